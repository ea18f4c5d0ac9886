"""Several backward passes before a step, some reduced and some not, in every order: means of all of them add up."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

import fastpar as fp
from tests.dist import run_ranks
from tests.zero.zero_ranks import whole_of

# What happens: a backward pass with its own overlap, one within no_sync, an explicit reduction.
ORDERS = {
    "each reduced": "pass pass",
    "not reduced on top of reduced": "pass no_sync reduce",
    "between reduced ones": "pass no_sync pass",
    "reduced by hand, twice": "no_sync reduce no_sync reduce",
    "reduced by hand on top": "no_sync reduce pass",
}


class Weights(nn.Module):
    """Gradients are the numbers that it is called with, exactly. One parameter is used in every other pass."""

    def __init__(self) -> None:
        super().__init__()
        self.often, self.seldom = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(3, 2))

    def forward(self, number: int, *, all_of_them: bool) -> Tensor:
        total = (self.often * number).sum()
        return total + (self.seldom * (2 * number)).sum() if all_of_them else total


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Weights()

    def forward(self, number: int, *, all_of_them: bool) -> Tensor:
        return self.inner(number, all_of_them=all_of_them)


def gradients(stage: int, order: str, dtype: torch.dtype, calls: str, overlap: bool) -> dict[str, Tensor]:
    """The optimizer's gradients, whole, after these passes. `calls`: the model that was sharded ("model"), a part of it
    ("part"), or nothing that was given to shard ("parameters")."""
    mesh = fp.init_mesh(dp_shard=2, device="cpu")
    model = Outer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    precision = "bf16" if dtype == torch.bfloat16 else None
    given = dict(model.named_parameters()).items() if calls == "parameters" else model
    zero = fp.zero.shard(given, optimizer, group=mesh, stage=stage, precision=precision, overlap=overlap)
    run = model if calls == "model" else model.inner
    number = 0
    for what in order.split():
        if what == "reduce":
            zero.reduce_gradients()
            continue
        number += 1
        with zero.no_sync() if what == "no_sync" else nullcontext():
            run(4 * number + 2 * mesh.rank("dp"), all_of_them=number % 2 == 1).float().backward()
    zero.reduce_gradients()
    found = {param.name: whole_of(param.optim_param.grad).float().clone() for param in zero.params}
    zero.detach()
    mesh.close()
    return found


def every_stage(calls: str, overlap: bool) -> list[tuple[str, dict[str, Tensor]]]:
    stages = range(4) if calls == "model" else range(3)  # stage 3 gathers when the model runs
    return [
        (f"{name}, stage {stage}, {dtype}", gradients(stage, order, dtype, calls, overlap))
        for name, order in ORDERS.items()
        for stage in stages
        for dtype in (torch.float32, torch.bfloat16)
    ]


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "deferred"])
@pytest.mark.parametrize("calls", ["model", "part", "parameters"])
def test_means_of_all_passes_add_up(calls: str, overlap: bool) -> None:
    for found in run_ranks(2, every_stage, calls, overlap):
        for what, grads in found:
            order = ORDERS[what.partition(", stage")[0]].split()
            passes = sum(each != "reduce" for each in order)
            means = [4.0 * n + 1 for n in range(1, passes + 1)]  # of the numbers of two ranks
            often, seldom = sum(means), 2 * sum(means[::2])
            assert torch.equal(grads["inner.often"], torch.full((5,), often)), what
            assert torch.equal(grads["inner.seldom"], torch.full((3, 2), seldom)), what
