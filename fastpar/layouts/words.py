"""A layout as words: `pp2 tp2 sp dp2 zero3 ep2`.

| words | what |
|---|---|
| `pp2 tp2 cp2 ep2 etp2` | sizes of the mesh's dims |
| `dp2`, `replicas2` | dp_shard and dp_replicate |
| `grid1x2x2` | the tp ranks as a grid of x, y and z; `grid1x2x4:features/2` has another spread, and 2 replicas |
| `grid1x2x2:stream` | spread over features, and streamed in blocks |
| `sp` | sequence parallelism |
| `zero0` to `zero3` | the stage of ZeRO |
| `cpu`, `cpu+parameters`, `nvme:FOLDER`, `nvme+parameters:FOLDER` | offload |
| `zbv`, `interleaved_1f1b`, ... | the pipeline's schedule |
| `mb8`, `stages2`, `shard_head` | microbatches, stages per rank, the sharded head |
| `cut6/5*2` | layers of each part: 6, 5 and 5 |
| `ring`, `gather`, `ulysses`; `contiguous`, `striped`, `dealt` | attention over cp; the order of tokens |
| `selective`, `full` | recomputation; `recompute:full*2/none` has one for every pipeline rank |
| `acc4` | passes whose gradients are summed |

Words stand in any order, with spaces or commas between. Each may be said once. `dims=2` is `dims2`. A folder's own
spaces, commas and percent signs are written as in addresses: `nvme:/my%20disk`.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, unquote

from fastpar.layouts.layout import (
    METHODS,
    RECOMPUTE,
    SPREADS,
    TOKEN_ORDERS,
    ContextOptions,
    GridOptions,
    Layout,
    PipelineOptions,
    ZeroOptions,
)
from fastpar.pipeline.schedules.generators import schedule_names

_DIMS = {"pp": "pp", "tp": "tp", "replicas": "dp_replicate", "dp": "dp_shard", "cp": "cp", "ep": "ep", "etp": "etp"}
_COUNTS = {"mb": "microbatches", "stages": "stages_per_rank"}
_GRID = re.compile(rf"grid(\d+)x(\d+)x(\d+)(?::({'|'.join(SPREADS)}|stream))?(?:/(\d+))?")
_EXAMPLE = "as in 'pp2 tp2 sp dp2 zero1 zbv mb8'"


def to_words(layout: Layout) -> str:
    """The canonical words of a layout: what differs from the defaults, always in the same order."""
    pipeline, default = layout.pipeline, PipelineOptions()
    found = [f"{word}{getattr(layout, dim)}" for word, dim in _DIMS.items() if getattr(layout, dim) > 1]
    found += [grid_word(layout.tp_grid)] if layout.tp_grid != GridOptions() else []
    found += ["sp"] if layout.sequence_parallel else []
    found += [f"zero{layout.zero.stage}"] if layout.zero.stage else []
    offload = re.sub(r"[\s,%]", lambda one: quote(one[0]), layout.zero.offload)
    found += [offload] if offload != "none" else []
    found += [pipeline.schedule] if pipeline.schedule != default.schedule else []
    found += [f"{word}{getattr(pipeline, name)}" for word, name in _COUNTS.items() if getattr(pipeline, name) > 1]
    found += ["shard_head"] if pipeline.shard_head else []
    found += ["cut" + _runs(map(str, pipeline.cut))] if pipeline.cut is not None else []
    found += [layout.context.method] if layout.context.method != "auto" else []
    found += [layout.context.order] if layout.context.order != "zigzag" else []
    if isinstance(layout.recompute, tuple):
        found.append("recompute:" + _runs(layout.recompute))
    elif layout.recompute != "none":
        found.append(layout.recompute)
    found += [f"acc{layout.accumulate}"] if layout.accumulate > 1 else []
    return " ".join(found) or "one rank"


def grid_word(grid: Any) -> str:
    """The word of `GridOptions`, or of a `fp.GridSpec`."""
    spread = ":stream" if grid.stream else f":{grid.spread}" if grid.spread != "rows" else ""
    return f"grid{grid.x}x{grid.y}x{grid.z}{spread}" + (f"/{grid.replicas}" if grid.replicas > 1 else "")


def _runs(values: Iterable[str]) -> str:
    """Equal neighbours once, with their number: _runs("aab") == "a*2/b"."""
    runs = [(value, len(list(group))) for value, group in itertools.groupby(values)]
    return "/".join(value if count == 1 else f"{value}*{count}" for value, count in runs)


def _unfold(text: str) -> tuple[str, ...]:
    """The inverse of `_runs`."""
    found: list[str] = []
    for part in text.split("/"):
        value, star, count = part.partition("*")
        if star and not (count.isdecimal() and int(count) > 0):
            raise ValueError(f"{part!r}: a number of ranks or parts goes behind the *")
        found += [value] * (int(count) if star else 1)
    return tuple(found)


def from_words(text: str) -> Layout:
    """The layout that the words describe. Raises ValueError for words that there are not, with near misses."""
    if not isinstance(text, str):
        raise TypeError(f"text must be words {_EXAMPLE}, got {type(text).__name__}")
    if text.strip() == "one rank":
        return Layout()
    read = _Words(text)
    for word in re.split(r"[\s,]+", text.strip()):
        read.add(word)
    return Layout(
        **read.found["layout"],
        zero=ZeroOptions(**read.found["zero"]),
        pipeline=PipelineOptions(**read.found["pipeline"]),
        context=ContextOptions(**read.found["context"]),
    )


@dataclass
class _Words:
    """What has been read so far, by the dataclass that it belongs to."""

    text: str
    found: dict[str, dict[str, Any]] = field(
        default_factory=lambda: {"layout": {}, "zero": {}, "pipeline": {}, "context": {}}
    )

    def add(self, word: str) -> None:
        where, name, value = self._meaning(word)
        if name in self.found[where]:
            raise ValueError(f"layout {self.text!r}: {word!r} says a second time what {name} is")
        self.found[where][name] = value

    def _meaning(self, word: str) -> tuple[str, str, Any]:
        if word in schedule_names():
            return "pipeline", "schedule", word
        numbered = re.fullmatch(r"([a-z]+)=?(\d+)", word)
        if numbered:
            stem, number = numbered[1], int(numbered[2])
            if stem in _DIMS:
                return "layout", _DIMS[stem], number
            if stem in _COUNTS:
                return "pipeline", _COUNTS[stem], number
            if stem == "acc":
                return "layout", "accumulate", number
            if stem == "zero":
                return "zero", "stage", number
        if word in ("sp", "shard_head"):
            return ("layout", "sequence_parallel", True) if word == "sp" else ("pipeline", "shard_head", True)
        grid = _GRID.fullmatch(word)
        if grid:
            x, y, z, replicas = (int(each or 1) for each in grid.group(1, 2, 3, 5))
            stream = grid[4] == "stream"
            spread = "features" if stream else grid[4] or "rows"
            return "layout", "tp_grid", GridOptions(x, y, z, spread, replicas, stream)
        if word in RECOMPUTE or word == "recompute":
            return "layout", "recompute", "full" if word == "recompute" else word
        if word in METHODS or word in TOKEN_ORDERS:
            return "context", "method" if word in METHODS else "order", word
        if re.match(r"(cpu|nvme)([+:]|$)", word):
            return "zero", "offload", unquote(word)
        if word.startswith("recompute:"):
            return "layout", "recompute", _unfold(word.removeprefix("recompute:"))
        if re.fullmatch(r"cut\d+(\*\d+)?(/\d+(\*\d+)?)*", word):
            return "pipeline", "cut", tuple(map(int, _unfold(word.removeprefix("cut"))))
        raise ValueError(self._unknown(word))

    def _unknown(self, word: str) -> str:
        numbered = [f"{stem}N" for stem in (*_DIMS, *_COUNTS, "acc")]
        known = [*numbered, "gridXxYxZ", "sp", "zero0", "zero1", "zero2", "zero3", "shard_head", "selective", "full"]
        known += [*METHODS[1:], *TOKEN_ORDERS, *schedule_names()]
        near = difflib.get_close_matches(re.sub(r"=?\d+$", "N", word), known, n=3)
        hint = f"; did you mean {' or '.join(near)}" if near else ""
        return f"layout {self.text!r} has an unknown word {word!r}{hint}; words are {', '.join(known)}, {_EXAMPLE}"
