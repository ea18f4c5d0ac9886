"""`generate` where ranks with different prompts share every forward: ZeRO's stage 3, and experts spread over batches.

A rank whose sequences have ended would stop, and the others wait for it in the next forward. transformers knows that as
`synced_gpus`: all go on until all have ended. It is what happens by default here.
"""

from __future__ import annotations

import copy
from typing import Any

import torch.distributed as dist
from torch import nn


class SyncedGenerate:
    """`model.generate` with `synced_gpus=True`, unless the caller says otherwise.

    inner  what the model had in the place of its class's method, or None
    """

    def __init__(self, model: Any, inner: Any = None):
        self.model, self.inner = model, inner
        self.__doc__ = type(model).generate.__doc__

    def __deepcopy__(self, memo: Any) -> SyncedGenerate:
        model = memo.get(id(self.model), self.model)
        return SyncedGenerate(model, copy.deepcopy(self.inner, memo))

    def __call__(self, *args: Any, synced_gpus: bool | None = None, **kwargs: Any) -> Any:
        if synced_gpus is None:
            synced_gpus = dist.is_initialized() and dist.get_world_size() > 1
        if self.inner is not None:
            return self.inner(*args, synced_gpus=synced_gpus, **kwargs)
        return type(self.model).generate(self.model, *args, synced_gpus=synced_gpus, **kwargs)


class GenerateDoor:
    """`model.generate` is a `SyncedGenerate` until `remove` is called, where the model has this method."""

    def __init__(self, model: nn.Module | None):
        self._model = model if callable(getattr(type(model), "generate", None)) else None
        if self._model is not None:
            self._before = vars(self._model).get("generate")
            vars(self._model)["generate"] = SyncedGenerate(self._model, self._before)

    def remove(self) -> None:
        """Give back what was there; a second call does nothing."""
        model, self._model = self._model, None
        if model is not None:
            vars(model).pop("generate", None)
            if self._before is not None:
                vars(model)["generate"] = self._before
