"""Parameters whose memory is away: reading them raises, and what else one does with parameters works."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fastpar as fp
from fastpar.zero.groups import local
from fastpar.zero.param_classes import mark_absent, mark_present
from tests.dist import run_ranks


class Model(nn.Module):
    """Two layers, the second of which is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(13, 13), nn.LayerNorm(13)) for _ in range(2))
        self.layers[1].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](torch.tanh(self.layers[0](x)))


def test_reading_a_freed_parameter_raises() -> None:
    model = Model()
    weight, frozen = model.layers[0][0].weight, model.layers[1][0].weight
    optimizer = torch.optim.AdamW(model.parameters())
    zero = fp.zero.shard(model, optimizer, stage=3)
    for parameter in (weight, frozen):
        for read in (
            lambda p: p.detach().clone(),
            lambda p: p.clone(),
            lambda p: p.data + 1,
            lambda p: p.t(),
            lambda p: torch.add(1, p),
            lambda p: torch._foreach_norm([p]),
            lambda p: nn.functional.linear(torch.ones(13), p),
        ):
            with pytest.raises(RuntimeError, match=r"'layers\.[01]\.0\.weight' is sharded by stage 3"):
                read(parameter)
        assert parameter.shape == parameter.detach().shape == (13, 13)
        assert parameter.grad is None
        parameter.grad = torch.ones(13, 13)
        assert type(parameter.grad) is Tensor
        parameter.grad = None
        assert isinstance(parameter, nn.Parameter)
    model.layers[0].unshard()
    assert type(weight) is nn.Parameter
    torch.testing.assert_close(weight.detach().clone(), Model().layers[0][0].weight.detach(), rtol=0, atol=0)
    zero.detach()
    assert type(frozen) is nn.Parameter


def check_frozen_in_groups() -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    zero: Any = fp.zero.shard(model, optimizer, group=dist.group.WORLD, stage=3)
    for parameter in zero.optimizers[0].param_groups[0]["params"]:
        assert torch.isfinite(local(parameter).clone()).all()
        assert hasattr(parameter, "placements")
    names = list(zero.state_dict()["groups"])
    assert names == [name for name, _ in Model().named_parameters()]


def test_an_optimizer_has_shards_of_frozen_parameters_too() -> None:
    run_ranks(2, check_frozen_in_groups)


def test_an_absent_tensor_comes_back_as_it_was() -> None:
    x = nn.Parameter(torch.ones(3))
    x.note = 1  # type: ignore[attr-defined]
    before = dict(vars(x))
    mark_absent(x, "gone")
    mark_absent(x, "gone twice")
    assert repr(x) == "AbsentParameter(shape=(3,), dtype=torch.float32)"
    mark_present(x)
    mark_present(x)
    assert type(x) is nn.Parameter
    assert vars(x) == before
