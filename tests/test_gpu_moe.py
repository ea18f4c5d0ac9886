"""Mixture of experts on one GPU: experts of one rank, and virtual ranks that push rows into each other's memory.

`make gpu` runs the tests with "small" in their names once more under compute-sanitizer.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fastpar.ops.moe_mlp import moe_mlp
from fastpar.reference.moe_mlp import ExpertRule
from fastpar.reference.moe_mlp import moe_mlp as reference_mlp
from tests.overlap_gemm_cases import DeviceBuffer, device_memories, integers

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")

from fastpar.kernels import moe_mlp as kernels  # noqa: E402  (triton is optional)
from fastpar.kernels import moe_rows, moe_sort  # noqa: E402
from fastpar.kernels.moe_push import PushExchange, run_together  # noqa: E402
from fastpar.kernels.overlap_gemm_buffer import OverlapBuffer  # noqa: E402
from fastpar.reference import moe_rows as reference_rows  # noqa: E402

DEVICE = "cuda"
RULES = {
    "swiglu": ExpertRule(),
    "before": ExpertRule("geglu", weigh="before"),
    "input": ExpertRule(weigh="input", transposed=True),
    "gpt-oss": ExpertRule("clamped_swiglu", transposed=True, interleaved=True),
}
# Of the largest value: sums of 64 to 256 products in float32, rounded to the dtype up to three times on the way.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def problem(
    rule: ExpertRule, dtype: torch.dtype, tokens: int, hidden: int, features: int, experts: int
) -> list[Tensor]:
    """x, indices, weights, first, second, dout on the CPU; the last expert has no token."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    indices = torch.randint(-1, experts - 1, (tokens, 2), generator=generator)
    first, second = normal(experts, features * (1 + rule.is_gated), hidden) / 8, normal(experts, hidden, features) / 8
    if rule.transposed:
        first, second = first.transpose(1, 2).contiguous(), second.transpose(1, 2).contiguous()
    weights = torch.rand(tokens, 2, generator=generator)
    return [normal(tokens, hidden), indices, weights, first, second, normal(tokens, hidden)]


def run(function: Any, parts: list[Tensor], rule: ExpertRule) -> list[Tensor]:
    """out and the gradients of x, weights, first and second."""
    x, indices, weights, first, second, dout = parts
    leaves = [t.detach().clone().requires_grad_() for t in (x, weights, first, second)]
    out = function(leaves[0], indices, leaves[1], leaves[2], leaves[3], rule=rule)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("name", RULES)
def test_small_experts_match_float64(name: str, dtype: torch.dtype) -> None:
    parts = problem(RULES[name], dtype, 70, 64, 96, 5)
    wanted = run(reference_mlp, [t.double() if t.is_floating_point() else t for t in parts], RULES[name])
    found = run(moe_mlp, [t.to(DEVICE) for t in parts], RULES[name])
    for part, got, exact in zip(("out", "x", "weights", "first", "second"), found, wanted, strict=True):
        scale = float(exact.abs().max())
        error = float((got.cpu().double() - exact).abs().max()) / scale
        assert error < TOLERANCE[dtype], (part, error)
    assert found[3][-1].count_nonzero() == found[4][-1].count_nonzero() == 0


def test_real_sizes_give_the_same_bits_every_time_and_near_a_loop_over_experts() -> None:
    rule = ExpertRule()
    parts = [t.to(DEVICE) for t in problem(rule, torch.bfloat16, 4096, 1024, 2048, 8)]
    found, again = run(moe_mlp, parts, rule), run(moe_mlp, parts, rule)
    for got, same, near in zip(found, again, run(reference_mlp, parts, rule), strict=True):
        assert torch.equal(got, same)
        assert float((got.float() - near.float()).abs().max()) < 0.05 * float(near.float().abs().max())


def test_forward_and_backward_wait_for_nothing_and_a_graph_follows_the_routing() -> None:
    rule = ExpertRule()
    x, indices, weights, first, second, dout = (t.to(DEVICE) for t in problem(rule, torch.bfloat16, 512, 256, 256, 8))
    experts = kernels.Experts(first, second)

    def step() -> list[Tensor]:
        out, saved = kernels.forward(x, indices, weights, experts, rule)
        grads = kernels.backward(dout, x, indices, weights, experts, rule, saved)
        assert grads.x is not None
        assert grads.experts is not None
        return [out, grads.x, grads.weights, grads.experts.first, grads.experts.second]

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for routing in (torch.full_like(indices, 3), indices.flip(0).clone()):
        indices.copy_(routing)
        graph.replay()
        replayed = [t.clone() for t in found]
        for got, wanted in zip(replayed, step(), strict=True):
            assert torch.equal(got, wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_small_rows_match_the_reference(dtype: torch.dtype) -> None:
    tables = [torch.randn(n, 200, device=DEVICE).to(dtype) for n in (7, 0, 9)]
    index = torch.randint(-1, 16, (50, 3), device=DEVICE)
    weights, add = torch.rand(50, 3, device=DEVICE), torch.randn(50, 200, device=DEVICE)
    assert torch.equal(moe_rows.gather_rows(tables, index[:, 0]), reference_rows.gather_rows(tables, index[:, 0]))
    rounding = {torch.bfloat16: 2.0**-7, torch.float32: 1e-5, torch.float64: 1e-6}[dtype]
    for found, wanted in (
        (
            moe_rows.sum_rows(tables, index, weights=weights, add=add),
            reference_rows.sum_rows(tables, index, weights=weights, add=add),
        ),
        (
            moe_rows.dot_rows(add.to(dtype), tables, index[:, 1]),
            reference_rows.dot_rows(add.to(dtype), tables, index[:, 1]),
        ),
    ):
        torch.testing.assert_close(found, wanted, rtol=rounding, atol=10 * rounding)


@pytest.mark.parametrize("num_experts", [1, 8, 257])
def test_small_pairs_are_sorted_as_on_the_cpu(num_experts: int) -> None:
    indices = torch.randint(-1, num_experts + 1, (1000, 3))
    for found, wanted in zip(
        moe_sort.sort_pairs(indices.to(DEVICE), num_experts),
        reference_rows.sort_pairs(indices, num_experts),
        strict=True,
    ):
        assert torch.equal(found.cpu(), wanted)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_small_rows_are_pushed_to_their_experts_and_summed(size: int) -> None:
    """Virtual ranks: no phase waits for a later one, so that one stream serves them all."""
    tokens, width, experts, capacity = 100, 256, 8, 400 * size
    memories = device_memories(size, 1 << 24, DEVICE)
    exchanges = [
        PushExchange(
            OverlapBuffer(DeviceBuffer(memories, rank), flag_capacity=4, timeout=20.0),
            num_experts=experts,
            width=width,
            dtype=torch.bfloat16,
            capacity=capacity,
        )
        for rank in range(size)
    ]
    for step in range(4):
        x = integers(size * tokens, width, seed=step, dtype=torch.bfloat16).to(DEVICE)
        indices = torch.randint(-1, experts, (size * tokens, 4), device=DEVICE)
        weights = 2.0 ** torch.randint(-2, 2, indices.shape, device=DEVICE)
        parts = list(zip(*(t.split(tokens) for t in (x, indices, weights)), strict=True))
        pushed = run_together([e.dispatch_phases(*p) for e, p in zip(exchanges, parts, strict=True)])
        calls = []
        for exchange, found, part in zip(exchanges, pushed, parts, strict=True):
            rows = exchange.empty_rows()
            rows.copy_(found.rows)
            calls.append(exchange.give_back_phases(found, rows, weights=part[2]))
        out = torch.cat([out for out, _ in run_together(calls)])
        total = (weights * (indices >= 0)).sum(1, keepdim=True)
        assert torch.equal(out, (total * x.float()).bfloat16())
    for exchange in exchanges:
        torch.cuda.synchronize()
        exchange.buffer.check()
