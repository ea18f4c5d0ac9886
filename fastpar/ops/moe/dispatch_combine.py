"""Dispatch and combine: tokens to the ranks of their experts, and the experts' results back to the tokens.

    rows, row_weights, plan = moe_dispatch(x, indices, weights, num_experts=8, group=ep)
    results = ...                                      # by expert: rows[plan.splits[e] : plan.splits[e + 1]]
    out = moe_combine(results, plan, row_weights)      # [T, H]

Each is the other's backward. The plan of the dispatch serves the combine and both backwards, which send no metadata.
`fastpar.ops.moe.dispatcher` has the transports.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fastpar.arguments import checked
from fastpar.comm import Communicator, GroupLike
from fastpar.comm.multi_host.host_ranks import find_hosts_of
from fastpar.comm.recompute_cache import kept
from fastpar.ops._autograd import first_derivative_only, needs_grad
from fastpar.ops.moe.claim import DTYPES, Claim
from fastpar.ops.moe.dispatcher import Exchange, LocalExchange
from fastpar.ops.moe.permute import dot_rows, gather_rows
from fastpar.ops.moe.plan import DispatchPlan, Padding, Terms
from fastpar.ops.moe.transports.all_to_all import AllToAllExchange
from fastpar.ops.moe.transports.hierarchical import HierarchicalExchange
from fastpar.ops.moe.transports.shared_memory import SharedExchange, SharedHalves
from fastpar.ops.moe.transports.within_host import SentRows, SharedRows

_TRANSPORTS = ("auto", "shared_memory", "all_to_all", "hierarchical", "symmetric")
_TWICE = "fastpar.reference.moe_mlp, in one process,"

# Note: what is kept for a group is its memory, not its exchange, which refers to the group: nothing would ever end.
_HALVES: weakref.WeakKeyDictionary[ProcessGroup, SharedHalves] = weakref.WeakKeyDictionary()


def exchange_of(
    group: GroupLike, *, transport: str = "auto", exact: bool = False, device: torch.device | None = None
) -> Exchange:
    """The exchange of a group for tensors on `device` (None: CPU); see `moe_dispatch` for the other arguments.

    The first call for a group waits until all its ranks have come.
    """
    if transport not in _TRANSPORTS:
        raise ValueError(f"transport must be one of {', '.join(_TRANSPORTS)}, got {transport!r}")
    comm = Communicator.of(group)
    if comm.group is None or comm.size == 1:
        return LocalExchange()
    if transport == "symmetric":
        raise ValueError(
            "transport='symmetric' is for moe_mlp: how many rows there are is known on the device alone, and the plan "
            "of a dispatch says it on the host; fastpar.kernels.moe_push has the exchange by itself"
        )
    is_cpu = device is None or device.type == "cpu"
    world = comm.local_world() if is_cpu and transport != "all_to_all" else None
    shares = world is not None and world.size == comm.size
    if transport == "shared_memory" and not shares:
        where = "" if is_cpu else f" on {device}"
        raise ValueError(f"transport='shared_memory': the ranks of {comm!r} cannot share memory{where}")
    if shares and transport != "hierarchical":
        return SharedExchange(comm, _HALVES.setdefault(comm.group, SharedHalves()))
    found = (
        None
        if transport == "all_to_all"
        else _over_hosts(comm, comm.group, is_cpu=is_cpu, exact=exact, if_fewer=transport == "auto")
    )
    if transport == "hierarchical" and found is None:
        raise ValueError(
            f"transport='hierarchical': the ranks of {comm!r} must be on several hosts, with several on one of them "
            "that can share memory"
        )
    return found or AllToAllExchange(comm, exact=exact)


def _over_hosts(
    comm: Communicator, group: ProcessGroup, *, is_cpu: bool, exact: bool, if_fewer: bool
) -> HierarchicalExchange | None:
    """For a group on several hosts where some rank is not alone: else no token would be spared a way."""
    if is_cpu:
        here = comm.host_ranks()
        if here is None:
            return None
        shared = SharedRows(here, _HALVES.setdefault(group, SharedHalves()))
        return HierarchicalExchange(comm, here.hosts, shared, exact=exact, if_fewer=if_fewer)
    hosts = find_hosts_of(group, comm.timeout)
    if not 1 < len(hosts) < comm.size:
        return None
    sent = SentRows(AllToAllExchange(comm))
    return HierarchicalExchange(comm, hosts, sent, exact=exact, if_fewer=if_fewer)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: Exchange, plan_box: list[DispatchPlan], num_experts: int, terms: Terms,
                x: Tensor, indices: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:  # fmt: skip
        def run() -> tuple[Tensor, Tensor, DispatchPlan]:
            contiguous = x.contiguous() if isinstance(x, Tensor) else x
            plan, tables = exchange.dispatch(contiguous, indices, weights, num_experts, terms)
            return gather_rows(tables, plan.source), plan.row_weights.clone(), plan

        rows, row_weights, plan = kept(run)
        plan_box.append(plan)
        ctx.plan = plan
        ctx.weights_dtype = None if weights is None else weights.dtype
        return rows, row_weights

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        plan: DispatchPlan = ctx.plan
        drows, dweights = (grad.contiguous() for grad in grads)
        dx, values = plan.exchange.launch_back(plan, drows, weighted=False, values=dweights)(None)
        dx = first_derivative_only(dx, "moe_dispatch", _TWICE, *grads)
        if ctx.weights_dtype is None:
            return None, None, None, None, dx, None, None
        dpairs = first_derivative_only(values.to(ctx.weights_dtype), "moe_dispatch", _TWICE, *grads)
        return None, None, None, None, dx, None, dpairs


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: DispatchPlan, claim: Claim | None, rows: Tensor, row_weights: Tensor | None,
                add: Tensor | None) -> Tensor:  # fmt: skip
        rows = rows.contiguous() if isinstance(rows, Tensor) else rows  # else its claim says so
        weighted = row_weights is not None
        out: Tensor = kept(lambda: plan.exchange.launch_back(plan, rows, weighted=weighted, claim=claim)(add)[0])
        ctx.plan, ctx.add_dtype = plan, None if add is None else add.dtype
        ctx.save_for_backward(rows if ctx.needs_input_grad[3] else None, row_weights)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        plan: DispatchPlan = ctx.plan
        (dout,) = grads
        rows, row_weights = ctx.saved_tensors
        dadd = dout.to(ctx.add_dtype) if ctx.needs_input_grad[4] else None
        if not any(ctx.needs_input_grad[2:4]):  # on no rank: see the claim
            return None, None, None, None, dadd
        (tables,) = plan.exchange.send(plan, dout.contiguous())
        found = [gather_rows(tables, plan.source, scale=row_weights)]
        if rows is not None:
            found.append(dot_rows(rows, tables, plan.source))
        drows, *dweights = (first_derivative_only(g, "moe_combine", _TWICE, dout, rows, row_weights) for g in found)
        return None, None, drows, dweights[0] if dweights else None, dadd


@checked(unless_agreed="group")
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
    payload: str | None = None,
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
    memory as that takes; `moe_capacity` is for those who want less.

    Args:
        padding: room for rows beyond those there are; see `Padding`.
        transport: "shared_memory", "all_to_all", "hierarchical" (over several hosts: a token goes once to each, see
            `fastpar.ops.moe.transports.hierarchical`), or "auto": the first for CPU tensors where the ranks are on one
            host, the last where they are on several and it sends fewer rows between those, else the second.
            "symmetric" is for `moe_mlp`, and here an error between ranks: a plan has its splits on the host.
        exact: give results the bits that one rank has, also over all_to_all, which then sends more.
        payload: "float8_e4m3fn": tokens travel in 8 bits, and experts see what arrives (`fastpar.ops.moe.fp8`);
            gradients and results travel as they are.

    Collectives: shared memory: one all-gather of num_experts + 11 numbers and a barrier, and one for the backward;
    all_to_all: one all-gather, one all-to-all of each token once for every rank that it goes to, and one for the
    backward; hierarchical: one all-gather, one all-to-all of each token once for every host, within hosts a barrier
    (devices: an all-to-all), and these two for the backward. The same in `moe_combine`, without all-gathers, but one of
    32 bytes a rank in hierarchical. Regions of shared memory grow when a step needs more than any before: two more
    all-gathers.

    Raises ValueError on every rank of the group for what is wrong on one, after which the group can be used further;
    CommError as `Communicator` does. Under torch.compile it is a graph break.
    """
    if torch.compiler.is_compiling():
        return torch.compiler.disable(moe_dispatch)(
            x, indices, weights, num_experts=num_experts, group=group, padding=padding, transport=transport,
            exact=exact, payload=payload,
        )  # fmt: skip
    device = x.device if isinstance(x, Tensor) else None
    exchange = exchange_of(group, transport=transport, exact=exact, device=device)
    is_differentiable = needs_grad(*(t for t in (x, weights) if isinstance(t, Tensor)))
    terms = Terms(padding or Padding(), payload, int(is_differentiable))
    box: list[DispatchPlan] = []
    rows, row_weights = _Dispatch.apply(exchange, box, num_experts, terms, x, indices, weights)
    return rows, row_weights, box[0]


@checked(unless_agreed="plan")
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

    Collectives: one each way, as `moe_dispatch` says. Whether rows are as they should be goes in front of them.

    Raises ValueError on every rank of the group for what is wrong on one, where rows are on the CPU; on other devices,
    which would have to wait for the answer, on that rank only. Over all_to_all, rows of another width than the other
    ranks' are a CommMismatchError on each; over torch.distributed they are an error at the deadline.
    """
    if torch.compiler.is_compiling():
        return torch.compiler.disable(moe_combine)(rows, plan, row_weights, add=add)
    problem, is_cpu = _problem_of(rows, plan, row_weights, add), plan.source.device.type == "cpu"
    if problem and not is_cpu:
        raise ValueError(problem)
    is_differentiable = needs_grad(*(x for x in (rows, row_weights) if isinstance(x, Tensor)))
    claim = Claim(problem, is_differentiable) if is_cpu else None
    return _Combine.apply(plan, claim, rows, row_weights, add)


def _problem_of(rows: Tensor, plan: DispatchPlan, row_weights: Tensor | None, add: Tensor | None) -> str:
    """What is wrong with the arguments of `moe_combine`, or nothing. Not raised here: other ranks have to be told."""
    given = {"rows": rows, "row_weights": row_weights, "add": add}
    for name, x in given.items():
        if x is None and name != "rows":
            continue
        if not isinstance(x, Tensor):
            return f"{name} must be a tensor, got {type(x).__name__}"
        if x.device != plan.source.device:
            return f"{name} must be on the device of the dispatch, {plan.source.device}, got {x.device}"
    if rows.ndim != 2 or len(rows) != plan.num_rows:
        return f"rows must be [{plan.num_rows}, H], as the dispatch gave them, got {tuple(rows.shape)}"
    if rows.dtype not in DTYPES:
        return f"rows must be one of {', '.join(map(str, DTYPES))}, got {rows.dtype}"
    if row_weights is not None and row_weights.shape != rows.shape[:1]:
        return f"row_weights must be [{plan.num_rows}], got {tuple(row_weights.shape)}"
    if add is not None and add.shape != (plan.tokens, rows.shape[1]):
        return f"add must be [{plan.tokens}, {rows.shape[1]}], got {tuple(add.shape)}"
    return ""
