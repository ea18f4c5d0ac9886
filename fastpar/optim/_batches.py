"""What one call of an op takes: the tensors of many parameters, list by list.

Models have thousands of small tensors, for which Python takes longer than the kernel does. So nothing is called per
parameter: every list is one comprehension over parameters or states, DTensors are unwrapped where the set of types has
any, and the counts of steps are one tensor (`StepCounts`). Nothing of a parameter or a state is kept from step to step
beside those counts, so that whatever replaces them is seen.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

States = list[dict[str, Any]]  # of parameters, in their order
_MOST_COUNTS = 64


@dataclass
class Batch:
    """One entry per parameter in every list that is not empty; `states` and `scales` by kind of state."""

    params: list[Tensor]
    grads: list[Tensor]
    states: list[list[Tensor]]
    scales: list[list[Tensor]]
    outputs: list[Tensor | None] = field(default_factory=list)
    remainders: list[Tensor | None] = field(default_factory=list)  # of a call's parameters all or none has one
    keys: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    number: int = 1  # of the step, from 1
    is_new: bool = False  # states are to be written, not read

    def by_call(self, numbers: Sequence[float], are_new: Sequence[bool]) -> Iterator[Batch]:
        """Batches that one call can take: of one device, one number of the step (`numbers` count those before), new
        states or old ones, with or without remainders."""
        devices = [param.device for param in self.params]
        splits = [x is not None for x in self.remainders] or [False] * len(self.params)
        kinds = list(zip(devices, numbers, are_new, splits, strict=True))
        if len(set(kinds)) == 1:
            yield self._of_kind(kinds[0], None)
            return
        places: dict[Hashable, list[int]] = {}
        for index, kind in enumerate(kinds):
            places.setdefault(kind, []).append(index)
        for indices in places.values():
            yield self._of_kind(kinds[indices[0]], indices)

    def _of_kind(self, kind: tuple[Any, float, bool, bool], indices: Sequence[int] | None) -> Batch:
        _, number, is_new, has_remainders = kind

        def some(column: list[Any]) -> list[Any]:
            return column if indices is None or not column else [column[i] for i in indices]

        return dataclasses.replace(
            self,
            params=some(self.params),
            grads=some(self.grads),
            states=[some(column) for column in self.states],
            scales=[some(column) for column in self.scales],
            outputs=some(self.outputs),
            remainders=some(self.remainders) if has_remainders else [],
            keys=some(self.keys),
            starts=some(self.starts),
            number=int(number) + 1,
            is_new=is_new,
        )


class StepCounts:
    """The "step" of parameters that are updated together, in one tensor [n].

    torch has a tensor of one number for each parameter: to read and to increase n of them takes n calls. They stay
    tensors here, but are views of one, which is read and increased at once. What somebody has put in the place of one
    (a checkpoint) is moved there by the next step.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Tensor, list[Tensor]]] = {}  # by the id of the first parameter's states

    def of(self, states: States) -> Tensor:
        """The counts of these parameters; what is added to them is added to every "step"."""
        steps = [state["step"] for state in states]
        counts, views = self._known.get(id(states[0]), (None, []))
        if counts is not None and len(views) == len(steps) and all(map(operator.is_, steps, views)):
            return counts
        counts = torch.stack(steps)
        views = list(counts.unbind())
        for state, view in zip(states, views, strict=True):
            state["step"] = view
        if len(self._known) >= _MOST_COUNTS:
            self._known.clear()
        self._known[id(states[0])] = counts, views
        return counts


def local(x: Tensor) -> Tensor:
    return x._local_tensor if isinstance(x, DTensor) else x


def locals_of(tensors: list[Tensor]) -> list[Tensor]:
    """What this rank has of each."""
    if not any(issubclass(kind, DTensor) for kind in set(map(type, tensors))):
        return tensors
    return [x._local_tensor if isinstance(x, DTensor) else x for x in tensors]


def local_gradients(params: list[Tensor], grads: list[Tensor], optimizer: str) -> list[Tensor]:
    """Raises ValueError for a gradient that does not lie as its parameter does, and for a sparse one."""
    if {grad.layout for grad in grads} != {torch.strided}:
        raise ValueError(f"{optimizer} does not take sparse gradients; use torch.optim.SparseAdam for them")
    found = locals_of(grads)
    if found is not grads:
        for param, grad in zip(params, grads, strict=True):
            if (
                isinstance(param, DTensor)
                and isinstance(grad, DTensor)
                and grad._spec.placements != param._spec.placements  # the properties take longer than the comparison
            ):
                raise ValueError(
                    f"the gradient of a parameter {tuple(param.shape)} has placements {grad.placements}, the parameter "
                    f"has {param.placements}: redistribute the gradient first"
                )
    return found
