"""That a parallelised model still holds what `parallelize` has seen.

A module that is put into the model afterwards (an adapter, a new head) has plain parameters: every rank initialises its
own copy, and nothing sums the parts of their gradients that ranks have where heads, features or the sequence are split.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from fastpar.tensor.parameter import layout_of


class MemberGuard:
    """Notices modules that have come, by the identity of every child: tens of nanoseconds each, in every forward."""

    def __init__(self) -> None:
        self._children: list[tuple[dict[str, Any], tuple[Any, ...]]] = []

    def check(self, model: nn.Module) -> None:
        """ValueError names a trainable parameter that is not of the model that was parallelised."""
        if self._children and all(tuple(of.values()) == children for of, children in self._children):
            return
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and not isinstance(parameter, DTensor) and layout_of(parameter) is None:
                raise ValueError(
                    f"{name} has been added after fastpar.parallelize: its copies on the ranks of the tensor-parallel "
                    "group differ or will, and nothing sums the parts of its gradient. Change the model first, and "
                    "parallelize it then (adapters: get_peft_model(model, config), then parallelize); or "
                    "fastpar.unparallelize(model), change it, and parallelize again"
                )
        self._children = [(module._modules, tuple(module._modules.values())) for module in model.modules()]
