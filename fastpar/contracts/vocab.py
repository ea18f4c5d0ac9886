"""Checks and steps that the functions of a split vocabulary share with their references: softmax, log-probabilities,
entropy, filters, sampling, top-k."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fastpar.contracts import FLOAT_DTYPES, compute_dtype
from fastpar.contracts.agreement import call_of
from fastpar.contracts.cross_entropy import check_options
from fastpar.contracts.vocab_shard import HEADER_ROWS, Shard, check_headers, exchange, with_header

if TYPE_CHECKING:
    from fastpar.comm import Communicator


# ---- softmax and log-probabilities -----------------------------------------------------------------------------------

SUMS = 3  # columns of the statistics before those of the ids


class LogitTransform(NamedTuple):
    """What becomes of a logit before the softmax; checked. softcap 0: none."""

    softcap: float
    logit_scale: float


def check_logits(logits: Tensor) -> None:
    if logits.dtype not in FLOAT_DTYPES:
        raise TypeError(f"logits must be one of {[str(d) for d in FLOAT_DTYPES]}, got {logits.dtype}")
    if logits.dim() == 0:
        raise ValueError("logits must have at least one dim, the vocabulary, got a scalar")


def check_transform(softcap: float | None, logit_scale: float) -> LogitTransform:
    options = check_options(-100, 0.0, 0.0, softcap, logit_scale)
    return LogitTransform(options.softcap, options.logit_scale)


def check_output_dtype(dtype: torch.dtype | None, logits: Tensor) -> torch.dtype:
    if dtype is not None and dtype not in FLOAT_DTYPES:
        raise TypeError(f"dtype must be None or one of {[str(d) for d in FLOAT_DTYPES]}, got {dtype}")
    return logits.dtype if dtype is None else dtype


def num_rows(logits: Tensor) -> int:
    return logits.shape[:-1].numel()


def check_ids(ids: Tensor, logits: Tensor, ignore_index: int) -> None:
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise TypeError(f"ignore_index must be an int, got {ignore_index!r}")
    if ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"ids must be int64 (or int32), got {ids.dtype}")
    rows = logits.shape[:-1]
    if ids.shape != rows and (ids.dim() != logits.dim() or ids.shape[:-1] != rows):
        raise ValueError(
            f"ids must have the shape of logits without its last dim (the vocabulary), or one dim more (ids per row): "
            f"logits is {tuple(logits.shape)}, ids is {tuple(ids.shape)}"
        )
    if ids.device != logits.device:
        raise ValueError(f"logits and ids must be on one device, got {logits.device} and {ids.device}")


# ---- top-k -----------------------------------------------------------------------------------------------------------

MAX_TOTAL = 2**31 - 1  # ids travel as int32 beside float32 values


def check_k(k: int, total: int) -> None:
    if isinstance(k, bool) or not isinstance(k, int):
        raise TypeError(f"k must be an int, got {k!r}")
    if not 0 <= k <= total:
        raise ValueError(f"k must be between 0 and the size of the vocabulary, {total}, got {k}")


def check_total(total: int) -> None:
    if total > MAX_TOTAL:
        raise ValueError(f"vocabularies of up to {MAX_TOTAL} ids are supported, got {total}")


class Candidates(NamedTuple):
    """Every rank's k best of every row, best first, short lists filled up with (-inf, -1); and `equal` of the op.

    values  [ranks, N, k], float32 or float64      ids  [ranks, N, k]      equal  [ranks, N]
    """

    values: Tensor
    ids: Tensor
    equal: Tensor


def pack_candidates(values: Tensor, ids: Tensor, equal: Tensor, k: int, shard: Shard, checksum: int = 0) -> Tensor:
    """What one rank sends, [N + 3, max(2 k + 1, 3)]: values, ids and `equal` as bits, and the header."""
    rows, width = equal.numel(), values.shape[-1]
    wire = compute_dtype(values.dtype)
    integers = torch.int32 if wire == torch.float32 else torch.int64
    out = torch.zeros(rows, max(2 * k + 1, 3), dtype=wire, device=values.device)
    out[:, :k].fill_(-math.inf)
    out[:, :width].copy_(values.reshape(rows, width))
    words = out.view(integers)
    words[:, k : 2 * k].fill_(-1)
    words[:, k : k + width].copy_(ids.reshape(rows, width))
    words[:, 2 * k].copy_(equal.reshape(rows))
    return with_header(out, shard, checksum=checksum)


def unpack_candidates(gathered: Tensor, k: int) -> Candidates:
    rows = gathered[:, :-HEADER_ROWS]
    words = rows.contiguous().view(torch.int32 if gathered.dtype == torch.float32 else torch.int64).long()
    return Candidates(rows[..., :k], words[..., k : 2 * k], words[..., 2 * k])


def gather_candidates(
    local: tuple[Tensor, Tensor, Tensor],
    k: int,
    shard: Shard,
    comm: Communicator | None,
    op: str = "vocab_parallel_topk",
    **options: Any,
) -> Candidates:
    """All ranks' lists by one all-gather; none without a communicator. `options`: what the ranks must agree on."""
    if comm is None:
        values, ids, equal = local
        rows = equal.numel()
        wide = values.to(compute_dtype(values.dtype))
        return Candidates(wide.reshape(1, rows, k), ids.reshape(1, rows, k), equal.reshape(1, rows))
    call = call_of(comm, local[0], op, k=k, **options)
    gathered = exchange(pack_candidates(*local, k, shard, 0 if call is None else call.checksum), comm)
    check_headers(gathered, None, -100, call=call)
    return unpack_candidates(gathered, k)


def merge_candidates(candidates: Candidates, k: int) -> tuple[Tensor, Tensor]:
    """(values [N, k], ids [N, k]) of the k best of all ranks, in the order of the op.

    Lists are joined in rank order, which is that of ids, and sorted by a stable sort.
    """
    values = candidates.values.transpose(0, 1).flatten(1)
    ids = candidates.ids.transpose(0, 1).flatten(1)
    # What fills up short lists is moved behind everything else, -inf included.
    last = torch.sort(ids < 0, dim=1, stable=True).indices
    values, ids = values.gather(1, last), ids.gather(1, last)
    order = torch.sort(values, dim=1, descending=True, stable=True).indices[:, :k]
    return values.gather(1, order), ids.gather(1, order)


# ---- filters and sampling --------------------------------------------------------------------------------------------

BINS = 256  # a byte of the key at a time
ALL_TIES = 2**62
_SIGNED = {2: torch.int16, 4: torch.int32, 8: torch.int64}


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


def check_sampling(seed: int, temperature: float, first_row: int) -> None:
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed must be an int, got {seed!r}")
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed must fit 64 bits, got {seed}")
    if not (temperature > 0.0 and math.isfinite(temperature)):
        raise ValueError(f"temperature must be a finite number > 0, got {temperature} (greedy: vocab_parallel_argmax)")
    if first_row < 0:
        raise ValueError(f"first_row must not be negative, got {first_row}")
