"""Tensors that code makes while it runs, and those of them that it has left somewhere."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves


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
        next looked at; a new list may be what a cache has. Returns these lists, and what was in them before."""
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
