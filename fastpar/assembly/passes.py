"""Forward and backward of a rank's batch: pass by pass through a whole model, or through a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fastpar import context
from fastpar.assembly.objective import FedBatch, Objective
from fastpar.context.region import HasModules, region_of
from fastpar.layouts import Layout
from fastpar.pipeline import CrossEntropy, Pipeline
from fastpar.precision import Precision


class Passes(Protocol):
    """How a layout runs a batch.

    train     forward and backward; returns this rank's part of the loss, which is the sum over its tokens divided by
              `denominator`. The same on all ranks of a pipeline
    evaluate  the loss alone
    """

    modules: list[nn.Module]

    def train(self, fed: FedBatch, denominator: float) -> Tensor: ...
    def evaluate(self, fed: FedBatch, denominator: float) -> Tensor: ...


def cut_sequences(model: HasModules, fed: FedBatch, first: str) -> FedBatch:
    """This rank's tokens of a batch whose sequences are split over cp, with their positions. Collective.

    Targets are aligned with outputs already: they are cut as tokens are. `first` is what the model calls its ids.
    """
    given = dict(fed.inputs)
    documents = given.pop("documents", None)
    ids = given.pop(first)
    cut = context.shard(model, {"input_ids": ids, **given}, documents=documents)
    where = region_of(model).positions.to(fed.target.device)
    return FedBatch({first: cut.pop("input_ids"), **cut}, fed.target[:, where])


class WholeModel:
    """A model of which this rank has all layers, or its part of each."""

    def __init__(self, model: nn.Module, objective: Objective, layout: Layout) -> None:
        self.modules, self._objective = [model], objective
        self._parts, self._cp = layout.accumulate, layout.cp
        self._is_checked = False

    def train(self, fed: FedBatch, denominator: float) -> Tensor:
        total: Tensor | None = None
        for part in fed.split(self._parts):
            loss = self._loss(part, denominator)
            loss.backward()
            total = loss.detach() if total is None else total + loss.detach()
        assert total is not None
        return total

    @torch.no_grad()
    def evaluate(self, fed: FedBatch, denominator: float) -> Tensor:
        losses = [self._loss(part, denominator) for part in fed.split(min(self._parts, fed.rows))]
        return torch.stack(losses).sum()

    def _loss(self, fed: FedBatch, denominator: float) -> Tensor:
        (model,) = self.modules
        fed = cut_sequences(model, fed, self._objective.first) if self._cp > 1 else fed
        inputs, target = {**dict.fromkeys(self._objective.withheld, False), **fed.inputs}, fed.target
        first = (inputs.pop(self._objective.first),) if self._objective.first in inputs else ()
        output = model(*first, **inputs)
        output = getattr(output, "logits", output)  # as the last stage of a pipeline returns it
        if not self._is_checked:
            self._is_checked = self._objective.check_sum(output, target)
        return self._objective.sum_of(output, target) / denominator


class PipelinedModel:
    """This rank's stages of a pipeline.

    after_pass   called after each pass: reduces gradients to shards where they are not kept whole
    around_pass  a context around each run
    """

    def __init__(self, objective: Objective, layout: Layout, precision: Precision) -> None:
        self.modules: list[nn.Module] = []
        self._objective, self._precision = objective, precision
        self._parts, self._cp = layout.accumulate, layout.cp
        self._denominator = 1.0
        self._is_checked = False
        self.after_pass: Callable[[], None] = lambda: None
        self.around_pass: Callable[[], AbstractContextManager[None]] = nullcontext
        self._pipe: Pipeline | None = None
        self._has_head = layout.pipeline.shard_head

    def loss(self, output: Any, target: Tensor) -> Tensor:
        """What the last stage calls."""
        if not self._is_checked:
            self._is_checked = self._objective.check_sum(output, target)
        return self._objective.sum_of(output, target) / self._denominator

    @property
    def pipe_options(self) -> dict[str, Any]:
        """The loss options of `fp.parallelize_pipeline`."""
        return {"loss": CrossEntropy()} if self._has_head else {"loss": self.loss, "reduction": "sum"}

    def adopt(self, pipe: Pipeline) -> None:
        """The pipeline that was made with these options."""
        self._pipe, self.modules = pipe, [stage.module for stage in pipe.stages.values()]

    def train(self, fed: FedBatch, denominator: float) -> Tensor:
        total: Tensor | None = None
        for part in fed.split(self._parts):
            loss = self._run("step", part, denominator)
            self.after_pass()
            total = loss if total is None else total + loss
        assert total is not None
        return total

    def evaluate(self, fed: FedBatch, denominator: float) -> Tensor:
        losses = [self._run("evaluate", part, denominator) for part in fed.split(self._parts)]
        return torch.stack(losses).sum()

    def _run(self, method: str, fed: FedBatch, denominator: float) -> Tensor:
        assert self._pipe is not None
        self._denominator = denominator
        if self._cp > 1:
            fed = cut_sequences(self._pipe, fed, self._objective.first)
        inputs = {name: self._cast(x) for name, x in fed.inputs.items()}
        first = (inputs.pop(self._objective.first),) if self._objective.first in inputs else ()
        more = {"denominator": denominator} if self._has_head else {}
        with self.around_pass(), self._autocast():
            loss: Tensor = getattr(self._pipe, method)(*first, target=fed.target, **more, **inputs)
        return loss.detach()

    def _cast(self, x: Any) -> Any:
        """The value in the dtype that `fp.zero.shard` casts inputs of modules to."""
        is_float = isinstance(x, Tensor) and x.is_floating_point() and self._precision.param is not None
        return x.to(self._precision.param) if is_float else x

    @contextmanager
    def _autocast(self) -> Iterator[None]:
        if self._precision.compute is None:
            yield
            return
        device = next(p.device.type for module in self.modules for p in module.parameters())
        with torch.autocast(device, dtype=self._precision.compute):
            yield
