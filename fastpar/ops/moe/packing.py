"""Rows of an all-to-all: columns of several tensors packed side by side, into one message of bytes.

    fields = [PackedField(x, rows), PackedField(weights, rows)]     # row i: x[rows[i]], weights[rows[i]]
    packed = pack(fields, num_rows)                                 # uint8 [num_rows, width]
    ends, width = layout(fields)
    columns(packed, x, ends[0])                                     # x[rows]

A field may also be a sum over rows (`PackedSums`), added up while it is packed. Fields begin at multiples of 8 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastpar.ops._buffers import new_buffer
from fastpar.ops.moe.fp8 import decode, encode
from fastpar.ops.moe.permute import gather_rows, sum_rows, tokens_by_rank
from fastpar.ops.moe.plan import SortedPairs, spread

_ALIGNMENT = 8  # bytes; of every field of a packed row


class PackedField(NamedTuple):
    """x [n, w], or of it `rows`."""

    x: Tensor
    rows: Tensor | None = None

    def write(self, out: Tensor) -> None:
        if self.rows is None:
            out.copy_(self.x)
        else:
            gather_rows([self.x], self.rows, out=out)

    def split(self, sizes: Sequence[int]) -> list[PackedField]:
        """Parts of so many rows."""
        assert self.rows is not None
        return [PackedField(self.x, rows) for rows in self.rows.split(list(sizes))]


class PackedSums(NamedTuple):
    """`sum_rows` of `tables` at slots [S, K], in the dtype and width of x."""

    x: Tensor
    tables: Sequence[Tensor]
    slots: Tensor
    weights: Tensor | None

    def write(self, out: Tensor) -> None:
        sum_rows(self.tables, self.slots, weights=self.weights, out=out)

    def split(self, sizes: Sequence[int]) -> list[PackedSums]:
        """Parts of so many rows."""
        slots = self.slots.split(list(sizes))
        weights = [None] * len(slots) if self.weights is None else self.weights.split(list(sizes))
        return [self._replace(slots=s, weights=w) for s, w in zip(slots, weights, strict=True)]


Field = PackedField | PackedSums


def layout(fields: Sequence[Field]) -> tuple[list[int], int]:
    """Bytes of a packed row before each field's end, and of all of it."""
    ends, width = [], 0
    for field in fields:
        ends.append(width + field.x.shape[1] * field.x.dtype.itemsize)
        width = -(-ends[-1] // _ALIGNMENT) * _ALIGNMENT
    return ends, width


def columns(packed: Tensor, like: Tensor, end: int) -> Tensor:
    """The bytes before `end` of every row that hold a row like those of `like`."""
    if like.shape[1] == 0:
        return packed.new_empty((len(packed), 0), dtype=like.dtype)
    return packed[:, end - like.shape[1] * like.dtype.itemsize : end].view(like.dtype)


def pack(fields: Sequence[Field], num_rows: int) -> Tensor:
    """uint8 [num_rows, width]: all fields, side by side."""
    ends, width = layout(fields)
    packed = new_buffer(fields[0].x, (num_rows, width), torch.uint8)
    for field, end in zip(fields, ends, strict=True):
        field.write(columns(packed, field.x, end))
    return packed


# ---- tokens ----------------------------------------------------------------------------------------------------------


class SentTokens(NamedTuple):
    """What this rank sends: a row for each token and rank that it goes to. See `tokens_by_rank`."""

    tokens: Tensor
    experts: Tensor
    sizes: Tensor
    rows_of_token: Tensor
    values_of_pair: Tensor

    @classmethod
    def of(cls, indices: Tensor, size: int, per_rank: int) -> SentTokens:
        return cls(*tokens_by_rank(indices, size, per_rank))

    def going(self, num_rows: int) -> SentTokens:
        """Without the rows behind the last, which there are on devices until the host knows `num_rows`."""
        if len(self.tokens) == num_rows:
            return self
        return self._replace(tokens=self.tokens[:num_rows], experts=self.experts[:num_rows])


class SentPairs(NamedTuple):
    """Pairs for sums with the bits of one rank: which rows are sent back, and where each pair's is among those
    received."""

    rows: Tensor
    to: list[int]
    back: list[int]
    slots: Tensor

    @classmethod
    def of(cls, pairs: SortedPairs, loads: Tensor, first: Tensor, rank: int) -> SentPairs:
        size = len(loads)
        mine = loads.view(size, size, -1)[:, rank]  # by source, of this rank's experts
        back = loads[rank].view(size, -1).sum(1)
        return cls(
            spread(first.reshape(-1), mine.reshape(-1)).to(pairs.order.device),
            mine.sum(1).tolist(),
            back.tolist(),
            pairs.slots(pairs.counts.cumsum(0) - pairs.counts),
        )


class TokenDecoder(NamedTuple):
    """From columns as they arrive to tensors: the first `num_parts` are tokens in `dtype`, if any are."""

    num_parts: int
    dtype: torch.dtype
    payload: str | None

    def __call__(self, found: Sequence[Tensor]) -> list[Tensor]:
        num_parts = self.num_parts
        if num_parts == 0 or self.payload is None:
            return list(found)
        return [decode(found[0], found[1], self.dtype, self.payload), *found[num_parts:]]


def token_parts(tensors: Sequence[Tensor], x: Tensor | None, payload: str | None) -> tuple[list[Tensor], TokenDecoder]:
    """What travels of x, as it is or as codes and scales, and of other tensors; and what to make of it on arrival."""
    if x is None:
        return list(tensors), TokenDecoder(0, torch.float32, payload)
    first = [x] if payload is None else list(encode(x, payload))
    return [*first, *tensors], TokenDecoder(len(first), x.dtype, payload)
