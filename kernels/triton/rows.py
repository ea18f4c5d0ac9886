"""Tensors as rows of their last dim, for kernels that take two leading dims with any strides and copy nothing."""

from __future__ import annotations

import torch
from torch import Tensor


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, float32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def as_rows(*tensors: Tensor) -> tuple[int, list[tuple[Tensor, int, int]]]:
    """(inner, [(tensor, outer, step)]): row r of the tensor begins at r // inner * outer + r % inner * step.

    The tensors have the same leading dims. These are merged where the rows of every tensor allow it; tensors that need
    more than two dims after that, or whose last dim is not contiguous, are copied.
    """
    if all(t.is_contiguous() for t in tensors):  # as _merged would find, and most tensors are
        size = tensors[0].shape[-1]
        return tensors[0].shape[:-1].numel(), [(t, 0, size) for t in tensors]
    dense = [t if t.shape[-1] <= 1 or t.stride(-1) == 1 else t.contiguous() for t in tensors]
    merged = _merged(dense)
    if len(merged) > 2:
        dense = [t.contiguous() for t in dense]
        merged = _merged(dense)
    while len(merged) < 2:
        merged.insert(0, (1, [0] * len(dense)))
    (_, outer), (inner, strides) = merged
    return inner, list(zip(dense, outer, strides, strict=True))


def _merged(tensors: list[Tensor]) -> list[tuple[int, list[int]]]:
    """(size, stride in every tensor) of the leading dims; adjacent ones are joined where all tensors allow it."""
    dims: list[tuple[int, list[int]]] = []
    for d, size in enumerate(tensors[0].shape[:-1]):
        strides = [t.stride(d) for t in tensors]
        if size == 1:
            continue
        if dims and all(before == size * s for before, s in zip(dims[-1][1], strides, strict=True)):
            dims[-1] = (dims[-1][0] * size, strides)
        else:
            dims.append((size, strides))
    return dims
