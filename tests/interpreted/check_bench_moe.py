"""The benches of experts that need a GPU, on a few tokens; run by tests/moe/test_moe_route_triton.py in the
interpreter."""

from __future__ import annotations

import pytest

from bench.bench_moe_push import JOBS, Problem, PushCase, Pushing, Sorting
from bench.harness import Rank


@pytest.mark.parametrize("job", JOBS)
def test_pushed_rows_are_right_and_what_is_timed_runs(job: str) -> None:
    providers = [p for p in PushCase(job, "fp32", 2, 6, 8, 4, 2).build(Rank()) if p.kind != "roof"]
    assert [p.name for p in providers] == ["fastpar", "torch"]
    for provider in providers:
        errors = provider.check()
        assert set(errors) == {"rows", "out"}
        assert all(error.ok for error in errors.values()), (provider.name, errors)
        provider.call()


@pytest.mark.parametrize("kind", [Pushing, Sorting])
def test_rows_in_a_wrong_place_and_wrong_sums_are_errors(kind: type[Pushing] | type[Sorting]) -> None:
    problem = Problem(PushCase("dispatch", "fp32", 2, 6, 8, 4, 2), "cpu")
    exchange = kind(problem)
    problem.tokens[1][2] = (problem.tokens[1][2] + 1) % 12
    assert problem.errors(exchange)["rows"].value == 1
    combine = exchange.combine
    exchange.combine = lambda rows=None: [1.001 * out for out in combine(rows)]  # type: ignore[method-assign]
    assert not problem.errors(exchange)["out"].ok
