"""What a mesh holds and gives back, and how its ranks find each other: deadlines, other jobs, failed groups."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from fastpar.comm import CommError, CommTimeoutError, Communicator, PointToPoint, SharedRegion
from fastpar.mesh import Mesh, RendezvousError, RendezvousTimeoutError, init_mesh, lifetime
from fastpar.mesh.grid import GroupMaker
from fastpar.mesh.lifetime import known_groups, mark_failed
from fastpar.mesh.rendezvous import Clock, Session
from tests.dist import run_ranks, say_done, stay_away_until_done
from tests.forks import run_programs

CYCLES = 50


def held() -> tuple[int, int]:
    """Threads and open files of this process."""
    gc.collect()
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def settled(wanted: tuple[int, int]) -> tuple[int, int]:
    """What is held, once that has come down to `wanted`: sockets of gloo close in threads of its own."""
    deadline = time.monotonic() + 5.0
    while (found := held()) > wanted and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def sub_mesh():
    """Of two ranks, whose default group is the pool's, and which has one real group of its own."""

    mark_failed(dist.group.WORLD)  # so that the mesh may not use it
    return init_mesh(dp_shard=2, device="cpu")


def make_and_drop() -> list:
    mesh = sub_mesh()  # torch's first group starts threads that stay
    mesh.close()
    before, groups = held(), len(known_groups())
    for cycle in range(CYCLES):
        mesh = sub_mesh()
        if cycle % 10 == 0:  # what holds the mesh, or its groups, in passing
            comm = Communicator(mesh["dp_shard"])
            assert comm.all_reduce(torch.ones(3)).tolist() == [2.0] * 3
            x = distribute_tensor(torch.arange(4.0), mesh["dp_shard"], [Shard(0)])
            assert x.redistribute(placements=[Replicate()]).to_local().numel() == 4
            region = SharedRegion(comm, 1 << 16)
            p2p = PointToPoint(mesh.group("dp_shard"))
            del comm, x, region, p2p
        if cycle % 2:
            mesh.close()
            mesh.close()
        del mesh
    return [before, settled(before), groups, len(known_groups())]


def test_meshes_that_are_made_and_dropped_leave_no_thread_descriptor_or_group():
    for before, after, groups, groups_after in run_ranks(2, make_and_drop, timeout=300.0):
        assert after <= before
        assert groups_after == groups


def drop_while_groups_are_looked_at() -> bool:
    """A mesh goes, by the garbage collector, in the thread that looks at the groups of meshes that have gone."""
    before = len(known_groups())
    gc.disable()
    cycle: list = [sub_mesh()]
    cycle.append(cycle)
    mesh = sub_mesh()
    look, threads = lifetime.known_groups, set()

    def collect_meanwhile() -> list:
        if gc.collect():
            threads.add(threading.get_ident())
        return look()

    with patch.object(lifetime, "known_groups", collect_meanwhile):
        del cycle
        mesh.close()
        gc.enable()
        del mesh
        lifetime.release_unused()
    assert threading.get_ident() not in threads
    return len(known_groups()) == before


def test_a_mesh_may_be_collected_while_dropped_groups_are_looked_at():
    assert run_ranks(2, drop_while_groups_are_looked_at, timeout=30.0) == [True, True]


def keep_ten() -> list:
    sub_mesh().close()
    before = held()
    meshes = [sub_mesh() for _ in range(10)]
    sizes = sorted(group.size() for group in known_groups() if group is not dist.group.WORLD)
    during = held()
    del meshes
    return [before, during, settled(before), sizes]


def test_a_mesh_makes_no_real_group_for_dims_of_one_rank():
    for before, during, after, sizes in run_ranks(2, keep_ten):
        assert sizes == [1] + [2] * 10
        assert during[0] - before[0] <= 10 * 3  # gloo's of one group; those of one rank have none
        assert after <= before


def use_without_the_mesh() -> None:
    group = sub_mesh().group("dp_shard")
    view = sub_mesh()["dp_shard"]
    gc.collect()
    sub_mesh().close()  # looks for groups that can go
    x = torch.ones(2)
    dist.all_reduce(x, group=group)
    assert x.tolist() == [2.0, 2.0]
    assert DTensor.from_local(x, view, [Partial()]).full_tensor().tolist() == [4.0, 4.0]
    comm = Communicator(group)
    del group
    gc.collect()
    assert comm.all_reduce(x).tolist() == [4.0, 4.0]
    known = len(known_groups())
    del comm
    gc.collect()
    assert len(known_groups()) == known - 1  # the last user has gone


def test_what_a_dropped_mesh_has_given_out_goes_on_working_until_its_last_user_goes():
    run_ranks(2, use_without_the_mesh)


def connect_late() -> bool:
    """Whether rank 0 had its mesh while rank 1 was still making groups."""
    store, early = dist.PrefixStore("late", dist.distributed_c10d._get_default_store()), False
    group_of = GroupMaker._group_of

    def slow(maker: GroupMaker, *arguments) -> dist.ProcessGroup:
        nonlocal early
        made = group_of(maker, *arguments)
        with contextlib.suppress(RuntimeError):  # nobody has set it in this time
            store.wait(["has a mesh"], timedelta(seconds=0.3))
            early = True
        return made

    with patch.object(GroupMaker, "_group_of", slow if dist.get_rank() else group_of):
        mesh = sub_mesh()
    store.set("has a mesh", "1")
    mesh.close()
    return early


def test_a_mesh_is_there_when_all_ranks_have_connected():
    assert run_ranks(2, connect_late) == [False, False]


def drop_elsewhere() -> None:
    mesh = sub_mesh()
    ref = weakref.ref(mesh.group("dp_shard"))
    holder = [mesh]
    holder.append(holder)  # found by the collector only
    del mesh, holder
    thread = threading.Thread(target=gc.collect)
    thread.start()
    thread.join()
    assert ref() is None
    mesh = sub_mesh()
    if os.fork() == 0:
        del mesh
        gc.collect()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
    assert Communicator(mesh["dp_shard"]).all_reduce(torch.ones(1)).item() == 2.0
    mesh.close()


def test_a_mesh_may_be_collected_on_any_thread_and_in_a_forked_child():
    run_ranks(2, drop_elsewhere)


FORKED = """
import os, sys
import torch.distributed as dist
from fastpar.mesh import lifetime

child = os.fork()
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
lifetime.leave([dist.new_group([0])])
lifetime.release_unused()
os._exit(len(lifetime.known_groups()))
"""


def test_a_process_forked_after_the_import_gives_its_own_groups_back():
    assert subprocess.run([sys.executable, "-c", FORKED], timeout=120, check=False).returncode == 1


def one_rank_dims() -> None:
    mesh = init_mesh(dp_shard=2, device="cpu")
    x = torch.arange(12.0).view(4, 3)
    for view in (mesh["tp"], mesh["dp_shard", "tp"], mesh["pp", "cp"]):
        for placement in (Shard(0), Shard(1), Replicate()):
            sharded = distribute_tensor(x, view, [placement] * view.ndim)
            assert torch.equal(sharded.full_tensor(), x)
            assert torch.equal((sharded @ sharded.T).full_tensor(), x @ x.T)
            moved = sharded.redistribute(placements=[Shard(1)] * view.ndim)
            assert torch.equal(moved.full_tensor(), x)
        partial = DTensor.from_local(x, view, [Partial()] * view.ndim)
        assert torch.equal(partial.full_tensor(), x * view.size())
    group = mesh["tp"].get_group()
    assert (group.size(), dist.get_process_group_ranks(group)) == (1, [dist.get_rank()])
    out = torch.empty(4, 3)
    dist.all_to_all_single(out, x, group=group)
    gathered, objects = [torch.empty(4, 3)], [None]
    dist.all_gather(gathered, x, group=group)
    dist.all_gather_object(objects, {"a": 1}, group=group)
    dist.barrier(group=group)
    work = dist.all_reduce(x.clone(), group=group, async_op=True)
    work.wait()
    assert torch.equal(out, x)
    assert torch.equal(gathered[0], x)
    assert objects == [{"a": 1}]
    assert work.is_completed()
    assert Communicator(mesh["tp"]).size == 1
    with pytest.raises(NotImplementedError, match="multiply before"):
        dist.all_reduce(x, op=dist._make_nccl_premul_sum(2.0), group=group)

    def scaled(t):
        whole = DTensor.from_local(t, mesh["pp", "cp"], [Shard(0), Partial()])
        return (whole.redistribute(placements=[Replicate(), Shard(0)]) * 2).to_local()

    assert torch.equal(torch.compile(scaled, backend="aot_eager", fullgraph=True)(x), 2 * x)
    mesh.close()


def test_dims_of_one_rank_serve_dtensors_and_torchs_collectives():
    run_ranks(2, one_rank_dims)


def use_after_close() -> None:
    mesh = init_mesh(tp=2, device="cpu")
    assert mesh.rank("tp") == dist.get_rank()
    mesh.close()
    assert (mesh.size("tp"), mesh.rank("tp")) == (2, dist.get_rank())
    for call in (lambda: mesh.group("tp"), lambda: mesh["tp"], lambda: mesh.device_mesh):
        with pytest.raises(RuntimeError, match=r"Mesh\(tp=2.*was closed.*init_mesh"):
            call()
    wrapped = AsyncCollectiveTensor(torch.ones(3))
    with pytest.raises(TypeError, match="got a AsyncCollectiveTensor: pass the tensors"):
        Communicator(dist.group.WORLD).all_reduce(wrapped)
    named = torch.nn.Parameter(torch.ones(3))
    assert Communicator(dist.group.WORLD).all_reduce(named).tolist() == [2.0] * 3


def test_a_closed_mesh_and_a_tensor_without_memory_are_refused():
    run_ranks(2, use_after_close)


# ---- deadlines


def stay_away_from_init_mesh() -> str:
    if dist.get_rank():
        stay_away_until_done([0])
        return ""
    started = time.monotonic()
    with pytest.raises(RendezvousTimeoutError) as error:
        init_mesh(tp=2, device="cpu", rendezvous_timeout=0.5)
    assert time.monotonic() - started < 5.0
    say_done()
    return str(error.value)


def test_init_mesh_names_the_ranks_that_do_not_come_by_its_deadline():
    assert "rank(s) 1 of 2 did not come within 0.5 s" in run_ranks(2, stay_away_from_init_mesh)[0]


def late_first_rank() -> str:
    if dist.get_rank() == 0:
        stay_away_until_done([1])
        return ""
    with pytest.raises(RendezvousTimeoutError) as error:
        init_mesh(tp=2, device="cpu", rendezvous_timeout=0.2)
    say_done()
    return str(error.value)


def test_init_mesh_says_that_rank_0_does_not_come():
    assert "rank 0 did not come within 0.2 s" in run_ranks(2, late_first_rank)[1]


def different_arguments() -> str:
    sizes = {"tp": 2} if dist.get_rank() else {"dp_shard": 2}
    with pytest.raises(RendezvousError) as error:
        init_mesh(**sizes, device="cpu")
    mesh = init_mesh(tp=2, device="cpu")  # nothing is left of the attempt
    mesh.close()
    return str(error.value)


def test_ranks_that_want_different_meshes_hear_of_it_on_all_ranks():
    for words in run_ranks(2, different_arguments):
        assert "rank 0 with pp=1, dp_replicate=1, dp_shard=2" in words
        assert "rank 1 with pp=1, dp_replicate=1, dp_shard=1, cp=1, tp=2" in words


def deadlines() -> list[float]:
    mesh = init_mesh(tp=2, device="cpu", timeout=7.0)
    found = [Communicator(mesh["tp"]).timeout, PointToPoint(mesh.group("tp")).timeout, mesh.timeout]
    found.append(Communicator(mesh["tp"], timeout=3.0).timeout)
    mesh.close()
    return [*found, Communicator(dist.new_group([0, 1])).timeout]


def test_the_deadline_of_a_mesh_is_that_of_all_that_is_made_from_it():
    assert run_ranks(2, deadlines) == [[7.0, 7.0, 7.0, 3.0, 600.0]] * 2


def fail_and_go_on() -> str:
    first = init_mesh(tp=2, device="cpu", timeout=0.5)
    comm = Communicator(first["tp"])
    comm.barrier()
    words = ""
    if comm.rank == 0:
        with pytest.raises(CommTimeoutError):
            comm.all_reduce(torch.ones(1))
        with pytest.raises(CommError) as error:
            comm.all_reduce(torch.ones(1))
        words = str(error.value)
        say_done()
    else:
        stay_away_until_done([0])  # it knows of nothing
    second = init_mesh(tp=2, device="cpu", timeout=20.0)
    assert Communicator(second["tp"]).all_reduce(torch.ones(1)).item() == 2.0
    second.close()
    first.close()
    third = init_mesh(tp=2, device="cpu", timeout=20.0)
    assert Communicator(third["tp"]).all_reduce(torch.ones(1)).item() == 2.0
    third.close()
    return words


def test_after_a_failed_collective_init_mesh_gives_a_group_that_works():
    words = run_ranks(2, fail_and_go_on)[0]
    assert "init_mesh" in words


# ---- jobs


def session(store: dist.Store, rank: int, found: list, seconds: float = 5.0) -> None:
    try:
        made = Session(store, rank, 2, Clock(seconds))
        made.meet({"tp": 2}, {"rank": rank})
        made.confirm("")
        found.append(made.known)
    except RendezvousError as error:
        found.append(error)


def run_sessions(store: dist.Store, ranks: list[int], seconds: float = 5.0) -> list:
    found: list = []
    threads = [threading.Thread(target=session, args=(store, rank, found, seconds)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_sessions_of_one_store_follow_each_other():
    store = dist.HashStore()
    for _ in range(3):
        assert run_sessions(store, [1, 0]) == [[{"rank": 0}, {"rank": 1}]] * 2


def test_a_rank_is_not_taken_into_the_session_that_rank_0_opens_next(monkeypatch):
    """Rank 0 may be through with a session, and have opened another, between two looks of a rank that waits."""
    looked, opened = threading.Event(), threading.Event()
    wait_for_all = Session._wait_for_all

    class Interrupted(dist.PrefixStore):
        def check(self, keys: list[str]) -> bool:
            answer = super().check(keys)
            if keys == ["outcome"] and threading.current_thread().name == "rank 1" and super().check(["in1"]):
                looked.set()
                opened.wait(5.0)  # what it has seen is old by now
            return answer

    def rank_0() -> None:
        first, after = (Session(store, 0, 2, Clock(10.0)) for _ in range(2))
        monkeypatch.setattr(first, "_wait_for_all", lambda *a: (wait_for_all(first, *a), looked.wait(5.0)))
        monkeypatch.setattr(after, "_wait_for_all", lambda *a: (opened.set(), wait_for_all(after, *a)))
        first.meet({"tp": 2}, {})
        after.meet({"cp": 2}, {})

    def rank_1() -> None:
        try:
            Session(store, 1, 2, Clock(10.0)).meet({"tp": 2}, {})
            Session(store, 1, 2, Clock(10.0)).meet({"cp": 2}, {})
            said.append("both")
        except RendezvousError as error:
            said.append(str(error))

    store, said = dist.HashStore(), []
    monkeypatch.setattr("fastpar.mesh.rendezvous.dist.PrefixStore", Interrupted)
    threads = [threading.Thread(target=rank_0), threading.Thread(target=rank_1, name="rank 1")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert said == ["both"]


def test_a_rank_of_another_job_is_refused_and_disturbs_nobody(monkeypatch):
    store = dist.HashStore()
    found: list = []
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "ours")
    first = threading.Thread(target=session, args=(store, 0, found))
    first.start()
    while not store.check(["fastpar/attempt0/session"]):
        time.sleep(0.001)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "theirs")
    (error,) = run_sessions(store, [1])
    assert "another job is waiting for its ranks" in str(error)
    assert "its run is 'ours', and this one's 'theirs'" in str(error)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "ours")
    assert run_sessions(store, [1]) == [[{"rank": 0}, {"rank": 1}]]
    first.join()
    assert found == [[{"rank": 0}, {"rank": 1}]]


_TAKER = """
import sys, torch.distributed as dist
from datetime import timedelta
from fastpar.mesh.rendezvous import Clock, Session
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False, wait_for_workers=False)
made = Session(store, 1, 2, Clock(60.0))
made.meet({"tp": 2}, {"rank": 1})
print("in", flush=True)
sys.stdin.read()
"""


def test_a_place_that_a_living_process_has_is_refused_by_its_name():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    root = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    taker = subprocess.Popen(
        [sys.executable, "-c", _TAKER, str(store.port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": root},
    )
    try:
        own = Session(store, 0, 2, Clock(60.0))
        own.meet({"tp": 2}, {"rank": 0})
        assert taker.stdout.readline() == b"in\n"
        (error,) = run_sessions(store, [1])
        assert f"rank 1 of this job is another process already ({os.uname().nodename} pid {taker.pid}" in str(error)
    finally:
        taker.kill()
        taker.communicate()
    (error,) = run_sessions(store, [1], seconds=0.1)  # the process has ended: maybe rank 0 opens another session
    assert isinstance(error, RendezvousTimeoutError)
    assert "rank 0 opened no new session" in str(error)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (((2,), {}), TypeError, r"takes sizes by name, got 2: write .* init_mesh\(dp_shard=2, tp=2\)"),
        (((), {"dp": 2}), TypeError, r"no argument 'dp': it is dp_replicate x dp_shard: give dp_shard=N"),
        (((), {"fsdp": 2}), TypeError, r"no argument 'fsdp': give dp_shard=N"),
        (((), {"tpp": 2}), TypeError, r"no argument 'tpp': did you mean tp"),
        (((), {"tensor_parallel": 2}), TypeError, r"no argument 'tensor_parallel'"),
        (((), {"tp": "2"}), TypeError, r"tp must be an int, got '2' \(str\)"),
        (((), {"tp": True}), TypeError, r"tp must be an int, got True"),
        (((), {"timeout": 0}), ValueError, r"timeout must be positive"),
        (((), {"timeout": "60"}), TypeError, r"timeout must be a number of seconds, got '60'"),
        (((), {"rendezvous_timeout": float("inf")}), ValueError, r"rendezvous_timeout must be positive .* finite"),
        (((), {"device": 3.5}), TypeError, r"device must be"),
    ],
)
def test_wrong_arguments_are_refused_by_name(arguments, error, words):
    positional, named = arguments
    with pytest.raises(error, match=words):
        init_mesh(*positional, **named)
    assert not dist.is_initialized()


def test_a_rendezvous_that_nobody_answers_ends_at_its_deadline(monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RendezvousTimeoutError, match=r"rank 1 cannot reach the store of rank 0 at 127.0.0.1:1"):
        init_mesh(tp=2, device="cpu", rendezvous_timeout=0.3)
    assert not dist.is_initialized()
    monkeypatch.delenv("MASTER_PORT")
    with pytest.raises(RendezvousError, match="MASTER_PORT must be set"):
        init_mesh(tp=2, device="cpu")


_AGAIN = """
import sys, warnings; warnings.simplefilter("error")
import torch, torch.distributed as dist, fastpar as fp
from tests.forks import become_ranks
become_ranks(2, sys.argv[1])
assert not dist.is_initialized()
for step in range(3):
    mesh = fp.init_mesh(tp=2, device="cpu", timeout=30.0)
    assert fp.Communicator(mesh["tp"]).all_reduce(torch.ones(1)).item() == 2
    mesh.close()
    mesh.close()
    assert not dist.is_initialized()
"""


@pytest.mark.ranks
def test_a_job_may_close_its_mesh_and_make_it_again():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    modules = "torch._dynamo", "torch.distributed.tensor"  # and nothing of fastpar: see tests/dist_imports.py
    (done,) = run_programs(_AGAIN, [[str(store.port)]], modules)
    assert done.returncode == 0, done.stdout + done.stderr


def doubled(mesh: Mesh) -> tuple[DTensor, DTensor]:
    x = DTensor.from_local(torch.ones(2), mesh["dp_shard"], [Shard(0)])
    return x, x + x


def meshes_of_one_shape() -> bool:
    """Rank 0 holds the first mesh, and rank 1 lets it go."""
    first = init_mesh(dp_shard=2, device="cpu")
    held = doubled(first)
    if first.rank("dp_shard") == 1:
        del held, first
        gc.collect()
    second = init_mesh(dp_shard=2, device="cpu")
    x, result = doubled(second)
    is_its_own = result.device_mesh is x.device_mesh
    second.close()
    return is_its_own


def test_dtensors_of_a_new_mesh_stay_on_it_whether_an_old_one_lives() -> None:
    assert run_ranks(2, meshes_of_one_shape) == [True, True]


def collected_mesh() -> bool:
    mesh = init_mesh(dp_shard=2, device="cpu")
    doubled(mesh)
    with patch("torch.distributed.tensor.debug._clear_sharding_prop_cache") as clear:
        del mesh
        gc.collect()
        is_left_alone = not clear.called
    init_mesh(dp_shard=2, device="cpu").close()
    return is_left_alone


def test_a_collection_leaves_the_caches_of_dtensor_alone() -> None:
    assert run_ranks(2, collected_mesh) == [True, True]
