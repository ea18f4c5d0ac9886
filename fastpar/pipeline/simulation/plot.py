"""Timelines as pictures: one row per rank, one box per action, to scale. Needs matplotlib.

Forwards are light, backwards (B, I) dark, weight gradients (W) a third hue; the three stay apart for colour-blind
readers and in print. Boxes carry the number of their microbatch where it fits. On a rank with several stages, those of
later ones are paler. Idle time is white; an update (STEP) that takes no time is a tick.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fastpar.pipeline.schedules.schedule import Action, ActionType
from fastpar.pipeline.simulation.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_Rgb = tuple[float, float, float]

# From Paul Tol's "muted" scheme: https://sronpersonalpages.nl/~pault/
_FORWARD: _Rgb = (0.533, 0.800, 0.933)
_BACKWARD: _Rgb = (0.200, 0.133, 0.533)
_WEIGHT: _Rgb = (0.867, 0.800, 0.467)
_HEAD: _Rgb = (0.800, 0.400, 0.467)
_HEAD_WEIGHT: _Rgb = (0.267, 0.667, 0.600)
_OTHER: _Rgb = (0.60, 0.60, 0.60)
_COLOURS = {
    ActionType.FORWARD: _FORWARD,
    ActionType.BACKWARD: _BACKWARD,
    ActionType.BACKWARD_INPUT: _BACKWARD,
    ActionType.BACKWARD_WEIGHT: _WEIGHT,
    ActionType.HEAD_FORWARD: _HEAD,
    ActionType.HEAD_WEIGHT: _HEAD_WEIGHT,
}
_NAMES = {
    ActionType.FORWARD: "forward",
    ActionType.BACKWARD: "backward",
    ActionType.BACKWARD_INPUT: "gradients of inputs",
    ActionType.BACKWARD_WEIGHT: "gradients of weights",
    ActionType.HEAD_FORWARD: "head",
    ActionType.HEAD_WEIGHT: "gradients of the head",
}
_INK: _Rgb = (0.10, 0.10, 0.12)
_PALEST = 0.62  # how far the last stage of a rank goes towards white
_FORMATS = (".png", ".svg", ".pdf")
_FONTS = ["DejaVu Sans", "Arial"]  # an SVG names them at every number

# Inches and points.
_ROW, _MARGIN_TOP, _MARGIN_BOTTOM, _MARGIN_LEFT, _MARGIN_RIGHT = 0.30, 0.34, 0.26, 0.66, 0.15
_LEGEND, _LABEL_OF_TIME = 0.24, 0.16
_FONT, _SMALLEST_FONT = 8.0, 5.0
_HEIGHT = 0.84  # of a box, in rows


@dataclass(frozen=True)
class Box:
    """What is drawn for one action (of an overlap: for each of its parts, one above the other)."""

    start: float
    width: float
    bottom: float
    height: float
    colour: _Rgb
    label: str
    action: Action


def plot(
    timelines: Timeline | Sequence[Timeline],
    path: str | Path | None = None,
    *,
    titles: Sequence[str] | None = None,
    arrows: bool = False,
    width: float | None = None,
) -> Figure:
    """Draw one timeline, or several one below the other.

    path    a .png, .svg or .pdf file to write
    titles  one per timeline; default: their names, makespans and bubbles
    arrows  draw what goes from rank to rank
    width   of the picture, in inches; default: what makes the numbers readable, at most 24

    Timelines of one unit share their time axis, so that lengths compare; others are stretched to the same length.
    Returns matplotlib's Figure. Raises ValueError for another kind of file, ImportError without matplotlib.
    """
    several = [timelines] if isinstance(timelines, Timeline) else list(timelines)
    if not several or not all(timeline.events for timeline in several):
        raise ValueError("there is no timeline to draw, or nothing in it")
    if titles is not None and len(titles) != len(several):
        raise ValueError(f"{len(several)} timelines need as many titles, got {len(titles)}")
    if path is not None and Path(path).suffix not in _FORMATS:
        raise ValueError(f"a picture is written as {', '.join(_FORMATS)}, got {str(path)!r}")
    import matplotlib
    from matplotlib.figure import Figure

    shared = len({timeline.unit for timeline in several}) == 1
    longest = max(float(timeline.makespan) for timeline in several)
    inches = width or max(map(_readable_width, several))
    heights = [_MARGIN_TOP + _ROW * timeline.num_ranks + _MARGIN_BOTTOM for timeline in several]
    figure = Figure(figsize=(inches, _LEGEND + sum(heights) + _LABEL_OF_TIME), dpi=150)
    top = _LEGEND
    for index, timeline in enumerate(several):
        rows = _ROW * timeline.num_ranks
        bottom = 1 - (top + _MARGIN_TOP + rows) / figure.get_figheight()
        box = (
            _MARGIN_LEFT / inches,
            bottom,
            1 - (_MARGIN_LEFT + _MARGIN_RIGHT) / inches,
            rows / figure.get_figheight(),
        )
        axes = figure.add_axes(box)
        end = longest if shared else float(timeline.makespan)
        _draw_boxes(axes, list(boxes(timeline)), (inches - _MARGIN_LEFT - _MARGIN_RIGHT) / (end or 1.0))
        _draw_steps(axes, timeline)
        _draw_axes(axes, timeline, end or 1.0, with_label=not shared or timeline is several[-1])
        _draw_title(axes, timeline, None if titles is None else titles[index])
        if arrows:
            _draw_arrows(axes, timeline)
        top += heights[index]
    _draw_legend(figure, several)
    if path is not None:
        with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fastpar", "font.sans-serif": _FONTS}):
            dated = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
            figure.savefig(path, metadata=dated.get(Path(path).suffix, {}))
    return figure


def boxes(timeline: Timeline) -> Iterator[Box]:
    """What `plot` draws, in units of time from the first event on, and in rows from the top."""
    origin = float(timeline.start)
    for rank, own in enumerate(timeline.by_rank):
        stages = sorted({p.stage for event in own for p in event.action.flat() if not p.type.is_head})
        for event in own:
            parts = event.action.flat()
            if not event.occupies_rank or not event.duration:
                continue
            height = _HEIGHT / len(parts)
            for place, part in enumerate(parts):
                colour = _COLOURS.get(part.type, _OTHER)
                if not part.type.is_head:
                    colour = _pale(colour, stages.index(part.stage), len(stages))
                label = part.type.value if part.microbatch is None else str(part.microbatch)
                bottom = rank + (1 - _HEIGHT) / 2 + place * height
                yield Box(float(event.start) - origin, float(event.duration), bottom, height, colour, label, part)


def _draw_boxes(axes: Axes, drawn: Sequence[Box], scale: float) -> None:
    """Boxes and their labels; `scale` is in inches per unit of time."""
    from matplotlib.collections import PolyCollection

    corners = [
        [(x, y), (x, y + box.height), (x + box.width, y + box.height), (x + box.width, y)]
        for box in drawn
        for x, y in [(box.start, box.bottom)]
    ]
    colours = [box.colour for box in drawn]
    axes.add_collection(PolyCollection(corners, facecolors=colours, edgecolors="white", linewidths=0.6, zorder=2))
    # One size for all boxes of a height, at which all microbatches but the narrowest tenth have their numbers.
    fitting: dict[float, list[float]] = {}
    for box in drawn:
        if box.action.type in _COLOURS:
            fitting.setdefault(box.height, []).append(_largest_font(box, scale))
    fonts = {height: max(_SMALLEST_FONT, sorted(sizes)[len(sizes) // 10]) for height, sizes in fitting.items()}
    for box in drawn:
        font = fonts.get(box.height, _SMALLEST_FONT)
        if _largest_font(box, scale) >= font:
            middle = (box.start + box.width / 2, box.bottom + box.height / 2)
            ink = _INK if _luminance(box.colour) > 0.4 else "white"
            axes.text(*middle, box.label, ha="center", va="center_baseline", fontsize=font, color=ink, zorder=3)


def _largest_font(box: Box, scale: float) -> float:
    """Points at which the label of a box fits into it. A digit is 0.64 of its size wide."""
    return min(_FONT, 0.62 * box.height * _ROW * 72, (box.width * scale * 72 - 1.5) / (0.64 * len(box.label)))


def _draw_steps(axes: Axes, timeline: Timeline) -> None:
    """A tick above the row for every update that takes no time."""
    steps = [event for event in timeline.events if event.action.type is ActionType.STEP and not event.duration]
    times = [float(event.start - timeline.start) for event in steps]
    rows = [event.rank + (1 - _HEIGHT) / 2 for event in steps]
    axes.plot(times, rows, linestyle="", marker="v", markersize=4, color=_INK, clip_on=False, zorder=4)


def _draw_axes(axes: Axes, timeline: Timeline, end: float, *, with_label: bool) -> None:
    axes.set_xlim(0, end)
    axes.set_ylim(timeline.num_ranks, 0)
    axes.set_yticks([rank + 0.5 for rank in range(timeline.num_ranks)])
    axes.set_yticklabels([f"rank {rank}" for rank in range(timeline.num_ranks)], fontsize=_FONT)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=_FONT, color=_OTHER, length=3)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_OTHER)
    axes.axvline(float(timeline.makespan), color=_OTHER, linewidth=0.8, linestyle=(0, (3, 3)), zorder=1, clip_on=False)
    if with_label:
        axes.set_xlabel("time" if timeline.unit == "unit" else f"time [{timeline.unit}]", fontsize=_FONT, labelpad=1)


def _draw_title(axes: Axes, timeline: Timeline, title: str | None) -> None:
    if title is not None:
        axes.set_title(title, loc="left", fontsize=_FONT + 2, pad=5)
        return
    unit = "" if timeline.unit == "unit" else f" {timeline.unit}"
    makespan = f"{float(timeline.makespan):.6g}{unit}"
    axes.set_title(timeline.name, loc="left", fontsize=_FONT + 2, fontweight="bold", pad=5)
    axes.set_title(
        f"makespan {makespan}, bubble {100 * float(timeline.bubble):.1f} %", loc="right", fontsize=_FONT, pad=5
    )


def _draw_arrows(axes: Axes, timeline: Timeline) -> None:
    from matplotlib.collections import LineCollection

    origin = timeline.start
    lines = []
    for producer, consumer in timeline.flows:
        leaves = producer.end if producer.occupies_rank else producer.start
        arrives = consumer.start if consumer.occupies_rank else consumer.end
        lines.append([(float(leaves - origin), producer.rank + 0.5), (float(arrives - origin), consumer.rank + 0.5)])
    axes.add_collection(LineCollection(lines, colors=[_INK], linewidths=0.6, alpha=0.5, zorder=2.5))


def _draw_legend(figure: Figure, timelines: Sequence[Timeline]) -> None:
    from matplotlib.patches import Patch

    drawn = [box for timeline in timelines for box in boxes(timeline)]
    kinds = {box.action.type for box in drawn}
    names: dict[_Rgb, list[str]] = {}
    for kind, name in _NAMES.items():
        if kind in kinds:
            names.setdefault(_COLOURS[kind], []).append(name)
    if others := sorted(kind.value for kind in kinds - set(_NAMES)):
        names[_OTHER] = others
    patches = [Patch(color=colour, label=", ".join(of)) for colour, of in names.items()]
    if any(box.colour not in names for box in drawn):
        patches.append(Patch(color=_pale(_OTHER, 1, 2), label="paler: later stages of a rank"))
    place = (_MARGIN_LEFT / figure.get_figwidth(), 1 - 0.06 / figure.get_figheight())
    figure.legend(
        handles=patches, loc="upper left", bbox_to_anchor=place, ncols=len(patches) or 1, fontsize=_FONT, frameon=False,
        borderaxespad=0, borderpad=0, handlelength=1.0, handleheight=1.0, columnspacing=1.4, handletextpad=0.5,
    )  # fmt: skip


def _readable_width(timeline: Timeline) -> float:
    """Inches at which every box has room for its label that is not far narrower than most; 6.5 (a page) to 24."""
    needed = sorted(box.width / (0.09 + 0.062 * len(box.label)) for box in boxes(timeline))
    if not needed:
        return 6.5
    time_per_inch = max(needed[0], needed[len(needed) // 2] / 4)
    return min(24.0, max(6.5, float(timeline.makespan) / time_per_inch + _MARGIN_LEFT + _MARGIN_RIGHT))


def _pale(colour: _Rgb, index: int, count: int) -> _Rgb:
    """The colour of a rank's index-th stage of count."""
    share = _PALEST * index / max(1, count - 1)
    red, green, blue = (part + (1 - part) * share for part in colour)
    return red, green, blue


def _luminance(colour: _Rgb) -> float:
    red, green, blue = colour
    return 0.299 * red + 0.587 * green + 0.114 * blue
