"""What a rank says of rows that a caller has handed it, along with the rows.

`moe_dispatch` is preceded by headers. `moe_combine` needs none, but what it is given may be wrong on one rank alone,
and the others would wait for that rank. So every rank puts a few words in front of its rows, in the exchange that there
is anyway, and all raise what is wrong on one. A rank whose rows are wrong takes part with none that matter.

Worked example: rank 0 brings rows [3, 5] in bfloat16 that need a gradient, rank 1 wrong ones: words [0, 5, 1, 1] and
[1, 0, 0, 0]. Rank 1 raises what is wrong, rank 0 that rank 1 is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from fastpar.ops.moe.plan import _DTYPES as DTYPES
from fastpar.ops.moe.plan import _GRADIENT

WORDS = 4  # of 8 bytes
_BAD_ARGUMENTS = 1
_EQUAL_ON_ALL = ("the width of rows", "the dtype of rows", _GRADIENT)


@dataclass(frozen=True)
class Claim:
    """problem         what is wrong with this rank's arguments, or nothing
    is_differentiable  whether there will be a backward, in which every rank has to take part
    op                 whose arguments they are
    """

    problem: str
    is_differentiable: bool
    op: str = "moe_combine"

    def words(self, rows: Tensor) -> list[int]:
        if self.problem:
            return [_BAD_ARGUMENTS, *[0] * (WORDS - 1)]
        return [0, rows.shape[1], DTYPES.index(rows.dtype), int(self.is_differentiable)]

    def check(self, everyone: Sequence[Sequence[int]]) -> None:
        """Raises ValueError for what is wrong in the words of all ranks: on each of them."""
        if self.problem:
            raise ValueError(self.problem)
        bad = [rank for rank, words in enumerate(everyone) if words[0]]
        if bad:
            raise ValueError(f"{self.op}: wrong arguments on rank {bad[0]} of the group: see its error")
        for column, name in enumerate(_EQUAL_ON_ALL, start=1):
            values = [words[column] for words in everyone]
            if len(set(values)) > 1:
                shown = [str(DTYPES[value]) for value in values] if "dtype" in name else values
                raise ValueError(f"{self.op}: {name} must be equal on all ranks of the group, got {shown}")


__all__ = ["DTYPES", "WORDS", "Claim"]
