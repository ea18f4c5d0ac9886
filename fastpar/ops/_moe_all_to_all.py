"""Rows of tokens by all-to-all, over any transport of a `Communicator`: each token once to each rank.

A dispatch is one all-gather of headers and one all-to-all of packed rows: the token, the local numbers of its experts
on that rank, and their weights. On the way back a rank sums each token's rows, in float32 with one rounding, and sends
one row a token; `exact` sends every pair's row instead, and the sum over a token's choices has the bits of one rank.

Bytes, top-8 of 256 experts on 8 ranks chosen at random: a token goes to 8 (1 - C(224, 8) / C(256, 8)) = 5.29 ranks and
not to 8. With H = 7168 in bfloat16 that is 1.51 times fewer than a row for each choice, with rows in 8 bits 2.91 times
(`fastpar.ops._moe_payload`), the 48 bytes a token of numbers and weights included.

Across hosts rows go as the `Communicator` sends an all-to-all there: through torch.distributed (gloo, NCCL), from each
rank to each, also where several ranks of one host get the same token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fastpar.comm import Communicator
from fastpar.ops._buffers import new_buffer
from fastpar.ops._moe_exchange import GroupBound, Tables, float_weights, make_plan, rows_of_pairs, take_values
from fastpar.ops._moe_payload import decode, encode
from fastpar.ops._moe_plan import (
    DispatchPlan,
    Padding,
    Pairs,
    Placement,
    Terms,
    check_arguments,
    exchange_headers,
    spread,
)
from fastpar.ops.moe_rows import gather_rows, sum_rows, tokens_by_rank

_ALIGNMENT = 8  # bytes; of every field of a packed row
_INT16_MAX = 32767


class AllToAllExchange(GroupBound):
    """See `fastpar.ops._moe_exchange.Exchange`.

    exact  send every pair's row back, and sum at the token: the bits of one rank
    """

    def __init__(self, comm: Communicator, *, exact: bool = False) -> None:
        self.comm, self.exact = comm, exact

    def dispatch(
        self,
        x: Tensor,
        indices: Tensor,
        weights: Tensor | None,
        num_experts: int,
        padding: Padding,
        *,
        payload: str | None = None,
        differentiable: int = 0,
        chunks: tuple[int, int] | None = None,
    ) -> tuple[DispatchPlan, Tables]:
        comm = self.comm
        terms = Terms(padding, payload, differentiable, chunks)
        problem = check_arguments(x, indices, weights, num_experts, terms, comm)
        pairs = Pairs.nowhere(num_experts) if problem else Pairs.of(indices, num_experts)
        per_rank = max(num_experts // comm.size, 1)
        sent = _Sent.of(pairs, comm.size, per_rank)
        headers = exchange_headers(comm, problem, x, pairs, terms, sent.sizes)
        loads, sizes = headers.loads, headers.extra
        assert sizes is not None
        place = Placement.of(loads, padding)

        numbers = sent.experts.to(torch.int16 if per_rank <= _INT16_MAX else torch.int32)
        pair_weights = float_weights(weights, indices)
        fields = [*_tokens(x, sent, payload), _Field(numbers), _Field(pair_weights, sent.tokens)]
        to, back = sizes[comm.rank].tolist(), sizes[:, comm.rank].tolist()
        *columns, experts, received_weights = self._swap(fields, to, back)
        received = Pairs.of(experts.int(), per_rank)
        mine = slice(comm.rank * per_rank, (comm.rank + 1) * per_rank)
        slots = received.slots(place.starts[mine])
        rows = rows_of_pairs(received, place.starts[mine], received_weights, place.rank_rows[comm.rank])
        way = _Way(sent, to, back, slots, received_weights)
        if self.exact:
            way.pairs = _PairRows.of(pairs, loads, place.first[:, mine], comm.rank)
        table = _received(columns, x.dtype, payload)
        return make_plan(self, pairs, headers, place, rows, weights, way), [table]

    def send(self, plan: DispatchPlan, *tensors: Tensor, again: Tensor | None = None) -> list[Tables]:
        sent = plan.way.sent
        first = [] if again is None else _tokens(again, sent, plan.payload)
        found = self._swap([*first, *(_Field(x, sent.tokens) for x in tensors)], plan.way.to, plan.way.back)
        if again is not None:
            found = [_received(found[: len(first)], again.dtype, plan.payload), *found[len(first) :]]
        return [[table] for table in found]

    def empty_rows(self, plan: DispatchPlan, width: int, dtype: torch.dtype) -> Tensor:
        return new_buffer(plan.row_weights, (plan.num_rows, width), dtype)

    def give_back(
        self,
        plan: DispatchPlan,
        rows: Tensor,
        *,
        weighted: bool,
        add: Tensor | None = None,
        values: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        way: _Way = plan.way
        if way.pairs is not None:
            columns = [rows] if values is None else [rows, values.view(-1, 1)]
            found = self._swap([_Field(x, way.pairs.rows) for x in columns], way.pairs.to, way.pairs.back)
            out = sum_rows(found[:1], way.pairs.slots, weights=plan.pair_weights if weighted else None, add=add)
            return out, None if values is None else take_values(found[1:], way.pairs.slots)
        fields: list[_Field | _Sums] = [_Sums(rows, way.slots, way.weights if weighted else None)]
        fields += [] if values is None else [_Field(take_values([values], way.slots))]
        found = self._swap(fields, way.back, way.to)
        out = sum_rows(found[:1], way.sent.rows_of_token, add=add)
        return out, None if values is None else take_values(found[1:], way.sent.values_of_pair)

    def _swap(self, fields: Sequence[_Field | _Sums], to: Sequence[int], back: Sequence[int]) -> list[Tensor]:
        """What the ranks have sent, field by field: one all-to-all of the fields' rows, packed side by side."""
        ends, width = _layout(fields)
        packed = new_buffer(fields[0].x, (sum(to), width), torch.uint8)
        for field, end in zip(fields, ends, strict=True):
            field.write(_columns(packed, field.x, end))
        received = self.comm.all_to_all(packed, input_sizes=to, output_sizes=back)
        return [_columns(received, field.x, end) for field, end in zip(fields, ends, strict=True)]


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


class _Sums(NamedTuple):
    """`sum_rows` of x [n, w] at slots [S, K], added up where it is sent from."""

    x: Tensor
    slots: Tensor
    weights: Tensor | None

    def write(self, out: Tensor) -> None:
        sum_rows([self.x], self.slots, weights=self.weights, out=out)


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
    of those pairs."""

    sent: _Sent
    to: list[int]
    back: list[int]
    slots: Tensor
    weights: Tensor
    pairs: _PairRows | None = None
