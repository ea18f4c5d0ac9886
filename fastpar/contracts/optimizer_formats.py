"""How the optimizer ops store numbers in fewer bits, in plain PyTorch: the definitions that every kernel follows.

Stochastic rounding to bfloat16. A float32 with bits x becomes the upper half of x + r, where r is uniform in [0, 2^16),
so the mean of many roundings is the value. r is a hash of the seed, the tensor's key and the element's index in the
whole tensor, so it depends neither on threads nor on how the tensor is cut into shards (`random_bits`).

bfloat16 and a remainder. A float32 master is kept as the bfloat16 nearest to it, which the model computes with, and the
signed 16 bits that are missing: master bits = (bfloat16 bits << 16) + remainder. The sum is exact; halfway cases round
away from zero, for the remainder has no +2^15 (TransformerEngine keeps its masters so). NaN is 0x7fc0 and 0.

8-bit blocks. 256 elements share a float32 scale, the largest magnitude among them. A code holds exponent and mantissa
of magnitude / scale to 3 bits: sign, 4 and 3 for a moment with a sign (down to 2^-16 of the scale), 5 and 3 for second
moments (down to 2^-32), where a value that is not zero is never stored as zero, since it becomes a divisor. Rounded to
nearest. A block with a value that is not finite becomes NaN as a whole.

Chosen by simulation, 16384 elements with gradients of lognormal scale (sigma 1.5), 1500 steps, betas 0.9 and 0.999;
distance of the AdamW update from float32's: 0.10 this way; 0.14 with stochastic rounding, which disturbs a second
moment at every step; 0.26 to 0.76 with scales that are powers of two, where a moment that shrinks by 0.1% a step stays
where it is; 0.54 with codes linear in sqrt(v) and in 2m / (1 + |m|), which have no small values.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 256
SMALLEST_SCALE = 2.0**-126
_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


# ---- random bits -----------------------------------------------------------------------------------------------------


def _splitmix(z: int) -> int:
    z = (z + _GOLDEN) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def rounding_keys(seed: int, key: int, index_high: int) -> tuple[int, int, int]:
    """The three 32-bit keys of the elements whose index has these upper 32 bits.

    k = splitmix(splitmix(splitmix(seed) + key) + index_high), with SplitMix64 (Steele et al. 2014) and sums modulo
    2^64; the keys are the lower half of k, its upper half, and the lower half of splitmix(k).
    """
    k = _splitmix(((_splitmix(((_splitmix(seed & _MASK64) + key) & _MASK64))) + index_high) & _MASK64)
    return k & 0xFFFFFFFF, k >> 32, _splitmix(k) & 0xFFFFFFFF


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit words (lowbias32, C. Wellons 2018), on int64."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)


def random_bits(seed: int, key: int, first: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """16 random bits each for the parameter, the first and the second state of elements first, ..., first + count - 1.

    With (k0, k1, k2) = rounding_keys(...) and l the lower 32 bits of the index:

        a = mix(mix(l ^ k0) + k1)      parameter a & 0xffff      first state a >> 16
        b = mix(a ^ k2)                second state b & 0xffff
    """
    index = torch.arange(first, first + count, dtype=torch.int64)
    high = index >> 32
    keys = {int(h): rounding_keys(seed, key, int(h)) for h in high.unique()}
    k0, k1, k2 = (torch.zeros_like(index) for _ in range(3))
    for h, (a0, a1, a2) in keys.items():
        here = high == h
        k0[here], k1[here], k2[here] = a0, a1, a2
    a = _mix((_mix((index & 0xFFFFFFFF) ^ k0) + k1) & 0xFFFFFFFF)
    b = _mix(a ^ k2)
    return a & 0xFFFF, a >> 16, b & 0xFFFF


def _bits(x: Tensor) -> Tensor:
    """The bits of float32 values as int64 in [0, 2^32)."""
    return x.view(torch.int32).to(torch.int64) & 0xFFFFFFFF


def _from_bits(bits: Tensor) -> Tensor:
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)


def _upper_half(bits: Tensor) -> Tensor:
    """bfloat16 with these bits; torch's conversion has bits of its own for NaN."""
    high = (bits >> 16) & 0xFFFF
    return torch.where(high >= 1 << 15, high - (1 << 16), high).to(torch.int16).view(torch.bfloat16)


def round_stochastically(x: Tensor, random: Tensor) -> Tensor:
    """float32 to bfloat16 with 16 random bits per element (int64); infinities stay, NaN stays NaN."""
    return _upper_half(torch.where(x.isnan(), 0x7FC00000, _bits(x) + random))


# ---- bfloat16 and a remainder ----------------------------------------------------------------------------------------


def split_master(master: Tensor) -> tuple[Tensor, Tensor]:
    """A float32 tensor as (bfloat16, int16); `join_master` gives it back bit for bit, except for the bits of NaN.

    Worked example: 1 + 2^-9 + 2^-20 has bits 0x3f804008: bfloat16 0x3f80, which is 1, and remainder 0x4008. 1 + 2^-8
    has 0x3f808000, halfway: 0x3f81 and -2^15.
    """
    bits = torch.where(master.isnan(), 0x7FC00000, _bits(master))
    low = bits & 0xFFFF
    remainder = torch.where(low >= 0x8000, low - 0x10000, low)
    return _upper_half(bits - remainder), remainder.to(torch.int16)


def join_master(param: Tensor, remainder: Tensor) -> Tensor:
    """The float32 master of a bfloat16 parameter and its int16 remainder."""
    return _from_bits(((param.view(torch.int16).to(torch.int64) << 16) + remainder.to(torch.int64)) & 0xFFFFFFFF)


# ---- 8-bit blocks ----------------------------------------------------------------------------------------------------


def num_blocks(numel: int) -> int:
    """Scales of a tensor of `numel` elements."""
    return -(-numel // BLOCK)


def _lowest(signed: bool) -> int:
    """What is taken from (exponent, 3 bits of mantissa) of magnitude / scale, so that 1 has the largest code."""
    return 1016 - (127 if signed else 255)


def quantise(x: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """A float32 tensor as (uint8 codes of its shape, float32 scales [num_blocks]), blocks along its elements in order.

    Worked example, signed: the block [1, -0.5, 0.3] has scale 1 and codes [127, 128 + 119, 113]: one exponent is 8
    codes, and 0.3 = 1.2 / 4 has the nearest mantissa 1 + 2/8, so it comes back as 0.3125.
    """
    blocks = torch.zeros(num_blocks(x.numel()) * BLOCK, dtype=torch.float32, device=x.device)
    blocks[: x.numel()] = x.reshape(-1)
    blocks = blocks.view(-1, BLOCK)
    largest = blocks.abs().amax(dim=1) if len(blocks) else blocks.new_zeros(0)
    scale = torch.where(largest.isfinite(), largest.clamp(min=SMALLEST_SCALE), torch.nan)
    ratio = _bits(blocks.abs() * (1.0 / scale)[:, None])
    code = ((ratio + 0x7FFFF + ((ratio >> 20) & 1)) >> 20) - _lowest(signed)
    code = code.clamp(0, 127 if signed else 255)
    if signed:
        code += 128 * (_bits(blocks) >> 31)
    else:
        code = torch.where((ratio > 0) & (code == 0), 1, code)
    return code.view(-1)[: x.numel()].to(torch.uint8).view(x.shape), scale


def dequantise(codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """The float32 tensor of codes and scales."""
    code = codes.reshape(-1).to(torch.int64)
    size = code & 127 if signed else code
    magnitude = torch.where(size == 0, 0.0, _from_bits((size + _lowest(signed)) << 20))
    if signed:
        magnitude = torch.where(code >= 128, -magnitude, magnitude)
    return (magnitude * scales.repeat_interleave(BLOCK)[: codes.numel()]).view(codes.shape)
