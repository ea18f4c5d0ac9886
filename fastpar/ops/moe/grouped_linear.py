"""Linear layers of several experts on rows that lie by expert, with dgrad and wgrad apart.

A loop over experts in autograd adds every expert's share of x and weight to a tensor of zeros of the whole size, and
concatenates the outputs. Here each product writes where its result belongs, and an expert without rows has a weight
gradient of zeros, neither None nor what lay in the memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastpar.arguments import checked
from fastpar.contracts.linear import autocast_dtype
from fastpar.ops._autograd import first_derivative_only, needs_grad
from fastpar.ops.moe import gemms as products
from fastpar.ops.weight_grad_store.store import WeightGradStore, current_store
from fastpar.reference.grouped_linear import check_grouped_linear, expert_rows, num_experts_of
from fastpar.reference.grouped_linear import grouped_linear as reference_grouped_linear


class GroupedCall(NamedTuple):
    """A checked call, apart from its tensors: where the experts' rows are, and how the matrices lie."""

    rows: tuple[slice, ...]
    transposed: bool


class DeferredGroupedGrads(NamedTuple):
    """Where the gradients of the weight and the bias go when they are computed later."""

    store: WeightGradStore
    weight: Tensor
    bias: Tensor | None


# ---- autograd --------------------------------------------------------------------------------------------------------


class GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        call: GroupedCall,
        deferred: DeferredGroupedGrads | None,
        anchor: Tensor | None,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        ctx.call, ctx.deferred = call, deferred
        given = weight if deferred is None else deferred.weight
        ctx.save_for_backward(x if given.requires_grad else None, weight, bias)
        return products.forward(x, weight, call.rows, bias, transposed=call.transposed)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, weight, bias = ctx.saved_tensors
        by_x = by_weight = by_bias = None
        with torch.no_grad():
            dout = grads[0].contiguous()
            if ctx.needs_input_grad[3]:
                by_x = products.dgrad(dout, weight, ctx.call.rows, transposed=ctx.call.transposed)
            if ctx.needs_input_grad[4]:
                by_weight = products.wgrad(dout, x, weight, ctx.call.rows, transposed=ctx.call.transposed)
            if ctx.needs_input_grad[5]:
                by_bias = products.bias_grad(dout, bias, ctx.call.rows)
            if ctx.deferred is not None:
                _defer(ctx, x, dout)
        once = ("grouped_linear", "fastpar.reference.grouped_linear", grads[0], x, weight)
        found = (None if g is None else first_derivative_only(g, *once) for g in (by_x, by_weight, by_bias))
        return None, None, None, *found


def _defer(ctx: Any, x: Tensor | None, dout: Tensor) -> None:
    call, (store, weight, bias) = ctx.call, ctx.deferred
    like, bias_like = weight.detach(), None if bias is None else bias.detach()
    parameters = [p for p in (weight, bias) if p is not None and p.requires_grad]
    wants = weight.requires_grad, bias is not None and bias.requires_grad

    def compute() -> list[Tensor]:
        found = []
        if wants[0]:
            assert x is not None
            found.append(products.wgrad(dout, x, like, call.rows, transposed=call.transposed))
        if wants[1]:
            assert bias_like is not None
            found.append(products.bias_grad(dout, bias_like, call.rows))
        return found

    if parameters:
        store.put(compute, parameters, sequence_nr=ctx._sequence_nr(), is_fresh=True)


# ---- public ----------------------------------------------------------------------------------------------------------


@checked()
def grouped_linear(
    x: Tensor,
    weight: Tensor,
    splits: Sequence[int],
    bias: Tensor | None = None,
    *,
    counts: Tensor | Sequence[int] | None = None,
    transposed: bool = False,
    wgrad_store: WeightGradStore | None = None,
) -> Tensor:
    """Rows splits[e] to splits[e + 1] of x through the linear layer of expert e.

        x       [N, K]      rows by expert, as `moe_dispatch` gives them
        weight  [E, F, K]   or [E, K, F] if transposed; in the dtype of x (torch.autocast converts)
        bias    [E, F]
        out     [N, F]

        forward  out = x @ weight[e].T + bias[e]
        dgrad    dx  = dout @ weight[e]
        wgrad    dweight[e] = dout.T @ x of e's rows, dbias[e] = their dout.sum(0); zeros where e has no rows

    No collective. Gradients apart: `grouped_linear_dgrad` and `grouped_linear_wgrad`.

    Args:
        splits: where each expert's rows begin, and where the last's end: `DispatchHandle.splits`.
        counts: rows of each expert that are no padding: `DispatchHandle.counts`; None: all. The rest of its rows is not
            read: their outputs and gradients are zeros.
        wgrad_store: leave the gradients of weight and bias to this store; by default that of the innermost
            `WeightGradStore.deferring()`, if there is one. Not under torch.compile.

    Worked example: x [[1], [2], [3]], weight [[[10]], [[20]]], splits (0, 1, 3): out [[10], [40], [60]]; for dout of
    ones dx is [[10], [20], [20]] and dweight [[[1]], [[5]]].

    Raises ValueError and TypeError for splits, counts, shapes, dtypes and devices that do not fit together.
    """
    dtype = autocast_dtype(x)
    if dtype is not None:
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    if torch.compiler.is_compiling():
        if wgrad_store is not None:
            raise ValueError("wgrad_store puts off work in eager code; leave it None under torch.compile")
        return reference_grouped_linear(x, weight, splits, bias, counts=counts, transposed=transposed)
    call = GroupedCall(expert_rows(splits, counts, num_experts_of(weight)), transposed)
    check_grouped_linear(x, weight, bias, splits[-1], transposed)
    if not needs_grad(x, weight, bias):
        return products.forward(x, weight, call.rows, bias, transposed=transposed)
    store = current_store() if wgrad_store is None else wgrad_store
    if store is None:
        return GroupedLinear.apply(call, None, None, x, weight, bias)
    deferred = DeferredGroupedGrads(store, weight, bias)
    anchor = x.new_empty(0).requires_grad_()  # backward runs even where x needs no gradient
    detached = None if bias is None else bias.detach()
    return GroupedLinear.apply(call, deferred, anchor, x, weight.detach(), detached)


@torch.no_grad()
@checked()
def grouped_linear_dgrad(
    dout: Tensor,
    weight: Tensor,
    splits: Sequence[int],
    *,
    counts: Tensor | Sequence[int] | None = None,
    transposed: bool = False,
) -> Tensor:
    """dx [N, K] of `grouped_linear` from dout [N, F]; zeros in padding rows."""
    rows = expert_rows(splits, counts, num_experts_of(weight))
    check_grouped_linear(dout, weight, None, splits[-1], not transposed, "dout")
    return products.dgrad(dout.contiguous(), weight, rows, transposed=transposed)


@torch.no_grad()
@checked()
def grouped_linear_wgrad(
    dout: Tensor,
    x: Tensor,
    weight: Tensor,
    splits: Sequence[int],
    *,
    counts: Tensor | Sequence[int] | None = None,
    transposed: bool = False,
) -> Tensor:
    """dweight of `grouped_linear` from dout [N, F] and x [N, K]; of `weight` the shape and dtype matter."""
    rows = expert_rows(splits, counts, num_experts_of(weight))
    check_grouped_linear(x, weight, None, splits[-1], transposed)
    check_grouped_linear(dout, weight, None, splits[-1], not transposed, "dout")
    return products.wgrad(dout.contiguous(), x, weight, rows, transposed=transposed)
