"""Routing on a GPU: one kernel each way, against the same op on the CPU.

`make gpu` runs the tests with "small" in their names once more under compute-sanitizer.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fastpar import ops
from fastpar.expert import PRESETS, Router
from fastpar.ops.moe.route import RouteRule, Routing

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")

DEVICE = "cuda"
RULES = {
    **{name: preset.rule for name, preset in PRESETS.items()},
    "groups by top_k_over_groups": replace(PRESETS["megatron"].rule, top_k=6, num_groups=4, top_groups=2),
    "sigmoid, sum 1": RouteRule(3, "sigmoid", normalize=True),
    "sqrtsoftplus": RouteRule(4, "sqrtsoftplus", normalize=True, epsilon=1e-20),
    "sqrtsoftplus, sum 1": RouteRule(2, "sqrtsoftplus", normalize=True),
    "softmax, epsilon": RouteRule(3, normalize=True, epsilon=0.1),
}


SMALL = ("deepseek_v3", "mixtral", "sqrtsoftplus, sum 1")


def logits_of(tokens: int, experts: int) -> Tensor:
    """In steps of an eighth: ties, and values so far apart that a few roundings cannot swap them; beside 0, where the
    sigmoids of a logit and of its negative have the same sum for all of them."""
    return (16 * torch.randn(tokens, experts, generator=torch.Generator().manual_seed(0))).round() / 8 + 0.3


def routed(
    logits: Tensor, rule: RouteRule, bias: Tensor | None = None, mask: Tensor | None = None
) -> tuple[Routing, Tensor, Tensor]:
    """The routing, and gradients of the logits from weights and from scores."""
    leaf = logits.clone().requires_grad_()
    routing = ops.moe_route(leaf, rule, bias=bias, mask=mask)
    generator = torch.Generator().manual_seed(1)

    def gradient(result: Tensor) -> Tensor:
        upstream = torch.randn(result.shape, generator=generator).to(result.device)
        # weights and scores come from the same masked logits: one node, which the first of them would free
        return torch.autograd.grad(result, leaf, upstream, retain_graph=True)[0]

    from_weights, from_scores = gradient(routing.weights), gradient(routing.scores)
    return routing, from_weights, from_scores


def compare(logits: Tensor, rule: RouteRule, bias: Tensor | None = None, mask: Tensor | None = None) -> None:
    on_gpu = [None if t is None else t.to(DEVICE) for t in (bias, mask)]
    found, wanted = routed(logits.to(DEVICE), rule, *on_gpu), routed(logits, rule, bias, mask)
    assert torch.equal(found[0].indices.cpu(), wanted[0].indices)
    assert torch.equal(found[0].counts.cpu(), wanted[0].counts)
    torch.testing.assert_close(found[0].weights.cpu(), wanted[0].weights, rtol=2e-6, atol=1e-6 * rule.scale)
    torch.testing.assert_close(found[0].scores.cpu(), wanted[0].scores, rtol=1e-5, atol=1e-7)
    for grad, wanted_grad in zip(found[1:], wanted[1:], strict=True):
        torch.testing.assert_close(grad.cpu(), wanted_grad, rtol=1e-5, atol=2e-6 * rule.scale)


def check_rule(name: str) -> None:
    """With padding, and the bias of a preset that has one."""
    bias = (8 * torch.randn(48, generator=torch.Generator().manual_seed(2))).round() / 8
    compare(logits_of(33, 48), RULES[name], bias if "deepseek" in name else None, torch.arange(33) % 3 > 0)


@pytest.mark.parametrize("name", SMALL)
def test_small_batches_are_routed_as_on_the_cpu(name: str) -> None:
    check_rule(name)


@pytest.mark.parametrize("name", [name for name in RULES if name not in SMALL])
def test_every_rule_routes_as_on_the_cpu(name: str) -> None:
    check_rule(name)


@pytest.mark.parametrize("experts", [1, 8, 257, 2048])
def test_few_and_many_experts(experts: int) -> None:
    compare(logits_of(70, experts), RouteRule(min(experts, 8), "sigmoid", normalize=True, epsilon=1e-20))


def test_real_sizes_give_the_same_bits_every_time() -> None:
    logits = torch.randn(4096, 256, device=DEVICE)
    rule = PRESETS["deepseek_v3"].rule
    compare(logits_of(4096, 256), rule)
    first, second = routed(logits, rule), routed(logits, rule)
    assert torch.equal(first[0].weights, second[0].weights)
    assert torch.equal(first[0].counts, second[0].counts)
    assert torch.equal(first[1], second[1])
    assert int(first[0].counts.sum()) == 4096 * rule.top_k


def test_small_batch_with_nan_has_valid_indices_and_spoils_its_token_alone() -> None:
    logits = torch.randn(5, 16, device=DEVICE)
    logits[1, 3], logits[3] = float("nan"), float("nan")
    routing, grad, _ = routed(logits, PRESETS["mixtral"].rule)
    assert int(routing.indices.min()) >= 0
    assert int(routing.indices.max()) < 16
    assert routing.weights[[1, 3]].isnan().all()
    assert routing.weights[[0, 2, 4]].isfinite().all()
    assert grad[[0, 2, 4]].isfinite().all()


def test_small_weights_of_far_logits_keep_their_relative_precision() -> None:
    """The product of -60 and log2(e), rounded, would make 3e-6 of it."""
    logits = torch.tensor([[0.0, -20.3, -40.7, -60.1]])
    found = ops.moe_route(logits.to(DEVICE), RouteRule(4))
    torch.testing.assert_close(found.weights.cpu().double(), logits.double().softmax(-1), rtol=1e-6, atol=0.0)


def test_routing_waits_for_nothing_and_a_graph_follows_the_logits() -> None:
    rule = PRESETS["deepseek_v3"].rule
    logits, bias = torch.randn(512, 256, device=DEVICE), torch.randn(256, device=DEVICE) / 8
    routed(logits, rule, bias)
    torch.cuda.set_sync_debug_mode("error")
    try:
        ops.moe_route(logits, rule, bias=bias)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = ops.moe_route(logits, rule, bias=bias)
    for scale in (1.0, -1.0):
        logits.mul_(scale)
        graph.replay()
        again = ops.moe_route(logits, rule, bias=bias)
        assert torch.equal(captured.indices, again.indices)
        assert torch.equal(captured.weights, again.weights)
        assert torch.equal(captured.counts, again.counts)


def test_a_router_launches_two_kernels_for_its_choice() -> None:
    logits = torch.randn(512, 256, device=DEVICE)
    rule = PRESETS["deepseek_v3"].rule
    ops.moe_route(logits, rule)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        ops.moe_route(logits, rule)
        torch.cuda.synchronize()
    launched = [event.name for event in profile.events() if event.device_type.name == "CUDA"]
    assert len(launched) <= 2, launched  # the counts are zeroed, and everything


def test_small_router_trains_with_losses_as_on_the_cpu() -> None:
    generator = torch.Generator().manual_seed(3)
    x, upstream = torch.randn(2, 20, 32, generator=generator), torch.randn(40, 8, generator=generator)
    grads = []
    for device in ("cpu", DEVICE):
        torch.manual_seed(0)
        router = PRESETS["deepseek_v3"].router(32, 16).to(device)
        assert isinstance(router, Router)
        routing = router(x.to(device))
        dense = routing.weights.new_zeros(40, 16).scatter(1, routing.indices, routing.weights)
        (grad,) = torch.autograd.grad((dense[:, :8] * upstream.to(device)).sum(), router.weight)
        grads.append(grad.cpu())
        assert int(router.load.sum()) == 40 * 8
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-4, atol=1e-5)  # the product that makes the logits, too
