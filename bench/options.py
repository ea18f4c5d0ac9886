"""Flags that every bench has, and the loop that every bench runs."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.harness import CUDA_SETTINGS, SETTINGS, Case, Measurement, ProviderError, Sampling, Setting, measure
from bench.ranks import LaneError, ProcessLane
from bench.report import plot, print_table
from bench.rows import Row, default_path, load, make_rows, new_run, save

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Bench:
    """What makes one bench different from another.

    name      of the bench, of its results file
    baselines the provider that the ratio columns of a table refer to: the first of these that was measured
    cases     from the parsed flags and a number of ranks to the cases to measure
    memory    whether peak memory is measured unless ``--no-memory`` says otherwise
    quick     flag values that ``--quick`` replaces
    devices   what ``--device`` may be; a bench whose cases honour `Rank.device` names "cuda"
    figures   what else to print below the table of a case, from its rows
    """

    name: str
    baselines: tuple[str, ...]
    cases: Callable[[argparse.Namespace, int], Sequence[Case]]
    memory: bool
    quick: dict[str, Any]
    devices: tuple[str, ...] = ("cpu",)
    figures: Callable[[Sequence[Row]], str] | None = None


def parser(bench: Bench, description: str, **defaults: Any) -> argparse.ArgumentParser:
    """The common flags; `defaults` overrides their defaults. A bench adds its own shape flags."""
    made = argparse.ArgumentParser(
        prog=f"fastpar bench {bench.name}",
        description=description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = made.add_argument
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where the tensors are")
    add("--dtype", type=_listed(_dtype), default=["fp32", "bf16"], metavar="LIST", help="fp32, bf16")
    add("--ranks", type=_listed(positive), default=[1, 2], metavar="LIST", help="numbers of ranks (1: one process)")
    add("--threads", type=_listed(positive), default=[1], metavar="LIST", help="threads of a single process")
    add("--rank-threads", type=positive, default=1, metavar="N", help="threads of each of several ranks")
    add("--settings", type=_listed(_setting), default=argparse.SUPPRESS, metavar="LIST", help=_settings_help())
    add(
        "--only",
        type=_listed(str),
        default=[],
        metavar="LIST",
        help="providers whose name contains one of these; =NAME: that is it",
    )
    add("--blocks", type=positive, default=5, metavar="N", help="rounds over all providers")
    add("--iters", type=positive, default=2, metavar="N", help="samples per provider in a block")
    add("--lead", type=int, default=1, metavar="N", help="untimed samples before those of every block")
    add("--memory", action=argparse.BooleanOptionalAction, default=bench.memory, help="peak memory, in fresh processes")
    add("--quick", action="store_true", help="small shapes, few samples; nothing is saved unless --json is given")
    add("--json", type=Path, metavar="FILE", help="results file to merge the rows into (default: bench/results/...)")
    add("--no-save", action="store_true", help="print only")
    add("--plot", action="store_true", help="draw the results file (or, if none is saved, this run) as a PNG beside it")
    made.set_defaults(**defaults)
    return made


def _settings_help() -> str:
    notes = "; ".join(f"{s.name}: {s.note}" for s in (SETTINGS | CUDA_SETTINGS).values())
    return f"{notes} (default: {','.join(SETTINGS)}; on CUDA: cold)"


def _listed(convert: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    def parse(text: str) -> list[Any]:
        return [convert(part.strip()) for part in text.split(",") if part.strip()]

    return parse


def positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _dtype(text: str) -> str:
    if text not in DTYPES:
        raise argparse.ArgumentTypeError(f"unknown dtype {text!r}; choose from {', '.join(DTYPES)}")
    return {torch.float32: "fp32", torch.bfloat16: "bf16"}[DTYPES[text]]


def _setting(text: str) -> str:
    known = SETTINGS | CUDA_SETTINGS
    if text not in known:
        raise argparse.ArgumentTypeError(f"unknown setting {text!r}; choose from {', '.join(known)}")
    return text


positive_list = _listed(positive)


def apply_quick(bench: Bench, flags: argparse.Namespace) -> None:
    """Replace what ``--quick`` replaces."""
    if flags.quick:
        for name, value in bench.quick.items():
            setattr(flags, name, value)


def apply_device(bench: Bench, flags: argparse.Namespace) -> None:
    """Fill in what depends on ``--device``. Raises ValueError for what this bench or machine cannot do."""
    if flags.device not in bench.devices:
        raise ValueError(f"--device {flags.device}: the bench {bench.name!r} runs on {', '.join(bench.devices)} only")
    known = SETTINGS if flags.device == "cpu" else CUDA_SETTINGS
    if "settings" not in flags:
        flags.settings = list(SETTINGS) if flags.device == "cpu" else ["cold"]
    wrong = [name for name in flags.settings if name not in known]
    if wrong:
        raise ValueError(f"--settings {','.join(wrong)}: on {flags.device} choose from {', '.join(known)}")
    if flags.device == "cpu":
        return
    if not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no CUDA device here")
    count = torch.cuda.device_count()
    # One rank, one device: NCCL refuses two ranks on one, and they would share its bandwidth.
    if max(flags.ranks) > count:
        given = [str(r) for r in flags.ranks if r <= count]
        if not given:
            raise ValueError(f"--ranks {','.join(map(str, flags.ranks))}: this machine has {count} CUDA devices")
        print(f"leaving out more ranks than the {count} CUDA devices here", file=sys.stderr)
        flags.ranks = [r for r in flags.ranks if r <= count]


def run(bench: Bench, flags: argparse.Namespace, command: Sequence[str]) -> int:
    """Measure, print, save, draw. 0 when every provider was right and was timed, 1 when not, 2 for impossible flags.

    Rows are saved case by case: a run that is stopped keeps what it has measured.
    """
    apply_quick(bench, flags)
    try:
        apply_device(bench, flags)
    except ValueError as error:
        print(f"fastpar bench {bench.name}: {error}", file=sys.stderr)
        return 2
    facts = new_run(command)
    run_id = f"{facts['date']} {facts['commit']}"
    path = flags.json or default_path(bench.name, facts["machine"], flags.device)
    saves = not flags.no_save and (flags.json is not None or not flags.quick)
    rows: list[Row] = []
    try:
        for world_size in flags.ranks:
            for threads in flags.threads if world_size == 1 and flags.device == "cpu" else [flags.rank_threads]:
                for new in _measure_lanes(bench, flags, world_size, threads, run_id):
                    print_table(new, bench.baselines)
                    if bench.figures is not None:
                        print(bench.figures(new))
                    rows += new
                    if saves:
                        save(path, run_id, facts, new)
    except (LaneError, ProviderError) as error:
        print(f"fastpar bench: {error}", file=sys.stderr)
        return 1
    if saves:
        print(f"saved {path}")
    if flags.plot:
        picture = path.with_suffix(".png") if saves else Path(f"{bench.name}.png")
        print(f"drew {plot(load(path)['rows'] if saves else rows, picture)}")
    problems = [row for row in rows if row["problem"]]
    for row in problems:
        print(f"{row['provider']} ({row['setting']}): {row['problem']}", file=sys.stderr)
    return 1 if problems else 0


def _measure_lanes(
    bench: Bench, flags: argparse.Namespace, world_size: int, threads: int, run_id: str
) -> Iterator[list[Row]]:
    """The rows of one case after the other at one number of ranks; the settings' lanes live side by side and take
    turns.
    """
    plan = Sampling(flags.blocks, flags.iters, flags.lead)
    settings = [(SETTINGS | CUDA_SETTINGS)[name] for name in flags.settings]
    on_cpu = flags.device == "cpu"
    told: set[str] = set()
    with contextlib.ExitStack() as stack:
        lanes = [stack.enter_context(ProcessLane(s, world_size, threads, device=flags.device)) for s in settings]
        for case in bench.cases(flags, world_size):
            title = {**case.describe(), "ranks": world_size, **({"threads": threads} if on_cpu else {})}
            print(f"measuring {title}", file=sys.stderr, flush=True)
            found = measure(case, lanes, plan, flags.only)
            _name_absent(found, told)
            if flags.memory and not on_cpu:
                _add_memory(found, settings[0].name, lambda name: lanes[0].memory(name))
            elif flags.memory and (world_size > 1 or threads == flags.threads[0]):  # threads do not change memory
                _add_memory(found, settings[0].name, partial(_fresh_memory, case, settings[0], world_size, threads))
            yield make_rows(bench.name, title, found, run_id)


def _name_absent(found: Sequence[Measurement], told: set[str]) -> None:
    """Say which peers are left out, once each."""
    for m in found:
        if m.provider.absent and m.provider.name not in told:
            told.add(m.provider.name)
            print(f"left out: {m.provider.name} ({m.provider.absent})", flush=True)


def _fresh_memory(case: Case, setting: Setting, world_size: int, threads: int, name: str) -> int:
    with ProcessLane(setting, world_size, threads) as lane:
        lane.build(case)
        return lane.memory(name)


def _add_memory(found: Sequence[Measurement], setting: str, memory_of: Callable[[str], int]) -> None:
    """Peak memory under one setting (the first; on CPU huge pages would round it up)."""
    for m in found:
        if m.setting == setting and m.seconds and m.provider.kind != "roof":
            try:
                m.extra_bytes = memory_of(m.provider.name)
            except ProviderError as error:
                m.problem = f"timed, but its memory could not be measured: {error}"
