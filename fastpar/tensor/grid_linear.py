"""Linear layers on a tensor-parallel grid: 1D, 2D, 2.5D and 3D by the sizes of `fastpar.GridSpec`.

Y [M, N] = X [M, K] W [K, N]. Every matrix lies on a face of the grid and is spread over the third axis, from where it
is gathered or where it is summed to (Agarwal et al. 1995, "A three-dimensional approach to parallel matrix
multiplication"). With the features K over axis k, N over axis n, the tokens M over z:

    forward  Y  = reduce_scatter_k(gather_n(X) gather_z(W))
    dgrad    dX = reduce_scatter_n(gather_k(dY) gather_z(W).T)
    wgrad    dW = reduce_scatter_z(gather_n(X).T gather_k(dY))

Words that a rank sends, with A = (1 - 1/n) MK / (zk), B = (1 - 1/z) KN / (kn), C = (1 - 1/k) MN / (zn): A + B + C in
forward, 2A + B + C in backward: X is gathered again there, W is kept from forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fastpar.arguments import checked
from fastpar.comm import (
    Communicator,
    copy_to,
    gather_sequence,
    reduce_from,
    reduce_scatter_sequence,
    scatter_to,
    shard_sizes,
)
from fastpar.comm.shards import check_is_tensor
from fastpar.ops.parallel_linear.api import (
    all_gather_linear,
    copy_to_linear,
    linear_all_reduce,
    linear_reduce_scatter,
)
from fastpar.ops.parallel_linear.overlap import Overlap
from fastpar.tensor.binding import blank
from fastpar.tensor.grid import Grid, GridRegion
from fastpar.tensor.grid_layout import AxisCut, GridLayout, cut_over
from fastpar.tensor.linear import linear_weights
from fastpar.tensor.own_forward import refuse_own_forward
from fastpar.tensor.parameter import ParallelModule, RowMap, install_state_dict_hooks


class GridLinear(ParallelModule):
    """A linear layer on a grid of x by y by z ranks. Made by `from_linear`.

    role "column" has K over x and N over y, "row" K over y and N over x; with spread="features" both have K and N over
    y. B is cut over z. What lies on this rank:

                    weight            x                   out
        rows        [N_n, K_k / z]    [B_z, S_n, K_k]     [B_z, S_k, N_n]
        copy        [N_n, K_k / z]    [B_z, S, K_k]       [B_z, S, N_n]
        features    [N_y, K / z]      [B_z, S, K_y]       [B_z, S, N_y]
        bias        [N_n]             by `torch.chunk`'s rule, each of them

    With `whole_sequences` the output of a column-parallel layer is [B_z, S, N_xy], and the input of a row-parallel one
    [B_z, S, K_xy]: all tokens, features over y and then x. So attention between the two has whole sequences of
    heads / (x y) heads, and no axis computes the same twice. `unit` is the number of features that stay together then,
    the size of a head.

        forward, dgrad, wgrad    as the module's note says; copy: all-reduce where it has a reduce-scatter, no gather
        dbias                    dY.sum(0), all-reduced over z, and over k where that cuts tokens after the sum

    Collectives of one call: weight all-gather over z; x all-gather over n, or none with "copy"; out reduce-scatter over
    k ("copy": all-reduce). In backward: x again, out's all-gather over k, reduce-scatters of dx over n and dweight over
    z, all-reduce of dweight over replicas; those over an axis of one rank are left out. A grid (1, p, 1) is
    `ColumnParallelLinear` and `RowParallelLinear` with sequence parallelism, bit for bit.

    Parameters are DTensors over the mesh dims (tp_x, tp_y, tp_d, tp_z); state dicts are those of the layer it replaces.
    Without a `sequence` the tokens (dim -2) are cut evenly.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    overlap: Overlap

    @classmethod
    @checked(computed=False)
    def from_linear(
        cls,
        linear: nn.Module,
        grid: Grid,
        role: Literal["column", "row"],
        *,
        sections: Sequence[int] | None = None,
        sequence: GridRegion | None = None,
        whole_sequences: bool = False,
        unit: int = 1,
        overlap: bool | Overlap = True,
    ) -> GridLinear:
        """A layer on the grid with the weights of `linear` (an `nn.Linear`, or Hugging Face's Conv1D).

        sections  sizes of a fused weight's parts along N, as of [q; k; v], each cut on its own (only "column")

        Raises TypeError for another module; ValueError for sections that do not add up or do not divide, and for heads
        (N or K / unit) that x * y does not divide where sequences are whole.
        """
        refuse_own_forward(linear)
        layer: GridLinear = blank(cls)
        layer._configure(linear, grid, role, sections, sequence)
        layer._set_sequences(whole_sequences, unit, sections)
        layer.overlap = Overlap.of(overlap)
        layer.train(linear.training)
        return layer

    def _configure(
        self, source: nn.Module, grid: Grid, role: str, sections: Sequence[int] | None, sequence: GridRegion | None
    ) -> None:
        weight, bias, self.transposed = linear_weights(source)
        self.grid, self.role, self.sequence, self.spread = grid, role, sequence, grid.spec.spread
        self.out_features, self.in_features = weight.shape[::-1] if self.transposed else weight.shape
        if sections is not None and role != "column":
            raise ValueError("sections cut the output of a column-parallel layer; role is 'row'")
        if sections is not None and sum(sections) != self.out_features:
            raise ValueError(
                f"sections {tuple(sections)} add up to {sum(sections)}, but the layer has {self.out_features} outputs"
            )
        k, n = self._axes()
        out, into = (1, 0) if self.transposed else (0, 1)
        rows = None if sections is None else RowMap.packed(sections, n.size)
        if rows is not None and rows.kind == "whole":
            raise ValueError(f"sections {tuple(sections or ())} must be divisible by the {n.size} ranks of an axis")
        # z last, so that gathering over it gives what the product takes.
        cuts = {3: AxisCut(grid.z, into), self._index(n): AxisCut(n, out, rows)}
        if k.size > 1:
            cuts[self._index(k)] = AxisCut(k, into)
        self._z_sizes = shard_sizes(shard_sizes(self.in_features, k.size)[k.rank], grid.z.size)
        layouts: Any = {"weight": GridLayout(grid.mesh, weight.shape, cut_over(grid.along, cuts))}
        bias_cuts = cut_over(grid.along, {self._index(n): AxisCut(n, 0, rows)})
        layouts["bias"] = GridLayout(grid.mesh, torch.Size([self.out_features]), bias_cuts)
        for name, full in (("weight", weight), ("bias", bias)):
            self._add_parameter(name, full, layouts[name])
        self._state_handles = install_state_dict_hooks(self)

    def _set_sequences(self, whole: bool, unit: int, sections: Sequence[int] | None) -> None:
        """How attention's side of the layer lies: `_head_sizes` are the features of each rank of x, of those over y."""
        self.whole_sequences, x, y = whole, self.grid.x, self.grid.y
        features = self.out_features if self.role == "column" else self.in_features
        self._head_sizes: list[int] | None = None
        if not whole or x.size == 1:
            return
        if sections is not None:
            raise ValueError("fused weights cannot be cut over x and y by heads: leave sections or whole_sequences out")
        if unit < 1 or features % unit:
            raise ValueError(f"unit must divide the {features} features, got {unit}")
        if features // unit % (x.size * y.size):
            raise ValueError(
                f"{features // unit} heads must be divisible by tp_x * tp_y ({x.size} * {y.size}); "
                f"grids of {self.grid.spec.ranks} ranks that work: {_grids_for(features // unit, self.grid.spec.ranks)}"
            )
        self._head_sizes = [features // (x.size * y.size)] * x.size

    def _axes(self) -> tuple[Communicator, Communicator]:
        """(k, n): the axes over which K and N are cut."""
        if self.spread == "features":
            return Communicator(None), self.grid.y
        pair = (self.grid.x, self.grid.y)
        return pair if self.role == "column" else pair[::-1]

    def _index(self, axis: Communicator) -> int:
        """Of the mesh's dim."""
        return next(index for index, comm in enumerate(self.grid.along) if comm is axis)

    def forward(self, x: Tensor) -> Tensor:
        check_is_tensor(x)
        self._check_features(x)
        k, _ = self._axes()
        weight, bias = self._gathered_weight(), self._summed_bias()
        if k.size == 1:
            return self._product(x, weight, bias)
        if self._sums_with_product():
            return self._product_summed(x, weight, bias, k)
        return self._scattered(self._product(x, weight, None), bias, k)

    def _gathered_weight(self) -> Tensor:
        """[N_n, K_k]: this rank's part and those of the other ranks of z. dweight: summed, and back to the parts."""
        local = self._local("weight")
        assert local is not None
        weight = copy_to(local, self.grid.replicas)
        weight = gather_sequence(weight, self.grid.z, dim=0 if self.transposed else 1, sizes=self._z_sizes)
        return weight.t() if self.transposed else weight

    def _summed_bias(self) -> Tensor | None:
        """The bias, whose gradient is summed over the ranks that have other sequences."""
        bias = self._local("bias")
        if bias is None:
            return None
        return copy_to(copy_to(bias, self.grid.replicas), self.grid.z).to(self.weight.dtype)

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """gather_n(x) @ weight.T: of all tokens of the z part, a partial sum where k has several ranks."""
        _, n = self._axes()
        if self.spread == "features" or self._takes_heads():
            sizes = self._head_sizes if self._takes_heads() else shard_sizes(self.in_features, n.size)
            return all_gather_linear(x, weight, bias, group=n, dim=-1, sizes=sizes, overlap=self.overlap)
        if self.spread == "copy":
            return copy_to_linear(x, weight, bias, group=n, overlap=self.overlap)
        dim = self._token_dim(x)
        tokens = [x.size(dim)] * n.size if self.sequence is None else self.sequence.token_sizes(n)
        return all_gather_linear(x, weight, bias, group=n, dim=dim, sizes=tokens, overlap=self.overlap)

    def _sums_with_product(self) -> bool:
        """Whether product and sum over k are one op, whose communication overlaps: where x is not gathered."""
        return self._axes()[1].size == 1 and not self._gives_heads()

    def _product_summed(self, x: Tensor, weight: Tensor, bias: Tensor | None, k: Communicator) -> Tensor:
        if self.spread == "copy":
            return linear_all_reduce(x, weight, bias, group=k, overlap=self.overlap)
        dim = self._token_dim(x)
        tokens = self._out_tokens(x.size(dim), k)
        return linear_reduce_scatter(x, weight, bias, group=k, dim=dim, sizes=tokens, overlap=self.overlap)

    def _scattered(self, out: Tensor, bias: Tensor | None, k: Communicator) -> Tensor:
        """Partial sums of all tokens to this rank's part of their sum over k, with the bias."""
        if self._gives_heads():
            out = reduce_scatter_sequence(out, k, dim=-1, sizes=self._head_sizes)
            return _plus(out, None if bias is None else scatter_to(bias, k, dim=0, sizes=self._head_sizes))
        if self.spread == "copy":
            return _plus(reduce_from(out, k), bias)
        dim = self._token_dim(out)
        out = reduce_scatter_sequence(out, k, dim=dim, sizes=self._out_tokens(out.size(dim), k))
        # Each rank of k adds it to tokens of its own.
        return _plus(out, None if bias is None else copy_to(bias, k))

    def _takes_heads(self) -> bool:
        return self._head_sizes is not None and self.role == "row"

    def _gives_heads(self) -> bool:
        return self._head_sizes is not None and self.role == "column"

    def _token_dim(self, x: Tensor) -> int:
        return x.dim() - 2 if self.sequence is None else self.sequence.dim

    def _out_tokens(self, tokens: int, k: Communicator) -> list[int]:
        if self.sequence is None:
            if tokens % k.size:
                raise ValueError(
                    f"{tokens} tokens cannot be cut evenly over the {k.size} ranks of an axis: pass sequence=GridRegion"
                )
            return [tokens // k.size] * k.size
        return self.sequence.token_sizes(k)

    def _check_features(self, x: Tensor) -> None:
        k, n = self._axes()
        over = n if self.spread == "features" else k
        expected = shard_sizes(self.in_features, over.size)[over.rank]
        if self._takes_heads() and self._head_sizes:
            expected = self._head_sizes[n.rank]
        if x.dim() < 2 or x.size(-1) != expected:
            raise ValueError(
                f"x has shape {tuple(x.shape)}; this rank of the grid takes [.., tokens, {expected}], "
                f"its part of the {self.in_features} input features"
            )

    def extra_repr(self) -> str:
        spec = self.grid.spec
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"{self.role} on grid ({spec.x}, {spec.y}, {spec.z}), spread={spec.spread!r}"
        )


def _plus(out: Tensor, bias: Tensor | None) -> Tensor:
    return out if bias is None else out + bias.to(out.dtype)  # which autocast has chosen


def _grids_for(heads: int, ranks: int) -> str:
    """Sizes (x, y, z) of the grids of as many ranks whose x * y divides the heads."""
    found = [
        (x, y, ranks // (x * y))
        for x in range(1, ranks + 1)
        for y in range(1, ranks + 1)
        if ranks % (x * y) == 0 and heads % (x * y) == 0
    ]
    return ", ".join(map(str, found[:6]))
