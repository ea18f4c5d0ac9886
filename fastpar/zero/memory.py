"""What the stages keep in memory, by formula: see the table in docs/zero.md."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from fastpar.zero.groups import Groups, local
from fastpar.zero.replicas import Replicas
from fastpar.zero.sharded_param import Slot
from fastpar.zero.stage3 import Stage3

if TYPE_CHECKING:
    from fastpar.zero.sharding import Zero

STAGING_BUFFERS = 2


def expected(zero: Zero, state_bytes: float) -> dict[str, int]:
    """Bytes of this rank by kind, between backward and the step: see `Zero.expected_memory`."""
    kept = sum(_numel(slot) * slot.parameter.dtype.itemsize for slot in zero.slots if not _is_sharded(zero, slot))
    at_rest = sum(
        local(slot.owner).numel() * slot.parameter.dtype.itemsize
        for slot in zero.slots
        if _is_sharded(zero, slot) and not _is_in_file(zero, slot.name)
    )
    frozen = sum(local(x).nbytes for name, x in zero.frozen().items() if not _is_in_file(zero, name))
    buffers = sum(x.nbytes for storage in zero.storages if isinstance(storage, Stage3) for x in storage.buffers)
    owners = [slot.owner for slot in zero.slots]
    coded = sum(storage.coded_bytes for storage in zero.storages if isinstance(storage, Replicas))
    coded -= sum(local(slot.owner).nbytes for slot in zero.slots if slot.shown is not None and slot.is_in_place)
    copies = sum(local(slot.owner).nbytes for slot in zero.slots if slot.target is not None)
    return {
        "parameters": kept + at_rest + frozen + buffers + coded,
        "gradients": sum(_gradient_bytes(zero, slot) for slot in zero.slots) + _staging_bytes(zero),
        "states": copies + int(state_bytes * sum(local(owner).numel() for owner in owners)),
    }


def _numel(slot: Slot) -> int:
    return local(slot.parameter).numel()


def _is_sharded(zero: Zero, slot: Slot) -> bool:
    """Whether a rank has only its rows of the parameter, at rest."""
    return zero.stage == 3 and slot.name not in zero.resident


def _is_in_file(zero: Zero, name: str) -> bool:
    """Whether no rank has the parameter in memory, at rest."""
    offload = zero.offload
    return offload is not None and offload.parameters and offload.path is not None and name not in zero.resident


def _gradient_bytes(zero: Zero, slot: Slot) -> int:
    """What is left of a gradient: the mean in the owner's dtype; in stage 0 the bucket that it lies in, and beside it
    the mean where that is wider."""
    mean = local(slot.owner).numel() * slot.owner.dtype.itemsize
    if zero.groups_of(slot).shard.size > 1 or zero.stage == 3:
        return mean
    in_bucket = _numel(slot) * slot.wire.itemsize
    return (
        in_bucket if slot.wire == slot.owner.dtype and slot.owner.device == slot.parameter.device else in_bucket + mean
    )


def _staging_bytes(zero: Zero) -> int:
    """Two buffers, of the largest bucket or unit of each kind."""
    total = 0
    for storage in zero.storages:
        most: dict[tuple[torch.dtype, torch.device, Groups], int] = {}
        for slots in _buckets(zero, storage):
            kind = slots[0].wire, slots[0].parameter.device, zero.groups_of(slots[0])
            most[kind] = max(most.get(kind, 0), sum(map(_numel, slots)))
        total += sum(STAGING_BUFFERS * numel * dtype.itemsize for (dtype, _, _), numel in most.items())
    return total


def _buckets(zero: Zero, storage: Replicas | Stage3) -> Iterable[list[Slot]]:
    is_by_rows = isinstance(storage, Stage3) or (storage.slots and zero.groups_of(storage.slots[0]).shard.size > 1)
    return [list(bucket.slots) for bucket in storage.reducer.buckets] if is_by_rows else []
