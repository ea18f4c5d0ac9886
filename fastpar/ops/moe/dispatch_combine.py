"""Dispatch and combine: tokens to the ranks of their experts, and the experts' results back to the tokens.

    rows, row_weights, handle = moe_dispatch(x, indices, weights, num_experts=8, group=ep)
    results = ...                                      # by expert: rows[handle.splits[e] : handle.splits[e + 1]]
    out = moe_combine(results, handle, row_weights)    # [T, H]

Each is the other's backward. The handle of the dispatch serves the combine and both backwards, which send no
metadata. `fastpar.ops.moe.dispatcher` says what a transport does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastpar.arguments import checked
from fastpar.comm import GroupLike
from fastpar.comm.agree import Agreement
from fastpar.comm.ranges import annotate
from fastpar.comm.recompute_cache import kept
from fastpar.ops._autograd import first_derivative_only, needs_grad
from fastpar.ops.moe.dispatcher import DispatchHandle, ExpertResults, TokenDispatcher
from fastpar.ops.moe.permute import dot_rows, gather_rows
from fastpar.ops.moe.plan import DEFAULT_DISPATCH, DTYPES, GRADIENT, Dispatch, DispatchSpec
from fastpar.ops.moe.transports.select import find_dispatcher

SECOND_DERIVATIVE = "fastpar.reference.moe_mlp, in one process,"
_EQUAL_ROWS = ("the width of rows", "the dtype of rows", GRADIENT)


def agree_on_rows(op: str, rows: Tensor, problem: str, *, is_differentiable: bool) -> Agreement:
    """What all ranks have to bring alike when a caller hands them rows: they may be wrong on one rank alone."""
    values = () if problem else (rows.shape[1], rows.dtype, is_differentiable)
    return Agreement(op, _EQUAL_ROWS, values, problem)


# ---- autograd --------------------------------------------------------------------------------------------------------


class MoeDispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dispatcher: TokenDispatcher, handles: list[DispatchHandle], spec: DispatchSpec,
                x: Tensor, indices: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:  # fmt: skip
        def run() -> tuple[Tensor, Tensor, DispatchHandle]:
            contiguous = x.contiguous() if isinstance(x, Tensor) else x  # else the dispatch says so, on all ranks
            handle, tables = dispatcher.dispatch(contiguous, indices, weights, spec)
            # A clone: autograd would make the handle's own tensor the output of this node.
            return gather_rows(tables, handle.source), handle.row_weights.clone(), handle

        with annotate("fastpar::moe::dispatch"):
            rows, row_weights, handle = kept(run)
        handles.append(handle)
        ctx.handle, ctx.weights_dtype = handle, None if weights is None else weights.dtype
        return rows, row_weights

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        dx, dpairs = dispatch_backward(ctx, "moe_dispatch", grads)
        return None, None, None, dx, None, dpairs


def dispatch_backward(ctx: Any, op: str, grads: tuple[Tensor, ...]) -> tuple[Tensor, Tensor | None]:
    """Gradients of x and of the weights, by the `handle` and the `weights_dtype` of ctx: a combine."""
    handle: DispatchHandle = ctx.handle
    drows, dweights = (grad.contiguous() for grad in grads)
    with annotate("fastpar::moe::combine"):
        dx, values = handle.dispatcher.combine(handle, ExpertResults(drows, weighted=False, values=dweights))(None)
    dx = first_derivative_only(dx, op, SECOND_DERIVATIVE, *grads)
    if values is None or ctx.weights_dtype is None:
        return dx, None
    return dx, first_derivative_only(values.to(ctx.weights_dtype), op, SECOND_DERIVATIVE, *grads)


class MoeCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, handle: DispatchHandle, agreement: Agreement | None, rows: Tensor,
                row_weights: Tensor | None, add: Tensor | None) -> Tensor:  # fmt: skip
        rows = rows.contiguous() if isinstance(rows, Tensor) else rows  # else the agreement says so
        results = ExpertResults(rows, weighted=row_weights is not None, agreement=agreement)
        with annotate("fastpar::moe::combine"):
            out: Tensor = kept(lambda: handle.dispatcher.combine(handle, results)(add)[0])
        ctx.handle, ctx.add_dtype = handle, None if add is None else add.dtype
        ctx.save_for_backward(rows if ctx.needs_input_grad[3] else None, row_weights)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        handle: DispatchHandle = ctx.handle
        (dout,) = grads
        rows, row_weights = ctx.saved_tensors
        dadd = dout.to(ctx.add_dtype) if ctx.needs_input_grad[4] else None
        if not any(ctx.needs_input_grad[2:4]):  # on no rank: see the agreement
            return None, None, None, None, dadd
        with annotate("fastpar::moe::dispatch"):
            (tables,) = handle.dispatcher.redispatch(handle, dout.contiguous())()
        found = [gather_rows(tables, handle.source, scale=row_weights)]
        if rows is not None:
            found.append(dot_rows(rows, tables, handle.source))
        inputs = dout, rows, row_weights
        drows, *dweights = (first_derivative_only(g, "moe_combine", SECOND_DERIVATIVE, *inputs) for g in found)
        return None, None, drows, dweights[0] if dweights else None, dadd


# ---- public ----------------------------------------------------------------------------------------------------------


@checked(unless_agreed="group")
def moe_dispatch(
    x: Tensor,
    indices: Tensor,
    weights: Tensor | None = None,
    *,
    num_experts: int,
    group: GroupLike = None,
    dispatch: Dispatch | None = None,
) -> tuple[Tensor, Tensor, DispatchHandle]:
    """Send every token to the experts it has chosen.

        x        [T, H]   this rank's tokens; T may differ between ranks, and be 0
        indices  [T, K]   int64 or int32: experts of the group, 0..num_experts - 1; -1 or num_experts: nowhere.
                          The same expert may stand there twice
        weights  [T, K]   of the choices; None: 1
        rows     [N, H]   by expert of this rank, then by source rank, token, choice
        row_weights [N]   the weight of each row's choice, for `moe_combine` or for what the experts do; float32, or
                          float64 if x is

        forward  rows[i] = x[source of i]
        backward dx = the sum of drows over each token's choices; dweights = those of the row weights, sent back

    Rank r of the group has the experts from r * num_experts / size on. Dropless: every choice has its row, in as much
    memory as that takes; `moe_capacity` is for those who want less.

    `dispatch` says how they travel: see `Dispatch`, of which `chunks` and transport="symmetric" are for `moe_mlp`. The
    latter is an error between ranks here: a handle has its splits on the host.

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
            x, indices, weights, num_experts=num_experts, group=group, dispatch=dispatch
        )
    device = x.device if isinstance(x, Tensor) else None
    options = dispatch or DEFAULT_DISPATCH
    dispatcher = find_dispatcher(group, options, device)
    is_differentiable = needs_grad(*(t for t in (x, weights) if isinstance(t, Tensor)))
    spec = DispatchSpec(num_experts, options.padding, options.payload, int(is_differentiable))
    handles: list[DispatchHandle] = []  # autograd functions return tensors only
    rows, row_weights = MoeDispatch.apply(dispatcher, handles, spec, x, indices, weights)
    return rows, row_weights, handles[0]


@checked(unless_agreed="handle")
def moe_combine(
    rows: Tensor, handle: DispatchHandle, row_weights: Tensor | None = None, *, add: Tensor | None = None
) -> Tensor:
    """Sum the experts' results at their tokens.

    rows         [N, H]   results, in the order of the dispatch
    row_weights  [N]      what the dispatch gave: weigh the rows; None: they are as they should be
    add          [T, H]   a shared expert's output or a residual, added before the one rounding
    out          [T, H]

    forward  out[t] = add[t] + sum over k of weights[t, k] * rows[row of (t, k)]     in the order of k, in float32
             (float64 for float64)
    backward drows[i] = row_weights[i] * dout[source of i]; drow_weights[i] = <dout[source of i], rows[i]>

    Collectives: one each way, as `moe_dispatch` says. Whether rows are as they should be goes in front of them.

    Raises ValueError on every rank of the group for what is wrong on one, where rows are on the CPU; on other devices,
    which would have to wait for the answer, on that rank only. Over all_to_all, rows of another width than the other
    ranks' are a CommMismatchError on each; over torch.distributed they are an error at the deadline.
    """
    if torch.compiler.is_compiling():
        return torch.compiler.disable(moe_combine)(rows, handle, row_weights, add=add)
    problem, is_cpu = _problem_of(rows, handle, row_weights, add), handle.source.device.type == "cpu"
    if problem and not is_cpu:
        raise ValueError(problem)
    is_differentiable = needs_grad(*(x for x in (rows, row_weights) if isinstance(x, Tensor)))
    # Elsewhere than on the CPU the answer would be a synchronisation.
    agreement = agree_on_rows("moe_combine", rows, problem, is_differentiable=is_differentiable) if is_cpu else None
    return MoeCombine.apply(handle, agreement, rows, row_weights, add)


def _problem_of(rows: Tensor, handle: DispatchHandle, row_weights: Tensor | None, add: Tensor | None) -> str:
    """What is wrong with the arguments of `moe_combine`, or nothing. Not raised here: other ranks have to be told."""
    given = {"rows": rows, "row_weights": row_weights, "add": add}
    for name, x in given.items():
        if x is None and name != "rows":
            continue
        if not isinstance(x, Tensor):
            return f"{name} must be a tensor, got {type(x).__name__}"
        if x.device != handle.source.device:
            return f"{name} must be on the device of the dispatch, {handle.source.device}, got {x.device}"
    if rows.ndim != 2 or len(rows) != handle.num_rows:
        return f"rows must be [{handle.num_rows}, H], as the dispatch gave them, got {tuple(rows.shape)}"
    if rows.dtype not in DTYPES:
        return f"rows must be one of {', '.join(map(str, DTYPES))}, got {rows.dtype}"
    if row_weights is not None and row_weights.shape != rows.shape[:1]:
        return f"row_weights must be [{handle.num_rows}], got {tuple(row_weights.shape)}"
    if add is not None and add.shape != (handle.tokens, rows.shape[1]):
        return f"add must be [{handle.tokens}, {rows.shape[1]}], got {tuple(add.shape)}"
    return ""
