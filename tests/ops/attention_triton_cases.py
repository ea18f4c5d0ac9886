"""What attention's Triton kernels are compared with: float64, dense, by autograd; and tables of tiles of every kind."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastpar.contracts.attention import AttentionDropout
from fastpar.reference.attention import attention_keep_mask

# (queries, keys) -> tiles (q0, q1, k0, k1, lo, hi) by what they stand for
TABLES: dict[str, tuple[int, int, list[tuple[int, ...]]]] = {
    "full": (20, 37, [(0, 20, 0, 37, -19, 36)]),
    "causal": (34, 34, [(0, 34, 0, 34, -33, 0)]),
    "causal, keys before": (17, 39, [(0, 17, 0, 39, -16, 22)]),
    "window": (50, 50, [(0, 50, 0, 50, -18, 0)]),
    "window on both sides": (40, 35, [(0, 40, 0, 35, -5, 20)]),
    "one diagonal": (18, 25, [(0, 18, 3, 21, 0, 0)]),
    "documents": (40, 40, [(0, 7, 0, 7, -6, 0), (7, 8, 7, 8, 0, 0), (8, 33, 8, 33, -24, 0), (33, 40, 33, 40, -6, 0)]),
    "zigzag": (36, 36, [(0, 18, 0, 18, -17, 0), (18, 36, 0, 18, -17, 17), (18, 36, 18, 36, -17, 0)]),
    "striped, a later rank": (19, 19, [(0, 19, 0, 19, -18, -1)]),
    "empty rows": (45, 30, [(3, 20, 0, 12, -16, 11), (30, 33, 5, 30, 0, 22)]),
    "many keys before": (20, 140, [(0, 20, 0, 140, -19, 120)]),
    "nothing": (3, 5, []),
    "one pair": (1, 1, [(0, 1, 0, 1, 0, 0)]),
}


class AttentionCase(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    tiles: Tensor
    offsets: Tensor | None


def table(rows: list[tuple[int, ...]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32).view(-1, 6)


def case(
    name: str, *, heads: tuple[int, int] = (1, 1), dims: tuple[int, int] = (16, 16), dtype: Any = torch.float32,
    batch: int = 1, device: str = "cpu",
) -> AttentionCase:  # fmt: skip
    num_queries, num_keys, rows = TABLES[name]
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    q, k = random(batch, heads[0], num_queries, dims[0]), random(batch, heads[1], num_keys, dims[0])
    v, dout = random(batch, heads[1], num_keys, dims[1]), random(batch, heads[0], num_queries, dims[1])
    return AttentionCase(q, k, v, dout, table(rows), None)


def visible(tiles: Tensor, offsets: Tensor | None, batch: int, num_queries: int, num_keys: int) -> Tensor:
    """bool [batch, 1, queries, keys]."""
    mask = torch.zeros(batch, 1, num_queries, num_keys, dtype=torch.bool)
    for n in range(batch):
        first, last = (0, len(tiles)) if offsets is None else offsets[n : n + 2].tolist()
        for q0, q1, k0, k1, lo, hi in tiles[first:last].tolist():
            ahead = torch.arange(k1 - k0)[None, :] - torch.arange(q1 - q0)[:, None]
            mask[n, 0, q0:q1, k0:k1] |= (ahead >= lo) & (ahead <= hi)
    return mask


def expected(c: AttentionCase, scale: float, softcap: float = 0.0, dropout: Any = None) -> tuple[Tensor, ...]:
    """(out, lse, delta, dq, dk, dv) in float64 on the CPU."""
    q, k, v = (x.detach().cpu().double().requires_grad_() for x in (c.q, c.k, c.v))
    batch, heads, num_queries, _ = q.shape
    group = heads // k.shape[1]
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k.repeat_interleave(group, 1)) * scale
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    mask = visible(c.tiles, c.offsets, batch, num_queries, k.shape[2])
    scores = scores.masked_fill(~mask, float("-inf"))
    lse = scores.logsumexp(-1)
    weight = torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0)[..., None])
    if dropout is not None and dropout.p:
        hashed = AttentionDropout(**dropout._asdict())
        rows, keys = (
            torch.arange(n) if x is None else x
            for n, x in ((num_queries, dropout.q_positions), (k.shape[2], dropout.k_positions))
        )
        weight = weight * attention_keep_mask(hashed, batch, heads, rows, keys) / (1.0 - dropout.p)
    out = weight @ v.repeat_interleave(group, 1)
    dout = c.dout.cpu().double()
    grads = torch.autograd.grad(out, (q, k, v), dout)
    out = out.detach()
    return out, lse.detach(), (out * dout).sum(-1), *(g.nan_to_num(0.0) for g in grads)
