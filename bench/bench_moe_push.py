"""Tokens pushed into the experts' rows of other ranks and results read back, on one GPU: W virtual ranks share it.

    fastpar bench moe_push --device cuda [--virtual-ranks 8] [--tokens 4096] [--hidden 7168] [--experts 256] [--top-k 8]

What is timed, forked from one stream to a stream per rank and joined again, for x [tokens, hidden] on every rank whose
tokens choose `top_k` different experts at random:

    dispatch  counts of all ranks, the row of every pair, and rows [pairs, hidden] by expert in the experts' memory
    combine   out [tokens, hidden]: the weighted sum of the rows of every token's pairs, read where they lie

The kernels are those of ranks on GPUs of their own (`fastpar.kernels.moe_push`); their links are this device's memory,
so rates say nothing about NVLink. What counts is how near they come to a copy in memory.

Bytes model, of all W ranks, P = W * tokens * top_k pairs: dispatch reads and writes P rows; combine reads P rows and
writes W * tokens.

Traps besides those of `bench.harness` and `bench.device`:

* A call is some ten launches of each rank. The host runs ahead of the device only where these work for longer than it
  takes to launch them: rates of small shapes are the host's.
* Ranks take turns in launching, phase by phase, so that no kernel waits for one that is launched later. They contend
  for the device, as ranks on several do not.
* A rank has room for 1.25 times the rows that it gets on average; a dropless exchange has more, and no row costs more.
* "torch" is what an all-to-all needs around it: gather by expert, copy a block from each rank to each, gather by
  expert there; and back, with a product and a sum at the end. Where every row goes is known to it beforehand.
* What combine sums while it is timed is what lay there; it is checked with rows that have been dispatched and doubled.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.harness import Case, Error, Provider, Rank, copy_roofs
from bench.options import DTYPES, Bench, parser, positive, positive_list, run

JOBS = ("dispatch", "combine")
ROOM = 1.25  # rows that a rank has room for, of those that it gets on average
TOLERANCES = {"fp32": 1e-6, "bf16": 1e-2}  # relative error of sums; torch's are rounded in between
_FLAGS = 4  # of a rank on another: more than an exchange has


@dataclass(frozen=True)
class PushCase:
    """One job of `size` virtual ranks."""

    job: str
    dtype: str
    size: int
    tokens: int
    hidden: int
    experts: int
    top_k: int
    calls: int = 1

    def describe(self) -> dict[str, Any]:
        names = ("job", "dtype", "tokens", "hidden", "experts", "top_k")
        return {**{name: getattr(self, name) for name in names}, "virtual ranks": self.size}

    def build(self, rank: Rank) -> list[Provider]:
        problem = Problem(self, rank.device)
        pairs, tokens = self.size * self.tokens * self.top_k, self.size * self.tokens
        moved = (2 * pairs if self.job == "dispatch" else pairs + tokens) * self.hidden * DTYPES[self.dtype].itemsize
        exchanges: list[tuple[str, str, Pushing | Sorting]] = [
            ("fastpar", "fastpar", Pushing(problem)),
            ("torch", "torch", Sorting(problem)),
        ]
        providers = [
            Provider(
                name, kind, exchange.dispatch if self.job == "dispatch" else exchange.combine,
                check=partial(problem.errors, exchange), num_bytes=float(moved),
            )
            for name, kind, exchange in exchanges
        ]  # fmt: skip
        return [*providers, *copy_roofs(1 << 20, 1, rank.device)]


class Problem:
    """Tokens and choices of all ranks, `x`, `indices` and `weights`, and where their rows belong."""

    def __init__(self, case: PushCase, device: str) -> None:
        if case.experts % case.size:
            raise ValueError(f"experts ({case.experts}) must be divisible by the virtual ranks ({case.size})")
        self.case, self.device, self.dtype = case, device, DTYPES[case.dtype]
        count = case.size * case.tokens
        generator = torch.Generator(device).manual_seed(0)
        self.x = torch.randn(count, case.hidden, generator=generator, device=device).to(self.dtype)
        scores = torch.rand(count, case.experts, generator=generator, device=device)
        self.indices = scores.topk(case.top_k, 1).indices
        self.weights = torch.rand(count, case.top_k, generator=generator, device=device)
        pairs = self.indices.view(-1)
        order = pairs.argsort(stable=True)  # by expert, then by rank, token and choice
        self.rows = torch.bincount(pairs // (case.experts // case.size), minlength=case.size).tolist()
        self.tokens = (order // case.top_k).split(self.rows)  # of the rows of each rank

    def of_ranks(self, x: Tensor) -> Sequence[Tensor]:
        """Each rank's part of x, indices or weights."""
        return x.split(self.case.tokens)

    def errors(self, exchange: Pushing | Sorting) -> dict[str, Error]:
        """Rows that do not lie where they belong, and the relative error of the sum of rows that were given back."""
        rows = exchange.dispatch()
        wrong = sum(int((r != self.x[t]).any(1).sum()) for r, t in zip(rows, self.tokens, strict=True))
        found = torch.cat(list(exchange.combine([2 * r for r in rows]))).double()  # what lay there before is not right
        exact = 2 * self.x.double() * self.weights.double().sum(1, keepdim=True)
        exchange.check()
        return {
            "rows": Error(float(wrong), 0.0),
            "out": Error(float((found - exact).norm() / exact.norm()), TOLERANCES[self.case.dtype]),
        }


# ----------------------------------------------------------------------------------------------------------- providers


class Pushing:
    """fastpar's exchange of every rank, each on a stream of its own."""

    def __init__(self, problem: Problem) -> None:
        from fastpar.comm.symmetric.buffer import virtual_ranks
        from fastpar.kernels.moe_push import PushExchange
        from fastpar.kernels.overlap_gemm_buffer import CHANNELS, OverlapBuffer, aligned

        case, dtype = problem.case, problem.dtype
        self.problem, size = problem, case.size
        capacity = max(int(ROOM * case.tokens * case.top_k), *problem.rows)
        data = (
            aligned(4 * size * case.experts) + aligned(4 * capacity) + aligned(capacity * case.hidden * dtype.itemsize)
        )
        nbytes = CHANNELS * (data + 2 * aligned(4 * size * _FLAGS))
        self.exchanges = [
            PushExchange(
                OverlapBuffer(buffer, flag_capacity=_FLAGS), num_experts=case.experts, width=case.hidden, dtype=dtype,
                capacity=capacity,
            )
            for buffer in virtual_ranks(size, nbytes, problem.device)
        ]  # fmt: skip
        self.streams = [torch.cuda.Stream() for _ in range(size)] if problem.device == "cuda" else None
        self.dispatch()  # combine has to have a plan

    def dispatch(self) -> list[Tensor]:
        """The rows of every rank, valid until the next call."""
        from fastpar.kernels.moe_push import Phases, Pushed

        problem = self.problem
        parts = zip(*(problem.of_ranks(t) for t in (problem.x, problem.indices, problem.weights)), strict=True)
        calls: list[Phases[Pushed]] = [e.dispatch_phases(*p) for e, p in zip(self.exchanges, parts, strict=True)]
        self.pushed: list[Pushed] = self._together(calls)
        return [p.rows[:n] for p, n in zip(self.pushed, problem.rows, strict=True)]

    def combine(self, rows: Sequence[Tensor] | None = None) -> list[Tensor]:
        """rows: that are copied first to where ranks can read them; None: what lies there."""
        self._fork()
        calls = []
        weights = self.problem.of_ranks(self.problem.weights)
        for rank, (exchange, pushed) in enumerate(zip(self.exchanges, self.pushed, strict=True)):
            with self._on(rank):
                results = exchange.empty_rows()
                if rows is not None:
                    results[: len(rows[rank])] = rows[rank]
            calls.append(exchange.give_back_phases(pushed, results, weights=weights[rank]))
        return [out for out, _ in self._together(calls)]

    def check(self) -> None:
        """Raises what a wait or an overflow has left."""
        if self.streams:
            torch.cuda.synchronize()
        for exchange in self.exchanges:
            exchange.buffer.check()

    def _on(self, rank: int) -> Any:
        return torch.cuda.stream(self.streams[rank] if self.streams else None)

    def _fork(self) -> None:
        """Ranks begin after what the current stream holds."""
        for stream in self.streams or ():
            stream.wait_stream(torch.cuda.current_stream())

    def _together(self, calls: Sequence[Any]) -> list[Any]:
        """`fastpar.kernels.moe_push.run_together`, each rank on its stream, after what came and before what comes."""
        self._fork()
        results: dict[int, Any] = {}
        while len(results) < len(calls):
            for rank, call in enumerate(calls):
                if rank not in results:
                    with self._on(rank):
                        try:
                            next(call)
                        except StopIteration as end:
                            results[rank] = end.value
        for stream in self.streams or ():
            torch.cuda.current_stream().wait_stream(stream)
        return [results[rank] for rank in range(len(calls))]


class Sorting:
    """Torch, with blocks of rows from each rank to each: by rank and expert while they travel."""

    def __init__(self, problem: Problem) -> None:
        case = problem.case
        self.problem, per_rank = problem, case.experts // case.size
        self.sends, self.slots, owners, experts = [], [], [], []
        for indices in problem.of_ranks(problem.indices):
            pairs = indices.reshape(-1)
            order = pairs.argsort(stable=True)
            slots = torch.empty_like(order)
            slots[order] = torch.arange(len(order), device=order.device)
            self.sends.append(order // case.top_k)
            self.slots.append(slots.view(indices.shape))
            owners.append(torch.bincount(pairs // per_rank, minlength=case.size).tolist())
            experts.append(pairs[order].split(owners[-1]))
        self.owners = owners  # [rank][owner]: rows
        arrived = [torch.cat([experts[rank][owner] for rank in range(case.size)]) for owner in range(case.size)]
        self.orders = [e.argsort(stable=True) for e in arrived]
        self.backs = [o.argsort() for o in self.orders]
        self.inboxes = [problem.x.new_empty(n, case.hidden) for n in problem.rows]
        self.returns = [problem.x.new_empty(sum(n), case.hidden) for n in owners]
        self.rows = [torch.zeros_like(inbox) for inbox in self.inboxes]

    def dispatch(self) -> list[Tensor]:
        size = self.problem.case.size
        into = [inbox.split([self.owners[r][o] for r in range(size)]) for o, inbox in enumerate(self.inboxes)]
        for rank, x in enumerate(self.problem.of_ranks(self.problem.x)):
            blocks = x.index_select(0, self.sends[rank]).split(self.owners[rank])
            for owner, block in enumerate(blocks):
                into[owner][rank].copy_(block)
        return [inbox.index_select(0, order) for inbox, order in zip(self.inboxes, self.orders, strict=True)]

    def combine(self, rows: Sequence[Tensor] | None = None) -> list[Tensor]:
        """rows: of every rank's experts; None: zeros."""
        size = self.problem.case.size
        into = [whole.split(owners) for whole, owners in zip(self.returns, self.owners, strict=True)]
        for owner, results in enumerate(self.rows if rows is None else rows):
            blocks = results.index_select(0, self.backs[owner]).split([self.owners[r][owner] for r in range(size)])
            for rank, block in enumerate(blocks):
                into[rank][owner].copy_(block)
        weights = self.problem.of_ranks(self.problem.weights.to(self.problem.dtype))
        sums = zip(self.returns, self.slots, weights, strict=True)
        return [(back[slots] * w[..., None]).sum(1) for back, slots, w in sums]

    def check(self) -> None:
        """Nothing can be late or missing."""


# --------------------------------------------------------------------------------------------------------------- main


def cases(flags: argparse.Namespace, world_size: int) -> Sequence[Case]:
    return [
        PushCase(job, dtype, size, tokens, hidden, flags.experts, top_k)
        for dtype in flags.dtype
        for size in flags.virtual_ranks
        for tokens in flags.tokens
        for hidden in flags.hidden
        for top_k in flags.top_k
        for job in JOBS
    ]


BENCH = Bench(
    name="moe_push",
    baselines=("torch",),
    cases=cases,
    memory=False,
    quick={"tokens": [256], "hidden": [1024], "virtual_ranks": [2], "blocks": 3, "iters": 2},
    devices=("cuda",),
)


def main(argv: Sequence[str]) -> int:
    made = parser(BENCH, "dispatch and combine of virtual ranks on one GPU", ranks=[1], dtype=["bf16"], iters=4)
    add = made.add_argument
    add("--virtual-ranks", type=positive_list, default=[8], metavar="LIST", help="ranks on the GPU")
    add("--tokens", type=positive_list, default=[4096], metavar="LIST", help="of each rank")
    add("--hidden", type=positive_list, default=[7168], metavar="LIST", help="row width")
    add("--top-k", type=positive_list, default=[8], metavar="LIST", help="choices of a token")
    add("--experts", type=positive, default=256, help="of all ranks")
    flags = made.parse_args(argv)
    if flags.device == "cpu":  # `fastpar bench` without a name runs them all
        print("fastpar bench moe_push: nothing to measure on the CPU; give --device cuda", file=sys.stderr)
        return 0
    return run(BENCH, flags, ["fastpar", "bench", "moe_push", *argv])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
