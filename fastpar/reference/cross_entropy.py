"""Vocab-parallel cross-entropy in plain PyTorch.

The algebra is in fastpar.ops.cross_entropy. `stats`, `merge`, `backward`, ... here have the signatures of the ops of
the same names, and are what the public function falls back to on devices without kernels. In all of them `weight` is
the whole vocabulary's class weights [V] in the compute dtype or None, `weight_sum` their sum as a float64 scalar (or
None without smoothing or weights), and a `softcap` of 0 means none.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastpar.contracts import communicator, compute_dtype
from fastpar.contracts.cross_entropy import (
    below_lse,
    check_logits_and_target,
    check_options,
    check_reduction,
    check_weight,
    join_lse,
    mean_denominator,
    reduce_loss,
    shifted,
    target_weight,
)
from fastpar.contracts.dtensor_logits import local_tensor, unwrap
from fastpar.contracts.vocab_shard import Shard, check_headers, check_target_range, exchange, resolve_shard, with_header

if TYPE_CHECKING:
    from fastpar.comm import GroupLike

SUM_UNIT = 2.0**-32  # sums of logits travel multiplied by this: one of logits of 1e38 would not be a float32


# ---- the ops ---------------------------------------------------------------------------------------------------------


def transform(logits: Tensor, rows: int, softcap: float, logit_scale: float) -> Tensor:
    """z [rows, V] in the compute dtype: scaled and soft-capped logits."""
    z = logits.reshape(rows, logits.shape[-1]).to(compute_dtype(logits.dtype))
    if logit_scale != 1.0:
        z = z * logit_scale
    return z if softcap == 0.0 else softcap * torch.tanh(z / softcap)


def stats(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    vocab_start: int,
    vocab_total: int,
    ignore_index: int,
    smoothing: bool,
    softcap: float,
    logit_scale: float,
    call: int = 0,
) -> Tensor:
    """[N + 3, 3] (5 with smoothing): of every row the maximum of z, the sum of exp(z - maximum), the target's z (0
    where another rank holds it), and with smoothing the sum of w z times SUM_UNIT, in two parts; then the header. What
    other ranks compare, `call`, is for kernels that run where headers are read.

    A shard without a finite logit gives (-inf, 0, ...). A target out of range has z NaN; on CPU its row is named in
    the header as well.
    """
    size, ids = logits.shape[-1], target.reshape(-1)
    z = transform(logits, ids.numel(), softcap, logit_scale)
    counted = ids != ignore_index
    column = ids - vocab_start
    owned = (column >= 0) & (column < size) & counted
    if size == 0:
        maximum = z.new_full((z.shape[0],), -math.inf)
        picked = torch.zeros_like(maximum)
    else:
        maximum = z.amax(dim=-1)
        picked = z.gather(1, column.clamp(0, size - 1).unsqueeze(1)).squeeze(1).masked_fill(~owned, 0.0)
    outside = ((ids < 0) | (ids >= vocab_total)) & counted
    picked = picked.masked_fill(outside, math.nan)
    reference = maximum.masked_fill(maximum == -math.inf, 0.0)
    columns = [maximum, (z - reference.unsqueeze(1)).exp().sum(dim=-1), picked]
    if smoothing:
        scaled = z.double() if weight is None else z.double() * weight[vocab_start : vocab_start + size]
        total = scaled.sum(dim=-1) * SUM_UNIT
        high = total.to(z.dtype)
        columns += [high, (total - high).masked_fill(~high.isfinite(), 0.0).to(z.dtype)]
    bad_row = -1
    if logits.device.type == "cpu" and bool(outside.any()):
        bad_row = int(outside.nonzero()[0])
    return with_header(torch.stack(columns, dim=-1), Shard(vocab_start, size, vocab_total), bad_row)


def merge(
    gathered: Tensor,
    target: Tensor,
    weight: Tensor | None,
    weight_sum: Tensor | None,
    vocab_total: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> tuple[Tensor, Tensor]:
    """(loss [N], lse [N] float64) from every rank's statistics [ranks, N + 3, C]; ignored rows have loss 0."""
    ids = target.reshape(-1)
    columns = gathered[:, : ids.numel()].double().unbind(dim=-1)
    maximum, total, picked = columns[:3]
    highest = maximum.amax(dim=0)
    reference = highest.masked_fill(highest == -math.inf, 0.0)
    log_sum = (total * (maximum - reference).exp()).sum(dim=0).log()
    lse = reference + log_sum
    loss = torch.zeros_like(lse)
    if label_smoothing < 1.0:
        loss = (1.0 - label_smoothing) * ((reference - picked.sum(dim=0)) + log_sum)
        if weight is not None:
            loss = loss * target_weight(weight, ids).double()
    if label_smoothing > 0.0:
        all_weights = vocab_total if weight_sum is None else weight_sum
        weighted = (columns[3] + columns[4]).sum(dim=0) / SUM_UNIT
        # For equal logits the difference is exact, whatever their size.
        around = (all_weights * reference - weighted) + all_weights * log_sum
        loss = loss + label_smoothing / max(vocab_total, 1) * around
    if z_loss > 0.0:
        loss = loss + z_loss * lse.square()
    return loss.masked_fill(ids == ignore_index, 0.0).to(gathered.dtype), join_lse(reference, log_sum, gathered.dtype)


def backward(
    logits: Tensor,
    lse: Tensor,
    target: Tensor,
    weight: Tensor | None,
    weight_sum: Tensor | None,
    grad_loss: Tensor,
    grad_lse: Tensor | None,
    vocab_start: int,
    vocab_total: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    logit_scale: float,
) -> Tensor:
    """Gradient by this rank's logits of sum_n grad_loss_n loss_n + grad_lse_n lse_n, in the logits' shape and dtype."""
    size, ids = logits.shape[-1], target.reshape(-1)
    z = transform(logits, ids.numel(), softcap, logit_scale)
    ignored = ids == ignore_index
    grad_loss = grad_loss.double().masked_fill(ignored, 0.0)
    gamma = (1.0 - label_smoothing) * grad_loss
    if weight is not None:
        gamma = gamma * target_weight(weight, ids).double().masked_fill(ignored, 0.0)
    beta = grad_loss * (label_smoothing / max(vocab_total, 1))
    delta = beta * (vocab_total if weight_sum is None else weight_sum)
    if z_loss > 0.0:
        delta = delta + grad_loss * 2.0 * z_loss * lse
    log_probability = below_lse(z, lse).to(z.dtype)
    probability = log_probability.exp()
    is_target = torch.arange(size, device=z.device) == (ids - vocab_start).unsqueeze(1)
    spread = torch.where(is_target, log_probability.expm1(), probability)
    grad = gamma.to(z.dtype).unsqueeze(1) * spread
    if label_smoothing > 0.0 or z_loss > 0.0 or grad_lse is not None:
        delta = delta if grad_lse is None else delta.masked_fill(ignored, 0.0) + grad_lse.double()
        grad = grad + delta.to(z.dtype).unsqueeze(1) * probability
    if label_smoothing > 0.0:
        scale = beta.to(z.dtype).unsqueeze(1)
        grad = grad - (scale if weight is None else scale * weight[vocab_start : vocab_start + size])
    grad = grad * (logit_scale if softcap == 0.0 else logit_scale * (1.0 - (z / softcap).square()))
    if grad_lse is None:
        grad = grad.masked_fill(ignored.unsqueeze(1), 0.0)
    return grad.to(logits.dtype).reshape(logits.shape)


def backward_(logits: Tensor, *arguments: Any) -> None:
    """`backward`, written over the logits."""
    logits.copy_(backward(logits, *arguments))


def stats_exp_(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    vocab_start: int,
    vocab_total: int,
    ignore_index: int,
    smoothing: bool,
    softcap: float,
    logit_scale: float,
    call: int = 0,
) -> Tensor:
    """`stats`, and E = exp(z - maximum) (times 1 - (z / softcap)^2) written over the logits.

    maximum is this rank's own. E is 0 in the target's column, whose entry of the gradient must not be computed from a
    rounded probability, and in rows that are ignored or without a finite logit.
    """
    out = stats(logits, target, weight, vocab_start, vocab_total, ignore_index, smoothing, softcap, logit_scale, call)
    size, ids = logits.shape[-1], target.reshape(-1)
    z = transform(logits, ids.numel(), softcap, logit_scale)
    maximum = out[: ids.numel(), 0].unsqueeze(1)
    empty = (maximum == -math.inf) | (ids == ignore_index).unsqueeze(1)
    is_target = torch.arange(size, device=z.device) == (ids - vocab_start).unsqueeze(1)
    exp = (z - maximum).exp()
    if softcap != 0.0:
        exp = exp * (1.0 - (z / softcap).square())
    logits.copy_(exp.masked_fill(is_target | empty, 0.0).reshape(logits.shape))
    return out


def forward_backward(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    weight_sum: Tensor | None,
    grad_loss: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    logit_scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss [N], lse [N], gradient of sum_n grad_loss_n loss_n) where one rank holds the whole vocabulary."""
    total = logits.shape[-1]
    if logits.device.type == "cpu":
        check_target_range(target, total, ignore_index)
    local = stats(logits, target, weight, 0, total, ignore_index, label_smoothing > 0.0, softcap, logit_scale)
    loss, lse = merge(local[None], target, weight, weight_sum, total, ignore_index, label_smoothing, z_loss)
    terms = (ignore_index, label_smoothing, z_loss, softcap, logit_scale)
    return loss, lse, backward(logits, lse, target, weight, weight_sum, grad_loss, None, 0, total, *terms)


def forward_backward_(logits: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """`forward_backward`, with the gradient written over the logits."""
    loss, lse, grad = forward_backward(logits, *arguments)
    logits.copy_(grad)
    return loss, lse


# ---- the public function ---------------------------------------------------------------------------------------------


def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    group: GroupLike = None,
    vocab_range: tuple[int, int, int] | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    weight: Tensor | None = None,
    shift: int = 0,
    reduction: str = "mean",
    denominator: float | Tensor | None = None,
    inplace_backward: bool = False,
    return_lse: bool = False,
) -> Any:
    """fastpar.ops.vocab_parallel_cross_entropy in float64 and plain PyTorch, differentiated by autograd.

    It shares no formula of the backward with the kernels. Several collectives; `inplace_backward` has no effect.
    """
    from fastpar.comm import reduce_from

    logits, group, vocab_range = unwrap(logits, group, vocab_range)
    target = local_tensor(target, "target")
    check_logits_and_target(logits, target)
    check_reduction(reduction, denominator)
    options = check_options(ignore_index, label_smoothing, z_loss, softcap, logit_scale)
    comm = communicator(group)
    shard = resolve_shard(logits.shape[-1], vocab_range, comm)
    weight, weight_sum = check_weight(weight, shard.total, logits, options)
    target = shifted(target.long(), shift, ignore_index)
    ids = target.reshape(-1)
    header = with_header(torch.zeros(0, 3), shard, 0 if bool(_outside(ids, shard, ignore_index).any()) else -1)
    check_headers(exchange(header, comm), target, ignore_index)

    z = transform(logits.double(), ids.numel(), options.softcap, options.logit_scale)
    ignored = ids == ignore_index
    if not return_lse:
        z = z.masked_fill(ignored.unsqueeze(1), 0.0)  # whatever is there, its gradient is 0
    maximum = z.detach().amax(dim=-1) if shard.size else z.new_full(ids.shape, -math.inf)
    maximum = maximum if comm is None else comm.all_reduce(maximum, "max")
    maximum = maximum.masked_fill(maximum == -math.inf, 0.0)
    lse = maximum + reduce_from((z - maximum.unsqueeze(1)).exp().sum(dim=-1), comm).log()

    column = ids - shard.start
    owned = (column >= 0) & (column < shard.size) & ~ignored
    picked = z.sum(dim=-1) * 0.0 if shard.size == 0 else z.gather(1, column.clamp(0, shard.size - 1).unsqueeze(1))
    nll = lse - reduce_from(picked.reshape(-1).masked_fill(~owned, 0.0), comm)
    loss = nll if weight is None else nll * target_weight(weight, ids).double().masked_fill(ignored, 0.0)
    if options.smoothing:
        local_weight = z.new_ones(shard.size) if weight is None else weight.double()[shard.start :][: shard.size]
        all_weights = shard.total if weight_sum is None else weight_sum
        spread = all_weights * lse - reduce_from((z * local_weight).sum(dim=-1), comm)
        share = options.label_smoothing
        loss = share / max(shard.total, 1) * spread + ((1.0 - share) * loss if share < 1.0 else 0.0)
    loss = (loss + options.z_loss * lse.square()).masked_fill(ignored, 0.0)

    divisor = mean_denominator(target, weight, options, denominator, loss.dtype) if reduction == "mean" else None
    dtype = compute_dtype(logits.dtype)
    out = reduce_loss(loss, target, reduction, divisor).to(dtype)
    return (out, lse.to(dtype).reshape(target.shape)) if return_lse else out


def _outside(ids: Tensor, shard: Shard, ignore_index: int) -> Tensor:
    return ((ids < 0) | (ids >= shard.total)) & (ids != ignore_index)
