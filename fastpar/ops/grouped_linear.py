"""Linear layers of several experts on rows that lie by expert."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional


def grouped_linear(
    x: Tensor, weight: Tensor, splits: Sequence[int], bias: Tensor | None = None, *, transposed: bool = False
) -> Tensor:
    """Rows splits[e] to splits[e + 1] of x times the weight of expert e.

    x       [N, K]
    weight  [E, F, K]   or [E, K, F] if transposed
    bias    [E, F]
    out     [N, F]
    """
    parts = []
    for expert, (begin, end) in enumerate(zip(splits[:-1], splits[1:], strict=True)):
        matrix = weight[expert].T if transposed else weight[expert]
        parts.append(functional.linear(x[begin:end], matrix, None if bias is None else bias[expert]))
    return torch.cat(parts)
