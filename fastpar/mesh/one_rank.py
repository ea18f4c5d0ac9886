"""The group of a mesh dim that has one rank: a ProcessGroup without threads, descriptors, store or peers.

torch's DeviceMesh wants a group for every dim. gloo's would cost two threads and four descriptors each, for dims that
nobody splits anything over; all that DTensor, FSDP2 or a user can ask of such a group is done by a copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d
from torch.distributed import ProcessGroup

_BACKEND = "fastpar_one_rank"
_Base: Any = ProcessGroup  # whose methods have narrower types than what is asked of them here


class OneRankGroup(_Base):
    """Collectives over this rank alone, on any device: done when they return. Sending has no receiver, and is refused.

    Names are those of torch 2.11 and of 2.13, which renamed some.
    """

    def __init__(self, name: str) -> None:
        super().__init__(0, 1)
        self._own_name = name

    @property
    def pg_name(self) -> str:
        return self._own_name

    @property
    def group_name(self) -> str:
        return self._own_name

    def getBackendName(self) -> str:
        return _BACKEND

    def __repr__(self) -> str:
        return "OneRankGroup()"

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        _check_reduction(opts)
        return _done(tensors)

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        return _done(tensors)

    def barrier(self, opts: Any = None) -> Any:
        return _done([])

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return _copy(outputs, inputs)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        _check_reduction(opts)
        return _copy(outputs, inputs)

    def alltoall_base(
        self, output: Tensor, x: Tensor, output_sizes: Any = None, input_sizes: Any = None, opts: Any = None
    ) -> Any:
        return _copy(output, x)

    allreduce_coalesced = reduce = allreduce
    allgather_coalesced = allgather_into_tensor_coalesced = all_gather_single_coalesced = allgather
    _allgather_base = all_gather_single = gather = scatter = alltoall = allgather
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced = reduce_scatter
    _reduce_scatter_base = reduce_scatter_single = reduce_scatter
    all_to_all_single = alltoall_base


def one_rank_group() -> ProcessGroup:
    """The group of this rank, which all meshes share. A local matter: no other rank is asked."""
    for known in dist.distributed_c10d._world.pg_map:
        if isinstance(known, OneRankGroup):
            return known
    if not hasattr(dist.Backend, _BACKEND.upper()):
        dist.Backend.register_backend(
            _BACKEND, lambda options, _: OneRankGroup(options.group_id), extended_api=True, devices=["cpu", "cuda"]
        )
    group: ProcessGroup = dist.new_group([dist.get_rank()], backend=_BACKEND, use_local_synchronization=True)
    return group


def _flat(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    else:
        for item in value:
            yield from _flat(item)


def _copy(outputs: Any, inputs: Any) -> Any:
    targets = list(_flat(outputs))
    with torch.no_grad():
        for target, source in zip(targets, _flat(inputs), strict=True):
            target.detach().copy_(source.view(target.shape))
    return _done(targets)


def _check_reduction(opts: Any) -> None:
    op = getattr(opts, "reduceOp", None)
    if op is not None and op == dist.ReduceOp.PREMUL_SUM:
        raise NotImplementedError("PREMUL_SUM over a mesh dim of one rank: multiply before the reduction")


def _done(result: Any) -> Any:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(list(result))
    create: Any = vars(_distributed_c10d)["_create_work_from_future"]
    return create(future)
