"""A parallel style of one's own: in a plan, refused in time, explained, equal to the whole model, undone on failure."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fastpar as fp
from fastpar.parallel.plan import parse_style
from tests.dist import run_ranks

ROOT = Path(__file__).resolve().parents[2]
FEATURES = 9  # which two ranks do not share evenly
SECTION = re.search(r"^## Adding a parallel style\n(.*?)^## ", (ROOT / "CONTRIBUTING.md").read_text(), re.M | re.S)[1]  # type: ignore[index]


def walk_through() -> type[fp.Style]:
    """The style of CONTRIBUTING's walk-through."""
    names: dict[str, Any] = {}
    for code in re.findall(r"^```python\n(.*?)^```", SECTION, re.M | re.S):
        exec(code, names)
    return names["PReLUStyle"]


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, FEATURES), nn.PReLU(FEATURES), nn.Linear(FEATURES, 6)).double()
    torch.nn.init.uniform_(model[1].weight)
    return model


def plan(style: str | fp.Style) -> dict[str, str | fp.Style]:
    return {"0": "colwise", "1": style, "2": "rowwise"}


def squares(out: Tensor, target: Tensor) -> Tensor:
    return (out - target).square().mean()


def _verified() -> tuple[str, str]:
    mesh = fp.init_mesh(tp=2, device="cpu")
    layout = fp.VerifyLayout(mesh, plan=plan(walk_through()()))
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    report = fp.verify(mlp, layout, (x,), loss=squares, target=torch.zeros_like(x))
    report.raise_if_wrong()
    model = fp.parallelize(mlp(), mesh, layout.plan)
    row = next(row for row in fp.explain(model).rows if row["module"] == "1")
    weights = fp.unparallelize(model).state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in mlp().state_dict().items())
    mesh.close()
    return row["style"], row["stored"]


def test_a_style_of_ones_own_is_explained_and_equal_to_the_whole_model() -> None:
    assert run_ranks(2, _verified) == [("prelu", "split by row: weight")] * 2


def test_the_walk_through_of_contributing_takes_three_files_that_exist() -> None:
    files = re.findall(r"^\d\. `([^`]+)`", SECTION, re.M)
    assert len(files) == 3
    assert all((ROOT / file).is_file() for file in files)


def test_a_style_of_ones_own_refuses_before_anything_is_changed() -> None:
    model = mlp()
    before = dict(model.named_parameters())
    with pytest.raises(TypeError, match=r"2 has style 'prelu': expected nn.PReLU, got Linear"):
        fp.parallelize(model, None, {"0": "colwise", "2": walk_through()()})
    assert [type(module) for module in model] == [nn.Linear, nn.PReLU, nn.Linear]
    assert all(parameter is before[name] for name, parameter in model.named_parameters())


@dataclass(frozen=True)
class FailingStyle(fp.Style):
    """Changes everything that a style can change, and fails."""

    def apply(self, path: str, module: nn.Module, context: fp.parallel.SwapContext) -> None:
        context.changes.hooked(module.register_forward_hook(lambda *_: None))
        walk_through()().apply(path, module, context)
        context.changes.set(module, "num_parameters", 0)
        raise RuntimeError("no room left")


def _undone() -> None:
    model, x = mlp(), torch.randn(4, 6, dtype=torch.float64)
    before, wanted = dict(model.named_parameters()), mlp()(x)
    # Styles are applied from the last module to the first: the one behind is split already when this one fails.
    with pytest.raises(RuntimeError, match="no room left"):
        fp.parallelize(model, dist.group.WORLD, plan(FailingStyle()))
    assert [type(module) for module in model] == [nn.Linear, nn.PReLU, nn.Linear]
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert not model[1]._forward_hooks
    assert model[1].num_parameters == FEATURES
    assert torch.equal(model(x), wanted)
    with pytest.raises(ValueError, match="has not been parallelised"):
        fp.explain(model)


def test_a_style_that_fails_leaves_the_model_as_it_was() -> None:
    run_ranks(2, _undone)


class Tied(nn.Module):
    """A weight that is split as a linear's, and whole as a norm's."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(6, 6), nn.Linear(6, 6), nn.LayerNorm(6)
        self.norm.bias = self.up.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))


def _tied_is_undone() -> None:
    model = Tied()
    with pytest.raises(ValueError, match="shared by modules that the plan splits differently"):
        fp.parallelize(model, dist.group.WORLD, {"up": "colwise", "down": "rowwise"}, sync_weights="none")
    assert [type(module) for module in model.children()] == [nn.Linear, nn.Linear, nn.LayerNorm]
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())


def test_a_parameter_that_the_plan_would_split_twice_leaves_the_model_as_it_was() -> None:
    run_ranks(2, _tied_is_undone)


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.levelname, record.getMessage()))


class NormedMLP(nn.Module):
    """An MLP with a norm over all its features in between: no rank can have a part of them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 10), nn.LayerNorm(10), nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x)))


def _logged() -> list[tuple[str, str]]:
    handler, logger = Lines(), logging.getLogger("fastpar.parallelize")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    torch.manual_seed(0)
    style = fp.parallel.WholeStyle(note="left whole: its features are normed", is_fallback=True)
    model = nn.Sequential(mlp().float(), NormedMLP())
    fp.parallelize(model, dist.group.WORLD, {"0.0": "colwise", "0.1": walk_through()(), "0.2": "rowwise", "1": style})
    logger.removeHandler(handler)
    return handler.lines


def test_the_first_rank_logs_what_was_split_and_what_was_left_whole() -> None:
    first, second = run_ranks(2, _logged)
    assert second == []
    assert [level for level, _ in first] == ["INFO", "WARNING"]
    words = "3 replicate, 1 colwise, 1 prelu, 1 rowwise, 1 whole"
    assert first[0][1].startswith(f"Sequential over 2 tensor-parallel ranks: {words}")
    assert first[1][1] == "1 (1 of them): left whole: its features are normed"


class WithoutBias(fp.parallel.ColwiseStyle):
    """By columns, for linears without a bias."""

    def check(self, path: str, module: nn.Module, context: fp.parallel.SwapContext) -> None:
        super().check(path, module, context)
        if module.bias is not None:
            raise ValueError(f"{path} has a bias")


class Attention(nn.Module):
    """One key/value head for two query heads: which rows a rank has is said by the number of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = 2, 3
        self.q, self.k, self.o = nn.Linear(6, 6, bias=False), nn.Linear(6, 3, bias=False), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.q(x).unflatten(-1, (self.num_heads, 3)), self.k(x).unflatten(-1, (-1, 3))
        return self.o((q * k.softmax(-1)).flatten(-2))


def _subclass_matches() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 6)
    model = nn.Sequential(Attention())
    wanted = model(x)
    split = {"0": "block", "0.q": WithoutBias(), "0.k": WithoutBias(), "0.o": "rowwise"}
    with pytest.raises(ValueError, match=r"0.o has a bias"):
        fp.parallelize(model, dist.group.WORLD, split | {"0.o": WithoutBias()})
    fp.parallelize(model, dist.group.WORLD, split)
    torch.testing.assert_close(model(x), wanted)
    assert model[0].num_heads == 1


def test_a_subclass_of_a_style_takes_part_in_what_its_base_does() -> None:
    run_ranks(2, _subclass_matches)


def test_what_is_no_style_is_refused_with_what_to_write() -> None:
    with pytest.raises(
        TypeError, match=r"must be a str or fastpar.Style, got the class FailingStyle: make an instance"
    ):
        parse_style("0", FailingStyle)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"0.weight is a parameter, which has no style 'failing'"):
        fp.parallelize(mlp(), None, {"0.weight": FailingStyle()})
