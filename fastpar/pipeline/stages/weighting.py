"""How much the loss of each microbatch counts in the loss of the batch.

A loss is a mean over tokens, and microbatches may have unequal numbers of them (padding, ignored labels): the mean of
their means is then not the mean. Where it is known what a loss is the mean of, a microbatch counts by its share:

    loss of the batch = sum_i (c_i / C) loss_i        c_i tokens that count in microbatch i, C in all

It is known for `CrossEntropy`, and for a model's own loss, which is tried on labels of unequal numbers before the model
is cut (`LossMean.find`). With equal numbers every microbatch counts 1 / m, in the same bits as m equal steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

IGNORED = -100
_COUNTS: dict[str, Callable[[Tensor], int]] = {
    "shifted": lambda labels: int((labels[..., 1:] != IGNORED).sum()),
    "tokens": lambda labels: int((labels != IGNORED).sum()),
    "rows": lambda labels: labels.shape[0],
}


@dataclass(frozen=True)
class LossMean:
    """What a model's own loss is the mean of.

    kind        "shifted": the labels but for the first of each row, "tokens": all labels, both where they are not
                ignored; "rows": the sequences; "unknown": none of these
    takes_items whether it divides by `num_items_in_batch` instead, where it is given
    """

    kind: str = "unknown"
    takes_items: bool = False

    def count(self, labels: Tensor) -> int:
        return _COUNTS[self.kind](labels)

    @staticmethod
    def find(loss_of: Callable[..., Tensor], inputs: Tensor, takes_items: bool) -> LossMean:
        """Try the loss on two rows of which one has few labels.

        loss_of   loss_of(inputs [B, S], labels [B, S], **keywords) -> scalar
        """
        labels = inputs.clone()
        labels[0, 2:] = IGNORED
        whole, *rows = (float(loss_of(inputs[part], labels[part])) for part in (slice(0, 2), slice(0, 1), slice(1, 2)))
        spread = abs(rows[0] - rows[1])
        found, best = "unknown", 0.02
        for kind, count in _COUNTS.items():
            counts = [count(labels[:1]), count(labels[1:])]
            mean = (counts[0] * rows[0] + counts[1] * rows[1]) / max(sum(counts), 1)
            off = abs(mean - whole) / spread if spread else float("inf")
            if off < best:
                found, best = kind, off
        if not takes_items or found not in ("shifted", "tokens"):
            return LossMean(found)
        items = 4 * _COUNTS[found](labels)
        given = float(loss_of(inputs, labels, num_items_in_batch=torch.tensor(items)))
        return LossMean(found, takes_items=abs(given * 4 - whole) < 0.02 * abs(whole))


@dataclass(frozen=True)
class Weighing:
    """What the losses of the microbatches are divided by, and what the model's own loss gets beside its batch.

    divisors   inf: the microbatch has no token that counts, and its loss is 0
    items      `num_items_in_batch` for each microbatch; None: it is not given
    """

    divisors: Sequence[float]
    items: Sequence[int | None]

    @staticmethod
    def equal(count: int, divisor: int) -> Weighing:
        return Weighing([divisor] * count, [None] * count)

    @staticmethod
    def of_counts(counts: Sequence[int], per_update: int, *, items: bool, can_be_empty: bool) -> Weighing:
        """The weighing by numbers of tokens, within each update of the weights; see above."""
        divisors: list[float] = []
        given: list[int | None] = []
        for index, count in enumerate(counts):
            start = index - index % per_update
            group = counts[start : start + per_update]
            total = sum(group)
            if len(set(group)) == 1:  # all of none too: not a number, as in one process
                divisors.append(len(group))
                given.append(None)
            elif items:
                divisors.append(1)
                given.append(max(total, 1))
            else:
                if not count and not can_be_empty:
                    raise ValueError(
                        f"microbatch {index} has no label that counts, and the mean over its labels is not a number; "
                        "spread the rows with labels over the microbatches, or use fewer of them"
                    )
                divisors.append(total / count if count else math.inf)
                given.append(None)
        return Weighing(divisors, given)


def check_equal_counts(targets: Sequence[Any], what: str, advice: str) -> None:
    """ValueError where microbatches have unequal numbers of targets, and what the loss is the mean of is unknown."""
    counts = [sum(map(_counted, tree_leaves(target))) for target in targets]
    if len(set(counts)) > 1:
        raise ValueError(
            f"the microbatches of {what} have {counts} elements that are not {IGNORED}, so the mean of their losses is "
            f"not the loss of the batch. {advice}"
        )


def _counted(target: Any) -> int:
    if not isinstance(target, Tensor):
        return 0
    return target.numel() if target.is_floating_point() or target.is_complex() else int((target != IGNORED).sum())
