"""ZeRO stage 3: parameters are sharded, and gathered for the layers that run.

    stage3 = Stage3(model, groups, options)         # done by fastpar.zero.shard(stage=3)

| moment | what happens |
|---|---|
| before a unit's forward | gather it, unless that was begun earlier; begin the next one's |
| after it | free it (`reshard_after_forward`) |
| before its backward: the gradient of an output is there | gather it again; begin the one's before |
| after its backward: the gradient of its input is there | begin to reduce its gradients to rows, free it |
| at the end of backward | reduce what is left (units whose inputs need no gradient), and persistent parameters |

Words per rank and microbatch, of Psi parameters on N ranks: 3 Psi (N - 1) / N (gather twice, reduce-scatter), or 2 with
reshard_after_forward=False; persistent parameters 2 (all-reduce). Memory: rows of everything, and at most two units
whole: one that runs, and the next (`Stage3.budget`; units that run inside each other are whole together).

Note: order. Which unit comes next is known from the last forward pass (in the first: from the order of modules), and in
backward from the calls themselves, each of which knows the one before it. A guess that was wrong costs time: the unit
is freed when room is needed. Over shared memory a gather is a copy that waits for nobody, so there is nothing to begin
early, and nothing is. Shards in a file are read one unit ahead over any transport.

Note: equal on all ranks. Gathers and reductions are collectives, so all ranks must run the same units in the same
order. Within a unit they may differ: a parameter without a gradient on this rank counts as zero, and one that no rank
has used gets none. Therefore a unit is reduced when its last call of a pass has got the gradient of its inputs, not
when its gradients happen to be complete.

Note: experts. Those that the mesh's ep or etp splits are gathered and reduced over efsdp and dp_replicate, in the same
units, at the same moments. The exchange of tokens waits for other ranks in between. So collectives of both kinds of
groups are launched in one order on all ranks, that of the unit's parameters, and none of them needs a rank's computing
thread to go on (split phases would: see `Groups.mode`). Where every rank has experts of its own (efsdp of 1) nothing is
gathered: they stay whole, and without replicas nothing of them travels at all.

Note: gradients of gradients. The graph that a backward pass makes of itself (create_graph, as for gradient penalties)
has saved parameters, and nothing says when it reads them: units in it stay whole until the backward pass through it has
ended, or a step.

Note: values written by hand. Between steps users write to shards (an average swapped in, weights clipped, the climb of
SAM), which other ranks read where memory is shared. So a training forward waits there until all ranks have come to it,
however they wrote; one of an evaluation, of which ranks may run different numbers, does so if this rank's shards have
another version, as those of the others have then. What was gathered before a write and kept is gathered again, and a
backward pass that comes to values that were written after its forward raises, as torch does.

Note: failures. A forward or backward that raises leaves units whole; the next forward frees them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from fastpar.comm.callers import refuse_other_threads
from fastpar.ops._autograd import in_backward
from fastpar.optim._masters import version_of
from fastpar.tensor.dtensor_data import check_own_part
from fastpar.tensor.parameter import layout_of
from fastpar.zero.flat import MemoryPool
from fastpar.zero.group_reducer import GroupReducer
from fastpar.zero.groups import Groups, local
from fastpar.zero.hooks import (
    ByHand,
    ForwardCall,
    ForwardHook,
    Frame,
    UncompiledHook,
    UnitOrder,
    UnitState,
    UnshardedCapture,
    containers,
    refuse_to_pickle,
    results_in,
    uncompiled,
)
from fastpar.zero.offload.shard_store import ShardStore, use_files
from fastpar.zero.options import ShardOptions
from fastpar.zero.param_classes import guard_at_rest, release_at_rest
from fastpar.zero.param_group import ParamGroup
from fastpar.zero.quantized_gather import GatherFormats
from fastpar.zero.replica_writes import Replica, ReplicaWrites
from fastpar.zero.sharded_param import ShardedParam, places_of
from fastpar.zero.unit_plan import UnitPlan, plan_units, small_names


def _versions_at_rest(unit: ParamGroup) -> list[int]:
    return [version_of(x) for x in unit.sharded]


class Stage3:
    """A model whose parameters are sharded, in place. Collective.

    model                  its parameters are on their device, with the same values on all ranks
    groups                 sharded: the ranks among which rows are split, and replicas of those; `groups.experts` has
                           those of parameters that are split over the mesh's ep or etp
    options                of which `ShardOptions` says what they are; the smallest parameters (`persistent_share`) are
                           kept whole on every rank
    held_by                the number of the optimizer that has a parameter, by the parameter's id
    budget                 bytes that may be unsharded at a time when something is prefetched; by default those of the
                           two largest units. What runs is gathered in any case

    params  of the trainable parameters: what is reduced, and what the optimizer is to update
    units   in the order of the model's modules
    """

    coded_bytes = 0

    def __init__(
        self,
        model: nn.Module,
        groups: Groups,
        options: ShardOptions | None = None,
        *,
        held_by: Mapping[int, int] | None = None,
        budget: int | None = None,
    ) -> None:
        options = options or ShardOptions(stage=3)
        self._held_by = {} if held_by is None else held_by
        self.model, self.groups = model, groups
        self.reshard_after_forward = options.reshard_after_forward
        numels = {name: local(parameter).numel() for name, parameter in model.named_parameters()}
        self.persistent = frozenset(small_names(numels, options.persistent_share))
        plans = plan_units(model, options.units)
        owners = places_of(model, list(numels))
        in_file = options.offload is not None and options.offload.parameters and options.offload.path is not None
        self.store = use_files(partial(ShardStore.of, options.offload), groups.joined() if in_file else (), "open")
        self.formats = GatherFormats(options.param_wires)
        self.units = [
            ParamGroup(
                plan.name,
                {name: owners[name] for name in plan.names},
                groups,
                options.precision,
                self.persistent,
                self.store,
                self.formats,
            )
            for plan in plans
        ]
        self.store.open()
        sizes = sorted((unit.nbytes for unit in self.units), reverse=True)
        self.budget = sum(sizes[:2]) if budget is None else budget
        self.pool = MemoryPool(self.budget)
        self.reducer = GroupReducer(self.units, groups, options.wire)
        self.reducer.writes = ReplicaWrites(list(self._replicas()))
        whole = [pair for unit in self.units for pair in zip(unit.names, unit.unsharded, strict=True)]
        self.layouts: Mapping[str, Any] = {name: layout_of(parameter) for name, parameter in whole}
        by_name = {param.name: param for param in self.reducer.params}
        self.params: list[ShardedParam] = [by_name[name] for name in numels if name in by_name]
        self.whole_bytes = self.peak_bytes = 0
        self._epochs = dict.fromkeys(self.units, 0)  # counts updates of the shards
        self._versions: dict[ParamGroup, list[int]] = {}  # of the parameters at rest, when they were last looked at
        self._states = {unit: UnitState() for unit in self.units}
        self._spare: list[ParamGroup] = []  # gathered early, or kept for what may follow: the oldest first
        self._order = UnitOrder(self.units)
        self._passes = 0
        self._open: set[int] = set()  # backward passes that have begun and not ended, by torch's number
        self._handles: list[Any] = []
        self._is_guarding = False
        self.is_held = (
            False  # whole for a pipeline's run, whose backward passes put gradients into parameters as they are
        )
        self._modules_in: dict[nn.Module, list[nn.Module]] = {}
        self._last_call: ForwardCall | None = None
        self._install_hooks(plans)
        self.published()

    @property
    def frozen(self) -> dict[str, Tensor]:
        """Shards of the parameters that are not trained, by name."""
        return {name: x for unit in self.units for name, x in unit.frozen.items()}

    @property
    def frozen_at_rest(self) -> dict[int, nn.Parameter]:
        """The parameter at rest of each whole one that is not trained, by its id."""
        pairs = [(w, s) for unit in self.units for w, s in zip(unit.unsharded, unit.sharded, strict=True)]
        return {id(whole): sharded for whole, sharded in pairs if not whole.requires_grad}

    @property
    def buffers(self) -> list[Tensor]:
        """Memory that shards in a file are read into."""
        return self.store.buffers

    @property
    def can_prefetch(self) -> bool:
        """Whether a gather takes time that can be hidden: not where ranks copy out of each other's memory."""
        return not any(part.shards.is_shared for unit in self.units for part in unit.parts)

    # ---- what fastpar.zero.shard calls

    def released(self) -> None:
        """Before shards are written to: frees all units, and waits until no rank reads shards any more. Collective."""
        self.release()
        self.reshard()
        self.store.released()
        for groups in self.groups.with_experts():
            groups.shard.barrier()

    def published(self, owner: int | None = None) -> None:
        """After shards were written to: waits until all ranks have. Collective."""
        for unit in self.units:
            if owner is None or owner in self._owners_of(unit):  # what others wait with to go back through is as it was
                self._epochs[unit] += 1
        self.formats.roll()
        self.store.settle()
        for groups in self.groups.with_experts():
            groups.shard.barrier()
        if self.store.has_memory:
            self._versions = {unit: _versions_at_rest(unit) for unit in self.units}
        self.reducer.writes.note()

    def _owners_of(self, unit: ParamGroup) -> set[int | None]:
        """The numbers of the optimizers that update parameters of a unit."""
        return {self._held_by.get(id(x)) for x in (*unit.unsharded, *unit.sharded)}

    def _replicas(self) -> Iterator[Replica]:
        """What several ranks hold alike: persistent parameters, and rows over the replicas of shards."""
        for unit in self.units:
            for name, sharded in zip(unit.names, unit.sharded, strict=True):
                groups = self.groups.of(sharded)
                if name in self.persistent:
                    yield Replica(name, sharded, tuple(groups.everyone()))
                elif self.store.has_memory and groups.replicate.size > 1:
                    yield Replica(name, sharded, (groups.replicate,))

    def _follow_writes(self, *units: ParamGroup) -> bool:
        """Whether somebody has written to these units' shards (none given: to any) since the last look: see "values
        written by hand" above."""
        if not self.store.has_memory:
            return False
        written = [unit for unit in units or self.units if _versions_at_rest(unit) != self._versions[unit]]
        for unit in written:
            self._versions[unit] = _versions_at_rest(unit)
            unit.epoch = -1  # of no shards that are there
            if unit in self._spare:
                self._free(unit)
        return bool(written)

    def _wait_for_writes(self) -> None:
        """Before a forward: see "values written by hand" above."""
        is_written = self._follow_writes()
        if self.can_prefetch or not (is_written or torch.is_grad_enabled()):
            return
        for unit in list(self._spare):  # torch counts no writes by _foreach_* to DTensors, and none to .data
            self._free(unit)
        for groups in self.groups.with_experts():
            groups.shard.barrier()

    def _loaded(self) -> None:
        """After the model's load_state_dict."""
        self.formats.forget()
        self.published()

    def check(self) -> None:
        """See to it that what modules have at rest is what is gathered. Collective where it is not."""
        self.release()
        astray = [(unit, i) for unit in self.units for i in unit.astray()] if self.store.has_memory else []
        if astray:
            self.released()
            for unit, index in astray:
                unit.bring_back(index)
            self.published()

    def thawed(self) -> dict[str, nn.Parameter]:
        """Parameters that have been frozen and are not any more, by name."""
        return {unit.names[i]: unit.sharded[i] for unit in self.units for i in unit.thawed()}

    def adopt(self, names: Sequence[str]) -> list[ShardedParam]:
        """Train parameters that have been frozen: returns their params."""
        params = [
            unit.adopt(index) for unit in self.units for index, name in enumerate(unit.names) if name in set(names)
        ]
        self.reducer.refresh(self.units)
        for param in params:
            self.params.append(param)
            self._watch(len(self.params) - 1)
        return params

    def load(self) -> None:
        """Have shards that are in a file in memory, until something is gathered or `published` is called."""
        self.store.load()

    def writing(self, params: Sequence[ShardedParam]) -> AbstractContextManager[None]:
        """Shards in a file have memory in the block, which is to give these params' parameters new values."""
        return self.store.writing([param.model_rows for param in params if param.model_rows is not None])

    def begin_forward(self) -> None:
        """The model is about to run: forget what a pass that has failed left."""
        if in_backward():  # of a checkpoint
            return
        refuse_other_threads(self.model, self.groups.shard.group)
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) or torch._C._get_tracing_state():
            raise RuntimeError(
                "a traced graph (make_fx, torch.jit.trace) would hold parameters that stage 3 gathers for a forward "
                "and frees after it: trace the model before fastpar.zero.shard, or after zero.detach()"
            )
        self.reducer.hide()
        self.release()
        if self._open:
            self._open.clear()
            self.reducer.forget()
        for unit, state in self._states.items():
            if state.running or state.in_backward or state.is_wanted:
                state.is_wanted = False
                state.running.clear()
                state.in_backward.clear()
                self._free_if_unused(unit)
            if unit.written():
                self._free(unit)
        self._wait_for_writes()
        self._passes += 1
        self._last_call = None
        self._order.begin()
        self._guard()

    def release(self) -> None:
        """Parameters at rest may be computed with: see param_classes.py."""
        if self._is_guarding:
            self._is_guarding = False
            for param in self.params:
                if param.sharded is not None:
                    release_at_rest([param.sharded])

    def _end_forward(self) -> None:
        self._order.end()
        if not in_backward():
            self.release()
        if torch.is_grad_enabled() and not in_backward():
            self._guard()

    def _guard(self) -> None:
        self._is_guarding = True
        at_rest = {param.name: param.sharded for param in self.params if param.sharded is not None}
        guard_at_rest(at_rest, self.groups)

    def detach(self) -> None:
        """Give the model its whole parameters for good, and remove all hooks. Collective."""
        self.reshard()
        self.store.put_away()
        for handle in self._handles:
            handle.remove()
        for module in self.model.modules():
            for name in [n for n in vars(module) if n in ("unshard", "reshard") or n.startswith("_fastpar_unit_")]:
                del vars(module)[name]
        for unit in self.units:
            unit.restore(self.pool)
        self.store.close()

    # ---- by hand

    def unshard(self, module: nn.Module | None = None) -> None:
        """Gather the units of a module and of those in it (None: the model), until `reshard`. Collective."""
        for unit in self._units_in(module):
            self._need(unit)
            self._states[unit].is_pinned = True

    def reshard(self, module: nn.Module | None = None) -> None:
        """Free the units of a module and of those in it (None: the model), whatever has gathered them."""
        for unit in self._units_in(module):
            state = self._states[unit]
            state.is_pinned = state.is_wanted = state.is_in_graph = False
            state.in_backward.clear()
            self._free_if_unused(unit)

    def is_running(self, unit: ParamGroup) -> bool:
        """Whether a module of the unit is in its forward."""
        return bool(self._states[unit].running)

    def __reduce__(self) -> Any:
        refuse_to_pickle()

    @contextmanager
    def kept_unsharded(self, unit: ParamGroup) -> Iterator[None]:
        """A unit is whole in the block."""
        running = self._states[unit].running
        frame = Frame(None, None)
        running.append(frame)
        try:
            self._need(unit)
            yield
        finally:
            running.remove(frame)
            self._free_if_unused(unit, keep=in_backward())

    # ---- gathering and freeing

    def _need(self, unit: ParamGroup) -> None:
        """Make a unit whole."""
        if unit.is_unsharded and unit.epoch != self._epochs[unit] and not self._states[unit].is_used:
            self._free(unit)  # gathered before an update
        if unit in self._spare and not in_backward():
            self._follow_writes(unit)
        if unit in self._spare:
            self._spare.remove(unit)
        if not unit.is_launched:
            self._launch(unit)
        if not unit.is_unsharded:
            unit.install(self._epochs[unit])

    def _prefetch(self, unit: ParamGroup | None) -> None:
        """Begin to gather what probably comes next."""
        if unit is None or unit.is_launched or not self.can_prefetch:
            return
        if self.whole_bytes + unit.nbytes <= self.budget:
            self._launch(unit)
            self._spare.append(unit)

    def _launch(self, unit: ParamGroup) -> None:
        self.store.put_away()
        while self._spare and self.whole_bytes + unit.nbytes > self.budget:
            self._free(self._spare[0])
        if self.can_prefetch:  # ranks gather together
            self.reducer.note(unit)
        unit.launch(self.pool)
        self.whole_bytes += unit.nbytes
        self.peak_bytes = max(self.peak_bytes, self.whole_bytes)

    def _free_if_unused(self, unit: ParamGroup, *, keep: bool = False) -> None:
        """`keep`: until room is needed."""
        if not unit.is_launched or self._states[unit].is_used:
            return
        if keep:
            self._spare.append(unit)
        else:
            self._free(unit)

    def _free(self, unit: ParamGroup) -> None:
        if unit in self._spare:
            self._spare.remove(unit)
        written = unit.written()
        unit.free(self.pool)
        self.whole_bytes -= unit.nbytes
        if written:
            raise RuntimeError(
                f"{written[0]} was written to while stage 3 had it gathered (after unshard(), a failed forward, or "
                "with reshard_after_forward=False one that no backward pass followed), and the write is lost: call the "
                "model's reshard() before changing parameters"
            )

    # ---- forward

    def _before(self, unit: ParamGroup, is_part: bool, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Before a module of a unit runs; `is_part`: one within those, which may be called alone."""
        state = self._states[unit]
        if is_part and state.is_used and unit.is_unsharded:
            return None
        state.running.append(Frame(module, None))
        self._need(unit)
        if len(state.running) > 1:
            return None
        if not (is_part or in_backward()):
            self._prefetch(self._order.next_after(unit))
        if not torch.is_grad_enabled():
            return None
        if not (self._is_guarding or self.is_held or in_backward()):  # a module that is called by itself
            self._guard()
        previous = None if in_backward() else self._last_call
        call = ForwardCall(unit, self._passes, previous, self._begin_backward, self._end_backward)
        state.running[-1] = Frame(module, call)
        return call.watch_inputs(args, kwargs)

    def _after(self, unit: ParamGroup, is_part: bool, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """After it has run, or raised."""
        state = self._states[unit]
        if not state.running or state.running[-1].module is not module:
            return
        call = state.running.pop().call
        unit.check_in_place()
        if call is not None:
            state.open_calls.add(call)
            if not in_backward():
                self._last_call = call
            is_found = call.watch_outputs(output, results_in(self._within(module)), containers(args, kwargs))
            if not is_found and not in_backward() and (call.has_inputs or any(p.requires_grad for p in unit.unsharded)):
                state.is_wanted = True
                return
        if self.reshard_after_forward or call is None:
            self._free_if_unused(unit, keep=is_part or in_backward())

    # ---- backward

    def _begin_backward(self, call: ForwardCall) -> None:
        """The gradient of an output is there."""
        self._enter_backward()
        state = self._states[call.unit]
        if call in state.in_backward:
            return
        self._need(call.unit)
        state.in_backward.add(call)
        state.is_in_graph |= torch.is_grad_enabled()
        previous = call.previous
        self._prefetch(None if previous is None else previous.unit)

    def _end_backward(self, call: ForwardCall) -> None:
        """The gradients of all inputs are there."""
        state = self._states[call.unit]
        if call not in state.in_backward:
            return
        state.in_backward.remove(call)
        state.open_calls.discard(call)
        is_last = all(other.number != call.number for other in state.open_calls)
        if is_last and self.reducer.is_syncing:
            self.reducer.reduce(call.unit)
        self._free_if_unused(call.unit)

    def _enter_backward(self) -> None:
        number = torch._C._current_graph_task_id()
        if number not in self._open:
            self.release()
            if not self._open:
                self._follow_writes()
                self.reducer.hide()  # what a pass before this one, of the same forward, has left to be shown
            self._open.add(number)
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(partial(uncompiled, self._leave_backward, number, torch.is_grad_enabled()))

    def _leave_backward(self, number: int, makes_graph: bool) -> None:
        """A backward pass has ended; it may be one within another (reentrant checkpoints)."""
        self._open.discard(number)
        if self._open:
            return
        if self.is_held:
            return
        if self.reducer.is_syncing:
            self.reducer.reduce_rest()
        else:
            self.reducer.show()
        for unit, state in self._states.items():
            state.in_backward.clear()
            state.is_wanted = False
            state.is_in_graph &= makes_graph
            self._free_if_unused(unit)

    def _came(self, param: ShardedParam, _: Any) -> None:
        """The gradient of a parameter is there."""
        self._enter_backward()
        if not self.reducer.is_syncing or param.unreduced_sum is not None:
            param.keep_sum()

    # ---- hooks

    def _install_hooks(self, plans: Sequence[UnitPlan]) -> None:
        for number, (plan, unit) in enumerate(zip(plans, self.units, strict=True)):
            guard = UnshardedCapture(self, unit)
            for module in plan.modules:
                self._hook(module, unit, is_part=False)
                vars(module).update(unshard=ByHand(self.unshard, module), reshard=ByHand(self.reshard, module))
                vars(module)[f"_fastpar_unit_{number}"] = guard
            for module in unit.modules - set(plan.modules):
                self._hook(module, unit, is_part=True)
        vars(self.model).update(unshard=ByHand(self.unshard), reshard=ByHand(self.reshard))
        self._handles += [
            self.model.register_forward_pre_hook(UncompiledHook(lambda *_: self.begin_forward()), prepend=True),
            self.model.register_forward_hook(UncompiledHook(lambda *_: self._end_forward())),
            self.model.register_state_dict_pre_hook(ForwardHook(self.model, lambda *_: self._be_at_rest())),
            self.model.register_load_state_dict_pre_hook(ForwardHook(self.model, self._be_writable)),
            self.model.register_load_state_dict_post_hook(ForwardHook(self.model, lambda *_: self._loaded())),
        ]
        itself = weakref.ref(self)  # see `fastpar.zero.order_reducer.OrderReducer._hook`

        def came(index: int, gradient: Tensor) -> None:
            stage3 = itself()
            if stage3 is not None:
                uncompiled(stage3._came, stage3.params[index], gradient)

        self._came_hook = came
        for index in range(len(self.params)):
            self._watch(index)

    def _watch(self, index: int) -> None:
        parameter = self.params[index].parameter
        self._handles.append(parameter.register_post_accumulate_grad_hook(partial(self._came_hook, index)))

    def _hook(self, module: nn.Module, unit: ParamGroup, *, is_part: bool) -> None:
        before = UncompiledHook(partial(self._before, unit, is_part), unit.be_for_compiler)
        after = UncompiledHook(partial(self._after, unit, is_part))
        self._handles += [
            module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
            module.register_forward_hook(after, always_call=True, with_kwargs=True),
        ]

    def _be_at_rest(self) -> None:
        """The model is about to show its shards."""
        if torch.is_inference_mode_enabled():
            raise RuntimeError(
                "state_dict() of a model in stage 3 gives DTensors, which torch cannot make under "
                "torch.inference_mode(): call it under torch.no_grad()"
            )
        self.release()
        self.reshard()
        self.load()

    def _be_writable(self, _: nn.Module, loaded: dict[str, Any], prefix: str, metadata: Any, *__: Any) -> None:
        for name, value in loaded.items():
            check_own_part(name, value)
        self.release()
        self.released()
        self.load()
        if metadata.get("assign_to_params_buffers", False):
            return
        for name, parameter in self.model.named_parameters(prefix.removesuffix("."), remove_duplicate=False):
            value = loaded.get(name)
            if not isinstance(parameter, DTensor) or not isinstance(value, Tensor) or isinstance(value, DTensor):
                continue
            if value.shape == parameter.shape:  # a whole tensor, which every rank has
                mesh, placements = parameter.device_mesh, parameter.placements
                loaded[name] = distribute_tensor(value.detach(), mesh, placements, src_data_rank=None)

    def _within(self, module: nn.Module) -> list[nn.Module]:
        """The module and those within, which may put results into attributes."""
        found = self._modules_in.get(module)
        if found is None:
            found = self._modules_in[module] = list(module.modules())
        return found

    def _units_in(self, module: nn.Module | None) -> list[ParamGroup]:
        inside = set((module or self.model).modules())
        return [unit for unit in self.units if unit.modules & inside]
