"""One step of Muon on the matrices of a transformer that lie in shards, or as replicas, on several ranks.

    fastpar bench muon [--quick] [--layers 8] [--hidden 512] [--dtype bf16,fp32] [--ranks 2]

What is timed: `optimizer.step()` with float32 parameters and gradients given; `--dtype` is that of Newton-Schulz and of
what travels (torch.optim.Muon has bf16 only). A layer has four matrices: [3 hidden, hidden], [hidden, hidden],
[4 hidden, hidden] and [hidden, 4 hidden]. ZeRO shards are rows, tensor-parallel shards rows or columns in turn, both as
DTensors; replicas are plain tensors on every rank, as under DDP, where torch.optim.Muon computes everything on each.
"no communication" is torch's step on 1 / ranks of the matrices: a lower bound with most results missing.

Flops model, all ranks together, for a matrix with sides k <= l and five steps:

    5 * (4 k^2 l + 2 k^3)

Bytes that a rank sends for all P elements: shards 2 P / ranks * (ranks - 1) / ranks elements, there and back.

Traps besides those of `bench.harness`:

* Ranks of torch.optim.Muon on DTensors compute with collectives of their own in every product; it is given DTensors of
  the same placements, as FSDP2 makes them.
* The error is that of the first layer's updates after one step from fresh states, in the L2 norm, against Newton-Schulz
  in float64. Rounding the products to bfloat16 shows as one percent.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from bench.harness import Case, Error, Provider, Rank, gemm_roof, local_tensor
from bench.options import DTYPES, Bench, parser, positive_list, run

LR, WEIGHT_DECAY = 0.02, 0.1
QUINTIC = (3.4445, -4.7750, 2.0315)
TOLERANCES = {"bf16": 0.03, "fp32": 1e-4}
MATRICES = 4  # a layer's
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class MuonCase:
    """Matrices of `layers` layers of width `hidden`; `dtype` of Newton-Schulz."""

    dtype: str
    layers: int
    hidden: int
    calls: int = 1

    def describe(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "layers": self.layers, "hidden": self.hidden}

    @property
    def shapes(self) -> list[tuple[int, int]]:
        h = self.hidden
        return [(3 * h, h), (h, h), (4 * h, h), (h, 4 * h)] * self.layers

    def build(self, rank: Rank) -> list[Provider]:
        problem = Problem(self, rank)
        flops = sum(5.0 * (4 * min(s) ** 2 * max(s) + 2 * min(s) ** 3) for s in self.shapes)
        found = []

        def add(name: str, kind: str, lay: Callable[[int, Tensor], Tensor], make: Make) -> None:
            step = Step(problem, lay, make)
            check = dict if kind == "bound" else step.errors
            found.append(Provider(name, kind, call=step.run, check=check, flops=flops))

        ours = partial(_fastpar_muon, DTYPES[self.dtype], rank)
        for distribute in ("auto", "owners", "shards"):
            add(f"fastpar ZeRO, {distribute}", "fastpar", problem.zero, partial(ours, distribute, False))
        add("fastpar tensor parallel, auto", "fastpar", problem.tensor_parallel, partial(ours, "auto", False))
        add("fastpar replicas, auto", "fastpar", problem.whole, partial(ours, "auto", True))
        if self.dtype == "bf16":
            add("torch replicas", "torch", problem.whole, _torch_muon)
            add("torch ZeRO", "torch", problem.zero, _torch_muon)
            add("no communication", "bound", problem.some, _torch_muon)
        return [*found, gemm_roof(DTYPES[self.dtype], rank.world_size)]


class Problem:
    """The full matrices and gradients (the same on every rank), and the first layer's exact updates."""

    def __init__(self, case: MuonCase, rank: Rank) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        self.case, self.rank = case, rank
        self.mesh = init_device_mesh("cpu", (rank.world_size,)) if rank.world_size > 1 else None

    def tensor(self, index: int, *, grad: bool) -> Tensor:
        generator = torch.Generator().manual_seed(2 * index + grad)
        return torch.randn(self.case.shapes[index], generator=generator)

    def _cut(self, x: Tensor, dim: int) -> Tensor:
        from torch.distributed.tensor import Shard, distribute_tensor

        return x if self.mesh is None else distribute_tensor(x, self.mesh, [Shard(dim)])

    def zero(self, index: int, x: Tensor) -> Tensor:
        return self._cut(x, 0)

    def tensor_parallel(self, index: int, x: Tensor) -> Tensor:
        return self._cut(x, index % 2)

    def whole(self, index: int, x: Tensor) -> Tensor:
        return x

    def some(self, index: int, x: Tensor) -> Tensor:
        return x if index % self.rank.world_size == self.rank.rank else x[:0]

    @cached_property
    def exact(self) -> list[Tensor]:
        """What one step from fresh states makes of the first layer, in float64."""
        from fastpar import reference

        found = []
        for index in range(MATRICES):
            weight, grad = (self.tensor(index, grad=which).double() for which in (False, True))
            update = reference.newton_schulz(grad, coefficients=QUINTIC, dtype=torch.float64)
            ratio = max(1.0, weight.shape[0] / weight.shape[1]) ** 0.5
            found.append(weight * (1 - LR * WEIGHT_DECAY) - LR * ratio * update)
        return found


class Step:
    """One implementation on one rank; `lay` says how a matrix lies. Parameters are made on first use."""

    def __init__(self, problem: Problem, lay: Callable[[int, Tensor], Tensor], make: Make) -> None:
        self._problem, self._lay, self._make = problem, lay, make

    @cached_property
    def _optimizer(self) -> torch.optim.Optimizer:
        params = []
        for index in range(len(self._problem.case.shapes)):
            value, grad = (self._lay(index, self._problem.tensor(index, grad=which)) for which in (False, True))
            if value.numel():
                params.append(nn.Parameter(value))
                params[-1].grad = grad
        return self._make(params)

    def run(self) -> None:
        """The timed region."""
        self._optimizer.step()

    def errors(self) -> dict[str, Error]:
        """Relative error of the first layer's change, and starts anew for it."""
        params = self._optimizer.param_groups[0]["params"][:MATRICES]
        before = [self._problem.tensor(index, grad=False) for index in range(MATRICES)]
        self._optimizer.state.clear()
        for index, param in enumerate(params):
            local_tensor(param.detach()).copy_(local_tensor(self._lay(index, before[index])))
        self.run()
        deviation = size = 0.0
        for index, param in enumerate(params):
            found, wanted, start = (
                local_tensor(x.detach()).double()
                for x in (param, self._lay(index, self._problem.exact[index]), self._lay(index, before[index]))
            )
            deviation += float((found - wanted).square().sum())
            size += float((wanted - start).square().sum())
        return {"update": Error((deviation / size) ** 0.5, TOLERANCES[self._problem.case.dtype])}


# ---------------------------------------------------------------------------------------------------------- providers


def _fastpar_muon(
    dtype: torch.dtype, rank: Rank, distribute: str, replicas: bool, params: list[nn.Parameter]
) -> torch.optim.Optimizer:
    from fastpar.optim import Muon

    group = rank.group if replicas else None
    return Muon(params, lr=LR, weight_decay=WEIGHT_DECAY, ns_dtype=dtype, distribute=distribute, replicas=group)


def _torch_muon(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Muon(params, lr=LR, weight_decay=WEIGHT_DECAY, ns_coefficients=QUINTIC)


# --------------------------------------------------------------------------------------------------------------- main


def cases(flags: argparse.Namespace, world_size: int) -> Sequence[Case]:
    return [MuonCase(d, n, h) for d in flags.dtype for n in flags.layers for h in flags.hidden]


BENCH = Bench(
    name="muon",
    baselines=("torch replicas", "fastpar replicas, auto"),
    cases=cases,
    memory=False,
    quick={"layers": [2], "hidden": [128], "blocks": 3, "iters": 2},
)


def main(argv: Sequence[str]) -> int:
    made = parser(BENCH, "a step of Muon over shards and replicas", ranks=[2], blocks=5, iters=2)
    made.add_argument("--layers", type=positive_list, default=[8], metavar="LIST", help="layers of four matrices each")
    made.add_argument("--hidden", type=positive_list, default=[512], metavar="LIST", help="width of a layer")
    return run(BENCH, made.parse_args(argv), ["fastpar", "bench", "muon", *argv])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
