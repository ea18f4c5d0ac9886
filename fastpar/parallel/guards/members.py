"""Modules of a parallelised model, which must be those that `parallelize` has seen.

A module that is put into the model afterwards (an adapter, a new head) has plain parameters: every rank initialises its
own copy, and nothing sums the parts of their gradients that ranks have where heads, features or the sequence are split.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from fastpar.tensor.parameter import layout_of


class MemberGuard:
    """Notices modules that have come, by the identity of every child, in every forward."""

    def __init__(self) -> None:
        self._holders: list[dict[str, Any]] = []  # the children of modules that have some, by name
        self._leaves: list[dict[str, Any]] = []  # those of modules that have none
        self._children: list[Any] = []

    def check(self, model: nn.Module) -> None:
        """ValueError names a trainable parameter that is not of the model that was parallelised."""
        # No loop in Python, as this is in every forward. Lists compare their items by identity first.
        if (self._holders or self._leaves) and not any(self._leaves) and self._now() == self._children:
            return
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and not isinstance(parameter, DTensor) and layout_of(parameter) is None:
                raise ValueError(
                    f"{name} has been added after fastpar.parallelize: its copies on the ranks of the tensor-parallel "
                    "group differ or will, and nothing sums the parts of its gradient. Change the model first, and "
                    "parallelize it then (adapters: get_peft_model(model, config), then parallelize); or "
                    "fastpar.unparallelize(model), change it, and parallelize again"
                )
        children = [module._modules for module in model.modules()]
        self._holders, self._leaves = [c for c in children if c], [c for c in children if not c]
        self._children = self._now()

    def _now(self) -> list[Any]:
        return list(chain.from_iterable(map(dict.values, self._holders)))
