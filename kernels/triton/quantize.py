# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# (parameters of Triton kernels have no Python types)
"""Blocks of 8-bit codes for CUDA tensors; tested on an H200, not timed. The algebra is in fastpar.ops.quantize.

One program takes BLOCKS blocks. The bits are those of csrc/quantize/quantize_kernel.h: codes are made of the bits of
float32 numbers, not by the device's conversions, which know no stochastic rounding; divisions round to nearest.

Worked example, int8: the block [1, -0.5, 0.25, 127] has scale 1 and codes [1, 0, 0, 127].
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastpar.kernels.launch import cdiv, launch, next_power_of_2
from fastpar.kernels.rows import as_rows

TILE = 2048  # elements of a program
NUM_WARPS = 4
LARGEST = (127.0, 448.0, 57344.0)  # by format: int8, float8_e4m3fn, float8_e5m2
MANTISSA = (0, 3, 2)  # 0: int8
BIAS = (0, 7, 15)


@triton.jit
def _random_bits(seed, block, element):
    """16 bits for every element of every block: hashes of (seed, block, element)."""
    z = seed + (block.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    h = ((z ^ (z >> 31)) >> 32).to(tl.uint32) + element.to(tl.uint32)
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = (h ^ (h >> 15)) * 0x846CA68B
    return (h >> 16).to(tl.int32)


@triton.jit
def _codes_of(q, random, STOCHASTIC: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """int32 codes of |q| <= the largest."""
    if MANTISSA == 0:
        if STOCHASTIC:
            return tl.floor(q + (random.to(tl.float32) + 0.5) * 0.0000152587890625).to(tl.int32)
        return ((q + 12582912.0) - 12582912.0).to(tl.int32)  # 1.5 * 2^23 leaves no bits for a fraction
    DROPPED: tl.constexpr = 23 - MANTISSA
    UNIT: tl.constexpr = BIAS - 1 + MANTISSA  # subnormal numbers are multiples of 2^-UNIT
    bits = q.to(tl.int32, bitcast=True)
    size_bits = bits & 0x7FFFFFFF
    size = size_bits.to(tl.float32, bitcast=True)
    if STOCHASTIC:
        above = (random << (DROPPED - 16)) + (1 << (DROPPED - 17))
        fraction = (random.to(tl.float32) + 0.5) * 0.0000152587890625
        small = tl.floor(size * (2.0**UNIT) + fraction).to(tl.int32)
    else:
        above = ((size_bits >> DROPPED) & 1) + ((1 << (DROPPED - 1)) - 1)
        SHIFT_BITS: tl.constexpr = (127 + 23 - UNIT) << 23  # the last bit of this sum is worth 2^-UNIT
        small = (size + 2.0 ** (23 - UNIT)).to(tl.int32, bitcast=True) - SHIFT_BITS
    normal = ((size_bits + above) >> DROPPED) - ((127 - BIAS) << MANTISSA)
    return tl.where(size < 2.0 ** (1 - BIAS), small, normal) | ((bits >> 24) & 0x80)


@triton.jit(do_not_specialize=["seed"])
def quantize_kernel(
    x,
    outer,
    inner_step,
    codes,
    scales,
    seed,
    inner,
    columns,
    num_blocks,
    total_blocks,
    block,
    LARGEST: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCKS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Codes and scales of BLOCKS blocks; WIDTH is the next power of 2 from `block` on."""
    index = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    row = index // num_blocks
    element = tl.arange(0, WIDTH)[None, :]
    column = (index % num_blocks * block)[:, None] + element
    mask = (index < total_blocks)[:, None] & (element < block) & (column < columns)
    start = (row // inner * outer + row % inner * inner_step)[:, None]
    v = tl.load(x + start + column, mask=mask, other=0.0).to(tl.float32)
    largest = tl.max(v.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)  # bits are ordered as numbers are
    is_finite = largest < 0x7F800000
    limit = tl.full(largest.shape, LARGEST, tl.float32)
    scale = tl.div_rn(tl.where(is_finite, largest, 0).to(tl.float32, bitcast=True), limit)
    scale = tl.maximum(scale, 1.1754943508222875e-38)  # 2^-126: its reciprocal is finite
    inverse = tl.div_rn(tl.full(largest.shape, 1.0, tl.float32), scale)
    q = tl.where(is_finite[:, None], v, 0.0) * inverse[:, None]
    q = tl.minimum(tl.maximum(q, -LARGEST), LARGEST)
    random = _random_bits(seed.to(tl.uint64), index[:, None], element) if STOCHASTIC else 0
    code = _codes_of(q, random, STOCHASTIC, MANTISSA, BIAS)
    tl.store(codes + (row * columns)[:, None] + column, code.to(tl.uint8), mask=mask)
    nan = tl.full(largest.shape, 0x7FC00000, tl.int32).to(tl.float32, bitcast=True)
    tl.store(scales + index, tl.where(is_finite, scale, nan), mask=index < total_blocks)


@triton.jit
def dequantize_kernel(
    codes,
    scales,
    out,
    columns,
    num_blocks,
    total,
    block,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    FIRST_SPECIAL: tl.constexpr,
    SPECIAL_BITS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Values of TILE codes; from code FIRST_SPECIAL on they are not finite."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = at < total
    code = tl.load(codes + at, mask=mask, other=0).to(tl.int32)
    if MANTISSA == 0:
        value = ((code << 24) >> 24).to(tl.float32)
    else:
        size = code & 0x7F
        normal = ((size << (23 - MANTISSA)) + ((127 - BIAS) << 23)).to(tl.float32, bitcast=True)
        value = tl.where(size < (1 << MANTISSA), size.to(tl.float32) * (2.0 ** -(BIAS - 1 + MANTISSA)), normal)
        bits = value.to(tl.int32, bitcast=True)
        bits = tl.where(size < FIRST_SPECIAL, bits, bits | SPECIAL_BITS)
        value = (bits | ((code & 0x80) << 24)).to(tl.float32, bitcast=True)
    scale = tl.load(scales + at // columns * num_blocks + at % columns // block, mask=mask, other=0.0)
    tl.store(out + at, (value * scale).to(out.dtype.element_ty), mask=mask)


def quantize(x: Tensor, block: int, format: int, seed: int) -> tuple[Tensor, Tensor]:
    """The op fastpar::quantize_rows."""
    columns = x.shape[-1]
    num_blocks = cdiv(columns, block)
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scales = torch.empty((*x.shape[:-1], num_blocks), dtype=torch.float32, device=x.device)
    if x.numel() == 0:
        return codes, scales
    inner, ((x, outer, inner_step),) = as_rows(x)
    width = next_power_of_2(block)
    blocks = max(1, TILE // width)
    options: dict[str, Any] = {"MANTISSA": MANTISSA[format], "BIAS": BIAS[format], "LARGEST": LARGEST[format]}
    launch(
        quantize_kernel,
        cdiv(scales.numel(), blocks),
        x.device,
        x,
        outer,
        inner_step,
        codes,
        scales,
        max(seed, 0),
        inner,
        columns,
        num_blocks,
        scales.numel(),
        block,
        STOCHASTIC=seed >= 0,
        BLOCKS=blocks,
        WIDTH=width,
        num_warps=NUM_WARPS,
        **options,
    )
    return codes, scales


def dequantize(codes: Tensor, scales: Tensor, block: int, format: int, dtype: torch.dtype) -> Tensor:
    """The op fastpar::dequantize_rows."""
    out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    if out.numel() == 0:
        return out
    launch(
        dequantize_kernel,
        cdiv(out.numel(), TILE),
        codes.device,
        codes.contiguous(),
        scales.contiguous(),
        out,
        codes.shape[-1],
        scales.shape[-1],
        out.numel(),
        block,
        MANTISSA=MANTISSA[format],
        BIAS=BIAS[format],
        FIRST_SPECIAL=(128, 0x7F, 0x7C)[format],
        SPECIAL_BITS=(0, 0x7FC00000, 0x7F800000)[format],
        TILE=TILE,
        num_warps=NUM_WARPS,
    )
    return out
