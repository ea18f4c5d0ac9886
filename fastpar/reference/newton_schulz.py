"""Newton-Schulz orthogonalization in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fastpar.contracts import communicator
from fastpar.contracts.newton_schulz import check_newton_schulz, polynomials

if TYPE_CHECKING:
    from fastpar.comm import GroupLike


def newton_schulz(
    x: Tensor,
    *,
    group: GroupLike = None,
    dim: int = -1,
    sizes: Sequence[int] | None = None,
    steps: int = 5,
    coefficients: str | Sequence[float] | Sequence[Sequence[float]] = "quintic",
    eps: float = 1e-7,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """See `fastpar.ops.newton_schulz`; this one gathers the matrix and gives every rank its part of the result."""
    comm = communicator(group)
    triples = polynomials(coefficients, steps)
    dim, sizes = check_newton_schulz(x, comm, dim, sizes, dtype)
    with torch.no_grad():
        whole = (x if comm is None else comm.all_gather(x, dim=dim, sizes=sizes)).to(dtype)
        whole = whole / whole.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
        for a, b, c in triples:
            if whole.shape[-2] <= whole.shape[-1]:
                gram = whole @ whole.mT
                whole = a * whole + (b * gram + c * gram @ gram) @ whole
            else:
                gram = whole.mT @ whole
                whole = a * whole + whole @ (b * gram + c * gram @ gram)
        rank = 0 if comm is None else comm.rank
        return whole.narrow(dim, sum(sizes[:rank]), sizes[rank]).contiguous()
