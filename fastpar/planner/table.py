"""Many layouts as columns of numbers: what costs and memory are computed from, for one layout or half a million."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fastpar.layouts import ContextOptions, GridOptions, Layout, LayoutFields, ModelShape, PipelineOptions, ZeroOptions
from fastpar.layouts.layout import RECOMPUTE, parts_of

Column = npt.NDArray[Any]
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zbv", "v_half", "dualpipev")


@dataclass(frozen=True)
class LayoutTable:
    """One row per layout.

    pp, dp_replicate, dp_shard, cp, tp, ep    sizes
    sp            sequence parallelism: 0 or 1
    stage         of ZeRO
    schedule      number in SCHEDULES
    parts         parts of the model per pipeline rank
    micro_batch   sequences of a microbatch
    microbatches  per step and data-parallel rank: those of a pipeline, or accumulated passes
    recompute     number in RECOMPUTE
    offload       optimizer states in the host's memory: 0 or 1
    """

    pp: Column
    dp_replicate: Column
    dp_shard: Column
    cp: Column
    tp: Column
    ep: Column
    sp: Column
    stage: Column
    schedule: Column
    parts: Column
    micro_batch: Column
    microbatches: Column
    recompute: Column
    offload: Column

    def __len__(self) -> int:
        return len(self.pp)

    @staticmethod
    def of(layouts: Sequence[Layout], batch: int) -> LayoutTable:
        """The rows of layouts that deal out a batch of so many sequences."""
        rows = []
        for x in layouts:
            if x.pipeline.schedule not in SCHEDULES and x.pp > 1:
                raise ValueError(f"the planner knows the schedules {', '.join(SCHEDULES)}, got {x.pipeline.schedule!r}")
            if x.pipeline.shard_head or x.context != ContextOptions() or x.zero.offload not in ("none", "cpu"):
                raise ValueError(
                    f"the planner has no costs of shard_head, of a method or order over cp, nor of offload but cpu: {x}"
                )
            if x.tp_grid != GridOptions():
                raise ValueError(f"the planner has no costs of tensor-parallel grids: {x}")
            words = {x.recompute} if isinstance(x.recompute, str) else set(x.recompute)
            count = x.accumulate * x.pipeline.microbatches
            rows.append(
                {
                    **{name: getattr(x, name) for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")},
                    "sp": int(x.sequence_parallel),
                    "stage": x.zero.stage,
                    "schedule": SCHEDULES.index(x.pipeline.schedule) if x.pp > 1 else 1,
                    "parts": parts_of(x.pipeline.schedule, x.pipeline.stages_per_rank) if x.pp > 1 else 1,
                    "micro_batch": max(1, -(-batch // (x.dp * count))),  # the largest, where they differ
                    "microbatches": count,
                    "recompute": max(RECOMPUTE.index(word) for word in words),
                    "offload": int(x.zero.offload != "none"),
                }
            )
        return LayoutTable(**{name: np.array([row[name] for row in rows], dtype=int) for name in _names()})

    def take(self, rows: Any) -> LayoutTable:
        """Some of the rows, by number or by truth value."""
        return LayoutTable(**{name: getattr(self, name)[rows] for name in _names()})

    @staticmethod
    def concatenate(tables: Sequence[LayoutTable]) -> LayoutTable:
        """The rows of several tables, in their order."""
        return LayoutTable(**{n: np.concatenate([getattr(table, n) for table in tables]) for n in _names()})

    @property
    def dp(self) -> Column:
        return self.dp_replicate * self.dp_shard

    @property
    def world(self) -> Column:
        return self.pp * self.dp * self.cp * self.tp

    def layout(self, row: int) -> Layout:
        """One row as a Layout."""
        x: dict[str, Any] = {name: int(getattr(self, name)[row]) for name in _names()}
        options: dict[str, Any] = {"accumulate": x["microbatches"]}
        if x["pp"] > 1:
            name = SCHEDULES[x["schedule"]]
            stages = x["parts"] if parts_of(name, 1) == 1 else 1
            options = {"pipeline": PipelineOptions(name, x["microbatches"], stages)}
        return Layout(
            **{name: x[name] for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")},
            sequence_parallel=bool(x["sp"]),
            zero=ZeroOptions(x["stage"], "cpu" if x["offload"] else "none"),
            recompute=RECOMPUTE[x["recompute"]],
            **options,
        )

    def fields(self, model: ModelShape, world_size: int, batch: int) -> LayoutFields:
        """The rows as the rules read them."""
        pipelined = self.pp > 1
        names = np.array(SCHEDULES)[self.schedule]
        return LayoutFields(
            **{name: getattr(self, name) for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")},
            etp=np.ones_like(self.ep),
            sequence_parallel=self.sp,
            zero_stage=self.stage,
            offloads=self.offload,
            offloads_params=np.zeros_like(self.offload),
            schedule=np.where(pipelined, names, "1f1b"),
            microbatches=np.where(pipelined, self.microbatches, 1),
            stages_per_rank=np.where(np.isin(names, ("zbv", "v_half", "dualpipev")), 1, self.parts),
            parts_per_rank=self.parts,
            shard_head=np.zeros_like(self.pp),
            num_cut=np.full_like(self.pp, -1),
            cut_layers=np.full_like(self.pp, -1),
            num_recompute=np.ones_like(self.pp),
            method=np.full(len(self), "auto"),
            order=np.full(len(self), "zigzag"),
            accumulate=np.where(pipelined, 1, self.microbatches),
            model=model,
            world_size=world_size,
            batch=batch,
        )


def _names() -> list[str]:
    return [each.name for each in dataclasses.fields(LayoutTable)]
