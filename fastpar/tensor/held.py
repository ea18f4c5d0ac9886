"""The part of a parameter that a rank holds, as indices into the whole one."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from fastpar.comm import shard_range
from fastpar.tensor.dtensor_data import keep_memory
from fastpar.tensor.grid_layout import GridLayout
from fastpar.tensor.parameter import layout_of

Index = tuple[Tensor | None, ...]  # per dim, the indices in the whole tensor; None: all of them


@dataclass(frozen=True)
class HeldTensor:
    """What a rank holds of the tensor `name` of the whole model: the elements at `index`, in the memory of `value`."""

    name: str
    index: Index
    value: Tensor


def take(whole: Tensor, index: Index) -> Tensor:
    """The elements of `whole` at an index."""
    for dim, rows in enumerate(index):
        if rows is not None:
            whole = whole.index_select(dim, rows)
    return whole


def index_of(parameter: Tensor) -> Index:
    """The place in the whole parameter of what this rank stores."""
    layout: Any = layout_of(parameter)
    index: list[Tensor | None] = [None] * parameter.dim()
    if isinstance(layout, GridLayout):
        return layout.index()
    if layout is not None:
        if layout.rows is not None and not layout.placement.is_replicate():
            ranges = layout.rows.ranges[layout.comm.rank]
            index[layout.dim] = torch.cat([torch.arange(lo, hi) for lo, hi in ranges] or [torch.arange(0)])
    elif isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        dims = list(enumerate(parameter.placements))
        # A strided shard splits what the mesh dims after it have split already.
        dims.sort(key=lambda item: isinstance(item[1], _StridedShard))
        for mesh_dim, placement in dims:
            if not isinstance(placement, Shard | _StridedShard):
                continue
            rows = index[placement.dim]
            rows = torch.arange(parameter.shape[placement.dim]) if rows is None else rows
            lo, hi = shard_range(len(rows), mesh.size(mesh_dim), mesh.get_local_rank(mesh_dim))
            index[placement.dim] = rows[lo:hi]
    return tuple(index)


class DataOfDTensors:
    """Watches DTensors for `x.data = value`: torch gives the wrapper that memory, and x goes on with its local part."""

    def __init__(self, named: Iterable[tuple[str, Any]]) -> None:
        self._seen = [(name, x, *_wrapped(x)) for name, x in named if isinstance(x, DTensor)]
        for _, x, *_ in self._seen:
            keep_memory(x)

    def check(self) -> None:
        """Raises RuntimeError, once, for one whose data were set."""
        for index, (name, x, storage, mine) in enumerate(self._seen):
            if x.untyped_storage()._cdata != storage._cdata:
                self._seen[index] = name, x, *_wrapped(x)
                if x._local_tensor is mine():  # else it was swapped as a whole
                    raise RuntimeError(
                        f"{name}.data was set, and {name} is a DTensor, of which torch takes no data: it goes on with "
                        f"its old values. Write in place: {name}.data.copy_(value), or copy_ under torch.no_grad()"
                    )


def _wrapped(x: Any) -> tuple[torch.UntypedStorage, weakref.ref[Tensor]]:
    """The memory of a wrapper, held so that no other has its address, and its local part, of which others dispose."""
    return x.untyped_storage(), weakref.ref(x._local_tensor)
