"""Does everything run at all: every public op once, forward and backward, small, against the CPU.

The first tests of `make gpu`, so that thirty seconds tell which kernels do not launch, before anything larger waits for
them. The cases are those of the rehearsal; a process a share of them (tests/gpu/gpu_smoke.py).
"""

from __future__ import annotations

import os

import pytest

from tests.gpu.gpu_smoke import CASES, run_all

PROCESSES = min(12, os.cpu_count() or 1)


@pytest.fixture(scope="module")
def problems() -> dict[str, str]:
    return run_all("cuda", PROCESSES)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_every_op_has_the_values_of_the_cpu(name: str, problems: dict[str, str]) -> None:
    assert not problems[name], problems[name]


@pytest.mark.expensive
def test_a_case_that_fails_or_ends_its_process_is_named_and_costs_no_other_process() -> None:
    """On meta tensors, whose values cannot be compared; a name that is no case ends its process."""
    found = run_all("meta", 2, ["rms_norm", "swiglu", "no such op", "rotary_tables", "rotary_embedding"])
    assert "NotImplementedError" in found["rms_norm"]
    assert "NotImplementedError" in found["rotary_tables"]
    for name in ("no such op", "rotary_embedding"):
        assert found[name] == "its process ended with status 1 before it was done: KeyError: 'no such op'"
