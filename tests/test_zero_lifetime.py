"""What data parallelism holds is gone when its model, optimizer and `Zero` are."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fastpar as fp
from fastpar.zero.groups import local
from tests.dist import run_ranks
from tests.zero_ranks import Net


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
