"""The gradients of the linears of `fastpar.ops.parallel_linear` apart, for schedules that run them at different times.

dgrad is what the backward of a pipeline stage has to send on; wgrad can wait. `wgrad_store` of the linears themselves
does the same through autograd. None of these keeps autograd history.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fastpar.arguments import checked
from fastpar.contracts import communicator
from fastpar.contracts import linear as reference
from fastpar.ops.parallel_linear import autograd as passes
from fastpar.ops.parallel_linear.api import make_call
from fastpar.ops.parallel_linear.autograd import ALL_GATHER, ALL_REDUCE, COPY, REDUCE_SCATTER, Call, Wants
from fastpar.ops.parallel_linear.gemms import product
from fastpar.ops.parallel_linear.overlap import Overlap

if TYPE_CHECKING:
    from fastpar.comm import GroupLike


def _sequence(x: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
    return (x,) if isinstance(x, Tensor) else tuple(x)


def _call(
    kind: str,
    like: Tensor,
    group: GroupLike,
    sizes: Sequence[int] | None,
    dim: int,
    width: int,
    features: int | None,
    overlap: bool | Overlap,
    *,
    is_whole: bool,
) -> Call | None:
    """The call of which these are gradients; None without a group. `like` has all tokens if `is_whole`."""
    comm = communicator(group)
    if kind in (COPY, ALL_REDUCE):
        return None if comm is None else make_call(kind, like, comm, 0, (), width, features, overlap)
    dim = reference.check_sequence_dim(like, dim)
    find = reference.scattered_sizes(like.shape[dim], sizes, comm) if is_whole else None
    found = reference.gathered_sizes(like, dim, sizes, comm) if find is None else find
    return None if comm is None else make_call(kind, like, comm, dim, found, width, features, overlap)


@torch.no_grad()
def _dgrad(
    kind: str,
    grad: Tensor | Sequence[Tensor],
    weight: Tensor | Sequence[Tensor],
    group: GroupLike,
    sizes: Sequence[int] | None,
    dim: int,
    transposed: bool,
    features: int | None,
    overlap: bool | Overlap,
) -> Tensor:
    given, grads = reference.as_weights(weight, None, transposed), _sequence(grad)
    if len(grads) != len(given.weights):
        raise ValueError(f"grad and weight must be as many, got {len(grads)} and {len(given.weights)}")
    for g, w in zip(grads, given.weights, strict=True):
        if w.dim() != 2:
            raise ValueError(f"weight must be a matrix, got shape {tuple(w.shape)}")
        reference.check_linear(g, reference.Weights((w.t(),), (None,), False), "grad")
    width = given.weights[0].shape[0 if kind in (REDUCE_SCATTER, ALL_REDUCE) else 1]
    is_whole = kind == ALL_GATHER
    call = _call(kind, grads[0], group, sizes, dim, width, features, overlap, is_whole=is_whole)
    if call is None:
        return product(grads, given.weights)
    none = (False,) * len(grads)
    found = passes.run_backward(call, None, given.weights, grads, Wants(True, none, none)).x
    assert found is not None
    return found


def _whole_shape(kind: str, call: Call | None, x: Tensor) -> tuple[int, ...]:
    """The dims of grad that go with x, but for its features."""
    rows = list(x.shape[:-1])
    if call is not None and kind == ALL_GATHER:
        rows[call.rows.dim] = sum(call.rows.sizes)
    elif call is not None and kind == REDUCE_SCATTER:
        rows[call.rows.dim] = call.rows.sizes[call.comm.rank]
    return tuple(rows)


@torch.no_grad()
def _wgrad(
    kind: str,
    grad: Tensor,
    x: Tensor,
    group: GroupLike,
    sizes: Sequence[int] | None,
    dim: int,
    transposed: bool,
    overlap: bool | Overlap,
) -> tuple[Tensor, Tensor]:
    if grad.dtype != x.dtype or grad.device != x.device:
        raise TypeError(
            f"grad and x must have one dtype and device, got {grad.dtype} {grad.device} and {x.dtype} {x.device}"
        )
    for name, tensor in (("grad", grad), ("x", x)):
        if tensor.dim() == 0 or not tensor.is_floating_point():
            raise ValueError(
                f"{name} must be [..., features] of a floating dtype, got {tuple(tensor.shape)} {tensor.dtype}"
            )
    is_column = kind in (ALL_GATHER, COPY)
    call = _call(kind, x, group, sizes, dim, x.shape[-1], None, overlap, is_whole=not is_column)
    whole = _whole_shape(kind, call, x)
    if grad.shape[:-1] != whole:
        raise ValueError(
            f"grad and x must agree in all dims but the last, got {tuple(grad.shape)} and {tuple(x.shape)}, which goes "
            f"with {(*whole, 'N')}"
        )
    like = x.new_empty(x.shape[-1], grad.shape[-1]).t() if transposed else x.new_empty(grad.shape[-1], x.shape[-1])
    if call is None:
        by_weight, by_bias = passes.weight_grad(grad, x, like), passes.bias_grad(grad)
    else:
        found = passes.run_backward(call, x, [like], [grad], Wants(False, (True,), (True,)))
        by_weight, by_bias = found.weights[0], found.biases[0]  # type: ignore[assignment]
    return by_weight.t() if transposed else by_weight, by_bias


@checked(meta=True)
def all_gather_linear_dgrad(
    grad: Tensor | Sequence[Tensor],
    weight: Tensor | Sequence[Tensor],
    *,
    group: GroupLike,
    overlap: bool | Overlap = True,
    sizes: Sequence[int] | None = None,
    dim: int = -2,
    transposed: bool = False,
    features: int | None = None,
) -> Tensor:
    """dx [.., M_r, K] = reduce_scatter(grad @ weight) from grad [.., M, N_r]; of several weights, of their sum.

    One reduce-scatter. `sizes` are M_r, by default `fastpar.comm.shard_sizes`; all else as `all_gather_linear`.
    """
    return _dgrad(ALL_GATHER, grad, weight, group, sizes, dim, transposed, features, overlap)


@checked(meta=True)
def all_gather_linear_wgrad(
    grad: Tensor,
    x: Tensor,
    *,
    group: GroupLike,
    overlap: bool | Overlap = True,
    sizes: Sequence[int] | None = None,
    dim: int = -2,
    transposed: bool = False,
) -> tuple[Tensor, Tensor]:
    """(dweight [N_r, K], dbias [N_r]) from grad [.., M, N_r] and x [.., M_r, K], which is gathered: one all-gather.

    `transposed`: dweight is [K, N_r]. All else as `all_gather_linear`.
    """
    return _wgrad(ALL_GATHER, grad, x, group, sizes, dim, transposed, overlap)


@checked(meta=True)
def copy_to_linear_dgrad(
    grad: Tensor | Sequence[Tensor],
    weight: Tensor | Sequence[Tensor],
    *,
    group: GroupLike,
    overlap: bool | Overlap = True,
    transposed: bool = False,
    features: int | None = None,
) -> Tensor:
    """dx [..., K] = all_reduce(grad @ weight) from grad [..., N_r]; of several weights, of their sum.

    One all-reduce. All else as `copy_to_linear`.
    """
    return _dgrad(COPY, grad, weight, group, None, 0, transposed, features, overlap)


@checked(meta=True)
def copy_to_linear_wgrad(
    grad: Tensor, x: Tensor, *, group: GroupLike = None, transposed: bool = False
) -> tuple[Tensor, Tensor]:
    """(dweight [N_r, K], dbias [N_r]) from grad [..., N_r] and x [..., K]; local, so `group` may be left out."""
    return _wgrad(COPY, grad, x, group, None, 0, transposed, True)


@checked(meta=True)
def linear_reduce_scatter_dgrad(
    grad: Tensor,
    weight: Tensor,
    *,
    group: GroupLike,
    overlap: bool | Overlap = True,
    sizes: Sequence[int] | None = None,
    dim: int = -2,
    transposed: bool = False,
    features: int | None = None,
) -> Tensor:
    """dx [.., M, K_r] = all_gather(grad) @ weight from grad [.., M_r, N].

    One all-gather. `sizes` are M_r, by default as many as here on every rank; all else as `linear_reduce_scatter`.
    """
    return _dgrad(REDUCE_SCATTER, grad, weight, group, sizes, dim, transposed, features, overlap)


@checked(meta=True)
def linear_reduce_scatter_wgrad(
    grad: Tensor,
    x: Tensor,
    *,
    group: GroupLike,
    overlap: bool | Overlap = True,
    sizes: Sequence[int] | None = None,
    dim: int = -2,
    transposed: bool = False,
) -> tuple[Tensor, Tensor]:
    """(dweight [N, K_r], dbias [N]) from grad [.., M_r, N], which is gathered, and x [.., M, K_r]: one all-gather.

    dbias is whole on every rank. All else as `linear_reduce_scatter`.
    """
    return _wgrad(REDUCE_SCATTER, grad, x, group, sizes, dim, transposed, overlap)


@checked(meta=True)
def linear_all_reduce_dgrad(
    grad: Tensor, weight: Tensor, *, group: GroupLike = None, transposed: bool = False
) -> Tensor:
    """dx [..., K_r] = grad @ weight from grad [..., N]; local, so `group` may be left out."""
    return _dgrad(ALL_REDUCE, grad, weight, group, None, 0, transposed, None, True)


@checked(meta=True)
def linear_all_reduce_wgrad(
    grad: Tensor, x: Tensor, *, group: GroupLike = None, transposed: bool = False
) -> tuple[Tensor, Tensor]:
    """(dweight [N, K_r], dbias [N]) from grad [..., N] and x [..., K_r]; local, so `group` may be left out."""
    return _wgrad(ALL_REDUCE, grad, x, group, None, 0, transposed, True)
