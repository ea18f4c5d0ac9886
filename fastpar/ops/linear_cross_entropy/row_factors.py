"""The gradient of the loss from exponentials that are not normalised yet.

Each rank has E_v = exp(z_v - m) of its own columns (m its own maximum; E_y = 0 for the target) before it knows the
normaliser of the whole vocabulary. The gradient by its logits is then, row by row,

    dx_v = scale E_v - spread w_v + [v = y] peak

    scale  = logit_scale (gamma + delta) exp(m - lse)
    spread = logit_scale beta                                 0 without label smoothing
    peak   = logit_scale (1 - (z_y / softcap)^2) (delta p_y + gamma expm1(z_y - lse))        on the target's owner

(gamma, beta and delta as in fastpar.ops.cross_entropy; E carries softcap's factor, which does not let `spread` be a
number per row: softcap with smoothing does not work this way.) None of the three needs the matrix E again, and all
commute with the two GEMMs:

    dX = scale * (E @ W) - spread (w @ W) + peak W[y]
    dW = E.T @ (scale * X) - w (spread @ X) + peak X in the rows y

so the GEMM E @ W runs while the statistics travel. Example: two ranks with a column each, logits [[0.0]] and
[[log 3]], target 1, dloss 1: both have m equal to their logit; E is [[1]] on rank 0 and [[0]] on rank 1, lse = log 4;
scale is 1/4 and 3/4, peak is 0 and -1/4.

Source: Yeung et al. 2024 (arXiv:2411.05288), algorithm 2; the row factor in QuACK's linear cross-entropy.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fastpar.contracts.cross_entropy import below_lse, target_weight
from fastpar.ops.cross_entropy import LossProblem
from fastpar.ops.linear_cross_entropy.row_chunks import Rows


class RowFactors(NamedTuple):
    """What turns a row of E into a row of the gradient; float64 [n].

    column  the target's column on this rank, some column where another rank owns it (peak is 0 there)
    """

    scale: Tensor
    spread: Tensor | None
    peak: Tensor
    column: Tensor


def row_factors(stats: Tensor, lse: Tensor, target: Tensor, grad_loss: Tensor, problem: LossProblem) -> RowFactors:
    """From this rank's statistics [>= n, C], lse [n], targets [n] and the gradient of the rows' losses [n]."""
    options, shard = problem.options, problem.shard
    maximum, _, picked = stats[: target.numel(), :3].unbind(dim=-1)
    ignored = target == options.ignore_index
    grad = grad_loss.double().masked_fill(ignored, 0.0)
    gamma = (1.0 - options.label_smoothing) * grad
    if problem.weight is not None:
        gamma = gamma * target_weight(problem.weight, target).double().masked_fill(ignored, 0.0)
    beta = grad * (options.label_smoothing / max(shard.total, 1))
    delta = beta * (shard.total if problem.weight_sum is None else problem.weight_sum)
    if options.z_loss > 0.0:
        delta = delta + grad * 2.0 * options.z_loss * lse
    empty = ignored | (maximum == -math.inf)
    scale = options.logit_scale * (gamma + delta) * below_lse(maximum, lse).exp()

    local = target - shard.start
    owned = (local >= 0) & (local < shard.size) & ~ignored
    log_probability = below_lse(picked, lse)
    peak = options.logit_scale * (delta * log_probability.exp() + gamma * log_probability.expm1())
    if options.softcap != 0.0:
        peak = peak * (1.0 - (picked.double() / options.softcap).square())
    return RowFactors(
        scale.masked_fill(empty, 0.0),
        options.logit_scale * beta if options.smoothing else None,
        peak.masked_fill(~owned, 0.0),
        torch.where(owned, local, local.remainder(max(shard.size, 1))),
    )


def target_rows(factors: RowFactors) -> tuple[Rows, Tensor, Tensor]:
    """(rows, column, peak) of the rows with a target here: counted on CPU, where that is free; all rows elsewhere."""
    if factors.peak.device.type != "cpu":
        return slice(None), factors.column, factors.peak
    rows = factors.peak.nonzero().squeeze(1)
    return rows, factors.column[rows], factors.peak[rows]


def add_target_rows(total: Tensor, column: Tensor, values: Tensor) -> None:
    """total[column[n]] += values[n], in an order that does not change from run to run.

    index_add_ is serial on CPU and atomic on CUDA; index_put_ the other way around.
    """
    if total.device.type == "cpu":
        total.index_add_(0, column, values)
    else:
        total.index_put_((column,), values, accumulate=True)
