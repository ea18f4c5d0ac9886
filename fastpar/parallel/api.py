"""`parallelize`, `explain` and `unparallelize`: a model split by a plan, said what was done, and made whole again.

`parallelize` works on instances: it changes the modules of this model in place and nothing else in the process. It
checks the whole plan first, so that an error leaves the model untouched; `unparallelize` brings the ordinary model back
with the trained weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from torch import nn

from fastpar.arguments import checked
from fastpar.comm import Communicator
from fastpar.context.region import Context, ContextRegion
from fastpar.contracts.rehearsal import Example
from fastpar.ddp import check_model
from fastpar.mesh import Mesh
from fastpar.ops.parallel_linear.overlap import Overlap
from fastpar.parallel.changes import Explanation
from fastpar.parallel.checks import check_has_values, check_plan, heads_on_grid, resolve
from fastpar.parallel.context_parallel import check_ranks, region_for
from fastpar.parallel.guards import sync_weights as sync_weights_of
from fastpar.parallel.heads import HeadsError
from fastpar.parallel.model_methods import calls_loss_function, takes_labels
from fastpar.parallel.on_grid import check_on_grid, grid_for
from fastpar.parallel.plan import match_plan
from fastpar.parallel.proving import proven_plan, refuse_wrong_blocks
from fastpar.parallel.styles import AttentionStyle, ExpertStyle, Style, SwapContext
from fastpar.parallel.swap import Swap
from fastpar.parallel.token_mixing import refuse_mixing
from fastpar.pipeline.stages.absent import Absent
from fastpar.tensor import Grid
from fastpar.tensor.binding import BoundGroup, GroupLike, bind

M = TypeVar("M", bound=nn.Module)
_STATE = "_fastpar_parallel"


@checked(computed=False, but=("model", "plan"))
def parallelize(
    model: M,
    mesh: Mesh | GroupLike,
    plan: str | Mapping[str, str | Style] = "auto",
    *,
    sequence_parallel: bool = False,
    gather_logits: bool | None = None,
    sync_weights: str = "check",
    overlap: bool | Overlap = True,
    context: Context | ContextRegion | None = None,
    example_inputs: Mapping[str, Any] | Sequence[Any] | None = None,
) -> M:
    """Split a model's layers over the tensor-parallel group, in place; returns the model.

    mesh               an `fp.Mesh` (its "tp" dim is used, "ep" and "etp" for experts; its data-parallel coordinates
                       place dropout masks), a 1-D DeviceMesh or a ProcessGroup (experts are spread over the same
                       ranks). With `tp_grid` linears become `GridLinear`, the same plan on x by y ranks, and the
                       residual stream is cut over the grid (`fastpar.tensor.GridRegion`); a grid (1, p, 1) is the
                       layers of one dim
    plan               "auto": what the model declares (Hugging Face's `tp_plan`), or how it calls its linears, as far
                       as trials on this process confirm it; blocks of which they do not are left whole, and `explain`
                       says why (`fastpar.parallel.proving`). Or a dict from pattern to style, such as
                       {"layers.*.mlp.up_proj": "colwise"}; see `fastpar.parallel`
    sequence_parallel  split the residual stream along the sequence between blocks; on a grid its `spread` says so
    gather_logits      True: the head returns all V logits as a plain tensor. False: a DTensor, Shard(-1) over the
                       group, which `vocab_parallel_cross_entropy(logits, target)` takes as it is, and of which
                       `logits.full_tensor()` and `logits.to_local()` give the whole and this rank's part; whatever
                       else reads it gets all logits, by an all-gather that every rank has to do. None: False,
                       unless the model computes a loss in its forward by code that fastpar cannot replace. The model's
                       own `loss_function` and `generate` work in both cases
    sync_weights       "check" (default): ranks must hold the same weights before the split, else ValueError names the
                       first parameter that differs; "broadcast": take rank 0's; "none"
    context            how sequences are split over the mesh's cp ranks (`fp.Context`; by default its defaults): of
                       batches that `fp.context.shard` has cut, attention runs over the tokens of all ranks. For models
                       of Hugging Face, and those with `fp.context.ContextAttention`. A `ContextRegion` is taken as it
                       is: for parts of one model that share it
    overlap            let collectives travel during the layers' GEMMs (`fastpar.ops.parallel_linear`), as measured
                       earlier on rank 0's machine (`fastpar.ops.measure_overlap`); False: not, with the same numbers
    example_inputs     what the model runs with once to see how its modules call each other: a dict of keyword inputs or
                       a tuple of positional ones, the same on every rank; a few tokens, or one small picture, will do.
                       None: a few ids, which models of images, sound, or two sequences do not take

    Parameters become DTensors on the group's mesh, sharded or replicated, under their old names; so build the optimizer
    afterwards. Every rank must call it with the same model and plan. Collectives per forward: 2 per transformer layer
    (all-reduces; with `sequence_parallel` an all-gather and a reduce-scatter in the place of each), one for the
    embedding, and one small one for the loss.

    The model, its hooks included, runs once on these or on a few ids, and copies of one block of each kind run whole
    and on virtual ranks, before anything is changed. Blocks of a written or declared plan that do not run then, as of
    models that take no ids and of a pipeline's stages, are tried when they are called first: ValueError in that
    forward.

    The logger "fastpar.parallelize" says on the first rank what was split (INFO), and what "auto" would have split and
    has left whole (WARNING).

    Raises ValueError for a pattern that matches nothing, heads that cannot be split, parameters inside a block with no
    style, a block that computes something else when it is split, weights that differ; TypeError for a style on the
    wrong kind of module. The model is unchanged then, but for weights that were broadcast.
    """
    check_model(model, "parallelize")
    if getattr(model, _STATE, None) is not None:
        raise ValueError("the model is parallelised already; call fastpar.unparallelize(model) first")
    if any("_fastpar_fused" in vars(type(module)) for module in model.modules()):
        raise ValueError("the model has kernels of fastpar.apply_kernels; call fastpar.remove_kernels(model) first")
    Overlap.of(overlap)
    if sync_weights not in ("check", "broadcast", "none"):
        raise ValueError(f"sync_weights must be 'check', 'broadcast' or 'none', got {sync_weights!r}")
    if isinstance(mesh, Mesh):
        _check_dims(model, mesh)
    if isinstance(plan, str) and plan != "auto":
        raise ValueError(f"plan must be 'auto' or a dict from pattern to style, got {plan!r}")
    grid, sequence_parallel = grid_for(mesh, sequence_parallel=sequence_parallel)
    split = _context(model, mesh, gather_logits)
    split.grid = grid
    comm = split.comm
    check_has_values(model)
    if sync_weights != "none":  # first, as trials of other weights would find other things on every rank
        sync_weights_of(model, comm, broadcast=sync_weights == "broadcast")
        if split.expert_ranks > comm.size:  # else among the same ranks
            for group in (split.experts, split.etp):
                sync_weights_of(model, group.comm, broadcast=sync_weights == "broadcast")
    split.context = _region(model, mesh, context, attention_of(model, plan))
    example = Example.of(example_inputs, "parallelize", comm)
    if isinstance(plan, str):
        with trial_of(split.context):
            plan = proven_on(model, comm.size, grid, example, sequence_parallel=sequence_parallel)
    styles = match_plan(model, plan)
    is_spread = any(isinstance(style, ExpertStyle) for style in styles.values())
    unused = {dim: n for dim in ("ep", "etp") if isinstance(mesh, Mesh) and (n := mesh.size(dim)) > 1}
    if unused and not is_spread:
        sizes = ", ".join(f"{dim}={n}" for dim, n in unused.items())
        raise ValueError(f"the mesh has {sizes}, but the plan gives no module the style 'expert'")
    resolve(split, styles, sequence_parallel=sequence_parallel)
    check_on_grid(split, styles)
    splits = check_plan(split)
    with trial_of(split.context):
        untried = refuse_wrong_blocks(model, split.styles | split.parameter_styles, split.features[1], example)
    split.overlap = overlap if isinstance(overlap, Overlap) else Overlap.load(comm)
    if overlap is False:
        split.overlap = split.overlap.disabled()
    swap = Swap(split, splits)
    swap.apply()
    for block in untried:
        split.changes.hooked(block.watch(split.modules[block.path], lambda: trial_of(split.context)))
    swap.log()
    model.__dict__[_STATE] = swap
    return model


def proven_on(
    model: nn.Module, size: int, grid: Grid | None, example: Example | None, *, sequence_parallel: bool
) -> dict[str, str | Style]:
    """The plan "auto", for the ranks that share features inside of blocks: all `size`, or those of x and y."""
    if grid is None:
        return proven_plan(model, size, sequence_parallel=sequence_parallel, example=example)
    _, size = grid.heads
    try:
        # Of one rank nothing could be found out.
        return proven_plan(model, max(size, 2), sequence_parallel=True, example=example)
    except HeadsError as error:
        if size == 1:
            return proven_plan(model, 1)
        raise heads_on_grid(error, grid) from None


def _region(
    model: nn.Module,
    mesh: Mesh | GroupLike,
    options: Context | ContextRegion | None,
    attention: Mapping[str, AttentionStyle],
) -> ContextRegion | None:
    """Where the model's sequences are split; None where they are not."""
    if isinstance(mesh, Mesh) and isinstance(options, ContextRegion):
        check_ranks(options, mesh)
        return options
    if isinstance(mesh, Mesh) and not isinstance(options, ContextRegion):
        return None if options is None and mesh.size("cp") == 1 else tried_region(model, mesh, options, attention)
    if options is not None:
        raise ValueError(f"context needs an fp.Mesh with a dim cp, got mesh {type(mesh).__name__}")
    return None


def tried_region(
    model: nn.Module, mesh: Mesh, options: Context | None, attention: Mapping[str, AttentionStyle]
) -> ContextRegion:
    """Where a whole model's sequences are split, after a trial of whether that changes what it computes.

    attention   by path, the modules whose attention a plan redirects
    """
    region = region_for(model, mesh, options, is_planned=bool(attention))
    refuse_mixing(model, region, attention)
    return region


def attention_of(model: nn.Module, plan: object) -> dict[str, AttentionStyle]:
    """The modules of a written plan that have the style "attention"."""
    if not isinstance(plan, Mapping):
        return {}
    return {path: style for path, style in match_plan(model, plan).items() if isinstance(style, AttentionStyle)}


def trial_of(region: ContextRegion | None) -> AbstractContextManager[None]:
    """While a model runs in this process to try something: what it has is all of its sequences."""
    return nullcontext() if region is None else region.trial("whole")


def _check_dims(model: nn.Module, mesh: Mesh) -> None:
    is_part = any(isinstance(module, Absent) for module in model.modules())
    if mesh.size("pp") > 1 and not is_part:
        raise ValueError(
            f"parallelize splits over tp, cp, ep, etp and data-parallel dims only, but the mesh has "
            f"pp={mesh.size('pp')}; fastpar.parallelize_pipeline cuts a model over pp"
        )


def _context(model: nn.Module, mesh: Mesh | GroupLike, gather_logits: bool | None) -> SwapContext:
    device_type = next((p.device.type for p in model.parameters()), "cpu")
    if gather_logits is None:  # logits stay split unless the model computes its loss from them by code of its own
        gather_logits = takes_labels(model) and not calls_loss_function(model)
    if not isinstance(mesh, Mesh):
        group = bind(mesh, device_type)
        return SwapContext(model, group, experts=group, batch=(0, 1), gather_logits=gather_logits)
    alone = BoundGroup(Communicator(None), None)  # every rank has all experts
    experts = bind(mesh["ep"], device_type) if mesh.size("ep") > 1 else alone
    etp = BoundGroup(Communicator(mesh.group("etp")), mesh["ep", "etp"]) if mesh.size("etp") > 1 else alone
    batch = mesh.rank("dp"), mesh.size("dp")
    cp_tp = Communicator(mesh.group("cp_tp")) if mesh.size("cp") > 1 else None
    return SwapContext(model, bind(mesh["tp"], device_type), experts, batch, gather_logits, etp, cp_tp=cp_tp)


def unwatch(model: nn.Module) -> None:
    """Let forwards of a parallelised model run unwatched: for `fastpar.verify`, which judges them by itself."""
    swap: Swap | None = getattr(model, _STATE, None)
    if swap is not None and swap.watch is not None:
        swap.watch.cadence.stop()


def swap_of(model: nn.Module) -> Swap:
    """The swap of a parallelised model; ValueError for another."""
    swap: Swap | None = getattr(model, _STATE, None)
    if swap is None:
        raise ValueError(f"model: this {type(model).__name__} has not been parallelised (fastpar.parallelize)")
    return swap


@checked(computed=False)
def explain(model: nn.Module) -> Explanation:
    """The report of what `parallelize` did: per module the style, how its parameters are stored, and remarks."""
    return swap_of(model).explanation


@checked(computed=False)
def unparallelize(model: M) -> M:
    """Undo `parallelize` in place: ordinary modules with full weights on every rank (one all-gather per shard).

    Parameters are the original objects again, with the trained values, frozen where the parallel ones were; gradients
    are dropped. Attributes that were set on modules after `parallelize` stay. Optimizers built on the
    parallel parameters must be built anew.
    """
    swap_of(model).undo(gather=True)
    del model.__dict__[_STATE]
    return model
