"""What a step's checks find out of its tensors, read in one pass: the same again need not be checked again.

A check of every tensor asks some ten things of it, at 35 to 70 ns each, and a kernel's launcher a few more: for 50
parameters and their states this took the host as long as the device needs for 1e7 elements. Most calls come with
tensors like those of the call before. So six things are asked, from which the answer to all others follows, and
compared with what has passed the checks.

Nothing is kept by identity: a tensor that was resized, moved, cast or replaced in place has other facts.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastpar.contracts.optimizer import Step

MAX_KNOWN = 64
_LISTS = frozenset({list, tuple})
_PLAIN = frozenset({Tensor, torch.nn.Parameter})
_dtype, _shape, _is_cpu = map(operator.attrgetter, ("dtype", "shape", "is_cpu"))


class Facts(NamedTuple):
    """Facts of tensors that are contiguous, of dense memory, on one device, and of no class but torch's own.

    They are in the order params, grads, states, scales, outputs that are not None, remainders.
    """

    device: torch.device
    lengths: tuple[int, ...]  # of these lists, with every None of outputs; then whether outputs and remainders are none
    output_of: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[torch.Size, ...]
    addresses: tuple[int, ...]


def facts_of(step: Step) -> Facts | None:
    """None where something is not as `Facts` says, or not even a list of tensors, which is for the checks to say; and
    in torch.compile."""
    if torch.compiler.is_compiling():
        return None
    outputs: Sequence[Any] | None = step.outputs
    optional: tuple[Any, ...] = (outputs, step.remainders)
    lists = (step.params, step.grads, *step.states, *step.scales, *(x for x in optional if x is not None))
    if not _LISTS.issuperset(map(type, lists)):
        return None
    output_of = tuple([i for i, x in enumerate(outputs) if x is not None]) if outputs else ()
    tensors: list[Any] = [*step.params, *step.grads]
    for found in (*step.states, *step.scales):
        tensors += found
    if outputs:
        tensors += [outputs[i] for i in output_of]
    if step.remainders:
        tensors += step.remainders
    if not step.params or not _PLAIN.issuperset(map(type, tensors)):
        return None
    device = tensors[0].device
    try:
        addresses = tuple(map(Tensor.data_ptr, tensors))  # raises for what has no memory of its own
        if not (all(map(Tensor.is_contiguous, tensors)) and _are_on(device, tensors)):
            return None
        if 0 in addresses and any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors)):
            return None  # functionalize's wrappers are at address 0, as empty tensors are
        lengths = (*map(len, lists), *[x is None for x in optional])
        return Facts(device, lengths, output_of, tuple(map(_dtype, tensors)), tuple(map(_shape, tensors)), addresses)
    except RuntimeError:
        return None


def _are_on(device: torch.device, tensors: list[Tensor]) -> bool:
    """A process has one kind of accelerator, so the number of a device is enough."""
    if device.type == "cpu":
        return all(map(_is_cpu, tensors))
    return device.type == "cuda" and set(map(Tensor.get_device, tensors)) == {device.index}


class KnownFacts:
    """What has passed the checks: of the last call for the same first parameter and lengths of lists."""

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}

    def has(self, facts: Facts) -> bool:
        return bool(self._known.get(self._key(facts)) == facts[:-1])

    def add(self, facts: Facts) -> None:
        if len(self._known) >= MAX_KNOWN:
            self._known.clear()
        self._known[self._key(facts)] = facts[:-1]  # addresses may change: checks do not ask for them

    def _key(self, facts: Facts) -> Any:
        return facts.addresses[0], facts.lengths
