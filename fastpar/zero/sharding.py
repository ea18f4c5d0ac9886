"""`shard`: data parallelism for a model and its optimizer, with as much of it sharded as one asks for."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fastpar.clip import GradSum
from fastpar.precision import Precision
from fastpar.zero.flat import Staging
from fastpar.zero.groups import Groups, GroupsLike, as_parameter, local
from fastpar.zero.reducer import BUCKET_BYTES, Bucket, Reducer, RowBucket, Slot, WholeBucket
from fastpar.zero.step import Stepper
from fastpar.zero.whole import WholeParameters

STAGING_BUFFERS = 2


def shard(
    model: nn.Module | Iterable[nn.Parameter] | Iterable[tuple[str, nn.Parameter]],
    optimizer: torch.optim.Optimizer,
    *,
    group: GroupsLike = None,
    stage: int = 1,
    precision: Precision | None = None,
    accumulate: int = 1,
    max_norm: float | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> Zero:
    """Make `model` and `optimizer` data-parallel over `group`, in place. Collective.

        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        zero = fp.zero.shard(model, optimizer, group=mesh, stage=2, precision=fp.Precision.bf16())
        for batch in batches:                      # a loop as without
            loss_of(model(batch)).backward()
            optimizer.step()
            optimizer.zero_grad()

    model       a module, or parameters (with names, or without)
    optimizer   any of torch.optim but LBFGS, of fp.optim, or one's own: all trainable parameters of the model must be
                in it. It stays the same object; from now on param_groups hold what this rank updates
    group       a Mesh (dims dp_shard and dp_replicate), a DeviceMesh of one dim, or two (replicate, shard), a
                ProcessGroup, or a Communicator: the ranks, which all have the same parameters (rank 0's are taken)
    stage       0: parameters, gradients and optimizer states on every rank (DDP)
                1: every rank updates its rows (dim 0) of each parameter, and has states for those only
                2: and gradients of those only, from microbatch to microbatch
                3: and parameters, which are gathered for the layer that runs
    precision   dtypes: see `Precision`
    accumulate  backward passes per step. Stages 0 and 1 sum gradients locally and reduce them in the last pass; 2 and 3
                reduce in every pass, and sum what is left of them
    max_norm    clip gradients to this global norm in every step (`Zero.norm` has it)

    Gradients are means over the ranks: scale the loss by 1 / accumulate, as always. Reductions begin during backward
    and have ended when it returns. Parameters that no rank used have no gradient, as without.

    Raises ValueError and TypeError for what does not fit, before anything is changed.
    """
    return Zero(
        model,
        optimizer,
        group=group,
        stage=stage,
        precision=precision or Precision(),
        accumulate=accumulate,
        max_norm=max_norm,
        bucket_bytes=bucket_bytes,
    )


class Zero:
    """What `shard` made of a model and an optimizer."""

    def __init__(
        self,
        model: Any,
        optimizer: torch.optim.Optimizer,
        *,
        group: GroupsLike,
        stage: int,
        precision: Precision,
        accumulate: int,
        max_norm: float | None,
        bucket_bytes: int,
    ) -> None:
        _check(stage, accumulate, max_norm, bucket_bytes)
        self.model = model if isinstance(model, nn.Module) else None
        self.optimizer, self.stage, self.precision, self.max_norm = optimizer, stage, precision, max_norm
        named = _named_parameters(model)
        _check_optimizer(named, optimizer)
        precision.check_names(list(named))
        self.groups = Groups(group, is_sharded=stage > 0)
        self.norm: Tensor | None = None
        self.skipped = 0
        self._bucket_bytes = bucket_bytes
        self._synchronise(named)
        self.slots, self._whole = self._make_slots(named)
        self._staging: dict[tuple[torch.dtype, torch.device], Staging] = {}
        self._reducer = Reducer(
            self.slots,
            self.groups,
            self._make_bucket,
            accumulate=accumulate if stage < 2 else 1,
            bucket_bytes=bucket_bytes,
        )
        self._adopt()
        self._stepper = Stepper(optimizer, self._phases)
        self._handles = self._hook_model()

    # ---- what users call

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in here add to local gradients; the next one outside, or the step, reduces them all."""
        before, self._reducer.is_syncing = self._reducer.is_syncing, False
        try:
            yield
        finally:
            self._reducer.is_syncing = before

    def reduce_gradients(self) -> None:
        """Reduce what has not been reduced yet, as `optimizer.step()` does. Collective."""
        self._reducer.reduce_now()

    def detach(self) -> None:
        """Remove all hooks; parameters, gradients and states stay as they are."""
        self._reducer.detach()
        self._stepper.detach()
        for handle in self._handles:
            handle.remove()

    # ---- the step

    def _phases(self) -> None:
        """Reduce, check and clip, update, gather."""
        self._reducer.reduce_now()
        owners = [slot.owner for slot in self.slots if slot.owner.grad is not None]
        if self.max_norm is not None and not self._clip(owners):
            self.skipped += 1
            return
        for comm in self.groups.everyone():
            comm.barrier()  # nobody reads rows any more
        self._stepper.update()
        self._write_back()
        for whole in self._whole:
            whole.gather()
        self._reducer.follow_order()

    def _clip(self, owners: Sequence[nn.Parameter]) -> bool:
        """Clip to max_norm; False, and nothing is changed, where a gradient is not finite."""
        assert self.max_norm is not None
        rank, size = self.groups.replicate.rank, self.groups.replicate.size
        total = GradSum().add([local(owner.grad) for owner in owners if owner.grad is not None], share=(rank, size))
        total.combine(*self.groups.everyone())
        self.norm = total.norm()
        if total.nonfinite:
            return False
        factor = total.clip_factor(self.max_norm)
        if factor < 1.0:
            torch._foreach_mul_([local(owner.grad) for owner in owners if owner.grad is not None], factor)
        return True

    def _write_back(self) -> None:
        """Round updated master weights to the parameters."""
        for slot in self.slots:
            if slot.target is not None:
                slot.target.copy_(local(slot.owner))

    # ---- building

    def _synchronise(self, named: dict[str, nn.Parameter]) -> None:
        """Rank 0's values on all ranks, for buffers too."""
        tensors: list[Tensor] = [local(parameter) for parameter in named.values()]
        if self.model is not None:
            tensors += [local(buffer) for buffer in self.model.buffers() if buffer.numel() > 0]
        for comm in self.groups.everyone():
            for x in tensors:
                x.copy_(comm.broadcast(x, 0))

    def _make_slots(self, named: dict[str, nn.Parameter]) -> tuple[list[Slot], list[WholeParameters]]:
        """Move parameters to where they will stay, and make what the optimizer is to have."""
        trainable = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
        masters = {
            name: local(parameter).clone()
            for name, parameter in trainable.items()
            if self.precision.master_dtype(name, parameter.dtype) != self.precision.param_dtype(name, parameter.dtype)
        }
        for name, parameter in named.items():
            wanted = self.precision.param_dtype(name, parameter.dtype)
            if wanted != parameter.dtype:
                parameter.data = parameter.data.to(wanted)
        kinds: dict[tuple[torch.dtype, torch.device], list[str]] = {}
        for name, parameter in trainable.items():
            kinds.setdefault((parameter.dtype, parameter.device), []).append(name)
        slots: dict[str, Slot] = {}
        everything = []
        for names in kinds.values():
            parameters = [trainable[name] for name in names]
            whole = WholeParameters(self.groups.shard, [local(parameter) for parameter in parameters])
            everything.append(whole)
            if whole.is_shared:
                for parameter, value in zip(parameters, whole.values, strict=True):
                    inner: Any = parameter
                    (inner._local_tensor if isinstance(inner, DTensor) else inner).data = value
            for index, (name, rows) in enumerate(zip(names, whole.rows, strict=True)):
                slots[name] = self._make_slot(name, trainable[name], rows, masters.get(name), whole, index)
        return [slots[name] for name in trainable], everything

    def _make_slot(
        self,
        name: str,
        parameter: nn.Parameter,
        rows: Tensor,
        master: Tensor | None,
        whole: WholeParameters,
        index: int,
    ) -> Slot:
        own = parameter.dtype
        wire = self.precision.reduce_dtype(name, own)
        row_spec = self.groups.row_spec(parameter)
        spec = row_spec or getattr(parameter, "_spec", None)
        if master is not None:
            mine = whole.layout.rows_of(master, index, self.groups.shard.rank)
            mine = mine.to(self.precision.master_dtype(name, own), copy=True)
            return Slot(name, parameter, as_parameter(mine, spec), spec, wire, target=rows)
        if row_spec is None:
            return Slot(name, parameter, parameter, spec, wire)
        return Slot(name, parameter, as_parameter(rows, spec), spec, wire)

    def _make_bucket(self, slots: Sequence[Slot]) -> Bucket:
        if self.groups.shard.size == 1:
            return WholeBucket(slots, self.groups)
        kind = slots[0].wire, slots[0].parameter.device
        return RowBucket(slots, self.groups, lambda: self._staging_of(*kind))

    def _staging_of(self, dtype: torch.dtype, device: torch.device) -> Staging:
        """Two buffers for the largest bucket of this kind."""
        most = max(
            sum(local(slot.parameter).numel() for slot in bucket.slots)
            for bucket in self._reducer.buckets
            if bucket.slots[0].wire == dtype and bucket.slots[0].parameter.device == device
        )
        found = self._staging.get((dtype, device))
        if found is None or found.numel < most:
            found = Staging(self.groups.shard, most, dtype, device, count=STAGING_BUFFERS)
            self._staging[dtype, device] = found
        return found

    def _adopt(self) -> None:
        """Give the optimizer the slots' owners in the place of the model's parameters, and cut what states it has."""
        owners = {id(slot.parameter): slot for slot in self.slots}
        state = self.optimizer.state
        for group in self.optimizer.param_groups:
            for index, parameter in enumerate(group["params"]):
                slot = owners.get(id(parameter))
                if slot is None or slot.owner is parameter:
                    continue
                group["params"][index] = slot.owner
                if parameter in state:
                    state[slot.owner] = self._cut_state(state.pop(parameter), slot)

    def _cut_state(self, state: dict[str, Any], slot: Slot) -> dict[str, Any]:
        raise NotImplementedError("shard the optimizer before its first step")

    def _hook_model(self) -> list[Any]:
        optimizer = self.optimizer
        plain_zero_grad = optimizer.zero_grad

        def zero_grad(_: Any, set_to_none: bool = True) -> None:
            self._reducer.forget_sums()
            plain_zero_grad(set_to_none)

        optimizer.zero_grad = types.MethodType(zero_grad, optimizer)  # type: ignore[method-assign]
        if self.model is None:
            return []

        def before_forward(*_: Any) -> None:
            if torch.is_grad_enabled():
                self._reducer.begin_forward()

        return [self.model.register_forward_pre_hook(before_forward)]


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


def _check_optimizer(named: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    missing = [name for name, parameter in named.items() if parameter.requires_grad and id(parameter) not in held]
    if missing:
        shown = ", ".join(missing[:4]) + (", ..." if len(missing) > 4 else "")
        raise ValueError(f"{len(missing)} trainable parameters are not in the optimizer: {shown}")
    strange = len(held - {id(parameter) for parameter in named.values()})
    if strange:
        raise ValueError(f"the optimizer has {strange} parameters that the model does not have")
