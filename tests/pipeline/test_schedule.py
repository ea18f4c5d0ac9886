"""The schedule as data: text, files, and what construction checks."""

from pathlib import Path

import pytest

from fastpar.pipeline import Action, ActionType, Chain, Schedule, ScheduleError

WORDS = [
    "0F3", "0B3", "0I3", "12W10", "0SEND_F3", "1RECV_F3", "1SEND_B3", "0RECV_B3", "0SEND_F3>2", "2RECV_F3>0",
    "0UNSHARD", "0RESHARD", "0REDUCE_GRAD", "0STEP", "0STASH@2", "0DROP@2", "0F3@2", "0B3@0", "(0F3;1B1)OVERLAP_F_B",
]  # fmt: skip


@pytest.mark.parametrize("word", WORDS)
def test_an_action_reads_back_what_it_writes(word: str) -> None:
    assert str(Action.parse(word)) == word


@pytest.mark.parametrize("word", [w for w in WORDS if ">" not in w and "@" not in w and "ST" not in w[:4]])
def test_torch_reads_the_same_action(word: str) -> None:
    from torch.distributed.pipelining.schedules import _Action

    assert str(_Action.from_str(word)) == word


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("F3", "is not an action"),
        ("0F", "needs a microbatch"),
        ("0STEP1", "has no microbatch"),
        ("0X1", "is not an action"),
        ("0F1>2", "only SEND_"),
        ("0STASH", "needs a weight version"),
        ("0STEP@1", "has no weight version"),
        ("(0F1)OVERLAP_F_B", "at least two"),
        ("(0F1;0STEP)OVERLAP_F_B", "only F, B, I and W"),
        ("", "is not an action"),
    ],
)
def test_text_that_is_no_action_is_refused(word: str, says: str) -> None:
    with pytest.raises(ScheduleError, match=says):
        Action.parse(word)


def parsed(*ranks: str) -> list[list[Action]]:
    return [[Action.parse(word) for word in own.split()] for own in ranks]


def two_ranks() -> Schedule:
    """Two stages, two microbatches."""
    actions = parsed("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")
    return Schedule.of_one_chain("two", [0, 1], 2, actions)


def test_a_schedule_survives_its_csv_file(tmp_path: Path) -> None:
    path = tmp_path / "two.csv"
    text = two_ranks().to_csv(path)
    assert text == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    assert Schedule.from_csv(path, name="two") == two_ranks() == Schedule.from_csv(text, name="two")


def test_idle_cells_of_torch_files_are_skipped() -> None:
    assert Schedule.from_csv("0F0,0F1,,,0B0,0B1\n,1F0,1B0,1F1,1B1\n", name="two") == two_ranks()


def test_csv_errors_name_line_and_column() -> None:
    with pytest.raises(ScheduleError, match="line 2, column 3"):
        Schedule.from_csv("0F0,0B0\n1F0,1B0,oops\n")
    with pytest.raises(ScheduleError, match="stage 0 has actions on ranks 0 and 1"):
        Schedule.from_csv("0F0,0B0\n0F1,0B1\n")
    with pytest.raises(ScheduleError, match=r"stages without actions: \[1\]"):
        Schedule.from_csv("0F0,0B0\n2F0,2B0\n")


def test_bidirectional_chains_hold_replicas() -> None:
    chains = (Chain((0, 1), (0,)), Chain((2, 3), (1,)))
    schedule = Schedule(
        "both ways", (0, 1, 1, 0), chains, tuple(map(tuple, parsed("0F0 0B0 3F1 3B1", "1F0 1B0 2F1 2B1")))
    )
    assert [schedule.part_of(stage) for stage in range(4)] == [0, 1, 0, 1]
    assert schedule.replicas_of(1) == (1, 3)
    assert schedule.stages_of(0) == (0, 3)
    assert (schedule.next_stage(2), schedule.next_stage(1), schedule.previous_stage(3)) == (3, None, 2)
    assert schedule.chain_of(1) is chains[1]
    assert schedule.peer_of(Action(ActionType.SEND_F, 2, 1)) == 3
    with pytest.raises(ScheduleError, match="no neighbour"):
        schedule.peer_of(Action(ActionType.SEND_F, 1, 0))


@pytest.mark.parametrize(
    ("stage_ranks", "chains", "says"),
    [
        ((0, 2), (Chain((0, 1), (0,)),), "stage 1 is on rank 2"),
        ((0, 1), (Chain((0,), (0,)),), "each of the 2 stages once"),
        ((0, 1), (Chain((0, 1), (0, 2)),), "each microbatch"),
        ((0, 1), (Chain((0, 1), ()),), "each microbatch"),
        ((0, 1, 1), (Chain((0, 1), (0,)), Chain((2,), (1,))), "equally long"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(stage_ranks, chains, says) -> None:
    with pytest.raises(ScheduleError, match=says):
        Schedule("bad", stage_ranks, chains, ((), ()))
