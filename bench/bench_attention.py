"""Attention forward and backward of one device: causal, grouped heads.

    fastpar bench attention [--quick] [--tokens 4096] [--dims 64,128] [--heads 8] [--key-heads 8] [--threads 1]

What is timed: ``out = f(q, k, v)`` and ``torch.autograd.grad(out, (q, k, v), grad_out)``, q [1, heads, tokens, dim]
and k, v [1, key heads, tokens, dim] leaves, grad_out given. One process: the op has no collective. Forward is the
first of them alone, without gradients: cases with backward 0.

Flops model (visible pairs of a query and a key are half of all under a causal mask; two products forward, five
backward), per query head:

    (4 + 10) * dim * tokens^2 / 2            forward alone 4 * dim * tokens^2 / 2

Memory bound that fastpar claims: the output, the float32 gradients, and their copies in the dtype of the inputs; packed
operands of two key heads at a time, and a float32 copy of out and grad_out, come on top: 8 elements of q and k each.

Traps besides those of `bench.harness`:

* torch's op is called as its documentation says for causal attention and grouped heads: is_causal, enable_gqa, no mask.
  On CUDA it is timed as it chooses for itself, and with each of its fused backends: cuDNN's, and flash attention (which
  takes 16-bit inputs only).
* fastpar is timed as it chooses for itself, and on CUDA with its Triton kernels alone ("fastpar Triton") and where
  torch's kernels are asked for, backward as well ("fastpar by torch").
* torch sums gradients of bfloat16 in bfloat16; its tolerance allows for that. Errors are norms over whole results, of
  the first head of each group, against float64.
* The roof is the rate of a large GEMM; attention also takes an exponential for each pair, forward and backward.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.harness import Case, Error, Provider, Rank, gemm_roof
from bench.options import DTYPES, Bench, parser, positive_list, run

# (q, k, v) -> out
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]

TOLERANCES = {"fp32": 1e-5, "bf16": 2e-2}  # relative errors of the output and of each gradient


@dataclass(frozen=True)
class AttentionCase:
    """q [1, heads, tokens, dim] and k, v [1, key_heads, tokens, dim] in `dtype`, causal."""

    dtype: str
    tokens: int
    dim: int
    heads: int
    key_heads: int
    backward: bool
    calls: int = 1

    def describe(self) -> dict[str, Any]:
        sizes = {"tokens": self.tokens, "dim": self.dim, "heads": self.heads, "key_heads": self.key_heads}
        return {"dtype": self.dtype, **sizes, "backward": self.backward}

    def build(self, rank: Rank) -> list[Provider]:
        problem = Problem(self, rank.device)
        forward = 2.0 * self.dim * self.tokens**2 * self.heads
        flops = 3.5 * forward if self.backward else forward
        providers = [
            Provider(
                name,
                kind,
                call=partial(problem.run, function),
                check=partial(problem.errors, function),
                flops=flops,
                memory_bound=problem.memory_bound() if kind == "fastpar" else None,
            )
            for name, kind, function in (
                ("fastpar", "fastpar", fastpar_attention),
                ("torch SDPA", "torch", torch_attention),
                *(fastpar_kernels(self.dtype) if rank.device == "cuda" else ()),
                *(torch_backends(self.dtype) if rank.device == "cuda" else ()),
            )
        ]
        return [*providers, gemm_roof(DTYPES[self.dtype], rank.world_size, device=rank.device)]


class Problem:
    """The tensors of a case."""

    def __init__(self, case: AttentionCase, device: str) -> None:
        generator = torch.Generator(device).manual_seed(0)

        def random(heads: int) -> Tensor:
            made = torch.randn(1, heads, case.tokens, case.dim, generator=generator, device=device)
            return made.to(DTYPES[case.dtype])

        self.case = case
        self.inputs = [random(heads).requires_grad_() for heads in (case.heads, case.key_heads, case.key_heads)]
        self.grad_out = random(case.heads)

    def memory_bound(self) -> int:
        q, k = self.inputs[0].numel(), self.inputs[1].numel()
        return 8 * 4 * (q + 2 * k)

    def run(self, function: Attention) -> tuple[Tensor, ...]:
        if not self.case.backward:
            with torch.no_grad():
                return (function(*self.inputs),)
        out = function(*self.inputs)
        return out, *torch.autograd.grad(out, self.inputs, self.grad_out)

    def errors(self, function: Attention) -> dict[str, Error]:
        """Relative errors of out, dq, dk and dv of the first key head against float64, by blocks of 256 queries."""
        with torch.enable_grad():
            found = [t.detach() for t in self.run(function)]
        group = self.case.heads // self.case.key_heads
        q, k, v = (t.detach()[:, : (group, 1, 1)[i]].double() for i, t in enumerate(self.inputs))
        exact = [torch.zeros_like(q), torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)]
        for rows in torch.arange(self.case.tokens).split(256):
            leaves = [q[:, :, rows].requires_grad_(), k.requires_grad_(), v.requires_grad_()]
            stop = int(rows[-1]) + 1
            scores = leaves[0] @ leaves[1][:, :, :stop].transpose(-1, -2) * self.case.dim**-0.5
            hidden = torch.arange(stop, device=q.device) > rows.to(q.device)[:, None]
            out = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1) @ leaves[2][:, :, :stop]
            grads = torch.autograd.grad(out, leaves, self.grad_out[:, :group, rows].double())
            exact[0][:, :, rows], exact[1][:, :, rows] = out.detach(), grads[0]
            exact[2] += grads[1]
            exact[3] += grads[2]
        tolerance = TOLERANCES[self.case.dtype]
        return {
            name: Error(((a[:, : b.shape[1]].double() - b).norm() / b.norm()).item(), tolerance)
            for name, a, b in zip(("out", "dq", "dk", "dv"), found, exact, strict=False)  # out alone without backward
        }


# ---------------------------------------------------------------------------------------------------------- providers


def fastpar_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from fastpar.ops import attention

    return attention(q, k, v, causal=True)


def fastpar_kernels(dtype: str) -> list[tuple[str, str, Attention]]:
    """fastpar's implementations for CUDA, by name; backward has those of its forward."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def only(backends: list[SDPBackend], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backends):
            return fastpar_attention(q, k, v)

    fused = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
    kinds = [("fastpar Triton", [SDPBackend.MATH]), *([] if dtype == "fp32" else [("fastpar by torch", fused)])]
    return [(name, "fastpar", partial(only, backends)) for name, backends in kinds]


def torch_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def torch_backends(dtype: str) -> list[tuple[str, str, Attention]]:
    """torch's fused backends for CUDA, by name."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def only(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel([backend]):
            return torch_attention(q, k, v)

    if dtype == "fp32":
        return []
    backends = (("torch cuDNN", SDPBackend.CUDNN_ATTENTION), ("torch flash", SDPBackend.FLASH_ATTENTION))
    return [(name, "torch", partial(only, backend)) for name, backend in backends]


# --------------------------------------------------------------------------------------------------------------- main


def flag_list(text: str) -> list[bool]:
    return [{"0": False, "1": True}[word] for word in text.split(",")]


def cases(flags: argparse.Namespace, world_size: int) -> Sequence[Case]:
    return [
        AttentionCase(dtype, tokens, dim, flags.heads, flags.key_heads, backward)
        for backward in flags.backward
        for dtype in flags.dtype
        for tokens in flags.tokens
        for dim in flags.dims
    ]


BENCH = Bench(
    name="attention",
    baselines=("torch SDPA",),
    cases=cases,
    memory=True,
    quick={"backward": [True], "tokens": [256], "dims": [64], "blocks": 3, "iters": 2},
    devices=("cpu", "cuda"),
)


def main(argv: Sequence[str]) -> int:
    made = parser(BENCH, "Causal attention forward + backward", threads=[1], ranks=[1], blocks=4, iters=2)
    made.add_argument("--tokens", type=positive_list, default=[4096], metavar="LIST", help="queries, and keys")
    made.add_argument("--dims", type=positive_list, default=[64, 128], metavar="LIST", help="of a head")
    made.add_argument("--heads", type=int, default=8, help="of queries")
    made.add_argument("--key-heads", type=int, default=8, help="of keys and values; divides the heads")
    made.add_argument("--backward", type=flag_list, default=[True, False], metavar="LIST", help="1: with gradients")
    return run(BENCH, made.parse_args(argv), ["fastpar", "bench", "attention", *argv])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
