"""Dispatch and combine: tokens to the ranks of their experts, and the experts' results back to the tokens.

    rows, row_weights, plan = moe_dispatch(x, indices, weights, num_experts=8, group=ep)
    results = ...                                      # by expert: rows[plan.splits[e] : plan.splits[e + 1]]
    out = moe_combine(results, plan, row_weights)      # [T, H]

Each is the other's backward. The plan of the dispatch serves the combine and both backwards, which send no metadata.
`fastpar.ops._moe_exchange` has the transports.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fastpar.comm import Communicator, GroupLike
from fastpar.ops._moe_all_to_all import AllToAllExchange
from fastpar.ops._moe_exchange import Exchange, LocalExchange
from fastpar.ops._moe_plan import DispatchPlan, Padding
from fastpar.ops._moe_shared import SharedExchange
from fastpar.ops.moe_rows import dot_rows, gather_rows

_TRANSPORTS = ("auto", "shared_memory", "all_to_all")
_EXCHANGES: weakref.WeakKeyDictionary[ProcessGroup, dict[Any, Exchange]] = weakref.WeakKeyDictionary()


def exchange_of(group: GroupLike, *, transport: str = "auto", exact: bool = False) -> Exchange:
    """The exchange of a group, the same whenever it is asked for; see `moe_dispatch` for the arguments.

    The first call for a group waits until all its ranks have come.
    """
    if transport not in _TRANSPORTS:
        raise ValueError(f"transport must be one of {', '.join(_TRANSPORTS)}, got {transport!r}")
    comm = Communicator.of(group)
    if comm.group is None or comm.size == 1:
        return LocalExchange()
    known = _EXCHANGES.setdefault(comm.group, {})
    key = (transport, exact, comm.timeout, comm.transport)
    if key not in known:
        world = None if transport == "all_to_all" else comm.local_world()
        shares = world is not None and world.size == comm.size
        if transport == "shared_memory" and not shares:
            raise ValueError(f"transport='shared_memory': the ranks of {comm!r} cannot share memory")
        known[key] = SharedExchange(comm) if shares else AllToAllExchange(comm, exact=exact)
    return known[key]


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: Exchange, plan_box: list[DispatchPlan], padding: Padding, num_experts: int,
                x: Tensor, indices: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:  # fmt: skip
        plan, tables = exchange.dispatch(x, indices, weights, num_experts, padding)
        plan_box.append(plan)
        ctx.exchange, ctx.plan = exchange, plan
        ctx.weights_dtype = None if weights is None else weights.dtype
        return gather_rows(tables, plan.source), plan.row_weights.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        drows, dweights = grads
        dx, values = ctx.exchange.give_back(ctx.plan, drows.contiguous(), weighted=False, values=dweights.contiguous())
        dpairs = None if ctx.weights_dtype is None else values.to(ctx.weights_dtype)
        return None, None, None, None, dx, None, dpairs


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: Exchange, plan: DispatchPlan, rows: Tensor, row_weights: Tensor | None,
                add: Tensor | None) -> Tensor:  # fmt: skip
        out, _ = exchange.give_back(plan, rows, weighted=row_weights is not None, add=add)
        ctx.exchange, ctx.plan, ctx.has_add = exchange, plan, add is not None
        ctx.save_for_backward(rows, row_weights)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (dout,) = grads
        rows, row_weights = ctx.saved_tensors
        (tables,) = ctx.exchange.send(ctx.plan, dout.contiguous())
        drows = gather_rows(tables, ctx.plan.source, scale=row_weights)
        dweights = None
        if row_weights is not None and ctx.needs_input_grad[3]:
            dweights = dot_rows(rows, tables, ctx.plan.source)
        return None, None, drows, dweights, dout if ctx.has_add else None


def moe_dispatch(
    x: Tensor,
    indices: Tensor,
    weights: Tensor | None = None,
    *,
    num_experts: int,
    group: GroupLike = None,
    padding: Padding | None = None,
    transport: str = "auto",
    exact: bool = False,
) -> tuple[Tensor, Tensor, DispatchPlan]:
    """Send every token to the experts it has chosen.

        x        [T, H]   this rank's tokens; T may differ between ranks, and be 0
        indices  [T, K]   int64 or int32: experts of the group, 0..num_experts - 1; -1 or num_experts: nowhere.
                          The same expert may stand there twice
        weights  [T, K]   of the choices; None: 1
        rows     [N, H]   by expert of this rank, then by source rank, token, choice
        row_weights [N]   float32: the weight of each row's choice, for `moe_combine` or for what the experts do

        forward  rows[i] = x[source of i]
        backward dx = the sum of drows over each token's choices; dweights = those of the row weights, sent back

    Rank r of the group has the experts from r * num_experts / size on. Dropless: every choice has its row, in as much
    memory as that takes.

    Args:
        padding: room for rows beyond those there are; see `Padding`.
        transport: "shared_memory", "all_to_all", or "auto": the first where the ranks are on one host.
        exact: give results the bits that one rank has, also over all_to_all, which then sends more.

    Collectives: shared memory: one all-gather of num_experts + 5 numbers and a barrier; all_to_all: one all-gather and
    one all-to-all of each token once for every rank that it goes to.

    Raises ValueError on every rank of the group for what is wrong on one; CommError as `Communicator` does.
    """
    exchange = exchange_of(group, transport=transport, exact=exact)
    box: list[DispatchPlan] = []
    rows, row_weights = _Dispatch.apply(exchange, box, padding or Padding(), num_experts, x, indices, weights)
    return rows, row_weights, box[0]


def moe_combine(
    rows: Tensor, plan: DispatchPlan, row_weights: Tensor | None = None, *, add: Tensor | None = None
) -> Tensor:
    """Sum the experts' results at their tokens.

    rows         [N, H]   results, in the order of the dispatch
    row_weights  [N]      what the dispatch gave: weigh the rows; None: they are as they should be
    add          [T, H]   a shared expert's output or a residual, added before the one rounding
    out          [T, H]

    forward  out[t] = add[t] + sum over k of weights[t, k] * rows[row of (t, k)]     float32, in the order of k
    backward drows[i] = row_weights[i] * dout[source of i]; drow_weights[i] = <dout[source of i], rows[i]>
    """
    return _Combine.apply(plan.exchange, plan, rows, row_weights, add)
