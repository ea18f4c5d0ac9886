"""Ranks that call different things where no memory is shared (gloo, and what stands for NCCL), and who is named when a
process is lost; empty tensors; sizes that no rank knows; all_to_all over dims; the world."""

from __future__ import annotations

import logging
import os
import re
import time

import pytest
import torch
import torch.distributed as dist

import fastpar as fp
from fastpar.comm import (
    CommMismatchError,
    CommTimeoutError,
    Communicator,
    PeerLostError,
    all_to_all,
    record,
    world,
)
from fastpar.comm.shared_memory.library import library
from tests.dist import RankError, run_ranks, say_done, stay_away_until_done
from tests.forks import run_programs

WAYS = ["auto", "torch", "check"]


def communicator(way: str, timeout: float = 20.0) -> Communicator:
    if way == "check":
        comm = Communicator(dist.group.WORLD, timeout=timeout, check=True)
        comm._selector._connection = None  # as between devices: torch's own collectives, checked
        return comm
    return Communicator(dist.group.WORLD, timeout=timeout, transport=way)


def disagree(way: str) -> None:
    comm = communicator(way)
    odd = comm.rank == comm.size - 1
    expected = uneven_of(comm, odd)
    small, large = torch.ones(6), torch.ones(60_000)
    calls = [
        lambda x: comm.all_reduce(x[: x.numel() // 2] if odd else x),
        lambda x: comm.all_reduce(x.int() if odd else x),
        lambda x: comm.all_reduce(x, "max" if odd else "sum"),
        lambda x: comm.all_reduce(x[:0] if odd else x),
        lambda x: comm.all_gather(x) if odd else comm.all_reduce(x),
        lambda x: comm.all_gather(x[:-1] if odd else x),
        lambda x: comm.broadcast(x, 1 if odd else 0),
        lambda x: comm.broadcast(x[:0] if odd else x),
        lambda x: comm.reduce(x, 1 if odd else 0),
        lambda x: comm.reduce_scatter(x[:0] if odd else x),
        lambda x: comm.barrier() if odd else comm.all_to_all(x[: comm.size]),
        lambda x: comm.all_to_all(x[:6], input_sizes=[7 - comm.size, *[1] * (comm.size - 1)], output_sizes=expected),
    ]
    for call in calls:
        for x in (small, large):
            with pytest.raises(CommMismatchError) as error:
                call(x)
            for rank in range(comm.size):
                assert re.search(rf"rank {rank}:? ", str(error.value)), str(error.value)
            assert comm.all_reduce(torch.full((5,), 1.0)).tolist() == [float(comm.size)] * 5
    if way == "check":
        return
    pendings = [comm.all_reduce_async(small.int() if odd and i == 1 else small) for i in range(3)]
    for i, pending in enumerate(pendings):
        if i == 1:
            with pytest.raises(CommMismatchError):
                pending.wait()
        else:
            assert pending.wait().tolist() == [float(comm.size)] * 6


def uneven_of(comm: Communicator, odd: bool) -> list[int]:
    """What comes from each rank where all send [n, 1, 1]; one more from rank 0 on the odd one."""
    first = 6 - comm.size + 1
    sizes = [first if comm.rank == 0 else 1] * comm.size
    if odd:
        sizes[0] += 1
    return sizes


@pytest.mark.parametrize("way", WAYS)
def test_ranks_that_disagree_hear_of_it_on_all_ranks_and_the_group_goes_on(way):
    run_ranks(2, disagree, way)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_three_ranks_that_disagree_hear_of_it_on_all_ranks(way):
    run_ranks(3, disagree, way)


def lose_one(way: str, kind: str) -> str:
    comm = communicator(way)
    comm.barrier()
    if comm.rank == 1:
        os._exit(7)
    time.sleep(0.5)  # nothing of the other rank is on its way any more
    with pytest.raises(PeerLostError) as error:
        comm.all_reduce(torch.ones(4 if kind == "little" else 100_000))
    raise ValueError(str(error.value))  # what the pool reports


@pytest.mark.parametrize("kind", ["little", "much"])
def test_gloo_names_the_rank_whose_process_has_ended(kind):
    with pytest.raises(RankError) as error:
        run_ranks(3, lose_one, "torch", kind)
    assert re.search(r"all_reduce #\d+ .*lost the connection to rank\(s\) 1", str(error.value)), str(error.value)


def come_late(way: str) -> str:
    comm = communicator(way, timeout=1.0)
    comm.barrier()
    if comm.rank == 1:
        stay_away_until_done([0])
        return ""
    with pytest.raises(CommTimeoutError) as error:
        comm.all_reduce(torch.ones(3))
    say_done()
    return str(error.value)


def test_gloo_names_the_rank_that_does_not_come():
    assert "rank(s) 1" in run_ranks(2, come_late, "torch")[0]


def one_has_nothing(way: str) -> None:
    comm = communicator(way)
    empty = torch.ones(0, 3)
    for call in (
        lambda: comm.all_reduce(empty),
        lambda: comm.all_gather(empty),
        lambda: comm.reduce_scatter(empty),
        lambda: comm.all_to_all(empty),
        lambda: comm.broadcast(empty),
        lambda: comm.gather(empty),
        lambda: comm.scatter(empty),
        lambda: comm.reduce(empty),
        lambda: comm.all_reduce(torch.ones(3, 0, 2)),
        lambda: comm.all_gather(torch.ones(3, 0, 2), dim=-1),
        lambda: comm.all_reduce(torch.ones(0, dtype=torch.int64), "max"),
    ):
        result = call()
        assert result is None or result.numel() == 0
    assert comm.all_reduce_async(empty).wait().shape == (0, 3)
    assert comm.collectives("split_phase").all_reduce(empty).wait().shape == (0, 3)
    with pytest.raises(CommMismatchError):
        comm.all_reduce(empty if comm.rank else torch.ones(4, 3))
    with pytest.raises(CommMismatchError):
        comm.all_gather(torch.ones(3, 0) if comm.rank else torch.ones(3, 1))
    sizes = [0] * (comm.size - 1) + [2]
    x = torch.ones(sizes[comm.rank], 3)
    assert comm.all_gather(x, sizes=sizes).shape == (2, 3)


@pytest.mark.parametrize("way", ["auto", "torch"])
def test_an_empty_tensor_takes_part_in_the_comparison(way):
    run_ranks(2, one_has_nothing, way)


# ---- what is new


def unknown_sizes() -> None:
    comm = world()
    x = torch.full((comm.rank * 2 + 1, 2), float(comm.rank))
    sizes = comm.share_sizes(x.size(0))
    assert sizes == [2 * rank + 1 for rank in range(comm.size)]
    whole = torch.cat([torch.full((2 * rank + 1, 2), float(rank)) for rank in range(comm.size)])
    assert torch.equal(comm.all_gather(x, sizes=sizes), whole)
    sent = [(comm.rank + 2 * other) % 4 for other in range(comm.size)]
    expected = comm.exchange_sizes(sent)
    assert expected == [(other + 2 * comm.rank) % 4 for other in range(comm.size)]
    rows = torch.arange(float(sum(sent))) + 100 * comm.rank
    received = comm.all_to_all(rows, input_sizes=sent, output_sizes=expected)
    assert received.numel() == sum(expected)
    for call, error in (
        (lambda: comm.share_sizes(-1), ValueError),
        (lambda: comm.share_sizes(1.5), TypeError),
        (lambda: comm.exchange_sizes([1]), ValueError),
        (lambda: comm.exchange_sizes([1, "2"]), TypeError),
    ):
        with pytest.raises(error, match=r"sizes|rows"):
            call()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_sizes_that_no_rank_knows_of_the_others_are_asked_for(size):
    if size > 1:
        run_ranks(size, unknown_sizes)
    else:
        assert world().share_sizes(3) == [3]
        assert world().exchange_sizes([2]) == [2]


def over_dims(way: str) -> None:
    comm = communicator(way)
    heads, tokens = 5, [2, 3, 4][: comm.size]
    generator = torch.Generator().manual_seed(1)
    whole = torch.randn(2, sum(tokens), heads, 3, generator=generator, dtype=torch.float64)
    x = whole.split(tokens, 1)[comm.rank].clone().requires_grad_()
    y = all_to_all(x, comm, split_dim=2, concat_dim=1, output_sizes=tokens)
    own = fp.comm.shard_sizes(heads, comm.size)
    assert torch.equal(y, whole.split(own, 2)[comm.rank])
    weight = torch.randn(whole.shape, generator=generator, dtype=torch.float64)
    (y * weight.split(own, 2)[comm.rank]).sum().backward()
    assert torch.equal(x.grad, weight.split(tokens, 1)[comm.rank])
    back = comm.all_to_all(y.detach(), split_dim=1, concat_dim=-2, input_sizes=tokens, output_sizes=own)
    assert torch.equal(back, x)
    z = torch.randn(3, 2 * comm.size, generator=generator)  # one dim, not the first
    assert torch.equal(comm.all_to_all(z, split_dim=-1), torch.cat([z.chunk(comm.size, 1)[comm.rank]] * comm.size, 1))
    t = torch.randn(comm.size, 3, dtype=torch.float64, requires_grad=True)
    sent = [2] + [1] * (comm.size - 1) if comm.rank == 0 else [1] * comm.size
    rows = torch.ones(sum(sent), 3, dtype=torch.float64, requires_grad=True)
    out = all_to_all(rows, comm, input_sizes=sent, output_sizes=comm.exchange_sizes(sent))
    (out.sum() * (comm.rank + 1) + all_to_all(t, comm).sum()).backward()
    wanted = torch.repeat_interleave(torch.arange(1.0, comm.size + 1), torch.tensor(sent))
    assert torch.equal(rows.grad[:, 0], wanted.double())
    for call, words in (
        (lambda: comm.all_to_all(z, split_dim=1, concat_dim=0, input_sizes=[1] * comm.size), "add up to the"),
        (lambda: comm.all_to_all(z, split_dim=1, concat_dim=0, output_sizes=[9] * comm.size), "must be the 3 rows"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    with pytest.raises(IndexError, match="dim must be in"):
        comm.all_to_all(z, split_dim=2)


@pytest.mark.parametrize(("size", "way"), [(2, "auto"), (3, "auto"), (2, "torch")])
def test_all_to_all_over_dims_matches_one_process_forward_and_backward(size, way):
    run_ranks(size, over_dims, way)


def test_all_to_all_of_one_rank_is_the_identity():
    x = torch.randn(2, 3)
    assert all_to_all(x, None, split_dim=1, concat_dim=0) is x
    assert torch.equal(Communicator(None).all_to_all(x, split_dim=1, concat_dim=0), x)


def the_world() -> None:
    comm = world(timeout=5.0)
    assert (comm.rank, comm.size, comm.timeout) == (dist.get_rank(), 2, 5.0)
    assert Communicator(None).size == 1
    with pytest.raises(ValueError, match=r"no group was given, and there are 2 ranks.*fastpar\.comm\.world\(\)"):
        Communicator()


def test_the_world_is_all_ranks_and_no_group_is_refused_where_there_are_several():
    run_ranks(2, the_world)


def test_the_world_of_a_launched_job_needs_a_mesh_first(monkeypatch):
    assert world().size == 1
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match=r"2 ranks were launched.*call fastpar.init_mesh first"):
        world()


# ---- waits


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, entry: logging.LogRecord) -> None:
        self.texts.append(entry.getMessage())


def wait_long(way: str) -> list[str]:
    comm = communicator(way)
    comm.barrier()
    p2p = fp.comm.PointToPoint(dist.group.WORLD)
    logger, kept = logging.getLogger("fastpar.comm"), _Kept()
    logger.addHandler(kept)
    library().report_late_ranks_after(0.2)
    if comm.rank:
        time.sleep(0.7)
    comm.all_reduce(torch.ones(3))
    if comm.rank:
        time.sleep(0.7)
        p2p.send(0, 5, [])
    else:
        p2p.recv(1, 5)
    library().report_late_ranks_after(60.0)
    logger.removeHandler(kept)
    return kept.texts


@pytest.mark.parametrize("way", ["auto", "torch"])
def test_a_long_wait_is_warned_of_with_the_ranks_that_are_late(way):
    texts = run_ranks(2, wait_long, way)[0]
    assert any(re.search(r"all_reduce.*rank 0 has waited .* for rank\(s\) 1", text) for text in texts), texts
    assert any("for a message with tag 5 of rank 1" in text for text in texts), texts


_IMPORTS = "torch._dynamo", "torch.distributed.tensor"  # and nothing of fastpar: see tests/dist_imports.py
_ENDS = """
import sys, torch, fastpar as fp
from tests.forks import become_ranks
how, port = sys.argv[1:]
become_ranks(2, port)
mesh = fp.init_mesh(tp=2, device="cpu", timeout=60.0)
comm = fp.Communicator(mesh["tp"])
for _ in range(3):
    comm.all_reduce(torch.ones(3))
if comm.rank == 1:
    if how == "raise":
        raise KeyError("lost")
    sys.exit(0)
try:
    comm.all_reduce(torch.ones(3))
except fp.comm.PeerLostError as error:
    print("SAID", error, flush=True)
"""


@pytest.mark.ranks
def test_a_rank_that_has_ended_is_said_to_have_ended_after_its_last_collective():
    ends = {"exit": "ended normally", "raise": "ended with KeyError: 'lost'"}
    stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in ends]
    cases = [[how, str(store.port)] for how, store in zip(ends, stores, strict=True)]
    for done, words in zip(run_programs(_ENDS, cases, _IMPORTS), ends.values(), strict=True):
        assert done.returncode == (done.args[0] == "raise"), done.stderr
        said = rf"SAID.* rank 1 \(pid \d+\) has {words}, after its last collective \(call #2\)"
        assert re.search(said, done.stdout), done.stdout + done.stderr


def compiled() -> int:
    comm = world()

    def step(x):
        return comm.all_reduce(x * 2) + comm.all_gather(x).sum() + comm.reduce_scatter(x)[0] + comm.all_to_all(x)[0]

    x = torch.arange(4.0)
    comm.barrier()
    assert torch.equal(torch.compile(step, backend="aot_eager", fullgraph=True)(x), step(x))
    with record() as log:
        step(x)
    return len(log)


def test_collectives_do_not_break_the_graph_of_torch_compile():
    assert run_ranks(2, compiled) == [4, 4]
