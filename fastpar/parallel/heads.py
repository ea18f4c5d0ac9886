"""Attention heads on ranks, with any number of key/value heads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from fastpar.parallel.styles import BlockStyle, ColwiseStyle, HeadsStyle, Style
from fastpar.parallel.styles.linear import is_colwise
from fastpar.tensor.linear import linear_weights
from fastpar.tensor.parameter import RowMap

QUERY_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
KEY_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head")


@dataclass
class HeadSplit:
    """Rows of the column-parallel linears under one module, and its attributes that count heads, made local."""

    rows: dict[str, RowMap] = field(default_factory=dict)
    parameters: dict[str, RowMap] = field(default_factory=dict)  # other parameters inside that are split by head
    attributes: dict[str, int] = field(default_factory=dict)
    num_heads: int = 0  # query heads of the whole model; 0 where the module is no attention


def key_value_heads(num_heads: int, num_kv_heads: int, size: int) -> list[list[int]]:
    """Per rank, the key/value heads that its query heads read, when their number does not divide by the group.

    Query head h reads key/value head h * num_kv_heads // num_heads. If on every rank the distinct ones serve equally
    many query heads each, those are listed; otherwise one entry per query head, so that local attention has no groups.

        key_value_heads(12, 2, 4) == [[0], [0], [1], [1]]
        key_value_heads(12, 3, 2) == [[0, 0, 0, 0, 1, 1], [1, 1, 2, 2, 2, 2]]
    """
    local = num_heads // size
    per_query = [[h * num_kv_heads // num_heads for h in range(r * local, (r + 1) * local)] for r in range(size)]
    distinct = [sorted(set(heads)) for heads in per_query]
    even = all(len({heads.count(k) for k in kinds}) == 1 for heads, kinds in zip(per_query, distinct, strict=True))
    return distinct if even and len({len(kinds) for kinds in distinct}) == 1 else per_query


def _heads_map(heads: list[list[int]], num_heads: int, unit: int) -> RowMap:
    return RowMap(num_heads * unit, tuple(tuple((k * unit, (k + 1) * unit) for k in rank) for rank in heads))


class HeadsError(ValueError):
    """The number of attention heads does not divide by the group. `path` and `heads` say whose, and how many."""

    def __init__(self, path: str, heads: int, size: int):
        works = [d for d in range(1, heads + 1) if heads % d == 0]
        super().__init__(
            f"{path}: the number of attention heads ({heads}) must be divisible by the tensor-parallel size "
            f"({size}); sizes that work: {works}"
        )
        self.path, self.heads = path, heads


def split_heads(
    path: str,
    parent: nn.Module,
    linears: Mapping[str, tuple[nn.Module, ColwiseStyle]],
    size: int,
    *,
    parameters: Mapping[str, nn.Parameter] | None = None,
    local: Iterable[str] = (),
    inner: int = 1,
) -> HeadSplit:
    """Row maps for the column-parallel linears directly under `parent`.

    In an attention module (one with a `head_dim`, or styles with a `unit`) rows go by whole heads. How many query heads
    there are is what the module or its configuration says, if a linear has as many heads, else the most that a linear
    has; their number must divide by the group. A linear with several times as many (queries and gates, interleaved) or
    with one feature per head (a gate) goes by query heads too. Key/value heads that do not divide are shared: the
    weights stay whole and each rank computes the heads that its queries read.

    parameters   others inside the module that have a row per query or key/value head, by path
    inner        on a grid: features go over size / inner ranks, and the part of each over `inner` of them
    local        names of more attributes of the module that count heads or features, to be divided by the group
    """
    split = HeadSplit()
    sections: dict[str, list[int]] = {}
    units: dict[str, int] = {}
    for name, (module, style) in linears.items():
        weight, _, transposed = linear_weights(module)
        features = weight.shape[1 if transposed else 0]
        unit = style.unit or getattr(parent, "head_dim", None) or 1
        sizes = list(style.sections) if isinstance(style.sections, tuple) else _equal(name, features, style.sections)
        if len(sizes) == 1 and style.unit is None and unit > 1:
            unit = _unit_of(features, unit, said(parent, QUERY_COUNTS))
        if sum(sizes) != features or any(s % unit for s in sizes):
            raise ValueError(
                f"{name}: sections {sizes} must add up to its {features} output features, each a multiple of {unit}"
            )
        sections[name], units[name] = sizes, unit
    is_attention = any(unit > 1 for unit in units.values())
    queries = max((s // units[n] for n, sizes in sections.items() for s in sizes if units[n] > 1), default=0)
    if queries % size:
        raise HeadsError(path, queries, size)
    key_values = 0
    for name, sizes in sections.items():
        unit = units[name]
        maps = []
        for section in sizes:
            heads = section // unit
            if not is_attention or heads % size == 0:
                maps.append(RowMap.nested((section,), (size // inner, inner)))
                key_values = max(key_values, heads // size) if is_attention and heads < queries else key_values
            else:
                per_rank = key_value_heads(queries, heads, size)
                maps.append(_heads_map(per_rank, heads, unit))
                key_values = len(per_rank[0])
        split.rows[name] = maps[0] if len(maps) == 1 else RowMap.concat(maps)
    split.num_heads = queries
    if queries:
        split.attributes = _local_counts(parent, queries, queries // size, key_values or queries // size)
    split.attributes |= {name: _divided(path, parent, name, size) for name in local}
    for name, param in (parameters or {}).items():
        split.parameters[name] = _parameter_rows(name, len(param), queries, size)
    packed = [sizes for sizes in sections.values() if len(sizes) > 1]
    if packed and getattr(parent, "split_size", None) == packed[0][0]:
        split.attributes["split_size"] = packed[0][0] // size
    return split


def block_splits(
    module: nn.Module, styles: Mapping[str, Style], size: int, where: str, inner: int = 1
) -> dict[str, HeadSplit]:
    """The split of the linears of each module inside, by its path."""
    modules = dict(module.named_modules(remove_duplicate=False))
    parents: dict[str, dict[str, tuple[nn.Module, ColwiseStyle]]] = {}
    for path, style in styles.items():
        if isinstance(style, ColwiseStyle) and is_colwise(style):
            parents.setdefault(path.rpartition(".")[0], {})[path] = (modules[path], style)
    splits = {}
    for parent, linears in parents.items():
        own = styles.get(parent)
        prefix = f"{parent}." if parent else ""
        by_head = [p for p, s in styles.items() if isinstance(s, HeadsStyle) and p.startswith(prefix)]
        params = {path: module.get_parameter(path) for path in by_head}
        options: dict[str, Any] = {
            "inner": inner,
            "parameters": params,
            "local": own.local if isinstance(own, BlockStyle) else (),
        }
        splits[parent] = split_heads(f"{where}.{parent}".strip("."), modules[parent], linears, size, **options)
    return splits


def said(parent: nn.Module, names: Iterable[str]) -> int:
    """A count that a module has as an attribute, or its configuration; 0 where neither says it."""
    for holder in (vars(parent), getattr(getattr(parent, "config", None), "__dict__", {})):
        for name in names:
            if isinstance(holder.get(name), int):
                return int(holder[name])
    return 0


def _unit_of(features: int, unit: int, queries: int) -> int:
    """Features of one head of a linear: `unit`, unless it has several units, or a part of one, per query head."""
    if queries and features % queries == 0:
        per_head = features // queries
        if features % unit or (per_head > unit and per_head % unit == 0):
            return per_head
    return unit


def _divided(path: str, parent: nn.Module, name: str, size: int) -> int:
    value = getattr(parent, name, None)
    if not isinstance(value, int) or value % size:
        raise ValueError(f"{path}.{name} is {value!r}, which cannot be divided by the tensor-parallel size ({size})")
    return value // size


def _parameter_rows(name: str, rows: int, queries: int, size: int) -> RowMap:
    if rows % size == 0:
        return RowMap.chunk(rows, size)
    if not queries or queries % rows:
        raise ValueError(f"{name}: {rows} rows are neither one per query head ({queries}) nor one per key/value head")
    return _heads_map(key_value_heads(queries, rows, size), rows, 1)


def _equal(name: str, features: int, parts: int) -> list[int]:
    if features % parts:
        raise ValueError(f"{name}: {features} output features do not form {parts} equal sections")
    return [features // parts] * parts


def _local_counts(parent: nn.Module, queries: int, local: int, local_kv: int) -> dict[str, int]:
    counts: dict[str, int] = {}
    attributes: dict[str, Any] = vars(parent)
    for name in QUERY_COUNTS:
        if attributes.get(name) == queries:
            counts[name] = local
    for name in KEY_COUNTS:
        if name in attributes:
            counts[name] = local_kv
    if "num_key_value_groups" in attributes:
        counts["num_key_value_groups"] = local // local_kv
    return counts
