"""Permute and unpermute: rows of tokens by expert, and weighted sums of the experts' results at their tokens.

    fastpar bench permute [--quick] [--tokens 4096] [--hidden 1024,4096,7168] [--top-k 2,8] [--jobs permute,unpermute]
    fastpar bench permute --device cuda --dtype bf16 --tokens 4096 --hidden 7168 --top-k 8

What is timed, on one process (nothing is sent), with indices of `--experts` experts drawn at random and the plan made
before:

    permute    rows[i] = x[source[i]]                                  x [T, H], rows [N, H], N = T * top_k
    unpermute  out[t] = sum over k of weights[t, k] * rows[slots[t, k]]
    plan       order, counts, the row of every pair and the token of every row, from indices [T, top_k] alone

Bytes model, in elements of the dtype: permute reads and writes every row, 2 N H, as a copy of the result does: a token
is read top_k times, at times that lie far apart. Unpermute reads N H and writes T H.

Traps besides those of `bench.harness`:

* Results that are new tensors pay for new memory under the default setting, but fastpar's come from its pool. "into a
  buffer" is the same call with `out=`, for both.
* torch's weighted sum gathers, multiplies and sums in the dtype: its bf16 results are rounded in between, which the
  tolerance allows.
* On CUDA fastpar's plan is `fastpar.kernels.moe_sort.place_pairs`, which synchronises with nobody, nor does torch's.
* The roofs are those of memory, of buffers beyond any cache: a row of small results, which the cache holds in part, may
  be above them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from bench.harness import Case, Error, Provider, Rank, copy_roofs
from bench.options import DTYPES, Bench, parser, positive, positive_list, run

JOBS = ("permute", "unpermute", "plan")
_ROOF_BYTES = 64 << 20
TOLERANCES = {"fp32": 1e-6, "bf16": 1e-2}  # relative error of the result


@dataclass(frozen=True)
class PermuteCase:
    """x [tokens, hidden] in `dtype`, indices [tokens, top_k] of `experts` experts."""

    job: str
    dtype: str
    tokens: int
    hidden: int
    top_k: int
    experts: int
    calls: int = 1

    def describe(self) -> dict[str, Any]:
        without = ("dtype", "hidden") if self.job == "plan" else ()
        names = [n for n in ("job", "dtype", "tokens", "hidden", "top_k", "experts") if n not in without]
        return {name: getattr(self, name) for name in names}

    def build(self, rank: Rank) -> list[Provider]:
        problem = Problem(self, rank.device)
        if self.job == "plan":
            return problem.plan_providers()
        size = DTYPES[self.dtype].itemsize
        rows = self.tokens * self.top_k
        moved = (2 * rows if self.job == "permute" else rows + self.tokens) * self.hidden * size
        functions = problem.permutes() if self.job == "permute" else problem.unpermutes()
        providers = [
            Provider(name, kind, call, check=partial(problem.errors, call), num_bytes=float(moved))
            for name, kind, call in functions
        ]
        return [*providers, *copy_roofs(min(max(_ROOF_BYTES, rows * self.hidden * size), 256 << 20), 1, rank.device)]


class Problem:
    """The tensors of a case."""

    def __init__(self, case: PermuteCase, device: str = "cpu") -> None:
        from fastpar.ops.moe import permute as moe_rows

        generator = torch.Generator(device).manual_seed(0)
        self.case, self.ops, self.device = case, moe_rows, device
        scores = torch.rand(case.tokens, case.experts, generator=generator, device=device)
        self.indices = scores.topk(case.top_k, 1).indices
        self.weights = torch.rand(case.tokens, case.top_k, generator=generator, device=device)
        if case.job == "plan":
            return
        self.order, counts = moe_rows.sort_pairs(self.indices, case.experts)
        self.source = self.order // case.top_k
        self.slots = moe_rows.pair_slots(self.order, counts, counts.cumsum(0) - counts, self.indices.shape)
        table_rows = case.tokens if case.job == "permute" else len(self.order)
        table = torch.randn(table_rows, case.hidden, generator=generator, device=device)
        self.table = table.to(DTYPES[case.dtype])
        out_rows = len(self.order) if case.job == "permute" else case.tokens
        self.out = torch.empty(out_rows, case.hidden, dtype=self.table.dtype, device=device)

    def permutes(self) -> list[tuple[str, str, Callable[[], torch.Tensor]]]:
        gather, x, source, out = self.ops.gather_rows, self.table, self.source, self.out
        return [
            ("fastpar", "fastpar", lambda: gather([x], source)),
            ("fastpar, into a buffer", "fastpar", lambda: gather([x], source, out=out)),
            ("torch index_select", "torch", lambda: x.index_select(0, source)),
            ("torch index_select, into a buffer", "torch", lambda: torch.index_select(x, 0, source, out=out)),
        ]

    def unpermutes(self) -> list[tuple[str, str, Callable[[], torch.Tensor]]]:
        total, rows, slots, weights = self.ops.sum_rows, self.table, self.slots, self.weights
        cast = weights.to(rows.dtype)[..., None]
        sorted_weights = weights.view(-1)[self.order].to(rows.dtype)[:, None]
        return [
            ("fastpar", "fastpar", lambda: total([rows], slots, weights=weights)),
            ("fastpar, into a buffer", "fastpar", lambda: total([rows], slots, weights=weights, out=self.out)),
            ("torch gather, multiply, sum", "torch", lambda: (rows[slots] * cast).sum(1)),
            (
                "torch multiply, index_add",
                "torch",
                lambda: self.out.zero_().index_add_(0, self.source, rows * sorted_weights),
            ),
        ]

    def errors(self, call: Callable[[], torch.Tensor]) -> dict[str, Error]:
        """Relative error of the result against float64, over pieces of 64 rows (4096 on CUDA)."""
        found = call()
        deviation = size = torch.zeros((), dtype=torch.float64, device=self.device)
        for part in torch.arange(len(found), device=self.device).split(64 if self.device == "cpu" else 4096):
            if self.case.job == "permute":
                exact = self.table[self.source[part]].double()
            else:
                exact = (self.table[self.slots[part]].double() * self.weights[part].double()[..., None]).sum(1)
            deviation = deviation + (found[part].double() - exact).square().sum()
            size = size + exact.square().sum()
        return {"out": Error(float((deviation / size).sqrt()), TOLERANCES[self.case.dtype])}

    def plan_providers(self) -> list[Provider]:
        ops, indices, experts, top_k = self.ops, self.indices, self.case.experts, self.case.top_k

        def fastpar_plan() -> tuple[torch.Tensor, ...]:
            if self.device == "cuda":
                from fastpar.kernels.moe_sort import place_pairs

                placed = place_pairs(indices, experts)
                return placed.counts, placed.slots, placed.source
            order, counts = ops.sort_pairs(indices, experts)
            first = counts.cumsum(0) - counts
            runs = torch.stack([torch.zeros_like(counts), first, counts, first, torch.zeros_like(counts)], 1)
            slots = ops.pair_slots(order, counts, first, indices.shape)
            return counts, slots, ops.row_sources([order], None, runs, top_k, len(order))[0]

        def torch_plan() -> tuple[torch.Tensor, ...]:
            flat = indices.view(-1)
            order = flat.argsort(stable=True)
            slots = torch.empty_like(order)
            slots[order] = torch.arange(len(order), device=order.device)
            if self.device == "cpu":
                counts = torch.bincount(flat, minlength=experts)
            else:  # bincount would wait for the largest index
                counts = torch.zeros(experts, dtype=torch.int64, device=order.device)
                counts.scatter_add_(0, flat, torch.ones_like(flat))
            return counts, slots.view(indices.shape), order // top_k

        def check() -> dict[str, Error]:
            pairs = zip(fastpar_plan(), torch_plan(), strict=True)
            return {"plan": Error(float(sum(int((a != b).sum()) for a, b in pairs)), 0.0)}

        return [
            Provider("fastpar", "fastpar", fastpar_plan, check=check),
            Provider("torch argsort", "torch", torch_plan),
        ]


# --------------------------------------------------------------------------------------------------------------- main


def cases(flags: argparse.Namespace, world_size: int) -> Sequence[Case]:
    made = [
        PermuteCase(job, d, t, h, k, flags.experts)
        for job in flags.jobs
        if job != "plan"
        for d in flags.dtype
        for t in flags.tokens
        for h in flags.hidden
        for k in flags.top_k
    ]
    if "plan" in flags.jobs:
        made += [
            PermuteCase("plan", "fp32", t, 1, k, e)
            for t in flags.tokens
            for k in flags.top_k
            for e in sorted({flags.experts, 64, 256})
        ]
    return made


def jobs(text: str) -> list[str]:
    """Names of JOBS, separated by commas."""
    found = [part.strip() for part in text.split(",") if part.strip()]
    unknown = [name for name in found if name not in JOBS]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown job {unknown[0]!r}; choose from {', '.join(JOBS)}")
    return found


BENCH = Bench(
    name="permute",
    baselines=("torch index_select", "torch gather, multiply, sum", "torch argsort"),
    cases=cases,
    memory=False,
    quick={"tokens": [256], "hidden": [1024], "blocks": 3, "iters": 2},
    devices=("cpu", "cuda"),
)


def main(argv: Sequence[str]) -> int:
    made = parser(BENCH, "rows of tokens by expert, and back", threads=[2], ranks=[1], blocks=4, iters=4)
    made.add_argument("--jobs", type=jobs, default=list(JOBS), metavar="LIST", help=", ".join(JOBS))
    made.add_argument("--tokens", type=positive_list, default=[4096], metavar="LIST", help="rows of x")
    made.add_argument("--hidden", type=positive_list, default=[1024, 4096, 7168], metavar="LIST", help="row width")
    made.add_argument("--top-k", type=positive_list, default=[2, 8], metavar="LIST", help="choices of a token")
    made.add_argument("--experts", type=positive, default=64, help="number of experts")
    return run(BENCH, made.parse_args(argv), ["fastpar", "bench", "permute", *argv])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
