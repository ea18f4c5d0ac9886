"""Reduce-scatter, residual and RMSNorm in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fastpar.comm.autograd import reduce_scatter_sequence
from fastpar.comm.communicator import GroupLike
from fastpar.reference.rms_norm import rms_norm


def reduce_scatter_rms_norm(
    x: Tensor,
    weight: Tensor | None,
    *,
    group: GroupLike,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    dim: int = -2,
    sizes: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """See `fastpar.ops.reduce_scatter_rms_norm`."""
    y = reduce_scatter_sequence(x, group, dim=dim, sizes=sizes)
    if residual is None:
        return rms_norm(y, weight, eps=eps, weight_offset=weight_offset), y
    return rms_norm(y, weight, eps=eps, residual=residual, weight_offset=weight_offset)
