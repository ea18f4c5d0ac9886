"""Runs stretches of a chain of layers without keeping their activations, and runs them again when backward needs them.

The model's own code calls the layers, one after the other, with whatever arguments. What autograd would save during the
call is replaced by a `_Holder`, a note of its place (segment and layer), through saved-tensor hooks; the graph itself
stays, as in torch's non-reentrant checkpoint, so that hooks, `.grad`, frozen parameters, several uses of an output and
parts of a backward work as ever. The first holder that autograd asks for has the segment run again, by its plan.

Note: how layers find their segment
    Outputs of a layer carry a `_Link` to their segment. A layer that is called with such a tensor, unchanged, and whose
    plan puts it into the same stretch, joins the segment: its input is not kept, but comes out of the layer before when
    the segment runs again. If model code has changed the tensor or made another of it, or the layers are called in
    another order, the layer starts a segment of its own and its input is kept. So a chain that the model does not call
    as a chain costs memory and is never wrong; and nothing is stored on modules, so that any number of forwards may be
    waiting for their backwards.

Note: what holds what
    The graph holds holders, which hold the segment, which holds the kept inputs (without their history), arguments and
    surroundings of its calls. The segment has weak references to holders and none to outputs, so there is no cycle, and
    all of it dies with the graph, layer by layer as backward frees it. A recomputed tensor is in its holder, until the
    holder dies; where the graph is retained, until the end of the backward.

Note: one recomputation
    Each layer's saved tensors are found by one run of it per backward, however often and in whatever order they are
    asked for. Runs that only compute the input of a later layer are those that the plan says. Each run is under the
    random states, autocast and other surroundings of the first one (`Ambient`), with the buffers and attributes that
    the first one found (`call_state`), and with gradients enabled, so that it takes the same kernels; it stops as soon
    as the last tensor that is still wanted has been saved.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from fastpar.comm.recompute_cache import Tape, recording, replaying
from fastpar.recompute.ambient import Ambient, Capture, random_preserved
from fastpar.recompute.call_state import CallWatch, Changed, is_alike, sample
from fastpar.recompute.plan import Drop, Keep, Steps, clip
from fastpar.recompute.selective import KeepOps

_LINK = "_fastpar_recompute_link"


class RecomputeError(RuntimeError):
    """A layer's second run did not save what its first run did."""


class _Stop(Exception):
    """Ends a layer's forward when all that is wanted of it has been saved. An Exception, since those are what nn.Module
    runs the hooks after that always run, such as the ones that end a tensor-parallel block."""


class Setting(NamedTuple):
    """How the calls of a chain are run, whatever their place in it."""

    keep: frozenset[Any] | None  # operators whose results are kept; None: of none, nor those of collectives
    captures: tuple[Capture, ...]
    preserve_rng: bool
    early_stop: bool


class _Holder:
    """Stands in the graph for a tensor that autograd would have saved."""

    __slots__ = ("__weakref__", "layer", "segment", "value")

    def __init__(self, segment: Segment, layer: int):
        self.segment, self.layer = segment, layer
        self.value: Tensor | None = None


class _Link(NamedTuple):
    """What an output tensor says about where it comes from."""

    segment: weakref.ref[Segment]
    layer: int
    slot: int
    version: int


class _Input(NamedTuple):
    """An argument that is output `slot` of the layer before."""

    slot: int
    requires_grad: bool


class _Argument(NamedTuple):
    """A tensor argument that was kept."""

    position: int
    requires_grad: bool


class _KeepInputs(torch.autograd.Function):
    """Has autograd save tensors: under outer hooks that offload or checkpoint, and with its check that nobody has
    changed them in place. Never part of a backward."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise AssertionError("nothing is computed from this output")


class _SegmentCall:
    """One call of one layer: all that it takes to make it again, and what it saved."""

    def __init__(self, function: Callable[..., Any], arguments: Any, tensors: Sequence[Tensor], ambient: Ambient):
        self.function, self.arguments, self.ambient = function, arguments, ambient
        self.holders: list[weakref.ref[_Holder]] = []
        self.metadata: list[tuple[torch.Size, torch.dtype, torch.device]] = []
        self.tape: Tape | None = None
        self.is_complete, self.changes_input = False, False
        self.changed: Changed | None = None
        self.samples: list[Tensor | None] = []  # of what it saved, where the second run is compared with it
        self._kept = _KeepInputs.apply(torch.empty(0, requires_grad=True), *tensors) if tensors else None
        self._tensors: tuple[Tensor, ...] | None = None

    def tensors(self) -> tuple[Tensor, ...]:
        """The kept arguments; unpacked once per backward, as outer hooks may do work for it."""
        if self._tensors is None:
            self._tensors = () if self._kept is None else self._kept.grad_fn.saved_tensors
        return self._tensors

    def slots(self) -> set[int]:
        """The outputs of the layer before that are arguments."""
        return {leaf.slot for leaf in leaves(self.arguments) if isinstance(leaf, _Input)}

    def wanted(self) -> list[int]:
        """Numbers of the saved tensors that the graph still refers to."""
        return [number for number, holder in enumerate(self.holders) if holder() is not None]

    def forget(self) -> None:
        self._tensors = None
        for reference in self.holders:
            holder = reference()
            if holder is not None:
                holder.value = None


class _Source(NamedTuple):
    """Where a stretch can be run again from: its steps, and the outputs that its first layer takes."""

    steps: Steps
    inputs: dict[int, Tensor]


class Segment:
    """Calls of consecutive layers of which only the first one's input is kept."""

    def __init__(self, step: Drop, setting: Setting, start: int):
        self.step, self.setting, self.start = step, setting, start
        self.calls: list[_SegmentCall] = []
        self._sources: list[_Source] = []
        self._is_armed = False
        self._lock = threading.RLock()  # graphs over several devices are run by a thread for each

    @property
    def stop(self) -> int:
        return self.start + len(self.calls)

    # ---- the first run

    def run(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], module: nn.Module | None
    ) -> Any:
        """Call the next layer, and remember how. `module`: the one that the function is the forward of."""
        tensors: list[Tensor] = []

        def note(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or leaf.is_inference():  # nobody can save those, nor see them change
                return leaf
            link = link_of(leaf)
            if link is not None and link.segment() is self and link.layer == self.stop - 1:
                return _Input(link.slot, leaf.requires_grad)
            tensors.append(leaf.detach())  # shares the count of changes in place
            return _Argument(len(tensors) - 1, leaf.requires_grad)

        given = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor) and not leaf.is_inference()]
        versions = [tensor._version for tensor in given]
        devices = dict.fromkeys(tensor.device for tensor in given if tensor.device.type not in ("cpu", "meta"))
        setting = self.setting
        ambient = Ambient.now(list(devices), setting.captures, preserve_rng=setting.preserve_rng)
        call = _SegmentCall(function, rebuilt((args, kwargs), note), tensors, ambient)
        layer = self.stop
        self.calls.append(call)
        watch = CallWatch(function, module, draws=setting.preserve_rng)

        def pack(x: Tensor) -> _Holder:
            holder = _Holder(self, layer)
            call.holders.append(weakref.ref(holder))
            call.metadata.append((x.shape, x.dtype, x.device))
            if watch.is_checked:
                call.samples.append(sample(x))
            return holder

        try:
            with saved_tensors_hooks(pack, _unpack):
                if setting.keep is None:
                    out = function(*args, **kwargs)
                else:
                    call.tape = Tape()
                    with recording(call.tape), KeepOps(setting.keep):
                        out = function(*args, **kwargs)
        except BaseException:
            self.calls.pop()
            raise
        call.is_complete = True
        call.changed = watch.end()
        call.changes_input = versions != [tensor._version for tensor in given]
        for slot, tensor in enumerate(outputs_of(out)):
            setattr(tensor, _LINK, _Link(weakref.ref(self), layer, slot, tensor._version))
        return out

    # ---- the runs in backward

    def fetch(self, holder: _Holder) -> Tensor:
        """The tensor that the holder stands for."""
        with self._lock:
            if holder.value is None:
                is_backward = self._arm()
                try:
                    self._recompute(holder)
                    value = holder.value
                finally:
                    if not is_backward:
                        self.forget()
            else:
                value = holder.value
        if value is None:
            raise RecomputeError(
                f"layer {holder.layer} did not save again what its first run saved. Does it do the same at every call, "
                "or depend on something that has changed since?"
            )
        return value

    def _arm(self) -> bool:
        """See to it that what was recomputed in this backward is gone after it. False: there is no backward."""
        if self._is_armed:
            return True
        this = weakref.ref(self)

        def forget() -> None:
            segment = this()
            if segment is not None:
                segment.forget()

        try:
            torch.autograd.Variable._execution_engine.queue_callback(forget)
        except RuntimeError:  # somebody looks at a node's saved tensors
            is_backward = False
        else:
            is_backward = True
        self._is_armed = is_backward
        self._sources = [_Source(self.step.inner, {})]
        return is_backward

    def forget(self) -> None:
        """Drop what was recomputed."""
        self._is_armed, self._sources = False, []
        for call in self.calls:
            call.forget()

    def _recompute(self, holder: _Holder) -> None:
        with random_preserved(self.calls[holder.layer - self.start].ambient), torch.enable_grad():
            while holder.value is None:
                found = [source for source in self._sources if _covers(source.steps, holder.layer)]
                if not found:
                    return
                self._sources.remove(found[0])
                self._run_again(found[0], holder.layer)

    def _run_again(self, source: _Source, layer: int) -> None:
        """Run a stretch by its steps, up to the last layer whose saved tensors are wanted."""
        first = max(source.steps[0].start, self.start)
        last = max((i for i in range(first, self.stop) if self.calls[i - self.start].wanted()), default=layer)
        last = min(last, source.steps[-1].stop - 1)
        steps, inputs = clip(source.steps, first, last + 1), source.inputs
        for step in steps:
            if isinstance(step, Drop):
                self._sources.append(_Source(step.inner, inputs))
            for i in range(step.start, step.stop):
                inputs = self._call_again(i, inputs, keep=isinstance(step, Keep), is_last=i == last)

    def _call_again(self, layer: int, inputs: dict[int, Tensor], *, keep: bool, is_last: bool) -> dict[int, Tensor]:
        """Make a call again, and fill its holders if `keep`. Returns the outputs that the next call takes."""
        call = self.calls[layer - self.start]
        if call.changed is not None and call.changed.lost is not None:
            raise RecomputeError(
                f"layer {layer} has written to {call.changed.lost}, which it had left alone before, so that nobody has "
                "a copy of what its first run read. It will have one from the next call on"
            )
        kept = call.tensors()

        def argument(leaf: Any) -> Any:
            if isinstance(leaf, (_Input, _Argument)):
                tensor = inputs[leaf.slot] if isinstance(leaf, _Input) else kept[leaf.position]
                tensor = tensor.detach().requires_grad_(leaf.requires_grad)
                return tensor.clone() if call.changes_input else tensor  # others may run from it, too
            return leaf

        args, kwargs = rebuilt(call.arguments, argument)
        filler = _Filler(call, layer, stop=is_last and keep and self.setting.early_stop)
        tape = nullcontext() if call.tape is None else replaying(call.tape)
        ops = nullcontext() if call.tape is None else KeepOps(self.setting.keep or frozenset())
        state = nullcontext() if call.changed is None else call.changed.restored()
        hooks = saved_tensors_hooks(filler.pack, filler.unpack) if keep else saved_tensors_hooks(_drop, _refuse)
        try:
            with state, hooks, tape, ops:
                out = call.ambient.call(call.function, args, kwargs)
        except _Stop:
            return {}
        if keep:
            filler.check()
        if is_last:
            return {}
        slots = self.calls[layer + 1 - self.start].slots()
        return {slot: tensor.detach() for slot, tensor in enumerate(outputs_of(out)) if slot in slots}


class _Filler:
    """Puts what a layer saves in a second run into the holders of the first."""

    def __init__(self, call: _SegmentCall, layer: int, *, stop: bool):
        self.call, self.layer = call, layer
        wanted = call.wanted()
        self.last = wanted[-1] if stop and wanted else None
        self.count = 0

    def pack(self, x: Tensor) -> Tensor:
        number, self.count = self.count, self.count + 1
        if x.requires_grad:
            x = x.detach()
        if number < len(self.call.holders):
            holder = self.call.holders[number]()
            if holder is not None:
                expected, found = self.call.metadata[number], (x.shape, x.dtype, x.device)
                if expected != found:
                    raise RecomputeError(
                        f"layer {self.layer} saved {_describe(found)} as its tensor number {number}, but "
                        f"{_describe(expected)} in its first run. Does it depend on something that has changed since?"
                    )
                self._compare(number, x)
                holder.value = x
        if number == self.last:
            raise _Stop
        return x

    def _compare(self, number: int, x: Tensor) -> None:
        first = self.call.samples[number] if number < len(self.call.samples) else None
        if first is not None and not is_alike(first, sample(x)):
            raise RecomputeError(
                f"layer {self.layer} has other values when it is run again, in its saved tensor number {number} "
                f"({_describe(self.call.metadata[number])}): its gradients would be wrong. Does it draw from a "
                "generator of its own, or depend on something that changes from call to call?"
            )

    def unpack(self, x: Tensor) -> Tensor:
        """The tensor itself, for a layer that differentiates within its forward."""
        return x

    def check(self) -> None:
        if self.count != len(self.call.holders) and self.call.is_complete:
            raise RecomputeError(
                f"layer {self.layer} saved {self.count} tensors for backward, but {len(self.call.holders)} in its "
                "first run. Does it do the same at every call, or depend on something that has changed since?"
            )


def _unpack(holder: _Holder) -> Tensor:
    return holder.segment.fetch(holder)


def _drop(_: Tensor) -> None:
    return None


def _refuse(_: None) -> Tensor:
    raise RecomputeError(
        "a layer that differentiates within its forward cannot be run without keeping its activations; recompute it "
        "with a policy that runs each layer at most once again (Full, Segments)"
    )


def _covers(steps: Steps, layer: int) -> bool:
    return steps[0].start <= layer < steps[-1].stop


def _describe(metadata: tuple[torch.Size, torch.dtype, torch.device]) -> str:
    shape, dtype, device = metadata
    return f"{list(shape)} {dtype} on {device}"


# ---- arguments and outputs -------------------------------------------------------------------------------------------


def link_of(tensor: Tensor) -> _Link | None:
    """Which layer the tensor is an output of, if nobody has written to it since."""
    link: _Link | None = getattr(tensor, _LINK, None)
    return link if link is not None and link.version == tensor._version else None


def leaves(value: Any) -> Iterator[Any]:
    """What is in the value, through tuples, lists and dicts; `_Input` and `_Argument` are leaves."""
    if isinstance(value, (_Input, _Argument)):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from leaves(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from leaves(item)
    else:
        yield value


def rebuilt(value: Any, function: Callable[[Any], Any]) -> Any:
    """The value with the function applied to each of its leaves."""
    if isinstance(value, (_Input, _Argument)):
        return function(value)
    if isinstance(value, tuple):
        items = [rebuilt(item, function) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if type(value) is list:
        return [rebuilt(item, function) for item in value]
    if type(value) is dict:
        return {key: rebuilt(item, function) for key, item in value.items()}
    return function(value)


def outputs_of(value: Any) -> list[Tensor]:
    """The tensors among a layer's outputs."""
    return [leaf for leaf in leaves(value) if isinstance(leaf, Tensor)]
