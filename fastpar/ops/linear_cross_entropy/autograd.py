"""The autograd of linear_cross_entropy: gradients that forward has computed, or that backward computes.

When which happens is said in `api`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastpar.comm.autograd import not_a_view
from fastpar.contracts import compute_dtype
from fastpar.contracts.cross_entropy import expand_grad, reduce_loss
from fastpar.ops._autograd import first_derivative_only, scale_by_upstream_
from fastpar.ops.cross_entropy import LossProblem
from fastpar.ops.linear_cross_entropy.passes import (
    LinearLossGrads,
    LinearLossInputs,
    LinearLossLayout,
    LinearLossWants,
    gradients,
    losses,
    losses_and_gradients,
)
from fastpar.ops.linear_cross_entropy.torch_ops import compiled_backward, compiled_forward
from fastpar.ops.weight_grad_store.store import WeightGradStore

Saved = Sequence[Any]  # a context's saved tensors, None where there was none


class DeferredLossGrads(NamedTuple):
    """Where the weight's gradient goes when it is computed later."""

    store: WeightGradStore
    weight: Tensor
    bias: Tensor | None


class LinearLossCall(NamedTuple):
    """A checked call, apart from the tensors with gradients."""

    problem: LossProblem
    layout: LinearLossLayout
    reduction: str
    return_lse: bool
    deferred: DeferredLossGrads | None


class LinearCrossEntropy(torch.autograd.Function):
    """Outside the passes, so that a call without gradients costs nothing."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        anchor: Tensor | None,
        target: Tensor,
        divisor: Tensor | None,
        call: LinearLossCall,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        ctx.call, ctx.wants = call, LinearLossWants(*ctx.needs_input_grad[:3])
        inputs = LinearLossInputs(hidden, weight, bias, target)
        is_compiling = torch.compiler.is_compiling()
        grad_loss = None
        if call.reduction != "none" and not call.return_lse and hidden.dtype != torch.float16:
            one = torch.ones((), dtype=compute_dtype(hidden.dtype), device=hidden.device)
            grad_loss = expand_grad(one, divisor, target, one.dtype)
        prepared = LinearLossGrads(None, None, None)
        if is_compiling:
            loss, lse, prepared = compiled_forward(inputs, call.problem, call.layout, grad_loss, ctx.wants)
        elif grad_loss is None:
            loss, lse = losses(inputs, call.problem, call.layout)
        else:
            loss, lse, prepared = losses_and_gradients(inputs, call.problem, call.layout, grad_loss, ctx.wants)
        ctx.is_prepared = grad_loss is not None
        ctx.prepared = None if is_compiling or grad_loss is None else prepared
        kept = prepared if is_compiling else (None, None, None)
        ctx.save_for_backward(hidden, weight, bias, target, lse, divisor, *kept)
        out = reduce_loss(loss, target, call.reduction, divisor)
        # A copy, since lse is saved: what callers write to theirs in place must not reach backward.
        own_lse = lse.to(loss.dtype, copy=True).reshape(target.shape) if call.return_lse else None
        return not_a_view(out), None if own_lse is None else not_a_view(own_lse)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_out, grad_lse = grads
        saved = ctx.saved_tensors  # once: checkpoints hand out what they recompute a single time
        with torch.no_grad():
            if torch.compiler.is_compiling():
                result = _compiled_backward(ctx, saved, grad_out, grad_lse)
            elif ctx.prepared is not None and grad_out is not None:
                prepared, ctx.prepared = ctx.prepared, None  # these buffers are handed out once
                result = LinearLossGrads(
                    *(None if grad is None else scale_by_upstream_(grad, grad_out) for grad in prepared)
                )
            else:
                result = gradients(*_recompute_arguments(ctx, saved, grad_out, grad_lse), ctx.wants)
            if ctx.call.deferred is not None:
                _defer(ctx, saved, grad_out, grad_lse)
        depends_on = (*saved[:3], *grads)
        once = ("linear_cross_entropy", "torch.nn.functional.cross_entropy", *depends_on)
        return (
            *(None if grad is None else first_derivative_only(grad, *once) for grad in result),
            None,
            None,
            None,
            None,
        )


def _recompute_arguments(
    ctx: Any, saved: Saved, grad_out: Tensor | None, grad_lse: Tensor | None
) -> tuple[LinearLossInputs, LossProblem, LinearLossLayout, Tensor, Tensor, Tensor | None]:
    """What `gradients` takes, but for `wants`."""
    hidden, weight, bias, target, lse, divisor = saved[:6]
    dtype = compute_dtype(hidden.dtype)
    grad_loss = expand_grad(grad_out, divisor, target, dtype)
    if grad_lse is not None:
        grad_lse = grad_lse.to(dtype).reshape(-1)
    inputs = LinearLossInputs(hidden, weight, bias, target)
    return inputs, ctx.call.problem, ctx.call.layout, lse, grad_loss, grad_lse


def _compiled_backward(ctx: Any, saved: Saved, grad_out: Tensor | None, grad_lse: Tensor | None) -> LinearLossGrads:
    """Compiled code plans its memory itself: nothing is written in place."""
    if not ctx.is_prepared:
        return compiled_backward(*_recompute_arguments(ctx, saved, grad_out, grad_lse), ctx.wants)
    assert grad_out is not None
    factor = grad_out.to(compute_dtype(saved[0].dtype))
    prepared = saved[6:]
    return LinearLossGrads(*(None if grad is None else (grad * factor.reshape(1)).to(grad.dtype) for grad in prepared))


def _defer(ctx: Any, saved: Saved, grad_out: Tensor | None, grad_lse: Tensor | None) -> None:
    store, weight, bias = ctx.call.deferred
    parameters = [p for p in (weight, bias) if p is not None and p.requires_grad]
    if not parameters:
        return
    arguments = _recompute_arguments(ctx, saved, grad_out, grad_lse)
    wants = LinearLossWants(False, weight.requires_grad, bias is not None and bias.requires_grad)

    def compute() -> list[Tensor]:
        return [grad for grad in gradients(*arguments, wants) if grad is not None]

    store.put(compute, parameters, sequence_nr=ctx._sequence_nr(), is_fresh=True)
