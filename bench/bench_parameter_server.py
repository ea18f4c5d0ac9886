"""One step of data parallelism with a parameter server against the same step with collectives, between CPU ranks.

    fastpar bench parameter_server [--quick] [--bytes 1M,16M,64M] [--ranks 2,3,4]

What is timed: from gradients of `bytes` on every worker to updated parameters on every worker (SGD; nothing else is
computed), by the slowest rank. Of W ranks:

    parameter server           rank 0 serves the W - 1 others: they push gradients and pull parameters
    all_reduce, W - 1 ranks    the same workers without a server, which every one of them updates alike; rank 0 is idle
    all_reduce, W ranks        rank 0 is a worker too
    reduce_scatter, W ranks    the same, where each rank updates its part, and parts are gathered (ZeRO-1)

Bytes that the busiest rank sends and receives, n = bytes, N workers: server 2 N n; all_reduce 4 n (N - 1) / N, and so
reduce_scatter with all_gather. Memory traffic model, all ranks together, every gradient read and every worker's
parameters read and written once: 3 N n.

Traps besides those of `bench.harness`:

* With a server, one rank less works. Rows with the same number of workers compare the communication, rows with the same
  number of ranks what one gets for a machine.
* Gradients are the same tensors in every call, so they are in a cache where they fit; as they are in training for the
  layers whose backward came last.
* Parameters start anew in every check, and drift while timed: values do not matter to the time.
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
from torch import Tensor, nn

from bench.bench_comm import sizes
from bench.harness import Case, Error, Provider, Rank, copy_roofs
from bench.options import DTYPES, Bench, parser, run
from fastpar.comm import Communicator
from fastpar.zero.parameter_server import ParameterServer, Worker

LR = 0.5


@dataclass(frozen=True)
class ServerCase:
    """A step of `num_bytes` of parameters on `ranks` ranks."""

    num_bytes: int
    dtype: str
    ranks: int

    @property
    def calls(self) -> int:
        return 10 if self.num_bytes <= 1 << 16 else 1

    def describe(self) -> dict[str, Any]:
        return {"op": "step", "bytes": self.num_bytes, "dtype": self.dtype}

    def build(self, rank: Rank) -> list[Provider]:
        return [*Problem(self, rank).providers(), *copy_roofs(max(self.num_bytes, 1 << 16), rank.world_size)]


class Problem:
    """The tensors of a case on one rank, and its providers. Gradients are whole numbers that every rank knows."""

    def __init__(self, case: ServerCase, rank: Rank) -> None:
        self.case, self.rank, self.size = case, rank.rank, rank.world_size
        group = rank.group or dist.group.WORLD
        assert group is not None
        dtype = DTYPES[case.dtype]
        self.numel = case.num_bytes // dtype.itemsize // self.size * self.size
        self.parameter = nn.Parameter(torch.zeros(self.numel, dtype=dtype))
        self.gradient = self.gradient_of(rank.rank)
        self.all_ranks = Communicator(group)
        others = dist.new_group(list(range(1, self.size)))
        self.others = Communicator(others) if self.rank else None
        optimizer = torch.optim.SGD([self.parameter], lr=LR)
        self.server = ParameterServer([self.parameter], optimizer, group=group) if self.rank == 0 else None
        self.worker = Worker([self.parameter], group=group) if self.rank else None
        if self.server is not None:
            self.server.greet()

    def gradient_of(self, rank: int) -> Tensor:
        return ((torch.arange(self.numel) + rank) % 7 - 3).to(self.parameter.dtype)

    def providers(self) -> list[Provider]:
        everybody = range(self.size)
        made: list[tuple[str, Callable[[], None], range]] = [
            ("parameter server", self.serve, everybody[1:]),
            (f"all_reduce, {self.size - 1} ranks", partial(self.all_reduce, self.others), everybody[1:]),
            (f"all_reduce, {self.size} ranks", partial(self.all_reduce, self.all_ranks), everybody),
            (f"reduce_scatter, {self.size} ranks", self.reduce_scatter, everybody),
        ]
        return [
            Provider(
                name,
                "torch" if name == "parameter server" else "fastpar",  # the peer that ratios refer to
                call=call,
                check=partial(self.errors, call, workers),
                num_bytes=3.0 * len(workers) * self.case.num_bytes,
            )
            for name, call, workers in made
        ]

    def serve(self) -> None:
        if self.server is not None:
            self.server.step()
        if self.worker is not None:
            self.parameter.grad = self.gradient
            self.worker.step()

    @torch.no_grad()
    def all_reduce(self, comm: Communicator | None) -> None:
        if comm is not None:
            self.parameter.sub_(comm.all_reduce(self.gradient, "avg"), alpha=LR)

    @torch.no_grad()
    def reduce_scatter(self) -> None:
        part = self.all_ranks.reduce_scatter(self.gradient, "avg")
        mine = self.parameter.view(self.size, -1)[self.rank]
        mine.sub_(part, alpha=LR)
        self.parameter.copy_(self.all_ranks.all_gather(mine))

    def errors(self, call: Callable[[], None], workers: range) -> dict[str, Error]:
        with torch.no_grad():
            self.parameter.zero_()
        call()
        if self.rank not in workers:
            return {}
        mean = torch.stack([self.gradient_of(rank).double() for rank in workers]).mean(0)
        off = (self.parameter.detach().double() + LR * mean).abs().max().item()
        return {"parameters": Error(off, 1e-6 if self.case.dtype == "fp32" else 1e-2)}


def cases(flags: argparse.Namespace, world_size: int) -> Sequence[Case]:
    return [ServerCase(n, dtype, world_size) for dtype in flags.dtype for n in flags.bytes] if world_size > 1 else []


BENCH = Bench(
    name="parameter_server",
    baselines=("parameter server",),
    cases=cases,
    memory=False,
    quick={"bytes": [1 << 20], "ranks": [2, 3], "blocks": 3, "iters": 2},
)


def main(argv: Sequence[str]) -> int:
    made = parser(BENCH, "a step with a parameter server, and with collectives", ranks=[2, 3, 4], dtype=["fp32"])
    made.set_defaults(blocks=7, iters=3)
    made.add_argument("--bytes", type=sizes, default="1M,16M,64M", metavar="LIST", help="of the parameters")
    return run(BENCH, made.parse_args(argv), ["fastpar", "bench", "parameter_server", *argv])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
