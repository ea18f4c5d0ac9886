# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# (parameters of Triton kernels have no Python types)
"""Sums of what several ranks have sent, in the order of the ranks, in one pass; not measured yet.

    out[i] = (((parts[0, i] + parts[1, i]) + parts[2, i]) ...) [/ size]

Accumulated in float32 (float64 for float64) and rounded once, or not at all to float32: the bits of
`fastpar.comm.reduction.reduce_in_order`, which reads and writes the sum once for every rank.

Bytes: size * n * itemsize read, n * itemsize of the result written. A program takes BLOCK elements, whose loads of all
ranks do not depend on each other.

Worked example: parts [[1, 2], [10, 20]]: out [11, 22], averaged [5.5, 11].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastpar.kernels.launch import cdiv, launch
from fastpar.kernels.rows import compute_dtype

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
BLOCK = 2048
NUM_WARPS = 8
AHEAD = 8  # ranks whose loads are on their way together
_TL_DTYPE = {torch.float32: tl.float32, torch.float64: tl.float64}


@triton.jit
def rank_sum_kernel(
    parts, out, n, stride, SIZE: tl.constexpr, AVERAGE: tl.constexpr, COMPUTE: tl.constexpr, AHEAD: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """out [n] from parts [SIZE, n], rows `stride` elements apart."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    total = tl.load(parts + i, mask=mask, other=0.0).to(COMPUTE)
    row = tl.cast(stride, tl.int64)
    for first in range(1, SIZE, AHEAD):
        for ahead in tl.static_range(AHEAD):
            rank = first + ahead
            value = tl.load(parts + rank * row + i, mask=mask & (rank < SIZE), other=0.0).to(COMPUTE)
            total = tl.where(rank < SIZE, total + value, total)  # not + 0: the sign of zero
    if AVERAGE:
        size = tl.full(total.shape, SIZE, COMPUTE)
        total = total / size if tl.float64 == COMPUTE else tl.div_rn(total, size)
    tl.store(out + i, total.to(out.dtype.element_ty), mask=mask)


def rank_sum(parts: Tensor, *, average: bool, dtype: torch.dtype | None = None) -> Tensor:
    """[n] in `dtype` (None: that of parts), the sum of parts [size, n] in the order of rows.

    Raises TypeError for dtypes that are none of DTYPES.
    """
    if parts.dtype not in DTYPES:
        raise TypeError(f"parts must be one of {', '.join(map(str, DTYPES))}, got {parts.dtype}")
    size, n = parts.shape
    parts = parts if n <= 1 or parts.stride(1) == 1 else parts.contiguous()
    out = parts.new_empty(n, dtype=dtype)
    if n:
        launch(
            rank_sum_kernel, cdiv(n, BLOCK), parts.device, parts, out, n, parts.stride(0), SIZE=size,
            AVERAGE=average, COMPUTE=_TL_DTYPE[compute_dtype(parts.dtype)], AHEAD=min(AHEAD, max(size - 1, 1)),
            BLOCK=BLOCK, num_warps=NUM_WARPS,
        )  # fmt: skip
    return out
