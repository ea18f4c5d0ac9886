"""Forwards whose backward may run layers again, for recomputation that knows of no placement.

Note: recomputation by others
    `fastpar.apply_recompute` brings the placement of a forward back (`ContextRegion.capture`). torch.utils.checkpoint
    runs a layer again in backward, and nobody can tell of which forward that is. It need not be told where all forwards
    that are still to be differentiated have the same layout and documents; else it is an error.

A forward is kept in mind by its autograd graph, which holds a token while it lives. A reentrant checkpoint makes no
graph, so that its forwards count until they have been run again.
"""

from __future__ import annotations

import sys
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction

_KEY = "fastpar_context_forward"
_REENTRANT = CheckpointFunction.forward.__code__


class _GraphToken:
    """Lives as long as the graphs of a placement's forwards."""

    __slots__ = ("__weakref__",)


@dataclass
class _PendingForward:
    """Forwards with one placement; `token` is None where no graph tells when they are over."""

    placement: Any
    token: weakref.ref[_GraphToken] | None
    is_rerun: bool = False

    @property
    def is_over(self) -> bool:
        return self.token is not None and self.token() is None


class PendingForwards:
    """Of one region; placements are compared by their values."""

    def __init__(self) -> None:
        self._items: list[_PendingForward] = []

    def note(self, placement: Any, out: Tensor) -> None:
        """A forward has attended with `placement`."""
        if out.grad_fn is None and not _in_reentrant_checkpoint():
            return
        self._items = [
            item for item in self._items if not (item.is_over or (item.is_rerun and item.placement != placement))
        ]
        has_graph = out.grad_fn is not None
        found = next((x for x in self._items if x.placement == placement and (x.token is not None) == has_graph), None)
        token = found.token() if found is not None and found.token is not None else None
        if found is None:
            token = _GraphToken() if has_graph else None
            found = _PendingForward(placement, None if token is None else weakref.ref(token))
            self._items.append(found)
        found.is_rerun = False
        if out.grad_fn is not None:
            metadata: Any = out.grad_fn.metadata  # a dict, which torch annotates as a method
            metadata[_KEY] = token

    def check(self, placement: Any) -> None:
        """A layer is run again in backward, and would attend with `placement`.

        Raises RuntimeError where that may be another than the forward's."""
        open_ones = [item for item in self._items if not item.is_over]
        if any(item.placement != placement for item in open_ones):
            self._items = []
            raise RuntimeError(
                "a layer is run again in backward (torch.utils.checkpoint), and there have been forwards of batches "
                "with other documents or lengths since its own, or before: run backward after each forward, before "
                "the next fastpar.context.shard, or use fastpar.apply_recompute (recompute= of a pipeline), which "
                "knows of which forward a layer is"
            )
        for item in open_ones:
            item.is_rerun = True


def is_rerun() -> bool:
    """Whether this thread is in backward, where layers are only run again."""
    return torch._C._current_graph_task_id() != -1


def _in_reentrant_checkpoint() -> bool:
    """Whether this forward, which makes no graph, is one that a checkpoint will run again."""
    frame: Any = None if torch.is_grad_enabled() else sys._getframe(1)
    while frame is not None and frame.f_code is not _REENTRANT:
        frame = frame.f_back
    return frame is not None
