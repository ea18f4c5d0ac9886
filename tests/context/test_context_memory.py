"""Sequences split over P ranks: what a layer saves for backward is a P-th of it."""

from __future__ import annotations

import pytest

from tests.context.context_memory_ranks import HEADS, KEY_HEADS, TOKENS, WIDTH, bytes_of_layer, bytes_of_op
from tests.dist import run_ranks

METHODS = ["ring", "gather", "ulysses"]


@pytest.mark.expensive
def test_saved_bytes_of_attention_are_those_of_the_formula() -> None:
    """q, k, v and out, and lse in float32, of this rank's tokens (Ulysses: of its heads)."""
    for size in (1, 2, 4):
        for rank, found in enumerate(run_ranks(size, bytes_of_op, METHODS, size)):
            for method, saved in zip(METHODS, found, strict=True):
                # Ulysses' ranks have both query heads of a key head, or one of them and the key head as well.
                keys = max(KEY_HEADS / size, 1) if method == "ulysses" else KEY_HEADS / size
                expected = 4 * TOKENS * ((2 * HEADS / size + 2 * keys) * WIDTH + HEADS / size)
                assert saved == pytest.approx(expected, rel=0.05), (method, size, rank)


@pytest.mark.expensive
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_saved_bytes_of_a_layer_of_llama_fall_as_one_over_the_ranks(size: int) -> None:
    pytest.importorskip("transformers")
    methods = METHODS[:2]  # Ulysses of 4 ranks shares key heads
    whole = run_ranks(1, bytes_of_layer, methods, 1)[0]
    for rank, found in enumerate(run_ranks(size, bytes_of_layer, methods, size)):
        for method, saved, alone in zip(methods, found, whole, strict=True):
            assert saved == pytest.approx(alone / size, rel=0.05), (method, rank, saved, alone)
