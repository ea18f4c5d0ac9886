"""Models on tensor-parallel grids for test_grids.py, right and with planted errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import fastpar as fp
from fastpar.comm import Communicator, scatter_to
from fastpar.ops.grid_linear import GridSpread
from fastpar.verification import VerifyReport
from fastpar.verification.words import parse_layout
from tests.tensor.grid_ranks import OWN_PLAN, VOCAB, Own
from tests.verification.verify_errors import planted
from tests.verification.verify_ranks import next_tokens

Plant = Callable[[nn.Module], None]


class _NotSummed(GridSpread):
    """This rank's part of its own summand."""

    def summed(self, partial: Tensor, overlap: bool) -> Callable[[], Tensor]:
        part = partial if self.dim is None else scatter_to(partial, self.comm, dim=self.dim, sizes=list(self.sizes))
        return lambda: part


def _unsummed(spread: GridSpread) -> GridSpread:
    return _NotSummed(spread.comm, spread.dim, spread.sizes)


def _changed(module: Any, name: str, change: Callable[[Any], Any]) -> None:
    real = getattr(module, name)
    setattr(module, name, lambda *given: change(real(*given)))


def _not_over_z(module: Any) -> None:
    """The bias' gradient is that of this rank's sequences."""
    module._summed_bias = lambda bias: bias


def _over_y(module: Any) -> None:
    """The weight is gathered over the wrong axis."""
    _changed(module, "weight_spread", lambda found: (replace(found[0], comm=module.grid.y), found[1]))


def _not_over_replicas(module: Any) -> None:
    _changed(module, "weight_spread", lambda found: (found[0], Communicator(None)))


MLP, ATTENTION = "layers.1.mlp", "layers.1.attention"
# By name: the layout, the module, what is done to it, and the modules one of which must be named first.
BUGS: dict[str, tuple[str, str, Callable[[Any], None], tuple[str, str]]] = {
    "no sum over y": (
        "tp4 grid1x2x2",
        f"{MLP}.2",
        lambda m: _changed(m, "output_spread", _unsummed),
        (f"{MLP}.2", "output"),
    ),
    "gathered over y": ("tp4 grid1x2x2", f"{MLP}.0", _over_y, (f"{MLP}.0", "output")),
    "gradients of inputs not summed": (
        "tp4 grid1x2x2",
        f"{MLP}.0",
        lambda m: _changed(m, "input_spread", _unsummed),
        (MLP, "gradient of the input"),
    ),
    "bias not over z": ("tp4 grid1x2x2", f"{ATTENTION}.qkv", _not_over_z, (f"{ATTENTION}.qkv", "gradient")),
    "weight not over replicas": ("tp4 grid1x2x2:features/2", f"{MLP}.0", _not_over_replicas, (f"{MLP}.0", "gradient")),
}
RIGHT = ["tp4 grid2x2x1", "tp4 grid1x2x2:stream", "dp2 tp2 grid2x1x1:copy zero3", "pp2,tp2,grid1x1x2,mb2 full"]


def run_grid(words: str, plant: Plant | None = None) -> VerifyReport:
    ids = torch.randint(VOCAB, (4, 7), generator=torch.Generator().manual_seed(1))
    layout = parse_layout(words).layout("cpu")
    layout = replace(layout, plan=OWN_PLAN)
    try:
        with planted(plant):
            return fp.verify(Own, layout, (ids,), target=ids, loss=next_tokens, steps=1)
    finally:
        layout.mesh.close()


def run_grids() -> dict[str, VerifyReport]:
    """Of all of both, by name."""
    found = {words: run_grid(words) for words in RIGHT}
    for name, (words, path, change, _) in BUGS.items():

        def plant(model: nn.Module, path: str = path, change: Callable[[Any], None] = change) -> None:
            change(model.get_submodule(path))

        found[name] = run_grid(words, plant)
    return found
