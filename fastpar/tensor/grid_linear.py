"""Linear layers on a tensor-parallel grid: 1D, 2D, 2.5D and 3D by the sizes of `fastpar.GridSpec`.

Y [M, N] = X [M, K] W [K, N]. Every matrix lies on a face of the grid and is spread over the third axis, from where it
is gathered or where it is summed to. With the features K over axis k, N over axis n, the tokens M over z:

    forward  Y  = reduce_scatter_k(gather_n(X) gather_z(W))
    dgrad    dX = reduce_scatter_n(gather_k(dY) gather_z(W).T)
    wgrad    dW = reduce_scatter_z(gather_n(X).T gather_k(dY))

`fastpar.ops.grid_linear` computes it: what is sent, and behind which product. With `stream` the blocks of K are
broadcast one after the other in the place of gathers: `fastpar.ops.summa`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastpar.arguments import checked
from fastpar.comm import Communicator, copy_to, gather_from, gather_sequence, scatter_to, shard_sizes
from fastpar.comm.shards import check_is_tensor
from fastpar.ops.grid_linear import GridCall, GridSpread, grid_linear
from fastpar.ops.parallel_linear.overlap import Overlap
from fastpar.tensor.binding import blank
from fastpar.tensor.grid import Grid, GridRegion
from fastpar.tensor.grid_blocks import outside_of_graphs
from fastpar.tensor.grid_layout import AxisCut, GridLayout
from fastpar.tensor.linear import linear_weights
from fastpar.tensor.own_forward import refuse_own_forward
from fastpar.tensor.parameter import MakeParameter, ParallelModule, RowMap, install_state_dict_hooks


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
        dbias                    gather_k(dY).sum(0), all-reduced over z and replicas

    Collectives of one call: weight all-gather over z; x all-gather over n, or none with "copy"; out reduce-scatter over
    k ("copy": all-reduce). In backward: weight and x again, out's all-gather over k, reduce-scatters of dx over n and
    dweight over z, all-reduce of dweight over replicas; those over an axis of one rank are left out. Saved for backward
    are this rank's parts of x and weight. A grid (1, p, 1) is `ColumnParallelLinear` and `RowParallelLinear` with
    sequence parallelism, bit for bit.

    With `stream` (spread="features", y = z / replicas = q): q broadcasts of blocks of x over y and of the weight over
    z, as many bytes as the gathers; in backward q broadcasts and reduces for dx, q for dweight. A block and the next
    one are in memory, 2 / q of what gathers make. What differs between ranks is raised on all of the grid.

    Parameters are DTensors over `Grid.mesh`, z last; state dicts are those of the layer it replaces.
    Rows that ranks of y share (key/value heads fewer than ranks, sections that do not divide) are stored by all of
    them. Without a `sequence` the tokens (dim -2) are cut evenly.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    overlap: Overlap
    shared_input: GridBlockInput | None

    @classmethod
    @checked(computed=False)
    def from_linear(
        cls,
        linear: nn.Module,
        grid: Grid,
        role: Literal["column", "row"],
        *,
        sections: Sequence[int] | None = None,
        rows: RowMap | None = None,
        sequence: GridRegion | None = None,
        whole_sequences: bool = False,
        unit: int = 1,
        overlap: bool | Overlap = True,
        stream: bool | None = None,
    ) -> GridLinear:
        """A layer on the grid with the weights of `linear` (an `nn.Linear`, or Hugging Face's Conv1D).

        sections  sizes of a fused weight's parts along N, as of [q; k; v], each cut on its own (only "column")
        rows      the output features of each of the x y ranks that share them, x within y (only "column", and with
                  several ranks on x only between `whole_sequences`)
        stream    whether blocks of K are broadcast one after the other; None: as the grid's `GridSpec` says

        Raises TypeError for another module; ValueError for sections that do not add up or, without `whole_sequences`,
        do not divide, for heads (N or K / unit) that x * y does not divide where sequences are whole, and for stream on
        a grid that cannot (`GridSpec.check_stream`).
        """
        refuse_own_forward(linear)
        layer: GridLinear = blank(cls)
        options: dict[str, Any] = {"sections": sections, "rows": rows, "unit": unit, "overlap": overlap}
        options["stream"] = stream
        layer._configure(linear, grid, role=role, sequence=sequence, whole_sequences=whole_sequences, **options)
        layer.train(linear.training)
        return layer

    def _configure(
        self,
        source: nn.Module,
        grid: Grid,
        *,
        role: str,
        sections: Sequence[int] | None = None,
        rows: RowMap | None = None,
        sequence: GridRegion | None = None,
        whole_sequences: bool = False,
        unit: int = 1,
        input_prepared: bool = False,
        overlap: bool | Overlap = True,
        stream: bool | None = None,
        parameters: MakeParameter | None = None,
    ) -> None:
        self.stream = grid.spec.stream if stream is None else stream
        if self.stream:
            grid.spec.check_stream()
        weight, bias, self.transposed = linear_weights(source)
        self.grid, self.role, self.sequence, self.spread = grid, role, sequence, grid.spec.spread
        self.overlap, self.shared_input, self.input_prepared = Overlap.of(overlap), None, input_prepared
        self.out_features, self.in_features = weight.shape[::-1] if self.transposed else weight.shape
        if role != "column" and not (sections is None and rows is None):
            raise ValueError("sections and rows cut the output of a column-parallel layer; role is 'row'")
        if sections is not None and sum(sections) != self.out_features:
            raise ValueError(
                f"sections {tuple(sections)} add up to {sum(sections)}, but the layer has {self.out_features} outputs"
            )
        self.whole_sequences = whole_sequences
        own = self._set_rows(sections, rows, unit)
        k, n = self._axes()
        out, into = (1, 0) if self.transposed else (0, 1)
        self._picked = None if own is None or own.kind != "whole" else own
        cuts, bias_cuts = [AxisCut(grid.z, into), AxisCut(k, into)], []
        if self._picked is None:
            cuts.append(AxisCut(n, out, own))
            bias_cuts.append(AxisCut(n, 0, own))
        self._z_sizes = tuple(shard_sizes(shard_sizes(self.in_features, k.size)[k.rank], grid.z.size))
        layouts = {
            "weight": GridLayout.over(grid.mesh, grid.mesh_axes, weight.shape, cuts),
            "bias": GridLayout.over(grid.mesh, grid.mesh_axes, torch.Size([self.out_features]), bias_cuts),
        }
        for name, full in (("weight", weight), ("bias", bias)):
            self._add_parameter(name, full, layouts[name], parameters)  # type: ignore[arg-type]
        self._state_handles = install_state_dict_hooks(self)

    def _set_rows(self, sections: Sequence[int] | None, rows: RowMap | None, unit: int) -> RowMap | None:
        """The rows of N on each rank of axis n; None: chunks. `_head_sizes` are the features of each rank of x, of
        those over y, where a block between whole sequences is cut over x as well."""
        x, y, self._head_sizes = self.grid.x, self.grid.y, None
        by_head = self.whole_sequences and x.size > 1
        if self.whole_sequences and unit > 1 and rows is None:
            self._check_heads(unit)
        if rows is None and sections is not None:
            rows = RowMap.nested(sections, (y.size, x.size) if by_head else (self._axes()[1].size,))
            if rows.kind == "whole" and not self.whole_sequences:
                raise ValueError(f"sections {tuple(sections)} must be divisible by the {y.size} ranks of an axis")
        if not by_head:
            return rows
        if self.role == "row":
            self._head_sizes = shard_sizes(shard_sizes(self.in_features, y.size)[y.rank], x.size)
            return None
        rows = RowMap.nested((self.out_features,), (y.size, x.size)) if rows is None else rows
        if len(rows.ranges) != x.size * y.size:
            raise ValueError(f"rows must be those of tp_x * tp_y ({x.size} * {y.size}) ranks, got {len(rows.ranges)}")
        self._head_sizes = [rows.size(y.rank * x.size + rank) for rank in range(x.size)]
        return rows.joined(x.size)

    def _check_heads(self, unit: int) -> None:
        """ValueError for heads that do not fit on the grid."""
        features = self.out_features if self.role == "column" else self.in_features
        if features % unit:
            raise ValueError(f"unit must divide the {features} features, got {unit}")
        check_heads(features // unit, self.grid)

    def _axes(self) -> tuple[Communicator, Communicator]:
        """(k, n): the axes over which K and N are cut."""
        if self.spread == "features":
            return Communicator(None), self.grid.y
        pair = (self.grid.x, self.grid.y)
        return pair if self.role == "column" else pair[::-1]

    @outside_of_graphs
    def forward(self, x: Tensor) -> Tensor:
        check_is_tensor(x)
        prepared = None if self.shared_input is None else self.shared_input.take(self, x)
        if prepared is not None:
            return prepared
        if self.sequence is not None and self.sequence.is_whole:
            return self._forward_whole(x)
        problem = self._problem(x)
        if problem is not None and not self.stream:
            raise problem  # a stream tells the other ranks first
        is_gathered = self.input_prepared and not self.stream
        inputs = GridSpread(Communicator(None)) if is_gathered else self.input_spread(x)
        call = GridCall(inputs, (self.output_spread(x),), *self.weight_spread(), self.overlap.enabled, self.stream)
        weight, bias = self.operands()
        return grid_linear(call, x, [weight], [bias], problem=problem)[0][0]

    def operands(self) -> tuple[Tensor, Tensor | None]:
        """Weight [N_n, K_k / z], and bias [N_out] of this rank's part of the output, as `grid_linear` takes them."""
        weight, bias = self._local("weight"), self._local("bias")
        assert weight is not None
        weight = weight.t() if self.transposed else weight
        if self._picked is not None:
            weight = self._picked.take(copy_to(weight, self._axes()[1]), 0, self._axes()[1].rank)
        return weight, None if bias is None else self._summed_bias(bias).to(weight.dtype)

    def _summed_bias(self, bias: Tensor) -> Tensor:
        """This rank's part of the bias, whose gradient is summed over the ranks that have other tokens."""
        k, n = self._axes()
        bias = copy_to(copy_to(bias, self.grid.replicas), self.grid.z)
        if self._picked is not None:
            bias = self._picked.take(copy_to(bias, n), 0, n.rank)
        if self._gives_heads():
            return scatter_to(bias, k, dim=0, sizes=self._head_sizes)
        return bias

    def output_rows(self) -> Tensor:
        """Which of the output features this rank computes, in its order."""
        k, n = self._axes()
        layout: Any = self._layouts["weight"]
        found = layout.index()[1 if self.transposed else 0] if self._picked is None else None
        rows: Tensor = torch.arange(self.out_features, device="cpu") if found is None else found
        if self._picked is not None:
            rows = self._picked.take(rows, 0, n.rank)
        return rows.split(list(self._head_sizes or ()))[k.rank] if self._gives_heads() else rows

    def weight_spread(self) -> tuple[GridSpread, Communicator]:
        """How the weight lies over z, and the ranks that have copies of it."""
        return GridSpread(self.grid.z, 1, self._z_sizes), self.grid.replicas

    def input_spread(self, x: Tensor) -> GridSpread:
        """How x lies over n."""
        _, n = self._axes()
        if self.spread == "features" or self._takes_heads():
            sizes = self._head_sizes if self._takes_heads() else shard_sizes(self.in_features, n.size)
            return GridSpread(n, x.dim() - 1, tuple(sizes or ()))
        if self.spread == "copy":
            return GridSpread(n)
        dim = self._token_dim(x)
        tokens = [x.size(dim)] * n.size if self.sequence is None else self.sequence.token_sizes(n)
        return GridSpread(n, dim, tuple(tokens))

    def output_spread(self, x: Tensor) -> GridSpread:
        """How the output of x lies over k."""
        k, n = self._axes()
        if self._gives_heads():
            return GridSpread(k, x.dim() - 1, tuple(self._head_sizes or ()))
        if self.spread != "rows" or k.size == 1:
            return GridSpread(k)
        dim = self._token_dim(x)
        if self.sequence is not None:
            return GridSpread(k, dim, tuple(self.sequence.token_sizes(k)))
        tokens = x.size(dim) * (1 if self._takes_heads() or self.input_prepared else n.size)
        if tokens % k.size:
            raise ValueError(
                f"{tokens} tokens cannot be cut evenly over the {k.size} ranks of an axis: pass sequence=GridRegion"
            )
        return GridSpread(k, dim, (tokens // k.size,) * k.size)

    def _forward_whole(self, x: Tensor) -> Tensor:
        """With all tokens and hidden features on every rank: how `tensor.sequence.whole_stream` compares. Between
        column- and row-parallel layers a rank has its own features, as ever. Forward only."""
        k, n = self._axes()
        weight, bias = self.operands()
        weight = gather_sequence(weight, self.grid.z, dim=1, sizes=self._z_sizes)
        if self.role == "column":
            out = F.linear(scatter_to(x, k, dim=-1), weight)
            if self._gives_heads():
                out = GridSpread(k, out.dim() - 1, tuple(self._head_sizes or ())).summed(out, False)()
            elif k.size > 1:
                out = k.all_reduce(out)
            return out if bias is None else out + bias.to(out.dtype)
        if self._takes_heads() or self.spread == "features":
            sizes = self._head_sizes or shard_sizes(self.in_features, n.size)
            x = gather_from(x, n, dim=-1, sizes=sizes)
        out = F.linear(x, weight)
        out = out if k.size == 1 else k.all_reduce(out)
        out = out if bias is None else out + bias.to(out.dtype)
        return gather_from(out, n, dim=-1, sizes=shard_sizes(self.out_features, n.size))

    def _takes_heads(self) -> bool:
        return self._head_sizes is not None and self.role == "row"

    def _gives_heads(self) -> bool:
        return self._head_sizes is not None and self.role == "column"

    def _token_dim(self, x: Tensor) -> int:
        return x.dim() - 2 if self.sequence is None else self.sequence.dim

    def _problem(self, x: Tensor) -> ValueError | None:
        """What is wrong with an input of this rank."""
        k, n = self._axes()
        over = n if self.spread == "features" else k
        expected = shard_sizes(self.in_features, over.size)[over.rank]
        if self._takes_heads() and self._head_sizes:
            expected = self._head_sizes[n.rank]
        if self.spread == "features" and self.input_prepared and not self.stream:
            expected = self.in_features
        if x.dim() >= 2 and x.size(-1) == expected:
            return None
        return ValueError(
            f"x has shape {tuple(x.shape)}; this rank of the grid takes [.., tokens, {expected}], "
            f"its part of the {self.in_features} input features"
        )

    def extra_repr(self) -> str:
        spec = self.grid.spec
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"{self.role} on grid ({spec.x}, {spec.y}, {spec.z}), spread={spec.spread!r}"
            + (", stream=True" if self.stream else "")
        )


class GridBlockInput:
    """The input of a block on a grid, gathered once for all column-parallel layers that read it.

    x       [B_z, S_y, H_x]   this rank's part of the hidden states
    enter   [B_z, S, H_x]     gathered over n; call it where the block begins, `leave` where it ends
    take    [B_z, S, N_xy]    a layer's output, prepared by `enter`

    Of layers with `stream` nothing is gathered: their x is broadcast in blocks, once for all of them, and `enter` gives
    this rank's part [B_z, S, H_y]. What is wrong with it on one rank is raised on all.

    As `SharedInput` has it: a layer that is called with anything else than what `enter` returned computes.
    """

    def __init__(self, layers: Sequence[GridLinear], *, sequence: GridRegion, overlap: bool = True):
        self.layers, self.sequence, self.overlap = list(layers), sequence, overlap
        self._input: Tensor | None = None
        self._outputs: dict[int, Tensor] = {}
        for layer in self.layers:
            layer.shared_input = self
        streams = {layer.stream for layer in self.layers}
        if len(streams) > 1:
            raise ValueError("layers that share an input must all have stream=True, or none of them")
        self.stream = streams == {True}

    @outside_of_graphs
    def enter(self, x: Tensor) -> Tensor:
        """Gather x and compute what the layers make of it. Returns the gathered x."""
        problem: ValueError | None = None
        try:
            self.sequence.check(x)
        except ValueError as error:
            if not self.stream or self.sequence.is_whole:
                raise
            problem = error
        features = self.sequence.shape[2]
        layers = [layer for layer in self.layers if layer.in_features == features]
        if problem is not None and not layers:
            raise problem
        if self.sequence.is_whole or not layers:
            return x if self.sequence.is_whole else self._gathered(x)
        first = layers[0]
        call = GridCall(
            first.input_spread(x),
            tuple(layer.output_spread(x) for layer in layers),
            *first.weight_spread(),
            self.overlap,
            self.stream,
        )
        weights, biases = zip(*(layer.operands() for layer in layers), strict=True)
        outs, self._input = grid_linear(call, x, weights, biases, keep=True, problem=problem)
        assert self._input is not None
        self._outputs = {id(layer): out for layer, out in zip(layers, outs, strict=True)}
        return self._input

    def _gathered(self, x: Tensor) -> Tensor:
        grid, region = self.sequence.grid, self.sequence
        if grid.spec.spread == "copy":
            return copy_to(x, grid.y)
        if grid.spec.spread == "features":
            return gather_sequence(x, grid.y, dim=-1, sizes=shard_sizes(region.shape[2], grid.y.size))
        return gather_sequence(x, grid.y, dim=region.dim, sizes=region.token_sizes(grid.y))

    def take(self, layer: GridLinear, x: Tensor) -> Tensor | None:
        """The output of `layer` for x, once, if x is what `enter` returned."""
        return self._outputs.pop(id(layer), None) if x is self._input else None

    def leave(self) -> None:
        """Forget what was not taken."""
        self._input, self._outputs = None, {}


@checked(computed=False)
def check_heads(heads: int, grid: Grid) -> None:
    """ValueError for a number of heads that x * y does not divide, with the grids of as many ranks that would do."""
    x, y, ranks = grid.spec.x, grid.spec.y, grid.spec.ranks
    if heads % (x * y):
        raise ValueError(
            f"{heads} heads must be divisible by tp_x * tp_y ({x} * {y}); "
            f"grids of {ranks} ranks that work: {_grids_for(heads, ranks)}"
        )


def _grids_for(heads: int, ranks: int) -> str:
    """Sizes (x, y, z) of the grids of as many ranks whose x * y divides the heads."""
    found = [
        (x, y, ranks // (x * y))
        for x in range(1, ranks + 1)
        for y in range(1, ranks + 1)
        if ranks % (x * y) == 0 and heads % (x * y) == 0
    ]
    return ", ".join(map(str, found[:6]))
