"""The k largest logits of a vocabulary that is split across ranks, in plain PyTorch; and what travels for them.

Equal logits are ordered by ascending id, and NaN is the largest value, as for torch.topk (which promises no order of
equal ones).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fastpar.contracts.agreement import call_of
from fastpar.contracts.dtensor_logits import unwrap
from fastpar.contracts.vocab_shard import (
    HEADER_ROWS,
    Shard,
    check_headers,
    communicator,
    compute_dtype,
    exchange,
    resolve_shard,
    with_header,
)
from fastpar.reference.vocab_softmax import check_logits, whole_vocab

if TYPE_CHECKING:
    from fastpar.comm import Communicator, GroupLike

MAX_TOTAL = 2**31 - 1  # ids travel as int32 beside float32 values


# ---- arguments -------------------------------------------------------------------------------------------------------


def check_k(k: int, total: int, name: str = "k") -> None:
    if isinstance(k, bool) or not isinstance(k, int):
        raise TypeError(f"{name} must be an int, got {k!r}")
    if not 0 <= k <= total:
        raise ValueError(f"{name} must be between 0 and the size of the vocabulary, {total}, got {k}")


def check_total(total: int) -> None:
    if total > MAX_TOTAL:
        raise ValueError(f"vocabularies of up to {MAX_TOTAL} ids are supported, got {total}")


# ---- the op ----------------------------------------------------------------------------------------------------------


def topk(logits: Tensor, k: int, vocab_start: int) -> tuple[Tensor, Tensor, Tensor]:
    """(values [..., k], global ids [..., k], how many more elements equal the last value [...]), k at most V_local."""
    k = min(k, logits.shape[-1])
    values, columns = torch.sort(logits, dim=-1, descending=True, stable=True)
    values, ids = values[..., :k].contiguous(), columns[..., :k].contiguous() + vocab_start
    if k == 0:
        return values, ids, ids.new_zeros(logits.shape[:-1])
    last = values[..., -1:]
    equal = ((logits == last) | (logits.isnan() & last.isnan())).sum(dim=-1)
    listed = ((values == last) | (values.isnan() & last.isnan())).sum(dim=-1)
    return values, ids, equal - listed


# ---- candidates ------------------------------------------------------------------------------------------------------


class Candidates(NamedTuple):
    """Every rank's k best of every row, best first, short lists filled up with (-inf, -1); and `equal` of the op.

    values  [ranks, N, k], float32 or float64      ids  [ranks, N, k]      equal  [ranks, N]
    """

    values: Tensor
    ids: Tensor
    equal: Tensor


def pack(values: Tensor, ids: Tensor, equal: Tensor, k: int, shard: Shard, checksum: int = 0) -> Tensor:
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


def unpack(gathered: Tensor, k: int) -> Candidates:
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
    gathered = exchange(pack(*local, k, shard, 0 if call is None else call.checksum), comm)
    check_headers(gathered, None, -100, call=call)
    return unpack(gathered, k)


def merge(candidates: Candidates, k: int) -> tuple[Tensor, Tensor]:
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


# ---- the public functions --------------------------------------------------------------------------------------------


def vocab_parallel_topk(
    logits: Tensor, k: int, *, group: GroupLike = None, vocab_range: tuple[int, int, int] | None = None
) -> tuple[Tensor, Tensor]:
    """fastpar.ops.vocab_parallel_topk by gathering and sorting the vocabulary, differentiated by autograd."""
    from fastpar.comm import gather_from

    logits, group, vocab_range = unwrap(logits, group, vocab_range)
    check_logits(logits)
    comm = communicator(group)
    shard = resolve_shard(logits.shape[-1], vocab_range, comm)
    check_k(k, shard.total)
    x = gather_from(logits, comm, dim=-1, sizes=whole_vocab(logits, shard, comm))
    values, ids = torch.sort(x, dim=-1, descending=True, stable=True)
    return values[..., :k], ids[..., :k]


def vocab_parallel_argmax(
    logits: Tensor, *, group: GroupLike = None, vocab_range: tuple[int, int, int] | None = None
) -> Tensor:
    """fastpar.ops.vocab_parallel_argmax by gathering and sorting the vocabulary."""
    _, ids = vocab_parallel_topk(logits.detach(), 1, group=group, vocab_range=vocab_range)
    return ids.squeeze(-1)
