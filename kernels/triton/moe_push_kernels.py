# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Triton kernels that send tokens straight to the rows of their experts on other ranks; `moe_push.py` launches them.

Waits, signals and the record of what failed are those of `overlap_gemm_kernels.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastpar.kernels.moe_sort import experts_of
from fastpar.kernels.overlap_gemm_kernels import (
    COUNTED,
    OVERFLOWED,
    RECORD_WHAT,
    REFUSED,
    peer_flag,
    wait_flag,
    write_record,
)

# Which of a rank's flags on another says what: an index.
COUNTS_FLAG = tl.constexpr(0)
ROWS_FLAG = tl.constexpr(1)
RESULTS_FLAG = tl.constexpr(2)


@triton.jit(do_not_specialize=["counts_offset", "flags_offset", "num_experts"])
def announce_kernel(counts, peers, counts_offset, flags_offset, state, num_experts, EXPERTS: tl.constexpr):
    """Write this rank's counts [E] to its place on every rank, and raise a flag there. One program a rank."""
    epoch = tl.load(state)
    peer = tl.program_id(0)
    e = tl.arange(0, EXPERTS)
    target = (tl.load(peers + peer) + counts_offset).to(tl.pointer_type(tl.int32))
    tl.store(target + e, tl.load(counts + e, mask=e < num_experts), mask=e < num_experts)
    tl.debug_barrier()
    tl.atomic_xchg(peer_flag(peers, peer, flags_offset, COUNTS_FLAG), epoch, sem="release", scope="sys")


@triton.jit(do_not_specialize=["rank", "capacity", "num_experts", "max_polls"])
def plan_kernel(
    loads,
    flags,
    flag_capacity,
    state,
    record,
    first,
    splits,
    room,
    rank,
    capacity,
    num_experts,
    max_polls,
    W: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """From the counts of all ranks, once they have come, where this rank's rows go. One program.

    loads   int32 [W, E]           pairs of each rank for each expert; negative: the rank takes no part
    first   int32 [E]              the row, on its expert's rank, of this rank's first pair for it
    splits  int32 [E / W + 1]      rows of this rank's experts
    room    int32 [1]              rows that every rank has room for; none if counts are missing, or a rank takes no
                                   part: nobody is written to

    loads [[1, 2], [3, 4]] on rank 1 of 2: first [1, 2], splits [0, 6].
    """
    epoch = tl.load(state)
    ok = True
    for sender in range(W):
        flag = flags + sender * flag_capacity + COUNTS_FLAG
        ok = wait_flag(flag, epoch, record, COUNTED, sender, 0, max_polls) & ok
    e = tl.arange(0, EXPERTS)
    is_expert = e < num_experts
    total = tl.zeros((EXPERTS,), tl.int32)
    earlier = tl.zeros((EXPERTS,), tl.int32)
    least = tl.zeros((EXPERTS,), tl.int32)
    for sender in range(W):
        count = tl.where(ok, tl.load(loads + sender * num_experts + e, mask=is_expert, other=0), 0)
        if tl.min(count, 0) < 0:
            write_record(record, REFUSED, sender, 0, 0, 0)
        least = tl.minimum(least, count)
        total += count
        earlier += tl.where(sender < rank, count, 0)
    ok &= tl.min(least, 0) >= 0
    total = tl.where(ok, total, 0)
    per_rank = num_experts // W
    for owner in range(W):
        is_owned = is_expert & (e // per_rank == owner)
        owned = tl.where(is_owned, total, 0)
        up_to = tl.cumsum(owned, 0)
        tl.store(first + e, up_to - owned + earlier, mask=is_owned)
        if owner == rank:
            tl.store(splits, 0)
            tl.store(splits + 1 + (e - rank * per_rank), tl.minimum(up_to, capacity), mask=is_owned)
        needed = tl.sum(owned, 0)
        if needed > capacity:
            write_record(record, OVERFLOWED, owner, needed, capacity, 0)
    tl.store(room, tl.where(ok, capacity, 0))


@triton.jit(do_not_specialize=["num_pairs", "capacity"])
def slot_kernel(
    indices, ranks, before, first, room, slots, num_pairs, num_experts, per_rank, capacity, BLOCK: tl.constexpr
):
    """slots[p] = rank of the expert * capacity + its row for pair p; -1: it goes nowhere, or does not fit.

    ranks and before are those of `moe_sort`: how many pairs before p have its expert.
    """
    block = tl.program_id(0).to(tl.int64)
    pairs = block * BLOCK + tl.arange(0, BLOCK)
    expert = experts_of(indices, pairs, num_pairs, num_experts)
    goes = expert >= 0
    row = tl.load(first + expert, mask=goes, other=0) + tl.load(ranks + pairs, mask=goes, other=0)
    row += tl.load(before + block * num_experts + expert, mask=goes, other=0)
    goes &= row < tl.load(room)
    slot = (expert // per_rank).to(tl.int64) * capacity + row
    tl.store(slots + pairs, tl.where(goes, slot, -1), mask=pairs < num_pairs)


@triton.jit(do_not_specialize=["num_pairs", "rows_offset", "values_offset", "flags_offset", "capacity"])
def push_kernel(
    x,
    stride,
    values,
    slots,
    peers,
    rows_offset,
    values_offset,
    flags_offset,
    state,
    done,
    num_pairs,
    top_k,
    capacity,
    width,
    W: tl.constexpr,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Row slots[p] of the rank that it names = x[p // top_k], and its value = values[p]; then a flag on every rank.

    rows_offset, values_offset   bytes from a rank's memory to its rows [capacity, width] and values [capacity]
    done                         int32 [1], 0 on entry and on exit: programs that have stored all that they had to

    The last program to finish raises the flags: it has seen, through `done`, what the others have stored.

    slots [[3, 0]], capacity 2, x [[5]]: row 1 of rank 1 and row 0 of rank 0 are 5.
    """
    epoch = tl.load(state)
    width = width * ALIGN
    blocks = tl.cdiv(width, COLS)
    for job in range(tl.program_id(0), tl.cdiv(num_pairs, ROWS) * blocks, tl.num_programs(0)):
        p = (job // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        slot = tl.load(slots + p, mask=p < num_pairs, other=-1)
        goes = slot >= 0
        slot = tl.maximum(slot, 0)
        memory = tl.load(peers + slot // capacity)
        row = slot % capacity
        cols = (job % blocks * COLS + tl.arange(0, COLS))[None, :]
        mask = goes[:, None] & (cols < width)
        address = (memory + rows_offset).to(tl.pointer_type(x.dtype.element_ty))
        address = tl.multiple_of(address, ALIGN * (x.dtype.element_ty.primitive_bitwidth // 8))
        value = tl.load(x + (p // top_k * stride * ALIGN)[:, None] + cols, mask=mask, other=0.0)
        tl.store((address + row * width)[:, None] + cols, value, mask=mask)
        if values is not None:  # noqa: SIM102 (Triton would compile the rest of an `and`)
            if job % blocks == 0:
                place = (memory + values_offset).to(tl.pointer_type(tl.float32)) + row
                tl.store(place, tl.load(values + p, mask=goes, other=0.0), mask=goes)
    tl.debug_barrier()
    if tl.atomic_add(done, 1, sem="acq_rel", scope="sys") == tl.num_programs(0) - 1:
        tl.store(done, 0)
        tl.debug_barrier()
        for peer in range(W):
            tl.atomic_xchg(peer_flag(peers, peer, flags_offset, ROWS_FLAG), epoch, sem="release", scope="sys")


@triton.jit(do_not_specialize=["flags_offset"])
def show_kernel(peers, flags_offset, state, W: tl.constexpr):
    """Tell every rank that this one's results lie where all can read them. One program."""
    epoch = tl.load(state)
    for peer in range(W):
        tl.atomic_xchg(peer_flag(peers, peer, flags_offset, RESULTS_FLAG), epoch, sem="release", scope="sys")


@triton.jit(do_not_specialize=["max_polls"])
def await_kernel(
    flags, flag_capacity, state, record, poison, max_polls, W: tl.constexpr, FLAG: tl.constexpr, WHAT: tl.constexpr
):
    """Wait for a flag of every rank. poison [1]: 0, or NaN if anything has failed on this rank. One program."""
    epoch = tl.load(state)
    ok = True
    for sender in range(W):
        ok = wait_flag(flags + sender * flag_capacity + FLAG, epoch, record, WHAT, sender, 0, max_polls) & ok
    ok &= tl.atomic_add(record + RECORD_WHAT, 0, sem="acquire", scope="sys") == 0
    tl.store(poison, tl.where(ok, 0.0, float("nan")))
