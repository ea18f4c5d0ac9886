"""Rotary position embeddings of queries and keys, forward and backward.

    fastpar bench rotary_embedding [--quick] [--tokens 4096] [--heads 32] [--dim 128] [--interleaved 0,1]

What is timed: ``q, k = f(q, k, cos, sin)`` and the gradients of both, q and k [1, tokens, heads, dim] leaves, the
tables given. One process: the op has no collective.

Bytes model (least traffic of a forward and a backward that are separate calls), in elements of the dtype: each reads
and writes q and k,

    8 * tokens * heads * dim * element size

The tables are left out. Memory bound that fastpar claims: the outputs and the gradients.

Traps besides those of `bench.harness`:

* The peer is what Hugging Face's models do, in the dtype of q, with tables of that dtype: two roundings more.
* Errors are norms over whole results against float64.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from bench.harness import Case, Error, Provider, Rank, copy_roofs
from bench.options import DTYPES, Bench, parser, positive_list, run

# (q, k, cos, sin, interleaved) -> (q, k); tables [tokens, dim / 2] float32
Rotation = Callable[..., tuple[torch.Tensor, torch.Tensor]]

TOLERANCES = {"fp32": 1e-5, "bf16": 2e-2}  # relative errors


@dataclass(frozen=True)
class RotaryCase:
    """q and k [1, tokens, heads, dim] in `dtype`."""

    dtype: str
    tokens: int
    heads: int
    dim: int
    interleaved: bool
    calls: int = 1

    def describe(self) -> dict[str, Any]:
        return {
            "dtype": self.dtype,
            "tokens": self.tokens,
            "heads": self.heads,
            "dim": self.dim,
            "interleaved": self.interleaved,
        }

    def build(self, rank: Rank) -> list[Provider]:
        problem = Problem(self, rank.device)
        elements = self.tokens * self.heads * self.dim
        size = DTYPES[self.dtype].itemsize

        def provider(name: str, kind: str, function: Rotation, bound: int | None = None) -> Provider:
            return Provider(
                name,
                kind,
                call=lambda: problem.step(function),
                check=lambda: problem.errors(function),
                num_bytes=8.0 * elements * size,
                memory_bound=bound,
            )

        return [
            provider("fastpar", "fastpar", fastpar_rotation, 4 * elements * size),
            provider("torch as in transformers", "torch", torch_rotation),
            provider("torch.compile as in transformers", "torch", compiled_rotation),
            *copy_roofs(min(elements * size, 256 << 20), rank.world_size, rank.device),
        ]


class Problem:
    """The tensors of a case."""

    def __init__(self, case: RotaryCase, device: str) -> None:
        from fastpar.ops import rotary_tables

        generator = torch.Generator(device).manual_seed(0)

        def random() -> torch.Tensor:
            shape = (1, case.tokens, case.heads, case.dim)
            return torch.randn(*shape, generator=generator, device=device).to(DTYPES[case.dtype])

        self.case = case
        self.q, self.k = (random().requires_grad_() for _ in range(2))
        self.grads = [random() for _ in range(2)]
        self.cos, self.sin = rotary_tables(torch.arange(case.tokens, device=device), case.dim)

    def step(self, function: Rotation) -> tuple[torch.Tensor, ...]:
        outputs = function(self.q, self.k, self.cos, self.sin, self.case.interleaved)
        return (*outputs, *torch.autograd.grad(outputs, (self.q, self.k), self.grads))

    def errors(self, function: Rotation) -> dict[str, Error]:
        found = [t.detach() for t in self.step(function)]
        cos, sin = self.cos.double(), self.sin.double()
        forward = torch_rotation(self.q.detach().double(), self.k.detach().double(), cos, sin, self.case.interleaved)
        grads = [grad.double() for grad in self.grads]
        backward = torch_rotation(grads[0], grads[1], cos, -sin, self.case.interleaved)
        names = ("q", "k", "grad q", "grad k")
        return {
            name: Error(float((mine.double() - exact).norm() / exact.norm()), TOLERANCES[self.case.dtype])
            for name, mine, exact in zip(names, found, (*forward, *backward), strict=True)
        }


# ---------------------------------------------------------------------------------------------------------- providers


def fastpar_rotation(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    from fastpar.ops import rotary_embedding

    turned = [rotary_embedding(x, cos=cos, sin=sin, interleaved=interleaved) for x in (q, k)]
    return turned[0], turned[1]


def torch_rotation(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    if interleaved:
        c, s = (t.repeat_interleave(2, -1).unsqueeze(-2).to(q.dtype) for t in (cos, sin))
    else:
        c, s = (torch.cat((t, t), -1).unsqueeze(-2).to(q.dtype) for t in (cos, sin))

    def turned(x: torch.Tensor) -> torch.Tensor:
        if interleaved:
            return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
        first, second = x.chunk(2, -1)
        return torch.cat((-second, first), -1)

    return q * c + turned(q) * s, k * c + turned(k) * s


@cache
def _compiled() -> Rotation:
    return torch.compile(torch_rotation, dynamic=False)


def compiled_rotation(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    return _compiled()(q, k, cos, sin, interleaved)  # on first use: importing the compiler takes seconds


# --------------------------------------------------------------------------------------------------------------- main


def cases(flags: argparse.Namespace, world_size: int) -> Sequence[Case]:
    return [
        RotaryCase(d, t, h, n, i == "1")
        for d in flags.dtype
        for t in flags.tokens
        for h in flags.heads
        for n in flags.dim
        for i in flags.interleaved
    ]


def _booleans(text: str) -> list[str]:
    if not set(text.split(",")) <= {"0", "1"}:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of 0 and 1")
    return text.split(",")


BENCH = Bench(
    name="rotary_embedding",
    baselines=("torch as in transformers",),
    cases=cases,
    memory=True,
    quick={"tokens": [128], "heads": [8], "blocks": 3, "iters": 2},
    devices=("cpu", "cuda"),
)


def main(argv: Sequence[str]) -> int:
    made = parser(BENCH, "Rotary embeddings, forward + backward", threads=[2], ranks=[1], blocks=4, iters=3)
    made.add_argument("--tokens", type=positive_list, default=[4096], metavar="LIST", help="positions")
    made.add_argument("--heads", type=positive_list, default=[32], metavar="LIST", help="of queries and of keys")
    made.add_argument("--dim", type=positive_list, default=[128], metavar="LIST", help="elements of a head, even")
    made.add_argument(
        "--interleaved", type=_booleans, default=["0"], metavar="LIST", help="0: halves; 1: interleaved pairs"
    )
    return run(BENCH, made.parse_args(argv), ["fastpar", "bench", "rotary_embedding", *argv])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
