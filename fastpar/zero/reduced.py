"""Gradients that have been averaged, as `.grad` of the model's own parameters.

    slot.owner                      rows of a parameter, or a wider copy, which has the averaged gradient
    model.parameters()              what users clip: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

Between the end of a reduction and the next forward or step, `.grad` of a parameter that is not its own owner is that of
the owner: one tensor, so what changes it changes what the optimizer takes. Where ranks have rows it is a DTensor, of
which torch computes norms with a collective: the norm of one process, on all ranks.

What has not been averaged yet, where a reduction is put off, is no gradient that anybody can clip: with overlap=False,
and where `.grad` is not even this rank's sum (stage 3, and 16 bits, which are summed in float32), reading it raises.

Note: by class. The parameter gets another class meanwhile, whose `grad` is a property; autograd and other code in C++
do not see it. What autograd itself has put there (and was not sent yet) comes first. Forward runs with the own class:
torch asks a class that it does not know at every function call, and torch.compile would compile for both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor
from torch.distributed.tensor import DTensor

from fastpar.zero.absent import AbsentTensor, looking_at_absent
from fastpar.zero.groups import as_dtensor, local

if TYPE_CHECKING:
    from fastpar.zero.slots import Slot

_OWN = cast("Any", Tensor).grad  # torch's own attribute, which autograd adds to


def unsent_gradient(parameter: Tensor) -> Tensor | None:
    """What autograd has put into `.grad` of this rank's parameter."""
    found: Tensor | None
    if isinstance(parameter, AbsentTensor):
        with looking_at_absent():
            found = _OWN.__get__(parameter)
    else:
        found = _OWN.__get__(parameter)
    return found


def drop_unsent(parameter: Tensor) -> None:
    _OWN.__set__(parameter, None)


@contextmanager
def _by_own_class(parameter: Any, again: Callable[[Slot], None]) -> Iterator[Any]:
    """The parameter with its own class in the block: what is copied or saved has that one."""
    slot = parameter._reduced_of
    hide(slot)
    try:
        yield parameter
    finally:
        again(slot)


class _ShowsReduced:
    """What is added to the class of a parameter while it shows its owner's gradient."""

    __slots__ = ()
    _reduced_of: Slot

    @property
    def grad(self) -> Tensor | None:
        inner: Any = self
        found = unsent_gradient(inner)
        return self._reduced_of.owner.grad if found is None else found

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        inner: Any = self
        slot = self._reduced_of
        if value is None:
            drop_unsent(inner)
            slot.summed = slot.owner.grad = None
            return
        owner: Any = slot.owner
        if isinstance(value, DTensor) != (slot.spec is not None) or local(value).shape != local(owner).shape:
            raise ValueError(
                f"{slot.name}.grad must be a tensor like the averaged gradient that is there, a part of it on every "
                f"rank, got a {type(value).__name__} of shape {tuple(value.shape)}: change it in place, or assign what "
                "was computed from it"
            )
        mine = local(value).to(owner.device, owner.dtype)
        owner.grad = as_dtensor(mine, slot.spec)

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
    """What is added to the class of a parameter whose gradient is this rank's alone, and is still to be averaged."""

    __slots__ = ()
    _reduced_of: Slot

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
        slot = self._reduced_of
        hide(slot)
        slot.drop()
        if value is None:
            slot.owner.grad = None
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


def show(slot: Slot) -> None:
    """From now on `.grad` of the parameter is that of its owner."""
    if slot.owner.grad is None:
        return
    for parameter in slot.faces:
        inner: Any = parameter
        if isinstance(inner, (_ShowsReduced, _Withholds)):
            continue
        inner._reduced_of = slot
        if not isinstance(inner, AbsentTensor):  # which looks by itself
            inner.__class__ = _class_with(_ShowsReduced, inner.__class__)


def withhold(slot: Slot) -> None:
    """From now on to read `.grad` of the parameter raises: its gradients have not been averaged."""
    hide(slot)
    inner: Any = slot.face
    if not isinstance(inner, AbsentTensor):
        inner._reduced_of = slot
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


def is_withheld(slot: Slot) -> bool:
    return isinstance(slot.face, _Withholds)


def hide(slot: Slot) -> None:
    """The parameter has its own class, and its own `.grad`, again."""
    for parameter in {*slot.faces, slot.face}:
        inner: Any = parameter
        if isinstance(inner, (_ShowsReduced, _Withholds)):
            inner.__class__ = type(inner).__mro__[2]
        vars(inner).pop("_reduced_of", None)
