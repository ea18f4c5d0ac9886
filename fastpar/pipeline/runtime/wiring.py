"""What a rank of a pipeline is made of: its stages, their runs and optimizers, and its shard of the head, checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from fastpar.comm import PointToPoint
from fastpar.pipeline.runtime.head_run import HeadRun
from fastpar.pipeline.runtime.sharded_head import ShardedHead
from fastpar.pipeline.runtime.stage_run import StageRun
from fastpar.pipeline.runtime.versions import WeightVersions
from fastpar.pipeline.runtime.weighing import PipelineLossRule
from fastpar.pipeline.schedules.schedule import ActionType, Schedule
from fastpar.pipeline.stages.agreement import StageAgreement
from fastpar.pipeline.stages.stage import Stage

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def stages_of_rank(schedule: Schedule, rank: int, stages: Sequence[nn.Module | Stage]) -> dict[int, Stage]:
    """A rank's stages by their numbers. Raises ValueError for others than the schedule has there."""
    own = schedule.stages_of(rank)
    if len(stages) != len(own):
        raise ValueError(f"rank {rank} runs stages {own} of the schedule, but {len(stages)} were given")
    if len({schedule.part_of(s) for s in own}) < len(own):
        raise ValueError(f"rank {rank} would hold a part of the model twice: its stages are {own}")
    return {s: _as_stage(stage, schedule, s) for s, stage in zip(own, stages, strict=True)}


def _as_stage(stage: nn.Module | Stage, schedule: Schedule, s: int) -> Stage:
    part, num_parts = schedule.part_of(s), schedule.num_parts
    if isinstance(stage, nn.Module):
        return Stage.of_module(stage, part, num_parts)
    if (stage.part, stage.num_parts) != (part, num_parts):
        raise ValueError(
            f"stage {s} of the schedule is part {part} of {num_parts}, but got part {stage.part} of {stage.num_parts}"
        )
    return stage


def make_optimizers(
    schedule: Schedule, stages: Mapping[int, Stage], updates: int, make: MakeOptimizer | None
) -> dict[int, torch.optim.Optimizer]:
    """One of each stage with trainable parameters, for a schedule that updates the weights on its way."""
    if (make is not None) != (updates > 0):
        has = "updates" if updates else "does not update"
        raise ValueError(
            f"the schedule {schedule.name!r} {has} the weights on its way, so optimizer= "
            + ("must be given" if updates else "must be None: call your optimizer after step()")
        )
    if make is None:
        return {}
    trained = {s: [p for p in stage.module.parameters() if p.requires_grad] for s, stage in stages.items()}
    return {s: make(parameters) for s, parameters in trained.items() if parameters}


def stage_run(schedule: Schedule, rank: int, s: int, stage: Stage, optimizer: torch.optim.Optimizer | None) -> StageRun:
    """What runs stage `s` of the rank."""
    chain = schedule.chain_of_stage(s).stages
    skips_from: dict[int, tuple[str, ...]] = {}
    for name, part in stage.receives.items():
        skips_from[chain[part]] = (*skips_from.get(chain[part], ()), name)
    halved = {a.microbatch for a in schedule.flat(rank) if a.stage == s and a.type is ActionType.BACKWARD_INPUT}
    return StageRun(
        stage,
        previous=schedule.previous_stage(s),
        following=schedule.head if s == schedule.last_stage else schedule.next_stage(s),
        skips_to={name: tuple(chain[part] for part in parts) for name, parts in stage.sends.items()},
        skips_from=skips_from,
        is_split=halved.__contains__,
        versions=WeightVersions(stage.module, lambda: optimizer.step()) if optimizer is not None else None,
    )


def make_head(
    schedule: Schedule, p2p: PointToPoint, head: ShardedHead | None, *, has_loss: bool, tags: int
) -> HeadRun | None:
    """What runs this rank's shard of the head. Raises ValueError where schedule, head and loss do not fit."""
    if (head is not None) != schedule.sharded_head:
        has = "has a sharded head" if schedule.sharded_head else "has no sharded head"
        needs = "head= must be this rank's shard" if schedule.sharded_head else "head= needs shard_head(schedule)"
        raise ValueError(f"the schedule {schedule.name!r} {has}: {needs}")
    if head is None:
        return None
    if has_loss:
        raise ValueError("a sharded head computes the loss: leave loss= out, and say there which (CrossEntropy)")
    if (head.rank, head.num_ranks) != (p2p.rank, schedule.num_ranks):
        raise ValueError(
            f"this is rank {p2p.rank} of {schedule.num_ranks}, but got the head's shard of rank {head.rank} of "
            f"{head.num_ranks}"
        )
    return HeadRun(head, schedule, p2p.rank, p2p, tags)


def check_split_sequence(
    agreement: StageAgreement, schedule: Schedule, updates: int, rule: PipelineLossRule | None
) -> None:
    """Raises ValueError, on every rank, for what sums no gradients, or is no part, of sequences that are split."""
    problem = ""
    if updates:
        problem = (
            f"the schedule {schedule.name!r} updates the weights on its way, before anybody can sum gradients "
            "over the ranks that sequences are split over: take one without updates"
        )
    try:
        if not problem and rule is not None:
            rule.check_parts()
    except ValueError as error:
        problem = str(error)
    found = next((text for text in agreement.gather(problem) if text), "")
    if found:
        raise ValueError(problem or found)
