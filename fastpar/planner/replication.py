"""PipeDream's planner: a chain of layers cut into stages that may be replicated (arXiv:1806.03377, section 3.2).

    A(j, m) = min over i, m' of  max(A(i, m - m'), 2 a(i) / b, T(i .. j, m'))
    T(i .. j, m') = t(i .. j) / m' + 4 (m' - 1) w(i .. j) / (b m')

A(j, m) is the slowest stage's seconds of the first j layers on m machines, t the seconds of a stage's layers, a what
goes over a cut (there and back), w the bytes of weights, which m' replicas exchange, and b the bytes/s of a link. The
cost of weights is added to that of computing, as in the authors' program; the paper takes the larger of the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from fastpar.arguments import checked, checked_fields


@checked_fields
@dataclass(frozen=True)
class LayerProfile:
    """A layer: seconds of forward and backward, bytes that it hands on, bytes of its weights."""

    seconds: float
    output_bytes: float
    weight_bytes: float

    def __post_init__(self) -> None:
        if min(self.seconds, self.output_bytes, self.weight_bytes) < 0:
            raise ValueError(f"a layer's numbers must not be negative, got {self}")


@dataclass(frozen=True)
class ReplicatedStage:
    """Layers start .. stop - 1, on so many machines that each take a part of the minibatches."""

    start: int
    stop: int
    replicas: int


@dataclass(frozen=True)
class PipedreamPlan:
    """The stages, and the seconds of the slowest: a minibatch leaves the pipeline that often."""

    stages: tuple[ReplicatedStage, ...]
    seconds: float


@checked(computed=False)
def pipedream(layers: Sequence[LayerProfile], num_machines: int, bandwidth: float) -> PipedreamPlan:
    """The stages with the least time per minibatch; O(n^2 m^2).

    layers        of a chain, in their order; a graph with branches is a chain once they are joined
    num_machines  all of which are used
    bandwidth     bytes/s of a link

    Raises ValueError for no layers, no machines, or a bandwidth that is not positive.
    """
    if not layers or num_machines < 1 or bandwidth <= 0:
        numbers = f"{len(layers)} layers, {num_machines} and {bandwidth}"
        raise ValueError(f"layers, num_machines and bandwidth must be positive, got {numbers}")
    seconds = [0.0, *accumulate(layer.seconds for layer in layers)]
    weights = [0.0, *accumulate(layer.weight_bytes for layer in layers)]

    def stage(start: int, stop: int, replicas: int) -> float:
        exchanged = 4.0 * (replicas - 1) * (weights[stop] - weights[start]) / bandwidth
        return (seconds[stop] - seconds[start] + exchanged) / replicas

    count = len(layers)
    # best[m][j]: (slowest stage, i, m') of the first j layers on m machines
    best = [[(float("inf"), 0, 0)] * (count + 1) for _ in range(num_machines + 1)]
    for machines in range(1, num_machines + 1):
        for stop in range(1, count + 1):
            found = (stage(0, stop, machines), 0, machines)
            for start in range(1, stop):
                sent = 2.0 * layers[start - 1].output_bytes / bandwidth
                for replicas in range(1, machines):
                    slowest = max(best[machines - replicas][start][0], sent, stage(start, stop, replicas))
                    if slowest < found[0]:
                        found = (slowest, start, replicas)
            best[machines][stop] = found
    stages, stop, machines = [], count, num_machines
    while stop:
        _, start, replicas = best[machines][stop]
        stages.append(ReplicatedStage(start, stop, replicas))
        stop, machines = start, machines - replicas
    return PipedreamPlan(tuple(reversed(stages)), best[num_machines][count][0])
