"""Calls of a unit's modules: their places in forward, and the moments at which their backward begins and ends.

Note: moments in backward. The backward of a call begins when the gradient of one of its outputs is there: a hook on the
tensors. It ends when the gradients of all its inputs are: a hook on the tensor where there is one input that needs a
gradient, which costs least and lets the module change it in place; for several inputs an identity that all of them go
through, since the gradient of a tensor that other layers use too (what a decoder's layers attend to) is complete much
later than this call's part in it. (Not for what lies in a list or a dict, which a module may write to: there the hook
is on the tensors.) A call without such inputs ends with the backward pass.

Note: results. They may be in what a module returns, in attributes of it and of the modules within (a balance loss), and
in what it was given. Where there is none, somebody may have it in another way, or there is none: the unit stays whole
until backward has ended.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from fastpar.zero.gathered import Unit

_DEPTH = 3  # of objects in objects
_OF_MODULES = frozenset(vars(nn.Module()))


class Call:
    """One call of a module of a unit, with gradients. It lives as long as the graph.

    begin, end   what to do when its backward begins and ends; both may come more than once, and `end` never
    previous     the call before it in the same forward pass
    number       of the forward pass
    """

    __slots__ = ("__weakref__", "_begin", "_end", "_previous", "has_inputs", "number", "unit")

    def __init__(
        self,
        unit: Unit,
        number: int,
        previous: Call | None,
        begin: Callable[[Call], None],
        end: Callable[[Call], None],
    ) -> None:
        self.unit, self.number = unit, number
        self._previous = None if previous is None else weakref.ref(previous)
        self._begin, self._end = begin, end
        self.has_inputs = False  # that need gradients

    @property
    def previous(self) -> Call | None:
        """None too where its graph is gone."""
        return None if self._previous is None else self._previous()

    def watch_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """See to it that `end` is called. Returns changed arguments, or None: they stay as they are."""
        leaves, structure = tree_flatten((args, kwargs))
        found = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        self.has_inputs = bool(found)
        if not found:
            return None
        tensors = {id(leaves[i]): leaves[i] for i in found}
        if len(tensors) == 1:
            leaves[found[0]].register_hook(self._ended)
            return None
        if any(_is_mutable(x) for x in (*args, *kwargs.values())):  # the module may write to it, not to a copy of it
            torch.autograd.graph.register_multi_grad_hook(list(tensors.values()), self._ended)
            return None
        for i, x in zip(found, _Boundary.apply(self, *(leaves[i] for i in found)), strict=True):
            leaves[i] = x
        changed: tuple[Any, Any] = tree_unflatten(leaves, structure)
        return changed

    def watch_outputs(self, *outputs: Any) -> bool:
        """See to it that `begin` is called. Returns whether anything was found that has a gradient."""
        is_any = False
        for x in (x for output in outputs for x in tensors_in(output)):
            if x.requires_grad and x.grad_fn is not None:
                is_any = True
                x.register_hook(self._began)
                if x._base is not None and x._base.grad_fn is not None:  # in-place changes of views replace their node
                    x._base.grad_fn.register_prehook(self._began)
        return is_any

    def _began(self, _: Any) -> None:
        self._begin(self)

    def _ended(self, _: Any) -> None:
        self._end(self)


class _Boundary(torch.autograd.Function):
    """Identity, whose backward runs when the gradients of all tensors are there."""

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.call._ended(None)
        return (None, *grads)


class Order:
    """The units in the order in which the last complete forward pass ran them; before the first, as given."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._expected, self._seen, self._position = list(units), list[Unit](), 0

    def begin(self) -> None:
        """A forward pass begins."""
        self._seen, self._position = [], 0

    def end(self) -> None:
        """It has ended."""
        if self._seen:
            self._expected = self._seen

    def next_after(self, unit: Unit) -> Unit | None:
        """The unit that probably runs after this one, which is running now; None where there is none."""
        self._seen.append(unit)
        rest = self._expected[self._position :]
        if unit not in rest:
            return None
        self._position += rest.index(unit) + 1
        return self._expected[self._position] if self._position < len(self._expected) else None


def tensors_in(value: Any, depth: int = _DEPTH) -> Iterator[Tensor]:
    """The tensors in what a module returned: in containers that torch knows, dataclasses, and attributes of objects."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif depth > 0 and not isinstance(leaf, (type, nn.Module)):
            names = [field.name for field in dataclasses.fields(leaf)] if dataclasses.is_dataclass(leaf) else []
            held = [getattr(leaf, name) for name in names] or list(getattr(leaf, "__dict__", {}).values())
            for x in held:
                yield from tensors_in(x, depth - 1)


def results_in(modules: Sequence[nn.Module]) -> list[Any]:
    """What modules may have put results into: attributes of their own."""
    return [
        value
        for module in modules
        for name, value in vars(module).items()
        if name not in _OF_MODULES and isinstance(value, (Tensor, list, tuple, dict))
    ]


def _is_mutable(value: Any) -> bool:
    """Whether a module may write to an argument that has tensors in it."""
    if isinstance(value, tuple):
        return any(map(_is_mutable, value))
    return not isinstance(value, Tensor) and any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))
