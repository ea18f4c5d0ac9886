"""DistributedDataParallel and other wrappers around a model that fastpar lays out: refused, with what to do instead.

DistributedDataParallel wants plain parameters, of which nobody else reduces the gradients: its constructor fails inside
of torch, several calls below the line that the user wrote, or does not fail.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


class RefusedByDDP:
    """The reason why a model must not be wrapped, put where DistributedDataParallel first looks, for the parameters to
    leave out."""

    def __init__(self, reason: str, *, holds_for_copies: bool = True):
        self.reason, self.holds_for_copies = reason, holds_for_copies

    def __deepcopy__(self, memo: Any) -> Any:
        return self if self.holds_for_copies else []

    def __iter__(self) -> Iterator[str]:
        raise TypeError(self.reason)

    def __len__(self) -> int:
        return 0


DDP_MARK = "_ddp_params_and_buffers_to_ignore"
OVER_PARALLEL = (
    "this model is parallelised by fastpar: its parameters are DTensors, which DistributedDataParallel cannot "
    "wrap. For data parallelism use fastpar.zero.shard(model, optimizer, group=mesh, stage=0), which is DDP "
    "(transformers' Trainer and accelerate.prepare wrap models in DistributedDataParallel by themselves: use "
    "fastpar.integrations.trainer.MeshTrainer and fastpar.integrations.accelerate.MeshAccelerator)"
)
OVER_CONTEXT = (
    "this model attends over sequences that fastpar has split over ranks, whose gradients have to be summed, and "
    "DistributedDataParallel averages them. Use fastpar.zero.shard(model, optimizer, group=mesh, stage=0), which is DDP"
)
OVER_ZERO = (
    "this model is data-parallel by fastpar.zero.shard already, which reduces its gradients: DistributedDataParallel "
    "around it would reduce them a second time, before they are clipped and stepped on. Leave it out. transformers' "
    "Trainer and accelerate.prepare wrap models in it by themselves: use fastpar.integrations.trainer.MeshTrainer and "
    "fastpar.integrations.accelerate.MeshAccelerator, which do not"
)


class ClosedToDDP:
    """`model` refuses to be wrapped in DistributedDataParallel until `remove` is called; its copies do not."""

    def __init__(self, model: nn.Module | None, reason: str):
        self._model, self._before = model, vars(model).get(DDP_MARK) if model is not None else None
        if model is not None:
            setattr(model, DDP_MARK, RefusedByDDP(reason, holds_for_copies=False))

    def remove(self) -> None:
        """Open the door again; a second call does nothing."""
        model, self._model = self._model, None
        if model is not None:
            vars(model).pop(DDP_MARK, None)
            if self._before is not None:
                setattr(model, DDP_MARK, self._before)


def check_model(model: Any, function: str) -> None:
    """TypeError and ValueError, with what to pass instead, for what is no module or one wrapped around the model."""
    if not isinstance(model, nn.Module):
        hint = (
            "; build it first, for instance by AutoModelForCausalLM.from_pretrained" if isinstance(model, str) else ""
        )
        raise TypeError(f"{function} takes an nn.Module as its model, got {type(model).__name__}{hint}")
    inner = [name for name in ("_orig_mod", "module") if isinstance(vars(model)["_modules"].get(name), nn.Module)]
    kinds = (nn.parallel.DistributedDataParallel, nn.DataParallel)
    if inner and (isinstance(model, kinds) or inner[0] == "_orig_mod"):
        raise ValueError(
            f"{function} got a {type(model).__name__} around the model: pass the model itself (its .{inner[0]}), and "
            "wrap or compile it afterwards"
        )
    for path, part in model.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise TypeError(
                f"{function} cannot change {path or 'the model'}, which torch.jit has scripted or traced: pass a model "
                "with the Python module in its place"
            )
