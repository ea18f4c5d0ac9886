"""Feed-forward experts: dispatch, two grouped products with an activation between them, combine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastpar.arguments import checked
from fastpar.comm import Communicator, GroupLike
from fastpar.contracts.linear import autocast_dtype
from fastpar.ops._autograd import needs_grad, scale_grad
from fastpar.ops.moe import mlp_triton as _moe_triton
from fastpar.ops.moe.dispatch_combine import exchange_of, moe_combine, moe_dispatch
from fastpar.ops.moe.dispatcher import Exchange
from fastpar.ops.moe.experts import Call, Experts, MoeMlp, forward
from fastpar.ops.moe.grouped_linear import grouped_linear
from fastpar.ops.moe.overlapped import moe_mlp_beside
from fastpar.ops.moe.plan import Padding, Terms
from fastpar.ops.moe.transports import symmetric as _moe_push
from fastpar.reference.moe_mlp import ExpertRule, activate, check_experts


@checked(unless_agreed="group")
def moe_mlp(
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    first: Tensor,
    second: Tensor,
    *,
    first_bias: Tensor | None = None,
    second_bias: Tensor | None = None,
    replicas: Sequence[Tensor | None] | None = None,
    rule: ExpertRule | None = None,
    add: Tensor | Callable[[], Tensor | None] | None = None,
    group: GroupLike = None,
    padding: Padding | None = None,
    transport: str = "auto",
    exact: bool = False,
    payload: str | None = None,
    grad_scale: float = 1.0,
    chunks: int = 1,
    max_rows: int | None = None,
) -> Tensor:
    """Every token through the experts that it has chosen, which lie on the ranks of `group`.

        x        [T, H]      this rank's tokens
        indices  [T, K]      see `moe_dispatch`
        weights  [T, K]
        first    [E_r, 2I, H]  this rank's experts: gate and up in one ([E_r, I, H] without gate; transposed:
                               [E_r, H, 2I]); all in the dtype of x (torch.autocast converts)
        second   [E_r, H, I]   (transposed: [E_r, I, H])
        first_bias [E_r, 2I], second_bias [E_r, H]
        add      [T, H]      added in the combine's sum: a shared expert's output, a residual. A function that gives it
                             is called while results travel, and its backward runs while dout does: see below
        out      [T, H]

        forward  h = x W1' + b1, a = f(h), y = a W2' + b2 of each row, out = add + sum over k of w y
        dgrad    da = dout W2, dh = w f'(h) da, dx = sum over k of dh W1, dw = <da, a> + <dout, b2>
        wgrad    dW2 = (dout)' (w a), dW1 = dh' x; times grad_scale; zeros for an expert without rows

    That is for rule.weigh "after"; see `ExpertRule`. The number of experts is E_r times the ranks of the group. Saved
    for backward: x and h. Backward computes a again, and dispatches x and dout in one exchange.

    A function that is to be called beside the combine is called before the dispatch where nothing travels: on one rank,
    on ranks that share memory, and on devices other than the CPU. The bits are those of its result given as a tensor,
    but that autograd adds up gradients of x in another order if the function uses x more than once. It must not raise
    on some ranks only.

    Collectives: those of `moe_dispatch` and `moe_combine`, once each way. On all ranks the same inputs have to need
    gradients. What needs none costs no product.

    Args:
        replicas: (first, second, first_bias, second_bias) of more experts of this rank, which come behind the others
            in `indices`, the same number of them on every rank: E_r counts them too. On CPU that saves a copy of all in
            one. As those of the others they need gradients, or do not.
        padding, transport, exact, payload: see `moe_dispatch`. transport="symmetric": see below.
        grad_scale: a factor of the gradients of the experts' parameters, for a mean over data-parallel ranks where
            tokens of more ranks meet in an expert than in other parameters.
        chunks: let tokens and results travel in so many parts, the same number on all ranks, the first experts' first:
            those compute while the others' tokens come, and the last ones while the others' results leave. Changes no
            bit; nothing at all where ranks share memory or rows go over hosts, or on other devices
            than the CPU.
        max_rows: rows that every rank has room for under transport="symmetric", the same number on all ranks; None: as
            many as the first call of the group can need at most, were all tokens sent to one rank.

    transport="symmetric" is for CUDA ranks that reach each other's memory, and is never chosen by "auto" (not measured
    yet). Rows are written into the memory of their experts' ranks and results read there, float32 sums over k with one
    rounding; three exchanges in backward, and no synchronisation with the host but in a group's first call, so that
    steps can be captured in CUDA graphs after one outside. Memory is that of max_rows rows, however many come: two
    tokens for each in all layers together, and h in each layer. More rows than there is room for are an error: the
    output is NaN on every rank, and a later call raises RuntimeError. So are arguments that are wrong on one rank: it
    raises them, and the others ValueError, later. The group needs another max_rows after that. No padding, no payload.

    Worked example: x [[2]], indices [[0, 1]], weights [[0.5, 0.25]], two experts with relu, first [[[1]], [[3]]],
    second [[[10]], [[20]]]: y 20 and 120, out [[40]]; for dout 1: dx [[20]], dweights [[20, 120]], dfirst [[[10]],
    [[10]]], dsecond [[[1]], [[1.5]]].

    On one CUDA rank Triton kernels do all of it (not measured yet; see `fastpar.kernels.moe_mlp`). On other devices
    this is `moe_dispatch`, PyTorch's operations and `moe_combine`, which save more. Under torch.compile it runs as it
    is, between two graphs.

    Raises ValueError and TypeError on every rank for what is wrong on one; CommError as `Communicator` does;
    TimeoutError where a rank does not come under transport="symmetric".
    """
    if torch.compiler.is_compiling():  # a graph cannot hold an exchange
        return torch.compiler.disable(moe_mlp)(
            x, indices, weights, first, second, first_bias=first_bias, second_bias=second_bias, replicas=replicas,
            rule=rule, add=add, group=group, padding=padding, transport=transport, exact=exact, payload=payload,
            grad_scale=grad_scale, chunks=chunks, max_rows=max_rows,
        )  # fmt: skip
    if max_rows is not None and transport != "symmetric":
        raise ValueError(f"max_rows is for transport='symmetric', got {transport!r}: memory is as large as is needed")
    rule, padding = rule or ExpertRule(), padding or Padding()
    dtype = autocast_dtype(x) if x.is_floating_point() else None
    experts = Experts(first, second, first_bias, second_bias)
    more: list[Any] = [] if replicas is None else [*replicas]
    if dtype is not None:
        x, experts = x.to(dtype), Experts(*(None if p is None else p.to(dtype) for p in experts))
        more = [None if p is None else p.to(dtype) for p in more]
    problem = check_experts(x, weights, *experts, rule) or _check_replicas(x, weights, experts, more, rule)
    if chunks < 1:
        problem = ValueError(f"chunks must be at least 1, got {chunks}")
    per_rank = (len(first) if first.dim() else 1) + (len(more[0]) if more and more[0] is not None else 0)
    parameters = [*experts, *more]
    if more and problem is None:
        experts = Experts.of(parameters)
        if not _is_fused(x) or transport == "symmetric":
            experts = Experts(*(None if stack is None else torch.cat(stack.parts) for stack in experts))
    if transport == "symmetric" and (comm := Communicator.of(group)).size > 1:
        return _moe_push.moe_mlp(
            x, indices, weights, experts, rule, add() if callable(add) else add,
            comm=comm, problem=problem, padding=padding, payload=payload, grad_scale=grad_scale, max_rows=max_rows,
        )  # fmt: skip
    exchange = exchange_of(group, transport=transport, exact=exact, device=x.device)
    call = Call(exchange, per_rank * exchange.comm.size, rule, padding, payload, grad_scale, chunks)
    if callable(add) and not (exchange.travels and _is_fused(x)):
        add = add()
    problem = problem or _check_add(x, add)
    if problem is not None:
        _refuse(problem, exchange, x, call.num_experts)
    if callable(add):
        return moe_mlp_beside(call, x.contiguous(), indices, weights, parameters, add)
    is_plain = grad_scale == 1.0 and payload is None
    if is_plain and _moe_triton.applies(x, first, size=exchange.comm.size, padding=padding):
        return _moe_triton.moe_mlp(x, indices, weights, *experts, rule, add)
    if not _is_fused(x):
        return composed(call, x, indices, weights, experts, add, group=group, transport=transport, exact=exact)
    x = x.contiguous()
    if needs_grad(x, weights, add, *parameters):
        return MoeMlp.apply(call, indices, add, x, weights, *parameters)
    with torch.no_grad():
        return forward(call, x, indices, weights, experts)[0](add)[0]


def _check_add(x: Tensor, add: Tensor | Callable[[], Tensor | None] | None) -> ValueError | None:
    if add is None or callable(add):
        return None
    if add.shape != x.shape or add.device != x.device:
        return ValueError(
            f"add must be as x is, {tuple(x.shape)} on {x.device}, got {tuple(add.shape)} on {add.device}"
        )
    return None


def _is_fused(x: Tensor) -> bool:
    return x.device.type == "cpu"


def _check_replicas(
    x: Tensor, weights: Tensor, experts: Experts, more: Sequence[Any], rule: ExpertRule
) -> Exception | None:
    """What is wrong with them, if anything."""
    if not more:
        return None
    names = experts._fields
    if len(more) != len(experts):
        return ValueError(f"replicas must be ({', '.join(names)}), got {len(more)} of them")
    for name, one, other in zip(names, experts, more, strict=True):
        if (one is None) != (other is None) or (one is not None and one.requires_grad != other.requires_grad):
            return ValueError(f"replicas must have {name}, and its gradient, where the other experts do")
    first, second, first_bias, second_bias = more
    return check_experts(x, weights, first, second, first_bias, second_bias, rule)


def composed(
    call: Call,
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    experts: Experts,
    add: Tensor | None,
    *,
    group: GroupLike,
    transport: str,
    exact: bool,
) -> Tensor:
    """The same of operations that autograd knows one by one."""
    rule = call.rule
    experts = Experts(*(None if p is None else scale_grad(p, call.grad_scale) for p in experts))
    rows, row_weights, plan = moe_dispatch(
        x,
        indices,
        weights,
        num_experts=call.num_experts,
        group=group,
        padding=call.padding,
        transport=transport,
        exact=exact,
        payload=call.payload,
    )
    where: dict[str, Any] = {"counts": plan.counts, "transposed": rule.transposed}
    scale = row_weights[:, None].to(x.dtype)
    if rule.weigh == "input":
        rows = rows * scale
    hidden = activate(grouped_linear(rows, experts.first, plan.splits, experts.first_bias, **where), rule)
    if rule.weigh == "before":
        hidden = hidden * scale
    results = grouped_linear(hidden, experts.second, plan.splits, experts.second_bias, **where)
    return moe_combine(results, plan, row_weights if rule.weigh == "after" else None, add=add)


def _refuse(problem: Exception, exchange: Exchange, x: Tensor, num_experts: int) -> None:
    """Raise here, and on the other ranks what says that this one did: they wait for its tokens."""
    nothing = torch.empty(0)  # no indices at all: the exchange tells so
    with contextlib.suppress(ValueError):
        exchange.dispatch(x, nothing, None, num_experts, Terms(Padding()))
    raise problem
