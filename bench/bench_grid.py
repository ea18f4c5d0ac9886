"""The linears of a transformer layer on grids of ranks: one dim, 2D, 2.5D and 3D, forward + backward.

    fastpar bench grid [--quick] [--tokens 4096] [--hidden 256] [--batch 8] [--dtype fp32] [--ranks 4,8]

What is timed: y = x + proj(mix(qkv(x))), y + down(gelu(up(y))) and its backward, with linears h -> 3h, h -> h, h -> 4h
and 4h -> h, no bias, fresh gradients every time. `mix` is q * sigmoid(k) + v, by feature, in the place of attention,
which no grid divides differently; there are no norms. x and y are this rank's parts of [batch, tokens / batch, hidden].

"1D" is Megatron-LM's with sequence parallelism, (1, p, 1); "2D" Optimus', "2.5D" Tesseract's, "3D" Colossal-AI's;
others are named by their sizes (x, y, z). "streamed" is SUMMA's schedule on the same grid: blocks of K one after the
other in the place of gathers, which sends as many words. A row has the words (elements) that a rank sends, by the
formula in `words`; the check counts them, and they equal it to the last one. "no collectives" is torch's modules with
whole weights on this rank's sequences, what (1, 1, p) would take if nothing had to be sent.

Flops model, all ranks together (a GEMM forward, twice again in backward):

    72 * tokens * hidden ** 2

Traps besides those of `bench.harness`:

* Ranks of one host share one memory. Words are what a network would see; here their cost is that of copies, and more
  ranks than cores hide nothing.
* Between CPU ranks a collective of few kilobytes costs its latency: more axes are more collectives. Look at sizes where
  words count, and say which.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastpar as fp
from bench.harness import Case, Error, Provider, Rank, gemm_roof
from bench.options import DTYPES, Bench, parser, positive_list, run

# Relative errors in the L2 norm: sums of up to 1024 products in any order, and of up to 8 partial ones.
TOLERANCES = {"fp32": 1e-5, "bf16": 4e-2}


def grids(ranks: int) -> dict[str, fp.GridSpec]:
    """By name: what 4 and 8 ranks can be."""
    found = {"1D": fp.GridSpec(1, ranks, 1)}
    if ranks == 8:
        found |= {"2.5D": fp.GridSpec.tesseract(2, 2), "3D": fp.GridSpec.cube(2)}
        found["2.5D streamed"] = fp.GridSpec.tesseract(2, 2, stream=True)
        sizes = [(1, 4, 2), (1, 2, 4), (2, 4, 1)]
    elif ranks == 4:
        found |= {"2D": fp.GridSpec.summa(2), "2D streamed": fp.GridSpec.summa(2, stream=True)}
        sizes = [(1, 2, 2), (2, 2, 1)]
    else:
        sizes = [(1, 1, ranks)]
    return found | {str(each): fp.GridSpec(*each) for each in sizes}


def words(spec: fp.GridSpec, tokens: int, hidden: int) -> float:
    """Elements that a rank sends, forward and backward: the module's formula of `fastpar.tensor.grid_linear`."""
    total, z = 0.0, spec.z // spec.replicas
    for is_column, inputs, outputs in ((True, 1, 3), (False, 1, 1), (True, 1, 4), (False, 4, 1)):
        k, n = (spec.x, spec.y) if is_column else (spec.y, spec.x)
        if spec.spread == "features":
            k, n = 1, spec.y
        rows, weight = tokens / spec.z, inputs * outputs * hidden**2 / (k * n)
        gathered = (1 - 1 / n) * rows * inputs * hidden / k
        summed = (1 - 1 / k) * rows * outputs * hidden / n
        copies = 2 * (1 - 1 / spec.replicas) * weight / z
        total += 3 * gathered + 3 * (1 - 1 / z) * weight + 2 * summed + copies
    return total


@dataclass(frozen=True)
class GridCase:
    """`tokens` of `batch` sequences through one layer's linears of width `hidden`."""

    dtype: str
    tokens: int
    batch: int
    hidden: int
    ranks: int
    calls: int = 1

    def describe(self) -> dict[str, Any]:
        sizes = {"dtype": self.dtype, "tokens": self.tokens, "batch": self.batch, "hidden": self.hidden}
        sent = {name: words(spec, self.tokens, self.hidden) for name, spec in grids(self.ranks).items()}
        return sizes | {f"words {name}": round(count) for name, count in sent.items()}

    def build(self, rank: Rank) -> list[Provider]:
        problem = Problem(self)
        flops = 72.0 * self.tokens * self.hidden**2
        providers = []
        for name, spec in grids(self.ranks).items():
            layer = GridLayer(problem, spec)
            check = partial(problem.errors, layer, words(spec, self.tokens, self.hidden))
            providers.append(Provider(name, "fastpar", call=layer.step, check=check, flops=flops))
        if self.batch % rank.world_size == 0:
            alone = LocalLayer(problem, rank)
            providers.append(Provider("no collectives", "torch", call=alone.step, check=alone.errors, flops=flops))
        return [*providers, gemm_roof(DTYPES[self.dtype], rank.world_size)]


class Problem:
    """The full weights and inputs, the same on every rank, and the whole layer in float64."""

    def __init__(self, case: GridCase) -> None:
        self.case = case
        generator = torch.Generator().manual_seed(0)
        h, dtype = case.hidden, DTYPES[case.dtype]
        shapes = {"qkv": (3 * h, h), "proj": (h, h), "up": (4 * h, h), "down": (h, 4 * h)}
        self.weights = {
            name: (torch.randn(shape, generator=generator) * shape[1] ** -0.5).to(dtype)
            for name, shape in shapes.items()
        }
        shape = (case.batch, case.tokens // case.batch, h)
        self.x, self.dy = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
        self._expected: dict[str, Tensor] = {}

    def linear(self, name: str) -> nn.Linear:
        weight = self.weights[name]
        made = nn.Linear(weight.size(1), weight.size(0), bias=False, dtype=weight.dtype)
        with torch.no_grad():
            made.weight.copy_(weight)
        return made

    def errors(self, layer: GridLayer, sent: float) -> dict[str, Error]:
        """Against float64, and the words that were counted against the formula."""
        with fp.comm.record() as log:
            out = layer.step()
        # Of operands: what ranks of a stream agree on are a few integers.
        counted = sum(entry.nbytes for entry in log if entry.dtype.is_floating_point) / self.x.element_size()
        assert layer.x.grad is not None
        found = {"y": layer.region.leave(out), "dx": layer.region.leave(layer.x.grad)}
        for name, linear in layer.linears.items():
            found[f"d{name}"] = fp.tensor.full_parameter(linear.weight, linear.weight.grad)
        tolerance = TOLERANCES[self.case.dtype]
        expected = self.expected()
        errors = {name: Error(relative(value, expected[name]), tolerance) for name, value in found.items()}
        return errors | {"words": Error(abs(counted - sent) / max(sent, 1.0), 0.0)}

    def expected(self) -> dict[str, Tensor]:
        if not self._expected:
            leaves = {name: w.double().requires_grad_() for name, w in self.weights.items()}
            x = self.x.double().requires_grad_()
            y = layer_forward({name: partial(F.linear, weight=w) for name, w in leaves.items()}, x)
            grads = torch.autograd.grad(y, (x, *leaves.values()), self.dy.double())
            self._expected = {"y": y.detach(), "dx": grads[0]}
            self._expected |= {f"d{name}": grad for name, grad in zip(leaves, grads[1:], strict=True)}
        return self._expected


class GridLayer:
    """The layer on one grid: this rank's parts."""

    def __init__(self, problem: Problem, spec: fp.GridSpec) -> None:
        from fastpar.tensor import Grid, GridLinear, GridRegion

        mesh = fp.init_mesh(tp=spec.ranks, tp_grid=spec, device="cpu")
        grid, h = Grid(mesh), problem.case.hidden
        self.region = GridRegion(grid)
        self.x = self.region.enter(problem.x).detach().requires_grad_()
        self.dy = self.region.enter(problem.dy)
        options: dict[str, Any] = {"sequence": self.region, "whole_sequences": True}
        make = GridLinear.from_linear
        self.linears: dict[str, Any] = {
            "qkv": make(problem.linear("qkv"), grid, "column", sections=(h, h, h), **options),
            "proj": make(problem.linear("proj"), grid, "row", **options),
            "up": make(problem.linear("up"), grid, "column", **options),
            "down": make(problem.linear("down"), grid, "row", **options),
        }

    def step(self) -> Tensor:
        """The timed region."""
        return layer_step(self.linears, self.x, self.dy)


class LocalLayer:
    """torch's modules, whole weights, this rank's sequences: the GEMMs of (1, 1, p) and nothing that is sent."""

    def __init__(self, problem: Problem, rank: Rank) -> None:
        self.problem, self.rank = problem, rank
        self.x = rank_sequences(problem.x, rank).clone().requires_grad_()
        self.dy = rank_sequences(problem.dy, rank)
        self.linears: dict[str, Any] = {name: problem.linear(name) for name in problem.weights}

    def step(self) -> Tensor:
        return layer_step(self.linears, self.x, self.dy)

    def errors(self) -> dict[str, Error]:
        """Of what is whole: gradients of weights are those of this rank's tokens only."""
        out, expected = self.step(), self.problem.expected()
        assert self.x.grad is not None
        found = {"y": out.detach(), "dx": self.x.grad}
        tolerance = TOLERANCES[self.problem.case.dtype]
        return {
            name: Error(relative(value, rank_sequences(expected[name], self.rank)), tolerance)
            for name, value in found.items()
        }


def rank_sequences(full: Tensor, rank: Rank) -> Tensor:
    return full.chunk(rank.world_size)[rank.rank]


def relative(value: Tensor, expected: Tensor) -> float:
    return float((value.detach().double() - expected).norm() / expected.norm())


def layer_step(linears: dict[str, Any], x: Tensor, dy: Tensor) -> Tensor:
    """Forward and backward, with fresh gradients."""
    x.grad = None
    for linear in linears.values():
        linear.weight.grad = None
    y = layer_forward(linears, x)
    y.backward(dy)
    return y


def layer_forward(linears: dict[str, Callable[[Tensor], Tensor]], x: Tensor) -> Tensor:
    q, k, v = linears["qkv"](x).chunk(3, -1)
    x = x + linears["proj"](q * torch.sigmoid(k) + v)
    return x + linears["down"](F.gelu(linears["up"](x)))


# --------------------------------------------------------------------------------------------------------------- main


def cases(flags: argparse.Namespace, world_size: int) -> Sequence[Case]:
    return [GridCase(d, t, flags.batch, h, world_size) for d in flags.dtype for t in flags.tokens for h in flags.hidden]


BENCH = Bench(
    name="grid",
    baselines=("1D",),
    cases=cases,
    memory=True,
    quick={"tokens": [256], "hidden": [64], "blocks": 3, "iters": 2},
)


def main(argv: Sequence[str]) -> int:
    made = parser(BENCH, "linears on grids of ranks, forward + backward", ranks=[4], blocks=5, iters=2)
    made.add_argument("--tokens", type=positive_list, default=[4096], metavar="LIST", help="of all sequences together")
    made.add_argument("--hidden", type=positive_list, default=[256], metavar="LIST", help="width of x and y")
    made.add_argument("--batch", type=int, default=8, metavar="N", help="sequences (%(default)s)")
    return run(BENCH, made.parse_args(argv), ["fastpar", "bench", "grid", *argv])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
