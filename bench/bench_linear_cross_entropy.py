"""The last linear layer and its cross-entropy, forward + backward, from hidden states: is the logits' memory needed?

    fastpar bench linear_cross_entropy [--quick] [--tokens 1024] [--hidden 1024] [--vocab 32768] [--ranks 1,2]
    fastpar bench linear_cross_entropy --options                    what the options of the loss cost
    fastpar bench linear_cross_entropy --device cuda --dtype bf16 --tokens 8192 --hidden 4096 --vocab 128256

What is timed: ``loss = f(hidden, weight, target)``, mean over the tokens, and ``torch.autograd.grad`` of it by hidden
[tokens, hidden] and weight [vocab / ranks, hidden]. Over several ranks hidden is the same on each, and its gradient is
summed over them.

Flops model, all ranks together, of what no implementation can avoid (logits, dX and dW, each one GEMM):

    6 * tokens * hidden * vocab

"three bare GEMMs" is just these at full size, into memory that exists: the bound, and "above bound" is the part of a
provider's time that it does not need. Each of them is a roof of its own.

Memory is counted without the two gradients, which every provider has to return. The plain version keeps two or three
tensors of tokens x vocab; fastpar claims an eighth of two.

Traps besides those of `bench.harness`:

* The gradient of the weight is the result of tokens x vocab products that are nearly all tiny: rows of ids that are
  somebody's target hide the others. 64 rows of each gradient are compared with float64, and the rows of ids that are
  no target once more by themselves.
* bf16: logits are rounded to bf16 by every provider that has them in memory, an error of a percent of a probability.
* A mean that is added up in bf16 is off by percents (`BF16_LOSS` of bench_cross_entropy), as the chunked one's is.
* `F.linear_cross_entropy` without ``options`` is the plain version by another name; it is measured with its default
  chunks.
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
from torch import Tensor

from bench import peers
from bench.bench_cross_entropy import BF16_LOSS, LossOptions, compiled, torch_loss, torch_loss_with, vocab_parallel_loss
from bench.harness import Case, Error, Provider, Rank, absent
from bench.options import DTYPES, Bench, parser, positive_list, run
from fastpar.comm import shard_range

LossFunction = Callable[[Tensor, Tensor, Tensor], Tensor]  # (hidden, weight, target) -> mean loss
SAMPLED_ROWS = 64
PIECE = 64  # rows of float64 logits at a time
# Relative errors in the L2 norm. fp32: GEMMs of up to 4096 products, sums of 1e5 exponentials. bf16: see above.
TOLERANCES = {
    "fp32": {"loss": 1e-5, "dx": 1e-4, "dw": 1e-4, "dw off target": 5e-4},
    "bf16": {"loss": 2e-3, "dx": 2e-2, "dw": 2e-2, "dw off target": 5e-2},
}


@dataclass(frozen=True)
class LinearCrossEntropyCase:
    """`tokens` x `hidden` through a weight of `vocab` x `hidden`, the vocabulary sharded over the ranks."""

    dtype: str
    tokens: int
    hidden: int
    vocab: int
    calls: int = 1
    options: LossOptions | None = None

    def describe(self) -> dict[str, Any]:
        found: dict[str, Any] = {"dtype": self.dtype, "tokens": self.tokens, "hidden": self.hidden, "vocab": self.vocab}
        if self.options is not None:
            found["options"] = f"{self.options.describe()}, bias"
        return found

    def build(self, rank: Rank) -> list[Provider]:
        problem = Problem(self, rank)
        made = Maker(problem)
        if self.options is not None:
            made.options_against_none()
        else:
            made.add_fastpar("fastpar", "fastpar", problem.options)
            made.bare_gemms()
            made.torch_and_peers()
        return [*made.providers, *made.gemm_roofs()]


class Problem:
    """The tensors of a case (the whole weight on every rank, which holds its rows of it), and the float64 answer."""

    def __init__(self, case: LinearCrossEntropyCase, rank: Rank) -> None:
        self.case, self.rank, self.options = case, rank, case.options
        self.start, self.end = shard_range(case.vocab, rank.world_size, rank.rank)
        generator = torch.Generator(rank.device).manual_seed(0)

        def random(*shape: int, scale: float) -> Tensor:
            x = torch.randn(*shape, generator=generator, device=rank.device)
            return (x * scale).to(DTYPES[case.dtype])

        # Logits with a standard deviation of 2: probabilities that differ, and no row that is nearly one-hot.
        self.whole_weight = random(case.vocab, case.hidden, scale=2 * case.hidden**-0.5)
        self.weight = self.whole_weight[self.start : self.end].clone().requires_grad_()
        self.hidden = random(case.tokens, case.hidden, scale=1.0).requires_grad_()
        self.bias = random(case.vocab, scale=0.1)
        self.target = torch.randint(case.vocab, (case.tokens,), generator=generator, device=rank.device)
        self.class_weight = torch.linspace(0.5, 1.5, case.vocab, device=rank.device)
        self._float64: dict[LossOptions | None, Float64] = {}

    def float64(self, options: LossOptions | None) -> Float64:
        """Computed once: it needs all the logits."""
        if options not in self._float64:
            self._float64[options] = Float64(self, options)
        return self._float64[options]

    def small(self, loss: LossFunction) -> None:
        """The same code over 8 tokens and 64 ids a rank."""
        hidden, weight = (x[:rows].detach().requires_grad_() for x, rows in ((self.hidden, 8), (self.weight, 64)))
        gradients(loss, hidden, weight, self.target[:8] % 64)

    def shard(self, weight: Tensor) -> tuple[int, int, int]:
        """(start, end, total) of this rank's weight, or of the one that `small` passes."""
        rows = weight.size(0)
        if rows == self.end - self.start:
            return self.start, self.end, self.case.vocab
        return rows * self.rank.rank, rows * (self.rank.rank + 1), rows * self.rank.world_size

    def errors(self, loss_function: LossFunction, options: LossOptions | None) -> dict[str, Error]:
        """Relative errors of the loss, of sampled rows of dX and of sampled rows of this rank's dW."""
        loss, dx, dw = gradients(loss_function, self.hidden, self.weight, self.target)
        reference = self.float64(options)
        rows = torch.linspace(0, self.case.tokens - 1, min(SAMPLED_ROWS, self.case.tokens)).long().to(dx.device)
        half = SAMPLED_ROWS // 2
        held = self.target[(self.target >= self.start) & (self.target < self.end)].unique()
        is_target = torch.zeros(self.end - self.start, dtype=torch.bool, device=dx.device)
        is_target[held - self.start] = True
        others = (~is_target).nonzero()[:, 0]
        others = others[:: max(1, others.numel() // half)][:half]
        ids = torch.cat([held[:half] - self.start, others])
        expected_dw = reference.dw(ids + self.start)
        found = {
            "loss": abs(loss.item() - reference.loss()) / abs(reference.loss()),
            "dx": relative_error(dx[rows], reference.dx(rows)),
            "dw": relative_error(dw[ids], expected_dw),
            "dw off target": relative_error(dw[others], expected_dw[ids.numel() - others.numel() :]),
        }
        allowed = dict(TOLERANCES[self.case.dtype])
        if loss.dtype == torch.bfloat16:
            allowed["loss"] = BF16_LOSS
        return {name: Error(e, allowed[name]) for name, e in found.items()}


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


class Float64:
    """The loss and rows of its gradients, from the whole weight."""

    def __init__(self, problem: Problem, options: LossOptions | None) -> None:
        self.p, self.o = problem, options
        self.x, self.w = problem.hidden.detach().double(), problem.whole_weight.double()
        self.bias = problem.bias.double() if options else torch.zeros_like(self.w[:, 0])
        self.classes = problem.class_weight.double() if options else torch.ones_like(self.bias)
        self.row_weight = self.classes[problem.target]
        self.rate = 1.0 / self.row_weight.sum()
        found = []
        for rows in torch.arange(self.x.size(0), device=self.x.device).split(PIECE):
            z = self.logits(rows)
            picked = z.gather(1, problem.target[rows, None])[:, 0]
            found.append(torch.stack([z.logsumexp(1), picked, z @ self.classes]))
        self.lse, self.picked, self.weighted = torch.cat(found, dim=1)

    def logits(self, rows: Tensor | slice = slice(None), ids: Tensor | slice = slice(None)) -> Tensor:
        z = self.x[rows] @ self.w[ids].T + self.bias[ids]
        return z if self.o is None else self.o.softcap * torch.tanh(z / self.o.softcap)

    def loss(self) -> float:
        o = self.o or LossOptions(0.0, 0.0)
        loss = (1 - o.label_smoothing) * self.row_weight * (self.lse - self.picked) + o.z_loss * self.lse**2
        loss += o.label_smoothing / self.classes.numel() * (self.classes.sum() * self.lse - self.weighted)
        return float(loss.sum() * self.rate)

    def dz(self, rows: Tensor | slice = slice(None), ids: Tensor | slice = slice(None)) -> Tensor:
        o = self.o or LossOptions(0.0, 0.0)
        z, lse = self.logits(rows, ids), self.lse[rows]
        gamma = self.rate * (1 - o.label_smoothing) * self.row_weight[rows]
        beta = self.rate * o.label_smoothing / self.classes.numel()
        delta = beta * self.classes.sum() + self.rate * 2 * o.z_loss * lse
        dz = (gamma + delta)[:, None] * (z - lse[:, None]).exp() - beta * self.classes[ids]
        every = torch.arange(self.classes.numel(), device=z.device)[ids]
        dz -= gamma[:, None] * (every == self.p.target[rows][:, None])
        return dz if self.o is None else dz * (1 - (z / self.o.softcap) ** 2)

    def dx(self, rows: Tensor) -> Tensor:
        return self.dz(rows) @ self.w

    def dw(self, ids: Tensor) -> Tensor:
        return self.dz(ids=ids).T @ self.x


def gradients(
    loss_function: LossFunction, hidden: Tensor, weight: Tensor, target: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The timed region."""
    loss = loss_function(hidden, weight, target)
    dx, dw = torch.autograd.grad(loss, (hidden, weight))
    return loss, dx, dw


# ---------------------------------------------------------------------------------------------------------- providers


class Maker:
    """Collects the providers of a problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.rank, self.case = problem, problem.rank, problem.case
        self.providers: list[Provider] = []
        self.flops = 6.0 * self.case.tokens * self.case.hidden * self.case.vocab
        self.gemms = self._gemms()

    def add(
        self, name: str, kind: str, loss: LossFunction, options: LossOptions | None = None, *, small: bool = True
    ) -> None:
        """small: False where a smaller call would compile anew, or where class weights fix the vocabulary"""
        p = self.problem
        logits_bytes = self.case.tokens * p.weight.size(0) * p.weight.itemsize
        self.providers.append(
            Provider(
                name,
                kind,
                call=lambda: gradients(loss, p.hidden, p.weight, p.target),
                check=lambda: p.errors(loss, options),
                warm=(lambda: p.small(loss)) if small else None,
                flops=self.flops,
                memory_bound=2 * logits_bytes // 8 if kind == "fastpar" else None,
                result_bytes=p.hidden.nbytes + p.weight.nbytes,
            )
        )

    def add_fastpar(self, name: str, kind: str, options: LossOptions | None) -> None:
        loss = peers.find(lambda: fastpar_loss(self.problem, options))
        if isinstance(loss, str):
            self.providers.append(absent(name, loss))
        else:
            self.add(name, kind, loss, options)

    def options_against_none(self) -> None:
        options = self.case.options
        assert options is not None
        self.add_fastpar("fastpar, no options", "bound", None)
        self.add_fastpar("fastpar, all options", "fastpar", options)
        if self.rank.world_size == 1:
            p, of_logits = self.problem, torch_loss_with(self.problem.class_weight, options)

            def plain(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
                return of_logits(F.linear(hidden, weight, p.bias[: weight.size(0)]), target)

            self.add("torch, all options", "torch", plain, options, small=False)

    def torch_and_peers(self) -> None:
        if self.rank.world_size > 1:
            self.add("torch linear + three all-reduces", "torch", sharded_loss(self.problem))
            return
        self.add("torch linear + F.cross_entropy", "torch", plain_loss)
        self.add("torch.compile of it", "torch", compiled(plain_loss), small=False)
        self.optional("torch F.linear_cross_entropy, chunked", peers.torch_chunked_linear_cross_entropy)
        if self.rank.device == "cuda":
            self.optional("Liger", peers.liger_linear_cross_entropy)
            self.optional("cut-cross-entropy", peers.cut_linear_cross_entropy)

    def optional(self, name: str, load: Callable[[], LossFunction]) -> None:
        loss = peers.find(load)
        if isinstance(loss, str):
            self.providers.append(absent(name, loss))
        else:
            self.add(name, "torch", loss)

    def bare_gemms(self) -> None:
        gemms = [call for _, call in self.gemms]

        def three() -> None:
            for call in gemms:
                call()

        results = self.problem.hidden.nbytes + self.problem.weight.nbytes
        self.providers.append(Provider("three bare GEMMs", "bound", three, flops=self.flops, result_bytes=results))

    def gemm_roofs(self) -> list[Provider]:
        return [Provider(f"roof: {name}", "roof", call, flops=self.flops / 3) for name, call in self.gemms]

    def _gemms(self) -> list[tuple[str, Callable[[], object]]]:
        """The GEMMs of this rank, into memory that exists. The gradient of the logits stands in for them: same size."""
        x, w = self.problem.hidden.detach(), self.problem.weight.detach()
        logits = x @ w.T  # GEMMs on zeros or garbage run at another speed
        dx, dw = torch.empty_like(x), torch.empty_like(w)
        return [
            ("GEMM logits = X W^T", partial(torch.mm, x, w.T, out=logits)),
            ("GEMM dX = dZ W", partial(torch.mm, logits, w, out=dx)),
            ("GEMM dW = dZ^T X", partial(torch.mm, logits.T, x, out=dw)),
        ]


def fastpar_loss(problem: Problem, options: LossOptions | None) -> LossFunction:
    from fastpar import ops

    op: Any = getattr(ops, "linear_cross_entropy", None)
    if op is None:
        raise ImportError("this fastpar has no fastpar.ops.linear_cross_entropy")
    group = problem.rank.group

    def loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        start, end, total = problem.shard(weight)
        flags: dict[str, Any] = {} if group is None else {"group": group, "vocab_range": (start, end, total)}
        if options is not None:
            flags |= {"label_smoothing": options.label_smoothing, "z_loss": options.z_loss, "softcap": options.softcap}
            flags |= {"class_weight": problem.class_weight[:total], "bias": problem.bias[start:end]}
        mean: Tensor = op(hidden, weight, target, **flags)
        return mean

    return loss


def plain_loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return torch_loss(F.linear(hidden, weight), target)


def sharded_loss(problem: Problem) -> LossFunction:
    """Column-parallel linear, then the loss of three all-reduces; the gradient of hidden is one more."""
    group = problem.rank.group

    def loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        start = problem.shard(weight)[0]
        return vocab_parallel_loss(F.linear(_SumOfGradients.apply(hidden, group), weight), target, start, group)

    return loss


class _SumOfGradients(torch.autograd.Function):
    """Identity; its backward sums over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


# --------------------------------------------------------------------------------------------------------------- main


def cases(flags: argparse.Namespace, world_size: int) -> Sequence[Case]:
    chosen = LossOptions() if flags.options else None
    return [
        LinearCrossEntropyCase(d, t, h, v, options=chosen)
        for d in flags.dtype
        for t in flags.tokens
        for h in flags.hidden
        for v in flags.vocab
    ]


BENCH = Bench(
    name="linear_cross_entropy",
    baselines=("torch linear + F.cross_entropy", "torch linear + three all-reduces", "torch, all options"),
    cases=cases,
    memory=True,
    quick={"tokens": [128], "hidden": [64], "vocab": [4096], "blocks": 3, "iters": 2},
    devices=("cpu", "cuda"),
)


def main(argv: Sequence[str]) -> int:
    made = parser(
        BENCH, "the last linear layer and its cross-entropy, forward + backward", ranks=[1], threads=[2], blocks=2
    )
    made.add_argument("--tokens", type=positive_list, default=[1024], metavar="LIST", help="rows of hidden")
    made.add_argument("--hidden", type=positive_list, default=[1024], metavar="LIST", help="width of hidden")
    made.add_argument("--vocab", type=positive_list, default=[32768], metavar="LIST", help="vocabulary of all ranks")
    made.add_argument(
        "--options", action="store_true", help=f"what the options cost ({LossOptions().describe()}, bias)"
    )
    return run(BENCH, made.parse_args(argv), ["fastpar", "bench", "linear_cross_entropy", *argv])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
