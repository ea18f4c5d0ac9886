"""How a parameter lies over ranks, seen as a matrix or a stack of matrices.

An axis is a group of ranks; along each a parameter is

    "rows", "columns"   cut: every rank has a chunk of the matrix's rows or columns
    "copy"              replicated: every rank has the same
    "apart"             cut between matrices: every rank has others of a stack, and nobody needs them

A parameter [d0, .., d(b-1), m, n, k1, k2, ..] with b batch dims is prod(d) matrices of m rows and n * k1 * k2 * ..
columns, as a convolution's weight is one matrix of out_channels rows. Chunks are those of `torch.chunk`, also nested.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fastpar.comm import Communicator, shard_sizes

ROWS, COLUMNS, COPY, APART = "rows", "columns", "copy", "apart"
CUTS = (ROWS, COLUMNS)


@dataclass(frozen=True)
class MatrixSpec:
    """A stack of `count` matrices [rows, columns * unit], of which ranks hold parts.

    count  matrices of the rank that has most
    unit   elements that stay together along the columns: a convolution's kernel
    kinds  one for each axis, in the order in which parts are put together
    steps  of Newton-Schulz, for the cost
    """

    count: int
    rows: int
    columns: int
    unit: int
    kinds: tuple[str, ...]
    steps: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.columns * self.unit

    def extent(self, kind: str, sizes: Sequence[int], fixed: Mapping[int, int]) -> int:
        """Rows or columns of the part that has coordinate fixed[axis] along the axes in `fixed`, and everything along
        the others. `sizes`: ranks of each axis.
        """
        # What is put together last was cut first.
        axes = [axis for axis in reversed(range(len(sizes))) if self.kinds[axis] == kind]

        def part(total: int, remaining: Sequence[int]) -> int:
            if not remaining:
                return total
            axis, *rest = remaining
            parts = shard_sizes(total, sizes[axis])
            chosen = [parts[fixed[axis]]] if axis in fixed else parts
            return sum(part(size, rest) for size in chosen)

        return part(self.rows, axes) if kind == ROWS else part(self.columns, axes) * self.unit


@dataclass(frozen=True)
class MatrixLayout:
    """A parameter's matrix and the ranks that it lies over. Parameters with one `domain` share axes."""

    spec: MatrixSpec
    domain: Hashable
    axes: tuple[Communicator, ...]


class LayoutReader:
    """Reads layouts off parameters, and keeps a communicator for each group that it meets.

    replicas  ranks that hold the same plain parameters; for a DTensor whose mesh does not have these ranks, the ranks
              that hold the same DTensor
    """

    def __init__(self, replicas: Communicator | None) -> None:
        self._replicas = replicas if replicas is not None and replicas.size > 1 else None
        self._comms: dict[tuple[DeviceMesh, int], Communicator] = {}
        self._outside: dict[DeviceMesh, bool] = {}  # whether the replicas are an axis of their own beside the mesh

    def read(self, param: Tensor, batch_dims: int, steps: int) -> MatrixLayout:
        """Raises ValueError for a layout that does not cut the parameter into matrices, rows or columns."""
        kinds: list[str] = []
        axes: list[Communicator] = []
        domain: tuple[Hashable, ...] = ()
        if self._replicas is not None and self._replicates(param):
            kinds.append(COPY)
            axes.append(self._replicas)
            domain = ("replicas",)
        count = math.prod(param.shape[:batch_dims])
        if isinstance(param, DTensor):
            order = self._order(param)
            for dim in order:
                if (comm := self._comm(param.device_mesh, dim)).size == 1:
                    continue
                kinds.append(_kind(param, dim, batch_dims))
                axes.append(comm)
                if kinds[-1] == APART:
                    count = -(-count // comm.size)
            domain += (param.device_mesh, order)
        rows, columns = param.shape[batch_dims], param.shape[batch_dims + 1]
        unit = math.prod(param.shape[batch_dims + 2 :])
        return MatrixLayout(MatrixSpec(count, rows, columns, unit, tuple(kinds), steps), domain, tuple(axes))

    @staticmethod
    def _order(param: DTensor) -> tuple[int, ...]:
        """Mesh dims in the order in which parts are put together: the reverse of that in which DTensor cuts.

        It cuts from the first mesh dim to the last, but for parameters that tensor parallelism cut first and ZeRO or
        FSDP after it: those have _StridedShard on a dim before all of tensor parallelism's.
        """
        strided = [dim for dim, x in enumerate(param.placements) if type(x).__name__ == "_StridedShard"]
        after = strided[-1] + 1 if strided else 0
        return (*range(after), *reversed(range(after, param.device_mesh.ndim)))

    def _comm(self, mesh: DeviceMesh, dim: int) -> Communicator:
        key = (mesh, dim)
        if key not in self._comms:
            self._comms[key] = Communicator(mesh.get_group(dim) if mesh.size(dim) > 1 else None)
        return self._comms[key]

    def _replicates(self, param: Tensor) -> bool:
        """Whether the replicas are an axis of their own; not where the DTensor's own mesh has those ranks."""
        if not isinstance(param, DTensor):
            return True
        mesh = param.device_mesh
        if mesh not in self._outside:
            assert self._replicas is not None
            replicas = set(dist.get_process_group_ranks(self._replicas.group))
            in_mesh = replicas & set(mesh.mesh.flatten().tolist())
            if in_mesh not in (replicas, {dist.get_rank()}):
                raise ValueError(
                    f"replicas has the ranks {sorted(replicas)}, of which only {sorted(in_mesh)} are in the mesh "
                    f"{mesh} of a parameter: it must have all of its ranks there, or this rank only"
                )
            self._outside[mesh] = in_mesh != replicas
        return self._outside[mesh]


def _kind(param: DTensor, mesh_dim: int, batch_dims: int) -> str:
    placement = param.placements[mesh_dim]
    if placement.is_replicate():
        return COPY
    dim = getattr(placement, "dim", None)
    if dim is None or placement.is_partial() or dim > batch_dims + 1:
        raise ValueError(
            f"a parameter of shape {tuple(param.shape)} (batch_dims={batch_dims}) must be replicated or sharded along "
            f"one of its first {batch_dims + 2} dims, got {placement} on mesh dim {mesh_dim}"
        )
    return APART if dim < batch_dims else (ROWS, COLUMNS)[dim - batch_dims]
