"""Softmax and log-softmax over a vocabulary that is split across ranks, in plain PyTorch.

The algebra is in fastpar.ops.vocab_softmax and fastpar.ops.vocab_entropy. `stats`, `merge`, `normalize`, ... here have
the signatures of the ops of the same names, and are what the public functions fall back to on devices without kernels;
a `softcap` of 0 means none.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fastpar.contracts import communicator
from fastpar.contracts.cross_entropy import below_lse, join_lse
from fastpar.contracts.dtensor_logits import placed_like, unwrap
from fastpar.contracts.vocab import SUMS, check_logits, check_output_dtype, check_transform, num_rows
from fastpar.contracts.vocab_shard import Shard, check_headers, exchange, read_headers, resolve_shard, with_header
from fastpar.reference.cross_entropy import transform

if TYPE_CHECKING:
    from fastpar.comm import Communicator, GroupLike


# ---- the ops ---------------------------------------------------------------------------------------------------------


def stats(
    logits: Tensor,
    ids: Tensor | None,
    vocab_start: int,
    vocab_total: int,
    ignore_index: int,
    entropy: bool,
    softcap: float,
    logit_scale: float,
    call: int = 0,
) -> Tensor:
    """[N + 3, 3 + K]: of every row the maximum m of z, sum exp(z - m), sum exp(z - m) (z - m) (0 without `entropy`),
    and the z of its K ids [N, K] (0 where another rank holds it, or it is ignored); then the header.

    A shard without a finite logit gives (-inf, 0, 0). An id out of range has z NaN; on CPU its row is named in the
    header as well.
    """
    size, rows = logits.shape[-1], num_rows(logits)
    z = transform(logits, rows, softcap, logit_scale)
    maximum = z.amax(dim=-1) if size else z.new_full((rows,), -math.inf)
    below = z - maximum.masked_fill(maximum == -math.inf, 0.0).unsqueeze(1)
    exp = below.exp()
    weighted = (exp * below.clamp(min=-1e4)).sum(dim=-1) if entropy else torch.zeros_like(maximum)
    columns = [torch.stack([maximum, exp.sum(dim=-1), weighted], dim=-1)]
    bad_row = -1
    if ids is not None:
        column = ids - vocab_start
        counted = ids != ignore_index
        owned = (column >= 0) & (column < size) & counted
        picked = z.gather(1, column.clamp(0, size - 1)) if size else z.new_zeros(ids.shape)
        outside = ((ids < 0) | (ids >= vocab_total)) & counted
        columns.append(picked.masked_fill(~owned, 0.0).masked_fill(outside, math.nan))
        if logits.device.type == "cpu" and bool(outside.any()):
            bad_row = int(outside.any(dim=1).nonzero()[0])
    return with_header(torch.cat(columns, dim=-1), Shard(vocab_start, size, vocab_total), bad_row)


def merge(gathered: Tensor, ids: Tensor | None, ignore_index: int) -> tuple[Tensor, Tensor, Tensor]:
    """(lse [N], entropy [N], log-probability [N, K]) from every rank's statistics [ranks, N + 3, 3 + K].

    The first two are float64. An ignored id has log-probability 0; without ids K is 0.
    """
    columns = gathered[:, :-3].double()
    maximum, total, weighted = columns[..., :SUMS].unbind(dim=-1)
    highest = maximum.amax(dim=0)
    reference = highest.masked_fill(highest == -math.inf, 0.0)
    shift = maximum - reference
    factor = shift.exp()
    sums = (factor * total).sum(dim=0)
    weighted = weighted + (shift * total).masked_fill(factor == 0.0, 0.0)
    entropy = sums.log() - (factor * weighted).sum(dim=0) / sums
    log_prob = (columns[..., SUMS:].sum(dim=0) - reference.unsqueeze(1)) - sums.log().unsqueeze(1)
    if ids is not None:
        log_prob = log_prob.masked_fill(ids == ignore_index, 0.0)
    return join_lse(reference, sums.log(), gathered.dtype), entropy, log_prob.to(gathered.dtype)


def _log_softmax(logits: Tensor, lse: Tensor, softcap: float, logit_scale: float) -> tuple[Tensor, Tensor]:
    """(z, z - lse) in the compute dtype, [N, V]."""
    z = transform(logits, num_rows(logits), softcap, logit_scale)
    return z, below_lse(z, lse).to(z.dtype)


def _slope(z: Tensor, softcap: float, logit_scale: float) -> Tensor | float:
    """dz/dx."""
    return logit_scale if softcap == 0.0 else logit_scale * (1.0 - (z / softcap).square())


def normalize(logits: Tensor, lse: Tensor, log: bool, widen: bool, softcap: float, logit_scale: float) -> Tensor:
    """exp(z - lse), or z - lse with `log`; in the logits' dtype, or with `widen` in the compute dtype."""
    _, out = _log_softmax(logits, lse, softcap, logit_scale)
    return (out if log else out.exp()).to(out.dtype if widen else logits.dtype).reshape(logits.shape)


def dot(logits: Tensor, lse: Tensor, grad_out: Tensor, log: bool, softcap: float, logit_scale: float) -> Tensor:
    """sum_v p_v dy_v, or sum_v dy_v with `log`, of every row: [N] float64."""
    _, log_p = _log_softmax(logits, lse, softcap, logit_scale)
    grad = grad_out.reshape(log_p.shape).to(log_p.dtype)
    return (grad if log else log_p.exp() * grad).sum(dim=-1, dtype=torch.float64)


def backward(
    logits: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    dot_: Tensor | None,
    log: bool,
    softcap: float,
    logit_scale: float,
) -> Tensor:
    """Gradient by this rank's logits; `dot_` is `dot` summed over the ranks, None where there is one rank."""
    if dot_ is None:
        dot_ = dot(logits, lse, grad_out, log, softcap, logit_scale)
    z, log_p = _log_softmax(logits, lse, softcap, logit_scale)
    p, grad, total = log_p.exp(), grad_out.reshape(z.shape).to(z.dtype), dot_.to(z.dtype).unsqueeze(1)
    dz = grad - p * total if log else p * (grad - total)
    return (dz * _slope(z, softcap, logit_scale)).to(logits.dtype).reshape(logits.shape)


def log_prob_backward(
    logits: Tensor,
    lse: Tensor,
    ids: Tensor | None,
    grad_log_prob: Tensor | None,
    entropy: Tensor | None,
    grad_entropy: Tensor | None,
    vocab_start: int,
    ignore_index: int,
    softcap: float,
    logit_scale: float,
) -> Tensor:
    """Gradient by this rank's logits of sum grad_log_prob log_prob + sum grad_entropy entropy.

    A row whose gradients are all 0, or belong to ignored ids, gets exact zeros whatever its logits are.
    """
    size = logits.shape[-1]
    z, log_p = _log_softmax(logits, lse, softcap, logit_scale)
    p = log_p.double().exp()
    dz = torch.zeros_like(p)
    used = torch.zeros(z.shape[0], dtype=torch.bool, device=z.device)
    if grad_entropy is not None and entropy is not None:
        slope = -grad_entropy.double().reshape(-1, 1)
        dz = dz + p * (slope * log_p.clamp(min=-1e4) + slope * entropy.unsqueeze(1))
        used |= (slope != 0.0).squeeze(1)
    if grad_log_prob is not None and ids is not None:
        grad = grad_log_prob.double().reshape(ids.shape).masked_fill(ids == ignore_index, 0.0)
        dz = dz - p * grad.sum(dim=1, keepdim=True)
        column = ids - vocab_start
        foreign = (column < 0) | (column >= size)
        if size:
            dz = dz.scatter_add(1, column.clamp(0, size - 1), grad.masked_fill(foreign, 0.0))
        used |= (grad != 0.0).any(dim=1)
    dz = dz * _slope(z.double(), softcap, logit_scale)
    return dz.masked_fill(~used.unsqueeze(1), 0.0).to(logits.dtype).reshape(logits.shape)


# ---- the public functions --------------------------------------------------------------------------------------------


def whole_vocab(
    logits: Tensor, shard: Shard, comm: Communicator | None, ids: Tensor | None = None, ignore_index: int = -100
) -> list[int]:
    """How many columns each rank holds, after the checks that need all ranks: shards that tile, ids in range."""
    bad_row = -1
    if ids is not None and bool((((ids < 0) | (ids >= shard.total)) & (ids != ignore_index)).any()):
        bad_row = 0
    headers = exchange(with_header(torch.zeros(0, 3), shard, bad_row), comm)
    check_headers(headers, ids, ignore_index, "ids")
    return [header[0] for header in read_headers(headers)]


def _reference_softmax(
    logits: Tensor,
    log: bool,
    group: GroupLike,
    vocab_range: tuple[int, int, int] | None,
    softcap: float | None,
    logit_scale: float,
    dtype: torch.dtype | None,
) -> Tensor:
    from fastpar.comm import gather_sequence

    given = logits
    logits, group, vocab_range = unwrap(given, group, vocab_range)
    check_logits(logits)
    options = check_transform(softcap, logit_scale)
    out_dtype = check_output_dtype(dtype, logits)
    comm = communicator(group)
    shard = resolve_shard(logits.shape[-1], vocab_range, comm)
    x = gather_sequence(logits.double(), comm, dim=-1, sizes=whole_vocab(logits, shard, comm))
    z = transform(x, num_rows(x), *options).reshape(x.shape)
    out = z.log_softmax(dim=-1) if log else z.softmax(dim=-1)
    return placed_like(given, out[..., shard.start : shard.start + shard.size].to(out_dtype))


def vocab_parallel_softmax(
    logits: Tensor,
    *,
    group: GroupLike = None,
    vocab_range: tuple[int, int, int] | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """fastpar.ops.vocab_parallel_softmax by gathering the vocabulary, in float64, differentiated by autograd."""
    return _reference_softmax(logits, False, group, vocab_range, softcap, logit_scale, dtype)


def vocab_parallel_log_softmax(
    logits: Tensor,
    *,
    group: GroupLike = None,
    vocab_range: tuple[int, int, int] | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """fastpar.ops.vocab_parallel_log_softmax by gathering the vocabulary, in float64, differentiated by autograd."""
    return _reference_softmax(logits, True, group, vocab_range, softcap, logit_scale, dtype)
