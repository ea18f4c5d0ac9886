"""Parameters that are cut along several dims of a mesh: a chain of one-dimensional cuts."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from fastpar.comm import Communicator
from fastpar.comm.autograd import reduce_from
from fastpar.tensor.parameter import RowMap
from fastpar.tensor.split_views import watch_views


@dataclass(frozen=True)
class AxisCut:
    """One cut of a chain: along `dim`, over the ranks of `comm`.

    rows  which indices each rank has; None: by `torch.chunk`'s rule of what the cuts before it have left
    """

    comm: Communicator
    dim: int
    rows: RowMap | None = None


@dataclass(frozen=True)
class GridLayout:
    """How a parameter lies on a grid: `cuts[i]` over dim i of the mesh, in this order, None where it has copies.

    DTensor cuts from left to right as well, so that [N, K] cut (K over x, N over y, K over z) is a DTensor with
    (Shard(1), Shard(0), Shard(1)).

    summed      axes over which a rank's gradient is a part, where a module says that it is one
    rows, part  of a parameter that is stored whole and of which a rank uses some rows (dim 0): which, by part
    reordered   cuts over axes of one rank, which the mesh does not have, where they change the order of rows
    """

    mesh: DeviceMesh
    shape: torch.Size
    cuts: tuple[AxisCut | None, ...]
    summed: tuple[Communicator, ...] = ()
    rows: RowMap | None = None
    part: int = 0
    reordered: tuple[AxisCut, ...] = ()

    @staticmethod
    def over(mesh: DeviceMesh, axes: Sequence[Communicator], shape: torch.Size, cuts: Sequence[AxisCut]) -> GridLayout:
        """The layout of these cuts, on a mesh with a dim for each of the axes."""
        along = {id(cut.comm): cut for cut in cuts}
        found = tuple(along.get(id(axis)) for axis in axes)
        return GridLayout(mesh, shape, found, reordered=tuple(cut for cut in cuts if cut not in found and cut.rows))

    def __deepcopy__(self, memo: Any) -> GridLayout:
        return self  # describes groups, which a copied model shares

    @functools.cached_property
    def kind(self) -> str:
        """ "replicated", "contiguous" or "packed", as `ParameterLayout`'s."""
        kinds = {self._map(cut, size).kind for cut, size in self._walk()}
        if "whole" in kinds:
            raise ValueError("on a grid, rows shared by several ranks cannot be stored as shards")
        return "packed" if "packed" in kinds else "contiguous" if kinds else "replicated"

    @property
    def placements(self) -> list[Placement]:
        """Those of its DTensor, one for each dim of the mesh."""
        return [Replicate() if cut is None else Shard(cut.dim) for cut in self.cuts]

    @property
    def picks_rows(self) -> bool:
        """Whether a rank selects its rows in forward from a parameter that is stored whole."""
        return self.rows is not None

    @property
    def num_ranks(self) -> int:
        """Ranks whose gradients are parts."""
        return math.prod(comm.size for comm in self.summed)

    @property
    def cut(self) -> tuple[Any, ...]:
        """How it is split, for comparison: of one parameter all modules have to say the same."""
        return tuple(None if cut is None else (cut.dim, cut.rows) for cut in (*self.cuts, *self.reordered)), self.rows

    def sum_grad(self, grad: Tensor) -> Tensor:
        """The sum of the ranks' parts of a gradient: an all-reduce for each axis; differentiable."""
        for comm in self.summed:
            if comm.size > 1:
                grad = reduce_from(grad, comm) if grad.requires_grad else comm.all_reduce(grad)
        return grad

    def pick(self, local: Tensor) -> Tensor:
        """The rows that a rank uses of a parameter of which it stores more; differentiable."""
        assert self.rows is not None
        return self.rows.take(local, 0, self.part)

    def _walk(self) -> list[tuple[AxisCut, int]]:
        """The cuts, with the size of their dim before each on this rank."""
        sizes, walk = list(self.shape), []
        for cut in (*self.cuts, *self.reordered):
            if cut is not None:
                walk.append((cut, sizes[cut.dim]))
                sizes[cut.dim] = self._map(cut, sizes[cut.dim]).size(cut.comm.rank)
        return walk

    @staticmethod
    def _map(cut: AxisCut, size: int) -> RowMap:
        return RowMap.chunk(size, cut.comm.size) if cut.rows is None else cut.rows

    @property
    def local_shape(self) -> list[int]:
        """Of what this rank stores."""
        shape = list(self.shape)
        for cut, size in self._walk():
            shape[cut.dim] = self._map(cut, size).size(cut.comm.rank)
        return shape

    def local(self, full: Tensor) -> Tensor:
        """What this rank stores of the full tensor."""
        for cut, size in self._walk():
            full = self._map(cut, size).take(full, cut.dim, cut.comm.rank)
        return full

    def index(self) -> tuple[Tensor | None, ...]:
        """Of each dim the indices that this rank stores, in its order; None: all."""
        found: list[Tensor | None] = [None] * len(self.shape)
        for cut, size in self._walk():
            before = found[cut.dim]
            rows = torch.arange(size, device="cpu") if before is None else before
            found[cut.dim] = self._map(cut, size).take(rows, 0, cut.comm.rank)
        return tuple(found)

    def full(self, local: Tensor) -> Tensor:
        """The full tensor in canonical order from what the ranks store: an all-gather for each cut."""
        for cut, size in reversed(self._walk()):
            rows = self._map(cut, size)
            sizes = [rows.size(rank) for rank in range(cut.comm.size)]
            gathered = cut.comm.all_gather(local.contiguous(), dim=cut.dim, sizes=sizes)
            local = rows.assemble(gathered.split(sizes, cut.dim), cut.dim)
        return local.clone() if self.kind == "replicated" else local

    def in_order(self, stored: Tensor) -> Tensor:
        """The full tensor in canonical order from one whose rows are in the order of the ranks that store them."""
        for dim in range(len(self.shape)):
            stored = torch.empty_like(stored).index_copy_(dim, self.order(dim).to(stored.device), stored)
        return stored

    def order(self, dim: int) -> Tensor:
        """As `ParameterLayout.order`."""
        cuts = [cut for cut, _ in self._walk() if cut.dim == dim]
        return _order(torch.arange(self.shape[dim], device="cpu"), cuts)

    @property
    def shards(self) -> list[tuple[Communicator, int, RowMap]]:
        """As `ParameterLayout.shards`, one after the other."""
        return [(cut.comm, cut.dim, self._map(cut, size)) for cut, size in self._walk()]

    def canonical(self) -> GridLayout:
        """The layout of the same cuts with all rows in their order, as checkpoints have them."""
        cuts = tuple(None if cut is None else AxisCut(cut.comm, cut.dim) for cut in self.cuts)
        return GridLayout(self.mesh, self.shape, cuts)

    def as_dtensor(self, local: Tensor) -> Tensor:
        """`local` as a DTensor of the full shape."""
        stride = torch.empty(self.shape, device="meta").stride()
        return DTensor.from_local(local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=stride)

    def parameter(self, full: Tensor, *, requires_grad: bool = True) -> nn.Parameter:
        """The parameter to register: this rank's part, copied, so that the full tensor can be freed."""
        local = self.local(full.detach()).clone(memory_format=torch.contiguous_format)
        return self.tag(nn.Parameter(self.as_dtensor(local), requires_grad=requires_grad))

    def tag(self, param: nn.Parameter) -> nn.Parameter:
        """Note the layout on the parameter, for `full_parameter`; its module knows it as well."""
        param.fastpar_layout = self  # type: ignore[attr-defined]
        watch_views(param)
        return param


def _order(rows: Tensor, cuts: Sequence[AxisCut]) -> Tensor:
    """Rows as the ranks of these cuts store them, one rank after the other."""
    if not cuts:
        return rows
    first = RowMap.chunk(len(rows), cuts[0].comm.size) if cuts[0].rows is None else cuts[0].rows
    return torch.cat([_order(first.take(rows, 0, rank), cuts[1:]) for rank in range(cuts[0].comm.size)])
