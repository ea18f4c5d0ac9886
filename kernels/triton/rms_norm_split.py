# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# (parameters of Triton kernels have no Python types)
"""RMSNorm of rows that are split over ranks, for CUDA tensors; tested on an H200, not timed. The algebra is in
fastpar.ops._rms_norm_split: these are the parts before and after the collectives.

One program takes a row of `hidden` elements, BLOCK at a time; `hidden` may be 0.

Worked example, the row [3, 4] on two ranks with one element each: squares 9 and 16, so rstd = 0.2 * sqrt(2) with eps 0,
and with weight [1, 2] out = [0.848528] and [2.262742]; with grad_out [1, 0] the products are 3 and 0, the factor is
3 / 2 * 0.08 = 0.12, and dx = [0.181019] and [-0.135765].
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastpar.kernels.launch import cdiv, launch, next_power_of_2
from fastpar.kernels.rms_norm import _weight_of
from fastpar.kernels.rows import as_rows, compute_dtype

MAX_BLOCK = 4096
_TL_DTYPE = {torch.float32: tl.float32, torch.float64: tl.float64}


@triton.jit
def squares_kernel(
    x,
    x_outer,
    x_inner,
    residual,
    residual_outer,
    residual_inner,
    summed,
    squares,
    inner,
    hidden,
    COMPUTE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sums of squares of x, or of x + residual rounded to its dtype, which is written then."""
    row = tl.program_id(0).to(tl.int64)
    x += row // inner * x_outer + row % inner * x_inner
    residual += row // inner * residual_outer + row % inner * residual_inner
    total = tl.zeros((BLOCK,), COMPUTE)
    for begin in range(0, hidden, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        mask = at < hidden
        h = tl.load(x + at, mask=mask, other=0.0)
        if HAS_RESIDUAL:
            h = (h.to(COMPUTE) + tl.load(residual + at, mask=mask, other=0.0).to(COMPUTE)).to(h.dtype)
            tl.store(summed + row * hidden + at, h, mask=mask)
        total += h.to(COMPUTE) * h.to(COMPUTE)
    tl.store(squares + row, tl.sum(total, axis=0))


@triton.jit
def scale_kernel(
    x,
    x_outer,
    x_inner,
    rstd,
    weight,
    out,
    inner,
    hidden,
    offset,
    COMPUTE: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out = x * rstd * weight"""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < hidden
    h = tl.load(x + row // inner * x_outer + row % inner * x_inner + at, mask=mask, other=0.0).to(COMPUTE)
    w = _weight_of(weight, at, mask, offset, COMPUTE, HAS_WEIGHT)
    tl.store(out + row * hidden + at, (h * tl.load(rstd + row) * w).to(out.dtype.element_ty), mask=mask)


@triton.jit
def products_kernel(
    grad_out,
    grad_out_outer,
    grad_out_inner,
    x,
    x_outer,
    x_inner,
    weight,
    products,
    inner,
    hidden,
    offset,
    COMPUTE: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sums of grad_out * weight * x"""
    row = tl.program_id(0).to(tl.int64)
    grad_out += row // inner * grad_out_outer + row % inner * grad_out_inner
    x += row // inner * x_outer + row % inner * x_inner
    total = tl.zeros((BLOCK,), COMPUTE)
    for begin in range(0, hidden, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        mask = at < hidden
        product = tl.load(grad_out + at, mask=mask, other=0.0).to(COMPUTE)
        product *= tl.load(x + at, mask=mask, other=0.0).to(COMPUTE)
        total += product * _weight_of(weight, at, mask, offset, COMPUTE, HAS_WEIGHT)
    tl.store(products + row, tl.sum(total, axis=0))


@triton.jit
def grad_x_kernel(
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
    factor,
    weight,
    grad_x,
    inner,
    hidden,
    offset,
    COMPUTE: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_GRAD_SUM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """grad_x = rstd * (grad_out * weight - x * factor) + grad_sum"""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < hidden
    outer, step = row // inner, row % inner
    w = _weight_of(weight, at, mask, offset, COMPUTE, HAS_WEIGHT)
    g = tl.load(grad_out + outer * grad_out_outer + step * grad_out_inner + at, mask=mask, other=0.0).to(COMPUTE) * w
    h = tl.load(x + outer * x_outer + step * x_inner + at, mask=mask, other=0.0).to(COMPUTE)
    grad = (g - h * tl.load(factor + row)) * tl.load(rstd + row)
    if HAS_GRAD_SUM:
        place = grad_sum + outer * grad_sum_outer + step * grad_sum_inner + at
        grad += tl.load(place, mask=mask, other=0.0).to(COMPUTE)
    tl.store(grad_x + row * hidden + at, grad.to(grad_x.dtype.element_ty), mask=mask)


def _options(x: Tensor) -> dict[str, Any]:
    block = min(MAX_BLOCK, next_power_of_2(max(x.shape[-1], 1)))
    return {"COMPUTE": _TL_DTYPE[compute_dtype(x.dtype)], "BLOCK": block, "num_warps": 4 if block <= 2048 else 8}


def _row_numbers(x: Tensor) -> Tensor:
    return torch.empty(x.shape[:-1].numel(), dtype=compute_dtype(x.dtype), device=x.device)


def squares(x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """The op fastpar::rms_norm_squares."""
    found = _row_numbers(x)
    summed = torch.empty((0,) if residual is None else x.shape, dtype=x.dtype, device=x.device)
    if found.numel() == 0:
        return found, summed
    hidden, options = x.shape[-1], _options(x)
    inner, operands = as_rows(x, x if residual is None else residual)
    parts = [part for operand in operands for part in operand]
    launch(
        squares_kernel,
        len(found),
        x.device,
        *parts,
        summed,
        found,
        inner,
        hidden,
        HAS_RESIDUAL=residual is not None,
        **options,
    )
    return found, summed


def scale(x: Tensor, rstd: Tensor, weight: Tensor | None, weight_offset: float) -> Tensor:
    """The op fastpar::rms_norm_scale."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    hidden, options = x.shape[-1], _options(x)
    inner, ((x, outer, step),) = as_rows(x)
    launch(
        scale_kernel,
        (len(rstd), cdiv(hidden, options["BLOCK"])),
        x.device,
        x,
        outer,
        step,
        rstd,
        x if weight is None else weight.contiguous(),
        out,
        inner,
        hidden,
        float(weight_offset),
        HAS_WEIGHT=weight is not None,
        **options,
    )
    return out


def products(grad_out: Tensor, x: Tensor, weight: Tensor | None, weight_offset: float) -> Tensor:
    """The first result of the op fastpar::rms_norm_products."""
    found = _row_numbers(x)
    if found.numel() == 0:
        return found
    hidden, options = x.shape[-1], _options(x)
    inner, operands = as_rows(grad_out, x)
    launch(
        products_kernel,
        len(found),
        x.device,
        *(part for operand in operands for part in operand),
        x if weight is None else weight.contiguous(),
        found,
        inner,
        hidden,
        float(weight_offset),
        HAS_WEIGHT=weight is not None,
        **options,
    )
    return found


def grad_x(
    grad_out: Tensor,
    grad_sum: Tensor | None,
    x: Tensor,
    rstd: Tensor,
    factor: Tensor,
    weight: Tensor | None,
    weight_offset: float,
) -> Tensor:
    """The op fastpar::rms_norm_grad_x."""
    found = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if found.numel() == 0:
        return found
    hidden, options = x.shape[-1], _options(x)
    inner, operands = as_rows(grad_out, x if grad_sum is None else grad_sum, x)
    launch(
        grad_x_kernel,
        (len(rstd), cdiv(hidden, options["BLOCK"])),
        x.device,
        *(part for operand in operands for part in operand),
        rstd,
        factor,
        x if weight is None else weight.contiguous(),
        found,
        inner,
        hidden,
        float(weight_offset),
        HAS_WEIGHT=weight is not None,
        HAS_GRAD_SUM=grad_sum is not None,
        **options,
    )
    return found
