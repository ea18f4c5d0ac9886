"""The fastest plan of a heterogeneous chain that fits into a memory budget: dynamic programming.

Let T(s, t, m) be the least time of forward and backward of layers s..t-1 with m bytes beyond the input of s, and write
f, b, saved and out for a layer's costs. Layer s is either kept, or run with those up to j without keeping anything:

    T(s, s+1, m) = f(s) + b(s)                                                     if saved(s) + out(s) <= m
    T(s, t, m)   = min of  f(s) + b(s) + T(s+1, t, m - saved(s) - out(s))
                           f(s) + .. + f(j-1) + T(j, t, m - out(j-1)) + T(s, j, m)    for s < j < t

The inputs and outputs of layers that keep nothing need no condition: T(s, j, m) runs the same layers, each at last with
its input and output held. The minimum is over all plans of fastpar.recompute.plan, the persistent schedules. n^3 / 6
steps, each on a vector of budgets: 64 layers take a second. Sizes are in units of their greatest common divisor where
the budget has at most `resolution` of those, and the result is exact. Otherwise the unit is budget / resolution and
sizes are rounded up: the plan fits, and is the best of a budget that is smaller by up to n / resolution.

Source: Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova 2019, "Optimal checkpointing for heterogeneous chains: how to
train deep neural networks with limited memory" (arXiv:1911.13214), known as Rotor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fastpar.arguments import checked
from fastpar.recompute.plan import Drop, Keep, LayerCost, RecomputePlan, Steps, keep_all

_KEEP = -1  # a choice; the others are the layer up to which nothing is kept
_NONE = -2


@checked(computed=False)
def optimal_plan(costs: Sequence[LayerCost], budget: int, *, resolution: int = 2000) -> RecomputePlan:
    """The plan of least `RecomputePlan.time` among those whose `RecomputePlan.peak_bytes` is at most `budget`.

    ValueError if no plan fits; the message says what the least budget is.
    """
    if not costs:
        raise ValueError("costs must be those of at least one layer")
    if resolution < 1:
        raise ValueError(f"resolution must be at least 1, got {resolution}")
    frugal = least_memory_plan(costs)
    least = frugal.peak_bytes(costs)
    if budget < least:
        raise ValueError(f"budget: no plan of these {len(costs)} layers fits into {budget} bytes; the least is {least}")
    everything = RecomputePlan(len(costs), keep_all(0, len(costs)))
    if budget >= everything.peak_bytes(costs):
        return everything
    return _fastest(costs, budget, _unit(costs, budget, resolution)) or frugal  # rounding up may leave no other


def _unit(costs: Sequence[LayerCost], budget: int, resolution: int) -> int:
    divisor = math.gcd(*(size for cost in costs for size in (cost.output, cost.saved)))
    return divisor if divisor and budget // divisor <= resolution else -(-budget // resolution)


def _fastest(costs: Sequence[LayerCost], budget: int, unit: int) -> RecomputePlan | None:
    """The recurrence of the module's docstring, with m counted in units."""
    count, capacity = len(costs), budget // unit
    rounded = [LayerCost(c.forward, c.backward, -(-c.output // unit), -(-c.saved // unit)) for c in costs]
    best: dict[tuple[int, int], np.ndarray] = {}
    choice: dict[tuple[int, int], np.ndarray] = {}
    for length in range(1, count + 1):
        for s in range(count - length + 1):
            t, cost = s + length, rounded[s]
            rest = best[s + 1, t] if length > 1 else np.zeros(capacity + 1)
            time = cost.forward + cost.backward + _with_less(rest, cost.saved + cost.output)
            chosen = np.where(np.isfinite(time), _KEEP, _NONE)
            forward = 0.0
            for j in range(s + 1, t):
                forward += rounded[j - 1].forward
                other = forward + _with_less(best[j, t], rounded[j - 1].output) + best[s, j]
                is_less = other < time
                time, chosen = np.where(is_less, other, time), np.where(is_less, j, chosen)
            best[s, t], choice[s, t] = time, chosen
    if not np.isfinite(best[0, count][capacity]):
        return None

    def steps(s: int, t: int, m: int) -> Steps:
        found: list[Keep | Drop] = []
        while s < t:
            j = int(choice[s, t][m])
            if j == _KEEP:
                found.append(Keep(s))
                s, m = s + 1, m - rounded[s].saved - rounded[s].output
            else:
                found.append(Drop(s, j, steps(s, j, m)))
                s, m = j, m - rounded[j - 1].output
        return tuple(found)

    return RecomputePlan(count, steps(0, count, capacity))


def _with_less(time: np.ndarray, amount: int) -> np.ndarray:
    """time[m - amount], infinite where that is negative."""
    shifted = np.full_like(time, np.inf)
    if amount < len(time):
        shifted[amount:] = time[: len(time) - amount]
    return shifted


@checked(computed=False)
def least_memory_plan(costs: Sequence[LayerCost]) -> RecomputePlan:
    """A plan of least `RecomputePlan.peak_bytes`, whatever its time; of equals, the one that drops least."""
    count = len(costs)
    least: dict[tuple[int, int], int] = {}
    choice: dict[tuple[int, int], int] = {}
    for length in range(1, count + 1):
        for s in range(count - length + 1):
            t = s + length
            bytes_if: dict[int, int] = {_KEEP: costs[s].saved + costs[s].output + least.get((s + 1, t), 0)}
            for j in range(s + 1, t):
                bytes_if[j] = max(least[s, j], costs[j - 1].output + least[j, t])
            choice[s, t] = min(bytes_if, key=lambda j: bytes_if[j])
            least[s, t] = bytes_if[choice[s, t]]

    def steps(s: int, t: int) -> Steps:
        found: list[Keep | Drop] = []
        while s < t:
            j = choice[s, t]
            found.append(Keep(s) if j == _KEEP else Drop(s, j, steps(s, j)))
            s = found[-1].stop
        return tuple(found)

    return RecomputePlan(count, steps(0, count))
