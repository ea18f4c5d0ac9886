"""What users call: `shard`, and the optimizer states of a sharded model as whole tensors, of no layout.

Note: stage 3 of a pipeline. This rank's stages are whole for each of its runs:

| moment | what happens |
|---|---|
| a run begins | gather all units of this rank's stages |
| its microbatches, forward and backward | nothing: gradients are summed where autograd puts them |
| it has ended | reduce the sums to rows, free the units |

Words per rank and run, of Psi parameters on N ranks: 2 Psi (N - 1) / N, whatever the number of microbatches; gathered
for each visit of a stage they would be 3 Psi times the microbatches, and schedules that put off weight gradients would
find parameters gone. The price is memory: while a run lasts, parameters and gradients are whole, as in stage 2, and
the rows are there beside them. Between runs, and in the optimizer's step, a rank has rows.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from fastpar.arguments import checked
from fastpar.comm.wire_formats import Wire
from fastpar.pipeline import Pipeline
from fastpar.precision import Precision
from fastpar.tensor.optimizer_numbers import skip_steps_together
from fastpar.zero import options
from fastpar.zero.groups import Groups, GroupsLike
from fastpar.zero.optimizer_trial import check_sharded_updates
from fastpar.zero.options import (
    PERSISTENT_SHARE,
    HasParameters,
    NamedParameters,
    Offload,
    ShardOptions,
    UnitsLike,
    param_wires_of,
)
from fastpar.zero.order_reducer import BUCKET_BYTES
from fastpar.zero.quantized_gather import ParamWireLike
from fastpar.zero.stage3 import Stage3
from fastpar.zero.zero import Zero

States = dict[str, dict[str, Any]]


@checked(computed=False, but=("model", "optimizer", "group", "precision", "offload", "wire", "param_wire"))
def shard(
    model: nn.Module | HasParameters | Iterable[nn.Parameter] | Iterable[tuple[str, nn.Parameter]],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    *,
    group: GroupsLike = None,
    stage: int = 1,
    precision: Precision | str | None = None,
    accumulate: int = 1,
    max_norm: float | None = None,
    skip_nonfinite: bool = True,
    offload: Offload | str | None = None,
    overlap: bool = True,
    bucket_bytes: int = BUCKET_BYTES,
    wire: Wire | None = None,
    param_wire: ParamWireLike = None,
    units: UnitsLike = None,
    reshard_after_forward: bool = True,
    persistent_share: float = PERSISTENT_SHARE,
    sync_weights: str = "broadcast",
    timeout: float | None = None,
) -> Zero:
    """Make `model` and `optimizer` data-parallel over `group`, in place. Collective.

        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        zero = fp.zero.shard(model, optimizer, group=mesh, stage=2, precision=fp.Precision.bf16())
        for batch in batches:                      # a loop as without
            loss_of(model(batch)).backward()
            optimizer.step()
            optimizer.zero_grad()

    model       a module, a Pipeline, or parameters (with names, or without; a pipeline's have theirs either way)
    optimizer   any of torch.optim but LBFGS, of fp.optim, or one's own, or several that divide the parameters between
                them: all trainable parameters must be in one. They stay the same objects (LR schedulers, GradScaler and
                state_dict work), and param_groups and state have the model's own parameters between steps
    group       a Mesh (dims dp_shard x cp and dp_replicate; efsdp and dp_replicate for experts split over its ep or
                etp), a DeviceMesh of one dim, or two (replicate, shard), a ProcessGroup, or a Communicator. None: all
                ranks of the job, as in torch; one rank alone is `fastpar.Communicator(None)`
    stage       0: parameters, gradients and optimizer states on every rank (DDP)
                1: every rank updates its rows (dim 0) of each parameter, and has states for those only
                2: and gradients of those only, from microbatch to microbatch
                3: and parameters, which are gathered for the layer that runs; of a pipeline for each of its runs,
                   whose gradients are reduced when it ends
    precision   dtypes: a `Precision`, or "fp32", "bf16", "fp16". Floating-point inputs of a module are cast to its
                parameters' dtype
    accumulate  backward passes per step. Stages 0 and 1 sum gradients locally and reduce them in the last pass; 2 and 3
                reduce in every pass, and sum what is left of them
    max_norm    clip gradients to this global norm in every step (`Zero.norm` has it). The norm is exact, so that it has
                the same bits in every stage
    skip_nonfinite
                a NaN or an infinity in a gradient of any rank: all ranks skip the step, nothing changes, `Zero.skipped`
                counts it and `Zero.report` says where it came from
    offload     "cpu", "nvme:FOLDER" or an Offload: master weights and optimizer states in the host's memory or a file;
                in stage 3 "cpu+parameters" and "nvme+parameters:FOLDER" for the shards of parameters, too
    overlap     False: reduce in optimizer.step() and not during backward, as for the many passes of a pipeline, and in
                any case where its stages share parameters, as of tied embeddings, or a head
    bucket_bytes
                of gradients that travel together in stages 0 to 2
    wire        how gradients travel within the group that shards, or in stage 0: a `fastpar.comm.BlockWire` (8 bits), a
                CastWire; None: in precision's dtype
    param_wire  how parameters travel when they are gathered (stages 1 to 3): a `fastpar.comm.BlockWire` or
                DelayedScalingWire for all of two dims or more, or a function of name and parameter that gives one, or
                None for what travels exactly. All ranks compute with the values of the 8-bit codes; the optimizer, and
                so checkpoints, have the exact ones
    units, reshard_after_forward, persistent_share
                of stage 3: what is gathered together, whether it is freed between forward and backward, and what share
                of the elements, in the smallest parameters, stays on every rank: see `fastpar.zero.stage3.Stage3`
    sync_weights
                "broadcast": rank 0's parameters and buffers are taken, with a warning where others differ; "check":
                ranks must have the same, else ValueError names what differs; "none": nobody looks
    timeout     seconds until a wait for another rank fails (None: the group's own where it is a Communicator, else 60)

    For float16 use `fastpar.LossScaler`. With another scaler and several optimizers call its unscale_ for each before
    the first step, in which the norm of all is taken. torch.amp.GradScaler skips a step on all ranks, too.

    Gradients are means over the ranks: scale the loss by 1 / accumulate, as always. Over a mesh's cp they are summed,
    as each of its ranks has the loss of a part of every sequence, divided by the tokens of all. Reductions begin during
    backward and have ended when it returns. Parameters that no rank used have no gradient, as without.

    After a reduction, `.grad` of the model's parameters is the averaged gradient in every stage, as a DTensor where a
    rank has rows: `torch.nn.utils.clip_grad_norm_(model.parameters(), c)` does what it does in one process.

    Parameters that are frozen may require a gradient later, and the other way round. Values that are moved or replaced
    (`model.to(...)`, `load_state_dict(assign=True)`) are taken over by the next forward or step; RuntimeError where
    their dtype or device is another.

    Raises ValueError and TypeError for what does not fit, before anything is changed.
    """
    named = NamedParameters.of(model)
    optimizers = options.optimizers_of(optimizer)
    group = options.group_of(group)
    chosen = ShardOptions(
        stage=stage,
        precision=Precision.of(precision),
        accumulate=accumulate,
        max_norm=max_norm,
        skip_nonfinite=skip_nonfinite,
        offload=Offload.of(offload),
        overlap=overlap,
        bucket_bytes=bucket_bytes,
        wire=wire,
        units=units,
        reshard_after_forward=reshard_after_forward,
        persistent_share=persistent_share,
        sync_weights=sync_weights,
    )
    chosen.check(model, timeout)
    options.check_parameters(named.parameters, chosen.precision)
    options.check_buffers(model)
    options.check_embeddings(model)
    chosen = replace(chosen, param_wires=param_wires_of(param_wire, named.parameters, chosen))
    if any(hasattr(parameter, "pipeline_adds_grad") for parameter in named.parameters.values()):
        chosen = replace(chosen, overlap=False)  # a reduction during backward would miss what the pipeline adds
    options.check_optimizers(named.parameters, optimizers)
    like: dict[str, Any] = {
        "is_sharded": stage > 0,
        "device_type": next(iter(named.parameters.values())).device.type,
        "timeout": timeout,
    }
    has_experts = options.has_experts(named.parameters, group)
    experts = Groups(group, **like, of_experts=True) if has_experts else None
    groups = Groups(group, **like, experts=experts)
    options.check_sharded_elsewhere(named.parameters, groups)
    options.check_context(model, groups)
    skip_steps_together()
    for each in optimizers:
        check_sharded_updates(each, groups, is_in_parts=chosen.offload is not None and chosen.offload.path is not None)
    if stage == 3 and isinstance(model, Pipeline):
        return _shard_pipeline(model, named, optimizers, groups, chosen)
    pipe = model if isinstance(model, Pipeline) else None
    return Zero(model if isinstance(model, nn.Module) else None, named, optimizers, groups, chosen, pipe=pipe)


# ---- optimizer states as whole tensors


@torch.no_grad()
@checked(computed=False, but=("zero",))
def full_optimizer_state(zero: Zero) -> States:
    """{name: {state: whole tensor or number}} of every parameter that the optimizers of `zero` have updated.

    Names are those of the model's parameters, of all its optimizers together. Tensors are new, on the device of the
    parameter; 8-bit states come as their values in float32, tensors without dims with one of size 1. A parameter that
    has not been updated yet is not there.

    For inspecting, converting and comparing states, and for programs that know nothing of layouts: every rank holds
    whole tensors. Training itself should use `Zero.state_dict()` with torch.distributed.checkpoint.

        states = full_optimizer_state(zero)                 # {"embed.weight": {"exp_avg": [V, H], ...}, ...}
        load_full_optimizer_state(zero, states)             # any stage, any number of ranks

    Collective: every rank of the mesh calls it; one all-gather for every tensor that is sharded. Where ranks have other
    parameters (pipeline stages), each gets those of its own.
    """
    _check_is_zero(zero)
    held = zero.state_dict()
    has_state = {name for name, is_there in held["has_state"].items() if is_there}
    return {
        name: {key: _whole_state(value) for key, value in states.items()}
        for name, states in held["optimizer"].items()
        if name in has_state
    }


@torch.no_grad()
@checked(computed=False, but=("zero",))
def load_full_optimizer_state(zero: Zero, states: Mapping[str, Mapping[str, Any]]) -> None:
    """Take over what `full_optimizer_state` gave, under any layout: every rank keeps its part.

    Parameters that are not in `states` lose theirs, as if they had never been updated; values of parameters, learning
    rates and other options of groups stay as they are. Every rank passes the same.

    Raises KeyError for a name that no optimizer of `zero` has, ValueError for a state with another shape, and for
    states that are missing or that the optimizer does not have; nothing is changed then.
    """
    _check_is_zero(zero)
    held = zero.state_dict()
    unknown = [name for name in states if name not in held["optimizer"]]
    if unknown:
        raise KeyError(
            f"no optimizer has a parameter called {unknown[0]!r}; there are {_some_names(held['optimizer'])}"
        )
    parts: dict[str, dict[str, Any]] = {}
    for name, given in states.items():
        wanted = held["optimizer"][name]
        if set(given) != set(wanted):
            raise ValueError(f"the states of {name!r} must be {_some_names(wanted)}, got {_some_names(given)}")
        parts[name] = {key: _part_of_whole(given[key], wanted[key], f"{key!r} of {name!r}") for key in wanted}
    held["optimizer"] = {**held["optimizer"], **parts}
    held["has_state"] = {name: name in parts for name in held["has_state"]}
    zero.load_state_dict(held)


def _check_is_zero(zero: Zero) -> None:
    if not isinstance(zero, Zero):
        raise TypeError(f"zero must be what fp.zero.shard returned, got {type(zero).__name__}")


def _whole_state(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.full_tensor().clone()
    return value.clone() if isinstance(value, Tensor) else value


def _part_of_whole(given: Any, like: Any, name: str) -> Any:
    """The part of a whole tensor that this rank holds of `like`."""
    if not isinstance(like, Tensor):
        return given
    if not isinstance(given, Tensor) or given.shape != like.shape:
        found = list(given.shape) if isinstance(given, Tensor) else type(given).__name__
        raise ValueError(f"{name} must be a tensor of {list(like.shape)}, got {found}")
    given = given.detach().to(like.device, like.dtype)
    if not isinstance(like, DTensor):
        return given
    # Every rank has it all: none is asked to send.
    return distribute_tensor(given, like.device_mesh, like.placements, src_data_rank=None)


def _some_names(names: Mapping[str, Any]) -> str:
    shown = sorted(names)[:6]
    return ", ".join(shown) + (", ..." if len(names) > len(shown) else "")


# ---- stage 3 of a pipeline


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


def _shard_pipeline(
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
