"""Linear layers split over a group: forward, dgrad and wgrad of the four kinds, and their autograd.

The kinds, their algebra and their collectives are described at the public functions, in api.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fastpar.comm import (
    Communicator,
    copy_to,
    gather_from,
    gather_sequence,
    reduce_from,
    reduce_scatter_sequence,
)
from fastpar.comm.recompute_cache import kept
from fastpar.ops.parallel_linear.gemms import (
    Rows,
    as_matrix,
    gathered_product,
    launch,
    product,
    product_all_reduced,
    product_reduce_scattered,
)
from fastpar.ops.weight_grad_store.store import WeightGradStore, current_store

ALL_GATHER, COPY, REDUCE_SCATTER, ALL_REDUCE = "all_gather", "copy", "reduce_scatter", "all_reduce"


class Call(NamedTuple):
    """A checked call, apart from its tensors.

    kind             where the collective is: before the product (all_gather), after it (reduce_scatter, all_reduce), or
                     in backward only (copy)
    comm             of at least two ranks
    rows             of forward
    backward_chunks  the chunks of the product with a collective in backward
    """

    kind: str
    comm: Communicator
    rows: Rows
    backward_chunks: int

    @property
    def backward_rows(self) -> Rows:
        return self.rows._replace(chunks=self.backward_chunks)


class Wants(NamedTuple):
    """Which gradients are asked for: of x, of each weight, of each bias."""

    x: bool
    weights: tuple[bool, ...]
    biases: tuple[bool, ...]


class Grads(NamedTuple):
    """Gradients; None: not asked for."""

    x: Tensor | None
    weights: tuple[Tensor | None, ...]
    biases: tuple[Tensor | None, ...]


# ---- the passes ------------------------------------------------------------------------------------------------------


def forward(
    call: Call, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], *, keep: bool
) -> tuple[list[Tensor], Tensor | None]:
    """The outputs by weight, and with `keep` what was gathered."""
    matrices = [weight.t() for weight in weights]
    if call.kind == ALL_GATHER:
        return gathered_product(x, matrices, biases, call.comm, call.rows, keep=keep)
    if call.kind == COPY:
        return [product([x], [b], bias) for b, bias in zip(matrices, biases, strict=True)], None
    summed = product_reduce_scattered if call.kind == REDUCE_SCATTER else product_all_reduced
    out = summed([x], matrices, call.comm, call.rows, busy=False)()
    (bias,) = biases
    return [out if bias is None else out.add_(bias)], None


def backward(
    call: Call, x: Tensor | None, weights: Sequence[Tensor], grads: Sequence[Tensor | None], wants: Wants
) -> Grads:
    """The gradients; `x` is needed for those of the weights only. At least one of `grads` is not None."""
    if call.kind in (ALL_GATHER, COPY):
        return _column_backward(call, x, weights, grads, wants)
    return _row_backward(call, x, weights[0], grads[0], wants)


def _column_backward(
    call: Call, x: Tensor | None, weights: Sequence[Tensor], grads: Sequence[Tensor | None], wants: Wants
) -> Grads:
    """The gather of x travels during the product for dx, and the sum of dx during those for the weights."""
    comm, rows, wants_weights = call.comm, call.backward_rows, any(wants.weights)
    gathered, summed = None, None
    if wants_weights and call.kind == ALL_GATHER:
        assert x is not None
        concurrent = rows.concurrent and wants.x
        gathered = launch(comm, "all_gather", x, concurrent=concurrent, dim=rows.dim, sizes=rows.sizes)
    if wants.x:
        given = [(grad, weight) for grad, weight in zip(grads, weights, strict=True) if grad is not None]
        sum_over_ranks = product_reduce_scattered if call.kind == ALL_GATHER else product_all_reduced
        operands = [grad for grad, _ in given], [weight for _, weight in given]
        summed = sum_over_ranks(*operands, comm, rows, busy=wants_weights)
    by_parameters = _parameter_grads(x if gathered is None else gathered(), weights, grads, wants)
    return Grads(None if summed is None else summed(), *by_parameters)


def _row_backward(call: Call, x: Tensor | None, weight: Tensor, grad: Tensor | None, wants: Wants) -> Grads:
    assert grad is not None
    by_x = None
    if call.kind == ALL_REDUCE:
        by_x = product([grad], [weight]) if wants.x else None
    elif wants.x:
        keep = any((*wants.weights, *wants.biases))
        (by_x,), grad = gathered_product(grad, [weight], [None], call.comm, call.backward_rows, keep=keep)
    elif any((*wants.weights, *wants.biases)):
        grad = call.comm.all_gather(grad, dim=call.rows.dim, sizes=call.rows.sizes)
    return Grads(by_x, *_parameter_grads(x, [weight], [grad], wants))


def _parameter_grads(
    x: Tensor | None, weights: Sequence[Tensor], grads: Sequence[Tensor | None], wants: Wants
) -> tuple[tuple[Tensor | None, ...], tuple[Tensor | None, ...]]:
    """Gradients by the weights and the biases from whole x and output gradients."""
    by_weights: list[Tensor | None] = []
    by_biases: list[Tensor | None] = []
    for weight, grad, wants_weight, wants_bias in zip(weights, grads, wants.weights, wants.biases, strict=True):
        is_given = grad is not None
        by_weights.append(
            weight_grad(cast(Tensor, grad), cast(Tensor, x), weight) if is_given and wants_weight else None
        )
        by_biases.append(bias_grad(cast(Tensor, grad)) if is_given and wants_bias else None)
    return tuple(by_weights), tuple(by_biases)


def weight_grad(grad: Tensor, x: Tensor, like: Tensor) -> Tensor:
    """grad.T @ x [N, K] from grad [..., N] and x [..., K], stored the way `like` is: rows or columns first."""
    grad, x = as_matrix(grad), as_matrix(x)
    if not like.is_contiguous() and like.t().is_contiguous():
        return product([x.t()], [grad]).t()
    return product([grad.t()], [x])


def bias_grad(grad: Tensor) -> Tensor:
    """Sum over the tokens, [..., N] -> [N]."""
    return as_matrix(grad).sum(0)


# ---- autograd --------------------------------------------------------------------------------------------------------


class Deferred(NamedTuple):
    """Where the gradients of weights and biases go when they are computed later."""

    store: WeightGradStore
    weights: tuple[Tensor, ...]
    biases: tuple[Tensor | None, ...]


class _ParallelLinear(torch.autograd.Function):
    """Outputs by weight, and with `keep` what was gathered, which has no gradient here (`_AsGathered` gives it one)."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, keep: bool, deferred: Deferred | None, anchor: Tensor | None, x: Tensor, *parameters: Any
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        count = len(parameters) // 2
        weights, biases = parameters[:count], parameters[count:]
        needs = ctx.needs_input_grad[4:]
        ctx.wants = Wants(needs[0], tuple(needs[1 : 1 + count]), tuple(needs[1 + count :]))
        ctx.call, ctx.deferred = call, deferred
        given = weights if deferred is None else deferred.weights
        needs_x = any(weight.requires_grad for weight in given)
        # The same tensors with and without a store, since a recomputation may run without it.
        ctx.save_for_backward(x if needs_x else None, *weights)
        outs, gathered = run_forward(call, x, weights, biases, keep=keep)
        if gathered is None:
            return tuple(outs)
        ctx.mark_non_differentiable(gathered)
        return (*outs, gathered)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        grads = grads[: len(weights)]
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True
            found = _differentiable_backward(ctx.call, x, weights, grads, ctx.wants)
        else:
            found = run_backward(ctx.call, x, weights, grads, ctx.wants)
        if ctx.deferred is not None:
            _defer(ctx, x, grads)
        return None, None, None, None, found.x, *found.weights, *found.biases


class _AsGathered(torch.autograd.Function):
    """What a gather has brought, as a function of what was sent."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gathered: Tensor, call: Call) -> Tensor:
        ctx.call = call
        return gathered.view_as(gathered)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        call = ctx.call
        return reduce_scatter_sequence(grads[0], call.comm, dim=call.rows.dim, sizes=call.rows.sizes), None, None


def run_forward(
    call: Call, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], *, keep: bool
) -> tuple[list[Tensor], Tensor | None]:
    """`forward`; as one op under torch.compile."""
    if torch.compiler.is_compiling():
        from fastpar.ops.parallel_linear.torch_ops import compiled_forward

        return compiled_forward(call, x, weights, biases, keep=keep)
    outs, gathered = kept(lambda: forward(call, x, weights, biases, keep=keep))
    # Not as views: autograd refuses in-place operations on a view that a Function returns.
    return [torch.ops.aten._unsafe_view(out, out.shape) if out._is_view() else out for out in outs], gathered


def run_backward(
    call: Call, x: Tensor | None, weights: Sequence[Tensor], grads: Sequence[Tensor | None], wants: Wants
) -> Grads:
    """`backward`; as one op under torch.compile."""
    if torch.compiler.is_compiling():
        from fastpar.ops.parallel_linear.torch_ops import compiled_backward

        return compiled_backward(call, x, weights, grads, wants)
    return backward(call, x, weights, grads, wants)


def apply(
    call: Call,
    x: Tensor,
    weights: tuple[Tensor, ...],
    biases: tuple[Tensor | None, ...],
    *,
    keep: bool = False,
    store: WeightGradStore | None = None,
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """The outputs by weight and, with `keep` (kind all_gather), the gathered x; all differentiable.

    Without a `store`, that of the innermost `WeightGradStore.deferring()` is used.
    """
    needs_grad = any(t is not None and t.requires_grad for t in (x, *weights, *biases))
    if not (torch.is_grad_enabled() and needs_grad):
        with torch.no_grad():
            outs, gathered = run_forward(call, x, weights, biases, keep=keep)
        return tuple(outs), gathered
    deferred, anchor = None, None
    store = current_store() if store is None else store
    if store is not None:
        deferred = Deferred(store, weights, biases)
        weights = tuple(weight.detach() for weight in weights)
        biases = tuple(None if bias is None else bias.detach() for bias in biases)
        anchor = x.new_empty(0).requires_grad_()  # backward runs even where x needs no gradient
    found = _ParallelLinear.apply(call, keep, deferred, anchor, x, *weights, *biases)
    if not keep:
        return found, None
    *outs, gathered = found
    return tuple(outs), _AsGathered.apply(x, gathered, call) if x.requires_grad else gathered


def _defer(ctx: Any, x: Tensor | None, grads: Sequence[Tensor | None]) -> None:
    call, (store, weights, biases) = ctx.call, ctx.deferred
    parameters = [p for p in (*weights, *biases) if p is not None and p.requires_grad]
    if not parameters:
        return
    wants = Wants(False, *(tuple(p is not None and p.requires_grad for p in each) for each in (weights, biases)))
    likes = [weight.detach() for weight in weights]

    def compute() -> list[Tensor | None]:
        found = backward(call, x, likes, grads, wants)
        pairs = zip((*found.weights, *found.biases), (*wants.weights, *wants.biases), strict=True)
        return [grad for grad, wanted in pairs if wanted]

    store.put(compute, parameters, sequence_nr=ctx._sequence_nr(), is_fresh=True)


def _differentiable_backward(
    call: Call, x: Tensor | None, weights: Sequence[Tensor], grads: Sequence[Tensor | None], wants: Wants
) -> Grads:
    """`backward` from operations that autograd knows, for second derivatives; the values are the same."""
    comm = call.comm
    where: dict[str, Any] = {"dim": call.rows.dim, "sizes": call.rows.sizes}
    by_bias = list(grads)
    if call.kind in (ALL_GATHER, COPY):
        shares = [grad @ weight for grad, weight in zip(grads, weights, strict=True) if grad is not None]
        is_gather = call.kind == ALL_GATHER
        by_x = None
        if wants.x:
            partial = cast(Tensor, sum(shares))
            by_x = reduce_scatter_sequence(partial, comm, **where) if is_gather else reduce_from(partial, comm)
        whole = None
        if any(wants.weights):
            assert x is not None
            whole = gather_sequence(x, comm, **where) if is_gather else copy_to(x, comm)
    else:
        (grad,) = grads
        assert grad is not None
        is_gather = call.kind == REDUCE_SCATTER
        whole_grad = gather_sequence(grad, comm, **where) if is_gather else copy_to(grad, comm)
        by_bias = [gather_from(grad, comm, **where) if is_gather and any(wants.biases) else grad]
        by_x, whole, grads = whole_grad @ weights[0] if wants.x else None, x, [whole_grad]
    by_weights = tuple(
        as_matrix(grad).t() @ as_matrix(whole) if grad is not None and whole is not None and wanted else None
        for grad, wanted in zip(grads, wants.weights, strict=True)
    )
    by_biases = tuple(
        bias_grad(grad) if grad is not None and wanted else None
        for grad, wanted in zip(by_bias, wants.biases, strict=True)
    )
    return Grads(by_x, by_weights, by_biases)
