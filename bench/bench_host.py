"""Time of the host: layers so small that Python, autograd and the launch of collectives are all that there is.

    fastpar bench host [--jobs mlp,mlp+sequence] [--dtype fp32] [--ranks 2]

Eager layers on a fast GPU are bound by the host, so what a layer adds to its kernels in Python counts there as it does
here. Every job is done by fastpar, by hand (the shortest code with the same collectives, which is what the ratio refers
to), and without collectives (a bound with a wrong result, not a peer).

    mlp             x + down(silu(gate(n)) * up(n)), n = norm(x), after `fastpar.parallelize`: one all-reduce of
                    [tokens, hidden] forward and one backward. Forward, backward with gradients of x and of every
                    parameter, fresh every time
    mlp+sequence    the same with sequence_parallel=True: an all-gather and a reduce-scatter forward, two all-gathers
                    and a reduce-scatter backward, and the norm's gradient summed over the ranks

A job is a line of `JOBS`: a function from a `Rank` and a dtype to its providers, the same list on every rank.

Traps besides those of `bench.harness`: a call takes less than a barrier's skew, so a sample is 20 calls. Ranks are
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

from bench.harness import Case, Error, Provider, Rank, local_tensor
from bench.options import DTYPES, Bench, parser, run
from fastpar.comm import Communicator, shard_range

TOKENS, HIDDEN, FFN = 16, 32, 64
TOLERANCES = {"fp32": 1e-5, "bf16": 3e-2}


@dataclass(frozen=True)
class HostCase:
    """One job of `JOBS`."""

    job: str
    dtype: str

    @property
    def calls(self) -> int:
        return 20

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


class MlpJob:
    """The weights and inputs, the same on every rank, and the whole block in float64."""

    def __init__(self, rank: Rank, dtype: str, *, sequence: bool) -> None:
        self.rank, self.sequence, self.tolerance = rank, sequence, TOLERANCES[dtype]
        torch.manual_seed(0)
        self.model = Model().to(DTYPES[dtype])
        self.x, self.dy = (torch.randn(1, TOKENS, HIDDEN).to(DTYPES[dtype]) for _ in range(2))

    def providers(self) -> list[Provider]:
        made = [
            ("fastpar", "fastpar", self.parallelized()),
            ("by hand", "torch", self.by_hand()),
            ("no collectives", "bound", self.without_collectives()),
        ]
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
        found = {"y": step(), "dx": step.x.grad} | {name: p.grad for name, p in step.parameters.items()}
        errors = {}
        for name, value in found.items():
            target = expected[name]
            if "mlp" in name:
                target = self.part(target, 1 if "down" in name else 0)
            off = (local_tensor(cast(Tensor, value)).detach().double() - target).norm() / target.norm()
            errors[name] = Error(float(off), self.tolerance)
        return errors


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

    def __init__(self, forward: Callable[[Tensor], Tensor], parameters: dict[str, Any], x: Tensor, dy: Tensor) -> None:
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


# ---- main ------------------------------------------------------------------------------------------------------------

JOBS: Mapping[str, Callable[[Rank, str], list[Provider]]] = {
    "mlp": mlp,
    "mlp+sequence": partial(mlp, sequence=True),
}


def cases(flags: argparse.Namespace, world_size: int) -> Sequence[Case]:
    return [HostCase(job, dtype) for job in flags.jobs for dtype in flags.dtype] if world_size > 1 else []


BENCH = Bench(
    name="host",
    baselines=("by hand",),
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
    made = parser(BENCH, "host time of layers at tiny shapes", ranks=[2], dtype=["fp32"], settings=["default"])
    made.set_defaults(blocks=15, iters=5, lead=2)
    made.add_argument("--jobs", type=_job, default=list(JOBS), metavar="LIST", help=", ".join(JOBS))
    return run(BENCH, made.parse_args(argv), ["fastpar", "bench", "host", *argv])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
