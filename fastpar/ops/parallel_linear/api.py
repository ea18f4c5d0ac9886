"""Linear layers whose weights are split over a group, with their collectives overlapped, forward and backward.

    column-parallel   weight [N_r, K]   all_gather_linear       x split by token
                                        copy_to_linear          x the same on every rank
    row-parallel      weight [N, K_r]   linear_reduce_scatter   out split by token
                                        linear_all_reduce       out the same on every rank

                            forward                       dgrad                             wgrad
    all_gather_linear       all_gather(x) @ W.T           reduce_scatter(dout @ W)          dout.T @ all_gather(x)
    copy_to_linear          x @ W.T                       all_reduce(dout @ W)              dout.T @ x
    linear_reduce_scatter   reduce_scatter(x @ W.T)       all_gather(dout) @ W              all_gather(dout).T @ x
    linear_all_reduce       all_reduce(x @ W.T)           dout @ W                          dout.T @ x

x of all_gather_linear is gathered again in backward, not kept: a rank holds its own tokens only. One gather of dout
serves dgrad, wgrad and dbias of linear_reduce_scatter.

What overlaps. In backward, the gather of x travels during the product for dx, and the sum of dx over the ranks during
the product for the weight; this costs no extra kernel and is always done, but for small tensors on CPU. A product can
further be cut into chunks of rows whose collectives travel during the next chunk's product, which is done where it was
measured to be faster; see overlap.py, also for how ranks agree. `overlap=False` waits for every collective
where it is launched. The products are the same then, and so are the bits.

Several weights of a column-parallel layer, as of queries, keys and values or gate and up, may be passed as a sequence:
they share one gather of x, and their shares of dx are added before one collective.

Rounding: every rank's partial sums are rounded to the dtype of x before they are added; the sum over the ranks is what
`fastpar.comm.Communicator` says (float32 accumulation, one rounding).

Sources: Shoeybi et al. 2019 (arXiv:1909.08053); Korthikanti et al. 2022 (arXiv:2205.05198), who gather again in
backward and hide the sum of dx behind the weight's gradient, as Megatron-LM does. Gradients apart: Qi et al. 2023
(arXiv:2401.10241).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fastpar.arguments import checked
from fastpar.contracts import communicator
from fastpar.contracts import linear as reference
from fastpar.contracts.linear import OneOrSeveral, Weights
from fastpar.ops.parallel_linear.autograd import (
    ALL_GATHER_LINEAR,
    COPY_TO_LINEAR,
    LINEAR_ALL_REDUCE,
    LINEAR_REDUCE_SCATTER,
    apply,
)
from fastpar.ops.parallel_linear.overlap import Overlap
from fastpar.ops.parallel_linear.types import LinearCall, LinearSpec, RankRows
from fastpar.ops.weight_grad_store.store import WeightGradStore

if TYPE_CHECKING:
    from fastpar.comm import Communicator, GroupLike

# ---- arguments -------------------------------------------------------------------------------------------------------


def _autocast(x: Tensor, given: Weights) -> tuple[Tensor, Weights]:
    """The tensors in the dtype that torch.nn.functional.linear would compute in."""
    dtype = reference.autocast_dtype(x)
    if dtype is None:
        return x, given
    weights = tuple(w.to(dtype) for w in given.weights)
    biases = tuple(None if b is None else b.to(dtype) for b in given.biases)
    return x.to(dtype), Weights(weights, biases, given.several)


class LinearSizes(NamedTuple):
    """The sizes of a linear by which its chunks are chosen; the same on all ranks.

    width     the features that travel: of x for the column-parallel ones, of the output for the others
    features  the other features of all ranks together; None: do not look for measurements
    """

    width: int
    features: int | None


def make_call(
    spec: LinearSpec,
    x: Tensor,
    comm: Communicator,
    overlap: bool | Overlap,
    sizes: LinearSizes,
    dim: int = 0,
    tokens: Sequence[int] = (),
) -> LinearCall:
    """The call with its chunks chosen. `x` gives device and dtype, and with `tokens` (of each rank, along `dim`) the
    number of tokens of all."""
    overlap = Overlap.of(overlap)
    rows = math.prod(x.shape[:-1])
    if tokens:
        rows = math.prod(x.shape[:dim]) * sum(tokens) * math.prod(x.shape[dim + 1 : -1])

    in_forward, in_backward = (
        overlap.chunks(product, comm, x, rows, *sizes) if product else 1
        for product in (spec.forward_product, spec.backward_product)
    )
    forward = RankRows(dim, tuple(tokens), in_forward, overlap.enabled)
    return LinearCall(spec, comm, forward, forward._replace(chunks=in_backward))


class LayerCalls:
    """The calls of one layer: made for the first tensor of a shape, kept for those that follow it."""

    def __init__(self, spec: LinearSpec, comm: Communicator, sizes: LinearSizes) -> None:
        self._spec, self._comm, self._sizes = spec, comm, sizes
        self._kept: tuple[Any, bool | Overlap, LinearCall] | None = (
            None  # one attribute: other threads see both parts or none
        )

    def of(self, x: Tensor, overlap: bool | Overlap, dim: int = 0, tokens: tuple[int, ...] = ()) -> LinearCall:
        """The call for an x that needs no checks; `overlap` is the layer's, which users may change."""
        key = x.shape, x.dtype, dim, tokens
        kept = self._kept
        if kept is None or kept[0] != key or kept[1] is not overlap:
            dim = dim + x.dim() if dim < 0 else dim
            kept = key, overlap, make_call(self._spec, x, self._comm, overlap, self._sizes, dim, tokens)
            self._kept = kept
        return kept[2]


_COMPUTED = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})


def is_plain(x: Tensor, weight: Tensor, width: int | None) -> bool:
    """Whether x [..., width] needs no check against a weight of an ordinary layer, nor a conversion by autocast."""
    return (
        type(x) is Tensor
        and x.dtype is weight.dtype
        and x.dtype in _COMPUTED
        and x.layout is torch.strided
        and x.dim() > 1
        and x.shape[-1] == width
        and ((x.is_cpu and weight.is_cpu) or x.device == weight.device)
        and not torch._C._is_any_autocast_enabled()
        and not torch._C._functorch.is_functorch_wrapped_tensor(x)
    )


def _local(x: Tensor, given: Weights, store: WeightGradStore | None) -> tuple[Tensor, ...]:
    """Without a group. A call on one rank gives the same results, and defers the same gradients."""
    if store is None:
        pairs = zip(given.weights, given.biases, strict=True)
        return tuple(torch.nn.functional.linear(x, weight, bias) for weight, bias in pairs)
    from fastpar.comm import Communicator

    rows = RankRows(0, (), 1, False)
    return apply(
        LinearCall(COPY_TO_LINEAR, Communicator(None), rows, rows), x, given.weights, given.biases, store=store
    )


def _check_store(store: WeightGradStore | None) -> None:
    if store is not None and torch.compiler.is_compiling():
        raise ValueError("wgrad_store puts off work in eager code; leave it None under torch.compile")


def _unpacked(outs: Sequence[Tensor], given: Weights) -> Any:
    return tuple(outs) if given.several else outs[0]


# ---- public ----------------------------------------------------------------------------------------------------------


@checked(meta=True, tangents=True)
def all_gather_linear(
    x: Tensor,
    weight: OneOrSeveral,
    bias: Tensor | Sequence[Tensor | None] | None = None,
    *,
    group: GroupLike,
    overlap: bool | Overlap = True,
    sizes: Sequence[int] | None = None,
    dim: int = -2,
    transposed: bool = False,
    features: int | None = None,
    wgrad_store: WeightGradStore | None = None,
) -> OneOrSeveral:
    """Gather tokens from the group, then apply a column-parallel weight.

        x       [.., M_r, K]   this rank's tokens along `dim`; any floating dtype
        weight  [N_r, K]       this rank's output features, in the dtype of x (torch.autocast converts), or several
        bias    [N_r]
        out     [.., M, N_r]   M the sum of all M_r; a tuple for several weights

        forward  out = all_gather(x) @ weight.T + bias
        dgrad    dx  = reduce_scatter(dout @ weight), the shares of several weights added first
        wgrad    dweight = dout.T @ all_gather(x), dbias = dout.sum(0): gathered again, not saved

    Collectives: one all-gather of x in forward; in backward one reduce-scatter of the same size if x needs a gradient,
    and one all-gather if a weight does. (size - 1) / size of M K elements each.

    Args:
        group: ProcessGroup, 1-D DeviceMesh, Communicator, or None for a weight and an x that are whole. Under
            torch.compile it has to be a Communicator made outside.
        overlap: True, False or an `Overlap`; never changes a bit of the result as long as the table is the same.
        sizes: M_r of every rank, any of them 0; the default is as many as here on every rank.
        dim: the dim of x that is split. -1: by feature, over which the product sums. x is [.., M, K_r] then and every
            rank has all tokens, sizes are K_r, out is [.., M, N_r], and forward, dgrad and wgrad stand as above, with
            the collectives along the features. In one piece, whatever `overlap` has measured.
        transposed: weights are [K, N_r], as in GPT-2's Conv1D; their gradients are too.
        features: output features of all ranks and weights together, for a measured table; None: do not look there.
        wgrad_store: leave the gradients of weights and biases to this store (see `WeightGradStore`); by default that of
            the innermost `WeightGradStore.deferring()`, if there is one. An entry gathers x again, so all ranks must
            run theirs in the same order. Not under torch.compile.

    Worked example, two ranks: x [[1]] and [[2]], weights [[10]] and [[20]]: rank 0 has out [[10], [20]], rank 1
    [[20], [40]]; for dout of ones dx is [[30]] on both, dweight [[3]].

    Raises:
        ValueError, TypeError: shapes, dtypes, devices, sizes, dim, overlap.
        CommError: as `Communicator` raises it.
    """
    _check_store(wgrad_store)
    comm, given = communicator(group), reference.as_weights(weight, bias, transposed)
    if reference.is_contraction_dim(x, dim):
        outs = _gathered_along_contraction(x, given, comm, sizes, overlap, wgrad_store)
        return _unpacked(outs, given)
    x, given = _checked(x, given)
    dim = reference.check_sequence_dim(x, dim)
    sizes = reference.gathered_sizes(x, dim, sizes, comm)
    if comm is None:
        return _unpacked(_local(x, given, wgrad_store), given)
    call = make_call(ALL_GATHER_LINEAR, x, comm, overlap, LinearSizes(x.shape[-1], features), dim, sizes)
    return _unpacked(apply(call, x, given.weights, given.biases, store=wgrad_store), given)


def _gathered_along_contraction(
    x: Tensor,
    given: Weights,
    comm: Communicator | None,
    sizes: Sequence[int] | None,
    overlap: bool | Overlap,
    store: WeightGradStore | None,
) -> tuple[Tensor, ...]:
    """`all_gather_linear` of an x that is split by feature. In one piece: chunks of rows were not measured for it."""
    dim = x.dim() - 1
    sizes = reference.gathered_sizes(x, dim, sizes, comm)
    x, given = _checked(x, given, width=sum(sizes))
    if comm is None:
        return _local(x, given, store)
    rows = RankRows(dim, tuple(sizes), 1, Overlap.of(overlap).enabled)
    return apply(LinearCall(ALL_GATHER_LINEAR, comm, rows, rows), x, given.weights, given.biases, store=store)


def gathered_and_linear(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    *,
    group: GroupLike,
    dim: int,
    sizes: Sequence[int],
    overlap: bool | Overlap = True,
    features: int | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """(all_gather(x), outputs of `all_gather_linear`) from one gather, for callers that need the tokens as well.

    The gathered x is differentiable: where a gradient comes back to it, backward has one more reduce-scatter.
    """
    comm, given = communicator(group), reference.as_weights(tuple(weights), tuple(biases), False)
    x, given = _checked(x, given)
    dim = reference.check_sequence_dim(x, dim)
    sizes = reference.gathered_sizes(x, dim, sizes, comm)
    if comm is None:
        return x, _local(x, given, None)
    call = make_call(ALL_GATHER_LINEAR, x, comm, overlap, LinearSizes(x.shape[-1], features), dim, sizes)
    *outs, gathered = apply(call, x, given.weights, given.biases, keep=True)
    return gathered, tuple(outs)


@checked(meta=True, tangents=True)
def copy_to_linear(
    x: Tensor,
    weight: OneOrSeveral,
    bias: Tensor | Sequence[Tensor | None] | None = None,
    *,
    group: GroupLike,
    overlap: bool | Overlap = True,
    transposed: bool = False,
    features: int | None = None,
    wgrad_store: WeightGradStore | None = None,
) -> OneOrSeveral:
    """Apply a column-parallel weight to tokens that every rank has.

        x       [..., K]     the same on every rank
        weight  [N_r, K]     this rank's output features, or several
        bias    [N_r]
        out     [..., N_r]   a tuple for several weights

        forward  out = x @ weight.T + bias, local
        dgrad    dx  = all_reduce(dout @ weight), the shares of several weights added first
        wgrad    dweight = dout.T @ x, dbias = dout.sum(0), local

    Collectives: one all-reduce of x's size in backward, if x needs a gradient; it travels while dweight is computed.
    Arguments and errors as `all_gather_linear`.

    Worked example, two ranks: x [[2]] on both, weights [[10]] and [[20]]: out is [[20]] and [[40]]; for dout of ones dx
    is [[30]] on both, dweight [[2]].
    """
    _check_store(wgrad_store)
    comm, given = communicator(group), reference.as_weights(weight, bias, transposed)
    x, given = _checked(x, given)
    if comm is None:
        return _unpacked(_local(x, given, wgrad_store), given)
    call = make_call(COPY_TO_LINEAR, x, comm, overlap, LinearSizes(x.shape[-1], features))
    return _unpacked(apply(call, x, given.weights, given.biases, store=wgrad_store), given)


@checked(meta=True, tangents=True)
def linear_reduce_scatter(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    group: GroupLike,
    overlap: bool | Overlap = True,
    sizes: Sequence[int] | None = None,
    dim: int = -2,
    transposed: bool = False,
    features: int | None = None,
    wgrad_store: WeightGradStore | None = None,
) -> Tensor:
    """Apply a row-parallel weight, then add over the ranks and keep this rank's tokens.

        x       [.., M, K_r]   this rank's input features of all tokens
        weight  [N, K_r]
        bias    [N]            the same on every rank, added once
        out     [.., M_r, N]   this rank's tokens along `dim`

        forward  out = reduce_scatter(x @ weight.T) + bias
        dgrad    dx  = all_gather(dout) @ weight
        wgrad    dweight = all_gather(dout).T @ x, dbias = all_gather(dout).sum(0): whole on every rank, equal bits

    Collectives: one reduce-scatter of [M, N] in forward, one all-gather of the same size in backward.

    `sizes` are M_r, by default `fastpar.comm.shard_sizes`; `features` are the input features of all ranks together. An
    entry of `wgrad_store` gathers dout again. Other arguments and errors as `all_gather_linear`.

    Worked example, two ranks: x [[1], [2]] and [[3], [4]], weights [[10]] and [[20]]: out is [[70]] and [[100]]; for
    dout of ones dx is [[10], [10]] and [[20], [20]], dweight [[3]] and [[7]].
    """
    _check_store(wgrad_store)
    comm, given = communicator(group), reference.as_weights(weight, bias, transposed)
    x, given = _checked(x, given)
    dim = reference.check_sequence_dim(x, dim)
    sizes = reference.scattered_sizes(x.shape[dim], sizes, comm)
    if comm is None:
        return _local(x, given, wgrad_store)[0]
    width = given.weights[0].shape[0]
    call = make_call(LINEAR_REDUCE_SCATTER, x, comm, overlap, LinearSizes(width, features), dim, sizes)
    return apply(call, x, given.weights, given.biases, store=wgrad_store)[0]


@checked(meta=True, tangents=True)
def linear_all_reduce(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    group: GroupLike,
    overlap: bool | Overlap = True,
    transposed: bool = False,
    features: int | None = None,
    wgrad_store: WeightGradStore | None = None,
) -> Tensor:
    """Apply a row-parallel weight, then add over the ranks.

        x       [..., K_r]   this rank's input features
        weight  [N, K_r]
        bias    [N]          the same on every rank, added once
        out     [..., N]     the same on every rank

        forward  out = all_reduce(x @ weight.T) + bias
        dgrad    dx  = dout @ weight                              local
        wgrad    dweight = dout.T @ x, dbias = dout.sum(0)        local

    Collectives: one all-reduce of out's size in forward, none in backward. Arguments and errors as
    `linear_reduce_scatter`.

    Worked example, two ranks: x [[1]] and [[3]], weights [[10]] and [[20]]: out is [[70]]; for dout of ones dx is
    [[10]] and [[20]], dweight [[1]] and [[3]].
    """
    _check_store(wgrad_store)
    comm, given = communicator(group), reference.as_weights(weight, bias, transposed)
    x, given = _checked(x, given)
    if comm is None:
        return _local(x, given, wgrad_store)[0]
    call = make_call(LINEAR_ALL_REDUCE, x, comm, overlap, LinearSizes(given.weights[0].shape[0], features))
    return apply(call, x, given.weights, given.biases, store=wgrad_store)[0]


def _checked(x: Tensor, given: Weights, width: int | None = None) -> tuple[Tensor, Weights]:
    """The tensors in the dtype of autocast, checked to fit together."""
    if isinstance(x, Tensor) and x.is_floating_point():
        x, given = _autocast(x, given)
    reference.check_linear(x, given, width=width)
    return x, given
