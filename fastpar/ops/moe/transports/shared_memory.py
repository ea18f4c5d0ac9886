"""Rows of tokens between CPU ranks of one host: nobody sends, everybody reads.

Each rank lays its tokens, sorted pairs and weights where all can read them (`SharedRegion`). After one barrier the
ranks of the experts gather rows from there, and after the experts' work every rank sums its tokens' rows out of the
other ranks' results. A row is copied once on its way to an expert and not at all on its way back, so a token that goes
to several experts of a rank costs no more than it must, and sums go over a token's choices in their order: the bits of
one rank.

Note: double buffering. A rank writes half h after the barrier that ends the use of half 1 - h, and all reads of what
half h held before came before that barrier. So one barrier a call suffices, as long as what a call returns is used up
before the next one.

Note: nothing to hide. A function that `moe_mlp` is given to call while results travel is called before the dispatch
here. Beside the wait for the rank with the most rows it would gain nothing either: that rank still has to call it, and
all wait for it in the next dispatch. Measured with the function between the two halves of the barrier, on 2 ranks with
even and uneven loads: not faster, and 0.2 ms of processor time a layer more, for the two nodes of autograd.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastpar.comm import Communicator
from fastpar.comm.agree import Agreement
from fastpar.comm.multi_host.host_ranks import HostRanks
from fastpar.comm.shared_memory.region import SharedRegion
from fastpar.ops.moe.dispatcher import (
    DispatchHandle,
    ExpertResults,
    FinishCombine,
    FinishRedispatch,
    Tables,
    TokenDispatcher,
    make_handle,
    take_values,
    wide_weights,
)
from fastpar.ops.moe.fp8 import quantize_dequantize
from fastpar.ops.moe.permute import row_sources, sum_rows
from fastpar.ops.moe.plan import DispatchSpec, RowPlacement, SortedPairs, gather_loads, problem_of

_ALIGNMENT = 64  # bytes
_GROWTH = 1.25  # room for more than is needed, so that steps that differ a little do not meet to grow


# ---- memory ----------------------------------------------------------------------------------------------------------


class DoubleBuffer:
    """The memory of a group, for all its dispatchers. Holds no reference to the group, which may end before it."""

    def __init__(self) -> None:
        self.regions: list[SharedRegion | None] = [None, None]
        self.turn = 0  # that is written next


class SharedTables:
    """Tensors of all ranks of `comm` in each other's sight: a group's, or its part on this host."""

    def __init__(self, comm: Communicator | HostRanks, memory: DoubleBuffer) -> None:
        self.comm, self._memory = comm, memory

    def share(self, *parts: tuple[Tensor, Sequence[int]]) -> list[Tables]:
        """Of each tensor [n, w] those of all ranks, which have as many rows as its counts [size] say. One barrier."""
        sizes = [_bytes(max(counts), x.shape[1], x.dtype) for x, counts in parts]
        self._reserve(sum(sizes))
        offsets = [sum(sizes[:i]) for i in range(len(sizes))]
        for (x, _), offset in zip(parts, offsets, strict=True):
            self._write(x, offset)
        self.comm.barrier()  # the only one of a call: see the module's note
        return self._read(parts, offsets)

    def share_agreed(self, agreement: Agreement, rows: Tensor, counts: Sequence[int]) -> list[Tables]:
        """The same of one tensor, which may be wrong here: an all-gather of words takes the place of the barrier.

        How large it is on the other ranks is known only then. So where there seems to be no room it is written
        afterwards, behind a barrier.
        """
        region = self._memory.regions[self._memory.turn]
        room = 0 if region is None or agreement.problem else region.nbytes
        is_written = room > 0 and _bytes(max(counts), rows.shape[1], rows.dtype) <= room
        if is_written:
            self._write(rows, 0)
        agreement.check(self.comm.all_gather(torch.tensor([agreement.words], device="cpu")).tolist())
        return self._read([(rows, counts)], [0]) if is_written else self.share((rows, counts))

    def buffer(self, counts: Sequence[int], width: int, dtype: torch.dtype) -> Tensor:
        """[counts of this rank, width] where the next `share` need not copy it from. Uninitialised."""
        self._reserve(_bytes(max(counts), width, dtype))
        return self._part(self.comm.rank, (counts[self.comm.rank], width), dtype, 0)

    def _write(self, x: Tensor, offset: int) -> None:
        target = self._part(self.comm.rank, tuple(x.shape), x.dtype, offset)
        if target.data_ptr() != x.data_ptr():  # else it was written there: see `buffer`
            target.copy_(x)

    def _read(self, parts: Sequence[tuple[Tensor, Sequence[int]]], offsets: Sequence[int]) -> list[Tables]:
        """What all ranks have written, in the half whose turn it was."""
        found: list[Tables] = [
            [self._part(rank, (rows, x.shape[1]), x.dtype, offset) for rank, rows in enumerate(counts)]
            for (x, counts), offset in zip(parts, offsets, strict=True)
        ]
        self._memory.turn = 1 - self._memory.turn
        return found

    def _reserve(self, nbytes: int) -> None:
        """Have a region of so many bytes, the same on all ranks: a collective call where it has to be made."""
        memory = self._memory
        region = memory.regions[memory.turn]
        if region is None or region.nbytes < nbytes:
            if region is not None:
                region.close()  # tensors over it keep the memory itself
            memory.regions[memory.turn] = SharedRegion(self.comm, max(int(nbytes * _GROWTH), 1 << 16))

    def _part(self, rank: int, shape: Sequence[int], dtype: torch.dtype, offset: int) -> Tensor:
        region = self._memory.regions[self._memory.turn]
        assert region is not None
        return region.tensor(shape, dtype, offset=offset, rank=rank)


def _bytes(rows: int, width: int, dtype: torch.dtype) -> int:
    return -(-rows * width * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


# ---- dispatcher ------------------------------------------------------------------------------------------------------


class SharedMemoryRoute(NamedTuple):
    """Tokens and rows of every rank; slots [T, K]: the row of each pair among those of all ranks, or -1."""

    tokens: tuple[int, ...]
    rank_rows: tuple[int, ...]
    slots: Tensor


SharedMemoryHandle = DispatchHandle[SharedMemoryRoute]


class SharedMemoryDispatcher(TokenDispatcher[SharedMemoryRoute]):
    """See `TokenDispatcher`."""

    def __init__(self, comm: Communicator, memory: DoubleBuffer) -> None:
        self.comm, self._tables = comm, SharedTables(comm, memory)

    def dispatch(
        self, x: Tensor, indices: Tensor, weights: Tensor | None, spec: DispatchSpec
    ) -> tuple[SharedMemoryHandle, Tables]:
        comm, num_experts = self.comm, spec.num_experts
        problem = problem_of(x, indices, weights, spec, comm)
        pairs = SortedPairs.nowhere(num_experts) if problem else SortedPairs.of(indices, num_experts)
        gathered = gather_loads(comm, problem, x, pairs, spec)
        loads, tokens = gathered.loads, tuple(gathered.tokens.tolist())
        place = RowPlacement.of(loads, spec.padding)
        pair_weights = wide_weights(weights, x, pairs)
        num_pairs = loads.sum(1).tolist()
        tables, orders, all_weights = self._tables.share(
            (quantize_dequantize(x, spec.payload), tokens),
            (pairs.order.int()[:, None], num_pairs),
            (pair_weights.reshape(-1)[pairs.order][:, None], num_pairs),
        )
        # A run is the pairs of one source rank for one expert here: they lie in a row on both sides.
        rank, size = comm.rank, comm.size
        ranks = torch.arange(size, device="cpu")[:, None].expand(size, num_experts // size)
        first_tokens = (gathered.tokens.cumsum(0) - gathered.tokens)[:, None].expand(ranks.shape)
        by_rank = (t.view(size, size, -1)[:, rank] for t in (loads.cumsum(1) - loads, loads, place.first))
        runs = torch.stack([ranks, *by_rank, first_tokens], -1).view(-1, 5)
        rows = row_sources(_flat(orders), _flat(all_weights), runs, max(pairs.top_k, 1), place.rank_rows[rank])
        base = torch.tensor([0, *place.rank_rows[:-1]], device="cpu").cumsum(0).repeat_interleave(num_experts // size)
        route = SharedMemoryRoute(tokens, place.rank_rows, pairs.slots(place.first[rank] + base))
        return make_handle(self, pairs, gathered, place, rows, pair_weights, route), tables

    def redispatch(
        self, handle: SharedMemoryHandle, *tensors: Tensor, x: Tensor | None = None, overlapped: bool = False
    ) -> FinishRedispatch:
        # Everything happens when it is waited for: shared memory has nothing to send ahead.
        first = [] if x is None else [quantize_dequantize(x, handle.payload)]
        return lambda: self._tables.share(*((part, handle.route.tokens) for part in (*first, *tensors)))

    def combine_buffer(self, handle: SharedMemoryHandle, width: int, dtype: torch.dtype) -> Tensor:
        return self._tables.buffer(handle.route.rank_rows, width, dtype)

    def combine(self, handle: SharedMemoryHandle, results: ExpertResults) -> FinishCombine:
        counts, slots = handle.route.rank_rows, handle.route.slots
        if results.agreement is None:
            tables, *more = self._tables.share(*((part, counts) for part in results.columns))
        else:
            tables, *more = self._tables.share_agreed(results.agreement, results.rows, counts)
        weights = handle.pair_weights if results.weighted else None

        def finish(add: Tensor | None) -> tuple[Tensor, Tensor | None]:
            out = sum_rows(tables, slots, weights=weights, add=add)
            return out, take_values(more[0], slots) if more else None

        return finish


def _flat(tables: Tables) -> list[Tensor]:
    return [table.view(-1) for table in tables]
