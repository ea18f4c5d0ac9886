"""Routing against a loop over tokens in float64, against transformers' routers, and at its edges."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from fastpar import ops, reference
from fastpar.expert import BiasRule, LossRule, Router, balance_routes, preset, record_routes, replay_routes
from fastpar.ops.moe.route import (
    RouteRule,
    balanced_indices,
    expert_choice_route,
    hash_table,
    moe_route,
    router_logits,
    top_experts,
)

IMPLEMENTATIONS = {"ops": ops.moe_route, "reference": reference.moe_route}
RULES = {
    "softmax, before": RouteRule(3),
    "softmax, before, normalised": RouteRule(3, normalize=True),
    "softmax, before, epsilon": RouteRule(3, normalize=True, epsilon=0.1),
    "softmax, after": RouteRule(3, when="after"),
    "sigmoid": RouteRule(3, "sigmoid", scale=2.5),
    "sigmoid, normalised": RouteRule(3, "sigmoid", normalize=True),
    "sigmoid, after": RouteRule(3, "sigmoid", when="after"),
    "sqrtsoftplus": RouteRule(3, "sqrtsoftplus", normalize=True, epsilon=1e-20),
    "groups by top2": RouteRule(3, "sigmoid", num_groups=4, top_groups=2),
    "groups by top_k_over_groups": RouteRule(
        3, when="after", num_groups=4, top_groups=3, group_score="top_k_over_groups"
    ),
    "groups by max": RouteRule(3, num_groups=6, top_groups=2, group_score="max"),
}


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def best(values: list[float], k: int) -> list[int]:
    """The k largest, largest first, the lowest of equal ones."""
    return sorted(range(len(values)), key=lambda e: (-values[e], e))[:k]


def route_token(logits: list[float], rule: RouteRule, bias: list[float]) -> tuple[list[int], list[float]]:
    """Experts and weights of one token, one number at a time."""
    single = {
        "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
        "sqrtsoftplus": lambda x: math.sqrt(math.log1p(math.exp(x))),
        "softmax": lambda x: math.exp(x) / sum(map(math.exp, logits)),
    }[rule.score]
    scores = [single(x) for x in logits]
    values = [v + b for v, b in zip(logits if rule.when == "after" else scores, bias, strict=True)]
    if rule.top_groups < rule.num_groups:
        width = len(values) // rule.num_groups
        groups = [values[start : start + width] for start in range(0, len(values), width)]
        taken = {"top2": 2, "top_k_over_groups": rule.top_k // rule.top_groups, "max": 1}[rule.group_score]
        open_groups = best([sum(sorted(group)[-taken:]) for group in groups], rule.top_groups)
        values = [v if e // width in open_groups else -math.inf for e, v in enumerate(values)]
    experts = best(values, rule.top_k)
    weights = [scores[e] for e in experts]
    if rule.score == "softmax" and rule.when == "after":
        weights = [math.exp(logits[e]) / sum(math.exp(logits[i]) for i in experts) for e in experts]
    if rule.normalize:
        weights = [w / (sum(weights) + rule.epsilon) for w in weights]
    return experts, [w * rule.scale for w in weights]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_worked_example(implementation):
    logits = torch.tensor([[0.0, math.log(3.0), 0.0]])
    routing = IMPLEMENTATIONS[implementation](logits, RouteRule(2, normalize=True))
    torch.testing.assert_close(routing.scores, torch.tensor([[0.2, 0.6, 0.2]]))
    torch.testing.assert_close(routing.weights, torch.tensor([[0.75, 0.25]]))
    assert routing.indices.tolist() == [[1, 0]]
    assert routing.counts.tolist() == [1, 1, 0]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", RULES)
def test_choices_and_weights_match_a_loop_over_tokens(name, implementation):
    rule = RULES[name]
    # Steps of a quarter: ties in every row, decided alike in float32 and in float64.
    logits = (4 * normal(31, 12)).round() / 4
    bias = (8 * normal(12, seed=1)).round() / 8
    routing = IMPLEMENTATIONS[implementation](logits, rule, bias=bias)
    wanted = [route_token(row, rule, bias.tolist()) for row in logits.tolist()]
    assert routing.indices.tolist() == [experts for experts, _ in wanted]
    weights = torch.tensor([weights for _, weights in wanted], dtype=torch.float64)
    torch.testing.assert_close(routing.weights.double(), weights, rtol=1e-6, atol=1e-7)  # a few roundings of float32
    assert routing.counts.tolist() == torch.bincount(routing.indices.flatten(), minlength=12).tolist()
    torch.testing.assert_close(routing.scores.sum(-1), torch.ones(31))


@pytest.mark.parametrize("name", RULES)
def test_gradients_match_numerical_ones(name):
    logits = normal(4, 12, dtype=torch.float64).requires_grad_()

    def weights_and_scores(x):
        routing = moe_route(x, RULES[name])
        return routing.weights, routing.scores

    assert torch.autograd.gradcheck(weights_and_scores, (logits,), fast_mode=True)


def test_the_bias_changes_the_choice_and_not_the_weights():
    bias = torch.zeros(8).requires_grad_()
    logits = normal(16, 8).requires_grad_()
    rule = RouteRule(2, "sigmoid")
    moved = moe_route(logits, rule, bias=bias + torch.tensor([9.0, *[0.0] * 7]))
    assert (moved.indices[:, 0] == 0).all()
    torch.testing.assert_close(moved.weights[:, 0], logits[:, 0].sigmoid())
    assert torch.autograd.grad(moved.weights.sum(), bias, allow_unused=True) == (None,)


def test_a_nan_logit_spoils_its_token_alone():
    logits = normal(5, 8)
    clean = moe_route(logits, RouteRule(2, "sigmoid", num_groups=2, top_groups=1))
    logits[1, 3], logits[3] = math.nan, math.nan
    for rule in (clean_rule(), RouteRule(8), RouteRule(2, when="after")):
        found = moe_route(logits, rule)
        assert found.indices.min() >= 0
        assert found.indices.max() < 8
        assert found.weights[[1, 3]].isnan().all()
        assert found.weights[[0, 2, 4]].isfinite().all()
    found = moe_route(logits, clean_rule())
    assert torch.equal(found.indices[[0, 2, 4]], clean.indices[[0, 2, 4]])
    assert top_experts(torch.tensor([[math.nan, 1.0, 2.0]]), 3).tolist() == [[2, 1, 0]]  # NaN last


def clean_rule() -> RouteRule:
    return RouteRule(2, "sigmoid", num_groups=2, top_groups=1)


@pytest.mark.parametrize("score", ["sigmoid", "sqrtsoftplus", "softmax"])
def test_weights_sum_to_one_and_have_gradients_at_any_logit(score):
    logits = torch.tensor([[-200.0, -201.0, -300.0], [200.0, 190.0, -200.0]]).requires_grad_()
    routing = moe_route(logits, RouteRule(2, score, normalize=True))
    torch.testing.assert_close(routing.weights.sum(-1), torch.ones(2))
    (routing.weights[:, 0].sum() + routing.scores[:, 1].sum()).backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def test_given_choices_are_weighed_by_the_logits():
    logits = normal(4, 6).requires_grad_()
    given = torch.tensor([[0, 5], [2, 2], [-1, 6], [6, 3]], dtype=torch.int32)
    routing = moe_route(logits, RouteRule(2, when="after"), indices=given)
    assert routing.indices.tolist() == [[0, 5], [2, 2], [-1, -1], [-1, 3]]
    torch.testing.assert_close(routing.weights[0], logits[0, [0, 5]].softmax(-1))
    torch.testing.assert_close(routing.weights[1:], torch.tensor([[0.5, 0.5], [0.0, 0.0], [0.0, 1.0]]))
    assert routing.counts.tolist() == [1, 0, 2, 1, 0, 1]
    (grad,) = torch.autograd.grad(routing.weights[:, 0].sum(), logits)
    assert grad.isfinite().all()
    assert not grad[2].any()


def test_masked_tokens_go_nowhere():
    logits = normal(6, 8)
    logits[4] = math.nan
    mask = torch.tensor([True, False, True, True, False, True])
    routing = moe_route(logits, RouteRule(3), mask=mask)
    assert (routing.indices[~mask] == -1).all()
    assert not routing.weights[~mask].any()
    assert torch.equal(routing.indices[mask], moe_route(logits[mask], RouteRule(3)).indices)
    assert routing.counts.sum() == 4 * 3
    nothing = moe_route(logits, RouteRule(3), mask=torch.zeros(6, dtype=torch.bool))
    assert not nothing.counts.any()
    assert moe_route(logits[:0], RouteRule(3)).indices.shape == (0, 3)


def test_wrong_arguments_are_named():
    logits = torch.zeros(4, 6)
    for error, match, call in (
        (ValueError, r"top_k \(7\).*experts \(6\)", lambda: moe_route(logits, RouteRule(7))),
        (ValueError, r"top_k must be at least 1, got 0", lambda: RouteRule(0)),
        (ValueError, r"num_experts \(6\) must be divisible by num_groups \(4\)",
         lambda: moe_route(logits, RouteRule(1, num_groups=4, top_groups=2))),
        (ValueError, r"top_k \(4\).*1 groups of 3", lambda: moe_route(logits, RouteRule(4, num_groups=2))),
        (ValueError, r"score must be one of softmax", lambda: RouteRule(1, "relu")),
        (ValueError, r"epsilon \(0.1\) is for normalize", lambda: RouteRule(1, epsilon=0.1)),
        (ValueError, r"bias must have shape \(6,\)", lambda: moe_route(logits, RouteRule(1), bias=torch.zeros(5))),
        (TypeError, r"logits must be one of torch.float32", lambda: moe_route(logits.long(), RouteRule(1))),
        (TypeError, r"indices must be int64", lambda: moe_route(logits, RouteRule(1), indices=torch.zeros(4, 1))),
        (ValueError, r"mask must be bool", lambda: moe_route(logits, RouteRule(1), mask=torch.zeros(4))),
        (ValueError, r"preset must be one of mixtral.*'gpt'", lambda: preset("gpt")),
    ):  # fmt: skip
        with pytest.raises(error, match=match):
            call()


# ---- other ways to choose --------------------------------------------------------------------------------------------


def test_experts_choose_tokens():
    logits = (2 * normal(9, 4)).round() / 2
    mask = torch.tensor([True] * 7 + [False] * 2)
    routing = expert_choice_route(logits, 3, mask=mask)
    scores = logits.softmax(-1)
    took = [best([*scores[:7, e].tolist()], 3) for e in range(4)]
    for token in range(9):
        experts = [e for e in range(4) if token in took[e]]
        row = routing.indices[token].tolist()
        assert row == experts + [-1] * (len(row) - len(experts))
        torch.testing.assert_close(routing.weights[token, : len(experts)], scores[token, experts])
        assert not routing.weights[token, len(experts) :].any()
    assert routing.counts.tolist() == [3, 3, 3, 3]
    assert expert_choice_route(logits, 99, mask=mask).counts.tolist() == [7] * 4
    assert expert_choice_route(logits, 3, width=4).indices.shape == (9, 4)
    assert (expert_choice_route(logits, 2, score="sigmoid").weights <= 1).all()
    with pytest.raises(ValueError, match=r"width \(1\) must be at least"):
        expert_choice_route(logits, 9, width=1)
    assert torch.autograd.gradcheck(
        lambda x: expert_choice_route(x, 2).weights,
        (normal(5, 4, dtype=torch.float64).requires_grad_(),),
        fast_mode=True,
    )


def test_a_router_whose_experts_choose_has_even_loads():
    router = Router(8, 6, RouteRule(2), expert_choice=True)
    x = normal(10, 8)
    routing = router(x)
    assert routing.counts.tolist() == [4] * 6  # ceil(10 * 2 / 6)
    with record_routes(router) as routes:
        router(x)
    with replay_routes(router, routes):
        again = router(x)
    assert torch.equal(again.indices, routing.indices)
    torch.testing.assert_close(again.weights, routing.weights)
    for options in ({"bias_rule": BiasRule()}, {"rule": RouteRule(2, normalize=True)}):
        with pytest.raises(ValueError, match="expert_choice goes with top_k and score alone"):
            Router(8, 6, **{"rule": RouteRule(2), **options}, expert_choice=True)
    with pytest.raises(ValueError, match="expert_choice has even loads"):
        Router(8, 6, RouteRule(2), expert_choice=True, losses=LossRule("switch", coeff=0.1))


def test_a_hash_gives_every_id_different_experts_and_all_experts_work():
    table = hash_table(5000, 16, 4, seed=3)
    assert torch.equal(table, hash_table(5000, 16, 4, seed=3))
    assert not torch.equal(table, hash_table(5000, 16, 4, seed=4))
    assert (table.sort(-1).values.diff(dim=-1) > 0).all()
    counts = torch.bincount(table.flatten(), minlength=16)
    assert (counts - 1250).abs().max() < 150  # five standard deviations of a fair draw: 5 * sqrt(5000 * 1/4 * 3/4)


def test_balanced_choices_load_all_experts_alike_from_a_start_of_their_own():
    indices = balanced_indices(12, 8, 2, start=6)
    assert indices[0].tolist() == [6, 7]
    assert torch.bincount(indices.flatten()).tolist() == [3] * 8


# ---- the router module -----------------------------------------------------------------------------------------------


def test_logits_of_16_bit_operands_are_those_of_float32():
    x, weight = normal(300, 40, dtype=torch.bfloat16), normal(6, 40, seed=1, dtype=torch.bfloat16)
    bias, upstream = normal(6, seed=2, dtype=torch.bfloat16), normal(300, 6, seed=3)
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    with torch.autocast("cpu", torch.bfloat16):
        logits = router_logits(*leaves)
    exact = [t.double().requires_grad_() for t in (x, weight, bias)]
    wanted = functional.linear(*exact)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), wanted, rtol=1e-5, atol=1e-5)
    grads = torch.autograd.grad(logits, leaves, upstream)
    for grad, want in zip(grads, torch.autograd.grad(wanted, exact, upstream.double()), strict=True):
        assert grad.dtype == torch.bfloat16
        torch.testing.assert_close(grad.double(), want, rtol=2**-8, atol=1e-5)  # one rounding to bfloat16
    assert router_logits(x[:0], weight).shape == (0, 6)
    mixed = router_logits(x, weight.float())
    torch.testing.assert_close(mixed.double(), wanted - bias.double(), rtol=1e-5, atol=1e-5)


def test_logits_stay_float32_under_autocast():
    x, weight = normal(5, 16), normal(4, 16, seed=1)
    with torch.autocast("cpu", torch.bfloat16):
        logits = router_logits(x, weight)
    assert torch.equal(logits, functional.linear(x, weight))


def test_the_selection_bias_stays_float32_and_exact():
    router = Router(8, 4, RouteRule(2, "sigmoid"), bias_rule=BiasRule())
    assert router.e_score_correction_bias is not None
    router.e_score_correction_bias.fill_(0.1001)
    router.to(torch.bfloat16)
    assert router.weight.dtype == torch.bfloat16
    assert router.e_score_correction_bias.dtype == torch.float32
    assert (router.e_score_correction_bias == torch.tensor(0.1001)).all()
    assert set(router.state_dict()) == {"weight", "e_score_correction_bias"}
    assert router(normal(3, 8, dtype=torch.bfloat16)).weights.dtype == torch.float32
    again = copy.deepcopy(router)
    assert again.e_score_correction_bias is not None
    assert torch.equal(again.e_score_correction_bias, router.e_score_correction_bias)
    with torch.device("meta"):
        empty = Router(8, 4, RouteRule(2), bias_rule=BiasRule()).to(torch.bfloat16)
    assert empty.to_empty(device="cpu").e_score_correction_bias.dtype == torch.float32


def test_noise_and_jitter_are_for_training():
    x = normal(2000, 4)
    for rule, options in (
        (RouteRule(2, when="after", noise="learned"), {}),
        (RouteRule(2, noise="normal"), {}),
        (RouteRule(2, noise="gumbel"), {}),
        (RouteRule(2), {"jitter": 0.5}),
    ):
        router = Router(4, 4, rule, **options)
        plain = router.eval()(x)
        noisy = router.train()(x)
        assert torch.equal(plain.indices, moe_route(plain.logits, rule).indices)
        assert 0 < (plain.indices != noisy.indices).float().mean() < 0.9
    assert router.noise_weight is None


def test_gumbel_noise_draws_experts_by_their_probabilities():
    router = Router(1, 4, RouteRule(1, noise="gumbel")).train()
    with torch.no_grad():
        router.weight.copy_(torch.tensor([[0.1], [0.2], [0.3], [0.4]]).log())
    routing = router(torch.ones(10000, 1))
    torch.testing.assert_close(routing.counts / 10000, torch.tensor([0.1, 0.2, 0.3, 0.4]), rtol=0, atol=0.025)
    assert torch.equal(routing.weights[:, 0], routing.scores.gather(1, routing.indices)[:, 0])  # clean ones


def test_learned_noise_has_the_deviation_of_its_softplus_and_a_gradient():
    router = Router(1, 2, RouteRule(1, when="after", noise="learned")).train()
    assert router.noise_weight is not None
    with torch.no_grad():
        router.weight.zero_()
        router.noise_weight.copy_(torch.tensor([[3.0], [-30.0]]))
    noise = router._noise(torch.ones(4000, 1), torch.zeros(4000, 2))
    assert noise is not None
    torch.testing.assert_close(noise[:, 0].std(), functional.softplus(torch.tensor(3.0)), rtol=0.06, atol=0)
    assert noise[:, 1].abs().max() < 1e-10
    (grad,) = torch.autograd.grad(noise.square().sum(), router.noise_weight)
    assert grad[0] > 0


def test_recorded_routes_can_be_replayed_with_other_logits():
    model = torch.nn.ModuleDict({"a": Router(8, 6, RouteRule(2)), "b": Router(8, 6, RouteRule(2))})
    x = normal(9, 8)
    with record_routes(model) as routes:
        before = {name: router(x) for name, router in model.items()}
        with pytest.raises(ValueError, match="router 'a' ran twice"):
            model["a"](x)
    assert set(routes) == {"a", "b"}
    with replay_routes(model, routes):
        after = {name: router(2 * x + 1) for name, router in model.items()}
        with pytest.raises(ValueError, match="router 'b' has 3 tokens, but 9 were recorded"):
            model["b"](x[:3])
    for name in routes:
        assert torch.equal(before[name].indices, after[name].indices)
        assert torch.equal(after[name].weights, after[name].scores.gather(1, after[name].indices))
    assert not torch.equal(model["a"](2 * x + 1).indices, before["a"].indices)
    with pytest.raises(ValueError, match="only on one side: b"), replay_routes(model, {"a": routes["a"]}):
        pass


def test_balanced_routes_ignore_the_logits():
    model = torch.nn.ModuleList([Router(8, 6, RouteRule(2))])
    with balance_routes(model):
        assert model[0](normal(9, 8)).counts.tolist() == [3] * 6


# ---- presets ---------------------------------------------------------------------------------------------------------


def huggingface_config(**more) -> SimpleNamespace:
    known = {
        "hidden_size": 16, "num_local_experts": 16, "num_experts": 16, "num_experts_per_tok": 3, "norm_topk_prob": True,
        "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "expert_capacity": 999, "router_bias": False,
        "router_jitter_noise": 0.0, "router_ignore_padding_tokens": False, "router_dtype": "float32",
    }  # fmt: skip
    return SimpleNamespace(**{**known, **more})


def huggingface_router(name: str, config: SimpleNamespace) -> torch.nn.Module:
    pytest.importorskip("transformers")
    import importlib

    module, cls = {
        "mixtral": ("mixtral", "MixtralTopKRouter"),
        "qwen2_moe": ("qwen2_moe", "Qwen2MoeTopKRouter"),
        "qwen3_moe": ("qwen3_moe", "Qwen3MoeTopKRouter"),
        "deepseek_v3": ("deepseek_v3", "DeepseekV3TopkRouter"),
        "gpt_oss": ("gpt_oss", "GptOssTopKRouter"),
        "llama4": ("llama4", "Llama4Router"),
        "switch": ("switch_transformers", "SwitchTransformersTop1Router"),
    }[name]
    found = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    router: torch.nn.Module = getattr(found, cls)(config)
    return router


def dense(indices: torch.Tensor, weights: torch.Tensor, num_experts: int) -> torch.Tensor:
    """[T, E]: the weight of each expert, 0 of those not chosen."""
    return weights.new_zeros(len(indices), num_experts).scatter(1, indices, weights)


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "gpt_oss", "llama4", "switch"])
def test_presets_are_the_routers_of_transformers(name):
    top_k = 1 if name in ("llama4", "switch") else 3
    config = huggingface_config(num_experts_per_tok=top_k, norm_topk_prob=name != "qwen2_moe")
    theirs = huggingface_router(name, config)
    ours = preset(name).routing(top_k=top_k).router(16, 16, jitter=0.0, losses=None).eval()
    x = normal(40, 16)
    their_weight = theirs.classifier.weight if name == "switch" else theirs.weight
    with torch.no_grad():
        their_weight.copy_(normal(16, 16, seed=1))
        ours.weight.copy_(their_weight)
        for tensor in (getattr(theirs, "bias", None), getattr(theirs, "e_score_correction_bias", None)):
            if tensor is not None:
                tensor.copy_(0.3 * normal(16, seed=2))
        if name == "gpt_oss":
            ours.bias.copy_(theirs.bias)
        if name == "deepseek_v3":
            ours.e_score_correction_bias.copy_(theirs.e_score_correction_bias)
    if name == "llama4":
        wanted, _ = theirs(x)
    elif name == "switch":
        chosen, weights, _ = theirs(x[None])
        wanted = (chosen * weights)[0]
    else:
        _, weights, indices = theirs(x)
        wanted = dense(indices, weights, 16)
    routing = ours(x)
    found = dense(routing.indices, routing.weights, 16)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)
    assert torch.equal(found > 0, wanted > 0)
    upstream = normal(40, 16, seed=3)
    (grad,) = torch.autograd.grad((found * upstream).sum(), ours.weight)
    (their_grad,) = torch.autograd.grad((wanted * upstream).sum(), their_weight)
    torch.testing.assert_close(grad, their_grad, rtol=1e-5, atol=1e-5)


def test_the_megatron_preset_computes_megatrons_formulas():
    logits = normal(50, 16)
    routing = moe_route(logits, preset("megatron").rule)
    top = logits.topk(2)
    assert torch.equal(routing.indices, top.indices)
    torch.testing.assert_close(routing.weights, top.values.softmax(-1))
    grouped = preset("megatron").routing(
        top_k=4, score="sigmoid", when="before", normalize=True, epsilon=1e-20, num_groups=4, top_groups=2
    )
    routing = moe_route(logits, grouped.rule)
    scores = logits.sigmoid()
    groups = scores.view(50, 4, 4).topk(4 // 2).values.sum(-1).topk(2).indices
    allowed = torch.zeros(50, 4).scatter(1, groups, 1.0).repeat_interleave(4, 1).bool()
    top = scores.masked_fill(~allowed, -math.inf).topk(4)
    assert torch.equal(routing.indices, top.indices)
    torch.testing.assert_close(routing.weights, top.values / (top.values.sum(-1, keepdim=True) + 1e-20))


def test_the_torchtitan_preset_computes_torchtitans_formulas():
    logits, bias = normal(50, 16), 0.3 * normal(16, seed=1)
    rule = preset("torchtitan").routing(top_k=3, normalize=True, epsilon=1e-20, scale=2.0).rule
    routing = moe_route(logits, rule, bias=bias)
    indices = (logits.sigmoid() + bias).topk(3).indices
    weights = logits.sigmoid().gather(1, indices)
    assert torch.equal(routing.indices, indices)
    torch.testing.assert_close(routing.weights, 2.0 * weights / (weights.sum(-1, keepdim=True) + 1e-20))
