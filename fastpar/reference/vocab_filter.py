"""Sampling filters over a vocabulary that is split across ranks, in plain PyTorch.

The rules are in fastpar.ops.vocab_filter. `histogram` and `apply` have the signatures of the ops of the same names, and
are what the public function falls back to on devices without kernels.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fastpar.contracts import communicator
from fastpar.contracts.dtensor_logits import placed_like, unwrap
from fastpar.contracts.vocab import (
    BINS,
    check_filters,
    check_logits,
    masses,
    num_rows,
    ordered_keys,
)
from fastpar.contracts.vocab_shard import resolve_shard
from fastpar.reference.vocab_softmax import whole_vocab

if TYPE_CHECKING:
    from fastpar.comm import GroupLike


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
