"""`shard`: data parallelism for a model and its optimizer, with as much of it sharded as one asks for."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from fastpar.clip import GradSum
from fastpar.comm.wire import Wire
from fastpar.mesh import Mesh
from fastpar.precision import Precision
from fastpar.zero import memory, state
from fastpar.zero.flat import FlatLayout
from fastpar.zero.groups import Groups, GroupsLike, as_dtensor, is_expert, local
from fastpar.zero.offload import DiskStates, Offload
from fastpar.zero.reducer import BUCKET_BYTES, Reducer
from fastpar.zero.replicas import Replicas
from fastpar.zero.slots import Slot, name_nonfinite
from fastpar.zero.stage3 import RESIDENT_SHARE, Stage3
from fastpar.zero.step import Stepper
from fastpar.zero.units import UnitsLike

_SCALARS = ("step", "eta", "mu", "mu_product")  # states of torch's optimizers that are one number for any parameter


def shard(
    model: nn.Module | Iterable[nn.Parameter] | Iterable[tuple[str, nn.Parameter]],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    *,
    group: GroupsLike = None,
    stage: int = 1,
    precision: Precision | None = None,
    accumulate: int = 1,
    max_norm: float | None = None,
    skip_nonfinite: bool = True,
    offload: Offload | str | None = None,
    overlap: bool = True,
    bucket_bytes: int = BUCKET_BYTES,
    wire: Wire | None = None,
    units: UnitsLike = None,
    reshard_after_forward: bool = True,
    resident_share: float = RESIDENT_SHARE,
) -> Zero:
    """Make `model` and `optimizer` data-parallel over `group`, in place. Collective.

        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        zero = fp.zero.shard(model, optimizer, group=mesh, stage=2, precision=fp.Precision.bf16())
        for batch in batches:                      # a loop as without
            loss_of(model(batch)).backward()
            optimizer.step()
            optimizer.zero_grad()

    model       a module, or parameters (with names, or without)
    optimizer   any of torch.optim but LBFGS, of fp.optim, or one's own, or several that divide the parameters between
                them: all trainable parameters must be in one. They stay the same objects (LR schedulers, GradScaler and
                state_dict work); from now on param_groups hold what this rank updates
    group       a Mesh (dims dp_shard and dp_replicate; efsdp and dp_replicate for experts split over its ep or etp), a
                DeviceMesh of one dim, or two (replicate, shard), a ProcessGroup, or a Communicator: the ranks, which
                all have the same parameters (rank 0's are taken)
    stage       0: parameters, gradients and optimizer states on every rank (DDP)
                1: every rank updates its rows (dim 0) of each parameter, and has states for those only
                2: and gradients of those only, from microbatch to microbatch
                3: and parameters, which are gathered for the layer that runs
    precision   dtypes: see `Precision`. Floating-point inputs of a module are cast to its parameters' dtype
    accumulate  backward passes per step. Stages 0 and 1 sum gradients locally and reduce them in the last pass; 2 and 3
                reduce in every pass, and sum what is left of them
    max_norm    clip gradients to this global norm in every step (`Zero.norm` has it). The norm is exact, so that it has
                the same bits in every stage
    skip_nonfinite
                a NaN or an infinity in a gradient of any rank: all ranks skip the step, nothing changes, `Zero.skipped`
                counts it and `Zero.report` says where it came from
    offload     "cpu", "nvme:FOLDER" or an Offload: master weights and optimizer states in the host's memory or a file;
                in stage 3 "cpu+parameters" and "nvme+parameters:FOLDER" for the shards of parameters, too
    overlap     False: reduce in optimizer.step() and not during backward, as for the many passes of a pipeline
    bucket_bytes
                of gradients that travel together in stages 0 to 2
    wire        how gradients travel within the group that shards, or in stage 0: a `fastpar.comm.BlockWire` (8 bits), a
                CastWire; None: in precision's dtype
    units, reshard_after_forward, resident_share
                of stage 3: what is gathered together, whether it is freed between forward and backward, and what share
                of the elements, in the smallest parameters, stays on every rank: see `fastpar.zero.stage3.Stage3`

    For float16 use `fastpar.LossScaler`. torch.amp.GradScaler works up to stage 2; in stage 3 its ranks may decide
    differently whether to skip a step, as torch looks at the first gradient only to see whether gradients are sharded,
    and resident ones are not.

    Gradients are means over the ranks: scale the loss by 1 / accumulate, as always. Reductions begin during backward
    and have ended when it returns. Parameters that no rank used have no gradient, as without.

    Raises ValueError and TypeError for what does not fit, before anything is changed.
    """
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
    offload = Offload.of(offload)
    _check_offload(offload, stage)
    _check(stage, accumulate, max_norm, bucket_bytes)
    named = _named_parameters(model)
    if not named:
        raise ValueError("model has no parameters")
    if stage == 3 and not isinstance(model, nn.Module):
        raise TypeError(f"stage 3 gathers parameters for modules: model must be one, got {type(model).__name__}")
    _check_optimizers(named, optimizers)
    precision = precision or Precision()
    precision.check_names(list(named))
    like: dict[str, Any] = {"is_sharded": stage > 0, "device_type": next(iter(named.values())).device.type}
    experts = Groups(group, **like, of_experts=True) if _has_experts(named, group) else None
    return Zero(
        model if isinstance(model, nn.Module) else None,
        named,
        optimizers,
        Groups(group, **like, experts=experts),
        stage=stage,
        precision=precision,
        accumulate=accumulate,
        max_norm=max_norm,
        skip_nonfinite=skip_nonfinite,
        offload=offload,
        overlap=overlap,
        bucket_bytes=bucket_bytes,
        wire=wire,
        units={"units": units, "reshard_after_forward": reshard_after_forward, "resident_share": resident_share},
    )


class Zero:
    """What `shard` made of a model and an optimizer."""

    def __init__(
        self,
        model: nn.Module | None,
        named: dict[str, nn.Parameter],
        optimizers: Sequence[torch.optim.Optimizer],
        groups: Groups,
        *,
        stage: int,
        precision: Precision,
        accumulate: int,
        max_norm: float | None,
        skip_nonfinite: bool,
        offload: Offload | None,
        overlap: bool,
        bucket_bytes: int,
        wire: Wire | None,
        units: dict[str, Any] | None,
    ) -> None:
        self.model, self.optimizers, self.groups = model, list(optimizers), groups
        self.stage, self.precision, self.max_norm, self.offload = stage, precision, max_norm, offload
        self.norm: Tensor | None = None
        self.skipped = 0
        self.report = ""
        self._skip_nonfinite = skip_nonfinite
        self._names = {id(parameter): name for name, parameter in named.items()}
        parts = _parts(named, groups)
        self._synchronise(parts)
        self._waiting: list[Stepper] = []  # that have not taken the step whose gradients have been prepared
        self._is_going = True  # and whether it is not skipped
        self.storages: list[Replicas | Stage3]
        if stage == 3:
            assert model is not None
            stage3 = Stage3(model, groups, precision, offload=offload, wire=wire, **(units or {}))
            self.storages = [stage3]
        else:
            self.storages = [
                Replicas(
                    part,
                    part_groups,
                    precision,
                    has_copies=offload is not None,
                    accumulate=accumulate if stage < 2 else 1,
                    bucket_bytes=bucket_bytes,
                    began=self._waiting.clear,
                    wire=wire,
                )
                for part, part_groups in parts
            ]
        self._reducers = [storage.reducer for storage in self.storages]
        order = {name: number for number, name in enumerate(named)}
        self.slots = sorted((slot for s in self.storages for slot in s.slots), key=lambda slot: order[slot.name])
        for slot in self.slots:
            slot.is_traced = skip_nonfinite
        for reducer in self._reducers:
            reducer.is_syncing = overlap
        self.steppers = [Stepper(optimizer, self._phases) for optimizer in self.optimizers]
        self._factor: Tensor | None = None
        self._adopt()
        self._disks = self._make_disks()
        self._handles = self._hook()

    # ---- what users call

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in here add to local gradients; the next one outside, or the step, reduces them all."""
        before = [reducer.is_syncing for reducer in self._reducers]
        for reducer in self._reducers:
            reducer.is_syncing = False
        try:
            yield
        finally:
            for reducer, was_syncing in zip(self._reducers, before, strict=True):
                reducer.is_syncing = was_syncing

    def reduce_gradients(self) -> None:
        """Reduce what has not been reduced yet, as `optimizer.step()` does. Collective."""
        for reducer in self._reducers:
            reducer.reduce_now()

    def expected_memory(self, state_bytes: float = 8.0) -> dict[str, int]:
        """Bytes that this rank holds between backward and the step, by formula: "parameters" (of those in a file the
        buffers that they are read into), "gradients" (with the buffers in which they travel) and "states" (with master
        weights, also where they are in a file). Activations, and in stage 3 the units that are whole meanwhile, come on
        top.

        state_bytes  of the optimizer per element that it updates: 8 for Adam's two moments in float32
        """
        return memory.expected(self, state_bytes)

    @property
    def resident(self) -> frozenset[str]:
        """Parameters that stage 3 keeps on every rank."""
        return frozenset().union(*(s.resident for s in self.storages if isinstance(s, Stage3)))

    def owner_names(self) -> dict[int, str]:
        """The names of the parameters that the optimizers have, by id."""
        frozen = {id(at_rest): self._names[number] for number, at_rest in self._frozen_at_rest().items()}
        return {**self._names, **frozen, **{id(slot.owner): slot.name for slot in self.slots}}

    def frozen(self) -> dict[str, Tensor]:
        """Parameters that are not trained, as they are at rest, by name."""
        return {name: parameter for storage in self.storages for name, parameter in storage.frozen.items()}

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint is to hold, for torch.distributed.checkpoint: see `fastpar.zero.state`. Collective."""
        self._load()
        return state.collect(self)

    def load_state_dict(self, loaded: dict[str, Any]) -> None:
        """Go on from a state that `state_dict` has given, and a checkpoint may have been loaded into. Collective."""
        self._load()
        state.restore(self, loaded)
        self._release()
        self._write_back([slot.owner for slot in self.slots], False)
        self._publish()
        for disk in self._disks.values():
            disk.put_away()

    def others(self) -> Iterator[tuple[str, Tensor]]:
        """Frozen parameters and buffers that a checkpoint holds, by name."""
        yield from self.frozen().items()
        if self.model is not None:
            persistent = self.model.state_dict(keep_vars=True)
            for name, buffer in self.model.named_buffers():
                if name in persistent:
                    yield name, buffer

    def detach(self) -> None:
        """Remove all hooks; parameters, gradients and states stay as they are, and come out of files."""
        for disk in self._disks.values():
            disk.load()
        for storage in self.storages:
            storage.detach()
        for stepper in self.steppers:
            stepper.detach()
        hooked: list[Any] = [*self.optimizers, *([self.model] if self.model is not None else [])]
        for owner in hooked:
            del owner.zero_grad
            vars(owner).pop("finish_gradients", None)
        for handle in self._handles:
            handle.remove()

    def groups_of(self, slot: Slot) -> Groups:
        """The ranks that a parameter is averaged over: those of data parallelism, or of its experts."""
        return self.groups.of(slot.parameter)

    def _load(self) -> None:
        """Bring what is in files into memory, until the next step or forward."""
        for disk in self._disks.values():
            disk.load()
        for storage in self.storages:
            if isinstance(storage, Stage3):
                storage.load()

    def _frozen_at_rest(self) -> dict[int, nn.Parameter]:
        """What modules have at rest in the place of whole parameters that are not trained, by the id of these."""
        found: dict[int, nn.Parameter] = {}
        for storage in self.storages:
            if isinstance(storage, Stage3):
                found |= storage.frozen_at_rest
        return found

    # ---- the step

    def _release(self) -> None:
        for storage in self.storages:
            storage.released()

    def _publish(self) -> None:
        for storage in self.storages:
            storage.published()

    def _phases(self, stepper: Stepper) -> None:
        """Reduce, check and clip (once for all optimizers), update, gather."""
        if stepper not in self._waiting:
            self._is_going = self._prepare(stepper.optimizer)
            self._waiting = list(self.steppers)
        self._waiting.remove(stepper)
        if not self._is_going:
            return
        self._release()
        owners = stepper.with_gradient()
        rounded = self._hand_over(stepper.optimizer)
        disk = self._disks.get(id(stepper))
        if disk is None:
            stepper.update()
            self._write_back(owners, rounded)
        else:
            optimizer: Any = stepper.optimizer
            factor = getattr(optimizer, "grad_factor", None)

            def update(some: Sequence[nn.Parameter]) -> None:
                if factor is not None:
                    optimizer.grad_factor = factor  # which an update resets
                with self._writing(some):
                    stepper.update(some)
                    self._write_back(some, rounded)

            disk.update(update)
        if not self._waiting:
            self._publish()

    @contextmanager
    def _writing(self, owners: Sequence[nn.Parameter]) -> Iterator[None]:
        """Memory in the block for the parameters that these owners are rounded to, where those are in a file."""
        slots = [self._slot_of[id(owner)] for owner in owners]
        with ExitStack() as stack:
            for storage in self.storages:
                if isinstance(storage, Stage3):
                    stack.enter_context(storage.writing(slots))
            yield

    def _prepare(self, optimizer: Any) -> bool:
        """Reduce, and see by how much gradients are to be clipped; False where the step is to be skipped."""
        self.reduce_gradients()
        self._factor, self.report = None, ""
        if self.max_norm is None and not self._skip_nonfinite:
            return True
        unscale = _unscaling(optimizer)
        total = GradSum.of([slot.owner for slot in self.slots], mesh=self.groups.mesh)
        self.norm = total.norm() * unscale
        if self._skip_nonfinite and total.nonfinite:
            self.skipped += 1
            self.report = name_nonfinite(self.slots, self.groups)
            return False
        if self.max_norm is not None:
            self._factor = total.clip_factor(self.max_norm, scale=unscale) / unscale
        return True

    def _hand_over(self, optimizer: Any) -> bool:
        """Clip: in the update's own pass where the optimizer can do that. Whether it rounds to the parameters, too."""
        if not hasattr(optimizer, "grad_factor"):
            if self._factor is not None and self._factor < 1.0:
                held = {id(p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
                grads = [slot.owner.grad for slot in self.slots if id(slot.owner) in held]
                gradients = [local(grad) for grad in grads if grad is not None]
                torch._foreach_mul_(gradients, self._factor)
            return False
        if self._factor is not None:
            pending = 1.0 if optimizer.grad_factor is None else optimizer.grad_factor
            optimizer.grad_factor = self._factor * pending
        return True

    def _write_back(self, owners: Sequence[nn.Parameter], is_rounded: bool) -> None:
        """Round updated master weights to the parameters."""
        if not self._has_targets:
            return
        for owner in owners:
            target = self._slot_of[id(owner)].target
            if target is not None and not (is_rounded and target.dtype != owner.dtype):
                target.copy_(local(owner), non_blocking=True)

    # ---- building

    def _synchronise(self, parts: Sequence[tuple[dict[str, nn.Parameter], Groups]]) -> None:
        """The values of each group's rank 0 on all of its ranks, for buffers too."""
        tensors = [[local(parameter) for parameter in named.values()] for named, _ in parts]
        if self.model is not None:
            tensors[0] += [local(buffer) for buffer in self.model.buffers() if buffer.numel() > 0]
        for values, (_, groups) in zip(tensors, parts, strict=True):
            for comm in groups.everyone():
                for x in values:
                    x.copy_(comm.broadcast(x, 0))

    def _adopt(self) -> None:
        """Give the optimizers the slots' owners in the place of the parameters, with their part of the states."""
        slots = {id(slot.parameter): slot for slot in self.slots}
        frozen = self._frozen_at_rest()
        self._slot_of = {id(slot.owner): slot for slot in self.slots}
        self._has_targets = any(slot.target is not None for slot in self.slots)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for index, parameter in enumerate(group["params"]):
                    slot = slots.get(id(parameter))
                    if id(parameter) in frozen:  # whose memory comes and goes
                        group["params"][index] = frozen[id(parameter)]
                    if slot is None or slot.owner is parameter:
                        continue
                    group["params"][index] = slot.owner
                    if parameter in optimizer.state:
                        optimizer.state[slot.owner] = self._cut_state(optimizer.state.pop(parameter), slot)
            if hasattr(optimizer, "outputs"):
                optimizer.outputs.update(
                    {
                        slot.owner: slot.target
                        for slot in self.slots
                        if slot.target is not None and slot.target.dtype != slot.owner.dtype
                    }
                )

    def _cut_state(self, states: dict[str, Any], slot: Slot) -> dict[str, Any]:
        """This rank's rows of states that have the parameter's shape."""
        groups = self.groups_of(slot)
        rank, size = groups.shard.rank, groups.shard.size
        shape, mine = local(slot.parameter).shape, local(slot.owner)
        layout = FlatLayout([shape], size)
        cut: dict[str, Any] = {}
        for key, value in states.items():
            if isinstance(value, Tensor) and local(value).shape == shape and key not in _SCALARS:
                rows = local(value)
                if mine.numel() != rows.numel():  # resident parameters are whole
                    rows = layout.rows_of(rows, 0, rank)
                cut[key] = as_dtensor(rows.to(mine.device).clone().view(mine.shape), slot.spec)
            else:
                cut[key] = value
        return cut

    def _make_disks(self) -> dict[int, DiskStates]:
        if self.offload is None or self.offload.path is None:
            return {}
        return {
            id(stepper): DiskStates(self.offload, stepper.parameters(), stepper.optimizer) for stepper in self.steppers
        }

    def _hook(self) -> list[Any]:
        for optimizer in self.optimizers:
            self._hook_zero_grad(optimizer, optimizer.zero_grad)
            vars(optimizer)["finish_gradients"] = self.reduce_gradients  # for LossScaler
        if self.model is None:
            return []
        self._hook_zero_grad(self.model, self.model.zero_grad)
        handles: list[Any] = []

        def before_forward(*_: Any) -> None:
            if torch.is_grad_enabled():
                self._waiting.clear()
                for reducer in self._reducers:
                    if isinstance(reducer, Reducer):
                        reducer.begin_forward()

        handles.append(self.model.register_forward_pre_hook(before_forward))
        if self.precision.param is not None:
            handles.append(self.model.register_forward_pre_hook(self._cast_inputs, with_kwargs=True))
        if self.precision.compute is not None:
            device = next((slot.parameter.device.type for slot in self.slots), "cpu")
            handles += autocast_forward(self.model, self.precision, device)
        return handles

    def _cast_inputs(self, _: nn.Module, args: Any, kwargs: Any) -> Any:
        """Floating-point inputs of the model, in the dtype of its parameters."""
        dtype = self.precision.param

        def cast(x: Any) -> Any:
            return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x

        return tree_map(cast, args), tree_map(cast, kwargs)

    def _hook_zero_grad(self, owner: Any, plain: Any) -> None:
        def zero_grad(_: Any, set_to_none: bool = True) -> None:
            self._waiting.clear()
            for reducer in self._reducers:
                reducer.forget_sums()
            plain(set_to_none)
            for slot in self.slots:  # of a module these are not the parameters
                if slot.owner.grad is not None:
                    slot.owner.grad = None

        owner.zero_grad = types.MethodType(zero_grad, owner)


def _unscaling(optimizer: Any) -> float | Tensor:
    """What the optimizer will multiply gradients with: a scaler may leave unscaling to the update."""
    if getattr(optimizer, "grad_scale", None) is not None:
        scale: Tensor = optimizer.grad_scale
        return 1.0 / scale.float()
    factor = getattr(optimizer, "grad_factor", None)
    return 1.0 if factor is None else factor


def autocast_forward(model: nn.Module, precision: Precision, device_type: str) -> list[Any]:
    """Run the model's forward under autocast."""
    entered: list[Any] = []

    def enter(*_: Any) -> None:
        entered.append(precision.autocast(device_type))
        entered[-1].__enter__()

    def leave(*_: Any) -> None:
        if entered:
            entered.pop().__exit__(None, None, None)

    return [model.register_forward_pre_hook(enter), model.register_forward_hook(leave, always_call=True)]


def _check_offload(offload: Offload | None, stage: int) -> None:
    if offload is not None and offload.parameters and stage != 3:
        raise ValueError(f"offload of parameters is for stage 3, which shards them; stage is {stage}")


def _check(stage: int, accumulate: int, max_norm: float | None, bucket_bytes: int) -> None:
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"stage must be 0, 1, 2 or 3, got {stage!r}")
    if accumulate < 1:
        raise ValueError(f"accumulate must be at least 1 (backward passes per step), got {accumulate}")
    if max_norm is not None and not max_norm > 0:
        raise ValueError(f"max_norm must be positive or None, got {max_norm}")
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes must be at least 1, got {bucket_bytes}")


def _named_parameters(model: Any) -> dict[str, nn.Parameter]:
    """Every parameter once, by its first name."""
    if isinstance(model, nn.Module):
        return dict(model.named_parameters())
    named = {}
    for index, item in enumerate(model):
        name, parameter = item if isinstance(item, tuple) else (str(index), item)
        if not isinstance(parameter, nn.Parameter):
            raise TypeError(f"model must be a module or parameters, got {type(parameter).__name__} at {name!r}")
        named[name] = parameter
    return named


def _has_experts(named: dict[str, nn.Parameter], group: GroupsLike) -> bool:
    """Whether there are parameters split over ep or etp, for which the mesh must be known."""
    names = [name for name, parameter in named.items() if is_expert(parameter)]
    if names and not isinstance(group, Mesh):
        raise ValueError(
            f"group must be the fastpar Mesh for experts split over its ep or etp ({names[0]}), got {group}"
        )
    return bool(names)


def _parts(named: dict[str, nn.Parameter], groups: Groups) -> list[tuple[dict[str, nn.Parameter], Groups]]:
    """The parameters by the ranks that they are averaged over."""
    return [
        ({name: parameter for name, parameter in named.items() if groups.of(parameter) is each}, each)
        for each in groups.with_experts()
    ]


def _check_optimizers(named: dict[str, nn.Parameter], optimizers: Sequence[torch.optim.Optimizer]) -> None:
    held = [
        id(parameter) for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"]
    ]
    missing = [name for name, parameter in named.items() if parameter.requires_grad and id(parameter) not in set(held)]
    if missing:
        shown = ", ".join(missing[:4]) + (", ..." if len(missing) > 4 else "")
        raise ValueError(f"{len(missing)} trainable parameters are not in the optimizer: {shown}")
    if len(held) != len(set(held)):
        raise ValueError(f"{len(held) - len(set(held))} parameters are in the optimizers more than once")
    strange = len(set(held) - {id(parameter) for parameter in named.values()})
    if strange:
        raise ValueError(f"the optimizer has {strange} parameters that the model does not have")
