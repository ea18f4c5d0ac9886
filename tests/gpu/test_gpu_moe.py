"""Mixture of experts on one GPU: experts of one rank, and virtual ranks that push rows into each other's memory.

`make gpu` runs the tests with "small" in their names once more under compute-sanitizer.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fastpar.contracts.moe import ExpertRule
from tests.dist import run_ranks
from tests.moe.moe_mlp_ranks import gradients
from tests.moe.moe_mlp_ranks import problem as rank_problem
from tests.moe.moe_push_ranks import raise_symmetric, run_symmetric
from tests.ops.overlap_gemm_cases import DeviceBuffer, device_memories, integers

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")

from fastpar.kernels import moe_mlp as kernels  # noqa: E402  (triton is optional)
from fastpar.kernels import moe_push_mlp, moe_rows, moe_sort  # noqa: E402
from fastpar.kernels.moe_push import FLAGS, PushExchange, buffer_bytes, run_together  # noqa: E402
from fastpar.kernels.overlap_gemm_buffer import OverlapBuffer  # noqa: E402
from fastpar.reference import moe_rows as reference_rows  # noqa: E402
from tests.moe.moe_calls import moe_mlp, reference_mlp  # noqa: E402

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
    experts = kernels.ExpertParams(first, second)

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
        moe_sort.order_pairs(indices.to(DEVICE), num_experts),
        reference_rows.order_pairs(indices, num_experts),
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


# ---- experts over the memory of several ranks ------------------------------------------------------------------------


def open_exchanges(size: int, experts: int, width: int, dtype: torch.dtype, capacity: int) -> list[PushExchange]:
    """Of virtual ranks."""
    nbytes = buffer_bytes(size, experts, width * dtype.itemsize, capacity)
    memories = device_memories(size, nbytes, DEVICE)
    return [
        PushExchange(
            OverlapBuffer(DeviceBuffer(memories, rank), flag_capacity=FLAGS, timeout=20.0),
            num_experts=experts, width=width, dtype=dtype, capacity=capacity,
        )
        for rank in range(size)
    ]  # fmt: skip


def step_together(
    exchanges: list[PushExchange], parts: list[list[Tensor]], rule: ExpertRule
) -> list[tuple[Tensor, moe_push_mlp.Grads]]:
    """Forward and backward of every virtual rank."""
    everyone = list(zip(exchanges, parts, strict=True))
    results = run_together([
        moe_push_mlp.forward_phases(e, x, indices, weights, kernels.ExpertParams(first, second), rule)
        for e, (x, indices, weights, first, second, _) in everyone
    ])  # fmt: skip
    wants = moe_push_mlp.PushGradNeeds(True, True, True, True, False, False)
    grads = run_together([
        moe_push_mlp.backward_phases(e, dout, x, weights, kernels.ExpertParams(first, second), rule, saved, wants)
        for (e, (x, _, weights, first, second, dout)), (_, saved) in zip(everyone, results, strict=True)
    ])  # fmt: skip
    return [(out, grad) for (out, _), grad in zip(results, grads, strict=True)]


def of_rank(parts: list[Tensor], rank: int, size: int) -> list[Tensor]:
    """x, indices, weights, first, second, dout of one rank, on the device."""
    by_expert = (3, 4)
    return [t.chunk(size)[rank].to(DEVICE) if n in by_expert else t.tensor_split(size)[rank].to(DEVICE)
            for n, t in enumerate(parts)]  # fmt: skip


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(("size", "name"), [(1, "swiglu"), (2, "before"), (4, "input"), (2, "gpt-oss")])
def test_small_experts_of_virtual_ranks_match_float64(size: int, name: str, dtype: torch.dtype) -> None:
    tokens, hidden, experts = 70, 64, 8
    parts = problem(RULES[name], dtype, tokens, hidden, 96, experts)
    wanted = run(reference_mlp, [t.double() if t.is_floating_point() else t for t in parts], RULES[name])
    exchanges = open_exchanges(size, experts, hidden, dtype, 2 * tokens)
    mine = [of_rank(parts, rank, size) for rank in range(size)]
    for _ in range(3):
        results = step_together(exchanges, mine, RULES[name])
    found = [torch.cat([out for out, _ in results])]
    found += [torch.cat([grads[n] for _, grads in results]) for n in range(4)]
    for named, got, exact in zip(("out", "x", "weights", "first", "second"), found, wanted, strict=True):
        error = float((got.cpu().double() - exact).abs().max()) / float(exact.abs().max())
        assert error < TOLERANCE[dtype], (named, error)
    torch.cuda.synchronize()
    for exchange in exchanges:
        exchange.buffer.check()


def test_a_step_over_symmetric_memory_waits_for_nothing_and_a_graph_follows_the_routing() -> None:
    """An odd number of calls, so that a replay begins with the channel that the one before has ended with."""
    rule = ExpertRule()
    parts = [t.to(DEVICE) for t in problem(rule, torch.bfloat16, 512, 256, 256, 8)]
    exchanges = open_exchanges(1, 8, 256, torch.bfloat16, 1024)

    def step() -> list[Tensor]:
        ((out, grads),) = step_together(exchanges, [parts], rule)
        return [out, *(grad for grad in grads if grad is not None)]

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    indices = parts[1]
    for routing in (torch.full_like(indices, 3), indices.flip(0).clone()):
        indices.copy_(routing)
        graph.replay()
        replayed = [t.clone() for t in found]
        for got, wanted in zip(replayed, step(), strict=True):
            assert torch.equal(got, wanted)


def test_processes_on_one_device_share_their_experts() -> None:
    rule, sizes = ExpertRule(), (17, 6)
    results = run_ranks(2, run_symmetric, sizes, rule, DEVICE, 3)
    given = rank_problem(torch.float32, rule)  # whose float64 problem has other weights of choices
    wide = {name: t.double() if t.is_floating_point() else t for name, t in given.items()}
    wanted = gradients(reference_mlp, wide, rule=rule)
    for name in ("x", "weights", "add", "out", "first", "second", "first_bias", "second_bias"):
        got = torch.cat([result[name] for result, _ in results]).double()
        exact = wanted[name] * (0.25 if "first" in name or "second" in name else 1.0)
        assert float((got - exact).abs().max()) < 2e-5 * float(exact.abs().max()), name
    for _, calls in results:
        assert calls == [5, 0]


def test_what_is_wrong_in_one_process_on_a_device_is_an_error_in_all() -> None:
    for found in run_ranks(2, raise_symmetric, DEVICE):
        assert found[0].startswith("transport='symmetric' is for moe_mlp")
        assert found[1].startswith("ValueError")
        assert found[2] == "nan" or found[2].startswith("RuntimeError")
        assert found[3].startswith("RuntimeError")
        assert found[4] == ""
        assert found[5] == "nan" or found[5].startswith("ValueError")
        assert found[6].startswith("ValueError")
