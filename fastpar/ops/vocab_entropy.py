"""Log-probabilities of given ids, and the entropy, over logits whose vocabulary dim is split across ranks.

Reinforcement learning needs both from one read of the logits. With z and lse as in fastpar.ops.vocab_softmax:

    log_prob_k = z_id(k) - lse                                 0 where id(k) is ignore_index
    H          = lse - sum_v p_v z_v
    dz_v       = sum_k dlog_prob_k ([v = id(k)] - p_v)  -  dH p_v (z_v - lse + H)

`stats` leaves (m, s, e) and the ids' z: m = max z, s = sum exp(z - m), e = sum exp(z - m) (z - m). All ranks' numbers
travel in the one collective. A rank's e moves from its own maximum m to the largest one M by
exp(m - M) (e + (m - M) s); then H = log S - E / S, in which lse does not occur and large logits cancel nothing.
Subtracting sum p z from lse instead loses all digits at logits of 1e7.

Backward is one read and one write for both, no collective. p_v = 0 contributes 0 however small z_v is: -inf masks a
column (0 * -inf would be NaN there, SkyRL issue 2259). A row whose upstream gradients are all zero, such as a prompt
token that the loss masks, is not read at all and gets exact zeros.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastpar.arguments import checked
from fastpar.contracts import communicator
from fastpar.contracts.dtensor_logits import local_tensor, unwrap
from fastpar.contracts.vocab import LogitTransform, check_ids, check_logits, check_transform
from fastpar.contracts.vocab_shard import Shard, resolve_shard
from fastpar.ops._autograd import first_derivative_only
from fastpar.ops.vocab_softmax import ids_by_row, implementation, statistics

if TYPE_CHECKING:
    from fastpar.comm import Communicator, GroupLike


# ---- autograd --------------------------------------------------------------------------------------------------------


def _name(ids: Tensor | None, entropy: bool) -> str:
    """The call as the other ranks must have made it."""
    if ids is None:
        return "vocab_parallel_entropy"
    return "vocab_parallel_log_prob_and_entropy" if entropy else "vocab_parallel_log_prob"


class _LogProb(torch.autograd.Function):
    """Log-probabilities [N, K] of ids [...] or [..., K] (None: K = 0) and, where it is asked for, the entropy [N]."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        ids: Tensor | None,
        shard: Shard,
        comm: Communicator | None,
        options: LogitTransform,
        ignore_index: int,
        entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        op = _name(ids, entropy)
        lse, entropies, log_prob = statistics(logits, ids, shard, comm, options, ignore_index, entropy, op)
        ctx.save_for_backward(logits, lse, ids, entropies if entropy else None)
        ctx.arguments = (shard.start, ignore_index, *options)
        # A copy, since entropies are saved: what callers write to theirs in place must not reach backward.
        return log_prob, entropies.to(log_prob.dtype, copy=True) if entropy else None

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, lse, ids, entropies = ctx.saved_tensors
        grad_log_prob = grads[0] if ids is not None else None
        with torch.no_grad():
            ops = implementation(logits)
            index = ids_by_row(ids, logits)
            grad = ops.log_prob_backward(logits, lse, index, grad_log_prob, entropies, grads[1], *ctx.arguments)
        name = "vocab_parallel_entropy" if ids is None else "vocab_parallel_log_prob"
        grad = first_derivative_only(grad, name, "torch.log_softmax", logits, *grads)
        return grad, None, None, None, None, None, None


def _evaluate(
    logits: Tensor,
    ids: Tensor | None,
    shard: Shard,
    comm: Communicator | None,
    options: LogitTransform,
    ignore_index: int,
    entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    if torch.is_grad_enabled() and logits.requires_grad:
        log_prob, entropies = _LogProb.apply(logits, ids, shard, comm, options, ignore_index, entropy)
        return log_prob, entropies
    _, exact, log_prob = statistics(logits, ids, shard, comm, options, ignore_index, entropy, _name(ids, entropy))
    return log_prob, exact.to(log_prob.dtype) if entropy else None


# ---- public ----------------------------------------------------------------------------------------------------------


@checked()
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
    """Log-probabilities of ids over a vocabulary that is split across the ranks of `group`.

        logits    [..., V_local]     this rank's columns; float32, bfloat16, float16 or float64, any strides; or a
                                     DTensor, Shard(-1), whose mesh gives `group` and `vocab_range`
        ids       [...] or [..., K]  global ids, int64 or int32, the same on every rank; one or K of each row
        log_prob  as ids             float32, or float64 for float64 logits; the same bits on every rank

        forward   one all-gather of 12 + 4K bytes a row (twice that for float64); none with one rank
        backward  no collective; rounded once to the logits' dtype

    Args:
        group: ProcessGroup, 1-D DeviceMesh, Communicator, or None for logits that hold the whole vocabulary. Under
            torch.compile it has to be a Communicator made outside.
        vocab_range: (start, end, total) if this rank's columns are [start, end) of `total`; default: equal shards in
            rank order. Empty shards are allowed.
        softcap, logit_scale: see fastpar.ops.vocab_parallel_cross_entropy; a temperature is 1 / logit_scale.
        ignore_index: ids with this value have log-probability 0 and no gradient.

    log_prob of one id is -vocab_parallel_cross_entropy(logits, id, reduction="none"). The log-probability of an id
    masked with -inf is -inf; a row without a finite logit, or with NaN or +inf, has NaN, as in torch. Not twice
    differentiable. `vocab_parallel_log_prob_and_entropy` gives the entropy as well.

    Worked example, two ranks with one column each: logits [[0.0]] and [[log 3]], ids [1]: the ranks send (0, 1, 0, 0)
    and (log 3, 1, 0, log 3); log_prob = log 0.75, and its gradients are [[-0.25]] and [[0.25]].

    Raises:
        IndexError: an id outside the vocabulary that is not ignore_index; names its position. Raised on every rank,
            after the collective. On CUDA and in compiled code that id's log-probability is NaN instead.
        ValueError, TypeError: shapes, dtypes, devices, options, vocab_range; shards that do not tile the vocabulary
            (on CPU, after the collective, on every rank).
    """
    return _log_prob(logits, ids, group, vocab_range, (softcap, logit_scale), ignore_index, with_entropy=False)[0]


@checked()
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
    """Log-probabilities of ids, and the entropy of every row, from one pass over the logits and one collective.

        log_prob  as ids   as `vocab_parallel_log_prob` gives it; arguments, collectives and errors are its own
        entropy   [...]    in nats, same dtype; of every row, ignored ids or not

        backward  no collective; both gradients in one write of the logits' gradient, rounded once to their dtype

    Worked example, that of `vocab_parallel_log_prob`: entropy = log 4 - 0.75 log 3, and its gradients are 0.1875 log 3
    and -0.1875 log 3.
    """
    log_prob, entropy = _log_prob(
        logits, ids, group, vocab_range, (softcap, logit_scale), ignore_index, with_entropy=True
    )
    assert entropy is not None  # it was asked for
    return log_prob, entropy


def _log_prob(
    logits: Tensor,
    ids: Tensor,
    group: GroupLike,
    vocab_range: tuple[int, int, int] | None,
    transform: tuple[float | None, float],
    ignore_index: int,
    *,
    with_entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    logits, group, vocab_range = unwrap(logits, group, vocab_range)
    check_logits(logits)
    ids = local_tensor(ids, "ids")
    check_ids(ids, logits, ignore_index)
    options = check_transform(*transform)
    comm = communicator(group)
    shard = resolve_shard(logits.shape[-1], vocab_range, comm)
    log_prob, entropy = _evaluate(logits, ids.long(), shard, comm, options, ignore_index, with_entropy)
    return log_prob.reshape(ids.shape), None if entropy is None else entropy.reshape(logits.shape[:-1])


@checked()
def vocab_parallel_entropy(
    logits: Tensor,
    *,
    group: GroupLike = None,
    vocab_range: tuple[int, int, int] | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> Tensor:
    """Entropy, in nats, of the softmax over a vocabulary that is split across the ranks of `group`.

        logits   [..., V_local]  this rank's columns, or a DTensor with Shard(-1)
        entropy  [...]           H = lse - sum_v p_v z_v; float32, or float64 for float64 logits; the same bits on
                                 every rank

        forward   one all-gather of 12 bytes a row (24 for float64) and 36 bytes; none with one rank
        backward  no collective; dz_v = -dH p_v (z_v - lse + H)

    Arguments and errors are those of `vocab_parallel_log_prob`. A column masked with
    -inf contributes 0; a row without a finite logit has no distribution and gives NaN. Not twice differentiable.

    Worked example, two ranks with one column each: logits [[0.0]] and [[log 3]]: the ranks send (0, 1, 0) and
    (log 3, 1, 0). M = log 3, S = 1/3 + 1, E = 1/3 (0 - log 3), H = log(4/3) + log(3) / 4 = log 4 - 0.75 log 3.
    """
    logits, group, vocab_range = unwrap(logits, group, vocab_range)
    check_logits(logits)
    options = check_transform(softcap, logit_scale)
    comm = communicator(group)
    shard = resolve_shard(logits.shape[-1], vocab_range, comm)
    _, entropy = _evaluate(logits, None, shard, comm, options, -100, True)
    assert entropy is not None  # it was asked for
    return entropy.reshape(logits.shape[:-1])
