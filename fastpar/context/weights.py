"""Whether ranks that share sequences still have the same weights.

Each rank's gradients are of its own tokens. Where nobody sums them over the ranks (`fastpar.zero.shard`, or code of the
user's), every rank takes a step of its own, fails nowhere, and the ranks train models that are more and more different.
So their weights are compared when a batch is split, in the message that there is anyway.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

_FIRST, _EVERY = 4, 64  # calls that look: the first, and one in many after
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class WeightChecks:
    """The checks of one region.

    is_summed   somebody is known to sum gradients over the ranks, and holds the weights in a way of its own
    """

    def __init__(self) -> None:
        self.is_summed = False
        self._calls = 0

    def next(self, model: Any) -> int:
        """A checksum of the weights that all ranks must have alike, or 0 in a call that does not look."""
        number = self._calls
        self._calls += 1
        if self.is_summed or (number >= _FIRST and number % _EVERY):
            return 0
        return sum(_checksum(p) for p in _alike(model)) % (1 << 62)


def _alike(model: Any) -> Iterator[Tensor]:
    """Parameters of which the ranks of cp have the same part: whole ones, and those split over tp alone."""
    seen: set[int] = set()
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is None or id(parameter) in seen or parameter.is_meta:
                continue
            seen.add(id(parameter))
            names = set(parameter.device_mesh.mesh_dim_names or ()) if isinstance(parameter, DTensor) else set()
            if names <= {"tp"}:
                yield parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _checksum(x: Tensor) -> int:
    """The wrap-around sum of its words: exact, so that equal tensors have equal sums."""
    x = torch.view_as_real(x.detach()) if x.is_complex() else x.detach()
    words = x.contiguous().view(-1).view(_WORDS[x.element_size()])
    return int(words.sum(dtype=torch.int64))
