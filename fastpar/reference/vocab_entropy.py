"""Log-probabilities of ids and entropy over a vocabulary that is split across ranks, in plain PyTorch.

The algebra is in fastpar.ops.vocab_entropy; the ops behind it are in fastpar.reference.vocab_softmax.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from fastpar.contracts import communicator, compute_dtype
from fastpar.contracts.dtensor_logits import local_tensor, unwrap
from fastpar.contracts.vocab import check_ids, check_logits, check_transform, num_rows
from fastpar.contracts.vocab_shard import resolve_shard
from fastpar.reference.cross_entropy import transform
from fastpar.reference.vocab_softmax import whole_vocab

if TYPE_CHECKING:
    from fastpar.comm import GroupLike


def _masked_product(p: Tensor, log_p: Tensor) -> Tensor:
    """p log p, 0 where p is 0."""
    return p * log_p.masked_fill(p == 0.0, 0.0)


def vocab_parallel_log_prob(
    logits: Tensor,
    ids: Tensor,
    *,
    group: GroupLike = None,
    vocab_range: tuple[int, int, int] | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    ignore_index: int = -100,
) -> Tensor:
    """fastpar.ops.vocab_parallel_log_prob by gathering the vocabulary, in float64, differentiated by autograd."""
    return vocab_parallel_log_prob_and_entropy(
        logits,
        ids,
        group=group,
        vocab_range=vocab_range,
        softcap=softcap,
        logit_scale=logit_scale,
        ignore_index=ignore_index,
    )[0]


def vocab_parallel_log_prob_and_entropy(
    logits: Tensor,
    ids: Tensor,
    *,
    group: GroupLike = None,
    vocab_range: tuple[int, int, int] | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    ignore_index: int = -100,
) -> tuple[Tensor, Tensor]:
    """fastpar.ops.vocab_parallel_log_prob_and_entropy by gathering the vocabulary, in float64, for autograd."""
    from fastpar.comm import gather_from

    logits, group, vocab_range = unwrap(logits, group, vocab_range)
    check_logits(logits)
    ids = local_tensor(ids, "ids")
    check_ids(ids, logits, ignore_index)
    options = check_transform(softcap, logit_scale)
    comm = communicator(group)
    shard = resolve_shard(logits.shape[-1], vocab_range, comm)
    ids = ids.long()
    x = gather_from(logits.double(), comm, dim=-1, sizes=whole_vocab(logits, shard, comm, ids, ignore_index))
    log_p = transform(x, num_rows(x), *options).log_softmax(dim=-1)
    index = ids.reshape(log_p.shape[0], -1)
    ignored = index == ignore_index
    picked = log_p.gather(1, index.masked_fill(ignored, 0)).masked_fill(ignored, 0.0)
    dtype = compute_dtype(logits.dtype)
    log_prob = picked.reshape(ids.shape).to(dtype)
    entropy = -_masked_product(log_p.exp(), log_p).sum(dim=-1)
    return log_prob, entropy.reshape(logits.shape[:-1]).to(dtype)


def vocab_parallel_entropy(
    logits: Tensor,
    *,
    group: GroupLike = None,
    vocab_range: tuple[int, int, int] | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> Tensor:
    """fastpar.ops.vocab_parallel_entropy by gathering the vocabulary, in float64, differentiated by autograd."""
    from fastpar.comm import gather_from

    logits, group, vocab_range = unwrap(logits, group, vocab_range)
    check_logits(logits)
    options = check_transform(softcap, logit_scale)
    comm = communicator(group)
    shard = resolve_shard(logits.shape[-1], vocab_range, comm)
    x = gather_from(logits.double(), comm, dim=-1, sizes=whole_vocab(logits, shard, comm))
    log_p = transform(x, num_rows(x), *options).log_softmax(dim=-1)
    entropy = -_masked_product(log_p.exp(), log_p).sum(dim=-1)
    return entropy.reshape(logits.shape[:-1]).to(compute_dtype(logits.dtype))
