"""Rows of tokens on their way to experts and back: permute, unpermute and what goes with them.

On CPU these are kernels of csrc/moe/, on CUDA those of `fastpar.kernels.moe_rows` in Triton;
elsewhere, and for dtypes that the kernels do not take, they are the functions of `fastpar.reference.moe_rows`, whose
docstrings have shapes, rules and worked examples.

    sort_pairs    a counting sort, stable                     reads the indices twice
    order_pairs   the same for devices: pairs that go nowhere stay, so that no size is read on the host
    pair_positions  which of its expert's pairs each pair is
    pair_slots    where each pair's row lies
    row_sources   which token each row is of
    tokens_by_rank  the rows that a rank sends, a token once to each rank
    gather_rows   permute: rows by expert                     reads and writes N rows
    sum_rows      unpermute: weighted sums at the tokens      reads N K rows, writes N
    dot_rows      gradients of weights                        reads 2 N rows

No autograd: `fastpar.ops.moe` and `fastpar.ops.moe_mlp` differentiate them. No collective. Results have the same bits
for any number of threads; those of `sum_rows` and `dot_rows` on every instruction set, too, and those of `sum_rows` are
the reference's. RuntimeError for an index beyond the tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastpar import _ext
from fastpar.ops._backends import has_kernels
from fastpar.ops._buffers import new_buffer
from fastpar.reference import moe_rows as reference

_ext.load()
_kernels = torch.ops.fastpar
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def _fits(*dtypes: torch.dtype) -> bool:
    """Whether the kernels that compute take these together: float64 goes with itself only."""
    return all(dtype in _FLOATS for dtype in dtypes) or all(dtype == torch.float64 for dtype in dtypes)


def _elsewhere(x: Tensor, takes: bool = True) -> Any:
    """The functions for a device that is no CPU, or for what its kernels do not take."""
    if x.device.type != "cuda" or not takes or not has_kernels(x) or torch.compiler.is_compiling():
        return reference
    from fastpar.kernels import moe_rows as kernels

    return kernels


def _factors(factors: Tensor | None, table: Tensor) -> Tensor | None:
    return None if factors is None else factors.to(torch.promote_types(table.dtype, torch.float32))


# ---- fakes -----------------------------------------------------------------------------------------------------------


@torch.library.register_fake("fastpar::moe_sort_pairs")
def _(indices: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    pairs = torch.library.get_ctx().new_dynamic_size()
    return indices.new_empty((pairs,), dtype=torch.int64), indices.new_empty((num_experts,), dtype=torch.int64)


@torch.library.register_fake("fastpar::moe_pair_slots")
def _(order: Tensor, counts: Tensor, first: Tensor, num_pairs: int) -> Tensor:
    return order.new_empty((num_pairs,))


@torch.library.register_fake("fastpar::moe_row_sources")
def _(orders: list[Tensor], weights: list[Tensor], runs: Tensor, top_k: int, num_rows: int) -> tuple[Tensor, Tensor]:
    dtype = weights[0].dtype if weights else torch.float32
    return runs.new_empty((num_rows,)), runs.new_empty((num_rows,), dtype=dtype)


@torch.library.register_fake("fastpar::moe_tokens_by_rank")
def _(indices: Tensor, size: int, per_rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    rows = torch.library.get_ctx().new_dynamic_size()
    tokens, top_k = indices.shape
    shapes = ((rows,), (rows, top_k), (size,), (tokens, min(top_k, size)), (tokens, top_k))
    a, b, c, d, e = (indices.new_empty(shape, dtype=torch.int64) for shape in shapes)
    return a, b, c, d, e


@torch.library.register_fake("fastpar::moe_gather_rows")
def _(tables: list[Tensor], index: Tensor, scale: Tensor | None, out: Tensor) -> None:
    return None


@torch.library.register_fake("fastpar::moe_sum_rows")
def _(tables: list[Tensor], index: Tensor, weights: Tensor | None, add: Tensor | None, out: Tensor) -> None:
    return None


@torch.library.register_fake("fastpar::moe_dot_rows")
def _(rows: Tensor, tables: list[Tensor], index: Tensor) -> Tensor:
    return rows.new_empty((len(index),), dtype=torch.promote_types(rows.dtype, torch.float32))


# ---- public ----------------------------------------------------------------------------------------------------------


def sort_pairs(indices: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """(order, counts): see `fastpar.reference.moe_rows.sort_pairs`. Elsewhere than on the CPU it waits for the device:
    `order_pairs` does not."""
    if indices.device.type != "cpu":
        order, counts = order_pairs(indices, num_experts)
        return order[: int(counts.sum())], counts
    order, counts = _kernels.moe_sort_pairs(indices, num_experts)
    return order, counts


def order_pairs(indices: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """(order, counts): see `fastpar.reference.moe_rows.order_pairs`."""
    if indices.is_cuda and has_kernels(indices) and num_experts > 0 and not torch.compiler.is_compiling():
        from fastpar.kernels import moe_sort

        return moe_sort.order_pairs(indices, num_experts)
    return reference.order_pairs(indices, num_experts)


def pair_positions(indices: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """(positions, counts): which of its expert's pairs each is, from 0 on, -1 for one that goes nowhere; pairs of each.

        indices    [T, K]   int64 or int32; a value outside 0..num_experts - 1 goes nowhere
        positions  [T, K]   int64
        counts     [E]      int64

    Worked example: indices [[1, 0], [0, -1]], 2 experts: positions [[0, 0], [1, -1]], counts [2, 1].
    """
    if indices.device.type == "cpu":
        order, counts = sort_pairs(indices, num_experts)
        return pair_slots(order, counts, torch.zeros_like(counts), indices.shape), counts
    order, counts = order_pairs(indices, num_experts)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    goes = (indices >= 0) & (indices < num_experts)
    begins = counts.cumsum(0) - counts
    return torch.where(goes, place.view(indices.shape) - begins[torch.where(goes, indices, 0)], -1), counts


def pair_slots(order: Tensor, counts: Tensor, first: Tensor, shape: Sequence[int]) -> Tensor:
    """[T, K]: see `fastpar.reference.moe_rows.pair_slots`."""
    if order.device.type != "cpu":
        return reference.pair_slots(order, counts, first, shape)
    slots: Tensor = _kernels.moe_pair_slots(order, counts, first, shape[0] * shape[1])
    return slots.view(tuple(shape))


def row_sources(
    orders: Sequence[Tensor], weights: Sequence[Tensor] | None, runs: Tensor, top_k: int, num_rows: int
) -> tuple[Tensor, Tensor]:
    """(source, row_weights): see `fastpar.reference.moe_rows.row_sources`."""
    if runs.device.type != "cpu":
        return reference.row_sources(orders, weights, runs, top_k, num_rows)
    source, row_weights = _kernels.moe_row_sources(list(orders), list(weights or ()), runs, top_k, num_rows)
    return source, row_weights


def tokens_by_rank(indices: Tensor, size: int, per_rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What a rank sends: see `fastpar.reference.moe_rows.tokens_by_rank`; elsewhere than on the CPU
    `padded_tokens_by_rank`, which waits for no device."""
    if indices.device.type != "cpu":
        return reference.padded_tokens_by_rank(indices, size, per_rank)
    tokens, experts, sizes, rows_of_token, values_of_pair = _kernels.moe_tokens_by_rank(indices, size, per_rank)
    return tokens, experts, sizes, rows_of_token, values_of_pair


def gather_rows(
    tables: Sequence[Tensor],
    index: Tensor,
    *,
    scale: Tensor | None = None,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """out[i] = scale[i] * table[index[i]]: see `fastpar.reference.moe_rows.gather_rows`.

    A plain copy where there is no scale and no other dtype. Large results are stored past the caches.
    """
    table = tables[0]
    wanted = (dtype or table.dtype) if out is None else out.dtype
    copies = scale is None and wanted == table.dtype
    if table.device.type != "cpu" or not (copies or _fits(table.dtype, wanted)):
        takes = copies or _fits(table.dtype, wanted)
        rows: Tensor = _elsewhere(table, takes).gather_rows(tables, index, scale=scale, out=out, dtype=dtype)
        return rows
    if out is None:
        out = new_buffer(table, (len(index), table.shape[1]), wanted)
    _kernels.moe_gather_rows(list(tables), index, _factors(scale, table), out)
    return out


def sum_rows(
    tables: Sequence[Tensor],
    index: Tensor,
    *,
    weights: Tensor | None = None,
    add: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """out[i] = add[i] + sum over k of weights[i, k] * table[index[i, k]]: see `fastpar.reference.moe_rows.sum_rows`."""
    table = tables[0]
    wanted = table.dtype if out is None else out.dtype
    if table.device.type != "cpu" or not _fits(table.dtype, wanted):
        takes = _fits(table.dtype, wanted)
        rows: Tensor = _elsewhere(table, takes).sum_rows(tables, index, weights=weights, add=add, out=out)
        return rows
    if add is not None and not _fits(table.dtype, add.dtype):
        add = add.to(torch.promote_types(table.dtype, torch.float32))
    if out is None:
        out = new_buffer(table, (len(index), table.shape[1]), wanted)
    _kernels.moe_sum_rows(list(tables), index, _factors(weights, table), add, out)
    return out


def dot_rows(rows: Tensor, tables: Sequence[Tensor], index: Tensor) -> Tensor:
    """dots[i] = <rows[i], table[index[i]]>: see `fastpar.reference.moe_rows.dot_rows`."""
    if rows.device.type != "cpu" or not _fits(rows.dtype, tables[0].dtype):
        takes = _fits(rows.dtype, tables[0].dtype)
        found: Tensor = _elsewhere(rows, takes).dot_rows(rows, tables, index)
        return found
    dots: Tensor = _kernels.moe_dot_rows(rows, list(tables), index)
    return dots


__all__ = [
    "dot_rows", "gather_rows", "order_pairs", "pair_positions", "pair_slots", "row_sources", "sort_pairs", "sum_rows",
    "tokens_by_rank",
]  # fmt: skip
