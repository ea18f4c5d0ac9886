"""Dropout that gives the same mask under every layout.

Each call draws one 64-bit seed from torch's default CPU generator, the same on all ranks that were seeded alike, and an
element's fate depends on that seed and its position in the *global* tensor. So `torch.manual_seed(s)` gives the same
masks whether the tensor is whole, split along the sequence or heads, or a data-parallel share of the batch; and
`torch.utils.checkpoint` replays them, because it restores that generator.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastpar.arguments import checked
from fastpar.comm.shards import check_is_tensor
from fastpar.ops.dropout import sharded_dropout
from fastpar.tensor.sequence import SequenceRegion, splitting


class LayoutDropout(nn.Module):
    """`nn.Dropout` for a tensor that may be this rank's share of a larger one.

    x    [B_r, ...]   dim 0 is split evenly over the data-parallel ranks (`batch=(rank, size)`); with `sequence`, the
                      region's dim is split along the sequence
    out  x / (1 - p) where the mask keeps, 0 elsewhere; no collective
    """

    @checked(computed=False)
    def __init__(self, p: float = 0.5, *, sequence: SequenceRegion | None = None, batch: tuple[int, int] = (0, 1)):
        super().__init__()
        self._configure(p, sequence=sequence, batch=batch)

    def _configure(self, p: float, *, sequence: SequenceRegion | None, batch: tuple[int, int]) -> None:
        if not 0.0 <= p <= 1.0:
            raise ValueError(f"dropout probability p must be between 0 and 1, got {p}")
        self.p, self.sequence, self.batch = p, sequence, batch

    def forward(self, x: Tensor) -> Tensor:
        check_is_tensor(x)
        if not self.training or self.p == 0.0:
            return x
        if x.dim() == 0:
            raise ValueError("x must have at least one dim, got a scalar tensor: dim 0 is the batch")
        offset, shape = [0] * x.dim(), list(x.shape)
        rank, size = self.batch
        offset[0], shape[0] = rank * x.size(0), size * x.size(0)
        sequence = splitting(self.sequence)
        if sequence is not None:
            offset[sequence.dim], shape[sequence.dim] = sequence.offset, sequence.total
        return sharded_dropout(x, self.p, seed=draw_seed(), offset=offset, global_shape=shape)

    def extra_repr(self) -> str:
        where = "along the sequence" if self.sequence is not None else "whole"
        return f"p={self.p}, {where}, batch share {self.batch[0]} of {self.batch[1]}"


def draw_seed() -> int:
    """One 62-bit number from torch's default CPU generator."""
    return int(torch.empty((), dtype=torch.int64).random_(0, 1 << 62).item())


__all__ = ["LayoutDropout", "draw_seed"]
