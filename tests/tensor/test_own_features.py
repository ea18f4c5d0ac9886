"""Norms on a part of the features: equal to the norm on all of them, for a few numbers a token."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fastpar as fp
from fastpar.comm import record
from fastpar.tensor import Grid, GridRegion
from fastpar.tensor.own_features import own_features
from tests.dist import run_ranks

BATCH, TOKENS, HIDDEN = 2, 3, 7  # features 4 and 3


class Gain(nn.Module):
    """(1 + w) * x / rms(x) in float32 or more, as Gemma has it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        high = x if x.dtype == torch.float64 else x.float()
        out = high * torch.rsqrt(high.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (out * (1.0 + self.weight)).type_as(x)


class Centred(Gain):
    """Mean and variance of its own, as Cohere has them; a subclass."""

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        return self.weight * (x - mean) * torch.rsqrt((x - mean).pow(2).mean(dim=-1, keepdim=True) + 1e-5)


class Plain(nn.Module):
    """Without parameters, as OLMo has it."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (HIDDEN,))


class ByNorm(Gain):
    """Statistics that are not known to be means."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / x.norm(dim=-1, keepdim=True)


class Sorted(Gain):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x.cumsum(-1)


class Odd(Gain):
    """Raises on parts of some sizes, on one rank alone."""

    def forward(self, x: Tensor) -> Tensor:
        if x.size(-1) == 3:
            raise RuntimeError("three")
        return super().forward(x)


class WithResidual(Gain):
    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return super().forward(x if residual is None else (x + residual) * x.size(-1))


CUT = [lambda: nn.LayerNorm(HIDDEN), lambda: nn.RMSNorm(HIDDEN), Gain, Centred, Plain]
WHOLE = [ByNorm, Sorted, Odd, nn.Identity, lambda: nn.Sequential(nn.LayerNorm(HIDDEN))]


def _noisy(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return module.to(dtype)


def compared(dtype: torch.dtype) -> list[tuple[float, list[int]]]:
    """Of each norm: the largest difference to one process, relative, of output and gradients, in two calls, and the
    numbers that this rank put into collectives."""
    mesh = fp.init_mesh(tp=2, tp_grid=(2, 1, 1), device="cpu")
    grid = Grid(mesh)
    found = []
    for make in CUT:
        whole = _noisy(make(), dtype)
        split, region = copy.deepcopy(whole), GridRegion(grid)
        assert own_features(split, region, HIDDEN) is not None
        worst, words = 0.0, []
        for seed in range(2):
            generator = torch.Generator().manual_seed(seed)
            x = (torch.randn(BATCH + seed, TOKENS, HIDDEN, generator=generator) * 3 + 1).to(dtype).requires_grad_()
            mine = x.detach().clone().requires_grad_()
            dout = torch.randn(x.shape, generator=generator).to(dtype)
            wanted = whole(x)
            part = region.enter(mine)
            with record() as calls:
                out = split(part)
                grad = region.enter(dout)
                dpart, *dparams = torch.autograd.grad(out, [part, *split._parameters.values()], grad)
            words = [call.numel for call in calls]
            dx, *wholes = torch.autograd.grad(wanted, [x, *whole.parameters()], dout)
            sums = [grid.x.all_reduce(d) for d in dparams]
            pairs = [(region.leave(out), wanted), (region.leave(dpart), dx), *zip(sums, wholes, strict=True)]
            assert out.dtype == wanted.dtype
            for a, b in pairs:
                worst = max(worst, float((a - b).detach().abs().max() / b.detach().abs().max()))
        found.append((worst, words))
    mesh.close()
    return found


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-13), (torch.bfloat16, 2e-2)])
def test_a_norm_on_a_part_of_the_features_is_that_of_all(dtype: torch.dtype, bound: float) -> None:
    for found in run_ranks(2, compared, dtype):
        assert [worst < bound for worst, _ in found] == [True] * len(CUT), found
        tokens = (BATCH + 1) * TOKENS
        # One number a token, or two from each rank for layer_norm; all features, as other modules get them, are 7.
        assert [words for _, words in found] == [
            [4 * tokens] * 2,
            [tokens] * 2,
            [tokens] * 2,
            [tokens] * 4,
            [4 * tokens] * 2,
        ]


def with_residual() -> float:
    mesh = fp.init_mesh(tp=2, tp_grid=(2, 1, 1), device="cpu")
    whole = _noisy(WithResidual(), torch.float64)
    split, region = copy.deepcopy(whole), GridRegion(Grid(mesh))
    assert own_features(split, region, HIDDEN) is not None
    x = torch.randn(BATCH, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    part = region.enter(x)
    pairs = [(split(part, part), whole(x, x)), (split(part, residual=None), whole(x))]
    worst = max(float((region.leave(a) - b).detach().abs().max()) for a, b in pairs)
    mesh.close()
    return worst


def test_what_was_not_tried_gets_all_features() -> None:
    for worst in run_ranks(2, with_residual):
        assert worst < 1e-13


def left() -> list[bool]:
    mesh = fp.init_mesh(tp=2, tp_grid=(2, 1, 1), device="cpu")
    region = GridRegion(Grid(mesh))
    found = []
    for make in WHOLE:
        module: Any = make()
        before = type(module)
        found.append(own_features(module, region, HIDDEN) is None and type(module) is before)
    mesh.close()
    return found


def test_what_is_not_known_to_be_so_is_left_as_it_is() -> None:
    for found in run_ranks(2, left):
        assert found == [True] * len(WHOLE)
