"""A dispatch in two steps: first the plan, from the router's choices alone, then rows.

    handle = moe_plan(indices, weights, num_experts=8, group=ep)   # counts, splits, places: one exchange of numbers
    ...                                                            # what needs no more than those, or computes x
    rows, row_weights = moe_send(x, handle, weights)               # as moe_dispatch returns them
    out = moe_combine(results, handle, row_weights)

For those who want to know how many rows come before they come (to reserve memory, to drop or rebalance, to log loads),
whose choices are made before their tokens are (a router beside the layer in front), or who send several tensors over
the same choices. `moe_dispatch` is both steps at once and spares an exchange.

A plan is a dispatch of tokens without columns: everything that `moe_dispatch` says of handles holds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastpar.arguments import checked
from fastpar.comm import GroupLike
from fastpar.comm.ranges import annotate
from fastpar.comm.recompute_cache import kept
from fastpar.ops._autograd import needs_grad
from fastpar.ops.moe.dispatch_combine import agree_on_rows, dispatch_backward
from fastpar.ops.moe.dispatcher import DispatchHandle
from fastpar.ops.moe.permute import gather_rows
from fastpar.ops.moe.plan import DEFAULT_DISPATCH, DTYPES, Dispatch, DispatchSpec
from fastpar.ops.moe.transports.select import find_dispatcher


class MoeSend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, handle: DispatchHandle, x: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
        def run() -> tuple[Tensor, Tensor]:
            (tables,) = handle.dispatcher.redispatch(handle, x.contiguous())()
            return gather_rows(tables, handle.source), handle.row_weights.clone()

        ctx.handle, ctx.weights_dtype = handle, None if weights is None else weights.dtype
        with annotate("fastpar::moe::dispatch"):
            return kept(run)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, *dispatch_backward(ctx, "moe_send", grads)


@checked(unless_agreed="group")
def moe_plan(
    indices: Tensor,
    weights: Tensor | None = None,
    *,
    num_experts: int,
    group: GroupLike = None,
    dispatch: Dispatch | None = None,
) -> DispatchHandle:
    """The handle of a dispatch without its rows.

        indices  [T, K]   as for `moe_dispatch`
        weights  [T, K]   of the choices; None: 1
        handle   counts, splits and loads, in host memory; source and row_weights of the rows to come

    Nothing is differentiated here: `moe_send` has the gradient of the weights. Other arguments, numbers and errors as
    `moe_dispatch`, but for `Dispatch.payload`, which rows that follow a plan do not have.

    Collectives: those of a `moe_dispatch` of tokens without columns: the exchange of counts, and of which token goes
    where with what weight.

    Worked example, one rank with two experts: indices [[1], [0], [1]] give counts [1, 2], splits (0, 1, 3) and source
    [1, 0, 2].

    Raises ValueError on every rank of the group for what is wrong on one; CommError as `Communicator` does. Under
    torch.compile it is a graph break.
    """
    if torch.compiler.is_compiling():
        return torch.compiler.disable(moe_plan)(
            indices, weights, num_experts=num_experts, group=group, dispatch=dispatch
        )
    is_tensor = isinstance(indices, Tensor)
    options = dispatch or DEFAULT_DISPATCH
    dispatcher = find_dispatcher(group, options, indices.device if is_tensor else None)
    dtype = torch.promote_types(weights.dtype, torch.float32) if isinstance(weights, Tensor) else torch.float32
    x = indices.new_empty((len(indices), 0), dtype=dtype) if is_tensor and indices.dim() > 0 else indices
    with torch.no_grad():
        handle, _ = dispatcher.dispatch(x, indices, weights, DispatchSpec(num_experts, options.padding))
    return handle


@checked(unless_agreed="handle")
def moe_send(x: Tensor, handle: DispatchHandle, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(rows, row_weights): tokens to the experts that a plan has for them.

        x        [T, H]   this rank's tokens, those of the plan's indices
        weights  [T, K]   what the plan was made with, for their gradient; None where none is wanted
        rows     [N, H]   by expert of this rank, then by source rank, token, choice; N is handle.num_rows
        row_weights [N]   float32, or float64 as the plan's weights: the weight of each row's choice

        forward  rows[i] = x[source of i]
        backward dx = the sum of drows over each token's choices; dweights = those of the row weights, sent back

    A plan may send any number of tensors. The rows of one are those of `moe_dispatch`, bit for bit.

    Collectives: one all-gather of 32 bytes a rank (CPU), and what `moe_dispatch` says of each transport without its
    all-gather of counts; one exchange for the backward.

    Raises ValueError on every rank of the group for what is wrong on one, where x is on the CPU; on other devices on
    that rank only. Under torch.compile it is a graph break.
    """
    if torch.compiler.is_compiling():
        return torch.compiler.disable(moe_send)(x, handle, weights)
    problem, is_cpu = _problem_of(x, handle, weights), handle.source.device.type == "cpu"
    is_differentiable = needs_grad(*(t for t in (x, weights) if isinstance(t, Tensor)))
    comm = handle.dispatcher.comm
    if is_cpu and comm.size > 1:
        agree_on_rows("moe_send", x, problem, is_differentiable=is_differentiable).gather(comm)
    if problem:
        raise ValueError(problem)
    rows, row_weights = MoeSend.apply(handle, x, weights)
    return rows, row_weights


def _problem_of(x: Tensor, handle: DispatchHandle, weights: Tensor | None) -> str:
    """What is wrong with the arguments of `moe_send`, or nothing. Not raised here: other ranks have to be told."""
    for name, tensor in (("x", x), ("weights", weights)):
        if tensor is None and name == "weights":
            continue
        if not isinstance(tensor, Tensor):
            return f"{name} must be a tensor, got {type(tensor).__name__}"
        if tensor.device != handle.source.device:
            return f"{name} must be on the device of the plan, {handle.source.device}, got {tensor.device}"
    if x.ndim != 2 or len(x) != handle.tokens:
        return f"x must be [{handle.tokens}, H], the tokens of the plan, got {list(x.shape)}"
    if x.dtype not in DTYPES:
        return f"x must be one of {', '.join(map(str, DTYPES))}, got {x.dtype}"
    if weights is None:
        return ""
    if weights.shape != (handle.tokens, handle.top_k) or not weights.is_floating_point():
        return (
            f"weights must be [{handle.tokens}, {handle.top_k}] and floating, as the plan's, got {list(weights.shape)} "
            f"{weights.dtype}"
        )
    if weights.device.type == "cpu" and not torch.equal(
        weights.detach().to(handle.pair_weights.dtype), handle.pair_weights
    ):
        return "weights must be those that the plan was made with: the row weights are the plan's"
    return ""
