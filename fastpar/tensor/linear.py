"""Column- and row-parallel linear layers (Shoeybi et al. 2019, "Megatron-LM"), with sequence parallelism.

Both keep the parameter names, shapes and orientation of the layer they replace: `weight` and `bias` as in `nn.Linear`,
or [in, out] as in the Conv1D of GPT-2 (`transposed=True`). Sizes need not divide by the group: shards follow
`torch.chunk`'s rule and may differ or be empty.

Tensors are suffixed by how they are sharded over the R ranks of the group: `_n` by output feature, `_k` by input
feature, `_s` by sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fastpar.arguments import check_counts, checked
from fastpar.comm import Communicator, gather_from, scatter_to, shard_sizes
from fastpar.comm.shards import check_is_tensor
from fastpar.ops.parallel_linear.api import (
    LayerCalls,
    LinearSizes,
    all_gather_linear,
    copy_to_linear,
    linear_all_reduce,
    linear_reduce_scatter,
)
from fastpar.ops.parallel_linear.autograd import (
    ALL_GATHER_LINEAR,
    COPY_TO_LINEAR,
    LINEAR_ALL_REDUCE,
    LINEAR_REDUCE_SCATTER,
    apply,
)
from fastpar.ops.parallel_linear.overlap import Overlap
from fastpar.ops.parallel_linear.types import LinearSpec
from fastpar.tensor.binding import GroupLike, bind, blank
from fastpar.tensor.own_forward import check_parameters, conv1d_class, refuse_own_forward
from fastpar.tensor.parameter import MakeParameter, ParallelModule, ParameterLayout, RowMap, install_state_dict_hooks
from fastpar.tensor.sequence import SequenceRegion, splitting
from fastpar.tensor.shared_input import SharedInput, takes_shortcut


def _split_rows(rows: RowMap | None, sections: Sequence[int] | None, features: int, parts: int, what: str) -> RowMap:
    if rows is not None and sections is not None:
        raise ValueError(f"pass either rows or sections, not both (sections={tuple(sections)})")
    if sections is not None:
        if sum(sections) != features:
            raise ValueError(f"sections {tuple(sections)} add up to {sum(sections)}, but {what} is {features}")
        return RowMap.packed(sections, parts)
    rows = RowMap.chunk(features, parts) if rows is None else rows
    if rows.total != features:
        raise ValueError(f"rows describe {rows.total} features, but {what} is {features}")
    return rows


class _ShardedLinear(ParallelModule):
    """The short way of both layers, for tensors that need no checks: no views, no nodes, no calls but the linear's."""

    comm: Communicator
    overlap: Overlap
    sequence: SequenceRegion | None
    transposed: bool

    def _prepare(self, whole: LinearSpec, split: LinearSpec, sizes: LinearSizes) -> None:
        """Which linear it is where the sequence is whole, and where it is split. The parameters are there."""
        calls = (LayerCalls(spec, self.comm, sizes) for spec in (whole, split))
        self._whole_calls, self._split_calls = calls
        layouts = self._layouts.values()
        self._takes_shards = (
            self.comm.size > 1 and not self.transposed and not any(layout.picks_rows for layout in layouts)
        )

    def sharded_operands(self) -> tuple[Any, Any] | None:
        """Weight and bias as the DTensors that they are, for `apply(sharded=True)`; None: unwrap them (`_local`)."""
        try:
            weight, bias = self._parameters["weight"], self._parameters["bias"]
        except KeyError:
            return None  # `_local` says what has become of it
        if not self._takes_shards or type(weight) is not DTensor or len(weight._spec.placements) > 1:
            return None
        return (weight, bias) if bias is None or bias.dtype is weight.dtype else None

    def _apply_call(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        region = splitting(self.sequence)
        if region is None:
            call = self._whole_calls.of(x, self.overlap)
        else:
            call = self._split_calls.of(x, self.overlap, region.dim, region.sizes)
        return apply(call, x, (weight,), (bias,), sharded=True)[0]


class ColumnParallelLinear(_ShardedLinear):
    """A linear layer whose output features are split over a group.

        x       [..., K]     the same on every rank, or [B, S_s, K] with `sequence`
        weight  [N_n, K]     stored as a DTensor of shape [N, K], Shard(0)
        bias    [N_n]
        out     [..., N_n]   or [..., N] with `gather_output`

        forward  out_n = x @ weight_n.T + bias_n          sequence: x = all_gather(x_s) first
        dgrad    dx    = all_reduce(dout_n @ weight_n)    sequence: reduce_scatter instead
        wgrad    dweight_n = dout_n.T @ x                 local

    Collectives: none in forward and one all-reduce of x's size in backward; with `sequence` one all-gather in forward
    and in backward a reduce-scatter and, if the weight needs a gradient, the all-gather again; `gather_output` adds an
    all-gather of the output. They overlap the products as `fastpar.ops.parallel_linear` says, unless `overlap=False`;
    the numbers are the same either way.

    `sections` splits a fused weight part by part: (I, I) for packed gate/up, (E, E, E) for packed QKV; the local output
    is this rank's part of each, in the same order. `rows` gives any other `RowMap`, such as key/value heads shared by
    several ranks. `input_prepared=True` says that the caller has applied `copy_to` or the gather to x already, once for
    several layers; `fastpar.tensor.SharedInput` does so. `init` runs `nn.Linear`'s initialisation of the full weight
    and keeps a shard, so that the same seed gives the same weights under every layout.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    shared_input: SharedInput | None

    @checked(computed=False)
    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: GroupLike = None,
        gather_output: bool = False,
        sequence: SequenceRegion | None = None,
        sections: Sequence[int] | None = None,
        overlap: bool | Overlap = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        check_counts(least=0, in_features=in_features, out_features=out_features)
        full = nn.Linear(in_features, out_features, bias, device=device, dtype=dtype)
        options: dict[str, Any] = {"gather_output": gather_output, "sequence": sequence, "sections": sections}
        self._configure(full, group, overlap=overlap, **options)

    @classmethod
    @checked(computed=False)
    def from_linear(
        cls,
        linear: nn.Module,
        *,
        group: GroupLike = None,
        gather_output: bool = False,
        sequence: SequenceRegion | None = None,
        sections: Sequence[int] | None = None,
        rows: RowMap | None = None,
        overlap: bool | Overlap = True,
    ) -> ColumnParallelLinear:
        """A parallel layer with the weights of `linear` (an `nn.Linear`, or Hugging Face's Conv1D)."""
        refuse_own_forward(linear)
        layer: ColumnParallelLinear = blank(cls)
        options: dict[str, Any] = {"gather_output": gather_output, "sequence": sequence, "sections": sections}
        layer._configure(linear, group, rows=rows, overlap=overlap, **options)
        layer.train(linear.training)
        return layer

    def _configure(
        self,
        source: nn.Module,
        group: GroupLike,
        *,
        gather_output: bool = False,
        sequence: SequenceRegion | None = None,
        sections: Sequence[int] | None = None,
        rows: RowMap | None = None,
        input_prepared: bool = False,
        overlap: bool | Overlap = True,
        parameters: MakeParameter | None = None,
    ) -> None:
        self.overlap, self.shared_input = Overlap.of(overlap), None
        weight, bias, self.transposed = linear_weights(source)
        self.comm, mesh = bind(group, weight.device.type)
        self.out_features, self.in_features = weight.shape[::-1] if self.transposed else weight.shape
        self.rows = _split_rows(rows, sections, self.out_features, self.comm.size, "out_features")
        if gather_output and self.rows.kind != "contiguous":
            raise ValueError("gather_output is not available for a layer with sections or shared rows")
        self.gather_output, self.sequence, self.input_prepared = gather_output, sequence, input_prepared
        dim = 1 if self.transposed else 0
        self._add_parameter(
            "weight", weight, ParameterLayout(self.comm, mesh, weight.shape, dim, self.rows), parameters
        )
        bias_layout = ParameterLayout(self.comm, mesh, torch.Size([self.out_features]), 0, self.rows)
        self._add_parameter("bias", bias, bias_layout, parameters)
        self._prepare(COPY_TO_LINEAR, ALL_GATHER_LINEAR, LinearSizes(self.in_features, self.out_features))
        self._state_handles = install_state_dict_hooks(self)

    @property
    def local_out_features(self) -> int:
        """Output features of this rank."""
        return self.rows.size(self.comm.rank)

    @property
    def sums_input_gradient(self) -> bool:
        """Whether dgrad is a part, which the caller who prepared the input sums."""
        return self.input_prepared

    def local_input(self, x: Tensor) -> Tensor:
        """What forward takes of a whole input."""
        return x

    def local_output(self, out: Tensor) -> Tensor:
        """What forward returns of a whole output [..., N]."""
        return out if self.gather_output else self.rows.take(out, -1, self.comm.rank)

    def forward(self, x: Tensor) -> Tensor:
        check_is_tensor(x)
        out = self._project(x)
        if self.gather_output:
            out = gather_from(out, self.comm, dim=-1, sizes=shard_sizes(self.out_features, self.comm.size))
        return out

    def _project(self, x: Tensor) -> Tensor:
        prepared = None if self.shared_input is None else self.shared_input.take(self, x)
        if prepared is not None:
            return prepared
        sharded = None if self.input_prepared else self.sharded_operands()
        if sharded is not None and takes_shortcut(x, sharded[0], self.in_features):
            if splitting(self.sequence) is not None:
                cast(SequenceRegion, self.sequence).check_shard(x)
            return self._apply_call(x, *sharded)
        weight, bias = self._local("weight"), self._local("bias")
        assert weight is not None
        options: dict[str, Any] = {"group": self.comm, "overlap": self.overlap, "features": self.out_features}
        if self.input_prepared:
            return F.linear(x, weight.t() if self.transposed else weight, bias)
        sequence = splitting(self.sequence)
        if sequence is None:
            return copy_to_linear(x, weight, bias, transposed=self.transposed, **options)
        sequence.check_shard(x)
        options |= {"dim": sequence.dim, "sizes": sequence.sizes}
        return all_gather_linear(x, weight, bias, transposed=self.transposed, **options)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features} "
            f"({self.local_out_features} on rank {self.comm.rank} of {self.comm.size}), bias={self.bias is not None}"
        )


class RowParallelLinear(_ShardedLinear):
    """A linear layer whose input features are split over a group.

        x_k     [..., K_k]   this rank's features, as a ColumnParallelLinear leaves them
        weight  [N, K_k]     stored as a DTensor of shape [N, K], Shard(1)
        bias    [N]          replicated, added once after the sum
        out     [..., N]     the same on every rank, or [B, S_s, N] with `sequence`

        forward  out   = all_reduce(x_k @ weight_k.T) + bias     sequence: reduce_scatter instead
        dgrad    dx_k  = dout @ weight_k                         sequence: dout = all_gather(dout_s) first
        wgrad    dweight_k = dout.T @ x_k, dbias = dout.sum(0): the same on every rank

    Collectives: one all-reduce of the output's size in forward, none in backward; with `sequence` one reduce-scatter
    and one all-gather. `overlap` as for `ColumnParallelLinear`.

    `input_is_parallel=False` takes a full x and keeps this rank's features (backward: all-gather).
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    @checked(computed=False)
    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: GroupLike = None,
        input_is_parallel: bool = True,
        sequence: SequenceRegion | None = None,
        overlap: bool | Overlap = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        check_counts(least=0, in_features=in_features, out_features=out_features)
        full = nn.Linear(in_features, out_features, bias, device=device, dtype=dtype)
        self._configure(full, group, input_is_parallel=input_is_parallel, sequence=sequence, overlap=overlap)

    @classmethod
    @checked(computed=False)
    def from_linear(
        cls,
        linear: nn.Module,
        *,
        group: GroupLike = None,
        input_is_parallel: bool = True,
        sequence: SequenceRegion | None = None,
        overlap: bool | Overlap = True,
    ) -> RowParallelLinear:
        """A parallel layer with the weights of `linear` (an `nn.Linear`, or Hugging Face's Conv1D)."""
        refuse_own_forward(linear)
        layer: RowParallelLinear = blank(cls)
        layer._configure(linear, group, input_is_parallel=input_is_parallel, sequence=sequence, overlap=overlap)
        layer.train(linear.training)
        return layer

    def _configure(
        self,
        source: nn.Module,
        group: GroupLike,
        *,
        input_is_parallel: bool = True,
        sequence: SequenceRegion | None = None,
        overlap: bool | Overlap = True,
        parameters: MakeParameter | None = None,
    ) -> None:
        self.overlap = Overlap.of(overlap)
        weight, bias, self.transposed = linear_weights(source)
        self.comm, mesh = bind(group, weight.device.type)
        self.out_features, self.in_features = weight.shape[::-1] if self.transposed else weight.shape
        self.input_is_parallel, self.sequence = input_is_parallel, sequence
        rows = RowMap.chunk(self.in_features, self.comm.size)
        dim = 0 if self.transposed else 1
        self._add_parameter("weight", weight, ParameterLayout(self.comm, mesh, weight.shape, dim, rows), parameters)
        bias_layout = ParameterLayout(self.comm, mesh, torch.Size([self.out_features]))
        self._add_parameter("bias", bias, bias_layout, parameters)
        self._prepare(LINEAR_ALL_REDUCE, LINEAR_REDUCE_SCATTER, LinearSizes(self.out_features, self.in_features))
        self.local_in_features = shard_sizes(self.in_features, self.comm.size)[self.comm.rank]
        self._state_handles = install_state_dict_hooks(self)

    sums_input_gradient = False

    def local_input(self, x: Tensor) -> Tensor:
        """What forward takes of a whole input [..., K]."""
        if not self.input_is_parallel:
            return x
        return x.split(shard_sizes(self.in_features, self.comm.size), -1)[self.comm.rank]

    def local_output(self, out: Tensor) -> Tensor:
        """What forward returns of a whole output: all of it."""
        return out

    def forward(self, x: Tensor) -> Tensor:
        check_is_tensor(x)
        if x.dim() == 0:
            raise ValueError("x must have at least one dim, got a scalar tensor")
        if not self.input_is_parallel:
            x = scatter_to(x, self.comm, dim=-1, sizes=shard_sizes(self.in_features, self.comm.size))
        sharded = self.sharded_operands()
        if sharded is not None and takes_shortcut(x, sharded[0], self.local_in_features):
            if splitting(self.sequence) is not None:
                cast(SequenceRegion, self.sequence).check_whole(x)
            return self._apply_call(x, *sharded)
        if x.size(-1) != self.local_in_features:
            raise ValueError(
                f"x has {x.size(-1)} features; rank {self.comm.rank} of {self.comm.size} holds "
                f"{self.local_in_features} of the {self.in_features} input features"
                + (" (pass input_is_parallel=False for a full x)" if x.size(-1) == self.in_features else "")
            )
        weight, bias = self._local("weight"), self._local("bias")
        assert weight is not None
        bias = None if bias is None else bias.to(weight.dtype)
        options: dict[str, Any] = {"group": self.comm, "overlap": self.overlap, "features": self.in_features}
        sequence = splitting(self.sequence)
        if sequence is None:
            return linear_all_reduce(x, weight, bias, transposed=self.transposed, **options)
        sequence.check_whole(x)
        options |= {"dim": sequence.dim, "sizes": sequence.sizes}
        return linear_reduce_scatter(x, weight, bias, transposed=self.transposed, **options)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features} ({self.local_in_features} on rank {self.comm.rank} of {self.comm.size}), "
            f"out_features={self.out_features}, bias={self.bias is not None}"
        )


def linear_weights(module: nn.Module) -> tuple[nn.Parameter, nn.Parameter | None, bool]:
    """(weight, bias, transposed) of an `nn.Linear`, or of GPT-2's Conv1D, whose weight is [in, out]. TypeError for
    another module, and for one whose parameters cannot be split (`own_forward.check_parameters`)."""
    conv1d = conv1d_class()
    transposed = conv1d is not None and isinstance(module, conv1d)
    if not (isinstance(module, nn.Linear) or transposed):
        raise TypeError(
            f"expected an nn.Linear or Conv1D, got {type(module).__name__}"
            + (f" of {type(module).__module__}" if type(module).__name__ in ("Linear", "Conv1D") else "")
        )
    check_parameters(module)
    weight, bias = module._parameters["weight"], module._parameters.get("bias")
    assert weight is not None
    if weight.device.type == "meta":
        raise ValueError("the layer is on the meta device; materialise and initialise it before it is sharded")
    return weight, bias, transposed
