"""The table of rules: which layouts the library runs, each with the reason and what to do instead.

Note: one text for one layout and for many. `Rule.breaks` is written with operators that mean the same for numbers and
for numpy arrays of them (`&`, `|`, `%`, comparisons; never `and`, `or`, `if`), so that the planner rejects half a
million candidates by the text by which `Layout.check` refuses one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from fastpar.layouts.layout import Layout, parts_of
from fastpar.layouts.shape import ModelShape
from fastpar.pipeline.schedules.generators import schedule_names


@dataclass(frozen=True)
class LayoutFields:
    """A layout's fields in one place: numbers of one layout, or numpy arrays of many.

    parts_per_rank    parts of the model per rank: 2 of V-shaped schedules, else stages_per_rank
    grid_*            `Layout.tp_grid`; ranks 1: tp is one dim
    offloads_params   parameters are offloaded, too
    model             None: rules about models break for no layout
    world_size, batch 0: not known
    """

    pp: Any
    dp_replicate: Any
    dp_shard: Any
    cp: Any
    tp: Any
    ep: Any
    etp: Any
    sequence_parallel: Any
    zero_stage: Any
    offloads: Any
    offloads_params: Any
    schedule: Any
    microbatches: Any
    stages_per_rank: Any
    parts_per_rank: Any
    shard_head: Any
    num_cut: Any
    cut_layers: Any
    num_recompute: Any
    method: Any
    order: Any
    accumulate: Any
    cut_least: Any = 1  # layers of a part between the first and the last
    grid_x: Any = 1
    grid_y: Any = 1
    grid_z: Any = 1
    grid_replicas: Any = 1
    grid_spread: Any = "rows"
    model: ModelShape | None = None
    world_size: int = 0
    batch: int = 0

    @staticmethod
    def of(layout: Layout, model: ModelShape | None = None, world_size: int = 0, batch: int = 0) -> LayoutFields:
        """The fields of one layout."""
        pipeline, cut = layout.pipeline, layout.pipeline.cut
        return LayoutFields(
            **{dim: getattr(layout, dim) for dim in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "etp")},
            sequence_parallel=layout.sequence_parallel,
            zero_stage=layout.zero.stage,
            offloads=layout.zero.offload != "none",
            offloads_params="+parameters" in layout.zero.offload.partition(":")[0],
            schedule=pipeline.schedule,
            microbatches=pipeline.microbatches,
            stages_per_rank=pipeline.stages_per_rank,
            parts_per_rank=parts_of(pipeline.schedule, pipeline.stages_per_rank),
            shard_head=pipeline.shard_head,
            num_cut=-1 if cut is None else len(cut),
            cut_layers=-1 if cut is None else sum(cut),
            cut_least=min((cut or ())[1:-1], default=1),
            num_recompute=1 if isinstance(layout.recompute, str) else len(layout.recompute),
            method=layout.context.method,
            order=layout.context.order,
            accumulate=layout.accumulate,
            **{f"grid_{name}": value for name, value in vars(layout.tp_grid).items() if name != "stream"},
            model=model,
            world_size=world_size,
            batch=batch,
        )

    @property
    def world(self) -> Any:
        """Ranks of the job."""
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def dp(self) -> Any:
        """Ranks that read batches of their own, context-parallel ones counted once."""
        return self.dp_replicate * self.dp_shard

    @property
    def grid_ranks(self) -> Any:
        """Ranks of the tensor-parallel grid; 1 where tp is one dim."""
        return self.grid_x * self.grid_y * self.grid_z

    @property
    def heads_ranks(self) -> Any:
        """Ranks that share the heads: those of tp, and of a grid x * y."""
        return self.tp * (self.grid_ranks == 1) + self.grid_x * self.grid_y * (self.grid_ranks > 1)

    @property
    def heads(self) -> int:
        """Query heads of the model; 0 of an unknown one, which every size divides."""
        return self.model.heads if self.model else 0

    @property
    def experts(self) -> int:
        """Experts of the model; 0 without one."""
        return self.model.num_experts if self.model else 0

    @property
    def experts_ffn(self) -> int:
        """Inner size of each of them; 0 without one."""
        return self.model.experts.ffn if self.model and self.model.experts else 0


@dataclass(frozen=True)
class Rule:
    """What a legal layout has.

    name    one word or two, as reports count by
    says    the rule, with the fields of the layout in braces
    why     what in the library, or in mathematics, asks for it
    breaks  from LayoutFields to whether the rule is broken: a bool, or an array of them
    """

    name: str
    says: str
    why: str
    breaks: Callable[[LayoutFields], Any]

    def message(self, x: LayoutFields) -> str:
        """What is wrong with one layout, with its numbers."""
        values = {each.name: getattr(x, each.name) for each in fields(x)}
        extra = {name: getattr(x, name) for name in _DERIVED}
        layers = x.model.layers if x.model else 0
        return f"{self.name}: {self.says.format(**values, **extra, layers=layers)} ({self.why})"


_DERIVED = ("world", "dp", "heads", "experts", "experts_ffn", "grid_ranks", "heads_ranks")
_ASYNCHRONOUS = ("pipedream", "pipedream_2bw")
_LOOPED = ("interleaved_1f1b", "looped_bfs", "zb_h1")  # that take stages_per_rank


def _is(values: Any, words: Sequence[str]) -> Any:
    """Whether a word is one of these, elementwise: numpy's truth, as Python's ~True is -2."""
    return np.isin(values, words)


RULES: tuple[Rule, ...] = (
    Rule(
        "ranks",
        "pp x dp_replicate x dp_shard x cp x tp is {world}, but there are {world_size} ranks (world_size)",
        "every rank has one place in the mesh",
        lambda x: (x.world_size > 0) & (x.world != x.world_size),
    ),
    Rule(
        "expert grid",
        "ep x etp ({ep} x {etp}) must divide dp_shard x cp x tp ({dp_shard} x {cp} x {tp})",
        "experts are spread over the ranks of one pipeline stage and one replica",
        lambda x: (x.dp_shard * x.cp * x.tp) % (x.ep * x.etp) != 0,
    ),
    Rule(
        "experts",
        "ep is {ep} and etp {etp}, but the model has no experts",
        "parallelize refuses a mesh with ep where no module has the style 'expert'",
        lambda x: (x.model is not None) & (x.experts == 0) & (x.ep * x.etp > 1),
    ),
    Rule(
        "equal experts",
        "the number of experts ({experts}) must be divisible by ep ({ep})",
        "every rank has as many experts as the others",
        lambda x: (x.experts > 0) & (x.experts % x.ep != 0),
    ),
    Rule(
        "split experts",
        "the experts' inner size ({experts_ffn}) must be divisible by etp ({etp})",
        "every rank has as many inner features of an expert as the others",
        lambda x: (x.experts > 0) & (x.experts_ffn % x.etp != 0),
    ),
    Rule(
        "heads",
        "the number of query heads ({heads}) must be divisible by tp, or x * y of its grid ({heads_ranks})",
        "attention is split by whole heads; key/value heads that do not divide are shared",
        lambda x: x.heads % x.heads_ranks != 0,
    ),
    Rule(
        "grid ranks",
        "the grid {grid_x} x {grid_y} x {grid_z} has {grid_ranks} ranks, but tp is {tp}",
        "each tensor-parallel rank has one place in it",
        lambda x: (x.grid_ranks > 1) & (x.grid_ranks != x.tp),
    ),
    Rule(
        "grid form",
        "the grid {grid_x} x {grid_y} x {grid_z} must cut more than y, and sequence parallelism not be said beside it",
        "1 x p x 1 is tp p, with sp where rows are spread; a grid says by its spread how tokens are cut",
        lambda x: (
            (x.grid_ranks > 1)
            & (((x.grid_x * x.grid_z == 1) & (x.grid_spread != "features")) | (x.sequence_parallel != 0))
        ),
    ),
    Rule(
        "grid dims",
        "a grid goes with data parallelism and pipelines, not with cp {cp}, ep {ep}, etp {etp} or {experts} experts",
        "parallelize and parallelize_pipeline refuse them: tokens and experts have no place on it",
        lambda x: (x.grid_ranks > 1) & ((x.cp * x.ep * x.etp > 1) | (x.experts > 0)),
    ),
    Rule(
        "grid batch",
        "a batch of {batch} over {dp} data-parallel ranks, in {accumulate} passes and {microbatches} microbatches, "
        "leaves one of z {grid_z} ranks of the grid ({grid_replicas} replicas) without a sequence",
        "sequences are dealt over z in parts of equal sizes, rounded up",
        lambda x: (x.grid_z > 1) & (x.batch > 0) & _leaves_one_out(x),
    ),
    Rule(
        "ulysses heads",
        "the number of query heads ({heads}) must be divisible by tp x cp ({tp} x {cp}) under ulysses",
        "every rank of cp attends with whole heads",
        lambda x: (x.method == "ulysses") & (x.heads % (x.tp * x.cp) != 0),
    ),
    Rule(
        "sequence parallel",
        "sequence parallelism needs tp above 1",
        "it splits the residual stream over tp, and changes nothing without",
        lambda x: (x.sequence_parallel != 0) & (x.tp == 1),
    ),
    Rule(
        "pipeline words",
        "schedule {schedule}, {microbatches} microbatches and the sharded head are for pp above 1",
        "a layout asks for nothing that is not done; without pp, accumulate splits the batch",
        lambda x: (
            (x.pp == 1)
            & (
                (x.microbatches > 1)
                | (x.stages_per_rank > 1)
                | (x.schedule != "1f1b")
                | (x.shard_head != 0)
                | (x.num_cut >= 0)
            )
        ),
    ),
    Rule(
        "schedule",
        "there is no schedule {schedule!r}",
        "fastpar.pipeline.schedule_names() has the names",
        lambda x: ~_is(x.schedule, schedule_names()),
    ),
    Rule(
        "asynchronous",
        "schedule {schedule} updates weights during a step",
        "its losses are not those of one process, and ZeRO's update comes after the step",
        lambda x: _is(x.schedule, _ASYNCHRONOUS),
    ),
    Rule(
        "stages per rank",
        "schedule {schedule} does not go with {stages_per_rank} stages per rank (stages_per_rank)",
        "interleaved_1f1b and looped_bfs wind around the ranks and need 2 or more, zb_h1 may, no other does",
        lambda x: (
            ((x.stages_per_rank > 1) & ~_is(x.schedule, _LOOPED))
            | ((x.stages_per_rank == 1) & (x.pp > 1) & _is(x.schedule, _LOOPED[:2]))
        ),
    ),
    Rule(
        "microbatches",
        "schedule {schedule} needs at least 2 microbatches per rank, {microbatches} on {pp} are too few",
        "microbatches travel in both directions at once",
        lambda x: (x.pp > 1) & _is(x.schedule, ("dualpipe", "dualpipev")) & (x.microbatches < 2 * x.pp),
    ),
    Rule(
        "dualpipe",
        "dualpipe needs even numbers of ranks and microbatches, got {pp} and {microbatches}",
        "each half of the microbatches begins at its own end of the pipeline",
        lambda x: (x.schedule == "dualpipe") & (x.pp > 1) & ((x.pp % 2 != 0) | (x.microbatches % 2 != 0)),
    ),
    Rule(
        "parts",
        "the model has {layers} layers, too few for {pp} ranks of {parts_per_rank} parts",
        "a part needs a layer; the embedding and the head are on the first and the last one",
        lambda x: (x.model is not None) & (x.pp > 1) & (_layers(x) < x.pp * x.parts_per_rank),
    ),
    Rule(
        "empty part",
        "the cut has a part without layers between the first and the last",
        "the first part has the embedding and the last one the head: any other needs a layer to have parameters",
        lambda x: x.cut_least < 1,
    ),
    Rule(
        "cut",
        "the cut has {num_cut} parts and {cut_layers} layers, but the pipeline has {pp} x {parts_per_rank} parts and "
        "the model {layers} layers",
        "each layer is in one part",
        lambda x: (
            (x.num_cut >= 0)
            & ((x.num_cut != x.pp * x.parts_per_rank) | ((x.model is not None) & (x.cut_layers != _layers(x))))
        ),
    ),
    Rule(
        "sharded head",
        "a sharded head goes with tp 1, a head of its own, and schedules of one direction, not {schedule}",
        "it is split over the vocabulary among the ranks of the pipeline (parallelize_pipeline)",
        lambda x: (x.shard_head != 0) & ((x.tp > 1) | _is_tied(x) | _is(x.schedule, ("dualpipe",))),
    ),
    Rule(
        "context words",
        "the method ({method}) and the order ({order}) of context parallelism are for cp above 1",
        "a layout asks for nothing that is not done",
        lambda x: (x.cp == 1) & ((x.method != "auto") | (x.order != "zigzag")),
    ),
    Rule(
        "offload",
        "offload of parameters is for ZeRO stage 3, which shards them; stage is {zero_stage}",
        "in other stages every rank needs all parameters all the time",
        lambda x: (x.offloads_params != 0) & (x.zero_stage != 3),
    ),
    Rule(
        "recompute",
        "recompute has {num_recompute} words for {pp} pipeline ranks",
        "one word holds for all; otherwise each rank has its own",
        lambda x: (x.num_recompute != 1) & (x.num_recompute != x.pp),
    ),
    Rule(
        "batch",
        "a batch of {batch} cannot be dealt to {dp} data-parallel ranks in {accumulate} passes",
        "each rank has as many sequences in a pass as the others",
        lambda x: (x.batch > 0) & (x.batch % (x.dp * x.accumulate) != 0),
    ),
    Rule(
        "small batch",
        "a batch of {batch} gives each of {dp} data-parallel ranks too few sequences for {accumulate} x "
        "{microbatches} microbatches",
        "a microbatch has at least one sequence",
        lambda x: (x.batch > 0) & (x.batch < x.dp * x.accumulate * x.microbatches),
    ),
)


def _is_tied(x: LayoutFields) -> bool:
    return x.model is not None and x.model.tied


def _leaves_one_out(x: LayoutFields) -> Any:
    """Whether one of z ranks has no sequence in some microbatch: a pass is cut into microbatches whose sizes differ by
    one, by `torch.tensor_split`'s rule."""
    rows, parts = x.batch // (x.dp * x.accumulate), x.microbatches * (x.pp > 1) + (x.pp == 1)
    return _has_none(rows // parts, x) | _has_none(-(-rows // parts), x)


def _has_none(rows: Any, x: LayoutFields) -> Any:
    """The same of one microbatch: its sequences go to replicas, and of each to its z / replicas ranks, both by
    `torch.chunk`'s rule."""
    ranks = x.grid_z // x.grid_replicas
    most = -(-rows // x.grid_replicas)
    least = rows - (x.grid_replicas - 1) * most
    return (least - (ranks - 1) * -(-least // ranks) <= 0) | (most - (ranks - 1) * -(-most // ranks) <= 0)


def _layers(x: LayoutFields) -> int:
    return x.model.layers if x.model else 0


class LayoutError(ValueError):
    """A layout that is not legal: all broken rules, and the nearest layout that breaks none.

    problems   one line per broken rule
    nearest    the nearest legal layout, or None where none was found
    """

    def __init__(self, layout: Layout, problems: Sequence[str], nearest: Layout | None) -> None:
        self.layout, self.problems, self.nearest = layout, tuple(problems), nearest
        hint = f"\nthe nearest legal layout: {nearest.words}" if nearest is not None else ""
        super().__init__(f"layout {layout.words!r} is not legal:\n  " + "\n  ".join(problems) + hint)


def broken_rules(
    layout: Layout, model: ModelShape | None = None, *, world_size: int | None = None, batch: int | None = None
) -> list[Rule]:
    """The rules that a layout breaks; arguments as of `Layout.check`."""
    x = LayoutFields.of(layout, model, world_size or 0, batch or 0)
    return [rule for rule in RULES if bool(rule.breaks(x))]


def check(layout: Layout, model: ModelShape | None, *, world_size: int | None, batch: int | None) -> None:
    """`Layout.check`."""
    for name, value in (("world_size", world_size), ("batch", batch)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 1 << 63):
            raise ValueError(f"{name} must be an integer of at least 1 that fits 64 bits, or None, got {value!r:.60}")
    if model is not None and not isinstance(model, ModelShape):
        raise TypeError(f"model must be a fastpar.layouts.ModelShape or None, got {type(model).__name__}")
    broken = broken_rules(layout, model, world_size=world_size, batch=batch)
    if broken:
        from fastpar.layouts.nearest import nearest_legal

        x = LayoutFields.of(layout, model, world_size or 0, batch or 0)
        near = nearest_legal(layout, model, world_size=world_size, batch=batch)
        raise LayoutError(layout, [rule.message(x) for rule in broken], near)
