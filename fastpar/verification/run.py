"""`verify`: what all ranks do together."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fastpar.arguments import checked
from fastpar.comm import CommError
from fastpar.mesh import Mesh
from fastpar.verification.culprit import findings_of
from fastpar.verification.inputs import FunctionalDropoutOff, Inputs, LossFunction, built, model_checksums, seeded
from fastpar.verification.judge import Judge, RankRecord, RankStep
from fastpar.verification.layout import LaidOut, MakeOptimizer, VerifyLayout
from fastpar.verification.pieces import Piece
from fastpar.verification.reference import Job, references, step_seed
from fastpar.verification.report import VerifyFinding, VerifyReport
from fastpar.verification.trace import StepTrace
from fastpar.verification.words import parse_layout

_WAIT = timedelta(hours=1)  # for the rank that runs the whole model


@checked(computed=False, but=("layout",))
def verify(
    build: Callable[[], nn.Module],
    layout: VerifyLayout | Mesh | str,
    batch: Any,
    *,
    target: Any = None,
    loss: LossFunction | None = None,
    optimizer: MakeOptimizer | None = None,
    steps: int = 2,
    noise: float = 1.0,
    seed: int = 0,
    rank_seeds: bool = False,
) -> VerifyReport:
    """Train a model for two steps, whole and in a layout, and say where they first differ. Collective: all ranks.

        mesh = fp.init_mesh(tp=2)                                   # under torchrun, or in one process
        report = fp.verify(build, fp.VerifyLayout(mesh, sequence_parallel=True), {"input_ids": ids, "labels": ids})
        report.raise_if_wrong()

    build       makes the model, whole, the same in every call and on every rank (generators of torch and random are
                seeded before). It is called several times; take a small one
    layout      a `VerifyLayout`; a Mesh, with the defaults of one; or words of `fp.Layout` such as "tp2,sp", whose mesh
                is made for the call
    batch       the whole batch, the same on every rank: a mapping of keyword inputs, a tuple of positional ones, or
                one tensor. Data-parallel ranks and microbatches get equal parts of dim 0
    target, loss    loss(output, target) -> scalar; without a loss, the model's output is one, or has one (`.loss`). It
                gets whole logits, unless `layout.options` has gather_logits=False
    optimizer   makes the optimizer of a list of parameters; by default SGD with momentum, whose updates show every
                error of a gradient in proportion
    steps       two by default: the second sees what the first has written
    noise       on every parameter, so that biases and norms are not 0 and 1; 0: the weights as built
    rank_seeds  seed the ranks differently while the parallel model runs, as many training scripts do. In one forward
                more, dropout that is switched off elsewhere (see *docs/verify.md*) is on: ranks must still hold alike
                what they hold whole

    Compared are: the floating-point inputs and outputs of every module that both have, the loss, the gradients of
    outputs and inputs, of every parameter, their norm as `fp.clip_grad_norm_` gives it, and the updates. Local parts
    (features, heads, tokens, rows of the vocabulary) are compared with that part of the whole. The bound is the
    rounding that the whole model has in its dtype, found with a run in float64: see `fastpar.verification.judge`.

    Over cp the batch is input_ids and labels, which `fp.context.shard` splits, and the loss the model's own; a rank's
    tensors are compared with those of its tokens in the whole model.

    Every rank gets the same report. What the layout refuses (parallelize, shard, ...) is a finding with its text, and
    so is an error while it runs. Raises ValueError and TypeError, on all ranks, for what cannot be compared: a build()
    that gives other weights each time, a batch that the layout cannot divide, a model that fails by itself.
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    owned: Mesh | None = None
    if isinstance(layout, str):
        layout = parse_layout(layout).layout()
        owned = layout.mesh
    elif isinstance(layout, Mesh):
        layout = VerifyLayout(layout)
    elif not isinstance(layout, VerifyLayout):
        raise TypeError(f"layout must be a VerifyLayout, a Mesh or words, got {type(layout).__name__}")
    exchange = _ReportExchange()
    try:
        make = optimizer or partial(torch.optim.SGD, lr=0.01, momentum=0.9, foreach=False)
        built_alike = partial(built, build, seed, noise)
        model, inputs = _prepared(exchange, layout, built_alike, batch, target)
        job = Job(built_alike, inputs, loss, make, steps, seed)
        return _Verification(layout, exchange, job, rank_seeds).run(model)
    finally:
        exchange.close()
        if owned is not None:
            owned.close()


class _ReportExchange:
    """Plain values between all ranks, on a group of its own, whatever has happened to others."""

    def __init__(self) -> None:
        self.rank, self.size, self._group = 0, 1, None
        if dist.is_initialized() and dist.get_world_size() > 1:
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
            self._group = dist.new_group(backend="gloo", timeout=_WAIT)

    def everyone(self, value: Any) -> list[Any]:
        """The values of all ranks, on every rank."""
        found = [value] * self.size
        if self._group is not None:
            dist.all_gather_object(found, value, group=self._group)
        return found

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks on rank 0; nothing on the others."""
        if self._group is None:
            return [value]
        found = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, found, dst=0, group=self._group)
        return found or []

    def of_first(self, value: Any) -> Any:
        """Rank 0's value on every rank."""
        if self._group is None:
            return value
        held = [value]
        dist.broadcast_object_list(held, src=0, group=self._group)
        return held[0]

    def close(self) -> None:
        if self._group is not None:
            dist.destroy_process_group(self._group)


def _prepared(
    exchange: _ReportExchange, layout: VerifyLayout, build: Callable[[], nn.Module], batch: Any, target: Any
) -> tuple[nn.Module, Inputs]:
    """The model and the batch, when all ranks have the same model."""

    def prepare() -> tuple[nn.Module, Inputs, dict[str, int]]:
        model = build()
        inputs = Inputs.of(batch, target, model)
        count = layout.mesh.size("dp") * layout.microbatches
        if inputs.rows % count:
            raise ValueError(
                f"batch has {inputs.rows} rows, which {layout.mesh.size('dp')} data-parallel ranks with "
                f"{layout.microbatches} microbatches each cannot share evenly"
            )
        inputs.parts(count)
        return model, inputs, model_checksums(model)

    model, inputs, sums = _agreed(exchange, "verify cannot begin", prepare)
    again = model_checksums(build()) if exchange.rank == 0 else sums
    everyone = exchange.everyone(sums)
    differs = next((name for name in sums if any(other.get(name) != sums[name] for other in everyone)), None)
    differs = differs or next((name for name in sums if again.get(name) != sums[name]), None)
    differs = next((name for name in exchange.everyone(differs) if name), None)
    if differs is not None:
        raise ValueError(
            f"build() must give the same model on every rank and in every call, but {differs} differs. Take random "
            "numbers from torch's and Python's default generators, which are seeded before every call"
        )
    return model, inputs


def _agreed(exchange: _ReportExchange, what: str, function: Callable[[], Any]) -> Any:
    """The result of the function; where it raises on one rank, an error on all."""
    found, error = None, None
    try:
        found = function()
    except Exception as raised:
        error = raised
    texts = exchange.everyone("" if error is None else f"{type(error).__name__}: {error}")
    first = next((rank for rank, text in enumerate(texts) if text), None)
    if error is not None:
        raise error
    if first is not None:
        raise ValueError(f"{what}: rank {first} raised {texts[first]}")
    return found


class _Verification:
    """One run of `verify`, from the point where all ranks have the same model."""

    def __init__(self, layout: VerifyLayout, exchange: _ReportExchange, job: Job, rank_seeds: bool) -> None:
        self._layout, self._exchange, self._job = layout, exchange, job
        self._rank_seeds = rank_seeds
        self._own_seed = 1_000_003 * exchange.rank if rank_seeds else 0
        mesh = layout.mesh
        self._dp, self._tokens = mesh.size("dp"), None
        self._inputs = job.inputs.parts(self._dp)[mesh.rank("dp")]
        self._tokens = job.inputs.parts(self._dp * layout.microbatches)[0].tokens
        self._notes: list[str] = []

    def run(self, model: nn.Module) -> VerifyReport:
        batch = self._different_batches()
        laid_out, error = _tried(lambda: LaidOut(model, self._layout, self._job.make_optimizer, self._job.loss))
        failure = self._failure(error, laid_out, 0, "refused")
        if failure is not None:
            return self._report([*batch, failure])
        assert laid_out is not None
        try:
            return self._compare(laid_out, batch)
        finally:
            laid_out.close()

    def _compare(self, laid_out: LaidOut, batch: list[VerifyFinding]) -> VerifyReport:
        """Both runs, and the comparison on rank 0."""
        dropouts = laid_out.dropouts()
        if self._layout.mesh.size("pp") > 1 and laid_out.switch_dropouts_off():
            self._note("dropout was switched off: each stage of a pipeline draws masks of its own")
            dropouts = []
        dropouts = sorted({path for paths in self._exchange.everyone(dropouts) for path in paths})
        whole = _agreed(self._exchange, "the whole model fails on this batch", lambda: self._whole(dropouts))
        record = self._record(laid_out)
        off = FunctionalDropoutOff(lambda: (laid_out.trace.active or [""])[-1])
        for number in range(self._job.steps):
            step, error = _tried(partial(self._step, laid_out, number, off))
            failure = self._failure(error, laid_out, number, "error")
            if failure is not None:
                return self._report([*batch, failure])
            assert step is not None
            record.steps.append(step)
            record.positions = laid_out.positions()
        if self._rank_seeds and laid_out.pipe is None:
            trace, error = _tried(partial(self._reseeded, laid_out))
            failure = self._failure(error, laid_out, self._job.steps, "error")
            if failure is not None:
                return self._report([*batch, failure])
            record.reseeded = trace
        records = self._exchange.gather(record)
        found: tuple[Any, ...] = ()
        if self._exchange.rank == 0:
            truth, native, note = whole
            self._notes += [text for text in (note, truth.weighs_parts()) if text]
            for path, p in truth.functional_dropout.items():
                self._note(f"dropout (p={p:g}) that the code of {path or 'the model'} draws by itself was switched off")
            judge = Judge(
                truth, native, records, dp=self._dp, microbatches=self._layout.microbatches, tokens=self._tokens
            )
            checks = judge.checks()
            styles = {path: style for each in records for path, style in each.hints.styles.items()}
            found = findings_of(checks, [step.traces[0] for step in truth.steps], styles), checks, self._notes
        findings, checks, self._notes = self._exchange.of_first(found)
        return self._report([*batch, *findings], checks)

    def _whole(self, dropouts: list[str]) -> Any:
        if self._exchange.rank != 0:
            return None
        alike = self._layout.options.get("reduction") == "microbatch_mean"
        return references(self._job, self._dp, self._layout.microbatches, dropouts, alike=alike)

    def _record(self, laid_out: LaidOut) -> RankRecord:
        mesh = self._layout.mesh
        microbatches = tuple(laid_out.pipe.schedule.chains[0].microbatches) if laid_out.pipe is not None else (0,)
        return RankRecord(
            self._exchange.rank,
            mesh.rank("pp"),
            mesh.rank("dp"),
            mesh.rank("cp"),
            mesh.rank("tp"),
            microbatches,
            laid_out.hints,
        )

    def _step(self, laid_out: LaidOut, number: int, off: FunctionalDropoutOff) -> RankStep:
        laid_out.trace.begin()
        with seeded(step_seed(self._job, number) + self._own_seed), off:
            loss = laid_out.forward_backward(self._inputs)
        grads = laid_out.grads()
        before = laid_out.values()
        norm = laid_out.update()
        pairs = zip(before, laid_out.values(), strict=True)
        updates = [
            Piece(old.name, old.index, None if old.value is None or new.value is None else new.value - old.value)
            for old, new in pairs
        ]
        return RankStep(loss, laid_out.trace.step, grads, updates, norm)

    def _reseeded(self, laid_out: LaidOut) -> StepTrace:
        """One more forward, in which code that draws dropout by itself does so."""
        laid_out.trace.begin()
        with seeded(self._job.seed + self._own_seed):
            laid_out.forward(self._inputs)
        return laid_out.trace.step

    def _different_batches(self) -> list[VerifyFinding]:
        everyone = self._exchange.everyone(self._job.inputs.checksums())
        for name, value in everyone[0].items():
            ranks = tuple(rank for rank, sums in enumerate(everyone) if sums.get(name) != value)
            if ranks:
                what = f"{name} differs from that of rank 0: ranks of one model must be given the same batch"
                return [VerifyFinding("batch", "(batch)", "", "", what, ranks=ranks)]
        return []

    def _failure(self, error: Exception | None, laid_out: LaidOut | None, step: int, kind: str) -> VerifyFinding | None:
        """The failure of any rank: the first error that is not about another rank."""
        text, module = "", ""
        if error is not None:
            kind_of = next((refusal for refusal in _REFUSALS if isinstance(error, refusal)), type(error))
            text = f"{kind_of.__name__}: {error}"
            module = (laid_out.trace.active or ["(model)"])[-1] if laid_out is not None else "(layout)"
        everyone = self._exchange.everyone((text, module or "(model)", isinstance(error, CommError)))
        failed = [rank for rank, (words, _, _) in enumerate(everyone) if words]
        if not failed:
            return None
        first = min(failed, key=lambda rank: (everyone[rank][2], rank))
        words, where, _ = everyone[first]
        kind = kind if words.startswith(tuple(refusal.__name__ for refusal in _REFUSALS)) else "error"
        return VerifyFinding(kind, where, "", "", f"rank {first}: {words}", step, ranks=tuple(failed))

    def _note(self, text: str) -> None:
        if text not in self._notes:
            self._notes.append(text)

    def _report(self, findings: list[VerifyFinding], checks: Any = ()) -> VerifyReport:
        world = self._exchange.size
        return VerifyReport(str(self._layout), world, tuple(findings), tuple(self._notes), tuple(checks))


_REFUSALS = (ValueError, TypeError, NotImplementedError)  # and what is derived from them


def _tried(function: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return function(), None
    except Exception as error:
        return None, error
