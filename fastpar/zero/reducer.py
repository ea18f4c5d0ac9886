"""Averages gradients over data-parallel ranks while backward runs: in buckets, whole or split by rows.

Note: order. All ranks must launch the same buckets in the same order, so a bucket is launched when its gradients are
there and all buckets before it have been launched. Buckets are first filled in reverse order of registration; after
the first reduction they are filled anew in the order in which rank 0's gradients came. Small buckets let communication
begin early, large ones have less overhead: 25 MB is torch's choice too.

Note: copies. A gradient is copied once, from where autograd made it to its bucket: where ranks share memory, the
others read it there. Letting autograd add into zeroed buckets instead costs a pass over the bucket more.

Note: accumulation. Between `no_sync` and a reduction, gradients are summed where autograd puts them, those of 16 bits
in float32, and travel once. A reduction takes what has been summed and not yet been sent, and adds its mean to what the
optimizer's parameters have as gradient already. Gradients of what pipeline stages share stay where autograd puts them
in 16 bits too, as the pipeline adds them up from there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from fastpar.comm import Communicator
from fastpar.comm.pending import Pending
from fastpar.comm.wire import CastWire, Wire
from fastpar.zero.flat import FlatGradients, FlatLayout, PeerMemory, Staging
from fastpar.zero.groups import Groups, as_dtensor, local

BATCH_BYTES = 256 << 10  # of gradients that are copied to their bucket together: what a cache holds
BUCKET_BYTES = 25 << 20
FIRST_BUCKET_BYTES = 1 << 20
_NAMES = 8  # in a report
_NOTE_BYTES = 1024


@dataclass(eq=False)
class Slot:
    """A trainable parameter of the model, and the parameter that the optimizer has instead of it.

    `owner` may be the parameter itself; else it has this rank's rows, or another dtype (master weights), or both.
    """

    name: str
    parameter: nn.Parameter
    owner: nn.Parameter
    spec: DTensorSpec | None = None  # of the owner, where it is a DTensor
    wire: torch.dtype = torch.float32  # what gradients travel in
    target: Tensor | None = field(default=None, repr=False)  # the parameter's rows, which the owner is rounded to
    summed: Tensor | None = field(default=None, repr=False)  # in float32: see the module docstring
    kept: Tensor | None = field(default=None, repr=False)  # the owner's gradient, while another pass is reduced
    is_traced: bool = False  # whether `traces` are kept: norms of what this rank has sent, which a NaN shows in
    traces: Sequence[Tensor] = field(default=(), repr=False)  # on CPUs only where they are not finite

    def keep_sum(self) -> None:
        """Move a gradient of 16 bits to `summed`, as another is going to be added to it."""
        grad = self.parameter.grad
        if grad is None or grad.dtype.itemsize >= 4 or hasattr(self.parameter, "pipeline_share"):
            return
        rows = local(grad)
        if self.summed is None:
            self.summed = rows.float()
        else:
            self.summed.add_(rows)
        self.parameter.grad = None

    def take(self) -> Tensor | None:
        """What has been summed and not been sent; forgotten here."""
        if self.summed is not None:
            self.keep_sum()
        taken = self.summed
        if taken is None and self.parameter.grad is not None:
            taken = local(self.parameter.grad)
        self.summed = self.parameter.grad = None
        return taken


class Bucket(Protocol):
    """Gradients that travel together: `open`, then `add` some of them, `launch`, and `finish`, which hands the results
    to the owners (zero for what was not added); `close` instead of `launch` where a pass has failed."""

    slots: Sequence[Slot]

    def open(self) -> None: ...
    def add(self, positions: Sequence[int], gradients: Sequence[Tensor]) -> None: ...
    def launch(self) -> None: ...
    def finish(self) -> None: ...
    def close(self) -> None: ...
    def set_aside(self) -> None:
        """A pass begins whose gradients are to be reduced for themselves and then added to the owners'."""

    def is_result(self, position: int) -> bool:
        """Whether what the parameter has as gradient came out of a reduction."""


class WholeBucket:
    """Every rank gets the mean of all gradients (stage 0). They lie in this bucket's memory from then on."""

    def __init__(self, slots: Sequence[Slot], groups: Groups, wire: Wire | None = None) -> None:
        self.slots, self._groups = slots, groups
        shapes = [local(slot.parameter).shape for slot in slots]
        numels = [shape.numel() for shape in shapes]
        comm = groups.replicate
        self._memory = PeerMemory(comm, [sum(numels)] * comm.size, slots[0].wire, slots[0].parameter.device)
        self._flat = self._memory.mine
        self._shapes = shapes
        self._views = self._cut(self._flat)
        self._wire = wire
        if wire is None and comm.size > 1 and self._flat.dtype.itemsize < 4 and slots[0].owner.dtype == torch.float32:
            # Master weights get the sum as it was taken, in float32, as rows of it do in other stages.
            self._wire = CastWire(self._flat.dtype)
        self._is_added = [False] * len(slots)
        self._pending: Pending[Tensor] | None = None

    def _cut(self, flat: Tensor) -> list[Tensor]:
        numels = [shape.numel() for shape in self._shapes]
        return [part.view(shape) for part, shape in zip(flat.split(numels), self._shapes, strict=True)]

    def set_aside(self) -> None:
        for slot, view in zip(self.slots, self._views, strict=True):
            if slot.owner.grad is not None and (
                slot.owner is not slot.parameter or _is_same(local(slot.owner.grad), view)
            ):
                slot.kept = local(slot.owner.grad).clone()
                slot.owner.grad = None

    def is_result(self, position: int) -> bool:
        grad = self.slots[position].parameter.grad
        return grad is not None and _is_same(local(grad), self._views[position])

    def open(self) -> None:
        self._is_added = [False] * len(self.slots)

    def add(self, positions: Sequence[int], gradients: Sequence[Tensor]) -> None:
        targets, sources = [], []
        for position, gradient in zip(positions, gradients, strict=True):
            self._is_added[position] = True
            if not _is_same(gradient, self._views[position]):
                targets.append(self._views[position])
                sources.append(gradient)
        if targets:
            torch._foreach_copy_(targets, sources)

    def close(self) -> None:
        pass  # the next pass writes all of it

    def launch(self) -> None:
        for view, is_added in zip(self._views, self._is_added, strict=True):
            if not is_added:
                view.zero_()
        keep_traces(self.slots, self._flat, lambda: [[view] for view in self._views])
        comm = self._groups.replicate
        if self._wire is not None and comm.size > 1:
            self._pending = self._wire.all_reduce_async(comm, self._flat, key=self.slots[0].name)
        else:
            collectives = comm._halves if self._groups.mode == "halves" else comm._background
            self._pending = collectives.all_reduce(self._flat, "avg", out=self._flat)

    def finish(self) -> None:
        assert self._pending is not None
        mean, self._pending = self._pending.wait(), None
        for slot, view in zip(self.slots, self._views if mean is self._flat else self._cut(mean), strict=True):
            mine = local(slot.owner)  # of another dtype or device, where these are master weights
            grad = view if _is_alike(view, mine) else view.to(mine.device, mine.dtype)
            if grad.shape != mine.shape:  # a scalar as one row
                grad = grad.view(mine.shape)
            if slot.kept is not None:
                grad.add_(slot.kept)
                slot.kept = None
            slot.owner.grad = as_dtensor(grad, slot.spec)


class RowBucket:
    """Every rank gets its rows of the mean (stages 1 and 2)."""

    def __init__(
        self, slots: Sequence[Slot], groups: Groups, staging: Callable[[], Staging], wire: Wire | None = None
    ) -> None:
        self.slots, self._groups, self._wire = slots, groups, wire
        self.layout = FlatLayout([local(slot.parameter).shape for slot in slots], groups.shard.size)
        self._staging = staging
        self._memory: PeerMemory | None = None
        self._gradients: FlatGradients | None = None
        self._pending: Pending[list[Tensor]] | None = None

    def set_aside(self) -> None:
        pass  # the owners' gradients lie elsewhere

    def is_result(self, position: int) -> bool:
        return False

    def open(self) -> None:
        self._memory = self._staging().take()
        self._gradients = FlatGradients(self._groups.shard, self.layout, self._memory.mine, mode=self._groups.mode)

    def add(self, positions: Sequence[int], gradients: Sequence[Tensor]) -> None:
        assert self._gradients is not None
        self._gradients.put(positions, gradients)

    def close(self) -> None:
        assert self._memory is not None
        self._staging().give_back(self._memory)
        self._memory = self._gradients = None

    def launch(self) -> None:
        assert self._gradients is not None
        self._gradients.fill()
        keep_traces(self.slots, self._gradients.flat, self._gradients.pieces)
        self._pending = self._gradients.reduce(self._wire, key=self.slots[0].name)

    def finish(self) -> None:
        assert self._pending is not None
        assert self._memory is not None
        rows = self._pending.wait()
        self._staging().give_back(self._memory)
        self._memory = self._gradients = self._pending = None
        replicate = self._groups.replicate
        if replicate.size > 1:
            flat = _flat_of(rows)
            replicate.all_reduce(flat, "avg", out=flat)
        for slot, mine in zip(self.slots, rows, strict=True):
            owner = slot.owner
            if owner.grad is None:
                own = mine if _is_alike(mine, owner) else mine.to(owner.device, owner.dtype)
                owner.grad = as_dtensor(own, slot.spec)
            else:
                local(owner.grad).add_(mine.to(owner.device))


def keep_traces(slots: Sequence[Slot], flat: Tensor, pieces: Callable[[], Iterable[Sequence[Tensor]]]) -> None:
    """Keep what `name_nonfinite` needs about gradients that this rank sends: `flat`, and the pieces of each slot."""
    if not slots[0].is_traced or (flat.device.type == "cpu" and math.isfinite(flat.sum().item())):
        return
    for slot, of_slot in zip(slots, pieces(), strict=True):
        some = [x for x in of_slot if x.numel() > 0]
        slot.traces = torch._foreach_norm(some, math.inf) if some else ()


def _is_alike(x: Tensor, like: Tensor) -> bool:
    return x.dtype == like.dtype and x.device == like.device


def _is_same(x: Tensor, view: Tensor) -> bool:
    return x.data_ptr() == view.data_ptr() and x.stride() == view.stride()


def _flat_of(rows: Sequence[Tensor]) -> Tensor:
    """The flat tensor that these are views of, one after the other."""
    numel = sum(x.numel() for x in rows)
    return rows[0].as_strided((numel,), (1,), rows[0].storage_offset()) if numel else rows[0].view(-1)


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
        self.buckets: list[Bucket] = []
        self.members: list[list[int]] = []  # the slots of each bucket
        self.nbytes = [local(slot.parameter).nbytes for slot in slots]  # of gradients
        self.place: dict[int, tuple[int, int]] = {}  # of a slot: its bucket and its position there
        self._passes = 0  # that have ended since gradients were last reduced
        self._is_inside = False
        self._round: _Round | None = None
        self._order: list[int] | None = []  # in which gradients come, until the buckets follow it
        self._fill(list(reversed(range(len(self.slots)))))
        self._hooks = [
            slot.parameter.register_post_accumulate_grad_hook(self._hook(index))
            for index, slot in enumerate(self.slots)
        ]

    def begin_forward(self) -> None:
        """The model is about to run with gradients."""
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
        for slot in self.slots:
            if slot.kept is not None and slot.owner.grad is None:  # a forward pass without a backward pass
                slot.owner.grad, slot.kept = as_dtensor(slot.kept, slot.spec), None
        is_any = any(self._is_unsent(index) for index in range(len(self.slots)))
        if agree([is_any], self.groups)[0]:
            for bucket in self.buckets:
                bucket.set_aside()
            _Round(self).finish()
        self._passes = 0

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
        for slot in self.slots:
            slot.summed = slot.kept = slot.parameter.grad = None
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

    def _fill(self, order: Sequence[int]) -> None:
        """Sort the slots into buckets in this order; the first one is small, so that communication begins early."""
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
        self.buckets = [self._make_bucket([self.slots[index] for index in group]) for group in groups]
        self.place = {
            index: (number, position) for number, group in enumerate(groups) for position, index in enumerate(group)
        }
        self.members = groups

    def _is_unsent(self, index: int) -> bool:
        """Whether a slot has gradients that only this rank knows of."""
        slot = self.slots[index]
        number, position = self.place[index]
        return slot.summed is not None or (
            slot.parameter.grad is not None and not self.buckets[number].is_result(position)
        )

    # ---- within a backward pass

    def _will_reduce(self) -> bool:
        return self.is_syncing and self._passes + 1 >= self._accumulate

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        return lambda _: self._came(index)

    def _came(self, index: int) -> None:
        if not self._is_inside:
            self._is_inside = True
            self._began()
            self._round = _Round(self) if self._will_reduce() else None
            torch.autograd.Variable._execution_engine.queue_callback(self._end)
        if self._round is None:
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
            reduction.finish()


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
        everyone = agree(self._is_used, self._reducer.groups)
        for slot, is_used, had_none in zip(self._reducer.slots, everyone, self._had_none, strict=True):
            if not is_used and had_none:
                slot.owner.grad = None  # as without data parallelism

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
        bucket.launch()
        self._in_flight.append(bucket)


def agree(flags: Sequence[bool], groups: Groups) -> list[bool]:
    """Which flags are set on any rank."""
    agreed = torch.tensor(flags, dtype=torch.int32)
    for comm in groups.everyone():
        comm.all_reduce(agreed, "max", out=agreed)
    return [bool(flag) for flag in agreed.tolist()]


def name_nonfinite(slots: Sequence[Slot], groups: Groups) -> str:
    """Which gradients are not finite, and on which ranks they became so before they were averaged: one text, the same
    on all ranks that average, and on all of the mesh where it is known. Collective."""
    flags = [any(not trace.isfinite() for trace in slot.traces) for slot in slots]
    for slot in slots:
        slot.traces = ()
    flags += [slot.owner.grad is not None and not local(slot.owner.grad).isfinite().all() for slot in slots]
    rows = torch.tensor([[dist.get_rank() if dist.is_initialized() else 0, *flags]], dtype=torch.int32)
    for comm in groups.everyone():
        rows = comm.all_gather(rows)
    ranks, sources, results = rows[:, 0].tolist(), rows[:, 1 : len(slots) + 1], rows[:, len(slots) + 1 :].any(0)
    found = []
    for index, slot in enumerate(slots):
        if results[index]:
            where = [str(rank) for rank, is_source in zip(ranks, sources[:, index].tolist(), strict=True) if is_source]
            found.append(f"{slot.name} (rank {', '.join(where)})" if where else slot.name)
    for comm in groups.others():
        found = _union(found, comm)
    return f"gradients that are not finite: {', '.join(found[:_NAMES])}" + (", ..." if len(found) > _NAMES else "")


def _union(lines: Sequence[str], comm: Communicator) -> list[str]:
    """The first lines of all ranks, each once. Collective: one all-gather of 1 KB a rank."""
    note = "\n".join(lines[: _NAMES + 1]).encode()[:_NOTE_BYTES].ljust(_NOTE_BYTES, b"\0")
    notes = comm.all_gather(torch.tensor(list(note), dtype=torch.uint8)[None])
    texts = [bytes(each).rstrip(b"\0").decode(errors="ignore") for each in notes.tolist()]
    return list(dict.fromkeys(line for text in texts for line in text.split("\n") if line))
