"""Time of the host in the loss: batches so small that Python, autograd and the calls of ops are all that there is.

    fastpar bench host_loss [--ranks 1,2] [--dtype fp32] [--tokens 8] [--vocab 32]

What is timed: ``logits.grad = None; loss(logits, target).backward()``, a mean over logits [tokens, vocab] that are a
leaf. On several ranks every rank has its share of the columns; the peer is torch.nn.functional.cross_entropy of all
columns on every rank, without a collective, so that the ratio there says what splitting costs at least.

Traps besides those of `bench.harness`: a call takes less than a barrier's skew, so a sample is 50 calls.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.harness import Case, Error, Provider, Rank
from bench.options import DTYPES, Bench, parser, positive_list, run
from fastpar.comm import shard_range

TOLERANCES = {"fp32": 1e-5, "bf16": 2e-2}
Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class HostLossCase:
    """Logits [tokens, vocab] in `dtype`."""

    dtype: str
    tokens: int
    vocab: int
    calls: int = 50

    def describe(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "tokens": self.tokens, "vocab": self.vocab}

    def build(self, rank: Rank) -> list[Provider]:
        from fastpar import ops

        generator = torch.Generator().manual_seed(0)
        logits = torch.randn(self.tokens, self.vocab, generator=generator).to(DTYPES[self.dtype])
        target = torch.randint(0, self.vocab, (self.tokens,), generator=generator)
        start, end = shard_range(self.vocab, rank.world_size, rank.rank)
        group = rank.group if rank.world_size > 1 else None
        vocab_range = None if group is None else (start, end, self.vocab)

        def split(x: Tensor, ids: Tensor) -> Tensor:
            return ops.vocab_parallel_cross_entropy(x, ids, group=group, vocab_range=vocab_range)

        def provider(name: str, kind: str, loss: Loss, columns: slice) -> Provider:
            step = HostLossStep(loss, logits[:, columns].clone().requires_grad_(), target)
            return Provider(name, kind, call=step, check=lambda: self.errors(step, logits, columns))

        return [
            provider("fastpar", "fastpar", split, slice(start, end)),
            provider("torch F.cross_entropy", "torch", F.cross_entropy, slice(0, self.vocab)),
        ]

    def errors(self, step: HostLossStep, logits: Tensor, columns: slice) -> dict[str, Error]:
        exact = logits.double().requires_grad_()
        loss = F.cross_entropy(exact, step.target)
        (grad,) = torch.autograd.grad(loss, exact)
        found = step()
        assert step.logits.grad is not None
        wanted = grad[:, columns]
        off = (step.logits.grad.double() - wanted).norm() / wanted.norm()
        tolerance = TOLERANCES[self.dtype]
        return {
            "loss": Error(abs(float(found.double() - loss) / float(loss)), tolerance),
            "grad": Error(float(off), tolerance),
        }


class HostLossStep:
    """Forward and backward of one implementation; the gradient is dropped first, as `zero_grad` does."""

    def __init__(self, loss: Loss, logits: Tensor, target: Tensor) -> None:
        self.loss, self.logits, self.target = loss, logits, target

    def __call__(self) -> Tensor:
        self.logits.grad = None
        loss = self.loss(self.logits, self.target)
        loss.backward()
        return loss.detach()


def cases(flags: argparse.Namespace, world_size: int) -> Sequence[Case]:
    return [
        HostLossCase(dtype, tokens, vocab) for dtype in flags.dtype for tokens in flags.tokens for vocab in flags.vocab
    ]


BENCH = Bench(
    name="host_loss",
    baselines=("torch F.cross_entropy",),
    cases=cases,
    memory=False,
    quick={"blocks": 3, "iters": 2, "dtype": ["fp32"]},
)


def main(argv: Sequence[str]) -> int:
    made = parser(BENCH, "host time of the loss at tiny shapes", ranks=[1, 2], dtype=["fp32"], settings=["default"])
    made.set_defaults(blocks=15, iters=5, lead=2)
    made.add_argument("--tokens", type=positive_list, default=[8], metavar="LIST", help="rows of logits")
    made.add_argument("--vocab", type=positive_list, default=[32], metavar="LIST", help="ids of the vocabulary")
    return run(BENCH, made.parse_args(argv), ["fastpar", "bench", "host_loss", *argv])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
