"""The layout of packed documents: what evens work out among ranks sends keys, and one is weighed against the other.

Between two ranks that share memory, 9 documents of 90 to 1500 tokens took 1.15 times as long as perfectly divided work
when they were dealt out, whose work was even within 0.3 %, and 0.99 and 0.93 times in zigzag and contiguous order:
dealt ranks read twice as many keys of each other (rows of `fastpar bench context --masks packed`). Keys grow with the
length of documents, and pairs with its square.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastpar.context.layout import contiguous, dealt, zigzag
from fastpar.contracts.attention import AttentionMask, Ranges, positions


def cheapest(
    tokens: int, size: int, mask: AttentionMask, *, pairs_a_key: float, is_hidden: bool = False, block: int = 512
) -> tuple[Ranges, ...]:
    """The layout of packed documents whose slowest rank is done first: contiguous, zigzag or dealt; of equal ones the
    first of these.

    A rank takes as long as its pairs of a query and a key that it sees, and the keys that it reads of other ranks, each
    as long as `pairs_a_key` pairs. is_hidden: keys travel during the attention, so that the longer of both counts.
    Both are counted for a causal mask with documents: layers with windows do, and read, less.
    """
    made = contiguous(tokens, size), zigzag(tokens, size), dealt(tokens, size, mask, block=block)
    pairs, rows = mask.visible_keys(tokens), mask.documents or ((tokens,),)
    return min(made, key=lambda layout: max(rank_costs(layout, pairs, rows, pairs_a_key, is_hidden)))


def rank_costs(
    layout: tuple[Ranges, ...], pairs: Tensor, rows: tuple[tuple[int, ...], ...], pairs_a_key: float, is_hidden: bool
) -> list[float]:
    """What each rank takes, in pairs: see `cheapest`. `pairs`: the keys that each query sees in all `rows` of the
    batch, which are lengths of documents."""
    costs = []
    for ranges in layout:
        own = positions(ranges)
        work, exchange = float(pairs[own].sum()), pairs_a_key * len(rows) * _keys_read(own, rows)
        costs.append(max(work, exchange) if is_hidden else work + exchange)
    return costs


def _keys_read(own: Tensor, rows: tuple[tuple[int, ...], ...]) -> int:
    """Keys of other ranks that causal queries at these positions see in any row; a message has those of all rows.

    Of a row they are one interval for each document that the rank has a query of. In the order in which they begin,
    each adds what lies behind all before it: nothing here is as long as the whole sequence, which all ranks go through.
    """
    begins, ends = [], []
    for lengths in rows:
        sizes = torch.tensor([n for n in lengths if n], dtype=torch.int64)
        starts = sizes.cumsum(0) - sizes
        document = torch.searchsorted(starts, own, right=True) - 1
        last = torch.full_like(starts, -1).scatter_reduce(0, document, own, "amax")
        held = last >= 0
        begins.append(starts[held])
        ends.append(last[held] + 1)
    begin, order = torch.cat(begins).sort()
    reached = torch.cat(ends)[order].cummax(0).values
    before = torch.cat([begin[:1], reached[:-1]])
    return int((reached - torch.maximum(begin, before)).clamp(min=0).sum()) - len(own)
