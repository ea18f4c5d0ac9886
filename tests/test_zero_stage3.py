"""ZeRO stage 3: the model computes what it would whole, with rows at rest and at most two units gathered."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fastpar as fp
from fastpar.comm import Communicator, record
from fastpar.precision import Precision
from fastpar.zero.groups import Groups
from fastpar.zero.stage3 import Stage3
from fastpar.zero.units import plan_units, small_names
from tests.dist import run_ranks

TRANSPORTS = ("auto", "torch")  # gathers that copy at once, and gathers that are begun early


class Layer(nn.Module):
    """13 rows: uneven on 2 and 3 ranks."""

    def __init__(self, width: int = 13) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return x + scale * self.down(torch.tanh(self.up(self.norm(x))))


class Text(nn.Module):
    """A model with layers, a tied embedding and head, and a parameter that the model's own forward reads."""

    def __init__(self, layers: int = 3, width: int = 13, vocab: int = 17) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(vocab, width)
        self.position = nn.Parameter(torch.randn(5, width))
        self.layers = nn.ModuleList([Layer(width) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.position[: ids.shape[-1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def ids_of(step: int, rank: int, microbatch: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * microbatch + rank)
    return torch.randint(17, (2, 5), generator=generator)


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(ids).flatten(0, -2), ids.flatten())


def make(model: nn.Module, transport: str = "auto", **options: Any) -> Stage3:
    comm = Communicator(dist.group.WORLD, transport=transport) if dist.is_initialized() else None
    options.setdefault("resident_share", 0.02)
    return Stage3(model, Groups(comm, is_sharded=True), **options)


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, foreach=False)


def update(stage3: Stage3, optimizer: torch.optim.Optimizer) -> None:
    stage3.released()
    optimizer.step()
    for slot in stage3.slots:
        if slot.target is not None:
            slot.target.copy_(slot.owner.detach()._local_tensor)
    optimizer.zero_grad()
    stage3.published()


def whole(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        value = parameter.detach()
        found[name] = (value.full_tensor() if isinstance(value, DTensor) else value).clone()
    return found


def plain_run(size: int, steps: int, accumulate: int = 1, make_model: Any = Text) -> dict[str, Tensor]:
    """What `size` ranks compute, in one process: each rank's gradient for itself, and their mean in the order of
    ranks."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the ranks have: sums in norms depend on it
    model = make_model()
    optimizer = optimizer_of(model.parameters())
    for step in range(steps):
        sums: dict[str, Tensor] = {}
        for rank in range(size):
            optimizer.zero_grad()
            for microbatch in range(accumulate):
                (loss_of(model, ids_of(step, rank, microbatch)) / accumulate).backward()
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    sums[name] = sums[name] + parameter.grad if name in sums else parameter.grad.clone()
        for name, parameter in model.named_parameters():
            parameter.grad = sums[name] / size if name in sums else None
        optimizer.step()
    torch.set_num_threads(threads)
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def sharded_run(steps: int, accumulate: int, transport: str, options: dict[str, Any]) -> dict[str, Tensor]:
    model = Text()
    stage3 = make(model, transport, **options)
    optimizer = optimizer_of([slot.owner for slot in stage3.slots])
    for step in range(steps):
        for microbatch in range(accumulate):
            stage3.reducer.is_syncing = microbatch == accumulate - 1
            (loss_of(model, ids_of(step, dist.get_rank(), microbatch)) / accumulate).backward()
        update(stage3, optimizer)
    assert stage3.whole_bytes == 0
    return whole(model)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("size", [2, 3])
def test_training_equals_the_mean_of_plain_gradients_bit_for_bit(size: int, transport: str) -> None:
    expected = plain_run(size, 6)
    for found in run_ranks(size, sharded_run, 6, 1, transport, {}):
        assert found.keys() == expected.keys()
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("options", [{"reshard_after_forward": False}, {"units": ["layers.1", "head"]}, {"budget": 0}])
def test_how_and_when_units_are_gathered_does_not_change_the_bits(options: dict[str, Any]) -> None:
    expected = plain_run(2, 3)
    for found in run_ranks(2, sharded_run, 3, 1, "torch", options):
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], rtol=0, atol=0, msg=name)


def test_gradients_summed_before_they_travel_are_those_of_one_backward() -> None:
    expected = plain_run(2, 3, accumulate=3)
    for found in run_ranks(2, sharded_run, 3, 3, "auto", {}):
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], rtol=0, atol=0, msg=name)
