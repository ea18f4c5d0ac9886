# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Rows of tokens on their way to experts and back, on GPUs in Triton: signatures of fastpar.reference.moe_rows.

    gather_rows     out[i] = scale[i] * table[index[i]]
    sum_rows        out[i] = add[i] + sum over k of weights[i, k] * table[index[i, k]]
    dot_rows        dots[i] = <rows[i], table[index[i]]>

Tables are one or several tensors that count as one, lying one below the other; they may be in other ranks' memory.
Kernels find a row of several through a table of their addresses, `Places`, which whoever uses the same tables again
keeps and gives in their stead.

Every row is read once and every row of the output written once; there are no atomics, and sums run in one order: over k
by fused multiply-adds in float32 (float64 for float64), from `add` on, and one rounding. A program takes ROWS rows of
COLS columns, with 16 bytes a thread where the width allows it. Nothing synchronises with the host but the making of a
`Places`, which is of use until the tables move. Measured on an H200: docs/benchmarks.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastpar.kernels.cross_entropy import WARP_SIZE
from fastpar.kernels.launch import cdiv, launch, next_power_of_2

THREADS = 128
LOADS_PER_THREAD = 4  # of 16 bytes, by a program
NO_ROW = tl.constexpr(1 << 62)


# ---- device functions ------------------------------------------------------------------------------------------------


@triton.jit
def row_pointers(table, stride, places, index, TABLES: tl.constexpr, PADDED: tl.constexpr, ALIGN: tl.constexpr):
    """Where rows `index` [ROWS] begin. With several tables, in `places` [3, TABLES]: addresses, first rows, strides.

    First rows [0, 2, 2]: row 1 lies in table 0, and row 2 in table 2, since table 1 has none.
    """
    if TABLES == 1:
        return table + index * stride * ALIGN
    else:  # Triton compiles what stands behind a return
        t = tl.arange(0, PADDED)
        first = tl.load(places + TABLES + t, mask=t < TABLES, other=NO_ROW)
        which = tl.sum((first[None, :] <= index[:, None]).to(tl.int32), 1) - 1
        inside = index - tl.load(places + TABLES + which)
        address = tl.load(places + which).to(tl.pointer_type(table.dtype.element_ty))
        address = tl.multiple_of(address, ALIGN * (table.dtype.element_ty.primitive_bitwidth // 8))
        return address + inside * tl.load(places + 2 * TABLES + which) * ALIGN


# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["num_rows"])
def gather_rows_kernel(
    table,
    stride,
    places,
    index,
    scale,
    out,
    out_stride,
    num_rows,
    width,
    TABLES: tl.constexpr,
    PADDED: tl.constexpr,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """out[i] = scale[i] * table[index[i]]; zeros where index[i] is -1. Grid: row blocks * column blocks.

    table [[1, 2], [3, 4]], index [1, -1], scale [10, 10]: out [[30, 40], [0, 0]].
    """
    COMPUTE: tl.constexpr = tl.float64 if table.dtype.element_ty == tl.float64 else tl.float32
    width = width * ALIGN
    blocks = tl.cdiv(width, COLS)
    program = tl.program_id(0)
    i = (program // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = (program % blocks * COLS + tl.arange(0, COLS))[None, :]
    exists = i < num_rows
    row = tl.load(index + i, mask=exists, other=-1).to(tl.int64)
    start = row_pointers(table, stride, places, tl.maximum(row, 0), TABLES, PADDED, ALIGN)
    value = tl.load(start[:, None] + cols, mask=(row >= 0)[:, None] & (cols < width), other=0.0)
    if scale is not None:
        factor = tl.load(scale + i, mask=row >= 0, other=0.0).to(COMPUTE)
        value = tl.where((row >= 0)[:, None], value.to(COMPUTE) * factor[:, None], 0.0)
    target = out + (i * out_stride * ALIGN)[:, None] + cols
    tl.store(target, value.to(out.dtype.element_ty), mask=exists[:, None] & (cols < width))


@triton.jit(do_not_specialize=["num_rows"])
def sum_rows_kernel(
    table,
    stride,
    places,
    index,
    weights,
    add,
    add_stride,
    poison,
    out,
    out_stride,
    num_rows,
    width,
    TOP_K: tl.constexpr,
    TABLES: tl.constexpr,
    PADDED: tl.constexpr,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """out[i] = add[i] + sum over k of weights[i, k] * table[index[i, k]]; a -1 adds nothing. Grid as above.

    table [[1], [2], [4]], index [[2, 0], [1, -1]], weights [[1, 3], [5, 9]], add [[10], [20]]: out [[17], [30]].
    """
    COMPUTE: tl.constexpr = tl.float64 if table.dtype.element_ty == tl.float64 else tl.float32
    width = width * ALIGN
    blocks = tl.cdiv(width, COLS)
    program = tl.program_id(0)
    i = (program // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = (program % blocks * COLS + tl.arange(0, COLS))[None, :]
    exists = i < num_rows
    inside = exists[:, None] & (cols < width)
    total = tl.zeros((ROWS, COLS), COMPUTE)
    if add is not None:
        total = tl.load(add + (i * add_stride * ALIGN)[:, None] + cols, mask=inside, other=0.0).to(COMPUTE)
    for k in tl.static_range(TOP_K):
        row = tl.load(index + i * TOP_K + k, mask=exists, other=-1).to(tl.int64)
        start = row_pointers(table, stride, places, tl.maximum(row, 0), TABLES, PADDED, ALIGN)
        value = tl.load(start[:, None] + cols, mask=(row >= 0)[:, None] & (cols < width), other=0.0).to(COMPUTE)
        if weights is not None:
            factor = tl.load(weights + i * TOP_K + k, mask=row >= 0, other=0.0).to(COMPUTE)
            total = tl.fma(value, tl.broadcast_to(factor[:, None], (ROWS, COLS)), total)
        else:
            total += value
    if poison is not None:
        total += tl.load(poison)
    tl.store(out + (i * out_stride * ALIGN)[:, None] + cols, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def dot_rows_kernel(
    rows,
    rows_stride,
    table,
    stride,
    places,
    index,
    dots,
    num_rows,
    width,
    TABLES: tl.constexpr,
    PADDED: tl.constexpr,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """dots[i] = <rows[i], table[index[i]]>, 0 where index[i] is -1. Grid: row blocks.

    rows [[1, 2], [3, 4]], table [[10, 1]], index [0, -1]: dots [12, 0].
    """
    COMPUTE: tl.constexpr = tl.float64 if table.dtype.element_ty == tl.float64 else tl.float32
    width = width * ALIGN
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row = tl.load(index + i, mask=i < num_rows, other=-1).to(tl.int64)
    start = row_pointers(table, stride, places, tl.maximum(row, 0), TABLES, PADDED, ALIGN)
    own = rows + i * rows_stride * ALIGN
    total = tl.zeros((ROWS, COLS), COMPUTE)
    for first in range(0, width, COLS):
        cols = (first + tl.arange(0, COLS))[None, :]
        inside = (row >= 0)[:, None] & (cols < width)
        left = tl.load(own[:, None] + cols, mask=inside, other=0.0).to(COMPUTE)
        total += left * tl.load(start[:, None] + cols, mask=inside, other=0.0).to(COMPUTE)
    tl.store(dots + i, tl.sum(total, 1), mask=i < num_rows)


# ---- launchers -------------------------------------------------------------------------------------------------------


def _is_aligned(x: Tensor, align: int) -> bool:
    """Whether rows of x begin and end at multiples of `align` elements."""
    is_multiple = (
        x.shape[1] % align == 0 and x.stride(0) % align == 0 and x.data_ptr() % (align * x.element_size()) == 0
    )
    return is_multiple or x.numel() == 0


class Places(NamedTuple):
    """Several tables as kernels see them.

    like     one of them that has rows, if any has: what says their dtype and width
    stride   of its rows
    align    a power of two of elements, up to 16 bytes: what addresses, strides and width are multiples of
    table    int64 [3, n] on the device: addresses, first rows, strides in units of `align`; None for one table
    tables   themselves, which have to live as long as their addresses are used
    """

    like: Tensor
    stride: int
    align: int
    table: Tensor | None
    tables: tuple[Tensor, ...]

    @classmethod
    def of(cls, tables: Tables, *others: Tensor) -> Places:
        """`others`: what else is accessed in steps of `align`. Places that fit them are used as they are."""
        if isinstance(tables, Places):
            if all(_is_aligned(t, tables.align) for t in others):
                return tables
            tables = tables.tables
        dense = [t if t.shape[1] <= 1 or t.stride(1) == 1 else t.contiguous() for t in tables]
        like = dense[0]
        align = 16 // like.element_size()
        while not all(_is_aligned(t, align) for t in (*dense, *others)):
            align //= 2
        if len(dense) == 1:
            return cls(like, like.stride(0) // align, align, None, tuple(dense))
        sizes = [len(t) for t in dense]
        firsts = [sum(sizes[:n]) for n in range(len(sizes))]
        parts = [[t.data_ptr() for t in dense], firsts, [t.stride(0) // align for t in dense]]
        return cls(like, 0, align, torch.tensor(parts, dtype=torch.int64).to(like.device), tuple(dense))

    def options(self, *, rows: int) -> dict[str, Any]:
        """Blocks of a launch over so many rows."""
        width, itemsize = self.like.shape[1], self.like.element_size()
        cols = min(next_power_of_2(width), THREADS * 16 // itemsize)
        block = min(max(THREADS * LOADS_PER_THREAD * 16 // itemsize // cols, 1), next_power_of_2(rows))
        count = 1 if self.table is None else self.table.shape[1]
        return {
            "TABLES": count, "PADDED": next_power_of_2(count), "ALIGN": self.align,
            "ROWS": block, "COLS": cols, "num_warps": max(THREADS // WARP_SIZE, 1),
        }  # fmt: skip


Tables = Sequence[Tensor] | Places


def _like(tables: Tables) -> Tensor:
    return tables.like if isinstance(tables, Places) else tables[0]


def _output(out: Tensor | None, like: Tensor, rows: int, dtype: torch.dtype | None = None) -> Tensor:
    """`out`, or a new one. The kernels step over its rows; a tensor whose columns are apart is not written in place."""
    if out is None:
        return like.new_empty((rows, like.shape[1]), dtype=dtype)
    return (
        out if out.shape[1] <= 1 or out.stride(1) == 1 else torch.empty_like(out, memory_format=torch.contiguous_format)
    )


def _given(out: Tensor | None, result: Tensor) -> Tensor:
    return result if out is None or out is result else out.copy_(result)


def _dense(x: Tensor) -> Tensor:
    return x if x.shape[1] <= 1 or x.stride(1) == 1 else x.contiguous()


# ---- the ops ---------------------------------------------------------------------------------------------------------


def gather_rows(
    tables: Tables,
    index: Tensor,
    *,
    scale: Tensor | None = None,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`fastpar.reference.moe_rows.gather_rows`; tables of 8-bit floats only as they are."""
    result = _output(out, _like(tables), index.shape[0], dtype)
    if result.numel() == 0:
        return _given(out, result)
    places, target = Places.of(tables, result), result
    if places.like.element_size() == 1 and result.dtype == places.like.dtype:
        places, target = places._replace(like=places.like.view(torch.uint8)), result.view(torch.uint8)
    options = places.options(rows=index.shape[0])
    width, align = result.shape[1], places.align
    programs = cdiv(index.shape[0], options["ROWS"]) * cdiv(width, options["COLS"])
    launch(
        gather_rows_kernel, programs, result.device,
        places.like, places.stride, places.table, index.contiguous(), None if scale is None else scale.contiguous(),
        target, result.stride(0) // align, index.shape[0], width // align, **options,
    )  # fmt: skip
    return _given(out, result)


def sum_rows(
    tables: Tables,
    index: Tensor,
    *,
    weights: Tensor | None = None,
    add: Tensor | None = None,
    out: Tensor | None = None,
    poison: Tensor | None = None,
) -> Tensor:
    """`fastpar.reference.moe_rows.sum_rows`.

    poison  float32 [1], added to all: 0, or NaN where a kernel has found that rows are missing
    """
    result = _output(out, _like(tables), index.shape[0])
    if result.numel() == 0:
        return _given(out, result)
    add = None if add is None else _dense(add)
    places = Places.of(tables, result) if add is None else Places.of(tables, result, add)
    options = places.options(rows=index.shape[0])
    width, align = result.shape[1], places.align
    programs = cdiv(index.shape[0], options["ROWS"]) * cdiv(width, options["COLS"])
    launch(
        sum_rows_kernel, programs, result.device,
        places.like, places.stride, places.table, index.contiguous(), None if weights is None else weights.contiguous(),
        add, 0 if add is None else add.stride(0) // align, poison, result, result.stride(0) // align,
        index.shape[0], width // align, TOP_K=index.shape[1], **options,
    )  # fmt: skip
    return _given(out, result)


def dot_rows(rows: Tensor, tables: Tables, index: Tensor) -> Tensor:
    """`fastpar.reference.moe_rows.dot_rows`."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    dots = rows.new_empty(rows.shape[0], dtype=wide)
    if rows.numel() == 0:
        return dots.zero_()
    rows = _dense(rows)
    places = Places.of(tables, rows)
    options = places.options(rows=rows.shape[0])
    launch(
        dot_rows_kernel, cdiv(rows.shape[0], options["ROWS"]), rows.device,
        rows, rows.stride(0) // places.align, places.like, places.stride, places.table, index.contiguous(), dots,
        rows.shape[0], rows.shape[1] // places.align, **options,
    )  # fmt: skip
    return dots
