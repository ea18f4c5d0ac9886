"""What the ranks of the mixture-of-experts tests run."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fastpar.comm import Communicator
from fastpar.ops import ExpertRule, Padding, moe_combine
from tests.moe.moe_calls import moe_dispatch, moe_mlp

TRANSPORTS: dict[str, dict[str, Any]] = {
    "shared memory": {"transport": "shared_memory"},
    "all-to-all": {"transport": "all_to_all"},
    "all-to-all, exact": {"transport": "all_to_all", "exact": True},
}
Parts = tuple[Tensor, Tensor, Tensor, Tensor]  # x, indices, weights, dout


def tokens_of(
    rank: int, sizes: tuple[int, ...], hidden: int, top_k: int, num_experts: int, dtype: torch.dtype
) -> Parts:
    """This rank's x, indices, weights and dout of a batch that is the same for any number of ranks."""
    generator = torch.Generator().manual_seed(7)
    total = sum(sizes)
    x = torch.randn(total, hidden, generator=generator, dtype=torch.float64).to(dtype)
    indices = torch.rand(total, num_experts, generator=generator).argsort(1)[:, :top_k]
    indices[torch.rand(total, top_k, generator=generator) < 0.1] = -1
    weights = torch.rand(total, top_k, generator=generator)
    dout = torch.randn(total, hidden, generator=generator, dtype=torch.float64).to(dtype)
    start, end = sum(sizes[:rank]), sum(sizes[: rank + 1])
    return x[start:end], indices[start:end], weights[start:end], dout[start:end]


def multiply(rows: Tensor, plan: Any) -> Tensor:
    """Experts that multiply by their number + 1; padding rows become NaN, which must not matter."""
    factors = torch.full((plan.num_rows, 1), torch.nan, device=rows.device)
    for expert, begin, count in zip(plan.experts, plan.splits[:-1], plan.counts.tolist(), strict=True):
        factors[begin : begin + count] = expert + 1
    return rows * factors.to(rows.dtype)


def through_experts(
    x: Tensor, indices: Tensor, weights: Tensor, dout: Tensor, *, num_experts: int, group: Any = None, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """out, dx, dweights of experts that multiply by their number + 1."""
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    rows, row_weights, plan = moe_dispatch(x, indices, weights, num_experts=num_experts, group=group, **options)
    out = moe_combine(multiply(rows, plan), plan, row_weights, add=x)
    out.backward(dout)
    assert x.grad is not None
    assert weights.grad is not None
    return out.detach(), x.grad, weights.grad


def expected(x: Tensor, indices: Tensor, weights: Tensor, dout: Tensor, num_experts: int) -> tuple[Tensor, ...]:
    """What `through_experts` has to give, in float64, from this rank's tokens alone."""
    x, weights, dout = x.double(), weights.double(), dout.double()
    factors = torch.where((indices >= 0) & (indices < num_experts), indices + 1, 0).double()
    scale = 1 + (factors * weights).sum(1, keepdim=True)
    return x * scale, dout * scale, factors * (x * dout).sum(1, keepdim=True)


def check_step(parts: Parts, num_experts: int, name: object = "", **options: Any) -> None:
    """One step in float32 against `expected`."""
    found = through_experts(*parts, num_experts=num_experts, group=dist.group.WORLD, **options)
    for got, want in zip(found, expected(*parts, num_experts), strict=True):
        # Sums of up to 8 terms, whose size is that of the largest factor, and of the hidden size.
        torch.testing.assert_close(
            got.double(), want, rtol=1e-5, atol=1e-5 * num_experts, msg=lambda text: f"{name}: {text}"
        )


def exchange_rank(sizes, hidden, top_k, num_experts, dtype, options, transport="auto") -> tuple[Tensor, ...]:
    """Buffers are used again; in the end under a default device that is not that of the tokens. `transport` is the
    communicator's."""
    found = ()
    group = Communicator(dist.group.WORLD, transport=transport)
    parts = tokens_of(dist.get_rank(), sizes, hidden, top_k, num_experts, dtype)
    for default in ("cpu", "cpu", "meta"):
        with torch.device(default):
            again = through_experts(*parts, num_experts=num_experts, group=group, **options)
        assert not found or all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
        found = again
    return found


# ---- adversarial routing


def routed(indices: Tensor, hidden: int = 5) -> Parts:
    """Tokens for given indices, others on every rank."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    x, dout = (torch.randn(len(indices), hidden, generator=generator) for _ in range(2))
    return x, indices, torch.rand(indices.shape, generator=generator), dout


def adversarial_cases(rank: int, size: int) -> dict[str, tuple[Tensor, int]]:
    """Name: this rank's indices, and the number of experts."""
    experts = 2 * size
    spread_out = (torch.arange(12).view(6, 2) + rank) % experts
    nothing = torch.empty((0, 2), dtype=torch.int64)
    return {
        "all to one expert": (torch.full((6, 1), experts - 1), experts),
        "all to one expert, more than once": (torch.full((6, 3), 0), experts),
        "one rank gets nothing": (spread_out % (experts - 2), experts),
        "all masked": (torch.full((6, 2), -1), experts),
        "all masked by the number of experts": (torch.full((6, 2), experts), experts),
        "one rank masked": (torch.full((6, 2), -1) if rank == 0 else spread_out, experts),
        "one rank without tokens": (nothing if rank == size - 1 else spread_out, experts),
        "one rank with tokens": (spread_out if rank == 0 else nothing, experts),
        "no tokens": (nothing, experts),
        "one token": (spread_out[:1] if rank == 0 else nothing, experts),
        "more choices than experts": ((torch.arange(6 * 2 * size) % size).view(6, -1), size),
        "no choices": (torch.empty((6, 0), dtype=torch.int64), experts),
        "32 bits": (spread_out.int(), experts),
        "transposed": ((torch.arange(12).view(2, 6).T + rank) % experts, experts),
    }


def adversarial_rank() -> int:
    """Every case over every transport, one after the other: layouts change all the time."""
    cases = adversarial_cases(dist.get_rank(), dist.get_world_size())
    for transport, options in TRANSPORTS.items():
        for name, (indices, num_experts) in cases.items():
            check_step(routed(indices), num_experts, (transport, name), **options)
    return len(cases)


def chunked_rank() -> int:
    """Every case through `moe_mlp` in chunks: the bits of one."""
    rank, size = dist.get_rank(), dist.get_world_size()
    cases = adversarial_cases(rank, size)
    for name, (indices, num_experts) in cases.items():
        generator = torch.Generator().manual_seed(1)
        x, _, weights, dout = routed(indices)
        first, second = (torch.randn(num_experts // size, 5, 5, generator=generator) for _ in range(2))
        found = []
        for chunks in (1, 2):
            leaves = [t.clone().requires_grad_() for t in (x, weights, first, second)]
            out = moe_mlp(
                leaves[0], indices, *leaves[1:], rule=ExpertRule("relu"), group=dist.group.WORLD,
                transport="all_to_all", chunks=chunks,
            )  # fmt: skip
            found.append([out.detach(), *torch.autograd.grad(out, leaves, dout)])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)), name
    return len(cases)


def random_steps_rank(steps: int) -> int:
    """Steps that have nothing in common with the ones before; what all ranks must agree on is drawn by all alike."""
    rank, size = dist.get_rank(), dist.get_world_size()
    alike, own = random.Random(1), random.Random(f"rank {rank}")
    for step in range(steps):
        num_experts, top_k = size * alike.choice([1, 2, 5]), alike.choice([1, 2, 3, 8])
        hidden, largest = alike.choice([1, 3, 16, 130]), alike.choice([0, 1, 4, 40])
        transport = alike.choice(list(TRANSPORTS))
        options = {**TRANSPORTS[transport], "padding": Padding(align=alike.choice([1, 1, 8]))}
        tokens = own.choice([0, own.randint(0, largest), largest])
        generator = torch.Generator().manual_seed(1000 * step + rank)
        few = own.choice([1, num_experts])  # experts that this rank's tokens go to
        indices = torch.randint(few, (tokens, top_k), generator=generator)
        indices[torch.rand(indices.shape, generator=generator) < own.choice([0.0, 0.1, 1.0])] = -1
        x, dout = (torch.randn(tokens, hidden, generator=generator) for _ in range(2))
        weights = torch.rand(indices.shape, generator=generator)
        check_step((x, indices, weights, dout), num_experts, (step, transport), **options)
    return steps
