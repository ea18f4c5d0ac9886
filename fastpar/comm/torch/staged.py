"""CPU tensors over a group that has a backend for devices only, as `init_process_group("nccl")` makes it.

What ranks tell each other beside the data (sizes, flags, notes: control messages) lies in host memory, where it is
used. Such a group cannot send it, so it goes by way of the current device: a copy there, the collective, a copy back,
which waits for the device. A group with a CPU backend ("cpu:gloo,cuda:nccl") has no such wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fastpar.comm.transport import InFlight, Transport


def carrying_device(group: ProcessGroup) -> torch.device:
    """Where a tensor has to be that the group can send: the CPU if it can, else the current device."""
    kinds = [device.type for device in group._device_types]
    if "cpu" in kinds or not kinds:
        return torch.device("cpu")
    module = torch.get_device_module(kinds[0])
    return torch.device(kinds[0], module.current_device())


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
        return x.to(carrying_device(self._group))

    def _back(self, flight: InFlight, take: Callable[[Tensor], Tensor] = Tensor.cpu) -> InFlight:
        def finish() -> Any:
            found = flight.finish()
            return None if found is None else take(found)

        return InFlight(flight.work, finish)
