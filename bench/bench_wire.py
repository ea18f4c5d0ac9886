"""Gradients reduced in several wire formats between CPU ranks: over shared memory, and over gloo's sockets.

    fastpar bench wire [--quick] [--ops reduce_scatter,all_reduce] [--bytes 1M,16M,64M] [--ranks 2,4]

What is timed: one blocking reduction ("avg") of a flat float32 gradient of `bytes`, by the slowest rank. The providers:

    plain, cast bf16,          the wires of fastpar.comm over shared memory, where a wire is as fast as memory, and a
    int8, float8               format is work that saves nothing
    ..., over gloo             the same over sockets: not a network, but bytes cost something
    gloo fp32, gloo bf16       torch.distributed's own; bf16 as DDP's bf16_compress_hook does it: cast, add, cast back
    int8, kernel alone, ...    quantising `bytes` and nothing else

Memory traffic model, all ranks together, every gradient read and every result written once: reduce_scatter W n + n,
all_reduce 2 W n; a kernel alone reads n and writes 65/256 n on every rank.

Traps besides those of `bench.harness`:

* A format is checked against the sum that its rounding allows, so a provider that sent something narrower would fail.
* gloo has no reduce_scatter that is worth timing (it is an all_reduce): its rows are all_reduce only.
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
from bench.options import Bench, parser, run
from fastpar.comm import BlockWire, CastWire, Communicator, PlainWire, Wire

OPS = ("reduce_scatter", "all_reduce")
BLOCK = 256
# Of the largest element: float32's own, half a unit of bfloat16, half a step of int8 (1/254), 1/16 of an element.
TOLERANCES = {"plain": 1e-6, "cast bf16": 2.0**-9, "int8": 1 / 250, "float8": 1 / 16, "gloo fp32": 1e-6}
TOLERANCES["gloo bf16"] = 2.0**-6  # rounded at every hop


def wires() -> dict[str, Wire]:
    return {
        "plain": PlainWire(),
        "cast bf16": CastWire(torch.bfloat16),
        "int8": BlockWire("int8", BLOCK),
        "float8": BlockWire("float8_e4m3fn", BLOCK),
    }


@dataclass(frozen=True)
class WireCase:
    """One reduction of `num_bytes` of float32 on `ranks` ranks."""

    op: str
    num_bytes: int
    ranks: int

    @property
    def calls(self) -> int:
        return 10 if self.num_bytes <= 1 << 18 else 1

    def describe(self) -> dict[str, Any]:
        return {"op": self.op, "bytes": self.num_bytes, "dtype": "fp32"}

    def build(self, rank: Rank) -> list[Provider]:
        return [*Problem(self, rank).providers(), *copy_roofs(max(self.num_bytes, 1 << 16), rank.world_size)]


class Problem:
    """The gradient of a case on one rank, which every rank can compute for all, and its providers."""

    def __init__(self, case: WireCase, rank: Rank) -> None:
        self.case, self.rank, self.size = case, rank.rank, rank.world_size
        group = rank.group or dist.group.WORLD
        self.numel = case.num_bytes // 4 // self.size // BLOCK * self.size * BLOCK
        self.x = self.gradient_of(rank.rank)
        self.shared, self.gloo = Communicator(group), Communicator(group, transport="torch")

    def gradient_of(self, rank: int) -> Tensor:
        return torch.sin(torch.arange(self.numel, dtype=torch.float32) * (0.37 + rank)) / 8

    def providers(self) -> list[Provider]:
        made = []
        for where, comm in (("", self.shared), (", over gloo", self.gloo)):
            made += [
                self.provider(name + where, "fastpar", partial(self.reduce, w, comm)) for name, w in wires().items()
            ]
        if self.case.op == "all_reduce":
            made.append(self.provider("gloo fp32", "torch", partial(self.gloo_all_reduce, torch.float32)))
            made.append(self.provider("gloo bf16", "torch", partial(self.gloo_all_reduce, torch.bfloat16)))
        for name in ("int8", "float8"):
            wire = wires()[name]
            assert isinstance(wire, BlockWire)
            made.append(self.kernel(f"{name}, kernel alone", wire))
        return made

    def provider(self, name: str, kind: str, call: Callable[[], Tensor]) -> Provider:
        outputs = self.size if self.case.op == "all_reduce" else 1
        moved = float((self.size + outputs) * self.case.num_bytes)
        return Provider(name, kind, call=call, check=partial(self.errors, name, call), num_bytes=moved)

    def kernel(self, name: str, wire: BlockWire) -> Provider:
        def call() -> Tensor:
            return wire.codes.quantize(self.x, [self.numel], seed=None, residual=None)

        def check() -> dict[str, Error]:
            off = (wire.codes.dequantize(call(), [self.numel]) - self.x).abs().max().item()
            return {"values": Error(off, TOLERANCES[name.split(",")[0]] / 8)}

        moved = self.size * self.case.num_bytes * (1 + 65 / 256)
        return Provider(name, "fastpar", call=call, check=check, num_bytes=moved)

    def reduce(self, wire: Wire, comm: Communicator) -> Tensor:
        if self.case.op == "all_reduce":
            return wire.all_reduce(comm, self.x)
        return wire.reduce_scatter(comm, self.x)

    def gloo_all_reduce(self, dtype: torch.dtype) -> Tensor:
        sent = self.x.to(dtype, copy=True).div_(self.size)
        dist.all_reduce(sent)
        return sent.float()

    def errors(self, name: str, call: Callable[[], Tensor]) -> dict[str, Error]:
        wanted = torch.stack([self.gradient_of(rank).double() for rank in range(self.size)]).mean(0)
        if self.case.op == "reduce_scatter":
            wanted = wanted.chunk(self.size)[self.rank]
        found = call()
        format = name.split(",")[0]
        # What the ranks send is rounded, from at most 1/8; so are results, where they travel as blocks.
        roundings = 2 if self.case.op == "all_reduce" and format in ("int8", "float8") else 1
        off = (found.double() - wanted).abs().max().item()
        return {"gradient": Error(off, roundings * TOLERANCES[format] / 8)}


def cases(flags: argparse.Namespace, world_size: int) -> Sequence[Case]:
    return [WireCase(op, n, world_size) for op in flags.ops for n in flags.bytes] if world_size > 1 else []


BENCH = Bench(
    name="wire",
    baselines=("gloo fp32",),
    cases=cases,
    memory=False,
    quick={"bytes": [1 << 20], "ranks": [2], "blocks": 3, "iters": 2},
)


def operations(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in OPS]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown {', '.join(unknown)}; choose from {', '.join(OPS)}")
    return names


def main(argv: Sequence[str]) -> int:
    made = parser(BENCH, "gradients reduced in several wire formats", ranks=[2, 4], dtype=["fp32"])
    made.set_defaults(blocks=7, iters=3)
    made.add_argument("--ops", type=operations, default=list(OPS), metavar="LIST", help=", ".join(OPS))
    made.add_argument("--bytes", type=sizes, default="1M,16M,64M", metavar="LIST", help="of the gradient")
    return run(BENCH, made.parse_args(argv), ["fastpar", "bench", "wire", *argv])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
