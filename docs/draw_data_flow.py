"""Draws the figures of data flow in docs/internals/:  python docs/draw_data_flow.py

    flow_linear.svg   forward and backward of a column- and a row-parallel linear with sequence parallelism
    flow_moe.svg      a token to its experts and back, forward and backward
    flow_zero3.svg    a step of ZeRO stage 3: what is gathered, computed, reduced and whole when

Time runs to the right. What a lane holds above another's box happens at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

WIDTH, LANE, BOX, LEFT = 920, 58, 36, 150
COMPUTE, TRAVEL, MEMORY = ("#dbeafe", "#1d4ed8"), ("#fef3c7", "#b45309"), ("#f1f5f9", "#64748b")
INK, DIM = "#0f172a", "#64748b"


@dataclass
class Figure:
    """Boxes and arrows; `unit` is the width of a unit of time."""

    unit: float
    parts: list[str] = field(default_factory=list)
    y: float = 14.0

    def heading(self, text: str) -> None:
        self.parts.append(f'<text x="14" y="{self.y + 14:.0f}" font-size="14" font-weight="bold">{text}</text>')
        self.y += 26

    def lane(self, title: str, boxes: list[tuple[float, float, str]], colours: tuple[str, str]) -> float:
        """A row of boxes (begin, end, text), and the y of its middle."""
        middle = self.y + BOX / 2
        self.words(LEFT - 12, middle + 4, title, anchor="end")
        for begin, end, text in boxes:
            self.box(self.at(begin), self.at(end) - 4, text, colours)
        self.y += LANE
        return middle

    def words(self, x: float, y: float, text: str, *, anchor: str = "middle", more: str = 'fill="#334155"') -> None:
        self.parts.append(f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" font-size="12.5" {more}>{text}</text>')

    def at(self, time: float) -> float:
        return LEFT + time * self.unit

    def box(self, left: float, right: float, text: str, colours: tuple[str, str], size: float = 12.5) -> None:
        fill, line = colours
        middle = (left + right) / 2
        self.parts.append(
            f'<rect x="{left:.0f}" y="{self.y:.0f}" width="{right - left:.0f}" height="{BOX}" rx="5" fill="{fill}" '
            f'stroke="{line}"/>'
        )
        lines = text.split("\n")
        for i, each in enumerate(lines):
            y = self.y + BOX / 2 + 4.5 + 14 * (i - (len(lines) - 1) / 2)
            self.parts.append(
                f'<text x="{middle:.0f}" y="{y:.0f}" text-anchor="middle" font-size="{size}" fill="{INK}">{each}</text>'
            )

    def arrow(self, x1: float, y1: float, x2: float, y2: float, text: str = "") -> None:
        self.parts.append(
            f'<line x1="{x1:.0f}" y1="{y1:.0f}" x2="{x2:.0f}" y2="{y2:.0f}" stroke="{DIM}" stroke-width="1.3" '
            'marker-end="url(#tip)"/>'
        )
        if text:
            x, y = (x1 + x2) / 2 + 5, (y1 + y2) / 2 + 4
            self.parts.append(f'<text x="{x:.0f}" y="{y:.0f}" font-size="11.5" fill="{DIM}">{text}</text>')

    def note(self, text: str, x: float = LEFT) -> None:
        self.parts.append(f'<text x="{x:.0f}" y="{self.y + 8:.0f}" font-size="12" fill="{DIM}">{text}</text>')
        self.y += 20

    def svg(self) -> str:
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.y:.0f}" font-family="sans-serif">'
        tip = (
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            f'<path d="M0 0L8 4L0 8z" fill="{DIM}"/></marker></defs>'
        )
        ground = f'<rect width="{WIDTH}" height="{self.y:.0f}" fill="#ffffff"/>'
        return "\n".join([head, tip, ground, *self.parts, "</svg>"]) + "\n"


def linear() -> str:
    """GEMMs in one lane, collectives in the other; an arrow is what one needs of the other."""
    figure = Figure(unit=74)
    half = BOX / 2

    def pair(
        title: str, gemms: list[tuple[float, float, str]], travels: list[tuple[float, float, str]]
    ) -> tuple[float, float]:
        figure.heading(title)
        above = figure.lane("collectives", travels, TRAVEL)
        below = figure.lane("GEMMs", gemms, COMPUTE)
        return above + half, below - half

    a, b = pair(
        "all_gather_linear: the columns of a weight, at the head of a block",
        [(2, 4, "out = x @ w\u1d40"), (5.5, 7.5, "dx = dout @ w"), (7.5, 9.5, "dw = dout\u1d40 @ x")],
        [(0, 2, "all-gather x"), (5.5, 7.5, "all-gather x again"), (7.5, 9.5, "reduce-scatter dx")],
    )
    figure.arrow(figure.at(1.9), a, figure.at(2.2), b)
    figure.arrow(figure.at(7.3), a, figure.at(7.8), b)
    figure.arrow(figure.at(7.35), b, figure.at(7.65), a)
    a, b = pair(
        "linear_reduce_scatter: the rows of a weight, at its end",
        [(0, 2, "y = x @ w\u1d40"), (7.3, 8.7, "dx = dy @ w"), (8.7, 10.2, "dw = dy\u1d40 @ x")],
        [(2, 4, "reduce-scatter y"), (5.5, 7.3, "all-gather dy")],
    )
    figure.arrow(figure.at(1.9), b, figure.at(2.2), a)
    figure.arrow(figure.at(7.1), a, figure.at(7.5), b, "one gather serves both")
    figure.note(
        "Left forward, right backward. In chunks of rows, the collective of one runs beside the GEMM of the next."
    )
    return figure.svg()


def moe() -> str:
    """Two ranks with two experts each, from left to right and back."""
    figure = Figure(unit=1)
    columns = (150, 330, 520, 710)
    figure.heading("moe_mlp on two ranks: forward to the right, backward to the left")
    for x, text in zip((150, 330, 520, 710), ("tokens", "rows by expert", "experts", "tokens"), strict=True):
        figure.words(x + 65, figure.y + 6, text)
    figure.y += 18
    tops = []
    for rank in range(2):
        tops.append(figure.y)
        figure.words(LEFT - 30, figure.y + 22, f"rank {rank}", anchor="end")
        first, second = 2 * rank, 2 * rank + 1
        texts = (
            "x [T, H]\nids, weights [T, K]",
            f"of expert {first}\nof expert {second}",
            "GEMM, activation,\nGEMM",
            "sum of weight * y\nover K choices",
        )
        for x, text, colours in zip(columns, texts, (MEMORY, MEMORY, COMPUTE, COMPUTE), strict=True):
            figure.box(x, x + 130, text, colours, 11.5)
        figure.y += 92
    middles = [top + BOX / 2 for top in tops]
    for i, start in enumerate(middles):
        figure.arrow(460, start, 520, start)
        for j, end in enumerate(middles):
            offset = 6 if i == j else 0
            figure.arrow(280, start - offset, 330, end - offset)
            figure.arrow(650, start - offset, 710, end - offset)
    for x, words in ((305, "dispatch"), (680, "combine")):
        figure.words(x, middles[1] + 42, words, more='font-weight="bold" fill="#b45309"')
    figure.y = middles[1] + 62
    figure.lane(
        "backward",
        [
            (0, 134, "combine:\ndx [T, H]"),
            (180, 314, "dx rows; dW1, dW2"),
            (370, 504, "da = dout @ W2\ndw = &lt;da, a&gt;"),
            (560, 694, "redispatch\nx and dout"),
        ],
        TRAVEL,
    )
    middle = figure.y - LANE + BOX / 2
    for x1, x2 in ((710, 650), (520, 460), (330, 280)):
        figure.arrow(x1, middle, x2, middle)
    figure.note("One all-gather before any row moves: counts, shapes, and whether arguments are wrong. Its handle says")
    figure.note("where every row lies, in all four exchanges. Saved: x [T, H] and the output of the first GEMM.")
    return figure.svg()


def zero3() -> str:
    """Three units; the boxes of the last lanes are parameters that are whole."""
    figure = Figure(unit=63)
    figure.heading("A step of ZeRO stage 3, a model of three units")
    spans = [(0, 1), (1, 2), (2, 3), (4, 3), (5, 2), (6, 1)]
    gathers = [(begin, begin + 1, f"unit {unit}") for begin, unit in spans]
    figure.lane("all-gather", gathers, TRAVEL)
    compute = [(1, 2, "F 1"), (2, 3, "F 2"), (3, 4, "F 3"), (5, 6, "B 3"), (6, 7, "B 2"), (7, 8, "B 1")]
    figure.lane("compute", compute, COMPUTE)
    reduces = [(6, 7, "unit 3"), (7, 8, "unit 2"), (8, 9, "unit 1")]
    figure.lane("reduce-scatter", reduces, TRAVEL)
    phases = [(9, 9.9, "agree\nnorm"), (9.9, 10.9, "clip"), (10.9, 12, "update\nrows")]
    figure.lane("optimizer.step()", phases, COMPUTE)
    for number, spans in ((1, [(0, 2), (6, 8)]), (2, [(1, 3), (5, 7)]), (3, [(2, 4), (4, 6)])):
        figure.lane(f"unit {number} whole", [(a, b, "") for a, b in spans], MEMORY)
        figure.y -= LANE - BOX - 6
    figure.y += 14
    figure.note("F forward, B backward. A unit is whole while it is gathered and used, at most two at a time.")
    figure.note("Rows are updated where they lie; the next forward gathers them.")
    return figure.svg()


if __name__ == "__main__":
    folder = Path(__file__).with_name("internals")
    for name, drawn in (("linear", linear()), ("moe", moe()), ("zero3", zero3())):
        (folder / f"flow_{name}.svg").write_text(drawn)
