"""Running a schedule: `Pipeline`.

    schedule = make_schedule("1f1b", num_ranks=4, num_microbatches=8)
    pipe = Pipeline([module], schedule, mesh["pp"], loss=loss)      # this rank's part of the model
    loss = pipe.step(input_ids, target=labels)                      # forward and backward of all microbatches
    optimizer.step()

What runs is the schedule's list of actions, one after the other; nothing is reordered, and what a rank did and when is
kept as a timeline that can be drawn beside the simulated one. Gradients equal those of

    for x, y in microbatches:
        (loss(model(x), y) / num_microbatches).backward()

bit for bit, for every schedule that keeps the microbatches of each stage in order, as all generated ones do.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from fastpar.arguments import checked
from fastpar.comm import CommError, PointToPoint
from fastpar.comm.ranges import annotate
from fastpar.pipeline.runtime.batch_run import BatchRun, Loss, PipelineCall
from fastpar.pipeline.runtime.grad_scale import GradScale
from fastpar.pipeline.runtime.head_run import HeadRun, Purpose
from fastpar.pipeline.runtime.rank_modules import RankModules
from fastpar.pipeline.runtime.sharded_head import ShardedHead
from fastpar.pipeline.runtime.shared_grads import SharedGrads, find_shared
from fastpar.pipeline.runtime.stage_run import StageRun
from fastpar.pipeline.runtime.transfers import StageTransfers
from fastpar.pipeline.runtime.weighing import MicrobatchCounts, PipelineLossRule
from fastpar.pipeline.runtime.wiring import (
    MakeOptimizer,
    check_split_sequence,
    make_head,
    make_optimizers,
    stage_run,
    stages_of_rank,
)
from fastpar.pipeline.schedules.lowering import add_communication
from fastpar.pipeline.schedules.schedule import Action, ActionType, Schedule, ScheduleError
from fastpar.pipeline.schedules.validate import check
from fastpar.pipeline.simulation.timeline import Event, Timeline
from fastpar.pipeline.stages.absent import SealedStandIns
from fastpar.pipeline.stages.agreement import StageAgreement
from fastpar.pipeline.stages.batch import Microbatches, SplitSequence
from fastpar.pipeline.stages.chain import Edge
from fastpar.pipeline.stages.stage import Stage

_E = TypeVar("_E", bound=BaseException)

_WHOLE, _INPUT, _WEIGHT = ActionType.BACKWARD, ActionType.BACKWARD_INPUT, ActionType.BACKWARD_WEIGHT
_FORWARD_ONLY = (ActionType.FORWARD, ActionType.SEND_F, ActionType.RECV_F, ActionType.HEAD_FORWARD)


class PipelineError(RuntimeError):
    """An action failed; the message names rank, stage, microbatch and action, and the cause is chained."""


class Pipeline(RankModules):
    """This rank's stages of a model, and the schedule that runs them with those of the other ranks.

    stages     this rank's stages, in the order of `schedule.stages_of(rank)`: modules, or `Stage`s of a `Partition`
    schedule   what to run; transfers are added where it has none
    group      the ranks of the pipeline: a ProcessGroup, a 1-D DeviceMesh; None: one rank that holds all stages
    loss       loss(output, target) -> scalar Tensor, on the last stage; None: the last module returns the loss
    reduction  "mean": of the batch's tokens, where the loss is a model's own or a `CrossEntropy`; other losses count
               1 / num_microbatches each (for schedules that update the weights on their way, 1 / microbatches per
               update), and microbatches with unequal numbers of targets that are not -100, as those of a batch that
               does not divide, are refused.
               "microbatch_mean": 1 / num_microbatches each, whatever the loss. "sum": as it is
    optimizer  for such schedules: makes the optimizer of a list of parameters, as `partial(torch.optim.SGD, lr=0.1)`
    head       this rank's shard of the head, for a schedule that has it on every rank (`shard_head`); it computes the
               loss, and `target` goes to it
    edges      skip connections between parts that are not neighbours: `Partition.edges`
    sequence   sequences of which this rank has some tokens: the region of `fastpar.context`, for each microbatch its
               rows. The loss is then a part, and its denominator that of all ranks
    timeout    seconds until a wait for another rank fails; by default those of the group's mesh

    Every rank of the group makes its Pipeline, with the same schedule. Raises ScheduleError for a schedule that cannot
    be run, ValueError for stages that do not fit it and for shared parameters that differ between ranks.
    """

    @checked(computed=False)
    def __init__(
        self,
        stages: Sequence[nn.Module | Stage],
        schedule: Schedule,
        group: ProcessGroup | DeviceMesh | None = None,
        *,
        loss: Loss | None = None,
        reduction: str = "mean",
        optimizer: MakeOptimizer | None = None,
        head: ShardedHead | None = None,
        edges: Iterable[Edge] = (),
        sequence: SplitSequence | None = None,
        timeout: float | None = None,
        transport: str = "auto",
    ) -> None:
        if reduction not in ("mean", "microbatch_mean", "sum"):
            raise ValueError(f"reduction must be 'mean', 'microbatch_mean' or 'sum', got {reduction!r}")
        pairs = list(dict.fromkeys((edge.source, edge.destination) for edge in edges))
        self.schedule = schedule if schedule.has_transfers else add_communication(schedule, pairs)
        check(self.schedule)
        self._p2p = PointToPoint(group, timeout=timeout, transport=transport)
        self._closing = weakref.finalize(self, self._p2p.close)
        self._closing.atexit = False
        self._agreement = StageAgreement(self._p2p)
        self.rank = self._p2p.rank
        if schedule.num_ranks != self._p2p.size:
            raise ValueError(f"the schedule is for {schedule.num_ranks} ranks, but the group has {self._p2p.size}")
        self.stages = stages_of_rank(schedule, self.rank, stages)
        counts = MicrobatchCounts.of(schedule)
        self._reduction, self._updates = reduction, counts.updates
        options = (
            f"reduction={reduction!r}, {'a' if loss is not None else 'no'} loss, optimizer={optimizer is not None}"
        )
        keywords = self._agreement.meet(self.schedule, self.stages.values(), options)  # of the stages of all ranks
        self.optimizers = make_optimizers(self.schedule, self.stages, self._updates, optimizer)
        self._exchange = StageTransfers(self.schedule, self.rank, self._p2p)
        self._runs = {
            s: stage_run(self.schedule, self.rank, s, stage, self.optimizers.get(s)) for s, stage in self.stages.items()
        }
        self.head = head
        rule = self._loss_rule(loss, counts)
        if sequence is not None:
            check_split_sequence(self._agreement, self.schedule, self._updates, rule)
        self._batch = BatchRun(keywords, loss, rule, counts.equal(reduction), sequence)
        tags = 2 * schedule.num_stages**2 * schedule.num_microbatches
        self._loss_tag, shared_tag = tags, tags + 1
        self._head = make_head(self.schedule, self._p2p, head, has_loss=loss is not None, tags=tags + 2)
        shared = find_shared(schedule, self.rank, self.stages)
        if shared and self._updates:
            raise ValueError(
                f"{shared[0].name} is shared by stages that update their weights on their way, each at other times "
                f"({schedule.name!r}): untie it, or take a schedule without updates"
            )
        self._shared = SharedGrads(shared, self.rank, self._p2p, shared_tag)
        self._shared.check_equal()
        self._training = self._program(self.schedule.actions[self.rank])
        self._forward_only = self._program(a for a in self.schedule.flat(self.rank) if a.type in _FORWARD_ONLY)
        self._scale = GradScale()
        self._results: dict[int, Any] = {}  # by microbatch: losses or outputs of the last stage
        self._times: list[tuple[float, float]] = []
        self._executed: Sequence[Action] = ()
        self._failure: str | None = None
        # Around every run, said whether it trains: where parameters are sharded, they are gathered for it.
        self.around_runs: Callable[[bool], AbstractContextManager[None]] = lambda trains: nullcontext()
        self._stand_ins = SealedStandIns(stage.module for stage in self.stages.values())

    # What users call

    def step(self, *args: Any, target: Any = None, denominator: float | None = None, **kwargs: Any) -> Tensor:
        """Forward and backward of one batch; gradients are added to `.grad`. Returns the batch's loss on every rank.

        args    inputs of the first stage    target   what the loss compares with, on the last stage
        kwargs  go to every stage whose forward takes the name
        denominator  of a `CrossEntropy`: what the sum over the tokens is divided by, instead of their number, where
                several pipelines or calls share a batch; the same on all ranks

        Each is cut into microbatches along dim 0 (see `Microbatches` for other ways); a rank may leave out what its
        stages do not need. Schedules that update the weights on their way also step their optimizers.
        Raises PipelineError where a stage fails, on that rank; on the others CommError: PeerFailedError with its
        message, PeerLostError where a process has died, CommTimeoutError. The pipeline cannot be used afterwards.
        """
        if not torch.is_grad_enabled():
            raise RuntimeError("step() computes gradients, but they are switched off here; evaluate() needs none")
        self._begin(PipelineCall(args, kwargs, target, denominator), Purpose.TRAIN)
        with self.around_runs(True):
            self._shared.begin()
            for run in self._runs.values():
                if run.versions is not None:
                    run.versions.restart()
            self._run(self._training, loss=True)
            self._finish("summing the gradients of shared parameters", self._shared.finish)
        self.note_gradients()
        return self._total_loss()

    def note_gradients(self) -> None:
        """Called when gradients are those to step with, as ZeRO does when it has reduced them: see grad_scale.py."""
        if self._agreement.is_first_or_one_in_many and not self._updates:
            self._scale.begin(self.parameters())

    def evaluate(self, *args: Any, target: Any = None, denominator: float | None = None, **kwargs: Any) -> Tensor:
        """The loss of a batch, on every rank, without gradients; arguments and errors as for `step`."""
        self._begin(PipelineCall(args, kwargs, target, denominator), Purpose.LOSS)
        with torch.no_grad(), self.around_runs(False):
            self._run(self._forward_only, loss=True)
            self._collect_head(HeadRun.loss)
        return self._total_loss()

    def forward(self, *args: Any, **kwargs: Any) -> Microbatches | None:
        """The outputs of the last stage, one per microbatch, on the rank that holds it (DualPipe: None for the
        microbatches of the other chain); None on all others. No gradients.
        """
        self._begin(PipelineCall(args, kwargs), Purpose.LOGITS)
        with torch.no_grad(), self.around_runs(False):
            self._run(self._forward_only, loss=False)
            self._collect_head(HeadRun.logits)
        outputs, self._results = self._results, {}
        return Microbatches(outputs.get(index) for index in range(self.schedule.num_microbatches)) if outputs else None

    @property
    def timeline(self) -> Timeline:
        """What this rank did in its last run, in seconds of the clock that all processes of a host share."""
        times = zip(self._executed, self._times, strict=False)
        events = tuple(Event(self.rank, action, start, end) for action, (start, end) in times)
        return Timeline(events, unit="s", name=self.schedule.name)

    def gather_timeline(self) -> Timeline:
        """The timelines of all ranks in one; called by all ranks, and returned on each. Ranks of several hosts have
        clocks of their own: see `Timeline.merge` for offsets.
        """
        own = self.timeline
        events = [(str(event.action), float(event.start), float(event.end)) for event in own.events]
        everyone = self._finish("gathering the timelines", partial(self._agreement.gather, events))
        return Timeline.merge(
            [
                Timeline(tuple(Event(rank, Action.parse(text), *times) for text, *times in each), own.unit, own.name)
                for rank, each in enumerate(everyone)
            ]
        )

    def _loss_rule(self, loss: Loss | None, counts: MicrobatchCounts) -> PipelineLossRule | None:
        """None where the loss is computed elsewhere."""
        last = next((stage for stage in self.stages.values() if stage.is_last), None)
        if last is None:
            return None
        computed = self.head.loss if self.head is not None else loss
        return PipelineLossRule(computed, last.loss_mean, self._reduction, counts)

    def __repr__(self) -> str:
        s = self.schedule
        stages = ", ".join(f"{i} (part {stage.part})" for i, stage in self.stages.items())
        return f"Pipeline({s.name}, rank {self.rank} of {s.num_ranks}, stages {stages} of {s.num_stages}, " + (
            f"{s.num_microbatches} microbatches)"
        )

    def close(self) -> None:
        """Give back the memory shared with other ranks, and threads; again: nothing. A dropped pipeline does so."""
        self._closing()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(
            "a Pipeline is not called: pipe.step(inputs, target=...) computes the loss and the gradients, "
            "pipe.evaluate(inputs, target=...) the loss alone, pipe.forward(inputs) the outputs of the last stage"
        )

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Not available: TypeError says what to write instead."""
        raise TypeError(
            "a Pipeline does not generate, as every token would wait for every rank: collect the state dicts of all "
            "ranks (pipe.state_dict() has the names of the whole model) in a model on one rank, and generate there"
        )

    def __reduce__(self) -> Any:
        raise TypeError(
            "a Pipeline is neither copied nor pickled, as it holds memory that its ranks share: copy or save "
            "pipe.state_dict()"
        )

    # Running

    def _program(self, actions: Iterable[Action]) -> list[tuple[Callable[[Pipeline, Action], None], Action]]:
        # Functions, not bound methods: a pipeline in no cycle gives back what it holds when it is dropped.
        return [(_HANDLERS[action.type], action) for action in actions]

    def _begin(self, call: PipelineCall, purpose: Purpose) -> None:
        if self._failure is not None:
            raise RuntimeError(f"this pipeline has failed and cannot be used any more: {self._failure}")
        if not self._closing.alive:
            raise RuntimeError("this pipeline has been closed")
        error: Exception | None = None
        try:
            self._stand_ins.check()
            self._batch.cut(call, purpose)
            self._results = {}
        except Exception as found:  # raised below, on every rank
            error = found
        try:
            self._agreement.begin_run(error, partial(self._batch.summary, call), self._scale.take())
        except BaseException as found:
            self._batch.forget()
            if isinstance(found, CommError):
                self._fail(found, "beginning a run", None)
            raise
        if self._head is not None:
            self._head.begin(purpose, self._batch.weighing.divisors)

    def _run(self, program: list[tuple[Callable[[Pipeline, Action], None], Action]], *, loss: bool) -> None:
        self._wants_loss = loss
        self._executed = [action for _, action in program]
        self._times = times = []
        clock = time.perf_counter
        action: Action | None = None
        try:
            for handler, action in program:
                begin = clock()
                with annotate(f"fastpar::pipeline::{action}"):
                    handler(self, action)
                times.append((begin, clock()))
        except BaseException as error:
            self._fail(error, f"action {action} ({len(times) + 1} of {len(program)})", action)
        finally:
            self._batch.forget()

    def _finish(self, what: str, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except BaseException as error:
            self._fail(error, what, None)

    def _fail(self, error: BaseException, doing: str, action: Action | None) -> None:
        """Tell the other ranks, and raise what says where it happened."""
        where = f"rank {self.rank} of the pipeline"
        if action is not None and not action.parts:
            part = "the head" if action.type.is_head else f"part {self.schedule.part_of(action.stage)} of the model"
            where += f", stage {action.stage} ({part})"
            where += "" if action.microbatch is None else f", microbatch {action.microbatch}"
        text = f"{where}, {doing}: {error if isinstance(error, CommError) else f'{type(error).__name__}: {error}'}"
        self._failure = text
        for run in self._runs.values():
            run.clear()
        if self._head is not None:
            self._head.clear()
        self._exchange.clear()
        self._p2p.abort(text)
        if isinstance(error, CommError):
            raise _with_message(error, text) from error
        if isinstance(error, Exception):
            raise PipelineError(text) from error
        raise error

    # Actions

    def _forward(self, action: Action) -> None:
        stage, microbatch = action.stage, _microbatch(action)
        run, take = self._runs[stage], self._exchange.take_activations
        received = {source: take(source, stage, microbatch) for source in run.sources}
        batch = self._batch
        inputs = batch.inputs[microbatch] if run.previous is None else ()
        loss_of = partial(batch.loss_of, microbatch) if self._wants_loss else None
        kwargs = batch.kwargs_of(microbatch, is_last=run.following is None)
        with batch.running(microbatch):
            packets, result = run.forward(microbatch, received, inputs, kwargs, action.version, loss_of)
        for destination, packet in packets.items():
            self._exchange.post_activations(stage, destination, microbatch, packet)
        if run.following is None:
            self._results[microbatch] = result
        elif self._head is not None and stage == self.schedule.last_stage:
            packet = take(stage, self.schedule.num_stages, microbatch)
            hidden = packet.tensors[0] if len(packet.tensors) == 1 else packet.tensors
            self._head.offer(microbatch, hidden, batch.targets[microbatch])

    def _transfer(self, action: Action) -> None:
        self._exchange.run(action)

    def _backward_whole(self, action: Action) -> None:
        self._backward(action, StageRun.backward)

    def _backward_input(self, action: Action) -> None:
        self._backward(action, StageRun.backward_input)

    def _backward(self, action: Action, how: Callable[..., dict[int, list[Tensor | None]]]) -> None:
        stage, microbatch = action.stage, _microbatch(action)
        run, take = self._runs[stage], self._exchange.take_gradients
        if self._head is not None and stage == self.schedule.last_stage:
            self._results[microbatch], gradient = self._head.combine(microbatch)
            self._exchange.post_gradients(stage, self.schedule.num_stages, microbatch, [gradient])
        grads = {destination: take(stage, destination, microbatch) for destination in run.destinations}
        for source, own in how(run, microbatch, grads).items():
            self._exchange.post_gradients(source, stage, microbatch, own)

    def _backward_weight(self, action: Action) -> None:
        self._runs[action.stage].backward_weight(_microbatch(action))

    def _head_forward(self, action: Action) -> None:
        assert self._head is not None
        self._head.forward(_microbatch(action))

    def _head_weight(self, action: Action) -> None:
        assert self._head is not None
        self._head.backward_weight(_microbatch(action))

    def _collect_head(self, how: Callable[[HeadRun, int], Tensor]) -> None:
        """Beside the last stage of a sharded head: the results of a run without backward."""
        head = self._head
        if head is not None and self.rank == self.schedule.stage_ranks[self.schedule.last_stage]:
            for microbatch in range(self.schedule.num_microbatches):
                self._results[microbatch] = self._finish("combining the head's shards", partial(how, head, microbatch))

    def _overlap(self, action: Action) -> None:
        for part in action.parts:
            _HANDLERS[part.type](self, part)

    def _change_weights(self, action: Action) -> None:
        versions = self._runs[action.stage].versions
        if versions is None:
            return  # a stage without trainable parameters has one version for ever
        if action.type is ActionType.STEP:
            versions.step()
        else:
            assert action.version is not None
            (versions.stash if action.type is ActionType.STASH else versions.drop)(action.version)

    def _change_sharding(self, action: Action) -> None:
        module = self.stages[action.stage].module
        method = getattr(module, action.type.value.lower(), None)
        if method is None:
            raise ScheduleError(
                f"{action}: the module of stage {action.stage} ({type(module).__name__}) has no such method; apply "
                "torch.distributed.fsdp.fully_shard to it, or take UNSHARD and RESHARD out of the schedule"
            )
        method()

    def _ready_to_reduce(self, action: Action) -> None:
        self._shared.contribute(self.schedule.part_of(action.stage))

    def _total_loss(self) -> Tensor:
        """The sum of the microbatches' losses in their order; the ranks with the last stages send theirs to all."""
        losses = dict(self._results)
        self._results = {}
        ends = {self.schedule.stage_ranks[chain.stages[-1]]: chain.microbatches for chain in self.schedule.chains}

        def collect() -> None:
            if losses:
                own = torch.stack([losses[index] for index in ends[self.rank]])
                for peer in set(range(self._p2p.size)) - {self.rank}:
                    self._p2p.send(peer, self._loss_tag, [own])
            for rank in sorted(set(ends) - {self.rank}):
                (theirs,), _ = self._p2p.recv(rank, self._loss_tag)
                losses.update(zip(ends[rank], theirs.clone().unbind(), strict=True))

        self._finish("collecting the loss", collect)
        total = losses[0].clone()
        for index in range(1, self.schedule.num_microbatches):
            total += losses[index]
        return total / self._updates if self._updates and self._reduction != "sum" else total


_HANDLERS: dict[ActionType, Callable[[Pipeline, Action], None]] = {
    ActionType.FORWARD: Pipeline._forward,
    _WHOLE: Pipeline._backward_whole,
    _INPUT: Pipeline._backward_input,
    _WEIGHT: Pipeline._backward_weight,
    ActionType.OVERLAP_F_B: Pipeline._overlap,
    ActionType.HEAD_FORWARD: Pipeline._head_forward,
    ActionType.HEAD_WEIGHT: Pipeline._head_weight,
    ActionType.STASH: Pipeline._change_weights,
    ActionType.DROP: Pipeline._change_weights,
    ActionType.STEP: Pipeline._change_weights,
    ActionType.UNSHARD: Pipeline._change_sharding,
    ActionType.RESHARD: Pipeline._change_sharding,
    ActionType.REDUCE_GRAD: Pipeline._ready_to_reduce,
    **dict.fromkeys((t for t in ActionType if t.is_transfer), Pipeline._transfer),
}


def _microbatch(action: Action) -> int:
    assert action.microbatch is not None
    return action.microbatch


def _with_message(error: _E, text: str) -> _E:
    """An error of the same type with another message."""
    try:
        return type(error)(text)
    except TypeError:  # a type with arguments of its own: keep it as it is
        return error
