"""The exact sum of squares of many tensors, in plain PyTorch and Python integers."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

# The sum as an integer in units of 2^LOWEST, cut into digits of DIGIT_BITS bits. 2^-298 is the square of the smallest
# float32, and 19 digits reach to 2^310, which is more than 2^53 squares of the largest.
DIGIT_BITS = 32
DIGITS = 19
LOWEST = -298
COUNTS = 2  # NaN, infinities
LENGTH = COUNTS + DIGITS

FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
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


def check_tensors(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The tensors as a list. Raises TypeError and ValueError for what cannot be summed."""
    if isinstance(tensors, Tensor):
        raise TypeError("tensors must be a sequence of tensors, got one tensor: write [tensor]")
    listed = list(tensors)
    for i, x in enumerate(listed):
        if not isinstance(x, Tensor):
            raise TypeError(f"tensors[{i}] must be a tensor, got {type(x).__name__}")
        if x.dtype not in FLOATING:
            raise TypeError(f"tensors[{i}] must be float32, bfloat16, float16 or float64, got {x.dtype}")
        if x.device != listed[0].device:
            raise ValueError(f"all tensors must be on one device, got {listed[0].device} and {x.device}")
    return listed


def check_sums(sums: Tensor, dtype: torch.dtype) -> None:
    if sums.dtype != torch.int64 or sums.shape != (LENGTH,):
        raise ValueError(
            f"sums must be int64 of shape ({LENGTH},), as exact_square_sum gives it; got {sums.dtype} of shape "
            f"{tuple(sums.shape)}"
        )
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"dtype must be torch.float32 or torch.float64, got {dtype}")


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
