"""Tensors as blocks of 8-bit codes with a scale each, and back.

    scale   = max(largest |x| of the block / L, 2^-126)      L = 127 (int8), 448 (float8_e4m3fn), 57344 (float8_e5m2)
    code    = round(x / scale)
    value   = code * scale

Codes and scales are tensors of their own, blocks lie along the last dim: the layout that FP8 products with 1 x 128
scales read (DeepSeek-V3, arXiv:2412.19437, section 3.3). The gradients on the wire (`fastpar.comm.BlockWire`) are the
same codes and scales in another order, one message; csrc/quantize/quantize_kernel.h has the numerics of both.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from fastpar import _ext
from fastpar.arguments import checked
from fastpar.comm.block_codes import FORMATS
from fastpar.contracts.gradients import check_dequantize, check_quantize
from fastpar.ops._backends import fallback, has_kernels

_ext.load()
_quantize = torch.ops.fastpar.quantize_rows
_dequantize = torch.ops.fastpar.dequantize_rows


# ---- CUDA ------------------------------------------------------------------------------------------------------------


@torch.library.impl("fastpar::quantize_rows", "cuda")
def _quantize_cuda(x: Tensor, block: int, format: int, seed: int) -> tuple[Tensor, Tensor]:
    from fastpar.kernels import quantize as kernels

    return kernels.quantize(x, block, format, seed)


@torch.library.impl("fastpar::dequantize_rows", "cuda")
def _dequantize_cuda(codes: Tensor, scales: Tensor, block: int, format: int, dtype: torch.dtype) -> Tensor:
    from fastpar.kernels import quantize as kernels

    return kernels.dequantize(codes, scales, block, format, dtype)


# ---- fakes -----------------------------------------------------------------------------------------------------------


@torch.library.register_fake("fastpar::quantize_rows")
def _quantize_fake(x: Tensor, block: int, format: int, seed: int) -> tuple[Tensor, Tensor]:
    scales = (*x.shape[:-1], (x.shape[-1] + block - 1) // block)
    return x.new_empty(x.shape, dtype=torch.uint8), x.new_empty(scales, dtype=torch.float32)


@torch.library.register_fake("fastpar::dequantize_rows")
def _dequantize_fake(codes: Tensor, scales: Tensor, block: int, format: int, dtype: torch.dtype) -> Tensor:
    return codes.new_empty(codes.shape, dtype=dtype)


# ---- public ----------------------------------------------------------------------------------------------------------


@checked()
def quantize_blocks(
    x: Tensor, *, format: str = "float8_e4m3fn", block: int = 128, rounding: str = "nearest", seed: int = 0
) -> tuple[Tensor, Tensor]:
    """(codes, scales): every `block` elements of a row as 8-bit codes with one scale.

        x       [..., K]                 float32, bfloat16 or float16
        codes   [..., K]                 torch.int8, torch.float8_e4m3fn or torch.float8_e5m2, as `format` says
        scales  [..., ceil(K / block)]   float32; the last block of a row may have fewer elements

        scale = max(largest |x| / L, 2^-126), L = 127, 448 or 57344;  code = round(x / scale);  value = code * scale

    Rounding to nearest (ties to even), int8 is off by at most 1/254 of the block's largest element; float8_e4m3fn by
    1/16 of the element itself, float8_e5m2 by 1/8, or by 2^-10 / 448 and 2^-17 / 57344 of the largest where that is
    more: all times 1 + 2^-22, since scales are rounded. Stochastic rounding may be off by twice that, without bias.

    A block of zeros has zeros for codes and values (and the scale 2^-126, whose reciprocal is finite). A block with an
    infinity or NaN has the scale NaN and zeros for codes, so all its values are NaN: visible, and in that block only.
    Blocks whose largest is below 2^-126 times L lose bits, as subnormal numbers do; one whose largest is float32's
    largest may come back as infinity.

    No gradient: an x that requires one is refused. No collective. The same bits on every instruction set and for any
    number of threads. On CPU a C++ kernel; on CUDA a Triton kernel, tested on an H200, not timed; elsewhere,
    and on CUDA without Triton, `fastpar.reference.quantize_blocks`.

    Args:
        format: "float8_e4m3fn", "float8_e5m2" or "int8".
        block: elements that share a scale, a multiple of 64 up to 4096.
        rounding: "nearest", or "stochastic": up with the probability of what would be dropped, to 2^-16 of a step.
        seed: of stochastic rounding: the same seed, the same bits. Random numbers depend on it, on the block's number
            in x and on the element's in the block.

    Worked example: x [1, -0.5, 0.25, 127] as int8 has the scale 1 and the codes [1, 0, 0, 127] (-0.5 and 0.25 round to
    0); as float8_e4m3fn the scale 127 / 448 and the values [0.992, -0.496, 0.248, 127].

    Raises:
        TypeError: dtypes; a block or seed that is no int.
        ValueError: a scalar; a format, block, rounding or seed that there is not; an x that requires a gradient.
    """
    codes_of = check_quantize(x, format, block, rounding, seed)
    if not has_kernels(x):
        options = {"format": format, "block": block, "rounding": rounding, "seed": seed}
        return cast("tuple[Tensor, Tensor]", fallback("quantize_blocks")(x, **options))
    codes, scales = _quantize(x, block, FORMATS[format], seed if rounding == "stochastic" else -1)
    return codes.view(codes_of.dtype), scales


def dequantize_blocks(codes: Tensor, scales: Tensor, *, block: int = 128, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values of codes and scales: code * scale, computed in float32 and rounded once to `dtype`.

        codes   [..., K]                 torch.int8, torch.float8_e4m3fn or torch.float8_e5m2, any strides
        scales  [..., ceil(K / block)]   float32: one for every `block` codes of a row
        out     [..., K]                 float32, bfloat16 or float16; contiguous

    Takes the codes of others, too: NaN and infinities that a format has codes for are NaN and infinities here. No
    gradient: tensors that require one are refused. No collective.

    Worked example: codes [1, 0, 0, 127] of int8 and the scale [0.5] give [0.5, 0, 0, 63.5].

    Raises:
        TypeError: dtypes.
        ValueError: scales that do not fit codes and block; devices that differ; a tensor that requires a gradient.
    """
    codes_of = check_dequantize(codes, scales, block, dtype)
    if not has_kernels(codes):
        return cast(Tensor, fallback("dequantize_blocks")(codes, scales, block=block, dtype=dtype))
    return cast(Tensor, _dequantize(codes.view(torch.uint8), scales, block, FORMATS[codes_of.format], dtype))
