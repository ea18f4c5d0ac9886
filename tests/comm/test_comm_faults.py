"""What ranks get when one of them dies, stops, stays away or does something else: over shared memory, a typed error on
every rank, soon, that says who and what.

Tests with a killed rank fork their own ranks (`tests.comm.fault_ranks`); the others use the pool.
"""

from __future__ import annotations

import gc
import os
import random
import re
import signal
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fastpar.comm import CommError, CommMismatchError, CommTimeoutError, Communicator
from fastpar.comm.shared_memory.region import SharedRegion
from tests.comm.fault_ranks import OPS, FaultRanks, Outcome
from tests.dist import run_ranks
from tests.timing import assert_within

KILLED_WITHIN_S = 2.0
MISMATCHES = 50


@pytest.fixture(scope="module")
def ranks() -> Iterator[FaultRanks]:
    with FaultRanks() as made:
        yield made


def shared_memory_names() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir() if path.stat().st_uid == os.getuid()}


def check_lost(outcomes: list[Outcome], victim: int) -> list[float]:
    """Every survivor has the right error, in time; the seconds that took."""
    for outcome in outcomes:
        assert outcome.error == "PeerLostError", outcome
        assert re.search(rf"process of rank {victim} \(pid \d+\) has ended", outcome.text), outcome
        assert re.match(r"\w+ #\d+ .*on rank \d of \d", outcome.text), outcome
        assert outcome.seconds < KILLED_WITHIN_S, outcome
    return [outcome.seconds for outcome in outcomes]


# ---- death


@pytest.mark.parametrize("op", OPS)
def test_a_killed_rank_becomes_an_error_that_names_it_on_every_survivor(ranks, op):
    before, size = shared_memory_names(), 2 + OPS.index(op) % 3
    victim = OPS.index(op) % size
    outcomes = ranks.run(size, op, fault="kill", victim=victim, after=0.003 * OPS.index(op))
    assert len(outcomes) == size - 1
    check_lost(outcomes, victim)
    assert shared_memory_names() <= before


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_any_rank_may_be_killed_at_any_moment_200_times(ranks):
    draw, before, seconds = random.Random(0), shared_memory_names(), []
    for _ in range(200):
        size = draw.randint(2, 4)
        victim = draw.randrange(size)
        outcomes = ranks.run(size, draw.choice(OPS), fault="kill", victim=victim, after=draw.random() * 0.05)
        assert len(outcomes) == size - 1
        seconds += check_lost(outcomes, victim)
    print(f"{len(seconds)} survivors: median {statistics.median(seconds):.3f} s, p99 {sorted(seconds)[-5]:.3f} s")
    assert shared_memory_names() <= before


def test_a_rank_that_ends_without_a_word_is_a_lost_one(ranks):
    check_lost(ranks.run(3, "all_reduce", fault="leave", victim=1, after=0.01), victim=1)


# ---- late


@pytest.mark.parametrize("fault", ["stop", "sleep"])
def test_a_rank_that_does_not_come_is_named_at_the_deadline(ranks, fault):
    outcomes = ranks.run(3, "all_reduce", fault=fault, victim=1, after=0.01, timeout=2.0)
    waited = [outcome for outcome in outcomes if outcome.rank != 1]
    assert len(waited) == 2
    for outcome in waited:
        assert outcome.error == "CommTimeoutError", outcome
        assert "for rank(s) 1" in outcome.text, outcome
        assert outcome.seconds < 3.0, outcome


def test_a_rank_that_was_stopped_is_told_what_it_missed(ranks):
    def stop() -> float:
        (late,) = (
            o for o in ranks.run(3, "all_gather", fault="stop", victim=2, after=0.01, timeout=0.5) if o.rank == 2
        )
        assert late.error == "CommTimeoutError"
        assert re.search(r"rank [01] gave up: .*waited 0.5 s for rank\(s\) 2", late.text), late
        return late.seconds

    assert_within(0.5, stop)


def reduce_twice(comm: Communicator) -> CommError:
    """The error of two collectives, of which the first fails somewhere; a late rank may find all it needs for that."""
    try:
        for _ in range(2):
            comm.all_reduce(torch.ones(1 << 16))
    except CommError as error:
        return error
    raise AssertionError("nothing failed")


def broken_for_good() -> tuple[str, str, float]:
    Communicator(dist.group.WORLD).barrier()  # meets the others, however late they start
    comm = Communicator(dist.group.WORLD, timeout=0.5, transport="shared_memory")
    if comm.rank == 1:
        time.sleep(1.0)
    first = reduce_twice(comm)
    started = time.monotonic()
    with pytest.raises(CommTimeoutError, match=r"earlier collective of this group failed .*make a new group"):
        comm.all_gather(torch.ones(3))
    with pytest.raises(CommTimeoutError, match="make a new group"):
        comm.all_gather_async(torch.ones(3)).wait()
    return type(first).__name__, str(first), time.monotonic() - started


def test_after_a_deadline_every_call_fails_at_once_and_with_the_same_error():
    def fail() -> float:
        found = run_ranks(3, broken_for_good)
        for kind, text, _ in found:
            assert kind == "CommTimeoutError", text
        return max(took for _, _, took in found)

    assert_within(0.5, fail)


# ---- an exception from a signal handler while a collective waits


class Interrupt(Exception):
    pass


def interrupted(in_flight: bool) -> Any:
    """Of rank 0 how long its call took, of rank 1 its error."""
    comm = Communicator(dist.group.WORLD, timeout=20.0, transport="shared_memory")
    comm.barrier()
    if comm.rank == 1:
        time.sleep(1.0)
        return str(reduce_twice(comm))

    def handler(*_: Any) -> None:
        raise Interrupt

    before = signal.signal(signal.SIGALRM, handler)
    pending = comm.all_reduce_async(torch.ones(1 << 16)) if in_flight else None
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    started = time.monotonic()
    try:
        with pytest.raises(Interrupt):
            comm.all_reduce(torch.ones(1 << 16))
    finally:
        signal.signal(signal.SIGALRM, before)
    took = time.monotonic() - started
    if pending is not None:
        assert pending.done()  # nobody writes to the buffers of either call any more
    with pytest.raises(CommError):
        comm.barrier()
    return took


@pytest.mark.parametrize("in_flight", [False, True])
def test_a_signal_ends_a_blocking_call_and_whatever_it_waits_behind(in_flight):
    def interrupt() -> float:
        took, text = run_ranks(2, interrupted, in_flight)
        assert "rank 0 gave up" in text
        return float(took)

    assert_within(0.8, interrupt)


# ---- ranks that do different things


def mismatched_calls(kind: str, draw: random.Random, odd: bool, comm: Communicator) -> Any:
    """A function that calls what this rank calls in one round; drawn alike on all ranks, of which one is `odd`."""
    numel = draw.choice([1, 3, 1000, 20_000, 300_000])
    x = torch.ones(numel * comm.size)
    background = draw.random() < 0.5
    if kind == "shape":
        op, more = (
            draw.choice(["all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce"]),
            draw.randint(1, 9),
        )
        arguments: tuple[Any, ...] = (torch.ones(x.numel() + more * comm.size) if odd else x,)
    elif kind == "dtype":
        op = draw.choice(["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce"])
        other = draw.choice([torch.bfloat16, torch.int32, torch.float64, torch.int64, torch.float16])
        arguments = (x.to(other) if odd else x,)
    elif kind == "op":
        one, two = draw.sample(["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "barrier"], 2)
        op = one if odd else two
        arguments = () if op == "barrier" else (x,)
    elif kind == "option":
        op = draw.choice(["all_reduce", "broadcast", "reduce", "reduce_scatter", "all_to_all"])
        if op in ("all_reduce", "reduce_scatter"):
            other_op = draw.choice(["avg", "max", "min"])
            arguments = (x, other_op if odd else "sum")
        elif op == "all_to_all":
            sizes = [numel] * comm.size
            if odd:
                sizes = [numel - 1, *sizes[1:-1], numel + 1] if comm.rank else [*sizes[:-2], numel - 1, numel + 1]
            return lambda: comm.all_to_all(x, input_sizes=sizes, output_sizes=sizes)
        else:
            arguments = (x, 1 if odd else 0)
    name = f"{op}_async" if background else op
    return lambda: getattr(comm, name)(*arguments).wait() if background else getattr(comm, name)(*arguments)


def mismatches(kind: str) -> int:
    comm = Communicator(dist.group.WORLD, timeout=10.0, transport="shared_memory")
    draw = random.Random(f"{kind} {comm.size}")
    for round_ in range(MISMATCHES):
        odd = draw.randrange(comm.size) == comm.rank
        call = mismatched_calls(kind, draw, odd, comm)
        with pytest.raises(CommMismatchError) as error:
            call()
        for rank in range(comm.size):
            assert re.search(rf"rank {rank}:? ", str(error.value)), str(error.value)
        # The group goes on.
        assert comm.all_reduce(torch.full((5,), float(round_))).tolist() == [float(round_ * comm.size)] * 5
    return MISMATCHES


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", ["shape", "dtype", "op", "option"])
def test_50_mismatches_are_an_error_on_every_rank_and_the_group_goes_on(kind, size):
    assert run_ranks(size, mismatches, kind) == [MISMATCHES] * size


def out_of_order() -> int:
    """Two collectives, which one rank calls the other way round: in the background, both ways."""
    comm = Communicator(dist.group.WORLD, timeout=10.0, transport="shared_memory")
    draw = random.Random(5)
    for _ in range(MISMATCHES):
        swapped = draw.randrange(comm.size) == comm.rank
        x = torch.ones(draw.choice([6, 6000, 600_000]))
        calls = [comm.all_reduce_async, comm.all_gather_async]
        pendings = [call(x) for call in (calls[::-1] if swapped else calls)]
        for pending in pendings:
            with pytest.raises(CommMismatchError, match=r"rank 0: all_.*rank 1: all_"):
                pending.wait()
        comm.barrier()
    return MISMATCHES


def test_50_collectives_out_of_order_are_errors_on_every_rank():
    assert run_ranks(3, out_of_order) == [MISMATCHES] * 3


# ---- what is left when groups go


def held() -> tuple[int, int, int]:
    """Open files, threads and mappings of shared memory of this process."""
    maps = Path("/proc/self/maps").read_text()
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), maps.count("memfd:fastpar")


def use_a_group() -> None:
    group = dist.new_group([0, 1])
    comm = Communicator(group, transport="shared_memory")
    comm.all_reduce(torch.ones(300_000))
    comm.all_gather_async(torch.ones(3)).wait()
    region = SharedRegion(comm, 1 << 20)
    inside = region.tensor((1000,), torch.float32)
    comm.all_reduce(inside, out=inside)
    region.close()
    comm.barrier()
    dist.destroy_process_group(group)


def use_many_groups() -> tuple[int, list[tuple[int, int, int]]]:
    gc.collect()
    before, found = held()[2], []  # other tests of the pool may have left groups that something of theirs still holds
    for _ in range(6):
        use_a_group()
        gc.collect()
        dist.barrier()  # of the default group, over gloo
        found.append(held())
    return before, found


def test_a_group_that_is_destroyed_leaves_no_file_thread_or_mapping():
    for before, found in run_ranks(2, use_many_groups):
        assert found[0][2] == before
        assert set(found[1:]) == {found[1]}
