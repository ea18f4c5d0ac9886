"""Running a module for trial: with what, what of it stays, and leaving what it draws from and keeps as it was."""

from __future__ import annotations

import contextlib
import functools
import gc
import random
import sys
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from fastpar.comm import Communicator
from fastpar.comm.agree import Agreement
from fastpar.contracts.agreement import tensor_checksum
from fastpar.contracts.containers import CONTAINERS, containers_in, items_of, put_back

_STATES = frozenset(vars(nn.Module()))  # of modules themselves, not of their code


class Example(NamedTuple):
    """What a model can be called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @staticmethod
    def of(inputs: Mapping[str, Any] | Sequence[Any] | None, op: str, *comms: Communicator) -> Example | None:
        """From what a user has given to `op`. Collective: ValueError on all ranks unless they have given the same, as
        trials of other inputs might find other things."""
        tensors = [x.detach().cpu() for x in tree_leaves(inputs) if isinstance(x, Tensor)]
        sums = [zlib.crc32(f"{tuple(x.shape)} {x.dtype} {tensor_checksum(x)}".encode()) for x in tensors]
        names = ("the number of tensors in example_inputs", "the checksum of example_inputs")
        for comm in comms:
            Agreement(op, names, [len(sums), zlib.crc32(str(sums).encode())]).gather(comm)
        if inputs is None:
            return None
        return Example((), dict(inputs)) if isinstance(inputs, Mapping) else Example(tuple(inputs), {})

    def copy(self) -> Example:
        """For one run, which may write to what it is given."""
        return Example(*tree_map_only(Tensor, lambda x: x.detach().clone(), tuple(self)))


@contextlib.contextmanager
def same_generators() -> Iterator[Callable[[], bool]]:
    """Leave the default generators of torch, Python and numpy as they are; yields whether they have been used."""
    numpy: Any = sys.modules.get("numpy")
    python, arrays = random.getstate(), None if numpy is None else numpy.random.get_state()
    with torch.random.fork_rng(devices=[]):
        before = torch.get_rng_state()

        def has_drawn() -> bool:
            same = torch.equal(before, torch.get_rng_state()) and random.getstate() == python
            return not (same and (numpy is None or _same_state(numpy.random.get_state(), arrays)))

        try:
            yield has_drawn
        finally:
            random.setstate(python)
            if numpy is not None:
                numpy.random.set_state(arrays)


def _same_state(state: Any, before: Any) -> bool:
    return bool(state[2] == before[2] and (state[1] == before[1]).all())


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """What a module's own code holds beside parameters, buffers and modules."""
    return {k: v for k, v in vars(module).items() if k not in _STATES and not k.startswith("_fastpar")}


@contextlib.contextmanager
def attributes_as_they_were(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Undo what code has done to the plain data and tensors that modules hold, and to containers of them; yields what
    does so at once.

    Where it has put modules, parameters, buffers or hooks somewhere, data without tensors is left: a mark that hooks
    are installed says what has happened.
    """
    before = [(module, own_attributes(module), _structure(module)) for module in model.modules()]
    held = containers_in(value for _, own, _ in before for value in own.values())
    contents = [(container, items_of(container)) for container in held]

    def rewind() -> None:
        is_same = all(_structure(module) == structure for module, _, structure in before)
        for module, own, _ in before:
            now = own_attributes(module)
            for key in now.keys() | own.keys() if is_same else now.keys():
                is_undone = isinstance(now.get(key), Tensor) or (is_same and _is_data(now.get(key), own.get(key)))
                if not is_undone or (key in now and key in own and now[key] is own[key]):
                    continue
                module.__dict__.pop(key, None)
                if key in own:
                    module.__dict__[key] = own[key]
        for container, items in contents:
            if is_same or _has_tensors(container):
                put_back(container, items)

    try:
        yield rewind
    finally:
        rewind()


@contextlib.contextmanager
def collections_as_they_were(model: nn.Module) -> Iterator[None]:
    """Undo what has been put into containers outside of the modules: by other people's hooks on them, into what these
    enclose, are bound to, or name among globals; and by modules, into objects that they hold."""
    hooks = [h for m in model.modules() for h in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]
    objects = [value for module in model.modules() for value in own_attributes(module).values()]
    values = [x for hook in hooks for x in _reached_by(hook)]
    values += [x for value in objects if not isinstance(value, nn.Module) for x in _attributes_of(value)]
    contents = [(container, items_of(container)) for container in containers_in(values)]
    try:
        yield
    finally:
        for container, items in contents:
            if _has_tensors(container):
                put_back(container, items)


def _reached_by(function: Any) -> Iterator[Any]:
    if isinstance(function, functools.partial):
        yield from (*function.args, *function.keywords.values(), *_reached_by(function.func))
    elif isinstance(function, MethodType):
        yield from (*_attributes_of(function.__self__), *_reached_by(function.__func__))
    elif isinstance(function, FunctionType) and not _is_internal(function):
        yield from (x for cell in function.__closure__ or () if (x := _content(cell)) is not None)
        yield from (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        yield from (function.__globals__[name] for name in function.__code__.co_names if name in function.__globals__)
    else:
        yield from _attributes_of(function)


def _attributes_of(value: Any) -> list[Any]:
    is_plain = isinstance(value, (Tensor, type, ModuleType, FunctionType)) or _is_internal(type(value))
    return [] if is_plain else list(getattr(value, "__dict__", {}).values())


def _is_internal(found: Any) -> bool:
    """Whether it is code of torch or of this package, such as fully_shard's, which have lists for themselves."""
    return str(getattr(found, "__module__", None)).partition(".")[0] in ("torch", "fastpar")


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


@contextlib.contextmanager
def buffers_as_they_were(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Undo what code has written to buffers; yields what does so at once."""
    held = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]

    @torch.no_grad()
    def rewind() -> None:
        for buffer, value in held:
            if buffer.shape != value.shape:  # as of quantization's observers, which learn how many channels there are
                buffer.resize_(value.shape)
            if not torch.equal(buffer, value):  # else autograd, which may have saved it, would find it changed
                buffer.copy_(value)

    try:
        yield rewind
    finally:
        rewind()


def _is_data(*values: Any) -> bool:
    """Whether one of an attribute's values, before and after, is a number, a text, nothing or a container."""
    plain = (bool, int, float, complex, str, tuple, *CONTAINERS)
    return any(value is None or isinstance(value, plain) for value in values)


def _structure(module: nn.Module) -> list[tuple[str, ...]]:
    """The keys of modules, tensors and hooks."""
    return [
        tuple(map(str, value)) for name, value in vars(module).items() if name in _STATES and isinstance(value, dict)
    ]


def _has_tensors(container: Any) -> bool:
    values = container.values() if isinstance(container, dict) else container
    return any(isinstance(value, Tensor) for value in values)


class MadeTensors(TorchFunctionMode):
    """Notes the tensors that are made while it is entered: where there are gradients, those with a history.

    lists   remember which lists there are, for `take_back`
    """

    def __init__(self, *, lists: bool = False) -> None:
        super().__init__()
        self._made: list[Any] = []
        self._lists = {id(x) for x in gc.get_objects() if type(x) is list} if lists else set()

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in (result,) if isinstance(result, Tensor) else tree_leaves(result):
            if isinstance(x, Tensor) and (x.grad_fn is not None or not torch.is_grad_enabled()):
                self._made.append(weakref.ref(x))
        return result

    def left(self) -> list[Tensor]:
        """Those that are alive, once nothing holds what the code has returned: it has put them somewhere."""
        if any(made() is not None for made in self._made):
            gc.collect()  # what is in cycles holds nothing
        return [x for made in self._made if (x := made()) is not None]

    def take_back(self) -> list[tuple[list[Any], list[Any]]]:
        """Take those that are left out of lists that were there before, of which a loss may be the sum when they are
        next looked at; a new list may be what a cache has. Returns these lists, and what was in them before.

        For runs with gradients alone: without them fully_shard's lists of what they have gathered count as well.
        """
        left = self.left()
        ids = {id(x) for x in left}
        holders = [x for x in gc.get_referrers(*left) if type(x) is list and id(x) in self._lists] if left else []
        before = [(holder, [x for x in holder if id(x) not in ids]) for holder in holders]
        put_back_lists(before)
        return before


def put_back_lists(before: list[tuple[list[Any], list[Any]]]) -> None:
    """Have in these lists what was in them before."""
    for holder, items in before:
        holder[:] = items
