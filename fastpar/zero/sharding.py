"""`shard`: data parallelism for a model and its optimizer, with as much of it sharded as one asks for."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fastpar.arguments import checked
from fastpar.clip import GradSum
from fastpar.comm.ranges import annotate
from fastpar.comm.wire_formats import Wire
from fastpar.ddp import OVER_ZERO, ClosedToDDP
from fastpar.precision import Precision
from fastpar.zero import memory, options, state_dict
from fastpar.zero.flat import FlatLayout
from fastpar.zero.groups import Groups, GroupsLike, as_dtensor, local
from fastpar.zero.hooks import Autocast, CastInputs, ForwardHook, LoadStates, ZeroGrad
from fastpar.zero.optimizer_step import MASTER, Stepper, check_sharded_updates
from fastpar.zero.options import HasParameters, NamedParameters, Offload, check_gradient_wire, param_wires_of
from fastpar.zero.param_group import UnitsLike
from fastpar.zero.quantized_gather import ParamWire, ParamWireLike
from fastpar.zero.reducer import BUCKET_BYTES
from fastpar.zero.replicas import Replicas
from fastpar.zero.shard_store import DiskStates
from fastpar.zero.sharded_param import ShardedParam, name_nonfinite, union
from fastpar.zero.stage3 import PERSISTENT_SHARE, Stage3, in_backward
from fastpar.zero.state_dict import new_run, part_of


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
                3: and parameters, which are gathered for the layer that runs
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
    overlap     False: reduce in optimizer.step() and not during backward, as for the many passes of a pipeline
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
                ranks must have the same, else ValueError names what differs
    timeout     seconds until a wait for another rank fails (None: the group's own where it is a Communicator, else 60)

    For float16 use `fastpar.LossScaler`. torch.amp.GradScaler works up to stage 2; in stage 3 its ranks may decide
    differently whether to skip a step, as torch looks at the first gradient only to see whether gradients are sharded,
    and persistent ones are not.

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
    offload = Offload.of(offload)
    precision = Precision.of(precision)
    group = options.group_of(group)
    options.check_stage(model, stage)
    options.check_offload(offload, stage)
    options.check_numbers(accumulate, max_norm, bucket_bytes, timeout)
    options.check_sync_weights(sync_weights)
    options.check_parameters(named.parameters, precision)
    check_gradient_wire(wire)
    param_wires = param_wires_of(
        param_wire, named.parameters, precision, stage, offload is not None and offload.parameters
    )
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
    for each in optimizers:
        check_sharded_updates(each, groups)
    return Zero(
        model if isinstance(model, nn.Module) else None,
        named,
        optimizers,
        groups,
        stage=stage,
        precision=precision,
        accumulate=accumulate,
        max_norm=max_norm,
        skip_nonfinite=skip_nonfinite,
        offload=offload,
        overlap=overlap,
        bucket_bytes=bucket_bytes,
        wire=wire,
        param_wires=param_wires,
        units={"units": units, "reshard_after_forward": reshard_after_forward, "persistent_share": persistent_share},
        sync_weights=sync_weights,
    )


class Zero:
    """What `shard` made of a model and an optimizer."""

    def __init__(
        self,
        model: nn.Module | None,
        found: NamedParameters,
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
        param_wires: Mapping[str, ParamWire],
        units: dict[str, Any] | None,
        sync_weights: str = "broadcast",
    ) -> None:
        named = found.parameters
        self.model, self.optimizers, self.groups = model, list(optimizers), groups
        self.stage, self.precision, self.max_norm, self.offload = stage, precision, max_norm, offload
        self.norm: Tensor | None = None
        self.steps = self.skipped = 0
        self.report = ""
        self._skip_nonfinite = skip_nonfinite
        self.are_named = found.are_named
        self.run = new_run(groups)  # see state_dict.py
        self._names = {id(parameter): name for name, parameter in named.items()}
        self._order = {name: number for number, name in enumerate(named)}
        parts = _parts(named, groups)
        self._synchronise(parts, sync_weights)
        self._cast_buffers()
        self._waiting: list[Stepper] = []  # that have not taken the step whose gradients have been prepared
        self._is_going = True  # and whether it is not skipped
        self.storages: list[Replicas | Stage3]
        if stage == 3:
            assert model is not None
            stage3 = Stage3(
                model, groups, precision, offload=offload, wire=wire, param_wires=param_wires, **(units or {})
            )
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
                    param_wires=param_wires,
                    model=model,
                )
                for part, part_groups in parts
            ]
        self._reducers = [storage.reducer for storage in self.storages]
        self.params: list[ShardedParam] = []
        self._take_params()
        for reducer in self._reducers:
            reducer.is_syncing, reducer.is_deferred = overlap, not overlap
        self.steppers = [Stepper(optimizer, self._phases, self._stepped) for optimizer in self.optimizers]
        self._factor: Tensor | None = None
        self._is_attached = True
        self._ddp_door = ClosedToDDP(model, OVER_ZERO)
        with self._holding_owners():
            self._adopt()
            self._disks = self._make_disks()
        self._note_versions()
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
            reducer.show()  # also where nothing was left to be reduced

    @checked(computed=False)
    def expected_memory(self, state_bytes: float = 8.0) -> dict[str, int]:
        """Bytes that this rank holds between backward and the step, by formula: "parameters" (of those in a file the
        buffers that they are read into), "gradients" (with the buffers in which they travel) and "states" (with master
        weights, also where they are in a file). Activations, and in stage 3 the units that are whole meanwhile, come on
        top.

        state_bytes  of the optimizer per element that it updates: 8 for Adam's two moments in float32
        """
        if not 0 <= state_bytes < 1 << 20:
            raise ValueError(f"state_bytes must be bytes per element, at least 0, got {state_bytes}")
        return memory.expected(self, state_bytes)

    @property
    def persistent(self) -> frozenset[str]:
        """Parameters that stage 3 keeps on every rank."""
        return frozenset().union(*(s.persistent for s in self.storages if isinstance(s, Stage3)))

    @property
    def saturated(self) -> dict[str, int]:
        """Elements of this rank's rows that were beyond a delayed scale (`param_wire`) and were gathered as the largest
        code, by parameter, counted at every gather; parameters without any are left out."""
        return {name: count for storage in self.storages for name, count in storage.formats.saturated().items()}

    def optim_param_names(self) -> dict[int, str]:
        """The names of the parameters that the optimizers have, by id."""
        frozen = {id(sharded): self._names[number] for number, sharded in self._frozen_at_rest().items()}
        return {**self._names, **frozen, **{id(param.optim_param): param.name for param in self.params}}

    def frozen(self) -> dict[str, Tensor]:
        """Parameters that are not trained, as they are at rest, by name."""
        known = {param.name for param in self.params}  # some of which may have been frozen meanwhile
        found = [item for storage in self.storages for item in storage.frozen.items()]
        return {name: parameter for name, parameter in found if name not in known}

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint is to hold, for torch.distributed.checkpoint: see `fastpar.zero.state_dict`. Collective."""
        self._check_names()
        self._load()
        for reducer in self._reducers:
            reducer.hide()
        with self._holding_owners():
            found = state_dict.collect(self)
        for reducer in self._reducers:
            reducer.show()
        return found

    @checked(computed=False)
    def load_state_dict(self, loaded: dict[str, Any]) -> None:
        """Go on from a state that `state_dict` has given, and a checkpoint may have been loaded into. Collective.

        Raises ValueError on all ranks where parts of the checkpoint are of different saves, and for parameter groups
        whose parameters had different options.
        """
        self._check_names()
        self._load()
        with self._holding_owners():
            state_dict.restore(self, loaded)
            self._release()
            self._write_back([param.optim_param for param in self.params], False)
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
        """Remove all hooks; parameters, gradients and states stay as they are, and come out of files. A second call
        does nothing."""
        if not self._is_attached:
            return
        self._is_attached = False
        self._ddp_door.remove()
        for disk in self._disks.values():
            disk.load()
        self._hide()
        for storage in self.storages:
            storage.detach()
        for stepper in self.steppers:
            stepper.detach()
        for optimizer in self.optimizers:
            vars(optimizer).pop("finish_gradients", None)
        replaced: list[ZeroGrad | LoadStates] = [*self._zero_grads, *self._load_states]
        for each in replaced:
            each.remove()
        for handle in self._handles:
            handle.remove()
        for disk in self._disks.values():
            disk.close()

    close = detach

    def groups_of(self, param: ShardedParam) -> Groups:
        """The ranks that a parameter is averaged over: those of data parallelism, or of its experts."""
        return self.groups.of(param.parameter)

    def _check_names(self) -> None:
        """Raises ValueError where other ranks may have other parameters under the same numbers."""
        world = dist.get_world_size() if dist.is_initialized() else 1
        mesh = self.groups.mesh
        is_alone = world == self.groups.size if mesh is None else mesh.size("pp") == 1
        if not (self.are_named or is_alone):
            raise ValueError(
                "shard(...) was given parameters without names, and other ranks have others under the same numbers: "
                "pass what has names to shard, as the pipeline itself, or pipe.named_parameters()"
            )

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
        self._note_versions()

    def _note_versions(self) -> None:
        if self._has_targets:
            for param in self.params:
                if param.model_rows is not None:
                    param.note_version()

    def _phases(self, stepper: Stepper) -> None:
        """Reduce, check and clip (once for all optimizers), update, gather."""
        if stepper not in self._waiting:
            self._look_around()
            self._check_known()
            self.steps += 1
            with annotate("fastpar::zero::reduce and clip"):
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
            with annotate("fastpar::zero::update"):
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
            with annotate("fastpar::zero::publish"):  # stages 1 and 2 gather what was updated
                self._publish()

    def _stepped(self) -> None:
        """After an optimizer's step, which has taken its gradients."""
        if not self._waiting:
            self._hide()

    def _hide(self) -> None:
        for reducer in self._reducers:
            reducer.hide()

    def _look_around(self) -> None:
        """What may have happened to parameters since the last forward or step: see `Connection`. Collective where
        something has."""
        for storage in self.storages:
            storage.check()
        if self._has_targets:
            with torch.no_grad():
                overwritten = [
                    param for param in self.params if param.is_overwritten
                ]  # by the model's load_state_dict, say
                for param in overwritten:
                    param.take_values()
            self._forget_scales(overwritten)
        thawed = {name: x for storage in self.storages for name, x in storage.thawed().items()}
        if thawed:
            with self._holding_owners():
                self._adopt_thawed(thawed)

    def _forget_scales(self, params: Sequence[ShardedParam]) -> None:
        """Of gathers with delayed scales, for parameters with values that no step has led to."""
        if params:
            for storage in self.storages:
                storage.formats.forget({param.name for param in params})

    def _check_known(self) -> None:
        """Raises ValueError for parameters of an optimizer that `shard` has not seen."""
        known = self.optim_param_names()
        for stepper in self.steppers:
            for parameter in stepper.parameters():
                if id(parameter) not in known:
                    raise ValueError(
                        f"the optimizer has a parameter of shape {tuple(parameter.shape)} that was not there in "
                        "fastpar.zero.shard(...): call detach() and shard again with a new optimizer"
                    )

    def _adopt_thawed(self, thawed: Mapping[str, nn.Parameter]) -> None:
        """Train parameters that were frozen in `shard`, and are in an optimizer."""
        held = {id(parameter) for stepper in self.steppers for parameter in stepper.parameters()}
        for storage in self.storages:
            names = [name for name in storage.thawed() if id(thawed[name]) in held]
            if names:
                storage.adopt(names)
        self._take_params()
        self._note_versions()
        before = {id(stepper): {id(p) for p in stepper.parameters()} for stepper in self.steppers}
        self._adopt()
        for stepper in self.steppers:
            disk = self._disks.get(id(stepper))
            if disk is not None:
                disk.adopt([p for p in stepper.parameters() if id(p) not in before[id(stepper)]])

    @contextmanager
    def _writing(self, owners: Sequence[nn.Parameter]) -> Iterator[None]:
        """Memory in the block for the parameters that these owners are rounded to, where those are in a file."""
        params = [self._param_of[id(owner)] for owner in owners]
        with ExitStack() as stack:
            for storage in self.storages:
                if isinstance(storage, Stage3):
                    stack.enter_context(storage.writing(params))
            yield

    def _prepare(self, optimizer: Any) -> bool:
        """Reduce, and see by how much gradients are to be clipped; False where the step is to be skipped."""
        self.reduce_gradients()
        for param in self.params:
            grad = param.optim_param.grad
            if (
                grad is not None and grad.dtype != param.optim_param.dtype
            ):  # model.to(dtype) converts what `.grad` shows
                param.optim_param.grad = as_dtensor(local(grad).to(param.optim_param.dtype), param.spec)
        self._factor, self.report = None, ""
        if self.max_norm is None and not self._skip_nonfinite:
            return True
        unscale = _unscaling(optimizer)
        total = GradSum.of([param.optim_param for param in self.params], mesh=self.groups.mesh)
        self.norm = total.norm() * unscale
        if self._skip_nonfinite and total.nonfinite:
            self.skipped += 1
            self.report = name_nonfinite(self.params, self.groups)
            return False
        if self.max_norm is not None:
            self._factor = total.clip_factor(self.max_norm, scale=unscale) / unscale
        return True

    def _hand_over(self, optimizer: Any) -> bool:
        """Clip: in the update's own pass where the optimizer can do that. Whether it rounds to the parameters, too."""
        if not hasattr(optimizer, "grad_factor"):
            if self._factor is not None and self._factor < 1.0:
                held = {id(p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
                grads = [param.optim_param.grad for param in self.params if id(param.optim_param) in held]
                gradients = [local(grad) for grad in grads if grad is not None]
                torch._foreach_mul_(gradients, self._factor)
            return False
        if self._factor is not None:
            pending = 1.0 if optimizer.grad_factor is None else optimizer.grad_factor
            optimizer.grad_factor = self._factor * pending
        return True

    @contextmanager
    def _holding_owners(self) -> Iterator[None]:
        """All optimizers have what they update in the block: see optimizer_step.py."""
        with ExitStack() as stack:
            for stepper in self.steppers:
                stack.enter_context(stepper.holding_owners())
            yield

    def _write_back(self, owners: Sequence[nn.Parameter], is_rounded: bool) -> None:
        """Round updated master weights to the parameters."""
        if not self._has_targets:
            return
        for owner in owners:
            target = self._param_of[id(owner)].model_rows
            if target is None or self._param_of[id(owner)].is_in_place:
                continue
            if not (is_rounded and target.dtype != owner.dtype):
                target.copy_(local(owner), non_blocking=True)

    # ---- building

    def _synchronise(self, parts: Sequence[tuple[dict[str, nn.Parameter], Groups]], sync_weights: str) -> None:
        """The values of each group's rank 0 on all of its ranks, for buffers too."""
        tensors = [{name: local(parameter) for name, parameter in named.items()} for named, _ in parts]
        if self.model is not None:
            tensors[0] |= {name: local(x) for name, x in self.model.named_buffers() if x.numel() > 0}
        differing: list[str] = []
        for values, (_, groups) in zip(tensors, parts, strict=True):
            for comm in groups.everyone():
                for name, x in values.items():
                    found = comm.broadcast(x, 0)
                    if not _are_equal(found, x):
                        differing.append(name)
                    if sync_weights == "broadcast":
                        x.copy_(found)
        for comm in [comm for groups in self.groups.with_experts() for comm in groups.everyone()]:
            differing = union(differing, comm)
        if differing:
            shown = ", ".join(differing[:4]) + (", ..." if len(differing) > 4 else "")
            text = f"ranks that average gradients have different values of {shown}"
            if sync_weights == "check":
                raise ValueError(f"{text}: seed every rank alike before building the model, or load the same weights")
            warnings.warn(f"{text}: rank 0's are taken", stacklevel=4)

    def _cast_buffers(self) -> None:
        dtype = self.precision.buffers
        if self.model is None or dtype is None:
            return
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_floating_point():
                    module._buffers[name] = buffer.to(dtype)

    def _take_params(self) -> None:
        """Of all storages, in the order of the parameters."""
        params = [param for storage in self.storages for param in storage.params]
        self.params = sorted(params, key=lambda param: self._order[param.name])
        for param in self.params:
            param.is_traced = self._skip_nonfinite

    def _adopt(self) -> None:
        """Give the optimizers the params' owners in the place of the parameters, with their part of the states."""
        params = {id(x): param for param in self.params for x in (param.parameter, param.sharded)}
        frozen = self._frozen_at_rest()
        self._param_of = {id(param.optim_param): param for param in self.params}
        self._has_targets = any(param.model_rows is not None for param in self.params)
        for stepper in self.steppers:
            optimizer: Any = stepper.optimizer
            for group in optimizer.param_groups:
                for index, parameter in enumerate(group["params"]):
                    param = params.get(id(parameter))
                    if id(parameter) in frozen:  # whose memory comes and goes
                        group["params"][index] = frozen[id(parameter)]
                    if param is None:
                        continue
                    if param.model_param is not param.optim_param:
                        stepper.adopt(param.model_param, param.optim_param, is_copy=param.model_rows is not None)
                    if param.optim_param is parameter:
                        continue
                    group["params"][index] = param.optim_param
                    if parameter in optimizer.state:
                        optimizer.state[param.optim_param] = self._cut_state(optimizer.state.pop(parameter), param)
            if hasattr(optimizer, "outputs"):
                optimizer.outputs.update(
                    {
                        param.optim_param: param.model_rows
                        for param in self.params
                        if param.model_rows is not None and param.model_rows.dtype != param.optim_param.dtype
                    }
                )

    def _cut_state(self, states: dict[str, Any], param: ShardedParam) -> dict[str, Any]:
        """This rank's rows of states that have the parameter's shape."""
        groups = self.groups_of(param)
        rank, size = groups.shard.rank, groups.shard.size
        shape, mine = local(param.parameter).shape, local(param.optim_param)
        layout = FlatLayout([shape], size)
        cut: dict[str, Any] = {}
        for key, value in states.items():
            if isinstance(value, Tensor) and local(value).shape == shape and key not in state_dict.SCALARS:
                rows = local(value)
                if mine.numel() != rows.numel():  # persistent parameters are whole
                    rows = layout.rows_of(rows, 0, rank)
                cut[key] = as_dtensor(rows.to(mine.device).clone().view(mine.shape), param.spec)
            else:
                cut[key] = value
        return cut

    def _bring_states(self) -> None:
        """Before an optimizer shows its states: nothing of them is in a file, and masters are among them."""
        if self._disks:
            for disk in self._disks.values():
                disk.load()
            with self._holding_owners():
                pass

    def _load_optimizer(self, optimizer: Any, load: Callable[[Any], None], state_dict: dict[str, Any]) -> None:
        """`optimizer.load_state_dict`, for states of this layout or whole ones, as one process has them. Collective
        where master weights are among them."""
        stepper = next(stepper for stepper in self.steppers if stepper.optimizer is optimizer)
        self._look_around()  # the model may have loaded values
        for disk in self._disks.values():
            disk.load()
        with torch.no_grad(), self._holding_owners():
            ids = [number for group in state_dict["param_groups"] for number in group["params"]]
            owners = dict(zip(ids, stepper.parameters(), strict=False))
            states, masters = {}, {}
            for number, found in state_dict["state"].items():
                param = self._param_of.get(id(owners.get(number)))
                if param is not None:
                    found = part_of(found, param)
                    if MASTER in found:
                        masters[param.name] = param, found.pop(MASTER)
                states[number] = found
            load({**state_dict, "state": states})
            if masters:
                self._release()
                for param, value in masters.values():
                    local(param.optim_param).copy_(local(value))
                self._write_back([param.optim_param for param, _ in masters.values()], False)
                self._forget_scales([param for param, _ in masters.values()])
                self._publish()
            for disk in self._disks.values():
                disk.refresh()

    def _make_disks(self) -> dict[int, DiskStates]:
        if self.offload is None or self.offload.path is None:
            return {}
        return {
            id(stepper): DiskStates(self.offload, stepper.parameters(), stepper.optimizer) for stepper in self.steppers
        }

    def _hook(self) -> list[Any]:
        hooked: list[Any] = [*self.optimizers, *([] if self.model is None else [self.model])]
        self._zero_grads = [ZeroGrad(owner, self._forget_gradients) for owner in hooked]
        for owner, zero_grad in zip(hooked, self._zero_grads, strict=True):
            owner.zero_grad = zero_grad
        self._load_states = [LoadStates(optimizer, self._load_optimizer) for optimizer in self.optimizers]
        for optimizer in self.optimizers:
            vars(optimizer)["finish_gradients"] = self.reduce_gradients  # for LossScaler
        handles: list[Any] = [
            optimizer.register_state_dict_pre_hook(lambda _: self._bring_states()) for optimizer in self.optimizers
        ]
        if self.model is None:
            return handles
        handles += [self.model.register_forward_pre_hook(ForwardHook(self.model, self._before_forward), prepend=True)]
        if self.precision.param is not None:
            handles.append(self.model.register_forward_pre_hook(CastInputs(self.precision.param), with_kwargs=True))
        if self.precision.compute is not None:
            device = next((param.parameter.device.type for param in self.params), "cpu")
            autocast = Autocast(self.precision, device)
            handles.append(self.model.register_forward_pre_hook(autocast.enter))
            handles.append(self.model.register_forward_hook(autocast.leave, always_call=True))
        return handles

    def _before_forward(self, *_: Any) -> None:
        if in_backward():  # of a checkpoint
            return
        self._look_around()
        if torch.is_grad_enabled():
            self._waiting.clear()
            for reducer in self._reducers:
                reducer.begin_forward()

    def _forget_gradients(self) -> None:
        self._waiting.clear()
        for reducer in self._reducers:
            reducer.forget_sums()
            reducer.hide()
        for param in self.params:  # of a module these are not the parameters
            if param.optim_param.grad is not None:
                param.optim_param.grad = None


def _unscaling(optimizer: Any) -> float | Tensor:
    """What the optimizer will multiply gradients with: a scaler may leave unscaling to the update."""
    if getattr(optimizer, "grad_scale", None) is not None:
        scale: Tensor = optimizer.grad_scale
        return 1.0 / scale.float()
    factor = getattr(optimizer, "grad_factor", None)
    return 1.0 if factor is None else factor


def _parts(named: dict[str, nn.Parameter], groups: Groups) -> list[tuple[dict[str, nn.Parameter], Groups]]:
    """The parameters by the ranks that they are averaged over."""
    return [
        ({name: parameter for name, parameter in named.items() if groups.of(parameter) is each}, each)
        for each in groups.with_experts()
    ]


def _are_equal(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, whatever the dtype: NaN is like NaN."""
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))
