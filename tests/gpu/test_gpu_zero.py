"""Stage 3 on a GPU, with its parameters in the host's memory or in a file: the bits of shards on the device."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastpar as fp

pytestmark = [pytest.mark.gpu, pytest.mark.gpu_alone]
WIDTH, LAYERS = 1024, 6


def train(offload: Any, precision: fp.Precision | None) -> tuple[dict[str, Tensor], int]:
    """Parameters after some steps on one rank, and the bytes of the device at rest, beyond those before the model."""
    gc.collect()  # a model that was sharded is garbage in cycles, whole parameters and shards
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]).cuda()
    optimizer = fp.optim.AdamW(model.parameters(), lr=1e-3)
    zero = fp.zero.shard(model, optimizer, stage=3, precision=precision, offload=offload, max_norm=1.0)
    for step in range(4):
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step)).cuda()
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        del x
    torch.cuda.synchronize()
    stage3: Any = zero.storages[0]
    stage3.pool.release()
    sharded = torch.cuda.memory_allocated() - before
    values = {name: x.detach().cpu().clone() for name, x in zero.state_dict()["model"].items()}
    zero.detach()
    return values, sharded


@pytest.mark.parametrize("precision", [None, fp.Precision.bf16()], ids=["fp32", "bf16"])
def test_parameters_off_the_device_change_no_bit_and_leave_its_memory(
    precision: fp.Precision | None, tmp_path: Path
) -> None:
    train("cpu", precision)  # libraries take their workspaces at the first call: 64 MiB of cuBLAS's, on Hopper
    expected, whole = train("cpu", precision)
    weights = LAYERS * WIDTH * WIDTH * (4 if precision is None else 2)
    assert whole > weights
    for offload in ("cpu+parameters", f"nvme+parameters:{tmp_path}"):
        found, left = train(offload, precision)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(found[name], value), (offload, name)
        assert left < whole - 0.95 * weights
