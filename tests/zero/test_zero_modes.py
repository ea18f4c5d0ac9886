"""Steps and states under torch.inference_mode(), and data parallelism that is taken off and put on again."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fastpar as fp
from tests.dist import run_ranks
from tests.zero.zero_ranks import Net, Parameters, assert_same, batch, make_optimizer, whole_values

SIZE = 2


def loss_of(model: nn.Module, step: int) -> Tensor:
    x, y = batch(step, 0, dist.get_rank())
    return nn.functional.mse_loss(model(x).float(), y)


def inference_run(stage: int, *, is_inference: bool, by_closure: bool, **options: Any) -> Parameters:
    model = Net()
    optimizer: Any = make_optimizer("adamw", model.parameters())
    zero = fp.zero.shard(model, optimizer, stage=stage, **options)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        return loss

    for step in range(3):
        if not by_closure:
            closure()
        with torch.inference_mode() if is_inference and step < 2 else nullcontext():
            optimizer.step(closure if by_closure else None)
            assert torch.is_inference_mode_enabled() == (is_inference and step < 2)
            if step == 1:
                zero.load_state_dict(zero.state_dict())
                optimizer.load_state_dict(optimizer.state_dict())
    if stage == 3:
        with torch.inference_mode(), pytest.raises(RuntimeError, match=r"under torch\.no_grad"):
            model.state_dict()
    return whole_values(model)


def inference() -> None:
    for stage in range(4):
        for options in ({}, {"offload": "cpu"}, {"by_closure": True}):
            by_closure = bool(options.pop("by_closure", False))
            runs = [inference_run(stage, is_inference=x, by_closure=by_closure, **options) for x in (False, True)]
            assert_same(runs[1], runs[0], (stage, options, by_closure))


def test_steps_under_inference_mode_are_steps() -> None:
    run_ranks(SIZE, inference)


def taken_off_and_on() -> None:
    for stage in range(4):
        runs = []
        for is_again in (False, True):
            model = Net()
            optimizer = make_optimizer("adamw", model.parameters())
            zero = fp.zero.shard(model, optimizer, stage=stage)
            for step in range(3):
                if step == 2 and is_again:
                    states = fp.zero.full_optimizer_state(zero)
                    zero.detach()
                    if stage > 0:
                        with pytest.raises(ValueError, match=r"before detach\(\).*load_full_optimizer_state"):
                            fp.zero.shard(model, optimizer, stage=stage)
                    optimizer = make_optimizer("adamw", model.parameters())
                    zero = fp.zero.shard(model, optimizer, stage=stage)
                    fp.zero.load_full_optimizer_state(zero, states)
                optimizer.zero_grad()
                loss_of(model, step).backward()
                optimizer.step()
            runs.append(whole_values(model))
        assert_same(runs[1], runs[0], stage)


def test_a_model_that_was_detached_is_sharded_again_with_a_new_optimizer() -> None:
    run_ranks(SIZE, taken_off_and_on)
