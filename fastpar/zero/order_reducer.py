"""Buckets of gradients that are launched while backward runs, in the order in which gradients come (stages 0 to 2).

A bucket is launched when its gradients are there and all buckets before it have been launched. Buckets are first filled
in reverse order of registration; after the first reduction they are filled anew in the order in which rank 0's
gradients came. Small buckets let communication begin early, large ones have less overhead: 25 MB is torch's choice too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fastpar.comm.agree import set_on_any
from fastpar.comm.ranges import annotate
from fastpar.comm.wire_formats import Wire
from fastpar.zero.buckets import AllReduceBucket, Bucket, BucketKind, ReduceScatterBucket
from fastpar.zero.groups import Groups, as_dtensor, local
from fastpar.zero.hooks import uncompiled
from fastpar.zero.reducer import GradReducer
from fastpar.zero.sharded_param import ShardedParam

BATCH_BYTES = 256 << 10  # of gradients that are copied to their bucket together: what a cache holds
DEVICE_BATCH_BYTES = 8 << 20  # the same on devices, where a copy of less takes as long as its launch (not measured)
BUCKET_BYTES = 25 << 20
FIRST_BUCKET_BYTES = 1 << 20


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
                    uncompiled(reducer.begin_pass)

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
        """Not what is read within `no_sync`, as in DDP. Pipelines add to some gradients themselves, to which autograd
        does not come or which stages share."""
        is_open = self.is_syncing or self.is_deferred
        for param in self._came_alone:
            is_part = param.unreduced_sum is not None or (is_open and param.unsent is not None)
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
                uncompiled(reducer._came, index)

        return self.params[index].parameter.register_post_accumulate_grad_hook(came)

    def _came(self, index: int) -> None:
        """The gradient of a parameter is there."""
        if not self._is_inside:
            self._is_inside = True
            self.hide()
            self._began()
            if self._will_reduce():
                self._begin_reduction()
            torch.autograd.Variable._execution_engine.queue_callback(partial(uncompiled, self._end))
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
        if hasattr(self.params[index].parameter, "pipeline_adds_grad"):
            raise RuntimeError(
                f"{self.params[index].name} is shared by stages of a pipeline that was made after shard(...), and its "
                "gradient would be reduced before theirs is added: make the pipeline first, or shard with overlap=False"
            )
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
            self.withhold_unread()

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
