"""A data-parallel training step: ZeRO stages 0 to 3 against torch's DDP, ZeroRedundancyOptimizer and fully_shard.

    fastpar bench zero [--quick] [--stages 0,1,2,3] [--optimizers torch,fastpar] [--accumulate 1] [--dtype fp32]
                       [--param-wires int8,float8,delayed] [--hidden 512] [--layers 4] [--vocab 8192] [--tokens 256]
                       [--batch 2] [--ranks 2,4]

What is timed: the forwards and backwards of `accumulate` microbatches of `batch` sequences on every rank, everything
that makes their gradients one, AdamW, and letting go of the gradients. The model is a pre-norm GPT of 21 million
parameters without dropout. All ranks start from the same weights; every rank reads its own sequences, the same at
every step, at a learning rate so small that the loss hardly moves while times are taken.

    no communication        the same step, every rank by itself with the whole AdamW: what a step costs at least without
                            ZeRO. ZeRO updates 1/ranks of the parameters, so a stage above 0 may be faster.
    fastpar stage S         `fastpar.zero.shard` around torch's fused AdamW
    fastpar stage S, own    around `fastpar.optim.AdamW`
    fastpar stage S, W      with `param_wire` W (`--param-wires`; torch's AdamW, stages above 0): blocks of int8 or
                            float8_e4m3fn, or float8_e4m3fn with delayed scales. Its loss is compared as it is
    torch DDP               `gradient_as_bucket_view`; `no_sync` for all microbatches but the last
    torch DDP + ZeRO        `ZeroRedundancyOptimizer`, which is stage 1
    torch fully_shard       a unit per layer and the rest: stage 3; gradients of microbatches kept whole until the last
    torch fully_shard, kept its `reshard_after_forward=False`
    DeepSpeed               named as absent where it is not installed, or does not run without a launcher

fp32: weights and arithmetic. bf16: fp32 weights in the optimizer and bf16 arithmetic: `Precision.bf16()`, torch's
`MixedPrecisionPolicy` with an fp32 reduction, autocast for everything else.

Checked, with `STEPS` steps from the first weights: "loss", of the last step, against a sequential run over the batches
of all ranks, as a part of what the loss has changed; in fp32 "weights", the distance of all parameters from those of
the sequential run as a part of how far these have moved; for fastpar "words", what `fastpar.comm.record` has seen one
step send, against the formula (P parameters, N ranks, A microbatches, times (N - 1) / N):

    stage 0   2 P                 all-reduce of the gradients
    stage 1   2 P                 reduce-scatter of the gradients, all-gather of the weights
    stage 2   (A + 1) P           the same, the first one for every microbatch
    stage 3   3 A P               all-gather in forward and in backward, and reduce-scatter, for every microbatch

The "alone" rows are these collectives and nothing else, 25 MB at a time. The part of communication that is hidden is
printed below the table:

    hidden = 1 - (step - step without communication) / collectives alone

where for stages above 0 the step without communication has the update of 1/N of the parameters, as theirs. On a machine
whose ranks fill all cores, what can be hidden is waiting, not copying: below zero is possible.

Flops model: 6 * parameters * tokens of all ranks, attention scores left out. "extra MB": the most that a rank holds
during two steps, weights and states included.

Traps besides those of `bench.harness`:

* Two ranks with a thread each fill two cores: whatever else runs is a third.
* Weights that fit a batch perfectly have gradients so small that their squares are denormal, which slows AdamW down.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench import peers
from bench.bench_pipeline import Block
from bench.harness import Case, Error, Provider, Rank, absent, gemm_roof
from bench.options import Bench, parser, positive, run
from bench.rows import Row
from fastpar.comm import Communicator, record, shard_sizes

STEPS = 3  # of a check
LR = 1e-4
BUCKET_WORDS = 25 * 2**20 // 4
LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 0.1}
CODED_TOLERANCE = 2e-2  # of the loss itself
WEIGHT_TOLERANCE = 1e-2  # AdamW's first steps have the size of lr whatever the gradient's: rounding moves tiny ones far
WORD_TOLERANCE = 0.02
OPTIMIZERS = ("torch", "fastpar")
PARAM_WIRES = ("int8", "float8", "delayed")
NO_COMMUNICATION = "no communication"
UPDATE_SHARE = f"roof: {NO_COMMUNICATION}, 1/N of the update"
ALONE = "roof: collectives of stage {}, alone"


class GPT(nn.Module):
    """ids [batch, tokens] -> logits [batch, tokens, vocab]."""

    def __init__(self, vocab: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList(Block(hidden, hidden // 64) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden))


@dataclass(frozen=True)
class ZeroCase:
    """One size of model and batch; the stages and peers that run it."""

    dtype: str
    hidden: int
    layers: int
    vocab: int
    tokens: int
    batch: int
    accumulate: int = 1
    stages: tuple[int, ...] = (0, 1, 2, 3)
    optimizers: tuple[str, ...] = OPTIMIZERS
    param_wires: tuple[str, ...] = ()

    @property
    def calls(self) -> int:
        return 1

    def describe(self) -> dict[str, Any]:
        names = ("dtype", "hidden", "layers", "vocab", "tokens", "batch", "accumulate")
        return {name: getattr(self, name) for name in names}

    def build(self, rank: Rank) -> list[Provider]:
        problem = Problem(self, rank)
        own = [
            (f"fastpar stage {stage}" + (", own" if optimizer == "fastpar" else ""), stage, optimizer)
            for optimizer in self.optimizers
            for stage in self.stages
        ]
        makers: list[tuple[str, str, Maker]] = [(NO_COMMUNICATION, "bound", NoCommunication)]
        makers += [(name, "fastpar", partial(FastparRun, stage=s, optimizer=o)) for name, s, o in own]
        makers += [
            (f"fastpar stage {s}, {w}", "fastpar", partial(FastparRun, stage=s, optimizer="torch", param_wire=w))
            for w in self.param_wires
            for s in self.stages
            if s > 0
        ]
        makers += [
            ("torch DDP", "torch", DdpRun),
            ("torch DDP + ZeRO", "torch", RedundancyRun),
            ("torch fully_shard", "torch", partial(FullyShardRun, reshard=True)),
            ("torch fully_shard, kept", "torch", partial(FullyShardRun, reshard=False)),
            (UPDATE_SHARE, "roof", partial(NoCommunication, update_share=True)),
        ]
        tiny = Problem(replace(self, hidden=64, layers=1, vocab=64, tokens=4), rank)
        providers = [_provider(name, kind, maker, problem, tiny) for name, kind, maker in makers]
        deepspeed = peers.find(_deepspeed)
        if isinstance(deepspeed, str):
            providers.append(absent("DeepSpeed", deepspeed))
        alone = {("all_reduce",): "0", ("reduce_scatter", "all_gather"): "1 and 2"}
        alone |= {("all_gather", "all_gather", "reduce_scatter"): "3"}
        providers += [
            Provider(ALONE.format(stage), "roof", partial(problem.communicate, ops)) for ops, stage in alone.items()
        ]
        return [*providers, gemm_roof(torch.float32 if self.dtype == "fp32" else torch.bfloat16, rank.world_size)]


def _deepspeed() -> object:
    import deepspeed

    return deepspeed


class Problem:
    """Model, batches and the sequential run; the same on every rank but for `rank`."""

    def __init__(self, case: ZeroCase, rank: Rank) -> None:
        self.case, self.rank = case, rank
        self.num_parameters = sum(p.numel() for p in self.build_model().parameters())

    @property
    def flops(self) -> float:
        case = self.case
        return 6.0 * self.num_parameters * case.tokens * case.batch * case.accumulate * self.rank.world_size

    @cached_property
    def comm(self) -> Communicator:
        return Communicator(self.rank.group)

    def build_model(self) -> GPT:
        torch.manual_seed(0)
        return GPT(self.case.vocab, self.case.hidden, self.case.layers)

    def batches(self, rank: int) -> list[tuple[Tensor, Tensor]]:
        """Inputs and targets of the microbatches of a rank."""
        case, generator = self.case, torch.Generator().manual_seed(rank)
        shape = (2 * case.accumulate, case.batch, case.tokens)
        return list(torch.randint(case.vocab, shape, generator=generator).split(2))

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast("cpu", torch.bfloat16, enabled=self.case.dtype == "bf16")

    def loss(self, model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
        """Of a microbatch, as its part of the step's."""
        logits = model(x)
        return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten()) / self.case.accumulate

    @cached_property
    def sequential(self) -> Sequential:
        """`STEPS` steps over the batches of all ranks, in fp32."""
        model, world_size = self.build_model(), self.rank.world_size
        start = [p.detach().clone() for p in model.parameters()]
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
        losses = []
        for _ in range(STEPS):
            losses.append(0.0)
            for rank in range(world_size):
                for x, target in self.batches(rank):
                    loss = self.loss(model, x, target)
                    loss.backward()
                    losses[-1] += float(loss.detach()) if rank == self.rank.rank else 0.0
            for p in model.parameters():
                assert p.grad is not None
                p.grad /= world_size
            optimizer.step()
            optimizer.zero_grad()
        return Sequential(start, [p.detach() for p in model.parameters()], losses)

    def communicate(self, ops: Sequence[str]) -> None:
        """These collectives over as many words as the model has parameters, one after the other."""
        left = self.num_parameters
        while left > 0:
            words = min(BUCKET_WORDS, left)
            left -= words
            whole = self.buffers[:words]
            shard = self.buffers[: shard_sizes(words, self.comm.size)[self.comm.rank]]
            for op in ops:
                if op == "all_reduce":
                    self.comm.all_reduce(whole, "avg", out=whole)
                elif op == "reduce_scatter":
                    self.comm.reduce_scatter(whole, "avg")
                else:
                    self.comm.all_gather(shard, sizes=shard_sizes(words, self.comm.size))

    @cached_property
    def buffers(self) -> Tensor:
        return torch.zeros(min(BUCKET_WORDS, self.num_parameters))


@dataclass(frozen=True)
class Sequential:
    """What the sequential run started from and came to; the losses are those of one rank's batches."""

    start: list[Tensor]
    end: list[Tensor]
    losses: list[float]

    def loss_error(self, loss: float) -> float:
        return abs(loss - self.losses[-1]) / abs(self.losses[0] - self.losses[-1])

    def weight_error(self, weights: Sequence[Tensor]) -> float:
        apart = sum(float((p - q).square().sum()) for p, q in zip(weights, self.end, strict=True))
        moved = sum(float((p - q).square().sum()) for p, q in zip(self.start, self.end, strict=True))
        return float((apart / moved) ** 0.5)


class Run:
    """One implementation on one rank."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    is_exact = True  # computes with the weights that the optimizer has, but for their dtype

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.batches = problem.batches(problem.rank.rank)

    def step(self) -> float:
        """A training step; returns the loss of this rank's batches."""
        total, last = 0.0, len(self.batches) - 1
        for index, (x, target) in enumerate(self.batches):
            with self.microbatch(is_last=index == last):
                loss = self.loss(x, target)
                loss.backward()
            total += float(loss.detach())
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total

    def loss(self, x: Tensor, target: Tensor) -> Tensor:
        with self.problem.autocast():
            return self.problem.loss(self.model, x, target)

    def microbatch(self, is_last: bool) -> contextlib.AbstractContextManager[Any]:
        """Around forward and backward: a place to put communication off."""
        return contextlib.nullcontext()

    def weights(self) -> list[Tensor]:
        """All of every parameter, in fp32."""
        return [p.detach() for p in self.model.parameters()]

    def expected_words(self) -> float | None:
        """What a rank sends in a step; None where nobody counts."""
        return None


class NoCommunication(Run):
    """Every rank by itself.

    update_share  the optimizer has one slice of every parameter, as ZeRO's
    """

    def __init__(self, problem: Problem, update_share: bool = False) -> None:
        super().__init__(problem)
        self.model = problem.build_model()
        self.shares: list[tuple[nn.Parameter, Tensor, slice]] = []
        if not update_share:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, fused=True)
            return
        size = problem.rank.world_size
        for p in self.model.parameters():
            rows = slice(0, -(-p.size(0) // size))
            self.shares.append((p, p.detach()[rows].requires_grad_(), rows))
        self.optimizer = torch.optim.AdamW([share for _, share, _ in self.shares], lr=LR, fused=True)
        self.optimizer.register_step_pre_hook(self._hand_over)

    def _hand_over(self, *_: Any) -> None:
        for p, share, rows in self.shares:
            assert p.grad is not None
            share.grad, p.grad = p.grad[rows], None


class DdpRun(Run):
    """torch's DistributedDataParallel around a fused AdamW."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.model = nn.parallel.DistributedDataParallel(problem.build_model(), gradient_as_bucket_view=True)
        self.optimizer = self.make_optimizer()

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=LR, fused=True)

    def microbatch(self, is_last: bool) -> contextlib.AbstractContextManager[Any]:
        assert isinstance(self.model, nn.parallel.DistributedDataParallel)
        return contextlib.nullcontext() if is_last else self.model.no_sync()


class RedundancyRun(DdpRun):
    """The same around torch's ZeroRedundancyOptimizer, which shards the states by whole parameters."""

    def make_optimizer(self) -> torch.optim.Optimizer:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # importing it compiles something with torch.jit, which warns
            from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(
            self.model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, lr=LR, fused=True
        )


class FullyShardRun(Run):
    """torch's fully_shard (FSDP2), a unit per layer and one for the rest."""

    def __init__(self, problem: Problem, reshard: bool) -> None:
        super().__init__(problem)
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy()
        if problem.case.dtype == "bf16":
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        options: dict[str, Any] = {"reshard_after_forward": reshard, "mp_policy": policy}
        options["mesh"] = init_device_mesh("cpu", (problem.rank.world_size,))
        model = problem.build_model()
        for layer in model.layers:
            fully_shard(layer, **options)
        self.sharded: Any = fully_shard(model, **options)
        self.model = model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, fused=True)

    def loss(self, x: Tensor, target: Tensor) -> Tensor:
        return self.problem.loss(self.model, x, target)

    @contextlib.contextmanager
    def microbatch(self, is_last: bool) -> Iterator[None]:
        self.sharded.set_requires_gradient_sync(is_last)
        yield

    def weights(self) -> list[Tensor]:
        return [p.full_tensor().detach() for p in self.model.parameters()]  # type: ignore[attr-defined]


class FastparRun(Run):
    """`fastpar.zero.shard`, around torch's AdamW or fastpar's. `param_wire`: one of `PARAM_WIRES`."""

    def __init__(self, problem: Problem, stage: int, optimizer: str, param_wire: str | None = None) -> None:
        super().__init__(problem)
        import fastpar as fp

        wires: dict[str, fp.comm.BlockWire | fp.comm.DelayedScalingWire] = {
            "int8": fp.comm.BlockWire("int8"),
            "float8": fp.comm.BlockWire("float8_e4m3fn"),
            "delayed": fp.comm.DelayedScalingWire(),
        }
        self.is_exact = param_wire is None
        self.stage = stage
        self.model = problem.build_model()
        if optimizer == "torch":
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, fused=True)
        else:
            self.optimizer = fp.optim.AdamW(self.model.parameters(), lr=LR)
        self.zero = fp.zero.shard(
            self.model,
            self.optimizer,
            group=problem.comm,
            stage=stage,
            precision=fp.Precision.bf16() if problem.case.dtype == "bf16" else None,
            accumulate=problem.case.accumulate,
            param_wire=None if param_wire is None else wires[param_wire],
        )

    def loss(self, x: Tensor, target: Tensor) -> Tensor:
        return self.problem.loss(self.model, x, target)

    def weights(self) -> list[Tensor]:
        from torch.distributed.tensor import DTensor

        return [(p.full_tensor() if isinstance(p, DTensor) else p).detach() for p in self.model.parameters()]

    def expected_words(self) -> float | None:
        if not self.is_exact:
            return None
        size, microbatches = self.problem.rank.world_size, self.problem.case.accumulate
        payloads = {0: 2, 1: 2, 2: microbatches + 1, 3: 3 * microbatches}[self.stage]
        return payloads * self.problem.num_parameters * (size - 1) / size


Maker = Callable[[Problem], Run]


class Lazy:
    """A run that is made when it is first needed: `check` starts from the first weights, whatever ran before."""

    def __init__(self, problem: Problem, make: Maker) -> None:
        self.problem, self._make = problem, make
        self._run: Run | None = None

    def step(self) -> None:
        if self._run is None:
            self._run = self._make(self.problem)
        self._run.step()

    def check(self) -> dict[str, Error]:
        self._run = None  # the old one's memory goes before the new one's comes
        self._run = made = self._make(self.problem)
        wanted, dtype = self.problem.sequential, self.problem.case.dtype
        loss = [made.step() for _ in range(STEPS)][-1]
        errors = {"loss": Error(wanted.loss_error(loss), LOSS_TOLERANCE[dtype])}
        if not made.is_exact:  # it moves by less than what the codes of the first weights change
            errors = {"loss": Error(abs(loss / wanted.losses[-1] - 1), CODED_TOLERANCE)}
        if dtype == "fp32" and made.is_exact:
            errors["weights"] = Error(wanted.weight_error(made.weights()), WEIGHT_TOLERANCE)
        expected = made.expected_words()
        if expected is not None:
            with record() as log:
                made.step()
            sent = sum(entry.nbytes / entry.dtype.itemsize for entry in log)
            errors["words"] = Error(abs(sent / expected - 1), WORD_TOLERANCE)
        return errors


def _provider(name: str, kind: str, make: Maker, problem: Problem, tiny: Problem) -> Provider:
    made = Lazy(problem, make)
    check = made.check if kind in ("fastpar", "torch") else dict
    flops = problem.flops if kind != "roof" else 0.0  # a roof's rate would count as one that others could reach
    return Provider(name, kind, call=made.step, check=check, warm=lambda: Lazy(tiny, make).step(), flops=flops)


def figures(rows: Sequence[Row]) -> str:
    """Per setting the times as multiples of the step without communication, and what fastpar hides of it."""
    settings = dict.fromkeys(row["setting"] for row in rows)
    lines = [line for name in settings for line in _figures(name, [row for row in rows if row["setting"] == name])]
    return "\n".join(lines)


def _figures(setting: str, rows: Sequence[Row]) -> list[str]:
    times = {row["provider"]: row["ms"]["median"] for row in rows if "ms" in row}
    kinds = {row["provider"]: row["kind"] for row in rows}
    if NO_COMMUNICATION not in times:
        return []
    bound = times[NO_COMMUNICATION]
    multiples = [f"{p} {ms / bound:.3f}" for p, ms in times.items() if kinds[p] in ("fastpar", "torch")]
    hidden = []
    for provider, ms in times.items():
        stage = provider.removeprefix("fastpar stage ")[:1]
        alone = times.get(ALONE.format({"0": "0", "3": "3"}.get(stage, "1 and 2")))
        without = bound if stage == "0" else times.get(UPDATE_SHARE)
        if kinds[provider] == "fastpar" and alone and without:
            hidden.append(f"{provider} {1 - (ms - without) / alone:.0%} of {alone:.1f} ms")
    lines = [f"  {setting}: x {NO_COMMUNICATION}: " + ", ".join(multiples)] if multiples else []
    return [*lines, *([f"  {setting}: communication hidden: " + ", ".join(hidden)] if hidden else [])]


def cases(flags: argparse.Namespace, world_size: int) -> Sequence[Case]:
    shape = {name: getattr(flags, name) for name in ("hidden", "layers", "vocab", "tokens", "batch", "accumulate")}
    chosen: dict[str, Any] = {name: tuple(getattr(flags, name)) for name in ("stages", "optimizers", "param_wires")}
    return [ZeroCase(dtype, **shape, **chosen) for dtype in flags.dtype]


BENCH = Bench(
    name="zero",
    baselines=("torch DDP", NO_COMMUNICATION),
    cases=cases,
    memory=True,
    quick={"hidden": 64, "layers": 2, "vocab": 256, "tokens": 16, "blocks": 1, "memory": False},
    figures=figures,
)


def _stages(text: str) -> list[int]:
    parts = text.split(",")
    if not set(parts) <= set("0123"):
        raise argparse.ArgumentTypeError(f"stages are 0, 1, 2 and 3, got {text!r}")
    return [int(part) for part in parts]


def _optimizers(text: str) -> list[str]:
    names = text.split(",")
    if not set(names) <= set(OPTIMIZERS):
        raise argparse.ArgumentTypeError(f"optimizers are {' and '.join(OPTIMIZERS)}, got {text!r}")
    return names


def _param_wires(text: str) -> list[str]:
    names = text.split(",")
    if not set(names) <= set(PARAM_WIRES):
        raise argparse.ArgumentTypeError(f"param wires are {', '.join(PARAM_WIRES)}, got {text!r}")
    return names


def main(argv: Sequence[str]) -> int:
    made = parser(BENCH, "a data-parallel training step of a GPT", dtype=["fp32"], ranks=[2], blocks=5, iters=2)
    made.add_argument("--stages", type=_stages, default=[0, 1, 2, 3], metavar="LIST", help="of fastpar's ZeRO")
    made.add_argument(
        "--optimizers", type=_optimizers, default=list(OPTIMIZERS), metavar="LIST", help="inside fastpar's"
    )
    made.add_argument(
        "--param-wires",
        type=_param_wires,
        default=[],
        metavar="LIST",
        help="beside the exact ones: " + ", ".join(PARAM_WIRES),
    )
    made.add_argument("--accumulate", type=positive, default=1, metavar="A", help="microbatches in a step")
    made.add_argument("--batch", type=positive, default=2, help="sequences of a microbatch, on every rank")
    made.add_argument("--hidden", type=positive, default=512)
    made.add_argument("--layers", type=positive, default=4)
    made.add_argument("--vocab", type=positive, default=8192)
    made.add_argument("--tokens", type=positive, default=256, help="of a sequence")
    flags = made.parse_args(argv)
    if min(flags.ranks) < 2:
        made.error(f"--ranks {min(flags.ranks)}: data parallelism needs at least 2 ranks")
    return run(BENCH, flags, ["fastpar", "bench", "zero", *argv])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
