"""Weights of the parallel linears, the checks of their arguments, and the sizes of sequence shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fastpar.comm import Communicator


# Of an argument and the result: one weight gives one output, several give a tuple of as many.
OneOrSeveral = TypeVar("OneOrSeveral", Tensor, Sequence[Tensor])


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


def check_linear(x: Tensor, given: Weights, width: int | None = None) -> None:
    """TypeError or ValueError for tensors that do not fit together. `width`: K, where x has a part of it only."""
    biases = [("bias", b) for b in given.biases if b is not None]
    named = [("x", x), *(("weight", w) for w in given.weights), *biases]
    for name, tensor in named:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
        if hasattr(tensor, "device_mesh"):
            raise TypeError(f"{name} must be a plain tensor, got a DTensor: pass {name}.to_local()")
        if not tensor.is_floating_point():
            raise TypeError(f"{name} must have a floating dtype, got {tensor.dtype}")
        if tensor.dtype != x.dtype:
            raise TypeError(f"{name} must have the dtype of x, {x.dtype}, got {tensor.dtype} (torch.autocast converts)")
        if tensor.device != x.device:
            raise ValueError(f"{name} must be on the device of x, {x.device}, got {tensor.device}")
    for weight, bias in zip(given.weights, given.biases, strict=True):
        if x.dim() == 0 or weight.dim() != 2 or (x.shape[-1] if width is None else width) != weight.shape[1]:
            parts = "" if width is None else f", whose parts have {width} columns together,"
            raise ValueError(
                f"x [..., K] and weight [N, K] (transposed: [K, N]) must agree in K, got x "
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


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype that torch.nn.functional.linear would compute in under torch.autocast; None: x's own."""
    kind = x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind) or x.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(kind)
