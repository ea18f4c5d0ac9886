"""`fp.verify` over split sequences: silent on what is right, and what it says of planted mistakes."""

from __future__ import annotations

from typing import Any

import pytest

import fastpar as fp
from tests.dist import run_ranks
from tests.verification.verify_context_ranks import GATHER, PLANTED, found

pytest.importorskip("transformers")


@pytest.mark.expensive
def test_planted_mistakes_are_found_where_they_are_and_nothing_else_is() -> None:
    for results in run_ranks(2, found, {"cp": 2}, ["", *PLANTED], {"options": GATHER}):
        assert results[""] == []
        for name, (_, kind, module) in PLANTED.items():
            assert results[name], f"{name} is not found"
            assert kind in results[name][0][0], (name, results[name])
            assert module in results[name][0][1], (name, results[name])


@pytest.mark.expensive
@pytest.mark.parametrize("sizes", [{"pp": 2}, {"pp": 2, "cp": 2}], ids=str)
def test_microbatches_count_by_their_labels(sizes: dict[str, int]) -> None:
    """As a pipeline weighs them; not where it is asked for the mean of their means."""
    size = sizes["pp"] * sizes.get("cp", 1)
    for results in run_ranks(size, found, sizes, [""], {}, 9):
        assert results[""] == []
    if "cp" not in sizes:
        for results in run_ranks(size, found, sizes, [""], {"options": {"reduction": "microbatch_mean"}}, 9):
            assert results[""] == []


RIGHT: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"cp": 2, "tp": 2}, {"sequence_parallel": True}),
    ({"pp": 2, "cp": 2}, {"recompute": fp.recompute.Full()}),
    ({"dp_shard": 2, "cp": 2}, {"zero_stage": 3}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "options"), RIGHT, ids=str)
def test_right_layouts_over_cp_pass(sizes: dict[str, int], options: dict[str, Any]) -> None:
    for results in run_ranks(4, found, sizes, [""], options):
        assert results[""] == []
