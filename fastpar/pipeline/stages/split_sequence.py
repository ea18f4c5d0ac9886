"""What a pipeline has to know of sequences that are split over ranks beside it (`fastpar.context`).

Where a batch's tokens lie, and which of them see each other, is data that belongs to rows of the batch. So it goes with
the microbatches: the pipeline says which rows each of them has, and which one runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor
from torch.utils._pytree import tree_leaves


class SplitSequence(Protocol):
    """The sequences of one model's batches, of which every rank of another group has some tokens."""

    def begin(self, rows: Sequence[int | None]) -> None:
        """A run of a batch that has been split: the rows of each microbatch, None where nothing here has any.

        Raises ValueError for other rows than those that were split, RuntimeError where no batch was.
        """

    def microbatch(self, index: int) -> AbstractContextManager[None]:
        """While a microbatch's forward runs."""

    def count_labels(self, here: int) -> int:
        """How many labels count on all ranks, where `here` of them do on this one. ValueError for another number than
        this rank was given."""

    def summary(self) -> Mapping[str, Any]:
        """What the ranks of the pipeline must have in common, in the form of `agreement.summary`."""


def rows_of(args: Sequence[Sequence[Any]], kwargs: Sequence[Mapping[str, Any]]) -> list[int | None]:
    """By microbatch, the rows of the first of its tensors that has dims."""
    return [
        next((len(x) for x in tree_leaves((a, dict(k))) if isinstance(x, Tensor) and x.dim()), None)
        for a, k in zip(args, kwargs, strict=True)
    ]
