"""Gradients of gradients (`create_graph=True`) of split models: those of one process, or an error; and tangents."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor

import fastpar as fp
from fastpar.tensor import Grid, GridLinear, full_parameter
from tests.dist import run_ranks

VOCAB, HIDDEN = 13, 6
PLAN = {
    "embed": "vocab",
    "blocks.*": "stream",
    "blocks.*.mlp": "block",
    "blocks.*.mlp.up": "colwise",
    "blocks.*.mlp.down": "rowwise",
    "head": "vocab",
}


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 8), nn.Linear(8, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.up(x).tanh())
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp, self.dropout = nn.LayerNorm(HIDDEN), MLP(), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.dropout(self.mlp(self.norm(x)))
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.blocks = nn.Embedding(VOCAB, HIDDEN), nn.ModuleList([Block(), Block()])
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB)
        self.double()
        with torch.no_grad():
            for p in self.parameters():
                p.add_(0.2 * torch.randn_like(p))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def penalty(model: nn.Module, grad_of: str = "") -> dict[str, Tensor]:
    """Gradients of the squares of the gradients: of one parameter, or of all."""
    model.zero_grad()
    ids = torch.arange(10).view(2, 5) % VOCAB
    loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten().flip(0))
    wanted = [p for name, p in model.named_parameters() if grad_of in ("", name)]
    total = torch.zeros((), dtype=torch.float64)
    for grad in torch.autograd.grad(loss, wanted, create_graph=True):
        total = total + (grad.full_tensor() if isinstance(grad, DTensor) else grad).square().sum()
    total.backward()
    named = {name: (p, p.grad) for name, p in model.named_parameters()}
    return {name: torch.zeros(()) if grad is None else full_parameter(p, grad) for name, (p, grad) in named.items()}


def penalties() -> None:
    for sequence_parallel in (False, True):
        plain: Any = Model()
        mesh = fp.init_mesh(tp=2, device="cpu")
        split = fp.parallelize(copy.deepcopy(plain), mesh, PLAN, sequence_parallel=sequence_parallel)
        split(torch.arange(10).view(2, 5)).sum().backward()  # which is watched
        for name in ("", "embed.weight", "blocks.0.norm.weight", "blocks.0.mlp.up.weight", "head.bias"):
            expected, found = penalty(plain, name), penalty(split, name)
            for key, value in expected.items():
                torch.testing.assert_close(found[key], value, rtol=1e-7, atol=1e-10, msg=f"{name}: {key}")
        mesh.close()


def test_gradient_penalties_of_split_models_equal_one_process() -> None:
    run_ranks(2, penalties)


def anomaly() -> None:
    mesh = fp.init_mesh(tp=2, device="cpu")
    for sequence_parallel in (False, True):
        split: Any = fp.parallelize(Model(), mesh, PLAN, sequence_parallel=sequence_parallel)
        ids = torch.arange(10).view(2, 5)
        with warnings.catch_warnings(), torch.autograd.set_detect_anomaly(True):
            warnings.simplefilter("ignore")  # torch's, that it is slow; with an error, the forward's traceback
            F.cross_entropy(split(ids).flatten(0, 1), ids.flatten()).backward()
            if mesh.rank("tp") == 1:
                split.blocks[0].mlp.up.weight.to_local().data.fill_(torch.inf)
            with pytest.raises(RuntimeError, match="returned nan values"):
                F.cross_entropy(split(ids).flatten(0, 1), ids.flatten()).backward()
    mesh.close()


def test_anomaly_mode_looks_at_gradients_of_split_models() -> None:
    run_ranks(2, anomaly)


def test_dropout_by_place_has_a_second_derivative() -> None:
    x = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(fp.ops.sharded_dropout(x.sin(), 0.5, seed=3).square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), x)
    keep = fp.ops.sharded_dropout(torch.ones_like(x), 0.5, seed=3)
    torch.testing.assert_close(second, keep.square() * 2 * (2 * x.detach()).cos())


def grids() -> None:
    """A critic that ends with a linear on a grid: the gradient that backward begins with is a constant."""
    mesh = fp.init_mesh(tp=4, tp_grid=(1, 2, 2), device="cpu")
    layer = GridLinear.from_linear(nn.Linear(4, 4), Grid(mesh), "column", whole_sequences=True)
    x = torch.randn(2, 3, 4, requires_grad=True)
    (grad,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="linear has a first derivative only"):
        grad.square().sum().backward()
    mesh.close()


def test_linears_on_a_grid_have_a_first_derivative_only() -> None:
    run_ranks(4, grids)


def tangents() -> None:
    warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, when it first sees a tangent
    mesh = fp.init_mesh(tp=2, device="cpu")
    model: Any = fp.parallelize(Model(), mesh, PLAN)
    x = torch.randn(2, 5, HIDDEN, dtype=torch.float64)
    with (
        torch.no_grad(),
        forward_ad.dual_level(),
        pytest.raises(TypeError, match="tangent of forward-mode differentiation"),
    ):
        model.blocks[0].mlp(forward_ad.make_dual(x, torch.ones_like(x)))
    mesh.close()


def test_a_tangent_that_a_collective_would_lose_is_refused() -> None:
    run_ranks(2, tangents)
