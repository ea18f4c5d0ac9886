"""Inputs and outputs of every module of a model in one step, and the gradients of both.

Hooks copy tensors; nothing else about the run changes, but that a module's inputs arrive as views, whose gradients are
those through this module alone and not those of all users of the tensor.

Note: recomputation. Layers that run again in backward call their modules' hooks again. Only what runs outside of
backward is recorded; the gradients of outputs that had no history then are taken where they get one, in the second run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fastpar.ops._autograd import in_backward
from fastpar.tensor import ColumnParallelLinear, GridLinear
from fastpar.tensor.parameter import local_tensor

INPUT, OUTPUT, GRAD_OUTPUT, GRAD_INPUT = "input", "output", "gradient of the output", "gradient of the input"
FORWARD, BACKWARD = (INPUT, OUTPUT), (GRAD_OUTPUT, GRAD_INPUT)
Key = tuple[str, str]  # module path, and one of the kinds above


@dataclass
class StepTrace:
    """One forward and backward.

    events   by key, per call: the floating-point tensors by position
    order    (module path, kind, call) in the order in which they came about
    counts   module to how often it was called
    parents  module to the module that was running when it was first called
    classes  module to its class
    """

    events: dict[Key, dict[int, dict[int, Tensor]]] = field(default_factory=dict)
    order: list[tuple[str, str, int]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    parents: dict[str, str | None] = field(default_factory=dict)
    classes: dict[str, str] = field(default_factory=dict)

    def of_call(self, key: Key, call: int) -> dict[int, Tensor]:
        """The tensors of a call, to be added to."""
        calls = self.events.setdefault(key, {})
        if call not in calls:
            calls[call] = {}
            self.order.append((*key, call))
        return calls[call]

    def tensors(self, key: Key, call: int) -> dict[int, Tensor]:
        return self.events.get(key, {}).get(call, {})


class ModuleTrace:
    """Records the calls of `modules` (path, module) until `close`.

    views  whether this module may be called with views of its inputs: a layer that asks whether its input *is* a
           certain tensor may not
    """

    def __init__(
        self, modules: Iterable[tuple[str, nn.Module]], views: Callable[[nn.Module], bool] = lambda _: True
    ) -> None:
        self.active: list[str] = []  # modules that are running; after an error, those that were
        self.step = StepTrace()
        self._views = views
        self._calls: dict[str, int] = defaultdict(int)
        self._reruns: dict[str, int] = defaultdict(int)
        self._handles: list[Any] = []
        for path, module in modules:
            enter, leave = self._hooks(path)
            self._handles.append(module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
            self._handles.append(module.register_forward_hook(leave))
            self.step.classes[path] = type(module).__name__

    def begin(self) -> None:
        """Forget the step before."""
        self.active.clear()
        self._calls.clear()
        self._reruns.clear()
        self.step = StepTrace(classes=self.step.classes)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _hooks(self, path: str) -> tuple[Any, Any]:
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if in_backward():
                return None
            self.step.parents.setdefault(path, self.active[-1] if self.active else None)
            self.active.append(path)
            call = self._calls[path]
            inputs = _tensors((args, kwargs))
            self._keep((path, INPUT), call, inputs)
            if not torch.is_grad_enabled() or not self._views(module):
                return None
            views = {id(x): x.view_as(x) for x in inputs if x.requires_grad}
            if not views:
                return None
            for index, x in enumerate(inputs):
                if id(x) in views:
                    self._watch(views[id(x)], (path, GRAD_INPUT), call, index)
            return _replaced(args, views), _replaced(kwargs, views)

        def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            outputs = _tensors(output)
            if in_backward():
                call = self._reruns[path]
                self._reruns[path] += 1
            else:
                self.active.pop()
                call = self._calls[path]
                self._calls[path] = self.step.counts[path] = call + 1
                self._keep((path, OUTPUT), call, outputs)
            for index, x in enumerate(outputs):
                if x.requires_grad and x.grad_fn is not None:
                    self._watch(x, (path, GRAD_OUTPUT), call, index)

        return enter, leave

    def _keep(self, key: Key, call: int, tensors: list[Tensor]) -> None:
        if tensors:
            self.step.of_call(key, call).update({i: _copy(x) for i, x in enumerate(tensors)})

    def _watch(self, x: Tensor, key: Key, call: int, index: int) -> None:
        step = self.step

        def keep(grad: Tensor) -> None:
            # A graph that is used twice (input gradients first, weights later) passes here twice.
            step.of_call(key, call).setdefault(index, _copy(grad))

        x.register_hook(keep)


def takes_views(module: nn.Module) -> bool:
    """True if a module of a parallel model computes the same with views of its inputs.

    Layers that share an input know it by identity, and so do those that are recomputed in a chain.
    """
    shares = isinstance(module, ColumnParallelLinear | GridLinear) and module.shared_input is not None
    return not shares and "forward" not in module.__dict__


def _copy(x: Tensor) -> Tensor:
    return local_tensor(x.detach()).to("cpu", copy=True)


def _tensors(value: Any) -> list[Tensor]:
    """The floating-point tensors in tuples, lists and mappings, in their order."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else ()
    return [x for item in items for x in _tensors(item)]


def _replaced(value: Any, views: dict[int, Tensor]) -> Any:
    """`value` with views in the place of tensors; containers that may be changed later stay the same objects."""
    if isinstance(value, Tensor):
        return views.get(id(value), value)
    if type(value) is tuple:
        return tuple(_replaced(item, views) for item in value)
    if type(value) is dict:
        return {
            name: _replaced(item, views) if isinstance(item, Tensor | tuple) else item for name, item in value.items()
        }
    return value
