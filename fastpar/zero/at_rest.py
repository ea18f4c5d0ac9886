"""Parameters of stage 3 while the model runs, and until backward: what would be wrong with them says so.

A loss is made of outputs, and some of parameters, too (weight decay by hand). In stage 3 the parameters that modules
have outside of forward are shards, and not what the graph of the outputs has: torch.autograd.grad finds no way to them
and returns None, and a term of them is a DTensor, which torch refuses to mix with plain tensors far from where it was
made.

A module that reads the parameter of another one, whose forward does not run, gets its shard, too.

Note: by class, as in absent.py. From the beginning of forward to backward they have a class that torch asks about every
function that is called with them: few are in between. What computes nothing that needs a gradient goes on as ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from fastpar.zero.reduced import class_below, set_class_below

# What gives a parameter itself, or another way to look at it that is fastpar's or torch's own business.
_ALLOWED = {"__get__", "__set__", "__delete__", "requires_grad_", "retain_grad", "register_hook", "__repr__"}


class AtRestTensor(Tensor):
    """A shard of a parameter that is not to be differentiated now; the other classes are this one for parameters and
    DTensors."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.autograd.grad:
            raise RuntimeError(
                "torch.autograd.grad was asked for gradients of shards of stage 3, which are not what the loss was "
                "computed with: call loss.backward() and take `.grad`, or use stage=2"
            )
        if func is Tensor.__deepcopy__ or func is Tensor.__reduce_ex__:
            name = args[0]._at_rest_name
            release(args[:1])
            try:
                return func(*args, **kwargs)
            finally:
                guard({name: args[0]})
        with torch._C.DisableTorchFunctionSubclass():
            try:
                found = func(*args, **kwargs)
            except RuntimeError as error:
                if "got mixed torch.Tensor and DTensor" in str(error):
                    raise RuntimeError(_text(func, args, kwargs)) from error
                raise
        results = found if isinstance(found, (list, tuple)) else [found]
        if func.__name__ not in _ALLOWED and any(isinstance(x, Tensor) and x.requires_grad for x in results):
            raise RuntimeError(_text(func, args, kwargs))
        return found


class AtRestParameter(AtRestTensor, nn.Parameter):
    __slots__ = ()


class AtRestDTensor(AtRestTensor, DTensor):
    __slots__ = ()


_CLASSES: dict[type, type] = {nn.Parameter: AtRestParameter, DTensor: AtRestDTensor}
_OWN = {guarded: own for own, guarded in _CLASSES.items()}


def _text(func: Any, args: Any, kwargs: Any) -> str:
    found = next((x for x in tree_leaves((args, kwargs)) if isinstance(x, AtRestTensor)), None)
    name = getattr(found, "_at_rest_name", "a parameter")
    module = name.rpartition(".")[0] or "the model"
    return (
        f"{func.__name__} was called with {name}, which stage 3 has sharded, outside of the forward of {module}: it "
        f"would compute with this rank's shard. Within the model's forward, call {module} itself, or give units= to "
        "shard(...) in which it stands together with the module that reads it. For a term of the loss take "
        "parameter.full_tensor(), for a value parameter.detach(), or use stage=2"
    )


def guard(parameters: Mapping[str, Tensor]) -> None:
    """From now on these, by name, say what would be wrong. Tensors of other classes stay as they are."""
    for name, x in parameters.items():
        guarded = _CLASSES.get(class_below(x))
        if guarded is not None:
            inner: Any = x
            inner._at_rest_name = name
            set_class_below(x, guarded)


def release(parameters: Iterable[Tensor]) -> None:
    for x in parameters:
        own = _OWN.get(class_below(x))
        if own is not None:
            set_class_below(x, own)
