"""Dropout on one rank's block of a larger tensor, with the mask of the whole.

The mask is a hash of the seed and the element's global index (fastpar.reference.dropout), so that it needs no generator
state per region, as Megatron-LM keeps, no communication, and nothing saved for backward; and it is the same in every
layout. On CUDA the hash stays in the registers of a Triton kernel (tested on an H200, not timed).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from fastpar import _ext
from fastpar.arguments import checked
from fastpar.ops._backends import fallback, has_kernels

_ext.load()
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def _launch(x: Tensor, p: float, seed: int, offset: list[int], global_shape: list[int]) -> Tensor:
    if x.device.type == "cpu":
        return cast(Tensor, torch.ops.fastpar.sharded_dropout(x, p, seed, offset, global_shape))
    if x.device.type == "cuda" and has_kernels(x) and x.dtype in _DTYPES:
        return cast(Tensor, torch.ops.fastpar.sharded_dropout(x, p, seed, offset, global_shape))
    return cast(Tensor, fallback("sharded_dropout")(x, p, seed=seed, offset=offset, global_shape=global_shape))


@torch.library.impl("fastpar::sharded_dropout", "cuda")
def _cuda(x: Tensor, p: float, seed: int, offset: list[int], global_shape: list[int]) -> Tensor:
    from fastpar.kernels import dropout as kernels

    return kernels.sharded_dropout(x, p, seed, offset, global_shape)


@torch.library.register_fake("fastpar::sharded_dropout")
def _fake(x: Tensor, p: float, seed: int, offset: list[int], global_shape: list[int]) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


class _ShardedDropout(torch.autograd.Function):
    """The op is linear in x with a diagonal matrix, so its backward is the op itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, seed: int, offset: list[int], global_shape: list[int]) -> Tensor:
        ctx.arguments = (p, seed, offset, global_shape)
        return _launch(x, p, seed, offset, global_shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True
            return _ShardedDropout.apply(grads[0], *ctx.arguments), None, None, None, None
        return _launch(grads[0], *ctx.arguments), None, None, None, None


@checked(meta=True)
def sharded_dropout(
    x: Tensor,
    p: float,
    *,
    seed: int,
    offset: Sequence[int] | None = None,
    global_shape: Sequence[int] | None = None,
) -> Tensor:
    """Zero elements of x with probability p and scale the rest by 1 / (1 - p), by the mask of the global tensor.

        x             [n_0, ..., n_d]   this rank's block, any floating dtype
        offset        d + 1 ints        where the block starts in the global tensor (default: zeros)
        global_shape  d + 1 ints        shape of the global tensor (default: x's)
        out           as x

        forward  out_i = x_i * keep(seed, index_i) / (1 - p)      dgrad  dx_i = dout_i * keep(seed, index_i) / (1 - p)

    keep is a hash of the seed and the element's linear index in the global tensor, compared with p to 24 bits. No
    collective; nothing is saved but the seed. Errors: ValueError for p outside [0, 1] or a block that does not lie
    inside the global tensor; TypeError for an integer x.
    """
    offset = [0] * x.dim() if offset is None else list(offset)
    global_shape = list(x.shape) if global_shape is None else list(global_shape)
    if not x.is_floating_point():
        raise TypeError(f"x must be floating point, got {x.dtype}")
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"p must be between 0 and 1, got {p}")
    if len(offset) != x.dim() or len(global_shape) != x.dim():
        raise ValueError(f"offset {offset} and global_shape {global_shape} need one entry per dim of x ({x.dim()})")
    blocks = zip(offset, x.shape, global_shape, strict=True)
    if any(start < 0 or start + size > extent for start, size, extent in blocks):
        raise ValueError(
            f"x, a block of shape {list(x.shape)} at {offset}, does not lie inside global_shape {global_shape}"
        )
    if x.requires_grad and torch.is_grad_enabled():
        return cast(Tensor, _ShardedDropout.apply(x, p, seed, offset, global_shape))
    return _launch(x, p, seed, offset, global_shape)
