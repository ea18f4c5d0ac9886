"""Split sequences with everything else: two steps of AdamW in every layout of cp with pp, data parallelism, ZeRO, tp,
sequence parallelism, ep and recomputation, against one process."""

from __future__ import annotations

import pytest

from tests.context.context_composition_ranks import Cell, compare_cells, factorisations
from tests.context.context_ranks import FAMILIES
from tests.dist import run_ranks

pytest.importorskip("transformers")

CP2 = (("cp", 2),)
CHEAP = {
    2: [
        Cell(CP2, recompute=True),
        Cell(CP2, stage=3, method="gather"),
        Cell((*CP2, ("ep", 2)), stage=1, family="mixtral"),
    ],
    4: [
        Cell((("pp", 2), *CP2), stage=2, recompute=True),
        Cell((*CP2, ("tp", 2)), stage=1, sequence_parallel=True, recompute=True),
        Cell((("dp_shard", 2), *CP2, ("ep", 4)), stage=3, family="mixtral", documents=None),
        Cell((("pp", 2), *CP2, ("ep", 2)), stage=0, family="mixtral"),
    ],
}


@pytest.mark.expensive
@pytest.mark.parametrize("world", CHEAP)
def test_two_steps_in_mixed_layouts_equal_one_process(world: int) -> None:
    assert all(count == len(CHEAP[world]) for count in run_ranks(world, compare_cells, CHEAP[world]))


@pytest.mark.expensive
@pytest.mark.parametrize("family", ["gemma3_text", "gpt2"])
def test_two_steps_of_a_family_equal_one_process(family: str) -> None:
    run_ranks(2, compare_cells, [Cell(CP2, family=family)])


@pytest.mark.slow
def test_two_steps_of_every_family_equal_one_process() -> None:
    run_ranks(2, compare_cells, [Cell(CP2, family=family) for family in FAMILIES])


def every_cell(world: int) -> list[Cell]:
    cells = []
    for sizes in factorisations(world):
        names = dict(sizes)
        for stage in range(4):
            cells.append(Cell(sizes, stage=stage, recompute=stage % 2 == 1))
        if "tp" in names:
            cells += [Cell(sizes, stage=stage, sequence_parallel=True, recompute=stage == 3) for stage in (0, 3)]
        inner = world // names.get("pp", 1) // names.get("dp_replicate", 1)
        for ep in (n for n in (2, 4) if inner % n == 0):
            cells += [Cell((*sizes, ("ep", ep)), stage=stage, family="mixtral") for stage in (0, 1, 3)]
    return cells


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_two_steps_in_every_layout_equal_one_process(world: int) -> None:
    for cell in every_cell(world):
        run_ranks(world, compare_cells, [cell])
