"""What to say where nothing fits: the layouts that come nearest, the bytes that they lack, and the cheapest remedy."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from fastpar.layouts import Layout
from fastpar.planner.machine import Machine
from fastpar.planner.memory import predict_memory
from fastpar.planner.search import Candidates
from fastpar.planner.space import PlanOptions, enumerate_layouts
from fastpar.planner.workload import Workload


@dataclass(frozen=True)
class NearMiss:
    """A layout that does not fit: what its fullest rank lacks, in bytes, and what would make room."""

    layout: Layout
    missing: float
    remedy: str


class NoLayoutFitsError(ValueError):
    """No layout fits into the limit of a rank; `misses` come nearest, the nearest first."""

    def __init__(self, misses: tuple[NearMiss, ...], limit: int) -> None:
        self.misses, self.limit = misses, limit
        lines = [f"  {miss.layout.words}: {miss.missing / 1e9:.1f} GB too much; {miss.remedy}" for miss in misses]
        super().__init__(f"no layout fits into {limit / 1e9:.1f} GB a rank; the nearest are\n" + "\n".join(lines))


def nearest_misses(
    machine: Machine, work: Workload, found: Candidates, options: PlanOptions, count: int = 3
) -> tuple[NearMiss, ...]:
    """The layouts of different sizes that lack least."""
    x, seen, misses = found.table, set(), []
    remedy = _remedy(machine, work, options)
    for row in np.argsort(found.memory.total, kind="stable"):
        family = tuple(int(getattr(x, name)[row]) for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"))
        if family in seen:
            continue
        seen.add(family)
        missing = float(found.memory.total[row]) - found.limit
        states = float(found.memory.parts["states"][row])
        own = remedy
        if not x.offload[row] and "offload" not in options.allow and states >= missing:
            own = f"offloaded optimizer states would make {states / 1e9:.1f} GB of room (allow offload)"
        misses.append(NearMiss(x.layout(int(row)), max(missing, 0.0), own))
        if len(misses) == count:
            break
    return tuple(misses)


def _remedy(machine: Machine, work: Workload, options: PlanOptions) -> str:
    """The fewest ranks, by doubling, on which something fits, without the pins."""
    if options.pin:
        loose = dataclasses.replace(options, pin={})
        space = enumerate_layouts(machine, work, loose)
        if len(space.table) and (predict_memory(machine, work, space.table).total <= _limit(machine, options)).any():
            return "it fits without the pins"
    for factor in (2, 4, 8, 16, 32, 64):
        more = dataclasses.replace(machine, gpus=machine.gpus * factor)
        if more.gpus > work.batch * work.model.layers * machine.per_node:
            break
        space = enumerate_layouts(more, work, dataclasses.replace(options, pin={}))
        if len(space.table) and (predict_memory(more, work, space.table).total <= _limit(more, options)).any():
            return f"{more.gpus} ranks are enough"
    return "more memory a rank, or a smaller model"


def _limit(machine: Machine, options: PlanOptions) -> int:
    return options.limit if options.limit is not None else machine.limit
