"""Mixed precision: which dtype is used where, and loss scaling.

Precision.bf16()     parameters bfloat16, gradients bfloat16 on the wire, float32 in the optimizer
LossScaler()         dynamic loss scaling whose decisions all ranks share
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fastpar import ops
from fastpar.arguments import checked
from fastpar.comm import Communicator
from fastpar.comm.communicator import GroupLike
from fastpar.comm.groups import resolve_group
from fastpar.mesh import Mesh, named_groups

_STATE_KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Precision:
    """The dtypes of a training run. None leaves what is there as it is.

    param    of the module's parameters, and so of what is gathered and computed with
    compute  of autocast in forward; None: no autocast
    reduce   of gradients on the wire; sums are taken in float32 whatever this is. None: the gradient's own
    master   of what the optimizer updates, kept apart where it is not the parameter's; None: the parameters themselves
    full     patterns (fnmatch) of the names of parameters that stay in master's dtype (None: their own), such as
             ("*.norm.weight", "*.bias"); one that matches nothing is an error where it is applied
    buffers  of the module's floating-point buffers. None leaves them as they are, which statistics and tables of angles
             need; arithmetic of a float32 buffer with 16-bit parameters then has mixed dtypes, which matrix products
             refuse and sums answer in float32

    Raises TypeError and ValueError for dtypes and combinations that make no sense.
    """

    param: torch.dtype | None = None
    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    master: torch.dtype | None = None
    full: Sequence[str] = ()
    buffers: torch.dtype | None = None

    def __post_init__(self) -> None:
        for field in ("param", "compute", "reduce", "master", "buffers"):
            value = getattr(self, field)
            if value is not None and not isinstance(value, torch.dtype):
                raise TypeError(f"{field} must be a torch.dtype or None, got {value!r}")
            if value is not None and value not in _DTYPES:
                raise ValueError(f"{field} must be one of {', '.join(map(str, _DTYPES))} or None, got {value}")
        if isinstance(self.full, str):
            raise TypeError(
                f"full must be a sequence of patterns, got the string {self.full!r}: write ({self.full!r},)"
            )
        if not isinstance(self.full, Sequence) or not all(isinstance(pattern, str) for pattern in self.full):
            raise TypeError(f"full must be a sequence of patterns, got {self.full!r:.60}")
        object.__setattr__(self, "full", tuple(self.full))
        if self.compute is torch.float32:
            raise ValueError("compute must be torch.bfloat16, torch.float16 or None: autocast to float32 does nothing")
        if self.compute is not None and self.param not in (None, torch.float32):
            raise ValueError(
                f"compute={self.compute} is for float32 parameters, but param is {self.param}: parameters of 16 bits "
                "are computed with as they are; leave compute out"
            )
        if self.master is not None and self.master.itemsize < (self.param or self.master).itemsize:
            raise ValueError(f"master ({self.master}) must not be narrower than param ({self.param})")
        if self.master in (torch.bfloat16, torch.float16) and self.param != self.master:
            raise ValueError(f"master={self.master} needs param={self.master}, got param={self.param}")

    @staticmethod
    def of(value: Precision | str | None) -> Precision:
        """A policy, or one by name: "fp32", "bf16", "fp16"; None leaves everything as it is.

        Raises TypeError and ValueError for anything else.
        """
        if value is None or isinstance(value, Precision):
            return value or Precision()
        policies = {"fp32": Precision.fp32, "bf16": Precision.bf16, "fp16": Precision.fp16}
        if not isinstance(value, str):
            raise TypeError(
                f"precision must be a fastpar.Precision, 'fp32', 'bf16', 'fp16' or None, got {type(value).__name__} "
                f"({value!r:.60})"
            )
        if value not in policies:
            raise ValueError(f"precision must be 'fp32', 'bf16', 'fp16' or a fastpar.Precision, got {value!r}")
        return policies[value]()

    @staticmethod
    def fp32() -> Precision:
        """Everything in float32, as without a policy."""
        return Precision(torch.float32, None, torch.float32, torch.float32)

    @staticmethod
    def bf16(full: Sequence[str] = (), buffers: torch.dtype | None = None) -> Precision:
        """Parameters and their gradients in bfloat16, float32 copies in the optimizer."""
        return Precision(torch.bfloat16, None, torch.bfloat16, torch.float32, full, buffers)

    @staticmethod
    def fp16(full: Sequence[str] = (), buffers: torch.dtype | None = None) -> Precision:
        """Parameters and their gradients in float16, float32 copies in the optimizer; use it with a LossScaler."""
        return Precision(torch.float16, None, torch.float16, torch.float32, full, buffers)

    @checked(computed=False)
    def is_full(self, name: str) -> bool:
        """Whether a parameter of this name stays in master's dtype."""
        return any(fnmatchcase(name, pattern) for pattern in self.full)

    @checked(computed=False)
    def param_dtype(self, name: str, own: torch.dtype) -> torch.dtype:
        """The dtype in which the module holds the parameter `name`, whose own is `own`. Only floating dtypes change."""
        wanted = self.master if self.is_full(name) else self.param
        return own if wanted is None or not own.is_floating_point else wanted

    @checked(computed=False)
    def master_dtype(self, name: str, own: torch.dtype) -> torch.dtype:
        """The dtype in which the optimizer updates it."""
        return self.param_dtype(name, own) if self.master is None or not own.is_floating_point else self.master

    @checked(computed=False)
    def reduce_dtype(self, name: str, own: torch.dtype) -> torch.dtype:
        """The dtype of its gradient on the wire."""
        gradient = self.param_dtype(name, own)
        return gradient if self.reduce is None or self.is_full(name) else self.reduce

    @checked(computed=False)
    def check_names(self, names: Sequence[str]) -> None:
        """Raise ValueError for a pattern of `full` that matches none of the names."""
        for pattern in self.full:
            if not any(fnmatchcase(name, pattern) for name in names):
                shown = ", ".join(list(names)[:4])
                raise ValueError(f"full: {pattern!r} matches no parameter; the names are {shown}, ...")

    @checked(computed=False)
    def autocast(self, device_type: str) -> AbstractContextManager[object]:
        """The context of forward: torch.autocast with `compute`, or nothing."""
        if not device_type.isalpha():
            raise ValueError(f"device_type must be that of a device, such as 'cpu' or 'cuda', got {device_type!r}")
        if self.compute is None:
            return nullcontext()
        return torch.autocast(device_type, dtype=self.compute)


class LossScaler:
    """Dynamic loss scaling for float16, with the interface of torch.amp.GradScaler and decisions that all ranks share.

        scaler = LossScaler(mesh=mesh)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)             # only where something comes in between, as clipping
        clip_grad_norm_(model.parameters(), 1.0, mesh=mesh)
        scaler.step(optimizer)                 # skipped where any rank has a gradient that is not finite
        scaler.update()

    The loss is multiplied with a scale, so that small gradients do not vanish in float16, and gradients are divided by
    it before the step. A gradient that is NaN or infinite on one rank skips the step on every rank, which leaves
    parameters and optimizer states as they are, bit for bit; `update` then multiplies the scale with `backoff`. After
    `growth_interval` steps in a row without one it multiplies it with `growth`.

    skipped  steps skipped so far
    report   of the last skipped step: which parameters on which ranks, one text that is equal on all ranks; else None

    The ranks that decide together are those of `mesh` (a fastpar.Mesh or DeviceMesh), of `group`, and of the meshes of
    parameters that are DTensors. Without any of them a rank is on its own: with torch's DDP that is enough, since
    averaging has spread what is not finite before. One all-reduce of 20 bytes per group and call that looks at
    gradients; where something was found, also one all-gather of 512 bytes a rank for the report. Ranks that have
    different numbers of optimizers (stages of a pipeline) pass all of theirs at once, `scaler.step([first, second])`,
    and those that have none `scaler.step([])`: one agreement.

    Optimizers that divide by the scale themselves (torch's fused ones, those of fastpar.optim: they say so as torch
    asks of them, with `_step_supports_amp_scaling`) get it as `grad_scale`, unless `unscale_` has divided before; that
    saves a pass over the gradients. An optimizer with a method `finish_gradients` has it called before its gradients
    are read; its `companions`, optimizers whose gradients are normed with its own (those of one `fastpar.zero.shard`),
    are looked at with it. Scaling is done by a float32 tensor, so that a float16 loss does not overflow.

    Args:
        init, growth, backoff, growth_interval, enabled: as torch.amp.GradScaler has them. Not enabled, every method
            passes on what it gets.
        init_scale, growth_factor, backoff_factor: torch's names of the first three.
        names: a module, or pairs of names and parameters, for the report; else the optimizer's own names or numbers.

    Raises ValueError for factors that would not grow or back off.
    """

    @checked(computed=False)
    def __init__(
        self,
        init: float = 2.0**16,
        growth: float = 2.0,
        backoff: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        mesh: Mesh | DeviceMesh | None = None,
        group: GroupLike = None,
        names: nn.Module | Iterable[tuple[str, Tensor]] | None = None,
        init_scale: float | None = None,
        growth_factor: float | None = None,
        backoff_factor: float | None = None,
    ) -> None:
        init = init if init_scale is None else init_scale
        growth = growth if growth_factor is None else growth_factor
        backoff = backoff if backoff_factor is None else backoff_factor
        if growth <= 1.0:
            raise ValueError(f"growth must be above 1, got {growth}")
        if not 0.0 < backoff < 1.0:
            raise ValueError(f"backoff must be between 0 and 1, got {backoff}")
        if init <= 0.0 or growth_interval < 1:
            raise ValueError(f"init and growth_interval must be positive, got {init} and {growth_interval}")
        self.skipped = 0
        self.report: str | None = None
        self._scale, self._growth, self._backoff, self._interval = float(init), growth, backoff, growth_interval
        self._enabled, self._streak = enabled, 0
        self._groups = _groups_of(mesh, group)
        named = list(names.named_parameters() if isinstance(names, nn.Module) else names or ())
        self._names = {id(parameter): name for name, parameter in named}
        self._found: dict[int, bool] = {}  # by optimizer, since the last update: whether anything was not finite
        self._stepped: set[int] = set()
        self._scaled: set[int] = set()  # those whose gradients still have the scale: they divide in their step
        self._ahead: set[int] = set()  # those that were looked at since one of their companions was stepped
        self._looks = 0  # since the last update: ranks agree as often as each other

    def scale(self, outputs: Any) -> Any:
        """A tensor, or an iterable of them (of any depth), multiplied with the scale."""
        if not self._enabled:
            return outputs
        if isinstance(outputs, Tensor):
            if outputs.is_floating_point() and outputs.itemsize < 2:
                raise TypeError(f"outputs must be of a dtype that is computed with, got {outputs.dtype}")
            # torch.tensor would wait for the device
            return outputs * torch.full((), self._scale, dtype=torch.float32, device=outputs.device)
        if isinstance(outputs, (list, tuple)):
            return type(outputs)(self.scale(each) for each in outputs)
        if isinstance(outputs, Iterable):
            return map(self.scale, outputs)
        raise TypeError(f"outputs must be a tensor or an iterable of tensors, got {type(outputs).__name__}")

    @checked(computed=False)
    def unscale_(self, optimizer: Optimizers) -> None:
        """Divide the gradients of an optimizer, or of several, by the scale, and find out whether all of all ranks are
        finite.

        Raises RuntimeError for a second call before `update`, ValueError for gradients in float16, which would lose
        again what scaling has saved; RuntimeError on all ranks where they agree different numbers of times.
        """
        if not self._enabled:
            return
        several = _several(optimizer)
        if all(id(each) in self._ahead - self._stepped - self._scaled for each in several):
            self._ahead.difference_update(map(id, several))  # done, with the one that was stepped before
            return
        if any(id(each) in self._found for each in several):
            raise RuntimeError(
                "unscale_() or step() has already been called for this optimizer since the last update()"
            )
        self._look(several, unscales=True)

    @checked(computed=False)
    def step(self, optimizer: Optimizers, *args: Any, **kwargs: Any) -> Any:
        """`optimizer.step(*args, **kwargs)` where all gradients of all ranks are finite, else None and nothing at all.

        Several optimizers are stepped one after the other, all or none, and what they return comes as a list.

        Raises RuntimeError for a second call before `update`, ValueError for a closure, which would need gradients of
        its own; else as `unscale_`.
        """
        several = _several(optimizer)
        if self._enabled:
            if "closure" in kwargs or any(callable(each) for each in args):
                raise ValueError("LossScaler.step takes no closure: its gradients would not be unscaled")
            if any(id(each) in self._stepped for each in several):
                raise RuntimeError("step() has already been called for this optimizer since the last update()")
            together = _with_companions(several)
            new = [each for each in together if id(each) not in self._found]
            if new:
                divide = all(
                    id(each) in self._scaled if id(each) in self._found else _divides(each) for each in together
                )
                self._look(new, unscales=not divide)
                self._ahead.update({id(each) for each in new} - set(map(id, several)))
            self._stepped.update(map(id, several))
            if any(self._found[id(each)] for each in several):
                self.skipped += 1
                return None
        results = []
        for each in several:
            if each is _NOBODY:
                continue
            with _grad_scale(each, self._scale) if id(each) in self._scaled else nullcontext():
                results.append(each.step(*args, **kwargs))
        return results[0] if isinstance(optimizer, torch.optim.Optimizer) else results

    @checked(computed=False)
    def update(self, new_scale: float | None = None) -> None:
        """Adjust the scale after the steps of an iteration, or set it.

        Raises RuntimeError where no gradient was looked at since the last call.
        """
        if not self._enabled:
            return
        if new_scale is not None:
            self._scale = float(new_scale)
        elif not self._found:
            raise RuntimeError("update() needs a step() or unscale_() before it, which look at the gradients")
        elif any(self._found.values()):
            self._scale, self._streak = _float32(self._scale * self._backoff), 0
        else:
            self._streak += 1
            if self._streak == self._interval:
                grown = _float32(self._scale * self._growth)
                self._scale, self._streak = grown if math.isfinite(grown) else self._scale, 0
        self._found.clear()
        self._stepped.clear()
        self._scaled.clear()
        self._ahead.clear()
        self._looks = 0

    @property
    def has_nonfinite(self) -> bool:
        """Whether `unscale_` or `step` has found something that is not finite, on any rank, since the last `update`."""
        return any(self._found.values())

    def get_scale(self) -> float:
        """The scale; 1.0 where scaling is not enabled."""
        return self._scale if self._enabled else 1.0

    def is_enabled(self) -> bool:
        """Whether losses are scaled at all."""
        return self._enabled

    def state_dict(self) -> dict[str, Any]:
        """torch.amp.GradScaler's entries, which it can load, and `skipped`; empty where scaling is not enabled."""
        if not self._enabled:
            return {}
        return {
            "scale": self._scale,
            "growth_factor": self._growth,
            "backoff_factor": self._backoff,
            "growth_interval": self._interval,
            "_growth_tracker": self._streak,
            "skipped": self.skipped,
        }

    @checked(computed=False)
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take the state of a LossScaler or a torch.amp.GradScaler. Raises ValueError for an empty one."""
        if not self._enabled:
            return
        if not state_dict:
            raise ValueError("the state is empty, as one that is not enabled saves it: nothing to load")
        missing = [key for key in _STATE_KEYS if key not in state_dict]
        if missing:
            raise ValueError(f"state_dict must be that of a LossScaler or torch.amp.GradScaler, has no {missing}")
        self._scale, self._streak = float(state_dict["scale"]), int(state_dict["_growth_tracker"])
        self._growth, self._backoff = float(state_dict["growth_factor"]), float(state_dict["backoff_factor"])
        self._interval, self.skipped = int(state_dict["growth_interval"]), int(state_dict.get("skipped", 0))

    def _gradients(self, optimizers: Sequence[Any]) -> list[_Gradient]:
        finishing: list[Any] = []
        for finish in (getattr(each, "finish_gradients", None) for each in optimizers):
            if finish is not None and finish not in finishing:  # optimizers may have one in common, a collective
                finishing.append(finish)
        for finish in finishing:
            finish()
        found = []
        for number, group in enumerate(group for each in optimizers for group in each.param_groups):
            own = group.get("param_names") or [f"parameter {i} of group {number}" for i in range(len(group["params"]))]
            for name, parameter in zip(own, group["params"], strict=True):
                if parameter.grad is not None:
                    grad = parameter.grad
                    local = grad.to_local() if isinstance(grad, DTensor) else grad
                    found.append(_Gradient(self._names.get(id(parameter), name), local))
        return found

    def _look(self, optimizers: Sequence[Any], *, unscales: bool) -> None:
        """Find out whether anything of these optimizers is not finite on any rank; unscale where that is asked for."""
        grads = self._gradients(optimizers)
        kinds = _by_kind(grads)
        is_half = any(dtype == torch.float16 for _, dtype in kinds)
        if unscales and not is_half:
            found = self._unscale(kinds)
        else:
            on_device: dict[torch.device, list[Tensor]] = {}
            for gradient in grads:
                on_device.setdefault(gradient.local.device, []).append(gradient.local)
            found = any(bool(ops.exact_square_sum(tensors)[:2].any()) for tensors in on_device.values())
        agreed = self._agree(optimizers, grads, _Looked(found, unscales, is_half))
        if agreed.is_unscaled and not unscales:  # norms over all ranks are of gradients that are alike
            self._unscale(kinds)
        if not agreed.is_unscaled:
            self._scaled.update(map(id, optimizers))
        self._found.update({id(each): agreed.found for each in optimizers})

    def _unscale(self, kinds: _Kinds) -> bool:
        """Divide by the scale; whether anything of this rank is not finite."""
        found = False
        for (device, _), tensors in kinds.items():
            here = torch.zeros((), dtype=torch.float32, device=device)
            inverse = torch.full((), 1.0 / self._scale, dtype=torch.float32, device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(tensors, here, inverse)
            found |= bool(here)
        return found

    def _agree(self, optimizers: Sequence[Any], grads: Sequence[_Gradient], own: _Looked) -> _Looked:
        """What holds on any rank; writes the report. Raises on all ranks what is wrong between them."""
        groups = dict(self._groups)  # those that all ranks have come first, so that all reduce in one order
        for parameter in (p for each in optimizers for group in each.param_groups for p in group["params"]):
            for x in (parameter, parameter.grad):  # of whole parameters gradients may be split
                if isinstance(x, DTensor):
                    for _, group in named_groups(x.device_mesh):
                        groups.setdefault(group.group_name, group)
        comms = [Communicator.of(group) for group in groups.values()]
        self._looks += 1
        # In host memory on all ranks, whatever device their gradients are on: some may have none.
        words = torch.tensor([*own, self._looks, -self._looks], dtype=torch.float32, device="cpu")
        for comm in comms:
            words = comm.all_reduce(words, "max")
        found, is_unscaled, is_half, most, least = words.tolist()
        if most != -least:
            raise RuntimeError(
                f"ranks look at gradients for the time {int(-least)} and {int(most)} since the last update(): they "
                "call unscale_() or step() for different numbers of optimizers. Pass all of a rank at once, as in "
                "scaler.step([first, second])"
            )
        if is_unscaled and is_half:
            where = "" if own.is_half else " (on another rank)"
            raise ValueError(
                f"gradients in float16 divided by the scale would be rounded again{where}: keep float32 copies for "
                "the optimizer (Precision.fp16()), use autocast, or leave the division to an optimizer of "
                "fastpar.optim, on all ranks, by calling step() alone"
            )
        agreed = _Looked(bool(found), bool(is_unscaled), bool(is_half))
        if not agreed.found:
            return agreed
        notes = torch.tensor(list(_note(grads)), dtype=torch.uint8, device="cpu")[None]
        for comm in comms:
            notes = comm.all_gather(notes)
        lines = [bytes(row).rstrip(b"\0").decode(errors="ignore") for row in notes.tolist()]
        lines = [line for line in lines if line]
        more = f"; and on {len(lines) - _NOTES} more ranks" if len(lines) > _NOTES else ""
        self.report = f"gradients that are not finite: {'; '.join(lines[:_NOTES])}{more}"
        return agreed


class _Looked(NamedTuple):
    """What looking at gradients has shown."""

    found: bool  # something that is not finite
    is_unscaled: bool
    is_half: bool  # gradients in float16, which are not to be unscaled in place


class _Gradient(NamedTuple):
    name: str
    local: Tensor  # as this rank holds it


_Kinds = Mapping[tuple[torch.device, torch.dtype], list[Tensor]]
_NOTES = 4  # ranks that a report names
_NOTE_BYTES = 512


class _Nobody:
    """Stands for no optimizer, so that a rank that has none agrees with those that have some, as often as they do."""

    param_groups: Sequence[Any] = ()
    _step_supports_amp_scaling = True  # it asks nobody to divide


_NOBODY = _Nobody()


def _several(optimizer: Optimizers) -> list[Any]:
    several: list[Any] = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
    for each in several:
        if not callable(getattr(each, "step", None)):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer or several, got {type(each).__name__}")
    if len({id(each) for each in several}) < len(several):
        raise ValueError("optimizer has the same one more than once")
    return several or [_NOBODY]


def _with_companions(optimizers: Sequence[Any]) -> list[Any]:
    """And those whose gradients are normed and clipped with theirs: scaled all, or none."""
    found = {id(each): each for one in optimizers for each in (one, *getattr(one, "companions", ()))}
    return list(found.values())


def _divides(optimizer: Any) -> bool:
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def _by_kind(grads: Iterable[_Gradient]) -> _Kinds:
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in grads:
        if gradient.local.numel():
            kinds.setdefault((gradient.local.device, gradient.local.dtype), []).append(gradient.local)
    return kinds


@contextmanager
def _grad_scale(optimizer: Any, scale: float) -> Iterator[None]:
    """What torch's own scaler sets for such optimizers."""
    device = next((p.device for group in optimizer.param_groups for p in group["params"]), None)
    optimizer.grad_scale = torch.full((), scale, dtype=torch.float32, device=device)
    optimizer.found_inf = torch.zeros((), dtype=torch.float32, device=device)
    try:
        yield
    finally:
        del optimizer.grad_scale, optimizer.found_inf


def _note(grads: Iterable[_Gradient]) -> bytes:
    """What this rank has to say, in _NOTE_BYTES bytes; zeros where all is well."""
    found = []
    for gradient in grads:
        nans, infinities = ops.exact_square_sum([gradient.local])[:2].tolist()
        if nans or infinities:
            counts = [f"{n} {what}" for n, what in ((nans, "NaN"), (infinities, "infinite")) if n]
            found.append(f"{gradient.name} ({' and '.join(counts)} of {gradient.local.numel()})")
    if not found:
        return bytes(_NOTE_BYTES)
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    text = f"rank {rank}: {', '.join(found[:3])}{more}".encode()[:_NOTE_BYTES]
    return text.ljust(_NOTE_BYTES, b"\0")


def _groups_of(mesh: Mesh | DeviceMesh | None, group: GroupLike) -> dict[str, ProcessGroup]:
    groups = [] if mesh is None else [each for _, each in named_groups(mesh)]
    given = group.group if isinstance(group, Communicator) else resolve_group(group)
    if given is not None:
        groups.append(given)
    return {each.group_name: each for each in groups}


def _float32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float32).item()
