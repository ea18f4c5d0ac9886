"""Layouts in words, as `fp.Layout` reads them, for `fp.verify`."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from fastpar.assembly.api import grid_of
from fastpar.context import Context
from fastpar.layouts import ContextOptions, Layout
from fastpar.layouts.layout import DENSE_DIMS
from fastpar.mesh import init_mesh
from fastpar.recompute import Full, Policy, Selective
from fastpar.verification.layout import VerifyLayout

_POLICIES: dict[Any, type[Policy]] = {"selective": Selective, "full": Full}


@dataclass(frozen=True)
class LayoutText:
    """A layout in words, before there are ranks: what `fp.init_mesh` takes, and options of `VerifyLayout`."""

    sizes: dict[str, Any]
    options: dict[str, Any]
    asked: Layout

    @property
    def world_size(self) -> int:
        return self.asked.world_size

    @property
    def parts(self) -> int:
        """The parts of the batch: data-parallel ranks times microbatches."""
        return self.asked.dp * (self.asked.pipeline.microbatches if self.asked.pp > 1 else 1)

    def layout(self, device: str | None = None) -> VerifyLayout:
        """On a mesh of its own, which is the caller's to close. Collective."""
        return VerifyLayout(init_mesh(**self.sizes, device=device), **self.options)


def parse_layout(text: str) -> LayoutText:
    """The words of `fp.Layout`: `tp2,sp`, `tp2 pp2 zero2`, `ep2`, `dp2,zero3,recompute`, `tp4 grid1x2x2`.

    Two words say more than there: experts are spread over dp and tp, and where these have fewer ranks than ep * etp, dp
    grows; a pipeline has pp microbatches where mb does not say how many. Not among them are what the report could not
    compare: accumulation, offload, the sharded head, recomputation that differs by rank.

    Raises ValueError with the words that there are, and for layouts that no rule allows, with the nearest one.
    """
    asked = Layout.parse(text)
    experts, inner = asked.ep * asked.etp, asked.dp_shard * asked.cp * asked.tp
    if not re.search(r"\bdp=?\d", text) and experts % inner == 0 and experts > inner:
        asked = replace(asked, dp_shard=experts // inner)
    pipeline = asked.pipeline
    if asked.pp > 1 and not re.search(r"\bmb=?\d", text):
        asked = replace(asked, pipeline=replace(pipeline, microbatches=asked.pp))
    left_out = {
        f"acc{asked.accumulate}": asked.accumulate > 1,
        asked.zero.offload: asked.zero.offload != "none",
        "shard_head": pipeline.shard_head,
        "recompute by rank": not isinstance(asked.recompute, str),
    }
    found = [word for word, is_said in left_out.items() if is_said]
    if found:
        raise ValueError(f"layout {text!r}: verify does not compare {' and '.join(found)}; leave it out")
    asked.check()
    return LayoutText(_sizes(asked), _options(asked, has_stage="zero" in text), asked)


def _sizes(asked: Layout) -> dict[str, Any]:
    sizes: dict[str, Any] = {dim: getattr(asked, dim) for dim in (*DENSE_DIMS, "ep", "etp")}
    sizes = {dim: size for dim, size in sizes.items() if size > 1}
    grid = grid_of(asked)
    return sizes if grid is None else {**sizes, "tp_grid": grid}


def _options(asked: Layout, *, has_stage: bool) -> dict[str, Any]:
    """The options of `VerifyLayout` that the layout gives."""
    options: dict[str, Any] = {"sequence_parallel": True} if asked.sequence_parallel else {}
    more: dict[str, Any] = {}
    if has_stage:
        options["zero_stage"] = asked.zero.stage
    if asked.recompute != "none":
        options["recompute"] = _POLICIES[asked.recompute]()
    if asked.context != ContextOptions():
        more["context"] = Context(asked.context.method, asked.context.order)
    if asked.pp > 1:
        options |= {"schedule": asked.pipeline.schedule, "num_microbatches": asked.pipeline.microbatches}
        if asked.pipeline.stages_per_rank > 1:
            more["schedule_options"] = {"stages_per_rank": asked.pipeline.stages_per_rank}
        if asked.pipeline.cut is not None:
            more["layout"] = list(asked.pipeline.cut)
    return {**options, "options": more} if more else options
