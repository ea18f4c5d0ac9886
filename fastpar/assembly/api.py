"""`assemble`: one call from a model and a layout to something that trains."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from fastpar import expert, recompute, zero
from fastpar.arguments import checked
from fastpar.assembly.assembled import Assembled, Ingredients
from fastpar.assembly.objective import Loss, Objective
from fastpar.assembly.passes import Passes, PipelinedModel, WholeModel
from fastpar.comm import Communicator
from fastpar.comm.agree import set_on_any
from fastpar.context import Context
from fastpar.layouts import Layout, ModelShape
from fastpar.mesh import DENSE_DIMS, GridSpec, Mesh, init_mesh
from fastpar.parallel import Style
from fastpar.parallel.api import parallelize, unparallelize
from fastpar.parallel.load import PretrainedWeights, device_of, opened_on_all
from fastpar.parallel.pipeline_api import parallelize_pipeline
from fastpar.pipeline import Architecture, Pipeline
from fastpar.planner.models import find_model
from fastpar.precision import LossScaler, Precision
from fastpar.tensor import local_tensor
from fastpar.zero.options import PERSISTENT_SHARE, NamedParameters
from fastpar.zero.unit_plan import small_names

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
MakeOptimizer = Callable[[list[nn.Parameter]], Optimizers]
MakeScheduler = Callable[[torch.optim.Optimizer], LRScheduler]
Plan = str | Mapping[str, str | Style]
_POLICIES: dict[str, Callable[[], recompute.Policy | None]] = {
    "none": lambda: None,
    "selective": recompute.Selective,
    "full": recompute.Full,
}


@checked(computed=False, but=("model", "layout", "optimizer", "plan", "precision"))
def assemble(
    model: nn.Module,
    layout: Layout | str,
    optimizer: MakeOptimizer,
    *,
    loss: Loss | None = None,
    scheduler: MakeScheduler | None = None,
    precision: Precision | str | None = None,
    max_norm: float | None = None,
    mesh: Mesh | None = None,
    plan: Plan = "auto",
    architecture: Architecture | None = None,
    split_points: Sequence[str] | None = None,
    example_inputs: Mapping[str, Any] | Sequence[Any] | None = None,
    weights: str | Path | None = None,
    zero_options: Mapping[str, Any] | None = None,
    peak_flops: float | None = None,
) -> Assembled:
    """Lay a model out over the ranks of the job, and return what trains it. Collective.

        trained = fp.assemble(model, "pp2 tp2 sp dp2 zero1 mb4", lambda params: torch.optim.AdamW(params, lr=3e-4))
        for step in range(steps):
            result = trained.step(corpus.batch(trained.samples(step, batch=64)))

    model      the same on every rank: a model of Hugging Face, or any other; changed in place. With `weights` it may be
               on the meta device, or what `fp.load_pretrained` builds a model of
    layout     an `fp.Layout`, or its words
    optimizer  from this rank's trainable parameters, which are new objects by then, to an optimizer or several
    loss       loss(output, target): the sum over the tokens, or the loss of each; the output of a model of Hugging
               Face is its logits. None: transformers' own next-token or masked-token loss where a model has it; else
               the cross-entropy of logits
    scheduler  from an optimizer to its LR scheduler, stepped with it; one whose step needs a metric, as
               ReduceLROnPlateau's, gets the loss of the step
    precision  a `Precision`, or "fp32", "bf16", "fp16" (with an `fp.LossScaler`)
    max_norm   of all gradients
    mesh       one that is there already; None: made, and closed with the result
    plan, architecture, split_points, example_inputs    of `fp.parallelize` and `fp.parallelize_pipeline`; an
               architecture and split points need pp above 1
    weights    a folder of safetensors, of which each rank reads what it holds; below
    zero_options         further ones of `fp.zero.shard`; not what the other arguments say
    peak_flops           of one device, for `StepResult.mfu`

    In order: the layout's rules, the mesh, routers told which ranks share a batch, `fp.parallelize_pipeline` or
    `fp.parallelize`, `fp.apply_recompute`, the optimizer, `fp.zero.shard`. `explain` prints these calls with their
    arguments.

    The loss is the mean over the valid tokens of the global batch in every layout. Balance losses of `fp.expert.Router`
    are means over the microbatches, each with the tokens of all data-parallel ranks where the loss is "global_batch".

    With `weights` all parameters, and the buffers of the model's state dict, get the folder's values, whatever they
    were; master weights those of the file, before they are rounded. Ranks read their slices only, experts and ZeRO's
    rows included, and hold parameters of the meta device by their slices only, but for one layer of each kind and the
    embeddings. Other buffers on that device are computed by transformers' `_init_weights` or by `reset_parameters`.
    ValueError names what the folder lacks or has too much, and buffers that nobody computes. A model that is built
    here is in training mode.

    Raises LayoutError for a layout that breaks a rule, and what the calls raise. Without a pipeline the model is as it
    was then; a pipeline has freed other ranks' layers.
    """
    layout = Layout.parse(layout) if isinstance(layout, str) else layout
    _check(model, layout, optimizer, mesh, weights)
    _check_zero_options(zero_options or {})
    for name, given in (("architecture", architecture), ("split_points", split_points)):
        if given is not None and layout.pp == 1:
            raise ValueError(f"{name} says where a pipeline may cut a model, and pp is 1: leave it out")
    world_size = _world_size() if mesh is None else mesh.world_size
    layout.check(shape_of(model) if isinstance(model, nn.Module) else None, world_size=world_size)
    with ExitStack() as undo:
        own_mesh = mesh is None
        if mesh is None:
            mesh = _make_mesh(model, layout)
            undo.callback(mesh.close)
        loading = None if weights is None else _open_weights(model, Path(weights), mesh, undo)
        model = model if loading is None else loading.model
        shape = shape_of(model)
        layout.check(shape, world_size=world_size)
        objective = Objective.of(model, loss)
        _check_own(layout, model, objective, loss)
        where = {"architecture": architecture, "split_points": split_points}
        building = _Building(
            model, layout, mesh, objective, Precision.of(precision), plan, where, loading, example_inputs
        )
        building.tell_routers(undo)
        passes = building.lay_out(undo)
        made = building.optimizer(optimizer)
        each = [made] if isinstance(made, torch.optim.Optimizer) else list(made)
        state = building.shard(made, max_norm, zero_options or {})
        undo.callback(state.close)
        if loading is not None:
            building.calls.append(f"# and the values of {weights}, of which each rank reads what it holds")
            with state.overwriting() as held:
                loading.fill_on_all(held)
        if isinstance(passes, PipelinedModel) and layout.zero.stage == 2:
            passes.after_pass = state.reduce_gradients
        found = Ingredients(
            layout=layout,
            mesh=mesh,
            parts=tuple(passes.modules),
            optimizer=made,
            zero=state,
            objective=objective,
            passes=passes,
            scaler=LossScaler(mesh=mesh, enabled=building.precision.param is torch.float16),
            schedulers=() if scheduler is None else tuple(scheduler(one) for one in each),
            pipe=building.pipe,
            shape=shape,
            peak_flops=peak_flops,
            calls=tuple(building.calls),
            owns_mesh=own_mesh,
            recomputed=tuple(building.recomputed),
        )
        result = Assembled(found)
        if loading is not None:
            loading.folder.close()
        undo.pop_all()
    return result


def _open_weights(model: Any, path: Path, mesh: Mesh, undo: ExitStack) -> PretrainedWeights:
    """The folder, and the model with memory for what runs before its values are read."""
    everyone = Communicator(torch.distributed.group.WORLD if mesh.world_size > 1 else None)
    loading = undo.enter_context(opened_on_all(path, model, everyone))
    undo.callback(loading.take_back)
    loading.give_stand_ins(device_of(mesh))
    if not isinstance(model, nn.Module):
        loading.model.train()
    return loading


@dataclass
class _Building:
    """A model on its way."""

    model: nn.Module
    layout: Layout
    mesh: Mesh
    objective: Objective
    precision: Precision
    plan: Plan
    cut: Mapping[str, Any]  # further options of `parallelize_pipeline`
    loading: PretrainedWeights | None
    example_inputs: Mapping[str, Any] | Sequence[Any] | None
    pipe: Pipeline | None = None
    recomputed: list[nn.Module] = field(default_factory=list)

    def __post_init__(self) -> None:
        sizes = {dim: getattr(self.layout, dim) for dim in (*DENSE_DIMS, "ep", "etp")}
        shown: dict[str, Any] = {dim: n for dim, n in sizes.items() if n > 1}
        shown |= {"tp_grid": grid} if (grid := grid_of(self.layout)) else {}
        self.calls = [f"mesh = fp.init_mesh({_shown(shown)})"]

    def tell_routers(self, undo: ExitStack) -> None:
        """Which ranks have other tokens of the batch; who has other parts of a microbatch `parallelize` says."""
        routers = expert.routers_of(self.model).values()
        for router in routers:
            undo.callback(vars(router).update, batch_comms=router.batch_comms)
            router.batch_comms = [Communicator(self.mesh.group("dp"))]
        if routers:
            self.calls.append('router.batch_comms = [Communicator(mesh.group("dp"))]')

    def lay_out(self, undo: ExitStack) -> Passes:
        """Cut, split, recompute."""
        layout = self.layout
        options: dict[str, Any] = {"sequence_parallel": layout.sequence_parallel}
        options |= {} if self.loading is None else {"sync_weights": "none"}
        words = layout.recompute
        written = [] if isinstance(self.plan, str) else ["plan=plan"]
        if layout.cp > 1:
            options["context"] = Context(layout.context.method, layout.context.order)
        policy = _POLICIES[words if isinstance(words, str) else words[self.mesh.rank("pp")]]()
        if layout.pp > 1:
            passes = PipelinedModel(self.objective, layout, self.precision)
            how = layout.pipeline
            options |= {
                "num_microbatches": how.microbatches,
                "schedule_options": {"stages_per_rank": how.stages_per_rank} if how.stages_per_rank > 1 else None,
                "layout": None if how.cut is None else list(how.cut),
                "shard_head": how.shard_head,
                "recompute": policy,
                **passes.pipe_options,
            }
            self._call("pipe = fp.parallelize_pipeline", [repr(how.schedule), *written], options)
            options |= {"plan": self.plan, "example_inputs": self.example_inputs, **self.cut}
            self.pipe = parallelize_pipeline(self.model, self.mesh, how.schedule, **options)
            undo.callback(self.pipe.close)
            passes.adopt(self.pipe)
            self.recomputed += [] if policy is None else passes.modules
            return passes
        if layout.world_size > 1 or self.plan != "auto":
            self._call("model = fp.parallelize", written, options)
            parallelize(self.model, self.mesh, self.plan, example_inputs=self.example_inputs, **options)
            undo.callback(unparallelize, self.model)
        if policy is not None:
            self.calls.append(f"fp.apply_recompute(model, {policy})")
            recompute.apply_recompute(self.model, policy)
            undo.callback(recompute.remove_recompute, self.model)
            self.recomputed.append(self.model)
        return WholeModel(self.model, self.objective, layout)

    def optimizer(self, make: MakeOptimizer) -> Optimizers:
        """The optimizers of this rank's parameters. What is wrong on one rank is raised on all, as stages have other
        parameters."""
        made: Optimizers | None = None
        problem: Exception | None = None
        try:
            made = self._made_by(make)
        except Exception as error:
            problem = error
        comms = [Communicator(self.mesh.group(dim)) for dim in DENSE_DIMS if self.mesh.size(dim) > 1]
        (is_wrong,) = set_on_any([problem is not None], comms)
        if problem is not None:
            raise problem
        if is_wrong or made is None:
            raise ValueError("there is no optimizer on another rank: see the error there")
        return made

    def _made_by(self, make: MakeOptimizer) -> Optimizers:
        owner: Any = self.model if self.pipe is None else self.pipe
        trained = [parameter for parameter in owner.parameters() if parameter.requires_grad]
        if not trained:
            raise ValueError("this rank has no trainable parameter, and an optimizer needs one: choose another cut")
        made = make(trained)
        several = list(made) if isinstance(made, Sequence) else [made]
        if not all(isinstance(each, torch.optim.Optimizer) for each in several):
            raise TypeError(f"optimizer must return a torch.optim.Optimizer or several, got {type(made).__name__}")
        if self.loading is not None:
            _check_states(several)
        self.calls.append(f"optimizer = {type(several[0]).__name__}({'pipe' if self.pipe else 'model'}.parameters())")
        return made

    def shard(self, made: Optimizers, max_norm: float | None, more: Mapping[str, Any]) -> zero.Zero:
        options: dict[str, Any] = {
            "stage": self.layout.zero.stage,
            "precision": None if self.precision == Precision() else self.precision,
            "accumulate": self.layout.accumulate,
            "max_norm": max_norm,
            "offload": None if self.layout.zero.offload == "none" else self.layout.zero.offload,
            "overlap": self.pipe is None,
            **({} if self.loading is None else {"sync_weights": "none"}),
            **more,
        }
        self._call("fp.zero.shard", ["optimizer", "group=mesh"], options, with_mesh=False)
        owner: Any = self.model if self.pipe is None else self.pipe
        if self.loading is not None:
            named = NamedParameters.of(owner).parameters
            if options["stage"] == 3:  # which copies rows, but for what stays whole on every rank
                share = options.get("persistent_share", PERSISTENT_SHARE)
                small = small_names({name: local_tensor(x).numel() for name, x in named.items()}, share)
                named = {name: named[name] for name in small}
            self.loading.give_memory(named.values())
        return zero.shard(owner, made, group=self.mesh, **options)

    def _call(self, name: str, given: list[str], options: Mapping[str, Any], *, with_mesh: bool = True) -> None:
        what = "pipe" if self.pipe is not None else "model"
        shown = {key: value for key, value in options.items() if value not in (None, False) and key != "loss"}
        words = [what, *(["mesh"] if with_mesh else []), *given, *([_shown(shown)] if shown else [])]
        self.calls.append(f"{name}({', '.join(words)})")


def shape_of(model: nn.Module) -> ModelShape | None:
    """The numbers that rules ask for; None where the model does not say them."""
    config: Any = getattr(model, "config", None)
    is_plain = dataclasses.is_dataclass(config) and not isinstance(config, type)
    try:
        return find_model(dataclasses.asdict(config) if is_plain else model)
    except (TypeError, ValueError):
        return None


def _check_states(optimizers: Sequence[Any]) -> None:
    """ValueError for states that an optimizer has made of values that are not the model's yet."""
    for optimizer in optimizers:
        for states in optimizer.state.values():
            for name, x in states.items():
                if (
                    isinstance(x, torch.Tensor)
                    and x.numel() > 1
                    and bool((local_tensor(x) != local_tensor(x).flatten()[:1]).any())
                ):
                    raise ValueError(
                        f"{type(optimizer).__name__} makes its state {name!r} when it is built, and weights= gives "
                        "parameters their values later: load the model before (fp.load_pretrained)"
                    )


def _shown(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in options.items())


def _check(model: Any, layout: Any, optimizer: Any, mesh: Mesh | None, weights: Any) -> None:
    if not isinstance(model, nn.Module) and weights is None:
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(layout, Layout):
        raise TypeError(f"layout must be an fp.Layout or its words, got {type(layout).__name__}")
    if isinstance(optimizer, torch.optim.Optimizer) or not callable(optimizer):
        raise TypeError(
            f"optimizer must be a function from parameters to an optimizer, got {type(optimizer).__name__}: parameters "
            "are new objects when the model is laid out, as in optimizer=lambda params: torch.optim.AdamW(params)"
        )
    if weights is None:
        tensors = itertools.chain(model.named_parameters(), model.named_buffers())
        meta = next((name for name, x in tensors if x.is_meta), None)
        if meta is not None:
            raise ValueError(
                f"{meta} is on the meta device: give a folder with its values, assemble(..., weights=folder), or "
                "materialise and initialise the model before"
            )
    if mesh is not None:
        sizes = {dim: (mesh.size(dim), getattr(layout, dim)) for dim in (*DENSE_DIMS, "ep", "etp")}
        other = {dim: both for dim, both in sizes.items() if both[0] != both[1]}
        if other:
            raise ValueError(f"mesh and layout have different sizes (mesh, layout): {other}")
        if mesh.tp_grid != grid_of(layout):
            raise ValueError(f"mesh has tp_grid={mesh.tp_grid}, but the layout {grid_of(layout)} ({layout})")


_OWN_OPTIONS = {
    "stage": "layout",
    "accumulate": "layout",
    "group": "mesh",
    "precision": "precision",
    "max_norm": "max_norm",
}


def _check_zero_options(options: Mapping[str, Any]) -> None:
    """Two places for one option would be two values."""
    for name, place in _OWN_OPTIONS.items():
        if name in options:
            raise ValueError(f"zero_options must not have {name!r}, which {place}= says")
    own = inspect.signature(zero.shard).parameters.keys() - {"model", "optimizer"} - _OWN_OPTIONS.keys()
    if unknown := options.keys() - own:
        raise TypeError(f"zero_options has {sorted(unknown, key=str)}; fp.zero.shard takes {', '.join(sorted(own))}")


def _check_own(layout: Layout, model: nn.Module, objective: Objective, loss: Loss | None) -> None:
    """What is not about layouts alone."""
    _warn_of_batch_statistics(layout, model)
    if layout.pipeline.shard_head and loss is not None:
        raise ValueError("a sharded head computes cross-entropy by itself: leave loss= out, or shard_head")
    if layout.cp > 1:
        _check_split(layout, model, objective, loss)


def _warn_of_batch_statistics(layout: Layout, model: nn.Module) -> None:
    """UserWarning for modules that normalise by a part of the global batch, where the layout cuts it."""
    microbatches = layout.accumulate * layout.pipeline.microbatches
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
        and module.training
        and layout.dp * microbatches > 1
        and (microbatches > 1 or not isinstance(module, nn.SyncBatchNorm))
    ]
    if names:
        warnings.warn(
            f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''}: batch normalisation takes the statistics of "
            f"one forward on one rank, a part of the global batch (dp {layout.dp}, {microbatches} forwards a step): "
            "the loss is not that of one process, and running statistics are each rank's own. Put it into evaluation "
            "mode (frozen statistics), or use a norm over each sample (GroupNorm, LayerNorm)",
            stacklevel=5,
        )


def _check_split(layout: Layout, model: nn.Module, objective: Objective, loss: Loss | None) -> None:
    """What sequences that are split over cp ask of a model."""
    if loss is not None:
        raise ValueError(
            f"cp is {layout.cp}, and loss= would see this rank's tokens alone: leave it out, for the cross-entropy of "
            "logits and targets"
        )
    if objective.key == "labels" and objective.shift != 1:
        raise ValueError(f"cp is {layout.cp}, and of models with labels only those with a next-token loss can be split")
    parameters = inspect.signature(type(model).forward).parameters
    if objective.key == "target" and "position_ids" not in parameters:
        raise ValueError(
            f"cp is {layout.cp}, and a rank's tokens are no run of the sequence: forward of {type(model).__name__} "
            "must take position_ids, [batch, seq], and use them in the place of torch.arange"
        )
    if any(router.losses.coeff or router.losses.z_coeff for router in expert.routers_of(model).values()):
        raise ValueError(f"balance losses of fastpar.expert.Router are not for split sequences (cp {layout.cp})")


def _world_size() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def _make_mesh(model: Any, layout: Layout) -> Mesh:
    """On the device of the model; None, where it has none yet: what the machine has."""
    devices = [p.device.type for p in model.parameters()] if isinstance(model, nn.Module) else ["meta"]
    device = next((each for each in devices if each != "meta"), None if devices else "cpu")
    sizes = {dim: getattr(layout, dim) for dim in (*DENSE_DIMS, "ep", "etp")}
    return init_mesh(**sizes, tp_grid=grid_of(layout), device=device)


def grid_of(layout: Layout) -> GridSpec | None:
    """The tensor-parallel grid as meshes take it; None where tp is one dim."""
    grid: Any = layout.tp_grid
    if grid.ranks == 1:
        return None
    return GridSpec(grid.x, grid.y, grid.z, grid.spread, grid.replicas, grid.stream)
