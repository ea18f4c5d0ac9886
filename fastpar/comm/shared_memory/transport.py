"""Collectives between CPU ranks of one host, through shared memory (csrc/comm).

Reductions add in rank order, bfloat16 and float16 in float32 with one rounding, whatever the size and the algorithm:
the same bits on every rank, from run to run, blocking or in the background, from ordinary memory or from a
`SharedRegion`. NaN wins in max and min.

A blocking call runs on the caller's thread. A split-phase one does too: it shows its data to the other ranks when it is
launched, and does the rest when it is waited for; it costs no more than a blocking one, and does not wait for the
others if they have come in the meantime. One in the background runs, in order, on a thread that belongs to the group,
so that it makes progress while the caller computes; it competes with the caller for processors where there are no
spare ones.

Measurements are in bench/results (`fastpar bench comm`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fastpar.comm.message_format import DTYPE_NUMBERS
from fastpar.comm.reduction import WIDE_OPS
from fastpar.comm.shared_memory.library import size_array
from fastpar.comm.shared_memory.world import LocalWorld
from fastpar.comm.transport import InFlight, StillInFlightError

# What csrc/comm knows dtypes by: torch's ScalarType, up to bfloat16.
_DTYPES = {dtype: number for dtype, number in DTYPE_NUMBERS.items() if number <= DTYPE_NUMBERS[torch.bfloat16]}
_OTHER_DTYPE = 255  # moved as bytes, never reduced
_REDUCIBLE = frozenset(dtype for dtype in _DTYPES if not dtype.is_complex)
_REDUCTIONS = {"sum": 0, "avg": 1, "max": 2, "min": 3}
_WIDE_REDUCTIONS = {WIDE_OPS["sum"]: 4, WIDE_OPS["avg"]: 5}
ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, ALL_TO_ALL, BROADCAST, REDUCE, BARRIER = range(7)

# Outputs from here on come from the pool of huge-page buffers: touching new pages costs more than a collective.
LARGE_BYTES = 8 << 20
_LARGE_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64)


# What csrc/comm calls a reduction of a dtype; missing where the op does not apply to it.
REDUCTION_SPECS = {
    (op, dtype): _DTYPES[dtype] << 8 | number << 16
    for dtype in _REDUCIBLE
    for op, number in _REDUCTIONS.items()
    if not (op == "avg" and not dtype.is_floating_point) and not (op == "sum" and dtype == torch.bool)
}


def dtype_code(dtype: torch.dtype) -> int:
    return _DTYPES.get(dtype, _OTHER_DTYPE) << 8


def can_reduce(dtype: torch.dtype) -> bool:
    return dtype in _REDUCIBLE


@dataclass(frozen=True)
class _Submitted:
    """A call that the group's thread runs."""

    world: LocalWorld
    ticket: int

    def wait(self, seconds: float) -> None:
        if not self.world.wait(self.ticket, seconds):
            raise StillInFlightError

    def done(self) -> bool:
        return self.world.done(self.ticket)


@dataclass(frozen=True)
class _Begun:
    """A call whose second half the waiting thread does."""

    world: LocalWorld
    ticket: int

    def wait(self, seconds: float) -> None:
        self.world.finish(self.ticket)

    def done(self) -> bool:
        return self.world.done(self.ticket)


class SharedMemoryTransport:
    """See `fastpar.comm.transport.Transport` and the module docstring. `timeout` in seconds; `mode` as in
    `Communicator.collectives`."""

    def __init__(self, world: LocalWorld, timeout: float, mode: str) -> None:
        self._world = world
        self._timeout = timeout
        self._mode = mode
        self._rank, self._size = world.rank, world.size

    def all_reduce(self, x: Tensor, op: str, out: Tensor | None) -> InFlight:
        target = new_output(x, x.numel()) if out is None else out
        return self._call(ALL_REDUCE | _REDUCTIONS[op] << 16, x, target, x.numel())

    def reduce_scatter(self, x: Tensor, sizes: Sequence[int], op: str) -> InFlight:
        if op in _WIDE_REDUCTIONS:
            target = new_output(x, sizes[self._rank], torch.float32)
            return self._call(REDUCE_SCATTER | _WIDE_REDUCTIONS[op] << 16, x, target, x.numel(), sizes)
        target = new_output(x, sizes[self._rank])
        return self._call(REDUCE_SCATTER | _REDUCTIONS[op] << 16, x, target, x.numel(), sizes)

    def all_gather(self, x: Tensor, sizes: Sequence[int]) -> InFlight:
        total = sum(sizes)
        return self._call(ALL_GATHER, x, new_output(x, total), total, sizes)

    def all_to_all(self, x: Tensor, input_sizes: Sequence[int], output_sizes: Sequence[int]) -> InFlight:
        return self._call(ALL_TO_ALL, x, new_output(x, sum(output_sizes)), x.numel(), input_sizes, output_sizes)

    def broadcast(self, x: Tensor, src: int) -> InFlight:
        return self._call(BROADCAST | src << 32, x, new_output(x, x.numel()), x.numel())

    def reduce(self, x: Tensor, dst: int, op: str) -> InFlight:
        target = new_output(x, x.numel()) if dst == self._rank else None
        return self._call(REDUCE | _REDUCTIONS[op] << 16 | dst << 32, x, target, x.numel())

    def barrier(self) -> InFlight:
        return self._call(BARRIER, None, None, 0)

    def _call(
        self,
        spec: int,
        x: Tensor | None,
        target: Tensor | None,
        count: int,
        sizes: Sequence[int] | None = None,
        output_sizes: Sequence[int] | None = None,
    ) -> InFlight:
        source_address, element_bytes = (0, 1) if x is None else (x.data_ptr(), x.itemsize)
        if x is not None:
            spec |= dtype_code(x.dtype)
        arguments = (
            spec,
            element_bytes,
            source_address,
            0 if target is None else target.data_ptr(),
            count,
            None if sizes is None else size_array(tuple(sizes)),
            None if output_sizes is None else size_array(tuple(output_sizes)),
            self._timeout,
        )
        # On this thread, and done.
        if self._mode == "blocking":
            self._world.run(*arguments)
            return InFlight(None, lambda: target)
        # The first phase here and now, the second one at `wait`, on this thread.
        if self._mode == "split_phase":
            ticket = self._world.begin(*arguments, keep=(x, target))
            return InFlight(_Begun(self._world, ticket), lambda: target)
        ticket = self._world.submit(*arguments, keep=(x, target))
        return InFlight(_Submitted(self._world, ticket), lambda: target)


def new_output(x: Tensor, numel: int, dtype: torch.dtype | None = None) -> Tensor:
    dtype = x.dtype if dtype is None else dtype
    if numel * dtype.itemsize >= LARGE_BYTES and dtype in _LARGE_DTYPES:
        return torch.ops.fastpar.large_buffer_empty([numel], dtype=dtype)
    return x.new_empty(numel, dtype=dtype)
