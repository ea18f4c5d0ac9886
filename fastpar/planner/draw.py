"""A plan as a picture: memory of each pipeline rank against the limit, and where the time of a step goes. SVG."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING

from fastpar.planner.cost import PARTS
from fastpar.planner.memory import MEMORY_PARTS

if TYPE_CHECKING:
    from fastpar.planner.planning import Plan

_WIDTH, _HEIGHT, _LEFT, _TOP = 860, 220, 70, 60
_COLOURS = (
    "#1d4ed8", "#60a5fa", "#93c5fd", "#15803d", "#86efac", "#eab308", "#f97316", "#dc2626", "#7c3aed", "#c4b5fd",
    "#64748b", "#0e7490", "#f472b6",
)  # fmt: skip


def draw(plan: Plan) -> str:
    """The SVG's text."""
    work, best = plan.work, plan.prediction
    title = f"{work.model.name} on {plan.machine.gpus} x {plan.machine.name}: {best.layout.words}"
    body = [_text(_LEFT, 26, title, 15, bold=True)]
    body += _memory(plan, _TOP)
    body += _time(plan, _TOP + _HEIGHT + 110)
    height = _TOP + _HEIGHT + 110 + 130
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" font-family="sans-serif">'
        f'<rect width="100%" height="100%" fill="white"/>' + "".join(body) + "</svg>\n"
    )


def _memory(plan: Plan, top: float) -> list[str]:
    ranks, limit = plan.prediction.ranks, float(plan.limit)
    most = max(limit, plan.prediction.peak) * 1.05
    width = (_WIDTH - _LEFT - 30) / len(ranks)
    drawn = [_text(_LEFT, top - 8, "memory of a pipeline rank, GB", 12)]
    for rank, parts in enumerate(ranks):
        bottom = top + _HEIGHT
        for index, name in enumerate(MEMORY_PARTS):
            tall = _HEIGHT * parts[name] / most
            bottom -= tall
            what = f"rank {rank}: {name} {parts[name] / 1e9:.2f} GB"
            drawn.append(_box(_LEFT + rank * width + 2, bottom, max(width - 4, 1), tall, _COLOURS[index], what))
        if len(ranks) <= 32:
            drawn.append(_text(_LEFT + (rank + 0.5) * width, top + _HEIGHT + 14, str(rank), 10, anchor="middle"))
    line = top + _HEIGHT * (1 - limit / most)
    place = f'x1="{_LEFT}" x2="{_WIDTH - 30}" y1="{line:.1f}" y2="{line:.1f}"'
    drawn.append(f'<line {place} stroke="#dc2626" stroke-dasharray="6 4"/>')
    drawn.append(_text(_LEFT - 6, line + 4, f"{limit / 1e9:.0f}", 11, anchor="end"))
    return drawn + _legend(top + _HEIGHT + 34, dict.fromkeys(MEMORY_PARTS, 1.0))


def _time(plan: Plan, top: float) -> list[str]:
    parts, x = plan.prediction.parts, float(_LEFT)
    total = sum(max(parts[name], 0.0) for name in PARTS)
    drawn = [_text(_LEFT, top - 8, f"a step of {plan.prediction.seconds:.3g} s by part", 12)]
    for index, name in enumerate(PARTS):
        wide = (_WIDTH - _LEFT - 30) * max(parts[name], 0.0) / total
        drawn.append(_box(x, top, wide, 36, _COLOURS[index], f"{name} {parts[name]:.3g} s"))
        x += wide
    return drawn + _legend(top + 60, {name: parts[name] / total for name in PARTS})


def _legend(y: float, shares: Mapping[str, float]) -> list[str]:
    drawn, x = [], float(_LEFT)
    for index, (name, share) in enumerate(shares.items()):
        if share <= 0.001:
            continue
        if x > _WIDTH - 140:
            x, y = float(_LEFT), y + 18
        drawn.append(_box(x, y - 9, 10, 10, _COLOURS[index], name))
        drawn.append(_text(x + 14, y, name, 11))
        x += 26 + 7 * len(name)
    return drawn


def _box(x: float, y: float, width: float, height: float, colour: str, what: str) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect {place} fill="{colour}"><title>{escape(what)}</title></rect>'


def _text(x: float, y: float, text: str, size: int, anchor: str = "start", *, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    place = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"{weight}'
    return f'<text {place} fill="#0f172a">{escape(text)}</text>'
