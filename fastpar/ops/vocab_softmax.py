"""Softmax and log-softmax over logits whose vocabulary dim is split across ranks: each rank gets its own columns.

From logits x, over the whole vocabulary:

    z      = softcap * tanh(logit_scale * x / softcap)      logit_scale * x without softcap
    lse    = log(sum_v exp(z_v))
    p_v    = exp(z_v - lse)                  dz_v = p_v (dy_v - sum_u p_u dy_u)
    l_v    = z_v - lse                       dz_v = dy_v - p_v sum_u dy_u
    dx_v   = dz_v logit_scale (1 - (z_v / softcap)^2)

`stats` reads this rank's logits once; the ranks' (maximum, sum) travel in the one collective of the forward, `merge`
combines them in rank order, and `normalize` writes the result. Backward needs a number a row from all ranks, the sum
over u: one collective of 8 bytes a row between `dot` and `backward`. With one rank `backward` computes both for a row
while the row is in cache.

Saved for backward: the logits themselves (no copy) and lse, 8 bytes a row, float64 for the reason given in
fastpar.ops.cross_entropy. torch saves the result instead; it is as large as the logits, in 16 bits it has lost digits
that the gradient needs, and a softcap needs the logits anyway.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastpar.arguments import checked
from fastpar.contracts import communicator, compute_dtype
from fastpar.contracts.agreement import call_of
from fastpar.contracts.dtensor_logits import placed_like, unwrap
from fastpar.contracts.vocab import SUMS, LogitTransform, check_logits, check_output_dtype, check_transform, num_rows
from fastpar.contracts.vocab_shard import Shard, check_headers, exchange, resolve_shard
from fastpar.ops._autograd import first_derivative_only
from fastpar.ops._backends import kernels_of

if TYPE_CHECKING:
    from fastpar.comm import Communicator, GroupLike


# ---- launchers -------------------------------------------------------------------------------------------------------

implementation = kernels_of("vocab_softmax")


def ids_by_row(ids: Tensor | None, logits: Tensor) -> Tensor | None:
    """ids [...] or [..., K] as the ops take them, [N, K]."""
    if ids is None:
        return None
    return ids.reshape(num_rows(logits), ids.shape[-1] if ids.dim() == logits.dim() else 1)


def statistics(
    logits: Tensor,
    ids: Tensor | None,
    shard: Shard,
    comm: Communicator | None,
    options: LogitTransform,
    ignore_index: int = -100,
    entropy: bool = False,
    op: str = "vocab_parallel_softmax",
) -> tuple[Tensor, Tensor, Tensor]:
    """(lse [N], entropy [N], log-probability [N, K]) by one collective, if there is a communicator.

    ids are [...] (K = 1) or [..., K]; errors name a position in them.
    """
    ops, index = implementation(logits), ids_by_row(ids, logits)
    call = call_of(comm, logits, op, **options._asdict(), ignore_index=ignore_index)
    checksum = 0 if call is None else call.checksum
    local = ops.stats(logits, index, shard.start, shard.total, ignore_index, entropy, *options, checksum)
    gathered = exchange(local, comm)
    if comm is not None or ids is not None:
        check_headers(gathered, ids, ignore_index, "ids", call)
    lse, entropies, log_prob = ops.merge(gathered, index, ignore_index)
    return lse, entropies, log_prob


# ---- fakes -----------------------------------------------------------------------------------------------------------


def _rows(logits: Tensor) -> Any:
    return logits.shape[:-1].numel()


@torch.library.register_fake("fastpar::vocab_softmax_stats")
def _(logits: Tensor, ids: Tensor | None, *arguments: Any) -> Tensor:
    columns = SUMS + (0 if ids is None else ids.shape[1])
    return logits.new_empty((_rows(logits) + 3, columns), dtype=compute_dtype(logits.dtype))


@torch.library.register_fake("fastpar::vocab_softmax_merge")
def _(gathered: Tensor, ids: Tensor | None, ignore_index: int) -> tuple[Tensor, Tensor, Tensor]:
    rows = gathered.shape[1] - 3
    lse = gathered.new_empty((rows,), dtype=torch.float64)
    return lse, torch.empty_like(lse), gathered.new_empty((rows, 0 if ids is None else ids.shape[1]))


@torch.library.register_fake("fastpar::vocab_softmax_normalize")
def _(logits: Tensor, lse: Tensor, log: bool, widen: bool, softcap: float, logit_scale: float) -> Tensor:
    return logits.new_empty(logits.shape, dtype=compute_dtype(logits.dtype) if widen else logits.dtype)


@torch.library.register_fake("fastpar::vocab_softmax_dot")
def _(logits: Tensor, *arguments: Any) -> Tensor:
    return logits.new_empty((_rows(logits),), dtype=torch.float64)


@torch.library.register_fake("fastpar::vocab_softmax_backward")
def _(logits: Tensor, *arguments: Any) -> Tensor:
    return logits.new_empty(logits.shape)


@torch.library.register_fake("fastpar::vocab_log_prob_backward")
def _(logits: Tensor, *arguments: Any) -> Tensor:
    return logits.new_empty(logits.shape)


# ---- autograd --------------------------------------------------------------------------------------------------------


def _name(log: bool) -> str:
    return "vocab_parallel_log_softmax" if log else "vocab_parallel_softmax"


class _Normalize(torch.autograd.Function):
    """Softmax, or log-softmax with `log`; its result is in the logits' dtype, or with `widen` in the compute dtype."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        shard: Shard,
        comm: Communicator | None,
        options: LogitTransform,
        log: bool,
        widen: bool,
    ) -> Tensor:
        lse, _, _ = statistics(logits, None, shard, comm, options, op=_name(log))
        ctx.save_for_backward(logits, lse)
        ctx.comm, ctx.options, ctx.log = comm, options, log
        out: Tensor = implementation(logits).normalize(logits, lse, log, widen, *options)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        logits, lse = ctx.saved_tensors
        ops, total = implementation(logits), None
        with torch.no_grad():
            if ctx.comm is not None:
                local = ops.dot(logits, lse, grads[0], ctx.log, *ctx.options)
                # Added in rank order: the same bits everywhere.
                total = functools.reduce(torch.add, exchange(local, ctx.comm).unbind(0))
            grad: Tensor = ops.backward(logits, lse, grads[0], total, ctx.log, *ctx.options)
        name = _name(ctx.log)
        grad = first_derivative_only(grad, name, name.replace("vocab_parallel_", "torch."), logits, grads[0])
        return grad, None, None, None, None, None


def _normalized(
    logits: Tensor,
    log: bool,
    group: GroupLike,
    vocab_range: tuple[int, int, int] | None,
    softcap: float | None,
    logit_scale: float,
    dtype: torch.dtype | None,
) -> Tensor:
    given = logits
    logits, group, vocab_range = unwrap(given, group, vocab_range)
    check_logits(logits)
    options = check_transform(softcap, logit_scale)
    out_dtype = check_output_dtype(dtype, logits)
    comm = communicator(group)
    shard = resolve_shard(logits.shape[-1], vocab_range, comm)
    widen = out_dtype != logits.dtype
    if torch.is_grad_enabled() and logits.requires_grad:
        out = _Normalize.apply(logits, shard, comm, options, log, widen)
    else:
        lse, _, _ = statistics(logits, None, shard, comm, options, op=_name(log))
        out = implementation(logits).normalize(logits, lse, log, widen, *options)
    return placed_like(given, out.to(out_dtype))


# ---- public ----------------------------------------------------------------------------------------------------------


@checked()
def vocab_parallel_softmax(
    logits: Tensor,
    *,
    group: GroupLike = None,
    vocab_range: tuple[int, int, int] | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """This rank's columns of the softmax over a vocabulary that is split across the ranks of `group`.

        logits  [..., V_local]  this rank's columns; float32, bfloat16, float16 or float64, any strides; or a DTensor,
                                Shard(-1), whose mesh gives `group` and `vocab_range`
        out     [..., V_local]  p_v = exp(z_v - lse); a DTensor like the logits where they are one

        forward   one all-gather of 12 bytes a row (24 for float64) and 36 bytes; none with one rank
        backward  one all-gather of 8 bytes a row; none with one rank

    Args:
        group: ProcessGroup, 1-D DeviceMesh, Communicator, or None for logits that hold the whole vocabulary. Under
            torch.compile it has to be a Communicator made outside.
        vocab_range: (start, end, total) if this rank's columns are [start, end) of `total`; default: equal shards in
            rank order. Empty shards are allowed.
        softcap, logit_scale: see fastpar.ops.vocab_parallel_cross_entropy.
        dtype: of the result, by default the logits'. bfloat16 logits and dtype=torch.float32 give what softmax of
            float32 logits would, without a copy of them.

    A row without a finite logit, and a row with NaN or +inf, is NaN, as in torch. Not twice differentiable.

    Worked example, two ranks with one column each: logits [[0.0]] and [[log 3]]: the ranks send (0, 1) and (log 3, 1),
    lse = log 4, and the results are [[0.25]] and [[0.75]]. For dy [[1]] and [[0]] the sum of p dy is 0.25, and the
    gradients are [[0.1875]] and [[-0.1875]].

    Raises ValueError and TypeError: dtypes, options, vocab_range; shards that do not tile the vocabulary (on CPU, after
    the collective, on every rank).
    """
    return _normalized(logits, False, group, vocab_range, softcap, logit_scale, dtype)


@checked()
def vocab_parallel_log_softmax(
    logits: Tensor,
    *,
    group: GroupLike = None,
    vocab_range: tuple[int, int, int] | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """This rank's columns of the log-softmax over a vocabulary that is split across the ranks of `group`.

        out  [..., V_local]  z_v - lse

    Everything else is as in `vocab_parallel_softmax`. For the log-probabilities of given ids only, and for the entropy,
    `vocab_parallel_log_prob` and `vocab_parallel_entropy` write nothing of the logits' size.

    Worked example, two ranks with one column each: logits [[0.0]] and [[log 3]] give [[-log 4]] and [[log 3 - log 4]].
    For dy [[1]] and [[0]] the gradients are [[0.75]] and [[-0.75]].
    """
    return _normalized(logits, True, group, vocab_range, softcap, logit_scale, dtype)
