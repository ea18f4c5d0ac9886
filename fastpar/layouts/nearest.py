"""The nearest legal layout: the fewest changes of one prime factor, or of one option, that break no rule."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import replace

from fastpar.layouts.layout import DENSE_DIMS, GridOptions, Layout, PipelineOptions
from fastpar.layouts.rules import broken_rules
from fastpar.layouts.shape import ModelShape

MAX_LAYOUTS = 4000  # that are looked at
_MOST_FACTORED = 1 << 24  # a size above this is no number of ranks


def nearest_legal(
    layout: Layout, model: ModelShape | None = None, *, world_size: int | None = None, batch: int | None = None
) -> Layout | None:
    """The legal layout with the fewest changes; None if none of the nearest `MAX_LAYOUTS` is legal.

    Sizes change by moving a prime factor from one dim to another, so that the number of ranks stays (unless it is
    wrong); options by one step towards their defaults. Ties go to what is tried first, so that the answer is always
    the same.
    """
    waiting = [(0, 0, layout)]
    seen = {layout}
    count = 0
    while waiting and count < MAX_LAYOUTS:
        distance, _, here = heapq.heappop(waiting)
        if not broken_rules(here, model, world_size=world_size, batch=batch):
            return here
        for other in _neighbours(here, world_size):
            if other not in seen:
                seen.add(other)
                count += 1
                heapq.heappush(waiting, (distance + 1, count, other))
    return None


def _neighbours(layout: Layout, world_size: int | None) -> Iterator[Layout]:
    yield from _options(layout)
    if world_size is not None and layout.world_size != world_size:
        yield from _resized(layout, world_size)
    for ep in ("ep", "etp"):
        for prime in _primes(getattr(layout, ep)):
            yield replace(layout, **{ep: getattr(layout, ep) // prime})
    for source in DENSE_DIMS:
        for prime in _primes(getattr(layout, source)):
            for target in ("dp_shard", "tp", "pp", "dp_replicate"):
                if target != source:
                    moved = {source: getattr(layout, source) // prime, target: getattr(layout, target) * prime}
                    yield _fitted(replace(layout, **moved))


def _fitted(layout: Layout) -> Layout:
    """Without the pipeline's options where there is no pipeline left."""
    return replace(layout, pipeline=PipelineOptions(), recompute=_one(layout)) if layout.pp == 1 else layout


def _one(layout: Layout) -> str:
    return layout.recompute if isinstance(layout.recompute, str) else layout.recompute[0]


def _options(layout: Layout) -> Iterator[Layout]:
    pipeline, zero = layout.pipeline, layout.zero
    if layout.sequence_parallel:
        yield replace(layout, sequence_parallel=False)
    if layout.tp_grid != GridOptions():
        yield replace(layout, tp_grid=GridOptions())
    if zero.stage:
        yield replace(layout, zero=replace(zero, stage=zero.stage - 1))
    if zero.offload != "none":
        yield replace(layout, zero=replace(zero, offload=zero.offload.replace("+parameters", "")))
        yield replace(layout, zero=replace(zero, offload="none"))
    default = PipelineOptions()
    if layout.pp > 1 and pipeline.stages_per_rank == 1:
        yield replace(layout, pipeline=replace(pipeline, stages_per_rank=2))
    for name in ("schedule", "stages_per_rank", "shard_head", "cut"):
        if getattr(pipeline, name) != getattr(default, name):
            yield replace(layout, pipeline=replace(pipeline, **{name: getattr(default, name)}))
    if layout.pp == 1 and pipeline != default:
        yield replace(layout, pipeline=default)
    if layout.pp > 1:
        least = 2 * layout.pp
        for count in (least, pipeline.microbatches // 2, pipeline.microbatches - 1):
            if 1 <= count != pipeline.microbatches:
                yield replace(layout, pipeline=replace(pipeline, microbatches=count))
    for name, default_word in (("method", "auto"), ("order", "zigzag")):
        if getattr(layout.context, name) != default_word:
            yield replace(layout, context=replace(layout.context, **{name: default_word}))
    if not isinstance(layout.recompute, str):
        yield replace(layout, recompute=layout.recompute[0])
    for prime in _primes(layout.accumulate):
        yield replace(layout, accumulate=layout.accumulate // prime)


def _resized(layout: Layout, world_size: int) -> Iterator[Layout]:
    """dp_shard takes what the other dims leave; where they leave nothing whole, a dim loses a factor."""
    others = layout.world_size // layout.dp_shard
    if world_size % others == 0:
        yield replace(layout, dp_shard=world_size // others)
    for dim in DENSE_DIMS:
        for prime in _primes(getattr(layout, dim)):
            yield _fitted(replace(layout, **{dim: getattr(layout, dim) // prime}))


def _primes(number: int) -> list[int]:
    if number > _MOST_FACTORED:
        return []  # it would take for ever
    found, factor = [], 2
    while factor * factor <= number:
        if number % factor == 0:
            found.append(factor)
            while number % factor == 0:
                number //= factor
        factor += 1
    return [*found, number] if number > 1 else found
