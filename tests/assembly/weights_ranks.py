"""What ranks do for the tests of `fp.assemble(..., weights=folder)`."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fastpar as fp
from bench.device import reset_peak_memory, resident_bytes
from examples.model import PLAN, Llama, LlamaConfig
from fastpar.pretrained.folder import WeightFolder
from fastpar.tensor.held import take
from tests.assembly.assembly_cells import MAX_NORM, Cell, build, make_optimizer
from tests.assembly.assembly_ranks import fed


class Counted:
    """Bytes that this rank reads of a folder in the block."""

    def __enter__(self) -> Counted:
        self.bytes, self._close = 0, WeightFolder.close

        def close(folder: WeightFolder) -> None:
            self.bytes = max(self.bytes, folder.bytes_read)
            self._close(folder)

        WeightFolder.close = close  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: Any) -> None:
        WeightFolder.close = self._close  # type: ignore[method-assign]


def on_meta(cell: Cell) -> nn.Module:
    with torch.device("meta"):
        return build(cell)


def loaded(cell: Cell, folder: str | Path, model: Any = None, **options: Any) -> Any:
    if cell.layout.cp > 1 and cell.model == "dense":
        options.setdefault("plan", PLAN)
    return fp.assemble(
        on_meta(cell) if model is None else model,
        cell.layout,
        lambda params: make_optimizer(cell, params),
        precision=None if cell.precision == "fp64" else cell.precision,
        max_norm=MAX_NORM,
        weights=folder,
        **options,
    )


def wrong_values(trained: Any, whole: nn.Module) -> tuple[list[str], int]:
    """What this rank holds that is not as in the whole model, bit for bit; and how many elements it holds."""
    named = dict(whole.named_parameters(remove_duplicate=False)) | dict(whole.named_buffers())
    wrong, count = [], 0
    with trained.zero.overwriting() as held:
        for each in {id(one.value): one for one in held}.values():
            count += each.value.numel()
            part = take(named[each.name.partition("@")[0]].detach(), each.index)
            if each.value.numel() and not torch.equal(each.value.view(part.shape), part.to(each.value.dtype)):
                wrong.append(each.name)
    return wrong, count


def cells_load(cells: Sequence[Cell], folders: Sequence[str]) -> dict[str, Any]:
    """By cell: wrong values, elements held and bytes read, and the losses of two steps."""
    found: dict[str, Any] = {}
    for cell, folder in zip(cells, folders, strict=True):
        with Counted() as counted:
            trained = loaded(cell, folder)
        wrong, count = wrong_values(trained, build(cell))
        losses = [trained.step(fed(trained, cell, step)).loss for step in range(2)]
        trained.close()
        found[str(cell)] = wrong, count, counted.bytes, losses
    return found


def peak_of_loading(words: str, folder: str, config: dict[str, Any]) -> int:
    """Bytes by which the resident memory of this rank grows at most."""
    loaded(Cell(words, precision="fp32"), f"{folder}/small").close()  # what the first one imports and starts
    gc.collect()
    reset_peak_memory()
    before = resident_bytes("VmRSS")
    with torch.device("meta"):
        model = Llama(LlamaConfig(**config))
    trained = fp.assemble(model, words, torch.optim.SGD, weights=f"{folder}/large")
    peak = resident_bytes("VmHWM") - before
    trained.close()
    return peak
