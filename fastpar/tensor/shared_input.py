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
from typing import TYPE_CHECKING

from torch import Tensor

from fastpar.comm import Communicator, copy_to
from fastpar.contracts.linear import autocast_dtype
from fastpar.ops.parallel_linear.api import copy_to_linear, gathered_and_linear
from fastpar.ops.parallel_linear.overlap import Overlap
from fastpar.tensor.sequence import SequenceRegion, splitting

if TYPE_CHECKING:
    from fastpar.tensor.linear import ColumnParallelLinear


class SharedInput:
    """What the column-parallel layers of one block share; `layers` are in the order of the block.

    x       [..., K]       the same on every rank, or this rank's tokens with `sequence`
    enter   [..., K]       all tokens; call it where the block begins, `leave` where it ends
    take    [..., N_n]     a layer's output, prepared by `enter`
    """

    def __init__(
        self,
        comm: Communicator,
        layers: Sequence[ColumnParallelLinear],
        *,
        sequence: SequenceRegion | None = None,
        overlap: bool | Overlap = True,
    ):
        self.comm, self.layers, self.sequence, self.overlap = comm, list(layers), sequence, Overlap.of(overlap)
        self._input: Tensor | None = None
        self._outputs: dict[int, Tensor] = {}
        for layer in self.layers:
            layer.shared_input = self

    def enter(self, x: Tensor) -> Tensor:
        """Gather (or copy) x and compute what the layers make of it. Returns the whole x."""
        layers = [layer for layer in self.layers if layer.in_features == x.size(-1)]
        if splitting(self.sequence) is None:
            whole, outs = copy_to(x, self.comm), self._copied(x, layers)
        elif self.sequence is not None and (not layers or autocast_dtype(x) not in (None, x.dtype)):
            whole, outs = self.sequence.gather(x), ()  # autocast would round what the block's other modules see
        else:
            whole, outs = self._gathered(x, layers)
        self._input = whole
        self._outputs = {id(layer): out for layer, out in zip(layers, outs, strict=False)}
        return whole

    def take(self, layer: ColumnParallelLinear, x: Tensor) -> Tensor | None:
        """The output of `layer` for x, once, if x is what `enter` returned."""
        return self._outputs.pop(id(layer), None) if x is self._input else None

    def leave(self) -> None:
        """Forget what was not taken."""
        self._input, self._outputs = None, {}

    def _copied(self, x: Tensor, layers: Sequence[ColumnParallelLinear]) -> tuple[Tensor, ...]:
        if not layers:
            return ()
        weights, biases, features = _parameters(layers)
        return copy_to_linear(x, weights, biases, group=self.comm, overlap=self.overlap, features=features)

    def _gathered(self, x: Tensor, layers: Sequence[ColumnParallelLinear]) -> tuple[Tensor, tuple[Tensor, ...]]:
        assert self.sequence is not None
        self.sequence.check_shard(x)
        weights, biases, features = _parameters(layers)
        return gathered_and_linear(
            x,
            weights,
            biases,
            group=self.comm,
            dim=self.sequence.dim,
            sizes=self.sequence.sizes,
            overlap=self.overlap,
            features=features,
        )


def _parameters(layers: Sequence[ColumnParallelLinear]) -> tuple[list[Tensor], list[Tensor | None], int]:
    """Weights as [N, K], biases, and the output features of all ranks together."""
    weights = []
    for layer in layers:
        weight = layer._local("weight")
        assert weight is not None
        weights.append(weight.t() if layer.transposed else weight)
    return weights, [layer._local("bias") for layer in layers], sum(layer.out_features for layer in layers)
