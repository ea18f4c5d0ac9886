"""A trainable parameter, what the optimizer has instead of it, its gradients, and which rank's were not finite; and the
classes that parameters have for a while, because of what their attributes would otherwise say.

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
run, gets its shard, too. What computes nothing that needs a gradient goes on as ever.

Note: averaged gradients. Between the end of a reduction and the next forward or step, `.grad` of a parameter that is
not its own optimizer parameter is that one's: one tensor, so what changes it changes what the optimizer takes. Where
ranks have rows it is a DTensor, of which torch computes norms with a collective: the norm of one process, on all ranks.
What autograd itself has put there (and was not sent yet) comes first. What has not been averaged yet, where a reduction
is deferred, is no gradient that anybody can clip: with overlap=False, and where `.grad` is not even this rank's sum
(stage 3, and 16 bits, which are summed in float32), reading it raises.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.utils._pytree import tree_leaves

from fastpar.comm import Communicator
from fastpar.optim._masters import follow, version_of, written
from fastpar.zero.groups import Groups, as_dtensor, local

_NAMES = 8  # in a report
_NOTE_BYTES = 1024


@dataclass(eq=False)
class ShardedParam:
    """A trainable parameter of the model, and the parameter that the optimizer has instead of it.

    `optim_param` may be the parameter itself; else it has this rank's rows, or another dtype (master weights), or both.
    `sharded` is what modules have outside of forward, where that is another one (stage 3).
    """

    name: str
    parameter: nn.Parameter
    optim_param: nn.Parameter
    spec: DTensorSpec | None = None  # of optim_param, where it is a DTensor
    reduce_dtype: torch.dtype = torch.float32  # what gradients travel in
    model_rows: Tensor | None = field(default=None, repr=False)  # the parameter's, which optim_param is rounded to
    unreduced_sum: Tensor | None = field(default=None, repr=False)  # in float32: see "accumulation" in reducer.py
    set_aside: Tensor | None = field(default=None, repr=False)  # optim_param's gradient, while a pass is reduced
    is_traced: bool = False  # whether `traces` are kept: norms of what this rank has sent, which a NaN shows in
    traces: Sequence[Tensor] = field(default=(), repr=False)  # on CPUs only where they are not finite
    sharded: nn.Parameter | None = field(default=None, repr=False)
    version: int = field(default=0, repr=False)  # of model_param's memory, when it last was optim_param rounded
    is_behind: bool = field(default=False, repr=False)  # optim_param, of writes that were seen while it was in a file
    # The parameter's rows where these are not model_rows, and what they have had: see quantized_gather.py
    quantized_rows: Tensor | None = field(default=None, repr=False)
    dequantized_rows: Callable[[], Tensor] | None = field(default=None, repr=False)

    @property
    def model_params(self) -> list[nn.Parameter]:
        """Parameters that users may have of it, beside optim_param."""
        return [x for x in (self.parameter, self.sharded) if x is not None and x is not self.optim_param]

    @property
    def model_param(self) -> nn.Parameter:
        """The parameter that the model has outside of forward."""
        return self.parameter if self.sharded is None else self.sharded

    @property
    def unsent(self) -> Tensor | None:
        """The gradient that autograd has put into the parameter."""
        return unsent_gradient(self.parameter)

    def note_version(self) -> None:
        """The parameter is its owner, rounded."""
        self.version = version_of(self.model_param)

    @property
    def is_in_place(self) -> bool:
        """Whether the target is the owner's own memory: exact rows of what is gathered as codes."""
        if self.quantized_rows is None or self.model_rows is None:
            return False
        return self.model_rows.data_ptr() == local(self.optim_param).data_ptr()

    @property
    def is_output(self) -> bool:
        """Whether an update can round to the parameter in its own pass, which runs where the masters are. A master of
        the parameter's dtype is copied instead, and so is one on another device."""
        rows = self.model_rows
        return (
            rows is not None and rows.dtype != self.optim_param.dtype and rows.device == local(self.optim_param).device
        )

    @property
    def is_overwritten(self) -> bool:
        """Whether somebody has written to a parameter whose owner is a copy."""
        return self.model_rows is not None and version_of(self.model_param) != self.version

    def take_values(self) -> None:
        """Let a copy follow what was written to its parameter; one in a file does when an update has read it."""
        self.is_behind = True
        follow_writes([self])
        self.note_version()

    def drop(self) -> None:
        """Forget what was not sent."""
        self.unreduced_sum = None
        drop_unsent(self.parameter)

    @property
    def has_own_term(self) -> bool:
        """Whether the parameter at rest has a gradient that the owner lacks: see `take_own_term`."""
        sharded = self.sharded
        return sharded is not None and sharded is not self.optim_param and unsent_gradient(sharded) is not None

    def take_own_term(self) -> None:
        """Add to the owner what a term of the loss that was made of the parameter at rest has as gradient."""
        if self.has_own_term:
            term: Any = self.sharded
            grad: Any = unsent_gradient(term)
            drop_unsent(term)
            self.add_gradient(local(grad).to(self.optim_param.dtype))

    def add_gradient(self, mine: Tensor) -> None:
        """Give optim_param this rank's part of a mean, a tensor of its own: it is its gradient, or is added to the one
        that is there."""
        optim_param: Any = self.optim_param
        # Of another dtype or device, where it is a master weight
        like = optim_param._local_tensor if isinstance(optim_param, DTensor) else optim_param
        if mine.shape != like.shape:  # a scalar as one row
            mine = mine.view(like.shape)
        if optim_param.grad is not None:
            local(optim_param.grad).add_(mine.to(like.device))
            return
        is_alike = mine.dtype == like.dtype and mine.device == like.device
        optim_param.grad = as_dtensor(mine if is_alike else mine.to(like.device, like.dtype), self.spec)

    def keep_sum(self) -> None:
        """Move a gradient of 16 bits to `unreduced_sum`, as another is going to be added to it."""
        grad = self.unsent
        if grad is None or grad.dtype.itemsize >= 4 or hasattr(self.parameter, "pipeline_share"):
            return
        rows = local(grad)
        if self.unreduced_sum is None:
            self.unreduced_sum = rows.float()
        else:
            self.unreduced_sum.add_(rows)
        drop_unsent(self.parameter)

    def take(self) -> Tensor | None:
        """The gradient that has been summed and not been sent; forgotten here."""
        if self.unreduced_sum is not None:
            self.keep_sum()
        taken = self.unreduced_sum
        unsent = self.unsent
        if taken is None and unsent is not None:
            taken = local(unsent)
        self.drop()
        return taken


def follow_writes(params: Iterable[ShardedParam]) -> bool:
    """Let copies that are in memory follow what was written to their parameters, counted by torch or not: elements that
    are not the copy's own, rounded. Whether there are any; of other copies `is_behind` says that they are to follow."""
    found = [(param, local(param.optim_param), _seen(param)) for param in params if param.model_rows is not None]
    held = []
    for each in found:
        param, mine, seen = each
        if all(x.untyped_storage().nbytes() > 0 for x in (mine, seen)):
            param.is_behind = False
            held.append(each)
    shown = [mine if p.dequantized_rows is None else p.dequantized_rows().to(mine.device) for p, mine, _ in held]
    is_any = False
    for index in written(shown, [seen for _, _, seen in held]):
        param, mine, seen = held[index]
        is_any |= follow(mine, seen, None if param.dequantized_rows is None else shown[index])
        if param.model_rows is not None and param.quantized_rows is not None and not param.is_in_place:
            param.model_rows.copy_(mine)  # what is quantised next
    return is_any


def _seen(param: ShardedParam) -> Any:
    """The rows that users write to."""
    return param.model_rows if param.quantized_rows is None else param.quantized_rows


def keep_traces(params: Sequence[ShardedParam], flat: Tensor, pieces: Callable[[], Iterable[Sequence[Tensor]]]) -> None:
    """Keep what `name_nonfinite` needs about gradients that this rank sends: `flat`, and the pieces of each param."""
    if not params[0].is_traced or (flat.device.type == "cpu" and math.isfinite(flat.sum().item())):
        return
    for param, of_param in zip(params, pieces(), strict=False):  # a bucket's flag comes last
        some = [x for x in of_param if x.numel() > 0]
        param.traces = torch._foreach_norm(some, math.inf) if some else ()


def name_nonfinite(params: Sequence[ShardedParam], groups: Groups) -> str:
    """Which gradients are not finite, and on which ranks they became so before they were averaged: one text, the same
    on all ranks that average, and on all of the mesh where it is known. Collective."""
    flags = [any(not trace.isfinite() for trace in param.traces) for param in params]
    for param in params:
        param.traces = ()
    flags += [
        param.optim_param.grad is not None and not local(param.optim_param.grad).isfinite().all() for param in params
    ]
    rows = torch.tensor([[dist.get_rank() if dist.is_initialized() else 0, *flags]], dtype=torch.int32)
    for comm in groups.everyone():
        rows = comm.all_gather(rows)
    ranks, sources, results = rows[:, 0].tolist(), rows[:, 1 : len(params) + 1], rows[:, len(params) + 1 :].any(0)
    found = []
    for index, param in enumerate(params):
        if results[index]:
            where = [str(rank) for rank, is_source in zip(ranks, sources[:, index].tolist(), strict=True) if is_source]
            found.append(f"{param.name} (rank {', '.join(where)})" if where else param.name)
    for comm in groups.others():
        found = union(found, comm)
    return f"gradients that are not finite: {', '.join(found[:_NAMES])}" + (", ..." if len(found) > _NAMES else "")


def union(lines: Sequence[str], comm: Communicator) -> list[str]:
    """The first lines of all ranks, each once. Collective: one all-gather of 1 KB a rank."""
    note = "\n".join(lines[: _NAMES + 1]).encode()[:_NOTE_BYTES].ljust(_NOTE_BYTES, b"\0")
    notes = comm.all_gather(torch.tensor(list(note), dtype=torch.uint8)[None])
    texts = [bytes(each).rstrip(b"\0").decode(errors="ignore") for each in notes.tolist()]
    return list(dict.fromkeys(line for text in texts for line in text.split("\n") if line))


def take_values(param: ShardedParam, home: Tensor, value: Tensor) -> None:
    """Give a parameter new values, and its master weights where it has some."""
    with torch.no_grad():
        home.copy_(value)
        if param.model_rows is not None:
            param.take_values()


def check_alike(name: str, home: Tensor, found: Tensor) -> None:
    for what, was, now in (
        ("dtype", home.dtype, found.dtype),
        ("shape", tuple(home.shape), tuple(found.shape)),
        ("device", home.device, found.device),
    ):
        if was != now:
            raise RuntimeError(
                f"{name} had {what} {was} in fastpar.zero.shard(...) and has {now} now: the optimizer would go on with "
                "the old parameter. Convert and move the model before shard (precision= gives dtypes to shard itself)"
            )


def places_of(model: nn.Module, names: Sequence[str]) -> dict[str, list[tuple[nn.Module, str]]]:
    """Places where parameters are registered: name -> modules and what they call it. Tied ones have several."""
    named = dict(model.named_parameters())  # get_parameter trips over properties with a parameter's name
    by_parameter = {id(named[name]): name for name in names}
    found: dict[str, list[tuple[nn.Module, str]]] = {name: [] for name in names}
    for module in model.modules():
        for attribute, parameter in module._parameters.items():
            name = by_parameter.get(id(parameter))
            if name is not None:
                found[name].append((module, attribute))
    return found


# ---- classes for a while

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
_GRADIENT = cast("Any", Tensor).grad.__get__


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
            name = args[0]._at_rest_name
            release_at_rest(args[:1])
            try:
                return func(*args, **kwargs)
            finally:
                guard_at_rest({name: args[0]})
        with torch._C.DisableTorchFunctionSubclass():
            try:
                found = func(*args, **kwargs)
            except RuntimeError as error:
                if "got mixed torch.Tensor and DTensor" in str(error):
                    raise RuntimeError(_text(func, args, kwargs)) from error
                raise
        results = found if isinstance(found, (list, tuple)) else [found]
        if func.__name__ not in _ALLOWED_AT_REST and any(isinstance(x, Tensor) and x.requires_grad for x in results):
            raise RuntimeError(_text(func, args, kwargs))
        return found


class AtRestParameter(AtRestTensor, nn.Parameter):
    __slots__ = ()


class AtRestDTensor(AtRestTensor, DTensor):
    __slots__ = ()


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


def guard_at_rest(parameters: Mapping[str, Tensor]) -> None:
    """From now on these, by name, say what would be wrong. Tensors of other classes stay as they are."""
    for name, x in parameters.items():
        guarded = _AT_REST_CLASSES.get(class_below(x))
        if guarded is not None:
            inner: Any = x
            inner._at_rest_name = name
            set_class_below(x, guarded)


def release_at_rest(parameters: Iterable[Tensor]) -> None:
    for x in parameters:
        own = _FROM_AT_REST.get(class_below(x))
        if own is not None:
            set_class_below(x, own)
