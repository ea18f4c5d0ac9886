"""Parameters whose place a parallel one has taken: whoever still holds one is told so.

An optimizer that was built before `fastpar.parallelize` holds the model's parameters of then. They get no gradients any
more, so it would train nothing, without a word. torch.utils.swap_tensors cannot make a plain parameter and a DTensor
change places, as their objects differ in layout. So a replaced parameter refuses to be asked for its gradient, which
is what optimizers and gradient clipping begin with, and to be computed with.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

_GRAD = cast(Any, Tensor).grad
_REFUSED_GETTERS = (_GRAD.__get__, _GRAD.__set__, _GRAD.__delete__)
_ALLOWED = {"__get__", "__set__", "size", "stride", "dim", "numel", "element_size", "is_floating_point", "is_complex"}
_ALLOWED |= {"data_ptr", "untyped_storage", "storage_offset", "is_contiguous", "__repr__", "__hash__", "__deepcopy__"}


class ReplacedParameter(nn.Parameter):
    """A parameter that `parallelize` has emptied."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _REFUSED_GETTERS or getattr(func, "__name__", "") not in _ALLOWED:
            raise RuntimeError(
                "this parameter is one of the model before fastpar.parallelize, which has taken its place: it gets no "
                "gradients and has no values. Build the optimizer (and lists of parameters) after parallelize, from "
                "model.parameters()"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def mark_replaced(parameter: nn.Parameter) -> None:
    """Free the memory of a plain parameter, and let it refuse to be used. Other classes stay as they are."""
    with torch.no_grad():
        parameter.grad = None
        parameter.data = parameter.data.new_empty(0)
    if type(parameter) is nn.Parameter:
        cast(Any, parameter).__class__ = ReplacedParameter


def mark_in_place(parameter: nn.Parameter) -> None:
    """Undo `mark_replaced`, but for the values."""
    if type(parameter) is ReplacedParameter:
        cast(Any, parameter).__class__ = nn.Parameter
