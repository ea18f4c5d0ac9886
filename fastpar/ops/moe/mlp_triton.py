"""Where experts of one rank run in Triton: on CUDA tensors, without a synchronisation with the host.

`fastpar.kernels.moe_mlp` has the algebra. Between ranks, and for what the kernels do not take, the composition of
`moe_dispatch`, `grouped_linear` and `moe_combine` serves; between ranks that share memory, on request,
`transports/symmetric.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastpar.contracts.moe import ExpertRule
from fastpar.ops._autograd import first_derivative_only
from fastpar.ops._backends import has_kernels
from fastpar.ops.moe.plan import Padding
from fastpar.ops.moe.weights import ExpertWeights

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def applies(x: Tensor, first: Tensor, *, size: int, padding: Padding | None) -> bool:
    """Whether `moe_mlp` on these arguments over a group of `size` ranks is that of this file."""
    if x.device.type != "cuda" or size > 1 or padding not in (None, Padding()) or torch.is_autocast_enabled("cuda"):
        return False
    return has_kernels(x) and x.dtype in _DTYPES and first.dtype == x.dtype and not torch.compiler.is_compiling()


class TritonMoeMlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rule: ExpertRule, x: Tensor, indices: Tensor, weights: Tensor, add: Tensor | None,
                first: Tensor, second: Tensor, *biases: Tensor | None) -> Tensor:  # fmt: skip
        from fastpar.kernels import moe_mlp as kernels

        out, saved = kernels.forward(x, indices, weights, kernels.ExpertParams(first, second, *biases), rule, add)
        ctx.rule, ctx.add_dtype, ctx.groups = rule, None if add is None else add.dtype, saved.groups
        ctx.save_for_backward(x, indices, weights, first, second, *biases, *saved.placed, saved.hidden)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        from fastpar.kernels import moe_mlp as kernels
        from fastpar.kernels.moe_sort import PlacedPairs

        x, indices, weights, *rest = ctx.saved_tensors
        experts = kernels.ExpertParams(*rest[:4])
        saved = kernels.MlpSaved(PlacedPairs(*rest[4:-1]), rest[-1], ctx.groups)
        for_x, for_experts = ctx.needs_input_grad[1], any(ctx.needs_input_grad[5:])
        dout = grads[0].contiguous()
        with torch.no_grad():
            found = kernels.backward(
                dout, x, indices, weights, experts, ctx.rule, saved, for_x=for_x, for_experts=for_experts
            )
        inputs = (grads[0], x, weights, *experts)

        def once(grad: Tensor | None) -> Tensor | None:
            return (
                None if grad is None else first_derivative_only(grad, "moe_mlp", "fastpar.reference.moe_mlp", *inputs)
            )

        dadd = None if ctx.add_dtype is None else grads[0].to(ctx.add_dtype)
        dexperts = [None] * 4 if found.experts is None else [once(grad) for grad in found.experts]
        return None, once(found.x), None, once(found.weights), dadd, *dexperts


def moe_mlp(
    x: Tensor, indices: Tensor, weights: Tensor, experts: ExpertWeights, rule: ExpertRule, add: Tensor | None
) -> Tensor:
    """`fastpar.ops.moe_mlp` of one rank. Nobody looks at the values of `indices`, since that would be a
    synchronisation: one that is no expert goes nowhere."""
    if x.ndim != 2 or indices.ndim != 2 or len(indices) != len(x):
        raise ValueError(f"x must be [T, H] and indices [T, K], got {tuple(x.shape)} and {tuple(indices.shape)}")
    if indices.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"indices must be int64 or int32, got {indices.dtype}")
    if weights.shape != indices.shape:
        raise ValueError(f"weights must have the shape of indices, {tuple(indices.shape)}, got {tuple(weights.shape)}")
    out: Tensor = TritonMoeMlp.apply(rule, x, indices, weights, add, *experts)
    return out
