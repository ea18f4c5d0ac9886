"""Tables and plots from rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.rows import Row

COLUMNS = (
    "provider",
    "setting",
    "median ms",
    "min",
    "p10 - p90",
    "rate",
    "of roof",
    "x same",
    "x tuned",
    "above bound",
    "extra MB",
    "error",
)


def case_title(case: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in case.items())


def by_case(rows: Sequence[Row]) -> list[tuple[dict[str, Any], list[Row]]]:
    """Rows grouped by case, in order of first appearance."""
    groups: dict[str, tuple[dict[str, Any], list[Row]]] = {}
    for row in rows:
        groups.setdefault(case_title(row["case"]), (row["case"], []))[1].append(row)
    return list(groups.values())


def cells(row: Row, baseline: str) -> list[str]:
    """One table line, a text per column of COLUMNS; "" where the row has nothing to say.

    "x same": times faster than `baseline` under the same setting; "x tuned": than `baseline` under the tuned one.
    "above bound": the part of the time that the setting's bound, which does less than the job, does not need.
    """
    memory = "" if row["extra_bytes"] is None else f"{row['extra_bytes'] / 1e6:.2f}"
    if memory and row["memory_bound"] is not None:
        memory += f" (bound {row['memory_bound'] / 1e6:.2f})"
    error = max((e["value"] / e["tolerance"] for e in row["errors"].values() if e["tolerance"]), default=None)
    worst = "" if error is None else f"{error:.0%} of tol."
    head = [row["provider"], row["setting"]]
    if "ms" not in row:
        return [*head, row["problem"].split(":")[0], *[""] * (len(COLUMNS) - 5), memory, worst]
    ms = row["ms"]
    rate = f"{row['gb_s']:.1f} GB/s" if row["gb_s"] else f"{row['gflop_s']:.0f} GFLOP/s" if row["gflop_s"] else ""
    ratios = {} if row["kind"] == "roof" else row["ratio"].get(baseline, {})
    same, tuned = (f"{ratios[s]:.2f}" if s in ratios else "" for s in (row["setting"], "tuned"))
    return [
        *head,
        _ms(ms["median"]),
        _ms(ms["min"]),
        f"{_ms(ms['p10'])} - {_ms(ms['p90'])}",
        rate,
        _percent(row["roof_fraction"]),
        same,
        tuned,
        _percent(row["above_bound"]),
        memory,
        worst,
    ]


def _ms(value: float) -> str:
    """Microseconds show below 1 ms."""
    return f"{value:.2f}" if value >= 1 else f"{value:.4f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def table(rows: Sequence[Row], baseline: str) -> tuple[list[str], list[list[str]]]:
    """Column titles and lines, without the columns in which no row says anything."""
    lines = [cells(row, baseline) for row in rows]
    used = [i for i in range(len(COLUMNS)) if any(line[i] for line in lines)]
    return [COLUMNS[i] for i in used], [[line[i] for i in used] for line in lines]


def load_note(rows: Sequence[Row]) -> str:
    """How quiet the machine was, in one line."""
    loads = [row["other_cores"] for row in rows if "other_cores" in row]
    if not loads:
        return ""
    worst = max(loads)
    busy = sum(not row["quiet"] for row in rows if "quiet" in row)
    word = "quiet machine" if not busy else f"NOT QUIET: {busy} of {len(loads)} rows disturbed, repeat before quoting"
    return f"others used {sum(loads) / len(loads):.2f} cores on average, {worst:.2f} at most: {word}"


def print_table(rows: Sequence[Row], baselines: Sequence[str]) -> None:
    """One table per case; plain text without rich. Ratios refer to the first of `baselines` that a case has."""
    for case, group in by_case(rows):
        names = {row["provider"] for row in group}
        baseline = next((name for name in baselines if name in names), "")
        title = case_title(case)
        note = load_note(group)
        if baseline:
            note += f'\nx same, x tuned: times faster than "{baseline}" (same setting; tuned setting)'
        titles, lines = table(group, baseline)
        try:
            _print_rich(title, titles, lines, note)
        except ImportError:
            print("\n" + plain_table(title, titles, lines, note))


def _print_rich(title: str, titles: Sequence[str], lines: Sequence[Sequence[str]], note: str) -> None:
    from rich.console import Console
    from rich.table import Table

    made = Table(title=title, caption=note, title_justify="left", caption_justify="left")
    for name in titles:
        made.add_column(name, justify="left" if name in ("provider", "setting") else "right", no_wrap=True)
    for line in lines:
        made.add_row(*line)
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)  # a file or a pipe has no width to fit
    console.print(made)


def plain_table(title: str, titles: Sequence[str], lines: Sequence[Sequence[str]], note: str) -> str:
    """The same without rich."""
    every = [titles, *lines]
    widths = [max(len(line[i]) for line in every) for i in range(len(titles))]
    body = ["  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in every]
    return "\n".join([title, *body, note])


def plot(rows: Sequence[Row], path: Path) -> Path:
    """Draw the median time of every provider (bars; whiskers p10 to p90), one panel per case, to a PNG.

    A panel's axis begins at 0; it is logarithmic only where times differ by more than 20, since cut-off bars mislead.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    timed = [row for row in rows if row["kind"] != "roof" and "ms" in row]
    if not timed:
        raise ValueError("there are no timed rows to plot")
    groups = by_case(timed)
    heights = [0.9 + 0.3 * len(group) for _, group in groups]
    figure = Figure(figsize=(10, sum(heights)), layout="constrained")
    panels = figure.subplots(len(groups), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    colours = {"fastpar": "#1b7837", "torch": "#8c8c8c", "bound": "#c7b46a"}
    for axes, (case, group) in zip(panels, groups, strict=True):
        for index, row in enumerate(group):
            ms = row["ms"]
            whiskers = [[max(0.0, ms["median"] - ms["p10"])], [max(0.0, ms["p90"] - ms["median"])]]
            hatch = "//" if row["setting"] == "tuned" else None
            axes.barh(index, ms["median"], xerr=whiskers, color=colours[row["kind"]], hatch=hatch, edgecolor="white")
            axes.text(max(ms["median"], ms["p90"]), index, f"  {ms['median']:.3g} ms", va="center", fontsize=7)
        axes.set_yticks(range(len(group)), [f"{row['provider']} ({row['setting']})" for row in group], fontsize=7)
        axes.invert_yaxis()
        times = [row["ms"]["median"] for row in group]
        axes.set_xscale("log" if max(times) > 20 * min(times) else "linear")
        axes.margins(x=0.15)
        axes.set_title(case_title(case), fontsize=8, loc="left")
        axes.tick_params(axis="x", labelsize=7)
    panels[-1].set_xlabel("ms (median; whiskers p10 to p90)", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    return path
