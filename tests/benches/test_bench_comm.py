"""The bench of the collectives: every provider gives the right result before anything is timed."""

from __future__ import annotations

import argparse

import pytest
import torch.distributed as dist

from bench.bench_comm import OPS, CommCase, Problem, cases, ops, sizes
from bench.harness import Rank
from tests.dist import run_ranks


def check_providers(op: str) -> list[str]:
    rank = Rank(dist.get_rank(), dist.get_world_size())
    providers = CommCase(op, 0 if op == "barrier" else 6000, "fp32", rank.world_size).build(rank)
    present = [p for p in providers if not p.absent and p.kind != "roof"]
    for provider in present:
        for _ in range(2):
            assert provider.prepare is not None
            provider.prepare()
            assert all(error.ok for error in provider.check().values()), provider.name
    return [p.name for p in present]


@pytest.mark.parametrize("op", OPS)
def test_every_provider_of_every_collective_is_right(op):
    names = run_ranks(3, check_providers, op)[0]
    assert {"fastpar", "fastpar, background", "fastpar over gloo", "gloo"} <= set(names)
    assert ("fastpar, in a region" in names) == (op in ("all_reduce", "reduce_scatter", "all_gather"))


def wrong_results() -> None:
    rank = Rank(dist.get_rank(), dist.get_world_size())
    for op in OPS[:-1]:
        problem = Problem(CommCase(op, 6000, "fp32", rank.world_size), rank)
        right = problem.expected().float()
        assert all(error.ok for error in problem.errors(right.clone).values())
        wrong = right.clone()
        wrong[len(wrong) // 2] += 1
        assert not any(error.ok for error in problem.errors(wrong.clone).values()), op


def test_one_wrong_element_is_an_error():
    run_ranks(2, wrong_results)


def test_sizes_and_ops_are_parsed():
    assert sizes("4K,1m,77") == [4096, 1 << 20, 77]
    assert ops("barrier,all_reduce") == ["barrier", "all_reduce"]
    with pytest.raises(argparse.ArgumentTypeError, match="'4KB' is not a size"):
        sizes("4KB")
    with pytest.raises(argparse.ArgumentTypeError, match="unknown collective 'allreduce'"):
        ops("allreduce")


def test_a_barrier_has_one_case_and_one_rank_has_none():
    flags = argparse.Namespace(ops=list(OPS), dtype=["fp32", "bf16"], bytes=[4096, 1 << 20])
    made = cases(flags, 2)
    assert len(made) == 5 * 2 * 2 + 1
    assert cases(flags, 1) == []
