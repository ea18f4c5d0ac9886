"""Dropout that gives the same mask under every layout.

Each call draws one 64-bit seed from torch's default CPU generator, the same on all ranks that were seeded alike, and an
element's fate depends on that seed and its position in the *global* tensor. So `torch.manual_seed(s)` gives the same
masks whether the tensor is whole, split along the sequence or heads, or a data-parallel share of the batch; and
`torch.utils.checkpoint` replays them, because it restores that generator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from fastpar.arguments import checked
from fastpar.comm.shards import check_is_tensor
from fastpar.contracts import refuse_capture
from fastpar.ops.dropout import sharded_dropout
from fastpar.tensor.sequence import SequenceRegion, splitting

SplitTokens = Callable[[], tuple[Sequence[tuple[int, int, int]], int]]


class LayoutDropout(nn.Module):
    """`nn.Dropout` for a tensor that may be this rank's share of a larger one.

    x    [B_r, ...]   dim 0 is split evenly over the data-parallel ranks (`batch=(rank, size)`); with `sequence`, the
                      dims that the region cuts are as it says; with `tokens`, dim 1 are these tokens of the sequence
    out  x / (1 - p) where the mask keeps, 0 elsewhere; no collective

    tokens   gives the ranges (start, stop, step) of this rank's tokens, in local order, and how many there are of all
    """

    @checked(computed=False)
    def __init__(
        self,
        p: float = 0.5,
        *,
        sequence: SequenceRegion | None = None,
        batch: tuple[int, int] = (0, 1),
        tokens: SplitTokens | None = None,
    ):
        super().__init__()
        self._configure(p, sequence=sequence, batch=batch, tokens=tokens)

    def _configure(
        self,
        p: float,
        *,
        sequence: SequenceRegion | None,
        batch: tuple[int, int],
        tokens: SplitTokens | None = None,
    ) -> None:
        if not 0.0 <= p <= 1.0:
            raise ValueError(f"dropout probability p must be between 0 and 1, got {p}")
        self.p, self.sequence, self.batch, self.tokens = p, sequence, batch, tokens

    def forward(self, x: Tensor) -> Tensor:
        check_is_tensor(x)
        if not self.training or self.p == 0.0:
            return x
        if x.dim() == 0:
            raise ValueError("x must have at least one dim, got a scalar tensor: dim 0 is the batch")
        offset, shape = [0] * x.dim(), list(x.shape)
        rank, size = self.batch
        sequence = splitting(self.sequence)
        for dim, (first, total) in ({} if sequence is None else sequence.place()).items():
            offset[dim], shape[dim] = first, total
        offset[0], shape[0] = offset[0] + rank * shape[0], size * shape[0]
        if self.tokens is not None:
            return self._of_ranges(x, *self.tokens(), offset, shape)
        return sharded_dropout(x, self.p, seed=draw_seed(), offset=offset, global_shape=shape)

    def _of_ranges(
        self, x: Tensor, ranges: Sequence[tuple[int, int, int]], total: int, offset: list[int], shape: list[int]
    ) -> Tensor:
        """One call for each range of tokens, of one seed; a range of step t is a column of tokens in rows of t."""
        seed, sequence = draw_seed(), splitting(self.sequence)
        counts = [len(range(*each)) for each in ranges]
        here = sum(counts)
        first, last = 0, here
        if sequence is not None and x.dim() > 1:
            first, last = sequence.offset, sequence.offset + sequence.sizes[sequence.comm.rank]
        if x.dim() < 2 or x.size(1) != last - first:
            raise ValueError(
                f"dropout of {tuple(x.shape)}: dim 1 must be the {last - first} tokens of this rank, so that masks go "
                "by their places in the sequence"
            )
        parts, local = [], 0
        for (start, _, step), count in zip(ranges, counts, strict=True):
            begin, end = max(local, first), min(local + count, last)
            if begin < end:
                part = x[:, begin - first : end - first].unsqueeze(2)
                at = [offset[0], (start + (begin - local) * step) // step, start % step, *offset[2:]]
                if total % step:
                    raise ValueError(f"dropout needs a sequence that {step} striped ranks divide, got {total} tokens")
                whole = [shape[0], total // step, step, *shape[2:]]
                parts.append(sharded_dropout(part, self.p, seed=seed, offset=at, global_shape=whole).squeeze(2))
            local += count
        return torch.cat(parts, 1) if parts else x

    def extra_repr(self) -> str:
        where = "along the sequence" if self.sequence is not None else "whole"
        return f"p={self.p}, {where}, batch share {self.batch[0]} of {self.batch[1]}"


def draw_seed() -> int:
    """One 62-bit number from torch's default CPU generator."""
    refuse_capture("the seed of dropout is drawn on the host, which cannot be", "Capture with p=0, or torch's dropout")
    return int(torch.empty((), dtype=torch.int64).random_(0, 1 << 62).item())


__all__ = ["LayoutDropout", "draw_seed"]
