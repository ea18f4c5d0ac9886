"""What the ranks of the mixture-of-experts tests run."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from fastpar.ops.moe import moe_combine, moe_dispatch


def tokens_of(rank: int, sizes: tuple[int, ...], hidden: int, top_k: int, num_experts: int, dtype: torch.dtype):
    """This rank's x, indices, weights and dout of a batch that is the same for any number of ranks."""
    generator = torch.Generator().manual_seed(7)
    total = sum(sizes)
    x = torch.randn(total, hidden, generator=generator, dtype=torch.float64).to(dtype)
    indices = torch.rand(total, num_experts, generator=generator).argsort(1)[:, :top_k]
    indices[torch.rand(total, top_k, generator=generator) < 0.1] = -1
    weights = torch.rand(total, top_k, generator=generator)
    dout = torch.randn(total, hidden, generator=generator, dtype=torch.float64).to(dtype)
    start = sum(sizes[:rank])
    return tuple(t[start : start + sizes[rank]] for t in (x, indices, weights, dout))


def through_experts(
    x: Tensor, indices: Tensor, weights: Tensor, dout: Tensor, *, num_experts: int, group=None, **options
) -> tuple[Tensor, Tensor, Tensor]:
    """out, dx, dweights of experts that multiply by their number + 1."""
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    rows, row_weights, plan = moe_dispatch(x, indices, weights, num_experts=num_experts, group=group, **options)
    factors = torch.zeros(plan.num_rows)
    for expert, begin, end in zip(plan.experts, plan.splits[:-1], plan.splits[1:], strict=True):
        factors[begin:end] = expert + 1
    out = moe_combine(rows * factors[:, None].to(rows.dtype), plan, row_weights, add=x)
    out.backward(dout)
    assert x.grad is not None
    assert weights.grad is not None
    return out.detach(), x.grad, weights.grad


def exchange_rank(sizes, hidden, top_k, num_experts, dtype, options) -> tuple[Tensor, ...]:
    found = ()
    for _ in range(3):  # buffers are used again
        parts = tokens_of(dist.get_rank(), sizes, hidden, top_k, num_experts, dtype)
        again = through_experts(*parts, num_experts=num_experts, group=dist.group.WORLD, **options)
        assert not found or all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
        found = again
    return found
