"""Reducers of gradients: buckets are launched while backward runs, and averaged over data-parallel ranks.

    OrderReducer    stages 0 to 2: buckets of a size, in the order in which gradients come
    GroupReducer    stage 3: the buckets of a parameter group, when its backward has ended

Note: order. All ranks must launch the same buckets in the same order. `OrderReducer` launches a bucket when its
gradients are there and all buckets before it have been launched. Buckets are first filled in reverse order of
registration; after the first reduction they are filled anew in the order in which rank 0's gradients came. Small
buckets let communication begin early, large ones have less overhead: 25 MB is torch's choice too. `GroupReducer` is
told to `reduce` the same groups in the same order on all ranks, whatever gradients a rank has; `finish` first lets the
ranks agree (one small all-reduce) on which groups still have gradients anywhere, and reduces those.

Note: accumulation. Between `no_sync` and a reduction, gradients are summed where autograd puts them, those of 16 bits
in float32, and travel once. A reduction takes what has been summed and not yet been sent, and adds its mean to what the
optimizer's parameters have as gradient already. Gradients of what pipeline stages share stay where autograd puts them
in 16 bits too, as the pipeline adds them up from there.
"""

from __future__ import annotations

import weakref
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fastpar.comm import Communicator
from fastpar.comm.agree import set_on_any
from fastpar.comm.ranges import annotate
from fastpar.comm.wire_formats import Wire
from fastpar.zero.buckets import (
    STAGING_BUFFERS,
    AllReduceBucket,
    Bucket,
    BucketKind,
    LocalBucket,
    PersistentBucket,
    ReduceScatterBucket,
    StagingPool,
)
from fastpar.zero.groups import Groups, as_dtensor, local
from fastpar.zero.replica_writes import ReplicaWrites
from fastpar.zero.sharded_param import ShardedParam, hide, looking_at_absent, show, withhold

if TYPE_CHECKING:
    from fastpar.zero.param_group import ParamGroup

BATCH_BYTES = 256 << 10  # of gradients that are copied to their bucket together: what a cache holds
DEVICE_BATCH_BYTES = 8 << 20  # the same on devices, where a copy of less takes as long as its launch (not measured)
_SHOWN = 8  # names in an error
BUCKET_BYTES = 25 << 20
FIRST_BUCKET_BYTES = 1 << 20


class GradReducer:
    """Reduces the gradients of `params` and hands the means to the optimizer's parameters.

    is_syncing   False: gradients stay where autograd sums them
    is_deferred  whether gradients are nobody's to read before `reduce_now`
    buckets      whose gradients travel
    writes       to what several ranks have copies of
    """

    def __init__(self, groups: Groups, wire: Wire | None = None) -> None:
        self.groups, self._wire = groups, wire
        self.is_syncing, self.is_deferred = True, False
        self.writes = ReplicaWrites([])
        self.params: list[ShardedParam] = []
        self.buckets: list[Bucket] = []
        self.staging = StagingPool()
        self._in_flight: deque[Bucket] = deque()
        self._used: set[ShardedParam] = set()  # had a gradient here since the last reduction ended
        self._had_none: dict[ShardedParam, bool] = {}  # of those put since: whether there was no gradient before
        self._is_shown = False  # whether any parameter may have another class
        self._was_shown = False  # when the forward pass began

    # ---- what differs

    def begin_forward(self) -> None:
        """The model is about to run with gradients: parameters have their own class, which compiled code is for."""
        self._was_shown = self._is_shown

    def end_forward(self, output: Any) -> None:
        """It has run: `.grad` is what it was before, until a backward pass begins."""
        if self._was_shown:
            self.show()

    def follow_order(self) -> None:
        """All optimizers have stepped. Collective."""

    def reduce_rest(self) -> None:
        """Reduce all that has not been sent, and wait for everything. Collective."""
        raise NotImplementedError

    def _has_unsent(self, param: ShardedParam) -> bool:
        """Whether a parameter has gradients that only this rank knows of."""
        raise NotImplementedError

    def _unread(self) -> Iterable[ShardedParam]:
        """Parameters whose `.grad` would be a part of a gradient, which nobody is to take for it."""
        raise NotImplementedError

    def comms(self) -> list[Communicator]:
        """Groups that reach, one after the other, all ranks that reduce in step."""
        return self.groups.everyone()

    def detach(self) -> None:
        pass

    # ---- what `Zero` calls

    def end_passes(self) -> bool:
        """No backward pass comes before the step. Returns whether this rank has summed what has not been sent."""
        self.hide()
        with looking_at_absent():
            return any(self._has_unsent(param) for param in self.params)

    def reduce_now(self) -> None:
        """Reduce what has been summed and not been sent. Collective: one small reduction, and all where any rank has
        such gradients. Raises RuntimeError where writes have made ranks different: see replica_writes.py."""
        is_unsent, is_written = set_on_any([self.end_passes(), self.writes.is_any], self.comms())
        if is_written:
            self.writes.compare(self.comms())
        if is_unsent:
            self.reduce_rest()

    def hide(self) -> None:
        """Let parameters have their own `.grad`: see sharded_param.py."""
        self._is_shown = False
        for param in self.params:
            hide(param)

    def show(self) -> None:
        """Let parameters have the averaged gradients, or none to read where these are not averaged yet."""
        self._is_shown = True
        for param in self.params:
            show(param)
        self._withhold_unread()

    def _withhold_unread(self) -> None:
        self._is_shown = True
        with looking_at_absent():
            unread = list(self._unread())
        for param in unread:
            withhold(param)

    def forget(self) -> None:
        """Forget a pass that did not end; reductions under way are waited for, and what they bring is kept."""
        self._drain()
        self._used.clear()
        self._had_none.clear()

    def forget_sums(self, params: Sequence[ShardedParam]) -> None:
        """Drop what was summed and not sent of these parameters' gradients, and show none."""
        self.forget()
        with looking_at_absent():
            for param in params:
                param.drop()
                param.set_aside, param.traces = None, ()
                hide(param)

    # ---- buckets on their way

    def _make_room(self, bucket: Bucket) -> None:
        """Wait for what has to end before a bucket can be opened: as many of a kind as there are staging buffers."""
        while bucket in self._in_flight or sum(b.kind == bucket.kind for b in self._in_flight) >= STAGING_BUFFERS:
            self._in_flight.popleft().finish()

    def _put(self, bucket: Bucket, positions: Iterable[int]) -> None:
        """Copy what these parameters have of gradients to an open bucket."""
        found, gradients = [], []
        for position in positions:
            param = bucket.params[position]
            if param not in self._had_none:
                # What autograd put there is not a gradient from before.
                own = param.optim_param.grad is None or param.optim_param is param.parameter
                self._had_none[param] = own and param.set_aside is None
            gradient = param.take()
            if gradient is not None:
                self._used.add(param)
                found.append(position)
                gradients.append(gradient)
        bucket.put(found, gradients)

    def _launch(self, bucket: Bucket, *, is_last: bool = False) -> None:
        bucket.launch(is_last=is_last)
        if bucket.travels:
            self._in_flight.append(bucket)
        else:
            bucket.finish()

    def _drain(self) -> None:
        while self._in_flight:
            self._in_flight.popleft().finish()

    def _settle(self, param: ShardedParam, is_used: bool) -> None:
        """After the last bucket; `is_used`: whether any rank had a gradient of it."""
        if not is_used and self._had_none.get(param, False):
            param.optim_param.grad = None  # as without data parallelism
        self._is_shown = True
        show(param)


class OrderReducer(GradReducer):
    """Reduces the gradients of `params` in the order in which they come: see the module docstring.

    wire          how they travel; None: as they are
    accumulate    every how many backward passes gradients are reduced
    bucket_bytes  of gradients that travel together
    began         called when a backward pass brings its first gradient
    """

    def __init__(
        self,
        params: Sequence[ShardedParam],
        groups: Groups,
        wire: Wire | None = None,
        *,
        accumulate: int = 1,
        bucket_bytes: int = BUCKET_BYTES,
        began: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(groups, wire)
        self._began, self._accumulate, self._bucket_bytes = began, accumulate, bucket_bytes
        self._members: list[list[int]] = []  # numbers of each bucket's parameters
        self._nbytes: list[int] = []  # of each parameter's gradient
        self._place: dict[int, tuple[int, int]] = {}  # of a parameter: its bucket and its position there
        self._passes = 0  # that have ended since gradients were last reduced
        self._is_inside = False  # a backward pass
        self._is_reducing = False  # in it
        self._came_alone: set[ShardedParam] = set()  # have gradients that were not reduced
        self._hooked: int | None = None  # a parameter that has come, and whose user's hooks run next
        self._order: list[int] | None = []  # in which gradients come, until the buckets follow it
        self._hooks: list[Any] = []
        self.extend(params)

    def extend(self, params: Sequence[ShardedParam]) -> None:
        """Reduce the gradients of these as well. Between passes; collective."""
        self.forget()
        added = range(len(self.params), len(self.params) + len(params))
        self.params += params
        self._nbytes += [local(param.parameter).nbytes for param in params]
        self._fill(list(reversed(added)), after=self._members)
        self._order = []  # gradients may come in another order now
        self._hooks += [self._hook(index) for index in added]

    def begin_forward(self) -> None:
        super().begin_forward()
        self.hide()
        if self._is_inside:
            self.forget()  # the backward pass before has failed

    def end_forward(self, output: Any) -> None:
        super().end_forward(output)
        if any(True for bucket in self.buckets for _ in bucket.results()):
            itself = weakref.ref(self)

            def begins(_: Tensor) -> None:
                reducer = itself()
                if reducer is not None:
                    reducer.begin_pass()

            for x in tree_leaves(output):
                if isinstance(x, Tensor) and x.requires_grad:
                    x.register_hook(begins)

    def begin_pass(self) -> None:
        """A backward pass is about to begin. What has been reduced is kept apart from what it brings; where nobody has
        said so, both are reduced together."""
        if not self._is_inside and self._will_reduce():
            self._set_aside()

    def hide(self) -> None:
        if self._is_shown:
            super().hide()

    def reduce_rest(self) -> None:
        self._set_aside()
        self._begin_reduction()
        self._finish_reduction()

    def end_passes(self) -> bool:
        if self._is_inside:
            self.forget()
        self.hide()
        for param in self.params:
            if param.set_aside is not None and param.optim_param.grad is None:  # a forward pass without a backward pass
                param.optim_param.grad, param.set_aside = as_dtensor(param.set_aside, param.spec), None
        is_any = super().end_passes()
        if not is_any:
            self._passes = 0
            self._came_alone.clear()
        return is_any

    def reduce_now(self) -> None:
        super().reduce_now()
        self._passes = 0
        self._came_alone.clear()

    def forget(self) -> None:
        is_open = self._is_reducing and 0 <= self._current < len(self.buckets)
        self._is_inside = self._is_reducing = False
        self._hooked = None
        super().forget()
        if is_open:
            self.buckets[self._current].close()

    def forget_sums(self, params: Sequence[ShardedParam]) -> None:
        super().forget_sums(params)
        self._came_alone.difference_update(params)
        if not self._came_alone:
            self._passes = 0

    def follow_order(self) -> None:
        """Fill the buckets anew in the order in which gradients came, once that is known. Collective."""
        if not self._order:
            return
        order = [*dict.fromkeys(self._order)]  # several passes may have been reduced before the first step
        seen = set(order)
        agreed = torch.tensor(order + [i for i in reversed(range(len(self.params))) if i not in seen])
        for comm in self.groups.everyone():
            agreed = comm.broadcast(agreed, 0)
        self._order = None
        kept = [(param, local(grad)) for bucket in self.buckets for param, grad in bucket.results()]
        for param, _ in kept:
            param.optim_param.grad = None
        self._fill(agreed.tolist())
        for param, grad in kept:
            number, position = self._place[self._index[param]]
            self.buckets[number].keep(position, grad)

    def detach(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _unread(self) -> Iterable[ShardedParam]:
        """Pipelines add to some gradients themselves, to which autograd does not come or which stages share."""
        for param in self._came_alone:
            is_part = param.unreduced_sum is not None or (self.is_deferred and param.unsent is not None)
            if is_part and self.groups.size > 1 and not hasattr(param.parameter, "pipeline_share"):
                yield param

    def _has_unsent(self, param: ShardedParam) -> bool:
        if param.unreduced_sum is not None or param.unsent is None:
            return param.unreduced_sum is not None
        number, position = self._place[self._index[param]]
        return param in self._came_alone or not self.buckets[number].is_result(position)

    def _set_aside(self) -> None:
        # What came alone lies on top of an earlier mean (`p.grad += ...`): their sum is reduced, as the mean of a mean
        # is the mean.
        for bucket in self.buckets:
            bucket.set_aside(but=self._came_alone)

    def _make_bucket(self, params: Sequence[ShardedParam]) -> Bucket:
        kind = BucketKind.of(params[0], self.groups)
        if self.groups.shard.size == 1:
            return AllReduceBucket(params, kind, self._wire)
        return ReduceScatterBucket(params, kind, self.staging, self._wire, is_flagged=True)

    def _fill(self, order: Sequence[int], after: Sequence[list[int]] = ()) -> None:
        """Sort the parameters into buckets in this order; the first one is small, so that communication begins early.
        `after`: buckets that stay, and come first."""
        limit = min(FIRST_BUCKET_BYTES, self._bucket_bytes)
        groups: list[list[int]] = []
        held, last = 0, None
        for index in order:
            param = self.params[index]
            nbytes = local(param.parameter).numel() * param.reduce_dtype.itemsize
            kind = param.reduce_dtype, param.parameter.device, param.optim_param.dtype
            if kind != last or held + nbytes > limit:
                if groups:
                    limit = self._bucket_bytes
                groups.append([])
                held, last = 0, kind
            groups[-1].append(index)
            held += nbytes
        made = [self._make_bucket([self.params[index] for index in group]) for group in groups]
        self.buckets = [*self.buckets[: len(after)], *made]
        self._members = [*after, *groups]
        self._place = {index: (n, at) for n, group in enumerate(self._members) for at, index in enumerate(group)}
        self._index = {param: index for index, param in enumerate(self.params)}

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

        return self.params[index].parameter.register_post_accumulate_grad_hook(came)

    def _came(self, index: int) -> None:
        """The gradient of a parameter is there."""
        if not self._is_inside:
            self._is_inside = True
            self.hide()
            self._began()
            if self._will_reduce():
                self._begin_reduction()
            torch.autograd.Variable._execution_engine.queue_callback(self._end)
        self._take_hooked()
        # Hooks that users have put behind this one are to see the gradient, so it is taken when they have run.
        hooks: Any = self.params[index].parameter._post_accumulate_grad_hooks
        if len(hooks) > 1:
            self._hooked = index
        else:
            self._take_in(index)

    def _take_hooked(self) -> None:
        if self._hooked is not None:
            index, self._hooked = self._hooked, None
            self._take_in(index)

    def _take_in(self, index: int) -> None:
        if not self._is_reducing:
            self._came_alone.add(self.params[index])
            self.params[index].keep_sum()
            return
        if self._order is not None:
            self._order.append(index)
        if self._has_come[index]:
            raise RuntimeError(
                f"the gradient of {self.params[index].name} came twice in one backward pass; reentrant checkpoints do "
                "that: give them use_reentrant=False"
            )
        self._has_come[index] = True
        number, _ = self._place[index]
        self._missing[number] -= 1
        if self._current < 0:
            self._open_next()
        elif number == self._current:
            self._batch.append(index)
            self._batch_bytes += self._nbytes[index]
            self._put_if_full(self.buckets[number])
        while self._current < len(self.buckets) and not self._missing[self._current]:
            self._launch_current()

    def _end(self) -> None:
        """A backward pass has ended."""
        self._take_hooked()
        self._is_inside = False
        self._passes += 1
        if self._is_reducing:
            self._finish_reduction()
            self._passes = 0
            self._came_alone.clear()
        else:
            self._withhold_unread()

    def _begin_reduction(self) -> None:
        self._is_reducing = True
        self._has_come = [False] * len(self.params)
        self._missing = [len(bucket.params) for bucket in self.buckets]
        self._current = -1  # the bucket that is open
        self._batch: list[int] = []  # have come for the open bucket, and have not been put
        self._batch_bytes = 0

    def _finish_reduction(self) -> None:
        """Launch what is left, with gradients that were summed earlier, and wait for all."""
        if self._current < 0:
            self._open_next()
        while self._current < len(self.buckets):
            self._batch += [index for index in self._members[self._current] if not self._has_come[index]]
            self._launch_current()
        self._drain()
        if all(bucket.is_complete for bucket in self.buckets):
            used = [True] * len(self.params)
        else:
            used = set_on_any([param in self._used for param in self.params], self.comms())
        for param, is_used in zip(self.params, used, strict=True):
            self._settle(param, is_used)
        self._is_reducing = False
        self.forget()

    def _open_next(self) -> None:
        self._current += 1
        if self._current < len(self.buckets):
            bucket = self.buckets[self._current]
            self._make_room(bucket)
            bucket.open()
            self._batch = [index for index in self._members[self._current] if self._has_come[index]]
            self._batch_bytes = sum(self._nbytes[index] for index in self._batch)
            self._put_if_full(bucket)

    def _put_if_full(self, bucket: Bucket) -> None:
        if self._batch_bytes >= (BATCH_BYTES if bucket.kind.device.type == "cpu" else DEVICE_BATCH_BYTES):
            self._put_batch()

    def _put_batch(self) -> None:
        self._put(self.buckets[self._current], [self._place[index][1] for index in self._batch])
        self._batch, self._batch_bytes = [], 0

    def _launch_current(self) -> None:
        self._put_batch()
        with annotate(f"fastpar::zero::reduce bucket {self._current}"):
            self._launch(self.buckets[self._current], is_last=self._current == len(self.buckets) - 1)
        self._open_next()


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
