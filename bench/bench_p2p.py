"""Messages between two CPU ranks of one host, called from Python: fastpar's PointToPoint against gloo's send and recv.

    fastpar bench p2p [--quick] [--bytes 4K,64K,1M,16M] [--dtype fp32]

What is timed: a round trip, from rank 0's send of one flat tensor to its return, so twice a send and a recv. Half of it
is what a message costs between two stages of a pipeline that both wait for it. The providers:

    fastpar                    what is received lies where it was sent
    fastpar, new copy          and is copied into a new tensor, as a receiver that returns no views would have to
    fastpar, kept buffer       or into one that exists already
    fastpar over gloo          the same object with transport="torch"
    gloo                       torch.distributed.send and recv, into a tensor that exists already, its shape known

Memory traffic model: the message read and written once, each way: 4 n bytes.

Traps besides those of `bench.harness`:

* gloo's recv has to know the shape, and needs a tensor to receive into; fastpar's has neither. Both ranks wait in every
  provider alike.
* A round trip never has two messages under way: the next one always finds the memory of the one before.
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
from torch import Tensor

from bench.bench_comm import sizes
from bench.harness import Case, Error, Provider, Rank, copy_roofs
from bench.options import DTYPES, Bench, parser, run
from fastpar.comm import PointToPoint


@dataclass(frozen=True)
class P2PCase:
    """A round trip of `num_bytes`."""

    num_bytes: int
    dtype: str

    @property
    def calls(self) -> int:
        return 50 if self.num_bytes <= 1 << 16 else 10 if self.num_bytes <= 1 << 20 else 1

    def describe(self) -> dict[str, Any]:
        return {"op": "round trip", "bytes": self.num_bytes, "dtype": self.dtype}

    def build(self, rank: Rank) -> list[Provider]:
        return [*Problem(self, rank).providers(), *copy_roofs(max(self.num_bytes, 1 << 16), rank.world_size)]


class Problem:
    """The tensors of a case on one rank, and its providers. Rank 1 sends back what it receives."""

    def __init__(self, case: P2PCase, rank: Rank) -> None:
        self.case, self.rank, self.peer = case, rank.rank, 1 - rank.rank
        group = rank.group or dist.group.WORLD
        numel = case.num_bytes // DTYPES[case.dtype].itemsize
        self.x = (torch.arange(numel) % 251 - 100).to(DTYPES[case.dtype])
        self.buffer = torch.empty_like(self.x)
        self.shared = PointToPoint(group)
        self.gloo = PointToPoint(group, transport="torch")

    def providers(self) -> list[Provider]:
        made: list[tuple[str, str, Callable[[], Tensor]]] = [
            ("fastpar", "fastpar", partial(self.round_trip, self.shared, lambda x: x)),
            ("fastpar, new copy", "fastpar", partial(self.round_trip, self.shared, Tensor.clone)),
            ("fastpar, kept buffer", "fastpar", partial(self.round_trip, self.shared, self.buffer.copy_)),
            ("fastpar over gloo", "fastpar", partial(self.round_trip, self.gloo, lambda x: x)),
            ("gloo", "torch", self.torch_round_trip),
        ]
        return [
            Provider(name, kind, call=call, check=partial(self.errors, call), num_bytes=4.0 * self.case.num_bytes)
            for name, kind, call in made
        ]

    def round_trip(self, p2p: PointToPoint, take: Callable[[Tensor], Tensor]) -> Tensor:
        if self.rank == 0:
            p2p.send(1, 0, [self.x])
            return take(p2p.recv(1, 0)[0][0])
        received = take(p2p.recv(0, 0)[0][0])
        p2p.send(0, 0, [received])
        return received

    def torch_round_trip(self) -> Tensor:
        if self.rank == 0:
            dist.send(self.x, 1)
            dist.recv(self.buffer, 1)
        else:
            dist.recv(self.buffer, 0)
            dist.send(self.buffer, 0)
        return self.buffer

    def errors(self, call: Callable[[], Tensor]) -> dict[str, Error]:
        return {"message": Error(0.0 if torch.equal(call(), self.x) else 1.0, 0.0)}


def cases(flags: argparse.Namespace, world_size: int) -> Sequence[Case]:
    return [P2PCase(n, dtype) for dtype in flags.dtype for n in flags.bytes] if world_size == 2 else []


BENCH = Bench(
    name="p2p",
    baselines=("gloo", "fastpar"),
    cases=cases,
    memory=False,
    quick={"bytes": [4096, 1 << 20], "ranks": [2], "blocks": 3, "iters": 2},
)


def main(argv: Sequence[str]) -> int:
    made = parser(BENCH, "messages between two CPU ranks of one host", ranks=[2], dtype=["fp32"], blocks=7, iters=3)
    made.add_argument("--bytes", type=sizes, default="4K,64K,1M,16M", metavar="LIST", help="of the message")
    return run(BENCH, made.parse_args(argv), ["fastpar", "bench", "p2p", *argv])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
