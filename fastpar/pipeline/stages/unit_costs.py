"""What each unit of a model costs, for cutting it into equal parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from fastpar.pipeline.stages.architecture import ModelUnit
from fastpar.pipeline.stages.balance import Number

UnitCosts = str | Sequence[Number]


class UnitGroup(NamedTuple):
    """What is placed as one: the embedding with what is added to it, a layer, or the head with the final norm."""

    kind: str
    paths: tuple[str, ...]


def groups_of(units: Sequence[ModelUnit]) -> list[UnitGroup]:
    """Units that a balanced cut keeps together, in running order."""
    groups: list[UnitGroup] = []
    for unit in units:
        joins = groups and (
            (unit.kind == "E" and groups[-1].kind == "E")
            or (unit.kind == "N" and groups[-1].kind == "N")
            or (unit.kind == "H" and groups[-1].kind == "N")
            or (unit.kind == "N" and not any(u.kind == "H" for u in units))
        )
        if joins:
            kind = "H" if unit.kind == "H" else groups[-1].kind
            groups[-1] = UnitGroup(kind, (*groups[-1].paths, unit.path))
        else:
            groups.append(UnitGroup(unit.kind, (unit.path,)))
    return groups


def group_costs(model: nn.Module, groups: Sequence[UnitGroup], costs: UnitCosts) -> list[Number]:
    """One number per group.

    "flops"       floating-point operations of forward for one token: 2 for every element of a weight with two dims or
                  more, but none for an nn.Embedding's, which is looked up, and 1 for every other parameter. Attention's
                  products of activations, convolutions' positions and unused experts are not known here
    "parameters"  number of parameters: what the parts weigh, with their gradients and optimizer states
    a sequence    measured times, one per group in the order of the model: embedding, layers, head
    """
    if isinstance(costs, str):
        if costs not in ("flops", "parameters"):
            raise ValueError(f'costs must be "flops", "parameters" or one number per unit, got {costs!r}')
        weigh = _flops if costs == "flops" else _parameters
        return [sum(weigh(model.get_submodule(path)) for path in group.paths) for group in groups]
    given = list(costs)
    if len(given) != len(groups):
        names = [group.paths[0] for group in groups]
        raise ValueError(f"got {len(given)} costs for {len(groups)} units: {', '.join(names)}")
    return given


def _parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _flops(module: nn.Module) -> int:
    return sum(
        0 if isinstance(m, nn.Embedding) else p.numel() * (2 if p.dim() > 1 else 1)
        for m in module.modules()
        for p in m.parameters(recurse=False)
    )
