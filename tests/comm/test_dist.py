"""The rank pool: results by rank, and failures that name the rank within seconds."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
import weakref

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.dist import RankError, run_ranks, say_done, stay_away_until_done, worker_pids
from tests.timing import assert_within


def rank_and_sum(value):
    x = torch.full((2,), float(dist.get_rank() + value))
    dist.all_reduce(x)
    return dist.get_rank(), dist.get_world_size(), x


def state():
    torch.set_default_dtype(torch.float64)
    group = dist.new_group([0])
    drawn = torch.rand(1).item(), float(np.random.rand()), random.random()  # noqa: NPY002
    return drawn, torch.get_num_threads(), os.environ["RANK"], os.environ["WORLD_SIZE"], group is not None


def default_dtype():
    return torch.get_default_dtype(), len(dist.distributed_c10d._world.pg_map)


def fail(how, culprit):
    if dist.get_rank() == culprit:
        if how == "raise":
            raise KeyError("something on one rank")
        if how == "exit":
            print("last words", flush=True)
            os._exit(7)
        if how == "late kill":
            time.sleep(0.3)
        if "kill" in how:
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "warn":
            warnings.warn("a warning on one rank", stacklevel=1)
        if how == "sleep":
            time.sleep(600)
    if how == "late kill":
        raise ConnectionError("as when a peer is gone")
    if how != "sleep":
        dist.all_reduce(torch.ones(1))  # never comes back: the culprit does not call it


def nap_forever(path):
    with open(f"{path}/{dist.get_rank()}", "w") as file:
        file.write(str(os.getpid()))
    time.sleep(600)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_results_come_back_by_rank_and_by_value(world_size):
    results = run_ranks(world_size, rank_and_sum, 1)
    assert [r[0] for r in results] == list(range(world_size))
    assert {r[1] for r in results} == {world_size}
    for result in results:
        torch.testing.assert_close(result[2], torch.full((2,), float(sum(range(1, world_size + 1)))), rtol=0, atol=0)
        assert not result[2].is_shared()


def test_workers_are_reused_and_every_run_starts_from_the_same_state():
    first = run_ranks(2, state)
    pids = worker_pids()
    second = run_ranks(2, state)
    assert worker_pids() == pids
    assert first == second
    assert first[0][0] == first[1][0]
    assert [(r[1], r[2], r[3]) for r in first] == [(1, "0", "2"), (1, "1", "2")]
    assert run_ranks(2, default_dtype) == [(torch.float32, 1)] * 2


def parent():
    return os.getppid()


def test_ranks_are_forks_of_one_process_that_has_imported_for_all():
    assert len({os.getpid(), *run_ranks(2, parent)}) == 2


class Ring:
    """Only a collection frees it."""

    def __init__(self):
        self.itself = self


LEFT = []


def leave_garbage():
    """Whether what the run before left is gone, and how many objects no collection looks at."""
    is_gone = [left() is None for left in LEFT]
    LEFT[:] = [weakref.ref(Ring())]
    return is_gone, gc.get_freeze_count()


def test_garbage_of_a_run_is_collected_and_modules_are_passed_over():
    run_ranks(2, leave_garbage)
    for is_gone, frozen in run_ranks(2, leave_garbage):
        assert is_gone == [True]
        assert frozen > 50_000  # torch alone has more; a collection would look at each after every run


def test_a_bound_holds_for_the_best_of_a_few_tries():
    late = iter([30.0, 20.0, 0.5, 4.0])
    assert_within(1.0, lambda: next(late))
    assert list(late) == [4.0]
    with pytest.raises(AssertionError, match=r"took 20.000 of [\d.]+, 20.000 of [\d.]+ s, never less than 1 s"):
        assert_within(1.0, lambda: 20.0, tries=2)


def stay_or_work():
    if dist.get_rank() == 0:
        stay_away_until_done([1, 2])
        return time.monotonic()
    time.sleep(0.1 * dist.get_rank())
    at = time.monotonic()
    say_done()
    return at


def test_a_rank_stays_away_until_the_last_of_the_others_is_done():
    away, *others = run_ranks(3, stay_or_work)
    assert away > max(others)


def leave_early_or_ask_late():
    """Whether rank 0, which returns at once, still has its group when rank 1 asks."""
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:

        def answer():
            store.wait(["asked"])
            store.set("answer", str(dist.is_initialized()))

        threading.Thread(target=answer, daemon=True).start()
        return None
    time.sleep(0.3)
    store.set("asked", "")
    return store.get("answer").decode()


def test_a_rank_that_is_done_leaves_its_groups_when_the_others_are():
    assert run_ranks(2, leave_early_or_ask_late) == [None, "True"]


def store_of_the_pool():
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return id(store), store.timeout.total_seconds()


def test_all_runs_share_one_connection_to_the_store():
    first, second = run_ranks(2, store_of_the_pool, timeout=30), run_ranks(2, store_of_the_pool, timeout=40)
    assert [r[0] for r in first] == [r[0] for r in second]
    assert {r[1] for r in first} == {30}
    assert {r[1] for r in second} == {40}


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raise", ["rank 1 raised", "KeyError: 'something on one rank'", "test_dist.py"]),
        ("warn", ["rank 1 raised", "UserWarning: a warning on one rank"]),
        ("exit", ["rank 1 died: exit status 7", "last words"]),
        ("kill", ["rank 1 died: killed by SIGKILL"]),
        ("late kill", ["rank 1 died: killed by SIGKILL", "ConnectionError: as when a peer is gone"]),
    ],
)
def test_a_rank_that_fails_is_named_within_seconds_and_the_next_run_works(how, words):
    run_ranks(2, default_dtype)
    started = time.monotonic()
    with pytest.raises(RankError) as caught:
        run_ranks(2, fail, how, 1)
    assert time.monotonic() - started < 8
    assert caught.value.rank == 1
    for word in words:
        assert word in str(caught.value)
    # Rank 0 waits inside the collective, unless gloo told it that the peer is gone.
    assert "in fail" in str(caught.value)
    assert run_ranks(2, default_dtype) == [(torch.float32, 1)] * 2


def test_a_rank_that_hangs_is_named_with_its_stack():
    run_ranks(2, default_dtype)
    started = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1 was not done within 1 s") as caught:
        run_ranks(2, fail, "sleep", 1, timeout=1.0)
    assert time.monotonic() - started < 5
    message = str(caught.value)
    assert "rank 0 returned" in message
    assert "rank 1 still running" in message
    assert 'test_dist.py", line' in message.split("rank 1 still running")[1]


def test_functions_that_ranks_cannot_import_are_rejected():
    with pytest.raises(ValueError, match="top-level function"):
        run_ranks(1, lambda: None)
    with pytest.raises(ValueError, match="world_size must be at least 1"):
        run_ranks(0, default_dtype)


def test_no_worker_outlives_a_killed_test_process(tmp_path):
    imports = "from tests.dist import run_ranks; from tests.comm.test_dist import nap_forever"
    code = f"{imports}; run_ranks(2, nap_forever, {str(tmp_path)!r})"
    parent = subprocess.Popen(
        [sys.executable, "-c", code], cwd=os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    )
    try:
        _wait_until(lambda: len(list(tmp_path.iterdir())) == 2 and all(f.read_text() for f in tmp_path.iterdir()), 60)
    finally:
        parent.kill()
        parent.wait()
    pids = [int(file.read_text()) for file in tmp_path.iterdir()]
    _wait_until(lambda: not any(_runs(pid) for pid in pids), 5)


def _runs(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _wait_until(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.05)
