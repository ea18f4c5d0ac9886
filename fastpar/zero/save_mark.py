"""Which save a part of a checkpoint belongs to: so that files of two saves are not taken for one.

Every rank writes its rows of one tensor [ROWS, 2], all alike: a number of the run, and how many steps it has taken.
Whoever loads reads some of them from the file of every rank that saved, and all must be equal. A file has no other mark
that says when it was written: two saves of one layout differ in nothing but their values.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from fastpar.comm import Communicator, shard_range
from fastpar.zero.groups import Groups, as_dtensor, local

if TYPE_CHECKING:
    from fastpar.zero.sharding import Zero

ROWS = 4096  # ranks beyond have none, and their files no mark


def new_run(groups: Groups) -> int:
    """A number that no other run has, the same on all ranks that save together, as far as they are known; 0 where they
    are not. Collective."""
    if dist.is_initialized() and len(groups.ranks) < dist.get_world_size():
        return 0
    number = torch.tensor([int.from_bytes(os.urandom(7), "little")], device="cpu")
    for comm in _comms(groups):
        number = comm.broadcast(number, 0)
    return int(number)


def mark_of(zero: Zero) -> Tensor:
    """The mark of what is saved now."""
    ranks = zero.groups.ranks
    mark = torch.tensor([[zero.run, zero.steps]], device="cpu")
    if len(ranks) == 1:
        return mark.repeat(ROWS, 1)
    start, end = shard_range(ROWS, len(ranks), ranks.index(dist.get_rank()))
    mesh = DeviceMesh("cpu", torch.tensor(ranks, device="cpu"), _init_backend=False)
    meta = TensorMeta(torch.Size((ROWS, 2)), (2, 1), torch.int64)
    return as_dtensor(mark.repeat(end - start, 1), DTensorSpec(mesh, (Shard(0),), tensor_meta=meta))


def check_mark(mark: Tensor, groups: Groups) -> None:
    """Raises ValueError on all ranks where what was loaded is not of one save. Collective."""
    rows = local(mark)
    if rows.numel() == 0:
        rows = mark.new_empty(0, 2)
    limits = torch.iinfo(torch.int64)
    low = rows.amin(0) if len(rows) else torch.full((2,), limits.max, device="cpu")
    high = rows.amax(0) if len(rows) else torch.full((2,), limits.min, device="cpu")
    for comm in _comms(groups):
        low, high = comm.all_reduce(low, "min"), comm.all_reduce(high, "max")
    if torch.equal(low, high):
        return
    steps = f"of steps {int(low[1])} and {int(high[1])}" if low[1] != high[1] else "of different runs"
    raise ValueError(
        f"the checkpoint has files of several saves ({steps}): a part of it was replaced, or is left from an earlier "
        "one. The values in memory are a mixture now; load another checkpoint"
    )


def _comms(groups: Groups) -> list[Communicator]:
    return [*groups.everyone(), *groups.others()]
