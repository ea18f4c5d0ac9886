"""Layouts of a sequence over ranks: which tokens each rank holds, in its local order.

    contiguous   rank r holds block r                                       windows, and the input of Ulysses
    zigzag       2P chunks, rank r holds r and 2P - 1 - r                   causal attention of one document
    striped      rank r holds tokens r, r + P, r + 2P, ...                  causal attention of one document
    dealt        blocks sorted by work and dealt, the heaviest of each
                 round to the rank that has least                           packed documents

Max / mean work over 8 ranks of 65536 causal tokens: contiguous 1.88, the others 1.00; of 26 packed documents:
contiguous 2.05, zigzag 1.48, dealt 1.02. Dealt reads 0.45 of all keys from other ranks there, and the others 0.02 and
0.07, so that `fastpar.context.packed` weighs one against the other. Every length works: ranks' token counts differ by
one at most (dealt: by one for each of a rank's blocks).

Zigzag: Zhu, ring-flash-attention; Llama 3 (Dubey et al. 2024). Striped: Brandon et al. 2023.
"""

from __future__ import annotations

import itertools

import torch

from fastpar.arguments import check_counts, checked
from fastpar.contracts.attention import MAX_TOKENS, AttentionMask, Ranges, TokenRange

_MAX_RANKS = 1 << 20


def _check(num_tokens: int, size: int) -> None:
    check_counts(MAX_TOKENS, least=0, num_tokens=num_tokens)
    check_counts(_MAX_RANKS, size=size)


@checked()
def contiguous(num_tokens: int, size: int) -> tuple[Ranges, ...]:
    """Blocks of neighbouring tokens, one a rank: `contiguous(5, 2)` is tokens 0..2 and 3..4."""
    _check(num_tokens, size)
    sizes = [len(range(rank, num_tokens, size)) for rank in range(size)]
    stops = list(itertools.accumulate(sizes))
    return tuple((TokenRange(stop - n, stop),) for stop, n in zip(stops, sizes, strict=True))


@checked()
def zigzag(num_tokens: int, size: int) -> tuple[Ranges, ...]:
    """Two chunks a rank, r and 2P - 1 - r: `zigzag(8, 2)` is tokens 0, 1, 6, 7 and 2, 3, 4, 5."""
    _check(num_tokens, size)
    counts = [len(range(rank, num_tokens, size)) for rank in range(size)]
    sizes = [(n + 1) // 2 for n in counts] + [n // 2 for n in reversed(counts)]
    stops = list(itertools.accumulate(sizes))
    chunks = [TokenRange(stop - n, stop) for stop, n in zip(stops, sizes, strict=True)]
    return tuple(_merged([chunks[rank], chunks[2 * size - 1 - rank]]) for rank in range(size))


@checked()
def striped(num_tokens: int, size: int) -> tuple[Ranges, ...]:
    """Tokens r, r + P, ... of rank r: `striped(8, 2)` is tokens 0, 2, 4, 6 and 1, 3, 5, 7."""
    _check(num_tokens, size)
    return tuple((TokenRange(min(rank, num_tokens), num_tokens, size),) for rank in range(size))


@checked()
def dealt(num_tokens: int, size: int, mask: AttentionMask, *, block: int = 512) -> tuple[Ranges, ...]:
    """Blocks sorted by the keys that their queries see and dealt out in rounds: the same number of blocks, and nearly
    the same work, for every rank.

    block: tokens of a block, about: all are equal up to one token, and an even number goes to each rank.
    Raises ValueError for a mask whose documents do not add up to num_tokens.
    """
    _check(num_tokens, size)
    check_counts(MAX_TOKENS, block=block)
    num_blocks = 2 * size * max(1, -(-num_tokens // (2 * size * block)))
    cuts = [index * num_tokens // num_blocks for index in range(num_blocks + 1)]
    seen = torch.cat([torch.zeros(1, dtype=torch.int64), mask.visible_keys(num_tokens).cumsum(0)])
    work = seen[cuts].diff()
    order = torch.argsort(work, descending=True, stable=True).tolist()
    mine: list[list[int]] = [[] for _ in range(size)]
    load = [0] * size
    for first in range(0, num_blocks, size):
        ranks = sorted(range(size), key=load.__getitem__)  # the least loaded first, for the heaviest block
        for rank, index in zip(ranks, order[first : first + size], strict=True):
            mine[rank].append(index)
            load[rank] += int(work[index])
    return tuple(_merged([TokenRange(cuts[i], cuts[i + 1]) for i in sorted(blocks)]) for blocks in mine)


def _merged(ranges: list[TokenRange]) -> Ranges:
    """The same tokens in the same order with fewer ranges, and none that is empty."""
    merged: list[TokenRange] = []
    for current in ranges:
        if merged and merged[-1].stop == current.start:
            merged[-1] = TokenRange(merged[-1].start, current.stop)
        elif len(current):
            merged.append(current)
    return tuple(merged)
