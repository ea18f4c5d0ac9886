"""A plan beside something else: another plan or layout, part by part, or what its steps were measured to take."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from fastpar.arguments import checked_fields
from fastpar.planner.cost import PARTS
from fastpar.planner.refine import RefinedLayout

_SHOWN = 0.002  # of a step: smaller parts are left out
_WARMUP = 2  # steps that allocate, compile and connect, where there are more than twice as many


@checked_fields
@dataclass(frozen=True)
class Measurement:
    """What a layout's steps took.

    seconds  of each step, in order; of five and more the first two do not count
    memory   bytes at the peak: of each pipeline rank, or one number of the fullest; empty: not measured
    """

    seconds: tuple[float, ...]
    memory: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.seconds or not min(self.seconds) > 0:
            raise ValueError(f"seconds must be those of one step or more, and positive, got {self.seconds}")
        if self.memory and not min(self.memory) > 0:
            raise ValueError(f"memory must be positive bytes, got {self.memory}")

    @property
    def step(self) -> float:
        """The median step."""
        return statistics.median(self.seconds[_WARMUP:] if len(self.seconds) > 2 * _WARMUP else self.seconds)


@dataclass(frozen=True)
class ComparisonRow:
    """One line: `left` is the plan's. unit is "s" or "bytes"."""

    name: str
    left: float
    right: float
    unit: str

    @property
    def change(self) -> float:
        """How much more the right one is, relative to the left one."""
        return self.right / self.left - 1.0 if self.left else float("inf") if self.right else 0.0


@dataclass(frozen=True)
class PlanComparison:
    """The plan's layout and another one, or predicted and measured, line by line.

    columns  what the two columns are
    rows     "step" first, then its parts where both have them, then memory
    note     what the difference means
    """

    columns: tuple[str, str]
    rows: tuple[ComparisonRow, ...]
    note: str = ""

    def __getitem__(self, name: str) -> ComparisonRow:
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(f"there is no row {name!r}; there are {', '.join(row.name for row in self.rows)}")

    def __str__(self) -> str:
        lines = [("", *self.columns, "")]
        lines += [
            (row.name, _shown(row.left, row.unit), _shown(row.right, row.unit), _percent(row)) for row in self.rows
        ]
        widths = [max(len(line[column]) for line in lines) for column in range(4)]
        text = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
        ]
        return "\n".join([*text, *([self.note] if self.note else [])])


def beside(mine: RefinedLayout, other: RefinedLayout, limit: float) -> PlanComparison:
    """Two predictions."""
    rows = [ComparisonRow("step", mine.seconds, other.seconds, "s")]
    rows += [
        ComparisonRow(name, mine.parts[name], other.parts[name], "s")
        for name in PARTS
        if max(mine.parts[name], other.parts[name]) > _SHOWN * mine.seconds
    ]
    rows.append(ComparisonRow("memory", mine.peak, other.peak, "bytes"))
    lacking = f"the second lacks {(other.peak - limit) / 1e9:.1f} GB of memory a rank" if other.peak > limit else ""
    return PlanComparison((mine.layout.words, other.layout.words), tuple(rows), lacking)


def measured_beside(mine: RefinedLayout, found: Measurement) -> PlanComparison:
    """A prediction, and what was measured of it. ValueError for memory of another number of ranks."""
    rows = [ComparisonRow("step", mine.seconds, found.step, "s")]
    peaks = [sum(rank.values()) for rank in mine.ranks]
    if len(found.memory) == 1:
        rows.append(ComparisonRow("memory", mine.peak, found.memory[0], "bytes"))
    elif found.memory:
        if len(found.memory) != len(peaks):
            raise ValueError(f"memory has {len(found.memory)} ranks, but the pipeline {len(peaks)}: give one, or each")
        rows += [
            ComparisonRow(f"memory of rank {rank}", peak, value, "bytes")
            for rank, (peak, value) in enumerate(zip(peaks, found.memory, strict=True))
        ]
    is_within = mine.low <= found.step <= mine.high
    bar = f"{_shown(mine.low, 's')} .. {_shown(mine.high, 's')}"
    where = "within" if is_within else "outside"
    return PlanComparison(("predicted", "measured"), tuple(rows), f"the measured step is {where} the error bar ({bar})")


def _percent(row: ComparisonRow) -> str:
    return f"{100 * row.change:+.1f} %" if row.left else ""


def _shown(value: float, unit: str) -> str:
    if unit == "bytes":
        return f"{value / 1e9:.2f} GB"
    return f"{value:.2f} s" if value >= 1 else f"{1e3 * value:.1f} ms"
