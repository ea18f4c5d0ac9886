"""Linear layers split over a group in plain PyTorch, and the argument checks that the overlapped versions share.

Each is one of the autograd pairs of `fastpar.comm` and `torch.nn.functional.linear`; signatures are those of
`fastpar.ops`, without the options that say when things are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from fastpar.contracts.vocab_shard import communicator

if TYPE_CHECKING:
    from fastpar.comm import Communicator, GroupLike


class Weights(NamedTuple):
    """Weights [N_j, K] with biases [N_j] or None; `several`: the caller passed a sequence, and gets a tuple."""

    weights: tuple[Tensor, ...]
    biases: tuple[Tensor | None, ...]
    several: bool


def as_weights(
    weight: Tensor | Sequence[Tensor], bias: Tensor | Sequence[Tensor | None] | None, transposed: bool
) -> Weights:
    """One weight or several with as many biases, as [N, K] whichever way they are stored."""
    several = not isinstance(weight, Tensor)
    if bias is not None and several == isinstance(bias, Tensor):
        raise TypeError("weight and bias must be two tensors or two sequences of tensors, not one of each")
    weights = (weight,) if isinstance(weight, Tensor) else tuple(weight)
    if bias is None:
        biases: tuple[Tensor | None, ...] = (None,) * len(weights)
    else:
        biases = (bias,) if isinstance(bias, Tensor) else tuple(bias)
    if not weights or len(weights) != len(biases):
        raise ValueError(
            f"expected at least one weight and as many biases, got {len(weights)} weights and {len(biases)} biases"
        )
    if transposed:
        weights = tuple(w.t() if isinstance(w, Tensor) and w.dim() == 2 else w for w in weights)
    return Weights(weights, biases, several)


def check_linear(x: Tensor, given: Weights, x_name: str = "x", width: int | None = None) -> None:
    """TypeError or ValueError for tensors that do not fit together. `width`: K, where x has a part of it only."""
    named = [
        (x_name, x),
        *(("weight", w) for w in given.weights),
        *(("bias", b) for b in given.biases if b is not None),
    ]
    for name, tensor in named:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
        if hasattr(tensor, "device_mesh"):
            raise TypeError(f"{name} must be a plain tensor, got a DTensor: pass {name}.to_local()")
        if not tensor.is_floating_point():
            raise TypeError(f"{name} must have a floating dtype, got {tensor.dtype}")
        if tensor.dtype != x.dtype:
            raise TypeError(
                f"{name} must have the dtype of {x_name}, {x.dtype}, got {tensor.dtype} (torch.autocast converts)"
            )
        if tensor.device != x.device:
            raise ValueError(f"{name} must be on the device of {x_name}, {x.device}, got {tensor.device}")
    for weight, bias in zip(given.weights, given.biases, strict=True):
        if x.dim() == 0 or weight.dim() != 2 or (x.shape[-1] if width is None else width) != weight.shape[1]:
            parts = "" if width is None else f", whose parts have {width} columns together,"
            raise ValueError(
                f"{x_name} [..., K] and weight [N, K] (transposed: [K, N]) must agree in K, got {x_name} "
                f"{tuple(x.shape)}{parts} and weight {tuple(weight.shape)} as [N, K]"
            )
        if bias is not None and bias.shape != weight.shape[:1]:
            raise ValueError(
                f"bias must have one entry per output feature, ({weight.shape[0]},), got {tuple(bias.shape)}"
            )


def check_sequence_dim(x: Tensor, dim: int) -> int:
    """`dim` counted from the front; it may be any but the last, which holds the features."""
    found = dim + x.dim() if dim < 0 else dim
    if not 0 <= found < x.dim() - 1:
        raise ValueError(
            f"dim must be a dim of x other than its last, which holds the features, got {dim} for {tuple(x.shape)}"
        )
    return found


def is_contraction_dim(x: Tensor, dim: int) -> bool:
    """Whether `dim` is the last of x, over which a product sums."""
    return isinstance(x, Tensor) and x.dim() > 0 and dim in (-1, x.dim() - 1)


def gathered_sizes(x: Tensor, dim: int, sizes: Sequence[int] | None, comm: Communicator | None) -> list[int]:
    """Rows along dim of every rank's x; by default as many as this rank has."""
    mine, ranks, rank = x.shape[dim], *((1, 0) if comm is None else (comm.size, comm.rank))
    if sizes is None:
        return [mine] * ranks
    if len(sizes) != ranks or sizes[rank] != mine or min(sizes) < 0:
        raise ValueError(
            f"sizes must be {ranks} numbers >= 0, the rows of every rank along dim {dim}, and sizes[{rank}] the {mine} "
            f"that x has, got {list(sizes)}"
        )
    return list(sizes)


def scattered_sizes(rows: int, sizes: Sequence[int] | None, comm: Communicator | None) -> list[int]:
    """Rows that every rank keeps of `rows`; by default `shard_sizes`."""
    from fastpar.comm import shard_sizes

    ranks = 1 if comm is None else comm.size
    if sizes is None:
        return shard_sizes(rows, ranks)
    if len(sizes) != ranks or sum(sizes) != rows or min(sizes) < 0:
        raise ValueError(f"sizes must be {ranks} numbers >= 0 that add up to {rows}, got {list(sizes)}")
    return list(sizes)


def _apply(x: Tensor, given: Weights) -> Tensor | tuple[Tensor, ...]:
    outs = tuple(F.linear(x, w, b) for w, b in zip(given.weights, given.biases, strict=True))
    return outs if given.several else outs[0]


# ---- public ----------------------------------------------------------------------------------------------------------


@overload
def all_gather_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = ...,
    *,
    group: GroupLike,
    sizes: Sequence[int] | None = ...,
    dim: int = ...,
    transposed: bool = ...,
) -> Tensor: ...
@overload
def all_gather_linear(
    x: Tensor,
    weight: Sequence[Tensor],
    bias: Sequence[Tensor | None] | None = ...,
    *,
    group: GroupLike,
    sizes: Sequence[int] | None = ...,
    dim: int = ...,
    transposed: bool = ...,
) -> tuple[Tensor, ...]: ...
def all_gather_linear(
    x: Tensor,
    weight: Tensor | Sequence[Tensor],
    bias: Tensor | Sequence[Tensor | None] | None = None,
    *,
    group: GroupLike,
    sizes: Sequence[int] | None = None,
    dim: int = -2,
    transposed: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """`gather_sequence`, then `F.linear`: fastpar.ops.all_gather_linear in plain PyTorch."""
    from fastpar.comm import gather_sequence

    comm, given = communicator(group), as_weights(weight, bias, transposed)
    if is_contraction_dim(x, dim):
        dim = x.dim() - 1
        sizes = gathered_sizes(x, dim, sizes, comm)
        check_linear(x, given, width=sum(sizes))
    else:
        check_linear(x, given)
        dim = check_sequence_dim(x, dim)
        sizes = gathered_sizes(x, dim, sizes, comm)
    return _apply(gather_sequence(x, comm, dim=dim, sizes=sizes), given)


@overload
def copy_to_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = ..., *, group: GroupLike, transposed: bool = ...
) -> Tensor: ...
@overload
def copy_to_linear(
    x: Tensor,
    weight: Sequence[Tensor],
    bias: Sequence[Tensor | None] | None = ...,
    *,
    group: GroupLike,
    transposed: bool = ...,
) -> tuple[Tensor, ...]: ...
def copy_to_linear(
    x: Tensor,
    weight: Tensor | Sequence[Tensor],
    bias: Tensor | Sequence[Tensor | None] | None = None,
    *,
    group: GroupLike,
    transposed: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """`copy_to`, then `F.linear`: fastpar.ops.copy_to_linear in plain PyTorch."""
    from fastpar.comm import copy_to

    given = as_weights(weight, bias, transposed)
    check_linear(x, given)
    return _apply(copy_to(x, communicator(group)), given)


def linear_reduce_scatter(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    group: GroupLike,
    sizes: Sequence[int] | None = None,
    dim: int = -2,
    transposed: bool = False,
) -> Tensor:
    """`F.linear`, then `reduce_scatter_sequence`, then the bias: fastpar.ops.linear_reduce_scatter in plain PyTorch.

    The bias is the same on every rank, and so is its gradient: a sum over the ranks' parts.
    """
    from fastpar.comm import copy_to, reduce_scatter_sequence

    comm, given = communicator(group), as_weights(weight, bias, transposed)
    check_linear(x, given)
    dim = check_sequence_dim(x, dim)
    sizes = scattered_sizes(x.shape[dim], sizes, comm)
    out = reduce_scatter_sequence(F.linear(x, given.weights[0]), comm, dim=dim, sizes=sizes)
    return out if bias is None else out + copy_to(bias, comm)


def linear_all_reduce(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, group: GroupLike, transposed: bool = False
) -> Tensor:
    """`F.linear`, then `reduce_from`, then the bias: fastpar.ops.linear_all_reduce in plain PyTorch."""
    from fastpar.comm import reduce_from

    comm, given = communicator(group), as_weights(weight, bias, transposed)
    check_linear(x, given)
    out = reduce_from(F.linear(x, given.weights[0]), comm)
    return out if bias is None else out + bias


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype that torch.nn.functional.linear would compute in under torch.autocast; None: x's own."""
    kind = x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind) or x.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(kind)
