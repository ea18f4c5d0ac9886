"""Covering arrays of what `fp.assemble` combines: few cells that have every pair, or triple, of values together.

Greedy and deterministic: cells are drawn at random, from a fixed seed, around a combination that is not covered, and
the one that covers most is taken. A combination that no legal cell has (by the rules of `fastpar.layouts`, and `fits`)
is left out when 150 draws around it have found none. What cells that run anyway combine need not be combined again.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterable, Iterator
from typing import Any

import fastpar as fp
from fastpar.layouts import ExpertShape, ModelShape
from tests.assembly.assembly_cells import ROWS, VOCAB, Cell

FACTORS: dict[str, tuple[Any, ...]] = {
    "pp": ("none", "1f1b", "interleaved_1f1b", "zbv"),
    "tp": (1, 2),
    "sp": (False, True),
    "cp": (1, 2),
    "ep": (1, 2),
    "etp": (1, 2),
    "dp_replicate": (1, 2),
    "dp_shard": (1, 2),
    "zero": (0, 1, 2, 3),
    "offload": ("none", "cpu"),
    "recompute": ("none", "selective", "full"),
    "accumulate": (1, 2),
    "model": ("dense", "experts", "huggingface"),
    "tied": (False, True),
    "frozen": (False, True),
    "optimizer": ("adamw", "sgd", "two"),
}
Choice = dict[str, Any]
Combination = frozenset[tuple[str, Any]]


def cell_of(x: Choice) -> Cell:
    """The cell of a choice of values."""
    words = [f"{name}{x[name]}" for name in ("tp", "cp", "ep", "etp") if x[name] > 1]
    words += ["replicas2"] if x["dp_replicate"] > 1 else []
    words += ["dp2"] if x["dp_shard"] > 1 else []
    words += ["sp"] if x["sp"] else []
    words += [f"zero{x['zero']}"] if x["zero"] else []
    words += [x["offload"]] if x["offload"] != "none" else []
    words += [x["recompute"]] if x["recompute"] != "none" else []
    words += ["acc2"] if x["accumulate"] > 1 else []
    if x["pp"] != "none":
        words += ["pp2", "mb2"]
        words += [x["pp"]] if x["pp"] != "1f1b" else []
        words += ["stages2"] if x["pp"] == "interleaved_1f1b" else []
    named = {key: x[key] for key in ("model", "tied", "frozen", "optimizer")}
    return Cell(" ".join(words) or "one rank", **named)


def choice_of(cell: Cell) -> Choice:
    """The values of factors that a cell has; none of one whose numbers are compared less closely, or on a grid."""
    layout = cell.layout
    if cell.precision != "fp64" or "grid" in cell.words:
        return {}
    has: Choice = {name: getattr(layout, name) for name in ("tp", "cp", "ep", "etp", "dp_replicate", "dp_shard")}
    has |= {"pp": layout.pipeline.schedule if layout.pp > 1 else "none", "sp": layout.sequence_parallel}
    has |= {"zero": layout.zero.stage, "offload": layout.zero.offload, "recompute": layout.recompute}
    has |= {"accumulate": layout.accumulate}
    has |= {name: getattr(cell, name) for name in ("model", "tied", "frozen", "optimizer")}
    return {name: value for name, value in has.items() if value in FACTORS[name]}


@functools.cache
def shape(model: str, tied: bool) -> ModelShape:
    """As rules know the models of the cells."""
    experts = ExpertShape(4, 2, 24) if model == "experts" else None
    return ModelShape(model, layers=4, hidden=32, ffn=24, vocab=VOCAB, heads=4, kv_heads=2, tied=tied, experts=experts)


def fits(x: Choice, most_ranks: int) -> bool:
    """Whether the layout is legal, and asks for no more than the model has."""
    if x["cp"] > 1 and x["model"] == "experts":  # whose balance losses are of whole sequences
        return False
    layout = cell_of(x).layout
    if layout.world_size > most_ranks:
        return False
    return not fp.layouts.broken_rules(layout, shape(x["model"], x["tied"]), batch=ROWS)


@functools.cache
def covering_array(strength: int, most_ranks: int, given: tuple[Cell, ...] = (), seed: int = 0) -> tuple[Cell, ...]:
    """Cells that have, with the given ones, every combination of `strength` values together that any legal cell has."""
    draw = random.Random(seed)
    missing = dict.fromkeys(_combinations(strength))
    for cell in given:
        for each in _combinations_of(choice_of(cell), strength):
            missing.pop(each, None)
    found: list[Choice] = []
    while missing:
        target = next(iter(missing))
        best, most = None, 0
        for candidate in itertools.islice(_drawn(draw, dict(target), most_ranks), 80):
            gain = sum(each in missing for each in _combinations_of(candidate, strength))
            if gain > most:
                best, most = candidate, gain
        if best is None:
            del missing[target]
            continue
        found.append(best)
        for each in _combinations_of(best, strength):
            missing.pop(each, None)
    return tuple(cell_of(x) for x in found)


def pairs_of(cells: Iterable[Cell]) -> set[Combination]:
    """All pairs of values of factors that one of these cells has."""
    return {each for cell in cells for each in _combinations_of(choice_of(cell), 2)}


def _combinations(strength: int) -> Iterator[Combination]:
    for names in itertools.combinations(FACTORS, strength):
        for values in itertools.product(*(FACTORS[name] for name in names)):
            yield frozenset(zip(names, values, strict=True))


def _combinations_of(x: Choice, strength: int) -> Iterator[Combination]:
    yield from map(frozenset, itertools.combinations(x.items(), strength))


def _drawn(draw: random.Random, fixed: Choice, most_ranks: int) -> Iterator[Choice]:
    """Legal cells with these values, of a few hundred that are drawn."""
    for _ in range(150):
        x = {name: fixed.get(name, draw.choice(values)) for name, values in FACTORS.items()}
        _mend(x, fixed)
        if fits(x, most_ranks):
            yield x


def _mend(x: Choice, fixed: Choice) -> None:
    """Take back what cannot go with the rest, so that fewer draws are in vain."""

    def settle(name: str, value: Any) -> None:
        if name not in fixed:
            x[name] = value

    if x["cp"] > 1 and x["model"] == "experts":
        settle("model", "huggingface")
    if x["ep"] > 1 or x["etp"] > 1:
        settle("model", "experts")
    if x["sp"]:
        settle("tp", 2)
    if x["tp"] == 1:
        settle("sp", False)
    if x["model"] != "experts":
        settle("ep", 1)
        settle("etp", 1)
    if x["model"] == "experts":
        settle("cp", 1)
