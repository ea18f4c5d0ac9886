"""ZeRO stage 3 of a pipeline: this rank's stages are whole for each of its runs.

| moment | what happens |
|---|---|
| a run begins | gather all units of this rank's stages |
| its microbatches, forward and backward | nothing: gradients are summed where autograd puts them |
| it has ended | reduce the sums to rows, free the units |

Words per rank and run, of Psi parameters on N ranks: 2 Psi (N - 1) / N, whatever the number of microbatches; gathered
for each visit of a stage they would be 3 Psi times the microbatches, and schedules that put off weight gradients would
find parameters gone. The price is memory: while a run lasts, parameters and gradients are whole, as in stage 2. Between
runs, and in the optimizer's step, a rank has rows.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fastpar.pipeline import Pipeline
from fastpar.zero.groups import Groups
from fastpar.zero.options import NamedParameters, ShardOptions
from fastpar.zero.stage3 import Stage3
from fastpar.zero.zero import Zero


class PipelineStages(nn.Module):
    """The stages of a pipeline's rank as one module, whose parameters have the names of the whole model."""

    def __init__(self, pipe: Pipeline) -> None:
        super().__init__()
        for number, stage in pipe.stages.items():
            self.add_module(str(number), stage.module)
        if pipe.head is not None:
            self.add_module("head", pipe.head)
        self._pipe: Callable[[], Any]
        vars(self)["_pipe"] = weakref.ref(pipe)

    @property
    def pipe(self) -> Any:
        """The pipeline, which lives longer than this."""
        return vars(self)["_pipe"]()

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        yield from NamedParameters.of(self.pipe).parameters.items()

    def named_buffers(self, *_: Any, **__: Any) -> Iterator[tuple[str, Tensor]]:
        yield from self.pipe.named_buffers()


def shard_pipeline(
    pipe: Pipeline,
    named: NamedParameters,
    optimizers: Sequence[torch.optim.Optimizer],
    groups: Groups,
    options: ShardOptions,
) -> Zero:
    """`fastpar.zero.shard` of a pipeline in stage 3. Collective."""
    options = replace(options, overlap=False)  # a run has many backward passes
    zero = Zero(PipelineStages(pipe), named, optimizers, groups, options, pipe=pipe)
    pipe.around_runs = _PipelineRuns(zero)
    return zero


class _PipelineRuns:
    """What a pipeline in stage 3 does around its runs; nothing after `zero.detach()`."""

    def __init__(self, zero: Zero) -> None:
        self._zero = weakref.ref(zero)

    def __call__(self, trains: bool) -> AbstractContextManager[None]:
        zero = self._zero()
        return nullcontext() if zero is None or not zero.is_attached else _gathered(zero, trains)


@contextmanager
def _gathered(zero: Zero, trains: bool) -> Iterator[None]:
    (stage3,) = zero.storages
    assert isinstance(stage3, Stage3)
    zero.begin_forward()
    stage3.begin_forward()
    stage3.unshard()
    stage3.is_held = True
    try:
        yield
        if trains:
            zero.reduce_gradients()
    finally:
        stage3.is_held = False
        stage3.release()
        stage3.reshard()
