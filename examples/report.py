"""What the trainer shows: a progress bar while it runs; a table, a PNG and a JSON file at the end."""

import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import nn

import fastpar as fp

PLAIN_LINES = 10  # progress lines of a run whose stderr is not a terminal


@dataclass
class Run:
    """What one training run measured."""

    name: str
    tokens_per_step: int
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # of every step
    memory: dict[str, int] = field(default_factory=dict)  # peak bytes of a step by kind, of the rank that has most
    loads: list[list[list[int]]] = field(default_factory=list)  # tokens of each expert, by step and layer

    @property
    def wall_seconds(self) -> float:
        return sum(self.seconds)

    @property
    def tokens_per_second(self) -> float:
        """Mean over all steps but the first, which pays for warming up; over all if there is only one."""
        timed = self.seconds[1:] or self.seconds
        return self.tokens_per_step * len(timed) / sum(timed)

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "final_loss": self.losses[-1],
            "tokens_per_second": round(self.tokens_per_second, 1),
            "wall_seconds": round(self.wall_seconds, 3),
            "bytes_per_rank": self.memory,
            "losses": self.losses,
            **({"expert_loads": self.loads} if self.loads else {}),
        }


class Meter:
    """Context manager that times the steps of a run and shows its loss, speed and ETA on stderr: a bar on a terminal,
    else a line now and then, or nothing if not `visible` (all ranks but one)."""

    def __init__(self, name: str, steps: int, tokens_per_step: int, *, visible: bool = True) -> None:
        self.run = Run(name, tokens_per_step)
        self._steps = steps
        self._console = Console(stderr=True)
        self._bar: Progress | None = None
        self._lines = visible and not self._console.is_terminal
        if visible and self._console.is_terminal:
            self._bar = Progress(
                TextColumn("[bold]{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("loss {task.fields[loss]:.3f}"),
                TextColumn("{task.fields[speed]:,.0f} tokens/s"),
                TimeRemainingColumn(),
                console=self._console,
            )

    def __enter__(self) -> "Meter":
        if self._bar is not None:
            self._bar.start()
            self._bar.add_task(self.run.name, total=self._steps, loss=float("nan"), speed=0.0)
        self._last = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step_done(self, loss: float, loads: list[list[int]] | None = None) -> None:
        now = time.perf_counter()
        self.run.losses.append(loss)
        if loads:
            self.run.loads.append(loads)
        self.run.seconds.append(now - self._last)
        self._last = now

        done, speed = len(self.run.losses), self.run.tokens_per_second
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, loss=loss, speed=speed)
        elif self._lines and (done in (1, self._steps) or done % max(1, self._steps // PLAIN_LINES) == 0):
            left = (self._steps - done) * self.run.tokens_per_step / speed
            line = (
                f"{self.run.name}: step {done}/{self._steps}, loss {loss:.3f}, {speed:,.0f} tokens/s, {left:.0f} s left"
            )
            print(line, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Comparison:
    """The parallel run beside the single-process one. `tolerance` None: the difference is shown, not judged."""

    parallel: Run
    single: Run
    tolerance: float | None

    @property
    def differences(self) -> list[float]:
        pairs = zip(self.parallel.losses, self.single.losses, strict=True)
        return [abs(parallel - single) for parallel, single in pairs]

    @property
    def passed(self) -> bool:
        # `not <=` would let a NaN loss through as a pass if it were written as `>`.
        return self.tolerance is None or all(difference <= self.tolerance for difference in self.differences)


def loads_of(
    parts: Sequence[nn.Module], mesh: fp.Mesh | None = None, layout: fp.Layout | None = None
) -> list[list[int]]:
    """How many tokens each expert got since the last call, by layer: those of all ranks of the mesh."""
    own: dict[str, torch.Tensor] = {}
    for part in parts:
        own |= fp.expert.expert_loads(part, reset=True)
    everyone: list[dict[str, torch.Tensor]] = [own]
    if mesh is not None and layout is not None and mesh.world_size > 1:
        has_own_tokens = mesh.rank("tp") == 0 or layout.sequence_parallel
        everyone = [{}] * mesh.world_size
        dist.all_gather_object(everyone, own if has_own_tokens else {})
    layers = sorted({name for each in everyone for name in each}, key=lambda name: (len(name), name))
    return [torch.stack([each[name] for each in everyone if name in each]).sum(0).tolist() for name in layers]


def save(out: Path, settings: dict[str, Any], parallel: Run, comparison: Comparison | None) -> None:
    """The table, and files in the folder `out`."""
    print_table(parallel, comparison)
    save_json(out / "report.json", settings, parallel, comparison)
    save_plot(out / "losses.png", parallel, comparison)
    pictures = "losses.png, layout.svg"
    if parallel.loads:
        save_loads(out / "loads.png", parallel)
        pictures += ", loads.png"
    print(f"wrote {out}/report.json and {pictures}")


def print_table(parallel: Run, comparison: Comparison | None) -> None:
    """Loss at some steps, then the totals; with a comparison, the single process and the difference beside it."""
    single = comparison.single if comparison else None
    runs = [run for run in (parallel, single) if run is not None]
    # The threads belong beside the speeds: the parallel run has that many per rank, the single process in all.
    notes = f"CPU threads per process: {torch.get_num_threads()}, CPUs: {os.cpu_count()}"
    if parallel.memory:
        notes += "\nMB of the rank that has most, at the worst moment of a step for each kind"
    table = Table(title="loss, nats per byte", title_justify="left", caption=notes, caption_justify="left")
    for column in ("step", *(run.name for run in runs), *(["|difference|"] if comparison else [])):
        table.add_column(column, justify="right")
    for step in _chosen_steps(len(parallel.losses)):
        difference = [f"{comparison.differences[step - 1]:.1e}"] if comparison else []
        table.add_row(str(step), *(f"{run.losses[step - 1]:.6f}" for run in runs), *difference)
    table.add_section()
    table.add_row("tokens/s", *(f"{run.tokens_per_second:,.0f}" for run in runs))
    table.add_row("seconds", *(f"{run.wall_seconds:.1f}" for run in runs))
    if parallel.memory:
        table.add_section()
        for kind in parallel.memory:
            table.add_row(f"MB: {kind}", *(f"{run.memory[kind] / 1e6:.2f}" for run in runs))

    console = Console()
    console.print(table)
    if comparison is not None:
        verdict = "not judged in this dtype"
        if comparison.tolerance is not None:
            word = "[green]ok[/]" if comparison.passed else "[bold red]TOO LARGE[/]"
            verdict = f"at most {comparison.tolerance:.0e} allowed: {word}"
        steps, largest = len(parallel.losses), max(comparison.differences)
        console.print(f"largest difference over {steps} steps: {largest:.1e}; {verdict}")


def _chosen_steps(count: int) -> list[int]:
    """1-based steps worth a row: the first few and the last, where differences start and where they have grown."""
    return sorted({step for step in (1, 2, 5, 10, 20, 40, 60, 80, count // 2, count) if 1 <= step <= count})


def save_json(path: Path, settings: dict[str, Any], parallel: Run, comparison: Comparison | None) -> None:
    """Write everything that was measured, with what it takes to measure it again."""
    report: dict[str, Any] = {
        "settings": settings,
        "machine": {"cpus": os.cpu_count(), "platform": platform.platform(), "processor": platform.machine()},
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "fastpar": fp.__version__},
        "parallel": parallel.as_json(),
    }
    if comparison is not None:
        report["single"] = comparison.single.as_json()
        report["difference"] = {
            "max": max(comparison.differences),
            "tolerance": comparison.tolerance,
            "passed": comparison.passed,
            "per_step": comparison.differences,
        }
    path.write_text(json.dumps(report, indent=2) + "\n")


def save_plot(path: Path, parallel: Run, comparison: Comparison | None) -> None:
    """Draw the loss curves, and below them, on a log scale, how far apart they are."""
    from matplotlib.figure import Figure  # no pyplot: it would pick a window system and keep global state

    figure = Figure(figsize=(8, 6 if comparison else 4), layout="constrained")
    steps = range(1, len(parallel.losses) + 1)
    if comparison is None:
        loss_axes = figure.subplots()
        loss_axes.set_xlabel("step")
    else:
        loss_axes, difference_axes = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
        loss_axes.plot(steps, comparison.single.losses, color="#eb6834", linewidth=4, label=comparison.single.name)
        smallest = min((gap for gap in comparison.differences if gap > 0), default=1e-9)
        # Equal losses have no logarithm: they are drawn at the bottom of the axis.
        drawn = [max(gap, smallest / 2) for gap in comparison.differences]
        difference_axes.plot(steps, drawn, color="#52514e", linewidth=1.5)
        if comparison.tolerance is not None:
            difference_axes.axhline(comparison.tolerance, color="#52514e", linestyle=":", linewidth=1)
            difference_axes.annotate(
                "allowed", (1, comparison.tolerance), xytext=(0, -4), textcoords="offset points", va="top", fontsize=8
            )
        difference_axes.set(yscale="log", xlabel="step", ylabel="|difference|")
        difference_axes.grid(alpha=0.25)
    loss_axes.plot(steps, parallel.losses, color="#2a78d6", linewidth=1.5, label=parallel.name)
    loss_axes.set_ylabel("loss, nats per byte")
    loss_axes.grid(alpha=0.25)
    loss_axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def save_loads(path: Path, run: Run) -> None:
    """Draw the share of tokens of each expert over the steps, a row per layer: an even load is one colour."""
    from matplotlib.figure import Figure

    shares = torch.tensor(run.loads, dtype=torch.float32)  # [steps, layers, experts]
    shares = shares / shares.sum(-1, keepdim=True).clamp_min(1) * shares.size(-1)
    figure = Figure(figsize=(8, 1 + 1.2 * shares.size(1)), layout="constrained")
    all_axes = figure.subplots(shares.size(1), 1, sharex=True, squeeze=False)[:, 0]
    for layer, axes in enumerate(all_axes):
        extent = (0.5, len(shares) + 0.5, shares.size(-1) - 0.5, -0.5)
        values = shares[:, layer].T.numpy()
        image = axes.imshow(
            values, aspect="auto", cmap="RdBu_r", vmin=0, vmax=2, extent=extent, interpolation="nearest"
        )
        axes.set_ylabel(f"layer {layer}\nexpert")
    all_axes[-1].set_xlabel("step")
    figure.colorbar(image, ax=all_axes, label="load, 1 where it is even")
    figure.savefig(path, dpi=150)
