"""What the stages keep in memory, by formula: see the table in docs/zero.md."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from fastpar.zero.buckets import STAGING_BUFFERS
from fastpar.zero.groups import Groups, local
from fastpar.zero.replicas import Replicas
from fastpar.zero.sharded_param import ShardedParam
from fastpar.zero.stage3 import Stage3

if TYPE_CHECKING:
    from fastpar.zero.sharding import Zero


def expected(zero: Zero, state_bytes: float) -> dict[str, int]:
    """Bytes of this rank by kind, between backward and the step: see `Zero.expected_memory`."""
    kept = sum(_numel(param) * param.parameter.dtype.itemsize for param in zero.params if not _is_sharded(zero, param))
    sharded = sum(
        local(param.optim_param).numel() * param.parameter.dtype.itemsize
        for param in zero.params
        if _is_sharded(zero, param) and not _is_in_file(zero, param.name)
    )
    frozen = sum(local(x).nbytes for name, x in zero.frozen().items() if not _is_in_file(zero, name))
    buffers = sum(x.nbytes for storage in zero.storages if isinstance(storage, Stage3) for x in storage.buffers)
    owners = [param.optim_param for param in zero.params]
    coded = sum(storage.coded_bytes for storage in zero.storages if isinstance(storage, Replicas))
    coded -= sum(
        local(param.optim_param).nbytes
        for param in zero.params
        if param.dequantized_rows is not None and param.is_in_place
    )
    copies = sum(local(param.optim_param).nbytes for param in zero.params if param.model_rows is not None)
    return {
        "parameters": kept + sharded + frozen + buffers + coded,
        "gradients": sum(_gradient_bytes(zero, param) for param in zero.params) + _staging_bytes(zero),
        "states": copies + int(state_bytes * sum(local(owner).numel() for owner in owners)),
    }


def _numel(param: ShardedParam) -> int:
    return local(param.parameter).numel()


def _is_sharded(zero: Zero, param: ShardedParam) -> bool:
    """Whether a rank has only its rows of the parameter, at rest."""
    return zero.stage == 3 and param.name not in zero.persistent


def _is_in_file(zero: Zero, name: str) -> bool:
    """Whether no rank has the parameter in memory, at rest."""
    offload = zero.offload
    return offload is not None and offload.parameters and offload.path is not None and name not in zero.persistent


def _gradient_bytes(zero: Zero, param: ShardedParam) -> int:
    """What is left of a gradient: the mean in the owner's dtype; in stage 0 the bucket that it lies in, and beside it
    the mean where that is wider."""
    mean = local(param.optim_param).numel() * param.optim_param.dtype.itemsize
    if zero.groups_of(param).shard.size > 1 or zero.stage == 3:
        return mean
    in_bucket = _numel(param) * param.reduce_dtype.itemsize
    return (
        in_bucket
        if param.reduce_dtype == param.optim_param.dtype and param.optim_param.device == param.parameter.device
        else in_bucket + mean
    )


def _staging_bytes(zero: Zero) -> int:
    """Two buffers, of the largest bucket or unit of each kind."""
    total = 0
    for storage in zero.storages:
        most: dict[tuple[torch.dtype, torch.device, Groups], int] = {}
        for params in _buckets(zero, storage):
            kind = params[0].reduce_dtype, params[0].parameter.device, zero.groups_of(params[0])
            most[kind] = max(most.get(kind, 0), sum(map(_numel, params)))
        total += sum(STAGING_BUFFERS * numel * dtype.itemsize for (dtype, _, _), numel in most.items())
    return total


def _buckets(zero: Zero, storage: Replicas | Stage3) -> Iterable[list[ShardedParam]]:
    is_by_rows = isinstance(storage, Stage3) or (storage.params and zero.groups_of(storage.params[0]).shard.size > 1)
    return [list(bucket.params) for bucket in storage.reducer.buckets] if is_by_rows else []
