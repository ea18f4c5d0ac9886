"""Arithmetic of a step that one process shows: clipping under a loss scale, and masters of values set by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fastpar as fp


def alone(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> fp.zero.Zero:
    return fp.zero.shard(model, optimizer, group=fp.Communicator(None), **options)


def vector(values: list[float]) -> nn.Module:
    model = nn.Module()
    model.weight = nn.Parameter(torch.tensor(values))
    return model


@pytest.mark.parametrize("kind", ["factor of fp.optim", "scale of torch"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_clipping_divides_by_a_pending_loss_scale_once(stage: int, kind: str) -> None:
    """The gradient is [3, 4] times 1024; clipped to a norm of 1 it is [0.6, 0.8], as is the update."""
    model = vector([0.0, 0.0])
    make = fp.optim.SGD if kind == "factor of fp.optim" else torch.optim.SGD
    optimizer: Any = make(model.parameters(), lr=1.0)
    zero = alone(model, optimizer, stage=stage, max_norm=1.0)
    (model.weight * torch.tensor([3.0, 4.0]) * 1024).sum().backward()
    if kind == "factor of fp.optim":
        optimizer.grad_factor = torch.tensor(1 / 1024)
    else:
        torch._foreach_mul_([param.optim_param.grad for param in zero.params], 1 / 1024)
    optimizer.step()
    assert zero.norm is not None
    torch.testing.assert_close(zero.norm, torch.tensor(5.0), rtol=0, atol=0)
    torch.testing.assert_close(model.weight.detach(), torch.tensor([-0.6, -0.8]), rtol=1e-5, atol=0)  # eps of 1e-6


def test_a_gradient_below_the_norm_is_not_scaled_up() -> None:
    model = vector([0.0, 0.0])
    optimizer = fp.optim.SGD(model.parameters(), lr=1.0)
    zero = alone(model, optimizer, stage=1, max_norm=10.0)
    (model.weight * torch.tensor([3.0, 4.0])).sum().backward()
    optimizer.step()
    assert torch.equal(model.weight.detach(), torch.tensor([-3.0, -4.0]))
    assert zero.norm == 5.0


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_master_takes_the_elements_that_were_set_and_keeps_the_others_exact(stage: int) -> None:
    """1 + 2^-12 is 1 in bfloat16: the element that nobody set must not become that."""
    model = vector([1 + 2**-12, 2.0, 1 + 2**-12])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    zero = alone(model, optimizer, stage=stage, precision="bf16", persistent_share=0.0)
    master = zero.params[0].optim_param
    with torch.no_grad():
        model.weight[1] = 3.0
        model.weight[2] = 1.0  # what the master rounds to: it stays
    for param in zero.params:
        param.optim_param.grad = torch.zeros_like(param.optim_param)
    optimizer.step()
    expected = torch.tensor([1 + 2**-12, 3.0, 1 + 2**-12])
    assert torch.equal(master.detach(), expected)
    assert torch.equal(model.weight.detach().float(), torch.tensor([1.0, 3.0, 1.0]))
