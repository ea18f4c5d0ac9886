"""`Assembled`: a model laid out over ranks, and one call per training step."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from fastpar import expert, recompute
from fastpar.arguments import check_counts, checked
from fastpar.assembly.feeding import FeedAgreement, GlobalBatch
from fastpar.assembly.generators import random_states, restore_random_states
from fastpar.assembly.objective import FedBatch, Objective, count
from fastpar.assembly.passes import Passes
from fastpar.assembly.report import LayoutReport, make_report
from fastpar.comm import Communicator
from fastpar.comm.ranges import annotate
from fastpar.layouts import Layout, ModelShape
from fastpar.mesh import Mesh
from fastpar.pipeline import Pipeline
from fastpar.precision import LossScaler
from fastpar.zero import Zero

COMPARED_EVERY = 1000  # steps between two comparisons of what ranks were fed


@dataclass(frozen=True)
class StepResult:
    """What a step did, as plain numbers: `dataclasses.asdict(result)` is what loggers take.

    loss     the mean over the valid tokens of the global batch, the same on all ranks
    norm     of all gradients, before they were clipped; NaN where nobody asked for it, or the step was skipped
    tokens   valid ones of the global batch
    skipped  a gradient was not finite, and nothing has changed
    seconds  of the whole step on this rank
    mfu      model FLOP/s utilisation: 6 flops per parameter and token, and attention's, over `peak_flops` of all ranks;
             NaN where the model's shape or the peak is not known
    """

    loss: float
    norm: float
    tokens: int
    skipped: bool
    seconds: float
    mfu: float


@dataclass(frozen=True)
class Ingredients:
    """What `assemble` has made: see `Assembled`."""

    layout: Layout
    mesh: Mesh
    parts: tuple[nn.Module, ...]
    optimizer: Any
    zero: Zero
    objective: Objective
    passes: Passes
    scaler: LossScaler
    schedulers: tuple[LRScheduler, ...]
    pipe: Pipeline | None
    shape: ModelShape | None
    peak_flops: float | None
    calls: tuple[str, ...]
    owns_mesh: bool
    recomputed: tuple[nn.Module, ...] = ()

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [self.optimizer] if isinstance(self.optimizer, torch.optim.Optimizer) else list(self.optimizer)


class Assembled:
    """A model in a layout, with its optimizer: what `fp.assemble` returns.

    layout     the layout
    mesh       the ranks
    parts      this rank's modules: the model that was given, or its stages of a pipeline
    optimizer  what the factory has made of this rank's parameters: one, or a list
    zero       what `fp.zero.shard` has returned

    Without a pipeline the model and the optimizer are ordinary ones, and one's own loop goes on working beside `step`:
    `loss.backward()` as often as `layout.accumulate` says, then `optimizer.step()`.
    """

    def __init__(self, made: Ingredients) -> None:
        self._made = made
        self.layout, self.mesh, self.parts = made.layout, made.mesh, made.parts
        self.optimizer, self.zero = made.optimizer, made.zero
        self._recomputed = list(made.recomputed)
        self._steps = self._samples = 0
        self._metric_schedulers = {id(each) for each in made.schedulers if _wants_loss(each)}
        self._agreement = FeedAgreement(made.mesh)
        # Losses are averaged over data parallelism and summed over cp, as gradients are.
        self._sums = [Communicator(made.mesh.group(dim)) for dim in ("dp", "cp") if made.mesh.size(dim) > 1]
        self._checked_rows: set[int] = set()
        self._balance = [
            router
            for part in made.parts
            for router in expert.routers_of(part).values()
            if router.losses.coeff or router.losses.z_coeff
        ]

    # ---- what users call

    @checked(computed=False)
    def samples(self, step: int, batch: int) -> range:
        """The samples that this rank reads in a step, of a global batch of so many: those of the whole run, counted
        from 0. Ranks that differ in tp, cp or pp alone read the same."""
        check_counts(batch=batch)
        check_counts(1 << 62, least=0, step=step)
        if batch % self.layout.dp:
            raise ValueError(f"batch ({batch}) must be divisible by the data-parallel ranks ({self.layout.dp})")
        each = batch // self.layout.dp
        start = step * batch + self.mesh.rank("dp") * each
        return range(start, start + each)

    def step(self, batch: Mapping[str, Any] | Sequence[Tensor]) -> StepResult:
        """One training step on this rank's sequences. Collective; all ranks get the same result but for `seconds`.

        batch  (inputs, target), with target[i] what the output at i is compared with; or keyword inputs of the model
               and "target"; or, of a model of Hugging Face and without a loss of one's own, with "labels". Targets of
               -100 do not count. Ranks that differ in tp, cp or pp alone give the same (`samples`)

        Cut along dim 0 into passes, and each into microbatches; forward, backward, reduction, exact norm, clipping;
        then the update, or nothing at all where a gradient is not finite; the scheduler; zero_grad. Collectives beside
        those of the layout: an all-reduce of 4 integers along each dim before it, and of the loss after it over dp and
        cp; in the first step and in every thousandth a comparison of what ranks were fed.

        Raises on all ranks: ValueError for a batch that is wrong on any, LayoutError for one that the layout cannot
        deal. What the model or the loss raises leaves no gradients behind; where only some ranks raise it, the others
        raise a CommError at their deadline.
        """
        made, began = self._made, time.perf_counter()
        with annotate("fastpar::assembly::step"):
            fed, whole = self._agree(batch, compare=self._steps % COMPARED_EVERY == 0)
            scale = made.scaler.get_scale()
            for router in self._balance:  # their losses are means, too: of each microbatch
                router.loss_scale = scale / (self.layout.accumulate * self._microbatches)
            try:
                total = made.passes.train(fed, whole.tokens / self.layout.dp / scale)
                loss = self._reduced(total) / scale
                skipped = self._update(loss)
            except BaseException:
                self._forget_gradients()  # of the passes that went well: the next step would add to them
                raise
        self._steps += 1
        self._samples += whole.rows
        seconds = time.perf_counter() - began
        norm = math.nan if skipped or self.zero.norm is None else float(self.zero.norm)
        return StepResult(loss, norm, whole.tokens, skipped, seconds, self._mfu(fed, whole, seconds))

    def evaluate(self, batch: Mapping[str, Any] | Sequence[Tensor]) -> float:
        """The loss of a batch as `step` takes it, in evaluation mode, without gradients. Collective."""
        modes = [(module, module.training) for part in self.parts for module in part.modules()]
        fed, whole = self._agree(batch, compare=True)
        for part in self.parts:
            part.eval()
        try:
            with annotate("fastpar::assembly::evaluate"):
                return self._reduced(self._made.passes.evaluate(fed, whole.tokens / self.layout.dp))
        finally:
            for module, mode in modes:
                module.training = mode

    def state(self) -> dict[str, Any]:
        """What a run goes on from, for torch.distributed.checkpoint: parameters, buffers and optimizer states under the
        names of the whole model, whatever the layout; schedulers, loss scale, steps and samples; the states of torch's
        generators on every rank, of the host and of the device. Not what reads data. Collective.

        torch.distributed.checkpoint.save(trained.state(), checkpoint_id=folder)
        """
        made = self._made
        return {
            "training": made.zero.state_dict(),
            "scheduler": [scheduler.state_dict() for scheduler in made.schedulers],
            "scaler": made.scaler.state_dict(),
            "steps": self._steps,
            "samples": self._samples,
            "random": random_states(self.mesh, self.layout),
        }

    @checked(computed=False)
    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave, here or in another layout. Collective.

        Random generators go on as they were where the layout is the same, or all ranks' were alike. Else all ranks are
        seeded alike, with a number made of the states that were saved, and a warning of the logger "fastpar.assemble"
        says so.

        state = trained.state()
        torch.distributed.checkpoint.load(state, checkpoint_id=folder)
        trained.load_state(state)
        """
        made, keys = self._made, ("training", "scheduler", "scaler", "steps", "samples", "random")
        missing = [key for key in keys if key not in state]
        if missing:
            raise ValueError(f"state must be that of Assembled.state(), but has no {', '.join(missing)}")
        if len(state["scheduler"]) != len(made.schedulers):
            raise ValueError(f"state has {len(state['scheduler'])} schedulers, but there are {len(made.schedulers)}")
        made.zero.load_state_dict(dict(state["training"]))
        for scheduler, saved in zip(made.schedulers, state["scheduler"], strict=True):
            scheduler.load_state_dict(saved)
        if state["scaler"]:
            made.scaler.load_state_dict(state["scaler"])
        self._steps, self._samples = int(state["steps"]), int(state["samples"])
        restore_random_states(self.mesh, self.layout, state["random"])

    def explain(self) -> LayoutReport:
        """Who holds and sends what: a table by `str`, a picture by `.svg`. Collective: one all-gather."""
        return make_report(self.layout, self.mesh, self.parts, self.zero, self._made.calls)

    def close(self) -> None:
        """Give back hooks, recomputation, files, shared memory and groups; the model stays as it is, split, with its
        values. Again: nothing."""
        self.zero.close()
        while self._recomputed:
            with suppress(ValueError):  # a stage may have no layers
                recompute.remove_recompute(self._recomputed.pop())
        if self._made.pipe is not None:
            self._made.pipe.close()
        if self._made.owns_mesh:
            self.mesh.close()

    # ---- a step

    @property
    def _microbatches(self) -> int:
        return self.layout.pipeline.microbatches if self.layout.pp > 1 else 1

    def _agree(self, batch: Any, *, compare: bool) -> tuple[FedBatch, GlobalBatch]:
        """This rank's batch, and what all ranks have together."""
        fed, tokens, problem = None, 0, None
        parts = self.layout.accumulate * self._microbatches
        try:
            fed = self._made.objective.read(batch)
            self._made.objective.check_ids(fed)
            self._made.objective.check_sequences(fed, self.layout.cp)
            tokens = count(fed.target)
            if fed.rows < parts:
                raise ValueError(f"batch has {fed.rows} rows here, too few for {parts} microbatches ({self.layout})")
            if self._balance and fed.rows % parts:
                raise ValueError(
                    f"balance losses are means of microbatches of equal sizes, and {fed.rows} rows cannot be cut into "
                    f"{parts}"
                )
        except Exception as error:  # raised on all ranks
            problem = error
        whole = self._agreement.gather(fed, tokens, problem, compare=compare)
        assert fed is not None
        if whole.tokens == 0:
            raise ValueError("no target of the global batch counts: all are -100")
        if whole.rows not in self._checked_rows:
            self.layout.check(self._made.shape, batch=whole.rows)
            self._checked_rows.add(whole.rows)
        return fed, whole

    def _reduced(self, total: Tensor) -> float:
        """The loss, of this rank's part of it: averaged over data parallelism, summed over cp."""
        total = total.double()
        for comm in self._sums:
            total = comm.all_reduce(total)
        return float(total) / self.layout.dp

    def _update(self, loss: float) -> bool:
        """The optimizers' step; whether it was skipped."""
        made = self._made
        skipped = self.zero.skipped + made.scaler.skipped
        made.scaler.step(made.optimizers)  # at once: ranks of a pipeline may have different numbers of them
        made.scaler.update()
        is_skipped = self.zero.skipped + made.scaler.skipped > skipped
        if not is_skipped:
            for scheduler in made.schedulers:
                step: Callable[..., None] = scheduler.step
                step(*([loss] if id(scheduler) in self._metric_schedulers else []))
        self._forget_gradients()
        return is_skipped

    def _forget_gradients(self) -> None:
        for optimizer in self._made.optimizers:
            optimizer.zero_grad()

    def _mfu(self, fed: FedBatch, whole: GlobalBatch, seconds: float) -> float:
        shape, peak = self._made.shape, self._made.peak_flops
        if shape is None or peak is None or fed.target.dim() < 2:
            return math.nan
        return model_flops(shape, whole.rows, fed.target.shape[1]) / (seconds * peak * self.mesh.world_size)


def _wants_loss(scheduler: LRScheduler) -> bool:
    """Whether `step` is called with a metric, as ReduceLROnPlateau's: it gets the loss of the step."""
    needed = [
        each.name
        for each in inspect.signature(scheduler.step).parameters.values()
        if each.default is each.empty and each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
    ]
    if len(needed) > 1:
        raise TypeError(f"scheduler's step needs {', '.join(needed)}; fastpar calls it with the loss, or nothing")
    return bool(needed)


@checked(computed=False)
def model_flops(shape: ModelShape, batch: int, seq: int) -> float:
    """Flops of a training step on `batch` sequences of `seq` tokens: 6 per parameter and token in matrices, and
    attention's, scores above the diagonal included; recomputation is not counted. Over the seconds of a step and the
    peak of all devices it is the model FLOP/s utilisation (Chowdhery et al. 2022, appendix B)."""
    from fastpar.planner import Workload
    from fastpar.planner.cost import model_flops as of_work

    check_counts(batch=batch, seq=seq)
    return of_work(Workload(shape, batch, seq))
