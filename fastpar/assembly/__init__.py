"""One layout, one call: `fp.assemble`, and what it returns.

    trained = fp.assemble(model, "pp2 tp2 sp dp2 zero1 mb4", lambda params: torch.optim.AdamW(params, lr=3e-4))
    result = trained.step(batch)                        # loss, norm, tokens, skipped, seconds, mfu
    print(trained.explain())                            # who holds and sends what, and by which calls

It adds no engine: what it does can be done with the calls that `explain` prints.
"""

from fastpar.assembly.assembled import Assembled, StepResult, model_flops
from fastpar.assembly.report import LayoutReport

__all__ = ["Assembled", "LayoutReport", "StepResult", "model_flops"]
