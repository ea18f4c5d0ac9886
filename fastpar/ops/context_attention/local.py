"""The local op as the methods call it: one block of queries and keys, and the merge of the results of several.

    (o, l) = attention(q, k_t, v_t);  L' = logaddexp(L, l);  O = exp(L - L') O + exp(l - L') o;  L = L'

in float32, or float64 for float64, whatever the dtype of q, k and v; from O = 0 and L = -inf on, with
exp(-inf - -inf) = 0.

Source: Milakov and Gimelshein 2018 (arXiv:1805.02867); Liu et al. 2023 (arXiv:2310.01889).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastpar.contracts import compute_dtype
from fastpar.contracts.attention import ScoreOptions
from fastpar.ops._buffers import new_buffer
from fastpar.ops.context_attention.methods import Span
from fastpar.ops.context_attention.plan import Block


class Gradients(NamedTuple):
    """Gradients of q, k and v, in the dtype of sums."""

    q: Tensor
    k: Tensor
    v: Tensor


@dataclass(frozen=True)
class LocalHeads:
    """The heads that are here: how query heads read key/value heads, and the number of the first in the whole."""

    segments: tuple[tuple[Span, Span], ...]
    first: int = 0
    is_whole: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_whole", len(self.segments) == 1)


def attend(
    q: Tensor, k: Tensor, v: Tensor, block: Block, options: ScoreOptions, heads: LocalHeads, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(out, lse) of the block's rows."""
    q = q[:, :, block.rows[0] : block.rows[1]]
    if heads.is_whole:
        return _forward(q, k, v, block, options, heads.first, out_dtype)
    parts = [
        _forward(q[:, q0:q1], k[:, k0:k1], v[:, k0:k1], block, options, heads.first + q0, out_dtype)
        for (q0, q1), (k0, k1) in heads.segments
    ]
    return torch.cat([out for out, _ in parts], 1), torch.cat([lse for _, lse in parts], 1)


class SavedRows(NamedTuple):
    """What backward knows of all this rank's queries; `out` where torch's kernels are asked for, which take it."""

    q: Tensor
    dout: Tensor
    lse: Tensor
    delta: Tensor
    out: Tensor | None = None

    def narrow(self, rows: Span) -> SavedRows:
        return SavedRows._make(x if x is None else x[:, :, rows[0] : rows[1]] for x in self)

    def heads(self, span: Span) -> SavedRows:
        return SavedRows._make(x if x is None else x[:, span[0] : span[1]] for x in self)


def attend_backward(
    saved: SavedRows, k: Tensor, v: Tensor, block: Block, options: ScoreOptions, heads: LocalHeads
) -> Gradients:
    """Gradients of the block's rows of q, and of all keys that it was given."""
    saved = saved.narrow(block.rows)
    if heads.is_whole:
        return _backward(saved, k, v, block, options, heads.first)
    parts = [
        _backward(saved.heads(queries), k[:, k0:k1], v[:, k0:k1], block, options, heads.first + queries[0])
        for queries, (k0, k1) in heads.segments
    ]
    return Gradients(*(torch.cat(grads, 1) for grads in zip(*parts, strict=True)))


def _options(block: Block, options: ScoreOptions, first_head: int) -> tuple[Any, ...]:
    """What the op takes behind its tensors."""
    if options.dropout_p:
        head = options.first_head + first_head
        options = options._replace(first_head=head, q_positions=block.queries, k_positions=block.keys)
    return block.table, block.offsets, *options


def _forward(
    q: Tensor, k: Tensor, v: Tensor, block: Block, options: ScoreOptions, first_head: int, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    out, lse = torch.ops.fastpar.attention_forward(q, k, v, *_options(block, options, first_head), out_dtype)
    return out, lse


def _backward(
    saved: SavedRows, k: Tensor, v: Tensor, block: Block, options: ScoreOptions, first_head: int
) -> Gradients:
    if saved.out is not None and options.is_plain:
        tensors = (saved.dout, saved.q, k, v, saved.out, saved.lse, block.table, block.offsets)
        return Gradients(
            *torch.ops.fastpar.attention_backward_from_out(*tensors, options.scale, compute_dtype(k.dtype))
        )
    found = torch.ops.fastpar.attention_backward(
        saved.dout, saved.q, k, v, saved.lse, saved.delta, *_options(block, options, first_head)
    )
    return Gradients(*found)


# ---- merging ---------------------------------------------------------------------------------------------------------


class Merged:
    """O and L of the rows of one rank, over the sources that have been added; without any O = 0 and L = -inf."""

    def __init__(self, q: Tensor, v: Tensor, dtype: torch.dtype) -> None:
        self._out = _Rows(v, (*q.shape[:3], v.shape[3]), 0.0, dtype)
        self._lse = _Rows(q, q.shape[:3], -torch.inf, compute_dtype(q.dtype))

    def add(self, rows: Span, out: Tensor, lse: Tensor) -> None:
        """One more source, of these rows."""
        if not (self._out.put_first(rows, out) and self._lse.put_first(rows, lse)):
            merge_(self._out.of(rows), self._lse.of(rows), out, lse)

    def result(self) -> tuple[Tensor, Tensor]:
        return self._out.whole(), self._lse.whole()


class SummedRows:
    """The sum of gradients of rows, from several sources."""

    def __init__(self, x: Tensor) -> None:
        self._sum = _Rows(x, x.shape, 0.0, compute_dtype(x.dtype))

    def add(self, rows: Span, part: Tensor) -> None:
        if not self._sum.put_first(rows, part):
            self._sum.of(rows).add_(part)

    def result(self) -> Tensor:
        return self._sum.whole()


class _Rows:
    """[b, h, s, ..] out of parts; it is the first part itself where that has all rows."""

    def __init__(self, like: Tensor, shape: Sequence[int], fill: float, dtype: torch.dtype) -> None:
        self._like, self._shape, self._fill, self._dtype = like, shape, fill, dtype
        self._whole: Tensor | None = None

    def put_first(self, rows: Span, part: Tensor) -> bool:
        """True for the first part, which is put down here."""
        if self._whole is not None:
            return False
        if rows == (0, self._shape[2]):
            self._whole = part
        else:
            self.of(rows).copy_(part)
        return True

    def whole(self) -> Tensor:
        if self._whole is None:
            self._whole = new_buffer(self._like, self._shape, self._dtype).fill_(self._fill)
        return self._whole

    def of(self, rows: Span) -> Tensor:
        return self.whole()[:, :, rows[0] : rows[1]]


def merge_(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> None:
    """(out, lse) of some keys becomes that of these and others; in place."""
    total = torch.logaddexp(lse, other_lse)
    base = total.clamp(min=torch.finfo(total.dtype).min)  # exp(-inf - -inf) is to be 0
    out.mul_((lse - base).exp_().unsqueeze(-1)).addcmul_(other_out, (other_lse - base).exp_().unsqueeze(-1))
    lse.copy_(total)
