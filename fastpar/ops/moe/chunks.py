"""Tokens that come in chunks, and results that go back in chunks.

So the first experts compute while the others' tokens are on their way, and the last ones while the others' results are.

The experts of every rank are cut into as many groups as there are chunks. A token travels to a rank once, with the
first group that has one of its experts, and what it gets there travels back once, when the last group that has one is
done. So expert e finds its tokens in the chunks up to that of its group, and no row is sent twice. Which rows an expert
computes, in which order, and what is summed up where in which order, does not depend on the number of chunks: nor does
any bit of a result.

    dispatch   one all-gather and one all-to-all for what `moe_dispatch` sends besides the tokens, then one all-to-all
               a chunk
    send       one all-to-all a chunk
    give back  one all-to-all a chunk

They are launched as soon as what they send is there, in the same order on all ranks, and carried out by the group's
thread, one after the other. Only rows that are sent have something to gain: ranks that share memory, or a single one,
have one chunk whatever is asked for.

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

from fastpar.ops._buffers import new_buffer
from fastpar.ops.moe.dispatcher import Exchange, Finish, Tables
from fastpar.ops.moe.fp8 import encode
from fastpar.ops.moe.plan import DispatchPlan, Terms
from fastpar.ops.moe.transports.all_to_all import AllToAllExchange, WayBack, _columns, _Field, _layout, _received

_Chunk = list[Tables]  # what came of every tensor that was sent


class Arrivals:
    """Rows of tokens for the experts of this rank, some of them on their way.

    source  int64 [num_rows]: as `DispatchPlan.source`, for `tables`
    """

    def __init__(
        self,
        source: Tensor,
        tables: Sequence[Tables],
        coming: Sequence[Callable[[], _Chunk]] = (),
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
        """Of every tensor that was sent, the tables in which the rows of this expert are; waits for them."""
        if self._coming:
            self._wait(self._chunk_of[expert] + 1)
        return self._tables

    def finish(self) -> None:
        """Wait for what no expert here has asked for: the exchange is called again only after that."""
        self._wait(len(self._coming))

    def _wait(self, count: int) -> None:
        for wait in self._coming[self._came : count]:
            for parts, chunk in zip(self._tables, wait(), strict=True):
                parts.extend(chunk)
        self._came = max(self._came, count)


def dispatch(
    exchange: Exchange, chunks: int, x: Tensor, indices: Tensor, weights: Tensor, num_experts: int, terms: Terms
) -> tuple[DispatchPlan, Arrivals]:
    """`Exchange.dispatch` in chunks."""
    if _count(exchange, chunks, num_experts) == 1:
        plan, tables = exchange.dispatch(x, indices, weights, num_experts, terms)
        return plan, Arrivals(plan.source, [tables])
    terms = replace(terms, chunks=(chunks, x.shape[-1]))
    plan, _ = exchange.dispatch(x[..., :0], indices, weights, num_experts, terms)
    return plan, _launch(plan, chunks, [], x)


def send(
    plan: DispatchPlan, chunks: int, *tensors: Tensor, again: Tensor | None = None, beside: bool = False
) -> Arrivals:
    """`Exchange.send` in chunks. `beside`: the caller has something to compute before it asks for what arrives."""
    if _count(plan.exchange, chunks, plan.num_experts) > 1:
        return _launch(plan, chunks, tensors, again)
    if not beside:
        return Arrivals(plan.source, plan.exchange.send(plan, *tensors, again=again))
    coming = plan.exchange.launch_send(plan, *tensors, again=again)
    return Arrivals(plan.source, _no_tables(tensors, again), [coming], [0] * len(plan.experts))


class Departures:
    """`Exchange.launch_back` in chunks, of results and values that experts are still to write, one after the other."""

    def __init__(
        self,
        plan: DispatchPlan,
        chunks: int,
        rows: Tensor,
        *,
        weighted: bool,
        values: Tensor | None = None,
        beside: bool = False,
    ) -> None:
        self._plan, self._rows, self._values = plan, rows, values
        self._weighted, self._beside = weighted, beside
        self._count = _count(plan.exchange, chunks, plan.num_experts)
        self._coming: list[Callable[[], list[Tensor]]] = []
        self._ends: list[int] = []  # by chunk, where its experts end
        if self._count > 1:
            self._way = WayBack.of(plan, weighted)
            groups = _groups(plan, self._count)
            self._ends = torch.bincount(groups, minlength=self._count).cumsum(0).tolist()
            self._leaves_in, self._comes_in = _last_back(plan, groups), _last_received(plan, groups)

    def done(self, experts: int) -> None:
        """The first so many experts are done: what waited for them only may leave."""
        while len(self._coming) < len(self._ends) and self._ends[len(self._coming)] <= experts:
            self._launch(len(self._coming))

    def launch(self) -> Finish:
        """All experts are done."""
        plan, rows, values = self._plan, self._rows, self._values
        if self._count == 1:
            return plan.exchange.launch_back(plan, rows, weighted=self._weighted, values=values, beside=self._beside)
        self.done(len(plan.experts))
        way, coming = self._way.arriving(_places(self._comes_in)), self._coming

        def finish(add: Tensor | None) -> tuple[Tensor, Tensor | None]:
            return way.sum([list(tables) for tables in zip(*(wait() for wait in coming), strict=True)], add)

        return finish

    def _launch(self, chunk: int) -> None:
        leaves, comes = self._leaves_in == chunk, self._comes_in == chunk
        fields = self._way.fields(self._rows, self._values, leaves)
        to, back = _by_rank(leaves, self._way.to), _by_rank(comes, self._way.back)
        self._coming.append(self._plan.exchange.launch_swap(fields, to, back, beside=True))


def _count(exchange: Exchange, chunks: int, num_experts: int) -> int:
    """How many chunks there are: not more than a rank has experts."""
    per_rank = num_experts // exchange.comm.size
    is_cut = isinstance(exchange, AllToAllExchange) and exchange.in_chunks
    return max(1, min(chunks, per_rank)) if is_cut else 1


def _launch(plan: DispatchPlan, chunks: int, tensors: Sequence[Tensor], again: Tensor | None) -> Arrivals:
    way = plan.way
    count = _count(plan.exchange, chunks, plan.num_experts)
    group_of = _groups(plan, count)
    sent_in, came_in = _first_sent(plan, group_of, count), _first_received(plan, group_of, count)
    parts: list[Tensor] = []
    if again is not None:
        parts += [again] if plan.payload is None else encode(again, plan.payload)
    num_parts = len(parts)
    parts += tensors

    def launch(chunk: int) -> Callable[[], _Chunk]:
        sent, came = sent_in == chunk, came_in == chunk
        tokens = way.sent.tokens[sent]
        to, back = _by_rank(sent, way.to), _by_rank(came, way.back)
        ends, width = _layout([_Field(x) for x in parts])
        packed = new_buffer(parts[0], (len(tokens), width), torch.uint8)
        for x, end in zip(parts, ends, strict=True):
            _Field(x, tokens).write(_columns(packed, x, end))
        pending = plan.exchange.comm.all_to_all_async(packed, input_sizes=to, output_sizes=back)

        def wait() -> _Chunk:
            received = pending.wait()
            found = [_columns(received, x, end) for x, end in zip(parts, ends, strict=True)]
            if again is not None:
                found = [_received(found[:num_parts], again.dtype, plan.payload), *found[num_parts:]]
            return [[table] for table in found]

        return wait

    place = _places(came_in)
    source = torch.where(plan.source < 0, plan.source, place[plan.source]) if len(place) else plan.source
    return Arrivals(source, _no_tables(tensors, again), [launch(chunk) for chunk in range(count)], group_of.tolist())


def _no_tables(tensors: Sequence[Tensor], again: Tensor | None) -> list[Tables]:
    """Of every tensor that was sent, before anything came."""
    return [[] for _ in range(len(tensors) + (again is not None))]


def _groups(plan: DispatchPlan, count: int) -> Tensor:
    """The group of each expert of a rank."""
    per_rank = len(plan.experts)
    return torch.arange(per_rank, device=plan.source.device) * count // per_rank


def _places(chunks: Tensor) -> Tensor:
    """Where rows are that come in these chunks, one chunk after the other."""
    order = chunks.argsort(stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    return place


def _by_rank(rows: Tensor, sizes: Sequence[int]) -> list[int]:
    """How many of each rank's rows are true."""
    return [int(mine.sum()) for mine in rows.split(list(sizes))]


def _first_sent(plan: DispatchPlan, group_of: Tensor, count: int) -> Tensor:
    """The chunk of every row that this rank sends."""
    experts = plan.way.sent.experts.long()  # -1: on another rank
    groups = torch.where(experts < 0, count, group_of[experts.clamp_min(0)])
    return functional.pad(groups, (0, 1), value=count).amin(1)  # also without choices


def _first_received(plan: DispatchPlan, group_of: Tensor, count: int) -> Tensor:
    """The chunk of every row that comes here."""
    groups = _groups_of_rows(plan, group_of)
    rows = plan.source >= 0
    first = torch.full((sum(plan.way.back),), count, device=group_of.device)
    return first.scatter_reduce_(0, plan.source[rows], groups[rows], "amin")


def _last_back(plan: DispatchPlan, group_of: Tensor) -> Tensor:
    """The chunk of every row that goes back from here: that of the last expert it waits for."""
    groups = _groups_of_rows(plan, group_of)
    if plan.way.pairs is not None:
        return groups[plan.way.pairs.rows]
    rows = plan.source >= 0
    last = torch.zeros((sum(plan.way.back),), dtype=groups.dtype, device=group_of.device)
    return last.scatter_reduce_(0, plan.source[rows], groups[rows], "amax")


def _last_received(plan: DispatchPlan, group_of: Tensor) -> Tensor:
    """The chunk of every row that comes back."""
    if plan.way.pairs is not None:  # by expert, as this rank's pairs are sorted
        counts = plan.loads[plan.exchange.comm.rank].to(group_of.device)
        return group_of.repeat(plan.exchange.comm.size).repeat_interleave(counts)
    experts = plan.way.sent.experts.long()  # -1: on another rank
    groups = torch.where(experts < 0, 0, group_of[experts.clamp_min(0)])
    return functional.pad(groups, (0, 1)).amax(1)  # also without choices


def _groups_of_rows(plan: DispatchPlan, group_of: Tensor) -> Tensor:
    """The group of the expert of each row, padding included."""
    room = torch.tensor(plan.splits, device=group_of.device).diff()
    return group_of.repeat_interleave(room)
