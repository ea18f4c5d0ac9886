"""A training step of a GPT over pipeline ranks: fastpar's schedules against torch.distributed.pipelining's.

    fastpar bench pipeline [--quick] [--schedules gpipe,1f1b,interleaved_1f1b,zb_h1,zbv] [--microbatches 4]
                           [--hidden 512] [--layers 6] [--tokens 256] [--ranks 2]
    fastpar bench pipeline --dispatch                 stages that do nothing: what an action costs besides torch's work

What is timed: forward and backward of all microbatches, gradients from None, the loss included; no optimizer. The
model is a pre-norm GPT without dropout, cut evenly by layers; inputs are one sequence of `tokens` per microbatch. Every
provider runs the same modules and microbatches, and is checked against a sequential run: "grad" is the largest relative
error over the parameters of a rank, in the L2 norm.

"compute only" runs the forwards and backwards of each rank one after the other with nothing sent: a lower bound for a
schedule without bubble. The ideal that is printed below a table is this time with the schedule's bubble, from the exact
simulator:

    ideal = compute only * makespan / busy            of the schedule at F : I : W = 1 : 1 : 1, hops free

"predicted" is the simulated makespan with the costs that a run has recorded (`measured_costs`), against the median
makespan of the recorded runs.

Flops model: 6 * parameters * tokens of all microbatches, attention scores left out.

Traps besides those of `bench.harness`:

* torch's ZB, ZBV and DualPipeV fail for stages that end in a linear layer with bias; the head has none.
* Two ranks with a thread each fill two cores: whatever else runs is a third.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.harness import Case, Error, Provider, Rank, gemm_roof
from bench.options import Bench, parser, positive, run
from bench.rows import Row
from fastpar.pipeline import (
    ActionType,
    Pipeline,
    Schedule,
    add_communication,
    make_schedule,
    measured_costs,
    simulate,
)

SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zbv")
OPTIONS: dict[str, dict[str, Any]] = {"interleaved_1f1b": {"stages_per_rank": 2}, "looped_bfs": {"stages_per_rank": 2}}
VOCAB = 4096
TOLERANCE = 1e-5  # of the same sums in another order; most providers are bit-equal
RECORDED_STEPS = 5


class Block(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(hidden), nn.LayerNorm(hidden)])
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).movedim(2, 0).transpose(2, 3)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Nothing(nn.Module):
    """A stage that costs next to nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 1.0


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


@dataclass(frozen=True)
class PipelineCase:
    """One schedule, for a GPT or (layers 0) for stages that do nothing."""

    schedule: str
    microbatches: int
    layers: int
    hidden: int
    tokens: int

    @property
    def calls(self) -> int:
        return 1 if self.layers else 5

    def describe(self) -> dict[str, Any]:
        model = (
            {"hidden": self.hidden, "layers": self.layers, "tokens": self.tokens} if self.layers else {"empty": True}
        )
        return {"schedule": self.schedule, "microbatches": self.microbatches, **model}

    def build(self, rank: Rank) -> list[Provider]:
        problem = Problem(self, rank)
        tokens = self.microbatches * self.tokens
        flops = 6.0 * sum(p.numel() for part in problem.build_parts() for p in part.parameters()) * tokens
        makers: list[tuple[str, str, Callable[[Problem], Run]]] = [
            ("fastpar", "fastpar", FastparRun),
            ("torch", "torch", TorchRun),
            ("compute only", "bound", ComputeOnly),
        ]
        providers = []
        for name, kind, make in makers:
            made = make(problem)
            check = dict if kind == "bound" else partial(problem.errors, made)
            providers.append(Provider(name, kind, call=made.step, check=check, prepare=made.clear, flops=flops))
        return [*providers, gemm_roof(torch.float32, rank.world_size)] if self.layers else providers


class Problem:
    """Model, batch and schedule; the same on every rank."""

    def __init__(self, case: PipelineCase, rank: Rank) -> None:
        self.case, self.rank = case, rank
        options = OPTIONS.get(case.schedule, {})
        self.schedule = make_schedule(case.schedule, rank.world_size, case.microbatches, **options)
        self.own_parts = [self.schedule.part_of(s) for s in self.schedule.stages_of(rank.rank)]
        generator = torch.Generator().manual_seed(0)
        shape = (case.microbatches, case.tokens)
        self.x, self.target = (torch.randint(VOCAB, shape, generator=generator) for _ in range(2))
        if not case.layers:
            self.x = torch.randn(case.microbatches, 8, 8, generator=generator).requires_grad_()

    @property
    def loss(self) -> Callable[[Tensor, Tensor], Tensor]:
        return loss_fn if self.case.layers else lambda output, target: output.sum()

    def build_parts(self) -> list[nn.Sequential]:
        case, count = self.case, self.schedule.num_parts
        if not case.layers:
            return [nn.Sequential(Nothing()) for _ in range(count)]
        torch.manual_seed(0)
        parts: list[list[nn.Module]] = [[] for _ in range(count)]
        for layer in range(case.layers):
            parts[layer * count // case.layers].append(Block(case.hidden, case.hidden // 64))
        parts[0].insert(0, nn.Embedding(VOCAB, case.hidden))
        parts[-1] += [nn.LayerNorm(case.hidden), nn.Linear(case.hidden, VOCAB, bias=False)]
        return [nn.Sequential(*modules) for modules in parts]

    def errors(self, run: Run) -> dict[str, Error]:
        """Against the sequential run of the same microbatches, which every rank does for itself."""
        parts = self.build_parts()
        for x, target in zip(self.x.split(1), self.target.split(1), strict=True):
            hidden: Any = x
            for part in parts:
                hidden = part(hidden)
            (self.loss(hidden, target) / self.case.microbatches).backward()
        run.clear()
        run.step()
        worst = 0.0
        for index, module in zip(self.own_parts, run.modules, strict=True):
            for ours, theirs in zip(module.parameters(), parts[index].parameters(), strict=True):
                assert ours.grad is not None
                assert theirs.grad is not None
                worst = max(worst, float((ours.grad - theirs.grad).norm() / theirs.grad.norm()))
        return {"grad": Error(worst, TOLERANCE), **run.figures()}


class Run:
    """One implementation on one rank."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        parts = problem.build_parts()
        self.modules = [parts[part] for part in problem.own_parts]

    def clear(self) -> None:
        for module in self.modules:
            for p in module.parameters():
                p.grad = None

    def step(self) -> Any:
        raise NotImplementedError

    def figures(self) -> dict[str, Error]:
        """Other numbers for the rows, from runs of its own."""
        return {}


class FastparRun(Run):
    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.pipe = Pipeline(self.modules, problem.schedule, problem.rank.group, loss=problem.loss)

    def step(self) -> Tensor:
        return self.pipe.step(self.problem.x, target=self.problem.target)

    def figures(self) -> dict[str, Error]:
        """How far the prediction from recorded costs is from what was recorded (0.05: 5 %)."""
        if not self.problem.case.layers:
            return {}
        recorded = []
        for _ in range(RECORDED_STEPS + 1):
            self.clear()
            self.problem.rank.barrier()
            self.step()
            recorded.append(self.pipe.gather_timeline())
        costs = [measured_costs(self.pipe.schedule, timeline) for timeline in recorded[1:]]
        predicted = statistics.median(float(simulate(self.problem.schedule, c).makespan) for c in costs)
        measured = statistics.median(float(timeline.makespan) for timeline in recorded[1:])
        return {"prediction": Error(abs(predicted / measured - 1), 1.0)}


class TorchRun(Run):
    """torch.distributed.pipelining, used as its tutorial says."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        from torch.distributed import pipelining

        schedules: dict[str, Any] = {
            "gpipe": pipelining.ScheduleGPipe,
            "1f1b": pipelining.Schedule1F1B,
            "interleaved_1f1b": pipelining.ScheduleInterleaved1F1B,
            "looped_bfs": pipelining.ScheduleLoopedBFS,
            "zb_h1": pipelining.ScheduleInterleavedZeroBubble,
            "zbv": pipelining.ScheduleZBVZeroBubble,
        }
        count, device = problem.schedule.num_parts, torch.device("cpu")
        stages = [
            pipelining.PipelineStage(module, part, count, device, group=problem.rank.group)
            for part, module in zip(problem.own_parts, self.modules, strict=True)
        ]
        make = schedules[problem.case.schedule]
        single = problem.case.schedule in ("gpipe", "1f1b")
        self.schedule = make(stages[0] if single else stages, problem.case.microbatches, loss_fn=problem.loss)

    def step(self) -> Any:
        problem = self.problem
        args = (problem.x,) if 0 in problem.own_parts else ()
        if problem.schedule.num_parts - 1 in problem.own_parts:
            return self.schedule.step(*args, target=problem.target, losses=[])
        return self.schedule.step(*args)


class ComputeOnly(Run):
    """Each rank's forwards and backwards, with nothing sent: inputs are kept from a first, complete pass."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        parts = problem.build_parts()
        with torch.no_grad():
            hidden: list[Any] = [problem.x[:1]]
            for part in parts:
                hidden.append(part(hidden[-1]))
        self.inputs = [hidden[part].detach() for part in problem.own_parts]
        self.order = [a for a in problem.schedule.flat(problem.rank.rank) if a.type in _BARE]

    def step(self) -> None:
        problem, places = (
            self.problem,
            {s: i for i, s in enumerate(self.problem.schedule.stages_of(self.problem.rank.rank))},
        )
        outputs: dict[tuple[int, int | None], Tensor] = {}
        for action in self.order:
            place = places[action.stage]
            part, key = problem.own_parts[place], (action.stage, action.microbatch)
            if action.type is ActionType.FORWARD:
                x = self.inputs[place]
                x = x.detach().requires_grad_() if x.is_floating_point() else x
                outputs[key] = self.modules[place](x)
                if part == problem.schedule.num_parts - 1:
                    outputs[key] = problem.loss(outputs[key], problem.target[:1]) / problem.case.microbatches
            else:
                out = outputs.pop(key)
                torch.autograd.backward(out, None if out.dim() == 0 else torch.ones_like(out))


_BARE = (ActionType.FORWARD, ActionType.BACKWARD, ActionType.BACKWARD_INPUT)


def ideal_factor(schedule: Schedule) -> float:
    """Makespan over busy time of the busiest rank."""
    simulation = simulate(schedule)
    return float(simulation.makespan / max(simulation.timeline.busy(rank) for rank in range(schedule.num_ranks)))


def figures(rows: Sequence[Row]) -> str:
    """Per setting the ideal and how far each provider is from it; for empty stages, the cost of an action."""
    settings = dict.fromkeys(row["setting"] for row in rows)
    lines = [_figures(setting, [row for row in rows if row["setting"] == setting]) for setting in settings]
    return "\n".join(line for line in lines if line)


def _figures(setting: str, rows: Sequence[Row]) -> str:
    case = rows[0]["case"]
    times = {row["provider"]: row["ms"]["median"] for row in rows if "ms" in row}
    if "compute only" not in times:
        return ""
    name, bound = case["schedule"], times.pop("compute only")
    schedule = make_schedule(name, case["ranks"], case["microbatches"], **OPTIONS.get(name, {}))
    if case.get("empty"):
        actions = max(len(own) for own in add_communication(schedule).actions)
        costs = {p: (times[p] - bound) * 1e3 / actions for p in ("fastpar", "torch") if p in times}
        return f"  {setting}: per action besides torch's work: " + ", ".join(
            f"{p} {us:.1f} us" for p, us in costs.items()
        )
    ideal = bound * ideal_factor(schedule)
    parts = [f"  {setting}: ideal {ideal:.0f} ms"]
    parts += [f"{p} {times[p] / ideal:.3f} x ideal" for p in ("fastpar", "torch") if p in times]
    predictions = [row["errors"]["prediction"]["value"] for row in rows if "prediction" in row["errors"]]
    return ", ".join([*parts, *(f"predicted within {error:.1%}" for error in predictions)])


def cases(flags: argparse.Namespace, world_size: int) -> Sequence[Case]:
    layers, microbatches = (0, 32) if flags.dispatch else (flags.layers, flags.microbatches)
    return [PipelineCase(name, microbatches, layers, flags.hidden, flags.tokens) for name in flags.schedules]


BENCH = Bench(
    name="pipeline",
    baselines=("torch", "compute only"),
    cases=cases,
    memory=False,
    quick={"hidden": 64, "layers": 4, "tokens": 16, "blocks": 1},
    figures=figures,
)


def _schedules(text: str) -> list[str]:
    names = text.split(",")
    unknown = sorted(set(names) - {*SCHEDULES, "looped_bfs"})
    if unknown:
        raise argparse.ArgumentTypeError(f"torch has no counterpart of {', '.join(unknown)}; choose from {SCHEDULES}")
    return names


def main(argv: Sequence[str]) -> int:
    made = parser(BENCH, "a training step of a GPT over pipeline ranks", ranks=[2], blocks=5, iters=2)
    made.add_argument("--schedules", type=_schedules, default=list(SCHEDULES), help="comma-separated names")
    made.add_argument("--microbatches", type=positive, default=4)
    made.add_argument("--hidden", type=positive, default=512)
    made.add_argument("--layers", type=positive, default=6)
    made.add_argument("--tokens", type=positive, default=256, help="of a microbatch")
    made.add_argument("--dispatch", action="store_true", help="stages that do nothing, 32 microbatches")
    return run(BENCH, made.parse_args(argv), ["fastpar", "bench", "pipeline", *argv])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
