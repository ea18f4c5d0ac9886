"""The batch of a run: cut into microbatches, weighed, and the loss of each of them on the last stage."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fastpar.pipeline.runtime.head_run import Purpose
from fastpar.pipeline.runtime.weighing import PipelineLossRule
from fastpar.pipeline.stages.agreement import summary
from fastpar.pipeline.stages.batch import SplitSequence, rows_of, split, split_call
from fastpar.pipeline.stages.calling import Keywords
from fastpar.pipeline.stages.weighting import Weighing

Loss = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class PipelineCall:
    """What a run was called with: the arguments of `Pipeline.step`."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any = None
    denominator: float | None = None


@dataclass
class BatchRun:
    """The microbatches of the running batch, by their numbers.

    keywords   that stages take, on any rank
    loss       the caller's, loss(output, target)
    rule       how microbatches are weighed; None where the loss is computed on another rank
    equal      every microbatch counts the same
    sequence   of which this rank has some tokens
    """

    keywords: Sequence[Keywords]
    loss: Loss | None
    rule: PipelineLossRule | None
    equal: Weighing
    sequence: SplitSequence | None
    inputs: list[tuple[Any, ...]] = field(default_factory=list)
    kwargs: list[dict[str, Any]] = field(default_factory=list)
    targets: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.weighing = self.equal

    def cut(self, call: PipelineCall, purpose: Purpose) -> None:
        """Take the batch of a run. Raises ValueError for one that cannot be cut, or weighed."""
        for name in call.kwargs:
            if not any(name in keywords for keywords in self.keywords):
                hint = "; what the loss compares with is target=" if name in ("targets", "labels", "y") else ""
                raise ValueError(f"no stage takes the keyword input {name!r}{hint}")
        count = len(self.equal.divisors)
        self.inputs, self.kwargs = split_call(call.args, call.kwargs, count)
        if self.sequence is not None:
            self.sequence.begin(rows_of(self.inputs, self.kwargs))
        self.targets = split(call.target, count, "target")
        self.weighing = self._weigh(call.denominator, purpose)

    def _weigh(self, denominator: float | None, purpose: Purpose) -> Weighing:
        rule = self.rule
        if rule is None:
            return self.equal
        if denominator is not None:
            return rule.weigh_by(denominator, self.targets)
        if rule.reduction != "mean" or purpose is Purpose.LOGITS:
            return self.equal
        if self.sequence is not None:
            return rule.weigh_parts(self.sequence, self.targets, self.kwargs)
        return rule.weigh(self.inputs, self.kwargs, self.targets)

    def summary(self, call: PipelineCall) -> dict[str, Any]:
        """What ranks compare of it."""
        found = summary(call.args, call.kwargs, call.target)
        return found if self.sequence is None else {**found, **self.sequence.summary()}

    def forget(self) -> None:
        """Forget the batch, which is the caller's to keep."""
        self.inputs, self.kwargs, self.targets = [], [], []

    def kwargs_of(self, microbatch: int, *, is_last: bool) -> Mapping[str, Any]:
        """The keyword inputs of a stage; of the last one, with what the model's own loss is divided by."""
        items = self.weighing.items[microbatch]
        if items is None or not is_last:
            return self.kwargs[microbatch]
        return {**self.kwargs[microbatch], "num_items_in_batch": torch.tensor(items)}

    def running(self, microbatch: int) -> AbstractContextManager[None]:
        """While a microbatch's forward runs."""
        return nullcontext() if self.sequence is None else self.sequence.microbatch(microbatch)

    def loss_of(self, microbatch: int, output: Any) -> Tensor:
        """What a microbatch adds to the loss of the batch, a scalar. Raises ValueError for a loss that is none."""
        divisor = self.weighing.divisors[microbatch]
        if math.isinf(divisor):  # a CrossEntropy of ignored targets only, whose mean is not a number
            return output.sum() * 0
        loss = output if self.loss is None else self.loss(output, self.targets[microbatch])
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            which = "the last stage's module (no loss= was given)" if self.loss is None else "the loss"
            raise ValueError(f"{which} must return a tensor with one element, got {what}")
        if isinstance(output, Tensor) and output.requires_grad and not loss.requires_grad:
            raise ValueError("the loss does not depend on the output: it requires no gradient, but the output does")
        loss = loss.reshape(()) if loss.dim() else loss
        return loss if divisor == 1 else loss / divisor
