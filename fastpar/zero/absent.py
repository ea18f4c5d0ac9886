"""Tensors whose memory is away: what would read it raises, where torch would crash the process.

    mark_absent(parameter, "the weight is freed: gather it first")
    parameter.shape, parameter.grad                # as ever
    parameter.detach().clone()                     # RuntimeError: the weight is freed: gather it first
    mark_present(parameter)

Note: by class. The tensor gets another class, and gets its own back; torch asks a class of one's own about every
function that is called with it. That costs 0.3 us for both, nothing while the memory is there, and while it is not,
1.7 us for every look at an attribute such as the gradient; under `looking_at_absent`, where nothing is refused, 0.1 us
(measured on a loaded core of an EPYC). Only code in C++ that has got hold of the tensor before, as autograd has, is not
asked: see "freed parameters say so" in gathered.py.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

# For loops over attributes of parameters whose memory may be away.
looking_at_absent = torch._C.DisableTorchFunctionSubclass

# What needs no values; tensors that it gives are absent, too.
_ALLOWED = {
    *("__get__", "__set__", "__delete__", "detach", "size", "stride", "dim", "ndimension", "numel", "nelement"),
    *("element_size", "storage_offset", "untyped_storage", "data_ptr", "is_contiguous", "get_device", "has_names"),
    *("is_floating_point", "is_complex", "requires_grad_", "retain_grad", "register_hook"),
    *("register_post_accumulate_grad_hook", "grad", "backward"),  # autograd gathers, and comes to them later
}
_GRADIENT = cast("Any", Tensor).grad.__get__


class AbsentTensor(Tensor):
    """A tensor without memory; the other classes are this one for parameters and DTensors."""

    __slots__ = ()
    _absent_text: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]  # of an operator without that of the overload
        if name not in _ALLOWED:
            tensors = _tensors_in([*args, *(kwargs or {}).values()])
            absent = next(x for x in tensors if isinstance(x, AbsentTensor))
            raise RuntimeError(f"{absent._absent_text} ({name} was called with it)")
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
        if func == _GRADIENT and found is None and "_reduced_of" in vars(args[0]):  # see reduced.py
            found = args[0]._reduced_of.owner.grad
        if isinstance(found, Tensor) and found is not args[0] and func != _GRADIENT:
            mark_absent(found, args[0]._absent_text)
        return found

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"


class AbsentParameter(AbsentTensor, nn.Parameter):
    __slots__ = ()


class AbsentDTensor(AbsentTensor, DTensor):
    __slots__ = ()


_CLASSES: dict[type, type] = {nn.Parameter: AbsentParameter, Tensor: AbsentTensor, DTensor: AbsentDTensor}
_OWN = {absent: own for own, absent in _CLASSES.items()}


def mark_absent(x: Tensor, text: str) -> None:
    """From now on what reads x raises RuntimeError with this text. Tensors of classes of their own stay as they are."""
    absent = _CLASSES.get(type(x))
    if absent is not None:
        inner: Any = x
        inner.__class__, inner._absent_text = absent, text
        if absent is AbsentDTensor:
            mark_absent(inner._local_tensor, text)


def mark_present(x: Tensor) -> None:
    own = _OWN.get(type(x))
    if own is not None:
        inner: Any = x
        inner.__class__ = own
        del inner._absent_text
        if own is DTensor:
            mark_present(inner._local_tensor)


def _tensors_in(values: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors_in(value)
    return found
