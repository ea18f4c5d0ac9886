"""Styles of the modules that hold others: blocks between two sums, and layers that pass the residual stream on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from fastpar.arguments import checked_fields
from fastpar.parallel.styles.base import Style, SwapContext
from fastpar.tensor import ColumnParallelLinear, GridLinear, GridRegion, SharedInput
from fastpar.tensor.grid_linear import GridBlockInput
from fastpar.tensor.sequence import map_hidden

_SHARED = "_fastpar_shared_input"


@checked_fields
@dataclass(frozen=True)
class BlockStyle(Style):
    """A module between two sums: its hidden input is gathered (sequence parallelism) or copied, once for all inside.

    local   attributes of the module that count heads or features, to be divided by the group, beside those that are
            known by their names (`num_heads` and its like)
    is_tried  split so, it was found to compute the same as whole: said by plan="auto" of what it has run
    """

    local: tuple[str, ...] = ()
    is_tried: bool = field(default=False, compare=False)

    keeps_module = True
    handles_sequence = True

    def apply(self, path: str, module: nn.Module, context: SwapContext) -> None:
        region, changes = context.region_of(path), context.changes
        inside = [child for name, child in context.modules.items() if context.block_of(name) == path]
        layers: list[Any] = [child for child in dict.fromkeys(inside) if _reads_input(child)]
        for layer in layers:
            changes.set(layer, "shared_input", None)  # so that `SharedInput`, which sets it, is undone
        if isinstance(region, GridRegion):
            shared: Any = GridBlockInput(layers, sequence=region, overlap=context.overlap.enabled)
        else:
            shared = SharedInput(context.comm, layers, sequence=region, overlap=context.overlap)
        changes.set(module, _SHARED, shared)
        # Through the module and not bound to the SharedInput: a copied model has one of its own layers.
        changes.hooked(module.register_forward_pre_hook(_enter, with_kwargs=True))
        changes.hooked(module.register_forward_hook(_leave, always_call=True))
        once = "input broadcast once, in blocks" if context.streams_blocks else "input gathered once"
        context.explain(path, self, note=once if region else "input gradient summed once")


@dataclass(frozen=True)
class StreamStyle(Style):
    """Layers that pass the residual stream on; sequence parallelism splits it from the first to the last."""

    keeps_module = True

    def apply(self, path: str, module: nn.Module, context: SwapContext) -> None:
        pass  # where the stream begins and ends is seen from all of its layers: `fastpar.parallel.swap`


def _reads_input(layer: nn.Module) -> bool:
    return isinstance(layer, ColumnParallelLinear) or (isinstance(layer, GridLinear) and layer.role == "column")


def _enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return map_hidden(args, kwargs, getattr(module, _SHARED).enter)


def _leave(module: nn.Module, _args: tuple[Any, ...], _output: Any) -> None:
    getattr(module, _SHARED).leave()
