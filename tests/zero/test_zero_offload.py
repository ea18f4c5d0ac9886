"""Offloaded states and master weights: the bits of training in memory, and a model that does not fit there."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fastpar as fp
from fastpar.storage import StorageError
from tests.dist import run_ranks
from tests.forks import run_programs
from tests.zero.zero_ranks import Parameters, assert_same, make_optimizer, optimizer_values


def wide() -> nn.Module:
    """256 KB of the middle weight, so that even a half of it goes to the file; biases stay."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256, bias=False))


def shard(model: nn.Module, kind: str, offload: str, stage: int) -> Any:
    optimizer = make_optimizer(kind, model.parameters())
    return fp.zero.shard(model, optimizer, group=dist.group.WORLD, stage=stage, offload=offload, timeout=20)


def train(stage: int, dtype: torch.dtype, kind: str, offload: Any) -> Parameters:
    model = wide()
    optimizer = make_optimizer(kind, model.parameters())
    precision = fp.Precision.bf16() if dtype == torch.bfloat16 else None
    zero = fp.zero.shard(
        model, optimizer, group=dist.group.WORLD, stage=stage, precision=precision, offload=offload, max_norm=0.05
    )
    for step in range(10):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        model(torch.randn(4, 8, generator=generator)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    zero.state_dict()  # brings values into memory
    found = optimizer_values(zero)
    for param in zero.params:
        states = {
            key: x for key, x in optimizer.state[param.model_param].items() if key != "master_param"
        }  # a copy's own
        for key, value in states.items():
            if isinstance(value, torch.Tensor):
                found[f"{param.name}.{key}"] = fp.zero.groups.local(value).clone()
    return found


def compare(folder: str, dtype: torch.dtype, kind: str) -> None:
    for stage in range(4):
        expected = train(stage, dtype, kind, None)
        assert_same(train(stage, dtype, kind, "cpu"), expected, f"cpu, stage {stage}")
        assert_same(train(stage, dtype, kind, f"nvme:{folder}"), expected, f"nvme, stage {stage}")
        small = fp.zero.Offload(folder, group_bytes=1 << 16, options={"backend": "threads"})
        assert_same(train(stage, dtype, kind, small), expected, f"nvme in small groups, stage {stage}")


@contextmanager
def small_files(is_here: bool) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if is_here:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def check_files_of_one_rank(folder: str) -> None:
    is_bad = dist.get_rank() == 1
    nowhere = f"{folder}/{dist.get_rank() or '.'}"
    for stage, offload in ((1, "nvme"), (3, "nvme"), (3, "nvme+parameters")):
        with pytest.raises(StorageError, match="ENOENT" if is_bad else "rank 1: .* failed"):
            shard(wide(), "ours", f"{offload}:{nowhere}", stage)
    with small_files(is_bad), pytest.raises(StorageError, match="EFBIG" if is_bad else "rank 1: write failed"):
        shard(wide(), "ours", f"nvme:{folder}", 1)

    model = wide()
    zero = shard(model, "ours", f"nvme:{folder}", 1)
    model(torch.ones(4, 8)).square().mean().backward()
    zero.optimizers[0].step()
    model(torch.ones(4, 8)).square().mean().backward()
    if is_bad:
        (disk,) = zero._disks.values()
        with open("/dev/full", "r+b", buffering=0) as full:
            os.dup2(full.fileno(), disk._store._file.backing.descriptor)
    with pytest.raises(StorageError, match="failed" if is_bad else "rank 1: write failed"):
        zero.optimizers[0].step()
    with pytest.raises(StorageError, match="failed" if is_bad else "rank 1: read failed"):
        zero.state_dict()


def test_a_file_of_states_that_fails_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    run_ranks(2, check_files_of_one_rank, str(tmp_path))


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [(torch.float32, "adamw"), pytest.param(torch.float32, "ours", marks=pytest.mark.slow), (torch.bfloat16, "ours")],
    ids=str,
)
def test_offload_changes_no_bit_of_values_and_states(dtype: torch.dtype, kind: str, tmp_path: Path) -> None:
    run_ranks(2, compare, str(tmp_path), dtype, kind)


@pytest.mark.parametrize("offload", ["nvme", "nvme+parameters"])
@pytest.mark.parametrize("kind", ["ours", "fused"])
def test_a_step_that_a_scaler_skips_leaves_everything_in_files_as_it_was(
    kind: str, offload: str, tmp_path: Path
) -> None:
    """Also what is updated after the first group, and parameters of 16 bits, which the update itself rounds."""
    model = wide()
    optimizer = make_optimizer(kind, model.parameters())
    zero = fp.zero.shard(
        model,
        optimizer,
        stage=3 if offload.endswith("parameters") else 2,
        precision=fp.Precision.bf16(),
        offload=fp.zero.Offload(str(tmp_path), group_bytes=1 << 16, parameters=offload.endswith("parameters")),
        skip_nonfinite=False,
    )
    found: list[dict[str, torch.Tensor]] = []
    for is_infinite in (0.0, 1.0):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
        model(x).float().square().mean().backward()
        optimizer.grad_scale = torch.tensor(1.0)  # type: ignore[attr-defined]  # as torch.amp.GradScaler does
        optimizer.found_inf = torch.tensor(is_infinite)  # type: ignore[attr-defined]
        optimizer.step()
        optimizer.zero_grad()
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
        out = model(x).detach()
        zero.state_dict()  # brings values into memory
        found.append({"out": out, **optimizer_values(zero)})
    assert_same(found[1], found[0], "a skipped step")


LARGE = """
import ctypes, hashlib, resource, sys
import torch
from torch import nn
import fastpar as fp

torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(*[nn.Linear(1024, 512, bias=False) if i % 2 == 0 else nn.Linear(512, 1024, bias=False)
                        for i in range(16)])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
zero = fp.zero.shard(model, optimizer, stage=1, bucket_bytes=2 << 20, offload=None if sys.argv[1] == "none" else
                     fp.zero.Offload(sys.argv[1], group_bytes=2 << 20))

def train(x):
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()

ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: what is freed goes back to the system
limit = int(sys.argv[2])
if limit:
    held = next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (held + limit, held + limit))
for step in range(3):
    train(torch.randn(2, 1024, generator=torch.Generator().manual_seed(step)))
digest = hashlib.sha256()
for p in model.parameters():
    digest.update(p.detach().numpy().tobytes())
print(digest.hexdigest())
"""
STATE_BYTES = 16 * 1024 * 512 * 2 * 4
LIMIT = 60_000_000  # below the states; gradients (33.5 MB) and three groups with their states (18 MB) have room


@pytest.mark.expensive
@pytest.mark.skipif(sys.platform != "linux", reason="limits the memory of a process as Linux does")
def test_a_model_whose_states_exceed_the_memory_trains_from_a_file(tmp_path: Path) -> None:
    assert STATE_BYTES > LIMIT
    cases = [("none", "0"), ("none", str(LIMIT)), (str(tmp_path), str(LIMIT))]
    free, limited, from_file = run_programs(LARGE, cases, ["torch._dynamo", "torch.distributed.tensor", "fastpar.zero"])
    assert free.returncode == 0, free.stderr
    assert "can't allocate memory" in limited.stderr
    assert from_file.returncode == 0, from_file.stderr
    assert from_file.stdout == free.stdout != ""
    assert list(tmp_path.iterdir()) == []
