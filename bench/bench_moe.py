"""Experts of a mixture, forward and backward: tokens to their experts, the feed-forward blocks, and back.

    fastpar bench moe [--quick] [--tokens 4096] [--hidden 1024] [--ffn 2048] [--experts 8] [--top-k 2] [--ranks 1,2]
    fastpar bench moe --device cuda --dtype bf16 --ranks 1 --passes forward,both
                      --tokens 32768 --hidden 2048 --ffn 768 --experts 128 --top-k 8

What is timed: ``out = experts(x, indices, weights)`` and ``out.backward(dout)`` with gradients of x, of the choices'
weights and of both matrices of every expert, fresh every time (set to None inside the timed region, as `zero_grad`
does); with ``--passes forward`` the first of the two, which keeps what backward needs. SwiGLU, gate and up in one
matrix, no bias. Routing is given: `top_k` different experts for each token, chosen at random, the same for every
provider; weights are float32, as Mixtral's router gives them. With several ranks each has its part of the tokens and of
the experts.

"GEMMs alone" are the products of the experts that a rank has, at their sizes, into memory that is there: what remains
of the job without routing, activation and communication. It is a lower bound with a wrong result, not a peer, and the
column "above bound" is the part of a provider's time above it.

Flops model, all ranks together, for three matrices of hidden x ffn in an expert, each once forward and twice backward:

    18 * tokens * top_k * hidden * ffn          6 of them forward

Traps besides those of `bench.harness`:

* Peers are Hugging Face's expert modules (Mixtral's), with each of its implementations; "batched_mm" copies both
  matrices for every choice of a token, which is left out where it does not fit into the memory.
* Ranks wait for the one whose experts have most tokens, with every provider alike.
* Results are compared with float64 over the whole batch, so every rank computes all experts once, before the timing.
* On CUDA there are two more peers: what one would write with torch's `grouped_mm` (sort, gather, two products, weighted
  `index_add`) without a synchronisation with the host, and Liger's fused experts, which take int32 indices; these are
  cast beforehand. Triton's autotuning, of those who do it, is over after the check.
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

from bench import peers
from bench.harness import Case, Error, Provider, Rank, absent, gemm_roof
from bench.options import DTYPES, Bench, parser, positive_list, run

# Relative errors in the L2 norm. fp32: sums of up to 4096 products in any order. bf16: activations rounded to 8 bits.
TOLERANCES = {"fp32": 1e-5, "bf16": 2e-2}
_MOST_COPIED = 4 << 30  # bytes of matrices that batched_mm may copy

# (x, indices, weights) -> out, with the experts inside
Layer = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class MoeCase:
    """`tokens` of all ranks, each to `top_k` of `experts` feed-forward blocks hidden -> 2 x ffn -> hidden."""

    dtype: str
    tokens: int
    hidden: int
    ffn: int
    experts: int
    top_k: int
    passes: str = "both"
    calls: int = 1

    def describe(self) -> dict[str, Any]:
        names = ("dtype", "tokens", "hidden", "ffn", "experts", "top_k")
        found = {name: getattr(self, name) for name in names}
        return found if self.passes == "both" else {**found, "passes": self.passes}

    def build(self, rank: Rank) -> list[Provider]:
        problem = Problem(self, rank)
        flops = (18.0 if self.passes == "both" else 6.0) * self.tokens * self.top_k * self.hidden * self.ffn
        makers: list[tuple[str, str, Callable[[Problem], Block]]] = [("fastpar", "fastpar", fastpar_block)]
        if rank.world_size > 1:
            makers.append(("fastpar all_to_all", "fastpar", partial(fastpar_block, transport="all_to_all")))
            names = {"eager": "all_to_all, eager", "grouped_mm": "all_to_all, grouped_mm"}
        else:
            names = {"eager": "eager", "grouped_mm": "grouped_mm", "batched_mm": "batched_mm"}
        if rank.world_size == 1 and rank.device == "cuda":
            makers += [("torch grouped_mm", "torch", grouped_block), ("Liger fused experts", "torch", liger_block)]
        makers += [(f"Hugging Face {n}", "torch", partial(peer_block, implementation=i)) for i, n in names.items()]
        providers = []
        for name, kind, make in makers:
            block = peers.find(partial(make, problem))
            if isinstance(block, str):
                providers.append(absent(name, block))
            else:
                check = partial(problem.errors, block)
                providers.append(Provider(name, kind, call=block.run, check=check, flops=flops))
        gemms = Provider("GEMMs alone", "bound", call=problem.gemms(), flops=flops)
        return [*providers, gemms, gemm_roof(DTYPES[self.dtype], rank.world_size, device=rank.device)]


@dataclass
class Block:
    """One implementation on one rank, and the leaves whose gradients it leaves in `.grad`."""

    layer: Layer
    problem: Problem
    first: Tensor
    second: Tensor

    def leaves(self) -> tuple[Tensor, ...]:
        return self.problem.x, self.problem.weights, self.first, self.second

    def run(self) -> Tensor:
        """The timed region."""
        for leaf in self.leaves():
            leaf.grad = None
        out = self.layer(self.problem.x, self.problem.indices, self.problem.weights)
        if self.problem.case.passes == "both":
            out.backward(self.problem.dout)
        return out

    def results(self) -> dict[str, Tensor]:
        out = self.run()
        grads = [leaf.grad for leaf in self.leaves() if leaf.grad is not None]
        names = NAMES if self.problem.case.passes == "both" else NAMES[:1]
        return dict(zip(names, (out.detach(), *grads), strict=True))


NAMES = ("out", "dx", "dweights", "dfirst", "dsecond")
PASSES = ("both", "forward")


class Problem:
    """The batch and the experts of all ranks, and this rank's parts of them."""

    def __init__(self, case: MoeCase, rank: Rank) -> None:
        if case.tokens % rank.world_size or case.experts % rank.world_size:
            raise ValueError(f"{rank.world_size} ranks need tokens ({case.tokens}) and experts ({case.experts}) alike")
        self.case, self.rank = case, rank
        generator = torch.Generator(rank.device).manual_seed(0)

        def random(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(*shape, generator=generator, device=rank.device) * scale).to(DTYPES[case.dtype])

        self.all_x, self.all_dout = random(case.tokens, case.hidden), random(case.tokens, case.hidden)
        scores = torch.randn(case.tokens, case.experts, generator=generator, device=rank.device)
        values, self.all_indices = scores.topk(case.top_k)
        self.all_weights = values.softmax(1)
        self.all_first = random(case.experts, 2 * case.ffn, case.hidden, scale=case.hidden**-0.5)
        self.all_second = random(case.experts, case.hidden, case.ffn, scale=case.ffn**-0.5)
        self.x, self.weights = (self.mine(t).clone().requires_grad_() for t in (self.all_x, self.all_weights))
        self.indices, self.dout = self.mine(self.all_indices), self.mine(self.all_dout)
        self._expected: dict[str, Tensor] | None = None

    def mine(self, x: Tensor) -> Tensor:
        """This rank's part of tokens or of experts."""
        return x.chunk(self.rank.world_size)[self.rank.rank]

    def parameters(self) -> tuple[Tensor, Tensor]:
        """New leaves: gate and up, and down, of this rank's experts."""
        first, second = (self.mine(t).clone().requires_grad_() for t in (self.all_first, self.all_second))
        return first, second

    def gemms(self) -> Callable[[], None]:
        """Every product of this rank's experts in the passes of the case."""
        first, second = self.mine(self.all_first), self.mine(self.all_second)
        counts = self.mine(torch.bincount(self.all_indices.flatten(), minlength=self.case.experts)).tolist()
        rows = max(counts)
        x, y, dout, dx = (first.new_ones(rows, self.case.hidden) for _ in range(4))
        hidden, dhidden = (first.new_ones(rows, 2 * self.case.ffn) for _ in range(2))
        inner, dinner = (first.new_ones(rows, self.case.ffn) for _ in range(2))
        dfirst, dsecond = torch.zeros_like(first), torch.zeros_like(second)

        def call() -> None:
            for expert, n in enumerate(counts):
                torch.mm(x[:n], first[expert].t(), out=hidden[:n])
                torch.mm(inner[:n], second[expert].t(), out=y[:n])
            for expert, n in enumerate(counts if self.case.passes == "both" else ()):
                torch.mm(dout[:n], second[expert], out=dinner[:n])
                torch.mm(dout[:n].t(), inner[:n], out=dsecond[expert])
                torch.mm(dhidden[:n].t(), x[:n], out=dfirst[expert])
                torch.mm(dhidden[:n], first[expert], out=dx[:n])

        return call

    def errors(self, block: Block) -> dict[str, Error]:
        """Relative errors of the output and of all gradients against float64."""
        wanted = self._reference()
        found = {}
        for name, value in block.results().items():
            whole = self.mine(wanted[name])
            error = float((value.double() - whole).norm() / whole.norm())
            found[name] = Error(error, TOLERANCES[self.case.dtype])
        return found

    def _reference(self) -> dict[str, Tensor]:
        if self._expected is None:
            given = (self.all_x, self.all_weights, self.all_first, self.all_second)
            leaves = [t.double().requires_grad_() for t in given]
            x, weights, first, second = leaves
            out = torch.zeros_like(x)
            for expert in range(self.case.experts):
                tokens, choice = (self.all_indices == expert).nonzero(as_tuple=True)
                gate, up = F.linear(x[tokens], first[expert]).chunk(2, -1)
                rows = F.linear(F.silu(gate) * up, second[expert])
                out = out.index_add(0, tokens, rows * weights[tokens, choice, None])
            backward = self.case.passes == "both"
            grads = torch.autograd.grad(out, leaves, self.all_dout.double()) if backward else leaves
            self._expected = dict(zip(NAMES, (out.detach(), *grads), strict=True))
        return self._expected


# ---------------------------------------------------------------------------------------------------------- providers


def fastpar_block(problem: Problem, *, transport: str = "auto") -> Block:
    from fastpar.ops import Dispatch, ExpertWeights, moe_mlp

    first, second = problem.parameters()

    def layer(x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        return moe_mlp(
            x, indices, weights, ExpertWeights(first, second), group=problem.rank.group, dispatch=Dispatch(transport)
        )

    return Block(layer, problem, first, second)


def grouped_block(problem: Problem) -> Block:
    """Torch alone, without a synchronisation: as many rows as there are pairs."""
    grouped_mm: Any = getattr(F, "grouped_mm", None)
    if grouped_mm is None:
        raise ImportError(f"torch {torch.__version__} has no torch.nn.functional.grouped_mm")
    first, second = problem.parameters()
    experts, top_k = problem.case.experts, problem.case.top_k

    def layer(x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        pairs = indices.reshape(-1)
        order = pairs.argsort(stable=True)
        counts = torch.zeros(experts, dtype=torch.int32, device=x.device)
        ends = counts.scatter_add_(0, pairs, torch.ones_like(pairs, dtype=torch.int32)).cumsum(0, dtype=torch.int32)
        tokens = order // top_k
        gate, up = grouped_mm(x.index_select(0, tokens), first.transpose(1, 2), offs=ends).chunk(2, -1)
        rows = grouped_mm(F.silu(gate) * up, second.transpose(1, 2), offs=ends)
        rows = rows * weights.reshape(-1)[order, None].to(x.dtype)
        return torch.zeros_like(x).index_add(0, tokens, rows)

    return Block(layer, problem, first, second)


def liger_block(problem: Problem) -> Block:
    fused = peers.liger_experts()
    first, second = problem.parameters()
    indices = problem.indices.int()

    def layer(x: Tensor, _: Tensor, weights: Tensor) -> Tensor:
        return fused(x, first, second, indices, weights)

    return Block(layer, problem, first, second)


def peer_block(problem: Problem, *, implementation: str) -> Block:
    """Mixtral's experts of Hugging Face's transformers; on several ranks behind its all-to-all."""
    case, size = problem.case, problem.rank.world_size
    copied = case.tokens * case.top_k * 3 * case.hidden * case.ffn * DTYPES[case.dtype].itemsize
    if implementation == "batched_mm" and copied > _MOST_COPIED:
        raise MemoryError(f"copies {copied / 2**30:.0f} GiB of matrices")
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    config = MixtralConfig(hidden_size=case.hidden, intermediate_size=case.ffn, num_local_experts=case.experts // size)
    config._experts_implementation = implementation
    with torch.device("meta"):
        experts = MixtralExperts(config)
    first, second = problem.parameters()
    experts.gate_up_proj, experts.down_proj = torch.nn.Parameter(first), torch.nn.Parameter(second)
    layer: Layer = experts
    if size > 1:
        from torch.distributed.device_mesh import init_device_mesh
        from transformers.distributed.expert_parallel import AllToAllEP

        mesh = init_device_mesh(problem.rank.device, (size, 1), mesh_dim_names=("ep", "tp"))
        layer = AllToAllEP(experts, mesh["ep"], mesh["tp"])
    return Block(layer, problem, experts.gate_up_proj, experts.down_proj)


# --------------------------------------------------------------------------------------------------------------- main


def cases(flags: argparse.Namespace, world_size: int) -> Sequence[Case]:
    return [
        MoeCase(dtype, tokens, hidden, ffn, experts, top_k, passes)
        for dtype in flags.dtype
        for tokens in flags.tokens
        for hidden in flags.hidden
        for ffn in flags.ffn
        for experts in flags.experts
        for top_k in flags.top_k
        for passes in flags.passes
    ]


def passes(text: str) -> list[str]:
    """Names of PASSES, separated by commas."""
    found = [part.strip() for part in text.split(",") if part.strip()]
    unknown = [name for name in found if name not in PASSES]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown passes {unknown[0]!r}; choose from {', '.join(PASSES)}")
    return found


BENCH = Bench(
    name="moe",
    baselines=("torch grouped_mm", "Hugging Face grouped_mm", "Hugging Face all_to_all, grouped_mm"),
    cases=cases,
    memory=False,
    quick={"tokens": [128], "hidden": [128], "ffn": [256], "blocks": 3, "iters": 2},
    devices=("cpu", "cuda"),
)


def main(argv: Sequence[str]) -> int:
    made = parser(BENCH, "experts of a mixture, forward + backward", threads=[2], ranks=[1, 2], blocks=4, iters=2)
    made.add_argument("--tokens", type=positive_list, default=[4096], metavar="LIST", help="tokens of all ranks")
    made.add_argument("--hidden", type=positive_list, default=[1024], metavar="LIST", help="width of x")
    made.add_argument("--ffn", type=positive_list, default=[2048], metavar="LIST", help="width inside an expert")
    made.add_argument("--experts", type=positive_list, default=[8], metavar="LIST", help="of all ranks")
    made.add_argument("--top-k", type=positive_list, default=[2], metavar="LIST", help="experts of each token")
    made.add_argument("--passes", type=passes, default=["both"], metavar="LIST", help=", ".join(PASSES))
    return run(BENCH, made.parse_args(argv), ["fastpar", "bench", "moe", *argv])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
