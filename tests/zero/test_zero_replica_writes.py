"""Writes to parameters after `shard`: the same on all ranks, or a step that says which ranks' copies differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fastpar as fp
from fastpar.zero.replica_writes import _checksum
from tests.dist import run_ranks
from tests.zero.zero_ranks import Net, Parameters, assert_same, batch, make_optimizer, whole_values

SIZE = 2


def train(model: nn.Module, optimizer: Any, step: int, rank: int = 0) -> None:
    x, y = batch(step, 0, rank)
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def sharded(stage: int, **options: Any) -> tuple[Net, Any]:
    model = Net()
    optimizer = make_optimizer("adamw", model.parameters())
    fp.zero.shard(model, optimizer, stage=stage, **options)
    return model, optimizer


def reset_run(stage: int | None, **options: Any) -> Parameters:
    if stage is None:
        model: Net = Net()
        optimizer = make_optimizer("adamw", model.parameters())
    else:
        model, optimizer = sharded(stage, **options)
    for step in range(3):
        train(model, optimizer, step)
        torch.manual_seed(step)
        model.first.reset_parameters()
        model.twice.reset_parameters()
    train(model, optimizer, 3)
    return whole_values(model)


def resets() -> None:
    expected = reset_run(None)
    for stage in (0, 1, 2):
        for options in ({}, {"skip_nonfinite": False}, {"overlap": False}, {"offload": "cpu"}):
            assert_same(reset_run(stage, **options), expected, (stage, options))


def test_parameters_reset_with_equal_seeds_are_those_of_one_process() -> None:
    run_ranks(SIZE, resets)


def differing() -> None:
    rank = dist.get_rank()
    cases: list[tuple[int, dict[str, Any]]] = [(stage, {}) for stage in range(4)]
    cases += [(0, {"skip_nonfinite": False}), (1, {"overlap": False}), (2, {"precision": "bf16"})]
    cases += [(1, {"offload": "cpu"}), (3, {"group": fp.init_mesh(dp_replicate=2, device="cpu")})]
    for stage, options in cases:
        model, optimizer = sharded(stage, **options)
        train(model, optimizer, 0, rank)
        shared = model.first if stage < 3 or "group" in options else model.scale  # stage 3 keeps one on every rank
        written = list(shared.parameters()) if isinstance(shared, nn.Module) else [shared]
        if stage < 3:
            torch.manual_seed(rank)
            model.first.reset_parameters()
        elif rank == 1:
            with torch.no_grad():
                [parameter.mul_(1.5) for parameter in written]
        name = "scale" if shared is model.scale else "first.weight"
        with pytest.raises(RuntimeError, match=f"different values of {name}.*reset_parameters"):
            train(model, optimizer, 1, rank)
        optimizer.zero_grad()
        with torch.no_grad():
            [parameter.fill_(0.25) for parameter in written]
        train(model, optimizer, 2, rank)
        train(model, optimizer, 3, rank)


def test_ranks_that_write_other_values_are_told_in_the_next_step() -> None:
    run_ranks(SIZE, differing)


def one_alone() -> None:
    rank = dist.get_rank()
    for stage, is_frozen, is_replaced in ((0, False, False), (2, False, False), (0, True, False), (1, False, True)):
        model, optimizer = sharded(stage)
        train(model, optimizer, 0, rank)
        written = model.frozen if is_frozen else model.norm.weight
        if rank == 1 and is_replaced:
            model.load_state_dict({name: x + 1 for name, x in model.state_dict().items()}, assign=True)
        elif rank == 1:
            with torch.no_grad():
                written.add_(1)
        with pytest.raises(RuntimeError, match="first.weight" if is_replaced else "frozen" if is_frozen else "norm"):
            train(model, optimizer, 1, rank)


def between_two_steps() -> None:
    model = Net()
    optimizers = [make_optimizer("sgd", each.parameters()) for each in (model.first, model.last)]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(("first", "last")))
    fp.zero.shard(model, optimizers, stage=0)
    for value in (1.0, float(dist.get_rank())):
        model(batch(0, 0, 0)[0]).sum().backward()
        optimizers[0].step()
        with torch.no_grad():
            model.norm.weight.fill_(value)
        optimizers[1].step()
    model(batch(0, 0, 0)[0]).sum().backward()
    with pytest.raises(RuntimeError, match="different values of norm"):
        optimizers[0].step()


def test_writes_between_the_steps_of_two_optimizers_are_seen() -> None:
    run_ranks(SIZE, between_two_steps)


def test_a_rank_that_writes_alone_is_told_and_so_are_the_others() -> None:
    run_ranks(SIZE, one_alone)


def schedules() -> None:
    rank = dist.get_rank()
    for stage, options in ((0, {}), (1, {"skip_nonfinite": False}), (3, {})):
        model, optimizer = sharded(stage, **options)
        follows_loss = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        for step, loss in enumerate((1.0, 0.9, 0.8 + rank)):
            train(model, optimizer, step, rank)
            follows_loss.step(loss)
        with pytest.raises(RuntimeError, match=rf"lr is {(0.01, 0.001)[rank]}\. .*takes its mean over the ranks"):
            train(model, optimizer, 3, rank)
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = 0.005
        train(model, optimizer, 4, rank)
    counts_batches = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (n + 1))

    def leaves_out_a_batch() -> None:
        for step in range(70):
            train(model, optimizer, step, rank)
            if rank == 0 or step != 3:
                counts_batches.step()

    with pytest.raises(RuntimeError, match="called equally often on each"):
        leaves_out_a_batch()


def test_ranks_whose_learning_rates_come_apart_are_told() -> None:
    run_ranks(SIZE, schedules)


def test_checksums_see_every_bit_and_the_order() -> None:
    x = torch.randn(700, 501)
    swapped, nudged = x.clone(), x.clone()
    swapped[[3, 4]] = x[[4, 3]]
    nudged[-1, -1] = torch.nextafter(nudged[-1, -1], torch.tensor(9.0))
    found = {_checksum(each) for each in (x, x.clone(), swapped, nudged, x.t())}
    assert len(found) == 4
    assert all(0 <= each < 1 << 62 for each in found)
    halves: list[Tensor] = [torch.ones(3, dtype=dtype) for dtype in (torch.bfloat16, torch.float64, torch.bool)]
    assert all(_checksum(each) != _checksum(torch.zeros_like(each)) for each in halves)


def replicas_of_rows() -> None:
    mesh = fp.init_mesh(dp_replicate=2, dp_shard=2, device="cpu")
    model = nn.Linear(7, 1)  # one row: of two ranks that shard, the other has none
    optimizer = make_optimizer("sgd", model.parameters())
    fp.zero.shard(model, optimizer, group=mesh, stage=3, persistent_share=0.0)
    for step, value in enumerate((1.0, float(mesh.rank("dp_replicate")))):
        with torch.no_grad():
            model.weight.fill_(value)
        model(torch.ones(2, 7)).sum().backward()
        if step == 0:
            optimizer.step()
        else:  # also the ranks whose replicas, of no rows, are alike
            with pytest.raises(RuntimeError, match="different values of weight"):
                optimizer.step()
        optimizer.zero_grad()


def test_ranks_without_rows_are_told_of_replicas_that_differ() -> None:
    run_ranks(4, replicas_of_rows)
