"""Feed-forward experts that are spread over GPUs which reach each other's memory: `moe_mlp.py` over `moe_push.py`.

    dispatch             x to the rows of its experts, whatever rank they are on
    grouped_linear_act   hidden = rows @ first.T, act = activation(hidden)
    grouped_linear       results = act @ second.T, where all ranks can read them
    give_back            out = the sum over each token's results

Backward has three exchanges, none of them with counts. Each one's rows are used up before the next begins:

    send dout            dhidden, and act again; dsecond
    send x               dfirst; left out where nothing needs it
    give_back            dx = the sum over each token's rows of dhidden @ first, and what the pairs' weights get

Kept for backward are x, hidden, and for each row its weight: permuted copies of x and of dout exist in the exchange's
memory alone, which all layers share. Sizes are those of `capacity` rows, of which splits, on the device, says how many
are in use: nothing waits for the host. Algebra and rules are those of `moe_mlp.py`; the weights' share of the second
bias, <dout, b2>, is taken where the bias is. Bytes sent: three times the rows of the forward, where x is sent again.

What is missing after a failed wait is NaN in out, and in every gradient that was computed from what did not come.
`PushExchange` raises at its next call. Tested on an H200 with virtual ranks, not timed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastpar.kernels.grouped_gemm import (
    RowGroups,
    grouped_bias_grad,
    grouped_linear,
    grouped_linear_act,
    grouped_linear_dact,
)
from fastpar.kernels.moe_mlp import ExpertParams, MlpRule, _activation, _wgrad
from fastpar.kernels.moe_push import Phases, PushExchange, run_together
from fastpar.kernels.moe_rows import dot_rows, gather_rows


class PushSaved(NamedTuple):
    """What backward needs besides the inputs.

    splits       int32 [E + 1]        rows of this rank's experts
    slots        int64 [T, K]         where each pair's row is: rank * capacity + row, -1: it has none
    row_weights  float32 [capacity]   the weight of each row's pair
    hidden       [capacity, 2I or I]
    """

    splits: Tensor
    slots: Tensor
    row_weights: Tensor
    hidden: Tensor


class PushGradNeeds(NamedTuple):
    """Which gradients are asked for, alike on all ranks; of biases that there are."""

    x: bool
    weights: bool
    first: bool
    second: bool
    first_bias: bool
    second_bias: bool

    def inputs(self, rule: MlpRule) -> bool:
        """Whether they take x."""
        return self.first or (self.weights and rule.weigh == "input")


class PushGrads(NamedTuple):
    """None: was not asked for."""

    x: Tensor | None
    weights: Tensor | None
    first: Tensor | None
    second: Tensor | None
    first_bias: Tensor | None
    second_bias: Tensor | None


def forward_phases(
    exchange: PushExchange,
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    experts: ExpertParams,
    rule: MlpRule,
    add: Tensor | None = None,
) -> Phases[tuple[Tensor, PushSaved]]:
    """out [T, H] of x [T, H], indices and weights [T, K], which name experts of all ranks; `add` [T, H] comes into the
    sum. `moe_push.run_together` runs the phases."""
    pushed = yield from exchange.dispatch_phases(x, indices, weights)
    row_weights = pushed.row_weights.clone()
    groups = RowGroups(pushed.splits, exchange.capacity, x.device)
    hidden, act = grouped_linear_act(
        pushed.rows, experts.first, groups, experts.first_bias, **_activation(rule),
        scale=row_weights if rule.weigh == "input" else None,
        row_weights=row_weights if rule.weigh == "before" else None,
    )  # fmt: skip
    results = exchange.empty_rows(x.shape[1], x.dtype)
    grouped_linear(act, experts.second, groups, experts.second_bias, transposed=rule.transposed, out=results)
    scale = weights if rule.weigh == "after" else None
    out, _ = yield from exchange.give_back_phases(pushed, results, weights=scale, add=add)
    exchange.end()
    return out, PushSaved(pushed.splits, pushed.slots, row_weights, hidden)


def backward_phases(
    exchange: PushExchange,
    dout: Tensor,
    x: Tensor | None,
    weights: Tensor | None,
    experts: ExpertParams,
    rule: MlpRule,
    saved: PushSaved,
    wants: PushGradNeeds,
    *,
    grad_scale: float = 1.0,
) -> Phases[PushGrads]:
    """What is wanted of the gradients; that of `add` is dout.

    x, weights  of the forward; None: nothing takes them (`PushGradNeeds.inputs`; rule.weigh is not "input")
    grad_scale  a factor of the experts' gradients
    """
    groups = RowGroups(saved.splits, exchange.capacity, dout.device)
    douts, poison = yield from exchange.send_phases(saved, dout)
    dhidden, act, dots = grouped_linear_dact(
        douts, experts.second, groups, saved.hidden, **_activation(rule),
        row_weights=None if rule.weigh == "input" else saved.row_weights,
    )  # fmt: skip
    factor = poison + grad_scale
    second = _wgrad(douts, act, groups, rule.transposed, factor=factor) if wants.second else None
    second_bias = first_bias = None
    if wants.second_bias:
        scale = saved.row_weights if rule.weigh == "after" else None
        second_bias = grouped_bias_grad(douts, groups, scale=scale, factor=factor)
    if wants.first_bias:
        first_bias = grouped_bias_grad(dhidden, groups, factor=factor)
    if wants.weights and rule.weigh == "after" and experts.second_bias is not None:
        dots += dot_rows(douts, [experts.second_bias], _expert_of_rows(saved.splits, exchange.capacity))

    inputs = first = None
    if x is not None and wants.inputs(rule):
        inputs, poison = yield from exchange.send_phases(saved, x)
    if inputs is not None and wants.first:
        weighed = dhidden
        if rule.weigh == "input":  # one of the two factors; this copy is the only one there is
            weighed = gather_rows([dhidden], _in_use(saved.splits, len(dhidden)), scale=saved.row_weights)
        first = _wgrad(weighed, inputs, groups, rule.transposed, factor=poison + grad_scale)

    dx = dweights = None
    if wants.x or wants.weights:
        rows = _rows_back(exchange, dout, dhidden, experts, rule, groups, wants)
        if wants.weights and rule.weigh == "input":
            assert inputs is not None
            dots = dot_rows(rows, [inputs], _in_use(saved.splits, len(rows)))
        dx, dweights = yield from exchange.give_back_phases(
            saved, rows, weights=weights if rule.weigh == "input" else None, values=dots if wants.weights else None
        )
    exchange.end()
    return PushGrads(dx if wants.x else None, dweights, first, second, first_bias, second_bias)


def _rows_back(
    exchange: PushExchange,
    dout: Tensor,
    dhidden: Tensor,
    experts: ExpertParams,
    rule: MlpRule,
    groups: RowGroups,
    wants: PushGradNeeds,
) -> Tensor:
    """dhidden @ first where all ranks can read it; with nothing that needs it, one column in its place."""
    if not wants.x and rule.weigh != "input":
        return exchange.empty_rows(1, dout.dtype).zero_()
    rows = exchange.empty_rows(dout.shape[1], dout.dtype)
    return grouped_linear(dhidden, experts.first, groups, transposed=not rule.transposed, out=rows)


def _in_use(splits: Tensor, num_rows: int) -> Tensor:
    """int64 [num_rows]: each row, -1: past the end. splits [0, 2, 2, 3], 4 rows: [0, 1, 2, -1]."""
    rows = torch.arange(num_rows, device=splits.device)
    return torch.where(rows < splits[-1], rows, -1)


def _expert_of_rows(splits: Tensor, num_rows: int) -> Tensor:
    """int64 [num_rows]; -1: past the end. splits [0, 2, 2, 3], 4 rows: [0, 0, 2, -1]."""
    rows = torch.arange(num_rows, dtype=splits.dtype, device=splits.device)
    expert = torch.searchsorted(splits[1:], rows, right=True)
    return torch.where(expert < len(splits) - 1, expert, -1)


def forward(
    exchange: PushExchange,
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    experts: ExpertParams,
    rule: MlpRule,
    add: Tensor | None = None,
) -> tuple[Tensor, PushSaved]:
    """`forward_phases` of one rank a process."""
    return run_together([forward_phases(exchange, x, indices, weights, experts, rule, add)])[0]


def backward(
    exchange: PushExchange,
    dout: Tensor,
    x: Tensor | None,
    weights: Tensor | None,
    experts: ExpertParams,
    rule: MlpRule,
    saved: PushSaved,
    wants: PushGradNeeds,
    *,
    grad_scale: float = 1.0,
) -> PushGrads:
    """`backward_phases` of one rank a process."""
    phases = backward_phases(exchange, dout, x, weights, experts, rule, saved, wants, grad_scale=grad_scale)
    return run_together([phases])[0]
