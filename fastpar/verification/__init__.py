"""`fastpar.verify`: a model in a layout against the same model whole, and the module at which they part.

    report = fp.verify(build, fp.VerifyLayout(mesh, sequence_parallel=True), {"input_ids": ids, "labels": ids})
    print(report)
    report.raise_if_wrong()

| file | what it holds |
|---|---|
| `layout.py` | `VerifyLayout`: what the whole model is compared with, and the model in that layout |
| `inputs.py` | the batch, its parts, the loss; noise on parameters; random numbers |
| `trace.py` | what goes into and comes out of every module, and the gradients of both |
| `pieces.py` | which part of a parameter a rank holds |
| `reference.py` | the whole model, in its dtype and in float64 |
| `words.py` | layouts in words |
| `alignment.py`, `grid_alignment.py` | which part of a module's whole output a rank's output is; on a grid |
| `judge.py` | comparison, against the rounding that the reference itself has |
| `culprit.py` | from what differs to the module whose code is wrong |
| `report.py` | findings, and the table |
| `run.py` | `verify` |
| `tiny.py`, `command.py` | tiny configurations of transformers' models by name; the `fastpar verify` command |
"""

from fastpar.verification.layout import VerifyLayout
from fastpar.verification.report import VerifyError, VerifyFinding, VerifyReport
from fastpar.verification.run import verify

__all__ = ["VerifyError", "VerifyFinding", "VerifyLayout", "VerifyReport", "verify"]
