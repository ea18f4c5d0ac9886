"""The bench of wire formats: every provider gives the mean, as far as its format can, before anything is timed."""

from __future__ import annotations

import argparse

import pytest
import torch.distributed as dist

from bench.bench_wire import Problem, WireCase, cases, operations
from bench.harness import Rank
from tests.dist import run_ranks


def check_providers(op: str) -> list[str]:
    rank = Rank(dist.get_rank(), dist.get_world_size())
    problem = Problem(WireCase(op, 1 << 16, rank.world_size), rank)
    providers = problem.providers()
    for provider in providers:
        errors = provider.check()
        assert errors, provider.name
        assert all(error.ok for error in errors.values()), (provider.name, errors)
        coarser = {"plain": "cast bf16", "cast bf16": "int8", "int8": "float8"}.get(provider.name)
        if coarser is not None:  # a format that loses more would be noticed
            call = next(p.call for p in providers if p.name == coarser)
            assert not any(error.ok for error in problem.errors(provider.name, call).values()), provider.name
    return [provider.name for provider in providers]


@pytest.mark.parametrize("op", ["reduce_scatter", "all_reduce"])
def test_every_provider_reduces_as_exactly_as_its_format_can(op: str) -> None:
    wires = ["plain", "cast bf16", "int8", "float8"]
    names = [*wires, *(f"{name}, over gloo" for name in wires)]
    names += ["gloo fp32", "gloo bf16"] if op == "all_reduce" else []
    names += ["int8, kernel alone", "float8, kernel alone"]
    assert run_ranks(2, check_providers, op) == [names] * 2


def test_one_rank_has_no_cases() -> None:
    flags = argparse.Namespace(ops=["all_reduce"], bytes=[4096, 1 << 20])
    assert [len(cases(flags, ranks)) for ranks in (1, 2, 4)] == [0, 2, 2]
    with pytest.raises(argparse.ArgumentTypeError, match="unknown gather; choose from reduce_scatter, all_reduce"):
        operations("all_reduce,gather")
