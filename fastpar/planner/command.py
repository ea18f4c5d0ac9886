"""`fastpar plan`, `fastpar explain` and `fastpar calibrate`: which layout, why, and on what machine."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from fastpar.layouts import LayoutError
from fastpar.planner.comparison import Measurement
from fastpar.planner.misses import NoLayoutFitsError
from fastpar.planner.planning import Plan, parse_bytes, plan
from fastpar.planner.space import ALLOW, PINS

_EPILOG = """\
examples:
  fastpar plan --model llama-3-70b --machine h100x64 --batch 128 --seq 8192
  fastpar plan --model my_model/config.json --machine machine.json:16 --batch 64 --seq 4096 --pin tp=4 --allow offload
  fastpar plan --model mixtral-8x7b --machine a100x64 --batch 256 --seq 4096 --json plan.json --draw plan.svg
  fastpar explain plan.json --versus "tp8 pp4 dp2 mb32"
  fastpar explain plan.json --measured 17.1 16.9 16.8 --peak 61GB

exit status: 0; 1 where nothing fits, with the nearest misses; 2 for a command line that is not understood"""


def main(arguments: Sequence[str]) -> int:
    """Run `fastpar plan` and return its exit status."""
    parser = _parser()
    flags = parser.parse_args(arguments)
    try:
        found = plan(
            flags.model,
            flags.machine,
            batch=flags.batch,
            seq=flags.seq,
            precision=flags.precision,
            memory=flags.memory,
            pin=_pins(flags.pin),
            allow=flags.allow,
            fused_loss=flags.fused_loss,
            fused_kernels=flags.fused_kernels,
        )
    except NoLayoutFitsError as error:
        print(f"fastpar plan: {error}", file=sys.stderr)
        return 1
    except ValueError as error:
        parser.error(str(error))
    print(found)
    try:
        if flags.json:
            found.save(flags.json)
        if flags.draw:
            found.draw(flags.draw)
    except OSError as error:
        parser.error(str(error))
    return 0


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="fastpar plan",
        description="Find how a model is best spread over a machine, and say why. Nothing is run.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("--model", required=True, metavar="NAME", help="a name, or the path of a config.json")
    made.add_argument(
        "--machine", required=True, metavar="NAME", help="such as h100x64, or a JSON file of Machine.to_json"
    )
    made.add_argument("--batch", required=True, type=int, metavar="N", help="sequences of a step, over all ranks")
    made.add_argument("--seq", required=True, type=int, metavar="N", help="tokens of a sequence")
    made.add_argument("--precision", default="bf16", metavar="DTYPE", help="bf16, fp16, fp8 or fp32 (%(default)s)")
    made.add_argument("--memory", metavar="SIZE", help="of a rank, such as 80GB (the machine's)")
    made.add_argument("--pin", action="append", default=[], metavar="AXIS=VALUE", help=f"of {', '.join(PINS)}")
    made.add_argument("--allow", action="append", default=[], metavar="WHAT", help=f"of {', '.join(ALLOW)}")
    made.add_argument("--fused-loss", action="store_true", help="logits are not kept: fp.ops.linear_cross_entropy")
    made.add_argument("--fused-kernels", action="store_true", help="norms and SwiGLU by fp.apply_kernels: less is kept")
    made.add_argument("--json", metavar="FILE", help="write the plan, for fastpar explain and Plan.load")
    made.add_argument("--draw", metavar="FILE.svg", help="draw memory by rank, and the step's time by part")
    return made


def _pins(texts: Sequence[str]) -> dict[str, int | str]:
    found: dict[str, int | str] = {}
    for text in texts:
        axis, equals, value = text.partition("=")
        if not equals or not value:
            raise ValueError(f"--pin takes AXIS=VALUE, got {text!r}")
        found[axis] = int(value) if value.isdecimal() else value
    return found


def explain_main(arguments: Sequence[str]) -> int:
    """Run `fastpar explain` and return its exit status."""
    made = argparse.ArgumentParser(
        prog="fastpar explain",
        description="Show a plan again, or beside another plan, a layout, or what its steps were measured to take.",
        allow_abbrev=False,
    )
    made.add_argument("plan", metavar="PLAN.json", help="as fastpar plan --json wrote it")
    made.add_argument("--versus", metavar="WHAT", help='another plan.json, or a layout such as "tp8 pp4 dp2 mb32"')
    made.add_argument("--measured", nargs="+", type=float, metavar="SECONDS", help="of each step, in order")
    made.add_argument(
        "--peak", nargs="+", metavar="SIZE", help="measured memory such as 58GB: of the fullest rank, or each"
    )
    flags = made.parse_args(arguments)
    try:
        found = Plan.load(flags.plan)
        if flags.peak and not flags.measured:
            raise ValueError("--peak goes with --measured")
        if flags.measured:
            peaks = tuple(float(parse_bytes(size)) for size in flags.peak or ())
            print(found.compare(Measurement(tuple(flags.measured), peaks)))
        elif flags.versus is not None:
            is_file = flags.versus.endswith(".json")
            print(found.compare(Plan.load(flags.versus) if is_file else flags.versus))
        else:
            print(found)
    except LayoutError as error:
        print(f"fastpar explain: {error}", file=sys.stderr)
        return 1
    except ValueError as error:
        made.error(str(error))
    return 0


def calibrate_main(arguments: Sequence[str]) -> int:
    """Run `fastpar calibrate` and return its exit status."""
    made = argparse.ArgumentParser(
        prog="fastpar calibrate",
        description="Measure this machine by all ranks of a job, and write a file for fastpar plan --machine.",
        epilog="torchrun --nproc-per-node 8 -m fastpar calibrate --out machine.json",
        allow_abbrev=False,
    )
    made.add_argument("--out", required=True, metavar="FILE.json", help="where rank 0 writes the machine")
    made.add_argument("--name", default="here", help="what the machine is called (%(default)s)")
    made.add_argument("--device", choices=("cpu", "cuda"), help="cuda where there is one")
    made.add_argument("--precision", metavar="DTYPE", help="fp32, bf16 or fp16 (bf16 on cuda, fp32 on cpu)")
    made.add_argument("--seconds", type=float, default=120.0, help="about how long it may take (%(default)s)")
    flags = made.parse_args(arguments)
    from fastpar.planner.calibration import calibrate

    try:
        machine = calibrate(flags.name, device=flags.device, precision=flags.precision, seconds=flags.seconds)
        if int(os.environ.get("RANK", "0")) == 0:
            machine.save(flags.out)
            print(machine)
    except (ValueError, OSError) as error:
        made.error(str(error))
    return 0
