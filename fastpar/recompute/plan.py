"""Which activations of a chain of layers are kept, and what is run again in which order: plans, as data.

A plan of layers [start, stop) is a sequence of steps that cover them in order:

    Keep(i)              run layer i and keep what its backward needs
    Drop(a, b, inner)    run layers a..b-1 and keep nothing but the input of a; when their backward comes, run them
                         again from there by `inner`, a plan of the same layers

So a plan says how the layers are run the first time, and, nested in it, how they are run every later time. It always
keeps the input of a stretch until the stretch's backward is over ("persistent" schedules).

Worked example, four layers of one activation each: (Drop(0, 2, (Keep(0), Keep(1))), Keep(2), Keep(3)) are two segments.
Forward runs 0 1 2 3 and holds the input and the activations of 2 and 3; backward is 3, 2, then again 0 1, then 1, 0. It
runs two layers twice, and holds at most three activations beside the input.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Union

from fastpar.arguments import check_counts, checked, checked_fields


@checked_fields
@dataclass(frozen=True)
class Keep:
    """Run layer `start` and keep its activations."""

    start: int

    @property
    def stop(self) -> int:
        """One past the layer."""
        return self.start + 1


@checked_fields
@dataclass(frozen=True)
class Drop:
    """Run layers start..stop-1 keeping their input only, and later again by `inner`."""

    start: int
    stop: int
    inner: Steps


Steps = tuple[Union["Keep", "Drop"], ...]


@checked_fields
@dataclass(frozen=True)
class LayerCost:
    """What one layer of a chain costs; times in one unit, sizes in bytes.

    forward, backward  time of each
    output             size of the layer's output, which is what the next layer can be run again from
    saved              size of what its backward needs, without its input, its output and its parameters
    """

    forward: float
    backward: float
    output: int
    saved: int

    def __post_init__(self) -> None:
        if min(self.forward, self.backward, self.output, self.saved) < 0:
            raise ValueError(f"times and sizes of a layer must not be negative, got {self}")


@checked_fields
@dataclass(frozen=True)
class RecomputePlan:
    """Steps that cover layers 0..num_layers-1."""

    num_layers: int
    steps: Steps

    def __post_init__(self) -> None:
        _check(self.steps, 0, self.num_layers)

    @checked(computed=False)
    def step_of(self, layer: int) -> Keep | Drop:
        """The outermost step that the layer is in."""
        if not 0 <= layer < self.num_layers:
            raise IndexError(f"layer must be in 0..{self.num_layers - 1}, got {layer}")
        return next(step for step in self.steps if step.start <= layer < step.stop)

    def forwards(self) -> list[int]:
        """How often each layer's forward runs in one forward and backward: 1 and its recomputations."""
        counts = [0] * self.num_layers
        _count(self.steps, counts)
        return counts

    @property
    def num_recomputed(self) -> int:
        """Layer forwards beyond the first of each layer."""
        return sum(self.forwards()) - self.num_layers

    @checked(computed=False)
    def time(self, costs: Sequence[LayerCost]) -> float:
        """One forward and backward, recomputation included."""
        self._check_costs(costs)
        forwards = zip(self.forwards(), costs, strict=True)
        return sum(count * cost.forward + cost.backward for count, cost in forwards)

    @checked(computed=False)
    def peak_bytes(self, costs: Sequence[LayerCost]) -> int:
        """The most bytes held at once beyond the chain's input: activations, kept inputs, and the input and output of
        the layer that runs. Gradients of activations are as large as these and take their place."""
        self._check_costs(costs)
        return _peak(self.steps, costs)

    def _check_costs(self, costs: Sequence[LayerCost]) -> None:
        if len(costs) != self.num_layers:
            raise ValueError(f"costs are of {len(costs)} layers, but the plan is of {self.num_layers}")


def _check(steps: Steps, start: int, stop: int) -> None:
    position = start
    for step in steps:
        if step.start != position or step.stop <= step.start:
            raise ValueError(f"the steps of layers {start}..{stop - 1} must follow each other, got {steps}")
        if isinstance(step, Drop):
            _check(step.inner, step.start, step.stop)
        position = step.stop
    if position != stop:
        raise ValueError(f"the steps must cover layers {start}..{stop - 1}, got {steps}")


def _count(steps: Steps, counts: list[int]) -> None:
    for step in steps:
        for layer in range(step.start, step.stop):
            counts[layer] += 1
        if isinstance(step, Drop):
            _count(step.inner, counts)


def _peak(steps: Steps, costs: Sequence[LayerCost]) -> int:
    """Beyond the input of the first layer, which whoever calls holds."""
    held, peak = 0, 0
    for step in steps:
        handed_on = costs[step.stop - 1].output
        if isinstance(step, Keep):
            held += costs[step.start].saved + handed_on
            peak = max(peak, held)
        else:  # run again when what follows has been freed, and at no time with less than in the first run
            peak = max(peak, held + _peak(step.inner, costs))
            held += handed_on
    return peak


def clip(steps: Steps, start: int, stop: int) -> Steps:
    """The part of the steps that concerns layers start..stop-1. A stretch at the end that would be run again at once,
    since nothing comes after it, is replaced by what it would be run by."""
    return _unfold_last(tuple(_clip(steps, start, stop)))


def _clip(steps: Steps, start: int, stop: int) -> Iterator[Keep | Drop]:
    for step in steps:
        first, last = max(step.start, start), min(step.stop, stop)
        if first >= last:
            continue
        yield Drop(first, last, clip(step.inner, first, last)) if isinstance(step, Drop) else step


def _unfold_last(steps: Steps) -> Steps:
    while steps and isinstance(steps[-1], Drop):
        steps = (*steps[:-1], *steps[-1].inner)
    return steps


MAX_LAYERS = 10_000  # of a chain; splitting longer ones takes for ever


# ---- plans with a name -----------------------------------------------------------------------------------------------


def keep_all(start: int, stop: int) -> Steps:
    """No recomputation."""
    check_counts(MAX_LAYERS, least=0, num_layers=stop - start)
    return tuple(Keep(layer) for layer in range(start, stop))


def each_layer(num_layers: int) -> RecomputePlan:
    """Every layer is run again, from its own input: n inputs and one layer's activations, n recomputations."""
    check_counts(MAX_LAYERS, least=0, num_layers=num_layers)
    return RecomputePlan(num_layers, tuple(Drop(layer, layer + 1, (Keep(layer),)) for layer in range(num_layers)))


def segments(num_layers: int, count: int) -> RecomputePlan:
    """`count` stretches of nearly equal length, the last of which is kept: n - n / count recomputations, count - 1
    inputs and n / count layers' activations (Chen et al. 2016, arXiv:1604.06174). Longer stretches come first."""
    check_counts(MAX_LAYERS, num_layers=num_layers)
    if not 1 <= count <= num_layers:
        raise ValueError(f"a chain of {num_layers} layers has 1 to {num_layers} segments, got {count}")
    base, longer = divmod(num_layers, count)
    bounds = [segment * base + min(segment, longer) for segment in range(count + 1)]
    stretches = [Drop(a, b, keep_all(a, b)) for a, b in itertools.pairwise(bounds[:-1])]
    return RecomputePlan(num_layers, (*stretches, *keep_all(bounds[-2], num_layers)))


def binomial(num_layers: int, slots: int) -> RecomputePlan:
    """The fewest recomputations of equal layers with `slots` inputs held, the chain's own among them, and one layer's
    activations (Griewank and Walther 2000, "Revolve").

    With every layer recomputed at most r times, s slots cover C(s + r, s) layers. One slot: n (n - 1) / 2.
    """
    if slots < 1:
        raise ValueError(f"slots must be at least 1 (the chain's input is in the first), got {slots}")
    check_counts(MAX_LAYERS, num_layers=num_layers)
    return RecomputePlan(num_layers, _binomial_steps(0, num_layers, min(slots, num_layers)))


def binomial_recomputations(num_layers: int, slots: int) -> int:
    """Layer forwards beyond the first that `binomial` needs: r n - C(s + r, s + 1), r the least number of repetitions
    with C(s + r, s) >= n."""
    repetitions = 0
    while math.comb(slots + repetitions, slots) < num_layers:
        repetitions += 1
    return repetitions * num_layers - math.comb(slots + repetitions, slots + 1)


def _binomial_steps(start: int, stop: int, slots: int) -> Steps:
    """Iterates over the stretches of this pass; each later pass over a stretch is a level deeper."""
    steps: list[Keep | Drop] = []
    while stop - start > 1:
        length = stop - start
        first = length - 1 if slots == 1 else _binomial_split(length, slots)
        steps.append(Drop(start, start + first, _binomial_steps(start, start + first, slots)))
        start, slots = start + first, max(slots - 1, 1)
    return (*steps, Keep(start))


@functools.cache
def _binomial_split(length: int, slots: int) -> int:
    """How many layers to run from the chain's input before the next input is stored."""

    def total(first: int) -> int:
        rest = binomial_recomputations(length - first, slots - 1)
        return first + binomial_recomputations(first, slots) + rest

    return min(range(1, length), key=total)
