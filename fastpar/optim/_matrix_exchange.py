"""Brings the parts of matrices to the ranks that orthogonalize them, and the results back.

    exchange = MatrixExchange(axes, specs, places, parts)
    blocks = exchange.collect(parts)                         # {index: what this rank orthogonalizes}
    parts = exchange.distribute({i: ... for i in blocks})    # one for each part, in their order

One axis after the other. The ranks of an axis differ in one coordinate only, so a matrix that is cut along two axes is
put together along the first wherever the other coordinates are those of parts, and along the second where its owner is.
All matrices travel in one all-to-all per axis and direction. Replicas of a part need nothing on the way there; on the
way back those of the owner give the result to the others in one all-gather per axis.

Bytes. With n numbers in all matrices, R ranks along one axis and an even distribution, a rank sends n / R numbers there
and n / R back, of each 1 / R to itself; over R replicas it sends n / R and receives the others' n (R - 1) / R. Beside
parts and results a rank holds at most what it sends, what it receives, and the matrices that it owns: 3 n / R numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fastpar.comm import Communicator
from fastpar.optim._matrix_layout import COLUMNS, COPY, CUTS, ROWS, MatrixSpec
from fastpar.optim._matrix_plan import Place

Shape = tuple[int, int, int]
Blocks = dict[int, Tensor]


@dataclass(frozen=True)
class _ExchangeStage:
    """What happens along one axis: matrices travel to their owners, or (replicas) results from them.

    owned   the matrices of each rank
    shapes  of this rank's part of each matrix
    pieces  of every rank's part of each matrix that this rank owns
    dims    along which a matrix is cut
    """

    comm: Communicator
    owned: list[list[int]]
    shapes: dict[int, Shape]
    pieces: dict[int, list[Shape]]
    dims: dict[int, int]

    @property
    def mine(self) -> list[int]:
        return self.owned[self.comm.rank]


class MatrixExchange:
    """The travels of stacks of matrices, whose parts [count, rows, columns] have one dtype and device.

    Raises ValueError if a part has another shape than the chunks of `torch.chunk` have.
    """

    def __init__(
        self,
        axes: Sequence[Communicator],
        specs: Sequence[MatrixSpec],
        places: Sequence[Place],
        parts: Sequence[Tensor],
    ) -> None:
        self._axes = tuple(axes)
        self._specs = tuple(specs)
        self._places = tuple(places)
        self._counts = [part.shape[0] for part in parts]
        for index, part in enumerate(parts):
            if part.shape != self._shape(index, 0):
                raise ValueError(
                    f"this rank's part of a matrix {list(specs[index].shape)} must be {list(self._shape(index, 0)[1:])}"
                    f", the chunk of torch.chunk along {'/'.join(specs[index].kinds)}, got {list(part.shape[1:])}"
                )
        here = list(range(len(parts)))
        self._copies: list[_ExchangeStage] = []
        for axis in range(len(axes)):
            self._copies.append(self._stage(axis, here, (COPY,)))
            here = self._kept(here, axis, (COPY,))
        self._collected_from = here
        self._cuts: list[_ExchangeStage] = []
        for axis in range(len(axes)):
            self._cuts.append(self._stage(axis, here, CUTS))
            here = self._kept(here, axis, CUTS)

    # ---- what goes where

    def split(self, index: int) -> tuple[Communicator, int, list[int]] | None:
        """(group, dim, its sizes) along which a collected block is still split, or None."""
        axis = self._places[index].split
        if axis is None:
            return None
        dim = self._dim(index, axis)
        sizes = [self._shape(index, len(self._axes), axis, rank)[dim] for rank in range(self._axes[axis].size)]
        return self._axes[axis], dim, sizes

    def _dim(self, index: int, axis: int) -> int:
        return -2 if self._specs[index].kinds[axis] == ROWS else -1

    def _shape(self, index: int, stage: int, axis: int = 0, rank: int | None = None) -> Shape:
        """The shape of this rank's block when the axes before `stage` are collected, or of the one with `rank` along
        `axis`."""
        spec, owner = self._specs[index], self._places[index].owner
        fixed = {a: comm.rank for a, comm in enumerate(self._axes) if a >= stage or owner[a] is None}
        if rank is not None:
            fixed[axis] = rank
        sizes = [comm.size for comm in self._axes]
        return self._counts[index], spec.extent(ROWS, sizes, fixed), spec.extent(COLUMNS, sizes, fixed)

    def _kept(self, indices: Sequence[int], axis: int, kinds: Sequence[str]) -> list[int]:
        """The matrices that are here before a stage, and after it."""
        here = (None, self._axes[axis].rank)
        return [i for i in indices if self._specs[i].kinds[axis] not in kinds or self._places[i].owner[axis] in here]

    def _stage(self, axis: int, here: Sequence[int], kinds: Sequence[str]) -> _ExchangeStage:
        comm = self._axes[axis]
        moved = [i for i in here if self._specs[i].kinds[axis] in kinds and self._places[i].owner[axis] is not None]
        owned = [[i for i in moved if self._places[i].owner[axis] == rank] for rank in range(comm.size)]
        if COPY in kinds:
            return _ExchangeStage(comm, owned, {i: self._shape(i, 0) for i in moved}, {}, {})
        shapes = {i: self._shape(i, axis) for i in moved}
        pieces = {i: [self._shape(i, axis, axis, rank) for rank in range(comm.size)] for i in owned[comm.rank]}
        return _ExchangeStage(comm, owned, shapes, pieces, {i: self._dim(i, axis) for i in moved})

    # ---- there and back

    def collect(self, parts: Sequence[Tensor]) -> Blocks:
        """The blocks that this rank orthogonalizes, by index."""
        blocks = {index: parts[index] for index in self._collected_from}
        for stage in self._cuts:
            if not stage.shapes:
                continue
            ranks = range(stage.comm.size)
            received = _all_to_all(
                stage.comm,
                [[blocks.pop(i) for i in indices] for indices in stage.owned],
                [[stage.pieces[i][rank] for i in stage.mine] for rank in ranks],
                parts[0],
            )
            for position, i in enumerate(stage.mine):
                blocks[i] = torch.cat([received[rank][position] for rank in ranks], dim=stage.dims[i])
        return blocks

    def distribute(self, results: Mapping[int, Tensor], like: Tensor) -> list[Tensor]:
        """This rank's part of every result, in the order of `collect`'s parts. `like` has their dtype and device."""
        blocks = dict(results)
        for stage in reversed(self._cuts):
            if not stage.shapes:
                continue
            pieces = {}
            for i in stage.mine:
                sizes = [shape[stage.dims[i]] for shape in stage.pieces[i]]
                pieces[i] = blocks.pop(i).split(sizes, dim=stage.dims[i])
            received = _all_to_all(
                stage.comm,
                [[pieces[i][rank] for i in stage.mine] for rank in range(stage.comm.size)],
                [[stage.shapes[i] for i in indices] for indices in stage.owned],
                like,
            )
            for indices, found in zip(stage.owned, received, strict=True):
                blocks.update(zip(indices, found, strict=True))
        for stage in reversed(self._copies):
            if stage.shapes:
                shapes = [[stage.shapes[i] for i in indices] for indices in stage.owned]
                sizes = [sum(map(_numel, of_rank)) for of_rank in shapes]
                gathered = stage.comm.all_gather(_flat([blocks[i] for i in stage.mine], like), sizes=sizes)
                for indices, found in zip(stage.owned, _unflatten(gathered, shapes), strict=True):
                    blocks.update(zip(indices, found, strict=True))
        return [blocks[index] for index in range(len(self._specs))]


# ---- flat tensors ----------------------------------------------------------------------------------------------------


def _numel(shape: Shape) -> int:
    return shape[0] * shape[1] * shape[2]


def _flat(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.cat([t.reshape(-1) for t in tensors]) if tensors else like.new_empty(0)


def _unflatten(flat: Tensor, shapes: Sequence[Sequence[Shape]]) -> list[list[Tensor]]:
    pieces = iter(flat.split([_numel(shape) for of_rank in shapes for shape in of_rank]))
    return [[next(pieces).view(shape) for shape in of_rank] for of_rank in shapes]


def _all_to_all(
    comm: Communicator, sent: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[Shape]], like: Tensor
) -> list[list[Tensor]]:
    """What the ranks sent to this one, `shapes` of each; `sent[r]` goes to rank r."""
    received = comm.all_to_all(
        _flat([t for to_rank in sent for t in to_rank], like),
        input_sizes=[sum(t.numel() for t in to_rank) for to_rank in sent],
        output_sizes=[sum(map(_numel, of_rank)) for of_rank in shapes],
    )
    return _unflatten(received, shapes)
