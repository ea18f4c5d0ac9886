"""Dropout whose mask depends on the seed and on an element's global position only, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # SplitMix64's increment and multipliers as signed 64-bit integers
_MIX1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX2 = 0x94D049BB133111EB - (1 << 64)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)  # logical, not arithmetic


def global_index(
    local_shape: Sequence[int],
    offset: Sequence[int],
    global_shape: Sequence[int],
    device: torch.device | None = None,
) -> Tensor:
    """The linear index in the global tensor of every element of this rank's block; int64, shape `local_shape`."""
    index = torch.zeros((), dtype=torch.int64, device=device)
    for size, start, extent in zip(local_shape, offset, global_shape, strict=True):
        coordinate = torch.arange(start, start + size, dtype=torch.int64, device=device)
        index = index.unsqueeze(-1) * extent + coordinate
    return index


def hash_of(seed: int | Tensor, index: Tensor) -> Tensor:
    """SplitMix64 of seed + (index + 1) * golden gamma, as int64."""
    z = (index + 1) * _GOLDEN + seed
    z = (z ^ _shift_right(z, 30)) * _MIX1
    z = (z ^ _shift_right(z, 27)) * _MIX2
    return z ^ _shift_right(z, 31)


def keep_mask(
    local_shape: Sequence[int],
    p: float,
    seed: int,
    offset: Sequence[int],
    global_shape: Sequence[int],
    device: torch.device | None = None,
) -> Tensor:
    """True where an element survives; element i of the global tensor does when hash(seed, i) >= p.

    The hash is SplitMix64 (Steele et al. 2014) of seed + (i + 1) * golden gamma; its upper 24 bits are the uniform
    number compared with p.
    """
    z = hash_of(seed, global_index(local_shape, offset, global_shape, device))
    return _shift_right(z, 40) >= round(p * (1 << 24))


def sharded_dropout(
    x: Tensor, p: float, *, seed: int, offset: Sequence[int] | None = None, global_shape: Sequence[int] | None = None
) -> Tensor:
    """See `fastpar.ops.sharded_dropout`."""
    mask = keep_mask(x.shape, p, seed, offset or [0] * x.dim(), global_shape or x.shape, x.device)
    scale = 1.0 / (1.0 - p) if p < 1 else 0.0
    return torch.where(mask, x * scale, torch.zeros((), dtype=x.dtype, device=x.device))
