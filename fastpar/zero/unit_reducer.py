"""Averages gradients unit by unit (stage 3): rows of what is sharded, whole ones of what is resident.

Note: two kinds of moments. `reduce` is called in the course of a backward pass, for the same units in the same order on
all ranks, whatever gradients a rank has. `finish`, at its end, first lets the ranks agree (one small all-reduce) on
which units still have gradients anywhere and on which parameters had any, and reduces those units.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fastpar.comm.ranges import annotate
from fastpar.comm.wire_formats import Wire
from fastpar.zero.buckets import OwnBucket, RowBucket, Staging
from fastpar.zero.groups import Groups, as_dtensor, local
from fastpar.zero.param_group import Unit
from fastpar.zero.parameter_classes import hide, looking_at_absent, show, withhold
from fastpar.zero.reducer import agree
from fastpar.zero.sharded_param import Slot, keep_traces

STAGING_BUFFERS = 2  # one that travels, one that is filled


class _Kind(NamedTuple):
    """What the gradients of a bucket have in common."""

    wire: torch.dtype
    device: torch.device
    groups: Groups


class ReplicaBucket:
    """Every rank gets the mean of all gradients, of resident parameters: few and small, so they travel in float32."""

    def __init__(self, slots: Sequence[Slot], groups: Groups) -> None:
        self.slots, self._groups = slots, groups
        self._numels = [local(slot.parameter).numel() for slot in slots]
        self._flat: Tensor | None = None

    def open(self) -> None:
        first = self.slots[0]
        wide = torch.promote_types(first.wire, torch.float32)
        self._flat = torch.zeros(sum(self._numels), dtype=wide, device=first.parameter.device)

    def add(self, positions: Sequence[int], gradients: Sequence[Tensor]) -> None:
        assert self._flat is not None
        pieces = self._flat.split(self._numels)
        if positions:
            torch._foreach_copy_([pieces[position] for position in positions], [x.reshape(-1) for x in gradients])

    def launch(self) -> None:
        assert self._flat is not None
        flat = self._flat
        keep_traces(self.slots, flat, lambda: [[piece] for piece in flat.split(self._numels)])
        for comm in self._groups.everyone():
            comm.all_reduce(self._flat, "avg", out=self._flat)
        self._groups.as_sum_of_parts(self._flat)

    def finish(self) -> None:
        assert self._flat is not None
        for slot, mine in zip(self.slots, self._flat.split(self._numels), strict=True):
            mean = mine.view(local(slot.owner).shape)
            if slot.owner.grad is None:
                slot.owner.grad = as_dtensor(mean.to(slot.owner.device, slot.owner.dtype), slot.spec)
            else:
                local(slot.owner.grad).add_(mean.to(slot.owner.device))
        self._flat = None


class UnitReducer:
    """Reduces the gradients of `units` and hands the means to the owners of their slots.

    is_syncing   False: gradients stay where autograd sums them
    """

    def __init__(self, units: Sequence[Unit], groups: Groups, wire: Wire | None = None) -> None:
        self._groups = groups
        self.is_syncing = True
        self.is_put_off = False  # shards show nothing of what is unsent in any case
        self._wire = wire
        self._in_flight: deque[RowBucket] = deque()
        self._used: set[Slot] = set()  # had a gradient here since the last `finish`
        self._had_none: dict[Slot, bool] = {}  # of those that were reduced since: whether the owner had no gradient
        self.refresh(units)

    def refresh(self, units: Sequence[Unit]) -> None:
        """Units have other slots than before. Between passes."""
        self._drain()
        self.slots = [slot for unit in units for slot in (*unit.slots, *unit.resident_slots)]
        self._buckets: dict[Unit, list[RowBucket | OwnBucket]] = {
            unit: [self._make_bucket(kind, slots) for kind, slots in _by_kind(unit.slots, self._groups)]
            for unit in units
        }
        resident = [slot for unit in units for slot in unit.resident_slots]
        self._replicas = [ReplicaBucket(slots, kind.groups) for kind, slots in _by_kind(resident, self._groups)]
        self._staging: dict[_Kind, Staging] = {}

    @property
    def staging_bytes(self) -> int:
        """Of the buffers in which gradients travel, which are made in the first backward pass."""
        return sum(STAGING_BUFFERS * staging.numel * kind.wire.itemsize for kind, staging in self._staging.items())

    @property
    def buckets(self) -> list[RowBucket]:
        """Whose gradients travel by rows."""
        return [bucket for buckets in self._buckets.values() for bucket in buckets if isinstance(bucket, RowBucket)]

    def reduce(self, unit: Unit) -> None:
        """Begin to reduce what a unit has of gradients; zero where it has none. Collective."""
        with annotate(f"fastpar::zero::reduce_scatter {unit.name}"):
            for bucket in self._buckets[unit]:
                if isinstance(bucket, OwnBucket):
                    self._launch(bucket)
                    bucket.finish()
                    continue
                while self._is_waiting_for(bucket):
                    self._in_flight.popleft().finish()
                self._launch(bucket)
                self._in_flight.append(bucket)

    def finish(self) -> None:
        """Reduce all that is left, and wait for everything. Collective."""
        units = list(self._buckets)
        with looking_at_absent():
            pending = [any(_has_gradient(slot) for slot in unit.slots) for unit in units]
            used = [slot in self._used or _has_gradient(slot) for slot in self.slots]
        agreed = agree([*pending, *used], self._groups.joined())
        for unit, is_pending in zip(units, agreed, strict=False):
            if is_pending:
                self.reduce(unit)
        for bucket in self._replicas:
            self._launch(bucket)
            bucket.finish()
        self._drain()
        for slot, is_used in zip(self.slots, agreed[len(units) :], strict=True):
            slot.take_own_term()
            if is_used:
                for hook in (getattr(slot.owner, "_post_accumulate_grad_hooks", None) or {}).values():
                    hook(slot.owner)
            elif self._had_none.get(slot, False):
                slot.owner.grad = None  # as without data parallelism
            show(slot)
        self._forget_pass()

    def hide(self) -> None:
        """Let parameters have their own `.grad`: see parameter_classes.py."""
        for slot in self.slots:
            hide(slot)

    def show(self) -> None:
        """Let shards have the averaged gradients, or none to read where there are some that are not averaged yet."""
        for slot in self.slots:
            show(slot)
        with looking_at_absent():
            unsent = [slot for slot in self.slots if _has_gradient(slot)]
        for slot in unsent:
            withhold(slot)

    def reduce_now(self) -> None:
        """Reduce what has been summed and not been sent, if any rank has such gradients. Collective."""
        self.hide()
        with looking_at_absent():
            pending = any(_has_gradient(slot) or slot.has_own_term for slot in self.slots)
        if agree([pending], self._groups.joined())[0]:
            self.finish()

    def forget(self) -> None:
        """Forget the pass that has not ended; reductions under way are waited for, and what they bring is kept."""
        self._drain()
        self._forget_pass()

    def forget_sums(self) -> None:
        """Drop gradients that were summed and not sent."""
        self.forget()
        with looking_at_absent():
            for slot in self.slots:
                slot.drop()
                slot.traces = ()

    def _make_bucket(self, kind: _Kind, slots: Sequence[Slot]) -> RowBucket | OwnBucket:
        if kind.groups is not self._groups and kind.groups.size == 1:
            return OwnBucket(slots, kind.groups)
        wire = self._wire if kind.groups.shard.size > 1 else None
        return RowBucket(slots, kind.groups, partial(self._staging_of, kind), wire)

    def _is_waiting_for(self, bucket: RowBucket) -> bool:
        """Whether something in flight has to end before a bucket can be filled."""
        kind = _kind_of(bucket.slots[0], self._groups)
        alike = sum(_kind_of(other.slots[0], self._groups) == kind for other in self._in_flight)
        return alike >= STAGING_BUFFERS or bucket in self._in_flight

    def _staging_of(self, kind: _Kind) -> Staging:
        """Buffers for the largest bucket of this kind."""
        found = self._staging.get(kind)
        if found is None:
            numels = [
                sum(local(slot.parameter).numel() for slot in bucket.slots)
                for bucket in self.buckets
                if _kind_of(bucket.slots[0], self._groups) == kind
            ]
            found = Staging(kind.groups.shard, max(numels), kind.wire, kind.device, count=STAGING_BUFFERS)
            self._staging[kind] = found
        return found

    def _launch(self, bucket: RowBucket | OwnBucket | ReplicaBucket) -> None:
        bucket.open()
        positions, gradients = [], []
        for position, slot in enumerate(bucket.slots):
            self._had_none.setdefault(slot, slot.owner.grad is None)
            gradient = slot.take()
            if gradient is not None:
                self._used.add(slot)
                positions.append(position)
                gradients.append(gradient)
        bucket.add(positions, gradients)
        bucket.launch()

    def _drain(self) -> None:
        while self._in_flight:
            self._in_flight.popleft().finish()

    def _forget_pass(self) -> None:
        self._used.clear()
        self._had_none.clear()


def _has_gradient(slot: Slot) -> bool:
    return slot.summed is not None or slot.unsent is not None


def _kind_of(slot: Slot, groups: Groups) -> _Kind:
    return _Kind(slot.wire, slot.parameter.device, groups.of(slot.parameter))


def _by_kind(slots: Sequence[Slot], groups: Groups) -> list[tuple[_Kind, list[Slot]]]:
    """Slots that may travel together."""
    kinds: dict[_Kind, list[Slot]] = {}
    for slot in slots:
        kinds.setdefault(_kind_of(slot, groups), []).append(slot)
    return list(kinds.items())
