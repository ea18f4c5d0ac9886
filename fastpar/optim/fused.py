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

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim.optimizer import Optimizer, ParamsT

from fastpar.ops.optimizer import Step, StochasticRounding
from fastpar.optim._state_formats import blocks_of, like, values_of
from fastpar.reference import optimizer_formats as formats

PARAM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MASTERS = (None, "float32", "split")
STATE_DTYPES = (torch.float32, torch.bfloat16, "8bit")


@dataclass
class Batch:
    """What one call of an op takes; one entry per parameter in every list, `states` and `scales` by kind of state."""

    number: int  # of the step, from 1
    is_new: bool  # states are to be written, not read
    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor | None] = field(default_factory=list)
    remainders: list[Tensor] = field(default_factory=list)
    states: list[list[Tensor]] = field(default_factory=list)
    scales: list[list[Tensor]] = field(default_factory=list)
    steps: list[Tensor] = field(default_factory=list)
    keys: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class _Deferred:
    """Steps that were counted before the host knew whether they would be skipped."""

    found_inf: Tensor  # in pinned memory
    arrived: torch.cuda.Event
    steps: list[Tensor]


def local(x: Tensor) -> Tensor:
    return x._local_tensor if isinstance(x, DTensor) else x


class FusedOptimizer(Optimizer):
    """Base of AdamW, SGD and Lion; see there. Subclasses name their states and call their op."""

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
        self._deferred: list[_Deferred] = []
        super().__init__(params, defaults)

    def __getstate__(self) -> dict[str, Any]:
        self._settle()
        names = ("master", "state_dtype", "stochastic_rounding", "seed", "outputs", "_deferred")
        return {**super().__getstate__(), **{name: self.__dict__[name] for name in names}, "_origins": {}}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch.optim.Optimizer; checks the dtypes."""
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
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._settle()
        factor, found_inf = self._take_scalars()
        if found_inf is not None and found_inf.device.type == "cpu" and bool(found_inf):
            return loss
        for group in self.param_groups:
            scale = -factor if group.get("maximize", False) else factor
            for batch in self._collect(group):
                device = batch.params[0].device
                found_here = None if found_inf is None else found_inf.to(device, non_blocking=True)
                arguments = Step(
                    batch.params,
                    batch.grads,
                    batch.states,
                    batch.scales,
                    scale.to(device, non_blocking=True) if isinstance(scale, Tensor) else scale,
                    found_here,
                    batch.outputs,
                    batch.remainders or None,
                    self._rounding(batch),
                    self._states,
                )
                self._update(group, batch, arguments)
                self._count(batch.steps, found_here)
        return loss

    def _update(self, group: dict[str, Any], batch: Batch, arguments: Step) -> None:
        """Runs the op."""
        raise NotImplementedError

    def _state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return self._states

    def _is_new(self, state: dict[str, Any]) -> bool:
        """Whether the states of a parameter begin with this step in another way than from zero."""
        return False

    def _take_scalars(self) -> tuple[Tensor | float, Tensor | None]:
        factor, found_inf = self.grad_factor, self.found_inf
        self.grad_factor = self.found_inf = None
        factor = 1.0 if factor is None else factor
        scale = getattr(self, "grad_scale", None)  # torch.amp.GradScaler makes it before step() and deletes it after
        if scale is not None:
            factor = scale.float().reciprocal() * factor
        return factor, found_inf

    def _count(self, steps: list[Tensor], found_inf: Tensor | None) -> None:
        torch._foreach_add_(steps, 1.0)
        if found_inf is None or found_inf.device.type == "cpu":
            return
        copy = torch.empty_like(found_inf, device="cpu", pin_memory=True).copy_(found_inf, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        self._deferred.append(_Deferred(copy, arrived, steps))

    def _settle(self) -> None:
        """Takes back the counts of steps that turned out to be skipped."""
        deferred, self._deferred = self._deferred, []
        for late in deferred:
            late.arrived.synchronize()
            if bool(late.found_inf):
                torch._foreach_sub_(late.steps, 1.0)

    # ---- collecting --------------------------------------------------------------------------------------------------

    def _collect(self, group: dict[str, Any]) -> Iterable[Batch]:
        batches: dict[tuple[Any, ...], Batch] = {}
        names = self._state_names(group)
        for param in group["params"]:
            if param.grad is None:
                continue
            state = self.state[param]
            is_new = self._is_new(state)
            self._make_state(param, state, names)
            kind = (param.device, int(state["step"]) + 1, "remainder" in state, is_new)
            batch = batches.get(kind)
            if batch is None:
                batch = batches[kind] = Batch(kind[1], is_new, states=[[] for _ in names], scales=[[] for _ in names])
            self._add(batch, param, state, names)
        return batches.values()

    def _add(self, batch: Batch, param: Tensor, state: dict[str, Any], names: Sequence[str]) -> None:
        output = self.outputs.get(param) if self.outputs else None
        if "master" in state:
            batch.params.append(local(state["master"]))
            output = param
        else:
            batch.params.append(local(param))
        batch.grads.append(self._gradient(param))
        batch.outputs.append(output if output is None else local(output))
        if "remainder" in state:
            batch.remainders.append(local(state["remainder"]))
        for k, name in enumerate(names):
            batch.states[k].append(local(state[name]))
            if self.state_dtype == "8bit":
                batch.scales[k].append(state[f"{name}_scale"])
        batch.steps.append(state["step"])
        if self.stochastic_rounding:
            key, start = self._origin(param)
            batch.keys.append(key)
            batch.starts.append(start)

    def _gradient(self, param: Tensor) -> Tensor:
        grad = param.grad
        assert grad is not None
        if grad.layout != torch.strided:
            raise ValueError(
                f"{type(self).__name__} does not take sparse gradients; use torch.optim.SparseAdam for them"
            )
        if isinstance(param, DTensor) and isinstance(grad, DTensor) and grad.placements != param.placements:
            raise ValueError(
                f"the gradient of a parameter {tuple(param.shape)} has placements {grad.placements}, the parameter has "
                f"{param.placements}: redistribute the gradient first"
            )
        return local(grad)

    def _make_state(self, param: Tensor, state: dict[str, Any], names: Sequence[str]) -> None:
        """Makes what is missing: everything at first, a master where the checkpoint of another optimizer had none."""
        has_master = self.master is None or param.dtype == torch.float32 or "master" in state or "remainder" in state
        if has_master and "step" in state and all(state.get(name) is not None for name in names):
            return
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
        if not self.stochastic_rounding:
            return None
        return StochasticRounding((self.seed << 32) + batch.number, batch.keys, batch.starts)

    def _origin(self, param: Tensor) -> tuple[int, int]:
        """(number of the parameter in this optimizer, index of its first local element in the whole)."""
        known = self._origins.get(id(param))
        if known is None or known[0] is not param:
            every = [p for group in self.param_groups for p in group["params"]]
            self._origins = {id(p): (p, i, _first_index(p)) for i, p in enumerate(every)}
            known = self._origins[id(param)]
        return known[1:]

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As torch.optim's, with the keys that torch gives moments; 8-bit states as the float32 values they mean."""
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


def _first_index(param: Tensor) -> int:
    """Linear index of a DTensor's first local element in the whole; exact for shards of rows."""
    if not isinstance(param, DTensor):
        return 0
    _, offset = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
    index = 0
    for start, size in zip(offset, param.shape, strict=True):
        index = index * size + start
    return index
