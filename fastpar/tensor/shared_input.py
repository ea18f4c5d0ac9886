"""The input of a tensor-parallel block, gathered or copied once for all column-parallel layers that read it.

A block (attention, MLP) hands one tensor to several projections: queries, keys and values, or gate and up. Each alone
would gather it again, and send its own share of the input's gradient. Here one op computes them together where the
block begins: one gather in forward, one sum of the added shares in backward, which travels while the gradients of all
the projections' weights are computed.

Note: how the outputs reach the projections. The block's own code calls its projections one by one, each with the tensor
that `enter` returned. A projection that is called with this very object takes its prepared output; called with anything
else, or a second time, it computes. So a wrong guess at what a block does costs time and is never wrong: the tensor
that `enter` returns is differentiable itself, and anything may be computed from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from fastpar.comm import Communicator, copy_to
from fastpar.contracts.linear import autocast_dtype
from fastpar.ops.parallel_linear.api import LayerCalls, LinearSizes, copy_to_linear, gathered_and_linear, is_plain
from fastpar.ops.parallel_linear.autograd import ALL_GATHER_LINEAR, COPY_TO_LINEAR, apply
from fastpar.ops.parallel_linear.overlap import Overlap
from fastpar.ops.weight_grad_store.store import current_store
from fastpar.tensor.sequence import SequenceRegion, splitting


class InputLayer(Protocol):
    """What a `ColumnParallelLinear` is to its block."""

    in_features: int
    out_features: int
    transposed: bool
    shared_input: Any

    def _local(self, name: str) -> Tensor | None: ...

    def sharded_operands(self) -> tuple[Any, Any] | None: ...


class SharedInput:
    """What the column-parallel layers of one block share; `layers` are in the order of the block.

    x       [..., K]       the same on every rank, or this rank's tokens with `sequence`
    enter   [..., K]       all tokens; call it where the block begins, `leave` where it ends
    take    [..., N_n]     a layer's output, prepared by `enter`
    """

    def __init__(
        self,
        comm: Communicator,
        layers: Sequence[InputLayer],
        *,
        sequence: SequenceRegion | None = None,
        overlap: bool | Overlap = True,
    ):
        self.comm, self.layers, self.sequence, self.overlap = comm, list(layers), sequence, Overlap.of(overlap)
        self._input: Tensor | None = None
        self._outputs: dict[int, Tensor] = {}
        widths = {layer.in_features for layer in self.layers}
        self._width = widths.pop() if len(widths) == 1 else None  # of all layers, where it is the same
        sizes = LinearSizes(self._width or 0, sum(layer.out_features for layer in self.layers))
        calls = (LayerCalls(spec, comm, sizes) for spec in (COPY_TO_LINEAR, ALL_GATHER_LINEAR))
        self._whole_calls, self._split_calls = calls
        for layer in self.layers:
            layer.shared_input = self

    def enter(self, x: Tensor) -> Tensor:
        """Gather (or copy) x and compute what the layers make of it. Returns the whole x."""
        weights, biases = self._sharded(x)
        layers: Sequence[InputLayer] = self.layers
        region = splitting(self.sequence)
        if weights:
            if region is not None:
                region.check_shard(x)
            if region is None:
                call = self._whole_calls.of(x, self.overlap)
            else:
                call = self._split_calls.of(x, self.overlap, region.dim, region.sizes)
            *outs, whole = apply(call, x, weights, biases, keep=True, sharded=True)
        else:
            layers = [layer for layer in layers if layer.in_features == x.size(-1)]
            whole, outs = self._checked(x, layers, region)
        self._input = whole
        self._outputs = {id(layer): out for layer, out in zip(layers, outs, strict=False)}
        return whole

    def _sharded(self, x: Tensor) -> tuple[list[Tensor], list[Tensor | None]]:
        """Weights and biases of all layers as DTensors; none where one of them has to be unwrapped, or x checked."""
        weights: list[Tensor] = []
        biases: list[Tensor | None] = []
        for layer in self.layers if self._width is not None else ():
            operands = layer.sharded_operands()
            if operands is None or operands[0].dtype is not x.dtype:
                return [], []
            weights.append(operands[0])
            biases.append(operands[1])
        return (weights, biases) if weights and takes_shortcut(x, weights[0], self._width) else ([], [])

    def _checked(
        self, x: Tensor, layers: Sequence[InputLayer], region: SequenceRegion | None
    ) -> tuple[Tensor, list[Tensor]]:
        """The whole x and the outputs of `layers`, by the public ops."""
        if region is None:
            return copy_to(x, self.comm), list(self._copied(x, layers))
        if not layers or autocast_dtype(x) not in (None, x.dtype):
            return region.gather(x), []  # autocast would round what the block's other modules see
        whole, outs = self._gathered(x, layers, region)
        return whole, list(outs)

    def take(self, layer: InputLayer, x: Tensor) -> Tensor | None:
        """The output of `layer` for x, once, if x is what `enter` returned."""
        return self._outputs.pop(id(layer), None) if x is self._input else None

    def leave(self) -> None:
        """Forget what was not taken."""
        self._input, self._outputs = None, {}

    def _copied(self, x: Tensor, layers: Sequence[InputLayer]) -> tuple[Tensor, ...]:
        if not layers:
            return ()
        weights, biases, features = _parameters(layers)
        return tuple(copy_to_linear(x, weights, biases, group=self.comm, overlap=self.overlap, features=features))

    def _gathered(
        self, x: Tensor, layers: Sequence[InputLayer], region: SequenceRegion
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        region.check_shard(x)
        weights, biases, features = _parameters(layers)
        options: dict[str, Any] = {"group": self.comm, "overlap": self.overlap, "features": features}
        return gathered_and_linear(x, weights, biases, dim=region.dim, sizes=region.sizes, **options)


def takes_shortcut(x: Tensor, weight: Any, width: int | None) -> bool:
    """Whether a linear may take x [..., width] unchecked and the DTensors of its layer as they are.

    Not under torch.compile, nor where weight gradients are deferred, which goes by the unwrapped weight.
    """
    return current_store() is None and not torch.compiler.is_compiling() and is_plain(x, weight._local_tensor, width)


def _parameters(layers: Sequence[InputLayer]) -> tuple[list[Tensor], list[Tensor | None], int]:
    """Weights as [N, K], biases, and the output features of all ranks together."""
    weights = []
    for layer in layers:
        weight = layer._local("weight")
        assert weight is not None
        weights.append(weight.t() if layer.transposed else weight)
    return weights, [layer._local("bias") for layer in layers], sum(layer.out_features for layer in layers)
