"""Parameters of experts in several parts that count as one, so that nobody has to copy them into one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastpar.ops._buffers import new_buffer


class Stack:
    """Tensors [E_1, ..], [E_2, ..] as one [E_1 + E_2, ..], which is indexed by expert."""

    def __init__(self, *parts: Tensor) -> None:
        self.parts = parts

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self), *self.parts[0].shape[1:]))

    def __len__(self) -> int:
        return sum(len(part) for part in self.parts)

    def __getitem__(self, expert: int) -> Tensor:
        for part in self.parts:
            if expert < len(part):
                return part[expert]
            expert -= len(part)
        raise IndexError(f"expert {expert} is beyond the {len(self)} of a Stack")

    def transpose(self, first: int, second: int) -> Stack:
        """Of two dims that are not that of experts."""
        return Stack(*(part.transpose(first, second) for part in self.parts))

    def new_buffer(self) -> Stack:
        """Another of the same shapes and dtype, uninitialised."""
        return Stack(*(new_buffer(part, part.shape) for part in self.parts))


def joined(tensors: Sequence[Any], count: int) -> list[Any]:
    """`count` parameters: as they are, or Stacks where there are more of each behind the first `count`."""
    if len(tensors) == count:
        return list(tensors)
    columns = [tensors[start::count] for start in range(count)]
    return [None if column[0] is None else Stack(*column) for column in columns]


def parted(parameters: Sequence[Any], num_tensors: int) -> list[Any]:
    """The tensors that were `joined`, or of each its gradient; a parameter may be None in the place of its parts."""
    if num_tensors == len(parameters):
        return list(parameters)
    parts = range(num_tensors // len(parameters))
    return [None if parameter is None else parameter.parts[part] for part in parts for parameter in parameters]
