"""Views of split parameters and gradients that are copies: a write to one is an error.

Of a DTensor torch gathers what `weight[0]`, `narrow`, `chunk` or `reshape` take along a dim that is split, and gives a
copy. `weight.data[padding].zero_()` or `weight.grad[:10].mul_(0)` then changes the copy and nothing else, without a
word, and only on layouts that split that dim. Reading such a view is as ever. Methods are looked at, and `x[...] = y`;
`torch.narrow(x, ...)` and the like, which DTensor takes without a word to its class, are not.

Inside an optimizer's step views of gradients and states are values to compute with, to which optimizers may write.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor.experimental import register_sharding

from fastpar.tensor.dtensor_data import take_data
from fastpar.tensor.optimizer_numbers import is_in_step, read_whole_numbers_in_steps, skip_steps_together
from fastpar.tensor.optimizer_rows import order_states_by_the_model
from fastpar.tensor.optimizer_trial import try_in_first_steps

_VIEWS = (
    "__getitem__", "select", "narrow", "chunk", "split", "tensor_split", "unbind", "diagonal", "view", "reshape",
    "flatten", "unflatten",
)  # fmt: skip
_OPERATORS = frozenset(
    f"__{name}__"
    for name in ("setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor")
)
_NO_WRITES = frozenset({"requires_grad_", "detach_", "share_memory_"})
# Shapes and placements of parameters. No references to them, with which torch would not let a model be converted.
_SPLIT: set[tuple[torch.Size, tuple[Placement, ...]]] = set()


class MarkedView(DTensor):
    """Copied and saved as a plain DTensor."""

    __slots__ = ()

    def _plain(self) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self.detach()

    def __deepcopy__(self, memo: Any) -> Any:
        return super().__deepcopy__(memo) if self.grad_fn is not None else copy.deepcopy(self._plain(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)


class GatheredView(MarkedView):
    """Such a copy. What is computed of it is a plain DTensor again; a view of it is one of these."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.__name__.partition(".")[0]
        if isinstance(kwargs.get("out"), GatheredView) or (_writes(name) and _first(args)):
            raise _refusal(name)
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **kwargs)
        views = [x for x in _each(found) if type(x) is DTensor]
        for view in views:
            if any(not _is_copy(view, x) for x in args if isinstance(x, GatheredView)):
                view.__class__ = GatheredView
        return found


class LocalView(MarkedView):
    """A view that is no copy: it lies in the memory of what it is of, and its own views are looked at as well."""

    __slots__ = ()


def _refusal(name: str) -> RuntimeError:
    return RuntimeError(
        f"{name} would write to a copy: torch gathers a part of a parameter or gradient along a dim that is split over "
        "ranks, and nothing comes back. Write to the whole tensor, as in weight.masked_fill_(mask, value) or "
        "weight.copy_(torch.where(mask, value, weight)), or to clone() if a copy is wanted"
    )


def _writes(name: str) -> bool:
    return name in _OPERATORS if name.startswith("__") else name.endswith("_") and name not in _NO_WRITES


def _first(args: Any) -> bool:
    """Whether what an operation writes to is such a copy: the first argument, or one of a list."""
    return bool(args) and any(isinstance(x, GatheredView) for x in _each(args[0]))


def _each(found: Any) -> Any:
    return found if isinstance(found, (tuple, list)) else (found,)


def _is_copy(view: DTensor, x: DTensor) -> bool:
    # Of storages themselves: those of fake tensors have no address.
    apart = view._local_tensor.untyped_storage()._cdata != x._local_tensor.untyped_storage()._cdata
    return apart and view._local_tensor.numel() > 0


def watch_views(parameter: Tensor) -> None:
    """Refuse writes to copies of this parameter's parts, and of what is split like it: gradients, averages."""
    if isinstance(parameter, DTensor):
        try_in_first_steps()
        order_states_by_the_model()
        read_whole_numbers_in_steps()
        skip_steps_together()
        _mark_copies()
        take_data(_is_split)
        _answer_anomaly_mode()
        _SPLIT.add((parameter.shape, parameter._spec.placements))


def _is_watched(x: DTensor) -> bool:
    if is_in_step():
        return isinstance(x, nn.Parameter)
    return type(x) is LocalView or _is_split(x)


def _is_split(x: DTensor) -> bool:
    return (x.shape, x._spec.placements) in _SPLIT


@functools.cache
def _mark_copies() -> None:
    for name in _VIEWS:
        setattr(DTensor, name, _marking(getattr(DTensor, name)))
    DTensor.__setitem__ = _refusing(DTensor.__getitem__, DTensor.__setitem__)  # type: ignore[method-assign]


@functools.cache
def _answer_anomaly_mode() -> None:
    """Let `torch.autograd.set_detect_anomaly` look at gradients that are DTensors, for which torch has no rule. Every
    rank gets the answer of the whole gradient, so that all raise where one has found a NaN."""
    register_sharding(torch.ops.aten._is_any_true.default)(lambda x: [([Replicate()], [Replicate()])])


def _marking(view: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(view)
    def marking(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = view(self, *args, **kwargs)
        if torch.compiler.is_compiling() or isinstance(self, GatheredView):
            return found
        views = [x for x in _each(found) if type(x) is DTensor and x is not self]
        if views and _is_watched(self):
            for x in views:
                x.__class__ = GatheredView if _is_copy(x, self) else LocalView
        return found

    return marking


def _refusing(get: Callable[..., Any], put: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(put)
    def setting(self: Any, index: Any, value: Any) -> None:
        is_basic = all(x is None or x is ... or type(x) in (int, slice) for x in _each(index))
        is_looked_at = is_basic and not torch.compiler.is_compiling() and _is_watched(self)
        if is_looked_at and isinstance(get(self, index), GatheredView):
            raise _refusal("__setitem__")
        put(self, index, value)

    return setting
