"""Modules of a parallelised model, which must be those that `parallelize` has seen.

A module that is put into the model afterwards (an adapter, a new head) has plain parameters: every rank initialises its
own copy, and nothing sums the parts of their gradients that ranks have where heads, features or the sequence are split.

One without parameters that comes into a block, such as another activation, was in no trial of the block. It sees this
rank's features, so it has to compute each by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fastpar.contracts.rehearsal import same_generators
from fastpar.tensor.parameter import layout_of


class MemberGuard:
    """Notices modules that have come, by the identity of every child, in every forward."""

    def __init__(self) -> None:
        self._holders: list[dict[str, Any]] = []  # the children of modules that have some, by name
        self._leaves: list[dict[str, Any]] = []  # those of modules that have none
        self._children: list[Any] = []
        self._blocks: dict[str, nn.Module] = {}
        self._known: WeakSet[nn.Module] = WeakSet()  # modules of blocks that were there in the trials, or are tried
        self._handles: list[Any] = []

    def __deepcopy__(self, memo: Any) -> MemberGuard:
        return MemberGuard()

    def start(self, model: nn.Module, blocks: Sequence[str]) -> None:
        """Remember what is in the blocks."""
        self._blocks = {path: model.get_submodule(path) for path in blocks}
        self._known = WeakSet(m for block in self._blocks.values() for m in block.modules())

    def remove(self) -> None:
        """No longer try what has come."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def check(self, model: nn.Module) -> bool:
        """True if modules have come, gone or moved since the last forward. ValueError names a trainable parameter that
        is not of the model that was parallelised."""
        # No loop in Python, as this is in every forward. Lists compare their items by identity first.
        is_first = not (self._holders or self._leaves)
        if not is_first and not any(self._leaves) and self._now() == self._children:
            return False
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and not isinstance(parameter, DTensor) and layout_of(parameter) is None:
                raise ValueError(
                    f"{name} has been added after fastpar.parallelize: its copies on the ranks of the tensor-parallel "
                    "group differ or will, and nothing sums the parts of its gradient. Change the model first, and "
                    "parallelize it then (adapters: get_peft_model(model, config), then parallelize); or "
                    "fastpar.unparallelize(model), change it, and parallelize again"
                )
        for path, block in self._blocks.items():
            for name, child in block.named_modules(prefix=path):
                if not any(m in self._known for m in child.modules()):  # else it wraps what was there
                    self._handles.append(child.register_forward_hook(self._trial(name, path), with_kwargs=True))
        children = [module._modules for module in model.modules()]
        self._holders, self._leaves = [c for c in children if c], [c for c in children if not c]
        self._children = self._now()
        return not is_first

    def _trial(self, name: str, block: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if module in self._known or torch.compiler.is_compiling():
                return
            if len(args) != 1 or kwargs or not _works_on_each_feature(module, args[0], output):
                raise ValueError(
                    f"{name} ({type(module).__name__}) has been put into the block {block!r} after "
                    "fastpar.parallelize. There it sees this rank's features, and it does not compute each of them by "
                    "itself: the result would depend on the layout. Change the model first, and parallelize it then; "
                    "or fastpar.unparallelize(model), change it, and parallelize again"
                )
            self._known.add(module)

        return hook

    def _now(self) -> list[Any]:
        return list(chain.from_iterable(map(dict.values, self._holders)))


@torch.no_grad()
def _works_on_each_feature(module: nn.Module, x: Any, output: Any) -> bool:
    """Whether of half of the features (numbers, in double) it makes half of the result."""
    if not isinstance(x, Tensor) or not isinstance(output, Tensor) or output.shape != x.shape:
        return False
    with same_generators(), torch.autocast(x.device.type, enabled=False):
        numbers = torch.rand(x.shape, dtype=torch.float64, device=x.device)
        half = x.size(-1) // 2
        try:
            whole, parts = (
                module.forward(numbers),
                [module.forward(part) for part in numbers.split([half, x.size(-1) - half], -1)],
            )
        except Exception:  # of the module's own code: any
            return False
    return torch.allclose(whole, torch.cat(parts, -1), rtol=1e-9, atol=1e-12)
