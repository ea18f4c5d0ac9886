"""The ``fastpar`` command.

    fastpar doctor [--json]             is this installation healthy? exit status 0 or 1
    fastpar bench [<name>] [flags]      the microbenchmarks of a source checkout; without a name, all of them
    fastpar simulate [flags]            what pipeline schedules would take, as a table, pictures and traces
    fastpar verify [flags]              a model of transformers in a layout, compared with itself whole
    fastpar plan [flags]                how a model is best spread over a machine, and why
    fastpar explain PLAN [flags]        a plan again, or beside another layout
    fastpar calibrate --out FILE        a machine for plans, as its own ranks measure it (under torchrun)

Exit status: 0 fine; 1 something is wrong, and the output says what; 2 the command line is not understood (verify: or
the layout is refused).
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from fastpar._version import __version__

CHECKOUT = Path(__file__).resolve().parent.parent


def bench_names(checkout: Path) -> list[str]:
    """Names of the benches in a source checkout; empty when `checkout` is not one."""
    return sorted(path.stem.removeprefix("bench_") for path in (checkout / "bench").glob("bench_*.py"))


def run_bench(arguments: Sequence[str], checkout: Path) -> int:
    """`arguments`: an optional bench name, then flags that the bench itself parses."""
    names = bench_names(checkout)
    if not names:
        print(
            f"fastpar bench: there is no bench/ in {checkout}: the benches are not part of an installed package. "
            "Clone the source, `pip install -e .` there, and run the command again.",
            file=sys.stderr,
        )
        return 1
    if arguments and not arguments[0].startswith("-"):
        chosen, flags = [arguments[0]], list(arguments[1:])
        if chosen[0] not in names:
            print(f"fastpar bench: there is no bench {chosen[0]!r}; there are: {', '.join(names)}", file=sys.stderr)
            return 2
    else:
        chosen, flags = names, list(arguments)
        if {"-h", "--help"} & set(flags):
            print(f"usage: fastpar bench [{{{','.join(names)}}}] [flags]\n\n`fastpar bench <name> --help`: the flags")
            return 0
    if str(checkout) not in sys.path:
        sys.path.insert(0, str(checkout))
    return max(importlib.import_module(f"bench.bench_{name}").main(flags) for name in chosen)


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="fastpar", description="Tools of fastpar: kernels and layers for training large models in parallel."
    )
    made.add_argument("--version", action="version", version=f"fastpar {__version__}")
    commands = made.add_subparsers(dest="command", required=True, metavar="command")
    doctor = commands.add_parser("doctor", help="check this installation; exit status 0 if it is healthy, else 1")
    doctor.add_argument("--json", action="store_true", help="print the findings as JSON")
    # These parse their own flags, --help included: see main().
    commands.add_parser("bench", help="run a microbenchmark (in a source checkout)", add_help=False)
    commands.add_parser("simulate", help="simulate pipeline schedules, draw and trace them", add_help=False)
    commands.add_parser("verify", help="compare a model in a layout with itself whole", add_help=False)
    commands.add_parser("plan", help="find how a model is best spread over a machine", add_help=False)
    commands.add_parser("explain", help="show a plan again, or beside another layout", add_help=False)
    commands.add_parser("calibrate", help="measure this machine for plans (under torchrun)", add_help=False)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] == ["bench"]:
        return run_bench(arguments[1:], CHECKOUT)
    if arguments[:1] == ["simulate"]:
        from fastpar.pipeline.simulation import command

        return command.main(arguments[1:])
    if arguments[:1] == ["verify"]:
        from fastpar.verification import command as verify_command

        return verify_command.main(arguments[1:])
    if arguments[:1] in (["plan"], ["explain"], ["calibrate"]):
        from fastpar.planner import command as plan_command

        known = {"plan": plan_command.main, "explain": plan_command.explain_main}
        return known.get(arguments[0], plan_command.calibrate_main)(arguments[1:])
    flags = _parser().parse_args(arguments)
    from fastpar import doctor

    return doctor.main(as_json=flags.json)


if __name__ == "__main__":
    sys.exit(main())
