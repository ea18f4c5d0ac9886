"""What ranks do for the tests of `fp.assemble`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import fastpar as fp
from examples.model import PLAN
from fastpar.verification.pieces import Piece, take, zero_pieces
from tests.assembly.assembly_cells import MAX_NORM, ROWS, Cell, Reference, batch, build, make_optimizer
from tests.models import norms_in_their_own_dtype

Trained = Any


def assembled(cell: Cell, **options: Any) -> Trained:
    precision = None if cell.precision == "fp64" else cell.precision
    if cell.layout.cp > 1 and cell.model == "dense":
        options.setdefault("plan", PLAN)
    return fp.assemble(
        build(cell),
        cell.layout,
        lambda params: make_optimizer(cell, params),
        precision=precision,
        max_norm=MAX_NORM,
        **options,
    )


def fed(trained: Trained, cell: Cell, step: int) -> Any:
    """This rank's rows."""
    samples = trained.samples(step, ROWS)
    rows = slice(samples.start - step * ROWS, samples.stop - step * ROWS)
    ids, targets = (x[rows] for x in batch(step, cell.model == "huggingface"))
    return {"input_ids": ids, "labels": targets} if cell.model == "huggingface" else (ids, targets)


def train(cell: Cell, steps: int) -> tuple[list[float], list[float], list[Piece], list[Piece]]:
    """Some steps: losses, norms, and pieces of the first gradients and of the last parameters."""
    model = build(cell)
    with norms_in_their_own_dtype(model):
        trained = assembled(cell)
        grads: list[Piece] = []

        def keep(*_: Any) -> None:
            if not grads:
                trained.zero.reduce_gradients()
                grads.extend(zero_pieces(trained.zero, "grad"))

        hooked = trained.optimizer if isinstance(trained.optimizer, list) else [trained.optimizer]
        for optimizer in hooked[:1]:
            optimizer.register_step_pre_hook(keep)
        results = [trained.step(fed(trained, cell, step)) for step in range(steps)]
        values = zero_pieces(trained.zero, "value")
        trained.close()
    return [r.loss for r in results], [r.norm for r in results], grads, values


def far(pieces: Sequence[Piece], wanted: dict[str, Tensor], limit: float) -> list[str]:
    """Pieces that are not as the whole tensors have them, relative to the largest element."""
    found = []
    for piece in pieces:
        name = piece.name.partition("@")[0]
        if name not in wanted:
            found.append(f"{name} is not known")
            continue
        whole = wanted[name]
        if piece.value is None or piece.value.numel() == 0:
            continue
        mine = take(whole, piece.index)
        off = float((piece.value.double() - mine).abs().max() / whole.abs().max().clamp_min(1e-12))
        if not off <= limit:
            found.append(f"{name} is off by {off:.1e}")
    return found


# Relative, of losses and norms and of gradients and parameters. Experts weigh rows in float32 whatever their dtype.
LIMITS = {"dense": (1e-9, 1e-8), "huggingface": (1e-9, 1e-8), "experts": (1e-7, 1e-6)}
# A bfloat16 is rounded by 4e-3, and AdamW makes whole steps of gradients that are near zero.
OF = {"fp32": (1e-4, 1e-3), "bf16": (5e-2, 0.2), "fp16": (5e-3, 0.1)}


def matches(cell: Cell, wanted: Reference) -> list[str]:
    """What differs from the reference, in words."""
    tight, loose = LIMITS[cell.model] if cell.precision == "fp64" else OF[cell.precision]
    losses, norms, grads, values = train(cell, len(wanted.losses))
    problems = []
    for what, mine, theirs in (("loss", losses, wanted.losses), ("norm", norms, wanted.norms)):
        for step, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            if not abs(a - b) <= tight * abs(b):
                problems.append(f"{what} of step {step}: {a!r} and not {b!r}")
    problems += [f"gradient: {each}" for each in far(grads, wanted.grads, loose)]
    problems += [f"parameter: {each}" for each in far(values, wanted.values, loose)]
    held = {piece.name for piece in grads}
    if not held <= set(wanted.grads):
        problems.append(f"gradients of {sorted(held - set(wanted.grads))}")
    return problems


def cells_match(cells: Sequence[Cell], references: Sequence[Reference]) -> dict[str, Any]:
    """Problems by cell, of those that have any."""
    import traceback

    found = {}
    for cell, wanted in zip(cells, references, strict=True):
        try:
            problems: Any = matches(cell, wanted)
        except Exception:
            problems = traceback.format_exc()
        if problems:
            found[str(cell)] = problems
    return found


__all__ = ["assembled", "cells_match", "far", "fed", "matches", "torch", "train"]
