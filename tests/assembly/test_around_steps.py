"""What people do around `Assembled.step`: freezing, evaluation, averages, schedulers, going on with dropout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fastpar as fp
from tests.assembly.around_ranks import (
    around,
    closed_parts,
    copied_models,
    outside_of_vocabulary,
    plateaus,
    resumed,
    states_in_memory,
)
from tests.assembly.assembly_cells import Cell, build, reference
from tests.dist import run_ranks


def test_freezing_editing_groups_evaluating_and_averaging_are_as_in_one_process() -> None:
    cells = [Cell(words) for words in ("tp2 sp", "dp2 zero1", "dp2 zero2 cpu", "dp2 zero3", "pp2 mb2 full", "dp2")]
    for found in run_ranks(2, around, cells):
        for cell in cells:
            losses, norms, problems, wanted = found[str(cell)]
            assert not problems, cell
            assert losses == pytest.approx(wanted[0], rel=1e-9), cell
            assert norms == pytest.approx(wanted[1], rel=1e-9), cell


def test_dropout_goes_on_where_it_was_also_in_another_layout_and_what_cannot_is_said(tmp_path: Path) -> None:
    pairs = [
        ("tp2 sp", "dp2 zero3", True),
        ("dp2 zero1", "dp2 zero1", False),
        ("pp2 mb2", "pp2 mb2", True),
        ("dp2 zero1", "tp2", False),
    ]
    ranks = run_ranks(2, resumed, str(tmp_path), pairs)
    for found in ranks:
        for wanted, again, said in found[:3]:
            assert not said
            assert again == pytest.approx(wanted, rel=1e-12)
        assert "all ranks are seeded with" in found[3][2][0]
    assert ranks[0][3][1] == ranks[1][3][1], "alike, as ranks of tp have to be"


def test_copies_of_states_in_memory_are_gone_back_to() -> None:
    for found in run_ranks(2, states_in_memory):
        for once, again in found:
            assert once == again


def test_copies_of_models_compute_what_the_models_do() -> None:
    for is_same, said in run_ranks(2, copied_models):
        assert is_same
        assert "generate needs whole sequences" in said[0]


def test_close_takes_recomputation_off_the_model() -> None:
    cells = [Cell(words) for words in ("dp2 full", "pp2 mb2 full", "pp2 mb2 selective", "tp2 selective")]
    assert run_ranks(2, closed_parts, cells) == [[], []]


def test_schedulers_that_need_a_metric_get_the_loss() -> None:
    for found in run_ranks(2, plateaus, [Cell("dp2"), Cell("pp2 mb2")]):
        assert found == [[0.05, 0.025, 0.0125]] * 2


def test_ids_outside_of_the_vocabulary_are_refused_on_all_ranks_before_anything_runs() -> None:
    cell = Cell("dp2 zero3", "huggingface")
    wanted = reference(cell).losses[0]
    for rank, (said, loss) in enumerate(run_ranks(2, outside_of_vocabulary, cell)):
        names = ("input_ids must be ids", "labels must be ids") if rank else ("the batch of rank 1 is wrong",) * 2
        assert [name in text for name, text in zip(names, said, strict=True)] == [True, True]
        assert loss == pytest.approx(wanted, rel=1e-8)


def test_an_architecture_without_a_pipeline_is_refused() -> None:
    parts = fp.pipeline.Architecture(embedding="embed_tokens", layers="layers", norm="norm", head="lm_head")
    with pytest.raises(ValueError, match="architecture says where a pipeline may cut"):
        fp.assemble(build(Cell("one rank")), "full", torch.optim.SGD, architecture=parts)
