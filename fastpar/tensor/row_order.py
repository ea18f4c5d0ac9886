"""Rows of fused weights in the order of the model, and as the ranks of tensor parallelism store them.

Packed shards of a fused weight (see "row maps" in `fastpar.tensor.parameter`) are a DTensor whose rows lie rank by
rank: another layout would take rows of gate for rows of up. They are put in order on the way to a checkpoint
(`in_order`), and back on the way from it (`as_stored`), also where ZeRO has rows of them. A cut along another dim than
the first, which nobody but these ranks has shards along, takes an all-gather among them; along the first, which ZeRO
cuts as well, one tensor at a time is whole on every rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from fastpar.comm import Communicator

if TYPE_CHECKING:
    from fastpar.tensor.parameter import RowMap


def is_packed(layout: Any) -> bool:
    """Whether shards of a parameter are not runs of its rows; None: it has no layout of tensor parallelism."""
    return layout is not None and layout.kind == "packed"


def in_order(x: Any, layout: Any) -> Any:
    """A DTensor of the parameter's shape as checkpoints have it, new where the layout is packed. Collective then."""
    return _moved(x, layout, to_order=True)


def as_stored(x: Any, layout: Any) -> Any:
    """The reverse of `in_order`."""
    return _moved(x, layout, to_order=False)


@torch.no_grad()
def _moved(x: Any, layout: Any, *, to_order: bool) -> Any:
    if not is_packed(layout) or not isinstance(x, DTensor) or x.shape != layout.shape:
        return x
    dims = [dim for _, dim, _ in layout.shards]
    packed = [shard for shard in layout.shards if shard[2].kind == "packed"]
    if all(dim > 0 and dims.count(dim) == 1 for _, dim, _ in packed):
        rows = x._local_tensor.detach()
        for shard in packed:
            rows = _moved_among(rows, *shard, to_order=to_order)
        return _like(x, rows)
    whole = x.full_tensor()
    for dim in range(whole.dim()):
        order = layout.order(dim).to(whole.device)
        whole = torch.empty_like(whole).index_copy_(dim, order, whole) if to_order else whole.index_select(dim, order)
    made = distribute_tensor(whole, x.device_mesh, x.placements, src_data_rank=None)
    return _like(x, made._local_tensor.clone(memory_format=torch.contiguous_format))


def _like(x: DTensor, rows: Tensor) -> DTensor:
    mesh, stride = x.device_mesh, x.stride()
    return DTensor.from_local(rows, mesh, x.placements, run_check=False, shape=x.shape, stride=stride)


def _moved_among(mine: Tensor, comm: Communicator, dim: int, rows: RowMap, *, to_order: bool) -> Tensor:
    sizes = [rows.size(rank) for rank in range(comm.size)]
    gathered = comm.all_gather(mine.contiguous(), dim=dim, sizes=sizes)
    if not to_order:
        taken = rows.take(gathered, dim, comm.rank)
    else:  # runs of equal sizes, as packed shards have
        taken = rows.assemble(gathered.split(sizes, dim), dim).chunk(comm.size, dim)[comm.rank]
    return taken.clone(memory_format=torch.contiguous_format)
