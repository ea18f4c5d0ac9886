"""RMSNorm, SwiGLU and rotary position embeddings in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastpar.comm import Communicator, GroupLike, copy_to, reduce_from, reduce_scatter_sequence
from fastpar.contracts import communicator, compute_dtype
from fastpar.contracts.transformer import check_rms_norm, check_rotary, check_swiglu

# ---- RMSNorm ---------------------------------------------------------------------------------------------------------


def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    group: GroupLike = None,
) -> Tensor:
    """See `fastpar.ops.rms_norm`."""
    out: Tensor = normalised(x, None, weight, eps, weight_offset, communicator(group))
    return out


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    group: GroupLike = None,
) -> tuple[Tensor, Tensor]:
    """See `fastpar.ops.add_rms_norm`."""
    both: tuple[Tensor, Tensor] = normalised(x, residual, weight, eps, weight_offset, communicator(group))
    return both


def normalised(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    weight_offset: float,
    comm: Communicator | None = None,
) -> Any:
    """out, or (out, h) with a residual."""
    check_rms_norm(x, weight, eps, residual, weight_offset)
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
    return add_rms_norm(y, residual, weight, eps=eps, weight_offset=weight_offset)


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
    return add_rms_norm(y, residual, weight, eps=eps, weight_offset=weight_offset)


# ---- SwiGLU ----------------------------------------------------------------------------------------------------------


def swiglu(gate_up: Tensor, up: Tensor | None = None) -> Tensor:
    """See `fastpar.ops.swiglu`."""
    check_swiglu(gate_up, up)
    gate, up = gate_up.chunk(2, dim=-1) if up is None else (gate_up, up)
    compute = torch.float64 if gate.dtype == torch.float64 else torch.float32
    return (F.silu(gate.to(compute)) * up.to(compute)).to(gate.dtype)


# ---- rotary embeddings -----------------------------------------------------------------------------------------------


def rotated(x: Tensor, cos: Tensor, sin: Tensor, *, heads_first: bool, interleaved: bool) -> Tensor:
    """x with its pairs turned; tables as `check_rotary` gives them."""
    half = cos.shape[-1]
    heads = -3 if heads_first else -2
    c, s = cos.unsqueeze(heads), sin.unsqueeze(heads)
    turned, rest = x[..., : 2 * half].to(cos.dtype), x[..., 2 * half :]
    first, second = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.split(half, -1)
    a, b = first * c - second * s, second * c + first * s
    together = torch.stack((a, b), -1).flatten(-2) if interleaved else torch.cat((a, b), -1)
    return torch.cat((together.to(x.dtype), rest), -1)


def rotary_embedding(
    x: Tensor,
    *,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    positions: Tensor | None = None,
    theta: float = 10000.0,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    layout: str = "bshd",
    inplace: bool = False,
) -> Tensor:
    """See `fastpar.ops.rotary_embedding`."""
    cos, sin = check_rotary(x, cos, sin, positions, theta, rotary_dim, layout)
    out = rotated(x, cos, sin, heads_first=layout == "bhsd", interleaved=interleaved)
    return x.copy_(out) if inplace else out
