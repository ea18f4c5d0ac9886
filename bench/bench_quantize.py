"""Blocks of 8-bit codes: quantisation and back.

    fastpar bench quantize [--quick] [--tokens 4096] [--columns 4096] [--block 128] [--format float8_e4m3fn,int8]

What is timed: ``codes, scales = quantize(x)`` and ``dequantize(codes, scales)``, to x's dtype; x [tokens, columns]. One
process: the ops have no collective.

Bytes model (least traffic of the two calls), per element: x is read, a code written and read, the value written,

    2 * element size + 2

The scales, 4 bytes a block, are left out. Memory bound that fastpar claims: codes, scales and values.

Traps besides those of `bench.harness`:

* Peers write the same layout, and their scales are the same float32 numbers; `to(torch.float8_e4m3fn)` rounds to
  nearest even, as fastpar does.
* Errors are relative to the largest element of a block, whose bound the format sets: a peer that skips the scales would
  show.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from bench.harness import Case, Error, Provider, Rank, copy_roofs
from bench.options import DTYPES, Bench, parser, positive_list, run

# (x, block, format) -> values
RoundTrip = Callable[[torch.Tensor, int, str], torch.Tensor]

LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
# Relative to the block's largest element: half a step at the top, and a rounding of the values to 16 bits.
TOLERANCES = {"int8": 1 / 254 + 2.0**-8, "float8_e4m3fn": 1 / 16 + 2.0**-8, "float8_e5m2": 1 / 8 + 2.0**-8}


@dataclass(frozen=True)
class QuantizeCase:
    """x [tokens, columns] in `dtype`."""

    dtype: str
    tokens: int
    columns: int
    block: int
    format: str
    calls: int = 1

    def describe(self) -> dict[str, Any]:
        return {
            "dtype": self.dtype,
            "tokens": self.tokens,
            "columns": self.columns,
            "block": self.block,
            "format": self.format,
        }

    def build(self, rank: Rank) -> list[Provider]:
        generator = torch.Generator(rank.device).manual_seed(0)
        x = torch.randn(self.tokens, self.columns, generator=generator, device=rank.device).to(DTYPES[self.dtype])
        size, elements = DTYPES[self.dtype].itemsize, self.tokens * self.columns
        claimed = elements * (size + 1) + 4 * self.tokens * -(-self.columns // self.block)

        def provider(name: str, kind: str, function: RoundTrip, bound: int | None = None) -> Provider:
            return Provider(
                name,
                kind,
                call=lambda: function(x, self.block, self.format),
                check=lambda: {"values": self.error(x, function)},
                num_bytes=(2.0 * size + 2.0) * elements,
                memory_bound=bound,
            )

        return [
            provider("fastpar", "fastpar", fastpar_round_trip, claimed),
            provider("torch", "torch", torch_round_trip),
            provider("torch.compile", "torch", compiled_round_trip),
            *copy_roofs(min(elements * size, 256 << 20), rank.world_size, rank.device),
        ]

    def error(self, x: torch.Tensor, function: RoundTrip) -> Error:
        off = (function(x, self.block, self.format).double() - x.double()).abs().unflatten(-1, (-1, self.block))
        largest = x.double().abs().unflatten(-1, (-1, self.block)).amax(-1)
        return Error(float((off.amax(-1) / largest).max()), TOLERANCES[self.format])


# ---------------------------------------------------------------------------------------------------------- providers


def fastpar_round_trip(x: torch.Tensor, block: int, format: str) -> torch.Tensor:
    from fastpar.ops import dequantize_blocks, quantize_blocks

    codes, scales = quantize_blocks(x, format=format, block=block)
    return dequantize_blocks(codes, scales, block=block, dtype=x.dtype)


def torch_round_trip(x: torch.Tensor, block: int, format: str) -> torch.Tensor:
    blocks = x.float().unflatten(-1, (-1, block))
    scales = blocks.abs().amax(-1, keepdim=True) / LARGEST[format]
    scaled = blocks / scales
    codes = (scaled.round() if format == "int8" else scaled).to(getattr(torch, format))
    return (codes.float() * scales).flatten(-2).to(x.dtype)


@cache
def _compiled() -> RoundTrip:
    return torch.compile(torch_round_trip, dynamic=False)


def compiled_round_trip(x: torch.Tensor, block: int, format: str) -> torch.Tensor:
    return _compiled()(x, block, format)  # on first use: importing the compiler takes seconds


# --------------------------------------------------------------------------------------------------------------- main


def cases(flags: argparse.Namespace, world_size: int) -> Sequence[Case]:
    return [
        QuantizeCase(d, t, c, b, f)
        for d in flags.dtype
        for t in flags.tokens
        for c in flags.columns
        for b in flags.block
        for f in flags.format
    ]


def _formats(text: str) -> list[str]:
    if not set(text.split(",")) <= set(LARGEST):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of {', '.join(LARGEST)}")
    return text.split(",")


BENCH = Bench(
    name="quantize",
    baselines=("torch",),
    cases=cases,
    memory=True,
    quick={"tokens": [128], "columns": [2048], "blocks": 3, "iters": 2},
    devices=("cpu", "cuda"),
)


def main(argv: Sequence[str]) -> int:
    made = parser(BENCH, "Quantisation to blocks of 8-bit codes, and back", threads=[2], ranks=[1], blocks=4, iters=3)
    made.add_argument("--tokens", type=positive_list, default=[4096], metavar="LIST", help="rows")
    made.add_argument("--columns", type=positive_list, default=[4096], metavar="LIST", help="multiples of the block")
    made.add_argument("--block", type=positive_list, default=[128], metavar="LIST", help="elements that share a scale")
    made.add_argument(
        "--format", type=_formats, default=["float8_e4m3fn", "int8"], metavar="LIST", help=", ".join(LARGEST)
    )
    return run(BENCH, made.parse_args(argv), ["fastpar", "bench", "quantize", *argv])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
