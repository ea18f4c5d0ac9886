"""Buckets of gradients that travel together: averaged whole on every rank, or by rows.

Note: copies. A gradient is copied once, from where autograd made it to its bucket: where ranks share memory, the
others read it there. Letting autograd add into zeroed buckets instead costs a pass over the bucket more.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from fastpar.comm import Communicator
from fastpar.comm.pending import Pending
from fastpar.comm.transport_selector import Mode
from fastpar.comm.wire_formats import CastWire, Wire
from fastpar.zero.flat import FlatLayout, PeerMemory
from fastpar.zero.groups import Groups, as_dtensor, local
from fastpar.zero.sharded_param import Slot, keep_traces


class FlatGradients:
    """Gradients of whole tensors, to be averaged over the ranks and split like their `layout`.

        gradients.put([0], [grad])             # any order; what is not put counts as zero
        pending = gradients.reduce()           # all ranks
            rows = pending.wait()              # this rank's rows of every tensor's mean, views of a new flat tensor

    `buffer`: memory to lay them out in (`Staging.take`), which may be used again after `wait`.
    """

    def __init__(self, comm: Communicator, layout: FlatLayout, buffer: Tensor, *, mode: Mode = "background") -> None:
        self.comm, self.layout = comm, layout
        self.flat = buffer[: layout.total]
        self._pieces = self.flat.split_with_sizes(layout.numels)  # of all tensors, rank by rank
        self._is_put = [False] * len(layout.shapes)
        self._collectives = comm.collectives(mode)

    def put(self, indices: Sequence[int], grads: Sequence[Tensor]) -> None:
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for index, grad in zip(indices, grads, strict=True):
            self._is_put[index] = True
            targets += self._pieces_of(index)
            sources += grad.reshape(-1).split_with_sizes(self.layout.numels_of(index))
        if targets:
            torch._foreach_copy_(targets, sources)

    def fill(self) -> None:
        """Zero what has not been put."""
        for index, is_put in enumerate(self._is_put):
            if not is_put:
                torch._foreach_zero_(self._pieces_of(index))
                self._is_put[index] = True

    def pieces(self) -> list[tuple[Tensor, ...]]:
        """Each tensor's elements, in one piece for each rank that gets some."""
        return [self._pieces_of(index) for index in range(len(self._is_put))]

    def _pieces_of(self, index: int) -> tuple[Tensor, ...]:
        return tuple(self._pieces[index :: len(self._is_put)])

    def reduce(self, wire: Wire | None = None, *, key: Hashable = None) -> Pending[list[Tensor]]:
        """Begin to average, in the format of `wire` (None: as they are, summed in float32)."""
        self.fill()
        if wire is not None:
            pending = wire.reduce_scatter_async(self.comm, self.flat, self.layout.counts, key=key)
        else:
            wide = torch.float32 if self.flat.dtype.itemsize < 4 else None  # as they were added up
            pending = self._collectives.reduce_scatter(self.flat, "avg", sizes=self.layout.counts, dtype=wide)
        return Pending(
            None,
            lambda: self.layout.views(pending.wait(), self.comm.rank),
            describe=lambda: "reducing gradients",
            timeout=self.comm.timeout,
        )


class Staging:
    """Buffers to lay gradients out in: at most `count` at a time, of `numel` elements, that peers can read."""

    def __init__(
        self, comm: Communicator, numel: int, dtype: torch.dtype, device: torch.device, *, count: int = 2
    ) -> None:
        self._free = [PeerMemory(comm, [numel] * comm.size, dtype, device) for _ in range(count)]
        self.numel = numel

    def take(self) -> PeerMemory:
        if not self._free:
            raise RuntimeError("all staging buffers are in use: wait for a reduction first")
        return self._free.pop(0)

    def give_back(self, memory: PeerMemory) -> None:
        self._free.append(memory)


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
        grad = self.slots[position].unsent
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
            collectives = comm.collectives(self._groups.mode)
            self._pending = collectives.all_reduce(self._flat, "avg", out=self._flat)

    def finish(self) -> None:
        assert self._pending is not None
        mean, self._pending = self._groups.as_sum_of_parts(self._pending.wait()), None
        for slot, view in zip(self.slots, self._views if mean is self._flat else self._cut(mean), strict=True):
            mine = local(slot.owner)  # of another dtype or device, where these are master weights
            # A tensor of its own: `p.grad.data = ...` (model.to does it) would take the bucket's view away
            grad = view.detach() if _is_alike(view, mine) else view.to(mine.device, mine.dtype)
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
        replicate, flat = self._groups.replicate, _flat_of(rows)
        if replicate.size > 1:
            replicate.all_reduce(flat, "avg", out=flat)
        self._groups.as_sum_of_parts(flat)
        for slot, mine in zip(self.slots, rows, strict=True):
            owner = slot.owner
            if owner.grad is None:
                own = mine if _is_alike(mine, owner) else mine.to(owner.device, owner.dtype)
                owner.grad = as_dtensor(own, slot.spec)
            else:
                local(owner.grad).add_(mine.to(owner.device))


class OwnBucket:
    """Gradients that no other rank averages, of experts that nobody else has: handed over without a buffer, rounded to
    what the others' travel in."""

    def __init__(self, slots: Sequence[Slot], groups: Groups) -> None:
        self.slots, self._groups = slots, groups
        self._gradients: dict[int, Tensor] = {}

    def open(self) -> None:
        self._gradients = {}

    def add(self, positions: Sequence[int], gradients: Sequence[Tensor]) -> None:
        self._gradients.update(zip(positions, gradients, strict=True))

    def launch(self) -> None:
        for position, gradient in self._gradients.items():
            _keep_trace(self.slots[position], gradient)

    def finish(self) -> None:
        for position, slot in enumerate(self.slots):
            mine, gradient = local(slot.owner), self._gradients.pop(position, None)
            if gradient is not None:
                gradient = gradient.to(mine.device, slot.wire).to(mine.dtype).contiguous().view(mine.shape)
                gradient = self._groups.as_sum_of_parts(gradient)
            if slot.owner.grad is None:
                slot.owner.grad = as_dtensor(torch.zeros_like(mine) if gradient is None else gradient, slot.spec)
            elif gradient is not None:
                local(slot.owner.grad).add_(gradient)


def _keep_trace(slot: Slot, gradient: Tensor) -> None:
    keep_traces([slot], gradient, lambda: [[gradient]])


def _is_alike(x: Tensor, like: Tensor) -> bool:
    return x.dtype == like.dtype and x.device == like.device


def _is_same(x: Tensor, view: Tensor) -> bool:
    return x.data_ptr() == view.data_ptr() and x.stride() == view.stride()


def _flat_of(rows: Sequence[Tensor]) -> Tensor:
    """The flat tensor that these are views of, one after the other."""
    numel = sum(x.numel() for x in rows)
    return rows[0].as_strided((numel,), (1,), rows[0].storage_offset()) if numel else rows[0].view(-1)
