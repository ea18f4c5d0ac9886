"""The report of `fp.verify`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from fastpar.verification.judge import Check

_SHOWN = 12


class VerifyError(AssertionError):
    """The model in its layout is not the whole model; the message is the report."""


@dataclass(frozen=True)
class VerifyFinding:
    """Something that is not as in the whole model.

    kind       "batch", "input", "output", "loss", "gradient of the output", "gradient of the input", "gradient" (of a
               parameter), "gradient norm", "update"; "refused" and "error", where the layout or a step raised
    module     whose code is to be looked at: the innermost module that got what it should and made something else of it
               "(loss)", "(batch)", "(gradient norm)", "(model)" where it is none
    cls, style its class, and what `fp.explain` calls it
    what       what differs, in words
    error, rounding    relative to the truth: what was found, and what the whole model in its own dtype has
    ranks      on which it differs
    """

    kind: str
    module: str
    cls: str
    style: str
    what: str
    step: int = 0
    parameter: str = ""
    error: float = 0.0
    rounding: float = 0.0
    ranks: tuple[int, ...] = ()
    detail: str = ""


@dataclass(frozen=True)
class VerifyReport:
    """The same on every rank.

    layout, world_size   what was compared with the whole model
    findings   what differs, in the order in which it came about: the first is the cause, or the first of several
    notes      what was not compared as it is: dropout that was switched off, for instance
    checks     every comparison, for `table(everything=True)`
    """

    layout: str
    world_size: int
    findings: tuple[VerifyFinding, ...] = ()
    notes: tuple[str, ...] = ()
    checks: tuple[Check, ...] = field(default=(), repr=False)

    @property
    def ok(self) -> bool:
        """Whether there are no findings."""
        return not self.findings

    @property
    def refused(self) -> bool:
        """True if the layout was refused, so that nothing ran."""
        return any(finding.kind == "refused" for finding in self.findings)

    @property
    def culprit(self) -> VerifyFinding | None:
        """The first finding."""
        return self.findings[0] if self.findings else None

    def raise_if_wrong(self) -> None:
        """VerifyError with the table, unless everything agrees."""
        if not self.ok:
            raise VerifyError(str(self))

    def __str__(self) -> str:
        return self.table()

    def table(self, *, everything: bool = False) -> str:
        """The findings; with `everything` also all comparisons."""
        compared = sum(check.status != "not compared" for check in self.checks)
        lines = [self._headline(compared)]
        if self.findings and self.findings[0].kind not in ("refused", "error"):
            lines += ["", *_table(_COLUMNS, [_row(finding) for finding in self.findings[:_SHOWN]])]
            if len(self.findings) > _SHOWN:
                lines.append(f"and {len(self.findings) - _SHOWN} more that come after")
        if self.notes:
            lines += ["", *(f"note: {note}" for note in self.notes)]
        if everything and self.checks:
            columns = ("step", "what", "module or parameter", "status", "error", "rounding", "ranks")
            lines += ["", *_table(columns, [_check_row(check) for check in self.checks])]
        return "\n".join(lines)

    def _headline(self, compared: int) -> str:
        where = f"{self.layout} on {self.world_size} rank{'s' if self.world_size > 1 else ''}"
        first = self.culprit
        if first is None:
            return f"{where}: equal to the whole model in {compared} comparisons"
        name = f"{first.module} ({first.cls})" if first.cls else first.module
        if first.kind == "refused":
            return f"{where}: refused. {first.what}"
        if first.kind == "error":
            return f"{where}: failed in step {first.step + 1}, in {name}: {first.what}"
        return f"{where}: differs from the whole model, first in {name}: {first.what}"

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "layout": self.layout,
            "world_size": self.world_size,
            "ok": self.ok,
            "refused": self.refused,
            "findings": [asdict(finding) for finding in self.findings],
            "notes": list(self.notes),
            "comparisons": sum(check.status != "not compared" for check in self.checks),
        }


_COLUMNS = ("", "module", "class", "style", "what differs", "error", "rounding", "ranks")


def _row(finding: VerifyFinding) -> tuple[str, ...]:
    what = f"step {finding.step + 1}: {finding.what}"
    numbers = (f"{finding.error:.1e}", f"{finding.rounding:.1e}") if finding.error else ("", "")
    ranks = ",".join(map(str, finding.ranks))
    return ("", finding.module, finding.cls, finding.style, what, *numbers, ranks)


def _check_row(check: Check) -> tuple[str, ...]:
    status = f"{check.status}: {check.detail}" if check.status == "not compared" else check.status
    numbers = (f"{check.error:.1e}", f"{check.rounding:.1e}")
    ranks = ",".join(map(str, check.ranks))
    return (str(check.step + 1), check.kind, check.parameter or check.module or "(model)", status, *numbers, ranks)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(column), *(len(row[i]) for row in rows)) for i, column in enumerate(columns)]
    lines = [columns, ["-" * width for width in widths], *rows]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
