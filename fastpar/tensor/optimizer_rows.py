"""Optimizer states of fused weights in the order of the model, for those who give them names.

`torch.distributed.checkpoint.state_dict` gathers and cuts an optimizer's states as it does the model's values, which
the model's state dict has in order: see `fastpar.tensor.row_order`. States have their rows in order there as well, so
that one process and other layouts can load them. Called by others, `optimizer.state_dict()` has states as they are, by
number, for the same layout.

Hooks come with an optimizer's first step. That is in time: before it asks for states, or sets them, torch steps an
optimizer that has none, at a learning rate of 0.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fastpar.tensor.row_order import as_stored, in_order, is_packed

_ASKS = "torch.distributed.checkpoint.state_dict"
_HOOKED: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


@functools.cache
def order_states_by_the_model() -> None:
    """For all optimizers of the process; once."""
    register_optimizer_step_pre_hook(_hook)


def _hook(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if torch.compiler.is_compiling() or optimizer in _HOOKED:
        return
    _HOOKED.add(optimizer)
    optimizer.register_state_dict_post_hook(functools.partial(_with_rows, in_order))
    optimizer.register_load_state_dict_pre_hook(functools.partial(_with_rows, as_stored))


def _with_rows(
    moved: Callable[[Any, Any], Any], optimizer: torch.optim.Optimizer, given: dict[str, Any]
) -> dict[str, Any] | None:
    """The state dict with the rows of packed states moved: all values, or none (None)."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    numbers = [number for group in given["param_groups"] for number in group["params"]]
    layouts = {n: layout for n, param in zip(numbers, params, strict=False) if is_packed(layout := _layout(param))}
    if not layouts or not is_asked_by_name():
        return None
    states = {
        number: {key: moved(value, layouts[number]) for key, value in state.items()} if number in layouts else state
        for number, state in given["state"].items()
    }
    return {**given, "state": states}


def _layout(param: Tensor) -> Any:
    found: Mapping[str, Any] = vars(param)
    return found.get("fastpar_layout") or found.get("fastpar_rows_of")


def is_asked_by_name() -> bool:
    """Whether torch's functions for checkpoints call, which give states the names of parameters."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__") != _ASKS:
        frame = frame.f_back
    return frame is not None
