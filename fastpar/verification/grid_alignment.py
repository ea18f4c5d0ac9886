"""The parts of a module's whole tensor that the tensors of the ranks of a tensor-parallel grid are.

Several dims are cut, each by itself: the batch over copies of the weights and z, tokens over y (or x), features as the
layers say whose output they are, as the layers of the same block do, or over an axis. What fits the sizes is tried.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fastpar.comm import shard_range
from fastpar.mesh.grid import TENSOR_GRID_DIMS
from fastpar.verification.layout import ModuleHints
from fastpar.verification.pieces import Index

_X, _Y, _REPLICAS, _Z = TENSOR_GRID_DIMS
Rows = list[Any]  # by rank: which indices of a dim it has; None: all of them


class GridAlignment:
    """Places of tensors on a grid, as `Alignment` has them in one dim.

    hints   of each rank
    tokens  (batch, sequence) of a part of the batch, where inputs have both
    """

    def __init__(self, hints: Sequence[ModuleHints], tokens: tuple[int, int] | None) -> None:
        self._hints, self._tokens = hints, tokens

    def places(self, path: str, is_output: bool, whole: Tensor, locals_: Sequence[Tensor]) -> Iterator[list[Index]]:
        """Places of the locals in the whole; nothing where their sizes do not fit."""
        if any(x.dim() != whole.dim() for x in locals_):
            return
        by_dim = [
            list(self._rows(path, is_output, dim, whole, [x.size(dim) for x in locals_])) for dim in range(whole.dim())
        ]
        for rows in itertools.product(*by_dim):
            yield [tuple(of_dim[rank] for of_dim in rows) for rank in range(len(locals_))]

    def may_be_parts(self, places: list[Index]) -> bool:
        """Whether gradients of what ranks share are parts: on a grid what lies between blocks is the same on all."""
        return False

    def _rows(self, path: str, is_output: bool, dim: int, whole: Tensor, sizes: list[int]) -> Iterator[Rows]:
        total, is_last = whole.size(dim), dim == whole.dim() - 1
        if all(size == total for size in sizes):
            yield [None] * len(sizes)
            return
        if not path and not is_last:
            return  # of what a model returns, logits may be split, and nothing else
        seen: list[list[list[int]]] = []
        for rows in self._candidates(path, is_output and is_last, dim, total):
            key = [part.tolist() for part in rows]
            if [len(part) for part in rows] == sizes and key not in seen:
                seen.append(key)
                yield rows

    def _candidates(self, path: str, is_output: bool, dim: int, total: int) -> Iterator[Rows]:
        own = [each.features[path] for each in self._hints if path in each.features]
        if is_output and own and own[0][0] == total:
            yield [rows for _, rows in own]
            return
        if dim == 0:
            yield self._over(total, _REPLICAS, _Z)
            yield from self._flattened(total)
            return
        yield from self._neighbours(path, total)
        for axes in ((_Y,), (_X,), (_Y, _X), ("tp",)):
            yield self._over(total, *axes)

    def _over(self, total: int, *axes: str) -> Rows:
        """Cut over one axis after the other, by `torch.chunk`'s rule."""
        found = []
        for hints in self._hints:
            rows = torch.arange(total)
            for axis in axes:
                rank, size = hints.grid[axis]
                lo, hi = shard_range(len(rows), size, rank)
                rows = rows[lo:hi]
            found.append(rows)
        return found

    def _flattened(self, total: int) -> Iterator[Rows]:
        """The rows of a dim that is batch times sequence."""
        if self._tokens is None or self._tokens[0] * self._tokens[1] != total:
            return
        batch, length = self._tokens
        firsts = self._over(batch, _REPLICAS, _Z)
        for cut in (self._over(length), self._over(length, _Y)):
            yield [(b[:, None] * length + t).flatten() for b, t in zip(firsts, cut, strict=True)]

    def _neighbours(self, path: str, total: int) -> Iterator[Rows]:
        """Features, or where these are fewer heads, of the layers in the same block."""
        around = [block for block in self._hints[0].blocks if path == block or path.startswith(f"{block}.")]
        for other, (features, _) in self._hints[0].features.items():
            if features % total or not any(other.startswith(f"{block}.") for block in around):
                continue
            unit = features // total
            rows = [each.features[other][1] for each in self._hints]
            if all(len(part) % unit == 0 for part in rows):
                heads = [part.view(-1, unit) for part in rows]
                if all(torch.equal(part, part[:, :1] + torch.arange(unit)) for part in heads):
                    yield [part[:, 0] // unit for part in heads]


__all__ = ["GridAlignment"]
