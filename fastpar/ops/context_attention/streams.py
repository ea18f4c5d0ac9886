"""How keys come to a ring's queries, and their gradients to the owners: a class for each transport.

    SharedStream   CPU ranks of one host. K and V lie where all can read them (`SharedRegion`), and so do float32 dK and
                   dV: a step reads keys and adds gradients in place. Nothing is copied, but the own part once. One
                   barrier before the first step, one after each in backward
    SentStream     anywhere: each step is a permutation, an all-to-all with one part to send and one to receive, of the
                   keys that the receiver reads; their gradients go straight back to the owner

The next step's keys travel during this one (over shared memory: the barrier's wait does). Owners add their own
gradients first, then those of positions o + 1, o + 2, ... of the ring, whichever the transport: the same bits.

Note: double buffering. A call writes half h of the shared memory. All reads and sums of what half h held before came
before the barrier of the call in between, which used half 1 - h.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fastpar.comm import Communicator, Pending, SharedRegion
from fastpar.comm.agree import Agreement
from fastpar.comm.transport_selector import Mode
from fastpar.contracts import compute_dtype
from fastpar.ops.context_attention.exchange import Message
from fastpar.ops.context_attention.methods import Span
from fastpar.ops.context_attention.plan import Block, ContextPlan, count_spans

_ALIGNMENT = 64  # bytes
_GROWTH = 1.25  # room for more than is needed, so that steps that differ a little do not meet to grow


@dataclass(frozen=True)
class RingCall:
    """A ring of one call: the group, the plan of this rank, and how far apart its neighbours in the ring are.

    stride     ranks of the group from one position of the ring to the next
    mode       how collectives are launched: "split_phase" to overlap, "blocking" not to
    agreement  what ranks must have in common, not yet compared; None: it has been
    """

    comm: Communicator
    plan: ContextPlan
    stride: int
    mode: Mode
    agreement: Agreement | None = None

    def rank_of(self, position: int) -> int:
        """The rank of the group at a position of this rank's ring."""
        return position * self.stride + self.comm.rank % self.stride


class KeyStream(Protocol):
    """Keys of one ring, and sums of their gradients. The steps are `0, *plan.busy`, in this order."""

    def keys(self, step: int) -> tuple[Tensor, Tensor, Block | None]:
        """K and V of a step's source, those that its block's table tells of. Then `prefetch` of the next one."""

    def prefetch(self, step: int | None) -> None:
        """Have the keys of a step travel."""

    def add(self, step: int, dk: Tensor | None, dv: Tensor | None) -> None:
        """Gradients of the keys that `keys` gave, to their owner."""

    def grads(self) -> tuple[Tensor, Tensor]:
        """dK and dV of this rank's keys, summed over the ring."""

    def finish(self) -> None:
        """At the end of a forward: raises what is wrong on another rank, if no step has."""


def open_stream(call: RingCall, k: Tensor, v: Tensor, *, backward: bool) -> KeyStream:
    """The stream of a ring for this rank's k and v. Raises what is wrong on any rank by the first step behind own keys
    (`RingCall.agreement`)."""
    world = call.comm.local_world() if k.device.type == "cpu" else None
    if world is not None and world.size == call.comm.size:
        return SharedStream(call, k, v, backward=backward)
    return SentStream(call, k, v)


# ---- messages --------------------------------------------------------------------------------------------------------


class SentStream:
    """See the module docstring."""

    def __init__(self, call: RingCall, k: Tensor, v: Tensor) -> None:
        self.call, self._k, self._v = call, k, v
        if call.agreement is not None:
            call.agreement.gather(call.comm)
        self._coming: Pending[Tensor] | None = None
        self._grads: tuple[Tensor, Tensor] | None = None
        self._contribution: tuple[Sequence[Span], Pending[Tensor]] | None = None

    def keys(self, step: int) -> tuple[Tensor, Tensor, Block | None]:
        ring = self.call.plan.steps[step]
        if step == 0:
            return self._k, self._v, ring.in_place
        assert self._coming is not None
        k, v = _unpacked(self._coming.wait(), (self._k, self._v), ring.read)
        self._coming = None
        return k, v, ring.packed

    def prefetch(self, step: int | None) -> None:
        if step is None:
            return
        ring = self.call.plan.steps[step]
        message = _packed((self._k, self._v), ring.sent)
        self._coming = self._send(message, ring.target, ring.source, _numel((self._k, self._v), ring.read))

    def add(self, step: int, dk: Tensor | None, dv: Tensor | None) -> None:
        ring = self.call.plan.steps[step]
        if step == 0:
            self._grads = _or_zeros(dk, self._k), _or_zeros(dv, self._v)
            return
        assert self._grads is not None
        self._receive()
        message = self._grads[0].new_empty(0)
        if dk is not None and dv is not None:
            message = _packed((dk, dv), [(0, dk.shape[2])])
        # The other way: from the source's reader to the source.
        pending = self._send(message, ring.source, ring.target, _numel(self._grads, ring.sent))
        self._contribution = ring.sent, pending

    def grads(self) -> tuple[Tensor, Tensor]:
        self._receive()
        assert self._grads is not None
        return self._grads

    def finish(self) -> None:
        """Nothing is under way."""

    def _receive(self) -> None:
        if self._contribution is None or self._grads is None:
            return
        spans, pending = self._contribution
        self._contribution = None
        _add_spans(self._grads, _unpacked(pending.wait(), self._grads, spans), spans)

    def _send(self, message: Tensor, target: int, source: int, numel: int) -> Pending[Tensor]:
        inputs, outputs = [0] * self.call.comm.size, [0] * self.call.comm.size
        inputs[self.call.rank_of(target)], outputs[self.call.rank_of(source)] = message.numel(), numel
        launcher = self.call.comm.collectives(self.call.mode)
        return launcher.all_to_all(message, input_sizes=inputs, output_sizes=outputs)


def _numel(like: Sequence[Tensor], spans: Sequence[Span]) -> int:
    return sum(x.shape[0] * x.shape[1] * count_spans(spans) * x.shape[3] for x in like)


def _packed(tensors: Sequence[Tensor], spans: Sequence[Span]) -> Tensor:
    """The keys of these spans of each [b, h, s, D], flat."""
    count = count_spans(spans)
    message = Message.of(tensors[0], [(*x.shape[:2], count, x.shape[3]) for x in tensors])
    for x, view in zip(tensors, message.views, strict=True):
        at = 0
        for start, stop in spans:
            view[:, :, at : at + stop - start] = x[:, :, start:stop]
            at += stop - start
    return message.flat


def _unpacked(flat: Tensor, like: Sequence[Tensor], spans: Sequence[Span]) -> tuple[Tensor, Tensor]:
    """The inverse, the keys one after another."""
    count = count_spans(spans)
    shapes = [(*x.shape[:2], count, x.shape[3]) for x in like]
    k, v = flat.split([torch.Size(shape).numel() for shape in shapes])
    return k.view(shapes[0]), v.view(shapes[1])


def _add_spans(sums: Sequence[Tensor], parts: Sequence[Tensor], spans: Sequence[Span]) -> None:
    for total, part in zip(sums, parts, strict=True):
        at = 0
        for start, stop in spans:
            total[:, :, start:stop] += part[:, :, at : at + stop - start]
            at += stop - start


def _or_zeros(grad: Tensor | None, like: Tensor) -> Tensor:
    return like.new_zeros(like.shape, dtype=compute_dtype(like.dtype)) if grad is None else grad


# ---- shared memory ---------------------------------------------------------------------------------------------------


class _DoubleBuffer:
    """The memory of a group. Holds no reference to the group, which may end before it."""

    def __init__(self) -> None:
        self.regions: list[SharedRegion | None] = [None, None]
        self.turn = 0  # that is written next


# What is kept for a group is its memory, not its communicator, which refers to the group: nothing would ever end.
_MEMORY: weakref.WeakKeyDictionary[ProcessGroup, _DoubleBuffer] = weakref.WeakKeyDictionary()


class SharedStream:
    """See the module docstring."""

    def __init__(self, call: RingCall, k: Tensor, v: Tensor, *, backward: bool) -> None:
        assert call.comm.group is not None
        self.call, self._own = call, (k, v)
        self._memory = _MEMORY.setdefault(call.comm.group, _DoubleBuffer())
        self._turn = self._memory.turn
        most = max(call.plan.sizes)
        kinds = [(x, x.dtype) for x in (k, v)] + [(x, compute_dtype(x.dtype)) for x in (k, v)] * backward
        sizes = [_bytes(x, most, dtype) for x, dtype in kinds]
        self._kinds, self._offsets, self._nbytes = kinds, [sum(sizes[:i]) for i in range(len(sizes))], sum(sizes)
        self._grads: tuple[Tensor, Tensor] | None = None
        self._barrier: Pending[Any] | None = None
        self._is_shown = False
        self._show()

    def keys(self, step: int) -> tuple[Tensor, Tensor, Block | None]:
        ring = self.call.plan.steps[step]
        if step == 0:
            return *self._own, ring.in_place
        if not self._is_shown:
            self.finish()
        return self._part(0, ring.source), self._part(1, ring.source), ring.in_place

    def prefetch(self, step: int | None) -> None:
        """There is nothing to fetch."""

    def add(self, step: int, dk: Tensor | None, dv: Tensor | None) -> None:
        plan = self.call.plan
        ring = plan.steps[step]
        self._pass()
        if step == 0:
            self._grads = _or_zeros(dk, self._own[0]), _or_zeros(dv, self._own[1])
            for which, own in enumerate(self._grads if plan.busy else ()):
                _copy_spans(self._part(2 + which, plan.position), own, plan.shown)
        elif dk is not None and dv is not None:
            for which, part in enumerate((dk, dv)):
                _add_in_place(self._part(2 + which, ring.source), part, ring.read)
        if plan.busy:
            self._launch_barrier()

    def grads(self) -> tuple[Tensor, Tensor]:
        self._pass()
        assert self._grads is not None
        for which, own in enumerate(self._grads if self.call.plan.busy else ()):
            _copy_spans(own, self._part(2 + which, self.call.plan.position), self.call.plan.shown)
        return self._grads

    def finish(self) -> None:
        """Wait for the barrier behind which all keys are shown."""
        self._pass()
        self._is_shown = True

    def _show(self) -> None:
        """Own keys where the others find them, and the first barrier: an all-gather where ranks have yet to agree.

        How much memory the other ranks want is known only then; where there is not enough here they are written
        afterwards.
        """
        call, region = self.call, self._memory.regions[self._turn]
        fits = region is not None and region.nbytes >= self._nbytes
        if call.plan.busy and fits:
            self._write()
        if call.agreement is None:
            self._agreed(None)
            if call.plan.busy and fits:
                self._launch_barrier()
        else:
            words = torch.tensor([call.agreement.words], device="cpu")
            launched = call.comm.collectives(call.mode if fits else "blocking").all_gather(words)
            self._barrier = launched.then(self._agreed)
        if call.plan.busy and not fits:
            self._pass()
            self._grow()
            self._write()
            self._launch_barrier()

    def _agreed(self, everyone: Tensor | None) -> None:
        """The half is this call's on all ranks, or on none."""
        if everyone is not None and self.call.agreement is not None:
            self.call.agreement.check(everyone.tolist())
        if self.call.plan.busy:
            self._memory.turn = 1 - self._turn

    def _grow(self) -> None:
        """A region of so many bytes, the same on all ranks: a collective call."""
        region = self._memory.regions[self._turn]
        if region is not None:
            region.close()  # tensors over it keep the memory itself
        self._memory.regions[self._turn] = SharedRegion(self.call.comm, max(int(self._nbytes * _GROWTH), 1 << 16))

    def _write(self) -> None:
        # All of them: what lies between the spans that are read must be numbers, too.
        for which, own in enumerate(self._own):
            self._part(which, self.call.plan.position).copy_(own)

    def _part(self, which: int, position: int) -> Tensor:
        """The tensor of that kind of the rank at a position of the ring."""
        region, (like, dtype) = self._memory.regions[self._turn], self._kinds[which]
        assert region is not None
        shape = (*like.shape[:2], self.call.plan.sizes[position], like.shape[3])
        return region.tensor(shape, dtype, offset=self._offsets[which], rank=self.call.rank_of(position))

    def _launch_barrier(self) -> None:
        self._barrier = self.call.comm.collectives(self.call.mode).barrier()

    def _pass(self) -> None:
        """Wait until all ranks have come to the last barrier."""
        if self._barrier is not None:
            self._barrier.wait()
            self._barrier = None


def _bytes(like: Tensor, tokens: int, dtype: torch.dtype) -> int:
    numel = like.shape[0] * like.shape[1] * tokens * like.shape[3]
    return -(-numel * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


def _copy_spans(target: Tensor, source: Tensor, spans: Sequence[Span]) -> None:
    for start, stop in spans:
        target[:, :, start:stop] = source[:, :, start:stop]


def _add_in_place(target: Tensor, part: Tensor, spans: Sequence[Span]) -> None:
    for start, stop in spans:
        target[:, :, start:stop] += part[:, :, start:stop]
