"""What a profile of collectives says, and what it costs to be ready for one.

That an idle `annotate` is cheap is told by the clock, against a block of the standard library's that does nothing.
"""

from __future__ import annotations

import contextlib
import timeit

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fastpar as fp
from fastpar.comm import Communicator
from fastpar.comm.ranges import annotate
from tests.dist import run_ranks


def ranges_of(profile: torch.profiler.profile) -> dict[str, int]:
    """Every range of fastpar's, and how often it was entered."""
    return {event.key: event.count for event in profile.key_averages() if event.key.startswith("fastpar::")}


def profile_collectives(transport: str) -> dict[str, int]:
    comm, x = Communicator(dist.group.WORLD, transport=transport), torch.ones(64)
    comm.barrier()  # the ranks have met, and blocking calls take their fast path
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        comm.all_reduce(x)
        comm.all_reduce(x)
        pending = comm.reduce_scatter_async(x)
        pending.wait()
        comm.gather(x)
        comm.barrier()
    return ranges_of(profile)


def test_a_profile_names_launches_and_waits():
    for transport in ("shared_memory", "torch"):
        for found in run_ranks(2, profile_collectives, transport):
            assert found["fastpar::comm::all_reduce"] == 2
            assert found["fastpar::comm::reduce_scatter"] == 1
            assert found["fastpar::comm::wait reduce_scatter"] == 1
            assert found["fastpar::comm::gather"] == found["fastpar::comm::barrier"] == 1


def profile_zero_step() -> dict[str, int]:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    zero = fp.zero.shard(model, optimizer, group=dist.group.WORLD)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
    del zero
    return ranges_of(profile)


def test_a_profile_of_a_zero_step_names_its_collectives():
    for found in run_ranks(2, profile_zero_step):
        assert found["fastpar::comm::reduce_scatter"] >= 1
        assert found["fastpar::comm::all_gather"] >= 1


def raise_in_ranges() -> None:
    with annotate("fastpar::outer"), annotate("fastpar::inner"):
        raise KeyError


def test_ranges_nest_and_pass_errors_on():
    with torch.profiler.profile() as profile, contextlib.suppress(KeyError):
        raise_in_ranges()
    assert ranges_of(profile) == {"fastpar::outer": 1, "fastpar::inner": 1}
    with pytest.raises(KeyError):
        raise_in_ranges()


def test_without_a_profiler_a_range_costs_less_than_an_empty_block():
    def annotated() -> None:
        with annotate("fastpar::idle"):
            pass

    def empty() -> None:
        with contextlib.nullcontext():
            pass

    times = [[timeit.timeit(f, number=2000) for f in (annotated, empty)] for _ in range(50)]
    assert min(mine for mine, _ in times) < min(theirs for _, theirs in times)


def test_ranges_neither_break_graphs_nor_compile_them_again_for_a_profiler():
    graphs = 0

    def count(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> torch.fx.GraphModule:
        nonlocal graphs
        graphs += 1
        return graph

    def step(x: torch.Tensor) -> torch.Tensor:
        with annotate("fastpar::compiled"):
            return x + 1

    compiled = torch.compile(step, backend=count, fullgraph=True)
    compiled(torch.ones(3))
    with torch.profiler.profile():
        assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 2.0))
    assert graphs == 1
