"""Coefficients of Newton-Schulz iterations, and the checks of their arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fastpar.comm import Communicator

Triple = tuple[float, float, float]
DTYPES = (torch.bfloat16, torch.float32, torch.float64)
MAX_STEPS = 100
_SAFETY = 1.01
_POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
)
# By name, (a, b, c) of p(s) = a s + b s^3 + c s^5 for each step; the last serves all further steps.
#   quintic        one polynomial with a steep slope at 0: singular values end between 0.68 and 1.21.
#                  Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/
#   polar_express  the best polynomial of each step for what the steps before have left of [1e-3, 1]; 1.01 is the room
#                  that the paper leaves for rounding. Amsel et al. 2025, arXiv:2505.16932, Algorithm 1.
#   cubic          the iteration of Schulz 1933: exact in the limit, and slow for small singular values.
COEFFICIENTS: dict[str, tuple[Triple, ...]] = {
    "quintic": ((3.4445, -4.7750, 2.0315),),
    "polar_express": (
        *((a / _SAFETY, b / _SAFETY**3, c / _SAFETY**5) for a, b, c in _POLAR_EXPRESS),
        (1.875, -1.25, 0.375),
    ),
    "cubic": ((1.5, -0.5, 0.0),),
}


def polynomials(coefficients: str | Sequence[float] | Sequence[Sequence[float]], steps: int) -> list[Triple]:
    """(a, b, c) of every step. Raises ValueError for an unknown name, a wrong number of coefficients or of steps."""
    if not 1 <= steps < MAX_STEPS:
        raise ValueError(f"the number of Newton-Schulz steps must be from 1 to {MAX_STEPS - 1}, got {steps}")
    given: Sequence[object]
    if isinstance(coefficients, str):
        if coefficients not in COEFFICIENTS:
            raise ValueError(f"coefficients must be numbers or one of {sorted(COEFFICIENTS)}, got {coefficients!r}")
        given = COEFFICIENTS[coefficients]
    else:
        given = list(coefficients)
        if given and not isinstance(given[0], Sequence):
            given = [given]
    found = [tuple(float(value) for value in triple) for triple in given]  # type: ignore[attr-defined]
    if not found or any(len(triple) != 3 for triple in found):
        raise ValueError(f"coefficients must be three numbers, or three numbers for each step, got {coefficients!r}")
    return [found[min(step, len(found) - 1)] for step in range(steps)]  # type: ignore[misc]


def check_newton_schulz(
    x: Tensor, comm: Communicator | None, dim: int, sizes: Sequence[int] | None, dtype: torch.dtype
) -> tuple[int, tuple[int, ...]]:
    """(dim as -2 or -1, rows or columns of every rank). Raises TypeError or ValueError with the values."""
    if hasattr(x, "device_mesh"):
        raise TypeError("x must be a plain tensor, got a DTensor: pass x.to_local() with group= and dim=")
    if not x.is_floating_point():
        raise TypeError(f"x must have a floating dtype, got {x.dtype}")
    if dtype not in DTYPES:
        raise TypeError(f"dtype must be one of {', '.join(map(str, DTYPES))}, got {dtype}")
    if x.dim() < 2:
        raise ValueError(f"x must be a matrix or a stack of matrices, got shape {tuple(x.shape)}")
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError("newton_schulz has no backward: pass x.detach(), or call it under torch.no_grad()")
    if dim not in (-2, -1, x.dim() - 2, x.dim() - 1):
        raise ValueError(f"dim must be one of the last two dims of x, -2 or -1, got {dim} for {x.dim()} dims")
    dim = dim - x.dim() if dim >= 0 else dim
    rank, ranks = (0, 1) if comm is None else (comm.rank, comm.size)
    found = (x.shape[dim],) * ranks if sizes is None else tuple(sizes)
    if len(found) != ranks or min(found) < 0:
        raise ValueError(f"sizes must have a number for each of {ranks} ranks, none negative, got {list(found)}")
    if found[rank] != x.shape[dim]:
        raise ValueError(f"sizes[{rank}] is {found[rank]}, but x has {x.shape[dim]} along dim {dim}")
    return dim, found
