"""Which kernels serve the ops of attention where tensors are on CUDA.

    bfloat16, float16, masks and head dims that torch's kernels have     torch's cuDNN or flash attention, forward
    float32, bfloat16, float16 with head dims up to 256                  Triton, where it is installed
    everything else                                                      blocks of plain PyTorch

The first that supports a call has it; `_attention_torch.py` says what torch's have, and when they serve backward. The
table of tiles stays on the host; what the kernels need of it is made there once, and kept.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor

from fastpar.ops import _attention_blocks, _attention_torch
from fastpar.ops._backends import has_kernels, triton


def _kernels(q: Tensor, v: Tensor) -> ModuleType | None:
    """The Triton kernels, where they have what the call needs."""
    if not has_kernels(q):
        return None
    kernels = triton("attention")
    return kernels if kernels.takes(q, v) else None


def forward(
    q: Tensor, k: Tensor, v: Tensor, tiles: Tensor, tile_offsets: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor]:
    """The op fastpar::attention_forward."""
    scale, softcap, *dropout, out_dtype = options
    if softcap == 0.0 and dropout[0] == 0.0:
        found = _attention_torch.forward(q, k, v, tiles, tile_offsets, scale, out_dtype)
        if found is not None:
            return found
    kernels = _kernels(q, v)
    if kernels is None:
        return _attention_blocks.forward(q, k, v, tiles, tile_offsets, *options)
    hashed = kernels.DropoutHash(*dropout)
    return kernels.attention_forward(q, k, v, tiles, tile_offsets, scale, softcap, hashed, out_dtype)


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    tiles: Tensor,
    tile_offsets: Tensor | None,
    *options: Any,
    grad_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The op fastpar::attention_backward, whose gradients are rounded here where grad_dtype says to what."""
    kernels = _kernels(q, v)
    if kernels is None:
        dq, dk, dv = _attention_blocks.backward(grad_out, q, k, v, lse, delta, tiles, tile_offsets, *options)
        return (dq, dk, dv) if grad_dtype is None else (dq.to(grad_dtype), dk.to(grad_dtype), dv.to(grad_dtype))
    scale, softcap, *dropout = options
    hashed = kernels.DropoutHash(*dropout)
    return kernels.attention_backward(
        grad_out, q, k, v, lse, delta, tiles, tile_offsets, scale, softcap, hashed, grad_dtype or torch.float32
    )


def row_delta(grad_out: Tensor, out: Tensor, grad_lse: Tensor | None) -> Tensor:
    """The op fastpar::attention_row_delta: one launch."""
    kernels = _kernels(out, out)
    if kernels is None:
        return _attention_blocks.row_delta(grad_out, out, grad_lse)
    return cast(Tensor, kernels.row_delta(grad_out, out, grad_lse))


torch.library.impl("fastpar::attention_forward", "cuda", forward)
torch.library.impl("fastpar::attention_backward", "cuda", backward)
