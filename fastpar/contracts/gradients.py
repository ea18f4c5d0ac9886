"""Formats of what is computed of gradients, and the checks of its arguments: exact sums of squares, 8-bit blocks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from fastpar.comm.block_codes import FORMATS, BlockCodes
from fastpar.contracts import FLOAT_DTYPES

# The sum as an integer in units of 2^LOWEST, cut into digits of DIGIT_BITS bits. 2^-298 is the square of the smallest
# float32, and 19 digits reach to 2^310, which is more than 2^53 squares of the largest.
DIGIT_BITS = 32
DIGITS = 19
LOWEST = -298
COUNTS = 2  # NaN, infinities
LENGTH = COUNTS + DIGITS


def check_tensors(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The tensors as a list. Raises TypeError and ValueError for what cannot be summed."""
    if isinstance(tensors, Tensor):
        raise TypeError("tensors must be a sequence of tensors, got one tensor: write [tensor]")
    listed = list(tensors)
    for i, x in enumerate(listed):
        if not isinstance(x, Tensor):
            raise TypeError(f"tensors[{i}] must be a tensor, got {type(x).__name__}")
        if x.dtype not in FLOAT_DTYPES:
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


# ---- 8-bit blocks ----------------------------------------------------------------------------------------------------

BLOCK_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CODE_DTYPES = {getattr(torch, name): name for name in FORMATS}
ROUNDINGS = ("nearest", "stochastic")


def check_quantize(x: Tensor, format: str, block: int, rounding: str, seed: int) -> BlockCodes:
    """The format; raises TypeError or ValueError with the values if the arguments do not fit `quantize_blocks`."""
    if not isinstance(x, Tensor) or x.dtype not in BLOCK_DTYPES:
        found = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"x must be a tensor of {', '.join(map(str, BLOCK_DTYPES))}, got {found}")
    if x.dim() == 0:
        raise ValueError("x must have at least one dim, the one that is cut into blocks; got a scalar")
    if rounding not in ROUNDINGS:
        raise ValueError(f"rounding must be one of {', '.join(ROUNDINGS)}, got {rounding!r}")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed must be an int, got {type(seed).__name__}")
    if not 0 <= seed < 1 << 63:
        raise ValueError(f"seed must be in 0..2**63 - 1, got {seed}")
    _refuse_gradient("quantize_blocks", x=x)
    return _block_codes(format, block)


def check_dequantize(codes: Tensor, scales: Tensor, block: int, dtype: torch.dtype) -> BlockCodes:
    """The same for `dequantize_blocks`."""
    if not isinstance(codes, Tensor) or codes.dtype not in CODE_DTYPES:
        found = codes.dtype if isinstance(codes, Tensor) else type(codes).__name__
        raise TypeError(f"codes must be a tensor of {', '.join(map(str, CODE_DTYPES))}, got {found}")
    if not isinstance(scales, Tensor) or scales.dtype != torch.float32:
        found = scales.dtype if isinstance(scales, Tensor) else type(scales).__name__
        raise TypeError(f"scales must be a tensor of torch.float32, got {found}")
    if dtype not in BLOCK_DTYPES:
        raise TypeError(f"dtype must be one of {', '.join(map(str, BLOCK_DTYPES))}, got {dtype}")
    if codes.dim() == 0:
        raise ValueError("codes must have at least one dim, the one that is cut into blocks; got a scalar")
    found_codes = _block_codes(CODE_DTYPES[codes.dtype], block)
    wanted = (*codes.shape[:-1], -(-codes.shape[-1] // block))
    if scales.shape != wanted:
        raise ValueError(
            f"scales must be {list(wanted)}, one for every {block} codes of a row of {list(codes.shape)}; got "
            f"{list(scales.shape)}"
        )
    if scales.device != codes.device:
        raise ValueError(f"codes and scales must be on one device, got {codes.device} and {scales.device}")
    _refuse_gradient("dequantize_blocks", codes=codes, scales=scales)
    return found_codes


def _block_codes(format: str, block: int) -> BlockCodes:
    if not isinstance(format, str):
        raise TypeError(f"format must be a string, one of {', '.join(FORMATS)}, got {type(format).__name__}")
    if isinstance(block, bool) or not isinstance(block, int):
        raise TypeError(f"block must be an int, got {type(block).__name__}")
    return BlockCodes(format, block)


def _refuse_gradient(op: str, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if torch.is_grad_enabled() and tensor.requires_grad:
            raise ValueError(
                f"{op} has no gradient, but {name} requires one: pass {name}.detach(), or call it under torch.no_grad()"
            )
