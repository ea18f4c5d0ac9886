"""`fp.verify` on tensor-parallel grids: all tensors are compared, and the module of a planted error is named."""

from __future__ import annotations

import functools

import pytest
import torch

from fastpar.verification import VerifyReport
from fastpar.verification.grid_alignment import GridAlignment
from fastpar.verification.layout import ModuleHints
from fastpar.verification.pieces import take
from fastpar.verification.words import parse_layout
from tests.dist import run_ranks
from tests.verification.verify_grids import BUGS, RIGHT, run_grids


@functools.cache
def reports() -> dict[str, VerifyReport]:
    return run_ranks(4, run_grids, timeout=240)[0]


@pytest.mark.expensive
@pytest.mark.parametrize("words", RIGHT)
def test_everything_on_a_grid_is_compared(words: str) -> None:
    report = reports()[words]
    assert report.ok, str(report)
    assert next(word for word in words.replace(",", " ").split() if word.startswith("grid")) in str(report)
    assert [check for check in report.checks if check.status == "not compared"] == []
    assert {check.kind for check in report.checks} >= {"input", "output", "gradient of the input", "update"}


@pytest.mark.expensive
@pytest.mark.parametrize("name", BUGS)
def test_the_module_of_an_error_on_a_grid_is_named(name: str) -> None:
    report = reports()[name]
    assert report.culprit is not None
    assert (report.culprit.module, report.culprit.kind) == BUGS[name][-1], str(report)


def test_dims_are_cut_each_by_itself() -> None:
    """x 1, y 2, z 2: [B, heads, S, D] with the batch over z and heads, shared by two ranks each, as a layer says."""
    features = [torch.tensor([0, 1, 2, 3]), torch.tensor([2, 3, 4, 5])]
    hints = [
        ModuleHints(
            blocks=["attn"],
            grid={"tp_x": (0, 1), "tp_y": (y, 2), "tp_d": (0, 1), "tp_z": (z, 2), "tp": (2 * y + z, 4)},
            features={"attn.k": (6, features[y])},
        )
        for y in range(2)
        for z in range(2)
    ]
    whole = torch.randn(3, 3, 5, 2)
    parts = [whole[rows][:, heads] for heads in ([0, 1], [1, 2]) for rows in ([0, 1], [2])]
    (places,) = GridAlignment(hints, (3, 5)).places("attn.norm", True, whole, parts)
    assert all(torch.equal(take(whole, index), part) for index, part in zip(places, parts, strict=True))
    flat = torch.randn(15, 6)
    cut = [flat.view(3, 5, 6)[rows][..., columns].flatten(0, 1) for columns in features for rows in ([0, 1], [2])]
    (places,) = GridAlignment(hints, (3, 5)).places("attn.k", True, flat, cut)
    assert all(torch.equal(take(flat, index), part) for index, part in zip(places, cut, strict=True))
    assert not list(GridAlignment(hints, (3, 5)).places("mlp", True, whole, [part[:, :1] for part in parts]))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tp4 grid1x2x4", "has 8 ranks, but tp is 4"),
        ("tp4 grid2x2x1 sp", "sequence parallelism not be said beside it"),
        ("tp4 grid2x2x1 acc2", "verify does not compare acc2; leave it out"),
    ],
)
def test_grids_that_no_rule_allows_are_errors(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_layout(text)
