"""The Triton kernels of routing against the CPU op and autograd through it; run by test_moe_route_triton.py in
the interpreter.

Half of the logits are rounded to quarters: rows are full of ties, which every device has to decide alike.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fastpar import ops
from fastpar.contracts.moe import RouteRule, Routing
from fastpar.expert import PRESETS
from fastpar.kernels import moe_route as kernels
from fastpar.ops.moe import route_triton as _moe_route_triton

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of NaN and infinities

RULES = {
    **{name: preset.rule for name, preset in PRESETS.items()},
    "megatron, groups": replace(PRESETS["megatron"].rule, top_k=6, num_groups=4, top_groups=2),
    "torchtitan, normalised": replace(PRESETS["torchtitan"].rule, top_k=3, normalize=True, epsilon=1e-20, scale=2.0),
    "sigmoid, sum 1": RouteRule(3, "sigmoid", normalize=True),
    "sqrtsoftplus": RouteRule(4, "sqrtsoftplus", normalize=True, epsilon=1e-20),
    "sqrtsoftplus, sum 1": RouteRule(2, "sqrtsoftplus", normalize=True, scale=0.5),
    "softmax, epsilon, groups by max": RouteRule(
        3, normalize=True, epsilon=0.1, num_groups=3, top_groups=2, group_score="max"
    ),
    "softmax of the chosen, epsilon": RouteRule(2, when="after", normalize=True, epsilon=0.1),
}


def logits_of(tokens: int, experts: int, seed: int = 0) -> Tensor:
    x = 3 * torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed))
    x[::2] = (4 * x[::2]).round() / 4 + 0.3  # beside 0, where the sigmoids of a logit and its negative add up to 1
    return x


def both(
    logits: Tensor, rule: RouteRule, *, bias: Tensor | None = None, mask: Tensor | None = None
) -> list[tuple[Routing, Tensor]]:
    """The kernels' routing and the CPU op's, each with the gradient of the logits; all weights and scores get one."""
    found = []
    for route in (_moe_route_triton.moe_route, ops.moe_route):
        leaf = logits.clone().requires_grad_()
        routing = route(leaf, rule, bias=bias, mask=mask)
        upstream = torch.randn(routing.weights.shape, generator=torch.Generator().manual_seed(9))
        (grad,) = torch.autograd.grad(routing.weights, leaf, upstream)
        found.append((routing, grad))
    return found


def compare(logits: Tensor, rule: RouteRule, *, bias: Tensor | None = None, mask: Tensor | None = None) -> None:
    """Choices and counts are the same; weights to 1e-6, gradients to that of their largest."""
    (routing, grad), (wanted, wanted_grad) = both(logits, rule, bias=bias, mask=mask)
    assert torch.equal(routing.indices, wanted.indices)
    assert torch.equal(routing.counts, wanted.counts)
    assert (routing.indices.dtype, routing.counts.dtype) == (torch.int64, torch.int64)
    torch.testing.assert_close(routing.weights, wanted.weights, rtol=1e-6, atol=1e-6 * rule.scale)
    torch.testing.assert_close(grad, wanted_grad, rtol=1e-5, atol=1e-6 * rule.scale)


@pytest.mark.parametrize("name", RULES)
def test_every_rule_chooses_and_weighs_as_the_cpu_does(name: str) -> None:
    """24 experts: no power of two, nor is the width of a group."""
    bias = (torch.randn(24, generator=torch.Generator().manual_seed(1)) * 8).round() / 8
    compare(logits_of(9, 24), RULES[name], bias=bias if "deepseek" in name or "groups" in name else None)


@pytest.mark.parametrize(
    ("tokens", "experts", "rule"),
    [
        (1, 1, RouteRule(1)),
        (5, 7, RouteRule(7, "sigmoid")),
        (70, 8, RouteRule(2, normalize=True)),
        (3, 257, RouteRule(8, when="after")),
        (2, 512, replace(PRESETS["deepseek_v3"].rule, num_groups=8)),
        (2, 160, RouteRule(6, scale=16.0, num_groups=8, top_groups=3, group_score="max")),
        (1, 2048, RouteRule(1)),
    ],
    ids=str,
)
def test_every_size_of_tokens_and_experts(tokens: int, experts: int, rule: RouteRule) -> None:
    compare(logits_of(tokens, experts), rule)


def test_zeros_of_both_signs_and_groups_of_one_sum_are_ties() -> None:
    logits = torch.tensor([[-0.0, 0.0, -1.0, 0.0, -1.0, -0.0]])
    for rule, wanted in (
        (RouteRule(3, when="after"), [0, 1, 3]),
        (RouteRule(2, when="after", num_groups=3, top_groups=1), [0, 1]),
        (RouteRule(3, when="after", num_groups=3, top_groups=2, group_score="max"), [0, 1, 3]),
    ):
        assert kernels.forward(logits, rule).indices.tolist() == [wanted]
        assert ops.moe_route(logits, rule).indices.tolist() == [wanted]


def test_masked_tokens_go_nowhere_and_their_nan_nowhere_either() -> None:
    logits = logits_of(6, 10)
    logits[4] = math.nan
    mask = torch.tensor([True, False, True, True, False, True])
    for rule in (RouteRule(3), RouteRule(3, when="after"), RouteRule(2, "sigmoid", normalize=True, epsilon=1e-20)):
        compare(logits, rule, mask=mask)
    routing, _ = both(logits, RouteRule(3), mask=mask)[0]
    assert (routing.indices[~mask] == -1).all()
    assert not routing.weights[~mask].any()


@pytest.mark.parametrize("rule", [RouteRule(2), RouteRule(10, "sigmoid"), RouteRule(3, when="after")], ids=str)
def test_a_nan_logit_spoils_its_token_alone(rule: RouteRule) -> None:
    logits = logits_of(5, 10)
    logits[1, 3], logits[3] = math.nan, math.nan
    for limited in (rule, replace(rule, num_groups=2, top_groups=1) if rule.top_k < 5 else rule):
        (routing, grad), (wanted, _) = both(logits, limited)
        assert torch.equal(routing.indices, wanted.indices)
        assert torch.equal(routing.counts, wanted.counts)
        assert routing.weights[[1, 3]].isnan().all()
        assert grad[[1, 3]].isnan().all()
        assert routing.weights[[0, 2, 4]].isfinite().all()
        assert grad[[0, 2, 4]].isfinite().all()


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_extreme_logits_have_finite_weights_and_gradients(score: str) -> None:
    """-inf is an expert that nobody may choose, as long as there are others."""
    logits = torch.tensor(
        [[-200.0, -201.0, -300.0], [200.0, 190.0, -200.0], [1.0, -math.inf, 0.0], [-25.0, -24.0, -18.0]]
    )
    compare(logits, RouteRule(2, score, normalize=True))
    compare(logits, RouteRule(2, score, when="after"))
    found = _moe_route_triton.moe_route(logits, RouteRule(2, score, normalize=True), None, None)
    torch.testing.assert_close(found.weights.sum(-1), torch.ones(4))


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_scores_of_all_experts_and_their_gradient(score: str) -> None:
    logits = logits_of(7, 24) * 4
    upstream = torch.randn(7, 24, generator=torch.Generator().manual_seed(2))
    found, wanted = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    scores = _moe_route_triton.moe_route(found, RouteRule(2, score), None, None).scores
    wanted_scores = ops.moe_route(wanted, RouteRule(2, score)).scores
    torch.testing.assert_close(scores, wanted_scores, rtol=1e-5, atol=1e-7)  # logarithms of size 50: 4e-6
    torch.testing.assert_close(
        torch.autograd.grad(scores, found, upstream), torch.autograd.grad(wanted_scores, wanted, upstream),
        rtol=1e-5, atol=1e-6,
    )  # fmt: skip


def test_the_worked_examples() -> None:
    logits = torch.tensor([[0.0, math.log(3.0), 0.0]])
    rule = RouteRule(2, normalize=True)
    routed = kernels.forward(logits, rule)
    assert routed.indices.tolist() == [[1, 0]]
    torch.testing.assert_close(routed.weights, torch.tensor([[0.75, 0.25]]))
    assert routed.counts.tolist() == [1, 1, 0]
    grad = kernels.backward(torch.tensor([[1.0, 0.0]]), logits, routed.indices, rule)
    torch.testing.assert_close(grad, torch.tensor([[-0.1875, 0.1875, 0.0]]))
    logits = torch.tensor([[0.0, math.log(3.0)]])
    torch.testing.assert_close(kernels.scores(logits, "sigmoid"), torch.tensor([[0.4, 0.6]]))
    grad = kernels.scores_backward(torch.tensor([[1.0, 0.0]]), logits, "sigmoid")
    torch.testing.assert_close(grad, torch.tensor([[0.12, -0.06]]))
    grouped = torch.tensor([[1.0, 5.0, 4.0, 4.0, 9.0, 0.0]])  # of close_groups
    rule = RouteRule(4, when="after", num_groups=3, top_groups=2)
    assert sorted(kernels.forward(grouped, rule).indices[0].tolist()) == [2, 3, 4, 5]


def test_no_tokens_columns_apart_and_16_bits() -> None:
    rule = RouteRule(2, "sigmoid")
    compare(logits_of(0, 6), rule)
    for logits in (logits_of(12, 4).T, logits_of(4, 12).bfloat16()):
        compare(logits, rule)


def test_a_second_derivative_is_an_error_that_names_an_alternative() -> None:
    logits = logits_of(3, 6).requires_grad_()
    routing = _moe_route_triton.moe_route(logits, RouteRule(2), None, None)
    for result in (routing.weights, routing.scores):
        (grad,) = torch.autograd.grad(result.square().sum(), logits, create_graph=True)
        with pytest.raises(RuntimeError, match=r"fastpar\.reference\.moe_route has a second one"):
            grad.sum().backward()


def test_wrong_arguments_are_named_as_on_the_cpu() -> None:
    with pytest.raises(ValueError, match=r"top_k \(7\).*experts \(6\)"):
        _moe_route_triton.moe_route(torch.zeros(4, 6), RouteRule(7), None, None)
    with pytest.raises(ValueError, match=r"bias must have shape \(6,\)"):
        _moe_route_triton.moe_route(torch.zeros(4, 6), RouteRule(1), torch.zeros(5), None)
