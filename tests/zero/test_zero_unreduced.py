"""Gradients that ranks have not averaged yet cannot be taken for those that they have."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fastpar as fp
from tests.dist import run_ranks
from tests.zero.zero_ranks import Net, batch, make_optimizer, optimizer_values, whole_values

STAGES = (0, 1, 2, 3)


def backward(model: nn.Module, step: int) -> None:
    x, y = batch(step, 0, dist.get_rank())
    nn.functional.mse_loss(model(x).float(), y).backward()


def put_off() -> None:
    for stage in STAGES:
        for precision in (None, "bf16"):
            found: list[dict[str, Tensor]] = []
            for overlap in (True, False):
                model = Net()
                optimizer = make_optimizer("adamw", model.parameters())
                zero = fp.zero.shard(model, optimizer, stage=stage, precision=precision, overlap=overlap)
                for step in range(2):
                    backward(model, step)
                    if not overlap:
                        with pytest.raises(RuntimeError, match=r"not been averaged .* reduce_gradients\(\)"):
                            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                        with pytest.raises(RuntimeError, match="not been averaged"):
                            fp.clip_grad_norm_(model.parameters(), 0.1)
                        copy.deepcopy(model)
                        zero.state_dict()
                        with pytest.raises(RuntimeError, match="not been averaged"):
                            _ = model.twice.weight.grad
                        zero.reduce_gradients()
                    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                    optimizer.step()
                    optimizer.zero_grad()
                    assert type(model.first.weight) in (nn.Parameter, torch.distributed.tensor.DTensor)
                found.append(optimizer_values(zero))
            for name, x in found[0].items():
                assert torch.equal(x, found[1][name]), (stage, precision, name)


def test_a_norm_of_one_rank_is_refused_where_reductions_are_put_off() -> None:
    run_ranks(2, put_off)


def under_no_sync() -> None:
    for stage in STAGES:
        for precision in (None, "bf16"):
            model = Net()
            optimizer = make_optimizer("adamw", model.parameters())
            zero = fp.zero.shard(model, optimizer, stage=stage, precision=precision)
            with zero.no_sync():
                backward(model, 0)
                if stage < 3 and precision is None:  # this rank's sum, as in DDP
                    plain = Net()
                    backward(plain, 0)
                    assert torch.equal(model.twice.weight.grad, plain.twice.weight.grad)
            with pytest.raises(RuntimeError, match="not been averaged"):
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.zero_grad()
            assert model.twice.weight.grad is None
            with zero.no_sync():
                backward(model, 0)
            backward(model, 1)
            assert model.twice.weight.grad is not None
            optimizer.step()


def test_under_no_sync_a_gradient_is_the_ranks_own_sum_and_after_it_nothing_to_read() -> None:
    run_ranks(2, under_no_sync)


def cut_short() -> None:
    """The last batches of an epoch are fewer than are accumulated."""
    for stage in STAGES:
        model, plain = Net(), Net()
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
        zero = fp.zero.shard(model, optimizers[0], stage=stage, accumulate=3)
        backward(model, 0)
        if stage < 2:  # others reduce after each
            with pytest.raises(RuntimeError, match="not been averaged"):
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        zero.reduce_gradients()
        for rank in range(dist.get_world_size()):
            x, y = batch(0, 0, rank)
            (nn.functional.mse_loss(plain(x), y) / dist.get_world_size()).backward()
        for each, optimizer in zip((model, plain), optimizers, strict=True):
            nn.utils.clip_grad_norm_(each.parameters(), 0.1)
            optimizer.step()
        for name, x in whole_values(model).items():
            torch.testing.assert_close(x, plain.get_parameter(name).detach(), msg=name)


def test_an_accumulation_that_is_cut_short_is_not_clipped_by_a_norm_of_one_rank() -> None:
    run_ranks(2, cut_short)
