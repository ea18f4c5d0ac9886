"""Options of `shard`: what each means, what fits, what does not, and what to write instead."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from fastpar.arguments import checked_fields
from fastpar.comm.scaled_codes import DelayedScalingWire
from fastpar.comm.wire_formats import FLOATS, BlockWire, Wire
from fastpar.context.region import REGION
from fastpar.mesh import Mesh
from fastpar.mesh.grid import TENSOR_GRID_DIMS
from fastpar.pipeline import Pipeline
from fastpar.precision import Precision
from fastpar.zero.groups import Groups, GroupsLike, is_expert
from fastpar.zero.hooks import ZeroGrad
from fastpar.zero.order_reducer import BUCKET_BYTES
from fastpar.zero.quantized_gather import ParamWire

UnitsLike = Sequence[str | nn.Module | Sequence[str | nn.Module]] | None

GROUP_BYTES = 64 << 20
PERSISTENT_SHARE = 1 / 256


@checked_fields
@dataclass(frozen=True)
class Offload:
    """The place of the optimizer's part of a model.

    path         None: the host's memory; a folder: a file in it, on a local disk
    group_bytes  of master weights that are in memory at once, three times: read ahead, updated, written behind
    options      of `fastpar.storage.TensorStore`
    parameters   whether the shards of stage 3 live there, too; what is persistent stays on the device
    """

    path: str | os.PathLike[str] | None = None
    group_bytes: int = GROUP_BYTES
    options: Mapping[str, Any] | None = None
    parameters: bool = False

    @staticmethod
    def of(value: Offload | str | None) -> Offload | None:
        """None or "none", "cpu", "nvme:FOLDER", these two with parameters ("cpu+parameters",
        "nvme+parameters:FOLDER"), or an Offload. Raises ValueError for another text."""
        if value is None or isinstance(value, Offload):
            return value
        if not isinstance(value, str):
            raise TypeError(f"offload must be a text, a fastpar.zero.Offload or None, got {type(value).__name__}")
        if value == "none":
            return None
        where, colon, folder = value.partition(":")
        kind, plus, what = where.partition("+")
        is_known = bool(folder) if kind == "nvme" else kind == "cpu" and not colon
        if not is_known or (plus and what != "parameters"):
            raise ValueError(
                'offload must be "none", "cpu", "cpu+parameters", "nvme:FOLDER", "nvme+parameters:FOLDER" or an '
                f"Offload, got {value!r}"
            )
        return Offload(folder or None, parameters=bool(plus))


def param_wires_of(param_wire: Any, named: Mapping[str, nn.Parameter], options: ShardOptions) -> dict[str, ParamWire]:
    """The format of every parameter that `param_wire` means. Raises TypeError and ValueError for what is not sound."""
    if param_wire is None:
        return {}
    is_choice = callable(param_wire) and not isinstance(param_wire, type)
    if not is_choice:
        _check_wire(param_wire, "param_wire")
    if options.stage == 0:
        raise ValueError(
            "param_wire is for stages 1 to 3, which gather parameters; in stage 0 none travel: leave it out"
        )
    if options.offload is not None and options.offload.parameters:
        raise ValueError(
            "param_wire gathers from shards in the device's memory; offload of parameters puts them elsewhere: leave "
            "one of the two out (offload='cpu' and 'nvme:FOLDER' without parameters do)"
        )
    found: dict[str, ParamWire] = {}
    for name, parameter in named.items():
        is_float = parameter.dtype in FLOATS and options.precision.param_dtype(name, parameter.dtype) in FLOATS
        wire = param_wire(name, parameter) if is_choice else param_wire if parameter.ndim >= 2 and is_float else None
        if wire is None:
            continue
        _check_wire(wire, f"param_wire({name!r}, ...)" if is_choice else "param_wire")
        if not is_float:
            raise ValueError(
                f"param_wire({name!r}, ...) must be None for a parameter of {parameter.dtype}: float32, bfloat16 and "
                "float16 can be quantised"
            )
        found[name] = wire
    return found


def _check_wire(wire: Any, name: str) -> None:
    if not isinstance(wire, (BlockWire, DelayedScalingWire)):
        raise TypeError(
            f"{name} must be a fastpar.comm.BlockWire, a DelayedScalingWire, a function of a name and a parameter that "
            f"gives one or None, or None; got {wire!r:.80}. For 16 bits take precision='bf16'"
        )
    if isinstance(wire, BlockWire) and (wire.rounding != "nearest" or wire.error_feedback):
        raise ValueError(
            f"{name} must be a BlockWire with rounding='nearest' and error_feedback=False, got {wire!r}: forward and "
            "backward gather the same values, and the optimizer keeps the exact ones"
        )


def _check_gradient_wire(wire: Any) -> None:
    """Raises TypeError for a `wire` that has no reductions."""
    if wire is not None and not (hasattr(wire, "reduce_scatter_async") and hasattr(wire, "all_reduce_async")):
        raise TypeError(
            f"wire must be a fastpar.comm.BlockWire, CastWire or PlainWire, which reduce gradients, got {wire!r:.80}"
            + ("; param_wire= takes it for parameters" if isinstance(wire, DelayedScalingWire) else "")
        )


@dataclass(frozen=True)
class ShardOptions:
    """The arguments of `fastpar.zero.shard`, which says what each means.

    param_wires  the formats of gathered parameters, by name
    """

    stage: int = 1
    precision: Precision = field(default_factory=Precision)
    accumulate: int = 1
    max_norm: float | None = None
    skip_nonfinite: bool = True
    offload: Offload | None = None
    overlap: bool = True
    bucket_bytes: int = BUCKET_BYTES
    wire: Wire | None = None
    param_wires: Mapping[str, ParamWire] = field(default_factory=dict)
    units: UnitsLike = None
    reshard_after_forward: bool = True
    persistent_share: float = PERSISTENT_SHARE
    sync_weights: str = "broadcast"

    def check(self, model: Any, timeout: float | None) -> None:
        """Raises TypeError where stage 3 is asked for and there is no module, ValueError for what is out of range."""
        if self.stage not in (0, 1, 2, 3):
            raise ValueError(f"stage must be 0, 1, 2 or 3, got {self.stage!r}")
        if self.stage == 3 and not isinstance(model, nn.Module | Pipeline):
            raise TypeError(
                "stage 3 gathers parameters for modules, and needs a module or a pipeline as model, got "
                f"{type(model).__name__}: of a pipeline pass it itself, or use stage=2"
            )
        for part in model.modules() if self.stage == 3 else ():
            if isinstance(part, torch.jit.ScriptModule) and any(True for _ in part.parameters()):
                raise TypeError(
                    f"stage 3 cannot take the parameters of {part.original_name} apart, which torch.jit has scripted "
                    "or traced: put the Python module in its place, or use stage=2"
                )
        if self.offload is not None and self.offload.parameters and self.stage != 3:
            raise ValueError(f"offload of parameters is for stage 3, which shards them; stage is {self.stage}")
        if self.accumulate < 1:
            raise ValueError(f"accumulate must be at least 1 (backward passes per step), got {self.accumulate}")
        if self.max_norm is not None and not self.max_norm > 0:
            raise ValueError(f"max_norm must be positive or None, got {self.max_norm}")
        if self.bucket_bytes < 1:
            raise ValueError(f"bucket_bytes must be at least 1, got {self.bucket_bytes}")
        if timeout is not None and not timeout > 0:
            raise ValueError(f"timeout must be positive (seconds) or None, got {timeout}")
        if self.sync_weights not in ("broadcast", "check", "none"):
            raise ValueError(f"sync_weights must be 'broadcast', 'check' or 'none', got {self.sync_weights!r}")
        if not 0.0 <= self.persistent_share <= 1.0:
            raise ValueError(f"persistent_share must be between 0 and 1, got {self.persistent_share}")
        _check_gradient_wire(self.wire)


class HasParameters(Protocol):
    """An object with parameters under the names of a whole model, and no module: a `fastpar.pipeline.Pipeline`."""

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]: ...


@dataclass(frozen=True)
class NamedParameters:
    """The parameters that `shard` is to take care of.

    parameters  every one once, by its first name
    are_named   False: they came without names, and are numbered
    """

    parameters: dict[str, nn.Parameter]
    are_named: bool = True

    @staticmethod
    def of(model: Any) -> NamedParameters:
        """The parameters of a module, of something else that has `named_parameters` (a pipeline), or of an iterable.

        Raises TypeError and ValueError for anything else, naming what it is.
        """
        _check_model(model)
        if isinstance(model, nn.Module):
            return NamedParameters(dict(model.named_parameters()))
        found: dict[str, nn.Parameter] = {}
        are_named = True
        items = list(model.named_parameters() if hasattr(model, "named_parameters") else model)
        own = {item[0] for item in items if isinstance(item, tuple)}
        for index, item in enumerate(items):
            name, parameter = item if isinstance(item, tuple) and len(item) == 2 else (None, item)
            if not isinstance(parameter, nn.Parameter):
                raise TypeError(
                    f"model must be a module, a pipeline or parameters, got {type(item).__name__} at number {index}"
                )
            if name is None:
                name = getattr(parameter, "pipeline_name", None)
                are_named &= name is not None
            tied = getattr(parameter, "pipeline_tied_name", None)  # of stages that hold one each
            name = str(index) if name is None else name if tied is None or tied in own | found.keys() else tied
            if name in found:
                raise ValueError(f"model has two parameters of the name {name!r}: give each a name of its own")
            found[name] = parameter
        return NamedParameters(found, are_named)


def _check_model(model: Any) -> None:
    if isinstance(model, torch.optim.Optimizer):
        raise TypeError(
            f"model is an optimizer ({type(model).__name__}): the arguments are shard(model, optimizer), in this order"
        )
    if isinstance(model, (DistributedDataParallel, DataParallel)):
        raise ValueError(
            f"model is wrapped in {type(model).__name__}, which averages gradients itself: pass the model within, "
            "model.module (stage=0 is data parallelism like it)"
        )
    compiler: Any = sys.modules.get("torch._dynamo")  # who has compiled something has imported it
    if compiler is not None and isinstance(model, compiler.OptimizedModule):
        raise ValueError(
            "model is compiled already: shard the model first and compile what comes of it, "
            "shard(model, optimizer); model = torch.compile(model)"
        )
    if isinstance(model, nn.Module):
        if "zero_grad" in vars(model) and is_of_zero(vars(model)["zero_grad"]):
            raise ValueError(
                "model is sharded already: call detach() of what the first shard(...) returned before another one"
            )
        return
    if isinstance(model, (str, bytes, type, torch.Tensor)) or not (
        hasattr(model, "named_parameters") or isinstance(model, Iterable)
    ):
        raise TypeError(f"model must be a module, a pipeline or parameters, got {type(model).__name__} ({model!r:.60})")


def is_of_zero(zero_grad: Any) -> bool:
    """Whether this is what `shard` put in the place of a model's or an optimizer's zero_grad."""
    return isinstance(zero_grad, ZeroGrad)


def optimizers_of(optimizer: Any) -> list[torch.optim.Optimizer]:
    """One or several optimizers, as a list. Raises TypeError and ValueError."""
    found = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer
    if isinstance(found, (nn.Module, str, torch.Tensor)) or not isinstance(found, Iterable):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer or several of them, got {type(found).__name__}")
    found = list(found)
    for each in found:
        if not isinstance(each, torch.optim.Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer or several of them, got {type(each).__name__}")
        if "_optimizer_state_dict_pre_hooks" not in vars(each):
            raise TypeError(
                f"this {type(each).__name__} has not called torch.optim.Optimizer.__init__, as wrappers of another "
                "optimizer do not: give that one to shard(...), and step the wrapper as before"
            )
        if is_of_zero(vars(each).get("zero_grad")):
            raise ValueError(
                f"this {type(each).__name__} is sharded already: call detach() of what the first shard(...) returned "
                "before another one"
            )
    if not found:
        raise ValueError("optimizer must be at least one torch.optim.Optimizer, got none")
    return found


def group_of(group: GroupsLike) -> GroupsLike:
    """None means all ranks of the job, as in torch. `Communicator(None)` is one rank."""
    if group is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return dist.group.WORLD
    return group


def check_parameters(named: dict[str, nn.Parameter], precision: Precision) -> None:
    """Raises ValueError and TypeError for parameters that cannot be sharded."""
    if not named:
        raise ValueError("model has no parameters")
    for name, parameter in named.items():
        if parameter.is_complex() and parameter.requires_grad:
            raise TypeError(
                f"{name} is {parameter.dtype}: gradients are averaged as real numbers. Hold it as "
                "nn.Parameter(torch.view_as_real(value)), and take torch.view_as_complex of that in forward"
            )
        if parameter.requires_grad and parameter.grad_dtype not in (None, parameter.dtype):
            raise ValueError(
                f"{name} is {parameter.dtype} with grad_dtype={parameter.grad_dtype}, but what is reduced and updated "
                "has the dtypes of precision: set grad_dtype back to the parameter's own, and pass "
                "precision=fastpar.Precision(reduce=torch.float32, master=torch.float32)"
            )
        if parameter.device.type == "meta":
            raise ValueError(f"{name} is on the meta device: materialise and initialise the model before shard(...)")
    precision.check_names(list(named))


def check_buffers(model: object) -> None:
    """Raises ValueError for buffers without values, which ranks are to have alike."""
    for name, buffer in model.named_buffers() if isinstance(model, nn.Module) else ():
        if buffer.device.type == "meta":
            raise ValueError(
                f"the buffer {name} is on the meta device: give it its values before shard(...); load_state_dict "
                "does not where a buffer is not persistent"
            )


def check_embeddings(model: object) -> None:
    """Raises ValueError for embeddings whose gradients are sparse, as collectives and shards are of dense ones; that
    write to their weights in forward, each rank to the rows of its own ids; or whose gradients a rank cannot compute
    from its part of the batch."""
    modules = getattr(model, "modules", None)  # of a module, or of a pipeline's stages
    for module in modules() if callable(modules) else ():
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or not module.weight.requires_grad:
            continue
        if module.sparse:
            raise ValueError(
                f"{module} has sparse gradients, and ranks sum dense ones: set sparse=False on it, or freeze its weight"
            )
        if module.max_norm is not None:
            raise ValueError(
                f"{module} writes to the rows of the ids that it sees (max_norm), which are others on each rank: scale "
                "what it returns, or bound the rows of its weight after optimizer.step(), and set max_norm=None"
            )
        if module.scale_grad_by_freq:
            raise ValueError(
                f"{module} divides gradients by how often an id is in the batch (scale_grad_by_freq), of which a rank "
                "sees a part: set scale_grad_by_freq=False on it, or freeze its weight"
            )


def check_context(model: object, groups: Groups) -> None:
    """Raises ValueError where sequences are split over ranks over which gradients would not be summed."""
    modules = getattr(model, "modules", None)  # of a module, or of a pipeline's stages
    for module in modules() if callable(modules) else ():
        region = vars(module).get(REGION)
        if region is not None and region.comm.size != groups.num_parts:
            raise ValueError(
                f"the model attends over sequences that are split over {region.comm.size} ranks, whose "
                "gradients have to be summed and not averaged: pass group=mesh, the fastpar.Mesh with "
                f"cp={region.comm.size}"
            )
        if region is not None:
            region.checks.is_summed = True


def check_sharded_elsewhere(named: dict[str, nn.Parameter], groups: Groups) -> None:
    """Raises ValueError for parameters of which these ranks have different rows already, as fully_shard leaves them."""
    mine = {rank for comm in groups.everyone() if comm.group is not None for rank in _ranks(comm.group)}
    for name, parameter in named.items():
        if not isinstance(parameter, DTensor) or is_expert(parameter):
            continue
        mesh, placements = parameter.device_mesh, parameter.placements
        _check_grid(name, mesh, groups)
        split = [dim for dim, placement in enumerate(placements) if not placement.is_replicate() and mesh.size(dim) > 1]
        if any(len(mine.intersection(_ranks(mesh.get_group(dim)))) > 1 for dim in split):
            raise ValueError(
                f"{name} is sharded already over ranks that shard(...) would average it over ({placements} on {mesh}), "
                "as torch's fully_shard does: take one of the two (stage=3 shards parameters as fully_shard does)"
            )


def _check_grid(name: str, mesh: DeviceMesh, groups: Groups) -> None:
    """Raises ValueError for a grid's parameter that two dims of its mesh, as one, would have to shard."""
    sizes = {} if groups.mesh is None else {dim: groups.mesh.size(dim) for dim in ("dp_shard", "cp")}
    is_on_grid = any(dim in TENSOR_GRID_DIMS for dim in mesh.mesh_dim_names or ())
    if is_on_grid and groups.shard.size > 1 and min(sizes.values(), default=1) > 1:
        raise ValueError(
            f"{name} lies on a tensor-parallel grid, whose parameters are sharded over dp_shard or cp alone, and the "
            f"mesh has {sizes}: make one of them 1, with dp_replicate for the other, or use stage=0"
        )


def _ranks(group: dist.ProcessGroup) -> list[int]:
    return dist.get_process_group_ranks(group)


def check_optimizers(named: dict[str, nn.Parameter], optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raises ValueError unless the optimizers divide the trainable parameters between them."""
    held = [
        id(parameter) for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"]
    ]
    missing = [name for name, parameter in named.items() if parameter.requires_grad and id(parameter) not in set(held)]
    if missing:
        shown = ", ".join(missing[:4]) + (", ..." if len(missing) > 4 else "")
        if any(
            hasattr(x, "fastpar_is_detached") for each in optimizers for g in each.param_groups for x in g["params"]
        ):
            raise ValueError(
                f"the optimizer has rows or copies from before detach(), and not {shown}: make a new one. "
                "fp.zero.full_optimizer_state(zero) before detach(), and load_full_optimizer_state after shard(...), "
                "take its states over"
            )
        raise ValueError(
            f"{len(missing)} trainable parameters are not in the optimizer: {shown}. Build it from the parameters that "
            "the model has now (calls that replace parameters, as parallelize does, come before it), or freeze those"
        )
    if len(held) != len(set(held)):
        raise ValueError(f"{len(held) - len(set(held))} parameters are in the optimizers more than once")
    strange = len(set(held) - {id(parameter) for parameter in named.values()})
    if strange:
        raise ValueError(f"the optimizer has {strange} parameters that the model does not have")


def has_experts(named: dict[str, nn.Parameter], group: GroupsLike) -> bool:
    """Whether there are parameters split over ep or etp, for which the mesh must be known."""
    names = [name for name, parameter in named.items() if is_expert(parameter)]
    if names and not isinstance(group, Mesh):
        raise ValueError(
            f"group must be the fastpar Mesh for experts split over its ep or etp ({names[0]}), got {group}"
        )
    return bool(names)
