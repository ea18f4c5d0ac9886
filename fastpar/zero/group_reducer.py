"""Gradients of parameter groups, reduced when the backward of a group has ended (stage 3).

`GroupReducer` is told to `reduce` the same groups in the same order on all ranks, whatever gradients a rank has; its
`reduce_rest` first lets the ranks agree (one small all-reduce) on which groups still have gradients anywhere.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from fastpar.comm import Communicator
from fastpar.comm.ranges import annotate
from fastpar.comm.wire_formats import Wire
from fastpar.zero.buckets import Bucket, BucketKind, LocalBucket, PersistentBucket, ReduceScatterBucket, StagingPool
from fastpar.zero.groups import Groups
from fastpar.zero.param_classes import looking_at_absent
from fastpar.zero.reducer import GradReducer
from fastpar.zero.sharded_param import ShardedParam

if TYPE_CHECKING:
    from fastpar.zero.param_group import ParamGroup


_SHOWN = 8  # names in an error


class GroupReducer(GradReducer):
    """Reduces the gradients of parameter groups: rows of what is sharded, whole ones of what every rank keeps."""

    def __init__(self, units: Sequence[ParamGroup], groups: Groups, wire: Wire | None = None) -> None:
        super().__init__(groups, wire)
        self._numbers = {unit: number for number, unit in enumerate(units)}
        self._went: list[int] = []  # numbers of units whose collectives this rank has called since ranks last agreed
        self.refresh(units)

    def refresh(self, units: Sequence[ParamGroup]) -> None:
        """Groups have other parameters than before. Between passes."""
        self._drain()
        self.params = [param for unit in units for param in (*unit.params, *unit.persistent_params)]
        self.staging = StagingPool()
        self._buckets = {unit: [self._make_bucket(*each) for each in self._by_kind(unit.params)] for unit in units}
        every = [bucket for buckets in self._buckets.values() for bucket in buckets]
        self.buckets = [bucket for bucket in every if bucket.travels]
        persistent = [param for unit in units for param in unit.persistent_params]
        self._persistent = [PersistentBucket(params, kind) for kind, params in self._by_kind(persistent)]

    def note(self, unit: ParamGroup) -> None:
        """A collective of a group is about to be called, which has to be the same group's on all ranks."""
        self._went.append(self._numbers[unit])

    def reduce(self, unit: ParamGroup) -> None:
        """Begin to reduce what a group has of gradients; zero where it has none. Collective."""
        if any(bucket.travels for bucket in self._buckets[unit]):
            self.note(unit)
        with annotate(f"fastpar::zero::reduce_scatter {unit.name}"):
            for bucket in self._buckets[unit]:
                self._make_room(bucket)
                self._put_all(bucket)
                self._launch(bucket)

    def reduce_rest(self) -> None:
        units = list(self._buckets)
        with looking_at_absent():
            pending = [any(_has_gradient(param) for param in unit.params) for unit in units]
            used = [param in self._used or self._has_unsent(param) for param in self.params]
        agreed = self._agreed([*pending, *used])
        for unit, is_pending in zip(units, agreed, strict=False):
            if is_pending:
                self.reduce(unit)
        for bucket in self._persistent:
            self._put_all(bucket)
            bucket.launch()
            bucket.finish()
        self._drain()
        for param, is_used in zip(self.params, agreed[len(units) :], strict=True):
            param.take_own_term()
            self._settle(param, is_used)
            if is_used:  # what users see is the parameter at rest, to which autograd does not come
                with looking_at_absent():
                    hooks = getattr(param.model_param, "_post_accumulate_grad_hooks", None) or {}
                for hook in list(hooks.values()):
                    hook(param.model_param)
        self.forget()

    def _agreed(self, flags: Sequence[bool]) -> list[bool]:
        """Flags of any rank. Raises RuntimeError on all ranks where they went through other groups: what was reduced is
        then a sum of gradients of several, and is dropped. Collective: one small all-reduce."""
        went = zlib.crc32(array("i", self._went).tobytes()) >> 1
        found = torch.tensor([went, -went, *flags], dtype=torch.int32, device="cpu")
        for comm in self.comms():
            comm.all_reduce(found, "max", out=found)
        most, least, *agreed = found.tolist()
        if most == -least:
            return [bool(flag) for flag in agreed]
        names = {number: unit.name or "the model" for unit, number in self._numbers.items()}
        here = ", ".join(names[number] for number in self._went[-_SHOWN:])
        self.forget_sums(self.params)
        for param in self.params:
            param.optim_param.grad = None
        raise RuntimeError(
            "ranks went through other modules, or in another order, and stage 3 gathers and reduces each on all ranks "
            f"at once: no gradients are kept (last here: {here}). Let all ranks run the same modules, and those that "
            "they choose by their data within one of units=; or take stage=2"
        )

    def _put_all(self, bucket: Bucket) -> None:
        bucket.open()
        self._put(bucket, range(len(bucket.params)))

    def forget(self) -> None:
        super().forget()
        self._went.clear()

    def comms(self) -> list[Communicator]:
        return self.groups.joined()

    def _has_unsent(self, param: ShardedParam) -> bool:
        return _has_gradient(param) or param.has_own_term

    def _unread(self) -> Iterable[ShardedParam]:
        return (param for param in self.params if _has_gradient(param))

    def _make_bucket(self, kind: BucketKind, params: Sequence[ShardedParam]) -> Bucket:
        if kind.groups is not self.groups and kind.groups.size == 1:
            return LocalBucket(params, kind)
        return ReduceScatterBucket(params, kind, self.staging, self._wire if kind.groups.shard.size > 1 else None)

    def _by_kind(self, params: Sequence[ShardedParam]) -> list[tuple[BucketKind, list[ShardedParam]]]:
        """Parameters whose gradients may travel together."""
        kinds: dict[BucketKind, list[ShardedParam]] = {}
        for param in params:
            kinds.setdefault(BucketKind.of(param, self.groups), []).append(param)
        return list(kinds.items())


def _has_gradient(param: ShardedParam) -> bool:
    return param.unreduced_sum is not None or param.unsent is not None
