"""From what differs to the module whose code is to be looked at.

| first thing that differs | whose code ran since what agreed |
|---|---|
| the output of a module, whose input agrees | that module |
| the input of a module | the module that called it |
| the gradient of a module's input, that of its output agrees | that module |
| the gradient of a module's output | the innermost module around it whose own output has the right gradient |
| the gradient, or the update, of a parameter | the module that has it |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fastpar.verification.judge import Check
from fastpar.verification.report import VerifyFinding
from fastpar.verification.trace import GRAD_INPUT, GRAD_OUTPUT, INPUT, OUTPUT, StepTrace

_PLACES = {"loss": "(loss)", "gradient norm": "(gradient norm)"}


def findings_of(checks: Sequence[Check], traces: Sequence[StepTrace], styles: Mapping[str, str]) -> list[VerifyFinding]:
    """One finding for each comparison that differs, in their order.

    traces  of the whole model, by step     styles  by module
    """
    wrong = [check for check in checks if check.differs]
    found = []
    for check in wrong:
        trace = traces[min(check.step, len(traces) - 1)]
        of_step = {(c.module, c.kind) for c in wrong if c.step == check.step}
        module = _culprit(check, trace, of_step)
        found.append(
            VerifyFinding(
                kind=check.kind,
                module=module or "(model)",
                cls=trace.classes.get(module, ""),
                style=styles.get(module, ""),
                what=_words(check, wrong[0] is check),
                step=check.step,
                parameter=check.parameter,
                error=check.error,
                rounding=check.rounding,
                ranks=check.ranks,
                detail=check.detail,
            )
        )
    return found


def _culprit(check: Check, trace: StepTrace, wrong: set[tuple[str, str]]) -> str:
    if check.kind in _PLACES:
        return _PLACES[check.kind]
    if check.kind == INPUT:
        return trace.parents.get(check.module) or ""
    if check.kind != GRAD_OUTPUT:
        return check.module
    if not check.module:
        return "(loss)"
    around = trace.parents.get(check.module)
    while around is not None and (around, GRAD_OUTPUT) in wrong:
        around = trace.parents.get(around)
    return "(loss)" if around is None else around


def _words(check: Check, is_first: bool) -> str:
    name = check.module or "the model"
    text = {
        INPUT: f"input of {name}",
        OUTPUT: "output",
        GRAD_OUTPUT: f"gradient of the output of {name}",
        GRAD_INPUT: "gradient of its input",
        "gradient": f"gradient of {check.parameter}",
        "update": f"update of {check.parameter}",
    }.get(check.kind, check.kind)
    if check.detail:
        text += f" ({check.detail})"
    elif is_first and check.step and check.kind in (INPUT, OUTPUT):
        text += ", although all updates before agree: other weights than the updated ones?"
    return text
