"""The exact norm of gradients, and clipping by it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fastpar import ops
from fastpar.comm import Communicator
from fastpar.comm.communicator import GroupLike


class GradSum:
    """The exact sum of squares of gradients, collected in pieces and over ranks.

        total = GradSum(device)
        total.add(grads)                     # this rank's part, in any pieces
        total.combine(comm)                  # one all-reduce of 160 bytes; the same sum on every rank
        factor = total.clip_factor(max_norm) # float32 scalar, for the update to multiply gradients with

    Sums are integers, so the result has the same bits however the elements are spread over calls and ranks. Every
    element must be added on exactly one rank of those that are combined.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        self.sums = ops.exact_square_sum([]).to(device or "cpu")

    def add(self, tensors: Iterable[Tensor | None], *, share: tuple[int, int] = (0, 1)) -> GradSum:
        """Add all elements of `tensors` (local parts of DTensors; None is left out); `self` is returned.

        share  (index, count): add only the index'th of `count` equal parts of every tensor, for tensors that `count`
               ranks hold alike: each reads a part.
        """
        index, count = share
        if not 0 <= index < count:
            raise ValueError(f"share must be (index, count) with 0 <= index < count, got {share}")
        local = [x.to_local() if isinstance(x, DTensor) else x for x in tensors if x is not None]
        if count > 1:
            local = [_part(x, index, count) for x in local]
        self.sums = self.sums + ops.exact_square_sum(local).to(self.sums.device)
        return self

    def combine(self, *groups: GroupLike) -> GradSum:
        """Sum over the ranks of each group in turn; `self` is returned."""
        for group in groups:
            self.sums = Communicator.of(group).all_reduce(self.sums)
        return self

    def norm(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The norm, rounded once to float32 or float64: a scalar tensor. NaN where a gradient is NaN, else inf where
        one is infinite (or the norm is too large for the dtype).
        """
        return ops.square_sum_norm(self.sums, dtype)

    @property
    def nonfinite(self) -> Tensor:
        """The number of elements that are NaN or infinite: an int64 scalar tensor."""
        return self.sums[:2].sum()

    @property
    def found_inf(self) -> Tensor:
        """1.0 where any element is NaN or infinite, else 0.0: a float32 scalar tensor."""
        return (self.nonfinite != 0).float()

    def clip_factor(self, max_norm: float, *, scale: float | Tensor = 1.0, eps: float = 1e-6) -> Tensor:
        """What to multiply the gradients with so that their norm is at most max_norm: a float32 scalar tensor.

        scale  the factor that gradients are multiplied with before they are clipped, as 1 / loss_scale. The result
               includes it: scale * min(1, max_norm / (scale * norm + eps)).

        Where the norm is not finite the result is `scale` alone: nothing is clipped.
        """
        norm = self.norm() * scale
        factor = (max_norm / (norm + eps)).clamp(max=1.0)
        return torch.where(norm.isfinite(), factor, 1.0) * scale


def _part(x: Tensor, index: int, count: int) -> Tensor:
    """Elements index * n / count to (index + 1) * n / count of x, in the order of a contiguous tensor."""
    flat, n = x.reshape(-1), x.numel()
    return flat[index * n // count : (index + 1) * n // count]
