"""The whole model on one rank: in float64 for the truth, and in its own dtype for the rounding that is to be expected.

Where a model does not run in float64 the truth is the run in its own dtype, and the rounding is what changes when every
parameter is moved by about one unit in its last place.

Note: what microbatches count
    A pipeline computes the loss of its rank's rows, whatever the microbatches: where these have unequal numbers of
    labels that count, they count by these numbers, with cp as well. So do the parts here, as far as that gives the loss
    of the undivided rows; what is tried is which labels a loss counts. Else all count the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastpar.tensor import LayoutDropout
from fastpar.tensor.binding import Adoption
from fastpar.verification.inputs import FunctionalDropoutOff, Inputs, LossFunction, loss_of, seeded
from fastpar.verification.layout import MakeOptimizer
from fastpar.verification.trace import ModuleTrace, StepTrace

_SAME_LOSS = 1e-5  # relative, of two ways to compute one mean


@dataclass
class WholeStep:
    """losses and traces by part of the batch; by parameter the gradient (None: it has none), the update, and the root
    mean square of its values."""

    losses: list[float]
    traces: list[StepTrace]
    grads: dict[str, Tensor | None]
    updates: dict[str, Tensor]
    scales: dict[str, float]

    @property
    def norm(self) -> float:
        return sum(float(grad.double().square().sum()) for grad in self.grads.values() if grad is not None) ** 0.5


@dataclass
class WholeRun:
    """What a whole model did.

    names               every name of a parameter to its first
    functional_dropout  what was switched off, by module
    undivided           the loss of the whole batch at once, before the first step; None: the batch has one part, or
                        masks of dropout that depend on the part
    """

    steps: list[WholeStep]
    names: dict[str, str]
    dtype: torch.dtype
    functional_dropout: dict[str, float]
    undivided: float | None = None

    def weighs_parts(self) -> str:
        """A note where the mean of the parts' losses is not the loss of the batch; "" where it is."""
        mean = sum(self.steps[0].losses) / len(self.steps[0].losses)
        if self.undivided is None or abs(mean - self.undivided) <= 1e-5 * abs(self.undivided):
            return ""
        return (
            f"the loss of the batch is {self.undivided:.6g}, the mean of its {len(self.steps[0].losses)} parts' losses "
            f"{mean:.6g}: parts have other numbers of tokens that count, or a loss that is no mean over tokens. A "
            "layout computes the mean of the parts"
        )

    def order(self, step: int) -> dict[tuple[str, str, int], int]:
        """When each input, output and gradient of each call came about: forward, then backward."""
        return {event: position for position, event in enumerate(self.steps[step].traces[0].order)}


@dataclass(frozen=True)
class Job:
    """The work that is done whole, and in the layout."""

    build: Callable[[], nn.Module]
    inputs: Inputs
    loss: LossFunction | None
    make_optimizer: MakeOptimizer
    steps: int
    seed: int


def step_seed(job: Job, step: int) -> int:
    return job.seed + 7919 * (step + 1)


def references(
    job: Job, dp: int, microbatches: int, dropouts: Sequence[str], *, alike: bool = False
) -> tuple[WholeRun, WholeRun, str]:
    """(truth, the model in its own dtype, a note or ""). alike: all microbatches count the same."""
    parts = _weighed_parts(job, dp, 1 if alike else microbatches) or [1.0] * (dp * microbatches)
    native = _run(job, dp, parts, dropouts, dtype=None)
    try:
        return _run(job, dp, parts, dropouts, dtype=torch.float64), native, ""
    except (RuntimeError, TypeError, NotImplementedError) as error:
        moved = _run(job, dp, parts, dropouts, dtype=None, moved=True)
        reason = str(error).splitlines()[0][:120]
        return native, moved, f"the model does not run in float64 ({reason}): compared with a run in its own dtype"


def _weighed_parts(job: Job, dp: int, microbatches: int) -> list[float] | None:
    """What each part of the batch counts, 1 in the mean over a rank's (Note: what microbatches count); None: all count
    the same. ValueError for a part whose loss is no number."""
    found: list[float] = []
    parts = job.inputs.parts(dp * microbatches)
    ranks = [parts[start : start + microbatches] for start in range(0, len(parts), microbatches)]
    rules = [[[_labels_that_count(part, job.loss, shift) for part in own] for own in ranks] for shift in (1, 0)]
    if all(len(set(counts)) == 1 for rule in rules for counts in rule):
        return None
    losses = _losses_of(job, [*parts, *job.inputs.parts(dp)])
    for rank, whole in enumerate(losses[len(parts) :]):
        own = losses[rank * microbatches : (rank + 1) * microbatches]
        empty = next((index for index, loss in enumerate(own) if loss != loss), None)
        if empty is not None and whole == whole:
            raise ValueError(
                f"microbatch {empty} of data-parallel rank {rank} has a loss that is not a number, though its rank's "
                "rows together have one: give every microbatch labels that count"
            )
        errors: dict[tuple[float, ...], float] = {}
        for weights in [[1] * microbatches, *(rule[rank] for rule in rules)]:
            shares = tuple(weight * microbatches / max(1, sum(weights)) for weight in weights)
            mean = sum(share * loss for share, loss in zip(shares, own, strict=True)) / microbatches
            errors[shares] = abs(mean - whole)
        best = min(errors, key=errors.__getitem__)
        found += best if errors[best] <= _SAME_LOSS * abs(whole) else [1.0] * microbatches
    return found


def _labels_that_count(part: Inputs, loss: LossFunction | None, shift: int) -> int:
    labels = part.target if loss is not None else part.kwargs.get("labels")
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dim() < 1:
        return 0
    return int((labels[..., shift:] != getattr(loss, "ignore_index", -100)).sum())


@torch.no_grad()
def _losses_of(job: Job, parts: Sequence[Inputs]) -> list[float]:
    """The losses, in float64 where the model runs in it, without dropout."""
    for dtype in (torch.float64, None):
        model = job.build().eval()
        model = model if dtype is None else model.to(dtype)
        try:
            cast = parts if dtype is None else [part.to(dtype) for part in parts]
            return [loss_of(model(*each.args, **each.kwargs), each.target, job.loss).item() for each in cast]
        except (RuntimeError, TypeError, NotImplementedError):
            if dtype is None:
                raise
    raise AssertionError("unreachable")


def _run(
    job: Job,
    dp: int,
    weights: Sequence[float],
    dropouts: Sequence[str],
    *,
    dtype: torch.dtype | None,
    moved: bool = False,
) -> WholeRun:
    """weights: what each part of the batch counts."""
    model, microbatches = job.build(), len(weights) // dp
    own = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    inputs = job.inputs
    if dtype is not None:
        model, inputs = model.to(dtype), inputs.to(dtype)
    if moved:
        _move(model)
    trace = ModuleTrace(model.named_modules())
    masks: list[Any] = [model.get_submodule(path) for path in dropouts]
    for module in masks:
        p = module.p
        Adoption(module, LayoutDropout)
        module._configure(p, sequence=None, batch=(0, dp))
    names: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[name] = first.setdefault(id(parameter), name)
    optimizer = job.make_optimizer([p for p in model.parameters() if p.requires_grad])
    off = FunctionalDropoutOff(lambda: trace.active[-1] if trace.active else "")
    parts = inputs.parts(dp * microbatches)
    undivided = None
    if len(parts) > 1 and not masks:
        with seeded(step_seed(job, 0)), off, torch.no_grad():
            undivided = loss_of(model(*inputs.args, **inputs.kwargs), inputs.target, job.loss).item()
    steps = []
    for number in range(job.steps):
        losses, traces = [], []
        for index, part in enumerate(parts):
            for module in masks:
                module.batch = (index // microbatches, dp)
            trace.begin()
            with seeded(step_seed(job, number)), off:
                loss = loss_of(model(*part.args, **part.kwargs), part.target, job.loss)
                loss = loss if weights[index] == 1.0 else loss * weights[index]
                loss.backward()  # not divided: losses that act in backward by themselves are not, either
            losses.append(loss.item())
            traces.append(trace.step)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= len(parts)
        grads = {name: None if p.grad is None else p.grad.cpu().clone() for name, p in model.named_parameters()}
        before = {name: p.detach().cpu().clone() for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        updates = {name: p.detach().cpu() - before[name] for name, p in model.named_parameters()}
        scales = {name: float(x.abs().double().square().mean() ** 0.5) for name, x in before.items()}
        steps.append(WholeStep(losses, traces, grads, updates, scales))
    return WholeRun(steps, names, own, off.found, undivided)


@torch.no_grad()
def _move(model: nn.Module) -> None:
    """Every parameter by about a unit in its last place."""
    for number, parameter in enumerate(model.parameters()):
        if parameter.is_floating_point():
            generator = torch.Generator().manual_seed(number)
            drawn = torch.randn(parameter.shape, generator=generator).to(parameter.device, parameter.dtype)
            parameter.mul_(1 + drawn * torch.finfo(parameter.dtype).eps)
