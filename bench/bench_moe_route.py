"""Routing: from the logits of a router to experts, weights and counts, and back to the gradient of the logits.

    fastpar bench moe_route [--quick] [--tokens 4096] [--experts 256] [--presets deepseek_v3,qwen3_moe] [--passes both]
    fastpar bench moe_route --device cuda --settings hot,cold

What is timed, on one process (nothing is sent), with rules of `fastpar.expert.PRESETS`, for float32 logits that a
product has left (bf16: which are widened first):

    forward   indices, weights [tokens, top_k] and counts [experts] of logits [tokens, experts]
    both      that, and the gradient of the logits from one of the weights

Bytes model, the least there is to move: forward reads the logits and writes 12 bytes a choice and 8 an expert; backward
reads the logits and 12 bytes a choice and writes the gradient.

Traps besides those of `bench.harness`:

* On CUDA everything here is short: kernels of microseconds. Under the setting "cold" the host runs ahead by the time
  of a flush, about a third of a millisecond; a provider of many launches falls behind all the same, as it does in a
  training step. "hot" has no flush, and times are those of the host.
* The logits are in steps of 1/8 plus 0.3: choices among equal ones have to be right (the lowest), and others lie so far
  apart that rounding does not swap them, but for sums of scores that come together by chance: TIES of the choices may
  differ from float64's, and weights and gradients are compared for the tokens that have the same.
* "torch" is the op's reference in plain PyTorch; "torch.compile" the same, compiled, on CUDA.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from bench import peers
from bench.harness import Case, Error, Provider, Rank, absent, copy_roofs
from bench.options import DTYPES, Bench, parser, positive_list, run

PASSES = ("forward", "both")
TIES = 1e-4
TOLERANCE = 1e-5  # of weights, each of its own; of gradients, in the L2 norm of all
_ROOF_BYTES = 64 << 20

# logits -> (indices, weights, counts)
Route = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class RouteCase:
    """Logits [tokens, experts] under the rule of a preset."""

    preset: str
    dtype: str
    tokens: int
    experts: int
    passes: str
    calls: int = 1

    def describe(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("preset", "dtype", "tokens", "experts", "passes")}

    def build(self, rank: Rank) -> list[Provider]:
        problem = Problem(self, rank.device)
        routes: list[tuple[str, str, Callable[[], Route]]] = [
            ("fastpar", "fastpar", problem.fastpar),
            ("torch", "torch", problem.torch),
        ]
        if rank.device == "cuda":
            routes.append(("torch.compile", "torch", problem.compiled))
        providers = []
        for name, kind, make in routes:
            route = peers.find(make)
            if isinstance(route, str):
                providers.append(absent(name, route))
            else:
                call = partial(problem.step, route)
                check = partial(problem.errors, call)
                providers.append(Provider(name, kind, call, check=check, num_bytes=problem.num_bytes()))
        return [*providers, *copy_roofs(_ROOF_BYTES, 1, rank.device)]


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """One for all cases of a process."""
    compiled: Callable[..., Any] = torch.compile(function, dynamic=False)
    return compiled


class Problem:
    """The logits, the selection bias if the preset has one, and the gradient of the weights."""

    def __init__(self, case: RouteCase, device: str) -> None:
        from fastpar.expert import PRESETS

        self.case, self.device, known = case, device, PRESETS[case.preset]
        self.rule = known.rule
        generator = torch.Generator().manual_seed(0)
        steps = (16 * torch.randn(case.tokens, case.experts, generator=generator)).round() / 8 + 0.3
        self.logits = steps.to(device, DTYPES[case.dtype]).requires_grad_()
        self.dweights = torch.randn(case.tokens, self.rule.top_k, generator=generator).to(device)
        self.bias = None
        if known.bias_rule is not None:
            self.bias = ((8 * torch.randn(case.experts, generator=generator)).round() / 64).to(device)

    def num_bytes(self) -> float:
        logits, choices = self.logits.numel() * self.logits.element_size(), 12 * self.dweights.numel()
        forward = logits + choices + 8 * self.case.experts
        return float(forward if self.case.passes == "forward" else forward + 2 * logits + choices)

    # ---- providers

    def fastpar(self) -> Route:
        from fastpar.ops import moe_route

        return self._with(moe_route)

    def torch(self) -> Route:
        from fastpar.reference import moe_route

        return self._with(moe_route)

    def compiled(self) -> Route:
        """Compiled at the first call: --only may leave it out, and then nothing of torch's compiler is imported."""
        from fastpar.reference import moe_route

        return self._with(lambda *arguments, **options: _compiled(moe_route)(*arguments, **options))

    def _with(self, function: Callable[..., Any]) -> Route:
        def route(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            routing = function(logits, self.rule, bias=self.bias)
            return routing.indices, routing.weights, routing.counts

        return route

    def step(self, route: Route) -> tuple[Tensor, ...]:
        """The timed region."""
        indices, weights, counts = route(self.logits)
        if self.case.passes == "forward":
            return indices, weights, counts
        return indices, weights, counts, *torch.autograd.grad(weights, self.logits, self.dweights)

    # ---- check

    def errors(self, call: Callable[[], tuple[Tensor, ...]]) -> dict[str, Error]:
        """Against the reference in float64: see the module docstring on ties."""
        from fastpar.reference import moe_route

        exact = self.logits.detach().double().requires_grad_()
        wanted = moe_route(exact, self.rule, bias=self.bias)
        indices, weights, counts, *grads = (t.detach() for t in call())
        same = (indices == wanted.indices).all(1)
        exact_weights = wanted.weights.detach()
        close = ((weights.double() - exact_weights).abs() / exact_weights.abs().clamp_min(1e-30))[same]
        own = torch.bincount(indices.flatten(), minlength=self.case.experts)
        found = {
            "choices": Error(float((indices != wanted.indices).double().mean()), TIES),
            "weights": Error(float(close.max()) if same.any() else math.inf, TOLERANCE),
            "counts": Error(float((own - counts).abs().sum()), 0.0),
        }
        for grad in grads:
            (whole,) = torch.autograd.grad(wanted.weights, exact, self.dweights.double())
            rounding = TOLERANCE if grad.dtype == torch.float32 else 2.0**-8
            found["grad"] = Error(float((grad.double() - whole)[same].norm() / whole[same].norm()), rounding)
        return found


# --------------------------------------------------------------------------------------------------------------- main


def cases(flags: argparse.Namespace, world_size: int) -> Sequence[Case]:
    return [
        RouteCase(preset, dtype, tokens, experts, passes)
        for preset in flags.presets
        for dtype in flags.dtype
        for tokens in flags.tokens
        for experts in flags.experts
        for passes in flags.passes
    ]


def _among(allowed: Sequence[str], what: str) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        found = [part.strip() for part in text.split(",") if part.strip()]
        unknown = [name for name in found if name not in allowed]
        if unknown:
            raise argparse.ArgumentTypeError(f"unknown {what} {unknown[0]!r}; choose from {', '.join(allowed)}")
        return found

    return parse


BENCH = Bench(
    name="moe_route",
    baselines=("torch",),
    cases=cases,
    memory=False,
    quick={"tokens": [256], "experts": [64], "blocks": 3, "iters": 2},
    devices=("cpu", "cuda"),
)


def main(argv: Sequence[str]) -> int:
    from fastpar.expert import PRESETS

    made = parser(BENCH, "routing, forward and backward", threads=[2], ranks=[1], dtype=["fp32"], blocks=4, iters=4)
    add = made.add_argument
    presets, passes = _among(tuple(PRESETS), "preset"), _among(PASSES, "passes")
    add("--presets", type=presets, default=["deepseek_v3", "qwen3_moe"], metavar="LIST", help=", ".join(PRESETS))
    add("--tokens", type=positive_list, default=[4096], metavar="LIST", help="rows of the logits")
    add("--experts", type=positive_list, default=[256], metavar="LIST", help="columns of the logits")
    add("--passes", type=passes, default=list(PASSES), metavar="LIST", help=", ".join(PASSES))
    return run(BENCH, made.parse_args(argv), ["fastpar", "bench", "moe_route", *argv])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
