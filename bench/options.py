"""Flags that every bench has, and the loop that every bench runs."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.harness import SETTINGS, Case, Measurement, Plan, ProviderError, measure
from bench.ranks import LaneError, ProcessLane
from bench.report import plot, print_table
from bench.rows import Row, default_path, make_rows, new_run, save

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Bench:
    """What makes one bench different from another.

    name      of the bench, of its results file
    baselines the provider that the ratio columns of a table refer to: the first of these that was measured
    cases     from the parsed flags and a number of ranks to the cases to measure
    memory    whether peak memory is measured unless ``--no-memory`` says otherwise
    quick     flag values that ``--quick`` replaces
    """

    name: str
    baselines: tuple[str, ...]
    cases: Callable[[argparse.Namespace, int], Sequence[Case]]
    memory: bool
    quick: dict[str, Any]


def parser(bench: Bench, description: str, **defaults: Any) -> argparse.ArgumentParser:
    """The common flags; `defaults` overrides their defaults. A bench adds its own shape flags."""
    made = argparse.ArgumentParser(
        prog=f"fastpar bench {bench.name}",
        description=description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = made.add_argument
    add("--dtype", type=_listed(_dtype), default=["fp32", "bf16"], metavar="LIST", help="fp32, bf16")
    add("--ranks", type=_listed(_positive), default=[1, 2], metavar="LIST", help="numbers of ranks (1: one process)")
    add("--threads", type=_listed(_positive), default=[1], metavar="LIST", help="threads of a single process")
    add("--rank-threads", type=_positive, default=1, metavar="N", help="threads of each of several ranks")
    add("--settings", type=_listed(_setting), default=list(SETTINGS), metavar="LIST", help=_settings_help())
    add("--only", type=_listed(str), default=[], metavar="LIST", help="providers whose name contains one of these")
    add("--blocks", type=_positive, default=5, metavar="N", help="rounds over all providers")
    add("--iters", type=_positive, default=2, metavar="N", help="samples per provider in a block")
    add("--lead", type=int, default=1, metavar="N", help="untimed samples before those of every block")
    add("--memory", action=argparse.BooleanOptionalAction, default=bench.memory, help="peak memory, in fresh processes")
    add("--quick", action="store_true", help="small shapes, few samples; nothing is saved unless --json is given")
    add("--json", type=Path, metavar="FILE", help="results file to merge the rows into (default: bench/results/...)")
    add("--no-save", action="store_true", help="print only")
    add("--plot", action="store_true", help="draw the results file (or, if none is saved, this run) as a PNG beside it")
    made.set_defaults(**defaults)
    return made


def _settings_help() -> str:
    return "; ".join(f"{s.name}: {s.note}" for s in SETTINGS.values())


def _listed(convert: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    def parse(text: str) -> list[Any]:
        return [convert(part.strip()) for part in text.split(",") if part.strip()]

    return parse


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _dtype(text: str) -> str:
    if text not in DTYPES:
        raise argparse.ArgumentTypeError(f"unknown dtype {text!r}; choose from {', '.join(DTYPES)}")
    return {torch.float32: "fp32", torch.bfloat16: "bf16"}[DTYPES[text]]


def _setting(text: str) -> str:
    if text not in SETTINGS:
        raise argparse.ArgumentTypeError(f"unknown setting {text!r}; choose from {', '.join(SETTINGS)}")
    return text


positive_list = _listed(_positive)


def apply_quick(bench: Bench, flags: argparse.Namespace) -> None:
    """Replace what ``--quick`` replaces."""
    if flags.quick:
        for name, value in bench.quick.items():
            setattr(flags, name, value)


def run(bench: Bench, flags: argparse.Namespace, command: Sequence[str]) -> int:
    """Measure, print, save, draw. 0 when every provider was right and was timed, else 1."""
    apply_quick(bench, flags)
    facts = new_run(command)
    run_id = f"{facts['date']} {facts['commit']}"
    rows: list[Row] = []
    try:
        for world_size in flags.ranks:
            for threads in flags.threads if world_size == 1 else [flags.rank_threads]:
                new = _measure_lanes(bench, flags, world_size, threads, run_id)
                print_table(new, bench.baselines)
                rows += new
    except (LaneError, ProviderError) as error:
        print(f"fastpar bench: {error}", file=sys.stderr)
        return 1
    _keep(bench, flags, facts, run_id, rows)
    problems = [row for row in rows if row["problem"]]
    for row in problems:
        print(f"{row['provider']} ({row['setting']}): {row['problem']}", file=sys.stderr)
    return 1 if problems else 0


def _measure_lanes(bench: Bench, flags: argparse.Namespace, world_size: int, threads: int, run_id: str) -> list[Row]:
    """All cases at one number of ranks; the settings' lanes live side by side and take turns."""
    plan = Plan(flags.blocks, flags.iters, flags.lead)
    settings = [SETTINGS[name] for name in flags.settings]
    rows = []
    with contextlib.ExitStack() as stack:
        lanes = [stack.enter_context(ProcessLane(s, world_size, threads)) for s in settings]
        for case in bench.cases(flags, world_size):
            title = {**case.describe(), "ranks": world_size, "threads": threads}
            print(f"measuring {title}", file=sys.stderr, flush=True)
            found = measure(case, lanes, plan, flags.only)
            if flags.memory and (world_size > 1 or threads == flags.threads[0]):  # threads do not change memory
                _add_memory(case, found, settings[0].name, world_size, threads)
            rows += make_rows(bench.name, title, found, run_id)
    return rows


def _add_memory(case: Case, found: Sequence[Measurement], setting: str, world_size: int, threads: int) -> None:
    """Peak memory under one setting: huge pages would round it up."""
    for m in found:
        if m.setting == setting and m.seconds and m.provider.kind != "roof":
            with ProcessLane(SETTINGS[setting], world_size, threads) as lane:
                try:
                    lane.build(case)
                    m.extra_bytes = lane.memory(m.provider.name)
                except ProviderError as error:
                    m.problem = f"timed, but its memory could not be measured: {error}"


def _keep(bench: Bench, flags: argparse.Namespace, facts: dict[str, Any], run_id: str, rows: list[Row]) -> None:
    path = flags.json or default_path(bench.name, facts["machine"])
    saves = not flags.no_save and (flags.json is not None or not flags.quick)
    if saves:
        rows = save(path, run_id, facts, rows)["rows"]
        print(f"saved {path}")
    if flags.plot:
        picture = path.with_suffix(".png") if saves else Path(f"{bench.name}.png")
        print(f"drew {plot(rows, picture)}")
