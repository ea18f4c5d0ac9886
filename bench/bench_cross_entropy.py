"""Cross-entropy forward + backward from given logits: one process, and a vocabulary sharded over ranks.

    fastpar bench cross_entropy [--quick] [--tokens 2048] [--vocab 131072] [--threads 1,2] [--ranks 1,2,4]

What is timed: ``loss = f(logits, target)`` and ``torch.autograd.grad(loss, logits)``, mean over the tokens, logits
[tokens, vocab / ranks] a leaf on every rank. `torch.autograd.grad` and not `.backward()`, because accumulating into a
leaf may copy a gradient that shares the logits' memory, which no layer inside a model does.

Bytes model (least traffic of a forward and a backward that are separate calls): the forward reads the logits, the
backward reads them again and writes the gradient in the same dtype,

    3 * tokens * vocab * element size        over all ranks

Statistics (a few numbers per token) are left out. Memory bound that fastpar claims: the gradient (0 in place) + 32
bytes per token. The measurement resolves 0.3 MB; to see the 32 bytes, measure many tokens with a small vocabulary
(``--tokens 65536 --vocab 4096``).

Traps besides those of `bench.harness`:

* The in-place backward destroys the logits. They are restored from a second copy before every sample of that provider,
  outside the timed region.
* The logits are 64 random rows repeated with a scale per row: a gigabyte of normal deviates costs more than the
  measurement. No provider here depends on the values.
* A mean loss hides a wrong row, and the target's entry hides a wrong row of the gradient (it is as large as all others
  together). Gradients are compared in whole rows, 64 of them spread over the tokens, with and without the target's
  entry.
* bf16: torch's eager loss rounds log-probabilities to bf16, an error of about 3 % of a probability. The tolerance
  allows for that; the row shows what each provider really has. Its mean over the tokens is a bf16 sum, which is off by
  percents; the peers here average per-token losses in fp32, which costs nothing and passes the check.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F

from bench.harness import Case, Error, Provider, Rank, copy_roofs, local_tensor
from bench.options import DTYPES, Bench, parser, positive_list, run
from fastpar.comm import shard_range

# (logits, target) -> (loss, gradient): the timed region
Step = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

SAMPLED_ROWS = 64
# Relative errors. fp32: sums of 1e5 terms in any order. bf16: see the module docstring.
TOLERANCES = {
    "fp32": {"loss": 1e-5, "grad": 1e-5, "grad off target": 1e-4},
    "bf16": {"loss": 2e-3, "grad": 1e-2, "grad off target": 5e-2},
}


@dataclass(frozen=True)
class CrossEntropyCase:
    """`tokens` x `vocab` logits in `dtype`, the vocabulary sharded over the ranks."""

    dtype: str
    tokens: int
    vocab: int
    calls: int = 1

    def describe(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "tokens": self.tokens, "vocab": self.vocab}

    def build(self, rank: Rank) -> list[Provider]:
        problem = Problem(self, rank)
        job = 3.0 * self.tokens * self.vocab * DTYPES[self.dtype].itemsize
        gradient = problem.logits.nbytes
        stats = 32 * self.tokens

        def provider(
            name: str, kind: str, step: Step, bound: int | None = None, in_place: bool = False, compiled: bool = False
        ) -> Provider:
            return Provider(
                name,
                kind,
                call=lambda: step(problem.logits, problem.target),
                check=lambda: problem.errors(step),
                prepare=problem.restore if in_place else None,
                # A small call of a compiled function would compile that shape, and measure the second compilation.
                warm=None if compiled else lambda: problem.small(step),
                num_bytes=job,
                memory_bound=bound,
            )

        providers = [
            provider("fastpar in place", "fastpar", fastpar_step(rank, in_place=True), stats, in_place=True),
            provider("fastpar fresh gradient", "fastpar", fastpar_step(rank, in_place=False), gradient + stats),
        ]
        if rank.world_size == 1:
            providers += [
                provider("torch F.cross_entropy", "torch", step_of(torch_loss)),
                provider("torch.compile F.cross_entropy", "torch", step_of(compiled_loss), compiled=True),
            ]
        else:
            providers += [
                provider("torch three all-reduces", "torch", three_all_reduces_step(rank, problem.start)),
                provider("torch loss_parallel", "torch", loss_parallel_step(rank, self.vocab)),
            ]
        return providers + copy_roofs(min(gradient, 256 << 20), rank.world_size)


class Problem:
    """The tensors of a case on one rank, and the float64 reference."""

    def __init__(self, case: CrossEntropyCase, rank: Rank) -> None:
        self.case, self.rank = case, rank
        self.start, end = shard_range(case.vocab, rank.world_size, rank.rank)
        self.master = _logits(case, self.start, end)
        self.logits = self.master.clone().requires_grad_()
        generator = torch.Generator().manual_seed(1)  # the same targets on every rank
        self.target = torch.randint(case.vocab, (case.tokens,), generator=generator)
        self._lse: torch.Tensor | None = None

    def restore(self) -> None:
        with torch.no_grad():
            self.logits.copy_(self.master)

    def small(self, step: Step) -> None:
        """The same code over 8 tokens."""
        step(self.master[:8].clone().requires_grad_(), self.target[:8])

    def errors(self, step: Step) -> dict[str, Error]:
        """Relative errors of the loss and of sampled gradient rows against float64."""
        self.restore()
        loss, grad = step(self.logits, self.target)
        rows = torch.linspace(0, self.case.tokens - 1, min(SAMPLED_ROWS, self.case.tokens)).long()
        lse, expected_loss = self._reference()
        expected = (self.master[rows].double() - lse[rows, None]).exp_().div_(self.case.tokens)
        column = self.target[rows] - self.start
        mine = (column >= 0) & (column < expected.size(1))
        place = (torch.arange(rows.numel())[mine], column[mine])
        expected[place] -= 1.0 / self.case.tokens
        deviation = grad[rows].double() - expected
        found = {
            "loss": abs(local_tensor(loss).item() - expected_loss) / abs(expected_loss),
            "grad": float(deviation.norm() / expected.norm()),
        }
        deviation[place], expected[place] = 0.0, 0.0
        found["grad off target"] = float(deviation.norm() / expected.norm())
        return {name: Error(e, TOLERANCES[self.case.dtype][name]) for name, e in found.items()}

    def _reference(self) -> tuple[torch.Tensor, float]:
        """log-sum-exp of every row, and the mean loss, in float64; computed in pieces, once."""
        picked = torch.zeros(self.case.tokens, dtype=torch.float64)
        column = self.target - self.start
        mine = (column >= 0) & (column < self.master.size(1))
        picked[mine] = self.master[mine.nonzero()[:, 0], column[mine]].double()
        if self._lse is None:
            local = torch.cat([piece.double().logsumexp(1) for piece in self.master.split(64)])
            self._lse = self._gathered(local).logsumexp(0)
        loss = (self._lse - self._gathered(picked).sum(0)).mean()
        return self._lse, float(loss)

    def _gathered(self, x: torch.Tensor) -> torch.Tensor:
        """[world_size, tokens]"""
        parts = [torch.empty_like(x) for _ in range(self.rank.world_size)]
        if self.rank.world_size == 1:
            return x[None]
        dist.all_gather(parts, x)
        return torch.stack(parts)


def _logits(case: CrossEntropyCase, start: int, end: int) -> torch.Tensor:
    """This rank's columns: 64 random rows, repeated, times a scale per row (see the module docstring)."""
    generator = torch.Generator().manual_seed(1000 + start)
    rows = torch.randn(min(64, case.tokens), end - start, generator=generator)
    logits = torch.empty(case.tokens, end - start, dtype=DTYPES[case.dtype])
    scales = torch.linspace(0.5, 2.0, case.tokens)
    for piece, scale in zip(logits.split(rows.size(0)), scales.split(rows.size(0)), strict=True):
        piece.copy_(rows[: piece.size(0)] * scale[:, None])
    return logits


# ---------------------------------------------------------------------------------------------------------- providers


def step_of(loss_function: Callable[..., torch.Tensor]) -> Step:
    """Forward and backward of a mean loss."""

    def step(logits: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        loss = loss_function(logits, target)
        (grad,) = torch.autograd.grad(loss, logits)
        return loss, grad

    return step


def fastpar_step(rank: Rank, *, in_place: bool) -> Step:
    from fastpar.ops import vocab_parallel_cross_entropy

    loss = partial(vocab_parallel_cross_entropy, group=rank.group, inplace_backward=in_place)
    return step_of(cast("Callable[..., torch.Tensor]", loss))


def torch_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, target, reduction="none").float().mean()  # see the module docstring on bf16


@cache
def _compiled() -> Callable[..., torch.Tensor]:
    return torch.compile(torch_loss, dynamic=False)


def compiled_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return _compiled()(logits, target)  # on first use: importing the compiler takes seconds


def three_all_reduces_step(rank: Rank, start: int) -> Step:
    """The algorithm of most vocabulary-parallel losses, in plain torch, as a careful user would write it."""

    def loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        per_token: torch.Tensor = _ThreeAllReduces.apply(logits, target, start, rank.group)
        return per_token.mean()

    return step_of(loss)


class _ThreeAllReduces(torch.autograd.Function):
    """Per-token loss; all-reduces the maximum, the target's logit and the sum of exp; saves the fp32 softmax.

    Works in place on its own temporary wherever torch allows, so its extra memory is one fp32 copy of the local logits
    (which becomes the gradient when the logits are fp32).
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, target: torch.Tensor, start: int, group: dist.ProcessGroup
    ) -> torch.Tensor:
        maximum = logits.amax(-1).float()
        dist.all_reduce(maximum, dist.ReduceOp.MAX, group)
        shifted = logits - maximum[:, None]  # fp32 by promotion
        column = target - start
        mine = (column >= 0) & (column < logits.size(-1))
        column = column.masked_fill(~mine, 0)
        picked = shifted.gather(1, column[:, None])[:, 0].masked_fill(~mine, 0.0)
        dist.all_reduce(picked, group=group)
        softmax = shifted.exp_()
        total = softmax.sum(-1)
        dist.all_reduce(total, group=group)
        softmax.div_(total[:, None])
        ctx.save_for_backward(softmax, column, mine)
        ctx.dtype = logits.dtype
        return total.log() - picked

    @staticmethod
    def backward(ctx: Any, grad_loss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        softmax, column, mine = ctx.saved_tensors
        grad = softmax.scatter_add_(1, column[:, None], -mine[:, None].float())
        return grad.mul_(grad_loss[:, None]).to(ctx.dtype), None, None, None


def loss_parallel_step(rank: Rank, vocab: int) -> Step:
    """torch's own: F.cross_entropy on DTensor logits inside `loss_parallel`."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.parallel import loss_parallel

    mesh = init_device_mesh("cpu", (rank.world_size,))

    def loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        shape = torch.Size((logits.size(0), vocab))
        sharded = DTensor.from_local(logits, mesh, [Shard(1)], run_check=False, shape=shape, stride=(vocab, 1))
        return F.cross_entropy(sharded, target)

    def step(logits: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with loss_parallel():  # its backward has to run inside, too
            return step_of(loss)(logits, target)

    return step


# --------------------------------------------------------------------------------------------------------------- main


def cases(flags: argparse.Namespace, world_size: int) -> Sequence[Case]:
    return [CrossEntropyCase(d, t, v) for d in flags.dtype for t in flags.tokens for v in flags.vocab]


BENCH = Bench(
    name="cross_entropy",
    baselines=("torch F.cross_entropy", "torch three all-reduces"),
    cases=cases,
    memory=True,
    quick={"tokens": [256], "vocab": [8192], "blocks": 3, "iters": 2},
)


def main(argv: Sequence[str]) -> int:
    made = parser(BENCH, "cross-entropy forward + backward from given logits", threads=[2], blocks=2, iters=2)
    made.add_argument("--tokens", type=positive_list, default=[2048], metavar="LIST", help="rows of the logits")
    made.add_argument("--vocab", type=positive_list, default=[131072], metavar="LIST", help="vocabulary of all ranks")
    return run(BENCH, made.parse_args(argv), ["fastpar", "bench", "cross_entropy", *argv])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
