"""Rows of tokens on their way to experts and back: sorted, gathered, summed, compared. Plain PyTorch.

Tables are tensors [n_s, H] that count as one, lying one below the other; an index is a row of that one, or -1.

A *pair* is a token and one of its choices, numbered t * K + k.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# ---- pairs -----------------------------------------------------------------------------------------------------------


def sort_pairs(indices: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Pairs of token and choice in the order of experts.

        indices  [T, K]   int64 or int32; a value outside 0..num_experts - 1 is a choice that goes nowhere
        order    [n]      int64: the pairs that go somewhere, by expert, then by pair
        counts   [E]      int64: how many there are of each expert

    Worked example: indices [[1, 0], [0, -1]], 2 experts: order [1, 2, 0], counts [2, 1].
    """
    order, counts = order_pairs(indices, num_experts)
    return order[: int(counts.sum())], counts


def order_pairs(indices: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """`sort_pairs` for devices, where sizes must not depend on values: the pairs that go nowhere follow the others.

        order    [T * K]  int64: a permutation of all pairs

    Worked example: indices [[1, 0], [0, -1]], 2 experts: order [1, 2, 0, 3], counts [2, 1].
    """
    flat = indices.reshape(-1).long()
    flat = torch.where((flat < 0) | (flat >= num_experts), num_experts, flat)
    # Not bincount, which looks at its largest value.
    counts = flat.new_zeros(num_experts + 1).scatter_add_(0, flat, torch.ones_like(flat))
    return torch.argsort(flat, stable=True), counts[:num_experts]


def pair_slots(order: Tensor, counts: Tensor, first: Tensor, shape: Sequence[int]) -> Tensor:
    """Where the row of each pair lies if those of expert e are first[e], first[e] + 1, ...

        order, counts       of `sort_pairs`
        first    [E]        int64
        slots    `shape`    [T, K], int64; -1: the pair has no row

    Worked example: order [1, 2, 0], counts [2, 1], first [4, 8], shape (2, 2): slots [[8, 4], [5, -1]].
    """
    slots = torch.full((shape[0] * shape[1],), -1, dtype=torch.int64, device=order.device)
    slots[order] = _runs(first, counts, len(order))
    return slots.view(tuple(shape))


def row_sources(
    orders: Sequence[Tensor], weights: Sequence[Tensor] | None, runs: Tensor, top_k: int, num_rows: int
) -> tuple[Tensor, Tensor]:
    """Token and weight of every row, from runs of sorted pairs.

        orders       [n_s]   int64 or int32: of `sort_pairs`, of several ranks
        weights      [n_s]   float32 or float64, in the same order; None: 1, in float32
        runs         [R, 5]  int64: the table, its first pair that is meant, how many, the first of their rows, and what
                             is added to the numbers of their tokens. No two runs have the same rows
        source       [num_rows]  int64: t of the pair t * top_k + k of each row; -1: the row is of no run
        row_weights  [num_rows]  as weights; 0 where source is -1

    Worked example: orders [[1, 2, 0]], weights [[5, 6, 7]], runs [[0, 0, 2, 1, 10], [0, 2, 1, 3, 10]], top_k 2, 5 rows:
    source [-1, 10, 11, 10, -1], row_weights [0, 5, 6, 7, 0].
    """
    device = runs.device
    all_pairs = torch.cat([order.reshape(-1).long() for order in orders])
    if len(runs) == 0 or len(all_pairs) == 0:
        dtype = weights[0].dtype if weights else torch.float32
        nothing = torch.zeros(num_rows, dtype=dtype, device=device)
        return torch.full((num_rows,), -1, dtype=torch.int64, device=device), nothing
    sizes = torch.tensor([len(order) for order in orders], device=device)
    # Every row looks for its run, so that the host of a device need not know how many rows have one. Of runs that begin
    # at one row the last is found, which is the one that is not empty.
    runs = runs[torch.argsort(runs[:, 2], stable=True)]
    runs = runs[torch.argsort(runs[:, 3], stable=True)]
    table, begin, count, row, token = runs.unbind(1)
    rows = torch.arange(num_rows, device=device)
    run = torch.searchsorted(row.contiguous(), rows, right=True) - 1
    is_after = run >= 0
    run = run.clamp(min=0)
    nth = rows - row[run]
    has_one = is_after & (nth < count[run])
    pairs = torch.where(has_one, (begin + (sizes.cumsum(0) - sizes)[table])[run] + nth, 0)
    source = torch.where(has_one, all_pairs[pairs] // top_k + token[run], -1)
    if weights is None:
        return source, has_one.to(torch.float32)
    return source, torch.where(has_one, torch.cat([w.reshape(-1) for w in weights])[pairs], 0.0)


def tokens_by_rank(indices: Tensor, size: int, per_rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The rows that a rank sends if each token goes once to every rank that has an expert of it.

        indices         [T, K]   int64 or int32; rank r of `size` has the `per_rank` experts from r * per_rank on; a
                                 value outside all ranks' is a choice that goes nowhere
        tokens          [S]      int64: the token of each row, by rank, then by token
        experts         [S, K]   int64: number on that rank of each choice's expert; -1: it is on another, or nowhere
        sizes           [size]   int64: rows for each rank
        rows_of_token   [T, min(K, size)]  int64: rows of each token, by rank, then -1
        values_of_pair  [T, K]   int64: s * K + k for the row s that has the pair; -1: none

    Worked example: indices [[3, 0], [0, 1]], 2 ranks with 2 experts each: tokens [0, 1, 0], experts
    [[-1, 0], [0, 1], [1, -1]], sizes [2, 1], rows_of_token [[0, 2], [1, -1]], values_of_pair [[4, 1], [2, 3]].
    """
    tokens, experts, sizes, rows_of_token, values_of_pair = padded_tokens_by_rank(indices, size, per_rank)
    total = int(sizes.sum())
    return tokens[:total], experts[:total], sizes, rows_of_token, values_of_pair


def padded_tokens_by_rank(indices: Tensor, size: int, per_rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`tokens_by_rank` for devices, where sizes must not depend on values: `tokens` and `experts` have as many rows as
    there can be, T * min(K, size); those behind the last are rows of token 0 for no expert.
    """
    indices, device = indices.long(), indices.device
    num_tokens, top_k = indices.shape
    most = min(top_k, size)
    goes = (indices >= 0) & (indices < size * per_rank)
    rank_of = torch.where(goes, indices // per_rank, size)
    goes_to = torch.zeros((num_tokens, size + 1), dtype=torch.bool, device=device)
    goes_to = goes_to.scatter_(1, rank_of, True)[:, :size]
    number = (goes_to.T.reshape(-1).cumsum(0) - 1).view(size, num_tokens).T  # of the row, by rank, then by token
    # What has no row is written to one more place, behind all rows.
    place = torch.where(goes_to, number, num_tokens * most)
    all_tokens, ranks = torch.arange(num_tokens, device=device), torch.arange(size, device=device)
    tokens = torch.zeros(num_tokens * most + 1, dtype=torch.int64, device=device)
    tokens = tokens.scatter_(0, place.reshape(-1), all_tokens[:, None].expand(-1, size).reshape(-1))[:-1]
    to = torch.full((num_tokens * most + 1,), -1, dtype=torch.int64, device=device)
    to = to.scatter_(0, place.reshape(-1), ranks.expand(num_tokens, -1).reshape(-1))[:-1]
    experts = torch.where(rank_of[tokens] == to[:, None], indices[tokens] - (to * per_rank)[:, None], -1)
    rows_of_token = torch.full((num_tokens, most + 1), -1, dtype=torch.int64, device=device)
    rows_of_token.scatter_(1, torch.where(goes_to, goes_to.cumsum(1) - 1, most), torch.where(goes_to, number, -1))
    row = torch.cat([torch.where(goes_to, number, -1), number.new_full((num_tokens, 1), -1)], 1)
    of_pair = row.gather(1, rank_of)
    values = torch.where(of_pair < 0, -1, of_pair * top_k + torch.arange(top_k, device=device))
    return tokens, experts, goes_to.sum(0), rows_of_token[:, :most], values


def _runs(first: Tensor, counts: Tensor, total: int) -> Tensor:
    """first[0], first[0] + 1, ... counts[0] of them, then the same of the next; `total` in all."""
    begins = counts.cumsum(0) - counts
    firsts = torch.repeat_interleave(first - begins, counts, output_size=total)
    return firsts + torch.arange(total, device=first.device)


# ---- rows ------------------------------------------------------------------------------------------------------------


def gather_rows(
    tables: Sequence[Tensor],
    index: Tensor,
    *,
    scale: Tensor | None = None,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """out[i] = scale[i] * table[index[i]]; zeros where index[i] is negative.

        tables   [n_s, H]   of one dtype: any without `scale` and another dtype, else a floating one
        index    [N]        int64
        scale    [N]        float32; the product is one of float32 (float64 for float64), then rounded to out's dtype
        out      [N, H]     of any dtype and distance of rows; None: a new one in `dtype`, or the tables' dtype

    Worked example: tables [[1, 2]] and [[3, 4]], index [1, -1, 0], scale [2, 7, 1]: out [[6, 8], [0, 0], [1, 2]].
    """
    table = torch.cat(list(tables)) if len(tables) > 1 else tables[0]
    if len(index) and int(index.max()) >= len(table):
        raise RuntimeError(f"index has {int(index.max())}, but the tables have {len(table)} rows")
    rows = table.index_select(0, index.clamp_min(0)) if len(table) else table.new_zeros((len(index), table.shape[1]))
    if scale is not None:
        wide = torch.promote_types(rows.dtype, torch.float32)
        rows = rows.to(wide) * scale.to(wide)[:, None]
    rows = torch.where((index < 0)[:, None], rows.new_zeros(()), rows)
    return rows.to(dtype or table.dtype) if out is None else out.copy_(rows)


def sum_rows(
    tables: Sequence[Tensor],
    index: Tensor,
    *,
    weights: Tensor | None = None,
    add: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """out[i] = add[i] + sum over k of weights[i, k] * table[index[i, k]]; a negative index contributes nothing.

        tables   [n_s, H]   of one dtype
        index    [N, K]     int64
        weights  [N, K]     float32
        add      [N, H]     in any floating dtype
        out      [N, H]     of any floating dtype and distance of rows; None: a new one in the tables' dtype

    In float32 (float64 for float64): from `add` or 0 on, k = 0, 1, ... in turn, each product rounded and then added;
    the sum is rounded once to out's dtype. The same bits everywhere.

    Worked example: tables [[1, 2]] and [[3, 4]], index [[1, 0], [0, -1]], weights [[0.5, 2], [1, 7]]: out
    [[3.5, 6], [1, 2]].
    """
    table = torch.cat(list(tables)) if len(tables) > 1 else tables[0]
    wide = torch.promote_types(table.dtype, torch.float32)
    total = table.new_zeros((len(index), table.shape[1]), dtype=wide) if add is None else add.to(wide, copy=True)
    for k in range(index.shape[1]):
        rows = gather_rows([table], index[:, k]).to(wide)
        if weights is not None:
            rows = rows * weights[:, k].to(wide)[:, None]
        total = torch.where((index[:, k] < 0)[:, None], total, total + rows)
    return total.to(table.dtype) if out is None else out.copy_(total)


def dot_rows(rows: Tensor, tables: Sequence[Tensor], index: Tensor) -> Tensor:
    """dots[i] = <rows[i], table[index[i]]>, 0 where index[i] is negative.

        rows   [N, H]
        dots   [N]      float32 (float64 for float64), accumulated so

    Worked example: rows [[1, 1], [1, 2]], tables [[1, 2]] and [[3, 4]], index [1, -1]: dots [7, 0].
    """
    wide = torch.promote_types(tables[0].dtype, torch.float32)
    found = gather_rows(tables, index).to(wide)
    return torch.where(index < 0, found.new_zeros(()), (rows.to(wide) * found).sum(-1))
