"""The part of a parameter that a rank holds, as indices into the whole one.

What ranks hold is sent as it is, with its place, and compared with that place of the reference. Nothing is gathered by
the code that is being checked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fastpar.tensor.held import Index, index_of, take
from fastpar.tensor.parameter import local_tensor
from fastpar.zero import Zero
from fastpar.zero.groups import held_index

__all__ = ["Index", "Piece", "index_of", "plain_pieces", "take", "zero_pieces"]


@dataclass(frozen=True)
class Piece:
    """A rank's part of the parameter `name`, or of something of its shape. None: it has no such thing."""

    name: str
    index: Index
    value: Tensor | None


def plain_pieces(named: dict[str, nn.Parameter], of: str) -> list[Piece]:
    """The pieces of each parameter that this rank has: "value", or "grad"."""
    found = []
    for name, parameter in named.items():
        value = parameter.detach() if of == "value" else parameter.grad
        found.append(Piece(name, index_of(parameter), None if value is None else _copy(value)))
    return found


def zero_pieces(zero: Zero, of: str) -> list[Piece]:
    """The same under ZeRO: values as the modules see them, reduced gradients of this rank's rows."""
    found = []
    for param in zero.params:
        groups = zero.groups_of(param)
        value: Any = param.parameter.detach()
        if of == "grad":
            value = param.optim_param.grad
        elif zero.stage == 3:  # the whole parameter has no memory
            value = param.optim_param.detach() if param.model_rows is None else param.model_rows
        index = held_index(param.parameter, param.optim_param if value is None else value, groups)
        found.append(Piece(param.name, index, None if value is None else _shaped(_copy(value), param.parameter)))
    return found


def _shaped(value: Tensor, parameter: Tensor) -> Tensor | None:
    """Parameters without dims are kept as one row, or none."""
    if parameter.dim():
        return value
    return value.reshape(()) if value.numel() else None


def _copy(x: Tensor) -> Tensor:
    return local_tensor(x).detach().to("cpu", copy=True)
