"""The changes that are made to a model, each recorded, so that they can be explained and undone."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from fastpar.tensor import Adoption, ParameterLayout, full_parameter, layout_of
from fastpar.tensor.parameter import current

_ABSENT = object()


@dataclass
class Explanation:
    """The report of `explain`: one row per module that fastpar changed; `print` shows them as a table."""

    rows: list[dict[str, str]] = field(default_factory=list)

    def add(self, module: str, style: str, stored: str, note: str = "") -> None:
        self.rows.append({"module": module, "style": style, "stored": stored, "note": note})

    def sort(self, paths: Iterable[str]) -> None:
        """Bring the rows into the order of these modules."""
        places = {path: place for place, path in enumerate(paths)}
        self.rows.sort(key=lambda row: places.get(row["module"], len(places)))

    def __str__(self) -> str:
        if not self.rows:
            return "no module was changed"
        columns = list(self.rows[0])
        widths = {c: max(len(c), *(len(row[c]) for row in self.rows)) for c in columns}
        lines = ["  ".join(c.ljust(widths[c]) for c in columns), "  ".join("-" * widths[c] for c in columns)]
        lines += ["  ".join(row[c].ljust(widths[c]) for c in columns).rstrip() for row in self.rows]
        return "\n".join(lines)


class Changes:
    """The record of one model: modules that became parallel layers, hooks, attributes, parameters."""

    def __init__(self) -> None:
        self.explanation = Explanation()
        self._steps: list[Adoption | tuple[nn.Module, str, Any]] = []  # adoptions, and attributes as they were
        self._handles: list[Any] = []
        self._parameters: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # id(original) -> (original, parallel)
        self._is_of_shards = False

    def __deepcopy__(self, memo: Any) -> Changes:
        """The changes of a copied model, which has shards of parameters that ZeRO's stage 3 has freed."""
        made = memo[id(self)] = Changes()
        there = {key: pair for key, pair in self._parameters.items() if not _is_freed(pair[1])}
        made._is_of_shards = self._is_of_shards or len(there) < len(self._parameters)
        made.explanation, made._steps, made._handles, made._parameters = copy.deepcopy(
            (self.explanation, self._steps, self._handles, there), memo
        )
        return made

    def adopted(self, adoption: Adoption) -> None:
        """Record a module that has become another."""
        self._steps.append(adoption)

    def hooked(self, *handles: Any) -> None:
        """Record hooks by their handles."""
        self._handles.extend(handles)

    def set(self, module: nn.Module, name: str, value: Any) -> None:
        """Set an attribute of a module."""
        is_property = isinstance(getattr(type(module), name, None), property)
        before = getattr(module, name) if is_property else vars(module).get(name, _ABSENT)
        self._steps.append((module, name, before))
        setattr(module, name, value)

    def parameter(self, full: nn.Parameter, layout: ParameterLayout) -> nn.Parameter:
        """The parallel parameter for an original one; a tied parameter is made once and shared again."""
        if id(full) not in self._parameters:
            split = layout.parameter(full, requires_grad=full.requires_grad)
            if full.grad_dtype != full.dtype:
                split.grad_dtype = full.grad_dtype
            self._parameters[id(full)] = (full, split)
        parallel = self._parameters[id(full)][1]
        made = layout_of(parallel)
        assert made is not None
        if made.cut != layout.cut:
            raise ValueError(
                f"a parameter of shape {tuple(full.shape)} is shared by modules that the plan splits differently "
                f"({made.kind} as {made.placements}, and {layout.kind} as {layout.placements})"
            )
        return parallel

    def layout_made(self, full: nn.Parameter | None) -> ParameterLayout | None:
        """The layout of the parallel parameter, where an original one has become one already."""
        found = self._parameters.get(id(full))
        return None if found is None else layout_of(found[1])

    def complete(self) -> None:
        """Say that all is made: what is set on modules from now on is the user's. Gives the memory of the original
        parameters back, which refuse to be used."""
        for change in self._steps:
            if isinstance(change, Adoption):
                change.settle()
        for original, _ in self._parameters.values():
            mark_replaced(original)

    def undo(self, *, gather: bool) -> None:
        """Make the model what it was; `gather` brings the trained values along (one all-gather per shard)."""
        if self._is_of_shards:
            raise ValueError(
                "this is a copy of a model that ZeRO's stage 3 had sharded, and has shards for good: unparallelize the "
                "model itself, after detach() of what fastpar.zero.shard returned"
            )
        for handle in self._handles:
            handle.remove()
        full = {}
        if gather:
            for key, (original, parallel) in self._parameters.items():  # in one order on all ranks
                now = current(parallel)
                full[key] = (original, full_parameter(now), now.requires_grad)
                mark_in_place(original)
            with torch.no_grad():
                for original, value, is_trained in full.values():
                    original.data = value
                    original.requires_grad_(is_trained)
        # The last first: a module adopted twice has its own class back at the end, and an adoption gives back the
        # attributes that the module had then, among them those that had been set before.
        for change in reversed(self._steps):
            if isinstance(change, Adoption):
                change.undo()
                continue
            module, name, value = change
            if value is _ABSENT:
                delattr(module, name)
            else:
                setattr(module, name, value)


def _is_freed(parameter: Any) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        memory = getattr(parameter, "_local_tensor", parameter)
        return bool(memory.numel() > 0 and memory.untyped_storage().nbytes() == 0)


# ---- parameters whose place a parallel one has taken -----------------------------------------------------------------
#
# An optimizer that was built before `fastpar.parallelize` holds the model's parameters of then. They get no gradients
# any more, so it would train nothing, without a word. torch.utils.swap_tensors cannot make a plain parameter and a
# DTensor change places, as their objects differ in layout. So a replaced parameter refuses to be asked for its
# gradient, which is what optimizers and gradient clipping begin with, and to be computed with.

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
