"""Transports around that of torch.distributed: for CPU tensors over a group that cannot send them, and for ranks that
compare what they call.

Staged: a group that `init_process_group("nccl")` makes has a backend for devices only. What ranks tell each other
beside the data (sizes, flags, notes: control messages) lies in host memory, where it is used. It goes by way of the
current device: a copy there, the collective, a copy back, which waits for the device. A group with a CPU backend
("cpu:gloo,cuda:nccl") has no such wait.

Checked: for tensors on devices, where nothing else finds out that ranks disagree: NCCL hangs, or gives wrong numbers.
The comparison is a message between the hosts of the ranks and waits for all of them, on the host and before the launch.
So a launch takes as long as the last rank needs to come, what was hidden behind computation shows, and ranks that
launch collectives of two groups in different orders wait for each other until the deadline. For finding a mistake.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from fastpar.comm.groups import carrying_device
from fastpar.comm.multi_host.collectives import HeaderComparison, HostAllToAll
from fastpar.comm.multi_host.protocol import Collective, Hierarchy, header_of
from fastpar.comm.transport import InFlight, Transport


class StagedTransport:
    """Hands copies of CPU tensors on the device to another transport."""

    def __init__(self, transport: Transport, group: ProcessGroup) -> None:
        self._transport, self._group = transport, group

    def all_reduce(self, x: Tensor, op: str, out: Tensor | None) -> InFlight:
        flight = self._transport.all_reduce(self._there(x), op, None)
        return self._back(flight, lambda found: found.cpu() if out is None else out.copy_(found))

    def reduce_scatter(self, x: Tensor, sizes: Sequence[int], op: str) -> InFlight:
        return self._back(self._transport.reduce_scatter(self._there(x), sizes, op))

    def all_gather(self, x: Tensor, sizes: Sequence[int]) -> InFlight:
        return self._back(self._transport.all_gather(self._there(x), sizes))

    def all_to_all(self, x: Tensor, input_sizes: Sequence[int], output_sizes: Sequence[int]) -> InFlight:
        return self._back(self._transport.all_to_all(self._there(x), input_sizes, output_sizes))

    def broadcast(self, x: Tensor, src: int) -> InFlight:
        return self._back(self._transport.broadcast(self._there(x), src))

    def reduce(self, x: Tensor, dst: int, op: str) -> InFlight:
        return self._back(self._transport.reduce(self._there(x), dst, op))

    def barrier(self) -> InFlight:
        return self._transport.barrier()

    def _there(self, x: Tensor) -> Tensor:
        # The copy is ordered by the current stream, as the collective is.
        return x.to(carrying_device(self._group))

    def _back(self, flight: InFlight, take: Callable[[Tensor], Tensor] = Tensor.cpu) -> InFlight:
        def finish() -> Any:
            found = flight.finish()
            return None if found is None else take(found)

        return InFlight(flight.work, finish)


class CheckedTransport:
    """See `fastpar.comm.transport.Transport`. `hierarchy` gives what joins the ranks, waiting for them."""

    def __init__(self, inner: Transport, hierarchy: Callable[[], Hierarchy], rank: int, timeout: float) -> None:
        self._inner, self._hierarchy, self._rank, self._timeout = inner, hierarchy, rank, timeout

    def all_reduce(self, x: Tensor, op: str, out: Tensor | None) -> InFlight:
        self._compare(header_of("all_reduce", x, reduction=op, count=x.numel()))
        return self._inner.all_reduce(x, op, out)

    def reduce_scatter(self, x: Tensor, sizes: Sequence[int], op: str) -> InFlight:
        self._compare(header_of("reduce_scatter", x, reduction=op, count=x.numel(), sizes=sizes))
        return self._inner.reduce_scatter(x, sizes, op)

    def all_gather(self, x: Tensor, sizes: Sequence[int]) -> InFlight:
        self._compare(header_of("all_gather", x, count=sum(sizes), sizes=sizes))
        return self._inner.all_gather(x, sizes)

    def all_to_all(self, x: Tensor, input_sizes: Sequence[int], output_sizes: Sequence[int]) -> InFlight:
        self._run(HostAllToAll(self._rank, x, input_sizes, output_sizes, moves=False))
        return self._inner.all_to_all(x, input_sizes, output_sizes)

    def broadcast(self, x: Tensor, src: int) -> InFlight:
        self._compare(header_of("broadcast", x, root=src, count=x.numel()))
        return self._inner.broadcast(x, src)

    def reduce(self, x: Tensor, dst: int, op: str) -> InFlight:
        self._compare(header_of("reduce", x, reduction=op, root=dst, count=x.numel()))
        return self._inner.reduce(x, dst, op)

    def barrier(self) -> InFlight:
        self._compare(header_of("barrier", None))
        return self._inner.barrier()

    def _compare(self, header: bytes) -> None:
        self._run(HeaderComparison(header))

    def _run(self, call: Collective) -> None:
        # On this thread: the collective must not be launched before the ranks agree.
        hierarchy, deadline = self._hierarchy(), time.monotonic() + self._timeout
        hierarchy.sequencer.run(lambda: hierarchy.run(call, deadline))
