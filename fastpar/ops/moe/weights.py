"""The weights of a rank's experts, which may lie in several tensors that count as one: nobody has to copy them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastpar.comm import Communicator
from fastpar.contracts.moe import ExpertRule
from fastpar.ops._buffers import new_buffer


class ConcatExperts:
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
        raise IndexError(f"expert {expert} is beyond the {len(self)} of ConcatExperts")

    def transpose(self, first: int, second: int) -> ConcatExperts:
        """Transpose two dims that are not that of experts."""
        return ConcatExperts(*(part.transpose(first, second) for part in self.parts))

    def new_buffer(self) -> ConcatExperts:
        """Another of the same shapes and dtype, uninitialised."""
        return ConcatExperts(*(new_buffer(part, part.shape) for part in self.parts))


class ExpertWeights(NamedTuple):
    """The parameters of this rank's experts, or their gradients.

    first        [E_r, 2I, H]   gate and up in one ([E_r, I, H] without gate; transposed: [E_r, H, 2I])
    second       [E_r, H, I]    (transposed: [E_r, I, H])
    first_bias   [E_r, 2I]      or None
    second_bias  [E_r, H]       or None
    """

    first: Any
    second: Any
    first_bias: Any = None
    second_bias: Any = None

    @classmethod
    def of(cls, tensors: Sequence[Tensor | None]) -> ExpertWeights:
        """From the tensors of one part, or of several parts, one after the other."""
        count = len(cls._fields)
        if len(tensors) == count:
            return cls(*tensors)
        columns = [tensors[start::count] for start in range(count)]
        return cls(*(None if column[0] is None else ConcatExperts(*column) for column in columns))  # type: ignore[arg-type]

    def tensors(self, num_tensors: int) -> list[Any]:
        """The inverse, also of gradients of so many tensors: None in the place of all parts of a parameter."""
        if num_tensors == len(self):
            return list(self)
        parts = range(num_tensors // len(self))
        return [None if parameter is None else parameter.parts[part] for part in parts for parameter in self]

    def map(self, function: Callable[[Any], Any]) -> ExpertWeights:
        """The function of each that is there."""
        return ExpertWeights(*(None if parameter is None else function(parameter) for parameter in self))

    def second_bias_once(self, etp: Communicator) -> ExpertWeights:
        """The weights with the second bias on one of the ranks that share each expert, whose results are summed."""
        if self.second_bias is None:
            return self
        return self._replace(second_bias=BiasOnOneRank.apply(self.second_bias, etp.rank == 0))

    def matrices(self, rule: ExpertRule) -> tuple[Any, Any]:
        """Both as [E, in, out]."""
        if rule.transposed:
            return self.first, self.second
        return self.first.transpose(1, 2), self.second.transpose(1, 2)


class BiasOnOneRank(torch.autograd.Function):
    """A bias that every rank of etp has and one of them adds; each has all tokens' gradients, so each its whole."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor, is_mine: bool) -> Tensor:
        return bias.clone() if is_mine else torch.zeros_like(bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None
