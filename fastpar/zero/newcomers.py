"""Parameters that come into a model after `shard`, such as a new head's: nothing averages their gradients, and an
optimizer of their own would train another one on every rank."""

from __future__ import annotations

from functools import partial
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn


class Newcomers:
    """Notices them by the identity of every module and the number of its parameters, and refuses their gradients."""

    def __init__(self, model: nn.Module) -> None:
        self._known = {id(parameter) for parameter in model.parameters()}
        self._names: WeakKeyDictionary[nn.Module, frozenset[str]] = WeakKeyDictionary()
        for _, module in _modules(model):
            self._names[module] = frozenset(module._parameters)
        self._frozen: list[tuple[str, Tensor]] = []
        self._handles: list[Any] = []
        self._see(model)

    def check(self, model: nn.Module) -> None:
        """Before a forward: the backward pass that gives one a gradient is to raise RuntimeError."""
        if self._now() != self._seen:
            self._see(model)
            for path, module in _modules(model):
                names = self._names.setdefault(module, frozenset())
                for name, parameter in module._parameters.items():
                    if parameter is not None and name not in names and id(parameter) not in self._known:
                        self._known.add(id(parameter))
                        self._frozen.append((f"{path}.{name}" if path else name, parameter))
        if self._frozen:
            for name, thawed in [x for x in self._frozen if x[1].requires_grad]:
                self._handles.append(thawed.register_post_accumulate_grad_hook(partial(_refuse, name)))
            self._frozen = [x for x in self._frozen if not x[1].requires_grad]

    def remove(self) -> None:
        """Take the hooks from them."""
        for handle in self._handles:
            handle.remove()

    def _see(self, model: nn.Module) -> None:
        modules = [module for _, module in _modules(model)]
        self._children = [module._modules for module in modules]
        self._own = [module._parameters for module in modules]
        self._seen = self._now()

    def _now(self) -> list[Any]:
        # No loop in Python, as this is in every forward. Lists compare their items by identity first.
        return [*chain.from_iterable(map(dict.values, self._children)), *map(len, self._own)]


def _modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Those that parameters may come into: not torch.jit's, which have no dicts of them."""
    return [(path, module) for path, module in model.named_modules() if isinstance(module._parameters, dict)]


def _refuse(name: str, parameter: Any) -> None:
    if len(parameter._post_accumulate_grad_hooks) == 1:  # nobody else looks after it, as another `shard` does
        raise RuntimeError(
            f"{name} has come into the model after fastpar.zero.shard, and has a gradient of this rank's batch, which "
            "nothing averages: ranks would train different ones. Change the model before shard(...), or call "
            "zero.detach(), and shard it again with a new optimizer; or shard the new module, with an optimizer of its "
            "own"
        )
