"""Linear layers split over a group in plain PyTorch.

Each is one of the autograd pairs of `fastpar.comm` and `torch.nn.functional.linear`; signatures are those of
`fastpar.ops`, without the options that say when things are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor

from fastpar.contracts import communicator
from fastpar.contracts.linear import (
    OneOrSeveral,
    Weights,
    as_weights,
    check_linear,
    check_sequence_dim,
    gathered_sizes,
    is_contraction_dim,
    scattered_sizes,
)

if TYPE_CHECKING:
    from fastpar.comm import GroupLike


def _apply(x: Tensor, given: Weights) -> Any:
    outs = tuple(F.linear(x, w, b) for w, b in zip(given.weights, given.biases, strict=True))
    return outs if given.several else outs[0]


# ---- public ----------------------------------------------------------------------------------------------------------


def all_gather_linear(
    x: Tensor,
    weight: OneOrSeveral,
    bias: Tensor | Sequence[Tensor | None] | None = None,
    *,
    group: GroupLike,
    sizes: Sequence[int] | None = None,
    dim: int = -2,
    transposed: bool = False,
) -> OneOrSeveral:
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


def copy_to_linear(
    x: Tensor,
    weight: OneOrSeveral,
    bias: Tensor | Sequence[Tensor | None] | None = None,
    *,
    group: GroupLike,
    transposed: bool = False,
) -> OneOrSeveral:
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
