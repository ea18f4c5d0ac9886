"""What data parallelism holds is gone when its model, optimizer and `Zero` are."""

from __future__ import annotations

import gc
import os
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fastpar as fp
from fastpar.zero.groups import local
from tests.dist import run_ranks
from tests.zero.zero_ranks import Net


def train_and_forget(stage: int) -> bool:
    model: Any = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    zero = fp.zero.shard(model, optimizer, group=dist.group.WORLD, stage=stage)
    del zero  # the optimizer keeps what it needs
    gc.collect()
    held = [p for p in optimizer.param_groups[0]["params"] if p.requires_grad]
    before = [local(p).clone() for p in held]
    model(torch.randn(3, 7)).sum().backward()
    optimizer.step()
    assert not all(torch.equal(a, local(p)) for a, p in zip(before, held, strict=True))
    refs = [weakref.ref(storage) for storage in optimizer.finish_gradients.__self__.storages]
    del model, optimizer, before, held
    gc.collect()
    return all(ref() is None for ref in refs)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_everything_goes_with_the_model_and_the_optimizer(stage: int) -> None:
    assert all(run_ranks(2, train_and_forget, stage))


def count() -> tuple[int, int]:
    """Threads and descriptors of this process."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def held() -> tuple[int, int]:
    """The same, once garbage is gone."""
    gc.collect()
    return count()


def settled(wanted: tuple[int, int]) -> tuple[int, int]:
    """What is held, once that has come down to `wanted`: sockets of gloo close in threads of its own."""
    found = held()
    for _ in range(100):
        if found[0] <= wanted[0] and found[1] <= wanted[1]:
            break
        time.sleep(0.02)
        found = count()  # without a collection, of which a busy machine makes seconds
    return found


def build_and_drop(mesh: fp.Mesh, stage: int, close: bool, options: dict[str, Any]) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    zero = fp.zero.shard(model, optimizer, group=mesh, stage=stage, **options)
    model(torch.randn(3, 7)).sum().backward()
    optimizer.step()
    if close:
        zero.close()
        zero.close()


def cycles(folder: str, count: int, ways: list[tuple[int, bool, dict[str, Any]]]) -> list[tuple[int, int]]:
    mesh = fp.init_mesh(dp_shard=2, device="cpu")
    found = []
    for stage, close, options in ways:
        options = {key: value.format(folder) for key, value in options.items()}
        for _ in range(2):
            build_and_drop(mesh, stage, close, options)
        threads, descriptors = held()
        for _ in range(count):
            build_and_drop(mesh, stage, close, options)
        now = settled((threads, descriptors))
        found.append((max(now[0] - threads, 0), max(now[1] - descriptors, 0)))
    mesh.close()
    return found


WAYS: list[tuple[int, bool, dict[str, Any]]] = [(stage, close, {}) for stage in range(4) for close in (True, False)]
ON_DISK: list[tuple[int, bool, dict[str, Any]]] = [
    (stage, close, {"offload": "nvme+parameters:{}" if stage == 3 else "nvme:{}"})
    for stage in (1, 3)
    for close in (True, False)
]


def test_what_is_dropped_leaves_no_threads_and_no_descriptors(tmp_path: Path) -> None:
    for found in run_ranks(2, cycles, str(tmp_path), 3, WAYS + ON_DISK):
        assert found == [(0, 0)] * len(found)


@pytest.mark.slow
def test_fifty_that_are_dropped_leave_no_threads_and_no_descriptors(tmp_path: Path) -> None:
    for found in run_ranks(2, cycles, str(tmp_path), 50, WAYS + ON_DISK, timeout=600):
        assert found == [(0, 0)] * len(found)
