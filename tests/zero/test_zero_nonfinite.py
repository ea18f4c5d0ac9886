"""A NaN or an infinity in a gradient of one rank: all ranks skip the step, and say where it came from."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fastpar as fp
from tests.dist import run_ranks
from tests.zero.zero_ranks import Net, batch, make_optimizer, optimizer_values

BAD_RANK = 1
NAME = "unused"  # which has no other gradient


class Poison(torch.autograd.Function):
    """Zero, with a gradient whose last element is `value`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: float) -> Tensor:
        ctx.value = value
        ctx.save_for_backward(x)
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        poisoned = torch.zeros_like(x)
        poisoned[-1, -1] = ctx.value
        return poisoned, None


class PoisonedNet(Net):
    value = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + Poison.apply(self.unused, self.value)


def skip(stage: int, accumulate: int, value: float) -> None:
    """On a rank: a step whose first pass is poisoned on one rank, and a sound one."""
    model = PoisonedNet()
    rank, what = dist.get_rank(), (stage, accumulate, value)
    optimizer = make_optimizer("adamw", model.parameters())
    zero = fp.zero.shard(model, optimizer, group=dist.group.WORLD, stage=stage, accumulate=accumulate)
    before = optimizer_values(zero)
    for skipped, poison in ((1, value), (1, 0.0), (2, value)):
        for microbatch in range(accumulate):
            x, y = batch(0, microbatch, rank)
            model.value = poison if rank == BAD_RANK and microbatch == 0 else 0.0
            nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        is_same = [torch.equal(x, before[name]) for name, x in optimizer_values(zero).items()]
        assert zero.skipped == skipped, what
        if poison == 0.0:
            assert zero.report == "", what
            assert not all(is_same), what
            before = optimizer_values(zero)
        else:
            assert zero.report == f"gradients that are not finite: {NAME} (rank {BAD_RANK})", (what, zero.report)
            assert all(is_same), what


def skip_all(value: float) -> None:
    for stage in (0, 1, 2, 3):
        for accumulate in (1, 2):
            skip(stage, accumulate, value)


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_all_ranks_skip_the_step_and_name_parameter_and_rank(value: float) -> None:
    run_ranks(3, skip_all, value)
