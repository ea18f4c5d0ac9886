"""What the ranks of the tests of experts on several hosts run. `over` says how rows get from rank to rank of a host."""

from __future__ import annotations

import contextlib
import gc
import random
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fastpar.comm import CommError, Communicator, SharedRegion, record
from fastpar.comm.multi_host.transport import HierarchicalTransport
from fastpar.ops import ExpertRule, Padding, moe_combine
from fastpar.ops.moe import dispatcher as _moe_exchange
from fastpar.ops.moe import packing
from fastpar.ops.moe.transports import all_to_all as _moe_all_to_all
from fastpar.ops.moe.transports import hierarchical as _moe_hierarchical
from fastpar.ops.moe.transports import select as moe
from fastpar.ops.moe.transports import shared_memory as _moe_shared
from fastpar.ops.moe.transports import within_host as _moe_hosts
from fastpar.ops.moe.transports.hierarchical import HierarchicalDispatcher
from tests.moe import moe_combine_ranks
from tests.moe.moe_calls import find_dispatcher, moe_dispatch, moe_mlp
from tests.moe.moe_mlp_ranks import run_chunks, run_experts
from tests.moe.moe_ranks import (
    TRANSPORTS,
    adversarial_cases,
    check_step,
    exchange_rank,
    multiply,
    routed,
    through_experts,
    tokens_of,
)
from tests.moe.test_moe_adversarial import DIFFERENT, WRONG_ON_ONE, good, interleaved
from tests.moe.test_moe_dispatch import send_again

HIERARCHICAL = {"transport": "hierarchical"}
OVER = ["shared memory", "all-to-all"]


@contextlib.contextmanager
def within_hosts(over: str) -> Iterator[None]:
    """All-to-all within hosts is for devices: CPU tensors are taken for such."""
    found = moe._over_hosts
    wanted = over == "shared memory"
    with mock.patch.object(moe, "_over_hosts", lambda *args, is_cpu, **more: found(*args, is_cpu=wanted, **more)):
        assert (
            isinstance(find_dispatcher(dist.group.WORLD, **HIERARCHICAL)._forwarder, _moe_hosts.SharedForwarder)
            == wanted
        )
        yield


def every_option(over: str, sizes: tuple[int, ...], hidden: int, options: list[tuple[torch.dtype, dict[str, Any]]]):
    """out, dx and dweights for each."""
    with within_hosts(over):
        return [exchange_rank(sizes, hidden, 3, 12, dtype, {**HIERARCHICAL, **more}) for dtype, more in options]


def adversarial(over: str) -> int:
    cases = adversarial_cases(dist.get_rank(), dist.get_world_size())
    with within_hosts(over):
        for name, (indices, num_experts) in cases.items():
            for padding in (Padding(), Padding(align=8, capacity=100)):
                check_step(routed(indices), num_experts, name, padding=padding, **HIERARCHICAL)
    return len(cases)


def random_steps(over: str, steps: int) -> int:
    """Steps that have nothing in common; what all ranks must agree on is drawn by all alike."""
    rank, size = dist.get_rank(), dist.get_world_size()
    alike, own = random.Random(1), random.Random(f"rank {rank}")
    with within_hosts(over):
        for step in range(steps):
            num_experts, top_k = size * alike.choice([1, 2, 5]), alike.choice([1, 2, 3, 8])
            hidden, largest = alike.choice([1, 3, 16, 130]), alike.choice([0, 1, 4, 40])
            options = {**HIERARCHICAL, "exact": alike.choice([False, True])}
            tokens = own.choice([0, own.randint(0, largest), largest])
            generator = torch.Generator().manual_seed(1000 * step + rank)
            few = own.choice([1, num_experts])
            indices = torch.randint(few, (tokens, top_k), generator=generator)
            indices[torch.rand(indices.shape, generator=generator) < own.choice([0.0, 0.1, 1.0])] = -1
            x, dout = (torch.randn(tokens, hidden, generator=generator) for _ in range(2))
            weights = torch.rand(indices.shape, generator=generator)
            check_step((x, indices, weights, dout), num_experts, step, **options)
    return steps


def rounded_once(over: str) -> list[float]:
    """Rank 0 has a token for the 4 experts of the other host."""
    indices = torch.tensor([[4, 5, 6, 7]] if dist.get_rank() == 0 else []).long().view(-1, 4)
    x = torch.ones(len(indices), 1, dtype=torch.bfloat16)
    weights = torch.tensor([[1.0, 2**-9, 2**-9, 2**-9]]).expand(indices.shape)
    with within_hosts(over):
        rows, row_weights, plan = moe_dispatch(
            x, indices, weights, num_experts=8, group=dist.group.WORLD, **HIERARCHICAL
        )
        return moe_combine(rows, plan, row_weights).flatten().tolist()


# ---- what is sent


@contextlib.contextmanager
def network(hosts: list[list[int]]) -> Iterator[list[int]]:
    """Bytes that this rank's all-to-alls send to other hosts, one by one."""
    host = next(ranks for ranks in hosts if dist.get_rank() in ranks)
    sent: list[int] = []
    all_to_all = HierarchicalTransport.all_to_all

    def counted(self: Any, x: Tensor, sizes: list[int], *rest: Any) -> Any:
        if self._flat is None:  # else handed on to the one in which every rank is alone on its host
            sent.append(sum(size for rank, size in enumerate(sizes) if rank not in host) * x.itemsize)
        return all_to_all(self, x, sizes, *rest)

    with mock.patch.object(HierarchicalTransport, "all_to_all", counted):
        yield sent


def step_over_network(hosts: list[list[int]], over: str, options: dict[str, Any]) -> dict[str, Any]:
    """Of a step with backward: its collectives, the bytes of each all-to-all to other hosts; and what there is to send:
    tokens to each other rank, and to each other host, of all ranks together."""
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = tokens_of(rank, (40,) * size, 256, 4, 4 * size, torch.bfloat16)
    whole = {"num_experts": 4 * size, "group": dist.group.WORLD, **options}
    with within_hosts(over):
        through_experts(*parts, **whole)  # regions are made
        with record() as log, network(hosts) as sent:
            through_experts(*parts, **whole)
    _, everyone, _, _ = tokens_of(0, (40 * size,), 256, 4, 4 * size, torch.bfloat16)
    host_of = {other: host for host, ranks in enumerate(hosts) for other in ranks}
    goes_to = [{e // 4 for e in choices if e >= 0} for choices in everyone.tolist()]
    sources = [host_of[token // 40] for token in range(40 * size)]
    pairs = list(zip(sources, goes_to, strict=True))
    return {
        "ops": [(entry.op, entry.size) for entry in log],
        "bytes": sent,
        "to ranks": sum(len({r for r in ranks if host_of[r] != here}) for here, ranks in pairs),
        "to hosts": sum(len({host_of[r] for r in ranks} - {here}) for here, ranks in pairs),
    }


def worked_example() -> list[list[int]]:
    """Rows that rank 1 sends to each rank, and what it gets back; other ranks have no tokens."""
    mine = dist.get_rank() == 1
    indices = torch.tensor([[2, 3]] if mine else []).long().view(-1, 2)
    x = torch.full((len(indices), 1), 2.0)
    found = []
    for transport in ("hierarchical", "all_to_all"):
        rows, _, plan = moe_dispatch(x, indices, num_experts=4, group=dist.group.WORLD, transport=transport)
        found.append(plan.route.to)
        out = moe_combine(multiply(rows, plan), plan)
        assert out.tolist() == [[2.0 * (3 + 4)]] * len(indices)
    return found


# ---- experts


def experts(over: str, sizes: tuple[int, ...], rule: Any) -> dict[str, Tensor]:
    with within_hosts(over):
        once, chunked = run_chunks(sizes, rule, HIERARCHICAL, (1, 2))
        assert all(torch.equal(once[name], chunked[name]) for name in once)
        return run_experts(sizes, torch.float64, rule, HIERARCHICAL)


def sent_again(over: str) -> bool:
    with within_hosts(over):
        return send_again(HIERARCHICAL)


def between_each_other(over: str) -> int:
    with within_hosts(over):
        return interleaved(HIERARCHICAL)


# ---- the way back


def beside(over: str) -> tuple[list[str], list[str]]:
    """What is computed beside the exchange: the bits, and the order of events in forward and in backward."""
    with within_hosts(over), mock.patch.object(moe_combine_ranks, "SIZES", (9, 0, 13, 1)):
        assert moe_combine_ranks.beside_and_before(HIERARCHICAL, torch.float32)
        assert moe_combine_ranks.nested(HIERARCHICAL)
        return moe_combine_ranks.order_of_events(HIERARCHICAL)


def wrong_results(over: str) -> int:
    with within_hosts(over), mock.patch.dict(TRANSPORTS, {"hierarchical": HIERARCHICAL}, clear=True):
        return moe_combine_ranks.combine_wrong("auto")


# ---- errors


def wrong_arguments(over: str) -> int:
    """Rank 1 is wrong, and all say so; what follows works."""
    rank, count = dist.get_rank(), 0
    right = torch.tensor([[0, 3], [1, 2]])
    with within_hosts(over):
        for name, (changes, text) in WRONG_ON_ONE.items():
            pattern = text if rank == 1 else "wrong arguments on rank 1 of the group: see its error"
            with pytest.raises(ValueError, match=pattern):
                moe_dispatch(**good(**(changes if rank == 1 else {}), **HIERARCHICAL))
            check_step(routed(right), 4, name, **HIERARCHICAL)
            count += 1
        for name, (changes, _) in DIFFERENT.items():
            with pytest.raises(ValueError, match=f"{name}.*must be equal on all ranks"):
                moe_dispatch(**good(**(changes if rank == 1 else {}), **HIERARCHICAL))
            count += 1
        with pytest.raises(ValueError, match="capacity is 1 rows for each expert, but one gets"):
            moe_dispatch(**good(padding=Padding(capacity=1), **HIERARCHICAL))
        check_step(routed(right), 4, "in the end", **HIERARCHICAL)
    return count


def refused() -> str:
    with pytest.raises(ValueError, match="transport='hierarchical'") as error:
        find_dispatcher(dist.group.WORLD, **HIERARCHICAL)
    check_step(routed(torch.tensor([[0, 1]])), 2 * dist.get_world_size())
    return str(error.value)


def chosen() -> list[str]:
    """By transport."""
    group = dist.group.WORLD
    found = [find_dispatcher(group, transport=name) for name in ("auto", "hierarchical", "all_to_all")]
    found += [
        find_dispatcher(group, device=torch.device("cuda")),
        find_dispatcher(Communicator(group, transport="torch")),
    ]
    return [
        type(each._forwarder).__name__ if isinstance(each, HierarchicalDispatcher) else type(each).__name__
        for each in found
    ]


def chosen_by_rows(over: str) -> list[str]:
    """What "auto" does with tokens for: one expert; two of one rank; two ranks of another host; nobody elsewhere."""
    rank, found = dist.get_rank(), []
    with within_hosts(over):
        for choices in ([[4]], [[4, 5]], [[4, 6]], [[rank * 2, -1]]):
            indices = torch.tensor(choices) if rank < 2 else torch.tensor([[-1] * len(choices[0])])
            check_step(routed(indices), 8, choices)
            _, _, plan = moe_dispatch(torch.zeros(1, 5), indices, num_experts=8, group=dist.group.WORLD)
            found.append(type(plan.dispatcher).__name__)
    return found


def chunks_of_one_expert(over: str) -> list[list[str]]:
    """By number of chunks: the collectives of a step with tokens that have a single expert."""
    x, indices, weights, dout = routed(torch.tensor([[4], [0], [7]]))
    first, second = (torch.randn(2, 5, 5, generator=torch.Generator().manual_seed(e)) for e in (0, 1))
    logs, found = [], []
    with within_hosts(over):
        for chunks in (1, 1, 2):  # in the first one regions are made
            leaf = x.clone().requires_grad_()
            with record() as log:
                out = moe_mlp(
                    leaf,
                    indices,
                    weights,
                    first,
                    second,
                    rule=ExpertRule("relu"),
                    group=dist.group.WORLD,
                    chunks=chunks,
                )
                out.backward(dout)
            logs.append([entry.op for entry in log])
            found.append((out.detach(), leaf.grad))
    assert all(torch.equal(a, b) for a, b in zip(found[1], found[2], strict=True))
    return logs[1:]


def wait_for_nobody(over: str) -> tuple[str, float]:
    """Rank 1 dispatches and goes away."""
    Communicator(dist.group.WORLD).barrier()
    comm = Communicator(dist.group.WORLD, timeout=0.5)
    with within_hosts(over):
        rows, row_weights, plan = moe_dispatch(**{**good(), "group": comm, **HIERARCHICAL})
    if comm.rank == 1:
        time.sleep(1.5)
        return "", 0.0
    started = time.monotonic()
    with pytest.raises(CommError) as error:
        moe_combine(multiply(rows, plan), plan, row_weights)
    return str(error.value), time.monotonic() - started


# ---- memory


def poisoned(over: str) -> int:
    """Memory that nobody has written holds NaN; nothing of it comes out."""
    made = []

    class Poisoned(SharedRegion):
        def __init__(self, comm: Any, nbytes: int) -> None:
            super().__init__(comm, nbytes)
            self.tensor((nbytes,), torch.uint8).fill_(0xFF)  # NaN in every floating format
            comm.barrier()
            made.append(nbytes)

    def buffer(like: Tensor, shape: Any, dtype: torch.dtype | None = None) -> Tensor:
        found = torch.empty(shape, dtype=like.dtype if dtype is None else dtype)
        found.view(torch.uint8).fill_(0xFF)
        return found

    patch = pytest.MonkeyPatch()
    with patch.context() as patched, within_hosts(over):
        patched.setattr(_moe_shared, "SharedRegion", Poisoned)
        for module in (packing, _moe_all_to_all, _moe_exchange, _moe_hosts, _moe_hierarchical):
            patched.setattr(module, "new_buffer", buffer)
        for tokens in (2, 64, 2000):  # regions grow
            num_experts = 2 * dist.get_world_size()
            indices = torch.arange(2 * tokens).view(-1, 2) % (num_experts - 1)
            for padding in (Padding(), Padding(align=16)):
                check_step(routed(indices, 33), num_experts, tokens, padding=padding, **HIERARCHICAL)
    return len(made)


def leave_nothing() -> tuple[int, int]:
    def mappings() -> int:
        return Path("/proc/self/maps").read_text().count("fastpar")

    counts = []
    for _ in range(3):
        group = dist.new_group(list(range(dist.get_world_size())))
        alive = weakref.ref(group)
        through_experts(*routed(torch.tensor([[0, 3], [1, 2]])), num_experts=4, group=group, **HIERARCHICAL)
        dist.destroy_process_group(group)
        del group
        gc.collect()
        assert alive() is None, "something holds the group"
        counts.append(mappings())
    return counts[0], counts[-1]


# ---- the ranks of a host


def take_turns() -> tuple[tuple[int, ...], list[int]]:
    """The ranks of a host between collectives of the group, of which some are in the background."""
    comm = Communicator(dist.group.WORLD)
    here = comm.host_ranks()
    assert here is not None
    total = sum(range(comm.size))
    for step in range(6):
        pending = [comm.all_reduce_async(torch.full((n,), float(comm.rank + step))) for n in (3, 50_000)]
        gathered = here.all_gather(torch.tensor([comm.rank + step]))
        least = here.all_reduce(torch.tensor([10 * comm.rank, -step]), "min")
        here.barrier()
        assert gathered.tolist() == [rank + step for rank in here.ranks]
        assert least.tolist() == [10 * min(here.ranks), -step]
        assert all(bool((p.wait() == total + step * comm.size).all()) for p in pending)
    if here.size > 1:
        region = SharedRegion(here, 64)
        region.tensor((1,), torch.int64).fill_(comm.rank)
        here.barrier()
        assert [int(region.tensor((1,), torch.int64, rank=i)) for i in range(here.size)] == list(here.ranks)
    with record() as log:
        here.barrier()
    assert [(entry.op, entry.size) for entry in log] == [("barrier", here.size)]
    return here.ranks, [here.rank, here.size]
