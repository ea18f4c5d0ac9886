"""A whole model on a mesh: pipeline stages, and tensor parallelism within each of them.

    mesh = fp.init_mesh(pp=2, dp_replicate=2, tp=2)
    pipe = fp.parallelize_pipeline(model, mesh, "zbv", num_microbatches=8, loss=loss)
    optimizer = torch.optim.AdamW(pipe.parameters())
    loss = pipe.step(input_ids, target=labels)

The model is cut first, so that a rank holds no more than its stages when their layers are split over its
tensor-parallel group. Ranks that differ in their pipeline coordinate only form a pipeline; ranks of one stage that
differ in their data-parallel coordinate see different batches, and averaging their gradients is the caller's, as
without a pipeline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from fastpar.arguments import checked
from fastpar.comm import Communicator
from fastpar.context.microbatches import ContextMicrobatches
from fastpar.context.region import Context, ContextRegion
from fastpar.contracts.rehearsal import Example
from fastpar.ddp import check_model
from fastpar.mesh import Mesh
from fastpar.ops.parallel_linear.overlap import Overlap
from fastpar.parallel.api import attention_of, parallelize, proven_on, swap_of, trial_of, tried_region
from fastpar.parallel.guards import sync_weights as sync_weights_of
from fastpar.parallel.on_grid import grid_for, with_parts_sent
from fastpar.parallel.styles import Style
from fastpar.pipeline import (
    Architecture,
    CrossEntropy,
    Pipeline,
    Schedule,
    ShardedHead,
    make_schedule,
    partition,
)
from fastpar.pipeline import shard_head as with_sharded_head
from fastpar.pipeline.runtime.batch_run import Loss
from fastpar.pipeline.runtime.wiring import MakeOptimizer
from fastpar.pipeline.stages.calling import Keywords
from fastpar.pipeline.stages.stage import Stage
from fastpar.pipeline.stages.unit_costs import UnitCosts
from fastpar.recompute import Policy, apply_recompute
from fastpar.tensor.optimizer_trial import of_stage


@checked(computed=False, but=("plan",))
def parallelize_pipeline(
    model: nn.Module | Sequence[nn.Module],
    mesh: Mesh,
    schedule: str | Schedule = "1f1b",
    *,
    num_microbatches: int | None = None,
    schedule_options: Mapping[str, Any] | None = None,
    layout: str | Sequence[int] | None = None,
    split_points: Sequence[str] | None = None,
    costs: UnitCosts = "flops",
    architecture: Architecture | None = None,
    loss: Loss | None = None,
    reduction: str = "mean",
    shard_head: bool = False,
    optimizer: MakeOptimizer | None = None,
    plan: str | Mapping[str, str | Style] | None = "auto",
    sequence_parallel: bool = False,
    gather_logits: bool | None = None,
    sync_weights: str = "check",
    overlap: bool | Overlap = True,
    recompute: Policy | None = None,
    context: Context | None = None,
    example_inputs: Mapping[str, Any] | Sequence[Any] | None = None,
    timeout: float | None = None,
) -> Pipeline:
    """Cut a model over the mesh's "pp" dim, split its stages' layers over "tp", "ep" and "etp"; returns the pipeline.

    model             as for `fastpar.pipeline.partition`: a layered model such as Hugging Face's, an nn.Sequential, or
                      a list of modules. It is changed in place; the parts of other ranks are freed
    schedule          a name (`fastpar.pipeline.schedule_names()`), made for `num_microbatches` with `schedule_options`
                      such as {"stages_per_rank": 2}; or a Schedule for as many ranks as the "pp" dim has
    layout, costs     how layers fall on parts: by default so that the costliest rank costs least
                      (`fastpar.pipeline.partition`)
    split_points      in the place of a layout: paths of the modules at which the second part and all after it begin. A
                      model of any shape is cut at them, by a trace of the code between its modules
    architecture      which modules are the embedding, layers, norm and head (`fastpar.pipeline.Architecture`); None:
                      found by the names of known models, or by the order in which the model calls its modules
    loss, reduction, optimizer, timeout    as for `Pipeline`; without a loss, a model that takes `labels` (all of
                      Hugging Face's) computes its own from that keyword input, and any other must return the loss.
                      With tp > 1 the loss gets logits that are split over the vocabulary
    shard_head        split the head over the vocabulary, and over all ranks of the pipeline, so that none is slower
                      than the others (`fastpar.pipeline.shard_head`); not with tp > 1, nor tied embeddings. The loss is
                      `CrossEntropy()` or one with options, from target=; a layout does not name the head. A Schedule
                      may have its sharded head already
    plan, sequence_parallel, gather_logits, sync_weights, overlap    as for `fastpar.parallelize`; plan=None: layers
                      stay whole, as they do where the mesh has none of "tp", "ep", "etp" and the plan is "auto"
    recompute         which activations of a stage's layers to compute again in backward, such as
                      `fp.recompute.Full()`: `fastpar.apply_recompute` on every stage
    context           how sequences are split over the mesh's cp ranks, as for `fastpar.parallelize`. Every rank gives
                      the whole batch of a step to `fp.context.shard(pipe, batch)`, and the pipeline all of what that
                      returns: `pipe.step(**batch)`. The loss is this rank's part (`fp.context.total(pipe, loss)`);
                      it is the model's own, a `CrossEntropy` of batch["shift_labels"], or with reduction="sum" yours
    example_inputs    what the whole model and each part of it are tried with before it is cut, as for
                      `fastpar.parallelize`: for models of pictures or sound, and those that need further inputs. Its
                      first input is what later parts get hidden states in the place of; with `labels`, where the model
                      computes its loss

    Every rank of the mesh calls it with the same model. Raises what `make_schedule`, `partition`, `parallelize` and
    `Pipeline` raise: all of it before anything runs.
    """
    if isinstance(model, nn.Module):
        check_model(model, "parallelize_pipeline")
    size = mesh.size("pp")
    grid, cuts_tokens = grid_for(mesh, sequence_parallel=sequence_parallel)
    region = _region(model, mesh, context, plan)
    if isinstance(schedule, str):
        if num_microbatches is None:
            raise TypeError(f"schedule {schedule!r} needs num_microbatches")
        schedule = make_schedule(schedule, size, num_microbatches, **(schedule_options or {}))
    elif num_microbatches is not None or schedule_options:
        raise TypeError(
            "num_microbatches and schedule_options go with the name of a schedule; this one is made already"
        )
    if schedule.num_ranks != size:
        raise ValueError(f"the schedule is for {schedule.num_ranks} ranks, but the mesh has pp={size}")
    if shard_head and mesh.size("tp") > 1:
        raise ValueError(f"shard_head splits the head over pp, and cannot with tp={mesh.size('tp')}: leave it out")
    if shard_head and not isinstance(loss, CrossEntropy | None):
        raise ValueError(
            f"a sharded head computes its loss by itself: pass loss=fastpar.pipeline.CrossEntropy(...), or none, got "
            f"{loss!r}"
        )
    if shard_head and not schedule.sharded_head:
        schedule = with_sharded_head(schedule)
    comms = [Communicator(mesh.group(dim)) for dim in ("pp", "tp")]
    example = Example.of(example_inputs, "parallelize_pipeline", *comms)
    if plan == "auto" and mesh.size("tp") > 1 and isinstance(model, nn.Module):
        if sync_weights != "none":  # trials of other weights would find other things on every rank
            tp = Communicator(mesh.group("tp"))
            sync_weights_of(model, tp, broadcast=sync_weights == "broadcast")
        with trial_of(region):  # it runs the model: uncut
            plan = proven_on(model, mesh.size("tp"), grid, example, sequence_parallel=cuts_tokens)
    chain = schedule.chains[0]
    cut: dict[str, Any] = {"layout": layout, "split_points": split_points}
    if layout is None and split_points is None:
        ranks = [schedule.stage_ranks[stage] for stage in chain.stages]
        cut = {"num_parts": schedule.num_parts, "costs": costs, "stage_ranks": ranks}
    computes_loss = (
        loss is None and not shard_head and isinstance(model, nn.Module) and "labels" in Keywords.of(model).names
    )
    check_weights = sync_weights == "check" and size > 1
    with trial_of(region):
        whole = partition(
            model,
            **cut,
            architecture=architecture,
            loss=computes_loss,
            shard_head=shard_head,
            check_weights=check_weights,
            example_inputs=example_inputs,
        )
    if whole.num_parts != schedule.num_parts:
        given = f"layout {layout!r} has" if split_points is None else f"split_points {list(split_points)} make"
        raise ValueError(f"{given} {whole.num_parts} parts, but the schedule needs {schedule.num_parts}")
    head: ShardedHead | None = None
    if shard_head:
        assert whole.head is not None
        device_mesh = mesh["pp"] if size > 1 else None
        whole_head, loss, head_loss = whole.head_module(), None, loss
        head = ShardedHead(whole_head, mesh.rank("pp"), size, mesh=device_mesh, name=whole.head, loss=head_loss)
        del whole_head
    units = [whole.units(part) for part in range(whole.num_parts)]
    stages = whole.stages(schedule.part_of(stage) for stage in schedule.stages_of(mesh.rank("pp")))
    splits_layers = any(mesh.size(dim) > 1 for dim in ("tp", "ep", "etp"))
    if region is not None and (plan is None or (not splits_layers and plan == "auto")):
        plan = {}
    if plan is not None and (splits_layers or plan != "auto"):
        stages = [
            replace(
                stage,
                module=parallelize(
                    stage.module,
                    mesh,
                    plan,
                    sequence_parallel=sequence_parallel,
                    gather_logits=gather_logits,
                    sync_weights=sync_weights,
                    overlap=overlap,
                    context=region,
                ),
            )
            for stage in stages
        ]
    if grid is not None and plan is not None:
        stages = [with_parts_sent(stage, swap_of(stage.module).context, units) for stage in stages]
    if recompute is not None:
        for stage in stages:
            _recompute_layers(stage, recompute)
    group = mesh.group("pp")
    pipe = Pipeline(
        stages,
        schedule,
        group,
        loss=loss,
        reduction=reduction,
        optimizer=optimizer,
        head=head,
        edges=whole.edges,
        sequence=None if region is None else ContextMicrobatches(region),
        timeout=timeout,
    )
    if group is not None:
        of_stage(pipe.parameters())
    return pipe


def _region(
    model: nn.Module | Sequence[nn.Module], mesh: Mesh, options: Context | None, plan: object
) -> ContextRegion | None:
    """Where the model's sequences are split: one for all stages, whose layers together decide the layout."""
    if options is None and mesh.size("cp") == 1:
        return None
    whole = model if isinstance(model, nn.Module) else nn.ModuleList(model)
    return tried_region(whole, mesh, options, attention_of(whole, plan))


def _recompute_layers(stage: Stage, policy: Policy) -> None:
    """The layers are the units that are numbered; those of other parts are not among a stage's units."""
    chains: dict[str, list[nn.Module]] = {}
    for path in stage.units:
        parent, _, name = path.rpartition(".")
        if name.isdigit():
            chains.setdefault(parent, []).append(stage.module.get_submodule(path))
    for layers in chains.values():
        apply_recompute(layers, policy)
