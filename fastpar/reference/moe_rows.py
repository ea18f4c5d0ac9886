"""Rows of tokens on their way to experts and back: gathered, summed, compared. Plain PyTorch.

Tables are tensors [n_s, H] that count as one, lying one below the other; an index is a row of that one, or -1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def sort_pairs(indices: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Pairs of token and choice in the order of experts.

        indices  [T, K]   int64 or int32; a value outside 0..num_experts - 1 is a choice that goes nowhere
        order    [n]      int64: the pairs t * K + k that go somewhere, by expert, then by pair
        counts   [E]      int64: how many there are of each expert

    Worked example: indices [[1, 0], [0, -1]], 2 experts: order [1, 2, 0], counts [2, 1].
    """
    flat = indices.reshape(-1).long()
    flat = torch.where((flat < 0) | (flat >= num_experts), num_experts, flat)
    counts = torch.bincount(flat, minlength=num_experts + 1)[:num_experts]
    return torch.argsort(flat, stable=True)[: int(counts.sum())], counts


def gather_rows(
    tables: Sequence[Tensor],
    index: Tensor,
    *,
    scale: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """out[i] = scale[i] * table[index[i]]; zeros where index[i] is -1.

    tables   [n_s, H]   of one dtype
    index    [N]        int64
    scale    [N]        float32; the product is rounded once
    out      [N, H]     in the tables' dtype
    """
    table = torch.cat(list(tables)) if len(tables) > 1 else tables[0]
    rows = table.index_select(0, index.clamp_min(0)) if len(table) else table.new_zeros((len(index), table.shape[1]))
    if scale is not None:
        wide = torch.promote_types(rows.dtype, torch.float32)
        rows = (rows.to(wide) * scale.to(wide)[:, None]).to(table.dtype)
    rows = torch.where((index < 0)[:, None], rows.new_zeros(()), rows)
    return rows if out is None else out.copy_(rows)


def sum_rows(
    tables: Sequence[Tensor],
    index: Tensor,
    *,
    weights: Tensor | None = None,
    add: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """out[i] = add[i] + sum over k of weights[i, k] * table[index[i, k]]; a -1 contributes nothing.

        tables   [n_s, H]   of one dtype
        index    [N, K]     int64
        weights  [N, K]     float32
        add      [N, H]     in any floating dtype
        out      [N, H]     in the tables' dtype

    In float32 (float64 for float64), `add` first, then k = 0, 1, ... by fused multiply-adds or not, but the same
    everywhere; one rounding.
    """
    table = torch.cat(list(tables)) if len(tables) > 1 else tables[0]
    wide = torch.promote_types(table.dtype, torch.float32)
    total = table.new_zeros((len(index), table.shape[1]), dtype=wide) if add is None else add.to(wide, copy=True)
    for k in range(index.shape[1]):
        rows = gather_rows([table], index[:, k]).to(wide)
        if weights is not None:
            rows = rows * torch.where(index[:, k] < 0, 0.0, weights[:, k].to(wide))[:, None]
        total += rows
    return total.to(table.dtype) if out is None else out.copy_(total)


def dot_rows(rows: Tensor, tables: Sequence[Tensor], index: Tensor) -> Tensor:
    """dots[i] = <rows[i], table[index[i]]>, 0 where index[i] is -1.

    rows   [N, H]
    dots   [N]      float32 (float64 for float64), accumulated so
    """
    wide = torch.promote_types(rows.dtype, torch.float32)
    return (rows.to(wide) * gather_rows(tables, index).to(wide)).sum(-1)
