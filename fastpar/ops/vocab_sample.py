"""Sampling from logits whose vocabulary dim is split across ranks, with one small collective.

The token with the largest z + g is a sample of softmax(z) if the g are independent Gumbel noise, -log(-log u) (Gumbel
1954): no normaliser, no cumulative sum, and an argmax over ranks instead of a sort. The noise of a token is a hash of
the seed, its row and its global id, so that every number of ranks chooses the same tokens, and no generator state has
to be kept in step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fastpar.arguments import checked
from fastpar.contracts import communicator
from fastpar.contracts.agreement import call_of
from fastpar.contracts.dtensor_logits import unwrap
from fastpar.contracts.vocab import check_logits, check_sampling, num_rows
from fastpar.contracts.vocab_shard import HEADER_ROWS, check_headers, exchange, resolve_shard, with_header
from fastpar.ops._backends import kernels_of

if TYPE_CHECKING:
    from fastpar.comm import GroupLike


implementation = kernels_of("vocab_sample")


@torch.library.register_fake("fastpar::vocab_gumbel_argmax")
def _(logits: Tensor, seed: int, vocab_start: int, first_row: int, temperature: float) -> tuple[Tensor, Tensor]:
    rows = num_rows(logits)
    return logits.new_empty((rows,), dtype=torch.float64), logits.new_empty((rows,), dtype=torch.int64)


@checked()
def vocab_parallel_sample(
    logits: Tensor,
    *,
    seed: int,
    temperature: float = 1.0,
    first_row: int = 0,
    group: GroupLike = None,
    vocab_range: tuple[int, int, int] | None = None,
) -> Tensor:
    """One token of every row, drawn from softmax(logits / temperature) over a vocabulary split across `group`.

        logits  [..., V_local]  this rank's columns; float32, bfloat16, float16 or float64, any strides; or a DTensor,
                                Shard(-1), whose mesh gives `group` and `vocab_range`
        out     [...]           global ids, int64, the same on every rank and for every number of ranks

        one all-gather of 24 bytes a row and 72 bytes; none with one rank

    Args:
        seed: a new one for every step; rows of one call are independent, equal calls give equal tokens.
        temperature: > 0; for the most likely token use `vocab_parallel_argmax`.
        first_row: the row of the whole batch that the first row here is, where a batch is split: the tokens are then
            those of the whole batch.

    Filters come before it: `vocab_parallel_sample(vocab_parallel_top_k_top_p(logits, top_p=0.9, group=g), seed=s,
    group=g)`; a token whose logit is -inf is never drawn. The id is -1 where no token can be drawn: every logit is
    -inf, or one is NaN. Several +inf count as one value, of which the lowest id wins. No gradient.

    Raises ValueError and TypeError: dtype, options, vocab_range; shards that do not tile the vocabulary (on CPU, after
    the collective, on every rank).
    """
    logits, group, vocab_range = unwrap(logits, group, vocab_range)
    check_logits(logits)
    check_sampling(seed, temperature, first_row)
    comm = communicator(group)
    shard = resolve_shard(logits.shape[-1], vocab_range, comm)
    with torch.no_grad():
        score, ids = implementation(logits).gumbel_argmax(
            logits.detach(), seed, shard.start, first_row, float(temperature)
        )
        if comm is not None:
            local = torch.stack([score, ids.view(torch.float64), torch.zeros_like(score)], dim=1)
            options = {"seed": seed, "temperature": float(temperature), "first_row": first_row}
            call = call_of(comm, logits, "vocab_parallel_sample", **options)
            gathered = exchange(with_header(local, shard, checksum=0 if call is None else call.checksum), comm)
            check_headers(gathered, None, -100, call=call)
            pairs = gathered[:, :-HEADER_ROWS]
            # A NaN is the largest, and its id is -1; of equal scores the first rank's wins, which has the lower ids.
            rank = pairs[..., 0].max(dim=0, keepdim=True).indices
            ids = pairs[..., 1].contiguous().view(torch.int64).gather(0, rank).squeeze(0)
    return ids.reshape(logits.shape[:-1])
