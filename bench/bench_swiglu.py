"""SwiGLU forward and backward from a packed tensor, as a fused gate-and-up projection leaves it.

    fastpar bench swiglu [--quick] [--tokens 2048] [--features 14336] [--threads 1,2]

What is timed: ``out = f(gate_up)`` and ``torch.autograd.grad(out, gate_up, grad_out)``, gate_up [tokens, 2 * features]
a leaf, grad_out given. One process: the op has no collective.

Bytes model (least traffic of a forward and a backward that are separate calls), in elements of the dtype: forward
reads 2 and writes 1, backward reads 3 and writes 2,

    8 * tokens * features * element size

Memory bound that fastpar claims: the output and the packed gradient, 3 * tokens * features elements.

Traps besides those of `bench.harness`:

* Peers get the packed tensor, too: the halves are views of it, and what a peer copies because of that is on its time,
  as it would be in a model.
* Errors are norms over the whole result; a bf16 peer that rounds silu(gate) on its own has twice the error, which the
  tolerance allows.
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

# gate_up -> (output, gradient): the timed region
Step = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

TOLERANCES = {"fp32": 1e-5, "bf16": 2e-2}  # relative errors of the output and of the gradient


@dataclass(frozen=True)
class SwigluCase:
    """gate_up [tokens, 2 * features] in `dtype`."""

    dtype: str
    tokens: int
    features: int
    calls: int = 1

    def describe(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "tokens": self.tokens, "features": self.features}

    def build(self, rank: Rank) -> list[Provider]:
        problem = Problem(self, rank.device)
        elements = self.tokens * self.features
        size = DTYPES[self.dtype].itemsize

        def provider(name: str, kind: str, function: Callable[..., torch.Tensor], bound: int | None = None) -> Provider:
            step = problem.step_of(function)
            return Provider(
                name,
                kind,
                call=lambda: step(problem.gate_up),
                check=lambda: problem.errors(step),
                num_bytes=8.0 * elements * size,
                memory_bound=bound,
            )

        return [
            provider("fastpar packed", "fastpar", fastpar_swiglu, 3 * elements * size),
            provider("torch silu(gate) * up", "torch", torch_swiglu),
            provider("torch.compile silu(gate) * up", "torch", compiled_swiglu),
            *copy_roofs(min(2 * elements * size, 256 << 20), rank.world_size, rank.device),
        ]


class Problem:
    """The tensors of a case."""

    def __init__(self, case: SwigluCase, device: str) -> None:
        generator = torch.Generator(device).manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, device=device).to(DTYPES[case.dtype])

        self.case = case
        self.gate_up = random(case.tokens, 2 * case.features).requires_grad_()
        self.grad_out = random(case.tokens, case.features)

    def step_of(self, function: Callable[..., torch.Tensor]) -> Step:
        def step(gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            out = function(gate_up)
            (grad,) = torch.autograd.grad(out, gate_up, self.grad_out)
            return out, grad

        return step

    def errors(self, step: Step) -> dict[str, Error]:
        """Relative errors of the output and of the gradient against float64, over pieces of 64 rows (1024 on CUDA)."""
        with torch.enable_grad():
            found = [t.detach() for t in step(self.gate_up)]
        deviation, size = self.grad_out.new_zeros(2, 2, dtype=torch.float64)
        step_rows = 64 if self.grad_out.device.type == "cpu" else 1024
        for first in range(0, self.case.tokens, step_rows):
            rows = slice(first, first + step_rows)
            exact_in = self.gate_up.detach()[rows].double().requires_grad_()
            out = torch_swiglu(exact_in)
            (grad,) = torch.autograd.grad(out, exact_in, self.grad_out[rows].double())
            for i, exact in enumerate((out.detach(), grad)):
                deviation[i] += (found[i][rows].double() - exact).square().sum()
                size[i] += exact.square().sum()
        relative = (deviation / size).sqrt().tolist()
        tolerance = TOLERANCES[self.case.dtype]
        return {name: Error(e, tolerance) for name, e in zip(("out", "grad"), relative, strict=True)}


# ---------------------------------------------------------------------------------------------------------- providers


def fastpar_swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    from fastpar.ops import swiglu

    return swiglu(gate_up)


def torch_swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


@cache
def _compiled() -> Callable[..., torch.Tensor]:
    return torch.compile(torch_swiglu, dynamic=False)


def compiled_swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    return _compiled()(gate_up)  # on first use: importing the compiler takes seconds


# --------------------------------------------------------------------------------------------------------------- main


def cases(flags: argparse.Namespace, world_size: int) -> Sequence[Case]:
    return [SwigluCase(d, t, f) for d in flags.dtype for t in flags.tokens for f in flags.features]


BENCH = Bench(
    name="swiglu",
    baselines=("torch silu(gate) * up",),
    cases=cases,
    memory=True,
    quick={"tokens": [128], "features": [2048], "blocks": 3, "iters": 2},
    devices=("cpu", "cuda"),
)


def main(argv: Sequence[str]) -> int:
    made = parser(BENCH, "SwiGLU forward + backward from a packed tensor", threads=[2], ranks=[1], blocks=4, iters=3)
    made.add_argument("--tokens", type=positive_list, default=[2048], metavar="LIST", help="rows")
    made.add_argument("--features", type=positive_list, default=[14336], metavar="LIST", help="half of a packed row")
    return run(BENCH, made.parse_args(argv), ["fastpar", "bench", "swiglu", *argv])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
