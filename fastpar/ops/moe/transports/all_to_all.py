"""Rows of tokens by all-to-all, over any transport of a `Communicator`: each token once to each rank.

A dispatch is one all-gather of headers and one all-to-all of packed rows: the token, the local numbers of its experts
on that rank, and their weights. On the way back a rank sums each token's rows, in float32 with one rounding, and sends
one row a token; `exact` sends every pair's row instead, and the sum over a token's choices has the bits of one rank.
Results from outside (`moe_combine`) are preceded by a claim of 32 bytes for each rank, in the same all-to-all.

Bytes, top-8 of 256 experts on 8 ranks chosen at random: a token goes to 8 (1 - C(224, 8) / C(256, 8)) = 5.29 ranks and
not to 8. With H = 7168 in bfloat16 that is 1.51 times fewer than a row for each choice, with rows in 8 bits 2.91 times
(`fastpar.ops.moe.fp8`), the 48 bytes a token of numbers and weights included.

Across hosts rows go as the `Communicator` sends an all-to-all there: through torch.distributed (gloo, NCCL), from each
rank to each, also where several ranks of one host get the same token. `fastpar.ops.moe.transports.hierarchical` sends
it once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from fastpar.comm import Communicator, Pending
from fastpar.ops._buffers import new_buffer
from fastpar.ops.moe.claim import DTYPES, WORDS, Claim
from fastpar.ops.moe.dispatcher import Finish, GroupBound, Tables, float_weights, make_plan, rows_of_pairs, take_values
from fastpar.ops.moe.fp8 import decode, encode
from fastpar.ops.moe.permute import gather_rows, sum_rows, tokens_by_rank
from fastpar.ops.moe.plan import (
    DispatchPlan,
    Headers,
    Pairs,
    Placement,
    Terms,
    check_arguments,
    exchange_headers,
    spread,
)

_ALIGNMENT = 8  # bytes; of every field of a packed row
_INT16_MAX = 32767


class AllToAllExchange(GroupBound):
    """See `fastpar.ops.moe.dispatcher.Exchange`.

    exact      send every pair's row back, and sum at the token: the bits of one rank
    in_chunks  whether `fastpar.ops.moe.chunks` may cut what is sent
    """

    travels = True

    def __init__(self, comm: Communicator, *, exact: bool = False, in_chunks: bool = True) -> None:
        self.comm, self.exact, self.in_chunks = comm, exact, in_chunks

    def dispatch(
        self,
        x: Tensor,
        indices: Tensor,
        weights: Tensor | None,
        num_experts: int,
        terms: Terms,
    ) -> tuple[DispatchPlan, Tables]:
        comm = self.comm
        terms = replace(terms, exact=self.exact)
        problem = check_arguments(x, indices, weights, num_experts, terms, comm)
        pairs = Pairs.nowhere(num_experts) if problem else Pairs.of(indices, num_experts)
        per_rank = max(num_experts // comm.size, 1)
        sent = _Sent.of(pairs, comm.size, per_rank)
        headers = exchange_headers(comm, problem, x, pairs, terms, sent.sizes)
        assert headers.extra is not None
        return self.deliver(x, weights, pairs, sent, headers, headers.extra)

    def deliver(
        self, x: Tensor, weights: Tensor | None, pairs: Pairs, sent: _Sent, headers: Headers, sizes: Tensor
    ) -> tuple[DispatchPlan, Tables]:
        """What `dispatch` does after the headers; `sizes` [size, size]: rows from each rank to each."""
        comm, loads, payload = self.comm, headers.loads, headers.terms.payload
        per_rank = pairs.num_experts // comm.size
        place = Placement.of(loads, headers.terms.padding)

        numbers = sent.experts.to(torch.int16 if per_rank <= _INT16_MAX else torch.int32)
        pair_weights = float_weights(weights, pairs.indices)
        fields = [*_tokens(x, sent, payload), _Field(numbers), _Field(pair_weights, sent.tokens)]
        to, back = sizes[comm.rank].tolist(), sizes[:, comm.rank].tolist()
        *columns, experts, received_weights = self._swap(fields, to, back)
        received = Pairs.of(experts.int(), per_rank)
        mine = slice(comm.rank * per_rank, (comm.rank + 1) * per_rank)
        slots = received.slots(place.starts[mine])
        rows = rows_of_pairs(received, place.starts[mine], received_weights, place.rank_rows[comm.rank])
        way = _Way(sent, to, back, slots, received_weights, x.shape[1], x.dtype)
        if self.exact:
            way.pairs = _PairRows.of(pairs, loads, place.first[:, mine], comm.rank)
        table = _received(columns, x.dtype, payload)
        return make_plan(self, pairs, headers, place, rows, weights, way), [table]

    def send(self, plan: DispatchPlan, *tensors: Tensor, again: Tensor | None = None) -> list[Tables]:
        return self._send(plan, tensors, again, beside=False)()

    def launch_send(
        self, plan: DispatchPlan, *tensors: Tensor, again: Tensor | None = None
    ) -> Callable[[], list[Tables]]:
        return self._send(plan, tensors, again, beside=True)

    def _send(
        self, plan: DispatchPlan, tensors: Sequence[Tensor], again: Tensor | None, *, beside: bool
    ) -> Callable[[], list[Tables]]:
        sent = plan.way.sent
        first = [] if again is None else _tokens(again, sent, plan.payload)
        fields = [*first, *(_Field(x, sent.tokens) for x in tensors)]
        coming = self.launch_swap(fields, plan.way.to, plan.way.back, beside=beside)
        num_first, dtype = len(first), None if again is None else again.dtype

        def wait() -> list[Tables]:
            found = coming()
            if dtype is not None:
                found = [_received(found[:num_first], dtype, plan.payload), *found[num_first:]]
            return [[table] for table in found]

        return wait

    def empty_rows(self, plan: DispatchPlan, width: int, dtype: torch.dtype) -> Tensor:
        return new_buffer(plan.row_weights, (plan.num_rows, width), dtype)

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
        way = WayBack.of(plan, weighted)
        if claim is not None:
            found = self._swap_claimed(claim, way, _stand_in(rows, plan) if claim.problem else rows)
            return lambda add: way.sum([found], add)
        coming = self.launch_swap(way.fields(rows, values), way.to, way.back, beside=beside)
        return lambda add: way.sum([[table] for table in coming()], add)

    def launch_swap(
        self, fields: Sequence[_Field | _Sums], to: Sequence[int], back: Sequence[int], *, beside: bool
    ) -> Callable[[], list[Tensor]]:
        """What the ranks have sent, field by field: one all-to-all of the fields' rows, packed side by side.

        beside  whether the caller computes before it waits: then the group's thread carries them
        """
        ends, width = _layout(fields)
        packed = new_buffer(fields[0].x, (sum(to), width), torch.uint8)
        for field, end in zip(fields, ends, strict=True):
            field.write(_columns(packed, field.x, end))
        likes = [field.x.new_empty((0, field.x.shape[1])) for field in fields]  # not the fields, which may be large
        if beside:
            pending = self.comm.all_to_all_async(packed, input_sizes=to, output_sizes=back)
        else:
            pending = Pending.ready(self.comm.all_to_all(packed, input_sizes=to, output_sizes=back))

        def wait() -> list[Tensor]:
            received = pending.wait()
            return [_columns(received, like, end) for like, end in zip(likes, ends, strict=True)]

        return wait

    def _swap(self, fields: Sequence[_Field | _Sums], to: Sequence[int], back: Sequence[int]) -> list[Tensor]:
        return self.launch_swap(fields, to, back, beside=False)()

    def _swap_claimed(self, claim: Claim, way: WayBack, rows: Tensor) -> Tables:
        """Rows on their way back, those for each rank behind a claim; raises on every rank what is wrong on one."""
        (field,) = way.fields(rows, None)
        (end,), width = _layout([field])
        head = WORDS * 8
        to, back = ([head + width * count for count in counts] for counts in (way.to, way.back))
        packed = new_buffer(rows, (sum(to),), torch.uint8)
        words = torch.tensor(claim.words(rows), device="cpu").view(torch.uint8)
        pieces: Sequence[_Field | _Sums] = field.split(way.to)
        for part, count, piece in zip(packed.split(to), way.to, pieces, strict=True):
            part[:head] = words
            piece.write(_columns(part[head:].view(count, width), rows, end))
        received = self.comm.all_to_all(packed, input_sizes=to, output_sizes=back).split(back)
        claim.check([part[:head].view(torch.int64).tolist() for part in received])
        parts = zip(received, way.back, strict=True)
        return [_columns(part[head:].view(count, width), rows, end) for part, count in parts]


def _stand_in(rows: object, plan: DispatchPlan) -> Tensor:
    """Something to send in the place of wrong rows: as wide as those of other ranks will be."""
    width, dtype = plan.way.width, plan.way.dtype
    if isinstance(rows, Tensor) and rows.ndim == 2 and rows.dtype in DTYPES:
        width, dtype = rows.shape[1], rows.dtype
    return torch.zeros((plan.num_rows, width), dtype=dtype, device=plan.source.device)


def _tokens(x: Tensor, sent: _Sent, payload: str | None) -> list[_Field]:
    """The tokens of a dispatch as they travel."""
    return [_Field(part, sent.tokens) for part in ([x] if payload is None else encode(x, payload))]


def _received(columns: Sequence[Tensor], dtype: torch.dtype, payload: str | None) -> Tensor:
    """Them on arrival."""
    return columns[0] if payload is None else decode(columns[0], columns[1], dtype, payload)


class _Field(NamedTuple):
    """x [n, w], or of it `rows`, as a part of what is sent."""

    x: Tensor
    rows: Tensor | None = None

    def write(self, out: Tensor) -> None:
        if self.rows is None:
            out.copy_(self.x)
        else:
            gather_rows([self.x], self.rows, out=out)

    def split(self, sizes: Sequence[int]) -> list[_Field]:
        """Parts of so many rows."""
        assert self.rows is not None
        return [_Field(self.x, rows) for rows in self.rows.split(list(sizes))]


class _Sums(NamedTuple):
    """`sum_rows` of x [n, w] at slots [S, K], added up where it is sent from."""

    x: Tensor
    slots: Tensor
    weights: Tensor | None

    def write(self, out: Tensor) -> None:
        sum_rows([self.x], self.slots, weights=self.weights, out=out)

    def split(self, sizes: Sequence[int]) -> list[_Sums]:
        """Parts of so many rows."""
        slots = self.slots.split(list(sizes))
        if self.weights is None:
            return [_Sums(self.x, part, None) for part in slots]
        return [_Sums(self.x, *part) for part in zip(slots, self.weights.split(list(sizes)), strict=True)]


def _layout(fields: Sequence[_Field | _Sums]) -> tuple[list[int], int]:
    """Bytes of a packed row before each field's end, and of all of it."""
    ends, width = [], 0
    for field in fields:
        ends.append(width + field.x.shape[1] * field.x.dtype.itemsize)
        width = -(-ends[-1] // _ALIGNMENT) * _ALIGNMENT
    return ends, width


def _columns(packed: Tensor, like: Tensor, end: int) -> Tensor:
    """The bytes before `end` of every row that hold a row like those of `like`."""
    if like.shape[1] == 0:
        return packed.new_empty((len(packed), 0), dtype=like.dtype)
    return packed[:, end - like.shape[1] * like.dtype.itemsize : end].view(like.dtype)


class _Sent(NamedTuple):
    """What this rank sends: a row for each token and rank that it goes to. See `tokens_by_rank`."""

    tokens: Tensor
    experts: Tensor
    sizes: Tensor
    rows_of_token: Tensor
    values_of_pair: Tensor

    @classmethod
    def of(cls, pairs: Pairs, size: int, per_rank: int) -> _Sent:
        return cls(*tokens_by_rank(pairs.indices, size, per_rank))


class _PairRows(NamedTuple):
    """For sums with the bits of one rank: which rows are sent back, and where each pair's is among those received."""

    rows: Tensor
    to: list[int]
    back: list[int]
    slots: Tensor

    @classmethod
    def of(cls, pairs: Pairs, loads: Tensor, first: Tensor, rank: int) -> _PairRows:
        size = len(loads)
        mine = loads.view(size, size, -1)[:, rank]  # by source, of this rank's experts
        back = loads[rank].view(size, -1).sum(1)
        return cls(
            spread(first.reshape(-1), mine.reshape(-1)).to(pairs.order.device),
            mine.sum(1).tolist(),
            back.tolist(),
            pairs.slots(pairs.counts.cumsum(0) - pairs.counts),
        )


@dataclass
class _Way:
    """sent; rows to each rank and from each; where the pairs of the received tokens have their rows, and the weights
    of those pairs; the width and the dtype of tokens."""

    sent: _Sent
    to: list[int]
    back: list[int]
    slots: Tensor
    weights: Tensor
    width: int
    dtype: torch.dtype
    pairs: _PairRows | None = None


class WayBack(NamedTuple):
    """How results go back: a sum for each token that has come (`slots`, `slot_weights`), or with `exact` single `rows`.

    to, back   rows to each rank and from each
    rows_of_token   [T, n]: which of the received rows a token's sum is of
    weights         what it multiplies them by; None: nothing
    values_of_pair  [T, K]: where a pair's value is, of `width` that a received row has
    """

    rows: Tensor | None
    slots: Tensor
    slot_weights: Tensor | None
    to: list[int]
    back: list[int]
    rows_of_token: Tensor
    weights: Tensor | None
    values_of_pair: Tensor
    width: int

    @classmethod
    def of(cls, plan: DispatchPlan, weighted: bool) -> WayBack:
        way: _Way = plan.way
        if way.pairs is None:
            return cls(
                None, way.slots, way.weights if weighted else None, way.back, way.to,
                way.sent.rows_of_token, None, way.sent.values_of_pair, way.slots.shape[1],
            )  # fmt: skip
        pairs = way.pairs
        weights = plan.pair_weights if weighted else None
        return cls(pairs.rows, way.slots, None, pairs.to, pairs.back, pairs.slots, weights, pairs.slots, 1)

    def fields(self, rows: Tensor, values: Tensor | None, chosen: Tensor | None = None) -> list[_Field | _Sums]:
        """What is sent of all rows, or of those that are chosen."""

        def pick(x: Tensor) -> Tensor:
            return x if chosen is None else x[chosen]

        if self.rows is not None:
            return [_Field(x, pick(self.rows)) for x in ([rows] if values is None else [rows, values.view(-1, 1)])]
        slots = pick(self.slots)
        sums = _Sums(rows, slots, None if self.slot_weights is None else pick(self.slot_weights))
        return [sums] if values is None else [sums, _Field(take_values([values], slots))]

    def arriving(self, place: Tensor) -> WayBack:
        """The same for rows that arrive in another order: row i at place[i]."""
        rows, values, width = self.rows_of_token, self.values_of_pair, max(self.width, 1)
        if len(place):
            rows = torch.where(rows < 0, rows, place[rows])
            values = torch.where(values < 0, values, place[values // width] * width + values % width)
        return self._replace(rows_of_token=rows, values_of_pair=values)

    def sum(self, tables: Sequence[Tables], add: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """What `Exchange.launch_back` gives in the end, of what has arrived: rows, and values if there are any."""
        out = sum_rows(tables[0], self.rows_of_token, weights=self.weights, add=add)
        return out, take_values(tables[1], self.values_of_pair) if len(tables) > 1 else None
