"""`Layout`: how the ranks of a job share one training step, as plain data."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fastpar.arguments import checked_fields

if TYPE_CHECKING:
    from fastpar.layouts.shape import ModelShape

DENSE_DIMS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
DIMS = (*DENSE_DIMS, "ep", "etp")
RECOMPUTE = ("none", "selective", "full")
METHODS = ("auto", "ring", "gather", "ulysses")
SPREADS = ("rows", "copy", "features")
TOKEN_ORDERS = ("zigzag", "contiguous", "striped", "dealt")


@checked_fields
@dataclass(frozen=True)
class ZeroOptions:
    """Options of `fp.zero.shard`.

    stage    0: replicas; 1: optimizer states sharded over dp_shard; 2: and gradients; 3: and parameters
    offload  as `fp.zero.Offload.of` reads it: "none", "cpu", "cpu+parameters", "nvme:FOLDER", "nvme+parameters:FOLDER"
    """

    stage: int = 0
    offload: str = "none"

    def __post_init__(self) -> None:
        if self.stage not in (0, 1, 2, 3):
            raise ValueError(f"stage must be 0, 1, 2 or 3, got {self.stage}")
        where, colon, folder = self.offload.partition(":")
        kind = where.removesuffix("+parameters")
        if kind not in ("none", "cpu", "nvme") or (kind == "none" and where != "none") or bool(colon) != bool(folder):
            raise ValueError(
                'offload must be "none", "cpu", "cpu+parameters", "nvme:FOLDER" or "nvme+parameters:FOLDER", got '
                f"{self.offload!r}"
            )
        if (kind == "nvme") != bool(folder):
            raise ValueError(f"offload: a folder goes with nvme, and nvme needs one, got {self.offload!r}")


@checked_fields
@dataclass(frozen=True)
class PipelineOptions:
    """Options of `fp.parallelize_pipeline`; without pp they stay at their defaults.

    schedule         a name of `fp.pipeline.schedule_names()`
    microbatches     that each pipeline runs per pass; the gradients of `Layout.accumulate` passes are summed
    stages_per_rank  of schedules that have this option, at least 2 of interleaved_1f1b and looped_bfs; 1 for all others
    shard_head       the head split over the ranks of the pipeline (`fp.pipeline.shard_head`)
    cut              layers of each part; None: balanced by cost
    """

    schedule: str = "1f1b"
    microbatches: int = 1
    stages_per_rank: int = 1
    shard_head: bool = False
    cut: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("microbatches", "stages_per_rank"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.cut is not None and any(count < 0 for count in self.cut):
            raise ValueError(f"cut, the layers of each part, must not be negative, got {self.cut}")


@checked_fields
@dataclass(frozen=True)
class ContextOptions:
    """Options of context parallelism; without cp they stay at their defaults.

    method  how attention sees the other ranks' keys: "auto", "ring", "gather" or "ulysses"
    order   which tokens a rank has: "zigzag", "contiguous", "striped" or "dealt"
    """

    method: str = "auto"
    order: str = "zigzag"

    def __post_init__(self) -> None:
        for name, value, known in (("method", self.method, METHODS), ("order", self.order, TOKEN_ORDERS)):
            if value not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")


@checked_fields
@dataclass(frozen=True)
class GridOptions:
    """How the tensor-parallel ranks form a grid, as `fp.GridSpec` says it; sizes of 1, the default: one dim of ranks.

    x, y      ranks that share the features, the one way and the other
    z         ranks that share the tokens
    spread    what the third axis of an activation does: "rows", "copy" or "features"
    replicas  copies of each weight among the z ranks
    stream    blocks of K broadcast one after the other in the place of gathers: "features" with y = z / replicas
    """

    x: int = 1
    y: int = 1
    z: int = 1
    spread: str = "rows"
    replicas: int = 1
    stream: bool = False

    def __post_init__(self) -> None:
        for name in ("x", "y", "z", "replicas"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} of a grid must be at least 1, got {getattr(self, name)}")
        if self.spread not in SPREADS:
            raise ValueError(f"spread must be one of {', '.join(SPREADS)}, got {self.spread!r}")
        if self.z % self.replicas:
            raise ValueError(f"replicas must divide z, got {self.replicas} and {self.z}")
        if self.spread == "features" and self.x != 1:
            raise ValueError(f'spread="features" has all features on y, so x must be 1, got {self.x}')
        if self.spread != "rows" and self.ranks == 1:
            raise ValueError(f"spread={self.spread!r} is for a grid of more than one rank")
        if self.stream and (self.spread != "features" or self.y * self.replicas != self.z):
            raise ValueError(
                f'stream needs spread="features" and y == z / replicas, got {self.spread!r}, {self.y} and '
                f"{self.z} / {self.replicas}: as in grid1x2x2:stream or grid1x2x4:stream/2"
            )

    @property
    def ranks(self) -> int:
        """x * y * z."""
        return self.x * self.y * self.z


@checked_fields
@dataclass(frozen=True)
class Layout:
    """Sizes of the mesh's dims, and the options of the calls that lay a model out on it.

        layout = fp.Layout(pp=2, tp=2, dp_shard=2, sequence_parallel=True, zero=fp.layouts.ZeroOptions(stage=1),
                           pipeline=fp.layouts.PipelineOptions("zbv", microbatches=8))
        layout == fp.Layout.parse("pp2 tp2 sp dp2 zero1 zbv mb8")
        layout.check(shape, world_size=8, batch=64)

    pp, dp_replicate, dp_shard, cp, tp    sizes of the mesh's dims, outermost first (`fp.init_mesh`)
    tp_grid            the tp ranks as a grid
    ep, etp            ranks that share the experts, and ranks that share each expert; within dp_shard x cp x tp
    sequence_parallel  of `fp.parallelize`
    recompute          "none", "selective" or "full"; or one of these for every pipeline rank
    accumulate         passes whose gradients a step sums; each runs all microbatches of a pipeline

    Which layouts are legal is said by `fastpar.layouts.RULES`. A layout decides no loss: batch size, precision and
    optimizer are not part of it. It is data: equal layouts are equal, and `parse(words)`, `from_json(to_json())` give
    the same one back. No torch is needed.

    Raises ValueError and TypeError for values that no layout has.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = 1
    sequence_parallel: bool = False
    zero: ZeroOptions = field(default_factory=ZeroOptions)
    pipeline: PipelineOptions = field(default_factory=PipelineOptions)
    context: ContextOptions = field(default_factory=ContextOptions)
    recompute: str | tuple[str, ...] = "none"
    accumulate: int = 1
    tp_grid: GridOptions = field(default_factory=GridOptions)

    def __post_init__(self) -> None:
        for name in (*DIMS, "accumulate"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        given = (self.recompute,) if isinstance(self.recompute, str) else self.recompute
        unknown = [word for word in given if word not in RECOMPUTE]
        if unknown or not given:
            raise ValueError(f"recompute must be {' or '.join(RECOMPUTE)}, or one for each rank, got {self.recompute}")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return math.prod(getattr(self, dim) for dim in DENSE_DIMS)

    @property
    def dp(self) -> int:
        """Ranks that see different sequences: dp_replicate x dp_shard."""
        return self.dp_replicate * self.dp_shard

    @property
    def num_parts(self) -> int:
        """Parts that the model is cut into."""
        return self.pp * parts_of(self.pipeline.schedule, self.pipeline.stages_per_rank) if self.pp > 1 else 1

    @property
    def words(self) -> str:
        """The layout as people write it, such as "pp2 tp2 sp dp2 zero3 ep2"; `parse` reads it."""
        from fastpar.layouts.words import to_words

        return to_words(self)

    @staticmethod
    def parse(text: str) -> Layout:
        """The layout that words describe: see `fastpar.layouts.words`. ValueError names near misses."""
        from fastpar.layouts.words import from_words

        return from_words(text)

    def to_json(self) -> dict[str, Any]:
        """Plain data for `json.dumps`: what differs from the defaults."""
        return _differences(self)

    @staticmethod
    def from_json(data: dict[str, Any] | str) -> Layout:
        """The inverse of `to_json`, of its result or of its text. ValueError for unknown names, with near misses."""
        try:
            loaded = json.loads(data) if isinstance(data, str) else data
        except json.JSONDecodeError as error:
            raise ValueError(f"data is no JSON: {error}") from error
        if not isinstance(loaded, dict):
            raise TypeError(f"data must be a JSON object, got {type(loaded).__name__}")
        made: Layout = _from_plain(Layout, loaded, "data")
        return made

    def check(
        self, model: ModelShape | None = None, *, world_size: int | None = None, batch: int | None = None
    ) -> None:
        """Raise LayoutError for everything that is wrong with the layout, together with the nearest legal one.

        model       whose heads, layers and experts must divide; None: rules about models are passed over
        world_size  number of ranks that there are
        batch       sequences per step, over all ranks
        """
        from fastpar.layouts.rules import check

        check(self, model, world_size=world_size, batch=batch)

    def __str__(self) -> str:
        return self.words


V_SCHEDULES = ("zbv", "v_half", "v_min", "dualpipev")  # that cut a model into two parts a rank, by construction


def parts_of(schedule: str, stages_per_rank: int) -> int:
    """Parts of the model per rank: two of V-shaped schedules, as many as asked for of all others.

    A rank of dualpipe holds two parts as well, but each part is on two ranks.
    """
    return 2 if schedule in V_SCHEDULES else stages_per_rank


_NESTED = {"zero": ZeroOptions, "pipeline": PipelineOptions, "context": ContextOptions, "tp_grid": GridOptions}


def _differences(value: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    default = type(value)()
    for each in dataclasses.fields(value):
        mine = getattr(value, each.name)
        if mine != getattr(default, each.name):
            found[each.name] = _differences(mine) if dataclasses.is_dataclass(mine) else _plain(mine)
    return found


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _from_plain(kind: Any, data: dict[str, Any], where: str) -> Any:
    known = [each.name for each in dataclasses.fields(kind)]
    for name in data:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3)
            hint = f"; did you mean {' or '.join(near)}" if near else ""
            raise ValueError(f"{where} has no {name!r}{hint}; it has {', '.join(known)}")
    values = {}
    for name, value in data.items():
        if kind is Layout and name in _NESTED:
            if not isinstance(value, dict):
                raise TypeError(f"{where}.{name} must be a JSON object, got {type(value).__name__}")
            value = _from_plain(_NESTED[name], value, f"{where}.{name}")
        values[name] = tuple(value) if isinstance(value, list) else value
    return kind(**values)
