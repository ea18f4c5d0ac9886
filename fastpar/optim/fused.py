"""What the fused optimizers have in common: unwrapping, states, skipping, counting, checkpoints.

A step is three phases. *Collect*: parameters with a gradient are unwrapped to local tensors, their states are made when
they are first needed, and they are sorted into batches that one call of an op can take (one device, one step number).
*Update*: one call per batch. *Count*: the steps of what was updated.

Note: the scalars of a step. `grad_factor` (unscaling, clipping) and `found_inf` are attributes that whoever drives the
optimizer sets before step(), as torch.amp.GradScaler does with `grad_scale` and `found_inf`; step() reads them and sets
the two back to None. With found_inf on CPU a skipped step returns at once. On CUDA the host does not wait: the kernels
skip by themselves, the steps are counted, and the next step() or state_dict() takes back a count that was wrong (the
copy of found_inf has arrived by then, without draining the queue of kernels).

Note: states and checkpoints. A state of a parameter's shape is a DTensor with the placements of its parameter, so
torch.distributed.checkpoint reshards it; 8-bit states, whose blocks are cut per shard, are float32 values there (see
`fastpar.optim._state_formats`). torch casts what it loads to the parameter's dtype, which would ruin float32 states of
bfloat16 parameters; here they come back in the dtype in which this optimizer keeps them, whatever the checkpoint had.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim.optimizer import Optimizer, ParamsT

from fastpar.contracts import optimizer_formats as formats
from fastpar.contracts import refuse_capture
from fastpar.contracts.optimizer import check_group, checked_params
from fastpar.ops.optimizer import Step, StochasticRounding
from fastpar.optim._batches import Batch, States, StepCounts, local, local_gradients, locals_of
from fastpar.optim._masters import Looks, drop_remainders_of_zeros, follow_all, version_of
from fastpar.optim._state_formats import blocks_of, like, values_of

PARAM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MASTERS = (None, "float32", "split")
STATE_DTYPES = (torch.float32, torch.bfloat16, "8bit")


@dataclass(frozen=True)
class _Deferred:
    """Steps that were counted before the host knew whether they would be skipped."""

    found_inf: Tensor  # in pinned memory
    arrived: torch.cuda.Event
    counts: Tensor


class FusedOptimizer(Optimizer):
    """Base of AdamW, SGD and Lion; see there. Subclasses name their states and call their op."""

    takes_dtensors = True  # what fastpar.zero asks: rows are updated as a part of the whole
    _step_supports_amp_scaling = True  # torch.amp.GradScaler then sets grad_scale and found_inf instead of unscaling
    _states: tuple[str, ...]
    _signed: tuple[bool, ...]

    grad_factor: Tensor | float | None = None
    found_inf: Tensor | None = None

    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        *,
        master: str | None,
        state_dtype: torch.dtype | str,
        stochastic_rounding: bool,
        seed: int,
    ) -> None:
        if master not in MASTERS:
            raise ValueError(f"master must be one of {MASTERS}, got {master!r}")
        if state_dtype not in STATE_DTYPES:
            raise ValueError(f"state_dtype must be one of {STATE_DTYPES}, got {state_dtype!r}")
        if not 0 <= seed < 1 << 31:
            raise ValueError(f"seed must be in [0, 2^31), got {seed}")
        self.master, self.state_dtype = master, state_dtype
        self.stochastic_rounding, self.seed = stochastic_rounding, seed
        self.outputs: dict[Tensor, Tensor] = {}
        self._origins: dict[int, tuple[Tensor, int, int]] = {}  # by id: to hash a tensor takes a microsecond
        self._counts = StepCounts()
        self._deferred: list[_Deferred] = []
        self._steps, self._looks = 0, Looks()
        self._versions: dict[int, int] = {}  # of parameters that have masters, by id, after the last step
        super().__init__(checked_params(params), defaults)

    def __getstate__(self) -> dict[str, Any]:
        self._settle()
        names = ("master", "state_dtype", "stochastic_rounding", "seed", "outputs", "_deferred")
        kept = {name: self.__dict__[name] for name in names}
        fresh = {"_origins": {}, "_counts": StepCounts(), "_steps": 0, "_looks": Looks(), "_versions": {}}
        return {**super().__getstate__(), **kept, **fresh}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch.optim.Optimizer does; checks the dtypes."""
        check_group(param_group, "param_group")
        super().add_param_group(param_group)
        for param in self.param_groups[-1]["params"]:
            if param.dtype not in PARAM_DTYPES:
                names = ", ".join(map(str, PARAM_DTYPES))
                raise TypeError(f"parameters must be one of {names}, got {param.dtype} {tuple(param.shape)}")
            if self.master == "split" and param.dtype == torch.float16:
                raise TypeError("master='split' keeps what bfloat16 cuts off; use master='float32' for float16")

    # ---- the step ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step. `closure`, if given, computes the loss again and returns it."""
        loss = None
        if not (closure is None or callable(closure)):
            raise TypeError(f"closure must be a function or None, got {type(closure).__name__}")
        refuse_capture(
            f"{type(self).__name__}.step() counts steps on the host, which cannot be",
            "Step after the replay, or capture the op of fastpar.ops (adamw_step with step= a tensor on the device)",
        )
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._settle()
        self._steps += 1
        factor, found_inf = self._take_scalars()
        if found_inf is not None and found_inf.device.type == "cpu" and bool(found_inf):
            return loss
        for group in self.param_groups:
            batches, counts = self._collect(group)
            scale = -factor if group.get("maximize", False) else factor
            for batch in batches:
                device = batch.params[0].device
                arguments = Step(
                    batch.params,
                    batch.grads,
                    batch.states,
                    batch.scales,
                    _sent(scale, device) if isinstance(scale, Tensor) else scale,
                    None if found_inf is None else _sent(found_inf, device),
                    batch.outputs or None,
                    cast(list[Tensor], batch.remainders) or None,
                    self._rounding(batch),
                    self._states,
                )
                self._update(group, batch, arguments)
            if self.master is not None:
                self._versions.update((id(param), version_of(param)) for param in group["params"])
            if counts is not None:
                self._count(counts, found_inf)
        return loss

    def _update(self, group: dict[str, Any], batch: Batch, arguments: Step) -> None:
        """Runs the op."""
        raise NotImplementedError

    def _state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return self._states

    def _are_new(self, states: States) -> list[bool]:
        """Whether the states of a parameter begin with this step in another way than from zero."""
        return [False] * len(states)

    def _take_scalars(self) -> tuple[Tensor | float, Tensor | None]:
        factor, found_inf = self.grad_factor, self.found_inf
        self.grad_factor = self.found_inf = None
        factor = 1.0 if factor is None else factor
        scale = getattr(self, "grad_scale", None)  # torch.amp.GradScaler makes it before step() and deletes it after
        if scale is not None:
            factor = scale.float().reciprocal() * factor
        return factor, found_inf

    def _count(self, counts: Tensor, found_inf: Tensor | None) -> None:
        counts.add_(1.0)
        if found_inf is None or found_inf.device.type == "cpu":
            return
        copy = torch.empty_like(found_inf, device="cpu", pin_memory=True).copy_(found_inf, non_blocking=True)
        # On the stream that copies: the current device may be another one.
        arrived = torch.cuda.current_stream(found_inf.device).record_event()
        self._deferred.append(_Deferred(copy, arrived, counts))

    def _settle(self) -> None:
        """Takes back the counts of steps that turned out to be skipped."""
        deferred = self._deferred[:]
        self._deferred.clear()  # of copies of this object, too
        for late in deferred:
            late.arrived.synchronize()
            if bool(late.found_inf):
                late.counts.sub_(1.0)

    # ---- collecting --------------------------------------------------------------------------------------------------

    def _collect(self, group: dict[str, Any]) -> tuple[Iterator[Batch], Tensor | None]:
        """What is to be updated, by calls, and the counts of its steps."""
        found = [(param, param.grad) for param in group["params"]]
        params = [param for param, grad in found if grad is not None]
        if not params:
            return iter(()), None
        grads = [grad for _, grad in found if grad is not None]
        names = self._state_names(group)
        states: States = [self.state[param] for param in params]
        are_new = self._are_new(states)
        self._complete(params, states, names)
        batch = Batch(
            locals_of(params),
            local_gradients(params, grads, type(self).__name__),
            [locals_of([state[name] for state in states]) for name in names],
            [[state[f"{name}_scale"] for state in states] if self.state_dtype == "8bit" else [] for name in names],
        )
        self._add_masters(batch, params, states)
        if self.stochastic_rounding and _has_bfloat16(batch):
            batch.keys, batch.starts = self._origins_of(params)
        counts = self._counts.of(states)
        return batch.by_call(counts.tolist(), are_new), counts

    def _complete(self, params: list[Tensor], states: States, names: Sequence[str]) -> None:
        """Makes what is missing: everything at first, a master where the checkpoint of another optimizer had none."""
        wanted = {"step", *names}
        if (
            all(state.keys() >= wanted for state in states)
            and not any(state[name] is None for name in names for state in states)
            and (self.master is None or all(map(self._has_master, params, states)))
        ):
            return
        for param, state in zip(params, states, strict=True):
            self._make_state(param, state, names)

    def _has_master(self, param: Tensor, state: dict[str, Any]) -> bool:
        return param.dtype == torch.float32 or "master" in state or "remainder" in state

    def _add_masters(self, batch: Batch, params: list[Tensor], states: States) -> None:
        """What is updated in the place of parameters, what gets it rounded, and the remainders of split masters; they
        follow what was written to the parameters: see _masters.py."""
        if self.outputs:
            outputs = [self.outputs.get(param) for param in params]
            batch.outputs = [None if output is None else local(output) for output in outputs]
        masters = [state.get("master") for state in states]
        if any(master is not None for master in masters):
            own, targets = batch.params, batch.outputs or [None] * len(params)
            self._look(params, own, masters, follow_all)
            batch.params = [p if m is None else local(m) for p, m in zip(own, masters, strict=True)]
            batch.outputs = [out if m is None else p for out, p, m in zip(targets, own, masters, strict=True)]
        remainders = [state.get("remainder") for state in states]
        if any(remainder is not None for remainder in remainders):
            batch.remainders = [None if x is None else local(x) for x in remainders]
            self._look(params, batch.params, remainders, lambda kept, shown: drop_remainders_of_zeros(shown, kept))

    def _look(
        self,
        params: Sequence[Tensor],
        shown: Sequence[Tensor],
        kept: Sequence[Tensor | None],
        take: Callable[[list[Tensor], list[Tensor]], bool],
    ) -> None:
        """Let what is kept beside parameters follow what was written to these: to those whose versions say so, and, in
        some steps, to any."""
        pairs = [(p, s, local(k)) for p, s, k in zip(params, shown, kept, strict=True) if k is not None]
        counted = [self._versions.get(id(p)) != version_of(p) for p, _, _ in pairs]
        for is_counted in (True, False) if self._looks.is_due(self._steps) else (True,):
            some = [(k, s) for (_, s, k), flag in zip(pairs, counted, strict=True) if flag == is_counted]
            if take([k for k, _ in some], [s for _, s in some]) and not is_counted:
                self._looks.found(self._steps)

    def _make_state(self, param: Tensor, state: dict[str, Any], names: Sequence[str]) -> None:
        mine = local(param)
        if "step" not in state:
            state["step"] = torch.tensor(0.0)
        if self.master == "float32" and mine.dtype != torch.float32 and "master" not in state:
            state["master"] = like(param, mine.float().contiguous())
        if self.master == "split" and mine.dtype == torch.bfloat16 and "remainder" not in state:
            state["remainder"] = like(param, torch.zeros_like(mine, dtype=torch.int16))
        dtype = torch.uint8 if self.state_dtype == "8bit" else cast(torch.dtype, self.state_dtype)
        for name in names:
            if state.get(name) is not None:
                continue
            state[name] = like(param, torch.zeros_like(mine, dtype=dtype))
            if dtype == torch.uint8:
                blocks = formats.num_blocks(mine.numel())
                state[f"{name}_scale"] = torch.full((blocks,), formats.SMALLEST_SCALE, device=mine.device)

    def _rounding(self, batch: Batch) -> StochasticRounding | None:
        if not batch.keys:
            return None
        return StochasticRounding((self.seed << 32) + batch.number, batch.keys, batch.starts)

    def _origins_of(self, params: list[Tensor]) -> tuple[list[int], list[int]]:
        """The numbers of the parameters in this optimizer, and the indices of their first local elements in the
        wholes."""
        known = [self._origins.get(id(param)) for param in params]
        if any(each is None or each[0] is not param for each, param in zip(known, params, strict=True)):
            every = [p for group in self.param_groups for p in group["params"]]
            self._origins = {id(p): (p, i, _first_index(p)) for i, p in enumerate(every)}
        origins = [self._origins[id(param)] for param in params]
        return [number for _, number, _ in origins], [start for _, _, start in origins]

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """torch.optim's state dict, with the keys that torch gives moments; 8-bit states as float32 values."""
        self._settle()
        found = super().state_dict()
        if self.state_dtype == "8bit":
            found["state"] = {key: self.to_checkpoint(state) for key, state in found["state"].items()}
        return found

    def to_checkpoint(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The states of a parameter as checkpoints have them: those of 8 bits as new float32 tensors, without scales;
        the others themselves."""
        shown = dict(state)
        for name, sign in zip(self._states, self._signed, strict=True):
            scale = shown.pop(f"{name}_scale", None)
            if scale is not None:
                shown[name] = values_of(shown[name], scale, signed=sign)
        return shown

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` of this class or of torch's optimizer of the same name returned.

        States come back in this optimizer's `state_dtype`, converted if the checkpoint has another.
        """
        self._counts = StepCounts()
        super().load_state_dict(state_dict)
        saved_ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for saved_id, param in zip(saved_ids, params, strict=True):
            saved = state_dict["state"].get(saved_id)
            if saved is not None:
                self.state[param] = self.from_checkpoint(param, saved)

    def from_checkpoint(self, param: Tensor, saved: Mapping[str, Any]) -> dict[str, Any]:
        """New states of a parameter, in the formats of this optimizer, from those of a checkpoint in any other."""
        state: dict[str, Any] = {}
        for name, value in saved.items():
            if name in self._states and isinstance(value, Tensor):
                sign = self._signed[self._states.index(name)]
                state |= self._stored(param, name, value.to(param.device), saved.get(f"{name}_scale"), sign)
            elif isinstance(value, Tensor) and name != "step":
                if not name.endswith("_scale"):
                    state[name] = value.to(param.device, copy=True)
            else:
                state[name] = value.clone() if isinstance(value, Tensor) else value
        if "step" in state and not isinstance(state["step"], Tensor):
            state["step"] = torch.tensor(float(state["step"]))
        if state.get("step") is not None:
            state["step"] = state["step"].to("cpu", torch.float32)
        return state

    def _stored(self, param: Tensor, name: str, value: Tensor, scale: Tensor | None, signed: bool) -> dict[str, Any]:
        """The entries of a state in this optimizer's format, from those of a checkpoint."""
        wanted = torch.uint8 if self.state_dtype == "8bit" else cast(torch.dtype, self.state_dtype)
        if value.dtype == wanted and wanted != torch.uint8:
            return {name: value.clone()}
        if value.dtype == torch.uint8:
            if scale is None:
                raise ValueError(f"the state dict has 8-bit {name} but no {name}_scale")
            scale = scale.to(param.device)
            if wanted == torch.uint8:
                return {name: value.clone(), f"{name}_scale": scale.clone()}
            return {name: values_of(value, scale, signed=signed).to(wanted)}
        if wanted != torch.uint8:
            return {name: value.to(wanted)}
        codes, scale = blocks_of(value, signed=signed)
        return {name: codes, f"{name}_scale": scale}


def _sent(scalar: Tensor, device: torch.device) -> Tensor:
    """On the device of a batch. The host waits for what it is going to read itself."""
    return scalar.to(device, non_blocking=device.type != "cpu")


def _has_bfloat16(batch: Batch) -> bool:
    """Whether something is stored that is rounded stochastically where that is wanted: not where masters are whole."""
    if batch.states and batch.states[0][0].dtype == torch.bfloat16:
        return True
    remainders = batch.remainders or [None] * len(batch.params)
    return torch.bfloat16 in {p.dtype for p, rest in zip(batch.params, remainders, strict=True) if rest is None}


def _first_index(param: Tensor) -> int:
    """Linear index of a DTensor's first local element in the whole; exact for shards of rows."""
    if not isinstance(param, DTensor):
        return 0
    _, offset = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
    index = 0
    for start, size in zip(offset, param.shape, strict=True):
        index = index * size + start
    return index
