"""The check of the bench of symmetric memory, whose kernels need a GPU: sums of all ranks pass, others do not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bench.bench_symmetric import Problem, SymmetricCase
from fastpar.comm.symmetric.collectives import SymmetricCollectives


@pytest.mark.parametrize("norm", [False, True])
def test_sums_of_all_ranks_are_right_and_those_of_fewer_an_error(norm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    nobody = SimpleNamespace(check=lambda: None)
    monkeypatch.setattr(SymmetricCollectives, "virtual", lambda *_, **__: nobody)
    problem = Problem(SymmetricCase("bf16", 16, 4, norm), "cpu")

    def errors(of_ranks: int) -> dict[str, Any]:
        total = problem.x[:of_ranks].float().sum(0) + float(norm)
        result = total.bfloat16().expand(problem.x.shape)
        return problem.errors(SimpleNamespace(result=lambda: result))  # type: ignore[arg-type]

    assert errors(4)["sum"].ok
    assert not errors(3)["sum"].ok
    problem.x.zero_()  # what a kernel that writes to its input would do
    assert not errors(4)["sum"].ok
