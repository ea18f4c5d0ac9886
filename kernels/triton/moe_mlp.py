"""Feed-forward experts of one rank on GPUs, in Triton: from tokens and their choices to their sums, in seven launches.

    place_pairs          which rows there are                            3 launches, and 1 for the table of tiles
    grouped_linear_act   hidden = x[token] @ first.T, act = activation(hidden)
    grouped_linear       rows = act @ second.T
    sum_rows             out = the sum over each token's rows

Tokens are read where they lie, through the places of their rows; permuted copies of x and of dout do not exist. Kept
for backward are x, hidden and the places; the activation is computed again, in the epilogue of the product that gives
its gradient. Gradients of the pairs' weights are <p, activation>, p = dout @ second, whether the weight came in before
or after the second product: results need not be kept (SonicMoE, arXiv:2512.14080).

How many rows there are is known on the device alone: no call waits for it, and everything can be captured in a CUDA
graph and replayed with another routing. Sums run in one order, so results are the same bits from run to run.
Measured on an H200: docs/benchmarks.md.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fastpar.kernels.grouped_gemm import (
    RowGroups,
    grouped_bias_grad,
    grouped_linear,
    grouped_linear_act,
    grouped_linear_dact,
    grouped_wgrad,
)
from fastpar.kernels.moe_rows import dot_rows, gather_rows, sum_rows
from fastpar.kernels.moe_sort import PlacedPairs, place_pairs


class MlpRule(Protocol):
    """What is used of a fastpar.reference.moe_mlp.ExpertRule."""

    @property
    def activation(self) -> str: ...
    @property
    def weigh(self) -> str: ...
    @property
    def transposed(self) -> bool: ...
    @property
    def interleaved(self) -> bool: ...
    @property
    def limit(self) -> float: ...
    @property
    def alpha(self) -> float: ...


class ExpertParams(NamedTuple):
    """Weights of the experts of this rank, as `fastpar.ops.moe.mlp.moe_mlp` takes them, or their gradients."""

    first: Tensor
    second: Tensor
    first_bias: Tensor | None = None
    second_bias: Tensor | None = None


class MlpSaved(NamedTuple):
    """What backward needs besides the inputs: where rows lie, their hidden features [rows, 2I or I], and the groups of
    rows, whose tables of tiles backward would make again."""

    placed: PlacedPairs
    hidden: Tensor
    groups: RowGroups


class MlpGrads(NamedTuple):
    """None: was not asked for."""

    x: Tensor | None
    weights: Tensor
    experts: ExpertParams | None


def _activation(rule: MlpRule) -> dict[str, Any]:
    return {
        "activation": rule.activation, "interleaved": rule.interleaved, "transposed": rule.transposed,
        "limit": float(rule.limit), "alpha": float(rule.alpha),
    }  # fmt: skip


def forward(
    x: Tensor, indices: Tensor, weights: Tensor, experts: ExpertParams, rule: MlpRule, add: Tensor | None = None
) -> tuple[Tensor, MlpSaved]:
    """out [T, H] of x [T, H], indices and weights [T, K]; `add` [T, H] comes into the sum."""
    placed = place_pairs(indices, experts.first.shape[0], weights)
    groups = RowGroups(placed.splits, placed.source.shape[0], x.device)
    hidden, act = grouped_linear_act(
        x, experts.first, groups, experts.first_bias, index=placed.source, **_activation(rule),
        scale=placed.row_weights if rule.weigh == "input" else None,
        row_weights=placed.row_weights if rule.weigh == "before" else None,
    )  # fmt: skip
    rows = grouped_linear(act, experts.second, groups, experts.second_bias, transposed=rule.transposed)
    out = sum_rows([rows], placed.slots, weights=weights if rule.weigh == "after" else None, add=add)
    return out, MlpSaved(placed, hidden, groups)


def backward(
    dout: Tensor,
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    experts: ExpertParams,
    rule: MlpRule,
    saved: MlpSaved,
    *,
    for_x: bool = True,
    for_experts: bool = True,
) -> MlpGrads:
    """Gradients of everything but `add`, whose gradient is dout; those of x and of the experts only if wanted."""
    placed, hidden, groups = saved
    dhidden, act, dots = grouped_linear_dact(
        dout, experts.second, groups, hidden, index=placed.source, **_activation(rule),
        row_weights=None if rule.weigh == "input" else placed.row_weights,
    )  # fmt: skip
    dx = None
    if for_x or rule.weigh == "input":
        rows = grouped_linear(dhidden, experts.first, groups, transposed=not rule.transposed)
        if rule.weigh == "input":
            dots = dot_rows(rows, [x], placed.source)
        if for_x:
            dx = sum_rows([rows], placed.slots, weights=weights if rule.weigh == "input" else None)
    # Slot -1 is the last one here, until it is a zero.
    dweights = dots[placed.slots].masked_fill_(placed.slots < 0, 0.0) if dots.numel() else weights.float()
    if rule.weigh == "after" and experts.second_bias is not None:
        products = dout.float() @ experts.second_bias.float().T  # [T, E]
        chosen = products.gather(1, indices.long().clamp(0, experts.first.shape[0] - 1))
        dweights = dweights + torch.where(placed.slots < 0, 0.0, chosen)
    grads = _expert_grads(dout, x, act, dhidden, experts, rule, placed, groups) if for_experts else None
    return MlpGrads(dx, dweights.to(weights.dtype), grads)


def _expert_grads(
    dout: Tensor,
    x: Tensor,
    act: Tensor,
    dhidden: Tensor,
    experts: ExpertParams,
    rule: MlpRule,
    placed: PlacedPairs,
    groups: RowGroups,
) -> ExpertParams:
    """From the weighted activations and the gradient of the hidden features."""
    dsecond = _wgrad(dout, act, groups, rule.transposed, dout_index=placed.source)
    second_bias = first_bias = None
    if experts.second_bias is not None:
        scale = placed.row_weights if rule.weigh == "after" else None
        second_bias = grouped_bias_grad(dout, groups, index=placed.source, scale=scale)
    if experts.first_bias is not None:
        first_bias = grouped_bias_grad(dhidden, groups)
    if rule.weigh == "input":  # weigh one of the two factors; this copy is the only one there is
        dhidden = gather_rows([dhidden], torch.arange(dhidden.shape[0], device=x.device), scale=placed.row_weights)
    dfirst = _wgrad(dhidden, x, groups, rule.transposed, x_index=placed.source)
    return ExpertParams(dfirst, dsecond, first_bias, second_bias)


def _wgrad(
    dout: Tensor,
    x: Tensor,
    groups: RowGroups,
    transposed: bool,
    *,
    dout_index: Tensor | None = None,
    x_index: Tensor | None = None,
    factor: Tensor | None = None,
) -> Tensor:
    """The gradient of a weight [E, out, in] ([E, in, out]) from rows [.., out] and [.., in]; one of them gathered."""
    if transposed:
        return grouped_wgrad(x, dout, groups, left_index=x_index, right_index=dout_index, factor=factor)
    return grouped_wgrad(dout, x, groups, left_index=dout_index, right_index=x_index, factor=factor)
