"""What is wrong on one rank is raised on all of them: `fastpar.comm.agree`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fastpar.comm import CommMismatchError, Communicator, calibrate
from fastpar.comm.agree import Agreement
from fastpar.comm.symmetric import calibration
from tests.dist import run_ranks

NAMES = ("top_k", "the dtype of x")


def test_worked_example_of_words() -> None:
    right = Agreement("moe_dispatch", NAMES, [2, torch.bfloat16])
    wrong = Agreement("moe_dispatch", NAMES, problem="x is upside down")
    words = [right.words, wrong.words]
    assert words == [[0, 2, 1], [1, 0, 0]]
    right.check([words[0]] * 3)
    with pytest.raises(ValueError, match=r"^moe_dispatch: wrong arguments on rank 1 of the group: see its error$"):
        right.check(words)
    with pytest.raises(ValueError, match=r"^x is upside down$"):
        wrong.check(words)
    with pytest.raises(ValueError, match=r"the dtype of x must be equal .* \['torch.bfloat16', 'torch.float16'\]$"):
        right.check([words[0], [0, 2, 2]])


def gathered() -> list[str]:
    """What each of some calls raised, by its type, or the numbers that it returned."""
    comm, found = Communicator(dist.group.WORLD), []
    mine = torch.tensor([comm.rank, 7])
    for problem, values, extra in (
        (None, [3, torch.float32], mine),
        (TypeError("no tensor") if comm.rank else None, [3, torch.float32], mine),
        (None, [3 + comm.rank, torch.float32], mine),
        ("nothing fits" if comm.rank else None, [3, torch.float32], mine[: 2 - comm.rank]),
        (None, [3, torch.float32], mine),
    ):
        try:
            found.append(str(Agreement("op", NAMES, values, problem).gather(comm, extra).tolist()))
        except (TypeError, ValueError, CommMismatchError) as error:
            found.append(f"{type(error).__name__}: {error}"[:60])
    return found


def test_gathered_agreements_raise_on_all_ranks_and_the_next_call_is_right() -> None:
    first, second = run_ranks(2, gathered)
    assert first[0] == first[4] == second[0] == second[4] == "[[0, 7], [1, 7]]"
    assert first[1] == "ValueError: op: wrong arguments on rank 1 of the group: see "
    assert second[1] == "TypeError: no tensor"
    assert first[2] == second[2] == "ValueError: op: top_k must be equal on all ranks of the grou"
    assert first[3].startswith("CommMismatchError")
    assert second[3] == "ValueError: nothing fits"


def calibrated() -> list[str]:
    rank, found = dist.get_rank(), []
    for options in ({"samples": 1 - rank}, {"sizes": [4096 << rank]}):
        try:
            calibrate(dist.group.WORLD, **options)
        except ValueError as error:
            found.append(str(error))
    return found


def test_ranks_that_calibrate_other_things_all_raise() -> None:
    first, second = run_ranks(2, calibrated)
    assert first[0].startswith("calibrate: wrong arguments on rank 1")
    assert second[0] == "samples must be at least 1, got 0"
    assert (
        first[1] == second[1] == ("calibrate: sum of sizes must be equal on all ranks of the group, got [4096, 8192]")
    )


def test_measurements_that_cannot_be_kept_are_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    calibration._write(tmp_path / "file" / "symmetric.json", 2, {})  # else rank 0 alone would raise
    assert "measurements are not kept" in caplog.text


def test_one_rank_agrees_with_itself() -> None:
    alone = Communicator(None)
    assert Agreement("op", NAMES, [1, torch.float64]).gather(alone, torch.tensor([5])).tolist() == [[5]]
    with pytest.raises(ValueError, match="nothing"):
        Agreement("op", NAMES, problem="nothing").gather(alone)
