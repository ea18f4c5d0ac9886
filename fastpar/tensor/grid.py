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

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor

from fastpar.arguments import checked
from fastpar.comm import Communicator, gather_from, scatter_to, shard_sizes
from fastpar.comm.shards import check_is_tensor
from fastpar.mesh import Mesh
from fastpar.mesh.grid import TENSOR_GRID_DIMS


class Grid:
    """This rank's communicators along the axes of a mesh's tensor-parallel grid. Layers of one model share one.

    x, y      ranks that share features
    z         ranks that the weights are spread over; they share the tokens of this replica
    replicas  ranks with the same weights, which share the tokens as well
    """

    @checked(computed=False)
    def __init__(self, mesh: Mesh) -> None:
        if mesh.tp_grid is None:
            raise ValueError(f"{mesh!r} has no tensor-parallel grid: make it with init_mesh(tp=N, tp_grid=(x, y, z))")
        self.spec = mesh.tp_grid
        self.mesh = mesh[TENSOR_GRID_DIMS]
        self.x, self.y, self.replicas, self.z = (Communicator.of(mesh.group(name)) for name in TENSOR_GRID_DIMS)

    def __deepcopy__(self, memo: Any) -> Grid:
        return self  # a copied model runs on the same groups

    @property
    def features(self) -> Communicator:
        """The axis over which the hidden states' features are cut."""
        return self.y if self.spec.spread == "features" else self.x

    @property
    def along(self) -> tuple[Communicator, ...]:
        """Communicators in the order of the mesh's dims."""
        return self.x, self.y, self.replicas, self.z


class GridRegion:
    """The stretch of a model whose activations lie on a grid; modules inside it share this object.

    x       [B, S, H]         whole, the same on every rank, outside of the region
    inside  [B_z, S_y, H_x]   as the module's note says, by the grid's spread
    """

    @checked(computed=False)
    def __init__(self, grid: Grid, *, dim: int = 1):
        if dim < 1:
            raise ValueError(f"dim must be that of the tokens of one sequence, 1 or more, got {dim}")
        self.grid = grid
        self.dim = dim
        self._shape: tuple[int, int, int] | None = None  # B, S, H

    def __deepcopy__(self, memo: Any) -> GridRegion:
        return self  # hooks of a copied model keep pointing here, so its layers must as well

    @property
    def shape(self) -> tuple[int, int, int]:
        """Whole batch, tokens of a sequence and features of what is in the region."""
        if self._shape is None:
            raise RuntimeError("the grid's region is empty: no tensor has entered it (GridRegion.enter)")
        return self._shape

    @checked(computed=False)
    def set_shape(self, batch: int, tokens: int, features: int) -> None:
        """Say how large the whole is when its parts come from elsewhere, such as an earlier pipeline stage."""
        copies = self.grid.replicas.size * self.grid.z.size
        if batch < copies:
            raise ValueError(
                f"batch {batch} cannot be cut over tp_z={copies}: use cp={copies}, or z <= {batch} in the grid"
            )
        self._shape = batch, tokens, features

    def capture(self) -> Callable[[], AbstractContextManager[None]]:
        """What brings the shape of now back while a layer in the region is recomputed (`fastpar.recompute`)."""
        shape = self._shape

        @contextmanager
        def restored() -> Iterator[None]:
            before, self._shape = self._shape, shape
            try:
                yield
            finally:
                self._shape = before

        return restored

    @checked(computed=False)
    def token_sizes(self, comm: Communicator) -> list[int]:
        """Tokens of each rank of an axis, where it cuts the sequence."""
        return shard_sizes(self.shape[1], comm.size)

    def _cuts(self) -> list[tuple[Communicator, int, int]]:
        """(axis, dim, size before the cut) in the order in which a whole tensor is cut."""
        grid, (batch, tokens, features) = self.grid, self.shape
        per_replica = shard_sizes(batch, grid.replicas.size)[grid.replicas.rank]
        cuts = [(grid.replicas, 0, batch), (grid.z, 0, per_replica)]
        if grid.spec.spread == "rows":
            cuts.append((grid.y, self.dim, tokens))
        return [*cuts, (grid.features, -1, features)]

    def enter(self, x: Tensor) -> Tensor:
        """Keep this rank's part.  forward: slices   backward: an all-gather for each axis"""
        check_is_tensor(x)
        if x.dim() <= self.dim + 1:
            raise ValueError(f"x must be [B, .., S, .., H] with the tokens along dim {self.dim}, got {tuple(x.shape)}")
        self.set_shape(x.size(0), x.size(self.dim), x.size(-1))
        for comm, dim, size in self._cuts():
            x = scatter_to(x, comm, dim=dim, sizes=shard_sizes(size, comm.size))
        return x

    def leave(self, x: Tensor) -> Tensor:
        """The whole tensor for replicated work.  forward: an all-gather for each axis   backward: slices"""
        self.check(x)
        for comm, dim, size in reversed(self._cuts()):
            x = gather_from(x, comm, dim=dim, sizes=shard_sizes(size, comm.size))
        return x

    def check(self, x: Tensor) -> None:
        """ValueError unless x has this rank's part of the hidden states."""
        check_is_tensor(x)
        own: dict[int, int] = {}
        for comm, dim, size in self._cuts():
            own[dim] = shard_sizes(size, comm.size)[comm.rank]
        own.setdefault(self.dim, self.shape[1])
        for dim, expected in own.items():
            if x.dim() <= self.dim + 1 or x.size(dim) != expected:
                raise ValueError(
                    f"x has shape {tuple(x.shape)}, but this rank's part of the {self.shape} in the grid's region has "
                    f"{expected} along dim {dim}"
                )


__all__ = ["Grid", "GridRegion"]
