"""Memory for results and scratch that is as large every step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from fastpar import _ext

_ext.load()

LARGE_BYTES = 8 << 20  # kLargeBufferBytes of csrc/common/large_buffer.h, below which its pool does nothing


def is_large(like: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> bool:
    """Whether `new_buffer` takes its memory from the pool."""
    itemsize = like.itemsize if dtype is None else dtype.itemsize
    return math.prod(shape) * itemsize >= LARGE_BYTES and like.is_cpu


def new_buffer(like: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """An uninitialised contiguous tensor on like's device, of like's dtype unless another is given.

    On CPU large ones come from the library's pool (csrc/common/large_buffer.h): torch returns large blocks to the
    system, and touching new pages costs more than filling them. On CUDA torch keeps a pool itself.
    """
    dtype = like.dtype if dtype is None else dtype
    if is_large(like, shape, dtype):
        return cast(Tensor, torch.ops.fastpar.large_buffer_empty(list(shape), dtype))
    return torch.empty(shape, dtype=dtype, device=like.device)
