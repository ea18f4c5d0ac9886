"""All-reduce over symmetric memory, with all ranks on one GPU: what the exchange itself costs, in a CUDA graph.

    fastpar bench symmetric --device cuda [--virtual-ranks 2,4,8] [--kib 1,16,64,1024,16384] [--norm]

The ranks are parts of one grid (`fastpar.comm.SymmetricCollectives.virtual`), and their kernels are those of real
ranks: a block pushes into the others' inboxes, signals, waits, and adds. "Links" are this device's L2 cache and memory,
so bandwidth says nothing about NVLink; latency is that of the protocol and of its memory traffic on one device.

What is timed: one replay of a CUDA graph of CALLS all-reduces, each waiting for the one before, divided by CALLS.

Bytes model, of all W ranks: mailbox and one_shot write W (W - 1) N to inboxes and read them, read x and write the sum;
two_shot moves 2 (W - 1) N through inboxes each way.

    mailbox, one_shot   2 W N + 2 W (W - 1) N          two_shot   2 W N + 4 (W - 1) N

Traps besides those of `bench.harness`:

* A launch from Python costs more than the exchange: hence the graph. A row is one call of CALLS in it.
* Warm caches are the truth here: what is exchanged was written a moment ago. Use the setting "hot" to leave the flush
  out; either way only the first call of a graph finds cold caches.
* "bound: local sum" adds the same tensors without any exchange, in the same graph: no protocol can be faster by much.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bench.harness import Case, Error, Provider, Rank, copy_roofs
from bench.options import DTYPES, Bench, parser, positive_list, run

CALLS = 50  # in a graph


@dataclass(frozen=True)
class SymmetricCase:
    """x [virtual_ranks, kib KiB of dtype]; `norm`: followed by residual and RMSNorm over rows of 4096 elements."""

    dtype: str
    kib: int
    virtual_ranks: int
    norm: bool = False
    calls: int = CALLS

    def describe(self) -> dict[str, Any]:
        found = {"dtype": self.dtype, "KiB": self.kib, "virtual ranks": self.virtual_ranks}
        return {**found, "rms_norm": True} if self.norm else found

    def build(self, rank: Rank) -> list[Provider]:
        problem = Problem(self, rank.device)
        ranks, nbytes = self.virtual_ranks, self.kib << 10
        kept = 2 * ranks * nbytes
        one_exchange = kept + 2 * ranks * (ranks - 1) * nbytes
        two_exchanges = kept + 4 * (ranks - 1) * nbytes
        if self.norm:
            plain = problem.provider(
                "fastpar all_reduce, then RMSNorm", "torch", problem.reduce_then_norm, one_exchange
            )
            return [problem.provider("fastpar all_reduce_rms_norm", "fastpar", problem.norm, one_exchange), plain]
        providers = [
            problem.provider(f"fastpar {algorithm}", "fastpar", problem.all_reduce(algorithm), traffic)
            for algorithm, traffic in (
                ("auto", one_exchange),
                ("mailbox", one_exchange),
                ("one_shot", one_exchange),
                ("two_shot", two_exchanges),
            )
        ]
        bound = problem.provider("bound: local sum", "bound", problem.local_sum, (ranks + 1) * nbytes)
        return [*providers, bound, *copy_roofs(nbytes, 1, rank.device)]


class Problem:
    """The tensors of a case, and graphs over them."""

    def __init__(self, case: SymmetricCase, device: str) -> None:
        from fastpar.comm.symmetric.collectives import SymmetricCollectives

        self.case, dtype = case, DTYPES[case.dtype]
        count = (case.kib << 10) // dtype.itemsize
        hidden = min(4096, count)
        shape = (case.virtual_ranks, count // hidden, hidden) if case.norm else (case.virtual_ranks, count)
        generator = torch.Generator(device).manual_seed(0)
        self.x = torch.randn(*shape, generator=generator, device=device).to(dtype)
        self.residual, self.out = torch.ones_like(self.x), torch.empty_like(self.x)
        self.weight = torch.ones(hidden, dtype=dtype, device=device)
        self.group = SymmetricCollectives.virtual(case.virtual_ranks, device, timeout=20.0)
        self._exact: tuple[torch.Tensor, torch.Tensor] | None = None

    # ---- what is captured; each returns [ranks, ...]

    def all_reduce(self, algorithm: str) -> Callable[[], torch.Tensor]:
        return lambda: self.group.all_reduce(self.x, out=self.out, algorithm=algorithm)

    def local_sum(self) -> torch.Tensor:
        torch.sum(self.x, dim=0, out=self.out[0])
        return self.out[:1]

    def norm(self) -> torch.Tensor:
        return self.group.all_reduce_rms_norm(self.x, self.weight, residual=self.residual)[1]

    def reduce_then_norm(self) -> torch.Tensor:
        from fastpar.ops import add_rms_norm

        self.group.all_reduce(self.x, out=self.out)
        return add_rms_norm(self.out, self.residual, self.weight)[1]

    def provider(self, name: str, kind: str, function: Callable[[], torch.Tensor], num_bytes: float) -> Provider:
        graph = Graph(function, self.case.calls)
        return Provider(name, kind, call=graph, check=lambda: self.errors(graph), num_bytes=num_bytes)

    def errors(self, graph: Graph) -> dict[str, Error]:
        """Largest error of a sum relative to the sum of absolute values."""
        exact, scale = self.exact()
        found = graph.result().double()
        self.group.check()
        # one rounding of the sum (and one of the residual), and the additions in float32
        tolerance = (2 + self.case.virtual_ranks / 2) * torch.finfo(DTYPES[self.case.dtype]).eps
        return {"sum": Error(float(((found - exact).abs() / scale).max()), tolerance)}

    def exact(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum and the sum of absolute values in float64; computed once, before a kernel has had x."""
        if self._exact is None:
            wide = self.x.double()
            residual = 1.0 if self.case.norm else 0.0
            self._exact = wide.sum(0) + residual, wide.abs().sum(0) + residual
        return self._exact


class Graph:
    """A CUDA graph of `calls` calls, replayed at every `calls`-th call of this object: the harness divides by them."""

    def __init__(self, function: Callable[[], torch.Tensor], calls: int) -> None:
        self._function, self._calls, self._called = function, calls, 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: torch.Tensor | None = None

    def __call__(self) -> None:
        self._called += 1
        if self._called % self._calls == 0:
            self._captured().replay()

    def result(self) -> torch.Tensor:
        self._captured().replay()
        assert self._result is not None
        return self._result

    def _captured(self) -> torch.cuda.CUDAGraph:
        if self._graph is None:
            for _ in range(3):  # what is compiled or loaded on first use
                self._function()
            torch.cuda.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                for _ in range(self._calls):
                    self._result = self._function()
        return self._graph


# --------------------------------------------------------------------------------------------------------------- main


def cases(flags: argparse.Namespace, world_size: int) -> Sequence[Case]:
    return [
        SymmetricCase(d, kib, ranks, flags.norm)
        for d in flags.dtype
        for ranks in flags.virtual_ranks
        for kib in flags.kib
    ]


BENCH = Bench(
    name="symmetric",
    baselines=("bound: local sum", "fastpar all_reduce, then RMSNorm"),
    cases=cases,
    memory=False,
    quick={"kib": [16], "virtual_ranks": [2], "blocks": 2, "iters": 2},
    devices=("cuda",),
)


def main(argv: Sequence[str]) -> int:
    made = parser(BENCH, "all-reduce of virtual ranks on one GPU", ranks=[1], dtype=["bf16"], blocks=5, iters=4)
    made.add_argument(
        "--virtual-ranks", type=positive_list, default=[2, 4, 8], metavar="LIST", help="ranks of the grid"
    )
    made.add_argument(
        "--kib", type=positive_list, default=[1, 16, 64, 1024, 16384], metavar="LIST", help="of each rank"
    )
    made.add_argument("--norm", action="store_true", help="all-reduce with residual and RMSNorm instead")
    flags = made.parse_args(argv)
    if flags.device == "cpu":  # `fastpar bench` without a name runs them all
        print("fastpar bench symmetric: nothing to measure on the CPU; give --device cuda", file=sys.stderr)
        return 0
    return run(BENCH, flags, ["fastpar", "bench", "symmetric", *argv])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
