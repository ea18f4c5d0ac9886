"""What the microbatches of a batch count in its loss, on the rank that computes it: `fastpar.pipeline.stages.weighting`
for whole sequences, and the denominators of all ranks where sequences are split."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fastpar.pipeline.runtime.sharded_head import CrossEntropy
from fastpar.pipeline.schedules.schedule import ActionType, Schedule
from fastpar.pipeline.stages.batch import SplitSequence
from fastpar.pipeline.stages.weighting import IGNORED, LossMean, Weighing, check_equal_counts

_ADVICE = (
    "Pass loss=fastpar.pipeline.CrossEntropy(), which knows its mean; a loss that sums, with "
    'reduction="sum", and divide by the number of tokens in the batch; or reduction="microbatch_mean" if '
    "the mean of the microbatches' losses is what you want"
)


@dataclass(frozen=True)
class MicrobatchCounts:
    """Counts of a schedule: the microbatches of a step, and the updates of every stage during one (0: after it)."""

    num_microbatches: int
    updates: int

    @classmethod
    def of(cls, schedule: Schedule) -> MicrobatchCounts:
        steps = [a.type is ActionType.STEP and a.stage == 0 for a in schedule.flat(schedule.stage_ranks[0])]
        return cls(schedule.num_microbatches, sum(steps))

    @property
    def per_update(self) -> int:
        return self.num_microbatches // max(self.updates, 1)

    def equal(self, reduction: str) -> Weighing:
        """Every microbatch counts the same."""
        return Weighing.equal(self.num_microbatches, 1 if reduction == "sum" else self.per_update)


@dataclass(frozen=True)
class PipelineLossRule:
    """Whose loss it is, and what it is divided by.

    loss        loss(output, target), None: the model's own
    mean        what the model's own loss is the mean of
    reduction  of the pipeline
    counts     what microbatches count in its batch
    """

    loss: Callable[..., Any] | None
    mean: LossMean
    reduction: str
    counts: MicrobatchCounts

    @property
    def num_microbatches(self) -> int:
        return self.counts.num_microbatches

    @property
    def per_update(self) -> int:
        return self.counts.per_update

    def equal(self) -> Weighing:
        """Every microbatch counts the same."""
        return self.counts.equal(self.reduction)

    def weigh_by(self, denominator: float, targets: Sequence[Any]) -> Weighing:
        """A given denominator; ValueError for a loss whose sum is not known, or a denominator not above 0."""
        if not isinstance(self.loss, CrossEntropy) or self.reduction != "mean" or self.counts.updates:
            raise ValueError(
                "denominator= is for loss=fastpar.pipeline.CrossEntropy() with reduction='mean', whose sum over tokens "
                f"is known, got {self.loss!r:.60} and {self.reduction!r}"
            )
        if not denominator > 0:
            raise ValueError(f"denominator must be positive, got {denominator}")
        if not all(isinstance(target, Tensor) for target in targets):
            return self.equal()  # an error of its own, in the first forward
        counts = self._counts(targets)
        return Weighing([denominator / n if n else math.inf for n in counts], [None] * len(counts))

    def weigh(
        self, inputs: Sequence[tuple[Any, ...]], kwargs: Sequence[Mapping[str, Any]], targets: Sequence[Any]
    ) -> Weighing:
        """Weigh microbatches of whole sequences."""
        if self.num_microbatches == 1:
            return self.equal()
        if isinstance(self.loss, CrossEntropy):
            if not all(isinstance(target, Tensor) for target in targets):
                return self.equal()  # an error of its own, in the first forward
            return Weighing.of_counts(self._counts(targets), self.per_update, items=False, can_be_empty=True)
        if self.loss is not None:
            check_equal_counts(targets, "target", _ADVICE)
            return self.equal()
        labels = [named.get("labels") for named in kwargs]
        if not all(isinstance(each, Tensor) for each in labels):
            check_equal_counts([*zip(inputs, kwargs, strict=True)], "the inputs", _ADVICE)
            return self.equal()
        return self._weigh_own(labels, kwargs)

    def _counts(self, targets: Sequence[Any]) -> list[int]:
        assert isinstance(self.loss, CrossEntropy)
        return [int((target != self.loss.ignore_index).sum()) for target in targets]

    def _weigh_own(self, labels: Sequence[Any], kwargs: Sequence[Mapping[str, Any]]) -> Weighing:
        """The model's own loss."""
        mean = self.mean
        if any("num_items_in_batch" in named for named in kwargs):
            if mean.takes_items:
                return Weighing.equal(len(labels), 1)  # each is its part of the batch's loss
            raise ValueError("num_items_in_batch: the model's own loss does not divide by it; leave it out")
        if mean.kind == "unknown":
            check_equal_counts(
                labels,
                "labels",
                "It is not known what the model's own loss is the mean of: pass a loss of your own (loss=, target=), "
                'or reduction="microbatch_mean" if the mean of the microbatches\' losses is what you want',
            )
            return self.equal()
        counts = [mean.count(each) for each in labels]
        return Weighing.of_counts(counts, self.per_update, items=mean.takes_items, can_be_empty=False)

    def weigh_parts(
        self, sequence: SplitSequence, targets: Sequence[Any], kwargs: Sequence[Mapping[str, Any]]
    ) -> Weighing:
        """Weigh microbatches of split sequences: this rank's sums over the count of all ranks, so that the parts add
        up.

        Raises ValueError for a loss without that count.
        """
        if isinstance(self.loss, CrossEntropy):
            if self.loss.ignore_index != IGNORED:
                raise ValueError(f"labels of split sequences ignore {IGNORED}, got {self.loss}")
            if not all(isinstance(target, Tensor) for target in targets):
                raise ValueError("the loss needs target=batch['shift_labels'] of fastpar.context.shard")
            counts = self._counts(targets)
            total = sequence.count_labels(sum(counts))
            return Weighing([total / count if count else math.inf for count in counts], [None] * len(counts))
        if not all("num_items_in_batch" in named and "shift_labels" in named for named in kwargs):
            raise ValueError(
                "the model's own loss of split sequences needs shift_labels and num_items_in_batch beside labels: "
                "pipe.step(**batch) with all that fastpar.context.shard returns"
            )
        return Weighing.equal(self.num_microbatches, 1)

    def check_parts(self) -> None:
        """ValueError for a loss of parts of sequences whose sum over the ranks is not known to be the loss."""
        if self.reduction == "sum":
            return
        known = self.loss is None and self.mean.takes_items
        if self.reduction != "mean" or not (known or isinstance(self.loss, CrossEntropy)):
            name = "the model's own" if self.loss is None else getattr(self.loss, "__name__", type(self.loss).__name__)
            raise ValueError(
                f"loss={name}, reduction={self.reduction!r}: of sequences that are split, each rank has some tokens, "
                "and a mean over these is no part of the mean over all. Pass loss=fastpar.pipeline.CrossEntropy() "
                'with target=batch["shift_labels"]; or reduction="sum" and a loss that divides its sum over tokens by '
                "num_items_in_batch of fastpar.context.shard"
            )


__all__ = ["MicrobatchCounts", "PipelineLossRule"]
