"""What reducers of gradients have in common: buckets under way, and what `.grad` shows meanwhile.

    OrderReducer    stages 0 to 2: buckets of a size, in the order in which gradients come
    GroupReducer    stage 3: the buckets of a parameter group, when its backward has ended

All ranks launch the same buckets in the same order.

Note: accumulation. Between `no_sync` and a reduction, gradients are summed where autograd puts them, those of 16 bits
in float32, and travel once. A reduction takes what has been summed and not yet been sent, and adds its mean to what the
optimizer's parameters have as gradient already. Gradients of what pipeline stages share stay where autograd puts them
in 16 bits too, as the pipeline adds them up from there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from fastpar.comm import Communicator
from fastpar.comm.agree import set_on_any
from fastpar.comm.wire_formats import Wire
from fastpar.zero.buckets import STAGING_BUFFERS, Bucket, StagingPool
from fastpar.zero.groups import Groups, as_dtensor, local
from fastpar.zero.param_classes import hide, looking_at_absent, show, unsent_gradient, withhold
from fastpar.zero.replica_writes import ReplicaWrites
from fastpar.zero.sharded_param import ShardedParam


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
        """The model has run: `.grad` is what it was before, until a backward pass begins."""
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
        """Let parameters have their own `.grad`: see param_classes.py."""
        self._is_shown = False
        for param in self.params:
            hide(param)

    def show(self) -> None:
        """Let parameters have the averaged gradients, or none to read where these are not averaged yet."""
        self._is_shown = True
        for param in self.params:
            show(param)
        self.withhold_unread()

    def withhold_unread(self) -> None:
        """Let nobody read what is not averaged yet."""
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


def forget_gradients(reducers: Sequence[GradReducer], params: Sequence[ShardedParam], *, set_to_none: bool) -> None:
    """Forget what has been summed and what has been averaged. Where it is not set to None, what had a gradient has one
    of zeros, with which a step updates it, as without data parallelism: it decays, and goes on by its momentum."""
    zeroed = [] if set_to_none else [param for param in params if _has_had_gradient(param)]
    for reducer in reducers:
        reducer.forget_sums(params)
    for param in params:  # of a module these are not the parameters
        if param.optim_param.grad is not None:
            param.optim_param.grad = None
    for param in zeroed:
        mine = local(param.optim_param)  # whose values may be in a file
        zeros = torch.zeros(mine.shape, dtype=mine.dtype, device=mine.device)
        param.optim_param.grad = as_dtensor(zeros, param.spec)
    if zeroed:
        for reducer in reducers:
            reducer.show()


def _has_had_gradient(param: ShardedParam) -> bool:
    found = param.unreduced_sum, param.unsent, unsent_gradient(param.optim_param)
    return any(x is not None for x in found)
