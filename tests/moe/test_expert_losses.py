"""Balance losses and biases: their values, and that no layout, accumulation or recomputation changes their scale."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from fastpar.expert import (
    BiasRule,
    LossRule,
    Router,
    attach_loss,
    aux_loss,
    collected_losses,
    expert_loads,
    load_balance,
    preset,
    record_routes,
    sequence_aux_loss,
    set_loss_scale,
    update_biases,
    update_biases_with,
    z_loss,
)
from fastpar.ops.moe.route import RouteRule, moe_route
from fastpar.recompute import checkpoint
from tests.dist import run_ranks
from tests.moe.expert_loss_ranks import (
    NUM_SEQUENCES,
    batch,
    moved_biases,
    router,
    router_gradient,
    shares,
    split_global_batch,
    split_losses,
    tokens,
    told_of_tensor_parallel_ranks,
)

LOSSES = LossRule("switch", coeff=0.1, z_coeff=0.01)


def balance_by_loops(scores, indices, top_k):
    """E * sum of (choices of e / tokens / top_k) * (mean score of e), token by token."""
    num_tokens, num_experts = scores.shape
    total = 0.0
    for expert in range(num_experts):
        choices = sum(row.count(expert) for row in indices.tolist())
        total += choices / num_tokens / top_k * sum(scores[:, expert].tolist()) / num_tokens
    return num_experts * total


def test_the_worked_examples():
    scores = torch.tensor([[0.8, 0.2], [0.6, 0.4]])
    assert aux_loss(scores, torch.tensor([[0], [0]])).item() == pytest.approx(1.4)
    assert z_loss(torch.zeros(1, 2)).item() == pytest.approx(math.log(2) ** 2)


def test_even_loads_cost_one_or_top_k():
    scores = torch.full((12, 6), 1 / 6)
    indices = (torch.arange(36) % 6).view(12, 3)
    assert aux_loss(scores, indices).item() == pytest.approx(1.0)
    assert aux_loss(scores, indices, convention="huggingface").item() == pytest.approx(3.0)


def test_losses_match_loops_over_tokens_without_padding():
    logits, mask, sequences = batch(23)
    found = shares(logits, mask, sequences)
    routing = moe_route(logits[mask], RouteRule(2, "sigmoid"))
    assert found["switch"][0].item() == pytest.approx(balance_by_loops(routing.scores, routing.indices, 2))
    assert found["huggingface"][0].item() == pytest.approx(balance_by_loops(routing.scores, routing.indices, 1))
    assert found["global_batch"][0] == found["switch"][0]
    each = [
        balance_by_loops(routing.scores[kept], routing.indices[kept], 2)
        for kept in (sequences[mask] == s for s in range(NUM_SEQUENCES))
    ]
    assert found["sequence"][0].item() == pytest.approx(sum(each) / NUM_SEQUENCES)
    wanted = sum(math.log(sum(map(math.exp, row))) ** 2 for row in logits[mask].tolist()) / int(mask.sum())
    assert found["z"][0].item() == pytest.approx(wanted)
    for _, grad in found.values():
        assert not grad[~mask].any()  # though there are NaN
        assert grad[mask].any()


def test_the_balance_loss_has_its_gradient_through_the_scores_alone():
    logits = batch(9)[0].nan_to_num(0.5).requires_grad_()
    indices = moe_route(logits, RouteRule(2)).indices
    assert torch.autograd.gradcheck(lambda x: aux_loss(x.softmax(-1), indices), (logits,), fast_mode=True)
    assert torch.autograd.gradcheck(z_loss, (logits,), fast_mode=True)


def test_sequences_without_tokens_are_left_out():
    logits, mask, sequences = batch(23)
    routing = moe_route(logits.nan_to_num(), RouteRule(2), mask=mask & (sequences > 0))
    found = sequence_aux_loss(routing.scores, routing.indices, sequences, NUM_SEQUENCES, mask=mask & (sequences > 0))
    kept = mask & (sequences > 0)
    wanted = sequence_aux_loss(routing.scores[kept], routing.indices[kept], sequences[kept] - 1, NUM_SEQUENCES - 1)
    torch.testing.assert_close(found, wanted)


def test_no_tokens_cost_nothing():
    logits, _, sequences = batch(8)
    for kept in (torch.zeros(8, dtype=torch.bool), torch.zeros(0, dtype=torch.bool)):
        for loss, grad in shares(logits[: len(kept)], kept, sequences[: len(kept)]).values():
            assert loss == 0
            assert not grad.any()


def test_the_huggingface_loss_is_that_of_transformers():
    modeling = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    layers = [torch.randn(10, 6, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    mask = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 0, 0]])
    rule = preset("mixtral").rule
    for attention_mask in (None, mask):
        joined = moe_route(torch.cat(layers), rule)
        kept = None if attention_mask is None else attention_mask.bool().flatten().repeat(3)
        ours = aux_loss(joined.scores, joined.indices, convention="huggingface", mask=kept)
        wanted = modeling.load_balancing_loss_func(tuple(layers), 6, 2, attention_mask)
        torch.testing.assert_close(ours, wanted)


def test_the_switch_losses_are_those_of_transformers():
    modeling = pytest.importorskip("transformers.models.switch_transformers.modeling_switch_transformers")
    logits = torch.randn(3, 7, 4, generator=torch.Generator().manual_seed(0))
    routing = moe_route(logits.flatten(0, 1), preset("switch").rule)
    sequences = torch.arange(3).repeat_interleave(7)
    ours = sequence_aux_loss(routing.scores, routing.indices, sequences, 3)
    wanted = modeling.load_balancing_loss_func(logits.softmax(-1), routing.indices.view(3, 7, 1))
    torch.testing.assert_close(ours, wanted)
    torch.testing.assert_close(z_loss(routing.logits), modeling.router_z_loss_func(logits))


# ---- over ranks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(14, 9), (0, 5, 18)], ids=str)
def test_shares_add_up_to_the_loss_of_the_whole_and_gradients_to_its_gradient(sizes):
    found = run_ranks(len(sizes), split_losses, sizes)
    whole = shares(*batch(sum(sizes)))
    for kind, (loss, grad) in whole.items():
        torch.testing.assert_close(sum(rank[kind][0] for rank in found), loss, rtol=1e-12, atol=0)
        torch.testing.assert_close(torch.cat([rank[kind][1] for rank in found]), grad, rtol=1e-12, atol=1e-15)


def test_the_global_batch_loss_does_not_depend_on_how_the_batch_is_split():
    sizes = (9, 3, 0, 12)
    found = run_ranks(4, split_global_batch, sizes)
    loss, grad = shares(*batch(sum(sizes)))["switch"]
    # Shares add up over two tp ranks; over two data-parallel ranks they are averaged, as gradients are.
    torch.testing.assert_close(sum(rank[0] for rank in found) / 2, loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(torch.cat([rank[1] for rank in found]) / 2, grad, rtol=1e-12, atol=1e-15)


def test_a_router_with_split_tokens_has_the_gradient_of_the_whole_with_one_collective():
    found = run_ranks(3, router_gradient, (4, 0, 13))
    layer = router(losses=LOSSES)
    (layer(tokens(17)).weights.sum() * 0.0).backward()
    for grad, collectives in found:
        torch.testing.assert_close(grad, layer.weight.grad)
        assert collectives == 1  # the counts serve both losses


# ---- into backward ---------------------------------------------------------------------------------------------------


def test_a_router_told_of_ranks_with_the_same_tokens_is_refused():
    """Each would count them all, and have half of the loss's gradient."""
    for found in run_ranks(2, told_of_tensor_parallel_ranks):
        assert "balances over the tokens of the ranks [0, 1]" in found
        assert "[0, 1] hold the same tokens" in found
        assert "leave its group out" in found


def test_an_attached_loss_gets_its_coefficient_whatever_the_main_loss_is():
    x, y, scale = torch.ones(3, requires_grad=True), torch.tensor(2.0, requires_grad=True), torch.tensor(7.0)
    attached = attach_loss(x, y.square(), coeff=0.5, scale=scale)
    assert torch.equal(attached, x)
    scale.fill_(10.0)  # read in backward
    (attached * 3.0).sum().backward()
    assert x.grad.tolist() == [3.0] * 3
    assert y.grad.item() == 0.5 * 10.0 * 2 * 2.0
    with pytest.raises(ValueError, match=r"scalar, got shape \(3,\)"):
        attach_loss(x, x)


def test_attached_losses_are_the_explicit_ones():
    upstream = torch.randn(11, 2, generator=torch.Generator().manual_seed(1))
    grads = []
    for collect in (False, True):
        layer = router(losses=LOSSES, collect=collect)
        model = torch.nn.ModuleDict({"gate": layer})
        loss = (layer(tokens(11)).weights * upstream).sum()
        if collect:
            losses = collected_losses(model)
            assert set(losses) == {"gate.aux", "gate.z"}
            assert collected_losses(model) == {}
            loss = loss + sum(losses.values())
        loss.backward()
        grads.append(layer.weight.grad)
    torch.testing.assert_close(grads[0], grads[1])
    plain = router()
    (plain(tokens(11)).weights * upstream).sum().backward()
    assert not torch.allclose(plain.weight.grad, grads[0], atol=1e-4)


def test_accumulation_averages_the_losses_of_microbatches():
    x = tokens(24)
    layer = router(losses=LOSSES)
    set_loss_scale(torch.nn.ModuleList([layer]), 1 / 3)
    apart = []
    for part in x.split(8):
        (layer(part).weights.sum() / 3 * 0.0).backward()
        alone = router(losses=LOSSES)
        (alone(part).weights.sum() * 0.0).backward()
        apart.append(alone.weight.grad)
    torch.testing.assert_close(layer.weight.grad, torch.stack(apart).mean(0))


RECOMPUTATIONS = {
    "fastpar": checkpoint,
    "torch": lambda f, x: torch_checkpoint(f, x, use_reentrant=False),
    "torch, reentrant": lambda f, x: torch_checkpoint(f, x, use_reentrant=True),
}


def step(layer: Router, recompute=None) -> tuple[torch.Tensor, torch.Tensor]:
    """The router's gradient and load after a step through a layer that may be recomputed."""

    def block(x):
        routing = layer(x)
        return x * routing.weights.sum(-1, keepdim=True).sin()

    x = tokens(13).requires_grad_()
    out = block(x) if recompute is None else recompute(block, x)
    loss = out.square().sum()
    if layer.collect:
        loss = loss + sum(collected_losses(layer).values())
    loss.backward()
    assert layer.weight.grad is not None
    return layer.weight.grad, layer.load


@pytest.mark.parametrize("collect", [False, True], ids=["attached", "collected"])
@pytest.mark.parametrize("name", RECOMPUTATIONS)
def test_losses_and_loads_are_counted_once_under_recomputation(name, collect):
    if collect and name == "torch, reentrant":
        return  # its first forward has no gradients, as losses.py says
    rule = LossRule("huggingface", coeff=0.5, z_coeff=0.1)
    wanted_grad, wanted_load = step(router(losses=rule))
    layer = router(losses=rule, collect=collect)
    with record_routes(layer) as routes:
        grad, load = step(layer, RECOMPUTATIONS[name])
    assert len(routes) == 1
    assert collected_losses(layer) == {}  # none of the second forward
    torch.testing.assert_close(grad, wanted_grad)
    assert torch.equal(load, wanted_load)
    assert load.sum() == 13 * 2


def test_a_second_backward_through_the_same_forward_counts_no_load():
    layer = router()
    loss = layer(tokens(5)).weights.sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert layer.load.sum() == 10


def test_loads_are_counted_in_training_and_without_gradients_in_front_too():
    layer = router().requires_grad_(False)
    model = torch.nn.ModuleDict({"gate": layer})
    counts = layer(tokens(5)).counts
    with torch.no_grad():
        layer(tokens(5))
    layer.eval()(tokens(5))
    assert torch.equal(expert_loads(model)["gate"], counts)
    assert torch.equal(expert_loads(model, reset=True)["gate"], counts)
    assert not expert_loads(model)["gate"].any()


def test_the_balance_of_loads():
    balance = load_balance(torch.tensor([[6, 2, 0, 0], [5, 5, 5, 5], [0, 0, 0, 0]]))
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25)) / math.log(4)
    torch.testing.assert_close(balance["max_over_mean"], torch.tensor([3.0, 1.0, 0.0]))
    torch.testing.assert_close(balance["entropy"], torch.tensor([entropy, 1.0, 0.0]))
    torch.testing.assert_close(balance["idle"], torch.tensor([0.5, 0.0, 0.0]))


def test_the_sequence_loss_takes_the_rows_of_a_batch_for_sequences():
    x = tokens(12)
    rule = LossRule("sequence", coeff=1.0)
    grads = []
    for options in ({}, {"sequences": torch.arange(3).repeat_interleave(4), "num_sequences": 3}):
        layer = router(losses=rule)
        (layer(x if options else x.view(3, 4, 8), **options).weights.sum() * 0.0).backward()
        grads.append(layer.weight.grad)
    assert torch.equal(*grads)
    with pytest.raises(ValueError, match="'sequence' loss needs"):
        router(losses=rule)(x)


def test_megatrons_counts_are_those_of_the_scores_without_bias():
    x = tokens(12)
    layers = []
    for counted in ("routed", "top_scores"):
        layer = router(losses=LossRule("switch", coeff=1.0, counted=counted), bias_rule=BiasRule())
        layer.e_score_correction_bias[0] = 9.0
        (layer(x).weights.sum() * 0.0).backward()
        layers.append(layer)
    plain = router(losses=LossRule("switch", coeff=1.0))
    (plain(x).weights.sum() * 0.0).backward()
    assert torch.equal(layers[1].weight.grad, plain.weight.grad)
    assert not torch.allclose(layers[0].weight.grad, plain.weight.grad, atol=1e-3)


# ---- biases ----------------------------------------------------------------------------------------------------------


def bias_after(load: list[int], rule: BiasRule) -> list[float]:
    layer = Router(4, len(load), RouteRule(1), bias_rule=rule)
    layer.load.copy_(torch.tensor(load))
    update_biases(layer)
    assert not layer.load.any()
    assert layer.e_score_correction_bias is not None
    return layer.e_score_correction_bias.tolist()


def test_biases_move_against_the_load():
    assert bias_after([5, 1, 3, 3], BiasRule(0.5)) == [-0.5, 0.5, 0.0, 0.0]
    assert bias_after([9, 1, 1, 1], BiasRule(0.5, centered=True)) == [-0.75, 0.25, 0.25, 0.25]
    assert bias_after([0, 0, 0, 0], BiasRule(0.5)) == [0.0] * 4
    assert bias_after([2**26 + 1, 2**26 - 1], BiasRule(0.5)) == [-0.5, 0.5]  # one number in float32


def test_biases_are_the_same_on_all_ranks_and_for_any_split_of_the_batch():
    sizes, steps = (5, 0, 11, 3), 3
    found = run_ranks(4, moved_biases, sizes, steps)
    model = torch.nn.ModuleList([router(bias_rule=BiasRule(0.1))])
    for _ in range(steps):
        model[0](tokens(sum(sizes))).weights.sum().backward()
        update_biases(model)
    assert model[0].e_score_correction_bias.any()
    for rank, (first, second, collectives, starts_at) in enumerate(found):
        assert starts_at == rank * 6 // 4
        assert torch.equal(first, model[0].e_score_correction_bias)
        assert torch.equal(second, first)
        assert collectives == 2  # one for each group, for all routers


def test_the_optimizer_hook_moves_biases_once_a_step():
    layer = router(bias_rule=BiasRule(0.1))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    handle = update_biases_with(optimizer, layer)
    for part in tokens(12).split(6):  # two microbatches, one step
        layer(part).weights.sum().backward()
    load = layer.load.clone()
    assert load.sum() == 24
    optimizer.step()
    wanted = 0.1 * torch.sign(load.sum() - 6 * load)
    torch.testing.assert_close(layer.e_score_correction_bias, wanted)
    assert not layer.load.any()
    handle.remove()
    layer(tokens(6)).weights.sum().backward()
    optimizer.step()
    torch.testing.assert_close(layer.e_score_correction_bias, wanted)


def test_the_bias_evens_out_a_skewed_load():
    layer, x = router(bias_rule=BiasRule(0.1)), tokens(300) + 1.0
    layer.rule = RouteRule(2, when="after")
    counts = []
    with torch.no_grad():
        for _ in range(60):
            counts.append(layer(x).counts)
            layer.load.copy_(counts[-1])
            update_biases(layer)
    assert counts[0].max() > 150  # a mean of 100
    assert counts[-1].max() < 115


def test_wrong_rules_are_named():
    for call, match in (
        (lambda: LossRule("even"), "balance must be one of none, switch"),
        (lambda: LossRule("none", coeff=0.1), r"coeff \(0.1\) needs a balance loss"),
        (lambda: LossRule(counted="all"), "counted must be one of routed"),
        (lambda: aux_loss(torch.zeros(2, 3), torch.zeros(3, 1).long()), r"got \(2, 3\) and \(3, 1\)"),
        (lambda: aux_loss(torch.zeros(2, 3), torch.zeros(2, 1).long(), convention="top"), "convention must be"),
    ):
        with pytest.raises(ValueError, match=match):
            call()
