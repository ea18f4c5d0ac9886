"""ZeRO stage 3 with experts split over ep and etp: the bits of stage 1, the formulas' bytes, one decision to skip."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.dist import run_ranks
from tests.zero.test_zero_layouts import load, save
from tests.zero.zero_expert_ranks import Case, agreements, memory, spoiled, stages, train, words
from tests.zero.zero_ranks import one_thread

LAYOUTS = {
    2: [{"dp_shard": 2, "ep": 2}, {"dp_shard": 2, "etp": 2}, {"tp": 2, "ep": 2}],
    4: [
        {"dp_shard": 4, "ep": 2},  # efsdp 2
        {"dp_shard": 2, "tp": 2, "ep": 2},  # efsdp 2
        {"tp": 4, "ep": 2},  # efsdp 2, and nothing else to shard
        {"dp_replicate": 2, "dp_shard": 2, "ep": 2},  # replicas of experts that are whole
        {"dp_shard": 4, "ep": 2, "etp": 2},
    ],
}
BF16 = Case(torch.bfloat16, accumulate=2)


def check(world: int, cases: list[Case], layouts: list[dict[str, int]] | None = None) -> None:
    layouts = layouts or LAYOUTS[world]
    with one_thread():
        wanted = {case: train(None, 0, case) for case in cases if case.dtype == torch.float32}
    for found in run_ranks(world, stages, layouts, cases):
        assert len(found) == len(layouts) * len(cases)
        for number, (what, first, third) in enumerate(found):
            case = cases[number % len(cases)]
            assert first.keys() == third.keys()
            for name, x in first.items():
                assert torch.equal(third[name], x), (what, name, (third[name] - x).abs().max())
                if case in wanted:  # sums in another order: of tokens over ranks, and of ranks
                    torch.testing.assert_close(third[name], wanted[case][name], rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("world", [2, 4])
def test_stage_3_trains_experts_with_the_bits_of_stage_1_and_as_one_process_does(world: int) -> None:
    """Norms and the decision to clip included; in bfloat16 with float32 masters, two microbatches a step."""
    check(world, [Case(persistent_share=0.1), BF16])


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_accumulated_and_frozen_and_recomputed_experts_too(world: int) -> None:
    check(world, [Case(accumulate=2), Case(frozen=True), Case(recomputes=True), Case(torch.bfloat16, frozen=True)])


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_offloaded_masters_and_ranks_without_a_row_of_the_experts_too(world: int) -> None:
    """With two experts and ep=2 a rank has one, and the second rank of efsdp none of its rows."""
    check(world, [Case(offload="cpu"), Case(torch.bfloat16, offload="cpu"), Case(num_experts=2)])


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_experts_whose_parameters_are_offloaded_too(world: int) -> None:
    """Also those of which no other rank has a copy."""
    check(world, [Case(offload="cpu+parameters"), Case(torch.bfloat16, offload="nvme+parameters:FOLDER")])


def test_gathers_begun_early_cross_with_the_exchange_of_tokens() -> None:
    """Gathers and reductions are on their way in the background while ranks exchange tokens, over other groups."""
    cases = [Case(prefetches=True), Case(prefetches=True, recomputes=True)]
    with one_thread():
        wanted = train(None, 0)
    for found in run_ranks(4, stages, LAYOUTS[4][:2], cases):
        for what, first, third in found:
            for name, x in wanted.items():
                for values in (first, third):  # torch adds in another order
                    assert torch.allclose(values[name], x, rtol=1e-5, atol=2e-6), (what, name)


@pytest.mark.parametrize(
    "sizes", [{"dp_shard": 4, "ep": 2}, {"tp": 4, "ep": 2}, {"dp_replicate": 2, "tp": 2, "ep": 2}], ids=str
)
def test_ranks_that_share_any_parameter_agree_on_what_is_reduced(sizes: dict[str, int]) -> None:
    """Ranks of tp share experts only; what a rank has is known to all that it reduces with, dense or not."""
    for rank, (found, partners) in enumerate(run_ranks(4, agreements, sizes)):
        assert len(partners) > 1
        assert {other for other, is_known in enumerate(found) if is_known} >= partners, rank


@pytest.mark.parametrize("sizes", [{"dp_shard": 4, "ep": 2}, {"dp_shard": 4, "ep": 4}, {"tp": 4, "ep": 2}], ids=str)
def test_experts_travel_among_those_who_hold_them_and_no_further(sizes: dict[str, int]) -> None:
    """Per unit two gathers and a reduction, over efsdp for experts; nothing of them where that is 1."""
    for found, expected in run_ranks(4, words, sizes):
        assert found == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("sizes", "shards", "copies"), [({"dp_shard": 2, "ep": 2}, 2, 1), ({"dp_shard": 4, "ep": 2}, 4, 2)], ids=str
)
def test_a_rank_keeps_its_part_of_experts(sizes: dict[str, int], shards: int, copies: int, dtype: torch.dtype) -> None:
    """`expected_memory` within 2 %, and both against the terms of docs/zero.md by hand: everything divides evenly."""
    wide, narrow = 4, dtype.itemsize
    for found, expected, numels, two_units in run_ranks(sizes["dp_shard"], memory, sizes, dtype):
        mine = numels["dense"] // shards + numels["experts"] // (2 * copies)
        buffers = numels["layer"] + (numels["layer's experts"] // 2 if copies > 1 else 0)
        masters = 0 if narrow == wide else wide * mine
        assert two_units == 2 * narrow * buffers  # experts that are whole need no memory to be gathered in
        assert expected["parameters"] == narrow * mine
        assert expected["gradients"] == wide * mine + 2 * narrow * buffers
        assert expected["states"] == 8 * mine + masters
        for kind, nbytes in expected.items():
            assert found[kind] == pytest.approx(nbytes, rel=0.02, abs=2048), kind


@pytest.mark.parametrize(
    ("sizes", "bad_rank"), [({"dp_shard": 2, "ep": 2}, 1), ({"dp_shard": 2, "tp": 2, "ep": 2}, 3)], ids=str
)
def test_a_nan_of_one_rank_s_experts_skips_the_step_on_all(sizes: dict[str, int], bad_rank: int) -> None:
    world = sizes["dp_shard"] * sizes.get("tp", 1)
    for skipped, report, changed, stuck in run_ranks(world, spoiled, sizes, bad_rank):
        assert skipped == 1
        assert f"layers.1.moe.experts.down_proj (rank {bad_rank})" in report
        assert not changed
        assert not stuck


def test_checkpoints_of_stage_3_and_of_stage_1_load_under_each_other(tmp_path: Path) -> None:
    """Parameters and moments, over other numbers of ranks and layouts; the next losses on the same one are equal."""
    layouts = [({"dp_shard": 4, "ep": 2}, 3), ({"dp_shard": 2, "ep": 2}, 1)]
    for number, (sizes, stage) in enumerate(layouts):
        folder = str(tmp_path / f"checkpoint{number}")
        before, losses = run_ranks(sizes["dp_shard"], save, folder, sizes, stage, True)[0]
        assert any(name.endswith("experts.down_proj.exp_avg") for name in before)
        others = [({"dp_shard": 2, "tp": 2, "ep": 2}, 3), ({}, 0)]
        for other, other_stage in [*layouts, *others[number:]]:
            ranks = other.get("dp_shard", 1) * other.get("tp", 1)
            for after, next_losses in run_ranks(ranks, load, folder, other, other_stage, True):
                assert after.keys() == before.keys()
                for name, x in before.items():
                    assert torch.equal(after[name], x), (name, other, other_stage)
                if (other, other_stage) == (sizes, stage):
                    assert next_losses == losses
                else:
                    assert next_losses == pytest.approx(losses, rel=1e-5)
