"""The classes that parameters have for a while, because of what their attributes would otherwise say.

| class | when | what it does |
|---|---|---|
| `AbsentTensor` | no memory: freed by stage 3, or in a file | reading values raises, where torch would crash |
| `AtRestTensor` | stage 3, from forward to backward | what would differentiate a shard raises |
| `_ShowsReduced` | from a reduction to the next forward or step | `.grad` is the averaged gradient, its optimizer's |
| `_Withholds` | from a pass that reduced nothing to a reduction | reading `.grad` raises: it is this rank's alone |

Note: by class. A parameter gets another class, and gets its own back; torch asks a class of one's own about every
function that is called with it. That costs 0.3 us for both, nothing with the own class, and 1.7 us for every look at an
attribute of an absent tensor; under `looking_at_absent`, where nothing is refused, 0.1 us (measured on a loaded core of
an EPYC). Forward runs with the own class: torch.compile would compile for both. Code in C++ that has got hold of a
tensor before, as autograd has, is not asked: see "freed parameters say so" in param_group.py.

Note: parameters at rest. A loss is made of outputs, and some of parameters, too (weight decay by hand). In stage 3 the
parameters that modules have outside of forward are shards, and not what the graph of the outputs has:
torch.autograd.grad finds no way to them and returns None, and a term of them is a DTensor, which torch refuses to mix
with plain tensors far from where it was made. A module that reads the parameter of another one, whose forward does not
run, gets its shard, too. What computes nothing that needs a gradient goes on as ever, and so does `full_tensor`.

Note: averaged gradients. Between the end of a reduction and the next forward or step, `.grad` of a parameter that is
not its own optimizer parameter is that one's: one tensor, so what changes it changes what the optimizer takes. Where
ranks have rows it is a DTensor, of which torch computes norms with a collective: the norm of one process, on all ranks.
What autograd itself has put there (and was not sent yet) comes first. What has not been averaged yet, where a reduction
is deferred, is no gradient that anybody can clip: with overlap=False, and where `.grad` is not even this rank's sum
(stage 3, and 16 bits, which are summed in float32), reading it raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from fastpar.zero.groups import Groups, as_dtensor, local

if TYPE_CHECKING:
    from fastpar.zero.sharded_param import ShardedParam

_OWN_GRAD = cast("Any", Tensor).grad  # torch's own attribute, which autograd adds to


def unsent_gradient(parameter: Tensor) -> Tensor | None:
    """The gradient that autograd has put into `.grad` of this rank's parameter."""
    found: Tensor | None
    if isinstance(parameter, AbsentTensor):
        with looking_at_absent():
            found = _OWN_GRAD.__get__(parameter)
    else:
        found = _OWN_GRAD.__get__(parameter)
    return found


def drop_unsent(parameter: Tensor) -> None:
    _OWN_GRAD.__set__(parameter, None)


@contextmanager
def _by_own_class(parameter: Any, again: Callable[[ShardedParam], None]) -> Iterator[Any]:
    """The parameter with its own class in the block: what is copied or saved has that one."""
    param = parameter._reduced_of
    hide(param)
    try:
        yield parameter
    finally:
        again(param)


class _ShowsReduced:
    """The base that a parameter's class gets while it shows the averaged gradient."""

    __slots__ = ()
    _reduced_of: ShardedParam

    @property
    def grad(self) -> Tensor | None:
        inner: Any = self
        found = unsent_gradient(inner)
        return self._reduced_of.optim_param.grad if found is None else found

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        inner: Any = self
        param = self._reduced_of
        if value is None:
            drop_unsent(inner)
            param.unreduced_sum = param.optim_param.grad = None
            return
        owner: Any = param.optim_param
        if isinstance(value, DTensor) != (param.spec is not None) or local(value).shape != local(owner).shape:
            raise ValueError(
                f"{param.name}.grad must be a tensor like the averaged gradient that is there, a part of it on every "
                f"rank, got a {type(value).__name__} of shape {tuple(value.shape)}: change it in place, or assign what "
                "was computed from it"
            )
        mine = local(value).to(owner.device, owner.dtype)
        owner.grad = as_dtensor(mine, param.spec)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with _by_own_class(self, show) as own:
            return own.__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        with _by_own_class(self, show) as own:
            return own.__reduce_ex__(protocol)


class _Withholds:
    """The base that a parameter's class gets while its gradient is this rank's alone, and still to be averaged."""

    __slots__ = ()
    _reduced_of: ShardedParam

    @property
    def grad(self) -> Tensor | None:
        raise RuntimeError(
            f"the gradients of {self._reduced_of.name} and others have not been averaged over the ranks yet, since "
            "overlap=False, no_sync() or accumulate= puts that off: every rank would clip by a norm of its own. Call "
            "reduce_gradients() of what fastpar.zero.shard returned, on all ranks, before reading .grad, or give "
            "max_norm to shard"
        )

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        inner: Any = self
        param = self._reduced_of
        hide(param)
        param.drop()
        if value is None:
            param.optim_param.grad = None
        else:
            inner.grad = value

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with _by_own_class(self, withhold) as own:
            return own.__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        with _by_own_class(self, withhold) as own:
            return own.__reduce_ex__(protocol)


@cache
def _class_with(added: type, kind: Any) -> type:
    return type(kind.__name__, (added, kind), {"__slots__": (), "__module__": kind.__module__})


def show(param: ShardedParam) -> None:
    """From now on `.grad` of the parameter is that of its owner."""
    if unsent_gradient(param.optim_param) is None:  # which may be withheld from users
        return
    for parameter in param.model_params:
        inner: Any = parameter
        if isinstance(inner, (_ShowsReduced, _Withholds)):
            continue
        inner._reduced_of = param
        if not isinstance(inner, AbsentTensor):  # which looks by itself
            inner.__class__ = _class_with(_ShowsReduced, inner.__class__)


def withhold(param: ShardedParam) -> None:
    """From now on to read `.grad` of the parameter raises: its gradients have not been averaged."""
    hide(param)
    inner: Any = param.model_param
    if not isinstance(inner, AbsentTensor):
        inner._reduced_of = param
        inner.__class__ = _class_with(_Withholds, inner.__class__)


def class_below(parameter: Tensor) -> type:
    """The class of a parameter without what `show` and `withhold` add."""
    cls = type(parameter)
    return cls.__mro__[2] if issubclass(cls, (_ShowsReduced, _Withholds)) else cls


def set_class_below(parameter: Tensor, cls: type) -> None:
    """Give a parameter another class, with what `show` and `withhold` have added."""
    inner: Any = parameter
    is_added = isinstance(inner, (_ShowsReduced, _Withholds))
    inner.__class__ = _class_with(type(inner).__mro__[1], cls) if is_added else cls


def is_withheld(param: ShardedParam) -> bool:
    return isinstance(param.model_param, _Withholds)


def hide(param: ShardedParam) -> None:
    """The parameter has its own class, and its own `.grad`, again."""
    for parameter in (param.parameter, param.sharded):
        inner: Any = parameter
        if inner is not None and inner.__dict__.pop("_reduced_of", None) is not None:
            cls = type(inner)
            if issubclass(cls, (_ShowsReduced, _Withholds)):
                inner.__class__ = cls.__mro__[2]


# For loops over attributes of parameters whose memory may be away.
looking_at_absent = torch._C.DisableTorchFunctionSubclass

# What needs no values; tensors that it gives are absent, too.
_ALLOWED_ABSENT = {
    *("__get__", "__set__", "__delete__", "detach", "size", "stride", "dim", "ndimension", "numel", "nelement"),
    *("element_size", "storage_offset", "untyped_storage", "data_ptr", "is_contiguous", "get_device", "has_names"),
    *("is_floating_point", "is_complex", "requires_grad_", "retain_grad", "register_hook"),
    *("register_post_accumulate_grad_hook", "grad", "backward"),  # autograd gathers, and comes to them later
}
_GRADIENT = _OWN_GRAD.__get__


class AbsentTensor(Tensor):
    """A tensor without memory; the other classes are this one for parameters and DTensors."""

    __slots__ = ()
    _absent_text: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]  # of an operator without that of the overload
        if name not in _ALLOWED_ABSENT:
            tensors = _tensors_in([*args, *(kwargs or {}).values()])
            absent = next(x for x in tensors if isinstance(x, AbsentTensor))
            raise RuntimeError(f"{absent._absent_text} ({name} was called with it)")
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
        if func == _GRADIENT and found is None and "_reduced_of" in vars(args[0]):  # see "averaged gradients"
            found = args[0]._reduced_of.optim_param.grad
        if isinstance(found, Tensor) and found is not args[0] and func != _GRADIENT:
            mark_absent(found, args[0]._absent_text)
        return found

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"


class AbsentParameter(AbsentTensor, nn.Parameter):
    __slots__ = ()


class AbsentDTensor(AbsentTensor, DTensor):
    __slots__ = ()


_ABSENT_CLASSES: dict[type, type] = {nn.Parameter: AbsentParameter, Tensor: AbsentTensor, DTensor: AbsentDTensor}
_FROM_ABSENT = {absent: own for own, absent in _ABSENT_CLASSES.items()}


def mark_absent(x: Tensor, text: str) -> None:
    """From now on what reads x raises RuntimeError with this text. Tensors of classes of their own stay as they are."""
    absent = _ABSENT_CLASSES.get(type(x))
    if absent is not None:
        inner: Any = x
        inner.__class__, inner._absent_text = absent, text
        if absent is AbsentDTensor:
            mark_absent(inner._local_tensor, text)


def mark_present(x: Tensor) -> None:
    own = _FROM_ABSENT.get(type(x))
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


# What gives a parameter itself, or another way to look at it that is fastpar's or torch's own business.
_ALLOWED_AT_REST = {"__get__", "__set__", "__delete__", "requires_grad_", "retain_grad", "register_hook", "__repr__"}


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
            name, groups = args[0]._at_rest_name, args[0]._at_rest_groups
            release_at_rest(args[:1])
            try:
                return func(*args, **kwargs)
            finally:
                guard_at_rest({name: args[0]}, groups)
        with torch._C.DisableTorchFunctionSubclass():
            try:
                found = func(*args, **kwargs)
            except RuntimeError as error:
                if "got mixed torch.Tensor and DTensor" in str(error):
                    raise RuntimeError(_text(func, args, kwargs)) from error
                raise
        if not torch.is_grad_enabled():  # what is returned is the parameter, which has been written to in place
            return found
        results = found if isinstance(found, (list, tuple)) else [found]
        if func.__name__ not in _ALLOWED_AT_REST and any(isinstance(x, Tensor) and x.requires_grad for x in results):
            raise RuntimeError(_text(func, args, kwargs))
        return found


class AtRestParameter(AtRestTensor, nn.Parameter):
    __slots__ = ()


class AtRestDTensor(AtRestTensor, DTensor):
    __slots__ = ()
    _at_rest_groups: Groups

    def redistribute(self, *args: Any, **kwargs: Any) -> DTensor:
        """DTensor's, which `full_tensor` gathers with. DTensor takes the gradient of the whole for the same on all
        ranks, and keeps its rows; here each rank's loss has made one of its own, and the rows are those of the mean."""
        with torch._C.DisableTorchFunctionSubclass():
            found: DTensor = super().redistribute(*args, **kwargs)
            if found.requires_grad:
                found.register_hook(partial(_mean_of, self._at_rest_groups))
        return found


def _mean_of(groups: Groups, grad: Tensor) -> Tensor | None:
    if not isinstance(grad, DTensor) or not all(placement.is_replicate() for placement in grad.placements):
        return None  # the user says what of the sum each rank has: full_tensor(grad_placements=)
    mean = grad.to_local().clone(memory_format=torch.contiguous_format)
    for comm in groups.everyone():
        comm.all_reduce(mean, "avg", out=mean)
    return as_dtensor(groups.as_sum_of_parts(mean), grad._spec)


_AT_REST_CLASSES: dict[type, type] = {nn.Parameter: AtRestParameter, DTensor: AtRestDTensor}
_FROM_AT_REST = {guarded: own for own, guarded in _AT_REST_CLASSES.items()}


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


def guard_at_rest(parameters: Mapping[str, Tensor], groups: Groups) -> None:
    """From now on these, by name, say what would be wrong. Tensors of other classes stay as they are. `groups`: the
    ranks that gradients are averaged over."""
    for name, x in parameters.items():
        guarded = _AT_REST_CLASSES.get(class_below(x))
        if guarded is not None:
            inner: Any = x
            inner._at_rest_name, inner._at_rest_groups = name, groups.of(x)
            set_class_below(x, guarded)


def release_at_rest(parameters: Iterable[Tensor]) -> None:
    for x in parameters:
        own = _FROM_AT_REST.get(class_below(x))
        if own is not None:
            set_class_below(x, own)
            vars(x).pop("_at_rest_groups", None)  # which no copy is to have
