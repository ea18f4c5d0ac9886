"""The norm of gradients of a model's worth of tensors, which is what clipping costs besides the update.

    fastpar bench clip [--quick] [--megabytes 256] [--tensors 64] [--threads 1,2]
    fastpar bench clip --device cuda --megabytes 2048

What is timed: the norm of `tensors` gradients of equal size. One process: what is between ranks is an all-reduce of 168
bytes. The other half of clipping, a factor, is multiplied in by the optimizer's pass (`bench_optimizer`).

Bytes model: one read, and of the kernels on CUDA nothing else that counts: 2 GiB of bfloat16 are 1.07e9 elements and at
least 0.5 ms at 4.3 TB/s. They need about 29 instructions an element of 16 bits and 40 of float32, so an estimated 1 to
2.5 ms for 1e9 elements. The plain read is torch.sum over the same memory as float32, whatever the
dtype: what adding up costs at the speed of memory.

Traps besides those of `bench.harness`:

* torch's norm of float32 is a sum of floats, and of bfloat16 is rounded to bfloat16; ours is exact. The tolerances are
  torch's.
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

TOLERANCES = {"fp32": 1e-5, "bf16": 1e-2}  # torch rounds a bf16 norm to bf16


@dataclass(frozen=True)
class NormCase:
    """`tensors` tensors in `dtype`, `megabytes` together."""

    dtype: str
    megabytes: int
    tensors: int
    calls: int = 1

    def describe(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "megabytes": self.megabytes, "tensors": self.tensors}

    def build(self, rank: Rank) -> list[Provider]:
        from fastpar import grad_norm

        num_bytes = self.megabytes << 20
        dtype = DTYPES[self.dtype]
        generator = torch.Generator(rank.device).manual_seed(0)
        numel = num_bytes // dtype.itemsize // self.tensors // 2 * 2
        parameters = [torch.nn.Parameter(torch.empty(0, device=rank.device)) for _ in range(self.tensors)]
        grads = [torch.randn(numel, generator=generator, device=rank.device).to(dtype) for _ in parameters]
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.data = grad  # a gradient has its parameter's shape; the values are not looked at
            parameter.grad = grad
        words = [grad.view(torch.float32) for grad in grads]
        exact = torch.stack([grad.double().square().sum() for grad in grads]).sum().sqrt()

        def provider(name: str, kind: str, function: Callable[[], torch.Tensor]) -> Provider:
            def check() -> dict[str, Error]:
                return {"norm": Error((function().double() / exact - 1).abs().item(), TOLERANCES[self.dtype])}

            return Provider(name, kind, call=function, check=check, num_bytes=float(num_bytes))

        return [
            provider("fastpar grad_norm", "fastpar", lambda: grad_norm(parameters)),
            provider("torch get_total_norm", "torch", lambda: torch.nn.utils.get_total_norm(grads)),
            Provider("roof: plain read", "roof", lambda: [w.sum() for w in words], num_bytes=float(num_bytes)),
            *copy_roofs(min(num_bytes, 256 << 20), rank.world_size, rank.device),
        ]


# --------------------------------------------------------------------------------------------------------------- main


def cases(flags: argparse.Namespace, world_size: int) -> Sequence[Case]:
    return [NormCase(d, m, t) for d in flags.dtype for m in flags.megabytes for t in flags.tensors]


BENCH = Bench(
    name="clip",
    baselines=("torch get_total_norm",),
    cases=cases,
    memory=False,
    quick={"megabytes": [8], "tensors": [8], "blocks": 3, "iters": 2},
    devices=("cpu", "cuda"),
)


def main(argv: Sequence[str]) -> int:
    made = parser(BENCH, "Norm of gradients", threads=[1, 2], ranks=[1], blocks=6, iters=3)
    made.add_argument("--megabytes", type=positive_list, default=[256], metavar="LIST", help="of all tensors together")
    made.add_argument("--tensors", type=positive_list, default=[64], metavar="LIST", help="how many tensors")
    return run(BENCH, made.parse_args(argv), ["fastpar", "bench", "clip", *argv])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
