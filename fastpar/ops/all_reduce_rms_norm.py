"""The end of a row-parallel region and the norm behind it: all-reduce, residual and RMSNorm.

For partial sums x of W ranks, rows of H elements:

    y     = sum over ranks of x        in rank order, float32, rounded to x's dtype
    h     = y + residual               rounded; h = y without a residual
    rstd  = 1 / sqrt(mean(h^2) + eps)
    out   = h * rstd * (weight_offset + weight)

    dx    = dresidual = the gradient of h in `fastpar.ops.rms_norm`, which is the same on every rank: no communication

On CUDA ranks with `fastpar.comm.SymmetricCollectives` one kernel does all of it: what comes out of the inboxes is
normalised before it is written. A group that `fastpar.comm.calibrate` gave them has that kernel where its all-reduce
goes over symmetric memory and is of few bytes, since the kernel sends all of x to every rank. Anywhere else the two ops
follow each other. y and h have the same bits over symmetric memory either way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastpar import _ext
from fastpar.arguments import checked
from fastpar.comm.autograd import reduce_from
from fastpar.comm.communicator import Communicator, GroupLike
from fastpar.comm.recompute_cache import kept
from fastpar.comm.symmetric.collectives import DTYPES, ONE_SHOT_BYTES, SymmetricCollectives
from fastpar.comm.symmetric.switch import collectives_for
from fastpar.contracts.transformer import check_rms_norm
from fastpar.ops._autograd import first_derivative_only
from fastpar.ops.rms_norm import add_rms_norm, rms_norm

_ext.load()


# ---- autograd --------------------------------------------------------------------------------------------------------


class _Fused(torch.autograd.Function):
    """(out, h) by the kernel; backward is that of RMSNorm, since every rank has the whole gradient of h."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        group: SymmetricCollectives,
        eps: float,
        weight_offset: float,
    ) -> tuple[Tensor, Tensor]:
        options: dict[str, Any] = {"residual": residual, "eps": eps, "weight_offset": weight_offset}
        out, h, rstd = kept(lambda: group.all_reduce_rms_norm(x, weight, **options))
        ctx.save_for_backward(h, rstd, weight)
        ctx.weight_offset = weight_offset
        ctx.set_materialize_grads(False)
        return out, h

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        h, rstd, weight = ctx.saved_tensors
        grad_out, grad_h = grads
        if grad_out is None:
            return grad_h, grad_h, None, None, None, None
        needs_x, needs_residual, needs_weight = ctx.needs_input_grad[:3]
        needs_h = needs_x or needs_residual
        with torch.no_grad():
            grad, grad_weight = torch.ops.fastpar.rms_norm_backward(
                grad_out, grad_h, h, rstd, weight, ctx.weight_offset, needs_h, needs_weight
            )
            if needs_weight:
                grad_weight = grad_weight.to(weight.dtype)
        inputs = (grad_out, grad_h, h, weight)
        if needs_h:
            grad = first_derivative_only(grad, "all_reduce_rms_norm", "fastpar.reference.all_reduce_rms_norm", *inputs)
        return (
            grad if needs_x else None,
            grad if needs_residual else None,
            grad_weight if needs_weight else None,
            None,
            None,
            None,
        )


class _AllReducedRmsNorm(torch.autograd.Function):
    """y = all_reduce(x); dx = dy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: SymmetricCollectives) -> Tensor:
        return kept(lambda: group.all_reduce(x))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def _calibrated(group: GroupLike, x: Tensor) -> GroupLike | SymmetricCollectives:
    """The group's own symmetric memory, where it takes that and one exchange is not dearer than two."""
    if not x.is_cuda or torch.compiler.is_compiling():
        return group
    comm = Communicator.of(group)
    found: SymmetricCollectives | None = collectives_for(comm, "all_reduce", x)
    return comm if found is None or x.nbytes * (comm.size - 1) > ONE_SHOT_BYTES else found


# ---- public ----------------------------------------------------------------------------------------------------------


@checked()
def all_reduce_rms_norm(
    x: Tensor,
    weight: Tensor | None,
    *,
    group: GroupLike | SymmetricCollectives,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """(out, h): the sum of x over the ranks, plus the residual, is h; out is its RMSNorm.

        x         [..., H]   this rank's partial sums
        residual  [..., H]   as x, the same on every rank; optional
        weight    [H]        as in `rms_norm`
        out, h    [..., H]   x's dtype, the same on every rank

        forward  h = all_reduce(x) + residual; out = h * rstd * (weight_offset + weight)
        dgrad    dx = dresidual = that of rms_norm: no communication, the gradients are the same on every rank
        wgrad    dweight: the whole gradient, on every rank

    One all-reduce of x in forward. With SymmetricCollectives (CUDA) and a weight of x's dtype it is one kernel, not
    measured yet; with any other group `all_reduce` and `rms_norm` follow each other, but for one that
    `fastpar.comm.calibrate` has given symmetric memory.

    Worked example: x [1, 1] on rank 0 and [1, 2] on rank 1, residual [1, 1], weight [1, 2], eps 0: h = [3, 4] and out =
    [0.848528, 2.262742] on both.

    Raises:
        TypeError, ValueError: as `rms_norm`; also for SymmetricCollectives of virtual ranks, which have no gradients of
            their own.
        CommError: the all-reduce failed.
    """
    check_rms_norm(x, weight, eps, residual, weight_offset)
    if not isinstance(group, SymmetricCollectives):
        group = _calibrated(group, x)
    if isinstance(group, SymmetricCollectives):
        if group.is_virtual:
            raise ValueError("group must be one of real ranks; virtual ranks: SymmetricCollectives.all_reduce_rms_norm")
        if x.dtype in DTYPES and (weight is None or weight.dtype == x.dtype):
            out, h = _Fused.apply(x, residual, weight, group, eps, weight_offset)
            return out, h
        y = _AllReducedRmsNorm.apply(x, group)
    else:
        y = reduce_from(x, group)
    if residual is None:
        return rms_norm(y, weight, eps=eps, weight_offset=weight_offset), y
    return add_rms_norm(y, residual, weight, eps=eps, weight_offset=weight_offset)
