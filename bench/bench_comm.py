"""Collectives between CPU ranks of one host, called from Python: fastpar over shared memory against gloo.

    fastpar bench comm [--quick] [--ops all_reduce,...] [--bytes 4K,64K,1M,16M,64M] [--ranks 2,4] [--dtype fp32]

What is timed: one blocking collective on one flat tensor, from the call to the result, by the slowest rank. `bytes` is
the larger of input and output of one rank: x of all_reduce, broadcast, all_to_all and reduce_scatter, the result of
all_gather; a barrier has none. The providers:

    fastpar                  a new result (all_reduce: out=x)
    fastpar, new output      all_reduce without out=
    fastpar, background      `_async(...).wait()`: the group's thread does the work
    fastpar, in a region     x lies in a `SharedRegion`, which the other ranks read where it is
    fastpar, C call          the C function alone, arguments ready: what is left of "fastpar" is the cost of Python
    fastpar over gloo        the same Communicator with transport="torch"
    gloo                     torch.distributed's own call, into tensors that exist already
    deepspeed                its shared-memory all_reduce (it has no other collective), where it is installed

Memory traffic model, all ranks together, n = bytes, W = ranks, every input read and every output written once:

    all_reduce 2 W n, all_to_all 2 W n, all_gather n + W n, reduce_scatter W n + n, broadcast n + W n

A collective moves more than that (through the shared buffers, or sockets), so the column "of roof" compares rates; it
is not a fraction that could reach 1.

Traps besides those of `bench.harness`:

* The barrier before a sample lets ranks go one after another, by up to a scheduler's time slice where ranks outnumber
  cores. A sample is therefore many calls of a short collective, and what is divided out is not the first one's wait.
* In back-to-back calls a rank that finishes first starts the next call at once, and its data is in a cache. So it is in
  a training step, where a collective follows the kernel that made its input.
* all_reduce with out=x doubles its values at every call: `prepare` restores them before a sample.
* gloo pairs start slowly; the check of every provider is also its first call.
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

from bench.harness import Case, Error, Provider, Rank, absent, copy_roofs
from bench.options import DTYPES, Bench, parser, run
from bench.peers import deepspeed_all_reduce, find
from fastpar.comm import Communicator
from fastpar.comm.shared_memory.region import SharedRegion

OPS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "barrier")
TOLERANCES = {"fp32": 1e-6, "bf16": 1e-2}  # of sums of up to 8 values, in the L2 norm; copies have to be exact


@dataclass(frozen=True)
class CommCase:
    """One collective of `num_bytes` (see the module docstring) between `ranks` ranks."""

    op: str
    num_bytes: int
    dtype: str
    ranks: int

    @property
    def calls(self) -> int:
        if self.num_bytes > 1 << 20:
            return 1
        return 40 if self.ranks == 2 and self.num_bytes <= 1 << 16 else 10

    def describe(self) -> dict[str, Any]:
        return {"op": self.op, "bytes": self.num_bytes, "dtype": self.dtype}

    def build(self, rank: Rank) -> list[Provider]:
        problem = Problem(self, rank)
        made = [problem.provider(name, kind, call) for name, kind, call in problem.calls()]
        return [*made, *problem.peers(), *copy_roofs(max(self.num_bytes, 1 << 16), rank.world_size)]


class Problem:
    """The tensors of a case on one rank, and its providers.

    Inputs are small whole numbers, which every rank can compute for all.
    """

    def __init__(self, case: CommCase, rank: Rank) -> None:
        self.case, self.rank, self.size = case, rank.rank, rank.world_size
        self.dtype = DTYPES[case.dtype]
        self.comm = Communicator(rank.group)
        numel = case.num_bytes // self.dtype.itemsize // self.size * self.size
        self.part = numel // self.size
        self.numel = self.part if case.op == "all_gather" else numel
        self.x = self.input_of(rank.rank)
        self.out = torch.empty(numel if case.op == "all_gather" else self.numel, dtype=self.dtype)
        self.out_part = torch.empty(self.part, dtype=self.dtype)
        self.region: SharedRegion | None = None

    def input_of(self, rank: int) -> Tensor:
        return ((torch.arange(self.numel) * (rank + 3)) % 11 - 5).to(self.dtype)

    def expected(self) -> Tensor:
        """What this rank must end up with, from everybody's inputs."""
        inputs = [self.input_of(rank) for rank in range(self.size)]
        if self.case.op == "all_gather":
            return torch.cat(inputs)
        if self.case.op == "broadcast":
            return inputs[0]
        if self.case.op == "all_to_all":
            return torch.cat([x.chunk(self.size)[self.rank] for x in inputs])
        total = torch.stack(inputs).double().sum(0)
        return total if self.case.op == "all_reduce" else total.chunk(self.size)[self.rank]

    # ---- providers

    def provider(self, name: str, kind: str, call: Callable[[], Any], x: Tensor | None = None) -> Provider:
        traffic = {"all_reduce": 2 * self.size, "all_to_all": 2 * self.size, "barrier": 0}
        return Provider(
            name,
            kind,
            call=call,
            check=partial(self.errors, call),
            prepare=partial(self.restore, self.x if x is None else x),
            num_bytes=float(self.case.num_bytes * traffic.get(self.case.op, 1 + self.size)),
        )

    def restore(self, x: Tensor) -> None:
        if self.case.op == "all_reduce":
            x.copy_(self.input_of(self.rank))

    def errors(self, call: Callable[[], Any]) -> dict[str, Error]:
        found = call()
        if self.case.op == "barrier":
            return {}
        wanted = self.expected().double()
        size = float(wanted.norm()) or 1.0
        is_sum = self.case.op in ("all_reduce", "reduce_scatter")
        tolerance = TOLERANCES[self.case.dtype] if is_sum else 0.0
        return {self.case.op: Error(float((found.double() - wanted).norm()) / size, tolerance)}

    def calls(self) -> list[tuple[str, str, Callable[[], Any]]]:
        op, x = self.case.op, self.x
        gloo = Communicator(self.comm.group, transport="torch")
        made = [
            ("fastpar", "fastpar", self.blocking(self.comm, x)),
            ("fastpar, background", "fastpar", self.background(x)),
            ("fastpar over gloo", "fastpar", self.blocking(gloo, x)),
            ("gloo", "torch", self.torch_call(x)),
        ]
        if op == "all_reduce":
            made.insert(1, ("fastpar, new output", "fastpar", lambda: self.comm.all_reduce(x)))
            made.insert(2, ("fastpar, C call", "fastpar", self.c_call(x)))
        return made

    def peers(self) -> list[Provider]:
        """Providers with an input of their own, and those that may be absent."""
        made = []
        if self.case.op in ("all_reduce", "reduce_scatter", "all_gather"):
            # Rounded up, as an allocator of buckets would; every case has a region of its own.
            self.region = SharedRegion(self.comm, max(4096, self.x.nbytes))
            inside = self.region.tensor((self.numel,), self.dtype)
            inside.copy_(self.x)
            made.append(self.provider("fastpar, in a region", "fastpar", self.blocking(self.comm, inside), inside))
        if self.case.op == "all_reduce" and self.comm.group is not None:
            reduce = find(partial(deepspeed_all_reduce, self.comm.group))
            if isinstance(reduce, str):
                made.append(absent("deepspeed", reduce))
            else:
                x, all_reduce = self.x, reduce
                made.append(self.provider("deepspeed", "torch", lambda: all_reduce(x)))
        return made

    def blocking(self, comm: Communicator, x: Tensor) -> Callable[[], Any]:
        if self.case.op == "all_reduce":
            return lambda: comm.all_reduce(x, out=x)
        if self.case.op == "barrier":
            return comm.barrier
        return partial(getattr(comm, self.case.op), x)

    def background(self, x: Tensor) -> Callable[[], Any]:
        comm = self.comm
        if self.case.op == "all_reduce":
            return lambda: comm.all_reduce_async(x, out=x).wait()
        if self.case.op == "barrier":
            return lambda: comm.barrier_async().wait()
        launch = getattr(comm, f"{self.case.op}_async")
        return lambda: launch(x).wait()

    def c_call(self, x: Tensor) -> Callable[[], Tensor]:
        """all_reduce out=x, as `fastpar.comm.shared_memory.transport` calls it."""
        world = self.comm.local_world()
        if world is None:
            raise RuntimeError("the ranks do not share memory")
        scalar_type = {"fp32": 6, "bf16": 15}[self.case.dtype]
        arguments = (scalar_type << 8, x.itemsize, x.data_ptr(), x.data_ptr(), x.numel(), None, None, 60.0)

        def call() -> Tensor:
            world.run(*arguments)
            return x

        return call

    def torch_call(self, x: Tensor) -> Callable[[], Any]:
        """As a user of torch.distributed writes it: outputs are made once."""
        op, out, part, group = self.case.op, self.out, self.out_part, self.comm.group
        # torch 2.13 renamed these two.
        gather_into: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        scatter_into: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

        def all_reduce() -> Tensor:
            dist.all_reduce(x, group=group)
            return x

        def reduce_scatter() -> Tensor:
            scatter_into(part, x, group=group)
            return part

        def all_gather() -> Tensor:
            gather_into(out, x, group=group)
            return out

        def all_to_all() -> Tensor:
            dist.all_to_all_single(out, x, group=group)
            return out

        def broadcast() -> Tensor:
            if self.rank == 0:
                out.copy_(x)
            dist.broadcast(out, 0, group=group)
            return out

        def barrier() -> None:
            dist.barrier(group=group)

        made: dict[str, Callable[[], Any]] = {
            function.__name__: function
            for function in (all_reduce, reduce_scatter, all_gather, all_to_all, broadcast, barrier)
        }
        return made[op]


# --------------------------------------------------------------------------------------------------------------- main


def sizes(text: str) -> list[int]:
    """4K,1M -> bytes."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    found = []
    for part in text.upper().split(","):
        number, unit = (part[:-1], units[part[-1]]) if part[-1:] in units else (part, 1)
        if not number.isdigit() or int(number) < 1:
            raise argparse.ArgumentTypeError(f"{part!r} is not a size like 4096, 4K or 1M")
        found.append(int(number) * unit)
    return found


def ops(text: str) -> list[str]:
    found = text.split(",")
    for op in found:
        if op not in OPS:
            raise argparse.ArgumentTypeError(f"unknown collective {op!r}; choose from {', '.join(OPS)}")
    return found


def cases(flags: argparse.Namespace, world_size: int) -> Sequence[Case]:
    if world_size == 1:
        return []
    made = []
    for op in flags.ops:
        for dtype in flags.dtype[:1] if op == "barrier" else flags.dtype:
            made += [CommCase(op, n, dtype, world_size) for n in ([0] if op == "barrier" else flags.bytes)]
    return made


BENCH = Bench(
    name="comm",
    baselines=("gloo", "fastpar"),
    cases=cases,
    memory=False,
    quick={"bytes": [4096, 1 << 20], "ops": ["all_reduce", "all_gather"], "ranks": [2], "blocks": 3, "iters": 2},
)


def main(argv: Sequence[str]) -> int:
    made = parser(BENCH, "collectives between CPU ranks of one host", ranks=[2, 4], dtype=["fp32"], blocks=7, iters=3)
    default = "4K,64K,1M,16M,64M"
    made.add_argument("--bytes", type=sizes, default=default, metavar="LIST", help="the larger of input and output")
    made.add_argument("--ops", type=ops, default=",".join(OPS), metavar="LIST", help="collectives")
    return run(BENCH, made.parse_args(argv), ["fastpar", "bench", "comm", *argv])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
