"""Published measurements as workloads and layouts: tests/data/planner_rows.csv, each row with its source."""

from __future__ import annotations

import csv
import dataclasses
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fastpar.layouts import ExpertShape, Layout, ModelShape, PipelineOptions, ZeroOptions
from fastpar.planner.cost import StepTime, predict
from fastpar.planner.machine import MACHINES, Machine
from fastpar.planner.memory import Memory, predict_memory
from fastpar.planner.table import LayoutTable
from fastpar.planner.workload import BytesPerParameter, Workload

PATH = Path(__file__).parents[1] / "data" / "planner_rows.csv"
_MACHINES = {"A100-80": "a100", "A100(8/node)": "a100", "A100-40": "a100-40", "H100-80": "h100", "H200": "h200"}
_MACHINES |= {"H100-96(HBM2e,500W)": "h100", "GB200": "b200"}
_DROPOUT = ("A", "B", "C", "Cm", "F", "G", "H")  # stacks whose models drop out in training, Megatron's default


@dataclass(frozen=True)
class PublishedRow:
    """One measurement; seconds, mem_bytes: None where the source gives none."""

    id: str
    kind: str  # the letters of its set
    work: Workload
    layout: Layout
    machine: Machine
    seconds: float | None
    mem_bytes: float | None
    is_oom: bool
    values: dict[str, str]

    def table(self) -> LayoutTable:
        return LayoutTable.of([self.layout], self.work.batch)

    def predict(self, stack: Machine | None = None) -> StepTime:
        return predict(stack or self.machine, self.work, self.table())

    def memory(self) -> Memory:
        return predict_memory(self.machine, self.work, self.table())

    def error(self, stack: Machine) -> float:
        """Relative error of the predicted step."""
        assert self.seconds is not None
        return float(self.predict(stack).step[0]) / self.seconds - 1.0


def read_rows() -> list[PublishedRow]:
    with PATH.open() as file:
        return [row for row in map(_row, csv.DictReader(file)) if row is not None]


def _row(values: dict[str, str]) -> PublishedRow | None:
    kind = values["set"].partition("-")[0]
    batch = _number(values, "global_batch")
    gpus = _number(values, "gpus") or _product(values)
    if values["gpu"] not in _MACHINES or not batch or kind in ("O", "P"):
        return None  # too little is stated
    precision = "fp8" if values["precision"].startswith("fp8") else values["precision"].split("_")[-1].split("/")[0]
    precision = precision if precision in ("bf16", "fp16", "fp8") else "bf16"
    model = _model(values, kind)
    layout = _layout(values, kind, gpus, batch)
    kept = _kept(values, kind)
    equal = model.layers % max(layout.num_parts, 1) == 0
    work = Workload(
        model,
        batch,
        _number(values, "seq"),
        precision,
        kept,
        fused_attention=values["flash"] == "1",
        balanced=not equal,
    )
    machine = dataclasses.replace(MACHINES[_MACHINES[values["gpu"]]], gpus=gpus, per_node=min(8, gpus))
    if kind == "F":  # Jean Zay: four Omni-Path links of 100 Gb/s for the eight GPUs of a node
        machine = dataclasses.replace(machine, nic=5e9)
    seconds = _seconds(values, work, gpus)
    memory = float(values["mem_GB"]) * 1e9 if values["mem_GB"] else None
    return PublishedRow(values["id"], kind, work, layout, machine, seconds, memory, values["oom"] == "1", values)


def _kept(values: dict[str, str], kind: str) -> BytesPerParameter:
    """What the stack keeps per parameter."""
    if values["precision"] == "bf16/pure":
        return BytesPerParameter(2.0, 2.0, 4.0, 2.0)
    if kind in ("J", "E"):  # FSDP keeps float32 parameters, and gathers them in 16 bits
        return BytesPerParameter(4.0, 4.0, 8.0, 2.0)
    if kind == "F":
        # DeepSpeed with 16-bit gradients, from 28 February on float32 sums of them beside. Its stage 1 all-reduces
        # gradients before it gathers parameters: three times 2 bytes, counted as two of 3.
        return BytesPerParameter(grad=6.0 if "02-28" in values["note"] else 2.0, wire=3.0)
    return BytesPerParameter(wire=4.0 if kind == "H" else 2.0)


def _number(values: dict[str, str], name: str) -> int:
    return int(float(values[name])) if values[name] else 0


def _product(values: dict[str, str]) -> int:
    found = 1
    for name in ("tp", "pp", "cp", "dp"):
        found *= _number(values, name) or 1
    return max(found * (1 if values["dp"] else _number(values, "ep") or 1), 8)


def _model(values: dict[str, str], kind: str) -> ModelShape:
    count = {name: _number(values, name) for name in ("layers", "hidden", "ffn", "vocab", "heads", "kv_heads")}
    experts = None
    if _number(values, "experts"):
        experts = ExpertShape(_number(values, "experts"), _number(values, "top_k"), _number(values, "moe_ffn"))
    head_dim = 128 if count["hidden"] % count["heads"] else 0
    return ModelShape(
        values["model"], **count, head_dim=head_dim, gated=values["gated"] == "1",
        tied=values["arch"] == "gpt" and kind != "H",  # whose configurations untie them
        dropout=kind in _DROPOUT and not experts, experts=experts,
    )  # fmt: skip


def _layout(values: dict[str, str], kind: str, gpus: int, batch: int) -> Layout:
    pp, tp, cp = (_number(values, name) or 1 for name in ("pp", "tp", "cp"))
    dp = max(1, gpus // (pp * tp * cp))
    micro = _number(values, "micro_batch") or 1
    if kind == "E" and pp > 1:
        micro = 1  # the local batch is given: all microbatches of a rank
    count = max(1, round(batch / (dp * micro)))
    words = {"full": "full", "sele": "selective", "per-": "selective", "conf": "selective"}
    stages = _number(values, "vpp") or (2 if values["schedule"].startswith("interleaved_") else 1)
    pipeline = PipelineOptions()
    if pp > 1:
        pipeline = PipelineOptions("interleaved_1f1b" if stages > 1 else "1f1b", count, stages)
    return Layout(
        pp=pp,
        tp=tp,
        cp=cp,
        dp_shard=dp,
        ep=_number(values, "ep") or 1,
        sequence_parallel=values["sp"] == "1" and tp > 1,
        zero=ZeroOptions(_number(values, "zero")),
        pipeline=pipeline,
        recompute=words.get(values["recompute"][:4], "none"),
        accumulate=1 if pp > 1 else count,
    )


def _seconds(values: dict[str, str], work: Workload, gpus: int) -> float | None:
    """Of a step: as given, or from tokens, or from the flop/s by the source's own way of counting them."""
    tokens = float(work.batch) * work.seq
    if values["iter_s"]:
        return float(values["iter_s"])
    if values["tokens_s_gpu"]:
        return tokens / float(values["tokens_s_gpu"]) / gpus
    model = work.model
    if values["tflops_gpu"] and values["tflops_kind"].startswith("hardware"):
        # Narayanan and others 2021 (arXiv:2104.04473), equation 3: forward twice, backward once.
        inner = 1 + work.seq / (6 * model.hidden) + model.vocab / (16 * model.layers * model.hidden)
        return 96 * tokens * model.layers * model.hidden**2 * inner / gpus / (float(values["tflops_gpu"]) * 1e12)
    if values["mfu_pct"]:
        matrices = model.parameters - model.embedding_parameters * (0 if model.tied else 1)
        flops = tokens * (6 * matrices + 12 * model.layers * model.hidden * work.seq)
        return flops / gpus / (float(values["mfu_pct"]) / 100 * 989e12)
    return None


def fit(rows: Sequence[PublishedRow], change: Callable[[Machine, float], Machine], low: float, high: float) -> float:
    """The value with which the median of the rows' errors is 0, by bisection; errors fall with it."""
    for _ in range(24):
        middle = (low + high) / 2
        if statistics.median(row.error(change(row.machine, middle)) for row in rows) > 0:
            low = middle
        else:
            high = middle
    return (low + high) / 2
