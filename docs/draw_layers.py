"""Draws docs/layers.svg, the picture in docs/architecture.md:  python docs/draw_layers.py

Rows from the top down; a part may import from the rows below it only. tests/project/test_layering.py enforces it.
"""

from pathlib import Path

WIDTH, ROW, GAP, LEFT, BOX_GAP = 920, 46, 12, 190, 8

# (row title, [(box, exists)]); a planned box is dashed.
PYTHON = [
    ("commands", [("cli", True), ("doctor", True)]),
    ("proof, other libraries", [("verification", True), ("integrations", True)]),
    ("one layout, one call", [("assembly", True)]),
    ("whole models", [("parallel", True), ("checkpoint", False), ("planner", True)]),
    ("layouts as data", [("layouts", True)]),
    ("data parallelism", [("zero (stands on clip, precision)", True), ("ddp", True)]),
    ("folders of weights", [("pretrained", True)]),
    (
        "strategies (never import each other)",
        [
            ("tensor", True),
            ("pipeline", True),
            ("recompute", True),
            ("optim", True),
            ("clip, precision", True),
            ("expert", True),
            ("context", True),
        ],
    ),
    ("ops: check, choose, launch", [("ops", True)]),
    ("plain-PyTorch versions", [("reference", True)]),
    ("options, checks, formats", [("contracts", True)]),
    ("collectives, files", [("comm", True), ("storage", True)]),
    ("foundations", [("mesh", True), ("_ext (loads _C.so)", True), ("kernels (Triton)", True), ("arguments", True)]),
]
CPP = [
    ("schemas", [("registration.cpp", True)]),
    (
        "kernels (never include each other)",
        [("cross_entropy", True), ("dropout", True), ("optimizer", True), ("moe", True), ("attention", True)],
    ),
    ("shared memory", [("comm", True), ("runtime", True)]),
    ("checks, vector maths, dispatch", [("common", True)]),
]
TORCH = [("PyTorch", [("DeviceMesh, DTensor, torch.distributed", True), ("LibTorch stable ABI (2.11)", True)])]

BANDS = [
    ("fastpar/", PYTHON, "#dbeafe", "#1d4ed8"),
    ("csrc/", CPP, "#dcfce7", "#15803d"),
    ("", TORCH, "#f1f5f9", "#475569"),
]


def box(x: float, y: float, width: float, text: str, exists: bool, fill: str, line: str) -> str:
    style = f'fill="{fill}" stroke="{line}"' if exists else f'fill="#ffffff" stroke="{line}" stroke-dasharray="5 4"'
    middle, centre = y + ROW / 2, f'x="{x + width / 2:.0f}" text-anchor="middle"'
    name_y = middle + 5 if exists else middle
    name = f'<text {centre} y="{name_y:.0f}" font-size="14" font-family="monospace" fill="#0f172a">{text}</text>'
    note = "" if exists else f'<text {centre} y="{middle + 15:.0f}" font-size="11" fill="#64748b">planned</text>'
    return f'<rect x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{ROW}" rx="6" {style}/>{name}{note}'


def title(y: float, text: str) -> str:
    """A row's title, broken before its parenthesis so that it fits the left margin."""
    head, bracket, tail = text.partition("(")
    lines = [head.strip(), bracket + tail] if bracket else [text]
    x, first = LEFT - 14, y + ROW / 2 + (5 if len(lines) == 1 else -3)
    return "".join(
        f'<text x="{x}" y="{first + 16 * i:.0f}" text-anchor="end" font-size="12.5" fill="#334155">{line}</text>'
        for i, line in enumerate(lines)
    )


def draw() -> str:
    parts, y = [], 20.0
    for heading, rows, fill, line in BANDS:
        if heading:
            parts.append(
                f'<text x="{LEFT}" y="{y + 12:.0f}" font-size="14" font-weight="bold" fill="{line}">{heading}</text>'
            )
            y += 22
        for row_title, boxes in rows:
            width = (WIDTH - LEFT - 20 - BOX_GAP * (len(boxes) - 1)) / len(boxes)
            parts.append(title(y, row_title))
            for i, (text, exists) in enumerate(boxes):
                parts.append(box(LEFT + i * (width + BOX_GAP), y, width, text, exists, fill, line))
            y += ROW + GAP
        y += 10
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y:.0f}" font-family="sans-serif">'
    return "\n".join([head, f'<rect width="{WIDTH}" height="{y:.0f}" fill="#ffffff"/>', *parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("layers.svg").write_text(draw())
