"""Time of the host: layers so small that Python, autograd and the launch of collectives are all that there is.

    fastpar bench host [--jobs mlp,mlp+sequence,moe,loss,rms_norm,zero1] [--dtype fp32] [--ranks 1,2]

Eager layers on a fast GPU are bound by the host, so what a layer adds to its kernels in Python counts there as it does
here. Every job is done by fastpar and by hand or by torch (which is what the ratio refers to); by hand is the shortest
code with the same collectives, and autograd functions of its own. Forward, and backward with gradients of the input and
of every parameter, fresh every time.

    mlp             x + down(silu(gate(n)) * up(n)), n = norm(x), after `fastpar.parallelize`: one all-reduce of
                    [tokens, hidden] forward and one backward. Several ranks. Beside it: by hand with parameters
                    that are DTensors, whose gradients torch alone takes as long to accumulate, and without collectives
                    (a bound with a wrong result, not a peer)
    mlp+sequence    the same with sequence_parallel=True: an all-gather and a reduce-scatter forward, two all-gathers
                    and a reduce-scatter backward, and the norm's gradient summed over the ranks
    moe             `fastpar.ops.moe_mlp` of 4 experts, 2 for each token, routing given; by hand an all-to-all of rows
                    each way, one of counts, and a loop over the experts
    loss            `fastpar.ops.vocab_parallel_cross_entropy` of 8 rows and 32 ids, a mean; each rank has its share of
                    the ids. torch's is of all ids on every rank, so that the ratio says what splitting costs at least
    rms_norm        `fastpar.ops.rms_norm` of [tokens, hidden] against torch's; no collective
    zero1           a training step of four linears of 4096 weights under `fastpar.zero.shard(stage=1)`, which takes the
                    exact norm of all gradients to see that they are finite, against torch's DistributedDataParallel,
                    which does not; both with torch's fused AdamW. Beside it the step of a rank by itself (a bound)

What bounds the ratios. Of `mlp`: torch takes longer to accumulate the gradient of a DTensor than a tensor's, even where
it need not ask its rules for placements (`fastpar/ops/_autograd.py`), and the norm's weight takes a node of its
own; by hand with DTensor parameters is the peer that has both. The rest is many small steps in Python: modules with
hooks, checks, autograd functions. Of `loss` on one rank: much of its time is that of an autograd function in Python
that does nothing. Fewer attributes and calls in that function, and tests of `is_cpu` in the place of devices, did not
help it. On several ranks a call that is given a group and no `Communicator` makes one; this bench makes it once.

A job is a line of `JOBS`: a function from a `Rank` and a dtype to its providers, the same list on every rank.

Traps besides those of `bench.harness`: a call takes less than a barrier's skew, so a sample is 50 calls. Ranks are
processes that wait for each other twice a call; on a machine with fewer free cores than ranks the figures are those of
the scheduler.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from bench.bench_moe import Block, MoeCase, fastpar_block
from bench.bench_moe import Problem as MoeProblem
from bench.harness import Case, Error, Provider, Rank, local_tensor
from bench.options import DTYPES, Bench, parser, run
from fastpar.comm import Communicator, shard_range

TOKENS, HIDDEN, FFN, EXPERTS, TOP_K = 16, 32, 64, 4, 2
ROWS, VOCAB = 8, 32
LR = 1e-3
TOLERANCES = {"fp32": 1e-5, "bf16": 3e-2}


@dataclass(frozen=True)
class HostCase:
    """One job of `JOBS`."""

    job: str
    dtype: str

    @property
    def calls(self) -> int:
        return 50

    def describe(self) -> dict[str, Any]:
        return {"job": self.job, "dtype": self.dtype}

    def build(self, rank: Rank) -> list[Provider]:
        return JOBS[self.job](rank, self.dtype)


# ---- an MLP block ----------------------------------------------------------------------------------------------------


class Mlp(nn.Module):
    """Gate, up and down, without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, FFN, bias=False)
        self.up = nn.Linear(HIDDEN, FFN, bias=False)
        self.down = nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


class Layer(nn.Module):
    """x + mlp(norm(x))."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.RMSNorm(HIDDEN, eps=1e-6), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.mlp(self.norm(x))
        return y


class Model(nn.Module):
    """One layer, as a model that `parallelize` takes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


PLAN = {"layers.*": "stream", "layers.*.mlp": "block"} | {
    f"layers.*.mlp.{name}": style for name, style in (("gate", "colwise"), ("up", "colwise"), ("down", "rowwise"))
}


class CopyToLinears(torch.autograd.Function):
    """x @ W_n.T for two W_n split by output feature; dx summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate_n: Tensor, up_n: Tensor, comm: Communicator) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, gate_n, up_n)
        ctx.comm = comm
        return F.linear(x, gate_n), F.linear(x, up_n)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, gate_n, up_n = ctx.saved_tensors
        dgate, dup = (grad.flatten(0, 1) for grad in grads)
        partial_dx = torch.addmm(dgate @ gate_n, dup, up_n).view(x.shape)
        dx, x = ctx.comm.all_reduce(partial_dx, out=partial_dx), x.flatten(0, 1)
        return dx, dgate.t() @ x, dup.t() @ x, None


class LinearAllReduce(torch.autograd.Function):
    """x_k @ W_k.T summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, x_k: Tensor, down_k: Tensor, comm: Communicator) -> Tensor:
        ctx.save_for_backward(x_k, down_k)
        y = F.linear(x_k, down_k)
        return comm.all_reduce(y, out=y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_k, down_k = ctx.saved_tensors
        (dy,) = grads
        return dy @ down_k, dy.flatten(0, 1).t() @ x_k.flatten(0, 1), None


class AllGatherLinears(torch.autograd.Function):
    """all_gather(x_s) @ W_n.T for two W_n; x is gathered again in backward."""

    @staticmethod
    def forward(ctx: Any, x_s: Tensor, gate_n: Tensor, up_n: Tensor, comm: Communicator) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x_s, gate_n, up_n)
        ctx.comm = comm
        x = comm.all_gather(x_s, dim=1)
        return F.linear(x, gate_n), F.linear(x, up_n)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_s, gate_n, up_n = ctx.saved_tensors
        x = ctx.comm.all_gather(x_s, dim=1)
        dgate, dup = (grad.flatten(0, 1) for grad in grads)
        partial_dx = torch.addmm(dgate @ gate_n, dup, up_n).view(x.shape)
        dx_s, x = ctx.comm.reduce_scatter(partial_dx, dim=1), x.flatten(0, 1)
        return dx_s, dgate.t() @ x, dup.t() @ x, None


class LinearReduceScatter(torch.autograd.Function):
    """reduce_scatter(x_k @ W_k.T)."""

    @staticmethod
    def forward(ctx: Any, x_k: Tensor, down_k: Tensor, comm: Communicator) -> Tensor:
        ctx.save_for_backward(x_k, down_k)
        ctx.comm = comm
        return comm.reduce_scatter(F.linear(x_k, down_k), dim=1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_k, down_k = ctx.saved_tensors
        dy = ctx.comm.all_gather(grads[0], dim=1)
        return dy @ down_k, dy.flatten(0, 1).t() @ x_k.flatten(0, 1), None


class Summed(torch.autograd.Function):
    """A whole parameter used on a part of the sequence: its gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, comm: Communicator) -> Tensor:
        ctx.comm = comm
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.comm.all_reduce(grads[0]), None


def _as_dtensor(grad: Tensor, spec: Any) -> DTensor:
    return DTensor.__new__(DTensor, grad, spec, requires_grad=False)


class OfDTensor(torch.autograd.Function):
    """This rank's part of a parameter."""

    @staticmethod
    def forward(ctx: Any, weight: Any) -> Tensor:
        ctx.spec, local = weight._spec, weight._local_tensor
        return cast(Tensor, local.view_as(local))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return _as_dtensor(grads[0], ctx.spec)


class CopyToLinearsOfDTensors(CopyToLinears):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Any, up: Any, comm: Communicator) -> tuple[Tensor, Tensor]:
        ctx.specs = gate._spec, up._spec
        return CopyToLinears.forward(ctx, x, gate._local_tensor, up._local_tensor, comm)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dx, dgate, dup, _ = cast("tuple[Tensor, ...]", CopyToLinears.backward(ctx, *grads))
        return dx, _as_dtensor(dgate, ctx.specs[0]), _as_dtensor(dup, ctx.specs[1]), None


class LinearAllReduceOfDTensor(LinearAllReduce):
    @staticmethod
    def forward(ctx: Any, x_k: Tensor, down: Any, comm: Communicator) -> Tensor:
        ctx.spec = down._spec
        return LinearAllReduce.forward(ctx, x_k, down._local_tensor, comm)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dx_k, ddown, _ = cast("tuple[Tensor, ...]", LinearAllReduce.backward(ctx, *grads))
        return dx_k, _as_dtensor(ddown, ctx.spec), None


class MlpJob:
    """The weights and inputs, the same on every rank, and the whole block in float64."""

    def __init__(self, rank: Rank, dtype: str, *, sequence: bool) -> None:
        self.rank, self.sequence, self.dtype = rank, sequence, dtype
        torch.manual_seed(0)
        self.model = Model().to(DTYPES[dtype])
        self.x, self.dy = (torch.randn(1, TOKENS, HIDDEN).to(DTYPES[dtype]) for _ in range(2))

    def providers(self) -> list[Provider]:
        made = [
            ("fastpar", "fastpar", self.parallelized()),
            ("by hand", "torch", self.by_hand()),
            ("no collectives", "bound", self.without_collectives()),
        ]
        if not self.sequence:
            made.append(("by hand, DTensor parameters", "torch", self.by_hand_with_dtensors()))
        return [
            Provider(name, kind, call=step, check=dict if kind == "bound" else partial(self.errors, step))
            for name, kind, step in made
        ]

    def part(self, x: Tensor, dim: int) -> Tensor:
        start, end = shard_range(x.size(dim), self.rank.world_size, self.rank.rank)
        return x.detach().narrow(dim, start, end - start).clone()

    def parallelized(self) -> Step:
        from fastpar import parallelize

        model = parallelize(copy.deepcopy(self.model), self.rank.group, PLAN, sequence_parallel=self.sequence)
        return Step(model, dict(model.named_parameters()), self.x, self.dy)

    def by_hand(self) -> Step:
        comm = Communicator.of(self.rank.group)
        layer = cast(Layer, self.model.layers[0])
        weights = {
            "layers.0.norm.weight": layer.norm.weight.detach().clone(),
            "layers.0.mlp.gate.weight": self.part(layer.mlp.gate.weight, 0),
            "layers.0.mlp.up.weight": self.part(layer.mlp.up.weight, 0),
            "layers.0.mlp.down.weight": self.part(layer.mlp.down.weight, 1),
        }
        parameters = {name: nn.Parameter(weight) for name, weight in weights.items()}
        norm, gate_n, up_n, down_k = parameters.values()

        def forward(x: Tensor) -> Tensor:
            normed = F.rms_norm(x, (HIDDEN,), norm, 1e-6)
            gate, up = CopyToLinears.apply(normed, gate_n, up_n, comm)
            return cast(Tensor, x + LinearAllReduce.apply(F.silu(gate) * up, down_k, comm))

        def forward_split(x: Tensor) -> Tensor:
            # The sequence is split where the layer begins and gathered where it ends, as `parallelize` does.
            x_s = _Split.apply(x, comm)
            normed = F.rms_norm(x_s, (HIDDEN,), Summed.apply(norm, comm), 1e-6)
            gate, up = AllGatherLinears.apply(normed, gate_n, up_n, comm)
            y_s = x_s + LinearReduceScatter.apply(F.silu(gate) * up, down_k, comm)
            return cast(Tensor, _Unsplit.apply(y_s, comm))

        return Step(forward_split if self.sequence else forward, parameters, self.x, self.dy)

    def by_hand_with_dtensors(self) -> Step:
        comm = Communicator.of(self.rank.group)
        parameters = self.parallelized().parameters
        norm, gate, up, down = parameters.values()

        def forward(x: Tensor) -> Tensor:
            normed = F.rms_norm(x, (HIDDEN,), OfDTensor.apply(norm), 1e-6)
            gated, upped = CopyToLinearsOfDTensors.apply(normed, gate, up, comm)
            return cast(Tensor, x + LinearAllReduceOfDTensor.apply(F.silu(gated) * upped, down, comm))

        return Step(forward, parameters, self.x, self.dy)

    def without_collectives(self) -> Step:
        model = copy.deepcopy(self.model)
        mlp = cast(Layer, model.layers[0]).mlp
        for linear, dim in ((mlp.gate, 0), (mlp.up, 0), (mlp.down, 1)):
            linear.weight = nn.Parameter(self.part(linear.weight, dim))
        return Step(model, dict(model.named_parameters()), self.x, self.dy)

    def errors(self, step: Step) -> dict[str, Error]:
        whole = copy.deepcopy(self.model).double()
        x = self.x.double().requires_grad_()
        y = whole(x)
        wanted = torch.autograd.grad(y, [x, *whole.parameters()], self.dy.double())
        expected = dict(zip(["y", "dx", *step.parameters], [y.detach(), *wanted], strict=True))
        for name in step.parameters:
            if "mlp" in name:
                expected[name] = self.part(expected[name], 1 if "down" in name else 0)
        found = {"y": step(), "dx": step.x.grad} | {name: p.grad for name, p in step.parameters.items()}
        return _errors(found, expected, self.dtype)


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator) -> Tensor:
        ctx.comm = comm
        return x.chunk(comm.size, 1)[comm.rank].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.comm.all_gather(grads[0], dim=1), None


class _Unsplit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_s: Tensor, comm: Communicator) -> Tensor:
        ctx.comm = comm
        return comm.all_gather(x_s, dim=1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].chunk(ctx.comm.size, 1)[ctx.comm.rank], None


class Step:
    """Forward and backward of one implementation; gradients are dropped first, as `zero_grad` does."""

    def __init__(
        self, forward: Callable[[Tensor], Tensor], parameters: dict[str, Any], x: Tensor, dy: Tensor | None
    ) -> None:
        self.forward, self.parameters, self.dy = forward, parameters, dy
        self.x = x.clone().requires_grad_()
        self._leaves = [self.x, *parameters.values()]

    def __call__(self) -> Tensor:
        for leaf in self._leaves:
            leaf.grad = None
        y = self.forward(self.x)
        y.backward(self.dy)
        return y.detach()


def mlp(rank: Rank, dtype: str, *, sequence: bool = False) -> list[Provider]:
    return MlpJob(rank, dtype, sequence=sequence).providers()


# ---- experts ---------------------------------------------------------------------------------------------------------


class Exchange(torch.autograd.Function):
    """Rows to their ranks; their gradients go the same way back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, comm: Communicator, sent: list[int], received: list[int]) -> Tensor:
        ctx.back = comm, received, sent
        return comm.all_to_all(rows, input_sizes=sent, output_sizes=received)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        comm, sent, received = ctx.back
        return comm.all_to_all(grads[0], input_sizes=sent, output_sizes=received), None, None, None


def moe_by_hand(problem: MoeProblem) -> Block:
    first, second = problem.parameters()
    comm = Communicator.of(problem.rank.group)
    local = torch.arange(len(first)).repeat(comm.size)

    def layer(x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        order = indices.flatten().argsort(stable=True)
        tokens = order // indices.shape[1]
        counts = torch.bincount(indices.flatten(), minlength=len(local))
        theirs = comm.all_to_all(counts).view(comm.size, -1)  # [ranks, experts here]
        sent, received = counts.view(comm.size, -1).sum(1).tolist(), theirs.sum(1).tolist()
        rows = Exchange.apply(x[tokens], comm, sent, received)
        by_expert = local.repeat_interleave(theirs.flatten()).argsort(stable=True)
        outs = []
        for expert, part in enumerate(rows[by_expert].split(theirs.sum(0).tolist())):
            gate, up = F.linear(part, first[expert]).chunk(2, -1)
            outs.append(F.linear(F.silu(gate) * up, second[expert]))
        found = Exchange.apply(torch.cat(outs)[by_expert.argsort()], comm, received, sent)
        scaled = found * weights.flatten()[order, None].to(x.dtype)
        return torch.zeros_like(x).index_add(0, tokens, scaled)

    return Block(layer, problem, first, second)


def moe(rank: Rank, dtype: str) -> list[Provider]:
    problem = MoeProblem(MoeCase(dtype, TOKENS, HIDDEN, FFN, EXPERTS, TOP_K), rank)
    blocks = (("fastpar", "fastpar", fastpar_block(problem)), ("by hand", "torch", moe_by_hand(problem)))
    return [Provider(name, kind, call=block.run, check=partial(problem.errors, block)) for name, kind, block in blocks]


# ---- a loss and a norm -----------------------------------------------------------------------------------------------


def loss(rank: Rank, dtype: str) -> list[Provider]:
    from fastpar import ops

    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(ROWS, VOCAB, generator=generator).to(DTYPES[dtype])
    target = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    start, end = shard_range(VOCAB, rank.world_size, rank.rank)
    group = Communicator.of(rank.group) if rank.world_size > 1 else None  # made once, as by layers
    vocab_range = None if group is None else (start, end, VOCAB)
    split = partial(ops.vocab_parallel_cross_entropy, group=group, vocab_range=vocab_range)
    exact = logits.double().requires_grad_()
    wanted = F.cross_entropy(exact, target)
    (grad,) = torch.autograd.grad(wanted, exact)

    def provider(name: str, kind: str, function: Callable[[Tensor, Tensor], Tensor], columns: slice) -> Provider:
        step = Step(lambda x: function(x, target), {}, logits[:, columns], None)
        expected = {"loss": wanted.detach(), "dx": grad[:, columns]}
        return Provider(
            name, kind, call=step, check=lambda: _errors({"loss": step(), "dx": step.x.grad}, expected, dtype)
        )

    return [
        provider("fastpar", "fastpar", split, slice(start, end)),
        provider("torch F.cross_entropy", "torch", F.cross_entropy, slice(0, VOCAB)),
    ]


def rms_norm(rank: Rank, dtype: str) -> list[Provider]:
    from fastpar import ops

    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(TOKENS, HIDDEN, generator=generator).to(DTYPES[dtype]) for _ in range(2))
    weight = torch.rand(HIDDEN, generator=generator).to(DTYPES[dtype]).requires_grad_()
    leaves = [x.double().requires_grad_(), weight.detach().double().requires_grad_()]
    y = F.rms_norm(leaves[0], (HIDDEN,), leaves[1], 1e-6)
    expected = dict(
        zip(("y", "dx", "dweight"), (y.detach(), *torch.autograd.grad(y, leaves, dy.double())), strict=True)
    )

    def provider(name: str, kind: str, function: Callable[[Tensor], Tensor]) -> Provider:
        step = Step(function, {"weight": weight}, x, dy)

        def check() -> dict[str, Error]:
            return _errors({"y": step(), "dx": step.x.grad, "dweight": weight.grad}, expected, dtype)

        return Provider(name, kind, call=step, check=check)

    return [
        provider("fastpar", "fastpar", lambda x: ops.rms_norm(x, weight, eps=1e-6)),
        provider("torch F.rms_norm", "torch", lambda x: F.rms_norm(x, (HIDDEN,), weight, 1e-6)),
    ]


# ---- a data-parallel step --------------------------------------------------------------------------------------------


class TrainingStep:
    """Forward and backward of this rank's rows, the optimizer's step, and gradients dropped."""

    def __init__(self, model: nn.Module, rows: Tensor) -> None:
        self.model, self.rows = model, rows
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

    def __call__(self) -> Tensor:
        loss: Tensor = self.model(self.rows).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


class Zero1Job:
    """Equal weights on all ranks, rows of their own, and one process in float64 for the first steps."""

    def __init__(self, rank: Rank, dtype: str) -> None:
        self.rank, self.dtype = rank, DTYPES[dtype]
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4))).to(self.dtype)
        self.rows = torch.randn(rank.world_size, ROWS, 64).to(self.dtype)

    def providers(self) -> list[Provider]:
        from fastpar import zero

        mine = self.rows[self.rank.rank]
        sharded, alone = (TrainingStep(copy.deepcopy(self.model), mine) for _ in range(2))
        zero.shard(sharded.model, sharded.optimizer, group=self.rank.group, stage=1)
        replicas = nn.parallel.DistributedDataParallel(copy.deepcopy(self.model), gradient_as_bucket_view=True)
        replicated = TrainingStep(replicas, mine)
        return [
            Provider("fastpar", "fastpar", call=sharded, check=partial(self.errors, sharded)),
            Provider("torch DDP", "torch", call=replicated, check=partial(self.errors, replicated)),
            Provider("no collectives", "bound", call=alone, check=dict),
        ]

    def errors(self, step: TrainingStep) -> dict[str, Error]:
        """How far the weights are after the first steps, as a part of how far they have moved."""
        whole = TrainingStep(copy.deepcopy(self.model).double(), self.rows.double().flatten(0, 1))
        for _ in range(3):
            step()
            whole()
        first, moved, found = (
            torch.cat([parameter.detach().double().flatten() for parameter in model.parameters()])
            for model in (self.model, whole.model, step.model)
        )
        return {"weights": Error(float((found - moved).norm() / (moved - first).norm()), 1e-2)}


def _errors(found: Mapping[str, Tensor | None], expected: Mapping[str, Tensor], dtype: str) -> dict[str, Error]:
    """In the L2 norm, relative, by name."""
    errors = {}
    for name, target in expected.items():
        value = local_tensor(cast(Tensor, found[name])).detach().double()
        errors[name] = Error(float((value - target).norm() / target.norm()), TOLERANCES[dtype])
    return errors


# ---- main ------------------------------------------------------------------------------------------------------------

JOBS: Mapping[str, Callable[[Rank, str], list[Provider]]] = {
    "mlp": mlp,
    "mlp+sequence": partial(mlp, sequence=True),
    "moe": moe,
    "loss": loss,
    "rms_norm": rms_norm,
    "zero1": lambda rank, dtype: Zero1Job(rank, dtype).providers(),
}
_ON_ONE_RANK = ("moe", "loss", "rms_norm")
_ON_SEVERAL = ("mlp", "mlp+sequence", "moe", "loss", "zero1")


def cases(flags: argparse.Namespace, world_size: int) -> Sequence[Case]:
    there = _ON_SEVERAL if world_size > 1 else _ON_ONE_RANK
    return [HostCase(job, dtype) for job in flags.jobs if job in there for dtype in flags.dtype]


BENCH = Bench(
    name="host",
    baselines=("by hand", "torch F.cross_entropy", "torch F.rms_norm", "torch DDP"),
    cases=cases,
    memory=False,
    quick={"blocks": 3, "iters": 2, "dtype": ["fp32"]},
)


def _job(text: str) -> list[str]:
    names = text.split(",")
    if not set(names) <= set(JOBS):
        raise argparse.ArgumentTypeError(f"{text!r}: choose from {', '.join(JOBS)}")
    return names


def main(argv: Sequence[str]) -> int:
    made = parser(BENCH, "host time of layers at tiny shapes", ranks=[1, 2], dtype=["fp32"], settings=["default"])
    made.set_defaults(blocks=15, iters=5, lead=2)
    made.add_argument("--jobs", type=_job, default=list(JOBS), metavar="LIST", help=", ".join(JOBS))
    return run(BENCH, made.parse_args(argv), ["fastpar", "bench", "host", *argv])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
