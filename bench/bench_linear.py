"""A tensor-parallel MLP block, forward + backward: column-parallel linear -> GELU -> row-parallel linear.

    fastpar bench linear [--quick] [--tokens 1024,64] [--hidden 1024] [--ffn 4096] [--dtype fp32,bf16] [--ranks 2]
    fastpar bench linear --many [--dtype fp32] ...                  20 shapes instead

What is timed: ``y = down(gelu(up(x)))`` and ``y.backward(dy)`` with gradients of x and both weights, no bias, fresh
gradients every time (set to None inside the timed region, as `zero_grad` does). x and y are [1, tokens, hidden], the
same on every rank; with sequence parallelism every rank holds its part of the tokens. "no communication" is fastpar's
block with the collectives left out: a lower bound with a wrong result, not a peer. The column "above bound" is the
part of a provider's time above it: communication, and waiting for it and for the other ranks.

"in turn" is `F.linear` and fastpar's own collectives one after the other, what overlap must never be slower than;
"overlap off" is fastpar's block with the same products and no collective in flight during any.

Flops model, all ranks together (two GEMMs forward, each twice again in backward):

    12 * tokens * hidden * ffn

Collectives of a TP block: one all-reduce of [tokens, hidden] forward and one backward; with sequence parallelism an
all-gather and a reduce-scatter each way, the same bytes, and fastpar gathers x once more in backward.

Traps besides those of `bench.harness`:

* Communication libraries wake their threads in 0.1 to 1 ms, and not always alike. Look at min and spread, and at a
  small number of tokens, where a block is as short as that.
* A short call is repeated 5 times per sample, so that ranks which leave the barrier at different times do not count.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from bench.harness import Case, Error, Provider, Rank, gemm_roof, local_tensor
from bench.options import DTYPES, Bench, parser, positive_list, run
from fastpar.comm import (
    Communicator,
    Pending,
    copy_to,
    gather_sequence,
    reduce_from,
    reduce_scatter_sequence,
    shard_range,
    shard_sizes,
)
from fastpar.comm.launcher import Launcher
from fastpar.comm.transport_selector import Mode

# 20 shapes: few to many tokens through MLPs of four widths.
MANY_TOKENS = (16, 64, 256, 1024, 2048)
MANY_WIDTHS = ((256, 1024), (768, 3072), (1024, 2816), (1024, 4096))
# Relative errors in the L2 norm. fp32: sums of up to 4096 products in any order. bf16: activations rounded to 8 bits.
TOLERANCES = {"fp32": 1e-5, "bf16": 2e-2}


@dataclass(frozen=True)
class MlpCase:
    """`tokens` x `hidden` through an MLP of width `ffn`."""

    dtype: str
    tokens: int
    hidden: int
    ffn: int

    @property
    def calls(self) -> int:
        return 5 if self.tokens <= 128 else 1

    def describe(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "tokens": self.tokens, "hidden": self.hidden, "ffn": self.ffn}

    def build(self, rank: Rank) -> list[Provider]:
        problem = Problem(self, rank)
        flops = 12.0 * self.tokens * self.hidden * self.ffn
        makers: list[tuple[str, str, Callable[[Problem], Block]]] = [
            ("fastpar", "fastpar", fastpar_block),
            ("fastpar + sequence", "fastpar", partial(fastpar_block, sequence=True)),
            ("plain torch", "torch", plain_block),
        ]
        if rank.world_size > 1:
            makers += [
                ("torch parallelize_module", "torch", torch_block),
                ("torch parallelize_module + sequence", "torch", partial(torch_block, sequence=True)),
                ("overlap off", "fastpar", partial(fastpar_block, overlap=False)),
                ("in turn", "torch", in_turn_block),
                ("in turn + sequence", "torch", partial(in_turn_block, sequence=True)),
                ("no communication", "bound", partial(fastpar_block, silent=True)),
            ]
        providers = []
        for name, kind, make in makers:
            block = make(problem)
            check = dict if kind == "bound" else partial(problem.errors, block)
            providers.append(Provider(name, kind, call=block.step, check=check, flops=flops))
        return [*providers, gemm_roof(DTYPES[self.dtype], rank.world_size)]


@dataclass
class Block:
    """One implementation on one rank: `forward`, its leaves, and the gradient that comes in."""

    forward: Callable[[Tensor], Tensor]
    x: Tensor
    dy: Tensor
    up: Tensor
    down: Tensor
    sequence: bool = False

    def step(self) -> Tensor:
        """The timed region."""
        self.x.grad = self.up.grad = self.down.grad = None
        y = self.forward(self.x)
        y.backward(self.dy)
        return y

    def results(self) -> dict[str, Tensor]:
        y = self.step()
        grads = {"dx": self.x.grad, "dup": self.up.grad, "ddown": self.down.grad}
        return {"y": local_tensor(y)} | {name: local_tensor(g) for name, g in grads.items() if g is not None}


class Problem:
    """The full weights and inputs (the same on every rank) and the unsharded block in float64."""

    def __init__(self, case: MlpCase, rank: Rank) -> None:
        self.case, self.rank = case, rank
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int, scale: float) -> Tensor:
            return (torch.randn(*shape, generator=generator) * scale).to(DTYPES[case.dtype])

        self.x = random(1, case.tokens, case.hidden, scale=1.0)
        self.dy = random(1, case.tokens, case.hidden, scale=1.0)
        self.up = random(case.ffn, case.hidden, scale=case.hidden**-0.5)
        self.down = random(case.hidden, case.ffn, scale=case.ffn**-0.5)
        self._expected: dict[str, Tensor] | None = None

    def shard(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part, torch.chunk's rule."""
        start, end = shard_range(x.size(dim), self.rank.world_size, self.rank.rank)
        return x.narrow(dim, start, end - start).clone()

    def linears(self) -> tuple[nn.Linear, nn.Linear]:
        """The unsharded layers, as a user has them before parallelisation."""
        up = nn.Linear(self.case.hidden, self.case.ffn, bias=False, dtype=self.x.dtype)
        down = nn.Linear(self.case.ffn, self.case.hidden, bias=False, dtype=self.x.dtype)
        with torch.no_grad():
            up.weight.copy_(self.up)
            down.weight.copy_(self.down)
        return up, down

    def inputs(self, sequence: bool) -> tuple[Tensor, Tensor]:
        """x (a leaf) and dy, whole or this rank's tokens."""
        if sequence:
            return self.shard(self.x, 1).requires_grad_(), self.shard(self.dy, 1)
        return self.x.clone().requires_grad_(), self.dy

    def errors(self, block: Block) -> dict[str, Error]:
        tolerance = TOLERANCES[self.case.dtype]
        expected = self._reference()
        found = {}
        for name, value in block.results().items():
            whole = expected[name]
            if name == "dup":
                whole = self.shard(whole, 0)
            elif name == "ddown" or block.sequence:
                whole = self.shard(whole, 1)
            found[name] = Error(float((value.detach().double() - whole).norm() / whole.norm()), tolerance)
        if len(found) != 4:
            raise RuntimeError(f"a gradient is missing: got {sorted(found)}")
        return found

    def _reference(self) -> dict[str, Tensor]:
        if self._expected is None:
            x, up, down = (t.double().requires_grad_() for t in (self.x, self.up, self.down))
            y = F.linear(F.gelu(F.linear(x, up)), down)
            dx, dup, ddown = torch.autograd.grad(y, (x, up, down), self.dy.double())
            self._expected = {"y": y.detach(), "dx": dx, "dup": dup, "ddown": ddown}
        return self._expected


# ---------------------------------------------------------------------------------------------------------- providers


class _Silent(Communicator):
    """Sends nothing: what is left is the work around an all-reduce."""

    def all_reduce(self, x: Tensor, op: str = "sum", *, out: Tensor | None = None) -> Tensor:
        return x if out is None else out

    def collectives(self, mode: Mode) -> Launcher:
        return _SilentLauncher(self._selector, mode)


class _SilentLauncher(Launcher):
    def all_reduce(self, x: Tensor, op: str = "sum", *, out: Tensor | None = None) -> Pending[Tensor]:
        return Pending.ready(x if out is None else out)


def fastpar_block(problem: Problem, *, sequence: bool = False, overlap: bool = True, silent: bool = False) -> Block:
    from fastpar.tensor import ColumnParallelLinear, RowParallelLinear, SequenceRegion

    comm = _Silent(problem.rank.group) if silent else Communicator.of(problem.rank.group)
    region = SequenceRegion(comm) if sequence else None
    if region is not None:
        region.set_total(problem.case.tokens)
    first, second = problem.linears()
    up = ColumnParallelLinear.from_linear(first, group=comm, sequence=region, overlap=overlap)
    down = RowParallelLinear.from_linear(second, group=comm, sequence=region, overlap=overlap)
    return Block(lambda x: down(F.gelu(up(x))), *problem.inputs(sequence), up.weight, down.weight, sequence)


def in_turn_block(problem: Problem, *, sequence: bool = False) -> Block:
    """Sharded weights, `F.linear`, and fastpar's blocking collectives between the products."""
    comm = Communicator.of(problem.rank.group)
    up, down = (problem.shard(w, dim).requires_grad_() for w, dim in ((problem.up, 0), (problem.down, 1)))
    sizes = shard_sizes(problem.case.tokens, comm.size)

    def forward(x: Tensor) -> Tensor:
        x = gather_sequence(x, comm, dim=1, sizes=sizes) if sequence else copy_to(x, comm)
        y = F.linear(F.gelu(F.linear(x, up)), down)
        return reduce_scatter_sequence(y, comm, dim=1, sizes=sizes) if sequence else reduce_from(y, comm)

    return Block(forward, *problem.inputs(sequence), up, down, sequence)


def plain_block(problem: Problem) -> Block:
    """Sharded weights, `F.linear`, and `dist.all_reduce` in two autograd functions, as tutorials write it."""
    group = problem.rank.group
    up, down = (problem.shard(w, dim).requires_grad_() for w, dim in ((problem.up, 0), (problem.down, 1)))

    def forward(x: Tensor) -> Tensor:
        if group is not None:
            x = _CopyToRanks.apply(x, group)
        y = F.linear(F.gelu(F.linear(x, up)), down)
        if group is not None:
            y = _SumOverRanks.apply(y, group)
        return y

    return Block(forward, *problem.inputs(False), up, down)


class _CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.mark_dirty(x)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Mlp(nn.Module):
    def __init__(self, up: nn.Linear, down: nn.Linear) -> None:
        super().__init__()
        self.up, self.down = up, down

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(x)))
        return y


def torch_block(problem: Problem, *, sequence: bool = False) -> Block:
    """torch's own tensor-parallel API on DTensor."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (problem.rank.world_size,))
    outside = Shard(1) if sequence else Replicate()
    mlp = _Mlp(*problem.linears())
    plan = {"up": ColwiseParallel(input_layouts=outside), "down": RowwiseParallel(output_layouts=outside)}
    parallelize_module(mlp, mesh, plan)
    return Block(mlp, *problem.inputs(sequence), mlp.up.weight, mlp.down.weight, sequence)


# --------------------------------------------------------------------------------------------------------------- main


def cases(flags: argparse.Namespace, world_size: int) -> Sequence[Case]:
    if flags.many:
        return [MlpCase(d, t, h, f) for d in flags.dtype for h, f in MANY_WIDTHS for t in MANY_TOKENS]
    return [MlpCase(d, t, h, f) for d in flags.dtype for t in flags.tokens for h in flags.hidden for f in flags.ffn]


BENCH = Bench(
    name="linear",
    baselines=("plain torch",),
    cases=cases,
    memory=False,
    quick={"tokens": [64], "hidden": [256], "ffn": [1024], "blocks": 3, "iters": 2},
)


def main(argv: Sequence[str]) -> int:
    made = parser(BENCH, "tensor-parallel MLP block, forward + backward", ranks=[2], blocks=5, iters=2)
    made.add_argument("--tokens", type=positive_list, default=[1024, 64], metavar="LIST", help="tokens in the block")
    made.add_argument("--hidden", type=positive_list, default=[1024], metavar="LIST", help="width of x and y")
    made.add_argument("--ffn", type=positive_list, default=[4096], metavar="LIST", help="width inside the block")
    made.add_argument("--many", action="store_true", help="20 shapes in place of tokens, hidden and ffn")
    return run(BENCH, made.parse_args(argv), ["fastpar", "bench", "linear", *argv])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
