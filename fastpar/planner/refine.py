"""One layout again, more exactly: layers cut for memory and time, the schedule simulated, memory by pipeline rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fastpar.layouts import Layout
from fastpar.layouts.layout import RECOMPUTE, parts_of
from fastpar.pipeline.schedules.costs import Costs
from fastpar.pipeline.schedules.schedule import Schedule
from fastpar.planner.cost import predict
from fastpar.planner.cuts import StageChoice, best_cut, even_parts
from fastpar.planner.machine import Machine
from fastpar.planner.memory import (
    MEMORY_PARTS,
    backward_bytes,
    gradient_bytes,
    held_bytes,
    kept_activations,
    layer_whole,
    logits_bytes,
    predict_memory,
)
from fastpar.planner.pipelines import is_simulated, makespan, peaks, schedule_of
from fastpar.planner.table import LayoutTable
from fastpar.planner.workload import Workload


@dataclass(frozen=True)
class RefinedLayout:
    """A layout with its prediction.

    seconds   of a step
    parts     what they are made of, by name
    ranks     by pipeline rank: what it holds at its peak, in bytes by name
    error     relative error bar
    is_backed whether every feature has been measured
    """

    layout: Layout
    seconds: float
    parts: Mapping[str, float]
    ranks: tuple[Mapping[str, float], ...]
    error: float = 0.12
    is_backed: bool = True

    @property
    def peak(self) -> float:
        """Bytes of the fullest rank."""
        return max(sum(rank.values()) for rank in self.ranks)

    @property
    def low(self) -> float:
        """Lower end of the error bar, seconds of a step."""
        return self.seconds * (1 - self.error)

    @property
    def high(self) -> float:
        """Upper end of the error bar, seconds of a step."""
        return self.seconds * (1 + self.error)


def refine(
    machine: Machine, work: Workload, layout: Layout, limit: float, *, as_given: bool = False
) -> RefinedLayout | None:
    """The layout with its cut and each rank's recomputation chosen; None if it does not fit then.

    as_given   keep the layout's own cut and recomputation

    Without a pipeline, and where a schedule is too long to be simulated, closed forms stay.
    """
    if layout.pp == 1:
        x = LayoutTable.of([layout], work.batch)
        time, memory = predict(machine, work, x), predict_memory(machine, work, x)
        seconds, parts = float(time.step[0]), {name: float(column[0]) for name, column in time.parts.items()}
        held = {name: float(memory.parts[name][0]) for name in MEMORY_PARTS}
        return RefinedLayout(layout, seconds, parts, (held,)) if sum(held.values()) <= limit else None
    pipeline = _Pipeline(machine, work, layout, limit)
    cut = pipeline.given() if as_given else pipeline.cut()
    if cut is None:
        return None
    layout, counts, words = cut
    ranks = tuple(pipeline.memory(rank, counts[rank], words[rank]) for rank in range(layout.pp))
    if max(sum(rank.values()) for rank in ranks) > limit:
        return None
    parts = pipeline.mean_parts(counts, words)
    if is_simulated(layout.pp, layout.pipeline.microbatches, pipeline.parts):
        exact = pipeline.simulated(layout, counts, words)
        waits = ("bubble", "imbalance", "hops", "dp", "optimizer")
        busy = sum(value for name, value in parts.items() if name not in waits)
        parts = {**parts, "imbalance": 0.0, "hops": 0.0, "bubble": exact - busy}
    return RefinedLayout(layout, sum(parts.values()), parts, ranks)


class _Pipeline:
    """Seconds and bytes of one layout's stages, by rank, number of layers and recomputation."""

    def __init__(self, machine: Machine, work: Workload, layout: Layout, limit: float) -> None:
        self.machine, self.work, self.layout, self.limit = machine, work, layout, limit
        pipeline = layout.pipeline
        self.parts = parts_of(pipeline.schedule, pipeline.stages_per_rank)
        self.peaks = peaks(pipeline.schedule, layout.pp, pipeline.microbatches, self.parts)
        tables = [LayoutTable.of([replace(layout, recompute=word)], work.batch) for word in RECOMPUTE]
        times = [predict(machine, work, x) for x in tables]
        self.times = times
        self.forward = [float(time.layer.forward[0]) for time in times]
        self.backward = [float(time.layer.backward[0]) for time in times]
        self.products = float(times[0].layer.products[0]) / 3.0
        self.head, self.hop = float(times[0].head[0]), float(times[0].hop[0])
        self.kept = [float(kept_activations(work, x)[0]) for x in tables]
        whole = float(layer_whole(work, tables[0])[0])
        self.working = [0.0, whole - self.kept[1], whole]
        self.table, self.held = tables[0], held_bytes(machine, work, tables[0])
        self.logits = float(logits_bytes(work, tables[0])[0])
        self.at_work = float(backward_bytes(work, tables[0])[0])
        model = work.model
        ends = 2 if self.parts == 2 and pipeline.schedule in ("zbv", "v_half", "dualpipev") else 1
        layers = model.layers / layout.pp
        dense = model.dense_layer_parameters / layout.tp + model.expert_parameters / layout.ep
        self.layer_share = dense / (dense * layers + ends * model.embedding_parameters / layout.tp)
        self.end_share = (model.embedding_parameters / layout.tp) * self.layer_share / dense
        self.has_both_ends = ends == 2

    def seconds(self, rank: int, count: int, word: int) -> float:
        found = count * (self.forward[word] + self.backward[word])
        return found + (self.head if rank == self._head_rank else 0.0)

    @property
    def _head_rank(self) -> int:
        return 0 if self.has_both_ends else self.layout.pp - 1

    def memory(self, rank: int, count: int, word: int) -> dict[str, float]:
        ends = (rank == 0) + (rank == self._head_rank)
        share = count * self.layer_share + ends * self.end_share
        held = {name: column * (1.0 if name == "buffers" else share) for name, column in self.held.items()}
        microbatch, is_head = count * self.kept[word], rank == self._head_rank
        at_work = (self.working[word] if count else 0.0) + (0.0 if is_head else self.at_work)
        return {
            "parameters": float(held["parameters"][0]),
            "gradients": float(gradient_bytes(self.work, self.table, held, self.peaks[rank], microbatch)[0]),
            "states": float(held["states"][0]),
            "activations": self.peaks[rank] * microbatch + at_work,
            "logits": self.logits if is_head else 0.0,
            "buffers": float(held["buffers"][0]),
        }

    def mean_parts(self, counts: list[int], words: list[int]) -> dict[str, float]:
        """Seconds by part, of the mean over ranks with the recomputation that each of them does."""
        shares = [sum(count for count, word in zip(counts, words, strict=True) if word == each) for each in range(3)]
        return {
            name: sum(share * float(time.parts[name][0]) for share, time in zip(shares, self.times, strict=True))
            / sum(shares)
            for name in self.times[0].parts
        }

    def given(self) -> tuple[Layout, list[int], list[int]]:
        """The layout's own cut, or the one by cost, and its own recomputation."""
        layout, schedule = self.layout, self._example()
        own = layout.recompute
        words = [RECOMPUTE.index(own if isinstance(own, str) else own[rank]) for rank in range(layout.pp)]
        parts = layout.pipeline.cut or self._balanced(schedule.num_parts, schedule.stage_ranks, max(words))
        counts = [0] * layout.pp
        for part, count in enumerate(parts):
            counts[schedule.stage_ranks[part]] += count
        return layout, counts, words

    def cut(self) -> tuple[Layout, list[int], list[int]] | None:
        """The layout with its cut, layers by rank, and recomputation by rank as numbers in RECOMPUTE."""
        layout, layers = self.layout, self.work.model.layers
        if self.parts > 1:
            return self._looped()
        found = best_cut(layers, layout.pp, self._stage)
        if found is None:
            return None
        words = [choice.recompute for choice in found.choices]
        same = words[0] if len(set(words)) == 1 else tuple(words)
        first = RECOMPUTE.index(words[0])
        even = self._balanced(layout.pp, range(layout.pp), first)
        slowest = max(self.seconds(rank, count, first) for rank, count in enumerate(even))
        # What `partition` does unasked is as good.
        is_default = len(set(words)) == 1 and slowest <= found.slowest * (1 + 1e-9)
        pipeline = replace(layout.pipeline, cut=None if is_default else found.layers)
        return (
            replace(layout, pipeline=pipeline, recompute=same),
            list(found.layers),
            [RECOMPUTE.index(word) for word in words],
        )

    def _stage(self, rank: int, count: int) -> StageChoice | None:
        fitting = [
            StageChoice(self.seconds(rank, count, word), name)
            for word, name in enumerate(RECOMPUTE)
            if sum(self.memory(rank, count, word).values()) <= self.limit
        ]
        return min(fitting, key=lambda choice: choice.seconds, default=None)

    def _looped(self) -> tuple[Layout, list[int], list[int]] | None:
        """Parts of equal cost; the recomputation of the layout on every rank."""
        layout = self.layout
        word = RECOMPUTE.index(layout.recompute) if isinstance(layout.recompute, str) else 2
        schedule = self._example()
        counts = [0] * layout.pp
        for part, count in enumerate(self._balanced(schedule.num_parts, schedule.stage_ranks, word)):
            counts[schedule.stage_ranks[part]] += count
        return layout, counts, [word] * layout.pp

    def _example(self) -> Schedule:
        """A short schedule of the layout's kind, for the ranks of its parts."""
        return schedule_of(self.layout.pipeline.schedule, self.layout.pp, 2 * self.layout.pp, self.parts)

    def _balanced(self, num_parts: int, ranks: Sequence[int], word: int) -> list[int]:
        """Layers of each part when parts are cut by cost, as `fastpar.pipeline.partition` cuts them."""
        each = self.forward[word] + self.backward[word]
        return even_parts(self.work.model.layers, ranks, self.head / each)[:num_parts]

    def simulated(self, layout: Layout, counts: list[int], words: list[int]) -> float:
        """Seconds of the schedule; W is half of backward's products, where it is split off."""
        pipeline = layout.pipeline
        schedule = self._example()
        parts = counts if self.parts == 1 else pipeline.cut
        parts = parts or self._balanced(schedule.num_parts, schedule.stage_ranks, words[0])
        forward, inputs, weights = [], [], []
        for part, count in enumerate(parts):
            word = words[schedule.stage_ranks[part]]
            head = self.head / 3.0 if part == len(parts) - 1 else 0.0
            forward.append(count * self.forward[word] + head)
            weight = count * self.products
            inputs.append(count * self.backward[word] - weight + head)
            weights.append(weight + head)
        costs = Costs(forward, inputs, weights, hop=self.hop)
        return float(makespan(pipeline.schedule, layout.pp, pipeline.microbatches, costs, self.parts, quick=True))
