"""Seconds of one step of a pipeline, at a cost that does not grow with the number of microbatches.

Note: the steady state. After its first rounds a schedule repeats itself: p microbatches more take as long as the p
before, or as those a few times p before (the longest chain of waits may come back after up to p microbatches). So
lengths that are equal modulo p are simulated, until p + 1 steps between them are equal, and the line is followed to the
length that is asked for. Where none is found before that, the whole schedule has been simulated. A search follows the
line after two equal steps, which is off by less than 2 % where stages are very unequal, and mostly exact.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from fractions import Fraction

from fastpar.pipeline.schedules.costs import Costs, Number
from fastpar.pipeline.schedules.generators import make_schedule
from fastpar.pipeline.schedules.schedule import Schedule
from fastpar.pipeline.simulation.evaluate import Evaluator
from fastpar.pipeline.simulation.simulate import activation_peaks, simulate

MAX_ACTIONS = 45_000  # of a schedule that is simulated here
_OVERLAPPING = ("dualpipe", "dualpipev")  # whose actions the Evaluator does not know
_LOOPED = ("interleaved_1f1b", "looped_bfs")


@functools.lru_cache(maxsize=256)
def schedule_of(name: str, num_ranks: int, num_microbatches: int, parts: int) -> Schedule:
    """A schedule by name, made once."""
    options = {"stages_per_rank": parts} if name in _LOOPED or (name == "zb_h1" and parts > 1) else {}
    return make_schedule(name, num_ranks, num_microbatches, **options)


def full_makespan(name: str, num_ranks: int, num_microbatches: int, costs: Costs, parts: int = 1) -> Number:
    """The makespan of the whole schedule."""
    schedule = schedule_of(name, num_ranks, num_microbatches, parts)
    if name in _OVERLAPPING or name.startswith("pipedream"):
        return simulate(schedule, costs).makespan
    evaluator = Evaluator(schedule, costs)
    found = evaluator.makespan(evaluator.encode(schedule))
    assert found is not None
    return found


def makespan(
    name: str, num_ranks: int, num_microbatches: int, costs: Costs, parts: int = 1, *, quick: bool = False
) -> Number:
    """The makespan of a schedule by its steady state; exact for ints and Fractions.

    parts  of the model per rank, where the schedule takes that option
    quick  the line is followed after two equal steps
    """
    return follow(
        lambda count: full_makespan(name, num_ranks, count, costs, parts),
        num_microbatches,
        num_ranks,
        4 * num_ranks * parts,
        2 if quick else num_ranks + 1,
    )


def follow(measure: Callable[[int], Number], count: int, period: int, start: int, steps: int) -> Number:
    """`measure(count)`, by a line through lengths that are equal modulo the period, of `start` and more, between which
    so many steps are equal."""
    lengths = [start + count % period + index * period for index in range(steps + 1)]
    if count <= lengths[-1]:
        return measure(count)
    values = [measure(length) for length in lengths]
    while lengths[-1] < count:
        last = [values[index + 1] - values[index] for index in range(len(values) - 1 - steps, len(values) - 1)]
        if all(_same(step, last[-1]) for step in last):
            periods = Fraction(count - lengths[-1], period)
            return values[-1] + (float(periods) if isinstance(last[-1], float) else periods) * last[-1]
        lengths.append(lengths[-1] + period)
        values.append(measure(lengths[-1]))
    return values[-1]


def _same(near: Number, far: Number) -> bool:
    if isinstance(near, float) or isinstance(far, float):
        return math.isclose(near, far, rel_tol=1e-9)
    return near == far


@functools.lru_cache(maxsize=1024)
def peaks(name: str, num_ranks: int, num_microbatches: int, parts: int) -> tuple[float, ...]:
    """Per rank, microbatches whose activations are kept at once, in units of the rank's layers."""
    counted = min(num_microbatches, 4 * num_ranks + num_microbatches % num_ranks)
    if name == "gpipe":
        return (float(num_microbatches),) * num_ranks
    schedule = schedule_of(name, num_ranks, counted, parts)
    return tuple(float(peak) / parts for peak in activation_peaks(schedule, until="weight"))


def is_simulated(num_ranks: int, num_microbatches: int, parts: int) -> bool:
    """Whether a schedule is small enough to be simulated in a search."""
    return num_ranks * min(num_microbatches, (4 * parts + 3) * num_ranks) * parts * 3 <= MAX_ACTIONS
