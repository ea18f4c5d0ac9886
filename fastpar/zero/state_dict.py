"""The state of a run for checkpoints: parameters and optimizer states by name, whole in meaning and sharded in fact.

    torch.distributed.checkpoint.save({"training": zero}, checkpoint_id=folder)
    torch.distributed.checkpoint.load({"training": zero}, checkpoint_id=folder)      # any stage, any number of ranks

    model.<name>                values, in the optimizer's precision (master weights where there are some); buffers
    optimizer.<name>.<state>    such as exp_avg, with the placements of the values
    groups.<name>               options of the optimizer's group that the parameter is in: pairs of names and values
    has_state.<name>            whether the parameter has been updated
    amax_history.<name>         of parameters that are gathered with delayed scales: what the next scale is made of
    save                        [MARK_ROWS, 2]: a number of the run, and how many steps it has taken

Rows of values and states are in the parameter's own order, also where tensor parallelism keeps packed shards of it:
see "packed rows".

Every key has the name of a parameter, so that what pipeline stages save lies side by side, and any stages find theirs.
Of copies on one rank (`Zero.copies`) the first is saved, and all are loaded from it: other layouts have no second one.

Tensors are DTensors where they are sharded, so that torch.distributed.checkpoint writes every element once and reads
those that a rank has. A tensor without dims is shown with one of size 1, since it may be sharded. Blocks of 8-bit
states belong to a layout, so an optimizer that has some gives and takes them as values (`to_checkpoint`,
`from_checkpoint` of fp.optim).

Note: states that do not exist yet. What is loaded must have tensors to be loaded into, so states are made here by a
step with zero gradients and a learning rate of zero, after which the values are put back; those of parameters that have
never been updated are taken away again.

Note: files of two saves. Every rank writes its rows of `save`, all alike. Whoever loads reads some of them from the
file of every rank that saved, and all must be equal. A file has no other mark that says when it was written: two saves
of one layout differ in nothing but their values.

Note: packed rows. Those of fused weights are put in order on the way to a checkpoint, and back on the way from it, with
what the optimizer has for them: see `fastpar.tensor.row_order`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from fastpar.comm import Communicator, shard_range
from fastpar.tensor.dtensor_data import check_own_part
from fastpar.tensor.parameter import layout_of
from fastpar.tensor.row_order import as_stored, in_order, is_packed
from fastpar.zero.groups import Groups, as_dtensor, local
from fastpar.zero.optimizer_step import MASTER, SCALARS, KeptCounts, Stepper
from fastpar.zero.sharded_param import ShardedParam

if TYPE_CHECKING:
    from fastpar.zero.zero import Zero


def collect(zero: Zero) -> dict[str, Any]:
    """The state of `zero`: its tensors share memory with what is trained, but for 8-bit states, which are float32 here,
    those of packed parameters, and those of parameters without state."""
    names, layouts = zero.optim_param_names(), _layouts(zero)
    state: dict[str, Any] = {
        **{"model": {}, "optimizer": {}, "groups": {}, "has_state": {}},
        **{"skipped": zero.skipped, "steps": zero.steps, "save": mark_of(zero)},
    }
    histories = {name: x for storage in zero.storages for name, x in storage.formats.histories().items()}
    if histories:
        state["amax_history"] = histories
    trained = {id(param.optim_param) for param in zero.params}
    for param in zero.params:
        if param.name in zero.copies:
            continue
        state["model"][param.name] = _shown(in_order(_detached(param.optim_param), layouts.get(param.name)))
    for name, x in zero.others():
        if name not in zero.copies:
            state["model"][name] = _shown(in_order(x, layouts.get(name)))
    for stepper in zero.steppers:
        optimizer = stepper.optimizer
        missing = [
            optim_param
            for optim_param in stepper.parameters()
            if id(optim_param) in trained and not optimizer.state.get(optim_param)
        ]
        make_states(stepper, missing)
        for optim_param in stepper.parameters():
            name = names[id(optim_param)]
            if name in zero.copies:
                continue
            for key, value in _saved(optimizer, optim_param).items():
                state["optimizer"].setdefault(name, {})[key] = _shown(in_order(value, layouts.get(name)))
        without = {id(optim_param) for optim_param in missing}
        for optim_param in missing:
            optimizer.state.pop(optim_param, None)
        for group in optimizer.param_groups:
            options = [(key, value) for key, value in group.items() if key not in ("params", "param_names")]
            for optim_param in group["params"]:
                name = names[id(optim_param)]
                if name in zero.copies:
                    continue
                state["groups"][name] = options
                if id(optim_param) in trained:
                    state["has_state"][name] = id(optim_param) not in without
    return state


def restore(zero: Zero, state: dict[str, Any]) -> None:
    """Take over what `collect` gave and a checkpoint has been loaded into."""
    missing = [key for key in ("save", "has_state", "groups") if key not in state]
    if missing:
        raise ValueError(f"loaded must be what Zero.state_dict() has given, has no {missing}")
    check_own_part("loaded", state["save"])
    check_mark(state["save"], zero.groups)
    layouts = _layouts(zero)
    saved_as = {name: zero.copies.get(name, name) for name in zero.optim_param_names().values()}
    names = {number: saved_as[name] for number, name in zero.optim_param_names().items()}
    has_state = {name for name, is_there in state["has_state"].items() if is_there}
    for stepper in zero.steppers:
        optimizer = stepper.optimizer
        for group in optimizer.param_groups:
            group.update(_options_of([names[id(optim_param)] for optim_param in group["params"]], state["groups"]))
        make_states(
            stepper, [p for p in stepper.parameters() if names[id(p)] in has_state and not optimizer.state.get(p)]
        )
        for optim_param in stepper.parameters():
            name = names[id(optim_param)]
            if name not in has_state:
                optimizer.state.pop(optim_param, None)
                continue
            saved = {key: as_stored(x, layouts.get(name)) for key, x in state["optimizer"].get(name, {}).items()}
            for entry, value in _loaded(optimizer, optim_param, saved).items():
                _put(optimizer.state[optim_param], entry, value)
    for param in zero.params:
        _copy(param.optim_param, as_stored(state["model"][saved_as[param.name]], layouts.get(param.name)))
    for name, x in zero.others():
        _copy(x, as_stored(state["model"][saved_as.get(name, name)], layouts.get(name)))
    for storage in zero.storages:
        storage.formats.load(state.get("amax_history", {}))
    zero.clipping.skipped, zero.steps = state["skipped"], state["steps"]


def _layouts(zero: Zero) -> dict[str, Any]:
    """How packed parameters lie over the ranks of tensor parallelism, by name."""
    found = [item for storage in zero.storages for item in storage.layouts.items()]
    return {name: layout for name, layout in found if is_packed(layout)}


def parts_of(
    given: Mapping[str, Any], params: Sequence[ShardedParam | None]
) -> tuple[dict[str, Any], dict[str, tuple[ShardedParam, Tensor]]]:
    """The states of an optimizer's state dict for this layout, and the master weights among them, by name.

    params  in the order of the optimizer's groups; None where one is not trained
    """
    ids = [number for group in given["param_groups"] for number in group["params"]]
    param_of = dict(zip(ids, params, strict=False))
    states: dict[str, Any] = {}
    masters: dict[str, tuple[ShardedParam, Tensor]] = {}
    for number, found in given["state"].items():
        param = param_of.get(number)
        if param is not None:
            found = _parts_of(found, param)
            if MASTER in found:
                masters[param.name] = param, found.pop(MASTER)
        states[number] = found
    return states, masters


def _parts_of(states: Mapping[str, Any], param: ShardedParam) -> dict[str, Any]:
    """This rank's part of a parameter's states, which may be whole, as one process has them."""
    # torch makes an empty dict of a state that a flat state dict has under no name, such as the scales of 8-bit states
    found = {key: value for key, value in states.items() if not (isinstance(value, dict) and not value)}
    return {key: _part(key, value, param) for key, value in found.items()}


def _part(key: str, value: Any, param: ShardedParam) -> Any:
    check_own_part(f"{key} of {param.name}", value)
    optim_param: Any = param.optim_param
    if not isinstance(value, Tensor) or key in SCALARS or local(value).shape == local(optim_param).shape:
        return value
    if isinstance(value, DTensor) and param.spec is not None and value.shape == optim_param.shape:
        value = value.full_tensor()  # of another layout: what is persistent under one stage is split under others
    if value.numel() != optim_param.numel():
        return value
    value = value.to(optim_param.device).view(optim_param.shape)
    if param.spec is None:
        return value
    if is_packed(layout_of(param.parameter)):  # torch's whole states of a layout like this have its order, others not
        raise ValueError(
            f"{param.name} is a fused weight in packed shards, and whole states do not say in which order their rows "
            "are: load what zero.state_dict() has given with zero.load_state_dict, or fp.zero.full_optimizer_state's "
            "with fp.zero.load_full_optimizer_state"
        )
    # Every rank has it all: none is asked to send.
    return distribute_tensor(value, param.spec.device_mesh, param.spec.placements, src_data_rank=None)


def _options_of(names: Sequence[str], saved: Mapping[str, Any]) -> dict[str, Any]:
    """The options that all of these parameters had when they were saved."""
    found: dict[str, Any] = {}
    first = ""
    for name in names:
        if name not in saved:
            raise ValueError(f"the checkpoint has no options of {name}: it was not in an optimizer that was saved")
        options = dict(saved[name])
        if first and options != found:
            differing = next(key for key in {**found, **options} if found.get(key) != options.get(key))
            raise ValueError(
                f"{first} and {name} are in one parameter group, and were saved with different {differing} "
                f"({found.get(differing)} and {options.get(differing)}): build the optimizer with the groups that were "
                "saved"
            )
        first, found = name, options
    return found


@torch.no_grad()
def make_states(stepper: Stepper, optim_params: Sequence[nn.Parameter]) -> None:
    """Give the optim_params the states that the optimizer's first step gives them."""
    if not optim_params:
        return
    values = [local(optim_param).clone() for optim_param in optim_params]
    grads = [optim_param.grad for optim_param in optim_params]
    counts = KeptCounts(stepper.optimizer)
    try:
        for group in stepper.optimizer.param_groups:
            if "lr" in group:
                group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
        for optim_param in optim_params:
            optim_param.grad = torch.zeros_like(optim_param)
        stepper.update(optim_params)
    finally:
        counts.put_back()
        for optim_param, value, grad in zip(optim_params, values, grads, strict=True):
            local(optim_param).copy_(value)
            optim_param.grad = grad


def _saved(optimizer: Any, optim_param: nn.Parameter) -> Mapping[str, Any]:
    """The states of an optim_param in the form that any layout loads: fp.optim has formats that belong to one."""
    states: Mapping[str, Any] = optimizer.state.get(optim_param, {})
    return optimizer.to_checkpoint(states) if hasattr(optimizer, "to_checkpoint") else states


def _loaded(optimizer: Any, optim_param: nn.Parameter, states: Mapping[str, Any]) -> Mapping[str, Any]:
    """The reverse of `_saved`, for this layout."""
    return optimizer.from_checkpoint(optim_param, states) if hasattr(optimizer, "from_checkpoint") else states


def _detached(x: Tensor) -> Tensor:
    """The same memory without history. `detach` of a DTensor would put back what `as_dtensor` avoids: copy.deepcopy of
    the state would fail on the ranks whose rows have an offset."""
    return as_dtensor(local(x), x._spec) if isinstance(x, DTensor) else x.detach()


def _shown(x: Any) -> Any:
    return x.detach().view(1) if isinstance(x, Tensor) and x.ndim == 0 else x


def _copy(target: Tensor, value: Tensor) -> None:
    mine, loaded = local(target), local(value)
    if loaded.data_ptr() != mine.data_ptr():
        mine.copy_(loaded.view(mine.shape))


def _put(states: dict[str, Any], key: str, value: Any) -> None:
    held = states.get(key)
    if isinstance(held, Tensor) and isinstance(value, Tensor):
        _copy(held, value)
    else:
        states[key] = value


ROWS = 4096  # ranks beyond have none, and their files no mark


def new_run(groups: Groups) -> int:
    """A number that no other run has, the same on all ranks that save together, as far as they are known; 0 where they
    are not. Collective."""
    if dist.is_initialized() and len(groups.ranks) < dist.get_world_size():
        return 0
    number = torch.tensor([int.from_bytes(os.urandom(7), "little")], device="cpu")
    for comm in _comms(groups):
        number = comm.broadcast(number, 0)
    return int(number)


def check_names(groups: Groups, *, are_named: bool) -> None:
    """Raises ValueError where other ranks may have other parameters under the same numbers."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    is_alone = world == groups.size if groups.mesh is None else groups.mesh.size("pp") == 1
    if not (are_named or is_alone):
        raise ValueError(
            "shard(...) was given parameters without names, and other ranks have others under the same numbers: "
            "pass what has names to shard, as the pipeline itself, or pipe.named_parameters()"
        )


def mark_of(zero: Zero) -> Tensor:
    """The mark of what is saved now."""
    ranks = zero.groups.ranks
    mark = torch.tensor([[zero.run, zero.steps]], device="cpu")
    if len(ranks) == 1:
        return mark.repeat(ROWS, 1)
    start, end = shard_range(ROWS, len(ranks), ranks.index(dist.get_rank()))
    mesh = DeviceMesh("cpu", torch.tensor(ranks, device="cpu"), _init_backend=False)
    meta = TensorMeta(torch.Size((ROWS, 2)), (2, 1), torch.int64)
    return as_dtensor(mark.repeat(end - start, 1), DTensorSpec(mesh, (Shard(0),), tensor_meta=meta))


def check_mark(mark: Tensor, groups: Groups) -> None:
    """Raises ValueError on all ranks where what was loaded is not of one save. Collective."""
    rows = local(mark)
    if rows.numel() == 0:
        rows = mark.new_empty(0, 2)
    limits = torch.iinfo(torch.int64)
    low = rows.amin(0) if len(rows) else torch.full((2,), limits.max, device="cpu")
    high = rows.amax(0) if len(rows) else torch.full((2,), limits.min, device="cpu")
    for comm in _comms(groups):
        low, high = comm.all_reduce(low, "min"), comm.all_reduce(high, "max")
    if torch.equal(low, high):
        return
    steps = f"of steps {int(low[1])} and {int(high[1])}" if low[1] != high[1] else "of different runs"
    raise ValueError(
        f"the checkpoint has files of several saves ({steps}): a part of it was replaced, or is left from an earlier "
        "one. The values in memory are a mixture now; load another checkpoint"
    )


def _comms(groups: Groups) -> list[Communicator]:
    return [*groups.everyone(), *groups.others()]
