"""Stage 3 where modules hand on results in other ways than as what forward returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fastpar as fp
from fastpar.zero import hooks
from tests.dist import run_ranks
from tests.zero.zero_ranks import one_thread, whole_values

WIDTH = 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def of(self, x: Tensor) -> Tensor:
        return x + self.b(torch.tanh(self.a(x)))


class Box:
    def __init__(self, x: Tensor) -> None:
        self.x = x


class ByObject(Block):
    def forward(self, x: Any) -> Any:
        return Box(self.of(x.x if isinstance(x, Box) else x))


class ByAttribute(Block):
    def forward(self, x: Tensor) -> None:
        self.out = self.of(x)


class ByBalanceLoss(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.loss = self.a(x).softmax(-1).pow(2).sum()
        return self.of(x)


class ByArgument(Block):
    def forward(self, held: dict[str, Tensor]) -> None:
        held["x"], held["y"] = self.of(held["x"]), held["y"] + self.a(held["x"])


class ByOutside(Block):
    """Where nobody can see it."""

    def forward(self, x: Tensor, keep: Callable[[Tensor], None]) -> None:
        keep(self.of(x))


class Model(nn.Module):
    def __init__(self, kind: type[Block]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([kind() for _ in range(3)])

    def forward(self, x: Any) -> Tensor:
        losses: Any = 0.0
        held = {"x": x, "y": x}
        kept: list[Any] = [x]
        for layer in self.layers:
            if isinstance(layer, ByOutside):
                layer(kept[-1], kept.append)
            elif isinstance(layer, ByArgument):
                layer(held)
                kept.append(held["x"] + held["y"])
            elif isinstance(layer, ByAttribute):
                layer(kept[-1])
                kept.append(layer.out)
            else:
                kept.append(layer(kept[-1]))
                losses = losses + getattr(layer, "loss", 0.0)
        last = kept[-1].x if isinstance(kept[-1], Box) else kept[-1]
        return last.pow(2).mean() + 0.1 * losses


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def trained(kind: type[Block], expected: dict[str, Tensor]) -> None:
    model = Model(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero = fp.zero.shard(model, optimizer, stage=3, persistent_share=0.0)
    for step in range(3):
        model(batch(step, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert not any(unit.is_unsharded for unit in zero.storages[0].units)  # type: ignore[union-attr]
    for name, x in whole_values(model).items():
        torch.testing.assert_close(x, expected[name], msg=f"{kind.__name__}: {name}")


@pytest.mark.parametrize("kind", [ByObject, ByAttribute, ByBalanceLoss, ByArgument, ByOutside])
def test_results_that_are_not_returned_have_the_gradients_of_one_process(kind: type[Block]) -> None:
    model = Model(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with one_thread():
        for step in range(3):
            optimizer.zero_grad()
            torch.stack([model(batch(step, rank)) for rank in range(2)]).mean().backward()
            optimizer.step()
    run_ranks(2, trained, kind, whole_values(model))


class ReadsAnother(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.layers[1](self.layers[0](x)), self.layers[0][0].weight)


def reading() -> None:
    for grad in (True, False):
        model = ReadsAnother()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        fp.zero.shard(model, optimizer, stage=3, persistent_share=0.0)
        text = r"layers\.0\.0\.weight, which stage 3 has sharded, outside of the forward of layers\.0\.0.*units="
        with pytest.raises(RuntimeError, match=text), torch.set_grad_enabled(grad):
            model(torch.ones(1, WIDTH))
    model = ReadsAnother()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fp.zero.shard(model, optimizer, stage=3, persistent_share=0.0, units=[])
    model(torch.ones(1, WIDTH)).sum().backward()
    optimizer.step()


def test_reading_the_parameter_of_a_module_that_does_not_run_says_what_to_write() -> None:
    run_ranks(2, reading)


def test_the_search_for_results_does_not_look_into_transports(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Any] = []
    find = hooks.tree_leaves
    monkeypatch.setattr(hooks, "tree_leaves", lambda value: looked.append(value) or find(value))
    layer = fp.tensor.ColumnParallelLinear(WIDTH, WIDTH)
    layer.out = [Box(torch.ones(1))]
    assert list(hooks.tensors_in(hooks.results_in([layer]))) == [torch.ones(1)]
    assert len(looked) <= 3  # the attributes, and what is in the box
