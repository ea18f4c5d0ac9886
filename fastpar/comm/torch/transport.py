"""Collectives by torch.distributed: gloo for CPU tensors, NCCL for CUDA tensors, whatever backend the group has.

Note: reductions on gloo. gloo's own reduce_scatter is an all-reduce that throws most of its result away, and its
reductions round after every hop. Where it does not cost speed we exchange the parts (all-to-all) and reduce them
here, in rank order, with float32 accumulation and one rounding. Measured, ms, two cores, one thread a rank (4 KB | 16
MB of float32):

                                              2 ranks          4 ranks
    reduce_scatter   gloo's own               0.33 | 20        2.4 | 48
                     all-to-all + sum         0.20 | 10        0.7 | 22      chosen, always
    all_gather       gloo's own               0.25 | 50        1.3 | 200
                     all-to-all of copies     0.17 | 11*       0.6 | 80*     chosen, always; any sizes, no padding
    all_reduce       gloo's own (ring)        0.31 | 19        1.9 | 30      chosen for large tensors
                     exchange all + sum       0.20 | 23*       0.7 | 100*    chosen for small tensors

(* not timed: scaled by bytes from the timing of the all-to-all. The machine was shared.)
The all-gather sends from a buffer with one copy of the input per rank: it
needs as much memory again as its result.

What is guaranteed about reductions, with the group and its inputs given: the same bits on every rank, from run to
run, sync or async. Beyond that, on gloo:
- reduce_scatter and reduce: rank order, float32 accumulation of bfloat16 and float16, one rounding; NaN wins in max
  and min.
- all_reduce the same where `size * bytes <= _EXCHANGE_BYTES`, with 2 ranks, and for bfloat16/float16 with up to 4
  ranks. Larger tensors are summed around a ring: each of `size` segments starts at another rank, so the order is a
  rotation of the rank order (bfloat16 and float16: in float32, rounded once).
On NCCL: its own algorithms; it picks them by topology and size, so the order of ranks is not fixed across
machines, and bfloat16 and float16 may be rounded between hops. Uneven reduce_scatter is in rank order there too,
  and so is that of 16 bits into float32: the ranks exchange 16-bit parts, no more bytes than a ring, and one kernel
  adds them (`fastpar.kernels.rank_sum`).
"""

from __future__ import annotations

import atexit
import functools
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    ReduceOp,
    ReduceOptions,
    ReduceScatterOptions,
)

from fastpar.comm.reduction import accumulator, reduce_in_order, reduce_rows
from fastpar.comm.transport import InFlight

# size * bytes up to which all_reduce exchanges everything; a round figure, not tuned
_EXCHANGE_BYTES = 1 << 19
_EXCHANGE_RANKS_16BIT = 4  # up to here, sending 16-bit values to everybody is no more bytes than a float32 ring
_REDUCE_OPS = {"sum": ReduceOp.SUM, "avg": ReduceOp.SUM, "max": ReduceOp.MAX, "min": ReduceOp.MIN}
_RING_DTYPES = (torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8, torch.int8, torch.bool)
_WIRE_DTYPES = (
    *_RING_DTYPES,
    torch.bfloat16,
    torch.float16,
)  # what both gloo and NCCL move; anything else travels as bytes


class _TorchWork:
    """A c10d work. Under NCCL, waiting orders the current stream after it and does not block the host: the deadline
    is then the watchdog's, and is the one given at the launch."""

    def __init__(self, work: Any, blocks_host: bool) -> None:
        self._work = work
        self._blocks_host = blocks_host

    def wait(self, seconds: float) -> None:
        if self._blocks_host:
            self._work.wait(timedelta(seconds=seconds))
        else:
            self._work.wait()

    def done(self) -> bool:
        return bool(self._work.is_completed())


def _wire(flat: Tensor) -> tuple[Tensor, int]:
    """The tensor as something every backend can move, and how many of its elements one element became."""
    if flat.dtype in _WIRE_DTYPES:
        return flat, 1
    return flat.view(torch.uint8), flat.dtype.itemsize


@functools.cache
def let_gloo_finish_at_exit() -> None:
    """Give gloo's threads a moment without the interpreter lock before the interpreter shuts down.

    A gloo thread lets go of a collective's tensors after the caller's wait() has returned, and needs the interpreter
    lock for those that Python has already let go of. A program that ends right after a collective (1 in 8, measured
    on 2 ranks) then kills that thread inside a destructor: "terminate called without an active exception", exit
    status -6. destroy_process_group does not wait for it. Seen with torch 2.13.
    """
    atexit.register(time.sleep, 0.05)


class TorchTransport:
    """See `fastpar.comm.transport.Transport` and the module docstring."""

    def __init__(self, group: ProcessGroup, timeout: float) -> None:
        self._group = group
        self._rank = group.rank()
        self._size = group.size()
        self._timeout = timedelta(seconds=timeout)
        let_gloo_finish_at_exit()
        self._nccl_by_device: dict[str, bool] = {}

    def _is_nccl(self, x: Tensor) -> bool:
        kind = x.device.type
        if kind not in self._nccl_by_device:
            self._nccl_by_device[kind] = "nccl" in self._group._get_backend(x.device).name().lower()
        return self._nccl_by_device[kind]

    def _options(self, cls: type, **values: Any) -> Any:
        options = cls()
        options.timeout = self._timeout
        for name, value in {"asyncOp": True, **values}.items():
            setattr(options, name, value)
        return options

    def _exchange(
        self, x: Tensor, input_sizes: Sequence[int], output_sizes: Sequence[int]
    ) -> tuple[_TorchWork, Tensor]:
        received = x.new_empty(sum(output_sizes))
        (source, unit), (target, _) = _wire(x), _wire(received)
        work = self._group.alltoall_base(
            target,
            source,
            [unit * size for size in output_sizes],
            [unit * size for size in input_sizes],
            self._options(AllToAllOptions),
        )
        return _TorchWork(work, not self._is_nccl(x)), received

    def _exchange_all(self, x: Tensor, sizes: Sequence[int]) -> tuple[_TorchWork, Tensor]:
        return self._exchange(x.repeat(self._size), [x.numel()] * self._size, sizes)

    def all_reduce(self, x: Tensor, op: str, out: Tensor | None) -> InFlight:
        if not self._is_nccl(x) and self._exchange_is_better(x):
            work, received = self._exchange_all(x, [x.numel()] * self._size)
            return InFlight(work, lambda: reduce_in_order(received.chunk(self._size), op, out))
        partial = accumulator(x.dtype) if not self._is_nccl(x) and op in ("sum", "avg") else x.dtype
        if out is not None and partial == x.dtype:
            buffer = out if out.data_ptr() == x.data_ptr() else out.copy_(x)
        else:
            buffer = x.to(partial, copy=True)
        bits = buffer.view(torch.uint8) if buffer.dtype == torch.bool else buffer
        work = _TorchWork(
            self._group.allreduce([bits], self._options(AllreduceOptions, reduceOp=_REDUCE_OPS[op])),
            not self._is_nccl(x),
        )

        def finish() -> Tensor:
            if op == "avg":
                buffer.div_(self._size)
            if out is None:
                return buffer.to(x.dtype)
            return out if buffer is out else out.copy_(buffer)

        return InFlight(work, finish)

    def _exchange_is_better(self, x: Tensor) -> bool:
        """True where all_reduce on gloo exchanges whole tensors; a function of what is equal on all ranks only."""
        if x.dtype in (torch.bfloat16, torch.float16) and self._size <= _EXCHANGE_RANKS_16BIT:
            return True
        return x.dtype not in (*_RING_DTYPES, torch.bfloat16, torch.float16) or x.nbytes * self._size <= _EXCHANGE_BYTES

    def reduce_scatter(self, x: Tensor, sizes: Sequence[int], op: str) -> InFlight:
        mine = sizes[self._rank]
        if self._is_nccl(x) and all(size == mine for size in sizes) and x.dtype != torch.bool and op in _REDUCE_OPS:
            part = x.new_empty(mine)
            options = self._options(ReduceScatterOptions, reduceOp=_REDUCE_OPS[op])
            work = _TorchWork(self._group._reduce_scatter_base(part, x, options), blocks_host=False)
            return InFlight(work, lambda: part.div_(self._size) if op == "avg" else part)
        work, received = self._exchange(x, sizes, [mine] * self._size)
        return InFlight(work, lambda: reduce_rows(received.view(self._size, mine), op))

    def all_gather(self, x: Tensor, sizes: Sequence[int]) -> InFlight:
        if self._is_nccl(x) and all(size == x.numel() for size in sizes):
            gathered = x.new_empty(sum(sizes))
            options = self._options(AllgatherOptions)
            work = _TorchWork(self._group._allgather_base(_wire(gathered)[0], _wire(x)[0], options), blocks_host=False)
            return InFlight(work, lambda: gathered)
        if self._is_nccl(x):
            return self._gather_uneven(x, sizes)
        work, gathered = self._exchange_all(x, sizes)
        return InFlight(work, lambda: gathered)

    def _gather_uneven(self, x: Tensor, sizes: Sequence[int]) -> InFlight:
        """A send to everybody and a receive from everybody, where they lie: no copy of x for each of them, as one
        message to all would need."""
        gathered = x.new_empty(sum(sizes))
        (source, unit), (target, _) = _wire(x), _wire(gathered)
        parts = list(target.split([unit * size for size in sizes]))
        work = self._group.alltoall(parts, [source] * self._size, self._options(AllToAllOptions))
        return InFlight(_TorchWork(work, blocks_host=False), lambda: gathered)

    def all_to_all(self, x: Tensor, input_sizes: Sequence[int], output_sizes: Sequence[int]) -> InFlight:
        work, received = self._exchange(x, input_sizes, output_sizes)
        return InFlight(work, lambda: received)

    def broadcast(self, x: Tensor, src: int) -> InFlight:
        buffer = x.clone()
        work = self._group.broadcast([_wire(buffer)[0]], self._options(BroadcastOptions, rootRank=src))
        return InFlight(_TorchWork(work, not self._is_nccl(x)), lambda: buffer)

    def reduce(self, x: Tensor, dst: int, op: str) -> InFlight:
        is_dst = self._rank == dst
        if self._is_nccl(x) and x.dtype != torch.bool:
            buffer = x.clone()
            options = self._options(ReduceOptions, reduceOp=_REDUCE_OPS[op], rootRank=dst)
            work = _TorchWork(self._group.reduce([buffer], options), blocks_host=False)
            return InFlight(work, lambda: (buffer.div_(self._size) if op == "avg" else buffer) if is_dst else None)
        numel = x.numel()
        to_dst = [numel if rank == dst else 0 for rank in range(self._size)]
        work, received = self._exchange(x, to_dst, [numel if is_dst else 0] * self._size)
        return InFlight(work, lambda: reduce_rows(received.view(self._size, numel), op) if is_dst else None)

    def barrier(self) -> InFlight:
        work = self._group.barrier(self._options(BarrierOptions))
        return InFlight(_TorchWork(work, blocks_host=True), lambda: None)
