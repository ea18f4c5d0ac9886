"""What a model's own code decides by its ids, on a part that has none.

A later part gets hidden states in the place of the ids. `if (ids == MASK).any():` between two layers would go by those,
and in a trial on a few made-up ids most conditions are what they are on hidden states. So a part whose model asks is
tried once more with the answers turned: what nobody uses, or what raises as checks of ids do, is harmless.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

_READS = ("__bool__", "__int__", "__float__", "__index__", "item")
_MOST_TURNED = 100  # in a loop that goes on as long as a condition holds, it ends when the answers are its own again


class IdDecisions(TorchFunctionMode):
    """Numbers that the model's own code reads off what stands in the place of its ids on a later part: conditions and
    items. Code of units does not count: it works on what they are called with.

    is_turned   let them be others
    count       how many there were
    """

    def __init__(self, *, is_turned: bool) -> None:
        super().__init__()
        self.is_turned, self.count = is_turned, 0
        self._inside = 0
        self._of_ids: dict[int, Tensor] = {}  # by id, and kept, so that no other tensor gets it

    def watch(self, model: nn.Module, units: Iterable[str]) -> None:
        """Hooks on a copy of the model that runs next."""
        self._of_ids.clear()
        model.register_forward_pre_hook(self._begin)
        for path in units:
            unit = model.get_submodule(path)
            unit.register_forward_pre_hook(self._enter)
            unit.register_forward_hook(self._leave)

    def _begin(self, _module: nn.Module, args: tuple[Any, ...]) -> None:
        self._of_ids.update({id(x): x for x in args[:1] if isinstance(x, Tensor)})

    def _enter(self, *_: Any) -> None:
        self._inside += 1

    def _leave(self, *_: Any) -> None:
        self._inside -= 1

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if self._inside or not any(id(x) in self._of_ids for x in tree_leaves((args, kwargs))):
            return result
        if isinstance(result, bool | int | float) and getattr(function, "__name__", "") in _READS:
            self.count += 1
            if not self.is_turned or self.count > _MOST_TURNED:
                return result
            return not result if isinstance(result, bool) else result + 1
        self._of_ids.update({id(x): x for x in tree_leaves(result) if isinstance(x, Tensor)})
        return result
