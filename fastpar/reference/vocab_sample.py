"""Sampling from a vocabulary that is split across ranks, in plain PyTorch.

The noise of a token is a hash of the seed, its row and its global id, as the mask of fastpar.reference.dropout is of
the seed and the index: a rank draws that of its own columns, and any number of ranks draw the same.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fastpar.contracts import communicator
from fastpar.contracts.dtensor_logits import unwrap
from fastpar.contracts.vocab import check_logits, check_sampling, num_rows
from fastpar.contracts.vocab_shard import resolve_shard
from fastpar.reference.dropout import _GOLDEN, _MIX1, _MIX2, _shift_right
from fastpar.reference.vocab_softmax import whole_vocab

if TYPE_CHECKING:
    from fastpar.comm import GroupLike


def _splitmix(z: Tensor) -> Tensor:
    z = (z ^ _shift_right(z, 30)) * _MIX1
    z = (z ^ _shift_right(z, 27)) * _MIX2
    return z ^ _shift_right(z, 31)


def gumbel_noise(
    rows: int, size: int, seed: int, vocab_start: int, first_row: int, device: torch.device | None = None
) -> Tensor:
    """[rows, size] float64: -log(-log u), u the upper 52 bits of hash(hash(seed, row), id) and a half."""
    row = torch.arange(first_row, first_row + rows, dtype=torch.int64, device=device).unsqueeze(1)
    column = torch.arange(vocab_start, vocab_start + size, dtype=torch.int64, device=device)
    bits = _splitmix(_splitmix(seed + (row + 1) * _GOLDEN) + (column + 1) * _GOLDEN)
    u = (_shift_right(bits, 12).double() + 0.5) * 2.0**-52
    return -(-u.log()).log()


def gumbel_argmax(
    logits: Tensor, seed: int, vocab_start: int, first_row: int, temperature: float
) -> tuple[Tensor, Tensor]:
    """(best score [N] float64, its global id [N]); id -1 where every logit is -inf; (NaN, -1) for a row with NaN."""
    rows, size = num_rows(logits), logits.shape[-1]
    if size == 0:
        best = torch.full((rows,), -math.inf, dtype=torch.float64, device=logits.device)
        return best, torch.full((rows,), -1, device=logits.device)
    z = logits.reshape(rows, size).double() / temperature
    scores = z + gumbel_noise(rows, size, seed, vocab_start, first_row, z.device)
    best, column = torch.sort(scores, dim=1, descending=True, stable=True)
    best, column = best[:, 0], column[:, 0]
    return best, (column + vocab_start).masked_fill((best == -math.inf) | best.isnan(), -1)


def vocab_parallel_sample(
    logits: Tensor,
    *,
    seed: int,
    temperature: float = 1.0,
    first_row: int = 0,
    group: GroupLike = None,
    vocab_range: tuple[int, int, int] | None = None,
) -> Tensor:
    """fastpar.ops.vocab_parallel_sample by gathering the vocabulary."""
    from fastpar.comm import gather_from

    logits, group, vocab_range = unwrap(logits, group, vocab_range)
    check_logits(logits)
    check_sampling(seed, temperature, first_row)
    comm = communicator(group)
    shard = resolve_shard(logits.shape[-1], vocab_range, comm)
    x = gather_from(logits.detach(), comm, dim=-1, sizes=whole_vocab(logits, shard, comm))
    return gumbel_argmax(x, seed, 0, first_row, temperature)[1].reshape(logits.shape[:-1])
