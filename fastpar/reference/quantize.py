"""Tensors as blocks of 8-bit codes with a scale each, in plain PyTorch, and the checks of their arguments."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fastpar.comm.block_codes import FORMATS, BlockCodes

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CODE_DTYPES = {getattr(torch, name): name for name in FORMATS}
ROUNDINGS = ("nearest", "stochastic")


def check_quantize(x: Tensor, format: str, block: int, rounding: str, seed: int) -> BlockCodes:
    """The format; raises TypeError or ValueError with the values if the arguments do not fit `quantize_blocks`."""
    if not isinstance(x, Tensor) or x.dtype not in DTYPES:
        found = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"x must be a tensor of {', '.join(map(str, DTYPES))}, got {found}")
    if x.dim() == 0:
        raise ValueError("x must have at least one dim, the one that is cut into blocks; got a scalar")
    if rounding not in ROUNDINGS:
        raise ValueError(f"rounding must be one of {', '.join(ROUNDINGS)}, got {rounding!r}")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed must be an int, got {type(seed).__name__}")
    if not 0 <= seed < 1 << 63:
        raise ValueError(f"seed must be in 0..2**63 - 1, got {seed}")
    _refuse_gradient("quantize_blocks", x=x)
    return _codes(format, block)


def check_dequantize(codes: Tensor, scales: Tensor, block: int, dtype: torch.dtype) -> BlockCodes:
    """The same for `dequantize_blocks`."""
    if not isinstance(codes, Tensor) or codes.dtype not in CODE_DTYPES:
        found = codes.dtype if isinstance(codes, Tensor) else type(codes).__name__
        raise TypeError(f"codes must be a tensor of {', '.join(map(str, CODE_DTYPES))}, got {found}")
    if not isinstance(scales, Tensor) or scales.dtype != torch.float32:
        found = scales.dtype if isinstance(scales, Tensor) else type(scales).__name__
        raise TypeError(f"scales must be a tensor of torch.float32, got {found}")
    if dtype not in DTYPES:
        raise TypeError(f"dtype must be one of {', '.join(map(str, DTYPES))}, got {dtype}")
    if codes.dim() == 0:
        raise ValueError("codes must have at least one dim, the one that is cut into blocks; got a scalar")
    found_codes = _codes(CODE_DTYPES[codes.dtype], block)
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


def _codes(format: str, block: int) -> BlockCodes:
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
