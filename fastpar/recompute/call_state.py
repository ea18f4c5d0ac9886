"""What a layer's second run must find as its first did, beside arguments and parameters, and must leave as it is.

Modules keep things from one call to the next: running means of batch normalisation, the vectors of spectral norm's
power iteration, counters, observers of quantisation. A forward that changes them would change them twice, and compute
something else the second time. So the buffers and attributes of a layer that a call changes are noted as they were
before; the second run gets those values, and afterwards all of them are again what they were before it.

    watch = CallWatch(forward, layer, draws=True)
    ...                                 # the first run
    changed = watch.end()
    with changed.restored(): ...        # the second

An attribute is noted by its object; lists, dicts, sets and deques that are attributes, or in such ones, also by their
items. Tensors may be written in place, and take a copy: small ones at every call, others at the first and once a call
has changed them.

Between a call and its second run others may change a layer, too: `torch.func.functional_call` lends it parameters for
one forward, and a script sets its mode, an active adapter or a temperature. So the second run also gets back the
parameters, and the attributes that hold only settings: numbers, strings and containers of them.

Python's and numpy's generators, from which some layers draw whether to skip themselves, take 0.1 ms to save, so they
are looked at in the first call of a layer and every thousandth, and saved for layers that were seen to draw. What else
a layer may depend on (a generator of its own, a file) cannot be brought back: in those calls samples of what a layer
saves for backward are compared with those of its second run.
"""

from __future__ import annotations

import enum
import functools
import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fastpar.contracts.containers import containers_in, items_of, put_back, with_own_containers

SMALL_TENSOR = 1 << 16  # bytes; up to here a buffer is copied at every call
MANY = 64  # items; a container of more is data, and too long to look at in every call
CHECKED_EVERY = 1000  # calls of a layer between two whose second run is compared with the first
_ABSENT: Any = object()
_OF_MODULES = frozenset(vars(nn.Module())) - {"training"}  # dicts of parameters, buffers, children and hooks
_SETTINGS = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, enum.Enum, type(None))


class LayerHistory:
    """What was seen at the calls of a layer so far, and is looked for at the next ones."""

    def __init__(self) -> None:
        self.calls = 0
        self.written: set[tuple[int, str]] = set()  # tensors that calls change, by module and name
        self.draws = False  # from Python's or numpy's generators


_histories: weakref.WeakKeyDictionary[Any, LayerHistory] = weakref.WeakKeyDictionary()


def _history_of(owner: Any) -> LayerHistory:
    found = _histories.get(owner)
    if found is None:
        found = _histories[owner] = LayerHistory()
    return found


def _owner(function: Any) -> Any:
    """What tells a function from others at its next call: its module, or its code, as of a lambda. None: nothing."""
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, nn.Module):
        return function
    if isinstance(getattr(function, "__self__", None), nn.Module):
        return function.__self__
    return getattr(function, "__code__", None)


class _Items(NamedTuple):
    """A container among a module's attributes, and what is in it."""

    container: Any
    items: Any

    def differs(self) -> bool:
        """Whether it differs by objects, since tensors do not compare."""
        container, items = self
        if len(container) != len(items):
            return True
        if isinstance(container, dict):
            return any(container.get(key, _ABSENT) is not value for key, value in items.items())
        if isinstance(container, set):
            return bool(container != items)
        return any(a is not b for a, b in zip(container, items, strict=True))

    def put_back(self) -> None:
        put_back(self.container, self.items)


class _Written(NamedTuple):
    """A tensor that may be written in place: a buffer, or an attribute."""

    tensor: Tensor
    version: int
    copy: Tensor | None

    @staticmethod
    def of(tensor: Tensor, *, copied: bool) -> _Written:
        found = _Written(tensor, tensor._version, None)
        return found._replace(copy=tensor.detach().clone()) if copied or found.is_small else found

    @property
    def is_small(self) -> bool:
        return self.tensor.numel() * self.tensor.element_size() <= SMALL_TENSOR

    def may_be_written(self) -> bool:
        """Batch normalisation's kernels do not count what they write to running means: small ones may always be."""
        if self.is_small or self.tensor._version != self.version:
            return True
        return self.copy is not None and _has_values(self.tensor) and not torch.equal(self.tensor, self.copy)

    @property
    def before(self) -> Tensor:
        """Its values before the call, without their history."""
        return (self.tensor if self.copy is None else self.copy).detach().requires_grad_(self.tensor.requires_grad)


class _Before(NamedTuple):
    """One module of a layer: its attributes, buffers, parameters, and what the containers among the attributes hold."""

    module: nn.Module
    attributes: dict[str, Any]
    buffers: dict[str, Tensor | None]
    parameters: dict[str, nn.Parameter | None]
    containers: list[_Items]

    @staticmethod
    def of(module: nn.Module) -> _Before:
        values = vars(module)
        attributes = {name: values[name] for name in values.keys() - _OF_MODULES}
        containers = [_Items(x, items_of(x)) for x in containers_in(attributes.values())]
        return _Before(module, attributes, dict(module._buffers), dict(module._parameters), containers)

    def put_back(self) -> None:
        """Have the module as it was, but for what was written to its tensors in place."""
        for values, before in ((vars(self.module), self.attributes), (self.module._buffers, self.buffers)):
            for name in values.keys() - before.keys() - _OF_MODULES:
                del values[name]
            values.update(before)
        for each in self.containers:
            if each.differs():
                each.put_back()


class _Found(NamedTuple):
    """What a call found in a module and others may change after it: its parameters and settings."""

    module: nn.Module
    parameters: dict[str, nn.Parameter | None]
    settings: dict[str, Any]  # whose containers are copies: the list itself may later hold outputs, and their graphs

    @staticmethod
    def of(before: _Before, memo: dict[int, Any]) -> _Found:
        settings = {k: with_own_containers(x, memo) for k, x in before.attributes.items() if _is_setting(x)}
        return _Found(before.module, before.parameters, settings)

    def bring_back(self, memo: dict[int, Any]) -> dict[str, nn.Parameter | None]:
        """Have in the module what is another by now. Returns the parameters that this has replaced."""
        now, attributes = self.module._parameters, vars(self.module)
        replaced: dict[str, nn.Parameter | None] = {}
        for name, x in self.parameters.items():
            # Whole and sharded ones take turns under one name, in stage 3 and fully_shard, which see to it themselves.
            if name in now and now[name] is not x and _mesh_of(now[name]) == _mesh_of(x):
                replaced[name], now[name] = now[name], x
        for name, value in self.settings.items():
            found = attributes.get(name, _ABSENT)
            if found is not value and not (type(found) is type(value) and _is_setting(found) and found == value):
                attributes[name] = with_own_containers(value, memo)
        return replaced


def _mesh_of(x: Any) -> Any:
    return getattr(x, "device_mesh", None)


def _is_setting(value: Any) -> bool:
    if not isinstance(value, (dict, list, tuple, set)):
        return isinstance(value, _SETTINGS)
    items = value.values() if isinstance(value, dict) else value
    return len(value) <= MANY and all(map(_is_setting, items))


class Changed(NamedTuple):
    """What a call has changed, as it was before, and what others may change after it."""

    modules: list[nn.Module]  # all of the layer
    values: list[tuple[dict[str, Any], str, Any]]  # of a module's attributes or buffers, by name
    containers: list[_Items]
    found: list[_Found]
    lost: str | None  # a tensor that was written to, of which there is no copy
    generators: GeneratorStates | None  # where the call has drawn from them

    @contextmanager
    def restored(self) -> Iterator[None]:
        """The state of before the call within the block; after it that of when the block began."""
        now = [_Before.of(module) for module in self.modules]
        memo: dict[int, Any] = {}
        replaced = [(each.module, each.bring_back(memo)) for each in self.found]
        for values, name, value in self.values:
            if value is _ABSENT:
                values.pop(name, None)
            elif isinstance(value, Tensor):  # which a third run may need
                values[name] = value.detach().clone().requires_grad_(value.requires_grad)
            else:
                values[name] = value
        for each in self.containers:
            each.put_back()
        try:
            with nullcontext() if self.generators is None else self.generators.restored():
                yield
        finally:
            for module, parameters in replaced:
                module._parameters.update(parameters)
            for before in now:
                before.put_back()


class CallWatch:
    """A layer before a call, to see what the call changes."""

    def __init__(self, function: Callable[..., Any], module: nn.Module | None, *, draws: bool):
        """`module`: the one that the function is the forward of. draws False: it draws nothing."""
        owner = _owner(function) if module is None else module
        self.history = LayerHistory() if owner is None else _history_of(owner)
        self.is_checked = owner is not None and self.history.calls % CHECKED_EVERY == 0
        self.generators = GeneratorStates.now() if draws and (self.is_checked or self.history.draws) else None
        self._modules = list(owner.modules()) if isinstance(owner, nn.Module) else []
        self._before = [_Before.of(module) for module in self._modules]
        memo: dict[int, Any] = {}
        self._found = [_Found.of(before, memo) for before in self._before]
        self._tensors: dict[tuple[int, str], _Written] = {}  # by the module's id and the name in it
        for before in self._before:
            for held in (before.attributes, before.buffers):
                for name, x in held.items():
                    if isinstance(x, Tensor) and not isinstance(x, nn.Parameter) and not x.is_inference():
                        key = (id(before.module), name)
                        copied = self.is_checked or key in self.history.written
                        self._tensors[key] = _Written.of(x, copied=copied)

    def end(self) -> Changed | None:
        """What is no longer as it was after the call, or may not stay so. None where there is nothing to bring back."""
        history = self.history
        history.calls += 1
        if self.generators is not None and self.generators.is_same():
            self.generators = None
        history.draws |= self.generators is not None
        values, containers, lost = [], [], None
        written = {key for key, each in self._tensors.items() if each.may_be_written()}
        for module, attributes, buffers, _, found in self._before:
            for now, before in ((vars(module), attributes), (module._buffers, buffers)):
                for name in _changed_names(module, now, before, written):
                    key = (id(module), name)
                    tensor = self._tensors.get(key)
                    old = before.get(name, _ABSENT)
                    values.append((now, name, _without_history(old) if tensor is None else tensor.before))
                    if tensor is not None and key in written and not tensor.is_small:
                        history.written.add(key)
                        lost = f"{name} of {type(module).__name__}" if tensor.copy is None else lost
            containers += [each._replace(items=_without_history(each.items)) for each in found if each.differs()]
        if not (self._modules or self.generators):
            return None
        return Changed(self._modules, values, containers, self._found, lost, self.generators)


def _without_history(value: Any) -> Any:
    """The value with those of its tensors alone. A tensor of an earlier layer of the stretch leads by its graph to the
    call that would hold it: a circle through autograd, which no collector sees."""
    return tree_map_only(Tensor, lambda x: x if x.grad_fn is None else x.detach().requires_grad_(), value)


def _changed_names(
    module: nn.Module, now: dict[str, Any], before: dict[str, Any], written: set[tuple[int, str]]
) -> Iterator[str]:
    """The names of values that are others, came or went, or were written to."""
    for name, value in before.items():
        if now.get(name, _ABSENT) is not value or (written and (id(module), name) in written):
            yield name
    if len(now) != len(before):  # mostly for what every module has
        yield from now.keys() - before.keys() - _OF_MODULES


class GeneratorStates(NamedTuple):
    """States of Python's and numpy's generators, which layers draw from that skip themselves or mask their input."""

    python: Any
    numpy: Any

    @staticmethod
    def now() -> GeneratorStates:
        return GeneratorStates(random.getstate(), np.random.get_state())  # noqa: NPY002

    def is_same(self) -> bool:
        kind, keys, *rest = np.random.get_state()  # noqa: NPY002
        own_kind, own_keys, *own_rest = self.numpy
        same = kind == own_kind and rest == own_rest and np.array_equal(keys, own_keys)
        return same and random.getstate() == self.python

    @contextmanager
    def restored(self) -> Iterator[None]:
        """These within the block, those of before it afterwards."""
        before = GeneratorStates.now()
        before.replace_with(self)
        try:
            yield
        finally:
            self.replace_with(before)

    def replace_with(self, other: GeneratorStates) -> None:
        random.setstate(other.python)
        np.random.set_state(other.numpy)  # noqa: NPY002


# ---- samples of saved tensors ----------------------------------------------------------------------------------------

SAMPLES = 64  # elements, about
# Of the largest sampled value; sums of a kernel with atomics differ between runs by a few roundings.
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3}
_FEW = 0.05  # the part that may differ all the same: an element at which a rounding decides


def sample(x: Tensor) -> Tensor | None:
    """A copy of elements from all over a tensor; None of what has no values to compare."""
    if not (_has_values(x) and (x.is_floating_point() or x.dtype == torch.bool) and x.numel()):
        return None
    each = max(2, round(SAMPLES ** (1 / max(1, x.dim()))))
    with torch.no_grad():
        found = x.detach()[tuple(slice(None, None, -(-size // each)) for size in x.shape)].clone()
        return found


def _has_values(x: Tensor) -> bool:
    """Whether they can be looked at: not of stand-ins, nor while a CUDA graph is captured."""
    if type(x) not in (Tensor, nn.Parameter) or x.layout != torch.strided or x.device.type not in ("cpu", "cuda"):
        return False
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def is_alike(first: Tensor, again: Tensor | None) -> bool:
    """Whether two samples may be of the same values. Waits for the device."""
    if again is None:
        return True
    if first.dtype == torch.bool:
        return bool((first != again).float().mean() <= _FEW)
    first, again = first.nan_to_num(0.0, 0.0, 0.0), again.nan_to_num(0.0, 0.0, 0.0)
    tolerance = _TOLERANCES.get(first.dtype, 2.0**-5)
    first, again = first.double(), again.double()
    return bool(((first - again).abs() > tolerance * first.abs().amax()).float().mean() <= _FEW)
