"""Benches draw their inputs on the device that they are for: what a GPU draws in milliseconds takes a host seconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import torch

from bench import bench_clip, bench_cross_entropy, bench_linear_cross_entropy, bench_moe, bench_moe_push
from bench.bench_attention import AttentionCase
from bench.bench_attention import Problem as AttentionProblem
from bench.bench_optimizer import OptimizerCase
from bench.bench_optimizer import Problem as OptimizerProblem
from bench.bench_permute import PermuteCase
from bench.bench_permute import Problem as PermuteProblem
from bench.bench_rms_norm import Problem as RmsNormProblem
from bench.bench_rms_norm import RmsNormCase
from bench.bench_swiglu import Problem as SwigluProblem
from bench.bench_swiglu import SwigluCase
from bench.bench_symmetric import Problem as SymmetricProblem
from bench.bench_symmetric import SymmetricCase
from bench.harness import Rank

ELSEWHERE = "meta"  # stands in for a GPU


class Drawn(Exception):
    """Ends what a bench makes with its first generator."""


INPUTS: dict[str, Callable[[], object]] = {
    "attention": lambda: AttentionProblem(AttentionCase("fp32", 8, 4, 2, 1, True), ELSEWHERE),
    "clip": lambda: bench_clip.NormCase("fp32", 1, 2).build(Rank(device=ELSEWHERE)),
    "cross_entropy": lambda: bench_cross_entropy._logits(
        bench_cross_entropy.CrossEntropyCase("fp32", 8, 16), 0, 16, ELSEWHERE
    ),
    "linear_cross_entropy": lambda: bench_linear_cross_entropy.Problem(
        bench_linear_cross_entropy.LinearCrossEntropyCase("fp32", 8, 4, 16), Rank(device=ELSEWHERE)
    ),
    "moe": lambda: bench_moe.Problem(bench_moe.MoeCase("fp32", 8, 4, 4, 4, 2), Rank(device=ELSEWHERE)),
    "moe_push": lambda: bench_moe_push.Problem(bench_moe_push.PushCase("combine", "fp32", 2, 6, 8, 4, 2), ELSEWHERE),
    "optimizer": lambda: OptimizerProblem(OptimizerCase("fp32", "update", 8, 2), ELSEWHERE).fresh(
        "grads", torch.float32
    ),
    "permute": lambda: PermuteProblem(PermuteCase("permute", "fp32", 8, 4, 2, 4), ELSEWHERE),
    "rms_norm": lambda: RmsNormProblem(RmsNormCase("fp32", 8, 4, True), ELSEWHERE),
    "swiglu": lambda: SwigluProblem(SwigluCase("fp32", 8, 4), ELSEWHERE),
    "symmetric": lambda: SymmetricProblem(SymmetricCase("bf16", 1, 2), ELSEWHERE),
}


@pytest.mark.parametrize("name", INPUTS)
def test_inputs_are_drawn_where_they_are_used(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def generator(device: Any = "cpu") -> NoReturn:
        asked.append(device)
        raise Drawn

    monkeypatch.setattr(torch, "Generator", generator)
    with pytest.raises(Drawn):
        INPUTS[name]()
    assert asked == [ELSEWHERE]
