"""Collectives of groups whose ranks are on several hosts. The hosts are simulated: ranks that are told apart do not
share memory, though they could.

The collectives themselves are those of test_comm.py. Here: which way they go, the bits and order of reductions,
sizes around the thresholds, calls in flight together, and errors, which must reach the ranks of all hosts.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import re
import signal
import time
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fastpar.comm import (
    CommError,
    CommMismatchError,
    CommTimeoutError,
    Communicator,
    PeerLostError,
)
from fastpar.comm.group_connection import GroupConnection
from fastpar.comm.multi_host.collectives import _WHOLE_BYTES
from fastpar.comm.multi_host.protocol import INLINE_BYTES
from fastpar.comm.multi_host.transport import _FLAT_BYTES, _FLAT_RANKS
from fastpar.comm.shared_memory import rendezvous
from fastpar.comm.shared_memory.region import SharedRegion
from fastpar.comm.shared_memory.world import SLOT_BYTES
from tests.comm import test_comm
from tests.comm.test_shared_memory import noise, same_bits
from tests.dist import run_ranks, say_done, stay_away_until_done

PAIRS = [[0, 1], [2, 3]]
MIXED = [[0, 2], [1, 3]]
ALONE_FIRST = [[0], [1, 2]]
ALONE_LAST = [[0, 1, 2], [3]]
THREE = [[0], [1, 3], [2]]
LAYOUTS = [PAIRS, MIXED, ALONE_LAST, THREE]
SIX = 6


@contextlib.contextmanager
def on_hosts(layout):
    """What this rank (of the default group) takes for its host, for groups whose ranks meet inside of the block."""
    host = next(index for index, ranks in enumerate(layout) if dist.get_rank() in ranks)
    with mock.patch.object(rendezvous, "_host", return_value=f"host {host}"):
        yield


def spread(layout, check, *args):
    """Nothing goes the flat way that need not."""
    with on_hosts(layout), mock.patch("fastpar.comm.multi_host.transport._FLAT_BYTES", 0):
        return check(*args)


def run_on(layout, check, *args, **kwargs):
    return run_ranks(sum(map(len, layout)), spread, layout, check, *args, **kwargs)


def communicator(timeout=20.0, group=None):
    return Communicator(group or dist.group.WORLD, timeout=timeout)


def num_calls(comm):
    """How many collectives went through the hierarchy."""
    found = GroupConnection.of(comm.group).hierarchy
    return 0 if found is None else found._sequence


# ---- the same results as everywhere


def check_and_count(check):
    check()
    return num_calls(communicator())


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(
    "check",
    [
        test_comm.check_all_reduce,
        test_comm.check_reduce_scatter,
        test_comm.check_gathers,
        test_comm.check_rooted,
    ],
)
def test_collective_across_hosts_matches_one_process(check, layout):
    assert min(run_on(layout, check_and_count, check)) > 10


@pytest.mark.parametrize("layout", [MIXED, ALONE_FIRST], ids=str)
def test_all_to_all_across_hosts_matches_one_process_and_stays_on_the_group(layout):
    assert run_on(layout, check_and_count, test_comm.check_all_to_all) == [0] * sum(map(len, layout))


@pytest.mark.parametrize("late_rank", [None, 1])
def test_async_results_across_hosts_do_not_depend_on_the_order_of_waits_or_a_late_rank(late_rank):
    run_on(ALONE_FIRST, test_comm.check_repeats, late_rank)


# ---- order and bits


def by_hosts(layout, xs, op):
    """Each host's ranks in order, then hosts in order, wide; one division, one rounding."""
    adds = op in ("sum", "avg")
    wide = torch.float32 if adds and xs[0].dtype in (torch.bfloat16, torch.float16) else xs[0].dtype
    combine = {"sum": torch.add, "avg": torch.add, "max": torch.maximum, "min": torch.minimum}[op]

    def over(values):
        total = values[0]
        for value in values[1:]:
            total = combine(total, value)
        return total

    total = over([over([xs[rank].to(wide) for rank in ranks]) for ranks in layout])
    return (total / len(xs) if op == "avg" else total).to(xs[0].dtype)


# Little data, whole sums to every leader, shares; and more than the exchange buffers of a host hold.
SIZES = [5, INLINE_BYTES // 4 + 1, _WHOLE_BYTES // 4, SLOT_BYTES // 4 + 77]


def check_bits(layout):
    comm = communicator()
    rank, size = comm.rank, comm.size
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.uint8):
        for numel in SIZES if dtype in (torch.float32, torch.bfloat16) else SIZES[:2]:
            for op in ("sum", "avg", "max") if dtype.is_floating_point else ("sum", "min"):
                xs = noise(size, numel, dtype, seed=numel)
                wanted = by_hosts(layout, xs, op)
                same_bits(comm.all_reduce(xs[rank], op), wanted)
                if op == "max" or numel == SIZES[1]:
                    continue
                same_bits(comm.all_reduce_async(xs[rank], op).wait(), wanted)
                sizes = [numel // 3] + [0] * (size - 2) + [numel - numel // 3]
                same_bits(comm.reduce_scatter(xs[rank], op, sizes=sizes), wanted.split(sizes)[rank])
                for dst in (0, size - 1):
                    reduced = comm.reduce(xs[rank], dst, op)
                    assert (reduced is None) == (rank != dst)
                    if reduced is not None:
                        same_bits(reduced, wanted)
    return comm.all_reduce(noise(size, 1000, torch.float32, seed=1)[rank]).view(torch.int32)


@pytest.mark.parametrize("layout", [MIXED, ALONE_FIRST, THREE], ids=str)
def test_reductions_add_per_host_then_over_hosts_and_round_once(layout):
    first, *others = run_on(layout, check_bits, layout, timeout=120)
    for other in others:
        assert torch.equal(first, other)  # bit for bit, payloads of NaN too


def check_rounds_once():
    """(1 + a) + (a + a) with a = 2^-9, a quarter of the last bit of 1 in bfloat16: three of them round up, but the
    first is lost if its host rounds, and then half a bit is left, which rounds to even: down."""
    comm = communicator()
    for numel in (3, INLINE_BYTES):
        x = torch.full((numel,), 1.0 if comm.rank == 0 else 2**-9).bfloat16()
        assert torch.equal(comm.all_reduce(x), torch.full((numel,), 1 + 2**-7).bfloat16())


def test_sixteen_bit_sums_are_not_rounded_on_the_way_between_hosts():
    run_on(PAIRS, check_rounds_once)


# ---- sizes


def check_sizes():
    comm = communicator()
    size, rank = comm.size, comm.rank
    inline = INLINE_BYTES // 4
    for numel in (inline - 1, inline, inline + 1, inline // size, inline // size + 1, SLOT_BYTES // 4 + 17):
        xs = [torch.arange(numel, dtype=torch.float32) % 1000 + other for other in range(size)]
        total = sum(xs[1:], xs[0])
        results = [comm.all_reduce(xs[rank]), comm.all_gather(xs[rank]), comm.reduce_scatter(xs[rank])]
        wanted = [total, torch.cat(xs), total.split(-(-numel // size))[rank]]
        for result, value in zip(results, wanted, strict=True):
            test_comm.same(result, value)
            assert result.untyped_storage().nbytes() == result.nbytes  # no piece of a larger buffer
        for root in (0, size - 1):
            test_comm.same(comm.broadcast(xs[rank], root), xs[root])
        sizes = [numel if other == size - 1 else 0 for other in range(size)]  # only one rank has any
        test_comm.same(comm.all_gather(xs[rank][: sizes[rank]], sizes=sizes), xs[rank] if rank == size - 1 else xs[-1])
        test_comm.same(comm.reduce_scatter(xs[rank], sizes=sizes), total[: sizes[rank]])
    for dtype in (torch.complex128, torch.float8_e4m3fn, torch.bool):  # moved as bytes
        for numel in (3, INLINE_BYTES + 3):
            xs = [(torch.arange(numel) % 7 + other).to(dtype) for other in range(size)]
            assert torch.equal(comm.all_gather(xs[rank]).view(torch.uint8), torch.cat(xs).view(torch.uint8))
            assert torch.equal(comm.broadcast(xs[rank], 1).view(torch.uint8), xs[1].view(torch.uint8))


@pytest.mark.parametrize("layout", [MIXED, ALONE_FIRST], ids=str)
def test_tensors_around_every_threshold_arrive_whole_across_hosts(layout):
    run_on(layout, check_sizes)


# ---- in flight together


def check_groups(layout):
    """Different groups, a flat collective and the user's own on the same group, awaited in another order."""
    comm = communicator()
    rank = comm.rank
    members = ([0, 1, 2], [1, 2, 3], [0, 1], [0, 1, 2, 3])
    groups = [dist.new_group(ranks) for ranks in members]
    comms = [communicator(group=group) for group in groups if group is not dist.GroupMember.NON_GROUP_MEMBER]
    for each in (comm, *comms):
        each.barrier()
    pending = []
    for step in range(SIX):
        for each in (comm, *comms):
            ranks = dist.get_process_group_ranks(each.group)
            for numel in (5 + step, 20_000 + step):
                wanted = torch.full((numel,), float(sum(ranks) + step * len(ranks)))
                pending.append((each.all_reduce_async(torch.full((numel,), float(rank + step))), wanted))
            rows = torch.arange(float(each.size)) + 10 * rank + step
            wanted = torch.tensor([10.0 * other + each.rank + step for other in ranks])
            pending.append((each.all_to_all_async(rows), wanted))
        own = torch.tensor([rank])
        dist.all_reduce(own)
        assert own.item() == 6
    for work, wanted in reversed(pending):
        assert torch.equal(work.wait(), wanted)
    assert num_calls(comm) == 1 + 2 * SIX


@pytest.mark.parametrize("layout", [PAIRS, MIXED], ids=str)
def test_groups_across_hosts_make_progress_together_and_leave_the_users_order_alone(layout):
    run_on(layout, check_groups, layout)


def check_background():
    comm = communicator()
    comm.barrier()
    for step in range(SIX):
        x = torch.full((50_000,), float(step + comm.rank))
        pending = comm.all_reduce_async(x, out=x)
        dropped = [comm.all_reduce_async(torch.ones(1000 * step + 1)) for _ in range(4)]
        del dropped
        # A blocking call comes after those that were launched before it.
        assert comm.all_reduce(torch.ones(2)).tolist() == [comm.size] * 2
        if comm.rank == step % comm.size:
            time.sleep(0.1)  # long enough for the others to leave notes
        assert pending.wait() is x
        assert torch.equal(x, torch.full((50_000,), float(3 * step + 3)))
    with torch.inference_mode():
        y = torch.ones(3)
        comm.all_reduce_async(y, out=y).wait()
        assert y.tolist() == [comm.size] * 3
    z = torch.ones(4, requires_grad=True) * 1
    z = z * 2
    loss = (z * z).sum()
    comm.all_reduce(z.detach(), out=z.detach())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_calls_in_the_background_run_in_order_and_need_nobody_to_wait_for_them():
    run_on(ALONE_FIRST, check_background)


# ---- which way


def check_transports(layout):
    comm = communicator()
    assert comm.local_world() is None
    assert GroupConnection.of(comm.group).hierarchy.hosts == tuple(tuple(ranks) for ranks in layout)
    required = Communicator(dist.group.WORLD, transport="shared_memory")
    for call in (lambda: required.all_reduce(torch.ones(2)), lambda: required.barrier()):
        with pytest.raises(CommError, match="cannot share memory: the ranks are on several hosts"):
            call()
    with pytest.raises(CommError, match="cannot share memory"):
        SharedRegion(comm, 64)
    test_comm.same(comm.all_reduce(torch.ones(3)), torch.full((3,), 4.0))
    here = dist.new_group([0, 2])  # all on one host
    if here is not dist.GroupMember.NON_GROUP_MEMBER:
        assert communicator(group=here).local_world().ranks == [0, 1]
    apart = dist.new_group([0, 1])
    if apart is not dist.GroupMember.NON_GROUP_MEMBER:
        flat = communicator(group=apart)
        test_comm.same(flat.all_reduce(torch.ones(3)), torch.full((3,), 2.0))
        assert GroupConnection.of(apart).hierarchy is None
        assert "no two on the same" in GroupConnection.of(apart).problem


def test_the_way_is_chosen_by_where_the_ranks_of_the_group_are():
    run_on(MIXED, check_transports, MIXED)


def check_flat(layout):
    """By size, and the same on every rank whatever its own part is."""
    with on_hosts(layout):
        comm = communicator()
        size, rank, most = comm.size, comm.rank, _FLAT_BYTES // 4
        comm.barrier()
        for numel in (most, most + 1):
            xs = [torch.arange(numel, dtype=torch.float32) % 100 + other for other in range(size)]
            sizes = [numel] + [0] * (size - 1)
            total, before = sum(xs[1:], xs[0]), num_calls(comm)
            test_comm.same(comm.all_reduce(xs[rank]), total)
            test_comm.same(comm.reduce_scatter(xs[rank], sizes=sizes), total[: sizes[rank]])
            test_comm.same(comm.all_gather(xs[0][: sizes[rank]], sizes=sizes), xs[0])
            test_comm.same(comm.broadcast(xs[rank], 1), xs[1])
            reduced = comm.reduce(xs[rank], 0)
            assert reduced is None or torch.equal(reduced, total)
            is_flat = size <= _FLAT_RANKS and numel == most
            assert num_calls(comm) == before + (0 if is_flat else 5)


@pytest.mark.parametrize("layout", [MIXED, [[0, 1, 2], [3, 4]]], ids=str)
def test_little_data_of_small_groups_goes_the_flat_way(layout):
    run_ranks(sum(map(len, layout)), check_flat, layout)


def no_network(*_):
    raise RuntimeError("no network today")


def no_memory(*_):
    return "no memory today"


def check_fall_back(place, broken, culprit):
    comm = communicator()
    broken = mock.patch(place, broken) if comm.rank == culprit else contextlib.nullcontext()
    with broken, mock.patch("fastpar.comm.multi_host.leaders._CONNECT_S", 0.5):
        for _ in range(SIX):
            test_comm.same(comm.all_reduce(torch.ones(3)), torch.full((3,), 3.0))
    assert (num_calls(comm), GroupConnection.of(comm.group).hierarchy) == (0, None)
    return GroupConnection.of(comm.group).problem


@pytest.mark.parametrize(
    ("place", "broken", "culprit", "words"),
    [
        ("multi_host.leaders.Leaders", no_network, 1, r"hosts cannot reach each other .*rank 1: no network today"),
        ("shared_memory.world._connect", no_memory, 2, "rank 2 has no shared memory: no memory today"),
    ],
)
def test_where_one_rank_cannot_all_fall_back_with_the_reason(place, broken, culprit, words):
    reasons = run_on(ALONE_FIRST, check_fall_back, f"fastpar.comm.{place}", broken, culprit)
    assert len(set(reasons)) == 1
    assert re.search(words, reasons[0])


# ---- errors


def check_mismatches(odd, numel):
    """Rank `odd` calls something else."""
    comm = communicator()
    is_odd = comm.rank == odd
    x, half = torch.ones(numel), numel // 2
    calls = [
        (lambda: comm.all_reduce(x[:half] if is_odd else x), rf"{odd}: all_reduce \(sum\) of {half} elements, float32"),
        (lambda: comm.all_reduce(x.double() if is_odd else x), "float32.*float64|float64.*float32"),
        (lambda: comm.all_reduce(x, "max" if is_odd else "min"), rf"{odd}: all_reduce \(max\)"),
        (lambda: comm.broadcast(x, 1 if is_odd else 0), f"{odd}: broadcast .*, root 1"),
        (lambda: comm.reduce(x, 1 if is_odd else 0), f"{odd}: reduce .*, root 1"),
        (lambda: comm.all_gather(x) if is_odd else comm.all_reduce(x), f"{odd}: all_gather"),
        (lambda: comm.barrier() if is_odd else comm.all_reduce(x), f"{odd}: barrier"),
        (lambda: comm.reduce_scatter(x, sizes=[numel, 0, 0] if is_odd else [0, 0, numel]), "sizes #"),
        (lambda: comm.all_reduce_async(x[:2] if is_odd else x).wait(), rf"{odd}: all_reduce \(sum\) of 2"),
    ]
    for call, words in calls:
        before = num_calls(comm)
        with pytest.raises(CommMismatchError, match=words):
            call()
        test_comm.same(comm.all_reduce(x), x * comm.size)  # and the group goes on
        assert num_calls(comm) == before + 2


@pytest.mark.parametrize("numel", [8, INLINE_BYTES])
@pytest.mark.parametrize("odd", [0, 1, 2])
def test_a_mismatch_within_a_host_or_across_hosts_is_an_error_on_every_rank_and_the_group_goes_on(odd, numel):
    run_on(ALONE_FIRST, check_mismatches, odd, numel)


def check_absent(absent, mode):
    communicator().barrier()  # meets the others, however late they start
    comm = communicator(timeout=0.8)
    for _ in range(SIX):
        comm.all_reduce(torch.ones(3))
    x = torch.ones(3 if mode == "little" else INLINE_BYTES)
    others = [rank for rank in range(comm.size) if rank != absent]
    if comm.rank == absent:
        stay_away_until_done(others)
        return None
    started = time.monotonic()
    with pytest.raises(CommTimeoutError) as caught:
        comm.all_reduce_async(x).wait() if mode == "async" else comm.all_reduce(x)
    took = time.monotonic() - started
    with pytest.raises(CommError, match=r"an earlier collective of this group failed .*: make a new group"):
        comm.all_reduce(x)
    again = communicator(group=dist.new_group(others, use_local_synchronization=True))
    test_comm.same(again.all_reduce(torch.ones(2)), torch.full((2,), comm.size - 1.0))
    say_done()
    return took, str(caught.value)


@pytest.mark.parametrize(
    ("layout", "absent", "mode", "named"),
    [
        (PAIRS, 3, "little", "rank(s) 3"),
        (PAIRS, 2, "large", "rank(s) 2"),
        (PAIRS, 0, "async", "rank(s) 0"),
        (ALONE_LAST, 3, "little", "rank(s) 3"),
        (THREE, 3, "large", "rank(s) 3"),
        (THREE, 0, "async", "rank(s) 0"),
    ],
)
def test_a_rank_that_never_calls_is_named_on_the_ranks_of_all_hosts_at_the_deadline(layout, absent, mode, named):
    for result in run_on(layout, check_absent, absent, mode):
        if result is not None:
            took, message = result
            assert 0.7 < took < 2.0
            assert named in message
            assert "all_reduce #6" in message


def check_host_absent():
    communicator().barrier()
    comm = communicator(timeout=0.8)
    if comm.rank in (1, 3):
        stay_away_until_done([0, 2])
        return None
    with pytest.raises(CommTimeoutError) as caught:
        comm.all_reduce(torch.ones(3))
    say_done()
    return str(caught.value)


def test_a_host_none_of_whose_ranks_calls_is_named():
    for message in run_on(THREE, check_host_absent):
        assert message is None or "for rank(s) 1, 3" in message


def check_late():
    """The deadline counts from the launch, and a rank that is late by less is no error."""
    comm = communicator(timeout=1.5)
    comm.barrier()
    for step in range(SIX):
        if comm.rank == step % comm.size:
            time.sleep(0.15)
        assert comm.all_reduce(torch.ones(1 + 5000 * (step % 2)))[0].item() == comm.size


def test_a_late_rank_is_waited_for():
    run_on(THREE, check_late)


def check_fork():
    comm = communicator()
    comm.barrier()
    child = os.fork()
    if child == 0:
        try:
            comm.all_reduce(torch.ones(2))
        except CommError as error:
            os._exit(0 if "forked" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    if comm.rank == 1:
        time.sleep(0.2)  # the others read notes: there must be none from a child
    assert comm.all_reduce(torch.ones(1)).item() == comm.size


def test_a_forked_child_is_told_that_it_is_no_rank_and_harms_nobody():
    run_on(ALONE_FIRST, check_fork)


# ---- processes that end


def rank_process(rank, layout, port, results, check, args):
    """A process of its own, which ends as Python programs do (multiprocessing would skip that)."""
    size = sum(map(len, layout))
    torch.set_num_threads(1)
    os.environ.update(LOCAL_WORLD_SIZE=str(size))
    limit = timedelta(seconds=20)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    results.send(spread(layout, check, *args))
    results.close()
    ctypes.pythonapi.Py_Exit(0)


def run_processes(layout, check, *args, timeout=30.0):
    """What `check` returned and the exit code, by rank; None where a rank was killed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "tests.comm.test_hierarchical"])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = []
    for rank in range(sum(map(len, layout))):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=rank_process, args=(rank, layout, store.port, theirs, check, args))
        process.start()
        theirs.close()
        ranks.append((process, ours))
    deadline = time.monotonic() + timeout
    found = []
    for process, results in ranks:
        result = None
        with contextlib.suppress(EOFError):
            if results.poll(max(deadline - time.monotonic(), 0)):
                result = results.recv()
        process.join(max(deadline - time.monotonic(), 0))
        found.append((result, process.exitcode))
        if process.exitcode is None:
            process.kill()
    return found


def lose(victim, numel, is_async):
    """The victim kills itself between two collectives of a row; gives the others' errors and how long each took."""
    comm = communicator(timeout=10.0)
    for step in range(100):
        started = time.monotonic()
        if comm.rank == victim and step == SIX:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            pending = comm.all_reduce_async(torch.ones(numel)) if is_async else None
            assert (comm.all_reduce(torch.ones(numel)) if pending is None else pending.wait())[0].item() == comm.size
        except CommError as error:
            return step, type(error).__name__, str(error), time.monotonic() - started
    return None


@pytest.mark.parametrize(
    ("layout", "victim", "numel", "is_async"),
    [(PAIRS, 3, 3, False), (PAIRS, 2, 100_000, True), (THREE, 0, 100_000, False)],
)
def test_a_killed_rank_is_an_error_on_the_ranks_of_all_hosts_within_two_seconds(layout, victim, numel, is_async):
    for rank, (result, code) in enumerate(run_processes(layout, lose, victim, numel, is_async)):
        if rank == victim:
            assert (result, code) == (None, -signal.SIGKILL)
            continue
        step, kind, text, took = result
        assert (step, kind, code) == (SIX, PeerLostError.__name__, 0), (rank, result)
        assert f"rank {victim} " in text or f"rank(s) {victim}:" in text
        assert took < 2.0


def leave(launcher):
    """One rank launches what nobody else does, and ends; the others wait for it."""
    comm = communicator(timeout=20.0)
    comm.barrier()
    started = time.monotonic()
    if comm.rank in launcher:
        comm.all_reduce_async(torch.ones(3))
        comm.all_reduce_async(torch.ones(30_000))
        time.sleep(0.2)
    return time.monotonic() - started


@pytest.mark.parametrize("launcher", [[1], [2], [0, 1]])
def test_a_process_ends_with_collectives_in_flight(launcher):
    started = time.monotonic()
    for _, code in run_processes([[0, 1], [2]], leave, launcher):
        assert code == 0
    assert time.monotonic() - started < 10.0
