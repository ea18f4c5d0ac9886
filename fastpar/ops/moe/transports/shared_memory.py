"""Rows of tokens between CPU ranks of one host: nobody sends, everybody reads.

Each rank lays its tokens, sorted pairs and weights where all can read them (`SharedRegion`). After one barrier the
ranks of the experts gather rows from there, and after the experts' work every rank sums its tokens' rows out of the
other ranks' results. A row is copied once on its way to an expert and not at all on its way back, so a token that goes
to several experts of a rank costs no more than it must, and sums go over a token's choices in their order: the bits of
one rank.

Note: two halves. Regions are written in turns: a rank writes half h after the barrier that ends the use of half 1 - h,
and all reads of what half h held before came before that barrier. So one barrier a call suffices, as long as what a
call gives is used up before the next one.

Note: nothing to hide. A function that `moe_mlp` is given to call while results travel is called before the exchange
here. Beside the wait for the rank with the most rows it would gain nothing either: that rank still has to call it, and
all wait for it in the next dispatch. Measured with the function between the two halves of the barrier, on 2 ranks with
even and uneven loads: not faster, and 0.2 ms of processor time a layer more, for the two nodes of autograd.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastpar.comm import Communicator
from fastpar.comm.shared_memory.region import SharedRegion
from fastpar.ops.moe.claim import Claim
from fastpar.ops.moe.dispatcher import Finish, GroupBound, Tables, make_plan, take_values
from fastpar.ops.moe.fp8 import through
from fastpar.ops.moe.permute import row_sources, sum_rows
from fastpar.ops.moe.plan import (
    DispatchPlan,
    Pairs,
    Placement,
    Terms,
    check_arguments,
    exchange_headers,
)

_ALIGNMENT = 64  # bytes
_GROWTH = 1.25  # room for more than is needed, so that steps that differ a little do not meet to grow


class SharedHalves:
    """The memory of a group, for all its exchanges. Holds no reference to the group, which may end before it."""

    def __init__(self) -> None:
        self.regions: list[SharedRegion | None] = [None, None]
        self.turn = 0  # that is written next


class SharedExchange(GroupBound):
    """See `fastpar.ops.moe.dispatcher.Exchange`."""

    def __init__(self, comm: Communicator, halves: SharedHalves) -> None:
        self.comm, self._halves = comm, halves

    def dispatch(
        self,
        x: Tensor,
        indices: Tensor,
        weights: Tensor | None,
        num_experts: int,
        terms: Terms,
    ) -> tuple[DispatchPlan, Tables]:
        problem = check_arguments(x, indices, weights, num_experts, terms, self.comm)
        pairs = Pairs.nowhere(num_experts) if problem else Pairs.of(indices, num_experts)
        headers = exchange_headers(self.comm, problem, x, pairs, terms)
        tokens, loads = headers.tokens, headers.loads
        place = Placement.of(loads, terms.padding)
        sorted_weights = (
            torch.ones(len(pairs.order), device="cpu") if weights is None else weights.reshape(-1)[pairs.order].float()
        )
        tables, orders, pair_weights = self._show(
            (through(x, terms.payload), tokens),
            (pairs.order.int()[:, None], loads.sum(1)),
            (sorted_weights.detach()[:, None], loads.sum(1)),
        )
        rank, size = self.comm.rank, self.comm.size
        ranks = torch.arange(size, device="cpu")[:, None].expand(size, num_experts // size)
        first_tokens = (tokens.cumsum(0) - tokens)[:, None].expand(ranks.shape)
        by_rank = (t.view(size, size, -1)[:, rank] for t in (loads.cumsum(1) - loads, loads, place.first))
        runs = torch.stack([ranks, *by_rank, first_tokens], -1).view(-1, 5)
        rows = row_sources(_flat(orders), _flat(pair_weights), runs, max(pairs.top_k, 1), place.rank_rows[rank])
        base = torch.tensor([0, *place.rank_rows[:-1]], device="cpu").cumsum(0).repeat_interleave(num_experts // size)
        slots = pairs.slots(place.first[rank] + base)
        way = _Way(tokens, place.rank_rows, slots)
        return make_plan(self, pairs, headers, place, rows, weights, way), tables

    def send(self, plan: DispatchPlan, *tensors: Tensor, again: Tensor | None = None) -> list[Tables]:
        first = [] if again is None else [through(again, plan.payload)]
        return self._show(*((x, plan.way.tokens) for x in (*first, *tensors)))

    def empty_rows(self, plan: DispatchPlan, width: int, dtype: torch.dtype) -> Tensor:
        self._reserve(_bytes(max(plan.way.rank_rows), width, dtype))
        return self._part(self.comm.rank, (plan.num_rows, width), dtype, 0)

    def launch_back(
        self,
        plan: DispatchPlan,
        rows: Tensor,
        *,
        weighted: bool,
        values: Tensor | None = None,
        claim: Claim | None = None,
        beside: bool = False,
    ) -> Finish:
        counts = torch.tensor(plan.way.rank_rows, device="cpu")
        if claim is None:
            parts = [rows] if values is None else [rows, values.view(-1, 1)]
            tables, *more = self._show(*((x, counts) for x in parts))
        else:
            tables, *more = self._show_claimed(claim, rows, counts)
        slots, weights = plan.way.slots, plan.pair_weights if weighted else None

        def finish(add: Tensor | None) -> tuple[Tensor, Tensor | None]:
            out = sum_rows(tables, slots, weights=weights, add=add)
            return out, take_values(more[0], slots) if more else None

        return finish

    # ---- memory

    def _show(self, *parts: tuple[Tensor, Tensor]) -> list[Tables]:
        """Of each tensor [n, w] those of all ranks, which have as many rows as its counts [size] say."""
        widths = [(x.shape[1], x.dtype) for x, _ in parts]
        sizes = [_bytes(int(counts.max()), *width) for (_, counts), width in zip(parts, widths, strict=True)]
        self._reserve(sum(sizes))
        offsets = [sum(sizes[:i]) for i in range(len(sizes))]
        for (x, _), offset in zip(parts, offsets, strict=True):
            self._write(x, offset)
        self.comm.barrier()
        return self._shown(parts, offsets)

    def _show_claimed(self, claim: Claim, rows: Tensor, counts: Tensor) -> list[Tables]:
        """The same of one tensor, which may be wrong here: its claim takes the place of the barrier.

        How large it is on the other ranks is known only then. So where there seems to be no room it is written
        afterwards, behind a barrier.
        """
        region = self._halves.regions[self._halves.turn]
        room = 0 if region is None or claim.problem else region.nbytes
        is_written = room > 0 and _bytes(int(counts.max()), rows.shape[1], rows.dtype) <= room
        if is_written:
            self._write(rows, 0)
        claim.check(self.comm.all_gather(torch.tensor([claim.words(rows)], device="cpu")).tolist())
        return self._shown([(rows, counts)], [0]) if is_written else self._show((rows, counts))

    def _write(self, x: Tensor, offset: int) -> None:
        target = self._part(self.comm.rank, tuple(x.shape), x.dtype, offset)
        if target.data_ptr() != x.data_ptr():  # else it was written there: see `empty_rows`
            target.copy_(x)

    def _shown(self, parts: Sequence[tuple[Tensor, Tensor]], offsets: Sequence[int]) -> list[Tables]:
        """What all ranks have written, in the half whose turn it was."""
        found: list[Tables] = []
        for (x, counts), offset in zip(parts, offsets, strict=True):
            found.append(
                [self._part(rank, (rows, x.shape[1]), x.dtype, offset) for rank, rows in enumerate(counts.tolist())]
            )
        self._halves.turn = 1 - self._halves.turn
        return found

    def _reserve(self, nbytes: int) -> None:
        """Have a region of so many bytes, the same on all ranks: a collective call where it has to be made."""
        halves = self._halves
        region = halves.regions[halves.turn]
        if region is None or region.nbytes < nbytes:
            if region is not None:
                region.close()
            halves.regions[halves.turn] = SharedRegion(self.comm, max(int(nbytes * _GROWTH), 1 << 16))

    def _part(self, rank: int, shape: Sequence[int], dtype: torch.dtype, offset: int) -> Tensor:
        region = self._halves.regions[self._halves.turn]
        assert region is not None
        return region.tensor(shape, dtype, offset=offset, rank=rank)


class _Way:
    """tokens [size] and rows of every rank; slots [T, K]: the row of each pair among those of all ranks, or -1."""

    def __init__(self, tokens: Tensor, rank_rows: tuple[int, ...], slots: Tensor) -> None:
        self.tokens, self.rank_rows, self.slots = tokens, rank_rows, slots


def _bytes(rows: int, width: int, dtype: torch.dtype) -> int:
    return -(-rows * width * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


def _flat(tables: Tables) -> list[Tensor]:
    return [table.view(-1) for table in tables]
