"""The search: every legal layout by closed forms, the best of them again by simulated schedules and balanced cuts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fastpar.layouts import Layout
from fastpar.planner.cost import StepTime, predict
from fastpar.planner.features import error_bars, feature_columns, is_backed
from fastpar.planner.machine import Machine
from fastpar.planner.memory import Memory, predict_memory
from fastpar.planner.refine import RefinedLayout, refine
from fastpar.planner.space import LayoutSpace, PlanOptions, enumerate_layouts
from fastpar.planner.table import Column, LayoutTable
from fastpar.planner.workload import Workload

NUM_REFINED = 20
NUM_SMALL = 120  # so many different layouts or fewer: all are refined
TIE = 0.03  # layouts within this share of the best are equal; the simpler one wins


@dataclass(frozen=True)
class EvaluatedLayouts:
    """All legal layouts with what is known of them.

    table, time, memory   one row each
    error                 relative error bar
    backed                every feature has been measured
    fits                  within the limit, which is in bytes
    rejected              rule -> layouts that it rejected first
    """

    table: LayoutTable
    time: StepTime
    memory: Memory
    error: Column
    backed: Column
    fits: Column
    limit: int
    rejected: Mapping[str, int]

    @property
    def step(self) -> Column:
        return self.time.step


def evaluate(machine: Machine, work: Workload, options: PlanOptions) -> EvaluatedLayouts:
    """Every legal layout by closed forms."""
    space: LayoutSpace = enumerate_layouts(machine, work, options)
    x = space.table
    time, memory = predict(machine, work, x), predict_memory(machine, work, x)
    features = feature_columns(machine, x, time)
    limit = options.limit if options.limit is not None else machine.limit
    error, backed = error_bars(machine, features), is_backed(machine, features)
    return EvaluatedLayouts(x, time, memory, error, backed, memory.total <= limit, limit, space.rejected)


@dataclass(frozen=True)
class SearchResult:
    """What a search found.

    recommended  the least time of those whose features are measured
    trials       the least means of all, where they are below it and have a feature that nobody has measured
    ranked       all that were refined, the fastest first
    is_backed    whether the recommended one's features are measured
    bound        no layout that was not refined is faster than this by its closed form
    """

    recommended: RefinedLayout
    trials: tuple[RefinedLayout, ...]
    ranked: tuple[RefinedLayout, ...]
    is_backed: bool
    bound: float


def search(machine: Machine, work: Workload, found: EvaluatedLayouts) -> SearchResult | None:
    """The best of the candidates; None where none fits."""
    rows = np.flatnonzero(found.fits)
    if not len(rows):
        return None
    order = rows[np.argsort(found.step[rows], kind="stable")]
    backed = order[found.backed[order]]
    chosen = list(dict.fromkeys([*_varied(found, backed), *_varied(found, order), *_of_each_schedule(found, order)]))
    refined = {row: refine(machine, work, found.table.layout(row), found.limit) for row in chosen}
    kept = {row: each for row, each in refined.items() if each is not None}
    for row, each in kept.items():
        kept[row] = replace(each, error=float(found.error[row]), is_backed=bool(found.backed[row]))
    ranked = tuple(sorted(kept.values(), key=lambda each: each.seconds))
    if not ranked:
        return None
    measured = [each for each in ranked if each.is_backed]
    pool = measured or sorted(ranked, key=lambda each: each.high)
    recommended = simplest(pool)
    rest = np.setdiff1d(rows, np.array(chosen))
    bound = float(found.step[rest].min()) if len(rest) else float("inf")
    return SearchResult(recommended, _trials(ranked, recommended), ranked, bool(measured), bound)


def _trials(ranked: Sequence[RefinedLayout], recommended: RefinedLayout) -> tuple[RefinedLayout, ...]:
    """The three least means below the recommended one's, of layouts with features that nobody has measured; of those
    that differ in microbatches or recomputation alone the first."""
    first: dict[tuple, RefinedLayout] = {}
    for each in ranked:
        if each.seconds < recommended.seconds and not each.is_backed:
            first.setdefault(_family(each.layout), each)
    first.pop(_family(recommended.layout), None)
    return tuple(first.values())[:3]


def simplest(pool: list[RefinedLayout]) -> RefinedLayout:
    """The layout of those within TIE of the first with the fewest dims above 1, then the least memory."""
    key = (lambda each: each.high) if not pool[0].is_backed else (lambda each: each.seconds)
    least = key(min(pool, key=key))
    near = [each for each in pool if key(each) <= (1 + TIE) * least]
    return min(near, key=lambda each: (_num_dims(each.layout), each.peak, each.seconds))


def _varied(found: EvaluatedLayouts, order: Column) -> list[int]:
    """The best rows, but at most two of one grid and schedule: variants differ in little. All, where they are few.

    Rows of a pipeline with one part a rank that differ in recomputation alone are one: refining chooses it.
    """
    x = found.table
    names = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "schedule", "stage", "sp", "parts", "micro_batch")
    different: dict[tuple, int] = {}
    for row in order[: 40 * NUM_REFINED]:
        is_chosen_later = x.pp[row] > 1 and x.parts[row] == 1
        key = tuple(int(getattr(x, name)[row]) for name in (*names, "offload"))
        different.setdefault((*key, -1 if is_chosen_later else int(x.recompute[row])), int(row))
    if len(different) <= NUM_SMALL:
        return list(different.values())
    seen: dict[tuple, int] = {}
    kept: list[int] = []
    for key, row in different.items():
        family = key[:8]
        seen[family] = seen.get(family, 0) + 1
        if seen[family] <= 2:
            kept.append(row)
        if len(kept) == NUM_REFINED:
            break
    return kept


def _of_each_schedule(found: EvaluatedLayouts, order: Column) -> list[int]:
    """The two best rows of every schedule, and without a pipeline: closed forms flatter some schedules."""
    x = found.table
    kind = np.where(x.pp[order] > 1, x.schedule[order], -1)
    return [int(row) for each in np.unique(kind) for row in order[kind == each][:2]]


def _family(layout: Layout) -> tuple:
    dims = layout.pp, layout.cp, layout.tp, layout.ep, layout.dp_shard, layout.zero.stage
    return *dims, layout.pipeline.schedule, layout.pipeline.stages_per_rank


def _num_dims(layout: Layout) -> int:
    return sum(getattr(layout, dim) > 1 for dim in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"))
