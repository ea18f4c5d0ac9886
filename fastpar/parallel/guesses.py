"""Guesses at how a block of no declared plan could be split: which of its linears by columns, and in which layout.

A guess may be cheap, since a trial decides (`parallel/trial`). All come from the order in which the block calls its
linears, from their sizes, and from the numbers of heads that it says.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import cast

from torch import nn

from fastpar.parallel.heads import KEY_COUNTS, QUERY_COUNTS, said
from fastpar.parallel.styles import ColwiseStyle, RowwiseStyle, Style
from fastpar.parallel.styles.linear import is_rowwise
from fastpar.parallel.trial import RecordedCall, is_linear


def linear_features(linear: nn.Module) -> tuple[int, int]:
    """(in, out) of a linear."""
    weight = linear._parameters.get("weight")
    if weight is None:  # one that is computed, at each reading again (spectral norm counts them)
        return cast(int, linear.in_features), cast(int, linear.out_features)
    return (weight.shape[1], weight.shape[0]) if isinstance(linear, nn.Linear) else (weight.shape[0], weight.shape[1])


def guessed_linears(module: nn.Module, call: RecordedCall) -> Iterator[dict[str, Style]]:
    """Column- and row-parallel linears by how the block calls them: the last gives the block's output, others its
    heads or features, some of them through a smaller one (latent attention)."""
    if len(call.order) < 2 or call.order[-1] in call.reads:
        return
    modules = dict(module.named_modules())
    last, reads = call.order[-1], call.reads
    between = [name for name in call.order[:-1] if name not in reads]
    inner = linear_features(modules[last])[0]
    subsets = [tuple(reads)] if not between else []
    if between and len(reads) <= 3:
        subsets = [c for n in range(len(reads) + 1) for c in itertools.combinations(reads, n)]
    for subset in subsets:
        columns = [*subset, *between]
        if not columns:
            continue
        choices = [_fused_layouts(module, linear_features(modules[name])[1], inner) for name in columns]
        for choice in itertools.product(*choices):
            yield {**dict(zip(columns, choice, strict=True)), last: RowwiseStyle()}


def _fused_layouts(module: nn.Module, features: int, inner: int) -> list[ColwiseStyle]:
    """Layouts that the output features of a linear may have, where the row-parallel one takes `inner` features."""
    heads, kv_heads = said(module, QUERY_COUNTS), said(module, KEY_COUNTS)
    if not heads or inner % heads:
        plain = [ColwiseStyle()]
        return plain if features != 2 * inner else [ColwiseStyle(sections=2), ColwiseStyle(unit=2), *plain]
    width = inner // heads
    kv_heads = kv_heads or heads
    sections = (heads * width, kv_heads * width, kv_heads * width)
    found: list[ColwiseStyle] = []
    if features == sum(sections):
        found.append(ColwiseStyle(sections=sections, unit=width))
        found.append(ColwiseStyle(unit=features // kv_heads))
    if features == 3 * inner:
        found += [ColwiseStyle(sections=3, unit=width), ColwiseStyle(unit=3 * width)]
    if features == inner + 2 * width:
        found.append(ColwiseStyle(sections=(inner, width, width), unit=width))
    if features == 2 * inner:
        found += [ColwiseStyle(unit=2 * width), ColwiseStyle(sections=2, unit=width)]
    if features % heads == 0 and features not in (inner, kv_heads * width):
        found.append(ColwiseStyle(unit=features // heads))
    if features % width == 0:
        found.append(ColwiseStyle(unit=width))
    return list(dict.fromkeys(found)) or [ColwiseStyle()]


def local_attributes(module: nn.Module, styles: Mapping[str, Style]) -> Iterator[tuple[str, ...]]:
    """Attributes to be divided beside the well-known ones: none; those of the split width; and those of heads."""
    yield ()
    last = next(name for name, style in styles.items() if is_rowwise(style))
    inner = linear_features(module.get_submodule(last))[0]
    heads, kv_heads = said(module, QUERY_COUNTS), said(module, KEY_COUNTS)
    known = (*QUERY_COUNTS, *KEY_COUNTS, "num_key_value_groups", "layer_idx")
    own = {k: v for k, v in vars(module).items() if type(v) is int and k not in known}
    by_width = tuple(name for name, value in own.items() if value == inner)
    by_heads = tuple(name for name, value in own.items() if value in (heads, kv_heads) and value > 1)
    seen: set[tuple[str, ...]] = {()}
    for names in (by_width, by_heads, by_width + by_heads):
        if names not in seen:
            seen.add(names)
            yield names


def sliced_parameters(module: nn.Module, styles: Mapping[str, Style], size: int) -> Iterator[tuple[str, ...]]:
    """Parameters with a row per head, beside those of linears: none of them, or all."""
    yield ()
    counts = {said(module, QUERY_COUNTS), said(module, KEY_COUNTS)} - {0}
    linears = tuple(f"{name}." for name, child in module.named_modules() if is_linear(child))
    names = tuple(
        name for name, p in module.named_parameters() if p.dim() and len(p) in counts and not name.startswith(linears)
    )
    if names:
        yield names
