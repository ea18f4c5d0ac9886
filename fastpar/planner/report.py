"""A plan as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastpar.planner.cost import PARTS

if TYPE_CHECKING:
    from fastpar.planner.planning import Plan
    from fastpar.planner.refine import RefinedLayout

_BAR = 40  # characters


def report(plan: Plan) -> str:
    """The layout, its time and memory, what may be faster, and why."""
    work, machine, best = plan.work, plan.machine, plan.prediction
    total = sum(plan.counts.values())
    left = ", ".join(f"{count:,} {name}" for name, count in plan.counts.items())
    lines = [
        f"{work.model.name} on {machine.gpus} x {machine.name} ({machine.source}), batch {work.batch} x {work.seq}, "
        f"{work.precision}",
        f"{total:,} layouts: {left}",
        "",
        ("recommended  " if plan.is_backed else "best guess   ") + best.layout.words,
        f"  step {_seconds(best.seconds)} ({_seconds(best.low)} .. {_seconds(best.high)})   "
        f"{plan.tokens_per_second:,.0f} tokens/s a rank",
        "",
        f"  memory of the fullest rank: {best.peak / 1e9:.1f} of {plan.limit / 1e9:.1f} GB",
        *_bars(max(best.ranks, key=lambda rank: sum(rank.values())), 1e9, "GB"),
        "",
        "  time of a step",
        *_bars({name: best.parts[name] for name in PARTS}, 1.0, "s"),
    ]
    if not plan.is_backed:
        lines += ["", "  no layout that fits has only measured features: this is the least upper end of all"]
    if plan.reasons:
        lines += ["", "why", *_why(plan)]
    if plan.recipe is not None:
        words, seconds = plan.recipe
        lines += [
            "",
            f"the classical recipe (tp in a node, pp until it fits, dp outermost): {words}, {_seconds(seconds)}",
        ]
    if plan.trials:
        lines += ["", "worth a trial: may be faster, but has not been measured"]
        lines += [f"  {_line(each)}" for each in plan.trials]
    if plan.flags:
        lines += ["", "look at", *(f"  {flag}" for flag in plan.flags)]
    lines += ["", _claim(plan)]
    return "\n".join(lines)


def _claim(plan: Plan) -> str:
    compared = plan.counts.get("compared", 0)
    text = f"best of {compared:,} layouts under this model"
    if plan.bound < plan.prediction.seconds:
        share = 100 * (1 - plan.bound / plan.prediction.seconds)
        return f"{text}, which by its closed forms knows of one that is {share:.1f} % faster but was not simulated"
    return f"{text}, which knows of none that is faster but those above"


def _line(each: RefinedLayout) -> str:
    return f"{_seconds(each.seconds)} +-{100 * each.error:.0f} %  {each.peak / 1e9:.1f} GB  {each.layout.words}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"


def _bars(values: dict[str, float] | object, unit: float, name: str) -> list[str]:
    assert hasattr(values, "items")
    items = [(key, float(value)) for key, value in values.items()]
    most = max((value for _, value in items), default=0.0) or 1.0
    shown = [(key, value) for key, value in items if value > 0.002 * most]
    return [
        f"    {key:<12}{value / unit:8.2f} {name}  {'#' * max(1, round(_BAR * value / most))}" for key, value in shown
    ]


def _why(plan: Plan) -> list[str]:
    by_axis: dict[str, list[str]] = {}
    for reason in plan.reasons:
        by_axis.setdefault(reason.axis, []).append(str(reason))
    return [f"  {axis:<13}" + "; ".join(found) for axis, found in by_axis.items()]
