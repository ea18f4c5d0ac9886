"""What the stages keep in memory, by formula: see the table in docs/zero.md."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastpar.zero.buckets import STAGING_BUFFERS, BucketKind
from fastpar.zero.groups import local
from fastpar.zero.sharded_param import ShardedParam

if TYPE_CHECKING:
    from fastpar.zero.zero import Zero


def expected(zero: Zero, state_bytes: float) -> dict[str, int]:
    """Bytes of this rank by kind, between backward and the step: see `Zero.expected_memory`."""
    kept = sum(_numel(param) * param.parameter.dtype.itemsize for param in zero.params if not _is_sharded(zero, param))
    sharded = sum(
        local(param.optim_param).numel() * param.parameter.dtype.itemsize
        for param in zero.params
        if _is_sharded(zero, param) and not _is_in_file(zero, param.name)
    )
    frozen = sum(local(x).nbytes for name, x in zero.frozen().items() if not _is_in_file(zero, name))
    buffers = sum(x.nbytes for storage in zero.storages for x in storage.buffers)
    optim_params = [param.optim_param for param in zero.params]
    coded = sum(storage.coded_bytes for storage in zero.storages)
    coded -= sum(
        local(param.optim_param).nbytes
        for param in zero.params
        if param.dequantized_rows is not None and param.is_in_place
    )
    copies = sum(local(param.optim_param).nbytes for param in zero.params if param.model_rows is not None)
    return {
        "parameters": kept + sharded + frozen + buffers + coded,
        "gradients": sum(_gradient_bytes(zero, param) for param in zero.params) + _staging_bytes(zero),
        "states": copies + int(state_bytes * sum(local(optim_param).numel() for optim_param in optim_params)),
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
    """Bytes left of a gradient: the mean in optim_param's dtype; in stage 0 the bucket that it lies in, and beside it
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
    """Two buffers, of the largest bucket of each kind."""
    total = 0
    for storage in zero.storages:
        most: dict[BucketKind, int] = {}
        for bucket in storage.reducer.buckets:
            if bucket.is_staged:
                most[bucket.kind] = max(most.get(bucket.kind, 0), sum(bucket.numels))
        total += sum(STAGING_BUFFERS * numel * kind.dtype.itemsize for kind, numel in most.items())
    return total
