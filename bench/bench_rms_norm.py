"""RMSNorm forward and backward, alone and with the addition of a residual stream in front of it.

    fastpar bench rms_norm [--quick] [--tokens 4096] [--hidden 4096] [--threads 1,2] [--residual 0,1]

What is timed: ``out = f(x, weight)`` and ``torch.autograd.grad(out, (x, weight), grad_out)``; with a residual
``out, h = f(x, residual, weight)`` and the gradients of all three, a gradient arriving at h as well. x [tokens,
hidden], the residual and the weight are leaves; the weight has x's dtype. One process: the op has no collective.

Bytes model (least traffic of a forward and a backward that are separate calls), in elements of the dtype: forward
reads x and writes out; backward reads x and grad_out and writes the gradient; a residual adds reading it and writing h
in forward, and reading the gradient of h in backward,

    5 * tokens * hidden * element size          8 * tokens * hidden * element size with a residual

The weight, its gradient and rstd are left out. Memory bound that fastpar claims: out (and h) and the gradient, 4 bytes
a row, and 260 rows of floats: the partial sums of the weight's gradient, which it needs for any number of tokens.

Traps besides those of `bench.harness`:

* The gradient of the residual is the gradient of x: both come from one addition. fastpar and autograd return the same
  tensor for both, so no provider is charged for a copy.
* Errors are norms over whole results against float64, the weight's gradient apart, because its sum over the rows hides
  what is wrong with one of them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from bench.harness import Case, Error, Provider, Rank, copy_roofs
from bench.options import DTYPES, Bench, parser, positive_list, run

EPS = 1e-6
# (x, weight, residual or None) -> (out,) or (out, h)
Function = Callable[..., tuple[torch.Tensor, ...]]
# -> the outputs, then the gradients of x, weight and residual: the timed region
Step = Callable[[], tuple[torch.Tensor, ...]]

TOLERANCES = {"fp32": 1e-5, "bf16": 2e-2}  # relative errors


@dataclass(frozen=True)
class RmsNormCase:
    """x [tokens, hidden] in `dtype`, with or without a residual."""

    dtype: str
    tokens: int
    hidden: int
    residual: bool
    calls: int = 1

    def describe(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "tokens": self.tokens, "hidden": self.hidden, "residual": self.residual}

    def build(self, rank: Rank) -> list[Provider]:
        problem = Problem(self, rank.device)
        elements = self.tokens * self.hidden
        size = DTYPES[self.dtype].itemsize
        claimed = (3 if self.residual else 2) * elements * size + 4 * self.tokens + 4 * 260 * self.hidden

        def provider(name: str, kind: str, function: Function, bound: int | None = None) -> Provider:
            step = problem.step_of(function)
            return Provider(
                name,
                kind,
                call=step,
                check=lambda: problem.errors(step),
                num_bytes=(8.0 if self.residual else 5.0) * elements * size,
                memory_bound=bound,
            )

        return [
            provider("fastpar", "fastpar", fastpar_rms_norm, claimed),
            provider("torch F.rms_norm", "torch", torch_rms_norm),
            provider("torch.compile F.rms_norm", "torch", compiled_rms_norm),
            *copy_roofs(min(elements * size, 256 << 20), rank.world_size, rank.device),
        ]


class Problem:
    """The tensors of a case."""

    def __init__(self, case: RmsNormCase, device: str) -> None:
        generator = torch.Generator(device).manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, device=device).to(DTYPES[case.dtype])

        self.case = case
        self.x = random(case.tokens, case.hidden).requires_grad_()
        self.weight = random(case.hidden).requires_grad_()
        self.residual = random(case.tokens, case.hidden).requires_grad_() if case.residual else None
        self.grads = [random(case.tokens, case.hidden) for _ in range(1 + case.residual)]

    def step_of(self, function: Function) -> Step:
        leaves = [self.x, self.weight] + ([] if self.residual is None else [self.residual])

        def step() -> tuple[torch.Tensor, ...]:
            outputs = function(self.x, self.weight, self.residual)
            return (*outputs, *torch.autograd.grad(outputs, leaves, self.grads))

        return step

    def errors(self, step: Step) -> dict[str, Error]:
        """Relative errors against float64; the exact norm is that of the rounded sum, as every provider's."""
        found = [t.detach() for t in step()]
        with torch.no_grad():
            summed = self.x if self.residual is None else self.x + self.residual
        h, weight = (t.detach().double().requires_grad_() for t in (summed, self.weight))
        out = F.rms_norm(h, (self.case.hidden,), weight, EPS)
        grad_h, grad_weight = torch.autograd.grad(out, (h, weight), self.grads[0].double())
        if self.residual is None:
            exact = {"out": out, "grad x": grad_h, "grad weight": grad_weight}
        else:
            grad_h = grad_h + self.grads[1].double()
            exact = {"out": out, "h": h, "grad x": grad_h, "grad weight": grad_weight, "grad residual": grad_h}
        return {
            name: Error(float((mine.double() - wanted).norm() / wanted.norm()), TOLERANCES[self.case.dtype])
            for mine, (name, wanted) in zip(found, exact.items(), strict=True)
        }


# ---------------------------------------------------------------------------------------------------------- providers


def fastpar_rms_norm(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    from fastpar.ops import add_rms_norm, rms_norm

    return (rms_norm(x, weight, eps=EPS),) if residual is None else add_rms_norm(x, residual, weight, eps=EPS)


def torch_rms_norm(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    h = x if residual is None else x + residual
    out = F.rms_norm(h, x.shape[-1:], weight, EPS)
    return (out,) if residual is None else (out, h)


@cache
def _compiled() -> Function:
    return torch.compile(torch_rms_norm, dynamic=False)


def compiled_rms_norm(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    return _compiled()(x, weight, residual)  # on first use: importing the compiler takes seconds


# --------------------------------------------------------------------------------------------------------------- main


def cases(flags: argparse.Namespace, world_size: int) -> Sequence[Case]:
    return [
        RmsNormCase(d, t, h, r) for d in flags.dtype for t in flags.tokens for h in flags.hidden for r in flags.residual
    ]


def _booleans(text: str) -> list[bool]:
    if not set(text.split(",")) <= {"0", "1"}:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of 0 and 1")
    return [part == "1" for part in text.split(",")]


BENCH = Bench(
    name="rms_norm",
    baselines=("torch F.rms_norm",),
    cases=cases,
    memory=True,
    quick={"tokens": [128], "hidden": [2048], "blocks": 3, "iters": 2},
    devices=("cpu", "cuda"),
)


def main(argv: Sequence[str]) -> int:
    made = parser(BENCH, "RMSNorm forward + backward", threads=[2], ranks=[1], blocks=4, iters=3)
    made.add_argument("--tokens", type=positive_list, default=[4096], metavar="LIST", help="rows")
    made.add_argument("--hidden", type=positive_list, default=[4096], metavar="LIST", help="elements of a row")
    made.add_argument(
        "--residual", type=_booleans, default=[False, True], metavar="LIST", help="0: alone; 1: with a residual"
    )
    return run(BENCH, made.parse_args(argv), ["fastpar", "bench", "rms_norm", *argv])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
