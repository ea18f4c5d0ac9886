"""The autograd functions of the parallel linears: forward, dgrad and wgrad of each on one screen.

Tensors are suffixed by how they are sharded over the R ranks: `_m` by token, `_n` by output feature, `_k` by input
feature; without a suffix they are whole. What the public functions promise is said in api.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from fastpar.comm import copy_to, gather_from, gather_sequence, reduce_from, reduce_scatter_sequence
from fastpar.comm.autograd import not_a_view
from fastpar.comm.recompute_cache import is_taping, kept
from fastpar.ops._autograd import apply_plain, dtensor_grad
from fastpar.ops.parallel_linear import torch_ops
from fastpar.ops.parallel_linear.gemms import (
    all_gather_matmul,
    as_matrix,
    launch,
    linear,
    matmul,
    matmul_all_reduce,
    matmul_reduce_scatter,
)
from fastpar.ops.parallel_linear.types import DeferredGrads, LinearCall, LinearSpec
from fastpar.ops.weight_grad_store.store import WeightGradStore, current_store, without_autocast

T = TypeVar("T")
Grads = list[Tensor | None]  # of x, of each weight, of each bias; None: not asked for
Needs = Sequence[bool]  # which of these are asked for, in the same order


class ParallelLinear(torch.autograd.Function):
    """What the four have in common: what is saved, what is deferred, DTensor parameters, recomputation.

    A subclass computes on local tensors:

        compute         outputs by weight, and the gathered x where it is asked for
        gradients       of x, the weights and the biases, as far as `needs` asks for them. At least one of `grads` is
                        not None, and x is there if a weight needs a gradient
        differentiable  the same values from operations that autograd knows, for second derivatives
    """

    @staticmethod
    def forward(
        ctx: Any,
        call: LinearCall,
        keep: bool,
        sharded: bool,
        deferred: DeferredGrads | None,
        x: Tensor,
        *parameters: Any,
    ) -> tuple[Tensor, ...]:
        """`parameters` are the weights, the biases and, where they are deferred, the anchor."""
        ctx.set_materialize_grads(False)
        count = len(parameters) // 2
        needs = ctx.needs_input_grad[4:]
        ctx.call, ctx.deferred, ctx.sharded = call, deferred, parameters if sharded else ()
        # The shards of DTensors are taken here: a node of its own for each would cost as much as a small GEMM.
        local: Any = [None if p is None else p._local_tensor for p in parameters] if sharded else parameters
        weights, biases = local[:count], local[count : 2 * count]
        keeps_x = any(needs[1 : 1 + count] if deferred is None else (w.requires_grad for w in deferred.weights))
        # The same tensors with and without a store, since a recomputation may run without it.
        ctx.save_for_backward(x if keeps_x else None, *weights)
        outs, whole = _run(call, x, weights, biases, keep)
        if not keep:
            return tuple(outs)
        whole = x.view_as(x) if whole is None else whole
        if not needs[0]:
            ctx.mark_non_differentiable(whole)
        return (*outs, whole)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        call, (x, *weights) = ctx.call, ctx.saved_tensors
        count, needs = len(weights), ctx.needs_input_grad[4:]
        whole_grad, grads = (grads[count] if len(grads) > count else None), grads[:count]
        found: Grads = [None] * (1 + 2 * count)
        if grads[0] is not None or any(grad is not None for grad in grads):
            if torch.compiler.is_compiling():
                found = torch_ops.run_backward(call, x, weights, grads, needs)
            elif torch.is_grad_enabled():  # create_graph=True
                weights = [p.to_local() for p in ctx.sharded[:count]] if ctx.sharded else weights
                found = call.spec.function.differentiable(call, x, weights, grads, needs)
            else:
                found = _in_chosen_dtypes(call.spec.function.gradients, call, x, weights, grads, needs)
            if ctx.deferred is not None:
                _defer(call, ctx.deferred, x, grads, ctx._sequence_nr())
        if whole_grad is not None and needs[0]:
            share = _sum_whole(call, whole_grad)
            found[0] = share if found[0] is None else found[0] + share
        for j, parameter in enumerate(ctx.sharded, 1):
            grad = found[j]
            if grad is not None:
                found[j] = _as_dtensor(grad, parameter)
        nothing = (None,) * (len(needs) - len(found))  # for the anchor
        return (None, None, None, None, *found, *nothing)


class AllGatherLinear(ParallelLinear):
    """Tokens gathered, then a column-parallel linear.

    x_m [.., M/R, K]   w_n [N/R, K] (or several)   out_n [.., M, N/R]

    forward  out_n = all_gather(x_m) @ w_n.T
    dgrad    dx_m  = reduce_scatter(sum of dout_n @ w_n)      travels during wgrad
    wgrad    dw_n  = dout_n.T @ all_gather(x_m)               gathered again, during dgrad
    """

    @staticmethod
    def compute(
        call: LinearCall, x_m: Tensor, weights_n: Sequence[Tensor], biases_n: Sequence[Tensor | None], keep: bool
    ) -> tuple[list[Tensor], Tensor | None]:
        return all_gather_matmul(x_m, weights_n, biases_n, call.comm, call.rows, keep=keep)

    @staticmethod
    def gradients(
        call: LinearCall, x_m: Any, weights_n: Sequence[Tensor], grads_n: Sequence[Any], needs: Needs
    ) -> Grads:
        comm, rows, needs_weights = call.comm, call.backward, any(needs[1 : 1 + len(weights_n)])
        x, dx_m = None, None
        if needs_weights:
            # Launched first, so that it travels while dgrad is computed.
            concurrent = rows.concurrent and needs[0]
            x = launch(comm, "all_gather", x_m, concurrent=concurrent, dim=rows.dim, sizes=rows.sizes)
        if needs[0]:
            dx_m = matmul_reduce_scatter(*_given(grads_n, weights_n), comm, rows, busy=needs_weights)
        by_parameters = _wgrad(None if x is None else x(), weights_n, grads_n, needs)
        return [None if dx_m is None else dx_m(), *by_parameters]

    @staticmethod
    def differentiable(
        call: LinearCall, x_m: Any, weights_n: Sequence[Tensor], grads_n: Sequence[Any], needs: Needs
    ) -> Grads:
        dim, sizes = call.rows.dim, call.rows.sizes
        x = gather_sequence(x_m, call.comm, dim=dim, sizes=sizes) if any(needs[1 : 1 + len(weights_n)]) else None
        dx_m = (
            reduce_scatter_sequence(_dgrad(grads_n, weights_n), call.comm, dim=dim, sizes=sizes) if needs[0] else None
        )
        return [dx_m, *_differentiable_wgrad(x, grads_n, grads_n, needs)]


class CopyToLinear(ParallelLinear):
    """A column-parallel linear of tokens that every rank has.

    x [.., K]   w_n [N/R, K] (or several)   out_n [.., N/R]

    forward  out_n = x @ w_n.T                                local
    dgrad    dx    = all_reduce(sum of dout_n @ w_n)          travels during wgrad
    wgrad    dw_n  = dout_n.T @ x                             local
    """

    @staticmethod
    def compute(
        call: LinearCall, x: Tensor, weights_n: Sequence[Tensor], biases_n: Sequence[Tensor | None], keep: bool
    ) -> tuple[list[Tensor], Tensor | None]:
        return [linear(x, weight, bias) for weight, bias in zip(weights_n, biases_n, strict=True)], None

    @staticmethod
    def gradients(call: LinearCall, x: Any, weights_n: Sequence[Tensor], grads_n: Sequence[Any], needs: Needs) -> Grads:
        dx, shape = None, next(grad.shape for grad in grads_n if grad is not None)
        grads_n = [None if grad is None else as_matrix(grad) for grad in grads_n]  # once, for dgrad and wgrad
        if needs[0]:
            busy = any(needs[1 : 1 + len(weights_n)])
            dx = matmul_all_reduce(*_given(grads_n, weights_n), call.comm, call.backward, busy=busy)
        by_parameters = _wgrad(x, weights_n, grads_n, needs)
        return [None if dx is None else dx().view(*shape[:-1], weights_n[0].shape[1]), *by_parameters]

    @staticmethod
    def differentiable(
        call: LinearCall, x: Any, weights_n: Sequence[Tensor], grads_n: Sequence[Any], needs: Needs
    ) -> Grads:
        x = copy_to(x, call.comm) if any(needs[1 : 1 + len(weights_n)]) else None
        dx = reduce_from(_dgrad(grads_n, weights_n), call.comm) if needs[0] else None
        return [dx, *_differentiable_wgrad(x, grads_n, grads_n, needs)]


class LinearReduceScatter(ParallelLinear):
    """A row-parallel linear, then the sum over the ranks, of which each keeps its tokens.

    x_k [.., M, K/R]   w_k [N, K/R]   out_m [.., M/R, N]

    forward  out_m = reduce_scatter(x_k @ w_k.T) + bias
    dgrad    dx_k  = all_gather(dout_m) @ w_k
    wgrad    dw_k  = all_gather(dout_m).T @ x_k, dbias = all_gather(dout_m).sum(0): one gather for all three
    """

    @staticmethod
    def compute(
        call: LinearCall, x_k: Tensor, weights_k: Sequence[Tensor], biases: Sequence[Tensor | None], keep: bool
    ) -> tuple[list[Tensor], Tensor | None]:
        out_m = matmul_reduce_scatter([x_k], [weights_k[0].t()], call.comm, call.rows, busy=False)()
        return [out_m if biases[0] is None else out_m.add_(biases[0])], None

    @staticmethod
    def gradients(
        call: LinearCall, x_k: Any, weights_k: Sequence[Tensor], grads_m: Sequence[Any], needs: Needs
    ) -> Grads:
        comm, rows, dx_k = call.comm, call.backward, None
        dout = dout_m = grads_m[0]
        if needs[0]:
            keep = needs[1] or needs[2]
            (dx_k,), gathered = all_gather_matmul(dout_m, [weights_k[0].t()], [None], comm, rows, keep=keep)
            dout = gathered if gathered is not None else dout_m
        elif needs[1] or needs[2]:
            dout = launch(comm, "all_gather", dout_m, concurrent=False, dim=rows.dim, sizes=rows.sizes)()
        return [dx_k, *_wgrad(x_k, weights_k, [dout], needs)]

    @staticmethod
    def differentiable(
        call: LinearCall, x_k: Any, weights_k: Sequence[Tensor], grads_m: Sequence[Any], needs: Needs
    ) -> Grads:
        dim, sizes, dout_m = call.rows.dim, call.rows.sizes, grads_m[0]
        # Each rank uses the whole dout for its features: the sum over the ranks of what comes back is the gradient.
        dout = gather_sequence(dout_m, call.comm, dim=dim, sizes=sizes)
        # Of the bias every rank computes the same: what comes back is whole.
        for_bias = gather_from(dout_m, call.comm, dim=dim, sizes=sizes) if needs[2] else None
        dx_k = dout @ weights_k[0] if needs[0] else None
        return [dx_k, *_differentiable_wgrad(x_k, [dout], [for_bias], needs)]


class LinearAllReduce(ParallelLinear):
    """A row-parallel linear, then the sum over the ranks.

    x_k [.., K/R]   w_k [N, K/R]   out [.., N]

    forward  out  = all_reduce(x_k @ w_k.T) + bias
    dgrad    dx_k = dout @ w_k                                local
    wgrad    dw_k = dout.T @ x_k, dbias = dout.sum(0)         local
    """

    @staticmethod
    def compute(
        call: LinearCall, x_k: Tensor, weights_k: Sequence[Tensor], biases: Sequence[Tensor | None], keep: bool
    ) -> tuple[list[Tensor], Tensor | None]:
        out = matmul_all_reduce([x_k], [weights_k[0].t()], call.comm, call.rows, busy=False)()
        return [out if biases[0] is None else out.add_(biases[0])], None

    @staticmethod
    def gradients(call: LinearCall, x_k: Any, weights_k: Sequence[Tensor], grads: Sequence[Any], needs: Needs) -> Grads:
        dx_k = matmul([grads[0]], weights_k) if needs[0] else None
        return [dx_k, *_wgrad(x_k, weights_k, grads, needs)]

    @staticmethod
    def differentiable(
        call: LinearCall, x_k: Any, weights_k: Sequence[Tensor], grads: Sequence[Any], needs: Needs
    ) -> Grads:
        # What comes back to dout is a part on every rank, but for the bias, of which all compute the same.
        dout = copy_to(grads[0], call.comm)
        dx_k = dout @ weights_k[0] if needs[0] else None
        return [dx_k, *_differentiable_wgrad(x_k, [dout], grads, needs)]


def _spec(
    op: str, function: type[ParallelLinear], forward: str, backward: str, *, gathers_input: bool = False
) -> LinearSpec:
    spec = LinearSpec(op, function, gathers_input, forward, backward)
    torch_ops.register(spec)
    return spec


_GATHER, _SCATTER, _REDUCE = "all_gather_linear", "linear_reduce_scatter", "linear_all_reduce"
ALL_GATHER_LINEAR = _spec(_GATHER, AllGatherLinear, _GATHER, _SCATTER, gathers_input=True)
COPY_TO_LINEAR = _spec("copy_to_linear", CopyToLinear, "", _REDUCE)
LINEAR_REDUCE_SCATTER = _spec(_SCATTER, LinearReduceScatter, _SCATTER, _GATHER)
LINEAR_ALL_REDUCE = _spec(_REDUCE, LinearAllReduce, _REDUCE, "")


# ---- gradients of parameters -----------------------------------------------------------------------------------------


def _given(grads: Sequence[Any], weights: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The gradients that are there, with their weights."""
    given = [(grad, weight) for grad, weight in zip(grads, weights, strict=True) if grad is not None]
    return [grad for grad, _ in given], [weight for _, weight in given]


def _wgrad(x: Any, weights: Sequence[Tensor], grads: Sequence[Tensor | None], needs: Needs) -> list[Tensor | None]:
    """dw_j = dout_j.T @ x and dbias_j = dout_j.sum(0), from whole x and whole output gradients."""
    count = len(weights)
    found: list[Tensor | None] = [None] * (2 * count)
    rows = as_matrix(x) if any(needs[1 : 1 + count]) else None
    for j, weight in enumerate(weights):
        grad = grads[j]
        if grad is not None and (needs[1 + j] or needs[1 + count + j]):
            grad = as_matrix(grad)
            if rows is not None and needs[1 + j]:
                found[j] = _weight_grad(grad, rows, weight)
            if needs[1 + count + j]:
                found[count + j] = grad.sum(0)
    return found


def _weight_grad(grad: Tensor, x: Tensor, like: Tensor) -> Tensor:
    """grad.T @ x [N, K] from grad [M, N] and x [M, K], stored the way `like` is: rows or columns first."""
    if not like.is_contiguous() and like.t().is_contiguous():
        return matmul((x.t(),), (grad,)).t()
    return matmul((grad.t(),), (x,))


def _dgrad(grads: Sequence[Tensor | None], weights: Sequence[Tensor]) -> Tensor:
    """This rank's share of dx, differentiable."""
    return cast(Tensor, sum(grad @ weight for grad, weight in zip(*_given(grads, weights), strict=True)))


def _differentiable_wgrad(
    x: Tensor | None, grads: Sequence[Tensor | None], grads_of_biases: Sequence[Tensor | None], needs: Needs
) -> list[Tensor | None]:
    count = len(grads)
    by_weights = [
        as_matrix(grad).t() @ as_matrix(x) if grad is not None and x is not None and needed else None
        for grad, needed in zip(grads, needs[1 : 1 + count], strict=True)
    ]
    by_biases = [
        as_matrix(grad).sum(0) if grad is not None and needed else None
        for grad, needed in zip(grads_of_biases, needs[1 + count : 1 + 2 * count], strict=True)
    ]
    return [*by_weights, *by_biases]


# ---- calling ---------------------------------------------------------------------------------------------------------


def apply(
    call: LinearCall,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    *,
    keep: bool = False,
    sharded: bool = False,
    store: WeightGradStore | None = None,
) -> tuple[Tensor, ...]:
    """The outputs by weight and, with `keep`, the whole x; all differentiable.

    Without a `store`, that of the innermost `WeightGradStore.deferring()` is used. `sharded`: weights and biases are
    DTensors, and get their gradients as such; not with a store, nor under torch.compile.
    """
    parameters = (*weights, *biases)
    if not torch.is_grad_enabled() or not (
        x.requires_grad or any(p is not None and p.requires_grad for p in parameters)
    ):
        with torch.no_grad():
            if sharded:
                weights = [cast(Any, weight)._local_tensor for weight in weights]
                biases = [None if bias is None else cast(Any, bias)._local_tensor for bias in biases]
            outs, whole = _run(call, x, weights, biases, keep)
        return (*outs, x if whole is None else whole) if keep else tuple(outs)
    store = current_store() if store is None and not sharded else store
    if store is None:
        found: Any = apply_plain(call.spec.function, call, keep, sharded, None, x, *parameters)
    else:
        deferred = DeferredGrads(store, tuple(weights), tuple(biases))
        detached = [None if p is None else p.detach() for p in parameters]
        anchor = x.new_empty(0).requires_grad_()  # backward runs even where x needs no gradient
        found = apply_plain(call.spec.function, call, keep, False, deferred, x, *detached, anchor)
    outputs: tuple[Tensor, ...] = found
    return outputs


def _run(
    call: LinearCall, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], keep: bool
) -> tuple[Sequence[Tensor], Tensor | None]:
    """`compute`; as one op under torch.compile, and from the tape where a forward is recomputed."""
    if torch.compiler.is_compiling():
        return torch_ops.run_forward(call, x, weights, biases, keep)
    if not is_taping():
        return _computed(call, x, weights, biases, keep)
    return kept(lambda: _computed(call, x, weights, biases, keep))


def _computed(call: LinearCall, *arguments: Any) -> tuple[Sequence[Tensor], Tensor | None]:
    outs, whole = _in_chosen_dtypes(call.spec.function.compute, call, *arguments)
    return [not_a_view(out) for out in outs], whole


def _sum_whole(call: LinearCall, dx: Tensor) -> Tensor:
    """The gradient of x from that of the whole x, which a column-parallel linear has returned beside its outputs."""
    if call.spec.gathers_input:
        return reduce_scatter_sequence(dx, call.comm, dim=call.rows.dim, sizes=call.rows.sizes)
    return reduce_from(dx, call.comm)


def _defer(
    call: LinearCall, deferred: DeferredGrads, x: Tensor | None, grads: Sequence[Tensor | None], sequence_nr: int
) -> None:
    """Leave wgrad to the store; what it takes is kept, x as it came."""
    store, weights, biases = deferred
    needs = [False, *(p is not None and p.requires_grad for p in (*weights, *biases))]
    parameters = [p for p in (*weights, *biases) if p is not None and p.requires_grad]
    if not parameters:
        return
    likes = [weight.detach() for weight in weights]

    def compute() -> Grads:
        found = call.spec.function.gradients(call, x, likes, grads, needs)
        return [grad for grad, needed in zip(found, needs, strict=True) if needed]

    store.put(compute, parameters, sequence_nr=sequence_nr, is_fresh=True)


def _as_dtensor(grad: Tensor, parameter: Any) -> Any:
    """A shard's gradient as that of the DTensor."""
    if torch.is_grad_enabled():
        where = {"shape": parameter.shape, "stride": parameter.stride(), "run_check": False}
        return parameter.from_local(grad, parameter.device_mesh, parameter.placements, **where)
    # As FSDP2 makes its gradients: `from_local` is a node of autograd itself, and takes as long as a small GEMM.
    return dtensor_grad(grad, parameter._spec)


def _in_chosen_dtypes(function: Callable[..., T], *args: Any) -> T:
    """Call it without autocast, which has chosen already: a call where there is none costs no context."""
    if not torch._C._is_any_autocast_enabled():
        return function(*args)
    with without_autocast():
        return function(*args)
