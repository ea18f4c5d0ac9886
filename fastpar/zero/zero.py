"""`Zero`: what `fastpar.zero.shard` made of a model and its optimizers, and the phases of their step.

| phase | where |
|---|---|
| look around: values replaced or overwritten, parameters thawed | `Zero._look_around` |
| reduce what is left, decide whether to skip, take the norm | `Zero._prepare`, `GradClipping` |
| wait until nobody reads rows; update them, round masters | `Zero._phases`, `Stepper.update` |
| gather what was updated (stages 1 and 2), wait for all (3) | `ModelParams.published` |
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fastpar.arguments import checked
from fastpar.clip import GradSum
from fastpar.comm.ranges import annotate
from fastpar.ddp import OVER_ZERO, ClosedToDDP
from fastpar.ops._autograd import in_backward
from fastpar.pipeline import Pipeline
from fastpar.pretrained.generation import GenerateDoor
from fastpar.pretrained.saving import SaveDoor
from fastpar.tensor.dtensor_data import keep_memory
from fastpar.tensor.held import HeldTensor, Index, index_of
from fastpar.tensor.optimizer_rows import is_asked_by_name
from fastpar.tensor.parameter import ROWS_OF, layout_of
from fastpar.tensor.row_order import as_stored
from fastpar.tensor.split_views import watch_views
from fastpar.zero import memory, state_dict
from fastpar.zero.grad_clipping import GradClipping
from fastpar.zero.groups import Groups, as_dtensor, held_index, local
from fastpar.zero.hooks import ForwardHook, LoadStates, ZeroGrad, hook_casts
from fastpar.zero.masters import Masters
from fastpar.zero.newcomers import Newcomers
from fastpar.zero.offload.shard_store import DiskStates, use_files
from fastpar.zero.optimizer_step import SCALER_SCALARS, KeptCounts, Stepper
from fastpar.zero.options import NamedParameters, ShardOptions
from fastpar.zero.reducer import forget_gradients
from fastpar.zero.replicas import ModelParams, Replicas, cast_buffers, synchronise_values
from fastpar.zero.sharded_param import ShardedParam
from fastpar.zero.stage3 import Stage3
from fastpar.zero.state_dict import check_names, new_run, parts_of

MODES = ("train", "eval")  # methods of optimizers that average weights
T = TypeVar("T")


class Zero:
    """A model and optimizers that `fastpar.zero.shard` has made data-parallel."""

    def __init__(
        self,
        model: nn.Module | None,
        found: NamedParameters,
        optimizers: Sequence[torch.optim.Optimizer],
        groups: Groups,
        options: ShardOptions,
        *,
        pipe: Pipeline | None = None,
    ) -> None:
        named = found.parameters
        self._pipe = None if pipe is None else weakref.ref(pipe)
        self.model, self.optimizers, self.groups, self.options = model, list(optimizers), groups, options
        self.stage, self.precision, self.offload = options.stage, options.precision, options.offload
        self.steps = 0
        self.clipping = GradClipping(options.max_norm, skip_nonfinite=options.skip_nonfinite)
        self.are_named = found.are_named
        self.run = new_run(groups)  # see state_dict.py
        self._names = {id(parameter): name for name, parameter in named.items()}
        firsts = {name: getattr(parameter, "pipeline_copy_of", None) for name, parameter in named.items()}
        # Of a pipeline's copies on this rank beyond the first: the first one's name.
        self.copies = {name: self._names[id(first)] for name, first in firsts.items() if id(first) in self._names}
        self._order = {name: number for number, name in enumerate(named)}
        self._frozen_at_first = {name: parameter for name, parameter in named.items() if not parameter.requires_grad}
        parts = [
            ({name: parameter for name, parameter in named.items() if groups.of(parameter) is each}, each)
            for each in groups.with_experts()
        ]
        self._held_by = {  # the number of the optimizer that has a parameter, by id
            id(p): i for i, each in enumerate(self.optimizers) for group in each.param_groups for p in group["params"]
        }
        synchronise_values(model, parts, options.sync_weights)
        cast_buffers(model, options.precision.buffers)
        self._waiting: list[Stepper] = []  # that have not taken the step whose gradients have been prepared
        self._is_going = True  # and whether it is not skipped
        self._masters = Masters(in_files=options.offload is not None and options.offload.path is not None)
        self._has_run = False  # with gradients, since the last step
        self.storages: list[ModelParams]
        if model is not None and options.stage == 3:
            self.storages = [Stage3(model, groups, options, held_by=self._held_by)]
        else:
            self.storages = [
                Replicas(*part, options, self._held_by, began=self._waiting.clear, model=model) for part in parts
            ]
        self._reducers = [storage.reducer for storage in self.storages]
        self._reducers[0].writes.optimizers = self.optimizers
        self.params: list[ShardedParam] = []
        self._take_params()
        for reducer in self._reducers:
            reducer.is_syncing, reducer.is_deferred = options.overlap, not options.overlap
        self.steppers = [Stepper(optimizer, self._phases, self._stepped) for optimizer in self.optimizers]
        self._is_attached = True
        self._ddp_door = ClosedToDDP(model, OVER_ZERO)
        gathering = model if options.stage == 3 else None
        self._doors = SaveDoor(gathering), GenerateDoor(gathering)
        with self._holding_optim_params():
            self._adopt()
            self._disks: dict[int, DiskStates] = {}
            if options.offload is not None and options.offload.path is not None:
                self._disks = self._use_files(self._make_disks, "write")
        self._masters.note_versions()
        self._newcomers = None if model is None or not groups.joined() else Newcomers(model)
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
                reducer.withhold_unread()

    def reduce_gradients(self) -> None:
        """Reduce what has not been reduced yet, as `optimizer.step()` does. Collective."""
        self._reduce()
        pipe = None if self._pipe is None else self._pipe()
        if pipe is not None:
            pipe.note_gradients()

    def _reduce(self) -> None:
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
        return frozenset().union(*(storage.persistent for storage in self.storages))

    @property
    def norm(self) -> Tensor | None:
        """The exact norm of the last step's gradients; None where nobody has asked for it."""
        return self.clipping.norm

    @property
    def skipped(self) -> int:
        """Steps that were skipped, as a gradient was not finite."""
        return self.clipping.skipped

    @property
    def report(self) -> str:
        """Names of gradients that were not finite, and ranks, where the last step was skipped."""
        return self.clipping.report

    @property
    def max_norm(self) -> float | None:
        """The norm that gradients are clipped to; it may be changed."""
        return self.clipping.max_norm

    @max_norm.setter
    def max_norm(self, value: float | None) -> None:
        self.clipping.max_norm = value

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
        """The state for a checkpoint, for torch.distributed.checkpoint: see `fastpar.zero.state_dict`. Collective."""
        check_names(self.groups, are_named=self.are_named)
        self._load()
        for reducer in self._reducers:
            reducer.hide()
        self._masters.follow()
        with self._holding_optim_params():
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
        check_names(self.groups, are_named=self.are_named)
        self._load()
        with self._holding_optim_params():
            state_dict.restore(self, loaded)
            self._release()
            self._masters.write_back([param.optim_param for param in self.params])
            self._publish()
            self._on_disks(DiskStates.put_away, "write")

    @contextmanager
    def overwriting(self) -> Iterator[list[HeldTensor]]:
        """What this rank holds of each parameter, in the optimizer's dtype, and of each buffer that a checkpoint has:
        the block gives them values, which all ranks have when it ends. Collective. Nothing is sent where it raises."""
        self._look_around()
        self._load()
        with torch.no_grad(), self._holding_optim_params():
            self._masters.follow()
            self._release()
            trained = [
                HeldTensor(p.name, held_index(p.parameter, p.optim_param, self.groups_of(p)), local(p.optim_param))
                for p in self.params
            ]
            others = [HeldTensor(name, self._index_of_other(name, x), local(x)) for name, x in self.others()]
            yield trained + others
            self._masters.write_back([param.optim_param for param in self.params])
            self._forget_scales(self.params)
            self._publish()
            self._on_disks(DiskStates.put_away, "write")

    def _index_of_other(self, name: str, held: Tensor) -> Index:
        whole = self._frozen_at_first.get(name)
        return index_of(held) if whole is None else held_index(whole, held, self.groups.of(whole))

    def others(self) -> Iterator[tuple[str, Tensor]]:
        """Frozen parameters and buffers that a checkpoint holds, by name."""
        yield from self.frozen().items()
        pipe = None if self._pipe is None else self._pipe()
        if pipe is not None:
            persistent, buffers = pipe.state_dict(), pipe.named_buffers()
        elif self.model is not None:
            persistent, buffers = self.model.state_dict(keep_vars=True), self.model.named_buffers()
        else:
            return
        for name, buffer in buffers:
            if name in persistent:
                yield name, buffer

    def detach(self) -> None:
        """Remove all hooks; parameters, gradients and states stay as they are, and come out of files. The optimizers
        keep this rank's rows, and master weights: to train on takes new ones. A second call does nothing."""
        if not self._is_attached:
            return
        self._is_attached = False
        self._ddp_door.remove()
        for door in self._doors:
            door.remove()
        for disk in self._disks.values():
            disk.load()
        for reducer in self._reducers:
            reducer.hide()
        for param in self.params:
            if param.optim_param is not param.parameter:
                vars(param.optim_param)["fastpar_is_detached"] = True  # see `options.check_optimizers`
        for storage in self.storages:
            storage.detach()
        for stepper in self.steppers:
            stepper.detach()
        for optimizer in self.optimizers:
            for name in ("finish_gradients", "companions", *MODES):
                vars(optimizer).pop(name, None)
        replaced: list[ZeroGrad | LoadStates] = [*self._zero_grads, *self._load_states]
        for each in replaced:
            each.remove()
        for handle in self._handles:
            handle.remove()
        if self._newcomers is not None:
            self._newcomers.remove()
        for disk in self._disks.values():
            disk.close()

    close = detach

    def groups_of(self, param: ShardedParam) -> Groups:
        """The ranks that a parameter is averaged over: those of data parallelism, or of its experts."""
        return self.groups.of(param.parameter)

    def _load(self) -> None:
        """Bring what is in files into memory, until the next step or forward. Collective."""
        self._on_disks(DiskStates.load, "read")
        for storage in self.storages:
            storage.load()

    def _on_disks(self, work: Callable[[DiskStates], object], operation: str) -> None:
        if self._disks:
            self._use_files(lambda: [work(disk) for disk in self._disks.values()], operation)

    def _use_files(self, work: Callable[[], T], operation: str) -> T:
        """`work` on the files of states, which fails on all ranks where it does on one. Collective."""
        return use_files(work, self.groups.joined(), operation)

    def _frozen_at_rest(self) -> dict[int, nn.Parameter]:
        """Parameters that modules have at rest in the place of those that are not trained, by the id of these."""
        return {number: x for storage in self.storages for number, x in storage.frozen_at_rest.items()}

    # ---- the step

    def _release(self) -> None:
        for storage in self.storages:
            storage.released()

    def _publish(self, owner: int | None = None) -> None:
        for storage in self.storages:
            storage.published(owner)
        self._masters.note_versions()

    def _phases(self, stepper: Stepper) -> None:
        """Reduce, check and clip (once for all optimizers), update, gather."""
        if stepper not in self._waiting:
            self._look_around()
            self._check_known()
            self.steps += 1
            with annotate("fastpar::zero::reduce and clip"):
                self._is_going = self._prepare(stepper.optimizer)
            self._warn_of_nothing()
            self._waiting = list(self.steppers)
        self._waiting.remove(stepper)
        optim_params = stepper.with_gradient()
        if not self._is_going:
            return
        if len(self.steppers) > 1:  # between whose steps somebody may have written
            for reducer in self._reducers:
                reducer.writes.hold()
        self._release()
        self.clipping.hand_over(stepper.optimizer, optim_params)
        disk = self._disks.get(id(stepper))
        if disk is None:
            with annotate("fastpar::zero::update"):
                self._masters.follow_before(optim_params, self.steps)
                stepper.update()
                self._masters.write_back(optim_params, stepper.outputs)
        else:
            optimizer: Any = stepper.optimizer
            scalars = {name: getattr(optimizer, name) for name in SCALER_SCALARS if hasattr(optimizer, name)}
            may_skip = scalars.get("found_inf") is not None
            counts = KeptCounts(optimizer)

            def update(some: Sequence[nn.Parameter]) -> None:
                counts.put_back()
                for name, value in scalars.items():  # which an update resets
                    setattr(optimizer, name, value)
                self._masters.follow_before(some, self.steps)
                with self._writing(some):
                    stepper.update(some)
                    # A skipped update has rounded nothing, and what lies in a file has new memory here
                    self._masters.write_back(some, () if may_skip else stepper.outputs)

            self._use_files(partial(disk.update, update), "write")
        with annotate("fastpar::zero::publish"):  # stages 1 and 2 gather what was updated: the others may never step
            self._publish(self.optimizers.index(stepper.optimizer))
            if not self._waiting:
                for reducer in self._reducers:
                    reducer.follow_order()

    def _warn_of_nothing(self) -> None:
        """Where stage 3 has no gradient at all after a forward: `inputs=` is the way to lose them that nothing sees."""
        has_run, self._has_run = self._has_run, False
        if has_run and self.stage == 3 and all(param.optim_param.grad is None for param in self.params):
            warnings.warn(
                "this step updates nothing: the model has run, and none of its parameters has a gradient. In stage 3 "
                "loss.backward(inputs=...) reaches no parameters, as they are shards: call loss.backward(), freeze "
                "what is not to be trained with requires_grad_(False), or take stage=2",
                stacklevel=2,
            )

    def _stepped(self) -> None:
        """After an optimizer's step: gradients stay until `zero_grad`, as without data parallelism."""
        if not self._waiting:
            for reducer in self._reducers:
                reducer.show()

    def _look_around(self) -> None:
        """What may have happened to parameters since the last forward or step: see `Connection`. Collective where
        something has."""
        for storage in self.storages:
            storage.check()
        self._forget_scales(self._masters.follow_overwritten())
        thawed = {name: x for storage in self.storages for name, x in storage.thawed().items()}
        if thawed:
            with self._holding_optim_params():
                self._adopt_thawed(thawed)

    def _forget_scales(self, params: Sequence[ShardedParam]) -> None:
        """Forget the scales of gathers with delayed ones, for parameters with values that no step has led to."""
        if params:
            for storage in self.storages:
                storage.formats.forget({param.name for param in params})

    def _check_known(self) -> None:
        """Raises ValueError for parameters of an optimizer that `shard` has not seen."""
        for stepper in self.steppers:
            for parameter in stepper.parameters():
                if id(parameter) not in self._param_of and id(parameter) not in self.optim_param_names():
                    raise ValueError(
                        f"the optimizer has a parameter of shape {tuple(parameter.shape)} that was not there in "
                        "fastpar.zero.shard(...): call detach() and shard again with a new optimizer"
                    )

    def _adopt_thawed(self, thawed: Mapping[str, nn.Parameter]) -> None:
        """Train parameters that were frozen in `shard`, and are in an optimizer."""
        held = {id(parameter): i for i, stepper in enumerate(self.steppers) for parameter in stepper.parameters()}
        self._held_by.update(held)
        for storage in self.storages:
            names = [name for name in storage.thawed() if id(thawed[name]) in held]
            if names:
                storage.adopt(names)
        self._take_params()
        self._masters.note_versions()
        before = {id(stepper): {id(p) for p in stepper.parameters()} for stepper in self.steppers}
        self._adopt()
        for stepper in self.steppers:
            disk = self._disks.get(id(stepper))
            if disk is not None:
                disk.adopt([p for p in stepper.parameters() if id(p) not in before[id(stepper)]])

    @contextmanager
    def _writing(self, optim_params: Sequence[nn.Parameter]) -> Iterator[None]:
        """Memory in the block for the parameters that these optim_params are rounded to, where those are in a file."""
        params = [self._param_of[id(optim_param)] for optim_param in optim_params]
        with ExitStack() as stack:
            for storage in self.storages:
                stack.enter_context(storage.writing(params))
            yield

    def _prepare(self, optimizer: Any) -> bool:
        """Reduce, and see by how much gradients are to be clipped; False where the step is to be skipped."""
        total = self._sum_if_final() if len(self._reducers) == 1 and self.clipping.needs_sum else None
        if total is None:
            self._reduce()
            self._cast_gradients()
            total = self.clipping.sum(self.params, self.groups) if self.clipping.needs_sum else None
        return self.clipping.prepare(total, self.params, self.groups, optimizer)

    def _sum_if_final(self) -> GradSum | None:
        """The sum of squares, as most steps find all gradients reduced and nothing written to by hand; None on all
        ranks where one has some that are not, or has written, or where they could not learn of it with the sum. Saves
        an exchange."""
        (reducer,) = self._reducers
        is_final = not reducer.end_passes() and not reducer.writes.is_any
        if is_final:
            self._cast_gradients()
        total = self.clipping.sum(self.params, self.groups, is_final=is_final, comms=reducer.comms())
        if total is None or not total.is_final:
            return None
        if len(self.steppers) > 1:  # between their steps
            reducer.show()
        return total

    def _cast_gradients(self) -> None:
        for param in self.params:
            grad, dtype = param.optim_param.grad, param.optim_param.dtype
            if grad is not None and grad.dtype != dtype:  # model.to(dtype) converts what `.grad` shows
                param.optim_param.grad = as_dtensor(local(grad).to(dtype), param.spec)

    @contextmanager
    def _holding_optim_params(self) -> Iterator[None]:
        """All optimizers have what they update in the block: see optimizer_step.py."""
        with ExitStack() as stack:
            for stepper in self.steppers:
                stack.enter_context(stepper.holding_optim_params())
            yield

    # ---- building

    def _take_params(self) -> None:
        """Take the parameters of all storages, in the model's order."""
        params = [param for storage in self.storages for param in storage.params]
        self.params = sorted(params, key=lambda param: self._order[param.name])
        for param in self.params:
            param.is_traced = self.options.skip_nonfinite
            watch_views(param.parameter)
            watch_views(param.optim_param)
            if isinstance(param.optim_param, DTensor):
                keep_memory(param.optim_param)
        self._masters.hold(self.params)

    def _adopt(self) -> None:
        """Give the optimizers what they are to update in the place of the parameters."""
        frozen = self._frozen_at_rest()
        self._param_of = {id(param.optim_param): param for param in self.params}
        for stepper in self.steppers:
            stepper.adopt(self.params, self.groups, frozen)

    def _bring_states(self) -> None:
        """Before an optimizer shows its states: nothing of them is in a file, and masters are among them."""
        if self._disks:
            for disk in self._disks.values():
                disk.load()
            with self._holding_optim_params():
                pass
        self._masters.follow()

    def _load_optimizer(self, optimizer: Any, load: Callable[[Any], None], given: dict[str, Any]) -> None:
        """`optimizer.load_state_dict`, for states of this layout or whole ones, as one process has them. Collective
        where master weights are among them."""
        stepper = next(stepper for stepper in self.steppers if stepper.optimizer is optimizer)
        self._look_around()  # the model may have loaded values
        for disk in self._disks.values():
            disk.load()
        with torch.no_grad(), self._holding_optim_params():
            states, masters = parts_of(
                given, [self._param_of.get(id(optim_param)) for optim_param in stepper.parameters()]
            )
            load({**given, "state": states})
            if masters:
                self._release()
                for param, value in masters.values():
                    if is_asked_by_name():  # as the other states, which the optimizer's own hook puts back
                        value = as_stored(value, layout_of(param.parameter) or getattr(param.parameter, ROWS_OF, None))
                    local(param.optim_param).copy_(local(value))
                self._masters.write_back([param.optim_param for param, _ in masters.values()])
                self._forget_scales([param for param, _ in masters.values()])
                self._publish()
            for disk in self._disks.values():
                disk.refresh()

    def _switch(self, stepper: Stepper, mode: str, *args: Any, **kwargs: Any) -> Any:
        """`optimizer.train()` and `.eval()` of an optimizer that has other weights for either, as schedule-free ones
        have: on what it updates. Collective."""
        self._look_around()
        self._on_disks(DiskStates.load, "read")
        with torch.no_grad(), self._holding_optim_params():
            self._masters.follow()
            self._release()
            found = getattr(type(stepper.optimizer), mode)(stepper.optimizer, *args, **kwargs)
            self._masters.write_back([p for p in stepper.parameters() if id(p) in self._param_of])
            self._publish(self.optimizers.index(stepper.optimizer))
            self._on_disks(DiskStates.put_away, "write")
        return found

    def _make_disks(self) -> dict[int, DiskStates]:
        assert self.offload is not None
        return {
            id(stepper): DiskStates(self.offload, stepper.parameters(), stepper.optimizer) for stepper in self.steppers
        }

    def _hook(self) -> list[Any]:
        hooked: list[Any] = [self.model] if self.model is not None else []
        self._zero_grads = [ZeroGrad(owner, self._forget_gradients) for owner in hooked]
        self._zero_grads += [ZeroGrad(x.optimizer, partial(self._forget_gradients, stepper=x)) for x in self.steppers]
        for owner, zero_grad in zip([*hooked, *self.optimizers], self._zero_grads, strict=True):
            owner.zero_grad = zero_grad
        self._load_states = [LoadStates(optimizer, self._load_optimizer) for optimizer in self.optimizers]
        for stepper in self.steppers:
            for mode in MODES:
                if callable(getattr(type(stepper.optimizer), mode, None)):
                    vars(stepper.optimizer)[mode] = partial(self._switch, stepper, mode)
        for optimizer in self.optimizers:
            vars(optimizer)["finish_gradients"] = self.reduce_gradients  # for LossScaler
            vars(optimizer)["companions"] = tuple(self.optimizers)  # of whom there is one norm
        handles: list[Any] = [
            optimizer.register_state_dict_pre_hook(lambda _: self._bring_states()) for optimizer in self.optimizers
        ]
        if self.model is None:
            return handles
        handles += [
            self.model.register_forward_pre_hook(ForwardHook(self.model, self._before_forward), prepend=True),
            self.model.register_forward_hook(ForwardHook(self.model, self._after_forward), always_call=True),
        ]
        device = next((param.parameter.device.type for param in self.params), "cpu")
        return [*handles, *hook_casts(self.model, self.precision, device)]

    @property
    def is_attached(self) -> bool:
        """Whether `detach` has not been called."""
        return self._is_attached

    def begin_forward(self) -> None:
        """A forward pass is about to begin: what the model's own forward calls."""
        self._before_forward()

    def _before_forward(self, *_: Any) -> None:
        if in_backward():  # of a checkpoint
            return
        if torch.is_grad_enabled() or self.stage == 3:
            self._look_around()  # not for an evaluation of whole parameters with others' memory, which may go again
        if torch.is_grad_enabled():
            self._has_run = True
            self._waiting.clear()
            if self._newcomers is not None and self.model is not None:
                self._newcomers.check(self.model)
            for reducer in self._reducers:
                reducer.begin_forward()

    def _after_forward(self, _: Any, __: Any, output: Any) -> None:
        if torch.is_grad_enabled() and not in_backward():
            for reducer in self._reducers:
                reducer.end_forward(output)

    def _forget_gradients(self, set_to_none: bool = True, *, stepper: Stepper | None = None) -> None:
        """Forget gradients of an optimizer's parameters; None: of all."""
        self._waiting.clear()
        params = self.params
        if stepper is not None and len(self.steppers) > 1:
            its = {id(parameter) for parameter in stepper.parameters()}
            params = [param for param in params if id(param.optim_param) in its]
        forget_gradients(self._reducers, params, set_to_none=set_to_none)
