"""The k largest logits of a vocabulary that is split across ranks, in plain PyTorch.

Equal logits are ordered by ascending id, and NaN is the largest value, as for torch.topk (which promises no order of
equal ones).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fastpar.contracts import communicator
from fastpar.contracts.dtensor_logits import unwrap
from fastpar.contracts.vocab import check_k, check_logits
from fastpar.contracts.vocab_shard import resolve_shard
from fastpar.reference.vocab_softmax import whole_vocab

if TYPE_CHECKING:
    from fastpar.comm import GroupLike


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
