"""The parameter server against an all-reduce of the same gradients, its words, its pace and its faults."""

from __future__ import annotations

import copy
import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fastpar.comm import Communicator, PeerFailedError, PeerLostError
from fastpar.zero.parameter_server import ParameterServer, Worker
from tests.dist import run_ranks

STEPS = 6


class Branches(nn.Module):
    """A part that is never used, and one that only odd ranks use."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.sometimes, self.never = nn.Linear(5, 3), nn.Linear(5, 3), nn.Linear(5, 3)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.used(x) * self.frozen
        return y + self.sometimes(x) if dist.get_rank() % 2 else y


def model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 5, bias=False))


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.01, weight_decay=0.1)


def batch(worker: int, step: int) -> Tensor:
    return torch.randn(4, 7, generator=torch.Generator().manual_seed(100 * worker + step))


def values(module: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


# ---- synchronous


def serve_or_work(dtype: torch.dtype) -> list[Tensor]:
    net = model(seed=dist.get_rank()).to(dtype)  # the server's parameters count
    if dist.get_rank() == 0:
        server = ParameterServer(net.parameters(), optimizer_of(net), group=dist.group.WORLD)
        server.serve()
        assert server.updates == STEPS
        assert server.most_stale == 0
        return values(net)
    worker = Worker(net.parameters(), group=dist.group.WORLD)
    for step in range(STEPS):
        net(batch(dist.get_rank(), step).to(dtype)).square().mean().backward()
        worker.step()
    worker.close()
    assert worker.steps == STEPS
    return values(net)


def all_reduced(dtype: torch.dtype, with_ddp: bool) -> list[Tensor]:
    """Ranks stand for the workers 1, 2, ...; every rank has the optimizer."""
    net = model().to(dtype)
    optimizer = optimizer_of(net)
    comm = Communicator(dist.group.WORLD)
    run = DistributedDataParallel(net) if with_ddp else net
    for step in range(STEPS):
        run(batch(comm.rank + 1, step).to(dtype)).square().mean().backward()
        for parameter in net.parameters():
            if not with_ddp and parameter.grad is not None:
                comm.all_reduce(parameter.grad, "avg", out=parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
    return values(net)


@pytest.mark.parametrize(
    ("num_workers", "dtype", "with_ddp"),
    [(1, torch.float32, False), (2, torch.float32, True), (3, torch.float32, False), (3, torch.bfloat16, False)],
)
def test_a_synchronous_server_gives_the_bits_of_an_all_reduce(
    num_workers: int, dtype: torch.dtype, with_ddp: bool
) -> None:
    wanted = run_ranks(num_workers, all_reduced, dtype, with_ddp)[0]
    for found in run_ranks(num_workers + 1, serve_or_work, dtype):
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, wanted, strict=True))


def partly_used() -> list[tuple[Tensor, Tensor]]:
    """Every parameter before and after a step with a weight decay of 1/4."""
    torch.manual_seed(0)
    net = Branches()
    before = copy.deepcopy(net)
    if dist.get_rank() == 0:
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0, weight_decay=0.25)
        ParameterServer(net.parameters(), optimizer, group=dist.group.WORLD).serve()
    else:
        worker = Worker(net.parameters(), group=dist.group.WORLD)
        net(torch.ones(1, 5)).sum().backward()
        worker.step()
        worker.close()
    return list(zip(values(before), values(net), strict=True))


def test_a_parameter_that_no_worker_used_is_left_alone_and_others_get_the_mean() -> None:
    """Every element's gradient is 1 where it is used: by both workers, by one, by none."""
    for frozen, *rest in run_ranks(3, partly_used):
        for gradient, parameters in ((1.0, rest[0:2]), (0.5, rest[2:4])):
            for before, after in parameters:
                torch.testing.assert_close(after, before - gradient - before / 4)
        for before, after in (frozen, *rest[4:6]):
            assert torch.equal(after, before)


def words() -> tuple[int, int, int]:
    """Of the parameters; received and sent, without what a worker starts with."""
    net = model()
    psi = sum(parameter.numel() for parameter in net.parameters())
    if dist.get_rank() == 0:
        server = ParameterServer(net.parameters(), optimizer_of(net), group=dist.group.WORLD)
        server.serve()
        return psi, server.words_received, server.words_sent - psi * len(server.workers)
    worker = Worker(net.parameters(), group=dist.group.WORLD)
    for step in range(STEPS):
        net(batch(1, step)).sum().backward()
        worker.step()
    worker.close()
    return psi, worker.words_received - psi, worker.words_sent


def test_a_worker_moves_two_words_a_parameter_and_the_server_two_for_every_worker() -> None:
    for num_workers in (1, 3):
        (psi, *server), *workers = run_ranks(num_workers + 1, words)
        assert server == [STEPS * num_workers * psi] * 2
        assert workers == [(psi, STEPS * psi, STEPS * psi)] * num_workers


def scheduled() -> float:
    parameter = nn.Parameter(torch.zeros(1))
    if dist.get_rank() == 0:
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        ParameterServer(
            [parameter], optimizer, group=dist.group.WORLD, on_update=lambda updates: scheduler.step()
        ).serve()
    else:
        worker = Worker([parameter], group=dist.group.WORLD)
        for _ in range(3):
            parameter.grad = -torch.ones(1)
            worker.step()
        worker.close()
    return parameter.item()


def test_a_scheduler_steps_with_the_updates() -> None:
    assert run_ranks(2, scheduled) == [1.75, 1.75]  # 1 + 1/2 + 1/4


# ---- asynchronous


def own_pace(staleness: int, steps: int) -> tuple[list[float], int]:
    """Element r of the parameter counts the updates by rank r; rank 1 is slow. The largest lead that a rank saw."""
    counts = nn.Parameter(torch.zeros(dist.get_world_size()))
    rank = dist.get_rank()
    if rank == 0:
        server = ParameterServer(
            [counts], torch.optim.SGD([counts], lr=1.0), group=dist.group.WORLD, staleness=staleness
        )
        server.serve()
        return counts.tolist(), server.most_stale
    worker = Worker([counts], group=dist.group.WORLD)
    lead = 0
    for step in range(steps):
        if rank == 1 and step < 3:
            time.sleep(0.2)
        counts.grad = torch.zeros_like(counts)
        counts.grad[rank] = -1.0
        worker.step()
        if counts[1] < steps:  # the slow one is still there
            lead = max(lead, int(counts[rank] - counts[1]))
    worker.close()
    return counts.tolist(), lead


@pytest.mark.parametrize("staleness", [0, 2])
def test_no_worker_is_further_ahead_of_the_slowest_than_allowed(staleness: int) -> None:
    (counts, most_stale), (_, _), (_, lead), (_, other_lead) = run_ranks(4, own_pace, staleness, 8)
    assert counts == [0.0, 8.0, 8.0, 8.0]
    assert max(lead, other_lead) == staleness  # and the others do run ahead
    assert most_stale <= 2 * (2 * staleness + 1)  # two other workers, so far behind to so far ahead


def leaves_early() -> list[float]:
    counts = nn.Parameter(torch.zeros(3))
    rank = dist.get_rank()
    if rank == 0:
        ParameterServer([counts], torch.optim.SGD([counts], lr=1.0), group=dist.group.WORLD, staleness=1).serve()
        return counts.tolist()
    worker = Worker([counts], group=dist.group.WORLD)
    for _ in range(2 if rank == 1 else 9):
        counts.grad = -torch.eye(3)[rank]
        worker.step()
    worker.close()
    return counts.tolist()


def test_asynchronous_workers_may_take_different_numbers_of_steps() -> None:
    assert run_ranks(3, leaves_early)[0] == [0.0, 2.0, 9.0]


# ---- faults


def faulty(kind: str, staleness: int | None) -> str:
    """What every rank hears when rank 1 does not do its part."""
    rank = dist.get_rank()
    parameter = nn.Parameter(torch.zeros(3 if kind == "shape" and rank == 1 else 2))
    try:
        if rank == 0:
            ParameterServer(
                [parameter],
                torch.optim.SGD([parameter], lr=1.0),
                group=dist.group.WORLD,
                staleness=staleness,
                timeout=10.0,
            ).serve()
            return "served"
        worker = Worker([parameter], group=dist.group.WORLD, timeout=10.0)
        for step in range(4):
            if rank == 1 and step == 2:
                if kind == "abort":
                    worker.abort("no data today")
                    return "aborted"
                if kind == "leaves":
                    worker.close()
                    return "left"
                if kind == "ends":
                    worker._p2p.close()
                    return "ended"
            parameter.grad = torch.ones(2)
            worker.step()
        worker.close()
        return "done"
    except (PeerFailedError, PeerLostError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("staleness", [None, 1])
def test_a_worker_that_gives_up_is_heard_of_everywhere(staleness: int | None) -> None:
    server, first, second = run_ranks(3, faulty, "abort", staleness)
    assert first == "aborted"
    for told in (server, second):
        assert "PeerFailedError: rank 1 gave up: no data today" in told


@pytest.mark.parametrize("staleness", [None, 1])
def test_a_worker_that_ends_without_leaving_is_heard_of_everywhere(staleness: int | None) -> None:
    server, _, second = run_ranks(3, faulty, "ends", staleness)
    assert server.startswith("PeerLostError")
    assert "PeerFailedError: rank 0 gave up: the parameter server failed: PeerLostError" in second


def test_synchronous_workers_take_equally_many_steps() -> None:
    server, first, second = run_ranks(3, faulty, "leaves", None)
    assert first == "left"
    assert "ValueError: ranks [1] have left after 2 steps and others go on" in server
    assert "rank 0 gave up: the parameter server failed: ValueError: ranks [1] have left" in second


@pytest.mark.parametrize("staleness", [None, 0])
def test_parameters_that_are_not_the_servers_are_refused(staleness: int | None) -> None:
    server, first, second = run_ranks(3, faulty, "shape", staleness)
    difference = "the parameters of rank 1 are not the server's: number 0 is (3,) torch.float32 instead of (2,)"
    for told in (server, first, second):
        assert difference in told


def refused() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    with pytest.raises(ValueError, match=r"staleness must be None \(synchronous\) or at least 0, got -1"):
        ParameterServer([parameter], optimizer, group=dist.group.WORLD, staleness=-1)
    with pytest.raises(ValueError, match="the group has one rank"):
        ParameterServer([parameter], optimizer, group=dist.group.WORLD)
    with pytest.raises(ValueError, match="server must be another rank of the 1 of the group, got 0"):
        Worker([parameter], group=dist.group.WORLD)
    with pytest.raises(ValueError, match="there is no parameter that needs a gradient"):
        Worker([parameter.requires_grad_(False)], group=dist.group.WORLD)


def test_a_server_needs_workers_and_parameters() -> None:
    run_ranks(1, refused)
