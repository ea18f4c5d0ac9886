"""The bench of files: every provider does its job before anything is timed."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import pytest
import torch

from bench.bench_storage import ROOF_BLOCK, Problem, StorageCase, Yardstick, cases, shifted
from bench.harness import Rank
from fastpar.storage import TensorStore

STORES = ["fastpar", "fastpar, threads", "fastpar, no checksums", "fastpar, page cache"]


@pytest.mark.parametrize(
    ("job", "others"),
    [
        ("write", ["fastpar, any address", "torch.save, fsync"]),
        ("read", ["fastpar, any address", "torch.load"]),
        ("update", ["fastpar, one after another", "memory only"]),
    ],
)
def test_every_provider_does_its_job(job: str, others: list[str], tmp_path: Path) -> None:
    providers = StorageCase(job, 2 * ROOF_BLOCK, 4, str(tmp_path)).build(Rank())
    roofs = ["roof: 8 threads of 4 MiB"] + ["roof: dd"] * (job != "update")
    assert [provider.name for provider in providers] == [*STORES, *others, *roofs]
    directions = 2 if job == "update" else 1
    for provider in providers:
        assert provider.num_bytes == 2 * ROOF_BLOCK * directions
        provider.call()
        assert all(error.ok for error in provider.check().values()), provider.name
    assert all(provider.check() for provider in providers if provider.kind in ("fastpar", "torch"))


@pytest.mark.parametrize("job", ["write", "read", "update"])
def test_a_job_that_is_not_done_is_an_error(job: str, tmp_path: Path) -> None:
    problem = Problem(StorageCase(job, 16384, 4, str(tmp_path)))
    with TensorStore(tmp_path) as store:
        assert not any(error.ok for error in problem.errors(store, lambda: problem.out).values())


def test_a_shifted_copy_is_where_direct_io_cannot_write(tmp_path: Path) -> None:
    x = TensorStore.empty((3000,), torch.float32).copy_(torch.arange(3000))
    assert x.data_ptr() % 4096 == 0
    assert shifted(x).data_ptr() % 4096 != 0
    assert torch.equal(shifted(x), x)


def test_the_yardstick_moves_every_block(tmp_path: Path) -> None:
    case = StorageCase("write", 5 * ROOF_BLOCK, 1, str(tmp_path))
    yardstick = Yardstick(case)
    assert Path(yardstick.path).read_bytes() == bytes(range(256)) * (5 * ROOF_BLOCK // 256)
    read = Yardstick(dataclasses.replace(case, job="read"))
    for buffer in read.memory:
        buffer[:] = bytes(ROOF_BLOCK)
    read.providers()[0].call()
    assert read.memory[4][:] == bytes(range(256)) * (ROOF_BLOCK // 256)


def test_only_a_single_process_has_cases() -> None:
    flags = argparse.Namespace(bytes=[4096], items=4, folder=Path("/tmp"))
    assert [[case.describe()["op"] for case in cases(flags, ranks)] for ranks in (1, 2)] == [
        ["write", "read", "update"],
        [],
    ]
