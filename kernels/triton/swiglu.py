# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# (parameters of Triton kernels have no Python types)
"""SwiGLU for CUDA tensors; tested on an H200, not timed. The algebra is in fastpar.ops.swiglu.

One program takes BLOCK features of one row; gate and up may be the halves of one packed row, and the packed gradient is
written in place. The sigmoid is that of the CPU kernel: 1 / (1 + exp(-g)), so gate = -inf gives NaN, as in torch.

Worked example: gate [0, 1], up [2, 3]: out = [0, 2.19318]; with grad_out [1, 1], grad_gate = [1, 2.78301] and grad_up =
[0, 0.73106].
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastpar.kernels.launch import cdiv, launch, next_power_of_2
from fastpar.kernels.rows import as_rows, compute_dtype

BLOCK = 2048
NUM_WARPS = 4
_TL_DTYPE = {torch.float32: tl.float32, torch.float64: tl.float64}


@triton.jit
def swiglu_kernel(
    gate,
    gate_outer,
    gate_inner,
    up,
    up_outer,
    up_inner,
    out,
    inner,
    features,
    COMPUTE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out [rows, features] = silu(gate) * up; one program per BLOCK features of a row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < features
    gate += row // inner * gate_outer + row % inner * gate_inner
    up += row // inner * up_outer + row % inner * up_inner
    g = tl.load(gate + column, mask=mask).to(COMPUTE)
    u = tl.load(up + column, mask=mask).to(COMPUTE)
    s = 1.0 / (1.0 + tl.exp(-g))
    tl.store(out + row * features + column, (g * s * u).to(out.dtype.element_ty), mask=mask)


@triton.jit
def swiglu_backward_kernel(
    grad_out,
    grad_out_outer,
    grad_out_inner,
    gate,
    gate_outer,
    gate_inner,
    up,
    up_outer,
    up_inner,
    grad_gate,
    grad_up,
    grad_stride,
    inner,
    features,
    COMPUTE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Both gradients, in rows that are grad_stride apart; one program per BLOCK features of a row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < features
    grad_out += row // inner * grad_out_outer + row % inner * grad_out_inner
    gate += row // inner * gate_outer + row % inner * gate_inner
    up += row // inner * up_outer + row % inner * up_inner
    dout = tl.load(grad_out + column, mask=mask).to(COMPUTE)
    g = tl.load(gate + column, mask=mask).to(COMPUTE)
    u = tl.load(up + column, mask=mask).to(COMPUTE)
    s = 1.0 / (1.0 + tl.exp(-g))
    dout_s = dout * s
    place = row * grad_stride + column
    tl.store(grad_gate + place, (dout_s * u * (1.0 + g * (1.0 - s))).to(grad_gate.dtype.element_ty), mask=mask)
    tl.store(grad_up + place, (dout_s * g).to(grad_up.dtype.element_ty), mask=mask)


def _halves(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    if up is not None:
        return gate, up
    features = gate.shape[-1] // 2
    return gate[..., :features], gate[..., features:]


def _shape(features: int, rows: int, compute: torch.dtype) -> tuple[tuple[int, int], dict[str, Any]]:
    block = min(BLOCK, next_power_of_2(features))
    grid = (rows, cdiv(features, block))
    return grid, {"COMPUTE": _TL_DTYPE[compute], "BLOCK": block, "num_warps": NUM_WARPS}


def forward(gate: Tensor, up: Tensor | None) -> Tensor:
    """The op fastpar::swiglu."""
    gate, up = _halves(gate, up)
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if out.numel() == 0:
        return out
    features = gate.shape[-1]
    inner, operands = as_rows(gate, up)
    (gate, gate_outer, gate_inner), (up, up_outer, up_inner) = operands
    grid, options = _shape(features, out.numel() // features, compute_dtype(gate.dtype))
    launch(
        swiglu_kernel,
        grid,
        out.device,
        gate,
        gate_outer,
        gate_inner,
        up,
        up_outer,
        up_inner,
        out,
        inner,
        features,
        **options,
    )
    return out


def backward(grad_out: Tensor, gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    """The op fastpar::swiglu_backward: (gradient of the packed tensor, an empty tensor), or those of gate and up."""
    grad_gate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    grad_up = torch.empty((0,) if up is None else up.shape, dtype=gate.dtype, device=gate.device)
    if grad_gate.numel() == 0:
        return grad_gate, grad_up
    is_packed = up is None
    gate, up = _halves(gate, up)
    features = gate.shape[-1]
    inner, operands = as_rows(grad_out, gate, up)
    (grad_out, *grad_out_strides), (gate, *gate_strides), (up, *up_strides) = operands
    grid, options = _shape(features, grad_out.numel() // features, compute_dtype(gate.dtype))
    launch(
        swiglu_backward_kernel,
        grid,
        gate.device,
        grad_out,
        *grad_out_strides,
        gate,
        *gate_strides,
        up,
        *up_strides,
        grad_gate,
        grad_gate.view(-1)[features:] if is_packed else grad_up,
        2 * features if is_packed else features,
        inner,
        features,
        **options,
    )
    return grad_gate, grad_up
