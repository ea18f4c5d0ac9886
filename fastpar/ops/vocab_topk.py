"""The k largest logits of a vocabulary that is split across ranks, and the largest.

Each rank sorts out its own k best; k (value, id) pairs a row from every rank travel in one all-gather, and every rank
merges them alike. Ties fall to the lowest id whatever the number of ranks, which torch.topk does not promise even on
one, so greedy decoding gives the same text on every layout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastpar.arguments import checked
from fastpar.comm.autograd import not_a_view
from fastpar.contracts import communicator
from fastpar.contracts.dtensor_logits import unwrap
from fastpar.contracts.vocab import check_k, check_logits, check_total, gather_candidates, merge_candidates
from fastpar.contracts.vocab_shard import Shard, resolve_shard
from fastpar.ops._backends import kernels_of

if TYPE_CHECKING:
    from fastpar.comm import Communicator, GroupLike


# ---- launchers -------------------------------------------------------------------------------------------------------

implementation = kernels_of("vocab_topk")


def _select(logits: Tensor, k: int, shard: Shard, comm: Communicator | None) -> tuple[Tensor, Tensor]:
    local = implementation(logits).topk(logits, k, shard.start)
    if comm is None:
        return local[0], local[1]
    values, ids = merge_candidates(gather_candidates(local, k, shard, comm), k)
    shape = (*logits.shape[:-1], k)
    return values.to(logits.dtype).reshape(shape), ids.reshape(shape)


# ---- fake ------------------------------------------------------------------------------------------------------------


@torch.library.register_fake("fastpar::vocab_topk")
def _(logits: Tensor, k: int, vocab_start: int) -> tuple[Tensor, Tensor, Tensor]:
    shape = (*logits.shape[:-1], min(k, logits.shape[-1]))
    ids = logits.new_empty(shape, dtype=torch.int64)
    return logits.new_empty(shape), ids, logits.new_empty(logits.shape[:-1], dtype=torch.int64)


# ---- autograd --------------------------------------------------------------------------------------------------------


class _TopK(torch.autograd.Function):
    """The values are elements of the logits: a gradient goes where its value came from, on the rank that holds it."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, k: int, shard: Shard, comm: Communicator | None) -> tuple[Tensor, Tensor]:
        values, ids = _select(logits, k, shard, comm)
        ctx.save_for_backward(ids)
        ctx.mark_non_differentiable(ids)
        ctx.shard = shard
        return not_a_view(values), ids

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (ids,), shard = ctx.saved_tensors, ctx.shard
        grad = grads[0].new_zeros((*ids.shape[:-1], shard.size))
        if shard.size == 0:
            return grad, None, None, None
        column = ids - shard.start
        foreign = (column < 0) | (column >= shard.size)
        # Every column is named once at most; those of other ranks add 0 to whichever.
        own = grads[0].masked_fill(foreign, 0.0)
        return grad.scatter_add(-1, column.clamp(0, shard.size - 1), own), None, None, None


# ---- public ----------------------------------------------------------------------------------------------------------


@checked()
def vocab_parallel_topk(
    logits: Tensor, k: int, *, group: GroupLike = None, vocab_range: tuple[int, int, int] | None = None
) -> tuple[Tensor, Tensor]:
    """The k largest logits of a vocabulary that is split across the ranks of `group`, and their ids.

        logits  [..., V_local]  this rank's columns; float32, bfloat16, float16 or float64, any strides; or a DTensor,
                                Shard(-1), whose mesh gives `group` and `vocab_range`
        values  [..., k]        largest first, in the logits' dtype; differentiable
        ids     [..., k]        global ids, int64; equal values in ascending order of id

        forward   one all-gather of 8 k + 4 bytes a row (16 k + 8 for float64); none with one rank
        backward  no collective; each gradient goes to the column that its value came from

    k is at most the vocabulary; a shard may be smaller. NaN counts as the largest value, as for torch.topk. Values and
    ids have the same bits on every rank and for every number of ranks.

    Worked example, two ranks with logits [[3, 5, 5]] and [[1, 5]], k = 2: values [[5, 5]], ids [[1, 2]].

    Raises ValueError and TypeError: dtype, k, vocab_range; shards that do not tile the vocabulary (on CPU, after the
    collective, on every rank).
    """
    logits, group, vocab_range = unwrap(logits, group, vocab_range)
    check_logits(logits)
    comm = communicator(group)
    shard = resolve_shard(logits.shape[-1], vocab_range, comm)
    check_total(shard.total)
    check_k(k, shard.total)
    if torch.is_grad_enabled() and logits.requires_grad:
        values, ids = _TopK.apply(logits, k, shard, comm)
        return values, ids
    return _select(logits, k, shard, comm)


@checked()
def vocab_parallel_argmax(
    logits: Tensor, *, group: GroupLike = None, vocab_range: tuple[int, int, int] | None = None
) -> Tensor:
    """Global ids [...] of the largest logit of every row; the lowest id of equal ones, the first NaN if there is one.

    logits [..., V_local] and the rest as in `vocab_parallel_topk`; one all-gather of 12 bytes a row (24 for float64).
    The vocabulary must not be empty.
    """
    if hasattr(logits, "shape") and logits.dim() > 0 and logits.shape[-1] == 0 and group is None:
        raise ValueError(f"logits must have a vocabulary to choose from, got shape {tuple(logits.shape)}")
    _, ids = vocab_parallel_topk(logits.detach(), 1, group=group, vocab_range=vocab_range)
    return ids.squeeze(-1)
