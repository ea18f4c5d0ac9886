"""Trying a split before it is made: one module on several virtual ranks of this process, against the whole module.

A plan says which linears of a block are split. Whether the block's own code then computes the same depends on all that
it does in between: how it forms heads, which sizes it reads from where, what else it holds. So the code is run: the
model once, on a few tokens, to see with what each kind of block is called; then the block, whole and on R virtual
ranks, on noisy copies of its parameters. Outputs, the gradients of all inputs and those of all parameters
are compared, and what the code has written to buffers and attributes.

Note: virtual ranks
    Ranks are threads that meet at the block's collectives, and their graphs are joined there. Where fastpar copies
    forward and sums backward, or sums forward and copies backward, a rank's result depends on the other ranks' inputs
    by value or by gradient alone (`enter`, `sum` of `VirtualRank`); gathers and reduce-scatters are what they are.
    One backward of the sum of all ranks' losses then gives each rank's gradients, without threads.

Note: what a trial proves
    Equality on random parameters and inputs, at the sizes of this model: an identity of the two programs up to a set of
    measure zero, for the path through their code that these inputs take. The tolerance lies three digits above
    float32's rounding and three below what a missing or misplaced head does.
"""

from __future__ import annotations

from fastpar.parallel.trial.calls import RecordedCall, holds_linears, is_linear, record_calls, recorded
from fastpar.parallel.trial.copies import noisy_copy, structure_copy
from fastpar.parallel.trial.ranks import CodeError, DifferenceError, TrialError
from fastpar.parallel.trial.trial import Trial, is_per_token, keeps_results

__all__ = [
    "CodeError",
    "DifferenceError",
    "RecordedCall",
    "Trial",
    "TrialError",
    "holds_linears",
    "is_linear",
    "is_per_token",
    "keeps_results",
    "noisy_copy",
    "record_calls",
    "recorded",
    "structure_copy",
]
