"""Experts whose results travel while something else is computed, as two nodes of the autograd graph.

    launched = MoeMlpLaunch(...)      dispatch, experts, and their results are on their way
    add = function()                  a shared expert, say
    out = MoeMlpWait(launched, add)   they are there, and summed

Backward goes the other way round. Autograd runs the node that was made last first, so dout is on its way to the experts
as soon as it is known, what the function did is differentiated next, and the experts' gradients come after that:

    MoeMlpWait      launches the exchange of dout and x
    ...             the backward of the function, also gradients of its parameters and whatever hangs on those
    MoeMlpLaunch    waits for the exchange; the experts' backward

The bits are those of one node, but where the function uses x more than once: autograd adds gradients up as they come.
Nothing depends on that order but time: whoever comes too early launches or waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from fastpar.comm.recompute_cache import kept
from fastpar.ops._autograd import needs_grad
from fastpar.ops.moe.chunks import Arrivals
from fastpar.ops.moe.dispatcher import Finish
from fastpar.ops.moe.experts import Call, Experts, Wants, forward, grads_of, keep, send_again
from fastpar.ops.moe.plan import DispatchPlan


class Flight:
    """What the two nodes of a call hand each other, besides the gradient.

    finish  from the first to the second: gives the result
    send    likewise, for backward: launches the exchange of x and dout
    sent    from the second's backward to the first's
    """

    finish: Finish | None = None
    send: Callable[[Tensor, Tensor], Arrivals] | None = None
    sent: Arrivals | None = None


class MoeMlpLaunch(torch.autograd.Function):
    """Gives a placeholder in the shape of the output, whose gradient is that of the output."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, flight: Flight, indices: Tensor, x: Tensor, weights: Tensor, *parameters: Tensor | None
    ) -> Tensor:
        needs = ctx.needs_input_grad
        wants, experts = Wants.of(needs[3:]), Experts.of(parameters)

        def run() -> tuple[DispatchPlan, Tensor | None]:
            flight.finish, plan, hidden = forward(call, x, indices, weights, experts, wants, beside=True)
            return plan, hidden

        plan, hidden = kept(run)
        ctx.flight = flight
        flight.send = lambda x, dout: send_again(call, plan, wants, x, dout, beside=True)
        keep(ctx, call, plan, wants, weights, x, hidden, *parameters)
        return x.new_empty(()).expand(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        sent, ctx.flight.sent = ctx.flight.sent, None
        return None, None, None, *grads_of(ctx, grads[0], sent)


class MoeMlpWait(torch.autograd.Function):
    """Saves x as well: where a layer is computed again to have it, that is before anything is launched."""

    @staticmethod
    def forward(ctx: Any, flight: Flight, launched: Tensor | None, add: Tensor | None, x: Tensor) -> Tensor:
        def run() -> Tensor:
            finish, flight.finish = flight.finish, None
            assert finish is not None
            return finish(add)[0]

        ctx.flight, ctx.add_dtype = flight, None if add is None else add.dtype
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None)
        return kept(run)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (dout,) = grads
        (x,) = ctx.saved_tensors
        if x is not None and torch._C._will_engine_execute_node(ctx.next_functions[0][0]):
            with torch.no_grad():
                ctx.flight.sent = ctx.flight.send(x, dout.contiguous())
        _, of_launched, of_add, _ = ctx.needs_input_grad
        return None, dout if of_launched else None, dout.to(ctx.add_dtype) if of_add else None, None


def moe_mlp_beside(
    call: Call,
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    parameters: Sequence[Tensor | None],
    function: Callable[[], Tensor | None],
) -> Tensor:
    """`fastpar.ops.moe_mlp` with function() added, which is called while results travel."""
    flight, launched = Flight(), None
    if needs_grad(x, weights, *parameters):
        launched = MoeMlpLaunch.apply(call, flight, indices, x, weights, *parameters)
    else:

        def run() -> None:
            flight.finish = forward(call, x, indices, weights, Experts.of(parameters), beside=True)[0]

        with torch.no_grad():
            kept(run)
    add = function()
    if add is not None and add.shape != x.shape:
        raise ValueError(f"what is added must be {tuple(x.shape)}, as x is, got {tuple(add.shape)}")
    return cast(Tensor, MoeMlpWait.apply(flight, launched, add, x.detach()))
