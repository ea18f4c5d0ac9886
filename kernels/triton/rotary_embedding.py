# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# (parameters of Triton kernels have no Python types)
"""Rotary embeddings for CUDA tensors; tested on an H200, not timed. The algebra is in fastpar.ops.rotary_embedding.

One program takes a position, whose angles it holds in registers, and its heads in turns, HEADS at a time.

Worked example: the head [1, 2, 3, 4], cos [0, 1], sin [1, 0]: halves [-3, 2, 1, 4], interleaved [-2, 1, 3, 4].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastpar.kernels.launch import launch, next_power_of_2
from fastpar.kernels.rows import compute_dtype

TILE = 2048  # elements of a program's step
NUM_WARPS = 4
_TL_DTYPE = {torch.float32: tl.float32, torch.float64: tl.float64}


@triton.jit
def rotary_kernel(
    x,
    x_batch,
    x_position,
    x_head,
    out,
    out_batch,
    out_position,
    out_head,
    cos,
    sin,
    table_batch,
    positions,
    heads,
    dim,
    half,
    sign,
    pair_step,
    pair_stride,
    COMPUTE: tl.constexpr,
    COPIES: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
):
    """The heads of one position; elements of a pair are pair_step apart, pairs pair_stride. COPIES: the rest of a head
    has to be written, too, REST elements at most."""
    batch = tl.program_id(0).to(tl.int64) // positions
    position = tl.program_id(0).to(tl.int64) % positions
    x += batch * x_batch + position * x_position
    out += batch * out_batch + position * out_position
    pair = tl.arange(0, PAIRS)[None, :]
    in_table = pair < half
    row = batch * table_batch + position * half
    c = tl.load(cos + row + pair, mask=in_table, other=0.0)
    s = tl.load(sin + row + pair, mask=in_table, other=0.0) * tl.cast(sign, COMPUTE)
    first = pair * pair_stride
    second = first + pair_step
    for begin in range(0, heads, HEADS):
        head = (begin + tl.arange(0, HEADS))[:, None].to(tl.int64)
        mask = (head < heads) & in_table
        a = tl.load(x + head * x_head + first, mask=mask, other=0.0).to(COMPUTE)
        b = tl.load(x + head * x_head + second, mask=mask, other=0.0).to(COMPUTE)
        tl.store(out + head * out_head + first, (a * c - b * s).to(out.dtype.element_ty), mask=mask)
        tl.store(out + head * out_head + second, (b * c + a * s).to(out.dtype.element_ty), mask=mask)
        if COPIES:
            rest = 2 * half + tl.arange(0, REST)[None, :]
            mask = (head < heads) & (rest < dim)
            tl.store(out + head * out_head + rest, tl.load(x + head * x_head + rest, mask=mask), mask=mask)


def rotate(
    x: Tensor, out: Tensor, cos: Tensor, sin: Tensor, heads_first: bool, interleaved: bool, inverse: bool
) -> None:
    """The ops fastpar::rotary_embedding and, with x as `out`, fastpar::rotary_embedding_."""
    if out.shape[-1] > 1 and out.stride(-1) != 1:
        raise ValueError("x must be contiguous along its last dim to be rotated in place")
    if x.numel() == 0:
        return
    is_same = x is out
    if x.stride(-1) != 1:
        x = x.contiguous()
    a, b = (t if t.dim() == 4 else t.unsqueeze(0) for t in (x, out))
    if heads_first:
        a, b = a.transpose(1, 2), b.transpose(1, 2)
    batch, positions, heads, dim = a.shape
    half = cos.shape[-1]
    pairs, rest = next_power_of_2(max(half, 1)), next_power_of_2(max(dim - 2 * half, 1))
    launch(
        rotary_kernel,
        batch * positions,
        x.device,
        a,
        *a.stride()[:3],
        b,
        *b.stride()[:3],
        cos,
        sin,
        positions * half if cos.dim() == 3 and cos.shape[0] > 1 else 0,
        positions,
        heads,
        dim,
        half,
        -1.0 if inverse else 1.0,
        1 if interleaved else half,
        2 if interleaved else 1,
        COMPUTE=_TL_DTYPE[compute_dtype(x.dtype)],
        COPIES=dim > 2 * half and not is_same,
        HEADS=max(1, min(next_power_of_2(heads), TILE // pairs)),
        PAIRS=pairs,
        REST=rest,
        num_warps=NUM_WARPS,
    )
