# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# (parameters of Triton kernels have no Python types)
"""Dropout by global position for CUDA tensors; tested on an H200, not timed. The mask is that of
fastpar.reference.dropout.

Two bytes are read and two written for an element of bfloat16; the hash stays in registers. A program takes BLOCK
elements of one row, a run along the last dim, whose first global index it finds out of the numbers of the dims.

Worked example: x [4], p 0.5, seed 0: elements 0 and 3 survive; out = [2 x_0, 0, 0, 2 x_3].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastpar.kernels.launch import cdiv, launch, next_power_of_2
from fastpar.kernels.rows import compute_dtype

BLOCK = 2048
NUM_WARPS = 4
LEADING = 3  # dims before the last that a kernel takes; adjacent ones that count on are one
_TL_DTYPE = {torch.float32: tl.float32, torch.float64: tl.float64}


@triton.jit(do_not_specialize=["seed", "first", "threshold", "stride0", "stride1", "stride2"])
def dropout_kernel(
    x,
    out,
    first,
    stride0,
    stride1,
    stride2,
    size1,
    size2,
    columns,
    seed,
    threshold,
    scale,
    COMPUTE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out [rows, columns] = x * scale where hash(seed, index) >= threshold, else 0; one program per BLOCK of a row.

    Row (i, j, k) of [size0, size1, size2] begins at the global index first + i * stride0 + j * stride1 + k * stride2.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    outer = row // size2
    begin = tl.cast(first, tl.int64) + row % size2 * stride2 + outer % size1 * stride1 + outer // size1 * stride0
    index = (begin + column).to(tl.uint64) + 1
    z = index * 0x9E3779B97F4A7C15 + tl.cast(seed, tl.int64).to(tl.uint64)  # SplitMix64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = (z ^ (z >> 31)) >> 40
    value = tl.load(x + row * columns + column, mask=mask).to(COMPUTE) * tl.cast(scale, COMPUTE)
    keep = z.to(tl.int32) >= threshold
    tl.store(out + row * columns + column, tl.where(keep, value, 0.0).to(out.dtype.element_ty), mask=mask)


def merged_dims(
    shape: Sequence[int], offset: Sequence[int], global_shape: Sequence[int]
) -> tuple[int, list[tuple[int, int]]]:
    """(global index of the first element, [(size, distance of global indices)] of the dims, adjacent ones merged)."""
    first, stride = 0, 1
    dims: list[tuple[int, int]] = []  # the last one first
    for size, start, extent in reversed(list(zip(shape, offset, global_shape, strict=True))):
        first += start * stride
        if dims and dims[-1][0] * dims[-1][1] == stride:
            dims[-1] = (dims[-1][0] * size, dims[-1][1])
        elif size != 1 or not dims:
            dims.append((size, stride))
        stride *= extent
    return first, dims[::-1] or [(1, 1)]


def sharded_dropout(x: Tensor, p: float, seed: int, offset: Sequence[int], global_shape: Sequence[int]) -> Tensor:
    """The op fastpar::sharded_dropout."""
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.numel() == 0:
        return out
    first, dims = merged_dims(x.shape, offset, global_shape)
    if len(dims) > LEADING + 1:  # no tensor of a model: one part of the first dim after the other
        for i, (part, target) in enumerate(zip(x, out, strict=True)):
            inner = [offset[0] + i, *offset[1:]]
            target.copy_(sharded_dropout(part[None], p, seed, inner, global_shape)[0])
        return out
    if dims[-1][1] != 1:  # a block of one column
        dims.append((1, 1))
    (_, stride0), (size1, stride1), (size2, stride2), (columns, _) = [(1, 0)] * (LEADING + 1 - len(dims)) + dims
    rows, block = x.numel() // columns, min(BLOCK, next_power_of_2(columns))
    launch(
        dropout_kernel, (rows, cdiv(columns, block)), x.device, x, out, first, stride0, stride1, stride2,
        size1, size2, columns, seed, round(p * (1 << 24)), 1.0 / (1.0 - p) if p < 1.0 else 0.0,
        COMPUTE=_TL_DTYPE[compute_dtype(x.dtype)], BLOCK=block, num_warps=NUM_WARPS,
    )  # fmt: skip
    return out
