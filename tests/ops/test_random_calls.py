"""Random calls of the ops against plain PyTorch in float64, on one rank and on several: see random_calls.py."""

from __future__ import annotations

import pytest

from tests.dist import run_ranks
from tests.ops.random_calls import CASES, OVER_RANKS, play_all, play_named


@pytest.mark.parametrize("op", CASES)
def test_an_op_is_plain_pytorch_in_any_call(op):
    for seed in range(60):
        play_named(op, seed)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("op", OVER_RANKS)
def test_every_rank_has_its_part_of_plain_pytorchs(op, size):
    run_ranks(size, play_all, op, range(20))


@pytest.mark.slow
@pytest.mark.parametrize("op", CASES)
def test_an_op_is_plain_pytorch_in_1000_more_calls(op):
    for seed in range(60, 1060):
        play_named(op, seed)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("op", OVER_RANKS)
def test_every_rank_has_its_part_of_plain_pytorchs_in_300_more_calls(op, size):
    run_ranks(size, play_all, op, range(20, 320), timeout=300.0)
