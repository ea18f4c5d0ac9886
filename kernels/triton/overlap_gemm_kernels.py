# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Triton kernels of GEMMs that overlap their collective; `overlap_gemm.py` has the protocol and launches them.

Note: schedules
    Which tile a program computes is data: an int32 table [num_tiles, 4] of (row, rows, column tile, tag), written by
    `overlap_gemm_schedule.py`. Program p of P takes the entries p, p + P, p + 2 P, ... A tile is `rows` rows (at most
    BLOCK_M) from `row` on, and the columns [column tile * BLOCK_N, ...) below N. The tag names a flag: that of the data
    that the tile waits for, or that of the tile itself. A tile's sum over K runs in one program from 0 up, so its bits
    depend on BLOCK_K and on nothing else: not on the order of the table, not on P, not on when data arrived.

Note: waiting
    Flags are int32 epochs in this rank's own memory, raised by peers and compared with >=. A wait reads its flag with
    acquire semantics at system scope, and gives up after `max_polls` such reads: it then writes (what, peer, index,
    wanted, found) into the record, once, and returns False. What was computed from data that never came is NaN. With
    the record written no later wait of this rank waits at all, so that a failed call ends within one timeout.

    Polls are counted, and not nanoseconds: every thread of a program would read another time, and at the deadline some
    would leave the loop while others stood at a barrier in it. For the same reason the record is read with an atomic,
    whose result one thread hands to all others, and not with a load.

Note: signals
    A program stores its data, passes a barrier (which orders all its threads' stores before what the first thread does
    next), and exchanges the epoch into the peer's flag with release semantics at system scope.

Note: offsets
    Where a tile begins is an int64 scalar, added to the pointer; offsets within a tile are int32. A tile of int64
    offsets takes twice the registers, and the GEMM spills.

A worked example of `wait_flag`: epoch 3, flag 2. Polls read 2, 2, ..., and 3 once the peer has stored its data; the
wait returns True. A peer that is one call ahead raises the flag to 4 at some time, which is fine as well.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Triton's interpreter multiplies bfloat16 as if its bits were integers.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

# What a wait was for: the first word of a record.
EMPTY = tl.constexpr(1)  # a peer has finished the channel's previous call
GATHERED = tl.constexpr(2)  # rows of a peer's shard
PARTIAL = tl.constexpr(3)  # a peer's partial tile
REDUCED = tl.constexpr(4)  # an owner's finished tile
PEER_FAILED = tl.constexpr(5)  # nothing: a peer said that one of its waits had failed
COUNTED = tl.constexpr(6)  # how many rows a peer has for every expert
PUSHED = tl.constexpr(7)  # a peer's rows
SHOWN = tl.constexpr(8)  # a peer's results
OVERFLOWED = tl.constexpr(9)  # nothing: a rank has no room for the rows that it would get
REFUSED = tl.constexpr(10)  # nothing: a peer said that its arguments are wrong

# Words of a record.
RECORD_WHAT = tl.constexpr(0)
RECORD_PEER = tl.constexpr(1)
RECORD_INDEX = tl.constexpr(2)
RECORD_WANTED = tl.constexpr(3)
RECORD_FOUND = tl.constexpr(4)
RECORD_LOCK = tl.constexpr(5)


# ---- device functions ------------------------------------------------------------------------------------------------


@triton.jit
def write_record(record, what, peer, index, wanted, found):
    """`Note: waiting`. Only the first failure is kept; its kind is written last, since that is what readers look at."""
    if tl.atomic_cas(record + RECORD_LOCK, 0, 1) == 0:
        tl.store(record + RECORD_PEER, peer)
        tl.store(record + RECORD_INDEX, index)
        tl.store(record + RECORD_WANTED, wanted)
        tl.store(record + RECORD_FOUND, found)
        tl.debug_barrier()
        tl.atomic_xchg(record + RECORD_WHAT, what, sem="release", scope="sys")


@triton.jit
def wait_flag(flag, wanted, record, what, peer, index, max_polls):
    """True once flag >= wanted, False if it has not come or a wait has failed before: `Note: waiting`."""
    found = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    if found < wanted:
        failed = tl.atomic_add(record + RECORD_WHAT, 0, sem="acquire", scope="sys")
        polls = tl.where(failed == 0, 0, max_polls)
        while (found < wanted) & (polls < max_polls):
            found = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
            polls += 1
        if found < wanted:
            write_record(record, what, peer, index, wanted, found)
    return found >= wanted


@triton.jit
def peer_pointer(table, rank, offset, like):
    """`offset` bytes (a multiple of 16) into the memory of a rank, as a pointer to what `like` points to."""
    address = tl.load(table + rank) + offset
    return tl.multiple_of(address.to(tl.pointer_type(like.dtype.element_ty)), 16)


@triton.jit
def peer_flag(table, rank, offset, index):
    """Pointer to flag `index` of the int32 flags that begin `offset` bytes into the memory of a rank."""
    return (tl.load(table + rank) + offset).to(tl.pointer_type(tl.int32)) + index


@triton.jit
def matmul_tile(
    x,
    stride_x,
    rows,
    weight,
    stride_n,
    stride_k,
    cols,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """float32 [BLOCK_M, BLOCK_N]: x [rows, K] @ weight [cols, K].T, from pointers to the first row and column.

    Rows past the end repeat the last one: their sums are never looked at, and the loads need no mask. Columns past the
    end are masked: a weight may be contiguous along them, and repeated ones would be loaded one by one.
    """
    m = tl.minimum(tl.arange(0, BLOCK_M), rows - 1)
    n = tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_block = x + m[:, None] * stride_x + k[None, :]
    weight_block = weight + n[None, :] * stride_n + k[:, None] * stride_k
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        a = tl.load(x_block) if EVEN_K else tl.load(x_block, mask=k[None, :] < K - start, other=0.0)
        if EVEN_K and EVEN_N:
            b = tl.load(weight_block)
        elif EVEN_K:
            b = tl.load(weight_block, mask=n[None, :] < cols, other=0.0)
        elif EVEN_N:
            b = tl.load(weight_block, mask=k[:, None] < K - start, other=0.0)
        else:
            b = tl.load(weight_block, mask=(k[:, None] < K - start) & (n[None, :] < cols), other=0.0)
        if INTERPRETED:
            a, b = a.to(tl.float32), b.to(tl.float32)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
        x_block += BLOCK_K
        weight_block += BLOCK_K * stride_k
    return acc


# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["done_offset", "failed_offset", "rank", "max_polls"])
def begin_kernel(state, signals, done_offset, failed_offset, record, rank, max_polls, W: tl.constexpr):
    """Start a call on a channel: epoch += 1, and wait until every rank has finished the epoch before. One program.

    state        int32 [1]  the channel's epoch on this rank
    done_offset  bytes into a rank's signals: int32 [W], the epochs that each rank has finished
    failed_offset                             int32 [W], 1 where a rank's wait has failed

    A rank that gives up here tells every peer, before it writes into memory that they may still be reading: who reads
    spoiled data hears of it before its own call ends.
    """
    epoch = tl.load(state) + 1
    ok = True
    for peer in range(W):
        done = peer_flag(signals, rank, done_offset, peer)
        ok = wait_flag(done, epoch - 1, record, EMPTY, peer, 0, max_polls) & ok
    if not ok:
        for peer in range(W):
            tl.atomic_xchg(peer_flag(signals, peer, failed_offset, rank), 1, sem="release", scope="sys")
    tl.store(state, epoch)


@triton.jit(do_not_specialize=["done_offset", "failed_offset", "rank"])
def finish_kernel(state, signals, done_offset, failed_offset, record, rank, W: tl.constexpr):
    """End a call on a channel: tell every rank that this one has read all that they sent. One program.

    A rank whose wait has failed tells that too; one that hears of it records it (PEER_FAILED), unless a wait of its own
    has failed before.
    """
    epoch = tl.load(state)
    failed = tl.atomic_add(record + RECORD_WHAT, 0, sem="acquire", scope="sys") != 0
    for peer in range(W):
        if failed:
            tl.atomic_xchg(peer_flag(signals, peer, failed_offset, rank), 1, sem="release", scope="sys")
        tl.atomic_xchg(peer_flag(signals, peer, done_offset, rank), epoch, sem="release", scope="sys")
    for peer in range(W):
        heard = tl.atomic_add(peer_flag(signals, rank, failed_offset, peer), 0, sem="acquire", scope="sys")
        if heard != 0:
            write_record(record, PEER_FAILED, peer, 0, epoch, 0)


@triton.jit(do_not_specialize=["data_offset", "flags_offset", "rank", "num_elements", "num_tiles"])
def push_kernel(
    x,
    peers,
    data_offset,
    flags_offset,
    state,
    rank,
    num_elements,
    chunk_elements,
    num_tiles,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy this rank's shard into the memory of every other rank, chunk by chunk, and raise a flag for each.

    To rank - 1 first, to rank + 1 last: rank r needs the shard of r + 1 right after its own.

    data_offset   bytes from a rank's memory to where this shard goes     flags_offset  to the flags of this rank
    """
    epoch = tl.load(state)
    for job in range(tl.program_id(0), (W - 1) * num_tiles, tl.num_programs(0)):
        chunk = job % num_tiles
        peer = (rank + W - 1 - job // num_tiles) % W
        target = peer_pointer(peers, peer, data_offset, x)
        first = chunk.to(tl.int64) * chunk_elements
        end = tl.minimum(first + chunk_elements, num_elements)
        for start in range(first, end, BLOCK):
            offsets = start + tl.arange(0, BLOCK)
            inside = offsets < end
            tl.store(target + offsets, tl.load(x + offsets, mask=inside), mask=inside)
        tl.debug_barrier()
        tl.atomic_xchg(peer_flag(peers, peer, flags_offset, chunk), epoch, sem="release", scope="sys")


@triton.jit(do_not_specialize=["num_tiles", "own_row", "max_polls"])
def gather_gemm_kernel(
    x,
    gathered,
    weight,
    bias,
    out,
    tiles,
    num_tiles,
    own_row,
    N,
    K,
    stride_n,
    stride_k,
    flags,
    flag_capacity,
    state,
    record,
    max_polls,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """out = gather(x) @ weight.T + bias, each tile as soon as its rows are there.

    x         [M_r, K]  this rank's rows; read where they are, not from `gathered`
    gathered  [M, K]    the rows of the others, at their places
    tag of a tile: -1 for this rank's rows, else owner * flag_capacity + chunk, the flag that says that they came

    The gate stands in front of a tile's first load; the loop over K is that of a GEMM without a collective.
    """
    epoch = tl.load(state)
    for t in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        entry = tiles + t * 4
        row = tl.load(entry).to(tl.int64)
        rows = tl.load(entry + 1)
        col = tl.load(entry + 2) * BLOCK_N
        tag = tl.load(entry + 3)
        ok = True
        if tag >= 0:
            peer = tag // flag_capacity
            ok = wait_flag(flags + tag, epoch, record, GATHERED, peer, tag % flag_capacity, max_polls)
        source = tl.where(tag < 0, x, gathered) + tl.where(tag < 0, row - own_row, row) * K
        columns = weight + col.to(tl.int64) * stride_n
        acc = matmul_tile(
            source, K, rows, columns, stride_n, stride_k, N - col, K,
            BLOCK_M, BLOCK_N, BLOCK_K, EVEN_N, EVEN_K, PRECISION,
        )  # fmt: skip
        m = tl.arange(0, BLOCK_M)
        n = col + tl.arange(0, BLOCK_N)
        if bias is not None:
            acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        acc = tl.where(ok, acc, float("nan"))
        target = out + row * N + (m[:, None] * N + n[None, :])  # `Note: offsets`
        tl.store(target, acc.to(out.dtype.element_ty), mask=(m[:, None] < rows) & (n[None, :] < N))


@triton.jit(do_not_specialize=["num_tiles", "staging_offset", "flags_offset"])
def scatter_gemm_kernel(
    x,
    weight,
    tiles,
    num_tiles,
    N,
    K,
    stride_x,
    stride_n,
    stride_k,
    peers,
    staging_offset,
    flags_offset,
    flag_capacity,
    state,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """x @ weight.T, tile by tile into the memory of each tile's owner, rounded to the dtype of x.

    x       [M, K_r]   weight  [N, K_r]
    tag of a tile: owner * flag_capacity + slot. It lies at staging_offset + slot * BLOCK_M * BLOCK_N elements as one
    piece, rows of BLOCK_N, whatever it covers of the matrix; both offsets are those of this rank's part.

    A tile is signalled after the sum of the next one: the signal has to wait until the owner's memory has taken the
    tile, and by then it has. Nothing in here waits for another rank.
    """
    epoch = tl.load(state)
    stored = -1  # tag of the tile that was stored and not signalled
    for t in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        entry = tiles + t * 4
        row = tl.load(entry).to(tl.int64)
        rows = tl.load(entry + 1)
        col = tl.load(entry + 2) * BLOCK_N
        tag = tl.load(entry + 3)
        columns = weight + col.to(tl.int64) * stride_n
        acc = matmul_tile(
            x + row * stride_x, stride_x, rows, columns, stride_n, stride_k, N - col, K,
            BLOCK_M, BLOCK_N, BLOCK_K, EVEN_N, EVEN_K, PRECISION,
        )  # fmt: skip
        if stored >= 0:
            tl.debug_barrier()
            flag = peer_flag(peers, stored // flag_capacity, flags_offset, stored % flag_capacity)
            tl.atomic_xchg(flag, epoch, sem="release", scope="sys")
        slot = (tag % flag_capacity).to(tl.int64)
        target = peer_pointer(peers, tag // flag_capacity, staging_offset, x) + slot * (BLOCK_M * BLOCK_N)
        m = tl.arange(0, BLOCK_M)
        n = tl.arange(0, BLOCK_N)
        tl.store(target + m[:, None] * BLOCK_N + n[None, :], acc.to(x.dtype.element_ty))
        stored = tag
    if stored >= 0:
        tl.debug_barrier()
        flag = peer_flag(peers, stored // flag_capacity, flags_offset, stored % flag_capacity)
        tl.atomic_xchg(flag, epoch, sem="release", scope="sys")


@triton.jit(
    do_not_specialize=["num_slots", "first_row", "num_tiles", "max_polls", "result_offset", "result_flags_offset"]
)
def reduce_kernel(
    staging,
    num_slots,
    bias,
    out,
    first_row,
    tiles,
    num_tiles,
    N,
    flags,
    flag_capacity,
    state,
    record,
    max_polls,
    peers,
    result_offset,
    result_flags_offset,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SUB_M: tl.constexpr,
    W: tl.constexpr,
    PUSH: tl.constexpr,
):
    """Sum the partial tiles that this rank owns in rank order, in float32; add the bias; round once.

    staging  [W, num_slots, BLOCK_M, BLOCK_N]   slot s of rank r has come when flags[r * flag_capacity + s] >= epoch
    out      [rows of this rank, N], from `first_row` of the matrix on; with PUSH not written: every rank gets the tile
             at its place in a matrix [M, N] at `result_offset`, and its flag at `result_flags_offset` raised.

    A tile is taken SUB_M rows at a time, which bounds the registers whatever the GEMM's tile is.
    """
    epoch = tl.load(state)
    for t in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        entry = tiles + t * 4
        row = tl.load(entry).to(tl.int64)
        rows = tl.load(entry + 1)
        col = tl.load(entry + 2) * BLOCK_N
        slot = tl.load(entry + 3) % flag_capacity
        ok = True
        for sender in range(W):
            flag = flags + sender * flag_capacity + slot
            ok = wait_flag(flag, epoch, record, PARTIAL, sender, slot, max_polls) & ok
        n = tl.arange(0, BLOCK_N)
        inside = col + n < N
        for start in range(0, rows, SUB_M):
            m = start + tl.arange(0, SUB_M)
            acc = tl.zeros((SUB_M, BLOCK_N), tl.float32)
            for source in tl.static_range(W):
                piece = staging + (source * num_slots + slot).to(tl.int64) * (BLOCK_M * BLOCK_N)
                acc += tl.load(piece + m[:, None] * BLOCK_N + n[None, :]).to(tl.float32)
            if bias is not None:
                acc += tl.load(bias + col + n, mask=inside, other=0.0).to(tl.float32)[None, :]
            value = tl.where(ok, acc, float("nan")).to(staging.dtype.element_ty)
            mask = (m[:, None] < rows) & inside[None, :]
            place = m[:, None] * N + (col + n)[None, :]
            if PUSH:
                for target in tl.static_range(W):
                    result = peer_pointer(peers, target, result_offset, staging) + row * N
                    tl.store(result + place, value, mask=mask)
            else:
                tl.store(out + (row - first_row) * N + place, value, mask=mask)
        if PUSH:
            tl.debug_barrier()
            for peer in range(W):
                flag = peer_flag(peers, peer, result_flags_offset, slot)
                tl.atomic_xchg(flag, epoch, sem="release", scope="sys")


@triton.jit(do_not_specialize=["num_tiles", "max_polls"])
def collect_kernel(
    result,
    out,
    tiles,
    num_tiles,
    N,
    flags,
    flag_capacity,
    state,
    record,
    max_polls,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SUB_M: tl.constexpr,
):
    """Copy a matrix [M, N] that its owners write tile by tile; the tag of a tile is its flag."""
    epoch = tl.load(state)
    for t in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        entry = tiles + t * 4
        row = tl.load(entry).to(tl.int64)
        rows = tl.load(entry + 1)
        tag = tl.load(entry + 3)
        owner = tag // flag_capacity
        ok = wait_flag(flags + tag, epoch, record, REDUCED, owner, tag % flag_capacity, max_polls)
        n = tl.load(entry + 2) * BLOCK_N + tl.arange(0, BLOCK_N)
        for start in range(0, rows, SUB_M):
            m = start + tl.arange(0, SUB_M)
            place = m[:, None] * N + n[None, :]
            mask = (m[:, None] < rows) & (n[None, :] < N)
            value = tl.where(ok, tl.load(result + row * N + place, mask=mask).to(tl.float32), float("nan"))
            tl.store(out + row * N + place, value.to(out.dtype.element_ty), mask=mask)
