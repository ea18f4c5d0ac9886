"""The Triton kernels of routing where there is no GPU: in the interpreter, and compiled ahead of time.

Compiled is what the functions of fastpar.kernels.moe_route would launch with the blocks that they choose on a GPU.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from fastpar.expert import PRESETS
from fastpar.ops.moe import route_triton as _moe_route_triton
from fastpar.ops.moe.route import RouteRule, moe_route
from tests.triton_aot import HOPPER, LDS_LIMIT, MI300, Target, compile_launch, each_target
from tests.triton_interpreter import run_interpreted

triton = pytest.importorskip("triton")

from fastpar.kernels import moe_route as kernels  # noqa: E402  (triton is optional)


@pytest.mark.timeout(600)
def test_kernels_match_the_cpu_and_their_benches_run_in_the_interpreter() -> None:
    run_interpreted("check_moe_route.py", "check_bench_moe.py")


# ---- which way -------------------------------------------------------------------------------------------------------


class _Logits:
    """What is looked at of logits on a device that this machine need not have."""

    def __init__(self, device: str, num_experts: int = 64, dtype: torch.dtype = torch.float32) -> None:
        self.device, self.dtype, self.shape = torch.device(device), dtype, (8, num_experts)

    def dim(self) -> int:
        return 2


def test_the_kernels_take_cuda_logits_of_known_sizes_and_nothing_else() -> None:
    def applies(rule: RouteRule, *args: Any) -> bool:
        logits: Any = _Logits(*args)
        return _moe_route_triton.applies(logits, rule)

    assert applies(RouteRule(8), "cuda")
    assert applies(RouteRule(8), "cuda", 2048, torch.bfloat16)
    assert not applies(RouteRule(8), "cuda", 2049)
    assert not applies(RouteRule(33), "cuda")
    assert not applies(RouteRule(8), "cuda", 64, torch.float64)
    assert not applies(RouteRule(8), "cpu")
    assert not applies(RouteRule(8), "meta")


def test_noise_and_given_choices_stay_in_plain_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("the kernels were called")

    monkeypatch.setattr(_moe_route_triton, "applies", lambda *_: True)
    monkeypatch.setattr(_moe_route_triton, "moe_route", refuse)
    logits = torch.zeros(4, 6)
    moe_route(logits, RouteRule(2), noise=torch.zeros(4, 6))
    moe_route(logits, RouteRule(2), indices=torch.zeros(4, 2, dtype=torch.int64))
    with pytest.raises(AssertionError, match="the kernels were called"):
        moe_route(logits, RouteRule(2))


# ---- ahead of time ---------------------------------------------------------------------------------------------------


target = each_target(kernels)


def compiled(
    monkeypatch: pytest.MonkeyPatch, target: Target, rule: RouteRule, experts: int, *, losses: bool = False
) -> dict[str, dict[str, Any]]:
    """What the compiler reports of forward and backward, or of both for the losses' scores."""
    found: dict[str, dict[str, Any]] = {}

    def launch(kernel: Any, programs: int, device: torch.device, *arguments: Any, **options: Any) -> None:
        name = kernel.__name__ if kernel.__name__ not in found else f"{kernel.__name__}, again"
        found[name] = compile_launch(kernel, target, programs, arguments, options)

    monkeypatch.setattr(kernels, "launch", launch)
    logits = torch.zeros(4096, experts)
    if losses:
        kernels.scores(logits, rule.score)
        kernels.scores_backward(torch.zeros(4096, experts), logits, rule.score)
    else:
        routed = kernels.forward(logits, rule, torch.zeros(experts), torch.zeros(4096, dtype=torch.bool))
        kernels.backward(routed.weights, logits, routed.indices, rule)
    assert len(found) == 2
    return found


DEEPSEEK = PRESETS["deepseek_v3"].rule
CASES = {
    "deepseek_v3": (DEEPSEEK, 256),
    "qwen3_moe": (PRESETS["qwen3_moe"].rule, 512),
    "mixtral": (PRESETS["mixtral"].rule, 8),
    "deepseek_v2": (RouteRule(6, scale=16.0, num_groups=8, top_groups=3, group_score="max"), 160),
    "sqrtsoftplus": (RouteRule(8, "sqrtsoftplus", normalize=True), 384),
    "most": (replace(DEEPSEEK, top_k=kernels.MOST_CHOICES), kernels.MOST_EXPERTS),
    **{
        name: (PRESETS[name].rule, 128)
        for name in ("qwen2_moe", "gpt_oss", "llama4", "switch", "megatron", "torchtitan")
    },
}
COMMON = ("deepseek_v3", "qwen3_moe")


def check(name: str, found: dict[str, Any], target: Target, experts: int) -> None:
    assert found["spills"] == 0, (name, found["spills"])
    assert found["shared"] <= LDS_LIMIT // 8, (name, found["shared"])  # or few programs fit a multiprocessor
    # of 65536: room for 21 programs of a warp, or for 10 of those that have twice as many columns a thread
    limit = 96 if experts <= 256 else 192
    assert target == MI300 or found["registers"] <= limit, (name, found["registers"])


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in COMMON else pytest.mark.slow) for name in CASES]
)
def test_routing_compiles_without_spills_to_wide_accesses(
    monkeypatch: pytest.MonkeyPatch, target: Target, name: str
) -> None:
    rule, experts = CASES[name]
    for kernel, found in compiled(monkeypatch, target, rule, experts).items():
        check(f"{name}: {kernel}", found, target, experts)
        assert found["wide_loads"] > 0, kernel
        assert found["wide_stores"] > 0 or kernel == "route_kernel", kernel
        if target == HOPPER and kernel == "route_kernel":
            assert re.search(r"(?:red|atom)\.global\S*\.relaxed\S*\.add\.u64", found["ptx"]), "counts in 64 bits"
            for reduction in ("redux.sync.max.s32", "redux.sync.min.s32") if 32 <= experts <= 512 else ():
                assert found["threads"] == 32, "a row is one warp's"
                assert reduction in found["ptx"], "the best expert is found by reductions in hardware"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("score", ["sigmoid", pytest.param("sqrtsoftplus", marks=pytest.mark.slow)])
def test_scores_compile_without_spills(monkeypatch: pytest.MonkeyPatch, target: Target, score: str) -> None:
    for kernel, found in compiled(monkeypatch, target, RouteRule(8, score), 256, losses=True).items():
        check(kernel, found, target, 256)
        assert found["wide_loads"] > 0
        assert found["wide_stores"] > 0
