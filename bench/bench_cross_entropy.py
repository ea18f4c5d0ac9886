"""Cross-entropy forward + backward from given logits: one process, a vocabulary sharded over ranks, one rank of such
a group on one GPU.

    fastpar bench cross_entropy [--quick] [--tokens 2048] [--vocab 32768,131072] [--threads 1,2] [--ranks 1,2,4]
    fastpar bench cross_entropy --options                           what the options of the loss cost
    fastpar bench cross_entropy --device cuda --dtype bf16 --tokens 8192 --vocab 32000,128256,262144
    fastpar bench cross_entropy --device cuda --dtype bf16 --tokens 8192 --vocab 32768,131072,262144 --virtual-ranks 2

What is timed: ``loss = f(logits, target)`` and ``torch.autograd.grad(loss, logits)``, mean over the tokens, logits
[tokens, vocab / ranks] a leaf on every rank. `torch.autograd.grad` and not `.backward()`, because accumulating into a
leaf may copy a gradient that shares the logits' memory, which no layer inside a model does.

Bytes model (least traffic of a forward and a backward that are separate calls): the forward reads the logits, the
backward reads them again and writes the gradient in the same dtype,

    3 * tokens * vocab * element size        over all ranks

and "of roof" compares it with the copy bandwidth of the same run. (One rank that holds the whole vocabulary may read
once, and pass 100 %.) Statistics (a few numbers per token) are left out. Memory bound that fastpar claims: the gradient
(0 in place) + 32 bytes per token. The measurement on CPU resolves 0.3 MB; to see the 32 bytes, measure many tokens with
a small vocabulary (``--tokens 65536 --vocab 4096``).

Traps besides those of `bench.harness`:

* A backward, or a peer, that writes over the logits destroys them. They are restored from a second copy before every
  sample of such a provider, outside the timed region.
* The logits are 64 random rows repeated with a scale per row: a gigabyte of normal deviates costs more than the
  measurement. No provider here depends on the values.
* A mean loss hides a wrong row, and the target's entry hides a wrong row of the gradient (it is as large as all others
  together). Gradients are compared in whole rows, 64 of them spread over the tokens, with and without the target's
  entry.
* bf16: torch's eager loss rounds log-probabilities to bf16, an error of about 3 % of a probability. The tolerance
  allows for that; the row shows what each provider really has. Its mean over the tokens is a bf16 sum, which is off by
  percents; the peers here average per-token losses in fp32, which costs nothing and passes the check. One that returns
  its loss in bf16 whatever its user does is held to `BF16_LOSS`.
* Megatron-Core's fused function rounds its gradient to bf16 for fp32 logits too; it is held to the bf16 tolerance.
* Peers of a virtual rank (`bench.virtual`) run in a group of size 1 on the same logits: the vocabulary-parallel
  algorithm with nobody to talk to, and targets folded into the columns they hold.
* ``--options`` compares fastpar with itself: the job is the loss with every option, the bound the loss without, and
  "above bound" is what the options cost. The float64 reference has the same options.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F

from bench import peers
from bench.harness import Case, Error, Provider, Rank, absent, copy_roofs, local_tensor
from bench.options import DTYPES, Bench, parser, positive, positive_list, run
from bench.virtual import VirtualRanks
from fastpar.comm import GroupLike, shard_range

# (logits, target) -> (loss, gradient): the timed region
Step = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

SAMPLED_ROWS = 64
# Relative errors. fp32: sums of 1e5 terms in any order. bf16: see the module docstring.
TOLERANCES = {
    "fp32": {"loss": 1e-5, "grad": 1e-5, "grad off target": 1e-4},
    "bf16": {"loss": 2e-3, "grad": 1e-2, "grad off target": 5e-2},
}
BF16_LOSS = 3e-2  # of a mean that was added up, or rounded, in bf16


@dataclass(frozen=True)
class LossOptions:
    """The options of the loss under ``--options``; class weights run from 0.5 to 1.5 over the vocabulary."""

    label_smoothing: float = 0.1
    z_loss: float = 1e-4
    softcap: float = 30.0

    def describe(self) -> str:
        return f"smoothing {self.label_smoothing:g}, z-loss {self.z_loss:g}, softcap {self.softcap:g}, class weights"


@dataclass(frozen=True)
class CrossEntropyCase:
    """`tokens` x `vocab` logits in `dtype`, the vocabulary sharded over the ranks.

    With virtual ranks (and one real one) this rank holds `vocab` columns out of `virtual_ranks` times as many.
    """

    dtype: str
    tokens: int
    vocab: int
    calls: int = 1
    virtual_ranks: int = 1
    options: LossOptions | None = None

    def describe(self) -> dict[str, Any]:
        found: dict[str, Any] = {"dtype": self.dtype, "tokens": self.tokens, "vocab": self.vocab}
        if self.virtual_ranks > 1:
            found["virtual ranks"] = self.virtual_ranks
        if self.options is not None:
            found["options"] = self.options.describe()
        return found

    def build(self, rank: Rank) -> list[Provider]:
        problem = Problem(self, rank)
        made = Maker(problem)
        if self.options is not None:
            made.options_against_none()
        else:
            made.fastpar()
            if rank.world_size == 1 and self.virtual_ranks == 1:
                made.whole_vocabulary_peers()
            else:
                made.sharded_peers()
        # A roof is rated on at least the gradient's size on CUDA, where small buffers would measure a cache.
        return made.providers + copy_roofs(min(problem.logits.nbytes, 256 << 20), rank.world_size, rank.device)


class Maker:
    """Collects the providers of a problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.rank, self.case = problem, problem.rank, problem.case
        self.providers: list[Provider] = []

    def add(
        self,
        name: str,
        kind: str,
        step: Step,
        *,
        bound: int | None = None,
        overwrites: bool = False,
        small: bool = True,
        problem: Problem | None = None,
        tolerance: str = "",
    ) -> None:
        """overwrites: the logits; small: False where a smaller call would compile again, and that would be measured;
        tolerance: of this dtype for the gradients, where it is not the case's.
        """
        problem = problem or self.problem
        small = small and self.case.virtual_ranks == 1  # what the virtual ranks bring is for all the tokens
        self.providers.append(
            Provider(
                name,
                kind,
                call=lambda: step(problem.logits, problem.target),
                check=lambda: problem.errors(step, tolerance or self.case.dtype),
                prepare=problem.restore if overwrites else None,
                warm=(lambda: problem.small(step)) if small else None,
                num_bytes=3.0 * self.case.tokens * self.case.vocab * DTYPES[self.case.dtype].itemsize,
                memory_bound=bound,
            )
        )

    def fastpar(self) -> None:
        stats = 32 * self.case.tokens
        gradient = self.problem.logits.nbytes
        self.add("fastpar in place", "fastpar", fastpar_step(self.problem, in_place=True), bound=stats, overwrites=True)
        fresh = fastpar_step(self.problem, in_place=False)
        self.add("fastpar fresh gradient", "fastpar", fresh, bound=gradient + stats)

    def options_against_none(self) -> None:
        assert self.case.options is not None
        plain = self.problem.without_options()
        step = fastpar_step(plain, in_place=True)
        self.add("fastpar in place, no options", "bound", step, overwrites=True, problem=plain)
        step = fastpar_step(self.problem, in_place=True)
        self.add("fastpar in place, all options", "fastpar", step, bound=32 * self.case.tokens, overwrites=True)
        if self.rank.world_size == 1 and self.case.virtual_ranks == 1:
            loss = torch_loss_with(self.problem.weight, self.case.options)
            self.add("torch, all options", "torch", step_of(loss))
            self.add("torch.compile, all options", "torch", step_of(compiled(loss)), small=False)

    def whole_vocabulary_peers(self) -> None:
        self.add("torch F.cross_entropy", "torch", step_of(torch_loss))
        self.add("torch.compile F.cross_entropy", "torch", step_of(compiled(torch_loss)), small=False)
        if self.rank.device == "cuda":
            self.optional("Liger", peers.liger_cross_entropy, lambda loss: loss)
            self.sharded_peer("flash-attn", peers.flash_attn_vocab_parallel)

    def sharded_peers(self) -> None:
        three = three_all_reduces_step
        if self.case.virtual_ranks > 1:
            alone = self.problem.alone()
            group = peers.process_group(self.rank.device)
            self.add("torch three all-reduces", "torch", three(group, 0), problem=alone)
        else:
            self.add("torch three all-reduces", "torch", three(self.rank.group, self.problem.start))
            self.add("torch loss_parallel", "torch", loss_parallel_step(self.rank, self.case.vocab))
        if self.case.vocab % self.rank.world_size == 0:  # these know equal shards only
            self.sharded_peer("Megatron-Core", peers.megatron_unfused)
            self.sharded_peer("Megatron-Core fused", peers.megatron_fused, small=False, tolerance="bf16")
            if self.rank.device == "cuda":
                self.sharded_peer("Liger vocab-parallel", peers.liger_vocab_parallel)
                self.sharded_peer("flash-attn", peers.flash_attn_vocab_parallel)

    def sharded_peer(self, name: str, load: Callable[[], Callable[..., torch.Tensor]], **how: Any) -> None:
        """A peer with per-token losses that wants a group; it averages in fp32 outside."""

        def mean(per_token: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
            group = self.rank.group or peers.process_group(self.rank.device)
            return lambda logits, target: per_token(logits, target, group).float().mean()

        self.optional(name, load, mean, **how)

    def optional(
        self,
        name: str,
        load: Callable[[], Callable[..., torch.Tensor]],
        loss_of: Callable[[Callable[..., torch.Tensor]], Callable[..., torch.Tensor]],
        **how: Any,
    ) -> None:
        """A peer of another library, if it is there. Its logits are restored: some of them overwrite their input."""
        found = peers.find(load)
        if isinstance(found, str):
            self.providers.append(absent(name, found))
            return
        problem = self.problem.alone() if self.case.virtual_ranks > 1 else self.problem
        self.add(name, "torch", step_of(loss_of(found)), overwrites=True, problem=problem, **how)


class Problem:
    """The tensors of a case on one rank, and the float64 reference."""

    def __init__(self, case: CrossEntropyCase, rank: Rank) -> None:
        self.case, self.rank, self.options = case, rank, case.options
        if case.virtual_ranks > 1:
            if rank.world_size > 1:
                raise ValueError(f"virtual ranks ({case.virtual_ranks}) need --ranks 1, got {rank.world_size}")
            self.total = case.vocab * case.virtual_ranks
            self.start, end = 0, case.vocab
        else:
            self.total = case.vocab
            self.start, end = shard_range(case.vocab, rank.world_size, rank.rank)
        generator = torch.Generator().manual_seed(1)  # the same targets on every rank
        self.target = torch.randint(self.total, (case.tokens,), generator=generator).to(rank.device)
        self.weight = torch.linspace(0.5, 1.5, self.total, device=rank.device)
        self.master = _logits(case, self.start, end, rank.device)
        self.logits = self.master.clone().requires_grad_()
        self.group: GroupLike = rank.group
        self._others: list[torch.Tensor] = []  # reference terms of virtual ranks
        self._terms: tuple[torch.Tensor, ...] | None = None
        if case.virtual_ranks > 1:
            self._make_virtual_ranks()

    def _make_virtual_ranks(self) -> None:
        sent = []
        vocab, count = self.case.vocab, self.case.virtual_ranks
        for rank in range(1, count):
            start = rank * vocab
            x = _logits(self.case, start, start + vocab, self.rank.device)
            self._others.append(self._local_terms(x, start))
            comm = VirtualRanks(rank, count)
            loss = partial(_fastpar_loss(self, comm, start), x, self.target)
            sent.append(comm.captured(loss))
        self.group = VirtualRanks(0, count, sent)

    def alone(self) -> Problem:
        """The same logits as a vocabulary of its own, for a peer in a group of size 1."""
        whole = copy.copy(self)
        whole.total, whole.target = self.case.vocab, self.target % self.case.vocab
        whole._others, whole._terms = [], None
        return whole

    def without_options(self) -> Problem:
        """The same logits and the plain loss."""
        plain = copy.copy(self)
        plain.options, plain._terms = None, None
        if self.case.virtual_ranks > 1:
            plain._others = []
            plain._make_virtual_ranks()
        return plain

    def restore(self) -> None:
        with torch.no_grad():
            self.logits.copy_(self.master)

    def small(self, step: Step) -> None:
        """The same code over 8 tokens."""
        step(self.master[:8].clone().requires_grad_(), self.target[:8])

    def errors(self, step: Step, tolerance: str = "") -> dict[str, Error]:
        """Relative errors of the loss and of sampled gradient rows against float64."""
        self.restore()
        loss, grad = step(self.logits, self.target)
        rows = torch.linspace(0, self.case.tokens - 1, min(SAMPLED_ROWS, self.case.tokens)).long().to(self.rank.device)
        expected_loss = self._reference_loss()
        expected, place = self._reference_rows(rows)
        deviation = grad[rows].double() - expected
        found = {
            "loss": abs(local_tensor(loss).item() - expected_loss) / abs(expected_loss),
            "grad": float(deviation.norm() / expected.norm()),
        }
        deviation[place], expected[place] = 0.0, 0.0
        found["grad off target"] = float(deviation.norm() / expected.norm())
        loss_error = BF16_LOSS if loss.dtype == torch.bfloat16 else TOLERANCES[self.case.dtype]["loss"]
        allowed = TOLERANCES[tolerance or self.case.dtype] | {"loss": loss_error}
        return {name: Error(e, allowed[name]) for name, e in found.items()}

    # The algebra of the loss with all its options, in float64: fastpar.ops.cross_entropy has it in words.

    def _reference_loss(self) -> float:
        lse, picked, weighted = self._all_terms()
        o, w = self.options, self._target_weight()
        if o is None:
            return float((lse - picked).mean())
        weight_sum = self.weight.double().sum()
        loss = (1 - o.label_smoothing) * w * (lse - picked) + o.z_loss * lse**2
        loss += o.label_smoothing / self.total * (weight_sum * lse - weighted)
        return float(loss.sum() / w.sum())

    def _reference_rows(self, rows: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """(the gradient of these rows' own columns, the places of their targets in it)"""
        lse = self._all_terms()[0][rows]
        z = self._capped(self.master[rows])
        o, w = self.options, self._target_weight()
        grad_loss = 1.0 / w.sum()
        gamma = grad_loss * w[rows]
        grad = (z - lse[:, None]).exp_()
        if o is None:
            grad *= gamma[:, None]
        else:
            beta = grad_loss * o.label_smoothing / self.total
            delta = beta * self.weight.double().sum() + grad_loss * 2 * o.z_loss * lse
            gamma *= 1 - o.label_smoothing
            own = self.weight[self.start : self.start + z.size(1)].double()
            grad = (gamma + delta)[:, None] * grad - beta * own
        column = self.target[rows] - self.start
        mine = (column >= 0) & (column < z.size(1))
        place = (torch.arange(rows.numel(), device=rows.device)[mine], column[mine])
        grad[place] -= gamma[mine]
        if o is not None:
            grad *= 1 - (z / o.softcap) ** 2
        return grad, place

    def _capped(self, x: torch.Tensor) -> torch.Tensor:
        x = x.double()
        return x if self.options is None else self.options.softcap * torch.tanh(x / self.options.softcap)

    def _target_weight(self) -> torch.Tensor:
        return (
            torch.ones_like(self.target, dtype=torch.float64)
            if self.options is None
            else self.weight.double()[self.target]
        )

    def _local_terms(self, x: torch.Tensor, start: int) -> torch.Tensor:
        """[3, tokens] over the columns `x` from `start` on: log-sum-exp, the target's logit or 0, and the sum of class
        weight times logit.
        """
        own = self.weight[start : start + x.size(1)].double()
        column = self.target - start
        mine = (column >= 0) & (column < x.size(1))
        column = column.clamp(0, x.size(1) - 1)
        found = []
        for piece, ids in zip(x.split(64), column.split(64), strict=True):
            z = self._capped(piece)
            found.append(torch.stack([z.logsumexp(1), z.gather(1, ids[:, None])[:, 0], z @ own]))
        terms = torch.cat(found, dim=1)
        terms[1].masked_fill_(~mine, 0.0)
        return terms

    def _all_terms(self) -> tuple[torch.Tensor, ...]:
        """`_local_terms` over the whole vocabulary; computed once."""
        if self._terms is None:
            local = self._local_terms(self.master, self.start)
            parts = [local, *self._others]
            if self.rank.world_size > 1:
                parts = [torch.empty_like(local) for _ in range(self.rank.world_size)]
                dist.all_gather(parts, local)
            lse, picked, weighted = torch.stack(parts, dim=1)
            self._terms = (lse.logsumexp(0), picked.sum(0), weighted.sum(0))
        return self._terms


def _logits(case: CrossEntropyCase, start: int, end: int, device: str) -> torch.Tensor:
    """This rank's columns: 64 random rows, repeated, times a scale per row (see the module docstring)."""
    generator = torch.Generator(device).manual_seed(1000 + start)
    rows = torch.randn(min(64, case.tokens), end - start, generator=generator, device=device)
    logits = torch.empty(case.tokens, end - start, dtype=DTYPES[case.dtype], device=device)
    scales = torch.linspace(0.5, 2.0, case.tokens, device=device)
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


def fastpar_step(problem: Problem, *, in_place: bool) -> Step:
    return step_of(_fastpar_loss(problem, problem.group, problem.start, inplace_backward=in_place))


def _fastpar_loss(problem: Problem, group: GroupLike, start: int, **flags: Any) -> Callable[..., torch.Tensor]:
    from fastpar.ops import vocab_parallel_cross_entropy

    if group is not None:
        flags |= {"group": group, "vocab_range": (start, start + problem.master.size(1), problem.total)}
    if problem.options is not None:
        o = problem.options
        flags |= {"label_smoothing": o.label_smoothing, "z_loss": o.z_loss, "softcap": o.softcap}
        flags["weight"] = problem.weight
    return cast("Callable[..., torch.Tensor]", partial(vocab_parallel_cross_entropy, **flags))


def torch_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, target, reduction="none").float().mean()  # see the module docstring on bf16


def compiled(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """torch.compile of it, on first use: importing the compiler takes seconds."""

    @cache
    def made() -> Callable[..., torch.Tensor]:
        return torch.compile(function, dynamic=False)

    return lambda *arguments: made()(*arguments)


def torch_loss_with(weight: torch.Tensor, o: LossOptions) -> Callable[..., torch.Tensor]:
    """Every option in plain torch, in fp32, as a careful user would write it."""

    def loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        z = o.softcap * torch.tanh(logits.float() / o.softcap)
        total = F.cross_entropy(z, target, weight=weight, label_smoothing=o.label_smoothing, reduction="sum")
        return (total + o.z_loss * torch.logsumexp(z, -1).square().sum()) / weight[target].sum()

    return loss


def three_all_reduces_step(group: dist.ProcessGroup | None, start: int) -> Step:
    return step_of(lambda logits, target: vocab_parallel_loss(logits, target, start, group))


def vocab_parallel_loss(
    logits: torch.Tensor, target: torch.Tensor, start: int, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """The algorithm of most vocabulary-parallel losses, in plain torch, as a careful user would write it."""
    per_token: torch.Tensor = _ThreeAllReduces.apply(logits, target, start, group)
    return per_token.mean()


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

    mesh = init_device_mesh(rank.device, (rank.world_size,))

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
    chosen = LossOptions() if flags.options else None
    return [
        CrossEntropyCase(d, t, v, virtual_ranks=flags.virtual_ranks, options=chosen)
        for d in flags.dtype
        for t in flags.tokens
        for v in flags.vocab
    ]


BENCH = Bench(
    name="cross_entropy",
    baselines=("torch F.cross_entropy", "torch three all-reduces", "torch, all options"),
    cases=cases,
    memory=True,
    quick={"tokens": [256], "vocab": [8192], "blocks": 3, "iters": 2},
    devices=("cpu", "cuda"),
)


def main(argv: Sequence[str]) -> int:
    made = parser(BENCH, "cross-entropy forward + backward from given logits", threads=[2], blocks=2, iters=2)
    made.add_argument("--tokens", type=positive_list, default=[2048], metavar="LIST", help="rows of the logits")
    made.add_argument("--vocab", type=positive_list, default=[131072], metavar="LIST", help="vocabulary of all ranks")
    made.add_argument(
        "--options", action="store_true", help=f"the cost of the loss's options ({LossOptions().describe()})"
    )
    made.add_argument(
        "--virtual-ranks", type=positive, default=1, metavar="N", help="of N ranks with --vocab columns each, this one"
    )
    flags = made.parse_args(argv)
    if flags.virtual_ranks > 1:
        flags.ranks = [1]
    return run(BENCH, flags, ["fastpar", "bench", "cross_entropy", *argv])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
