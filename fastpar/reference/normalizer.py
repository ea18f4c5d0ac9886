"""The normaliser of a row as one double: see `Note: far rows` in csrc/common/far_rows.h.

    lse = maximum + log_sum                      |maximum| < 2^30, or float64 logits
    lse = maximum + log_sum 2^(k - 30)           2^k <= |maximum| < 2^(k + 1), a float

A double has no room for log_sum beside a maximum of 1e17; beside a float that large its lower bits are free. Rounded to
float32 both are the log-sum-exp.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
