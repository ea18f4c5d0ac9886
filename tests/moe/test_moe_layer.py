"""MoELayer in every layout against one process, and one process against a loop over tokens in float64."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.utils.checkpoint

import fastpar as fp
from fastpar.contracts.moe import activate
from fastpar.expert import Capacity, LossRule
from fastpar.ops.moe.mlp import ExpertRule
from tests.dist import run_ranks
from tests.moe.moe_layer_ranks import (
    TOP_K,
    ZERO_LAYOUTS,
    Block,
    all_layouts,
    batch,
    few_tokens,
    losses_over_tp,
    refused_by_zero,
    train,
    zero_layouts,
    zero_train,
)


def reference(block, x, rule):
    """The block token by token in float64."""
    moe = block.moe
    h = (x * block.scale).reshape(-1, x.shape[-1])
    gate_up, down = moe.experts.gate_up_proj.flatten(1, 2), moe.experts.down_proj
    biases = moe.experts.gate_up_bias.flatten(1), moe.experts.down_bias
    shared = moe.shared
    out = []
    for token in h:
        probs = torch.softmax(moe.router.weight @ token, 0)
        chosen = probs.argsort(descending=True, stable=True)[:TOP_K]
        weights = probs[chosen] / probs[chosen].sum()
        total = shared.down_proj(activate(shared.gate_up_proj(token), shared.rule)) * torch.sigmoid(shared.gate(token))
        for expert, weight in zip(chosen.tolist(), weights, strict=True):
            entered = token * weight if rule.weigh == "input" else token
            hidden = activate(gate_up[expert] @ entered + biases[0][expert], rule)
            hidden = hidden * weight if rule.weigh == "before" else hidden
            row = down[expert] @ hidden + biases[1][expert]
            total = total + (row * weight if rule.weigh == "after" else row)
        out.append(total)
    return x + torch.stack(out).view(x.shape)


RULES = [ExpertRule(), ExpertRule("gelu", weigh="before"), ExpertRule("clamped_swiglu", weigh="input")]


@pytest.mark.parametrize("world", [2, 4])
def test_every_layout_equals_one_process(world):
    wanted = {rule: train(None, rule) for rule in RULES}
    results = run_ranks(world, all_layouts, RULES)
    assert len(results[0]) == {2: 6, 4: 18}[world] * len(RULES)
    for found in results:
        for layout, values in found:
            want = wanted[layout["rule"]]
            assert values.keys() == want.keys()
            for name, value in values.items():
                torch.testing.assert_close(
                    value, want[name], rtol=1e-6, atol=1e-6, msg=lambda m, where=f"{layout}, {name}": f"{where}: {m}"
                )


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.activation}, {rule.weigh}")
def test_output_and_every_gradient_match_a_loop_over_tokens_in_float64(rule):
    block = Block(None, rule)
    wide = copy.deepcopy(block).double()
    x, target = batch()
    wide_x = x.double().requires_grad_()
    x.requires_grad_()
    out, want = block(x), reference(wide, wide_x, rule)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-6)
    (out - target).square().mean().backward()
    (want - target).square().mean().backward()
    for (name, p), q in zip(block.named_parameters(), wide.parameters(), strict=True):
        torch.testing.assert_close(
            p.grad.double(), q.grad, rtol=1e-4, atol=1e-7, msg=lambda m, name=name: f"{name}: {m}"
        )
    torch.testing.assert_close(x.grad.double(), wide_x.grad, rtol=1e-4, atol=1e-7)


def test_tokens_that_tp_does_not_divide_and_sequence_parallelism_equal_one_process():
    for found in run_ranks(2, few_tokens):
        for got, want in found:
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_a_preset_gives_a_layer_that_counts_drops_and_adds_losses():
    torch.manual_seed(0)
    layer = fp.expert.MoELayer.from_preset(
        "switch", 8, 12, 4, shared_inner=6, capacity=Capacity(0.5, minimum=1), router={"jitter": 0.0}
    )
    x = torch.randn(2, 6, 8)
    plain = copy.deepcopy(layer)
    plain.router.losses = LossRule()
    for one in (layer, plain):
        one(x).sum().backward()
    capacity = 2  # ceil(12 / 4 * 0.5)
    loads = layer.router.load
    assert loads.sum() == 12
    assert layer.dropped == (loads - capacity).clamp_min(0).sum() > 0
    before = layer.dropped.clone()
    torch.utils.checkpoint.checkpoint(layer, x.requires_grad_(), use_reentrant=False).sum().backward()
    assert layer.dropped == 2 * before
    layer.zero_grad()
    layer(x).sum().backward()
    assert not torch.equal(layer.router.weight.grad, plain.router.weight.grad)
    assert torch.equal(layer.experts.down_proj.grad, plain.experts.down_proj.grad)


def test_losses_of_a_layer_do_not_depend_on_tp():
    for found in run_ranks(2, losses_over_tp):
        for got, want in found:
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("world", [2, 4])
def test_zero_stages_train_experts_as_one_process_does(world):
    want = zero_train(None, 0)
    for found in run_ranks(world, zero_layouts):
        assert len(found) == 3 * len(ZERO_LAYOUTS[world])
        for sizes, stage, values in found:
            for name, value in values.items():
                where = f"{sizes}, stage {stage}, {name}"
                torch.testing.assert_close(value, want[name], rtol=1e-5, atol=2e-6, msg=lambda m, w=where: f"{w}: {m}")


def test_experts_without_a_mesh_are_refused():
    found = run_ranks(2, refused_by_zero)[0]
    assert len(found) == 2
    for message in found:
        assert "group must be the fastpar Mesh for experts split over its ep or etp" in message
