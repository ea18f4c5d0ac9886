"""Forwards whose backward may run layers again, for recomputation that knows of no placement.

Note: recomputation by others
    `fastpar.apply_recompute` brings the placement of a forward back (`ContextRegion.capture`). torch.utils.checkpoint
    runs a layer again in backward, and nobody can tell of which forward that is. It need not be told where all forwards
    that are still to be differentiated have the same layout and documents; else it is an error.

A forward is kept in mind by its autograd graph, which holds a token while it lives. Within a reentrant checkpoint there
is no such graph, but the checkpoint's own node: autograd keeps that where it may be differentiated, and drops it as it
returns where not, as in an evaluation.
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
    """Forwards with one placement."""

    placement: Any
    token: weakref.ref[_GraphToken]
    is_rerun: bool = False

    @property
    def is_over(self) -> bool:
        return self.token() is None


class PendingForwards:
    """Forwards of one region that wait for backward; placements are compared by their values."""

    def __init__(self) -> None:
        self._items: list[_PendingForward] = []

    def note(self, placement: Any, out: Tensor) -> None:
        """A forward has attended with `placement`."""
        holders = _graph_of(out)
        if not holders:
            return
        self._items = [
            item for item in self._items if not (item.is_over or (item.is_rerun and item.placement != placement))
        ]
        found = next((item for item in self._items if item.placement == placement), None)
        token = None if found is None else found.token()
        if found is None or token is None:
            token = _GraphToken()
            found = _PendingForward(placement, weakref.ref(token))
            self._items.append(found)
        found.is_rerun = False
        for holder in holders:
            holder[_KEY] = token

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


def _graph_of(out: Tensor) -> list[dict[str, Any]]:
    """What lives as long as this forward may be differentiated: dicts of its graph's nodes; none where nothing does."""
    if out.grad_fn is not None:
        metadata: Any = out.grad_fn.metadata  # a dict, which torch annotates as a method
        return [metadata]
    found = []
    frame: Any = None if torch.is_grad_enabled() else sys._getframe(1)
    while frame is not None:  # of checkpoints within one another the outermost is differentiated
        if frame.f_code is _REENTRANT:
            found.append(vars(frame.f_locals[_REENTRANT.co_varnames[0]]))
        frame = frame.f_back
    return found
