"""Attention over band tiles in plain PyTorch, a block of a tile at a time: for devices without kernels.

Scores exist for at most _ROWS queries and _COLUMNS keys at once. Partial results are float32 (float64 for float64) and
merged block by block in the order of the table:

    o, l = attention of one block;  L' = logaddexp(L, l);  O = exp(L - L') O + exp(l - L') o;  L = L'
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastpar.contracts import compute_dtype
from fastpar.contracts.attention import AttentionDropout, ScoreOptions
from fastpar.reference.attention import attention_keep_mask

_ROWS, _COLUMNS = 256, 2048


class _Block(NamedTuple):
    batch: slice
    rows: slice
    columns: slice
    lo: int  # the band, of the block's own indices
    hi: int


def _blocks(tiles: Tensor, offsets: Tensor | None, batch: int) -> Iterator[_Block]:
    """The tiles, cut into blocks without those that see nothing."""
    bounds = [0, len(tiles)] if offsets is None else offsets.tolist()
    table = tiles.tolist()
    for row, (start, stop) in enumerate(itertools.pairwise(bounds)):
        which = slice(0, batch) if offsets is None else slice(row, row + 1)
        for q0, q1, k0, k1, lo, hi in table[start:stop]:
            for i, j in itertools.product(range(q0, q1, _ROWS), range(k0, k1, _COLUMNS)):
                i1, j1, shift = min(i + _ROWS, q1), min(j + _COLUMNS, k1), (i - q0) - (j - k0)
                if lo + shift < j1 - j and hi + shift > i - i1:
                    yield _Block(which, slice(i, i1), slice(j, j1), lo + shift, hi + shift)


@dataclass(frozen=True)
class _Scores:
    """A call's scores by blocks, [batch, h_k, g, rows, columns]; q is [b, h_k, g, s_q, D] and k [b, h_k, s_k, D]."""

    q: Tensor
    k: Tensor
    options: ScoreOptions

    def of(self, block: _Block) -> tuple[Tensor, Tensor]:
        """(scores with -inf where a query does not see a key, d scores / d their argument of the softcap)."""
        q, k = self.q[block.batch, :, :, block.rows], self.k[block.batch, :, block.columns]
        scores = (q @ k.transpose(-1, -2)[:, :, None]) * self.options.scale
        slope = torch.ones((), dtype=q.dtype, device=q.device)
        if softcap := self.options.softcap:
            ratio = torch.tanh(scores / softcap)
            scores, slope = softcap * ratio, 1 - ratio * ratio
        rows, columns = scores.shape[-2:]
        if block.lo > 1 - rows or block.hi < columns - 1:
            band = torch.arange(columns, device=q.device) - torch.arange(rows, device=q.device)[:, None]
            scores = scores.masked_fill((band < block.lo) | (band > block.hi), -torch.inf)
        return scores, slope

    def kept(self, block: _Block) -> Tensor | None:
        """Z / (1 - p) of the block; None without dropout."""
        drop = self.options.dropout
        if drop is None:
            return None
        (_, kv_heads, group, rows, _), columns = self.q.shape, self.k.shape[2]
        positions = [
            (torch.arange(count) if given is None else given.cpu())[part]
            for given, count, part in ((drop.q_positions, rows, block.rows), (drop.k_positions, columns, block.columns))
        ]
        first = AttentionDropout(drop.p, drop.seed, None, None, drop.first_batch + block.batch.start, drop.first_head)
        mask = attention_keep_mask(first, block.batch.stop - block.batch.start, kv_heads * group, *positions)
        scale = 1.0 / (1.0 - drop.p) if drop.p < 1 else 0.0
        return mask.unflatten(1, (kv_heads, group)).to(self.q) * scale


def _by_kv_head(x: Tensor, kv_heads: int, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).unflatten(1, (kv_heads, -1))


def forward(
    q: Tensor, k: Tensor, v: Tensor, tiles: Tensor, tile_offsets: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor]:
    """(out [b, h_q, s_q, D_v] of out_dtype, the last option; lse [b, h_q, s_q])."""
    *of_scores, out_dtype = options
    dtype = compute_dtype(q.dtype)
    scores = _Scores(_by_kv_head(q, k.shape[1], dtype), k.to(dtype), ScoreOptions(*of_scores))
    values = v.to(dtype)
    out = values.new_zeros((*scores.q.shape[:-1], v.shape[-1]))
    lse = values.new_full(scores.q.shape[:-1], -torch.inf)
    for block in _blocks(tiles, tile_offsets, q.shape[0]):
        s, _ = scores.of(block)
        part = torch.logsumexp(s, -1)
        weights = torch.exp(s - _or_inf(part)[..., None])
        if (kept := scores.kept(block)) is not None:
            weights *= kept
        before = lse[block.batch, :, :, block.rows]
        after = torch.logaddexp(before, part)
        o = out[block.batch, :, :, block.rows]
        o *= torch.exp(before - _or_inf(after))[..., None]
        o += (weights @ values[block.batch, :, None, block.columns]) * torch.exp(part - _or_inf(after))[..., None]
        lse[block.batch, :, :, block.rows] = after
    return out.flatten(1, 2).to(out_dtype), lse.flatten(1, 2)


def backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor,
    tiles: Tensor, tile_offsets: Tensor | None, *options: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv) in float32, or float64."""
    dtype, kv_heads = compute_dtype(q.dtype), k.shape[1]
    scores = _Scores(_by_kv_head(q, kv_heads, dtype), k.to(dtype), ScoreOptions(*options))
    dout, values = _by_kv_head(grad_out, kv_heads, dtype), v.to(dtype)
    final, shift = (x.to(dtype).unflatten(1, (kv_heads, -1))[..., None] for x in (_or_inf(lse), delta))
    dq, dk, dv = torch.zeros_like(scores.q), torch.zeros_like(scores.k), torch.zeros_like(values)
    for block in _blocks(tiles, tile_offsets, q.shape[0]):
        s, slope = scores.of(block)
        rows = (block.batch, slice(None), slice(None), block.rows)
        columns = (block.batch, slice(None), block.columns)
        p = torch.exp(s - final[rows])
        dp = dout[rows] @ values[columns].transpose(-1, -2)[:, :, None]
        weights = p
        if (kept := scores.kept(block)) is not None:
            weights, dp = p * kept, dp * kept
        ds = p * (dp - shift[rows]) * slope * scores.options.scale
        dq[rows] += ds @ scores.k[columns][:, :, None]
        dk[columns] += (ds.transpose(-1, -2) @ scores.q[rows]).sum(2)
        dv[columns] += (weights.transpose(-1, -2) @ dout[rows]).sum(2)
    return dq.flatten(1, 2), dk, dv


def _or_inf(lse: Tensor) -> Tensor:
    """lse, and inf where nothing is visible: exp(x - inf) is 0 for every x there."""
    return lse.masked_fill(lse == -torch.inf, torch.inf)


def row_delta(grad_out: Tensor, out: Tensor, grad_lse: Tensor | None) -> Tensor:
    """rowsum(dout * out) - dlse, in float32, or float64, dense."""
    dtype = compute_dtype(out.dtype)
    delta = (grad_out.to(dtype) * out).sum(-1)  # the product widens out, without a copy of it
    return (delta if grad_lse is None else delta - grad_lse.to(dtype)).contiguous()
