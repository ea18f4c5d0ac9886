"""Styles that turn a linear, an embedding or an output head into a parallel layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from fastpar.arguments import checked_fields
from fastpar.parallel.styles.base import Style, SwapContext
from fastpar.tensor import (
    ColumnParallelLinear,
    GridLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
    prove_adoption,
)
from fastpar.tensor.linear import linear_weights
from fastpar.tensor.own_forward import check_parameters, has_hooks, has_own_forward


class LayerStyle(Style):
    """A style that puts a parallel layer of `fastpar.tensor` in the place of a module; `layer` says which."""

    def layer(self, path: str, module: nn.Module, context: SwapContext) -> tuple[type[Any], dict[str, Any]]:
        """The class of the parallel layer, and the options of its constructor."""
        raise NotImplementedError(f"{type(self).__name__} has no layer(path, module, context)")

    def check(self, path: str, module: nn.Module, context: SwapContext) -> None:
        try:
            check_parameters(module) if isinstance(module, nn.Embedding) else linear_weights(module)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{path} has style {self.name!r}: {error}") from None

    def check_on_grid(self, path: str, module: nn.Module, context: SwapContext) -> None:
        """Raise for a linear that a grid's layer cannot take the place of."""
        if has_own_forward(module) or has_hooks(module):
            raise TypeError(
                f"{path} is a {type(module).__module__}.{type(module).__qualname__} with a forward or hooks of its "
                "own, which a layer on a grid cannot keep: leave it out of the plan, or use tp without tp_grid"
            )
        if context.region_of(path) is None:
            raise ValueError(
                f"{path} has style {self.name!r}, but is in no layer that passes the residual stream on, and on a grid "
                'the stream is what is split: give such layers the style "stream", or use tp without tp_grid'
            )

    def prove(self, path: str, module: nn.Module, context: SwapContext) -> None:
        cls, options = self.layer(path, module, context)
        prove_adoption(path, module, cls, context.group, options)

    def apply(self, path: str, module: nn.Module, context: SwapContext) -> None:
        cls, options = self.layer(path, module, context)
        context.adopt(path, module, cls, self, **options)


@checked_fields
@dataclass(frozen=True)
class ColwiseStyle(LayerStyle):
    """A linear split by output features; its output stays split, or is gathered.

    sections       number of equal parts of a fused weight (3 for packed QKV, 2 for packed gate/up), or their sizes in
                   features; 1: not fused
    unit           features that must stay together on one rank, usually the head dim; None: `head_dim` of the module
                   around, if it has one, else 1
    gather_output  every rank gets the whole output; sections and unit are for outputs that stay split
    """

    sections: int | tuple[int, ...] = 1
    unit: int | None = None
    gather_output: bool = False

    @property
    def name(self) -> str:
        return super().name + ("_gather_output" if self.gather_output else "")

    def check(self, path: str, module: nn.Module, context: SwapContext) -> None:
        super().check(path, module, context)
        if context.grid is not None:
            _refuse(path, self.name, self.gather_output)
            self.check_on_grid(path, module, context)

    def layer(self, path: str, module: nn.Module, context: SwapContext) -> tuple[type[Any], dict[str, Any]]:
        if context.grid is not None:
            return GridLinear, _on_grid(path, "column", context) | {"rows": context.rows.get(path)}
        is_prepared = context.block_of(path) is not None  # the block gathers, or copies, its input for all inside
        options: dict[str, Any] = {"overlap": context.overlap, "gather_output": self.gather_output}
        options |= {"input_prepared": is_prepared, "sequence": None if is_prepared else context.region_of(path)}
        return ColumnParallelLinear, options | {"rows": None if self.gather_output else context.rows.get(path)}


@checked_fields
@dataclass(frozen=True)
class RowwiseStyle(LayerStyle):
    """A linear split by input features, which arrive split (or whole, with `split_input`); outputs are summed."""

    split_input: bool = False

    @property
    def name(self) -> str:
        return super().name + ("_split_input" if self.split_input else "")

    def check(self, path: str, module: nn.Module, context: SwapContext) -> None:
        super().check(path, module, context)
        if context.grid is not None:
            _refuse(path, self.name, self.split_input)
            self.check_on_grid(path, module, context)

    def layer(self, path: str, module: nn.Module, context: SwapContext) -> tuple[type[Any], dict[str, Any]]:
        if context.grid is not None:
            return GridLinear, _on_grid(path, "row", context)
        options = {"sequence": context.region_of(path), "overlap": context.overlap}
        return RowParallelLinear, options | {"input_is_parallel": not self.split_input}


@dataclass(frozen=True)
class VocabStyle(LayerStyle):
    """An embedding, or an output head, split over the vocabulary; logits stay split."""

    def check(self, path: str, module: nn.Module, context: SwapContext) -> None:
        if not isinstance(module, nn.Linear | nn.Embedding):
            got = type(module).__name__
            raise TypeError(f"{path} has style {self.name!r}: expected nn.Embedding or nn.Linear, got {got}")
        super().check(path, module, context)

    def layer(self, path: str, module: nn.Module, context: SwapContext) -> tuple[type[Any], dict[str, Any]]:
        if isinstance(module, nn.Embedding):
            return VocabParallelEmbedding, {}
        return VocabParallelHead, {"gather_output": context.gather_logits, "overlap": context.overlap}


def _refuse(path: str, name: str, wanted: bool) -> None:
    if wanted:
        raise ValueError(f"{path} has style {name!r}, which a grid does not have: use tp without tp_grid")


def _on_grid(path: str, role: str, context: SwapContext) -> dict[str, Any]:
    """Options of a `GridLinear`: between column- and row-parallel linears features are cut over x and y, tokens not."""
    is_prepared = role == "column" and context.block_of(path) is not None
    options: dict[str, Any] = {"role": role, "sequence": context.region_of(path), "overlap": context.overlap}
    return options | {"whole_sequences": True, "input_prepared": is_prepared}


def splits_features(style: Style | None) -> bool:
    """True for a linear that gives, or takes, a rank's own features."""
    if isinstance(style, ColwiseStyle):
        return not style.gather_output
    return isinstance(style, RowwiseStyle) and not style.split_input


def is_colwise(style: Style | None) -> bool:
    """True for a linear that gives a rank's own features."""
    return isinstance(style, ColwiseStyle) and not style.gather_output


def is_rowwise(style: Style | None) -> bool:
    """True for a linear that takes a rank's own features."""
    return isinstance(style, RowwiseStyle) and not style.split_input
