"""The bench of the parameter server: every provider updates the parameters rightly before anything is timed."""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist

from bench.bench_parameter_server import Problem, ServerCase, cases
from bench.harness import Rank
from tests.dist import run_ranks


def check_providers() -> list[str]:
    rank = Rank(dist.get_rank(), dist.get_world_size())
    problem = Problem(ServerCase(6000, "fp32", rank.world_size), rank)
    providers = problem.providers()
    for provider in providers:
        for _ in range(2):
            errors = provider.check()
            assert all(error.ok for error in errors.values()), (provider.name, errors)
            assert errors or rank.rank == 0
    everybody = range(rank.world_size)
    assert not all(error.ok for error in problem.errors(lambda: None, everybody).values())  # nothing was done
    assert torch.equal(problem.gradient, problem.gradient_of(rank.rank))
    dist.barrier()
    return [provider.name for provider in providers]


def test_every_provider_updates_the_parameters():
    for size in (2, 3):
        names = ["parameter server", *(f"all_reduce, {n} ranks" for n in (size - 1, size))]
        assert run_ranks(size, check_providers) == [[*names, f"reduce_scatter, {size} ranks"]] * size


def test_a_server_needs_a_worker():
    flags = argparse.Namespace(dtype=["fp32", "bf16"], bytes=[4096, 1 << 20])
    assert [len(cases(flags, ranks)) for ranks in (1, 2, 4)] == [0, 4, 4]
