"""RMSNorm of rows whose elements are split over ranks; `fastpar.ops.rms_norm` with a group. For H_r elements here:

    forward   s    = sum of h^2 over the H_r elements                 h = x + residual, rounded
              S, H = all_reduce(s), all_reduce(H_r)                   one collective: a number a row, and three more
              out  = h * rstd * w,  rstd = 1 / sqrt(S / H + eps)      every rank has the same bits of rstd
    backward  p    = sum of g * h over the H_r elements               g = dout * w;  dw in the same pass
              P    = all_reduce(p)                                    a number a row; only where dx is wanted
              dx   = rstd * (g - h * rstd^2 * P / H) + dh

The three numbers behind the rows are H_r, whether this rank's arguments are wrong, and whether it will have a backward
that communicates: what is wrong on one rank is an error on all, where the answer can be read without waiting for a
device.

Saved for backward: h (or x), rstd in float32, 4 bytes a row, the weight, and H.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from fastpar import _ext
from fastpar.comm import CommError, Communicator
from fastpar.comm.recompute_cache import kept
from fastpar.contracts import compute_dtype
from fastpar.contracts.transformer import check_rms_norm
from fastpar.ops._autograd import first_derivative_only, needs_grad
from fastpar.ops._backends import fallback, has_kernels

_ext.load()
_squares = torch.ops.fastpar.rms_norm_squares
_scale = torch.ops.fastpar.rms_norm_scale
_products = torch.ops.fastpar.rms_norm_products
_grad_x = torch.ops.fastpar.rms_norm_grad_x


# ---- CUDA ------------------------------------------------------------------------------------------------------------


@torch.library.impl("fastpar::rms_norm_squares", "cuda")
def _squares_cuda(x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    from fastpar.kernels import rms_norm_split as kernels

    return kernels.squares(x, residual)


@torch.library.impl("fastpar::rms_norm_scale", "cuda")
def _scale_cuda(x: Tensor, rstd: Tensor, weight: Tensor | None, weight_offset: float) -> Tensor:
    from fastpar.kernels import rms_norm_split as kernels

    return kernels.scale(x, rstd, weight, weight_offset)


@torch.library.impl("fastpar::rms_norm_products", "cuda")
def _products_cuda(
    grad_out: Tensor, x: Tensor, rstd: Tensor, weight: Tensor | None, weight_offset: float, needs_grad_weight: bool
) -> tuple[Tensor, Tensor]:
    from fastpar.kernels import rms_norm as whole_rows
    from fastpar.kernels import rms_norm_split as kernels

    num_programs = 2 * torch.cuda.get_device_properties(x.device).multi_processor_count
    _, grad_weight = whole_rows.backward(
        grad_out, None, x, rstd, weight, weight_offset, False, needs_grad_weight, num_programs
    )
    return kernels.products(grad_out, x, weight, weight_offset), grad_weight


@torch.library.impl("fastpar::rms_norm_grad_x", "cuda")
def _grad_x_cuda(
    grad_out: Tensor,
    grad_sum: Tensor | None,
    x: Tensor,
    rstd: Tensor,
    factor: Tensor,
    weight: Tensor | None,
    weight_offset: float,
) -> Tensor:
    from fastpar.kernels import rms_norm_split as kernels

    return kernels.grad_x(grad_out, grad_sum, x, rstd, factor, weight, weight_offset)


# ---- fakes -----------------------------------------------------------------------------------------------------------


def _row_numbers(x: Tensor) -> Tensor:
    return x.new_empty((x.shape[:-1].numel(),), dtype=compute_dtype(x.dtype))


@torch.library.register_fake("fastpar::rms_norm_squares")
def _squares_fake(x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    return _row_numbers(x), x.new_empty((0,) if residual is None else x.shape)


@torch.library.register_fake("fastpar::rms_norm_scale")
def _scale_fake(x: Tensor, rstd: Tensor, weight: Tensor | None, weight_offset: float) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.register_fake("fastpar::rms_norm_products")
def _products_fake(
    grad_out: Tensor, x: Tensor, rstd: Tensor, weight: Tensor | None, weight_offset: float, needs_grad_weight: bool
) -> tuple[Tensor, Tensor]:
    width = x.shape[-1] if needs_grad_weight else 0
    return _row_numbers(x), x.new_empty((width,), dtype=compute_dtype(x.dtype))


@torch.library.register_fake("fastpar::rms_norm_grad_x")
def _grad_x_fake(
    grad_out: Tensor,
    grad_sum: Tensor | None,
    x: Tensor,
    rstd: Tensor,
    factor: Tensor,
    weight: Tensor | None,
    weight_offset: float,
) -> Tensor:
    return x.new_empty(x.shape)


# ---- what the ranks tell each other ----------------------------------------------------------------------------------


def check_on_all_ranks(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    residual: Tensor | None,
    weight_offset: float,
    comm: Communicator | None,
) -> None:
    """`check_rms_norm`; with a group, a rank whose arguments are wrong takes part in the collective of the others, who
    raise as well. That needs an x with rows."""
    try:
        check_rms_norm(x, weight, eps, residual, weight_offset)
    except (TypeError, ValueError):
        if comm is not None and isinstance(x, Tensor) and x.dim() > 0 and not torch.compiler.is_compiling():
            squares = torch.zeros(x.shape[:-1].numel(), dtype=compute_dtype(x.dtype), device=x.device)
            with contextlib.suppress(CommError):
                sum_over_ranks(squares, x.shape[-1], comm, has_backward=False, is_bad=True)
        raise


def sum_over_ranks(
    squares: Tensor, hidden: int, comm: Communicator, *, has_backward: bool, is_bad: bool = False
) -> tuple[Tensor, Tensor]:
    """(sums over the ranks of squares [rows], elements of a whole row [1]); on CPU ValueError where ranks do not fit.

    One all-reduce of rows + 3 numbers.
    """
    terms = squares.new_zeros(3)
    for place, value in enumerate((hidden, has_backward, is_bad)):  # fills wait for no device, as a copy would
        terms[place].fill_(value)
    total = comm.all_reduce(torch.cat([squares, terms]))
    if total.is_cpu and not torch.compiler.is_compiling() and not is_bad:
        backwards, bad = total[-2:].tolist()
        if bad:
            raise ValueError("rms_norm: wrong arguments on another rank of the group: see its error")
        if backwards not in (0, comm.size):
            raise ValueError(
                f"rms_norm: x or the residual requires a gradient on {int(backwards)} of {comm.size} ranks of the "
                "group; it must on all or on none, since backward has a collective"
            )
    return total[:-3], total[-3:-2].clone()  # saved for backward, where Dynamo wants no views


# ---- the passes ------------------------------------------------------------------------------------------------------


def _forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    comm: Communicator,
    eps: float,
    weight_offset: float,
    has_backward: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, h, rstd, H)"""
    squares, summed = _squares(x, residual)
    h = x if residual is None else summed
    total, hidden = kept(lambda: sum_over_ranks(squares, x.shape[-1], comm, has_backward=has_backward))
    rstd = (total.double() / hidden + eps).rsqrt().to(squares.dtype)
    return _scale(h, rstd, weight, weight_offset), h, rstd, hidden


class _SplitRmsNorm(torch.autograd.Function):
    """Outside the ops, so that a call without gradients costs nothing. Returns (out,) or (out, h)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        comm: Communicator,
        eps: float,
        weight_offset: float,
        has_backward: bool,
    ) -> tuple[Tensor, ...]:
        out, h, rstd, hidden = _forward(x, residual, weight, comm, eps, weight_offset, has_backward)
        ctx.save_for_backward(h, rstd, hidden, weight)
        ctx.comm, ctx.weight_offset = comm, weight_offset
        ctx.set_materialize_grads(False)
        return (out,) if residual is None else (out, h)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        h, rstd, hidden, weight = ctx.saved_tensors
        # An out that is not used counts as one with a gradient of zeros, so that ranks stay in step.
        grad_out = torch.zeros_like(h) if grads[0] is None else grads[0]
        grad_h = grads[1] if len(grads) > 1 else None
        needs_x, needs_residual, needs_weight = ctx.needs_input_grad[:3]
        needs_h = needs_x or needs_residual
        grad = grad_weight = None
        with torch.no_grad():
            products, grad_weight = _products(grad_out, h, rstd, weight, ctx.weight_offset, needs_weight)
            if needs_h:
                total = ctx.comm.all_reduce(products)
                factor = (total.double() / hidden * rstd.double().square()).to(rstd.dtype)
                grad = _grad_x(grad_out, grad_h, h, rstd, factor, weight, ctx.weight_offset)
        inputs, alternative = (grad_out, grad_h, h, weight), "fastpar.reference.rms_norm"
        if grad is not None:
            grad = first_derivative_only(grad, "rms_norm", alternative, *inputs)
        if needs_weight:
            grad_weight = first_derivative_only(grad_weight.to(weight.dtype), "rms_norm", alternative, *inputs)
        return (
            grad if needs_x else None,
            grad if needs_residual else None,
            grad_weight if needs_weight else None,
            None,
            None,
            None,
            None,
        )


def split_rms_norm(
    x: Tensor,
    weight: Tensor | None,
    comm: Communicator,
    *,
    eps: float,
    residual: Tensor | None,
    weight_offset: float,
) -> Any:
    """`fastpar.ops.rms_norm` and `add_rms_norm` with checked arguments and a group of several ranks."""
    if not has_kernels(x):
        return fallback("transformer").normalised(x, residual, weight, eps, weight_offset, comm)
    if needs_grad(x, weight, residual):
        outputs = _SplitRmsNorm.apply(x, residual, weight, comm, eps, weight_offset, needs_grad(x, residual))
        return outputs[0] if residual is None else outputs
    out, h, _, _ = _forward(x, residual, weight, comm, eps, weight_offset, False)
    return out if residual is None else (out, h)
