"""What data parallelism puts into a model and an optimizer, so that copies of these and files can be made.

Note: copies. `copy.deepcopy(model)` (an average of weights, say) copies a module's hooks and attributes. A copy has no
data parallelism: what is called for another module than the one it was made for does nothing, or what torch does.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from fastpar.precision import Precision


class ForwardHook:
    """A forward (pre-)hook of one module, called with what torch calls such a hook with; nothing for a copy of it."""

    def __init__(self, module: Any, call: Callable[..., Any]) -> None:
        self._module, self._call = weakref.ref(module), call

    def __call__(self, module: Any, *args: Any) -> Any:
        return self._call(module, *args) if self._module() is module else None

    def __deepcopy__(self, memo: Any) -> ForwardHook:
        return self

    def __reduce__(self) -> Any:
        return _nothing, ()


class CastInputs:
    """Floating-point inputs of the model in the dtype of its parameters: a forward pre-hook, of copies too."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __call__(self, _: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map(self._cast, args), tree_map(self._cast, kwargs)

    def _cast(self, x: Any) -> Any:
        return x.to(self._dtype) if isinstance(x, Tensor) and x.is_floating_point() else x


class Autocast:
    """Runs the model's forward under autocast: `enter` and `leave` are hooks, of copies too."""

    def __init__(self, precision: Precision, device_type: str) -> None:
        self._precision, self._device_type = precision, device_type
        self._entered: list[Any] = []

    def enter(self, *_: Any) -> None:
        self._entered.append(self._precision.autocast(self._device_type))
        self._entered[-1].__enter__()

    def leave(self, *_: Any) -> None:
        if self._entered:
            self._entered.pop().__exit__(None, None, None)


class ZeroGrad:
    """`zero_grad` of a module or an optimizer, which drops what was reduced and summed, too."""

    def __init__(self, owner: Any, forget: Callable[[], None]) -> None:
        self._owner, self._forget = weakref.ref(owner), forget
        self._before = vars(owner).get("zero_grad")

    def __call__(self, set_to_none: bool = True) -> None:
        owner = self._owner()
        if owner is None:
            return
        self._forget()
        if self._before is not None:
            self._before(set_to_none)
        else:
            type(owner).zero_grad(owner, set_to_none)

    def remove(self) -> None:
        owner = self._owner()
        if owner is not None and vars(owner).get("zero_grad") is self:
            del owner.zero_grad
            if self._before is not None:
                owner.zero_grad = self._before

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        owner: Any = self._owner()
        return functools.partial(type(owner).zero_grad, memo.get(id(owner), owner))

    def __reduce__(self) -> Any:
        owner: Any = self._owner()
        return functools.partial, (type(owner).zero_grad, owner)


class LoadStates:
    """`load_state_dict` of an optimizer, whose states are rows: calls `load` with the optimizer's own, and what it was
    given."""

    def __init__(self, owner: Any, load: Callable[..., None]) -> None:
        self._owner, self._load = weakref.ref(owner), load
        owner.load_state_dict = self

    def __call__(self, state_dict: Any) -> None:
        owner: Any = self._owner()
        self._load(owner, functools.partial(type(owner).load_state_dict, owner), state_dict)

    def remove(self) -> None:
        owner = self._owner()
        if owner is not None and vars(owner).get("load_state_dict") is self:
            del owner.load_state_dict

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        owner: Any = self._owner()
        return functools.partial(type(owner).load_state_dict, memo.get(id(owner), owner))

    def __reduce__(self) -> Any:
        owner: Any = self._owner()
        return functools.partial, (type(owner).load_state_dict, owner)


def _nothing() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*_: Any) -> None:
    return None
