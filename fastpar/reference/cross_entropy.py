"""Vocab-parallel cross-entropy in plain PyTorch, and the argument checks that the fused version shares with it.

The algebra is in fastpar.ops.cross_entropy. `stats`, `merge`, `backward`, ... here have the signatures of the ops of
the same names, and are what the public function falls back to on devices without kernels. In all of them `weight` is
the whole vocabulary's class weights [V] in the compute dtype or None, `weight_sum` their sum as a float64 scalar (or
None without smoothing or weights), and a `softcap` of 0 means none.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from fastpar.contracts.dtensor_logits import local_tensor, unwrap
from fastpar.contracts.vocab_shard import (
    Shard,
    check_headers,
    check_target_range,
    communicator,
    compute_dtype,
    exchange,
    resolve_shard,
    with_header,
)
from fastpar.reference.normalizer import below_lse, join_lse

if TYPE_CHECKING:
    from fastpar.comm import GroupLike

LOGITS_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SUM_UNIT = 2.0**-32  # sums of logits travel multiplied by this: one of logits of 1e38 would not be a float32
REDUCTIONS = ("none", "mean", "sum")


# ---- arguments -------------------------------------------------------------------------------------------------------


# From here on a far row's normaliser (csrc/common/far_rows.h) and tanh in float32 are too coarse on some backends, and
# logits that are small enough to have digits behind the point are not changed by the cap.
MAX_SOFTCAP = float(1 << 30)


class LossOptions(NamedTuple):
    """What changes the loss of a row, besides class weights; checked. softcap 0: none."""

    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float
    logit_scale: float

    @property
    def smoothing(self) -> bool:
        return self.label_smoothing > 0.0


def check_options(
    ignore_index: int, label_smoothing: float, z_loss: float, softcap: float | None, logit_scale: float
) -> LossOptions:
    """The options as the ops take them; ValueError or TypeError for what makes no sense."""
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise TypeError(f"ignore_index must be an int, got {ignore_index!r}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must be between 0 and 1, got {label_smoothing}")
    if not 0.0 <= z_loss < math.inf:
        raise ValueError(f"z_loss must be a finite number >= 0, got {z_loss}")
    if softcap is not None and not 0.0 < softcap < math.inf:
        raise ValueError(f"softcap must be None or a finite number > 0, got {softcap}")
    if softcap is not None and softcap >= MAX_SOFTCAP:
        raise ValueError(
            f"softcap must be below 2**30, got {softcap}: logits of float32 that it would change have no digits left "
            "for it. Leave it out"
        )
    if not -math.inf < logit_scale < math.inf or logit_scale == 0.0:
        raise ValueError(f"logit_scale must be finite and not 0, got {logit_scale}")
    return LossOptions(ignore_index, float(label_smoothing), float(z_loss), float(softcap or 0.0), float(logit_scale))


def check_reduction(reduction: str, denominator: float | Tensor | None) -> None:
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {REDUCTIONS}, got {reduction!r}")
    if denominator is None:
        return
    if reduction != "mean":
        raise ValueError(f"denominator is what a mean divides by; reduction is {reduction!r}")
    if isinstance(denominator, Tensor):
        if denominator.numel() != 1:
            raise ValueError(f"denominator must be a number or a tensor of one, got shape {tuple(denominator.shape)}")
    elif not denominator > 0:
        raise ValueError(f"denominator must be > 0, got {denominator}")


def check_logits_and_target(logits: Tensor, target: Tensor) -> None:
    if logits.dtype not in LOGITS_DTYPES:
        raise TypeError(f"logits must be one of {[str(d) for d in LOGITS_DTYPES]}, got {logits.dtype}")
    if target.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"target must hold class ids as int64 (or int32), got {target.dtype}")
    if logits.dim() == 0 or target.shape != logits.shape[:-1]:
        raise ValueError(
            f"target must have the shape of logits without its last dim (the vocabulary): logits is "
            f"{tuple(logits.shape)}, target is {tuple(target.shape)}"
        )
    if target.device != logits.device:
        raise ValueError(f"logits and target must be on one device, got {logits.device} and {target.device}")


def check_weight(
    weight: Tensor | None, total: int, like: Tensor, options: LossOptions
) -> tuple[Tensor | None, Tensor | None]:
    """Class weights as the ops take them, and their sum where smoothing needs it."""
    if weight is None:
        return None, None
    if not weight.is_floating_point():
        raise TypeError(f"weight must be floating point, got {weight.dtype}")
    if weight.shape != (total,):
        raise ValueError(
            f"weight must have one entry per id of the whole vocabulary, ({total},), got {tuple(weight.shape)}"
        )
    if weight.device != like.device:
        raise ValueError(f"weight must be on the device of the logits, {like.device}, got {weight.device}")
    if weight.requires_grad:
        raise ValueError("weight requires a gradient, and class weights have none here: pass weight.detach()")
    weight = weight.to(compute_dtype(like.dtype)).contiguous()
    return weight, weight.double().sum() if options.smoothing else None


def shifted(target: Tensor, shift: int, ignore_index: int) -> Tensor:
    """Target t + shift at position t of the last dim; `ignore_index` where there is none. The logits stay as they are.

    shifted([5, 6, 7], 1, -100) is [6, 7, -100].
    """
    if isinstance(shift, bool) or not isinstance(shift, int) or shift < 0:
        raise ValueError(f"shift must be an int >= 0, got {shift!r}")
    if shift == 0:
        return target
    if target.dim() == 0:
        raise ValueError("shift needs a target with a sequence dim, its last one; got a target of no dims")
    shift = min(shift, target.shape[-1])
    return F.pad(target, (0, shift), value=ignore_index)[..., shift:]


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


def target_weight(weight: Tensor, ids: Tensor) -> Tensor:
    """weight[id] of every row; NaN for ids outside the vocabulary, which may be ignored ones."""
    total = weight.shape[0]
    outside = (ids < 0) | (ids >= total)
    if total == 0:
        return weight.new_full(ids.shape, math.nan)
    return weight[ids.masked_fill(outside, 0)].masked_fill(outside, math.nan)


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


# ---- reductions ------------------------------------------------------------------------------------------------------


def mean_denominator(
    target: Tensor, weight: Tensor | None, options: LossOptions, denominator: float | Tensor | None, like: Tensor
) -> Tensor:
    """What a mean divides by, as a scalar of like's dtype and device: `denominator`, or the (weighted) number of rows
    that count; 1 where that is 0, so that a mean over nothing is 0.
    """
    if denominator is not None:
        if isinstance(denominator, Tensor):
            return denominator.detach().reshape(()).to(device=like.device, dtype=like.dtype)
        return like.new_tensor(denominator)
    counted = target != options.ignore_index
    if weight is None:
        return counted.sum().clamp(min=1).to(like.dtype)
    total = target_weight(weight, target.reshape(-1)).masked_fill(~counted.reshape(-1), 0.0).sum().to(like.dtype)
    return torch.where(total == 0, torch.ones_like(total), total)


def reduce_loss(loss: Tensor, target: Tensor, reduction: str, divisor: Tensor | None) -> Tensor:
    """The per-row losses [N] reduced; `divisor` belongs to a mean."""
    if reduction == "none":
        return loss.reshape(target.shape)
    return loss.sum() if divisor is None else loss.sum() / divisor


def expand_grad(grad: Tensor | None, divisor: Tensor | None, rows: int, like: Tensor) -> Tensor:
    """Gradient of every row's loss, [rows] of like's dtype, from the gradient of the reduced loss (None: zero)."""
    if grad is None:
        return like.new_zeros(()).expand(rows)
    scaled = grad.to(like.dtype) if divisor is None else grad.to(like.dtype) / divisor
    return scaled.reshape(-1).expand(rows)


# ---- the public function ---------------------------------------------------------------------------------------------


@overload
def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    group: GroupLike = ...,
    vocab_range: tuple[int, int, int] | None = ...,
    ignore_index: int = ...,
    label_smoothing: float = ...,
    z_loss: float = ...,
    softcap: float | None = ...,
    logit_scale: float = ...,
    weight: Tensor | None = ...,
    shift: int = ...,
    reduction: str = ...,
    denominator: float | Tensor | None = ...,
    inplace_backward: bool = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...
@overload
def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    group: GroupLike = ...,
    vocab_range: tuple[int, int, int] | None = ...,
    ignore_index: int = ...,
    label_smoothing: float = ...,
    z_loss: float = ...,
    softcap: float | None = ...,
    logit_scale: float = ...,
    weight: Tensor | None = ...,
    shift: int = ...,
    reduction: str = ...,
    denominator: float | Tensor | None = ...,
    inplace_backward: bool = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
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
) -> Tensor | tuple[Tensor, Tensor]:
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

    divisor = mean_denominator(target, weight, options, denominator, loss) if reduction == "mean" else None
    dtype = compute_dtype(logits.dtype)
    out = reduce_loss(loss, target, reduction, divisor).to(dtype)
    return (out, lse.to(dtype).reshape(target.shape)) if return_lse else out


def _outside(ids: Tensor, shard: Shard, ignore_index: int) -> Tensor:
    return ((ids < 0) | (ids >= shard.total)) & (ids != ignore_index)
