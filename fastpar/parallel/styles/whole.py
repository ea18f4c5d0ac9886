"""Styles of modules and parameters that every rank has whole, and of parameters with a row per head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from torch import nn

from fastpar.arguments import checked_fields
from fastpar.comm import Communicator
from fastpar.parallel.styles.base import Style, SwapContext
from fastpar.parallel.styles.linear import is_colwise
from fastpar.tensor import Adoption, GridRegion, LayoutDropout
from fastpar.tensor.own_forward import runs_forward_of
from fastpar.tensor.sequence import hook_output, hook_stream


@dataclass(frozen=True)
class ReplicateStyle(Style):
    """Parameters whole on every rank; every rank computes the same gradient."""

    def check_parameter(self, path: str, context: SwapContext) -> None:
        pass

    def apply(self, path: str, module: nn.Module, context: SwapContext) -> None:
        # Inside a block this runs after the sum: on this rank's part of the sequence, if it is split.
        keep_whole(path, module, context, is_part=context.region_of(path) is not None)

    def sums_gradient(self, path: str, context: SwapContext) -> bool:
        return context.region_of(path.rpartition(".")[0]) is not None


@dataclass(frozen=True)
class PartialStyle(Style):
    """Parameters whole on every rank; each rank computes a part of the gradient, and the parts are summed."""

    def check(self, path: str, module: nn.Module, context: SwapContext) -> None:
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.num_features > 1:
            raise ValueError(
                f"{path} ({type(module).__name__}) has style 'partial' in a block, where a rank has some of the "
                f"features or heads only, and normalises all {module.num_features} by their own statistics: there is "
                "no split form. Leave the block out of the plan, or put the norm behind it"
            )

    def check_parameter(self, path: str, context: SwapContext) -> None:
        pass

    def apply(self, path: str, module: nn.Module, context: SwapContext) -> None:
        keep_whole(path, module, context, is_part=True, by_head=True)

    def sums_gradient(self, path: str, context: SwapContext) -> bool:
        return True


@dataclass(frozen=True)
class HeadsStyle(Style):
    """A parameter with a row per attention head, split by head."""

    def check(self, path: str, module: nn.Module, context: SwapContext) -> None:
        raise TypeError(f"{path} has style 'heads', which is for a parameter; it is a {type(module).__name__}")

    def check_parameter(self, path: str, context: SwapContext) -> None:
        columns = {p.rpartition(".")[0] for p, style in context.styles.items() if is_colwise(style)}
        if not any(path.startswith(f"{parent}.") for parent in columns):
            raise ValueError(f"{path} has style 'heads', but no module around it has 'colwise' linears with heads")

    def sums_gradient(self, path: str, context: SwapContext) -> bool:
        return context.region_of(path.rpartition(".")[0]) is not None


@checked_fields
@dataclass(frozen=True)
class WholeStyle(Style):
    """A module left as it is; with sequence parallelism it works on this rank's tokens, each by itself.

    note         said by `fastpar.explain`
    is_fallback  the plan "auto" would have split it, and has not been able to
    """

    note: str = ""
    is_fallback: bool = False

    keeps_module = True
    handles_sequence = True

    def apply(self, path: str, module: nn.Module, context: SwapContext) -> None:
        context.explain(path, self, note=self.note)


@checked_fields
@dataclass(frozen=True)
class GatheredStyle(WholeStyle):
    """A module left as it is, on all tokens: sequence parallelism gathers its input and cuts its output."""

    def apply(self, path: str, module: nn.Module, context: SwapContext) -> None:
        outside = context.region_around(path)
        if outside is not None:
            leave: Any = outside.leave
            enter: Any = outside.enter
            if isinstance(outside, GridRegion):  # the batch stays cut: masks and positions are
                leave, enter = outside.leave_tokens, outside.enter_tokens
            context.changes.hooked(hook_stream(module, leave), hook_output(module, enter))
        super().apply(path, module, context)


@dataclass(frozen=True)
class DropoutStyle(Style):
    """Dropout on the residual stream, or wherever its tensor is whole: the mask goes by the global position."""

    def check(self, path: str, module: nn.Module, context: SwapContext) -> None:
        if not runs_forward_of(module, nn.Dropout):
            raise TypeError(f"{path} has style 'dropout': expected nn.Dropout, got {type(module).__name__}")

    def apply(self, path: str, module: nn.Module, context: SwapContext) -> None:
        assert isinstance(module, nn.Dropout)
        context.changes.adopted(Adoption(module, LayoutDropout))
        cast(Any, module)._configure(module.p, sequence=context.region_of(path), batch=context.batch)
        context.explain(path, self, note="mask by global position")


def apply_default(path: str, module: nn.Module, context: SwapContext) -> None:
    """A module that the plan leaves out stays whole; dropout outside blocks gets masks that no layout changes."""
    in_block = context.block_of(path) is not None
    if runs_forward_of(module, nn.Dropout) and not in_block:
        DropoutStyle().apply(path, module, context)
    elif any(p is not None for p in module._parameters.values()):
        is_part = context.region_of(path) is not None and not in_block and path not in context.blocks
        keep_whole(path, module, context, is_part=is_part)


def keep_whole(path: str, module: nn.Module, context: SwapContext, *, is_part: bool, by_head: bool = False) -> None:
    """Keep a module's own parameters whole, but for those with a style of their own.

    is_part   a rank's gradient of the others is a part, to be summed
    by_head   because it works on split heads or features, and not on a part of the stream
    """
    own: Mapping[str, Style | None] = {
        name: context.parameter_styles.get(f"{path}.{name}") for name in module._parameters
    }
    rows = {name: context.rows[f"{path}.{name}"] for name, style in own.items() if isinstance(style, HeadsStyle)}
    summed = {
        name
        for name, style in own.items()
        if (is_part if style is None else style.sums_gradient(f"{path}.{name}", context))
    }
    axes = None
    if context.grid is not None:
        axes = {
            name: _axes_of(path, context, by_head=by_head if style is None else isinstance(style, PartialStyle))
            for name, style in own.items()
        }
        axes |= dict.fromkeys(rows, context.grid.along)
        summed = {name for name, over in axes.items() if over}
    context.replicate(path, module, style=ReplicateStyle(), sum_grad=summed, rows=rows, axes=axes)


def _axes_of(path: str, context: SwapContext, *, by_head: bool) -> tuple[Communicator, ...]:
    """The axes of a grid over which the ranks' gradients of a whole parameter are parts of its own."""
    grid = context.grid
    if grid is None or context.region_around(path) is None:
        return ()
    if context.region_of(path) is None:  # on all tokens and features of the z part's sequences
        return grid.replicas, grid.z
    if by_head or grid.spec.spread != "copy":
        return grid.along
    return grid.x, grid.replicas, grid.z  # ranks of y have copies of the stream
