"""What to say where nothing fits: the layouts that come nearest, the bytes that they lack, and the cheapest remedy."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from fastpar.layouts import Layout
from fastpar.planner.machine import MEMORY_SHARE, Machine
from fastpar.planner.memory import predict_memory
from fastpar.planner.search import EvaluatedLayouts
from fastpar.planner.space import ALLOW, PlanOptions, enumerate_layouts
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
    machine: Machine, work: Workload, found: EvaluatedLayouts, options: PlanOptions
) -> tuple[NearMiss, ...]:
    """The three layouts of different sizes that lack least."""
    x, seen, misses = found.table, set(), []
    remedy = cheapest_remedy(machine, work, options)
    for row in np.argsort(found.memory.total, kind="stable"):
        family = tuple(int(getattr(x, name)[row]) for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"))
        if family in seen:
            continue
        seen.add(family)
        missing = float(found.memory.total[row]) - found.limit
        misses.append(NearMiss(x.layout(int(row)), max(missing, 0.0), remedy))
        if len(misses) == 3:
            break
    return tuple(misses)


def cheapest_remedy(machine: Machine, work: Workload, options: PlanOptions) -> str:
    """What makes room, the cheapest first: other pins, the fused loss or kernels, what is not searched unasked, more
    ranks, more memory. Each is tried: with it a layout fits."""
    loose = dataclasses.replace(options, pin={})
    if options.pin and _lacks(machine, work, loose) <= 0:
        return "it fits without the pins"
    lean = dataclasses.replace(work, fused_loss=True, fused_kernels=True)
    if not work.fused_loss and _lacks(machine, dataclasses.replace(work, fused_loss=True), loose) <= 0:
        return "the fused loss would make room (fused_loss)"
    if not work.fused_kernels and _lacks(machine, dataclasses.replace(work, fused_kernels=True), loose) <= 0:
        return "fused kernels would make room (fused_kernels)"
    for word in ALLOW:
        more = dataclasses.replace(loose, allow=options.allow | {word})
        if word not in options.allow and _lacks(machine, work, more) <= 0:
            states = "offloaded optimizer states would make room" if word == "offload" else f"{word} would make room"
            return f"{states} (allow {word})"
    for factor in (2, 4, 8, 16, 32, 64):
        larger = dataclasses.replace(machine, gpus=machine.gpus * factor)
        if _lacks(larger, work, loose) <= 0:
            return f"{larger.gpus} ranks are enough"
    together = f"the fused loss, fused kernels and allow {', '.join(ALLOW)}"
    lacking = _lacks(machine, lean, dataclasses.replace(loose, allow=frozenset(ALLOW)))
    if lacking <= 0:
        return f"it fits with {together}"
    return f"{(machine.hbm_bytes + lacking / MEMORY_SHARE) / 1e9:.1f} GB a rank would do, with {together}"


def _lacks(machine: Machine, work: Workload, options: PlanOptions) -> float:
    """Bytes that the leanest layout lacks; not positive where it fits, inf where there is none."""
    table = enumerate_layouts(machine, work, options).table
    if not len(table):
        return float("inf")
    limit = options.limit if options.limit is not None else machine.limit
    return float(predict_memory(machine, work, table).total.min()) - limit
