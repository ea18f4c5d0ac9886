"""A tensor-parallel grid at run time: the communicators of its axes, and how activations enter and leave it.

Note: who holds what
    Axes x and y share features, z tokens (`fastpar.GridSpec`). The hidden states [B, S, H] between two blocks are cut

        spread="rows"        B over z, S over y, H over x
        spread="copy"        B over z,           H over x      the same on all ranks of y
        spread="features"    B over z,           H over y

    each by `torch.chunk`'s rule. A column-parallel linear turns S over y into S over x while it turns H over x into its
    own features over y; the row-parallel one after it turns both back.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from fastpar.arguments import checked
from fastpar.comm import Communicator, gather_from, gather_sequence, scatter_to, shard_range, shard_sizes
from fastpar.comm.shards import check_is_tensor
from fastpar.mesh import Mesh
from fastpar.mesh.grid import TENSOR_GRID_DIMS
from fastpar.tensor.grid_blocks import (
    BlockLayout,
    DeferredSum,
    offer_twin,
    outside_of_graphs,
    sum_into_blocks,
    whole_twin,
)
from fastpar.tensor.sequence import SequenceRegion


class Grid:
    """This rank's communicators along the axes of a mesh's tensor-parallel grid. Layers of one model share one.

    x, y      ranks that share features
    z         ranks that the weights are spread over; they share the tokens of this replica
    replicas  ranks with the same weights, which share the tokens as well
    ranks     all of them, z fastest
    mesh      of the parameters: the dims of tp_x, tp_y, tp_d and tp_z that have several ranks; "tp" where just one has.
              DTensor tries every placement on every dim, so that an operation's first call costs n**dims
    """

    @checked(computed=False)
    def __init__(self, mesh: Mesh) -> None:
        if mesh.tp_grid is None:
            raise ValueError(f"{mesh!r} has no tensor-parallel grid: make it with init_mesh(tp=N, tp_grid=(x, y, z))")
        self.spec = mesh.tp_grid
        larger = [name for name in TENSOR_GRID_DIMS if mesh.size(name) > 1]
        self.mesh = mesh[tuple(larger)] if len(larger) > 1 else mesh["tp"]
        self.x, self.y, self.replicas, self.z = (Communicator.of(mesh.group(name)) for name in TENSOR_GRID_DIMS)
        self.ranks = Communicator.of(mesh.group("tp"))

    def __deepcopy__(self, memo: Any) -> Grid:
        return self  # a copied model runs on the same groups

    @property
    def features(self) -> Communicator:
        """The axis over which the hidden states' features are cut."""
        return self.y if self.spec.spread == "features" else self.x

    @property
    def heads(self) -> tuple[int, int]:
        """(rank, size) of this rank among those that share the features, or heads, inside of a block: x within y."""
        return self.y.rank * self.x.size + self.x.rank, self.y.size * self.x.size

    @property
    def along(self) -> tuple[Communicator, ...]:
        """x, y, replicas and z."""
        return self.x, self.y, self.replicas, self.z

    @property
    def mesh_axes(self) -> tuple[Communicator, ...]:
        """Those of the dims of `mesh`; z last, so that gathering a weight over it gives what a product takes."""
        return tuple(comm for comm in self.along if comm.size > 1) or (self.z,)


class GridRegion(SequenceRegion):
    """The stretch of a model whose activations lie on a grid; modules inside it share this object.

    x       [B, S, H]         whole, the same on every rank, outside of the region
    inside  [B_z, S_y, H_x]   as the module's note says, by the grid's spread
    """

    option = "tp_grid"

    @checked(computed=False)
    def __init__(self, grid: Grid, *, dim: int = 1):
        if dim < 1:
            raise ValueError(f"dim must be that of the tokens of one sequence, 1 or more, got {dim}")
        super().__init__(grid.y if grid.spec.spread == "rows" else Communicator(None), dim)
        self.grid = grid
        self._shape: tuple[int, int, int] | None = None  # B, S, H
        # At the ends of a pipeline's part: whether this rank's part comes from, and goes to, its twin there.
        self.takes_parts, self.sends_parts = False, False
        self._arrived: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Whole batch, tokens of a sequence and features of what is in the region."""
        if self._shape is None:
            raise RuntimeError("the grid's region is empty: no tensor has entered it (GridRegion.enter)")
        return self._shape

    @property
    def total(self) -> int:
        """Tokens of a whole sequence."""
        return self.shape[1]

    @checked(computed=False)
    def set_shape(self, batch: int, tokens: int, features: int) -> None:
        """Say how large the whole is when its parts come from elsewhere, such as an earlier pipeline stage."""
        copies = self.grid.replicas.size * self.grid.z.size
        if batch < copies:
            raise ValueError(
                f"batch {batch} cannot be cut over tp_z={copies}: use cp={copies}, or z <= {batch} in the grid"
            )
        # `torch.chunk`'s rule, which leaves the last ranks without any.
        per_replica = shard_sizes(batch, self.grid.replicas.size)
        fewest = min(min(shard_sizes(size, self.grid.z.size)) for size in per_replica)
        if fewest == 0:
            raise ValueError(
                f"batch {batch} leaves a rank of tp_z={copies} without a sequence (parts of ceil(batch / z)): use a "
                f"multiple of {copies}, such as {-(-batch // copies) * copies}"
            )
        self._shape = batch, tokens, features
        first, last = self.batch_range
        self.batch = last - first

    @property
    def batch_range(self) -> tuple[int, int]:
        """(first, one past the last) of the sequences that this rank has."""
        replicas, z = self.grid.replicas, self.grid.z
        first, last = shard_range(self.shape[0], replicas.size, replicas.rank)
        lo, hi = shard_range(last - first, z.size, z.rank)
        return first + lo, first + hi

    def place(self) -> dict[int, tuple[int, int]]:
        """Of every dim that is cut (position of the first index of this rank, size of the whole)."""
        batch, tokens, features = self.shape
        over = self.grid.features
        return {
            0: (self.batch_range[0], batch),
            self.dim: (self.offset, tokens),
            -1: (shard_range(features, over.size, over.rank)[0], features),
        }

    def capture(self) -> Callable[[], AbstractContextManager[None]]:
        """What brings the shape of now back while a layer in the region is recomputed (`fastpar.recompute`)."""
        shape, batch = self._shape, self.batch

        @contextmanager
        def restored() -> Iterator[None]:
            before = self._shape, self.batch
            self._shape, self.batch = shape, batch
            try:
                yield
            finally:
                self._shape, self.batch = before

        return restored

    @checked(computed=False)
    def token_sizes(self, comm: Communicator) -> list[int]:
        """Tokens of each rank of an axis, where it cuts the sequence."""
        return shard_sizes(self.shape[1], comm.size)

    def _batch_cuts(self) -> list[tuple[Communicator, int, int]]:
        """(axis, dim, size before the cut), in the order in which a whole batch is cut."""
        replicas = self.grid.replicas
        per_replica = shard_sizes(self.shape[0], replicas.size)[replicas.rank]
        return [(replicas, 0, self.shape[0]), (self.grid.z, 0, per_replica)]

    def _token_cuts(self) -> list[tuple[Communicator, int, int]]:
        return [(self.comm, self.dim, self.shape[1])]

    def _feature_cuts(self) -> list[tuple[Communicator, int, int]]:
        return [(self.grid.features, -1, self.shape[2])]

    def _cuts(self) -> list[tuple[Communicator, int, int]]:
        """Those of a whole tensor, in order."""
        return [*self._batch_cuts(), *self._token_cuts(), *self._feature_cuts()]

    def _blocks(self, shape: torch.Size) -> BlockLayout:
        """What the ranks have of a whole tensor of this shape; of copies over y each has its tokens, S over y."""
        grid, (batch, tokens, features) = self.grid, self.shape
        blocks = []
        for x, y, copy, z in itertools.product(*(range(comm.size) for comm in grid.along)):
            first, last = shard_range(batch, grid.replicas.size, copy)
            lo, hi = shard_range(last - first, grid.z.size, z)
            cuts = [(0, first + lo, hi - lo)]
            if grid.spec.spread != "features":
                lo, hi = shard_range(tokens, grid.y.size, y)
                cuts.append((self.dim, lo, hi - lo))
            lo, hi = shard_range(features, grid.features.size, y if grid.spec.spread == "features" else x)
            blocks.append((*cuts, (-1, lo, hi - lo)))
        return BlockLayout(grid.ranks, shape, tuple(blocks))

    def _over_y(self) -> list[tuple[Communicator, int, int]]:
        """The cut of a copy over y that `_blocks` has and the region has not."""
        return [(self.grid.y, self.dim, self.shape[1])] if self.grid.spec.spread == "copy" else []

    @outside_of_graphs
    def enter(self, x: Tensor) -> Tensor:
        """Keep this rank's part.  forward: slices   backward: an all-gather for each axis

        Of a `DeferredSum`  forward: one reduce-scatter   backward: one all-gather, over all ranks
        With `takes_parts` the part is what has arrived, and x only stands in its place.
        """
        check_is_tensor(x)
        if self.takes_parts:
            return self._take()
        if x.dim() <= self.dim + 1:
            raise ValueError(f"x must be [B, .., S, .., H] with the tokens along dim {self.dim}, got {tuple(x.shape)}")
        sizes = x.size(0), x.size(self.dim), x.size(-1)
        if self.is_whole:  # of any batch, as nothing is cut
            self._shape, self.batch = sizes, x.size(0)
        else:
            self.set_shape(*sizes)
        if isinstance(x, DeferredSum):
            if not self.is_whole and x.enters(self.grid.ranks):
                return _gathered(sum_into_blocks(x, self._blocks(x.shape)), self._over_y())
            x = x.view_as(x)
        return x if self.is_whole else _scattered(x, self._cuts())

    @outside_of_graphs
    def leave(self, x: Tensor) -> Tensor:
        """The whole tensor for replicated work.  forward: an all-gather for each axis   backward: slices

        The whole carries a twin, whose gradient the ranks may have in parts: one reduce-scatter in its backward.
        With `sends_parts` this rank's part, as it is.
        """
        self.check(x)
        if self.sends_parts:
            return _scattered(x, self._cuts()) if self.is_whole else x
        if self.is_whole:
            return x
        whole = _gathered(x, self._cuts())
        if whole.requires_grad and not torch.compiler.is_compiling():
            layout, over_y, values = self._blocks(whole.shape), self._over_y(), whole.detach()
            offer_twin(whole, lambda: whole_twin(_scattered(x, over_y), layout, values))
        return whole

    @outside_of_graphs
    def arrive(self, part: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Keep this rank's part [B_z, S_y, H_x] of hidden states of a (B, S, H), for `enter`. Returns `blank`.

        It comes from the rank of the previous pipeline stage with the same place on its grid: no collective.
        """
        check_is_tensor(part)
        self.set_shape(*shape)
        self._check_part(part)
        self._arrived = part
        return self.blank(part)

    @outside_of_graphs
    def depart(self, part: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        """(part, (B, S, H)) for the rank of the next pipeline stage with the same place on its grid."""
        check_is_tensor(part)
        self._check_part(part)
        return part, self.shape

    def blank(self, part: Tensor) -> Tensor:
        """Zeros of the whole's shape in the memory of one, for code whose result is not used."""
        sizes = list(part.shape)
        sizes[0], sizes[self.dim], sizes[-1] = self.shape
        return part.new_zeros(()).expand(sizes)

    def _take(self) -> Tensor:
        if self._arrived is None:
            raise RuntimeError(
                "no hidden states have arrived for the first layer of this pipeline stage: it was called outside of "
                "its stage's forward, or twice in one"
            )
        part = self._arrived
        if self.is_whole:  # to compare with: the forward itself comes after it
            return _gathered(part, self._cuts())
        self._arrived = None
        return part

    @outside_of_graphs
    def leave_tokens(self, x: Tensor) -> Tensor:
        """[B_z, S, H], for modules that need whole sequences: all ranks but those of z compute the same."""
        self.check(x)
        return x if self.is_whole else _gathered(x, [*self._token_cuts(), *self._feature_cuts()])

    @outside_of_graphs
    def enter_tokens(self, x: Tensor) -> Tensor:
        """This rank's part of [B_z, S, H]: the inverse of `leave_tokens`."""
        return x if self.is_whole else _scattered(x, [*self._token_cuts(), *self._feature_cuts()])

    @outside_of_graphs
    def leave_features(self, x: Tensor) -> Tensor:
        """All features of this rank's tokens, for a module of which a rank then uses its own features' output.

        forward: an all-gather over the axis that cuts features   backward: a reduce-scatter
        """
        if self.is_whole:
            return x
        over = self.grid.features
        return gather_sequence(x, over, dim=-1, sizes=shard_sizes(self.shape[2], over.size))

    @outside_of_graphs
    def enter_features(self, x: Tensor) -> Tensor:
        """This rank's features, of what all ranks of the axis compute; the others are theirs, in backward too."""
        if self.is_whole:
            return x
        over = self.grid.features
        lo, hi = shard_range(self.shape[2], over.size, over.rank)
        return x.narrow(-1, lo, hi - lo)

    def cut_batch(self, x: Tensor) -> Tensor:
        """The rows of x [B, ...] that go with this rank's sequences."""
        lo, hi = self.batch_range
        return x.narrow(0, lo, hi - lo)

    @outside_of_graphs
    def whole_of(self, x: Tensor) -> Tensor | None:
        """The whole of a part [B_z, S_y, ..] or [B_z, S_y, H_x]; None where it cannot be told."""
        mine = self.sizes[self.comm.rank]
        if x.dim() <= self.dim or x.size(0) != self.batch or x.size(self.dim) != mine:
            return None
        over = self.grid.features
        is_hidden = x.size(-1) == shard_sizes(self.shape[2], over.size)[over.rank]
        return _gathered(x, [*self._batch_cuts(), *self._token_cuts(), *(self._feature_cuts() if is_hidden else [])])

    @outside_of_graphs
    def whole_heads(self, x: Tensor, heads: int) -> Tensor:
        """[B, all heads, ...] from [B_z, heads of this rank, ...]."""
        x, y = gather_from(x, self.grid.x, dim=1, sizes=[heads] * self.grid.x.size), self.grid.y
        x = gather_from(x, y, dim=1, sizes=[heads * self.grid.x.size] * y.size)
        return x if self.is_whole else _gathered(x, self._batch_cuts())

    def check_shard(self, x_shard: Tensor) -> None:
        """ValueError unless x has this rank's part of the hidden states."""
        self.check(x_shard)

    def check(self, x: Tensor) -> None:
        """ValueError unless x has this rank's part of the hidden states."""
        check_is_tensor(x)
        if not self.is_whole:
            self._check_part(x)
        elif x.dim() <= self.dim + 1 or (x.size(0), x.size(self.dim), x.size(-1)) != self.shape:
            raise ValueError(f"x has shape {tuple(x.shape)}, but all of {self.shape} is in the grid's region")

    def _check_part(self, x: Tensor) -> None:
        own: dict[int, int] = {}
        for comm, dim, size in self._cuts():
            own[dim] = shard_sizes(size, comm.size)[comm.rank]
        for dim, expected in own.items():
            if x.dim() <= self.dim + 1 or x.size(dim) != expected:
                raise ValueError(
                    f"x has shape {tuple(x.shape)}, but this rank's part of the {self.shape} in the grid's region has "
                    f"{expected} along dim {dim}"
                )


def _scattered(x: Tensor, cuts: list[tuple[Communicator, int, int]]) -> Tensor:
    for comm, dim, size in cuts:
        x = scatter_to(x, comm, dim=dim, sizes=shard_sizes(size, comm.size))
    return x


def _gathered(x: Tensor, cuts: list[tuple[Communicator, int, int]]) -> Tensor:
    for comm, dim, size in reversed(cuts):
        x = gather_from(x, comm, dim=dim, sizes=shard_sizes(size, comm.size))
    return x


__all__ = ["Grid", "GridRegion"]
