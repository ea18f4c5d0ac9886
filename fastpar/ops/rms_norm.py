"""RMSNorm, with the addition of a residual stream fused in front of it.

For every row of H elements:

    h     = x + residual                         rounded to x's dtype; h = x without a residual
    rstd  = 1 / sqrt(mean(h^2) + eps)
    w     = weight_offset + weight               1 without a weight
    out   = h * rstd * w                         rounded once
    g     = dout * w
    dh    = rstd * (g - h * rstd^2 * mean(g * h)) + dh_in        the gradient of x and of the residual alike
    dw    = sum over rows of dout * h * rstd

The statistics are those of the rounded h: backward reads h again, and what it differentiates is then what forward
computed. dh_in is the gradient that arrives at h from the residual stream, added in the same pass instead of by a
kernel of its own.

Saved for backward: h (or x, which is no copy), rstd in float32, 4 bytes a row, and the weight. dw is a sum over all
rows; its order is fixed by the shape alone, so its bits do not depend on the number of threads (on CUDA: they do not
change on one kind of device).

One rounding, at the end. Hugging Face's Llama rounds h * rstd to the input's dtype before it multiplies with the
weight, which costs a rounding more and is not offered: it would not give the same bits anyway, since sums of squares in
another order differ in their last bit.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from fastpar import _ext
from fastpar.arguments import checked
from fastpar.contracts import communicator, compute_dtype
from fastpar.ops._autograd import first_derivative_only, needs_grad
from fastpar.ops._backends import fallback, has_kernels, op_on_cuda
from fastpar.ops._rms_norm_split import check_on_all_ranks, split_rms_norm

if TYPE_CHECKING:
    from fastpar.comm import GroupLike

_ext.load()


# ---- CUDA ------------------------------------------------------------------------------------------------------------


def _forward_cuda(x: Tensor, weight: Tensor | None, eps: float, weight_offset: float) -> tuple[Tensor, Tensor]:
    from fastpar.kernels import rms_norm as kernels

    out, _, rstd = kernels.forward(x, None, weight, eps, weight_offset)
    return out, rstd


def _add_forward_cuda(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, weight_offset: float
) -> tuple[Tensor, Tensor, Tensor]:
    from fastpar.kernels import rms_norm as kernels

    return kernels.forward(x, residual, weight, eps, weight_offset)


@functools.cache  # torch counts devices and looks at this one again
def _multiprocessors(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _backward_cuda(
    grad_out: Tensor,
    grad_sum: Tensor | None,
    x: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    weight_offset: float,
    needs_grad_x: bool,
    needs_grad_weight: bool,
    weight_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    from fastpar.kernels import rms_norm as kernels

    num_programs = 2 * _multiprocessors(x.device.index)
    return kernels.backward(
        grad_out, grad_sum, x, rstd, weight, weight_offset, needs_grad_x, needs_grad_weight, num_programs, weight_dtype
    )


_forward = op_on_cuda("rms_norm", _forward_cuda)
_add_forward = op_on_cuda("add_rms_norm", _add_forward_cuda)
_backward = op_on_cuda("rms_norm_backward", _backward_cuda)


# ---- fakes -----------------------------------------------------------------------------------------------------------


def _rstd_fake(x: Tensor) -> Tensor:
    return x.new_empty((x.shape[:-1].numel(),), dtype=compute_dtype(x.dtype))


@torch.library.register_fake("fastpar::rms_norm")
def _forward_fake(x: Tensor, weight: Tensor | None, eps: float, weight_offset: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), _rstd_fake(x)


@torch.library.register_fake("fastpar::add_rms_norm")
def _add_forward_fake(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, weight_offset: float
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape), _rstd_fake(x)


@torch.library.register_fake("fastpar::rms_norm_backward")
def _backward_fake(
    grad_out: Tensor,
    grad_sum: Tensor | None,
    x: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    weight_offset: float,
    needs_grad_x: bool,
    needs_grad_weight: bool,
) -> tuple[Tensor, Tensor]:
    grad_x = x.new_empty(x.shape if needs_grad_x else (0,))
    return grad_x, x.new_empty((x.shape[-1] if needs_grad_weight else 0,), dtype=compute_dtype(x.dtype))


# ---- autograd --------------------------------------------------------------------------------------------------------


class _RmsNorm(torch.autograd.Function):
    """Outside the ops, so that a call without gradients costs nothing. Returns (out,) or (out, h)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, weight_offset: float
    ) -> tuple[Tensor, ...]:
        if residual is None:
            out, rstd = _forward(x, weight, eps, weight_offset)
            h, outputs = x, [out]
        else:
            out, h, rstd = _add_forward(x, residual, weight, eps, weight_offset)
            outputs = [out, h]
        ctx.save_for_backward(h, rstd, weight)
        ctx.weight_offset = weight_offset
        ctx.set_materialize_grads(False)  # where only one of the outputs is used
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        h, rstd, weight = ctx.saved_tensors
        grad_out, grad_h = grads[0], grads[1] if len(grads) > 1 else None
        if grad_out is None:  # out is not used: h is a sum like any other
            return grad_h, grad_h, None, None, None
        needs_x, needs_residual, needs_weight = ctx.needs_input_grad[:3]
        needs_h = needs_x or needs_residual
        with torch.no_grad():
            terms = (grad_h, h, rstd, weight, ctx.weight_offset, needs_h, needs_weight)
            grad, grad_weight = _backward(grad_out, *terms, weight_dtype=weight.dtype if needs_weight else None)
            if needs_weight:  # where its kernel has not rounded it
                grad_weight = grad_weight.to(weight.dtype)
        inputs = (grad_out, grad_h, h, weight)
        alternative = "torch.nn.functional.rms_norm"
        if needs_h:
            grad = first_derivative_only(grad, "rms_norm", alternative, *inputs)
        if needs_weight:
            grad_weight = first_derivative_only(grad_weight, "rms_norm", alternative, *inputs)
        return (
            grad if needs_x else None,
            grad if needs_residual else None,
            grad_weight if needs_weight else None,
            None,
            None,
        )


# ---- public ----------------------------------------------------------------------------------------------------------


@checked(meta=True, unless_agreed="group")
def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    group: GroupLike = None,
) -> Tensor:
    """Divide every row by its root mean square and scale it by a weight. With a residual: `add_rms_norm`.

        x         [..., H]   float32, bfloat16, float16 or float64; with a group this rank's H_r elements of every row
        weight    [H]        any of these dtypes, not necessarily x's; or None; with a group this rank's [H_r]
        out       [..., H]   x's dtype, contiguous

        forward  out = x * rstd * (weight_offset + weight), rstd = 1 / sqrt(mean(x^2) + eps)
        dgrad    dx = rstd * (g - x * rstd^2 * mean(g * x)),  g = dout * (weight_offset + weight)
        wgrad    dweight = sum over rows of dout * x * rstd, summed in float32, rounded to the weight's dtype

    Computed in float32 (float64 for float64) and rounded once. Rows may be any distance apart, as those of a slice are;
    a tensor whose last dim is not contiguous is copied. Saved for backward: x and 4 bytes a row.

    Without a group there is no collective: where tokens are split over ranks, dweight is this rank's share, to be
    summed like any gradient of a replicated parameter. With a group the elements of every row are split over its ranks,
    in any sizes, 0 among them, as the queries of all heads are under tensor parallelism (OLMo-2's q_norm). Forward is
    one all-reduce of a float32 a row and three more (float64 for float64), backward one of a float32 a row if x (or a
    residual) needs a gradient; dx and dweight are this rank's elements, whole. Every rank has the same bits of rstd.

    On CPU a C++ kernel; on CUDA a Triton kernel, tested on an H200, not timed; elsewhere, and on CUDA without Triton,
    `fastpar.reference.rms_norm`.

    Args:
        eps: added to the mean of squares.
        weight_offset: 1.0 for models that store the weight's deviation from one (Gemma).
        group: ProcessGroup, 1-D DeviceMesh, Communicator, or None for rows that are whole. Under torch.compile it has
            to be a Communicator made outside.

    Worked example: x [3, 4], weight [1, 2], eps 0: rstd = 0.282843, out = [0.848528, 2.262742]; with dout [1, 0]: dx =
    [0.181019, -0.135765] and dweight = [0.848528, 0].

    Raises:
        TypeError: a dtype that is not floating.
        ValueError: shapes or devices that do not fit; a negative eps; a weight_offset without a weight. With a group
            and tensors on the CPU, on every rank, and so for gradients that some ranks need and others do not.
        CommError: as `Communicator` raises it: other numbers of rows on another rank.
    """
    return cast(Tensor, _norm(x, None, weight, eps, weight_offset, group))


@checked(meta=True, unless_agreed="group")
def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    group: GroupLike = None,
) -> tuple[Tensor, Tensor]:
    """Add x to the residual stream, and normalise the sum: `rms_norm` of x + residual in one pass over memory.

        x         [..., H]   see `rms_norm`, as all that is not said here
        residual  [..., H]   the stream that x is added to; x's dtype
        out       [..., H]   the normalised sum
        h         [..., H]   the sum, which the next block adds to; the result is (out, h)

        forward  h = x + residual, rounded to x's dtype; out = rms_norm(h, weight)
        dgrad    dx = dresidual = rstd * (g - h * rstd^2 * mean(g * h)) + dh,  g = dout * (weight_offset + weight)

    Saved for backward: h and 4 bytes a row.

    Raises:
        TypeError: also for a residual with a dtype that is not x's.
    """
    return cast("tuple[Tensor, Tensor]", _norm(x, residual, weight, eps, weight_offset, group))


def _norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, weight_offset: float, group: GroupLike
) -> Any:
    """out, or (out, h) with a residual."""
    comm = communicator(group)
    check_on_all_ranks(x, weight, eps, residual, weight_offset, comm)
    if comm is not None:
        return split_rms_norm(x, weight, comm, eps=eps, residual=residual, weight_offset=weight_offset)
    if not has_kernels(x):
        return fallback("transformer").normalised(x, residual, weight, eps, weight_offset)
    if needs_grad(x, weight, residual):
        outputs = _RmsNorm.apply(x, residual, weight, eps, weight_offset)
        return outputs[0] if residual is None else outputs
    if residual is None:
        return _forward(x, weight, eps, weight_offset)[0]
    return _add_forward(x, residual, weight, eps, weight_offset)[:2]
