"""Layouts: which part of a pipeline holds which units of a model, as text and as data.

    "E,t*3|t*3|t*2,H"       three parts: the embedding and three layers; three layers; two layers and the head

`E` is the embedding with what belongs to it (position embedding, dropout), `t` a layer, `N` the final norm, `H` the
head; `t*3` is three layers, `|` separates parts. Without an `N` the final norm goes with the head. A model without
embedding or head (a list of modules, an `nn.Sequential`) consists of `t` only. Parts may be empty, but for the first
one, which takes the ids, and the last one, which returns the output.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_ORDER = "EtNH"
_MEANING = {"E": "embedding", "t": "layer", "N": "final norm", "H": "head"}


@dataclass(frozen=True)
class StagePlacement:
    """Units of each part in the order in which they run: "E", "t", "N", "H"."""

    parts: tuple[tuple[str, ...], ...]

    @staticmethod
    def parse(
        text: str, *, num_layers: int, embedding: bool, norm: bool, head: bool, names: Sequence[str]
    ) -> StagePlacement:
        """The layout of a model with these units; ValueError shows the text with the place marked.

        `names` are the layers' names, for errors. Every unit that the model has must be placed exactly once.
        """
        have = {"E": embedding, "t": num_layers > 0, "N": norm, "H": head}
        parts: list[list[str]] = [[]]
        placed: list[str] = []
        for start, token in _tokens(text):
            if token == "|":
                parts.append([])
                continue
            kind, count = _item(text, start, token)
            if not have[kind]:
                raise _error(text, start, f"this model has no {_MEANING[kind]}")
            if placed and _ORDER.index(kind) < _ORDER.index(placed[-1]):
                raise _error(text, start, f"{kind} ({_MEANING[kind]}) cannot run after {placed[-1]}")
            if kind != "t" and (count > 1 or kind in placed):
                raise _error(text, start, f"{kind} ({_MEANING[kind]}) is placed a second time")
            if kind == "t" and placed.count("t") + count > num_layers:
                message = f"the model has {num_layers} layers, and this places {placed.count('t') + count}"
                raise _error(text, start, message)
            parts[-1] += [kind] * count
            placed += [kind] * count
        if placed.count("t") < num_layers:
            left = list(names)[placed.count("t") :]
            raise _error(text, len(text), f"{len(left)} of {num_layers} layers are in no part: {_shorten(left)}")
        for kind in "EH":
            if have[kind] and kind not in placed:
                raise _error(text, len(text), f"{kind} ({_MEANING[kind]}) is in no part")
        layout = StagePlacement(tuple(map(tuple, parts)))
        if not parts[0] or not parts[-1]:
            raise _error(text, 0 if not parts[0] else len(text), "the first and the last part cannot be empty")
        return layout.with_norm() if norm else layout

    @staticmethod
    def of_counts(counts: Sequence[int], *, num_layers: int, embedding: bool, norm: bool, head: bool) -> StagePlacement:
        """Layers per part; embedding and head at the ends. ValueError unless every layer is placed."""
        if any(isinstance(c, bool) or not isinstance(c, int) or c < 0 for c in counts) or not counts:
            raise ValueError(
                f"layout, the layers of each of the parts, must be numbers that are not negative, got {list(counts)}"
            )
        if sum(counts) != num_layers:
            raise ValueError(
                f"{list(counts)} places {sum(counts)} layers, but the model has {num_layers}: each must be in one part"
            )
        parts = [["t"] * count for count in counts]
        parts[0][:0] = ["E"] * embedding
        parts[-1] += ["N"] * norm + ["H"] * head
        if not parts[0] or not parts[-1]:
            raise ValueError(f"{list(counts)}: the first and the last part cannot be empty")
        return StagePlacement(tuple(map(tuple, parts)))

    def with_norm(self) -> StagePlacement:
        """The same with the final norm placed: before the head where no part names it, or after the last layer."""
        if any("N" in part for part in self.parts):
            return self
        if not any("H" in part for part in self.parts):
            return StagePlacement((*self.parts[:-1], (*self.parts[-1], "N")))
        return StagePlacement(
            tuple(tuple(x for u in part for x in (("N", "H") if u == "H" else (u,))) for part in self.parts)
        )

    @property
    def num_parts(self) -> int:
        return len(self.parts)

    def part_of(self, kind: str, index: int = 0) -> int:
        """The part that holds the unit: the embedding, norm, head, or layer number `index`."""
        seen = 0
        for part, units in enumerate(self.parts):
            here = units.count(kind)
            if index < seen + here:
                return part
            seen += here
        raise ValueError(f"the layout {self} has no {_MEANING[kind]} number {index}")

    def __str__(self) -> str:
        def text(units: tuple[str, ...]) -> str:
            layers = units.count("t")
            unique = [u for u in dict.fromkeys(units) if not (u == "N" and "H" in units)]
            return ",".join(f"t*{layers}" if u == "t" and layers > 1 else u for u in unique)

        return "|".join(map(text, self.parts))


def _tokens(text: str) -> list[tuple[int, str]]:
    """(position, item or "|") of every item; commas and spaces separate, and are left out."""
    return [(m.start(), m.group()) for m in re.finditer(r"\||[^|,\s*]+(?:\s*\*\s*[^|,\s]*)?", text)]


def _item(text: str, start: int, token: str) -> tuple[str, int]:
    match = re.fullmatch(r"([EtNH])\s*(?:\*\s*(\d+))?", token.strip())
    if match is None:
        known = ", ".join(f"{kind} ({meaning})" for kind, meaning in _MEANING.items())
        raise _error(text, start, f"{token.strip()!r} is none of {known}, or one of them with a number, such as t*3")
    count = 1 if match[2] is None else int(match[2])
    if count == 0:
        raise _error(text, start, f"{token.strip()!r} places nothing; leave it out")
    return match[1], count


def _error(text: str, position: int, message: str) -> ValueError:
    return ValueError(f"layout: {message}\n    {text}\n    {' ' * position}^")


def _shorten(names: Sequence[str]) -> str:
    shown = list(names) if len(names) <= 8 else [*names[:6], "...", names[-1]]
    return ", ".join(shown)
