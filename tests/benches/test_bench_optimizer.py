"""The bench of AdamW: every provider is right before anything is timed, and how often the answer is computed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bench.bench_optimizer import JOBS, OptimizerCase, Problem
from bench.harness import Rank


@pytest.mark.parametrize(
    ("job", "dtype"), [(job, dtype) for job in JOBS for dtype in ("fp32", "bf16") if (job, dtype) != ("wide", "fp32")]
)
def test_every_provider_is_right_as_often_as_it_is_asked(job: str, dtype: str) -> None:
    providers = [p for p in OptimizerCase(dtype, job, 600, 7).build(Rank()) if p.kind != "roof" and not p.absent]
    assert {"fastpar", "torch"} == {p.kind for p in providers}
    for provider in providers * 2:
        errors = provider.check()
        assert set(errors) == {"masters" if (job, dtype) == ("step", "bf16") else "params", "exp_avgs"}
        assert all(error.ok for error in errors.values()), (provider.name, errors)


def test_fresh_tensors_are_the_same_every_time_and_other_ones() -> None:
    problem = Problem(OptimizerCase("bf16", "step", 600, 7), "cpu")
    masters, again = problem.fresh("masters", torch.float32), problem.fresh("masters", torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(masters, again, strict=True))
    assert masters[0].data_ptr() != again[0].data_ptr()
    params = problem.fresh("params", torch.bfloat16)
    assert all(torch.equal(p, m.bfloat16()) for p, m in zip(params, masters, strict=True))
    assert not any(x.any() for x in problem.fresh("remainders", torch.int16))


@pytest.mark.parametrize(("device", "times"), [("cpu", 2), ("cuda", 1)])
def test_the_float64_answer_is_kept_on_a_gpu_and_given_up_on_the_cpu(
    device: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = OptimizerCase("fp32", "update", 600, 7)
    on_cpu, made = Problem(case, "cpu"), list[str]()

    def fresh(self: Problem, role: str, dtype: torch.dtype) -> list[Tensor]:
        made.append(role)
        return tensors[role]

    tensors = {role: on_cpu.fresh(role, torch.float32) for role in ("params", "grads", "exp_avgs", "exp_avg_sqs")}
    monkeypatch.setattr(Problem, "fresh", fresh)
    problem = Problem(case, device)
    first, second = problem.exact(), problem.exact()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert len(made) == 4 * times
