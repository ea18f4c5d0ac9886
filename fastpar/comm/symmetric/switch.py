"""Which collectives of CUDA ranks go over symmetric memory: those that `fastpar.comm.calibrate` found faster there.

A `Communicator` asks for the switch of its group at each launch of CUDA tensors; a group that nobody has calibrated has
none, and everything goes by torch.distributed. What decides is equal on all ranks: the operation, the dtype, and the
bytes of the whole; sizes that were not measured are not taken.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fastpar.comm.machine_cache import size_bucket
from fastpar.comm.transport import InFlight, Transport

OPS = ("all_reduce", "reduce_scatter", "all_gather")
MARGIN = 0.98  # of torch's time; a decision should not hang on the noise of one measurement
# ratios[key_of(op, dtype)][bytes]: time over symmetric memory / time by torch.distributed
Ratios = Mapping[str, Mapping[int, float]]


def key_of(op: str, dtype: torch.dtype) -> str:
    """The key of a table: a gather moves bytes, whatever they are."""
    return op if op == "all_gather" else f"{op} {str(dtype).removeprefix('torch.')}"


class Collectives(Protocol):
    """What is used of `SymmetricCollectives`."""

    def all_reduce(self, x: Tensor, op: str = "sum", *, out: Tensor | None = None) -> Tensor: ...
    def reduce_scatter(self, x: Tensor, op: str = "sum", *, sizes: Sequence[int] | None = None) -> Tensor: ...
    def all_gather(self, x: Tensor, *, sizes: Sequence[int] | None = None) -> Tensor: ...


class SymmetricSwitch:
    """The collectives of one group over symmetric memory, and where they were faster."""

    def __init__(self, collectives: Collectives, ratios: Ratios) -> None:
        self.collectives, self.ratios = collectives, ratios
        self._stream: torch.cuda.Stream | None = None

    def takes(self, op: str, dtype: torch.dtype, nbytes: int) -> bool:
        """Whether so many bytes of the whole, measured as the nearest power of two, go over symmetric memory."""
        return self.ratios.get(key_of(op, dtype), {}).get(size_bucket(nbytes), 1.0) < MARGIN

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """The stream of calls that somebody computes beside: kernels of the current one do not wait for them."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        return self._stream


_SWITCHES: weakref.WeakKeyDictionary[ProcessGroup, SymmetricSwitch] = weakref.WeakKeyDictionary()


def install(group: ProcessGroup, switch: SymmetricSwitch | None) -> SymmetricSwitch | None:
    """Makes it the group's (None: torch.distributed again), for every communicator over it; gives the one before."""
    before = _SWITCHES.pop(group, None)
    if switch is not None:
        _SWITCHES[group] = switch
    return before


def switch_of(group: ProcessGroup | None) -> SymmetricSwitch | None:
    return None if group is None else _SWITCHES.get(group)


def collectives_for(comm: Any, op: str, x: Tensor) -> Any:
    """The `SymmetricCollectives` that a communicator takes for `op` of x; None: it goes by torch.distributed."""
    switch = switch_of(comm.group) if x.is_cuda and comm.transport != "torch" else None
    return switch.collectives if switch is not None and switch.takes(op, x.dtype, x.nbytes) else None


class _StreamWork:
    """A call on another stream: waiting orders the current one after it."""

    def __init__(self, event: torch.cuda.Event, result: Tensor) -> None:
        self._event, self._result = event, result

    def wait(self, seconds: float) -> None:
        current = torch.cuda.current_stream(self._result.device)
        current.wait_event(self._event)
        self._result.record_stream(current)  # it was allocated on the other stream

    def done(self) -> bool:
        return bool(self._event.query())


class SymmetricTransport:
    """Takes what the switch says, and leaves everything else to `rest`. See `fastpar.comm.transport.Transport`.

    is_beside  calls run on the switch's stream, beside what is computed next; their bits are the same
    """

    def __init__(self, switch: SymmetricSwitch, rest: Transport, *, is_beside: bool) -> None:
        self._switch, self._rest, self._is_beside = switch, rest, is_beside

    def all_reduce(self, x: Tensor, op: str, out: Tensor | None) -> InFlight:
        if op not in ("sum", "avg") or not self._switch.takes("all_reduce", x.dtype, x.nbytes):
            return self._rest.all_reduce(x, op, out)
        return self._run(lambda collectives: collectives.all_reduce(x, op, out=out), x)

    def reduce_scatter(self, x: Tensor, sizes: Sequence[int], op: str) -> InFlight:
        if op not in ("sum", "avg") or not self._switch.takes("reduce_scatter", x.dtype, x.nbytes):
            return self._rest.reduce_scatter(x, sizes, op)
        return self._run(lambda collectives: collectives.reduce_scatter(x, op, sizes=sizes), x)

    def all_gather(self, x: Tensor, sizes: Sequence[int]) -> InFlight:
        if not self._switch.takes("all_gather", x.dtype, sum(sizes) * x.element_size()):
            return self._rest.all_gather(x, sizes)
        return self._run(lambda collectives: collectives.all_gather(x, sizes=sizes), x)

    def all_to_all(self, x: Tensor, input_sizes: Sequence[int], output_sizes: Sequence[int]) -> InFlight:
        return self._rest.all_to_all(x, input_sizes, output_sizes)

    def broadcast(self, x: Tensor, src: int) -> InFlight:
        return self._rest.broadcast(x, src)

    def reduce(self, x: Tensor, dst: int, op: str) -> InFlight:
        return self._rest.reduce(x, dst, op)

    def barrier(self) -> InFlight:
        return self._rest.barrier()

    def _run(self, call: Callable[[Any], Tensor], x: Tensor) -> InFlight:
        collectives = self._switch.collectives
        if not self._is_beside:
            result = call(collectives)
            return InFlight(None, lambda: result)
        stream = self._switch.stream(x.device)
        stream.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(stream):
            result = call(collectives)
            event = stream.record_event()
        x.record_stream(stream)
        return InFlight(_StreamWork(event, result), lambda: result)
