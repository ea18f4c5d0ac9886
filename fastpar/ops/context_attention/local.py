"""The local op as the methods call it: one block of queries and keys, and the merge of the results of several.

    (o, l) = attention(q, k_t, v_t);  L' = logaddexp(L, l);  O = exp(L - L') O + exp(l - L') o;  L = L'

in float32, or float64 for float64, whatever the dtype of q, k and v; from O = 0 and L = -inf on, with
exp(-inf - -inf) = 0. A sink is one more block, with o = 0 and l = sink[h].

Source: Milakov and Gimelshein 2018 (arXiv:1805.02867); Liu et al. 2023 (arXiv:2310.01889).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastpar.contracts import compute_dtype
from fastpar.contracts.attention import AttentionDropout
from fastpar.ops.context_attention.methods import Span
from fastpar.ops.context_attention.plan import Block


@dataclass(frozen=True)
class ScoreRule:
    """How scores become probabilities, as the local op takes it."""

    scale: float
    softcap: float | None = None
    dropout: AttentionDropout | None = None

    def arguments(self, block: Block, first_head: int) -> tuple[Any, ...]:
        """From the table of tiles on."""
        where = (block.table, block.offsets, self.scale, self.softcap or 0.0)
        drop = self.dropout
        if drop is None:
            return *where, 0.0, 0, 0, 0, None, None
        return *where, drop.p, drop.seed, drop.first_batch, drop.first_head + first_head, block.queries, block.keys


class Gradients(NamedTuple):
    """Of q, k and v, in the dtype of sums."""

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
    q: Tensor, k: Tensor, v: Tensor, block: Block, rule: ScoreRule, heads: LocalHeads, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(out, lse) of the block's rows."""
    q = q[:, :, block.rows[0] : block.rows[1]]
    if heads.is_whole:
        return _forward(q, k, v, block, rule, heads.first, out_dtype)
    parts = [
        _forward(q[:, q0:q1], k[:, k0:k1], v[:, k0:k1], block, rule, heads.first + q0, out_dtype)
        for (q0, q1), (k0, k1) in heads.segments
    ]
    return torch.cat([out for out, _ in parts], 1), torch.cat([lse for _, lse in parts], 1)


class SavedRows(NamedTuple):
    """What backward knows of all this rank's queries."""

    q: Tensor
    dout: Tensor
    lse: Tensor
    delta: Tensor

    def narrow(self, rows: Span) -> SavedRows:
        return SavedRows(*(x[:, :, rows[0] : rows[1]] for x in self))

    def heads(self, span: Span) -> SavedRows:
        return SavedRows(*(x[:, span[0] : span[1]] for x in self))


def attend_backward(
    saved: SavedRows, k: Tensor, v: Tensor, block: Block, rule: ScoreRule, heads: LocalHeads
) -> Gradients:
    """Gradients of the block's rows of q, and of all keys that it was given."""
    saved = saved.narrow(block.rows)
    if heads.is_whole:
        return _backward(saved, k, v, block, rule, heads.first)
    parts = [
        _backward(saved.heads(queries), k[:, k0:k1], v[:, k0:k1], block, rule, heads.first + queries[0])
        for queries, (k0, k1) in heads.segments
    ]
    return Gradients(*(torch.cat(grads, 1) for grads in zip(*parts, strict=True)))


def _forward(
    q: Tensor, k: Tensor, v: Tensor, block: Block, rule: ScoreRule, first_head: int, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    out, lse = torch.ops.fastpar.attention_forward(q, k, v, *rule.arguments(block, first_head), out_dtype)
    return out, lse


def _backward(saved: SavedRows, k: Tensor, v: Tensor, block: Block, rule: ScoreRule, first_head: int) -> Gradients:
    found = torch.ops.fastpar.attention_backward(
        saved.dout, saved.q, k, v, saved.lse, saved.delta, *rule.arguments(block, first_head)
    )
    return Gradients(*found)


# ---- merging ---------------------------------------------------------------------------------------------------------


class Merged:
    """O and L of the rows of one rank, over the sources that have been added. None are as if they saw nothing."""

    def __init__(self, q: Tensor, v: Tensor) -> None:
        self._shape, self._width, self._like = q.shape[:3], v.shape[3], q
        self._out: Tensor | None = None
        self._lse: Tensor | None = None

    def add(self, rows: Span, out: Tensor, lse: Tensor) -> None:
        """One more source, of these rows."""
        if self._out is None and rows == (0, self._shape[2]):
            self._out, self._lse = out, lse
            return
        whole_out, whole_lse = self.result()
        start, stop = rows
        merge_(whole_out[:, :, start:stop], whole_lse[:, :, start:stop], out, lse)

    def result(self) -> tuple[Tensor, Tensor]:
        if self._out is None or self._lse is None:
            dtype = compute_dtype(self._like.dtype)
            self._out = self._like.new_zeros((*self._shape, self._width), dtype=dtype)
            self._lse = self._like.new_full(self._shape, -torch.inf, dtype=dtype)
        return self._out, self._lse


def merge_(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> None:
    """(out, lse) of some keys becomes that of these and others; in place."""
    total = torch.logaddexp(lse, other_lse)
    base = total.clamp(min=torch.finfo(total.dtype).min)  # exp(-inf - -inf) is to be 0
    out.mul_((lse - base).exp_().unsqueeze(-1)).addcmul_(other_out, (other_lse - base).exp_().unsqueeze(-1))
    lse.copy_(total)


def merge_sink_(out: Tensor, lse: Tensor, sink: Tensor) -> None:
    """The sink [h] of each head as one more key with a value of 0; in place."""
    total = torch.logaddexp(lse, sink.to(lse.dtype)[:, None].expand_as(lse))
    base = total.clamp(min=torch.finfo(total.dtype).min)
    out.mul_((lse - base).exp_().unsqueeze(-1))
    lse.copy_(total)


def sink_grad(sink: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """dsink[h] = -sum over rows of exp(sink[h] - L) delta, of these rows."""
    base = lse.clamp(min=torch.finfo(lse.dtype).min)
    return -((sink.to(lse.dtype)[:, None] - base).exp() * delta).sum((0, 2))
