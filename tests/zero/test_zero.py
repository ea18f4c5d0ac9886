"""Every stage trains as one process does, and all of them alike: dtypes, ranks, accumulation, optimizers."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import pytest
import torch

from tests.dist import run_ranks
from tests.zero.zero_ranks import Case, Parameters, assert_same, one_thread, train_plain, train_sharded

STAGES = (0, 1, 2, 3)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def runs(cases: list[Case]) -> list[Parameters]:
    """On a rank: one after the other, so that a start of the ranks serves many."""
    return [train_sharded(case) for case in cases]


@cache
def plain(size: int, stage: int, dtype: torch.dtype, accumulate: int, travels: str, kind: str) -> Parameters:
    with one_thread():
        return train_plain(Case(stage, dtype, accumulate, travels, kind), size)


def expected_of(case: Case, size: int) -> Parameters:
    is_apart = case.unrounded and case.travels == "once" and case.dtype != torch.float32
    return plain(size, case.stage if is_apart else 0, case.dtype, case.accumulate, case.travels, case.kind)


def check(size: int, cases: list[Case]) -> None:
    found = run_ranks(size, runs, cases)
    for rank, of_rank in enumerate(found):
        for case, parameters in zip(cases, of_rank, strict=True):
            assert_same(parameters, expected_of(case, size), f"rank {rank} of {size}, {case}")


@pytest.mark.parametrize("size", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_steps_equal_the_plain_optimizer_bit_for_bit(dtype: torch.dtype, size: int) -> None:
    """Every stage, with one and with four microbatches: sums are taken before gradients travel in stages 0 and 1, and
    of what has travelled in 2 and 3."""
    check(size, [Case(stage, dtype, accumulate) for stage, accumulate in product(STAGES, (1, 4))])


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_stages_are_equal_under_equal_use_of_no_sync(dtype: torch.dtype, size: int) -> None:
    check(
        size, [Case(stage, dtype, 4, "once") for stage in STAGES] + [Case(stage, dtype, 4, "each") for stage in (0, 1)]
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["ours", "foreach", "sgd"])
def test_any_optimizer_does_to_rows_what_it_does_to_tensors(kind: str, dtype: torch.dtype) -> None:
    check(3, [Case(stage, dtype, kind=kind) for stage in STAGES])


def test_fused_optimizers_of_torch_agree_to_rounding() -> None:
    # What torch's fused AdamW does on a CPU depends on where in a tensor an element lies: it computes the last few
    # of every tensor by another code path, one rounding apart. Ten steps of 1e-2 leave that below 1e-5.
    cases = [Case(stage, kind="fused") for stage in STAGES]
    for of_rank in run_ranks(3, runs, cases):
        for case, parameters in zip(cases, of_rank, strict=True):
            for name, expected in expected_of(case, 3).items():
                torch.testing.assert_close(parameters[name], expected, rtol=1e-5, atol=1e-6, msg=f"{case}: {name}")


@pytest.mark.parametrize(
    "options",
    [{"transport": "torch"}, {"overlap": False}, {"bucket_bytes": 256}, {"offload": "cpu"}],
    ids=str,
)
def test_how_gradients_travel_does_not_change_the_bits(options: dict[str, Any]) -> None:
    cases = [Case(stage, dtype, 2, options=options) for stage in STAGES for dtype in (torch.float32, torch.bfloat16)]
    check(3, [*cases, Case(0, torch.float32, 2, "each", options=options)])
