"""What the tests of the parallel linears share: a forced number of chunks, and a layer run over shards and gathered.

Every kind is compared with the unsharded `torch.nn.functional.linear` in float64. Tolerances: 1e-12 relative to the
largest value for float64, where the orders of summation differ; 2^-7 for bfloat16 and 1e-5 for float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastpar import ops
from fastpar.comm import Communicator, shard_sizes
from fastpar.ops.parallel_linear.overlap import Overlap

KINDS = ("all_gather_linear", "copy_to_linear", "linear_reduce_scatter", "linear_all_reduce")
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2.0**-7}


@dataclass(frozen=True)
class Forced(Overlap):
    """Every product in `count` chunks."""

    count: int = 1

    def chunks(self, *_: Any) -> int:
        return self.count


@dataclass(frozen=True)
class Problem:
    """An unsharded layer [.., K] -> [.., N]; `tokens`: rows of each rank along `dim`, by default equal shares."""

    kind: str
    shape: tuple[int, ...]
    features: int
    dim: int = -2
    tokens: tuple[int, ...] | None = None
    bias: bool = True
    transposed: bool = False
    dtype: torch.dtype = torch.float64

    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """x, weight [N, K], bias, dout; the same on every rank."""
        generator = torch.Generator().manual_seed(len(self.shape) + self.features)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(self.dtype)

        x, weight = random(*self.shape), random(self.features, self.shape[-1])
        return x, weight, random(self.features) if self.bias else None, random(*self.shape[:-1], self.features)

    def sizes(self, group: Communicator) -> list[int]:
        return list(self.tokens) if self.tokens else shard_sizes(self.shape[self.dim], group.size)

    @property
    def is_column(self) -> bool:
        return self.kind in KINDS[:2]

    @property
    def splits_tokens(self) -> bool:
        return self.kind in (KINDS[0], KINDS[2])


def mine(x: Tensor, sizes: Sequence[int], dim: int, group: Communicator) -> Tensor:
    return x.split(list(sizes), dim)[group.rank].contiguous()


def shards(problem: Problem, group: Communicator) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """This rank's x, weight (transposed where asked), bias and dout, as leaves."""
    x, weight, bias, dout = problem.tensors()
    tokens = problem.sizes(group) if problem.splits_tokens else None
    if problem.is_column:
        features = shard_sizes(problem.features, group.size)
        weight, dout = mine(weight, features, 0, group), mine(dout, features, -1, group)
        bias = None if bias is None else mine(bias, features, 0, group)
        x = x if tokens is None else mine(x, tokens, problem.dim, group)
    else:
        features = shard_sizes(problem.shape[-1], group.size)
        weight, x = mine(weight, features, 1, group), mine(x, features, -1, group)
        dout = dout if tokens is None else mine(dout, tokens, problem.dim, group)
    if problem.transposed:
        weight = weight.t().contiguous()
    return x, weight, bias, dout


def options(problem: Problem, group: Communicator) -> dict[str, Any]:
    where = {"dim": problem.dim, "sizes": problem.sizes(group)} if problem.splits_tokens else {}
    return {"group": group, "transposed": problem.transposed, **where}


def run_op(
    problem: Problem, group: Communicator, function: Callable[..., Any] | None = None, **extra: Any
) -> list[Any]:
    """[out, dx, dweight, dbias] of this rank's shards."""
    *tensors, dout = shards(problem, group)
    x, weight, bias = (None if t is None else t.requires_grad_() for t in tensors)
    function = getattr(ops, problem.kind) if function is None else function
    out = function(x, weight, bias, **options(problem, group), **extra)
    inputs = [t for t in (x, weight, bias) if t is not None]
    grads = list(torch.autograd.grad(out, inputs, dout))
    return [out.detach(), *grads, *([None] if bias is None else [])]


def expected(problem: Problem, group: Communicator) -> list[Any]:
    """What `run_op` should give: this rank's shards of the unsharded layer's results, computed in float64."""
    x, weight, bias, dout = (None if t is None else t.double() for t in problem.tensors())
    inputs = [t.requires_grad_() for t in (x, weight, bias) if t is not None]
    out = F.linear(x, weight, bias)
    dx, dweight, *rest = torch.autograd.grad(out, inputs, dout)
    dbias, out = rest[0] if rest else None, out.detach()
    tokens = problem.sizes(group) if problem.splits_tokens else None
    if problem.is_column:
        features = shard_sizes(problem.features, group.size)
        out, dweight = mine(out, features, -1, group), mine(dweight, features, 0, group)
        dbias = None if dbias is None else mine(dbias, features, 0, group)
        dx = dx if tokens is None else mine(dx, tokens, problem.dim, group)
    else:
        features = shard_sizes(problem.shape[-1], group.size)
        dx, dweight = mine(dx, features, -1, group), mine(dweight, features, 1, group)
        out = out if tokens is None else mine(out, tokens, problem.dim, group)
    return [out, dx, dweight.t() if problem.transposed else dweight, dbias]


def assert_right(found: Sequence[Any], wanted: Sequence[Any], dtype: torch.dtype) -> None:
    for name, ours, exact in zip(("out", "dx", "dweight", "dbias"), found, wanted, strict=True):
        assert (ours is None) == (exact is None), name
        if exact is None or exact.numel() == 0:
            assert exact is None or ours.shape == exact.shape, name
            continue
        assert ours.shape == exact.shape, name
        assert ours.dtype == dtype, name
        bound = TOLERANCE[dtype] * float(exact.abs().max())
        assert float((ours.double() - exact).abs().max()) <= bound, name
