"""`fastpar simulate`: what schedules would take, as a table; their pictures and traces."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

from fastpar.pipeline.schedules.costs import Costs, Number, simplest
from fastpar.pipeline.schedules.generators import make_schedule, schedule_names
from fastpar.pipeline.schedules.schedule import Schedule, ScheduleError
from fastpar.pipeline.simulation.simulate import Simulation, simulate
from fastpar.pipeline.simulation.timeline import table

_DESCRIPTION = """\
Simulate pipeline schedules: makespan, idle time, activations kept, messages; exactly.

Costs and activations are those of one microbatch on one rank's share of the model, 1/p of it. A schedule that cuts the
model into more parts than there are ranks pays, and keeps, accordingly less per part, so that rows compare."""

_EPILOG = """\
examples:
  fastpar simulate --schedule 1f1b,zb_h1 -p 4 -m 8 --costs 10,20,6 --hop 2
  fastpar simulate --schedule all -p 8 -m 32 --memory 8
  fastpar simulate --schedule 1f1b -p 4 -m 8 --text --svg 1f1b.svg --trace 1f1b.json
  fastpar simulate --csv mine.csv --schedule 1f1b"""


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status: 0; 1 for a schedule that cannot be executed; 2 for bad flags."""
    parser = _parser()
    flags = parser.parse_args(arguments)
    _check(parser, flags)
    schedules, left_out = _schedules(parser, flags)
    for flag in ("trace", "save_csv"):
        if getattr(flags, flag) and len(schedules) != 1:
            parser.error(f"--{flag.replace('_', '-')} takes one schedule, got {len(schedules)}")
    try:
        found = [simulate(schedule, _costs(flags, schedule)) for schedule in schedules]
    except ScheduleError as error:
        print(f"fastpar simulate: {error}", file=sys.stderr)
        return 1
    print(_report(found, flags))
    for reason in left_out:
        print(f"left out: {reason}")
    _write(found, flags)
    return 0


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="fastpar simulate",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    what = made.add_argument_group("what is simulated")
    names = ", ".join(schedule_names())
    what.add_argument("-s", "--schedule", metavar="NAMES", help=f"names with commas between, or all: {names}")
    what.add_argument("--csv", metavar="FILE", help="a schedule as `to_csv` or torch.distributed.pipelining writes it")
    what.add_argument("-p", "--ranks", type=_positive, metavar="P", help="(default: those of the file)")
    what.add_argument("-m", "--microbatches", type=_positive, metavar="M", help="(default: those of the file)")
    what.add_argument("-v", "--stages-per-rank", type=_positive, metavar="V", help="where a schedule has that option")
    cost = made.add_argument_group("costs: whole numbers, decimals or fractions such as 1/3")
    cost.add_argument("--costs", default="1,1,1", metavar="F,I,W", help="forward, input and weight gradients (1,1,1)")
    cost.add_argument("--hop", type=_number, default=0, metavar="T", help="latency of a message between ranks (0)")
    cost.add_argument(
        "--overlap", default="sum", metavar="sum|max|X", help="OVERLAP_F_B: sum or max of its parts, or X times the sum"
    )
    cost.add_argument("--memory", type=_number, metavar="N", help="activations that a rank has room for, until W")
    out = made.add_argument_group("output")
    out.add_argument("--text", action="store_true", help="print the timelines")
    out.add_argument("--png", metavar="FILE", help="draw the timelines, one below the other")
    out.add_argument("--svg", metavar="FILE", help="the same")
    out.add_argument("--arrows", action="store_true", help="draw the messages too")
    out.add_argument("--trace", metavar="FILE", help="write a trace for ui.perfetto.dev")
    out.add_argument("--save-csv", metavar="FILE", help="write the schedule itself")
    return made


def _check(parser: argparse.ArgumentParser, flags: argparse.Namespace) -> None:
    """Turn --costs and --overlap into numbers; refuse flags that do not go together."""
    try:
        flags.costs = [_number(word) for word in flags.costs.split(",")]
        flags.overlap = flags.overlap if flags.overlap in ("sum", "max") else _number(flags.overlap)
    except argparse.ArgumentTypeError as error:
        parser.error(str(error))
    if len(flags.costs) != 3:
        parser.error(f"--costs takes three numbers, of F, I and W, got {len(flags.costs)}")
    for flag in ("png", "svg"):
        path = getattr(flags, flag)
        if path and Path(path).suffix != f".{flag}":
            parser.error(f"--{flag} writes a file whose name ends in .{flag}, got {path!r}")
    if flags.arrows and not (flags.png or flags.svg):
        parser.error("--arrows needs --png or --svg")


def _costs(flags: argparse.Namespace, schedule: Schedule) -> Costs:
    """What the parts of a schedule cost: a rank's share of the model, divided by its parts."""
    share = Fraction(schedule.num_ranks, schedule.num_parts)
    forward, backward_input, backward_weight = (simplest(share * time) for time in flags.costs)
    return Costs(
        forward, backward_input, backward_weight, hop=flags.hop, overlap=flags.overlap, activation=simplest(share)
    )


def _schedules(parser: argparse.ArgumentParser, flags: argparse.Namespace) -> tuple[list[Schedule], list[str]]:
    """The schedules asked for; of `all`, why some cannot be had."""
    schedules = []
    if flags.csv:
        try:
            schedules.append(Schedule.from_csv(Path(flags.csv), name=Path(flags.csv).stem))
        except (OSError, UnicodeDecodeError) as error:
            parser.error(f"--csv: {error}")
        except ScheduleError as error:
            print(f"fastpar simulate: {flags.csv}: {error}", file=sys.stderr)
            raise SystemExit(1) from None
        flags.ranks = flags.ranks or schedules[0].num_ranks
        flags.microbatches = flags.microbatches or schedules[0].num_microbatches
    if not flags.schedule:
        if not flags.csv:
            parser.error("--schedule or --csv is needed")
        return schedules, []
    if flags.ranks is None or flags.microbatches is None:
        parser.error("--schedule needs -p and -m")
    names = schedule_names() if flags.schedule == "all" else flags.schedule.split(",")
    made, left_out, took_option = [], [], False
    for name in names:
        try:
            schedule, took = _make(name, flags)
        except (ValueError, TypeError) as error:
            if flags.schedule != "all":
                parser.error(str(error))
            left_out.append(f"{name}: {error}")
            continue
        made.append(schedule)
        took_option |= took
    if flags.stages_per_rank and not took_option and made:
        parser.error(
            f"-v {flags.stages_per_rank}: {', '.join(names)} has one stage per rank, or its own number of them"
        )
    return schedules + made, left_out


def _make(name: str, flags: argparse.Namespace) -> tuple[Schedule, bool]:
    """The schedule, and whether it has the option that -v sets."""
    if flags.stages_per_rank:
        try:
            options = {"stages_per_rank": flags.stages_per_rank}
            return make_schedule(name, flags.ranks, flags.microbatches, **options), True
        except TypeError:
            pass  # It has no such option.
    return make_schedule(name, flags.ranks, flags.microbatches), False


def _report(found: Sequence[Simulation], flags: argparse.Namespace) -> str:
    head = ["schedule", "makespan", "idle", "bubble", "kept until I", "kept until W", "messages"]
    rows = [head + ([f"fits {_text(flags.memory)}"] if flags.memory is not None else [])]
    for one in found:
        kept = max(one.peak_until_weight)
        cells = [one.schedule.name, _text(one.makespan), _text(max(one.idle)), f"{100 * float(one.bubble):.2f} %"]
        cells += [_text(max(one.peak_until_input)), _text(kept), str(one.num_messages)]
        rows.append(cells + (["yes" if kept <= flags.memory else "no"] if flags.memory is not None else []))
    sizes = {(one.schedule.num_ranks, one.schedule.num_microbatches) for one in found}
    ranks = "; ".join(f"{p} ranks, {m} microbatches" for p, m in sorted(sizes))
    times = ", ".join(map(_text, flags.costs))
    lines = [f"{ranks}; F, I, W = {times}; hop {_text(flags.hop)}", "", table(rows)]
    if flags.text:
        lines += [f"\n{one.schedule.name}\n{one.timeline.to_text()}" for one in found]
    return "\n".join(lines)


def _write(found: Sequence[Simulation], flags: argparse.Namespace) -> None:
    timelines = [one.timeline for one in found]
    if flags.trace:
        timelines[0].to_chrome_trace(flags.trace)
    if flags.save_csv:
        found[0].schedule.to_csv(flags.save_csv)
    for path in filter(None, (flags.png, flags.svg)):
        from fastpar.pipeline.simulation.plot import plot

        plot(timelines, path, arrows=flags.arrows)


def _text(number: Number) -> str:
    return str(number) if isinstance(number, int) else f"{float(number):.6g}"


def _number(text: str) -> Number:
    try:
        value = Fraction(text)
    except (ValueError, ZeroDivisionError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is negative")
    return simplest(value)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)
