"""All-reduce, residual and RMSNorm in plain PyTorch."""

from __future__ import annotations

from torch import Tensor

from fastpar.comm.autograd import reduce_from
from fastpar.comm.communicator import GroupLike
from fastpar.reference.rms_norm import rms_norm


def all_reduce_rms_norm(
    x: Tensor,
    weight: Tensor | None,
    *,
    group: GroupLike,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """See `fastpar.ops.all_reduce_rms_norm`."""
    y = reduce_from(x, group)
    if residual is None:
        return rms_norm(y, weight, eps=eps, weight_offset=weight_offset), y
    return rms_norm(y, weight, eps=eps, residual=residual, weight_offset=weight_offset)
