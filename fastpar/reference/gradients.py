"""Exact sums of squares, and blocks of 8-bit codes, in plain PyTorch and Python integers."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from fastpar.contracts.gradients import (
    COUNTS,
    DIGIT_BITS,
    LENGTH,
    LOWEST,
    check_dequantize,
    check_quantize,
    check_sums,
    check_tensors,
)

# ---- sums of squares -------------------------------------------------------------------------------------------------

_CHUNK = 1 << 22  # elements at a time; every one takes about 150 bytes here


def exact_square_sum(tensors: Iterable[Tensor]) -> Tensor:
    """The sum of squares of all elements, without a rounding; see `fastpar.ops.exact_square_sum`."""
    listed = check_tensors(tensors)
    sums = torch.zeros(LENGTH, dtype=torch.int64, device=listed[0].device if listed else None)
    for x in listed:
        for chunk in x.detach().reshape(-1).split(_CHUNK):
            sums += _square_sum(chunk.double())
    return carried(sums)


def square_sum_norm(sums: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The square root of such a sum, rounded once; see `fastpar.ops.square_sum_norm`."""
    check_sums(sums, dtype)
    nans, infinities, *digits = sums.tolist()
    if nans or infinities:
        return sums.new_tensor(math.nan if nans else math.inf, dtype=dtype)
    value = sum(digit << DIGIT_BITS * i for i, digit in enumerate(digits))
    # 59 bits of the root, of which the last says whether anything is left: enough for any rounding to be the only one.
    shift = (value.bit_length() - 118) // 2 * 2
    scaled = value >> shift if shift > 0 else value << -shift
    root = math.isqrt(scaled)
    root |= int(root * root != scaled or (shift > 0 and scaled << shift != value))
    return sums.new_tensor(_rounded(root, (shift + LOWEST) // 2, dtype), dtype=dtype)


def carried(sums: Tensor) -> Tensor:
    """The same sum with all digits but the last in [0, 2^32): one form for one value."""
    out = sums.clone()
    for i in range(COUNTS, LENGTH - 1):
        out[i + 1] += out[i] >> DIGIT_BITS  # rounds down, so that negative digits borrow
        out[i] &= (1 << DIGIT_BITS) - 1
    return out


def _square_sum(x: Tensor) -> Tensor:
    """x: float64, flat."""
    finite = x.abs() < 2.0**128
    nan = x.isnan()
    # |x| = m * 2^p with p >= -149, the last bit of the smallest float32; what float64 has below is cut off.
    mantissa, exponent = torch.frexp(torch.where(finite, x.abs(), 0.0))
    m = (mantissa * 2.0**53).long()
    p = exponent.long() - 53
    below = (-149 - p).clamp(0, 63)
    m, p = m >> below, p + below
    a, b = m >> 27, m & (1 << 27) - 1
    sums = x.new_zeros(LENGTH, dtype=torch.int64)
    for term, offset in ((b * b, 0), (2 * a * b, 27), (a * a, 54)):
        for part, place in ((term & (1 << 28) - 1, offset), (term >> 28, offset + 28)):
            position = 2 * p - LOWEST + place
            index, shifted = position // DIGIT_BITS + COUNTS, part << position % DIGIT_BITS
            index = torch.where(part == 0, COUNTS, index)
            sums.index_add_(0, index, shifted & (1 << DIGIT_BITS) - 1)
            sums.index_add_(0, index + 1, shifted >> DIGIT_BITS)
    sums[0] = nan.sum()
    sums[1] = (~finite & ~nan).sum()
    return sums


def _rounded(root: int, exponent: int, dtype: torch.dtype) -> float:
    """root * 2^exponent, rounded once to dtype, to nearest even; root's last bit may be one that only says `more`."""
    digits, lowest, highest = (24, -149, 128) if dtype == torch.float32 else (53, -1074, 1024)
    drop = max(root.bit_length() - digits, lowest - exponent, 0)
    half, rest = (1 << drop) >> 1, root & (1 << drop) - 1
    kept = root >> drop
    if drop and (rest > half or (rest == half and kept & 1)):
        kept += 1
    if kept.bit_length() + drop + exponent > highest:
        return math.inf
    return math.ldexp(kept, drop + exponent)


# ---- 8-bit blocks ----------------------------------------------------------------------------------------------------


def quantize_blocks(
    x: Tensor, *, format: str = "float8_e4m3fn", block: int = 128, rounding: str = "nearest", seed: int = 0
) -> tuple[Tensor, Tensor]:
    """See `fastpar.ops.quantize_blocks`."""
    made = check_quantize(x, format, block, rounding, seed)
    columns, num_blocks = x.shape[-1], -(-x.shape[-1] // block)
    padded = F.pad(x.float(), (0, num_blocks * block - columns)).reshape(-1, block)
    if len(padded) == 0:
        return x.new_empty(x.shape, dtype=made.dtype), x.new_empty((*x.shape[:-1], num_blocks), dtype=torch.float32)
    codes, scales = made.encode(padded, seed=seed if rounding == "stochastic" else None)
    whole = codes.view(*x.shape[:-1], num_blocks * block)
    return whole[..., :columns].contiguous().view(made.dtype), scales.view(*x.shape[:-1], num_blocks)


def dequantize_blocks(codes: Tensor, scales: Tensor, *, block: int = 128, dtype: torch.dtype = torch.float32) -> Tensor:
    """See `fastpar.ops.dequantize_blocks`."""
    check_dequantize(codes, scales, block, dtype)
    return (codes.float() * scales.repeat_interleave(block, -1)[..., : codes.shape[-1]]).to(dtype)
