"""The optimizer states of a model by the names of its parameters, as whole tensors: of no layout.

    states = full_optimizer_state(zero)                 # {"embed.weight": {"exp_avg": [V, H], ...}, ...}
    load_full_optimizer_state(zero, states)             # any stage, any number of ranks

For inspecting, converting and comparing states, and for programs that know nothing of layouts. `Zero.state_dict()` with
torch.distributed.checkpoint is what training itself should use: there no rank ever holds a whole tensor that is not its
own, and here every rank does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from fastpar.arguments import checked
from fastpar.zero.zero import Zero

States = dict[str, dict[str, Any]]


@torch.no_grad()
@checked(computed=False, but=("zero",))
def full_optimizer_state(zero: Zero) -> States:
    """{name: {state: whole tensor or number}} of every parameter that the optimizers of `zero` have updated.

    Names are those of the model's parameters, of all its optimizers together. Tensors are new, on the device of the
    parameter; 8-bit states come as their values in float32, tensors without dims with one of size 1. A parameter that
    has not been updated yet is not there.

    Collective: every rank of the mesh calls it; one all-gather for every tensor that is sharded. Where ranks have other
    parameters (pipeline stages), each gets those of its own.
    """
    _check(zero)
    held = zero.state_dict()
    has_state = {name for name, is_there in held["has_state"].items() if is_there}
    return {
        name: {key: _whole(value) for key, value in states.items()}
        for name, states in held["optimizer"].items()
        if name in has_state
    }


@torch.no_grad()
@checked(computed=False, but=("zero",))
def load_full_optimizer_state(zero: Zero, states: Mapping[str, Mapping[str, Any]]) -> None:
    """Take over what `full_optimizer_state` gave, under any layout: every rank keeps its part.

    Parameters that are not in `states` lose theirs, as if they had never been updated; values of parameters, learning
    rates and other options of groups stay as they are. Every rank passes the same.

    Raises KeyError for a name that no optimizer of `zero` has, ValueError for a state with another shape, and for
    states that are missing or that the optimizer does not have; nothing is changed then.
    """
    _check(zero)
    held = zero.state_dict()
    unknown = [name for name in states if name not in held["optimizer"]]
    if unknown:
        raise KeyError(f"no optimizer has a parameter called {unknown[0]!r}; there are {_some(held['optimizer'])}")
    parts: dict[str, dict[str, Any]] = {}
    for name, given in states.items():
        wanted = held["optimizer"][name]
        if set(given) != set(wanted):
            raise ValueError(f"the states of {name!r} must be {_some(wanted)}, got {_some(given)}")
        parts[name] = {key: _part(given[key], wanted[key], f"{key!r} of {name!r}") for key in wanted}
    held["optimizer"] = {**held["optimizer"], **parts}
    held["has_state"] = {name: name in parts for name in held["has_state"]}
    zero.load_state_dict(held)


def _check(zero: Zero) -> None:
    if not isinstance(zero, Zero):
        raise TypeError(f"zero must be what fp.zero.shard returned, got {type(zero).__name__}")


def _whole(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.full_tensor().clone()
    return value.clone() if isinstance(value, Tensor) else value


def _part(given: Any, like: Any, name: str) -> Any:
    """Of a whole tensor what this rank holds of `like`."""
    if not isinstance(like, Tensor):
        return given
    if not isinstance(given, Tensor) or given.shape != like.shape:
        found = list(given.shape) if isinstance(given, Tensor) else type(given).__name__
        raise ValueError(f"{name} must be a tensor of {list(like.shape)}, got {found}")
    given = given.detach().to(like.device, like.dtype)
    if not isinstance(like, DTensor):
        return given
    # Every rank has it all: none is asked to send.
    return distribute_tensor(given, like.device_mesh, like.placements, src_data_rank=None)


def _some(names: Mapping[str, Any]) -> str:
    shown = sorted(names)[:6]
    return ", ".join(shown) + (", ..." if len(names) > len(shown) else "")
