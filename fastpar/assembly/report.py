"""What `Assembled.explain` shows: a table of who holds and sends what, and a picture of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import torch
from torch import nn

from fastpar.comm import Communicator
from fastpar.layouts import Layout
from fastpar.mesh import DENSE_DIMS, Mesh
from fastpar.zero import Zero

KINDS = ("parameters", "gradients", "states")
_COLOURS = {"parameters": "#1d4ed8", "gradients": "#eab308", "states": "#15803d"}
_WIDTH, _BAR, _ROW = 220, 150, 104


@dataclass(frozen=True)
class RankReport:
    """One rank: its coordinate by dim, the bytes that it holds by kind between backward and the update (states: by the
    formula for Adam's), and how many parameter tensors it has a part of."""

    rank: int
    coordinate: dict[str, int]
    bytes: dict[str, int]
    parameters: int


@dataclass(frozen=True)
class LayoutReport:
    """Who holds and sends what: `print` shows a table, `svg` draws ranks, dims and memory.

    layout  the layout
    ranks   of all ranks, in their order
    sends   what travels over each dim of more than one rank
    calls   the calls of fastpar that made it, with their arguments
    """

    layout: Layout
    ranks: tuple[RankReport, ...]
    sends: tuple[tuple[str, int, str], ...]
    calls: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"layout {self.layout.words}: {len(self.ranks)} ranks", ""]
        dims = [dim for dim in DENSE_DIMS if getattr(self.layout, dim) > 1]
        head = ["rank", *dims, "tensors", *(f"{kind}, MB" for kind in KINDS)]
        rows = [
            [
                str(each.rank),
                *(str(each.coordinate[dim]) for dim in dims),
                f"{each.parameters:,}",
                *(f"{each.bytes[kind] / 1e6:.3f}" for kind in KINDS),
            ]
            for each in self.ranks
        ]
        lines += _table(head, rows)
        if self.sends:
            lines += ["", *_table(["dim", "ranks", "what travels"], [[d, str(n), what] for d, n, what in self.sends])]
        return "\n".join([*lines, "", "made by", *(f"  {call}" for call in self.calls)])

    def svg(self, path: str | Path | None = None) -> str:
        """The picture's text: a box a rank, one row of boxes for each pipeline stage and replica; written to `path` if
        one is given."""
        inner = self.layout.cp * self.layout.tp * self.layout.dp_shard
        columns = min(inner, 16)
        most = max(sum(each.bytes.values()) for each in self.ranks) or 1
        drawn = [
            _text(16, 26, f"{self.layout.words}: {len(self.ranks)} ranks, bytes between backward and the update", 15)
        ]
        for index, each in enumerate(self.ranks):
            drawn += _rank(each, 16 + index % columns * _WIDTH, 44 + index // columns * _ROW, most, self.layout)
        height = 44 + -(-len(self.ranks) // columns) * _ROW
        for place, (dim, size, what) in enumerate(self.sends):
            drawn.append(_text(16, height + 18 + 18 * place, f"{dim} ({size}): {what}", 12))
        x = 16
        height += 18 * len(self.sends) + 36
        for kind in KINDS:
            drawn += [_box(x, height - 10, 10, 10, _COLOURS[kind], kind), _text(x + 14, height, kind, 12)]
            x += 100
        wide = max(32 + columns * _WIDTH, 860)
        text = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{height + 16}" font-family="sans-serif">'
            f'<rect width="100%" height="100%" fill="white"/>{"".join(drawn)}</svg>\n'
        )
        if path is not None:
            Path(path).write_text(text)
        return text


def make_report(
    layout: Layout, mesh: Mesh, parts: Sequence[nn.Module], zero: Zero, calls: Sequence[str]
) -> LayoutReport:
    """The report of all ranks. Collective: an all-gather of 5 integers along each dim."""
    held = zero.expected_memory()
    own = [mesh_rank(mesh), *(int(held[kind]) for kind in KINDS), sum(1 for part in parts for _ in part.parameters())]
    rows = torch.tensor([own], dtype=torch.int64, device=mesh.device_type)
    for dim in reversed(DENSE_DIMS):  # the innermost first, so that rows come in the order of ranks
        if mesh.size(dim) > 1:
            rows = Communicator(mesh.group(dim)).all_gather(rows)
    found = []
    for rank, *sizes, parameters in rows.tolist():
        where, left = {}, rank
        for dim in reversed(DENSE_DIMS):
            left, where[dim] = divmod(left, mesh.size(dim))
        found.append(RankReport(rank, where, dict(zip(KINDS, sizes, strict=True)), parameters))
    return LayoutReport(layout, tuple(found), _sends(layout), tuple(calls))


def mesh_rank(mesh: Mesh) -> int:
    """This rank's number, by its coordinate."""
    number = 0
    for dim in DENSE_DIMS:
        number = number * mesh.size(dim) + mesh.rank(dim)
    return number


def _sends(layout: Layout) -> tuple[tuple[str, int, str], ...]:
    stage, passes = layout.zero.stage, layout.accumulate
    times = f", {passes} times a step" if passes > 1 else ""
    kept = layout.pp > 1
    zero = {
        0: "gradients summed, once a step",
        1: "gradients reduced to rows once a step; updated rows gathered",
        2: f"gradients reduced to rows after each pass{times}; updated rows gathered",
        3: (
            f"a stage's parameters gathered once a pass and kept over its microbatches, gradients to rows{times}"
            if kept
            else f"each layer's parameters gathered in forward and backward, gradients reduced to rows{times}"
        ),
    }[stage]
    tp = "residual stream gathered and reduced to shards" if layout.sequence_parallel else "activations summed"
    tp = f"{tp}: twice a layer forward, twice backward"
    if layout.tp_grid.ranks > 1:
        tp = f"tokens and weights gathered, outputs reduced to shards, on the grid {layout.tp_grid}"
    cp = f"keys and values ({layout.context.method}); gradients summed"
    pp = f"activations and their gradients, {layout.pipeline.microbatches} microbatches by {layout.pipeline.schedule}"
    rows = [
        ("pp", layout.pp, pp),
        ("dp_replicate", layout.dp_replicate, "gradients (of a shard, where dp_shard has some) summed"),
        ("dp_shard", layout.dp_shard, zero),
        ("cp", layout.cp, cp),
        ("tp", layout.tp, tp),
        ("ep", layout.ep, "each token's row to its experts and back, forward and backward"),
        ("etp", layout.etp, "tokens gathered and outputs reduced, within each expert"),
    ]
    return tuple(row for row in rows if row[1] > 1)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = [head, ["-" * width for width in widths], *rows]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def _rank(each: RankReport, x: float, y: float, most: int, layout: Layout) -> list[str]:
    dims = [dim for dim in DENSE_DIMS if getattr(layout, dim) > 1]
    where = " ".join(f"{dim}{each.coordinate[dim]}" for dim in dims)
    drawn = [
        f'<rect x="{x}" y="{y}" width="{_WIDTH - 12}" height="{_ROW - 14}" fill="none" stroke="#94a3b8" rx="4"/>',
        _text(x + 8, y + 18, f"rank {each.rank}", 13),
        _text(x + 8, y + 36, where, 11),
        _text(x + 8, y + 52, f"{sum(each.bytes.values()) / 1e6:.2f} MB", 11),
    ]
    at = x + 8
    for kind in KINDS:
        wide = _BAR * each.bytes[kind] / most
        drawn.append(_box(at, y + 60, wide, 18, _COLOURS[kind], f"{kind} {each.bytes[kind] / 1e6:.3f} MB"))
        at += wide
    return drawn


def _box(x: float, y: float, width: float, height: float, colour: str, what: str) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect {place} fill="{colour}"><title>{escape(what)}</title></rect>'


def _text(x: float, y: float, text: str, size: int) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="#0f172a">{escape(text)}</text>'
