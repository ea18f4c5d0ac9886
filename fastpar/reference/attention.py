"""Attention over band tiles in plain PyTorch: every score at once, in float32 (float64 for float64)."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from fastpar.contracts import compute_dtype
from fastpar.contracts.attention import AttentionDropout, AttentionMask, AttentionTiles, Ranges, positions
from fastpar.reference.dropout import hash_of


def dense_mask(mask: AttentionMask, queries: Ranges, keys: Ranges) -> Tensor:
    """True where a query sees a key, by the definition of `AttentionMask`: bool [rows of documents or 1, s_q, s_k]."""
    p, c = positions(queries)[:, None], positions(keys)[None]
    left, right = mask.reach
    near = (c >= p - left) & (c <= p + right)
    total = mask.num_tokens or max([0, *(r.stop for r in (*queries, *keys))])
    rows = []
    for lengths in mask.documents or ((total,),):
        sizes = torch.tensor(lengths, dtype=torch.int64)
        document = torch.arange(len(lengths)).repeat_interleave(sizes)
        within = torch.arange(total) - (sizes.cumsum(0) - sizes)[document]
        chunk = within // (mask.chunk or max(1, total))
        rows.append(near & (document[p] == document[c]) & (chunk[p] == chunk[c]))
    return torch.stack(rows)


def dense_tiles(tiles: AttentionTiles) -> Tensor:
    """How many tiles say that a query sees a key, which is 0 or 1: int32 [batch rows told apart or 1, s_q, s_k]."""
    offsets = tiles.batch or (0, len(tiles.table))
    count = torch.zeros(len(offsets) - 1, tiles.num_queries, tiles.num_keys, dtype=torch.int32)
    for row, (start, stop) in enumerate(itertools.pairwise(offsets)):
        for q0, q1, k0, k1, lo, hi in tiles.table[start:stop].tolist():
            band = torch.arange(k1 - k0) - torch.arange(q1 - q0)[:, None]
            count[row, q0:q1, k0:k1] += (lo <= band) & (band <= hi)
    return count


def attention_keep_mask(
    dropout: AttentionDropout, batch: int, heads: int, q_positions: Tensor, k_positions: Tensor
) -> Tensor:
    """True where a probability survives: bool [b, h, s_q, s_k].

    mix(s, i) = SplitMix64 of s + (i + 1) * golden gamma, as for `sharded_dropout`; one step for each of four numbers:

        kept iff (mix(mix(mix(mix(seed, batch row), head), query's position), key's position) >> 40) >= round(p 2^24)

    so that a kernel hashes three times a row and once a pair, and no extent of the whole tensor enters.
    """
    z = torch.full((), dropout.seed, dtype=torch.int64)
    z = hash_of(z, dropout.first_batch + torch.arange(batch))[:, None, None, None]
    z = hash_of(z, (dropout.first_head + torch.arange(heads))[:, None, None])
    z = hash_of(hash_of(z, q_positions.cpu()[:, None]), k_positions.cpu())
    return ((z >> 40) & ((1 << 24) - 1)) >= round(dropout.p * (1 << 24))


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tiles: AttentionTiles | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    dropout: AttentionDropout | None = None,
    return_lse: bool = False,
) -> Any:
    """See `fastpar.ops.attention`."""
    dtype, (batch, heads, rows, width) = compute_dtype(q.dtype), q.shape
    columns, group = k.shape[2], q.shape[1] // max(1, k.shape[1])
    kv_head = torch.arange(heads, device=q.device) // max(1, group)
    scores = q.to(dtype) @ k.to(dtype)[:, kv_head].transpose(-1, -2) * (width**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if tiles is not None:
        visible = dense_tiles(tiles).bool()[:, None].to(q.device)
    else:
        band = torch.arange(columns, device=q.device) - torch.arange(rows, device=q.device)[:, None]
        visible = (band <= 0) | (not causal)
    scores = scores.masked_fill(~visible, -torch.inf)
    if sink is not None:
        scores = torch.cat([scores, sink.to(dtype)[:, None, None].expand(batch, heads, rows, 1)], -1)
    lse = torch.logsumexp(scores, -1) if scores.shape[-1] else scores.new_full(scores.shape[:-1], -torch.inf)
    probabilities = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])[..., :columns]
    if dropout is not None:
        q_positions = torch.arange(rows) if dropout.q_positions is None else dropout.q_positions
        k_positions = torch.arange(columns) if dropout.k_positions is None else dropout.k_positions
        kept = attention_keep_mask(dropout, batch, heads, q_positions, k_positions).to(q.device)
        probabilities = probabilities * kept * (1.0 / (1.0 - dropout.p) if dropout.p < 1 else 0.0)
    out = (probabilities @ v.to(dtype)[:, kv_head]).to(q.dtype)
    return (out, lse) if return_lse else out
