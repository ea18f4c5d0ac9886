"""The parts of a module's whole tensor that the tensors of a tensor-parallel group are.

A column-parallel layer says it itself (its rows). Elsewhere what fits the sizes is tried: parts of the sequence, of
flattened tokens, of features or heads, in the order of ranks or as the rows of the layers in the same block go. Where
several fit, the one that agrees best counts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fastpar.comm import shard_range
from fastpar.verification.layout import ModuleHints
from fastpar.verification.pieces import Index

Places = list[Index]  # by rank of the group


class Alignment:
    """Places of tensors in one layout.

    hints   of the ranks that run the module
    tokens  (batch, sequence) of a part of the batch, where inputs have both
    """

    def __init__(self, hints: ModuleHints, tokens: tuple[int, int] | None) -> None:
        self._hints, self._tokens = hints, tokens

    def places(self, path: str, is_output: bool, whole: Tensor, locals_: Sequence[Tensor]) -> Iterator[Places]:
        """Places of the locals in the whole; nothing where their sizes do not fit."""
        if any(x.dim() != whole.dim() for x in locals_):
            return
        dims = [d for d in range(whole.dim()) if any(x.size(d) != whole.size(d) for x in locals_)]
        if not dims:
            yield [(None,) * whole.dim()] * len(locals_)
            return
        if len(dims) > 1 or (not path and dims[0] != whole.dim() - 1):
            return  # of what a model returns, logits may be split, and nothing else
        dim, sizes = dims[0], [x.size(dims[0]) for x in locals_]
        for rows in self._rows(path, is_output, dim, whole, sizes):
            yield [tuple(rows[rank] if d == dim else None for d in range(whole.dim())) for rank in range(len(sizes))]

    def may_be_parts(self, places: Places) -> bool:
        """Whether gradients of what ranks share are parts: that of heads is, and what is whole on every rank is not."""
        return overlaps(places)

    def _rows(self, path: str, is_output: bool, dim: int, whole: Tensor, sizes: list[int]) -> Iterator[list[Tensor]]:
        total, own = whole.size(dim), self._hints.rows.get(path)
        if own is not None and is_output and dim == whole.dim() - 1:
            if own[0] == total:
                yield from _fitting(_row_indices(own[1], 1), sizes)
            return
        for candidate in self._neighbours(path, total, len(sizes)):
            yield from _fitting(candidate, sizes)
        if sum(sizes) == total:
            starts = [0, *itertools.accumulate(sizes)]
            yield [torch.arange(starts[rank], starts[rank + 1]) for rank in range(len(sizes))]
        if dim == 0 and self._tokens is not None and self._tokens[0] * self._tokens[1] == total:
            yield from _fitting(_flattened_tokens(*self._tokens, len(sizes)), sizes)

    def _neighbours(self, path: str, total: int, ranks: int) -> Iterator[list[Tensor]]:
        """Rows of the layers in the same block, by feature or, where these are fewer, by head."""
        around = [b for b in self._hints.blocks if path == b or path.startswith(f"{b}.")]
        seen = set()
        for other, (features, ranges) in self._hints.rows.items():
            if features % total or len(ranges) != ranks or not any(other.startswith(f"{b}.") for b in around):
                continue
            unit = features // total
            if (ranges, unit) not in seen and all(
                edge % unit == 0 for rank in ranges for pair in rank for edge in pair
            ):
                seen.add((ranges, unit))
                yield _row_indices(ranges, unit)


def overlaps(places: Places) -> bool:
    """True if ranks hold the same elements, of those that are not whole on every rank."""
    for index in zip(*places, strict=True):
        rows = [x for x in index if x is not None]
        if rows and len(torch.cat(rows).unique()) < sum(len(x) for x in rows):
            return True
    return False


def _row_indices(ranges: tuple[tuple[tuple[int, int], ...], ...], unit: int) -> list[Tensor]:
    empty = torch.arange(0)
    return [torch.cat([torch.arange(lo // unit, hi // unit) for lo, hi in rank] or [empty]) for rank in ranges]


def _flattened_tokens(batch: int, length: int, ranks: int) -> list[Tensor]:
    """Parts of every sequence, in a tensor whose first dim is batch times sequence."""
    found = []
    for rank in range(ranks):
        lo, hi = shard_range(length, ranks, rank)
        found.append((torch.arange(batch)[:, None] * length + torch.arange(lo, hi)).reshape(-1))
    return found


def _fitting(rows: list[Tensor], sizes: list[int]) -> Iterator[list[Tensor]]:
    if [len(x) for x in rows] == sizes:
        yield rows
