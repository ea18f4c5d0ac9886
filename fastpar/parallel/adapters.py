"""Merging of PEFT's adapters in a model that `parallelize` has split."""

from __future__ import annotations

from typing import Any

from torch import nn

from fastpar.parallel.changes import Changes
from fastpar.pretrained.adapters import is_adapter


def connect_adapters(model: nn.Module, changes: Changes) -> None:
    """Let `merge` of PEFT's layers, and so `merge_and_unload`, refuse what parameters that are DTensors would lose."""
    for module in filter(is_adapter, model.modules()):
        if callable(getattr(module, "merge", None)):
            changes.set(module, "merge", _Merge(module))


class _Merge:
    """`merge` of a module with adapters, in the place of its class's."""

    def __init__(self, module: Any):
        self.module = module
        self.__doc__ = type(module).merge.__doc__

    def __deepcopy__(self, memo: Any) -> _Merge:
        return _Merge(memo.get(id(self.module), self.module))

    def __call__(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        if safe_merge:  # it assigns to the weight's .data, where a merge in place adds
            raise RuntimeError(
                "safe_merge=True assigns new weights, which a model that fastpar has split would lose: merge without "
                "it, or call fastpar.unparallelize(model) first"
            )
        type(self.module).merge(self.module, adapter_names=adapter_names)
