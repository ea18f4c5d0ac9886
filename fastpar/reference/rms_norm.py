"""RMSNorm in plain PyTorch, and the checks of its arguments."""

from __future__ import annotations

import math
from typing import overload

import torch
from torch import Tensor

from fastpar.comm import GroupLike, copy_to, reduce_from
from fastpar.contracts.vocab_shard import communicator

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, float32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_arguments(
    x: Tensor, weight: Tensor | None, eps: float, residual: Tensor | None, weight_offset: float
) -> None:
    """Raises TypeError or ValueError with the values if the arguments do not fit `rms_norm`."""
    if x.dtype not in DTYPES:
        raise TypeError(f"x must be one of {', '.join(map(str, DTYPES))}, got {x.dtype}")
    if x.dim() == 0:
        raise ValueError("x must have at least one dim, the one that is normalised; got a scalar")
    if not 0.0 <= eps < math.inf:
        raise ValueError(f"eps must be finite and not negative, got {eps}")
    if not -math.inf < weight_offset < math.inf:
        raise ValueError(f"weight_offset must be finite, got {weight_offset}")
    if weight is None and weight_offset != 0.0:
        raise ValueError(f"weight_offset ({weight_offset}) is added to a weight, but weight is None")
    if weight is not None:
        if weight.dtype not in DTYPES:
            raise TypeError(f"weight must be one of {', '.join(map(str, DTYPES))}, got {weight.dtype}")
        if weight.shape != x.shape[-1:]:
            raise ValueError(f"weight must be [{x.shape[-1]}], the last dim of x, got {tuple(weight.shape)}")
        if weight.device != x.device:
            raise ValueError(f"x and weight must be on one device, got {x.device} and {weight.device}")
    if residual is not None:
        if residual.dtype != x.dtype:
            raise TypeError(f"x and residual must have one dtype, got {x.dtype} and {residual.dtype}")
        if residual.shape != x.shape:
            raise ValueError(f"x and residual must have one shape, got {tuple(x.shape)} and {tuple(residual.shape)}")
        if residual.device != x.device:
            raise ValueError(f"x and residual must be on one device, got {x.device} and {residual.device}")


@overload
def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    *,
    eps: float = ...,
    residual: None = ...,
    weight_offset: float = ...,
    group: GroupLike = ...,
) -> Tensor: ...
@overload
def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    *,
    eps: float = ...,
    residual: Tensor,
    weight_offset: float = ...,
    group: GroupLike = ...,
) -> tuple[Tensor, Tensor]: ...
def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    *,
    eps: float = 1e-6,
    residual: Tensor | None = None,
    weight_offset: float = 0.0,
    group: GroupLike = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """See `fastpar.ops.rms_norm`."""
    comm = communicator(group)
    check_arguments(x, weight, eps, residual, weight_offset)
    summed = x if residual is None else x + residual
    h = summed.to(compute_dtype(x.dtype))
    if comm is None:
        mean = h.square().mean(-1, keepdim=True)
    else:
        # Every rank's part of the row depends on the sum: its gradients are added, too.
        total = copy_to(reduce_from(h.square().sum(-1, keepdim=True), comm), comm)
        mean = total / comm.all_reduce(h.new_tensor([x.shape[-1]]))
    out = h * torch.rsqrt(mean + eps)
    if weight is not None:
        out = out * (weight.to(h.dtype) + weight_offset)
    return out.to(x.dtype) if residual is None else (out.to(x.dtype), summed)
