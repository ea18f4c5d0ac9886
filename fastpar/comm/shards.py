"""Shards of a dim: the rule of `torch.chunk` and DTensor's `Shard`, checks of tensors and dims, and the
flat parts that transports move.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor

MAX_PARTS = 1 << 24  # more ranks than there are; a list of as many numbers still fits
_NO_DISPATCH: Any = Tensor.__torch_dispatch__


def is_int(value: Any) -> bool:
    """True for whole numbers, SymInts among them; False for True and False."""
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)


def shard_sizes(total: int, parts: int) -> list[int]:
    """Rows of each of `parts` ranks out of `total`: ceil(total / parts) each until they are used up; the last ones
    get fewer, or none.

        shard_sizes(10, 4) == [3, 3, 3, 1]        shard_sizes(4, 3) == [2, 2, 0]

    Raises ValueError if `total` is negative or `parts` is not positive.
    """
    for name, value in (("total", total), ("parts", parts)):
        if not is_int(value):
            raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if total < 0:
        raise ValueError(f"total must not be negative, got {total}")
    if not 1 <= parts <= MAX_PARTS:
        raise ValueError(f"parts must be at least 1 and at most {MAX_PARTS}, got {parts}")
    each = -(-total // parts)
    return [max(0, min(each, total - each * part)) for part in range(parts)]


def shard_range(total: int, parts: int, rank: int) -> tuple[int, int]:
    """First row and one past the last row of `rank` under `shard_sizes`: shard_range(10, 4, 1) == (3, 6).

    Raises ValueError as `shard_sizes` does, and IndexError if `rank` is not in 0..parts-1.
    """
    sizes = shard_sizes(total, parts)
    if not is_int(rank):
        raise TypeError(f"rank must be an int, got {type(rank).__name__}")
    if not 0 <= rank < parts:
        raise IndexError(f"rank must be in 0..{parts - 1}, got {rank}")
    start = sum(sizes[:rank])
    return start, start + sizes[rank]


def check_is_tensor(x: Tensor, name: str = "x") -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")


def check_tensor(x: Tensor) -> None:
    check_is_tensor(x)
    if isinstance(x, DTensor):
        raise TypeError("x must be a plain tensor, got a DTensor: pass x.to_local()")
    if torch.compiler.is_compiling():
        return  # Dynamo refuses to read a layout in a backward; what it compiles is dense
    if type(x) is not Tensor and type(x).__torch_dispatch__ is not _NO_DISPATCH:
        # A tensor that wraps others has no memory of its own, and transports would read what is not there.
        raise TypeError(f"x must be a plain tensor, got a {type(x).__name__}: pass the tensors that it is made of")
    if x.layout != torch.strided:
        raise TypeError(f"x must be a dense tensor, got layout {x.layout}")
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
        raise TypeError(
            "x has a tangent of forward-mode differentiation (torch.func.jvp, forward_ad.make_dual), which no "
            "collective carries: use backward, or the whole model in one process"
        )


def check_out(out: Tensor, x: Tensor) -> None:
    check_tensor(out)
    if out.shape != x.shape or out.dtype != x.dtype or out.device != x.device:
        raise ValueError(
            f"out must have the shape, dtype and device of x: {tuple(x.shape)} {x.dtype} {x.device}, "
            f"got {tuple(out.shape)} {out.dtype} {out.device}"
        )


def check_dim(dim: int, x: Tensor, name: str = "dim") -> int:
    if not is_int(dim):
        raise TypeError(f"{name} must be an int, got {type(dim).__name__}")
    if x.ndim == 0:
        raise ValueError("x must have at least one dim, got a scalar tensor: x.view(1) has one")
    if not -x.ndim <= dim < x.ndim:
        raise IndexError(f"{name} must be in {-x.ndim}..{x.ndim - 1} for a tensor of shape {tuple(x.shape)}, got {dim}")
    return dim % x.ndim


def with_dim(shape: torch.Size, dim: int, size: int) -> torch.Size:
    return torch.Size((*shape[:dim], size, *shape[dim + 1 :]))


def row_numel(x: Tensor, dim: int) -> int:
    """Elements of x per row along dim; right also where x has no rows."""
    return with_dim(x.shape, dim, 1).numel()


def plain_bits(x: Tensor) -> Tensor:
    """x without bits of its own that say how to read it, which no transport knows of."""
    if torch.compiler.is_compiling() or not (x.is_conj() or x.is_neg()):
        return x
    return x.resolve_conj().resolve_neg()


def pack(x: Tensor, dim: int, sizes: Sequence[int]) -> tuple[Tensor, list[int]]:
    """The parts of x along dim one after another, flat, and their numbers of elements. Copies unless dim 0 of a
    contiguous x.
    """
    row = row_numel(x, dim)
    x = plain_bits(x)
    if all(size == 1 for size in x.shape[:dim]):
        flat = x.contiguous().view(-1)
    else:
        flat = torch.cat([part.reshape(-1) for part in x.split(list(sizes), dim)])
    return flat, [size * row for size in sizes]


def unpack(flat: Tensor, shape: torch.Size, dim: int, sizes: Sequence[int]) -> Tensor:
    """The inverse: parts of `shape` (but for dim) put side by side along dim. Copies unless they already are."""
    if all(size == 1 for size in shape[:dim]):
        return flat.view(with_dim(shape, dim, sum(sizes)))
    row = with_dim(shape, dim, 1).numel()
    parts = flat.split([size * row for size in sizes])
    return torch.cat([part.view(with_dim(shape, dim, size)) for part, size in zip(parts, sizes, strict=True)], dim)
