"""The layouts that a search looks at: `enumerate_layouts`, and what is asked of them, `PlanOptions`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from fastpar.layouts import RULES
from fastpar.planner.machine import Machine
from fastpar.planner.table import SCHEDULES, Column, LayoutTable
from fastpar.planner.workload import Workload

ALLOW = ("offload", "tp_across_nodes", "cp")
PINS = (
    "pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "sp", "zero", "micro_batch", "microbatches", "recompute",
    "schedule", "stages",
)  # fmt: skip
_COLUMN = {"zero": "stage", "stages": "parts"}
_MAX_STAGES = 8
_LONG = 16384  # tokens of a sequence from which context parallelism is looked at unasked


@dataclass(frozen=True)
class PlanOptions:
    """What a search may use, and what is given.

    pin     axis -> value, such as {"tp": 4, "zero": 2, "schedule": "zbv"}
    allow   of "offload" (optimizer states in the host's memory), "tp_across_nodes" and "cp" (also for short sequences)
    limit   bytes that a rank may fill; None: `Machine.limit`
    """

    pin: Mapping[str, int | str] = field(default_factory=dict)
    allow: frozenset[str] = frozenset()
    limit: int | None = None

    def __post_init__(self) -> None:
        for name, known, what in ((self.pin, PINS, "pin"), (self.allow, ALLOW, "allow")):
            for each in name:
                if each not in known:
                    raise ValueError(f"{what}: there is no {each!r}; there are {', '.join(known)}")
        if self.limit is not None and self.limit <= 0:
            raise ValueError(f"memory must be positive, got {self.limit} bytes")


@dataclass(frozen=True)
class LayoutSpace:
    """Legal layouts, and how many were rejected by each rule."""

    table: LayoutTable
    rejected: Mapping[str, int]


def enumerate_layouts(machine: Machine, work: Workload, options: PlanOptions) -> LayoutSpace:
    """Every layout of the machine's ranks that the rules allow, as one table."""
    tables = [_options_of(work, options, *grid) for grid in _grids(machine, work, options)]
    tables = [table for table in tables if len(table)]
    rejected: dict[str, int] = {}
    if not tables:
        return LayoutSpace(LayoutTable.of([], work.batch), {"batch": 1})
    table = LayoutTable.concatenate(tables)
    table, pinned = _pinned(table, options)
    if pinned:
        rejected["pinned"] = pinned
    fields = table.fields(work.model, machine.gpus, work.batch)
    legal = np.ones(len(table), dtype=bool)
    for rule in RULES:
        broken = np.broadcast_to(np.asarray(rule.breaks(fields), dtype=bool), legal.shape)
        count = int((broken & legal).sum())
        if count:
            rejected[rule.name] = count
        legal &= ~broken
    return LayoutSpace(table.take(legal), rejected)


def divisors(number: int) -> list[int]:
    """The divisors in ascending order."""
    small = [each for each in range(1, int(number**0.5) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)})


def _grids(machine: Machine, work: Workload, options: PlanOptions) -> list[tuple[int, int, int, int, int, int]]:
    """(pp, dp_replicate, dp_shard, cp, tp, ep) whose product is the number of ranks."""
    ranks, model = machine.gpus, work.model
    tps = [tp for tp in divisors(ranks) if model.heads % tp == 0]
    if "tp_across_nodes" not in options.allow and "tp" not in options.pin:
        tps = [tp for tp in tps if tp <= machine.per_node and machine.per_node % tp == 0]
    found = []
    for tp in tps:
        for cp in _cps(work, options, ranks // tp):
            for pp in divisors(ranks // (tp * cp)):
                dp = ranks // (tp * cp * pp)
                if pp > model.layers or work.batch % dp:
                    continue
                for dp_shard in sorted({dp, *_shards(machine, dp, cp * tp), *_pinned_shards(options, dp)}):
                    inner = dp_shard * cp * tp
                    eps = [ep for ep in divisors(model.num_experts) if inner % ep == 0] if model.experts else [1]
                    found += [(pp, dp // dp_shard, dp_shard, cp, tp, ep) for ep in eps]
    return found


def _cps(work: Workload, options: PlanOptions, ranks: int) -> list[int]:
    is_open = "cp" in options.allow or "cp" in options.pin or work.seq >= _LONG
    return [cp for cp in (1, 2, 4, 8, 16, 32) if ranks % cp == 0 and work.seq % (2 * cp) == 0 and (cp == 1 or is_open)]


def _pinned_shards(options: PlanOptions, dp: int) -> list[int]:
    """What a pinned dp_shard, or a pinned dp_replicate, makes of the data-parallel ranks."""
    replicas = pin_value("dp_replicate", options.pin.get("dp_replicate", 0))
    asked = pin_value("dp_shard", options.pin.get("dp_shard", 0)), dp // replicas if replicas else 0
    return [shards for shards in asked if shards and dp % shards == 0]


def _shards(machine: Machine, dp: int, inner: int) -> list[int]:
    """Shards within a node, with replicas across (HSDP); and replicas alone where nothing is sharded anyway."""
    within = machine.per_node // inner if inner <= machine.per_node else 0
    return [within] if 1 < within < dp and dp % within == 0 else []


def _options_of(
    work: Workload, options: PlanOptions, pp: int, dp_replicate: int, dp_shard: int, cp: int, tp: int, ep: int
) -> LayoutTable:
    """All rows of one grid."""
    share = work.batch // (dp_replicate * dp_shard)
    micro = np.array(divisors(share))
    pipelines = [(1, 1)]
    if pp > 1:
        most = min(_MAX_STAGES, work.model.layers // pp)
        pipelines = [(SCHEDULES.index(name), 1) for name in ("gpipe", "1f1b", "zb_h1")]
        pipelines += [(SCHEDULES.index("interleaved_1f1b"), stages) for stages in range(2, most + 1)]
        pipelines += [(SCHEDULES.index(name), 2) for name in ("zbv", "v_half", "dualpipev")]
    is_sharded = dp_shard * cp > 1 or (ep > 1 and dp_shard * cp * tp > ep)
    # Pipelines sum whole gradients in stage 2 as in stage 1: the same words and bytes.
    staged = ([0, 1, 2] if "zero" in options.pin else [0, 1]) if pp > 1 else [0, 1, 2, 3]
    stages = staged if is_sharded else [0]
    offloads = [0, 1] if "offload" in options.allow else [0]
    axes = (np.arange(len(pipelines)), micro, [0, 1] if tp > 1 else [0], stages, [0, 1, 2], offloads)
    grid = np.meshgrid(*axes, indexing="ij")
    which, size, sp, stage, recompute, offload = (axis.ravel() for axis in grid)
    number, parts = np.array(pipelines).T
    constants = {"pp": pp, "dp_replicate": dp_replicate, "dp_shard": dp_shard, "cp": cp, "tp": tp, "ep": ep}
    return LayoutTable(
        **{name: np.full(len(size), value) for name, value in constants.items()},
        sp=sp,
        stage=stage,
        schedule=number[which],
        parts=parts[which],
        micro_batch=size,
        microbatches=share // size,
        recompute=recompute,
        offload=offload,
    )


def pin_value(axis: str, value: int | str) -> int:
    """A pinned value as the table has it. ValueError for a word that there is not."""
    from fastpar.layouts.layout import RECOMPUTE

    words = {"schedule": SCHEDULES, "recompute": RECOMPUTE}.get(axis)
    if words is not None:
        if value not in words:
            raise ValueError(f"pin: {axis} must be one of {', '.join(words)}, got {value!r}")
        return words.index(str(value))
    if isinstance(value, str) or value < 0:
        raise ValueError(f"pin: {axis} must be a number that is not negative, got {value!r}")
    return int(value)


def axis_column(x: LayoutTable, axis: str) -> Column:
    """The column of an axis of `PINS`."""
    found: Column = getattr(x, _COLUMN.get(axis, axis))
    return found


def _pinned(table: LayoutTable, options: PlanOptions) -> tuple[LayoutTable, int]:
    keep = np.ones(len(table), dtype=bool)
    for axis, value in options.pin.items():
        keep &= axis_column(table, axis) == pin_value(axis, value)
    return table.take(keep), int((~keep).sum())
