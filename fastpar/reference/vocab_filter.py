"""Sampling filters over a vocabulary that is split across ranks, in plain PyTorch.

The rules are in fastpar.ops.vocab_filter. `histogram` and `apply` have the signatures of the ops of the same names, and
are what the public function falls back to on devices without kernels.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fastpar.contracts.dtensor_logits import placed_like, unwrap
from fastpar.contracts.vocab_shard import communicator, resolve_shard
from fastpar.reference.vocab_softmax import check_logits, num_rows, whole_vocab
from fastpar.reference.vocab_topk import check_total

if TYPE_CHECKING:
    from fastpar.comm import GroupLike

BINS = 256  # a byte of the key at a time
ALL_TIES = 2**62
_SIGNED = {2: torch.int16, 4: torch.int32, 8: torch.int64}


# ---- arguments -------------------------------------------------------------------------------------------------------


def check_filters(
    top_k: int | None, top_p: float | None, min_p: float | None, temperature: float, filter_value: float, total: int
) -> None:
    check_total(total)
    if top_k is not None:
        if isinstance(top_k, bool) or not isinstance(top_k, int):
            raise TypeError(f"top_k must be None or an int, got {top_k!r}")
        if top_k < 1:
            raise ValueError(f"top_k must be at least 1 (None for no limit), got {top_k}")
    if top_p is not None and not 0.0 <= top_p <= 1.0:
        raise ValueError(f"top_p must be between 0 and 1 (None for no limit), got {top_p}")
    if min_p is not None and not 0.0 <= min_p <= 1.0:
        raise ValueError(f"min_p must be between 0 and 1 (None for no limit), got {min_p}")
    if not (temperature > 0.0 and math.isfinite(temperature)):
        raise ValueError(f"temperature must be a finite number > 0, got {temperature}")
    if math.isnan(filter_value):
        raise ValueError("filter_value must not be NaN")


# ---- keys and masses -------------------------------------------------------------------------------------------------

# Note: masses. exp(z - maximum) is counted in integer units of 2^-mass_bits, so that a sum has the same value however
# it is split over ranks; mass_bits leaves room for the whole vocabulary in 63 bits.


def mass_bits(total: int) -> int:
    return min(52, 62 - total.bit_length())


def masses(values: Tensor, maximum: Tensor, bits: int) -> Tensor:
    """exp(value - maximum) in units of 2^-bits, int64; 0 where that is not a number."""
    exact = (values.double() - maximum).exp() * 2.0**bits
    return (exact + 0.5).nan_to_num(0.0, 0.0, 0.0).long()


def ordered_keys(x: Tensor) -> Tensor:
    """Integers of the same order as the floating-point numbers x; unsigned, so those of 64 bits wrap. -0 is 0."""
    bits = (x + 0.0).contiguous().view(_SIGNED[x.element_size()]).long()
    width = 8 * x.element_size()
    ordered = torch.where(bits < 0, ~bits, bits ^ -(2**63) if width == 64 else bits + 2 ** (width - 1))
    return torch.where(bits < 0, ordered & (2 ** (width - 1) - 1), ordered)


def values_of(keys: Tensor, dtype: torch.dtype) -> Tensor:
    """The floating-point numbers whose `ordered_keys` these are."""
    width = 8 * dtype.itemsize
    if width == 64:
        return torch.where(keys < 0, keys ^ -(2**63), ~keys).view(dtype)
    half = 2 ** (width - 1)
    bits = torch.where(keys >= half, keys - half, -1 - keys)
    return bits.to(_SIGNED[dtype.itemsize]).view(dtype)


# ---- the ops ---------------------------------------------------------------------------------------------------------


def histogram(logits: Tensor, maximum: Tensor, prefix: Tensor, digit: int, mass_bits: int) -> Tensor:
    """[N, 2, 256]: the mass, and the number, of the elements with any mass whose key begins with the `digit` bytes
    `prefix`, by their next byte. A row whose maximum is not finite has none.
    """
    x = logits.reshape(num_rows(logits), logits.shape[-1])
    keys, width = ordered_keys(x), 8 * x.element_size()
    shift = width - 8 * (digit + 1)
    mass = masses(x, maximum.unsqueeze(1), mass_bits)
    counted = (x.double() - maximum.unsqueeze(1) > -0.7 * (mass_bits + 1)) & maximum.isfinite().unsqueeze(1)
    if digit > 0:
        upper = (keys >> (shift + 8)) & (2 ** (width - shift - 8) - 1)  # a logical shift
        counted &= upper == prefix.unsqueeze(1)
    bins = (keys >> shift) & (BINS - 1)
    both = torch.stack([mass.masked_fill(~counted, 0), counted.long()], dim=1)
    return both.new_zeros(x.shape[0], 2, BINS).scatter_add(2, bins.unsqueeze(1).expand_as(both), both)


def apply(logits: Tensor, cut: Tensor, ties: Tensor, filter_value: float) -> Tensor:
    """The logits above cut [N], the first ties [N] that equal it, and NaN; `filter_value` for all others."""
    x = logits.reshape(num_rows(logits), logits.shape[-1])
    wide = x.double()
    equal = wide == cut.unsqueeze(1)
    late = equal & (equal.cumsum(dim=1) > ties.unsqueeze(1))
    return x.masked_fill((wide < cut.unsqueeze(1)) | late, filter_value).reshape(logits.shape)


# ---- the public function ---------------------------------------------------------------------------------------------


def vocab_parallel_top_k_top_p(
    logits: Tensor,
    *,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    temperature: float = 1.0,
    group: GroupLike = None,
    vocab_range: tuple[int, int, int] | None = None,
    filter_value: float = -math.inf,
) -> Tensor:
    """fastpar.ops.vocab_parallel_top_k_top_p by gathering and sorting the vocabulary, in float64."""
    from fastpar.comm import gather_from

    given = logits
    logits, group, vocab_range = unwrap(given, group, vocab_range)
    check_logits(logits)
    comm = communicator(group)
    shard = resolve_shard(logits.shape[-1], vocab_range, comm)
    check_filters(top_k, top_p, min_p, temperature, filter_value, shard.total)
    scores = gather_from(logits, comm, dim=-1, sizes=whole_vocab(logits, shard, comm)) / temperature
    z = scores.detach().double()
    keep = torch.ones_like(z, dtype=torch.bool)
    if z.shape[-1]:
        usable = z.amax(dim=-1, keepdim=True).isfinite()
        if top_k is not None and top_k < shard.total:
            keep &= ~(z < z.topk(top_k, dim=-1).values[..., -1:])
        if top_p is not None and top_p < 1.0:
            p, order = z.masked_fill(~keep, -math.inf).softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
            inside = p.cumsum(dim=-1) - p < top_p  # as long as what comes before is not enough
            inside[..., 0] = True
            keep &= torch.zeros_like(keep).scatter(-1, order, inside)
        if min_p is not None and min_p > 0.0:
            keep &= z - z.amax(dim=-1, keepdim=True) >= math.log(min_p)
        keep |= ~usable
    own = slice(shard.start, shard.start + shard.size)
    return placed_like(given, scores[..., own].masked_fill(~keep[..., own], filter_value))
