"""Averages gradients over data-parallel ranks while backward runs: in buckets, whole or split by rows.

Note: order. All ranks must launch the same buckets in the same order, so a bucket is launched when its gradients are
there and all buckets before it have been launched. Buckets are first filled in reverse order of registration; after
the first reduction they are filled anew in the order in which rank 0's gradients came. Small buckets let communication
begin early, large ones have less overhead: 25 MB is torch's choice too.

Note: accumulation. Between `no_sync` and a reduction, gradients are summed where autograd puts them, those of 16 bits
in float32, and travel once. A reduction takes what has been summed and not yet been sent, and adds its mean to what the
optimizer's parameters have as gradient already. Gradients of what pipeline stages share stay where autograd puts them
in 16 bits too, as the pipeline adds them up from there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastpar.comm import Communicator
from fastpar.comm.ranges import annotate
from fastpar.zero.buckets import Bucket
from fastpar.zero.groups import Groups, as_dtensor, local
from fastpar.zero.parameter_classes import hide, show, withhold
from fastpar.zero.sharded_param import Slot

BATCH_BYTES = 256 << 10  # of gradients that are copied to their bucket together: what a cache holds
BUCKET_BYTES = 25 << 20
FIRST_BUCKET_BYTES = 1 << 20


class Reducer:
    """Reduces the gradients of `slots` in the course of backward passes: see the module docstring.

    make_bucket   slots of one dtype -> Bucket
    accumulate    every how many backward passes gradients are reduced
    began         called when a backward pass brings its first gradient
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        groups: Groups,
        make_bucket: Callable[[Sequence[Slot]], Bucket],
        *,
        accumulate: int = 1,
        bucket_bytes: int = BUCKET_BYTES,
        began: Callable[[], None] = lambda: None,
    ) -> None:
        self._began = began
        self.slots, self.groups, self._make_bucket = list(slots), groups, make_bucket
        self._accumulate, self._bucket_bytes = accumulate, bucket_bytes
        self.is_syncing = True
        self.is_put_off = False  # whether gradients are nobody's to read before `reduce_now`
        self.buckets: list[Bucket] = []
        self.members: list[list[int]] = []  # the slots of each bucket
        self.nbytes = [local(slot.parameter).nbytes for slot in slots]  # of gradients
        self.place: dict[int, tuple[int, int]] = {}  # of a slot: its bucket and its position there
        self._passes = 0  # that have ended since gradients were last reduced
        self._is_inside = False
        self._came_alone: set[int] = set()  # slots that have gradients which were not reduced
        self._round: _Round | None = None
        self._order: list[int] | None = []  # in which gradients come, until the buckets follow it
        self._fill(list(reversed(range(len(self.slots)))))
        self._hooks = [self._hook(index) for index in range(len(self.slots))]

    def extend(self, slots: Sequence[Slot]) -> None:
        """Reduce the gradients of these as well. Between passes; collective."""
        self.forget()
        first = len(self.slots)
        added = range(first, first + len(slots))
        self.slots += slots
        self.nbytes += [local(slot.parameter).nbytes for slot in slots]
        self._fill(list(reversed(added)), after=self.members)
        self._order = []  # gradients may come in another order now
        self._hooks += [self._hook(index) for index in added]

    def begin_forward(self) -> None:
        """The model is about to run with gradients."""
        self.hide()
        if self._is_inside:
            self.forget()  # the backward pass before has failed
        if self._will_reduce():
            for bucket in self.buckets:
                bucket.set_aside()

    def reduce_now(self) -> None:
        """Reduce what has been summed and not been sent. Collective: one small reduction, and all where any rank has
        such gradients."""
        if self._is_inside:
            self.forget()
        self.hide()
        for slot in self.slots:
            if slot.kept is not None and slot.owner.grad is None:  # a forward pass without a backward pass
                slot.owner.grad, slot.kept = as_dtensor(slot.kept, slot.spec), None
        is_any = any(self._is_unsent(index) for index in range(len(self.slots)))
        if agree([is_any], self.groups.everyone())[0]:
            for bucket in self.buckets:
                bucket.set_aside()
            _Round(self).finish()
        self._passes = 0
        self._came_alone.clear()

    def hide(self) -> None:
        """Let parameters have their own `.grad`: see parameter_classes.py."""
        for slot in self.slots:
            hide(slot)

    def show(self) -> None:
        """Let parameters have the averaged gradients, or none where these are not averaged yet."""
        for slot in self.slots:
            show(slot)
        self._withhold()

    def _withhold(self) -> None:
        """After a pass that has reduced nothing: let nobody take a part of a gradient for it. Pipelines add to some
        gradients themselves, to which autograd does not come or which stages share."""
        for index in self._came_alone:
            slot = self.slots[index]
            is_part = slot.summed is not None or (self.is_put_off and slot.unsent is not None)
            if is_part and self.groups.size > 1 and not hasattr(slot.parameter, "pipeline_share"):
                withhold(slot)

    def forget(self) -> None:
        """Drop what a backward pass that did not end has left. Reductions under way are waited for."""
        self._is_inside = False
        if self._round is not None:
            self._round.abandon()
            self._round = None

    def forget_sums(self) -> None:
        """Drop gradients that were summed and not sent."""
        self.forget()
        self._passes = 0
        self._came_alone.clear()
        for slot in self.slots:
            slot.drop()
            slot.kept = None
            slot.traces = ()

    def follow_order(self) -> None:
        """Fill the buckets anew in the order in which gradients came, once that is known; forgets gradients.
        Collective."""
        if not self._order:
            return
        order = [*dict.fromkeys(self._order)]  # several passes may have been reduced before the first step
        seen = set(order)
        agreed = torch.tensor(order + [i for i in reversed(range(len(self.slots))) if i not in seen])
        for comm in self.groups.everyone():
            agreed = comm.broadcast(agreed, 0)
        self._order = None
        for slot in self.slots:  # may lie in memory of the buckets that go
            slot.owner.grad = None
        self._fill(agreed.tolist())

    def detach(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _fill(self, order: Sequence[int], after: Sequence[list[int]] = ()) -> None:
        """Sort the slots into buckets in this order; the first one is small, so that communication begins early.
        `after`: buckets that stay, and come first."""
        limit = min(FIRST_BUCKET_BYTES, self._bucket_bytes)
        groups: list[list[int]] = []
        held = 0
        for index in order:
            slot = self.slots[index]
            nbytes = local(slot.parameter).numel() * slot.wire.itemsize
            kind = slot.wire, slot.parameter.device, slot.owner.dtype
            before = self.slots[groups[-1][-1]] if groups else None
            if (
                before is None
                or held + nbytes > limit
                or kind != (before.wire, before.parameter.device, before.owner.dtype)
            ):
                if groups:
                    limit = self._bucket_bytes
                groups.append([])
                held = 0
            groups[-1].append(index)
            held += nbytes
        kept = self.buckets[: len(after)]
        self.buckets = [*kept, *(self._make_bucket([self.slots[index] for index in group]) for group in groups)]
        groups = [*after, *groups]
        self.place = {
            index: (number, position) for number, group in enumerate(groups) for position, index in enumerate(group)
        }
        self.members = groups

    def _is_unsent(self, index: int) -> bool:
        """Whether a slot has gradients that only this rank knows of."""
        slot = self.slots[index]
        number, position = self.place[index]
        return slot.summed is not None or (slot.unsent is not None and not self.buckets[number].is_result(position))

    # ---- within a backward pass

    def _will_reduce(self) -> bool:
        return self.is_syncing and self._passes + 1 >= self._accumulate

    def _hook(self, index: int) -> Any:
        """Weak: Python's collector does not see what a hook of a tensor holds, and groups would stay for ever. The
        optimizer's hooks keep this."""
        itself = weakref.ref(self)

        def came(_: Tensor) -> None:
            reducer = itself()
            if reducer is not None:
                reducer._came(index)

        return self.slots[index].parameter.register_post_accumulate_grad_hook(came)

    def _came(self, index: int) -> None:
        if not self._is_inside:
            self._is_inside = True
            self.hide()
            self._began()
            self._round = _Round(self) if self._will_reduce() else None
            torch.autograd.Variable._execution_engine.queue_callback(self._end)
        if self._round is None:
            self._came_alone.add(index)
            self.slots[index].keep_sum()
        else:
            if self._order is not None:
                self._order.append(index)
            self._round.came(index)

    def _end(self) -> None:
        self._passes += 1
        reduction, self._round = self._round, None
        self._is_inside = False
        if reduction is not None:
            self._passes = 0
            self._came_alone.clear()
            reduction.finish()
        else:
            self._withhold()


class _Round:
    """One reduction of all buckets."""

    def __init__(self, reducer: Reducer) -> None:
        self._reducer, self._buckets = reducer, reducer.buckets
        count = len(reducer.slots)
        self._has_come = [False] * count
        self._is_used = [False] * count
        self._had_none = [
            slot.kept is None and (slot.owner.grad is None or slot.owner is slot.parameter) for slot in reducer.slots
        ]
        self._missing = [len(bucket.slots) for bucket in self._buckets]
        self._current = -1  # the bucket that is open
        self._in_flight: list[Bucket] = []
        self._batch: list[int] = []  # have come for the open bucket, and have not been added
        self._batch_bytes = 0

    def came(self, index: int) -> None:
        """The gradient of a slot is there."""
        if self._has_come[index]:
            raise RuntimeError(
                f"the gradient of {self._reducer.slots[index].name} came twice in one backward pass; reentrant "
                "checkpoints do that: give them use_reentrant=False"
            )
        self._has_come[index] = True
        number, _ = self._reducer.place[index]
        self._missing[number] -= 1
        if self._current < 0:
            self._open_next()
        elif number == self._current:
            self._batch.append(index)
            self._batch_bytes += self._reducer.nbytes[index]
            if self._batch_bytes >= BATCH_BYTES:
                self._add_batch()
        while self._current < len(self._buckets) and not self._missing[self._current]:
            self._launch()
            self._open_next()

    def finish(self) -> None:
        """Launch what is left, with gradients that were summed earlier, and wait for all."""
        if self._current < 0:
            self._open_next()
        while self._current < len(self._buckets):
            self._batch += [index for index in self._reducer.members[self._current] if not self._has_come[index]]
            self._launch()
            self._open_next()
        self._drain()
        everyone = agree(self._is_used, self._reducer.groups.everyone())
        for slot, is_used, had_none in zip(self._reducer.slots, everyone, self._had_none, strict=True):
            if not is_used and had_none:
                slot.owner.grad = None  # as without data parallelism
            show(slot)

    def abandon(self) -> None:
        """The pass has failed."""
        self._drain()
        if 0 <= self._current < len(self._buckets):
            self._buckets[self._current].close()

    def _drain(self) -> None:
        while self._in_flight:
            self._in_flight.pop(0).finish()

    def _open_next(self) -> None:
        self._current += 1
        while len(self._in_flight) >= 2:  # as many as there are staging buffers
            self._in_flight.pop(0).finish()
        if self._current < len(self._buckets):
            self._buckets[self._current].open()
            self._batch = [index for index in self._reducer.members[self._current] if self._has_come[index]]
            self._add_batch()

    def _add_batch(self) -> None:
        positions, gradients = [], []
        for index in self._batch:
            gradient = self._reducer.slots[index].take()
            if gradient is not None:
                self._is_used[index] = True
                positions.append(self._reducer.place[index][1])
                gradients.append(gradient)
        self._buckets[self._current].add(positions, gradients)
        self._batch, self._batch_bytes = [], 0

    def _launch(self) -> None:
        self._add_batch()
        bucket = self._buckets[self._current]
        with annotate(f"fastpar::zero::reduce bucket {self._current}"):
            bucket.launch()
        self._in_flight.append(bucket)


def agree(flags: Sequence[bool], comms: Sequence[Communicator]) -> list[bool]:
    """Which flags are set on any rank that these groups reach one after the other."""
    agreed = torch.tensor(flags, dtype=torch.int32)
    for comm in comms:
        comm.all_reduce(agreed, "max", out=agreed)
    return [bool(flag) for flag in agreed.tolist()]
