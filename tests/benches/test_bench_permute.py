"""The bench of permute and unpermute: every provider gives the right result before anything is timed."""

from __future__ import annotations

import argparse

import pytest

from bench.bench_permute import JOBS, PermuteCase, Problem, cases, jobs
from bench.harness import Rank


@pytest.mark.parametrize("job", JOBS)
def test_every_provider_is_right_and_a_wrong_row_is_an_error(job: str) -> None:
    case = PermuteCase(job, "bf16", 40, 24, 3, 8)
    providers = [p for p in case.build(Rank()) if p.kind != "roof"]
    assert {"fastpar", "torch"} == {p.kind for p in providers}
    for provider in providers:
        assert all(error.ok for error in provider.check().values()), provider.name
    if job != "plan":
        right = providers[0].call()
        right[7] = 0
        assert not any(error.ok for error in Problem(case).errors(lambda: right).values())


def test_the_plan_has_cases_of_its_own() -> None:
    flags = argparse.Namespace(
        jobs=list(JOBS), dtype=["fp32", "bf16"], tokens=[64], hidden=[8, 16], top_k=[2], experts=8
    )
    made = cases(flags, 1)
    assert len(made) == 2 * 2 * 2 + 3
    assert jobs("plan, permute") == ["plan", "permute"]
    with pytest.raises(argparse.ArgumentTypeError, match="unknown job 'sort'"):
        jobs("sort")
