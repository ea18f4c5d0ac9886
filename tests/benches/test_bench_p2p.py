"""The bench of messages: every provider gives the right result before anything is timed."""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist

from bench.bench_p2p import P2PCase, Problem, cases
from bench.harness import Rank
from tests.dist import run_ranks


def check_providers() -> list[str]:
    rank = Rank(dist.get_rank(), dist.get_world_size())
    problem = Problem(P2PCase(6000, "bf16"), rank)
    providers = problem.providers()
    for provider in providers:
        for _ in range(2):
            assert all(error.ok for error in provider.check().values()), provider.name
    wrong = problem.x.clone()
    wrong[7] += 1
    assert not any(error.ok for error in problem.errors(lambda: wrong).values())
    assert torch.equal(problem.buffer, problem.x)
    dist.barrier()
    return [provider.name for provider in providers]


def test_every_provider_brings_the_message_back():
    names = ["fastpar", "fastpar, new copy", "fastpar, kept buffer", "fastpar over gloo", "gloo"]
    assert run_ranks(2, check_providers) == [names] * 2


def test_only_two_ranks_have_cases():
    flags = argparse.Namespace(dtype=["fp32", "bf16"], bytes=[4096, 1 << 20])
    assert [len(cases(flags, ranks)) for ranks in (1, 2, 4)] == [0, 4, 0]
