# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# (parameters of Triton kernels have no Python types)
"""RMSNorm for CUDA tensors; tested on an H200, not timed. The algebra is in fastpar.ops.rms_norm.

forward    one program per row, or per ROWS short ones. A row of up to MAX_BLOCK elements is held in registers; a longer
           one is read twice, the second time from the cache.
backward   two launches. A fixed number of programs, two per multiprocessor, takes rows in turns, writes the
           gradient of x, and keeps its share of the weight's gradient in registers (for long rows in its own row of a
           buffer); then the shares are added up column by column. No atomics: the order of every sum is fixed by the
           shape and the number of programs.

Worked example: x [3, 4], weight [1, 2], eps 0: rstd = 0.282843, out = [0.848528, 2.262742]; with grad_out [1, 0]: g =
[1, 0], c = mean(g * x) * rstd^2 = 0.12, dx = [0.181019, -0.135765], dw = [0.848528, 0].
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastpar.kernels.launch import cdiv, launch, next_power_of_2
from fastpar.kernels.rows import as_rows, compute_dtype

# Elements of a row that one program holds. Backward keeps a float of the weight's gradient for each besides, and spills
# at 16384; rows that are longer are taken in pieces of LONG_BLOCK.
MAX_BLOCK = 16384
MAX_BLOCK_BACKWARD = 8192
LONG_BLOCK = 4096
TILE = 2048  # elements that a program of short rows holds
SUM_ROWS, SUM_BLOCK = 32, 64
_TL_DTYPE = {torch.float32: tl.float32, torch.float64: tl.float64}


@triton.jit
def _weight_of(weight, column, mask, offset, COMPUTE: tl.constexpr, HAS_WEIGHT: tl.constexpr):
    if HAS_WEIGHT:
        return tl.load(weight + column, mask=mask, other=0.0).to(COMPUTE) + tl.cast(offset, COMPUTE)
    return tl.full(column.shape, 1.0, COMPUTE)


@triton.jit
def _summed(x, residual, mask, COMPUTE: tl.constexpr, HAS_RESIDUAL: tl.constexpr):
    """x + residual, rounded once to their dtype."""
    h = tl.load(x, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        h = (h.to(COMPUTE) + tl.load(residual, mask=mask, other=0.0).to(COMPUTE)).to(h.dtype)
    return h


@triton.jit
def rms_norm_kernel(
    x,
    x_outer,
    x_inner,
    residual,
    residual_outer,
    residual_inner,
    weight,
    out,
    summed,
    rstd_out,
    inner,
    rows,
    hidden,
    eps,
    offset,
    COMPUTE: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """out, rstd and, with a residual, the sum of ROWS rows; WHOLE: a row fits BLOCK."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row_mask = (row < rows)[:, None]
    x += (row // inner * x_outer + row % inner * x_inner)[:, None]
    residual += (row // inner * residual_outer + row % inner * residual_inner)[:, None]
    place = (row * hidden)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = row_mask & (column < hidden)
    if WHOLE:
        h = _summed(x + column, residual + column, mask, COMPUTE, HAS_RESIDUAL)
        squares = h.to(COMPUTE) * h.to(COMPUTE)
    else:
        squares = tl.zeros((ROWS, BLOCK), COMPUTE)
        for begin in range(0, hidden, BLOCK):
            at = begin + column
            part = _summed(x + at, residual + at, row_mask & (at < hidden), COMPUTE, HAS_RESIDUAL).to(COMPUTE)
            squares += part * part
    rstd = tl.rsqrt(tl.sum(squares, axis=1) / hidden + tl.cast(eps, COMPUTE))
    tl.store(rstd_out + row, rstd, mask=row < rows)
    if WHOLE:
        w = _weight_of(weight, column, column < hidden, offset, COMPUTE, HAS_WEIGHT)
        if HAS_RESIDUAL:
            tl.store(summed + place + column, h, mask=mask)
        tl.store(out + place + column, (h.to(COMPUTE) * rstd[:, None] * w).to(out.dtype.element_ty), mask=mask)
    else:
        for begin in range(0, hidden, BLOCK):
            at = begin + column
            mask = row_mask & (at < hidden)
            part = _summed(x + at, residual + at, mask, COMPUTE, HAS_RESIDUAL)
            w = _weight_of(weight, at, at < hidden, offset, COMPUTE, HAS_WEIGHT)
            if HAS_RESIDUAL:
                tl.store(summed + place + at, part, mask=mask)
            tl.store(out + place + at, (part.to(COMPUTE) * rstd[:, None] * w).to(out.dtype.element_ty), mask=mask)


@triton.jit
def rms_norm_backward_kernel(
    grad_out,
    grad_out_outer,
    grad_out_inner,
    grad_sum,
    grad_sum_outer,
    grad_sum_inner,
    x,
    x_outer,
    x_inner,
    rstd,
    weight,
    grad_x,
    shares,
    inner,
    rows,
    hidden,
    offset,
    COMPUTE: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_GRAD_SUM: tl.constexpr,
    NEEDS_X: tl.constexpr,
    NEEDS_WEIGHT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The gradient of x, and this program's share [hidden] of the weight's, by tiles of ROWS rows; hidden <= BLOCK."""
    column = tl.arange(0, BLOCK)[None, :]
    inside = column < hidden
    w = _weight_of(weight, column, inside, offset, COMPUTE, HAS_WEIGHT)
    share = tl.zeros((ROWS, BLOCK), COMPUTE)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & inside
        outer = row // inner
        step = row % inner
        dout_at = grad_out + (outer * grad_out_outer + step * grad_out_inner)[:, None] + column
        x_at = x + (outer * x_outer + step * x_inner)[:, None] + column
        dout = tl.load(dout_at, mask=mask, other=0.0).to(COMPUTE)
        r = tl.load(rstd + row, mask=row < rows, other=0.0)[:, None]
        normed = tl.load(x_at, mask=mask, other=0.0).to(COMPUTE) * r
        if NEEDS_WEIGHT:
            share += dout * normed
        if NEEDS_X:
            g = dout * w
            c = tl.sum(g * normed, axis=1)[:, None] / hidden
            grad = (g - normed * c) * r
            if HAS_GRAD_SUM:
                sum_at = grad_sum + (outer * grad_sum_outer + step * grad_sum_inner)[:, None] + column
                grad += tl.load(sum_at, mask=mask, other=0.0).to(COMPUTE)
            tl.store(grad_x + (row * hidden)[:, None] + column, grad.to(grad_x.dtype.element_ty), mask=mask)
    if NEEDS_WEIGHT:
        total = tl.sum(share, axis=0)[None, :]
        tl.store(shares + tl.program_id(0).to(tl.int64) * hidden + column, total, mask=inside)


@triton.jit
def rms_norm_backward_long_kernel(
    grad_out,
    grad_out_outer,
    grad_out_inner,
    grad_sum,
    grad_sum_outer,
    grad_sum_inner,
    x,
    x_outer,
    x_inner,
    rstd,
    weight,
    grad_x,
    shares,
    inner,
    rows,
    hidden,
    offset,
    COMPUTE: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_GRAD_SUM: tl.constexpr,
    NEEDS_X: tl.constexpr,
    NEEDS_WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The same for rows longer than BLOCK; `shares` begins as zeros, and a program adds to its own row of it."""
    column = tl.arange(0, BLOCK)
    shares += tl.program_id(0).to(tl.int64) * hidden
    for row32 in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.cast(row32, tl.int64)
        dout_row = grad_out + row // inner * grad_out_outer + row % inner * grad_out_inner
        x_row = x + row // inner * x_outer + row % inner * x_inner
        sum_row = grad_sum + row // inner * grad_sum_outer + row % inner * grad_sum_inner
        r = tl.load(rstd + row)
        products = tl.zeros((BLOCK,), COMPUTE)
        for begin in range(0, hidden, BLOCK):
            at = begin + column
            mask = at < hidden
            product = tl.load(dout_row + at, mask=mask, other=0.0).to(COMPUTE) * r
            product *= tl.load(x_row + at, mask=mask, other=0.0).to(COMPUTE)
            if NEEDS_WEIGHT:
                tl.store(shares + at, tl.load(shares + at, mask=mask) + product, mask=mask)
            products += product * _weight_of(weight, at, mask, offset, COMPUTE, HAS_WEIGHT)
        if NEEDS_X:
            c = tl.sum(products, axis=0) / hidden
            for begin in range(0, hidden, BLOCK):
                at = begin + column
                mask = at < hidden
                w = _weight_of(weight, at, mask, offset, COMPUTE, HAS_WEIGHT)
                g = tl.load(dout_row + at, mask=mask, other=0.0).to(COMPUTE) * w
                grad = (g - tl.load(x_row + at, mask=mask, other=0.0).to(COMPUTE) * r * c) * r
                if HAS_GRAD_SUM:
                    grad += tl.load(sum_row + at, mask=mask, other=0.0).to(COMPUTE)
                tl.store(grad_x + row * hidden + at, grad.to(grad_x.dtype.element_ty), mask=mask)


@triton.jit
def sum_shares_kernel(shares, out, num_shares, hidden, COMPUTE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """out [hidden] = the sum over dim 0 of shares [num_shares, hidden], ROWS at a time in order, in out's dtype."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    total = tl.zeros((ROWS, BLOCK), COMPUTE)
    for begin in range(0, num_shares, ROWS):
        row = begin + tl.arange(0, ROWS)[:, None]
        place = row.to(tl.int64) * hidden + column
        total += tl.load(shares + place, mask=(row < num_shares) & (column < hidden), other=0.0)
    tl.store(out + column, tl.sum(total, axis=0)[None, :].to(out.dtype.element_ty), mask=column < hidden)


def tile_of(hidden: int, max_block: int) -> tuple[int, int, int]:
    """(rows of a program, elements of a row it holds, warps)"""
    block = next_power_of_2(max(hidden, 1))
    if block > max_block:
        block = min(LONG_BLOCK, max_block)
    rows = max(1, TILE // block) if block >= hidden else 1
    return rows, block, {True: 4, block > 2048: 8, block > 8192: 16}[True]


def forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, weight_offset: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, x + residual or x, rstd [rows]): the ops fastpar::rms_norm and fastpar::add_rms_norm."""
    compute, hidden, rows = compute_dtype(x.dtype), x.shape[-1], x.shape[:-1].numel()
    out, summed = x.new_empty(x.shape), x if residual is None else x.new_empty(x.shape)
    rstd = x.new_empty((rows,), dtype=compute)
    if rows == 0:
        return out, summed, rstd
    inner, operands = as_rows(x, x if residual is None else residual)
    (x, *x_strides), (second, *second_strides) = operands
    tile_rows, block, num_warps = tile_of(hidden, MAX_BLOCK)
    launch(
        rms_norm_kernel,
        cdiv(rows, tile_rows),
        x.device,
        x,
        *x_strides,
        second,
        *second_strides,
        x if weight is None else weight.contiguous(),
        out,
        summed,
        rstd,
        inner,
        rows,
        hidden,
        float(eps),
        float(weight_offset),
        COMPUTE=_TL_DTYPE[compute],
        HAS_WEIGHT=weight is not None,
        HAS_RESIDUAL=residual is not None,
        ROWS=tile_rows,
        BLOCK=block,
        WHOLE=hidden <= block,
        num_warps=num_warps,
    )
    return out, summed, rstd


def backward(
    grad_out: Tensor,
    grad_sum: Tensor | None,
    x: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    weight_offset: float,
    needs_grad_x: bool,
    needs_grad_weight: bool,
    num_programs: int,
    weight_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """The op fastpar::rms_norm_backward, with the number of programs that share the rows, and with what the weight's
    gradient is rounded to, where that is not left to the caller."""
    hidden, rows = x.shape[-1], x.shape[:-1].numel()
    grad_x = x.new_empty(x.shape if needs_grad_x else (0,))
    grad_weight = rstd.new_empty((hidden if needs_grad_weight else 0,), dtype=weight_dtype or rstd.dtype)
    if x.numel() == 0 or not (needs_grad_x or needs_grad_weight):
        return grad_x, grad_weight.zero_()
    inner, operands = as_rows(grad_out, x if grad_sum is None else grad_sum, x)
    tile_rows, block, num_warps = tile_of(hidden, MAX_BLOCK_BACKWARD)
    is_long = hidden > block
    num_programs = min(num_programs, cdiv(rows, tile_rows))
    options: dict[str, Any] = {"BLOCK": block, "num_warps": num_warps, **({} if is_long else {"ROWS": tile_rows})}
    shares = rstd  # for want of any
    if needs_grad_weight:
        shares = (rstd.new_zeros if is_long else rstd.new_empty)((num_programs, hidden))
    kernel = rms_norm_backward_long_kernel if is_long else rms_norm_backward_kernel
    launch(
        kernel,
        num_programs,
        x.device,
        *(part for operand in operands for part in operand),
        rstd,
        x if weight is None else weight.contiguous(),
        grad_x,
        shares,
        inner,
        rows,
        hidden,
        float(weight_offset),
        COMPUTE=_TL_DTYPE[rstd.dtype],
        HAS_WEIGHT=weight is not None,
        HAS_GRAD_SUM=grad_sum is not None,
        NEEDS_X=needs_grad_x,
        NEEDS_WEIGHT=needs_grad_weight,
        **options,
    )
    if needs_grad_weight:
        launch(
            sum_shares_kernel,
            cdiv(hidden, SUM_BLOCK),
            x.device,
            shares,
            grad_weight,
            num_programs,
            hidden,
            COMPUTE=_TL_DTYPE[rstd.dtype],
            ROWS=SUM_ROWS,
            BLOCK=SUM_BLOCK,
        )
    return grad_x, grad_weight
