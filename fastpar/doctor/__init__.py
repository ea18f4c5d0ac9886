"""``fastpar doctor``: what is installed, whether it fits together, and whether training steps come out right."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from fastpar.doctor import installation, probes
from fastpar.doctor.installation import Finding as Finding

_SYMBOLS = {"ok": "ok", "info": "--", "warning": "!!", "problem": "XX"}


def examine() -> list[Finding]:
    """All findings, in the order in which they are printed."""
    found = installation.findings()
    if any(finding.topic == "extension" and finding.status == "problem" for finding in found):
        return [*found, Finding("probes", "info", "not run: the extension does not load")]
    return [*found, *probes.findings()]


def healthy(findings: Sequence[Finding]) -> bool:
    return all(finding.status != "problem" for finding in findings)


def report(findings: Sequence[Finding]) -> str:
    """The findings as text, a verdict last."""
    width = max(len(finding.topic) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{_SYMBOLS[finding.status]}  {finding.topic.ljust(width)}  {finding.text}")
        if finding.remedy:
            lines.append(f"    {'':{width}}  -> {finding.remedy}")
    problems = sum(finding.status == "problem" for finding in findings)
    lines.append("healthy" if not problems else f"{problems} problem{'s' if problems > 1 else ''}")
    return "\n".join(lines)


def main(*, as_json: bool = False) -> int:
    """Print the report; 0 when there is no problem, else 1."""
    findings = examine()
    if as_json:
        print(json.dumps({"healthy": healthy(findings), "findings": [asdict(f) for f in findings]}, indent=1))
    else:
        print(report(findings))
    return 0 if healthy(findings) else 1
