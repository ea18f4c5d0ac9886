"""The pipeline bench: its ideal, the figures below its tables, and one small run of every provider."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from bench.bench_pipeline import SCHEDULES, PipelineCase, figures, ideal_factor, main
from bench.harness import Rank
from fastpar.pipeline import make_schedule
from tests.dist import run_ranks


def test_the_ideal_is_compute_with_the_bubble_of_the_schedule() -> None:
    """(m + p - 1) / m for whole backwards; interleaved stages halve the bubble."""
    assert ideal_factor(make_schedule("1f1b", 2, 4)) == 5 / 4
    assert ideal_factor(make_schedule("gpipe", 4, 8)) == 11 / 8
    assert ideal_factor(make_schedule("interleaved_1f1b", 2, 4, stages_per_rank=2)) == 9 / 8


def row(provider: str, median: float, setting: str = "tuned", **errors: float) -> dict[str, Any]:
    case = {"schedule": "1f1b", "microbatches": 4, "ranks": 2}
    found = {name: {"value": value, "tolerance": 1.0} for name, value in errors.items()}
    return {"case": case, "provider": provider, "setting": setting, "ms": {"median": median}, "errors": found}


def test_figures_compare_with_the_ideal_per_setting() -> None:
    rows = [row("compute only", 80.0), row("fastpar", 105.0, prediction=0.02), row("torch", 120.0)]
    rows += [row("compute only", 160.0, "default"), row("fastpar", 200.0, "default")]
    assert figures(rows).splitlines() == [
        "  tuned: ideal 100 ms, fastpar 1.050 x ideal, torch 1.200 x ideal, predicted within 2.0%",
        "  default: ideal 200 ms, fastpar 1.000 x ideal",
    ]


def test_figures_of_empty_stages_are_costs_of_actions() -> None:
    rows = [row("compute only", 1.0), row("fastpar", 2.6)]
    for each in rows:
        each["case"]["empty"] = True
    # Each rank has 4 F, 4 B and, for each, one transfer: 16 actions.
    assert figures(rows) == "  tuned: per action besides torch's work: fastpar 100.0 us"


def run_case(schedule: str) -> dict[str, float]:
    rank = Rank(dist.get_rank(), dist.get_world_size())
    case = PipelineCase(schedule, microbatches=4, layers=4, hidden=64, tokens=4)
    errors: dict[str, float] = {}
    for provider in case.build(rank):
        if provider.kind == "roof":
            continue
        provider.call()
        for name, error in provider.check().items():
            assert error.ok, (provider.name, name, error)
            errors[f"{provider.name} {name}"] = error.value
    return errors


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_providers_agree_with_the_sequential_run(schedule: str) -> None:
    for errors in run_ranks(2, run_case, schedule):
        assert errors["fastpar grad"] == 0.0  # bit for bit
        assert errors["torch grad"] <= 1e-5


def test_a_schedule_that_torch_does_not_have_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--schedules", "v_half"])
    assert "torch has no counterpart of v_half" in capsys.readouterr().err
