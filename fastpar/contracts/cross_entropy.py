"""Cross-entropy's options, the checks of its arguments, and how a row's loss becomes a scalar: what ops and reference
share.

Note: lse. The normaliser of a row is one double; see `Note: far rows` in csrc/common/far_rows.h.

    lse = maximum + log_sum                      |maximum| < 2^30, or float64 logits
    lse = maximum + log_sum 2^(k - 30)           2^k <= |maximum| < 2^(k + 1), a float

A double has no room for log_sum beside a maximum of 1e17; beside a float that large its lower bits are free. Rounded to
float32 both are the log-sum-exp.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastpar.contracts import FLOAT_DTYPES, compute_dtype

# ---- the normaliser --------------------------------------------------------------------------------------------------

FAR_MAXIMUM = 2.0**30


def _far_unit(maximum: Tensor) -> Tensor:
    """2^(k - 30) where the maximum is far, 1 elsewhere."""
    is_far = (maximum.abs() >= FAR_MAXIMUM) & maximum.isfinite()
    exponent = torch.frexp(maximum.masked_fill(~is_far, FAR_MAXIMUM)).exponent  # k + 1
    return torch.ldexp(torch.ones_like(maximum), exponent - 31)


def join_lse(maximum: Tensor, log_sum: Tensor, dtype: torch.dtype) -> Tensor:
    """lse of rows, float64; `dtype` is what the logits are computed in."""
    return maximum + (log_sum if dtype == torch.float64 else log_sum * _far_unit(maximum))


def below_lse(z: Tensor, lse: Tensor) -> Tensor:
    """z - lse in float64, for z [N] or [N, V] of the compute dtype and lse [N]."""
    lse = lse.reshape(-1, *(1,) * (z.dim() - 1))
    if z.dtype == torch.float64:
        return z - lse
    high = lse.float().double()
    return (z.double() - high) - (lse - high) / _far_unit(high)


# ---- arguments -------------------------------------------------------------------------------------------------------

REDUCTIONS = ("none", "mean", "sum")
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
    if logits.dtype not in FLOAT_DTYPES:
        raise TypeError(f"logits must be one of {[str(d) for d in FLOAT_DTYPES]}, got {logits.dtype}")
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


# ---- weights and reductions ------------------------------------------------------------------------------------------


def target_weight(weight: Tensor, ids: Tensor) -> Tensor:
    """weight[id] of every row; NaN for ids outside the vocabulary, which may be ignored ones."""
    total = weight.shape[0]
    outside = (ids < 0) | (ids >= total)
    if total == 0:
        return weight.new_full(ids.shape, math.nan)
    return weight[ids.masked_fill(outside, 0)].masked_fill(outside, math.nan)


def mean_denominator(
    target: Tensor, weight: Tensor | None, options: LossOptions, denominator: float | Tensor | None, dtype: torch.dtype
) -> Tensor:
    """What a mean divides by, as a scalar of this dtype on target's device: `denominator`, or the (weighted) number of
    rows that count; 1 where that is 0, so that a mean over nothing is 0.
    """
    if denominator is not None:
        if isinstance(denominator, Tensor):
            return denominator.detach().reshape(()).to(device=target.device, dtype=dtype)
        number = float(denominator)  # an int may have more bits than torch.full takes
        number = math.inf if number > torch.finfo(dtype).max else number  # which it would refuse to round to
        return torch.full((), number, dtype=dtype, device=target.device)  # no copy from the host
    counted = target != options.ignore_index
    if weight is None:
        return counted.sum().clamp(min=1).to(dtype)
    total = target_weight(weight, target.reshape(-1)).masked_fill(~counted.reshape(-1), 0.0).sum().to(dtype)
    return torch.where(total == 0, torch.ones_like(total), total)


def reduce_loss(loss: Tensor, target: Tensor, reduction: str, divisor: Tensor | None) -> Tensor:
    """The per-row losses [N] reduced; `divisor` belongs to a mean."""
    if reduction == "none":
        return loss.reshape(target.shape)
    return loss.sum() if divisor is None else loss.sum() / divisor


def expand_grad(grad: Tensor | None, divisor: Tensor | None, target: Tensor, dtype: torch.dtype) -> Tensor:
    """Gradient of every row's loss, [rows] of this dtype, from the gradient of the reduced loss (None: zero)."""
    if grad is None:
        return target.new_zeros((), dtype=dtype).expand(target.numel())
    scaled = grad.to(dtype) if divisor is None else grad.to(dtype) / divisor
    # A scalar is expanded, not copied: kernels take rows any distance apart, 0 included.
    return scaled.expand(target.numel()) if scaled.dim() == 0 else scaled.reshape(-1)
