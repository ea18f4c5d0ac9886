"""SwiGLU: the gated activation in the middle of a feed-forward block, silu(gate) * up.

Forward reads gate and up and writes the product, rounded once. Backward reads them and the upstream gradient, and
writes both gradients in one pass. Nothing but the inputs is saved: the sigmoid is computed again. In eager torch the
same takes a temporary for silu(gate), rounded to the dtype, and three more kernels in backward.

A packed tensor holds the gate's features and then up's in every row, as the output of one fused projection does
(Megatron-LM's layout). Kernels take the distance of rows, so both halves are read where they are, and backward writes
the packed gradient; halves made by chunk() would be copied first by every kernel that wants contiguous inputs.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from fastpar import _ext
from fastpar.arguments import checked
from fastpar.contracts.transformer import check_swiglu
from fastpar.ops._autograd import first_derivative_only, needs_grad
from fastpar.ops._backends import fallback, has_kernels, op_on_cuda

_ext.load()


# ---- CUDA ------------------------------------------------------------------------------------------------------------


def _forward_cuda(gate: Tensor, up: Tensor | None) -> Tensor:
    from fastpar.kernels import swiglu as kernels

    return kernels.forward(gate, up)


def _backward_cuda(grad_out: Tensor, gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    from fastpar.kernels import swiglu as kernels

    return kernels.backward(grad_out, gate, up)


_forward = op_on_cuda("swiglu", _forward_cuda)
_backward = op_on_cuda("swiglu_backward", _backward_cuda)


# ---- fakes -----------------------------------------------------------------------------------------------------------


@torch.library.register_fake("fastpar::swiglu")
def _forward_fake(gate: Tensor, up: Tensor | None) -> Tensor:
    features = gate.shape[-1] // 2 if up is None else gate.shape[-1]
    return gate.new_empty((*gate.shape[:-1], features))


@torch.library.register_fake("fastpar::swiglu_backward")
def _backward_fake(grad_out: Tensor, gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), gate.new_empty((0,) if up is None else up.shape)


# ---- autograd --------------------------------------------------------------------------------------------------------


class _Swiglu(torch.autograd.Function):
    """Outside the ops, so that a call without gradients costs nothing."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor | None) -> Tensor:
        ctx.save_for_backward(gate, up)
        return cast(Tensor, _forward(gate, up))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        gate, up = ctx.saved_tensors
        with torch.no_grad():
            found = _backward(grads[0], gate, up)
        alternative = "silu(gate) * up of torch.nn.functional"
        grad_gate, grad_up = (first_derivative_only(g, "swiglu", alternative, grads[0], gate, up) for g in found)
        return grad_gate, None if up is None else grad_up


# ---- public ----------------------------------------------------------------------------------------------------------


@checked(meta=True)
def swiglu(gate_up: Tensor, up: Tensor | None = None) -> Tensor:
    """silu(gate) * up, from one packed tensor or from two.

        gate_up  [..., 2F]   the gate's F features, then up's; or with `up`: the gate [..., F]
        up       [..., F]    optional
        out      [..., F]    same dtype: float32, bfloat16, float16 or float64; contiguous

        s        sigmoid(gate)                                        computed in float32 (float64 for float64)
        forward  out = gate * s * up                                  rounded once
        dgrad    dup = dout * gate * s       dgate = dout * up * s * (1 + gate * (1 - s))

    Rows (runs along the last dim) may be any distance apart, as those of a slice are; a tensor whose last dim is not
    contiguous is copied. The gradient of a packed tensor is packed. No collective; saved for backward: the inputs.
    Infinities and NaN give what torch gives, so gate = -inf gives NaN.

    On CPU a C++ kernel; on CUDA a Triton kernel, tested on an H200, not timed; elsewhere, and on CUDA without Triton,
    `fastpar.reference.swiglu`.

    Worked example: gate_up [0, 1, 2, 3], so gate [0, 1] and up [2, 3]: out = [0, 2.19318], and with dout [1, 1] the
    gradient is [1, 2.78301, 0, 0.73106].

    Raises:
        TypeError: a dtype that is not floating, or two dtypes.
        ValueError: an odd last dim without `up`; shapes or devices that differ.
    """
    check_swiglu(gate_up, up)
    if not has_kernels(gate_up):
        return cast(Tensor, fallback("swiglu")(gate_up, up))
    if needs_grad(gate_up, up):
        return cast(Tensor, _Swiglu.apply(gate_up, up))
    return cast(Tensor, _forward(gate_up, up))
