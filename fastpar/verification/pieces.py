"""The part of a parameter that a rank holds, as indices into the whole one.

What ranks hold is sent as it is, with its place, and compared with that place of the reference. Nothing is gathered by
the code that is being checked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from fastpar.comm import shard_range
from fastpar.tensor import GridLayout
from fastpar.tensor.parameter import layout_of, local_tensor
from fastpar.zero import Zero
from fastpar.zero.flat import FlatLayout

Index = tuple[Tensor | None, ...]  # per dim, the indices in the whole tensor; None: all of them


@dataclass(frozen=True)
class Piece:
    """A rank's part of the parameter `name`, or of something of its shape. None: it has no such thing."""

    name: str
    index: Index
    value: Tensor | None


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


def plain_pieces(named: dict[str, nn.Parameter], of: str) -> list[Piece]:
    """The pieces of each parameter that this rank has: "value", or "grad"."""
    found = []
    for name, parameter in named.items():
        value = parameter.detach() if of == "value" else parameter.grad
        found.append(Piece(name, index_of(parameter), None if value is None else _copy(value)))
    return found


def zero_pieces(zero: Zero, of: str) -> list[Piece]:
    """The same under ZeRO: values as the modules see them, reduced gradients of this rank's rows."""
    found = []
    for param in zero.params:
        groups = zero.groups_of(param)
        value: Any = param.parameter.detach()
        if of == "grad":
            value = param.optim_param.grad
        elif zero.stage == 3:  # the whole parameter has no memory
            value = param.optim_param.detach() if param.model_rows is None else param.model_rows
        index = _rows_index(index_of(param.parameter), param.parameter, param.optim_param, value, groups)
        found.append(Piece(param.name, index, None if value is None else _shaped(_copy(value), param.parameter)))
    return found


def _rows_index(index: Index, parameter: Tensor, owner: Tensor, value: Any, groups: Any) -> Index:
    """The index of this rank's rows of what it stores, unless `value` is all of that."""
    mine = owner if value is None else value
    shape = _local_shape(parameter, index)
    if not shape or local_tensor(mine).numel() == shape.numel():
        return index
    first = torch.arange(parameter.shape[0]) if index[0] is None else index[0]
    rows = FlatLayout([shape], groups.shard.size).rows_of(first, 0, groups.shard.rank)
    return (rows, *index[1:])


def _local_shape(parameter: Tensor, index: Index) -> torch.Size:
    sizes = zip(parameter.shape, index, strict=True)
    return torch.Size([size if rows is None else len(rows) for size, rows in sizes])


def _shaped(value: Tensor, parameter: Tensor) -> Tensor | None:
    """Parameters without dims are kept as one row, or none."""
    if parameter.dim():
        return value
    return value.reshape(()) if value.numel() else None


def _copy(x: Tensor) -> Tensor:
    return local_tensor(x).detach().to("cpu", copy=True)
