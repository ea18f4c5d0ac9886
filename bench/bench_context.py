"""Attention over a sequence that is split over ranks, forward + backward: the methods of `fp.ops.context_attention`.

    fastpar bench context [--quick] [--masks causal,window,packed] [--tokens 8192] [--window-tokens 32768] [--ranks 2,4]

What is timed: ``out = context_attention(q, k, v)`` and ``out.backward(dout)`` with gradients of q, k and v of this
rank's tokens, fresh gradients every time. The model: `--heads` query heads on `--kv-heads` key/value heads of
`--head-dim`, one sequence. Masks: "causal"; "window", causal with 1024 keys; "packed", causal documents of 90 to 1500
tokens.

"divided perfectly" is fastpar's own local attention of the whole sequence with 1/P of the query heads on each rank and
no communication at all: the same kernel's time, of which every rank has an equal part. It is a lower bound, not a peer:
each rank would need all tokens. The column "above bound" is what a method costs beyond it: communication, merging,
uneven work and waiting for the others.

"own work alone" is this rank's own queries over all tokens' keys in one call, no communication at all: as uneven as the
layout is. What a method takes beyond it is communication, merging of parts and waiting for one another; what it takes
beyond "divided perfectly" by comparison is the layout's balance and the price of its tiles' edges. One row for each
layout that a mask has.

"plain ring" is what is written over torch.distributed: zigzag tokens, K and V and float32 dK and dV handed round with
`batch_isend_irecv` while a block is computed, partial results merged in float32. It calls the same local kernel, so
that the difference is the ring. "over gloo" is fastpar's ring where ranks cannot share memory.

Flops model, all ranks together, of the (query, key) pairs that are visible:

    14 * head_dim * heads * pairs           4 forward (q kT, p v), 10 backward

Traps besides those of `bench.harness`:

* Ranks with one thread each: more ranks than cores take turns, so that rows of 4 ranks on 2 cores show the sum of the
  work, not the balance.
* Every provider of one table has the same kernel. Whether that is fast is `bench_attention`'s question.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.harness import Case, Error, Provider, Rank
from bench.options import DTYPES, Bench, parser, positive, run
from fastpar import ops
from fastpar.comm import Communicator
from fastpar.context import layout as layouts
from fastpar.contracts.attention import AttentionMask, AttentionTiles, Ranges, TokenRange, positions

WINDOW = 1024
# Relative errors in the L2 norm. fp32: sums of thousands of products in any order. bf16: one rounding of the results.
TOLERANCES = {"fp32": 1e-5, "bf16": 6e-3}
MASKS = ("causal", "window", "packed")
# (name, method, layout, transport) of the providers of a mask; "usp 2" where there are 4 ranks.
METHODS: dict[str, list[tuple[str, Any, str, str]]] = {
    "causal": [
        ("ring, zigzag", "ring", "zigzag", "auto"),
        ("ring, zigzag, over gloo", "ring", "zigzag", "torch"),
        ("ring, contiguous", "ring", "contiguous", "auto"),
        ("gather, zigzag", "gather", "zigzag", "auto"),
        ("ulysses", "ulysses", "contiguous", "auto"),
        ("usp 2, zigzag", 2, "zigzag", "auto"),
    ],
    "window": [
        ("ring, contiguous", "ring", "contiguous", "auto"),
        ("ring, contiguous, over gloo", "ring", "contiguous", "torch"),
        ("gather, contiguous", "gather", "contiguous", "auto"),
        ("ulysses", "ulysses", "contiguous", "auto"),
    ],
    "packed": [
        ("ring, dealt", "ring", "dealt", "auto"),
        ("ring, dealt, over gloo", "ring", "dealt", "torch"),
        ("ring, zigzag", "ring", "zigzag", "auto"),
        ("ring, contiguous", "ring", "contiguous", "auto"),
        ("ulysses", "ulysses", "contiguous", "auto"),
    ],
}


@dataclass(frozen=True)
class ContextCase:
    """One sequence of `tokens`, under a mask of `MASKS`."""

    dtype: str
    mask: str
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def calls(self) -> int:
        return 1

    def describe(self) -> dict[str, Any]:
        names = ("dtype", "mask", "tokens", "heads", "kv_heads", "head_dim")
        return {name: getattr(self, name) for name in names}

    def build(self, rank: Rank) -> list[Provider]:
        problem = Problem(self, rank)
        flops = 14.0 * self.head_dim * self.heads * problem.tiles.pairs
        makers: list[tuple[str, str, Callable[[Problem], Step]]] = []
        for name, method, layout, transport in METHODS[self.mask]:
            if isinstance(method, int):
                if rank.world_size % method or rank.world_size == method:
                    continue
                method = ops.Usp(method)
            if method == "ulysses" and self.heads % rank.world_size:
                continue
            makers.append((name, "fastpar", partial(fastpar_step, method=method, layout=layout, transport=transport)))
        makers.append(("plain ring", "torch", plain_step))
        for layout in dict.fromkeys(name for _, _, name, _ in METHODS[self.mask]):
            makers.append((f"own work alone, {layout}", "bound", partial(alone_step, layout=layout)))
        makers.append(("divided perfectly", "bound", divided_step))  # the last bound is that of "above bound"
        providers = []
        for name, kind, make in makers:
            step = make(problem)
            check = dict if kind == "bound" else partial(problem.errors, step)
            providers.append(Provider(name, kind, call=step.run, check=check, flops=flops))
        return providers


def mask_of(name: str, tokens: int) -> AttentionMask:
    if name != "packed":
        return AttentionMask(causal=True, window=(WINDOW - 1, 0) if name == "window" else None)
    drawn = torch.randint(90, 1500, (tokens // 90 + 1,), generator=torch.Generator().manual_seed(5)).cumsum(0).tolist()
    cuts = [0, *(cut for cut in drawn if cut < tokens), tokens]
    return AttentionMask(causal=True, documents=(tuple(b - a for a, b in itertools.pairwise(cuts)),))


def make_layout(name: str, tokens: int, size: int, mask: AttentionMask) -> tuple[Ranges, ...]:
    made: dict[str, Callable[[], tuple[Ranges, ...]]] = {
        "contiguous": lambda: layouts.contiguous(tokens, size),
        "zigzag": lambda: layouts.zigzag(tokens, size),
        "dealt": lambda: layouts.dealt(tokens, size, mask),
    }
    return made[name]()


@dataclass
class Step:
    """One implementation on one rank: its leaves q, k and v, the gradient that comes in, and where its tokens are."""

    forward: Callable[[Tensor, Tensor, Tensor], Tensor]
    leaves: Sequence[Tensor]
    dout: Tensor
    tokens: Tensor = field(default_factory=lambda: torch.empty(0))

    def run(self) -> Tensor:
        """The timed region."""
        for leaf in self.leaves:
            leaf.grad = None
        out = self.forward(*self.leaves)
        out.backward(self.dout)
        return out


class Problem:
    """The whole sequence (the same on every rank), and its attention in float64."""

    def __init__(self, case: ContextCase, rank: Rank) -> None:
        self.case, self.rank = case, rank
        made = torch.Generator().manual_seed(0)
        heads = (case.heads, case.kv_heads, case.kv_heads, case.heads)
        self.q, self.k, self.v, self.dout = (
            torch.randn(1, count, case.tokens, case.head_dim, generator=made).to(DTYPES[case.dtype]) for count in heads
        )
        self.mask = mask_of(case.mask, case.tokens)
        whole = (TokenRange(0, case.tokens),)
        self.tiles: AttentionTiles = self.mask.tiles(whole, whole)
        self._expected: list[Tensor] | None = None

    def local(self, layout: tuple[Ranges, ...]) -> tuple[list[Tensor], Tensor, Tensor]:
        """Leaves, dout and positions of this rank's tokens."""
        tokens = positions(layout[self.rank.rank])
        q, k, v, dout = (x[:, :, tokens].clone() for x in (self.q, self.k, self.v, self.dout))
        return [x.requires_grad_() for x in (q, k, v)], dout, tokens

    def errors(self, step: Step) -> dict[str, Error]:
        out = step.run()
        found = {}
        grads = [leaf.grad for leaf in step.leaves]
        for name, value, whole in zip(("out", "dq", "dk", "dv"), (out, *grads), self._reference(), strict=True):
            if value is None:
                raise RuntimeError(f"{name} is missing")
            want = whole[:, :, step.tokens]
            error = float((value.detach().double() - want).norm() / want.norm())
            found[name] = Error(error, TOLERANCES[self.case.dtype])
        return found

    def _reference(self) -> list[Tensor]:
        if self._expected is None:
            q, k, v = (x.double().requires_grad_() for x in (self.q, self.k, self.v))
            out = ops.attention(q, k, v, self.tiles)
            self._expected = [out.detach(), *torch.autograd.grad(out, (q, k, v), self.dout.double())]
        return self._expected


# ---------------------------------------------------------------------------------------------------------- providers


def fastpar_step(problem: Problem, *, method: Any, layout: str, transport: str) -> Step:
    comm = Communicator(problem.rank.group, transport=transport)
    ranges = make_layout(layout, problem.case.tokens, comm.size, problem.mask)
    options = {"group": comm, "layout": ranges, "mask": problem.mask, "method": method}
    return Step(partial(ops.context_attention, **options), *problem.local(ranges))


def divided_step(problem: Problem) -> Step:
    """All tokens, and this rank's part of the query heads."""
    case, size, rank = problem.case, problem.rank.world_size, problem.rank.rank
    first, last = case.heads * rank // size, case.heads * (rank + 1) // size
    group = case.heads // case.kv_heads
    keys = slice(first // group, -(-last // group))
    parts = problem.q[:, first:last], problem.k[:, keys], problem.v[:, keys]
    leaves = [x.clone().requires_grad_() for x in parts]
    return Step(lambda q, k, v: ops.attention(q, k, v, problem.tiles), leaves, problem.dout[:, first:last].clone())


def alone_step(problem: Problem, layout: str) -> Step:
    """This rank's queries, and the keys of all."""
    ranges = make_layout(layout, problem.case.tokens, problem.rank.world_size, problem.mask)
    (q, _, _), dout, tokens = problem.local(ranges)
    tiles = problem.mask.tiles(ranges[problem.rank.rank], (TokenRange(0, problem.case.tokens),))
    leaves = [q, *(x.clone().requires_grad_() for x in (problem.k, problem.v))]
    return Step(lambda q, k, v: ops.attention(q, k, v, tiles), leaves, dout, tokens)


def plain_step(problem: Problem) -> Step:
    rank = problem.rank
    layout = layouts.zigzag(problem.case.tokens, rank.world_size)
    own = layout[rank.rank]
    tiles = [problem.mask.tiles(own, layout[(rank.rank - step) % rank.world_size]) for step in range(rank.world_size)]
    return Step(lambda q, k, v: _PlainRing.apply(q, k, v, tiles, rank), *problem.local(layout))


class _PlainRing(torch.autograd.Function):
    """Blocks that are handed from rank r to rank r + 1, with the gradients of their keys in backward."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, tiles: list[AttentionTiles], rank: Rank) -> Tensor:
        scale, block = q.shape[-1] ** -0.5, torch.stack([k, v])
        out, lse = torch.zeros_like(q, dtype=torch.float32), q.new_full(q.shape[:-1], -torch.inf, dtype=torch.float32)
        for step, table in enumerate(tiles):
            coming, wait = _pass_on(block, rank) if step + 1 < len(tiles) else (block, lambda: None)
            if len(table.table):
                part, part_lse = torch.ops.fastpar.attention_forward(
                    q, block[0], block[1], table.table, None, scale, 0.0, 0.0, 0, 0, 0, None, None, torch.float32
                )
                total = torch.logaddexp(lse, part_lse)
                out = torch.exp(lse - total)[..., None] * out + torch.exp(part_lse - total)[..., None] * part
                lse = total
            wait()
            block = coming
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.tiles, ctx.rank = tiles, rank
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        (dout,) = grads
        delta, scale, block = (dout.float() * out.float()).sum(-1), q.shape[-1] ** -0.5, torch.stack([k, v])
        dq, sums = torch.zeros_like(q, dtype=torch.float32), torch.zeros_like(block, dtype=torch.float32)
        for step, table in enumerate(ctx.tiles):
            coming, wait = _pass_on(block, ctx.rank) if step + 1 < len(ctx.tiles) else (block, lambda: None)
            if len(table.table):
                part = torch.ops.fastpar.attention_backward(
                    dout, q, *block, lse, delta, table.table, None, scale, 0.0, 0.0, 0, 0, 0, None, None
                )
                dq += part[0]
                sums[0] += part[1]
                sums[1] += part[2]
            wait()
            sums, wait = _pass_on(sums, ctx.rank)
            wait()
            block = coming
        return dq.to(q.dtype), sums[0].to(k.dtype), sums[1].to(v.dtype), None, None


def _pass_on(x: Tensor, rank: Rank) -> tuple[Tensor, Callable[[], object]]:
    """What comes from the rank before, and a function that waits for it."""
    size, coming = rank.world_size, torch.empty_like(x)
    if size == 1:
        return x, lambda: None
    work = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, x, (rank.rank + 1) % size),
            dist.P2POp(dist.irecv, coming, (rank.rank - 1) % size),
        ]
    )
    return coming, lambda: [item.wait() for item in work]


# --------------------------------------------------------------------------------------------------------------- main


def cases(flags: argparse.Namespace, world_size: int) -> Sequence[Case]:
    wrong = [name for name in flags.masks if name not in MASKS]
    if wrong:
        raise SystemExit(f"unknown masks {', '.join(wrong)}; choose from {', '.join(MASKS)}")
    return [
        ContextCase(
            dtype, mask, flags.window_tokens if mask == "window" else flags.tokens, flags.heads, flags.kv_heads,
            flags.head_dim,
        )
        for dtype in flags.dtype for mask in flags.masks
    ]  # fmt: skip


BENCH = Bench(
    name="context",
    baselines=("plain ring",),
    cases=cases,
    memory=False,
    quick={"tokens": 512, "window_tokens": 4096, "blocks": 3, "iters": 2},
)


def main(argv: Sequence[str]) -> int:
    made = parser(BENCH, "attention over a sequence split over ranks, forward + backward", ranks=[2, 4], blocks=5)
    made.add_argument("--masks", type=lambda text: text.split(","), default=list(MASKS), metavar="LIST", help="masks")
    made.add_argument("--tokens", type=positive, default=8192, metavar="N", help="tokens of the whole sequence")
    made.add_argument("--window-tokens", type=positive, default=32768, metavar="N", help="the same for 'window'")
    made.add_argument("--heads", type=positive, default=8, metavar="N", help="query heads")
    made.add_argument("--kv-heads", type=positive, default=2, metavar="N", help="key/value heads")
    made.add_argument("--head-dim", type=positive, default=64, metavar="N", help="features of a head")
    return run(BENCH, made.parse_args(argv), ["fastpar", "bench", "context", *argv])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
