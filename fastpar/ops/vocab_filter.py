"""Top-k, top-p and min-p filtering of logits whose vocabulary is split across ranks, without gathering it.

In the order of Hugging Face's generate, from scores z = logits / temperature:

    top_k   removes z below the k-th largest; what equals it stays
    top_p   sorts what is left, and removes a token once the probability of those before it is at least top_p; the
            first one stays; equal scores are taken in ascending order of id
    min_p   removes tokens less than min_p times as likely as the first

What is left is described by two numbers a row, a cut and how many of the scores that equal it stay (those with the
lowest ids), which each rank applies to its own columns.

With top_k, every rank sends its k best and how many more equal the last of them: all that can stay, and the number of
ties, is then known to everybody, and so is the cut. One collective.

With top_p alone the nucleus may be the whole vocabulary. The cut is found a byte of the score at a time: every rank
adds up probability mass by the next byte of those scores that begin like the cut does, and the sums over the ranks say
which byte comes next. Masses are integers, in units that leave room for the whole vocabulary, so that sums do not
depend on their order and the result not on the number of ranks. One collective for the maximum, and one for each byte
of the dtype, of 2 KiB a row (4 KiB for the last): 3 for 16-bit logits, 5 for float32.

Gathering the M best and doubling M until their mass suffices would take fewer rounds for peaked rows, but as many bytes
as the vocabulary for flat ones.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastpar.arguments import checked
from fastpar.contracts import communicator
from fastpar.contracts.dtensor_logits import placed_like, unwrap
from fastpar.contracts.vocab import (
    ALL_TIES,
    BINS,
    Candidates,
    check_filters,
    check_logits,
    gather_candidates,
    mass_bits,
    masses,
    merge_candidates,
    num_rows,
    values_of,
)
from fastpar.contracts.vocab_shard import Shard, exchange, resolve_shard
from fastpar.ops._backends import kernels_of
from fastpar.ops.vocab_topk import implementation as topk_implementation

if TYPE_CHECKING:
    from fastpar.comm import Communicator, GroupLike


# ---- launchers -------------------------------------------------------------------------------------------------------

implementation = kernels_of("vocab_filter")


# ---- fakes -----------------------------------------------------------------------------------------------------------


@torch.library.register_fake("fastpar::vocab_filter_histogram")
def _(logits: Tensor, maximum: Tensor, prefix: Tensor, digit: int, mass_bits: int) -> Tensor:
    return prefix.new_empty((num_rows(logits), 2, BINS))


@torch.library.register_fake("fastpar::vocab_filter_apply")
def _(logits: Tensor, cut: Tensor, ties: Tensor, filter_value: float) -> Tensor:
    return logits.new_empty(logits.shape)


# ---- cuts ------------------------------------------------------------------------------------------------------------


def _needed(total: Tensor, top_p: float) -> Tensor:
    """The mass that a nucleus must reach, at least one unit, at most all."""
    return torch.minimum((total.double() * top_p).ceil().long(), total).clamp(min=1)


def _own_ties(counts: Tensor, stay: Tensor, comm: Communicator | None) -> Tensor:
    """How many of this rank's ties stay: counts [ranks, N] are every rank's, and the first `stay` [N] of all stay."""
    before = counts[: 0 if comm is None else comm.rank].sum(dim=0)
    return (stay - before).clamp(min=0)


def _cut_of_candidates(
    candidates: Candidates, k: int, top_p: float, bits: int, comm: Communicator | None
) -> tuple[Tensor, Tensor]:
    """(cut, own ties) of top-k and top-p from the ranks' k best."""
    values, _ = merge_candidates(candidates, k)
    kth, maximum = values[:, -1], values[:, :1].double()

    def ties_of(cut: Tensor) -> Tensor:
        """[ranks, N]: how many scores of each rank equal the cut, which is not below the k-th largest."""
        listed = ((candidates.values == cut.unsqueeze(1)) & (candidates.ids >= 0)).sum(dim=2)
        return listed + candidates.equal.masked_fill(candidates.values[..., -1] != cut, 0)

    if top_p >= 1.0:
        return kth.double(), torch.full_like(kth, ALL_TIES, dtype=torch.int64)
    mass = masses(values, maximum, bits)
    all_kth = ties_of(kth).sum(dim=0)
    above = mass.masked_fill(values == kth.unsqueeze(1), 0).sum(dim=1)
    needed = _needed(above + mass[:, -1] * all_kth, top_p)
    reached = mass.cumsum(dim=1) >= needed.unsqueeze(1)
    reached[:, -1] = True  # by ties of the k-th that are not in the list
    cut = values.gather(1, reached.int().argmax(dim=1, keepdim=True))
    above = mass.masked_fill(values <= cut, 0).sum(dim=1)
    unit = masses(cut, maximum, bits).squeeze(1).clamp(min=1)
    stay = -((above - needed) // unit)  # rounded up
    counts = ties_of(cut.squeeze(1))
    return cut.squeeze(1).double(), _own_ties(counts, stay, comm)


def _cut_by_mass(
    z: Tensor, maximum: Tensor, top_p: float, bits: int, comm: Communicator | None
) -> tuple[Tensor, Tensor]:
    """(cut, own ties) of top-p over everything, a byte of the cut's key at a time."""
    ops = implementation(z)
    prefix = torch.zeros(maximum.shape, dtype=torch.int64, device=z.device)
    above, needed = prefix, prefix
    for digit in range(z.element_size()):
        local = ops.histogram(z, maximum, prefix, digit, bits)
        if digit + 1 < z.element_size():
            mass = local[:, 0].contiguous()
            mass = mass if comm is None else comm.all_reduce(mass)
            counts = None
        else:
            gathered = exchange(local, comm)
            mass, counts = gathered[:, :, 0].sum(dim=0), gathered[:, :, 1]
        if digit == 0:
            needed = _needed(mass.sum(dim=1), top_p)
        # From the largest byte down: the first at which the mass above and its own suffice.
        falling = mass.flip(1).cumsum(dim=1) + above.unsqueeze(1)
        position = (falling >= needed.unsqueeze(1)).int().argmax(dim=1, keepdim=True)
        byte = BINS - 1 - position
        inside = mass.gather(1, byte)
        above = (falling.gather(1, position) - inside).squeeze(1)
        prefix = (prefix << 8) | byte.squeeze(1)
    assert counts is not None  # no dtype is without bytes
    ties = counts.gather(2, byte.expand(counts.shape[0], -1, 1)).squeeze(2)
    unit = (inside.squeeze(1) // ties.sum(dim=0).clamp(min=1)).clamp(min=1)
    stay = -((above - needed) // unit)
    return values_of(prefix, z.dtype).double(), _own_ties(ties, stay, comm)


def _cut(
    z: Tensor,
    shard: Shard,
    comm: Communicator | None,
    top_k: int | None,
    top_p: float,
    min_p: float,
    **options: float,
) -> tuple[Tensor, Tensor]:
    """(cut [N] float64, how many of this rank's scores that equal it stay [N])."""
    bits, k = mass_bits(shard.total), 1 if top_k is None else top_k
    options |= {"top_p": top_p, "min_p": min_p, "top_k": -1 if top_k is None else top_k}
    best = topk_implementation(z).topk(z, k, shard.start)
    candidates = gather_candidates(best, k, shard, comm, "vocab_parallel_top_k_top_p", **options)
    maximum = merge_candidates(candidates, 1)[0].squeeze(1).double()
    if top_k is not None:
        cut, ties = _cut_of_candidates(candidates, k, top_p, bits, comm)
    elif top_p < 1.0:
        cut, ties = _cut_by_mass(z, maximum, top_p, bits, comm)
    else:
        cut, ties = torch.full_like(maximum, -math.inf), torch.full_like(maximum, ALL_TIES, dtype=torch.int64)
    if min_p > 0.0:
        lowest = maximum + math.log(min_p)
        ties = torch.where(lowest > cut, ALL_TIES, ties)
        cut = torch.maximum(cut, lowest)
    # Without a finite maximum (NaN, +inf, or nothing but -inf) there are no probabilities: such a row stays as it is.
    usable = maximum.isfinite()
    return cut.masked_fill(~usable, -math.inf), ties.masked_fill(~usable, ALL_TIES)


# ---- autograd --------------------------------------------------------------------------------------------------------


class _Filter(torch.autograd.Function):
    """The scores that stay keep their gradient."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, cut: Tensor, ties: Tensor, filter_value: float) -> Tensor:
        ctx.save_for_backward(z, cut, ties)
        out: Tensor = implementation(z).apply(z, cut, ties, filter_value)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        z, cut, ties = ctx.saved_tensors
        removed = implementation(z).apply(torch.nan_to_num(z.detach()), cut, ties, math.nan).isnan()
        return grads[0].masked_fill(removed, 0.0), None, None, None


# ---- public ----------------------------------------------------------------------------------------------------------


@checked()
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
    """This rank's columns of logits / temperature, with those that sampling must not choose replaced.

        logits  [..., V_local]  this rank's columns; float32, bfloat16, float16 or float64, any strides; or a DTensor,
                                Shard(-1), whose mesh gives `group` and `vocab_range`
        out     [..., V_local]  logits / temperature, rounded to their dtype, or `filter_value`; a DTensor where the
                                logits are one

        collectives   none without a filter, or with one rank
                      top_k, min_p   one all-gather of 8 top_k + 4 bytes a row (12 without top_k)
                      top_p alone    one all-gather of 12 bytes a row, an all-reduce of 2 KiB a row for each byte of the
                                     dtype but the last, an all-gather of 4 KiB a row: 3 for 16-bit logits, 5 for
                                     float32, 9 for float64
        backward      the gradient of what stays, divided by temperature; no collective

    The result is what filtering the whole vocabulary in one process gives, in the order and by the rules of Hugging
    Face's generate (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper); the choice is the
    same for every number of ranks, to the last token. At least one token stays.

    Args:
        top_k: keep the scores that are not below the k-th largest, ties included; None, or the size of the vocabulary
            and more: all.
        top_p: keep the most likely tokens, of those that top_k kept, until their probability is at least top_p. Of
            equally likely ones those with the lowest ids (Hugging Face: as its sort leaves them). None or 1: all.
        min_p: keep tokens at least min_p times as likely as the most likely one. None or 0: all.
        temperature: what the logits are divided by; > 0.
        filter_value: what replaces the others.

    A row with NaN or +inf, or with nothing but -inf, has no probabilities, and is not filtered.

    Worked example, two ranks with logits log [[1, 4]] and log [[3, 2]], top_k = 3, top_p = 0.7: top_k leaves 4, 3 and 2
    of 9; 4 is less than 0.7 * 9, 4 + 3 is not: the result is [[-inf, log 4]] and [[log 3, -inf]].

    Raises ValueError and TypeError: dtype, options, vocab_range; shards that do not tile the vocabulary (on CPU, after
    the collective, on every rank).
    """
    given = logits
    logits, group, vocab_range = unwrap(given, group, vocab_range)
    check_logits(logits)
    comm = communicator(group)
    shard = resolve_shard(logits.shape[-1], vocab_range, comm)
    check_filters(top_k, top_p, min_p, temperature, filter_value, shard.total)
    if top_k is not None and top_k >= shard.total:
        top_k = None
    top_p, min_p = 1.0 if top_p is None else float(top_p), min_p or 0.0
    temperature = float(temperature)
    z = logits if temperature == 1.0 else logits / temperature
    if shard.total == 0 or (top_k is None and top_p >= 1.0 and min_p == 0.0):
        return placed_like(given, z.clone() if z is logits else z)
    with torch.no_grad():
        cut, ties = _cut(z.detach(), shard, comm, top_k, top_p, min_p, temperature=temperature)
    if torch.is_grad_enabled() and z.requires_grad:
        return placed_like(given, _Filter.apply(z, cut, ties, filter_value))
    return placed_like(given, implementation(z).apply(z, cut, ties, filter_value))
