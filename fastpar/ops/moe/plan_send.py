"""A dispatch in two steps: first the plan, from the router's choices alone, then rows.

    plan = moe_plan(indices, weights, num_experts=8, group=ep)     # counts, splits, places: one exchange of numbers
    ...                                                            # what needs no more than those, or computes x
    rows, row_weights = moe_send(x, plan, weights)                 # as moe_dispatch gives them
    out = moe_combine(results, plan, row_weights)

For those who want to know how many rows come before they come (to reserve memory, to drop or rebalance, to log loads),
whose choices are made before their tokens are (a router beside the layer in front), or who send several tensors over
the same choices. `moe_dispatch` is both steps at once and spares an exchange.

A plan is the exchange of a dispatch whose tokens have no columns: everything that `moe_dispatch` says of plans holds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastpar.arguments import checked
from fastpar.comm import GroupLike
from fastpar.comm.recompute_cache import kept
from fastpar.ops._autograd import first_derivative_only, needs_grad
from fastpar.ops.moe.claim import DTYPES, Claim
from fastpar.ops.moe.dispatch_combine import exchange_of
from fastpar.ops.moe.permute import gather_rows
from fastpar.ops.moe.plan import DispatchPlan, Padding, Terms

_TWICE = "fastpar.reference.moe_mlp, in one process,"


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: DispatchPlan, x: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
        def run() -> tuple[Tensor, Tensor]:
            (tables,) = plan.exchange.send(plan, x.contiguous())
            return gather_rows(tables, plan.source), plan.row_weights.clone()

        ctx.plan, ctx.weights_dtype = plan, None if weights is None else weights.dtype
        return kept(run)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        plan: DispatchPlan = ctx.plan
        drows, dweights = (grad.contiguous() for grad in grads)
        dx, values = plan.exchange.launch_back(plan, drows, weighted=False, values=dweights)(None)
        dx = first_derivative_only(dx, "moe_send", _TWICE, *grads)
        if ctx.weights_dtype is None:
            return None, dx, None
        return None, dx, first_derivative_only(values.to(ctx.weights_dtype), "moe_send", _TWICE, *grads)


@checked(unless_agreed="group")
def moe_plan(
    indices: Tensor,
    weights: Tensor | None = None,
    *,
    num_experts: int,
    group: GroupLike = None,
    padding: Padding | None = None,
    transport: str = "auto",
    exact: bool = False,
) -> DispatchPlan:
    """The plan of a dispatch without its rows.

        indices  [T, K]   as for `moe_dispatch`
        weights  [T, K]   of the choices; None: 1
        plan     counts, splits and loads, in host memory; source and row_weights of the rows to come

    Nothing is differentiated here: `moe_send` has the gradient of the weights. Other arguments, numbers and errors as
    `moe_dispatch`, but for `payload`, which rows that follow a plan do not have.

    Collectives: those of a `moe_dispatch` of tokens without columns: the exchange of counts, and of which token goes
    where with what weight.

    Worked example, one rank with two experts: indices [[1], [0], [1]] give counts [1, 2], splits (0, 1, 3) and source
    [1, 0, 2].

    Raises ValueError on every rank of the group for what is wrong on one; CommError as `Communicator` does. Under
    torch.compile it is a graph break.
    """
    if torch.compiler.is_compiling():
        return torch.compiler.disable(moe_plan)(
            indices, weights, num_experts=num_experts, group=group, padding=padding, transport=transport, exact=exact
        )
    is_tensor = isinstance(indices, Tensor)
    exchange = exchange_of(group, transport=transport, exact=exact, device=indices.device if is_tensor else None)
    x = indices.new_empty((len(indices), 0), dtype=torch.float32) if is_tensor and indices.dim() > 0 else indices
    with torch.no_grad():
        plan, _ = exchange.dispatch(x, indices, weights, num_experts, Terms(padding or Padding()))
    return plan


@checked(unless_agreed="plan")
def moe_send(x: Tensor, plan: DispatchPlan, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(rows, row_weights): tokens to the experts that a plan has for them.

        x        [T, H]   this rank's tokens, those of the plan's indices
        weights  [T, K]   what the plan was made with, for their gradient; None where none is wanted
        rows     [N, H]   by expert of this rank, then by source rank, token, choice; N is plan.num_rows
        row_weights [N]   float32: the weight of each row's choice

        forward  rows[i] = x[source of i]
        backward dx = the sum of drows over each token's choices; dweights = those of the row weights, sent back

    A plan may send any number of tensors. The rows of one are those of `moe_dispatch`, bit for bit.

    Collectives: one all-gather of 32 bytes a rank (CPU), and what `moe_dispatch` says of each transport without its
    all-gather of counts; one exchange for the backward.

    Raises ValueError on every rank of the group for what is wrong on one, where x is on the CPU; on other devices on
    that rank only. Under torch.compile it is a graph break.
    """
    if torch.compiler.is_compiling():
        return torch.compiler.disable(moe_send)(x, plan, weights)
    problem, is_cpu = _problem_of(x, plan, weights), plan.source.device.type == "cpu"
    is_differentiable = needs_grad(*(t for t in (x, weights) if isinstance(t, Tensor)))
    comm = plan.exchange.comm
    if is_cpu and comm.size > 1:
        claim = Claim(problem, is_differentiable, "moe_send")
        claim.check(comm.all_gather(torch.tensor([claim.words(x)], device="cpu")).tolist())
    if problem:
        raise ValueError(problem)
    rows, row_weights = _Send.apply(plan, x, weights)
    return rows, row_weights


def _problem_of(x: Tensor, plan: DispatchPlan, weights: Tensor | None) -> str:
    """What is wrong with the arguments of `moe_send`, or nothing. Not raised here: other ranks have to be told."""
    for name, tensor in (("x", x), ("weights", weights)):
        if tensor is None and name == "weights":
            continue
        if not isinstance(tensor, Tensor):
            return f"{name} must be a tensor, got {type(tensor).__name__}"
        if tensor.device != plan.source.device:
            return f"{name} must be on the device of the plan, {plan.source.device}, got {tensor.device}"
    if x.ndim != 2 or len(x) != plan.tokens:
        return f"x must be [{plan.tokens}, H], the tokens of the plan, got {list(x.shape)}"
    if x.dtype not in DTYPES:
        return f"x must be one of {', '.join(map(str, DTYPES))}, got {x.dtype}"
    if weights is None:
        return ""
    if weights.shape != (plan.tokens, plan.top_k) or not weights.is_floating_point():
        return (
            f"weights must be [{plan.tokens}, {plan.top_k}] and floating, as the plan's, got {list(weights.shape)} "
            f"{weights.dtype}"
        )
    if weights.device.type == "cpu" and not torch.equal(weights.detach().float(), plan.pair_weights):
        return "weights must be those that the plan was made with: the row weights are the plan's"
    return ""
