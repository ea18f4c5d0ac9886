"""The exact sum of squares, and its square root."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from fastpar import reference


def exact_square_sum(tensors: Iterable[Tensor]) -> Tensor:
    return reference.exact_square_sum(tensors)


def square_sum_norm(sums: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return reference.square_sum_norm(sums, dtype)
