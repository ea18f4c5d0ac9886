"""Why a layout: what every axis would cost with another value, the classical recipe beside it, and what to look at.

Each axis is pinned to its other values in turn, and the best of all layouts with that value is compared with the chosen
one, by closed forms both; nothing is said that was not computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fastpar.layouts import Layout
from fastpar.layouts.layout import RECOMPUTE
from fastpar.planner.cost import predict
from fastpar.planner.features import feature_columns
from fastpar.planner.machine import Machine
from fastpar.planner.refine import RefinedLayout
from fastpar.planner.search import EvaluatedLayouts
from fastpar.planner.space import axis_column
from fastpar.planner.table import SCHEDULES, Column, LayoutTable
from fastpar.planner.workload import Workload

_AXES = ("tp", "pp", "dp_replicate", "cp", "ep", "zero", "sp", "recompute", "schedule", "micro_batch")
_WORDS = {"recompute": RECOMPUTE, "schedule": SCHEDULES}


@dataclass(frozen=True)
class Reason:
    """What one axis would cost with another value.

    axis, value   such as "tp", "4"
    change        relative change of the step, of the best layout with it; None where none fits
    missing       bytes that the leanest layout with it lacks, where none fits
    is_backed     whether that layout's features have been measured
    """

    axis: str
    value: str
    change: float | None
    missing: float
    is_backed: bool

    def __str__(self) -> str:
        name = f"{self.axis} {self.value}" if self.axis not in _WORDS else self.value
        if self.change is None:
            return f"{name} lacks {self.missing / 1e9:.1f} GB"
        return f"{name} {100 * self.change:+.0f} %" + ("" if self.is_backed else " (not measured)")


def chosen_value(layout: Layout, work: Workload, axis: str) -> int:
    """The value of an axis that a layout has, as tables have it."""
    return int(axis_column(LayoutTable.of([layout], work.batch), axis)[0])


def reasons_for(found: EvaluatedLayouts, chosen: RefinedLayout, work: Workload) -> tuple[Reason, ...]:
    """The three values of every axis nearest to the chosen one's time, and the nearest that does not fit."""
    here = _closed_form(found, chosen.layout, work)
    reasons: list[Reason] = []
    for axis in _AXES:
        column = axis_column(found.table, axis)
        own = chosen_value(chosen.layout, work, axis)
        others = [_reason(found, column, int(value), axis, here) for value in np.unique(column) if value != own]
        fitting = sorted((r for r in others if r.change is not None), key=lambda r: r.change or 0.0)
        lacking = sorted((r for r in others if r.change is None), key=lambda r: r.missing)
        reasons += [*fitting[:3], *lacking[:1]]
    return tuple(reasons)


def _closed_form(found: EvaluatedLayouts, layout: Layout, work: Workload) -> float:
    """The step of the chosen layout's row, so that like is compared with like."""
    x, row = found.table, LayoutTable.of([layout], work.batch)
    same = np.ones(len(x), dtype=bool)
    for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "sp", "stage", "schedule", "parts", "micro_batch"):
        same &= getattr(x, name) == getattr(row, name)[0]
    words = {layout.recompute} if isinstance(layout.recompute, str) else set(layout.recompute)
    exact = same & (x.recompute == max(RECOMPUTE.index(word) for word in words))
    pool = exact if exact.any() else same
    return float(found.step[pool].min()) if pool.any() else float(found.step.min())


def _reason(found: EvaluatedLayouts, column: Column, value: int, axis: str, here: float) -> Reason:
    word = _WORDS[axis][value] if axis in _WORDS else str(value)
    rows = column == value
    fitting = rows & found.fits
    if not fitting.any():
        return Reason(axis, word, None, float(found.memory.total[rows].min()) - found.limit, True)
    backed = fitting & found.backed
    pool = np.flatnonzero(backed if backed.any() else fitting)
    return Reason(axis, word, float(found.step[pool].min()) / here - 1.0, 0.0, bool(backed.any()))


def classical_recipe(found: EvaluatedLayouts, machine: Machine) -> tuple[str, float] | None:
    """Tensor parallelism inside a node, pipelines between nodes until it fits, data parallelism outermost: the words of
    the best such layout and its seconds by closed form. None where no such layout fits."""
    x = found.table
    plain = found.fits & (x.cp == 1) & (x.dp_replicate == 1) & (x.stage <= 1)
    most = x.tp[plain].max(initial=1, where=x.tp[plain] <= machine.per_node)
    plain &= x.tp == most
    if not plain.any():
        return None
    plain &= x.pp == x.pp[plain].min()
    row = np.flatnonzero(plain)[np.argmin(found.step[plain])]
    return x.layout(int(row)).words, float(found.step[row])


def flags_of(machine: Machine, work: Workload, chosen: RefinedLayout, found: EvaluatedLayouts) -> tuple[str, ...]:
    """Cliffs and doubts of a layout."""
    return tuple(_flags(machine, work, chosen.layout))


def _flags(machine: Machine, work: Workload, layout: Layout) -> Iterator[str]:
    model = work.model
    if machine.source != "calibrated":
        yield f"{machine.name} is not calibrated ({machine.source}): measure before you trust the error bars"
    if machine.assumed:
        yield f"{machine.name} is calibrated, but {', '.join(machine.assumed)} were not measured"
    x = LayoutTable.of([layout], work.batch)
    features = feature_columns(machine, x, predict(machine, work, x))
    missing = [name for name, has in features.items() if has[0] and name not in machine.errors]
    if machine.source == "calibrated" and missing:
        yield f"calibration has not measured {', '.join(missing)}, which this layout uses"
    if model.head_dim % 8:
        yield f"head_dim {model.head_dim} is no multiple of 8: attention misses the tensor cores' layouts"
    if model.hidden % (128 * layout.tp):
        yield f"hidden {model.hidden} is no multiple of 128 tp ({128 * layout.tp})"
    narrow = (model.experts.ffn if model.experts else model.ffn / layout.tp) if model else 0
    if narrow < 512:
        yield f"GEMMs are {narrow:.0f} wide, less than 512"
    if layout.pp > 1 and (model.layers % layout.num_parts):
        yield f"{model.layers} layers do not divide into {layout.num_parts} parts: stages are uneven"
    if layout.tp > machine.per_node:
        yield f"tp {layout.tp} goes across nodes of {machine.per_node}"
    if layout.ep > machine.per_node:
        yield f"ep {layout.ep} goes across nodes of {machine.per_node}"
    if layout.cp * layout.tp > machine.per_node > 1 and layout.cp > 1:
        yield f"cp {layout.cp} goes across nodes of {machine.per_node}"
