"""Adapters of PEFT in a folder: whole tensors of a model whose parameters are shards, written by PEFT's own code."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from fastpar.comm import Communicator
from fastpar.comm.agree import problem_of, raise_on_all


def is_adapted_model(model: object) -> bool:
    """Whether a model is a `peft.PeftModel`, which saves its adapters and not the model inside."""
    peft_model = getattr(sys.modules.get("peft"), "PeftModel", None)
    return peft_model is not None and isinstance(model, peft_model)


def is_adapter(module: object) -> bool:
    """Whether a module is a layer of PEFT, around one of the model."""
    layer = getattr(sys.modules.get("peft.tuners.tuners_utils"), "BaseTunerLayer", None)
    return layer is not None and isinstance(module, layer)


def has_adapters(model: nn.Module) -> bool:
    """Whether layers of PEFT are inside of a model."""
    return any(is_adapter(module) for module in model.modules())


def models_to_save(model: Any) -> list[Any]:
    """A model, and the one in a `peft.PeftModel`, which `merge_and_unload` leaves."""
    return [model, model.get_base_model()] if is_adapted_model(model) else [model]


class ClosedMerge:
    """`merge` and `unmerge` of a model's adapters raise until `remove` is called."""

    def __init__(self, model: nn.Module):
        self._before: list[tuple[nn.Module, str, Any]] = []
        for module in filter(is_adapter, model.modules()):
            for name in ("merge", "unmerge"):
                if callable(getattr(module, name, None)):
                    self._before.append((module, name, vars(module).get(name)))
                    vars(module)[name] = _NoMerge(module, name)

    def remove(self) -> None:
        """Give the methods back; a second call does nothing."""
        before, self._before = self._before, []
        for module, name, own in before:
            if isinstance(vars(module).get(name), _NoMerge):
                vars(module).pop(name)
                vars(module).update({} if own is None else {name: own})


class _NoMerge:
    def __init__(self, module: nn.Module, name: str):
        self.module, self.name = module, name

    def __deepcopy__(self, memo: Any) -> Any:
        return MethodType(getattr(type(self.module), self.name), memo.get(id(self.module), self.module))

    def __call__(self, *_: Any, **__: Any) -> None:
        raise RuntimeError(
            f"{self.name} of adapters computes with whole weights, of which ZeRO's stage 3 leaves this rank a part: "
            "call zero.detach() before, or save the adapters (model.save_pretrained) and merge them in one process"
        )


def save_adapters(model: Any, folder: Path, values: Mapping[str, Any], everyone: Communicator) -> Exception | None:
    """Write the adapters as `PeftModel.save_pretrained` does, on the first rank; what went wrong there, or None.

    values   of the model's state dict: each has a shape and a dtype, and gives the whole tensor when it is called.
             Collective, as such a call is: those of adapters, and of modules that are saved with them, are gathered
    """
    names = list(values)
    taken = torch.zeros(len(names), dtype=torch.int64, device="cpu")
    described = {n: torch.empty(v.shape, dtype=v.dtype, device="meta") for n, v in values.items()}
    error: Exception | None = None
    if everyone.rank == 0:  # whose choice all take: PEFT may ask the hub, which may answer ranks differently
        try:
            chosen = {id(x) for x in _chosen(model, described)}
            taken = torch.tensor([int(id(described[name]) in chosen) for name in names], device="cpu")
        except Exception as e:
            error = e
    raise_on_all(error, everyone, lambda _: RuntimeError("save_pretrained of adapters failed on the first rank"))
    if everyone.size > 1:
        taken = everyone.broadcast(taken, src=0)
    state: dict[str, Tensor] = {
        name: values[name]().cpu() if is_taken else described[name]
        for name, is_taken in zip(names, taken.tolist(), strict=True)
    }
    if everyone.rank != 0:
        return None
    return problem_of(lambda: type(model).save_pretrained(model, folder, state_dict=state))


def _chosen(model: Any, state: Mapping[str, Tensor]) -> list[Tensor]:
    """The tensors of a state dict that PEFT would save."""
    from peft import get_peft_model_state_dict

    found: list[Tensor] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # said again when they are saved
        for name in model.peft_config:
            found += get_peft_model_state_dict(model, state_dict=dict(state), adapter_name=name).values()
    if not all(any(x is known for known in state.values()) for x in found):
        raise ValueError(
            f"fastpar cannot save adapters of the kinds {[str(c.peft_type) for c in model.peft_config.values()]} from "
            "shards, as they are computed when they are saved: fastpar.unparallelize(model), or zero.detach(), before"
        )
    return found
