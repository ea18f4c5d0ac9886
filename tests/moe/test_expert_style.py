"""`fastpar.parallelize` with experts: Hugging Face's models on meshes with ep, against one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import fastpar as fp
from fastpar.parallel.styles.experts import check_experts
from tests.dist import run_ranks
from tests.moe.expert_style_ranks import parallelized_steps, pipelined_gradients, refusals, trained_step
from tests.moe.moe_models import assert_equal_steps, batch, build, experts_of, mean_step, step

ON_TWO: list[tuple[str, dict[str, int], dict[str, Any]]] = [
    ("mixtral", {"tp": 2}, {}),
    ("olmoe", {"tp": 2, "ep": 2}, {}),
    ("qwen3_moe", {"tp": 2, "ep": 2}, {"sequence_parallel": True}),
    ("qwen2_moe", {"dp_shard": 2, "ep": 2}, {}),
    ("deepseek_v3", {"tp": 2, "ep": 2}, {}),
    ("gpt_oss", {"dp_shard": 2, "ep": 2}, {}),
    ("llama4", {"tp": 2, "ep": 2}, {}),
    ("qwen3_moe", {"tp": 2, "etp": 2}, {"sequence_parallel": True}),
    ("gpt_oss", {"dp_shard": 2, "etp": 2}, {}),
    ("llama4", {"tp": 2, "etp": 2}, {}),
]
ON_FOUR: list[tuple[str, dict[str, int], dict[str, Any]]] = [
    ("mixtral", {"dp_shard": 2, "tp": 2, "ep": 4}, {}),
    ("llama4", {"dp_shard": 4, "ep": 2}, {}),
    ("qwen3_moe", {"dp_replicate": 2, "tp": 2, "ep": 2}, {"sequence_parallel": True}),
    ("olmoe", {"tp": 4, "ep": 2}, {}),
    ("gpt_oss", {"dp_shard": 2, "tp": 2, "ep": 2}, {}),
    ("gpt_oss", {"dp_shard": 2, "tp": 2, "ep": 2, "etp": 2}, {}),
    ("mixtral", {"dp_shard": 2, "tp": 2, "etp": 4}, {}),
]


def check_parallelized(cases: list[tuple[str, dict[str, int], dict[str, Any]]], world_size: int) -> None:
    found = run_ranks(world_size, parallelized_steps, cases)
    for index, (name, sizes, _) in enumerate(cases):
        dp = sizes.get("dp_shard", 1) * sizes.get("dp_replicate", 1)
        logits, grads = mean_step(name, dp)
        experts = sum(p.numel() for key, p in build(name).named_parameters() if ".experts." in key)
        for rank, steps in enumerate(found):
            of_rank, averaged, stored = steps[index]
            assert_equal_steps((of_rank, averaged), (logits[rank * dp // world_size], grads))
            biases = sum(p.numel() for key, p in build(name).named_parameters() if "down_proj_bias" in key)
            ep, etp = sizes.get("ep", 1), sizes.get("etp", 1)
            assert stored == (experts - biases) // (ep * etp) + biases // ep


def test_parallelize_on_two_ranks_matches_one_process() -> None:
    check_parallelized(ON_TWO, 2)


@pytest.mark.slow
def test_parallelize_on_four_ranks_matches_one_process() -> None:
    check_parallelized(ON_FOUR, 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"pp": 2, "dp_shard": 2, "ep": 2}, {}),
        ({"pp": 2, "dp_shard": 2, "ep": 2}, {"shard_head": True}),
        ({"pp": 2, "tp": 2, "ep": 2}, {}),
    ],
    ids=str,
)
def test_pipeline_stages_spread_their_experts(sizes: dict[str, int], options: dict[str, Any]) -> None:
    plain, dp = build("mixtral"), sizes.get("dp_shard", 1)
    for index in range(dp):
        (plain(batch(index), labels=batch(index)).loss / dp).backward()
    wanted = {key: param.grad for key, param in plain.named_parameters()}
    found = run_ranks(4, pipelined_gradients, "mixtral", sizes, options)
    assert {key for grads in found for key in grads} == set(wanted)
    for grads in found:
        for key, grad in grads.items():
            torch.testing.assert_close(grad, wanted[key], rtol=1e-4, atol=1e-5, msg=key)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_zero_averages_experts_over_those_who_hold_them(stage: int) -> None:
    """A step of SGD: parameters move by the mean gradient, and the norm counts every expert once."""
    plain = build("qwen3_moe")
    _, grads = mean_step("qwen3_moe", 2)
    norm = float(torch.stack([grad.square().sum() for grad in grads.values()]).sum().sqrt())
    for found, parameters in run_ranks(2, trained_step, "qwen3_moe", {"dp_shard": 2, "ep": 2}, stage):
        assert found == pytest.approx(norm, rel=1e-5)
        for key, param in plain.named_parameters():
            torch.testing.assert_close(parameters[key], param.detach() - 0.5 * grads[key], rtol=1e-4, atol=1e-5)


def test_llama4_in_one_process_computes_only_what_was_chosen() -> None:
    """It runs no product over the tokens' other experts, and gives the same."""
    plain = build("llama4")
    model = fp.parallelize(copy.deepcopy(plain), None, {"model.layers.*.feed_forward.experts": "expert"})
    assert_equal_steps(step(model, batch()), step(plain, batch()))


def test_wrong_plans_are_refused() -> None:
    for found in run_ranks(2, refusals):
        (attention, first, second, third) = found
        assert "layers.0.self_attn is not split by the plan, and with sequence_parallel=True" in attention[1]
        assert first[0] is TypeError
        assert "expected a module with gate_up_proj" in first[1]
        assert "inside the block 'model.layers.0.mlp'" in second[1]
        assert "ep=2, but the plan gives no module the style 'expert'" in third[1]


def test_experts_that_ranks_cannot_share_are_refused() -> None:
    experts = experts_of("qwen3_moe.Qwen3MoeExperts", {})
    with pytest.raises(ValueError, match=r"has 3 experts, which 2 ranks cannot share evenly; these can: \[1, 3\]"):
        check_experts("experts", experts, None, 2)
    with pytest.raises(ValueError, match=r"the experts' inner size \(10\) must be divisible by etp \(4\)"):
        check_experts("experts", experts, None, 1, 4)
    softmax = experts_of("qwen3_moe.Qwen3MoeExperts", {})
    softmax._apply_gate = lambda hidden: hidden.softmax(-1).chunk(2, -1)[0]
    with pytest.raises(TypeError, match="may need whole rows, of which etp=2 leaves a rank a part"):
        check_experts("experts", softmax, None, 1, 2)
    experts.register_parameter("scale", nn.Parameter(torch.ones(3)))
    with pytest.raises(TypeError, match=r"has the parameters \['scale'\] beside those of stacked experts"):
        check_experts("experts", experts, None, 1)
