"""PipeDream's planner: layers cut into stages that may be replicated (arXiv:1806.03377, section 3.2).

    A(j, m) = min over i, m' of  max(A(i, m - m'), 2 a(i) / b, T(i .. j, m'))
    T(i .. j, m') = (t(i .. j) + 4 (m' - 1) w(i .. j) / (b m')) / m'

A(j, m) is the slowest stage's seconds of the first j layers on m machines, t the seconds of a stage's layers, a what
goes over a cut (there and back), w the bytes of weights, which m' replicas exchange, and b the bytes/s of a link. The
cost of weights is added to that of computing, as in the authors' program; the paper takes the larger of the two.

Note: graphs. "The first j layers" of a chain are the sets of layers that hold the inputs of each of their members of a
graph with branches; what goes over a cut is what members hand to others. Layers that must follow one another make few
such sets: 240 of ResNet-50's 175 layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastpar.arguments import checked, checked_fields

_MOST_CUTS = 2048


@checked_fields
@dataclass(frozen=True)
class LayerProfile:
    """A layer: seconds of forward and backward, bytes that it hands on, bytes of its weights.

    inputs  the layers whose outputs it takes, by their places in the list, all before its own; None: the one before
    """

    seconds: float
    output_bytes: float
    weight_bytes: float
    inputs: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if min(self.seconds, self.output_bytes, self.weight_bytes, *(self.inputs or ())) < 0:
            raise ValueError(f"a layer's numbers must not be negative, got {self}")


@dataclass(frozen=True)
class ReplicatedStage:
    """Layers by their places, on so many machines that each take a part of the minibatches. Of a chain they are start
    .. stop - 1; of a graph some between may belong to other stages."""

    start: int
    stop: int
    replicas: int
    layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class PipedreamPlan:
    """The stages, and the seconds of the slowest: a minibatch leaves the pipeline that often."""

    stages: tuple[ReplicatedStage, ...]
    seconds: float


@checked(computed=False)
def pipedream(layers: Sequence[LayerProfile], num_machines: int, bandwidth: float) -> PipedreamPlan:
    """The stages with the least time per minibatch, of those with equal times the fewest; O(s^2 m^2) for s cuts.

    layers        of a chain, or of a graph (`LayerProfile.inputs`), each after its inputs
    num_machines  all of which are used
    bandwidth     bytes/s of a link

    Raises ValueError for no layers, no machines, a bandwidth that is not positive, inputs that do not come before, and
    for graphs of more than 2,048 cuts.
    """
    if not layers or num_machines < 1 or bandwidth <= 0:
        numbers = f"{len(layers)} layers, {num_machines} and {bandwidth}"
        raise ValueError(f"layers, num_machines and bandwidth must be positive, got {numbers}")
    cuts = _cuts(layers)
    seconds = [sum(each.seconds for each in _members(layers, cut)) for cut in cuts]
    weights = [sum(each.weight_bytes for each in _members(layers, cut)) for cut in cuts]
    sent = [2.0 * handed / bandwidth for handed in _handed_on(layers, cuts)]
    before = [[k for k in range(1, j) if not cuts[k] & ~cuts[j]] for j in range(len(cuts))]

    def stage(start: int, stop: int, replicas: int) -> float:
        exchanged = 4.0 * (replicas - 1) * (weights[stop] - weights[start]) / bandwidth
        return (seconds[stop] - seconds[start] + exchanged / replicas) / replicas

    def solve(bound: float) -> list[list[tuple[float, int, int, int]]]:
        """best[m][j]: (slowest stage, number of stages, i, m') before the cut j on m machines; within the bound
        any time is as good as another, and the fewest stages are best."""
        best = [[(float("inf"), 0, 0, 0)] * len(cuts) for _ in range(num_machines + 1)]
        for machines in range(1, num_machines + 1):
            for stop in range(1, len(cuts)):
                found = (max(bound, stage(0, stop, machines)), 1, 0, machines)
                for start in before[stop]:
                    for replicas in range(1, machines):
                        slowest, stages, *_ = best[machines - replicas][start]
                        slowest = max(slowest, sent[start], stage(start, stop, replicas))
                        if (slowest, stages + 1) < found[:2]:
                            found = (slowest, stages + 1, start, replicas)
                best[machines][stop] = found
        return best

    count = len(cuts)
    least = solve(0.0)[num_machines][count - 1][0]
    best = solve(least * (1.0 + 1e-9))  # sums in another order are equal times, too
    found_stages, stop, machines = [], count - 1, num_machines
    while stop:
        _, _, start, replicas = best[machines][stop]
        places = tuple(place for place in range(len(layers)) if cuts[stop] & ~cuts[start] & 1 << place)
        found_stages.append(ReplicatedStage(places[0], places[-1] + 1, replicas, places))
        stop, machines = start, machines - replicas
    return PipedreamPlan(tuple(reversed(found_stages)), least)


def _inputs(layers: Sequence[LayerProfile], place: int) -> int:
    """The inputs of a layer, as bits."""
    given = layers[place].inputs
    if given is None:
        return 1 << place - 1 if place else 0
    if any(each >= place for each in given):
        raise ValueError(f"layer {place} takes the outputs of layers {given}, which must come before it")
    return sum(1 << each for each in set(given))


def _cuts(layers: Sequence[LayerProfile]) -> list[int]:
    """Sets of layers that hold the inputs of their members, as bits, small ones first: nothing, ..., everything."""
    inputs = [_inputs(layers, place) for place in range(len(layers))]
    found, todo = {0}, [0]
    while todo:
        cut = todo.pop()
        for place, needed in enumerate(inputs):
            more = cut | 1 << place
            if more != cut and not needed & ~cut and more not in found:
                found.add(more)
                todo.append(more)
        if len(found) > _MOST_CUTS:
            raise ValueError(f"the graph of {len(layers)} layers has more than {_MOST_CUTS} cuts: join its branches")
    return sorted(found, key=lambda cut: (cut.bit_count(), cut))


def _members(layers: Sequence[LayerProfile], cut: int) -> list[LayerProfile]:
    return [layer for place, layer in enumerate(layers) if cut & 1 << place]


def _handed_on(layers: Sequence[LayerProfile], cuts: Sequence[int]) -> list[float]:
    """Bytes of the outputs before each cut that layers behind it take."""
    takers = [0] * len(layers)
    for place in range(len(layers)):
        inputs = _inputs(layers, place)
        for other in range(place):
            takers[other] |= (inputs >> other & 1) << place
    return [
        sum(layer.output_bytes for place, layer in enumerate(layers) if cut & 1 << place and takers[place] & ~cut)
        for cut in cuts
    ]
