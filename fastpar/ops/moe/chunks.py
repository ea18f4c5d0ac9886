"""Tokens that come in chunks, and results that go back in chunks.

So the first experts compute while the others' tokens are on their way, and the last ones while the others' results are.

The experts of every rank are cut into as many groups as there are chunks. A token travels to a rank once, with the
first group that has one of its experts, and what it gets there travels back once, when the last group that has one is
done. So expert e finds its tokens in the chunks up to that of its group, and no row is sent twice. Which rows an expert
computes, in which order, and what is summed up where in which order, does not depend on the number of chunks: nor does
any bit of a result.

    dispatch   one all-gather and one all-to-all for what `moe_dispatch` sends besides the tokens, then one all-to-all
               a chunk
    redispatch one all-to-all a chunk
    combine    one all-to-all a chunk

All-to-alls are launched as soon as what they send is there, in the same order on all ranks, and carried out by the
group's thread, one after the other. Only rows that are sent have something to gain: ranks that share memory, or a
single one, have one chunk whatever is asked for.

Worked example: experts 0..3 of a rank in two chunks, and three tokens that come to it for the experts {2}, {0, 3} and
{1}: the second and the third travel in the first chunk, the first in the second; expert 3 finds its token in the first.
The third goes back in the first chunk, the others in the second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from fastpar.ops.moe.dispatcher import (
    DispatchHandle,
    ExpertResults,
    FinishCombine,
    FinishRedispatch,
    Tables,
    TokenDispatcher,
)
from fastpar.ops.moe.packing import PackedField, token_parts
from fastpar.ops.moe.plan import DispatchSpec
from fastpar.ops.moe.transports.all_to_all import AllToAllDispatcher, AllToAllHandle, CombineRoute


class ChunkedRecv:
    """Rows of tokens for the experts of this rank, some of them on their way.

    source  int64 [num_rows]: as `DispatchHandle.source`, for `tables`
    """

    def __init__(
        self,
        source: Tensor,
        tables: Sequence[Tables],
        coming: Sequence[FinishRedispatch] = (),
        chunk_of: Sequence[int] = (),
    ) -> None:
        """`tables` of every tensor that was sent, to which the chunks that are `coming` are added as they come; by
        expert, `chunk_of` says up to which it has to wait.
        """
        self.source = source
        self._tables = [list(parts) for parts in tables]
        self._coming, self._chunk_of = list(coming), chunk_of
        self._came = 0

    def tables(self, expert: int) -> Sequence[Tables]:
        """The tables with the rows of this expert, of every tensor that was sent; waits for them."""
        if self._coming:
            self._wait(self._chunk_of[expert] + 1)
        return self._tables

    def finish(self) -> None:
        """Wait for what no expert here has asked for: the dispatcher is called again only after that."""
        self._wait(len(self._coming))

    def _wait(self, count: int) -> None:
        # In the order of launches, which is that of all ranks.
        for wait in self._coming[self._came : count]:
            for parts, chunk in zip(self._tables, wait(), strict=True):
                parts.extend(chunk)
        self._came = max(self._came, count)


def dispatch_chunks(
    dispatcher: TokenDispatcher, chunks: int, x: Tensor, indices: Tensor, weights: Tensor, spec: DispatchSpec
) -> tuple[DispatchHandle, ChunkedRecv]:
    """`TokenDispatcher.dispatch` in chunks."""
    if _count(dispatcher, chunks, spec.num_experts) == 1:
        handle, tables = dispatcher.dispatch(x, indices, weights, spec)
        return handle, ChunkedRecv(handle.source, [tables])
    # First tokens without columns: who gets which. Then the columns, chunk by chunk.
    handle, _ = dispatcher.dispatch(x[..., :0], indices, weights, replace(spec, chunks=(chunks, x.shape[-1])))
    return handle, _launch(handle, chunks, [], x)


def redispatch_chunks(
    handle: DispatchHandle, chunks: int, *tensors: Tensor, x: Tensor | None = None, overlapped: bool = False
) -> ChunkedRecv:
    """`TokenDispatcher.redispatch` in chunks."""
    if _count(handle.dispatcher, chunks, handle.num_experts) > 1:
        return _launch(handle, chunks, tensors, x)
    coming = handle.dispatcher.redispatch(handle, *tensors, x=x, overlapped=overlapped)
    if not overlapped:
        return ChunkedRecv(handle.source, coming())
    return ChunkedRecv(handle.source, _no_tables(tensors, x), [coming], [0] * len(handle.experts))


class ChunkedCombine:
    """`TokenDispatcher.combine` in chunks, of results that experts are still to write, one after the other."""

    def __init__(self, handle: DispatchHandle, chunks: int, results: ExpertResults) -> None:
        self._handle, self._results = handle, results
        self._count = _count(handle.dispatcher, chunks, handle.num_experts)
        self._coming: list[Callable[[], list[Tensor]]] = []
        self._ends: list[int] = []  # by chunk, where its experts end
        if self._count > 1:
            self._route = CombineRoute.of(handle, results.weighted)
            groups = _groups(handle, self._count)
            self._ends = torch.bincount(groups, minlength=self._count).cumsum(0).tolist()
            self._leaves_in, self._comes_in = _last_back(handle, groups), _last_received(handle, groups)

    def done(self, experts: int) -> None:
        """The first so many experts are done: what waited for them only may leave."""
        while len(self._coming) < len(self._ends) and self._ends[len(self._coming)] <= experts:
            self._launch(len(self._coming))

    def launch(self) -> FinishCombine:
        """All experts are done."""
        handle = self._handle
        if self._count == 1:
            return handle.dispatcher.combine(handle, self._results)
        self.done(len(handle.experts))
        route, coming = self._route.reordered(_places(self._comes_in)), self._coming

        def finish(add: Tensor | None) -> tuple[Tensor, Tensor | None]:
            return route.sum([list(tables) for tables in zip(*(wait() for wait in coming), strict=True)], add)

        return finish

    def _launch(self, chunk: int) -> None:
        leaves, comes = self._leaves_in == chunk, self._comes_in == chunk
        fields = self._route.fields(self._results, leaves)
        to, back = _by_rank(leaves, self._route.to), _by_rank(comes, self._route.back)
        self._coming.append(_swapping(self._handle.dispatcher).swap(fields, to, back, overlapped=True))


def _count(dispatcher: TokenDispatcher, chunks: int, num_experts: int) -> int:
    """How many chunks there are: not more than a rank has experts."""
    per_rank = num_experts // dispatcher.comm.size
    is_cut = isinstance(dispatcher, AllToAllDispatcher) and dispatcher.in_chunks
    return max(1, min(chunks, per_rank)) if is_cut else 1


def _swapping(dispatcher: TokenDispatcher) -> AllToAllDispatcher:
    assert isinstance(dispatcher, AllToAllDispatcher)  # the only one with more than one chunk
    return dispatcher


def _launch(handle: AllToAllHandle, chunks: int, tensors: Sequence[Tensor], x: Tensor | None) -> ChunkedRecv:
    """Every chunk of a redispatch, launched one after the other."""
    route, dispatcher = handle.route, _swapping(handle.dispatcher)
    count = _count(dispatcher, chunks, handle.num_experts)
    group_of = _groups(handle, count)
    sent_in, came_in = _first_sent(handle, group_of, count), _first_received(handle, group_of, count)
    parts, decoder = token_parts(tensors, x, handle.payload)

    def launch(chunk: int) -> FinishRedispatch:
        sent, came = sent_in == chunk, came_in == chunk
        tokens = route.sent.tokens[sent]
        to, back = _by_rank(sent, route.to), _by_rank(came, route.back)
        coming = dispatcher.swap([PackedField(part, tokens) for part in parts], to, back, overlapped=True)
        return lambda: [[table] for table in decoder(coming())]

    # A chunk's table lies behind those of the chunks before: rows are renumbered to that order.
    place = _places(came_in)
    source = torch.where(handle.source < 0, handle.source, place[handle.source]) if len(place) else handle.source
    return ChunkedRecv(source, _no_tables(tensors, x), [launch(chunk) for chunk in range(count)], group_of.tolist())


def _no_tables(tensors: Sequence[Tensor], x: Tensor | None) -> list[Tables]:
    """The tables of every tensor that was sent, before anything came."""
    return [[] for _ in range(len(tensors) + (x is not None))]


def _groups(handle: DispatchHandle, count: int) -> Tensor:
    """The group of each expert of a rank."""
    per_rank = len(handle.experts)
    return torch.arange(per_rank, device=handle.source.device) * count // per_rank


def _places(chunks: Tensor) -> Tensor:
    """Where rows are that come in these chunks, one chunk after the other."""
    order = chunks.argsort(stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    return place


def _by_rank(rows: Tensor, sizes: Sequence[int]) -> list[int]:
    """How many of each rank's rows are true."""
    return [int(mine.sum()) for mine in rows.split(list(sizes))]


def _first_sent(handle: AllToAllHandle, group_of: Tensor, count: int) -> Tensor:
    """The chunk of every row that this rank sends."""
    experts = handle.route.sent.experts.long()  # -1: on another rank
    groups = torch.where(experts < 0, count, group_of[experts.clamp_min(0)])
    return functional.pad(groups, (0, 1), value=count).amin(1)  # also without choices


def _first_received(handle: AllToAllHandle, group_of: Tensor, count: int) -> Tensor:
    """The chunk of every row that comes here."""
    groups = _groups_of_rows(handle, group_of)
    rows = handle.source >= 0
    first = torch.full((sum(handle.route.back),), count, device=group_of.device)
    return first.scatter_reduce_(0, handle.source[rows], groups[rows], "amin")


def _last_back(handle: AllToAllHandle, group_of: Tensor) -> Tensor:
    """The chunk of every row that goes back from here: that of the last expert it waits for."""
    groups = _groups_of_rows(handle, group_of)
    if handle.route.pairs is not None:
        return groups[handle.route.pairs.rows]
    rows = handle.source >= 0
    last = torch.zeros((sum(handle.route.back),), dtype=groups.dtype, device=group_of.device)
    return last.scatter_reduce_(0, handle.source[rows], groups[rows], "amax")


def _last_received(handle: AllToAllHandle, group_of: Tensor) -> Tensor:
    """The chunk of every row that comes back."""
    if handle.route.pairs is not None:  # by expert, as this rank's pairs are sorted
        counts = handle.loads[handle.dispatcher.comm.rank].to(group_of.device)
        return group_of.repeat(handle.dispatcher.comm.size).repeat_interleave(counts)
    experts = handle.route.sent.experts.long()  # -1: on another rank
    groups = torch.where(experts < 0, 0, group_of[experts.clamp_min(0)])
    return functional.pad(groups, (0, 1)).amax(1)  # also without choices


def _groups_of_rows(handle: DispatchHandle, group_of: Tensor) -> Tensor:
    """The group of the expert of each row, padding included."""
    room = torch.tensor(handle.splits, device=group_of.device).diff()
    return group_of.repeat_interleave(room)
