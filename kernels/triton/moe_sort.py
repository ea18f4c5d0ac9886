# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Where the pairs of tokens and choices go, on the device: counts, prefix sums and positions, without a sort.

`place_pairs` gives what a dispatch within one rank needs, and synchronises with the host nowhere: how many rows there
are is a number on the device, and outputs have the size that they can have at most. Three launches:

    rank_kernel    of each pair, how many before it in its block have the same expert; how many each block has
    scan_kernel    how many the blocks before have, expert by expert; and all of them
    place_kernel   the row of each pair, and the token and weight of each row

Comparing a block of BLOCK pairs with itself costs BLOCK comparisons a pair, however many experts there are, and is
stable, as a scatter with atomics would not be. 4096 x 8 pairs of 256 experts took 0.039 ms on an H200.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastpar.kernels.launch import cdiv, launch, next_power_of_2

BLOCK = 128  # pairs of a program
STEP = 16  # pairs or experts that these are compared with at a time: more of them spill on gfx942
SCAN_EXPERTS = 16  # experts of a program of the scan
SCAN_BLOCKS = 64  # blocks that it takes at a time


# ---- device functions ------------------------------------------------------------------------------------------------


@triton.jit
def experts_of(indices, pairs, num_pairs, num_experts):
    """int32: the expert of each pair, -1 for one that goes nowhere."""
    expert = tl.load(indices + pairs, mask=pairs < num_pairs, other=-1)
    return tl.where((expert >= 0) & (expert < num_experts), expert, -1).to(tl.int32)


# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["num_pairs"])
def rank_kernel(indices, ranks, block_counts, num_pairs, num_experts, BLOCK: tl.constexpr, STEP: tl.constexpr):
    """ranks[p]: pairs of this block before p with its expert. block_counts [blocks, E]: all of them; 0 on entry.

    indices [1, 0, 1, -1], 2 experts, one block: ranks [0, 0, 1, .], block_counts [[1, 2]].
    """
    block = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    pairs = block * BLOCK + i
    expert = experts_of(indices, pairs, num_pairs, num_experts)
    rank = tl.zeros((BLOCK,), tl.int32)
    later = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, BLOCK, STEP):
        j = first + tl.arange(0, STEP)
        others = experts_of(indices, block * BLOCK + j, num_pairs, num_experts)
        is_same = expert[:, None] == others[None, :]
        rank += tl.sum((is_same & (j[None, :] < i[:, None])).to(tl.int32), 1)
        later += tl.sum((is_same & (j[None, :] > i[:, None])).to(tl.int32), 1)
    tl.store(ranks + pairs, rank, mask=pairs < num_pairs)
    tl.store(block_counts + block * num_experts + expert, rank + 1, mask=(expert >= 0) & (later == 0))


@triton.jit(do_not_specialize=["num_blocks"])
def scan_kernel(
    block_counts, before, counts, num_blocks, num_experts, SCAN_EXPERTS: tl.constexpr, SCAN_BLOCKS: tl.constexpr
):
    """before[b, e]: pairs of expert e in the blocks before b; counts[e]: in all.

    block_counts [[1, 2], [3, 0]]: before [[0, 0], [1, 2]], counts [4, 2].
    """
    e = tl.program_id(0) * SCAN_EXPERTS + tl.arange(0, SCAN_EXPERTS)
    total = tl.zeros((SCAN_EXPERTS,), tl.int32)
    for first in range(0, num_blocks, SCAN_BLOCKS):
        b = first + tl.arange(0, SCAN_BLOCKS)
        mask = (b < num_blocks)[:, None] & (e < num_experts)[None, :]
        place = b.to(tl.int64)[:, None] * num_experts + e[None, :]
        found = tl.load(block_counts + place, mask=mask, other=0)
        tl.store(before + place, total[None, :] + tl.cumsum(found, 0) - found, mask=mask)
        total += tl.sum(found, 0)
    tl.store(counts + e, total, mask=e < num_experts)


@triton.jit(do_not_specialize=["num_pairs"])
def place_kernel(
    indices,
    ranks,
    before,
    counts,
    weights,
    splits,
    slots,
    source,
    row_weights,
    num_pairs,
    num_experts,
    top_k,
    align,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """slots[p]: the row of pair p, -1: none; source, row_weights of that row: the token and the weight of the pair.

    An expert has room for its pairs, rounded up to a multiple of `align`; program 0 writes where the rooms begin.

    indices [[1, 0], [1, -1]], align 2: splits [0, 2, 4], slots [[2, 0], [3, -1]], source [0, ., 0, 1].
    """
    block = tl.program_id(0).to(tl.int64)
    pairs = block * BLOCK + tl.arange(0, BLOCK)
    if block == 0:
        e = tl.arange(0, EXPERTS)
        room = (tl.load(counts + e, mask=e < num_experts, other=0) + align - 1) // align * align
        tl.store(splits, 0)
        tl.store(splits + 1 + e, tl.cumsum(room, 0), mask=e < num_experts)
    expert = experts_of(indices, pairs, num_pairs, num_experts)
    goes = expert >= 0
    start = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, num_experts, STEP):
        e = first + tl.arange(0, STEP)
        room = (tl.load(counts + e, mask=e < num_experts, other=0) + align - 1) // align * align
        start += tl.sum(tl.where(e[None, :] < expert[:, None], room[None, :], 0), 1)
    row = start + tl.load(before + block * num_experts + expert, mask=goes, other=0)
    row += tl.load(ranks + pairs, mask=goes, other=0)
    tl.store(slots + pairs, tl.where(goes, row, -1), mask=pairs < num_pairs)
    tl.store(source + row, pairs // top_k, mask=goes)
    weight = tl.full((BLOCK,), 1.0, tl.float32)
    if weights is not None:
        weight = tl.load(weights + pairs, mask=goes, other=0.0).to(tl.float32)
    tl.store(row_weights + row, weight, mask=goes)


# ---- the ops ---------------------------------------------------------------------------------------------------------


class RankedPairs(NamedTuple):
    """ranks [T, K], before [blocks, E]: how many pairs before each have its expert, in its block and in those before;
    counts [E]: all of them. int32."""

    ranks: Tensor
    before: Tensor
    counts: Tensor


class PlacedPairs(NamedTuple):
    """Rows by expert, then by token, then by choice.

    counts       int32 [E]     pairs of each expert
    splits       int32 [E + 1] where the rows of each begin, and where the last end
    slots        int64 [T, K]  the row of each pair, -1: it goes nowhere
    source       int64 [rows]  the token of each row, -1: padding, or past the end
    row_weights  float32 [rows]  the weight of its pair; 0: padding
    """

    counts: Tensor
    splits: Tensor
    slots: Tensor
    source: Tensor
    row_weights: Tensor


def rank_pairs(indices: Tensor, num_experts: int) -> RankedPairs:
    """The rank of each pair of indices [T, K]: how many before it have the same expert."""
    num_pairs, device = indices.numel(), indices.device
    blocks = cdiv(num_pairs, BLOCK)
    ranks = torch.empty(indices.shape, dtype=torch.int32, device=device)
    block_counts = torch.zeros((blocks, num_experts), dtype=torch.int32, device=device)
    before = torch.empty_like(block_counts)
    counts = torch.zeros(num_experts, dtype=torch.int32, device=device)
    if num_pairs == 0:
        return RankedPairs(ranks, before, counts)
    launch(
        rank_kernel, blocks, device, indices.contiguous(), ranks, block_counts, num_pairs, num_experts,
        BLOCK=BLOCK, STEP=STEP, num_warps=4,
    )  # fmt: skip
    launch(
        scan_kernel, cdiv(num_experts, SCAN_EXPERTS), device, block_counts, before, counts, blocks, num_experts,
        SCAN_EXPERTS=SCAN_EXPERTS, SCAN_BLOCKS=SCAN_BLOCKS, num_warps=4,
    )  # fmt: skip
    return RankedPairs(ranks, before, counts)


def place_pairs(indices: Tensor, num_experts: int, weights: Tensor | None = None, *, align: int = 1) -> PlacedPairs:
    """The rows of a dispatch to experts of one rank: as many as there can be, T * K + num_experts * (align - 1).

    indices  [T, K]   int64 or int32; a value outside 0..num_experts - 1 goes nowhere
    weights  [T, K]   or None: 1
    align    rows of an expert are padded to a multiple
    """
    num_pairs, device = indices.numel(), indices.device
    rows = num_pairs + num_experts * (align - 1)
    ranks, before, counts = rank_pairs(indices, num_experts)
    slots = torch.empty(indices.shape, dtype=torch.int64, device=device)
    splits = torch.zeros(num_experts + 1, dtype=torch.int32, device=device)
    source = torch.full((rows,), -1, dtype=torch.int64, device=device)
    row_weights = torch.zeros(rows, dtype=torch.float32, device=device)
    if num_pairs:
        launch(
            place_kernel, before.shape[0], device, indices.contiguous(), ranks, before, counts,
            None if weights is None else weights.contiguous(), splits, slots, source, row_weights,
            num_pairs, num_experts, indices.shape[1], align, BLOCK=BLOCK, STEP=STEP,
            EXPERTS=next_power_of_2(num_experts), num_warps=4,
        )  # fmt: skip
    return PlacedPairs(counts, splits, slots, source, row_weights)


def order_pairs(indices: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """`fastpar.reference.moe_rows.order_pairs`: no size is read on the host."""
    # One expert more for the pairs that go nowhere, so that every pair has a place.
    goes = (indices >= 0) & (indices < num_experts)
    placed = place_pairs(torch.where(goes, indices, num_experts), num_experts + 1)
    slots = placed.slots.view(-1)
    order = torch.empty_like(slots)
    order[slots] = torch.arange(slots.numel(), device=indices.device)
    return order, placed.counts[:num_experts].long()
