"""Dispatch and combine over every transport against one rank, and against a loop over tokens."""

from __future__ import annotations

import pytest
import torch

from tests.dist import run_ranks
from tests.moe_ranks import TRANSPORTS, exchange_rank, through_experts, tokens_of

SIZES = {1: (23,), 2: (17, 6), 3: (0, 5, 18), 4: (9, 0, 13, 1)}


def loop(x, indices, weights, dout, *, num_experts):
    """The same token by token in float64."""
    x, weights = x.double().requires_grad_(), weights.double().requires_grad_()
    out = x + torch.stack(
        [
            sum(
                (w * (e + 1) * row for e, w in zip(choices.tolist(), ws, strict=True) if 0 <= e < num_experts),
                torch.zeros_like(row),
            )
            for row, choices, ws in zip(x, indices, weights, strict=True)
        ]
    )
    out.backward(dout.double())
    return out.detach(), x.grad, weights.grad


def test_one_rank_matches_the_loop():
    parts = tokens_of(0, (23,), 9, 3, 12, torch.float32)
    found = through_experts(*parts, num_experts=12)
    for got, want in zip(found, loop(*parts, num_experts=12), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_match_one(size, transport, dtype):
    sizes = SIZES[size]
    found = run_ranks(size, exchange_rank, sizes, 9, 3, 12, dtype, TRANSPORTS[transport])
    whole = through_experts(*tokens_of(0, (sum(sizes),), 9, 3, 12, dtype), num_experts=12)
    for got, want in zip(zip(*found, strict=True), whole, strict=True):
        if transport == "all-to-all":  # a sum of sums, rounded in between
            torch.testing.assert_close(torch.cat(got), want, rtol=0.02 if dtype == torch.bfloat16 else 1e-6, atol=0.05)
        else:
            assert torch.equal(torch.cat(got), want)
