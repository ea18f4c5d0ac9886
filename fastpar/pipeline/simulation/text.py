"""Timelines as text, for terminals and documents.

    rank 0  F0 F1 ····· B0━━━ ·· B1━━━
    rank 1  ·· F0 B0━━━ F1 B1━━━ ·····

Every action is as wide as it is long: its letter (F, B; I and W for the halves of a B) and its microbatch, then a line
to its end, light for F and S, heavy for B and I, dashed for W and T (S and T: a sharded head). Dots are idle time. On a
rank with several stages the actions of the second are marked with one prime (F0'), those of the third with two. Where a
label does not fit, its letter is repeated.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING

from fastpar.pipeline.schedules.costs import Number
from fastpar.pipeline.schedules.schedule import Action, ActionType

if TYPE_CHECKING:  # timelines draw themselves with this module
    from fastpar.pipeline.simulation.timeline import Timeline

_LINES = {
    ActionType.FORWARD: "─",
    ActionType.HEAD_FORWARD: "─",
    ActionType.BACKWARD_WEIGHT: "╌",
    ActionType.HEAD_WEIGHT: "╌",
}
_IDLE = "·"


def draw(timeline: Timeline, width: int = 160) -> str:
    """The picture, at most `width` columns of time. Transfers, and what takes no time, are left out."""
    labels = _labels(timeline)
    scale = _exact_scale(timeline, labels, width)
    if scale is None:
        scale = Fraction(width) / Fraction(timeline.makespan) if timeline.makespan else Fraction(1)
    head = len(f"rank {timeline.num_ranks - 1}")
    columns = _column(timeline, scale, timeline.end)
    lines = []
    for rank, own in enumerate(timeline.by_rank):
        cells = ""
        for event in sorted(own, key=lambda event: event.start):
            first, last = _column(timeline, scale, event.start), _column(timeline, scale, event.end)
            if event.occupies_rank and last > first:
                cells += _box(_IDLE, _IDLE, first - len(cells))
                cells += _box(labels[event.action], _LINES.get(event.action.type, "━"), last - first)
        cells += _box(_IDLE, _IDLE, columns - len(cells))
        lines.append(f"{f'rank {rank}':{head}}  {cells}".rstrip())
    return "\n".join(lines)


def _column(timeline: Timeline, scale: Fraction, time: Number) -> int:
    return math.floor(scale * Fraction(time - timeline.start))


def _box(label: str, line: str, width: int) -> str:
    """`width` characters; the last is a gap where the label leaves room for it."""
    if width > len(label):
        return label.ljust(width - 1, line) + " "
    return label if width == len(label) else label[0] * width


def _labels(timeline: Timeline) -> dict[Action, str]:
    labels = {}
    for own in timeline.by_rank:
        stages = sorted({part.stage for event in own for part in event.action.flat()})
        for event in own:
            parts = event.action.flat()
            labels[event.action] = "+".join(_label(part, stages.index(part.stage)) for part in parts)
    return labels


def _label(action: Action, chunk: int) -> str:
    microbatch = "" if action.microbatch is None else action.microbatch
    primes = "" if action.type.is_head else chr(39) * chunk
    return f"{action.type.value}{microbatch}{primes}"


def _exact_scale(timeline: Timeline, labels: dict[Action, str], width: int) -> Fraction | None:
    """Columns per unit of time: the fewest at which every boundary falls on a column and every label fits with a gap,
    or as many as there is room for. None for floats, and where not every boundary can have a column."""
    boxes = [event for event in timeline.events if event.occupies_rank and event.duration]
    if any(isinstance(time, float) for event in boxes for time in (event.start, event.end)):
        return None
    step = _common_divisor([Fraction(time - timeline.start) for event in boxes for time in (event.start, event.end)])
    if not step:
        return None
    columns = max((math.ceil((len(labels[e.action]) + 1) * step / Fraction(e.duration)) for e in boxes), default=1)
    columns = min(columns, math.floor(width * step / Fraction(timeline.makespan)))
    return columns / step if columns else None


def _common_divisor(values: list[Fraction]) -> Fraction:
    denominator = math.lcm(*(value.denominator for value in values))
    return Fraction(math.gcd(*(int(value * denominator) for value in values)), denominator)
