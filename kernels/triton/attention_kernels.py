# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Triton kernels of attention over a table of tiles; `attention.py` has the algebra and launches them.

Note: scores
    With x = q @ k.T of a pair, the score in powers of two is `factor` * cap(x). Without a softcap cap(x) = x and
    factor = scale * log2(e); with the softcap c it is tanh(x * scale / c), and c * log2(e). Masked scores are -inf.
    Forward needs a factor that is not negative: the largest score of a row is then that of its largest cap(x).

Note: masks
    Runs of steps (`Note: runs` of attention_steps.py) that every row sees in full are loaded and multiplied without a
    mask. What lies behind the end of the owned block is loaded as zeros, and not stored. Forward may take narrower
    steps in masked runs, MASKED_STEP: masks take registers, of which wide steps leave none. In masked runs a pair that
    is not seen has the weight 0; a value that is not finite still reaches the rows of its block, since 0 * inf is NaN.

Note: surviving weights
    Dropout keeps the weight of a query and a key by a hash of the seed, batch row, head and both global positions: the
    generator of dropout.py once for each of the four, so that a pair costs one (`attention_keep_mask`).

There are no atomics: a program owns the rows of what it writes, and adds in the order of its runs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastpar.kernels.cross_entropy_row import tanh_and_slope
from fastpar.kernels.grouped_act_kernels import column_halves
from fastpar.kernels.grouped_gemm_tiles import multiply

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
NEVER = tl.constexpr(float("-inf"))
RUN_FIELDS = tl.constexpr(6)
BLOCK_FIELDS = tl.constexpr(4)
GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)


# ---- device functions ------------------------------------------------------------------------------------------------


@triton.jit
def load_rows(rows, start, count, limit, DIM: tl.constexpr, BLOCK: tl.constexpr, CHECKED: tl.constexpr):
    """rows[start + count] as [len(count), BLOCK]; zeros past DIM and, if CHECKED, from row `limit` on."""
    x, stride = rows
    d = tl.arange(0, BLOCK)
    pointers = x + tl.cast(start, tl.int64) * stride + (count[:, None] * stride + d[None, :])
    if CHECKED and DIM == BLOCK:
        block = tl.load(pointers, mask=(start + count < limit)[:, None], other=0.0)
    elif CHECKED:
        block = tl.load(pointers, mask=(start + count < limit)[:, None] & (d < DIM)[None, :], other=0.0)
    elif DIM == BLOCK:
        block = tl.load(pointers)
    else:
        block = tl.load(pointers, mask=(d < DIM)[None, :], other=0.0)
    return block


@triton.jit
def store_rows(x, rows, row, limit, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Into x, dense rows of DIM."""
    d = tl.arange(0, BLOCK)
    mask = (row < limit)[:, None] & (d < DIM)[None, :]
    tl.store(x + row.to(tl.int64)[:, None] * DIM + d[None, :], rows.to(x.dtype.element_ty), mask=mask)


@triton.jit
def store_grads(x, rows, row, limit, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """The same of gradients, those of 16 bits by parts of the columns: rows change places between threads before they
    are stored, and whole ones spill. Of 128 columns halves take fewest registers, of others quarters."""
    if x.dtype.element_ty == tl.float32:
        store_rows(x, rows, row, limit, DIM, BLOCK)
    else:
        left, right = column_halves(rows)
        if BLOCK == 128:
            store_columns(x, left, row, limit, 0, DIM)
            store_columns(x, right, row, limit, 64, DIM)
        else:
            first, second = column_halves(left)
            third, fourth = column_halves(right)
            store_columns(x, first, row, limit, 0, DIM)
            store_columns(x, second, row, limit, BLOCK // 4, DIM)
            store_columns(x, third, row, limit, BLOCK // 2, DIM)
            store_columns(x, fourth, row, limit, 3 * (BLOCK // 4), DIM)


@triton.jit
def store_columns(x, columns, row, limit, FIRST: tl.constexpr, DIM: tl.constexpr):
    """Into x from column FIRST on."""
    d = FIRST + tl.arange(0, columns.shape[1])
    mask = (row < limit)[:, None] & (d < DIM)[None, :]
    tl.store(x + row.to(tl.int64)[:, None] * DIM + d[None, :], columns.to(x.dtype.element_ty), mask=mask)


@triton.jit
def cap_and_slope(x, inner, SOFTCAP: tl.constexpr):
    """cap(x) of `Note: scores`; with a softcap also d cap / d(inner * x)."""
    if SOFTCAP:
        capped, slope = tanh_and_slope(x * inner)
    else:
        capped, slope = x, x
    return capped, slope


@triton.jit
def seen(row, column, run):
    """bool [rows, columns]: which pairs of a masked run are visible, by one comparison a pair."""
    _, end, low, high, first, last = run
    lower, upper = row + low, tl.minimum(row + high, end - 1)
    width = tl.where((row >= first) & (row < last), tl.maximum(upper - lower + 1, 0), 0).to(tl.uint32)
    return (column[None, :] - lower[:, None]).to(tl.uint32) < width[:, None]


@triton.jit
def load_block(blocks, batch_stride, batch):
    """(block, whole, masked, end) of the program: `Note: runs`."""
    entry = blocks + batch * batch_stride + tl.program_id(0) * BLOCK_FIELDS
    return tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)


@triton.jit
def load_run(runs, number):
    run = runs + tl.cast(number, tl.int64) * RUN_FIELDS
    begin, end, low = tl.load(run), tl.load(run + 1), tl.load(run + 2)
    return begin, end, low, tl.load(run + 3), tl.load(run + 4), tl.load(run + 5)


@triton.jit
def head_of(x, strides, batch, head):
    """(pointer to the rows of a head, distance of its rows)."""
    return x + batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1], strides[2]


@triton.jit
def load_lse(lse, row, limit):
    """lse in powers of two; inf for rows that see nothing and that are none: all their weights are then 0."""
    value = tl.load(lse + row, mask=row < limit, other=float("inf"))
    return tl.where(value == NEVER, float("inf"), value * LOG2E)


@triton.jit
def split_mix(z):
    """The finalizer of SplitMix64, on uint64."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def mix(seed, index):
    """uint64: SplitMix64 of a seed and an index, which are broadcast."""
    return split_mix(seed + (index + 1).to(tl.uint64) * GOLDEN)


@triton.jit
def load_positions(positions, index, limit):
    """int64: global positions; without a table they are the local numbers."""
    if positions is None:  # noqa: SIM108  (no load is compiled then)
        place = index.to(tl.int64)
    else:
        place = tl.load(positions + index, mask=index < limit, other=0)
    return place


@triton.jit
def hash_queries(dropout, batch, head, row, limit):
    """uint64, like `row`: the hash of `Note: surviving weights` up to the query."""
    positions, _, seed, first_batch, first_head, _, _ = dropout
    of_batch = mix(tl.cast(seed, tl.int64).to(tl.uint64), batch.to(tl.int64) + first_batch)
    return mix(mix(of_batch, head.to(tl.int64) + first_head), load_positions(positions, row, limit))


@triton.jit
def survives(dropout, query_hash, column, limit):
    """bool: the whole hash of pairs; `query_hash` and the keys' numbers are broadcast."""
    _, positions, _, _, _, threshold, _ = dropout
    z = mix(query_hash, load_positions(positions, column, limit))
    return (z >> 40).to(tl.int32) >= threshold


# ---- forward ---------------------------------------------------------------------------------------------------------


@triton.jit
def forward_run(
    state, q, keys, values, row, run, scores, dropout, query_hash, num_keys,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr, MASKED: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """(sum of weights * v, largest score, sum of weights) of the rows after the keys of one run."""
    acc, top, total = state
    factor, inner = scores
    n = tl.arange(0, BLOCK_N)
    for start in range(run[0], run[1], BLOCK_N):
        k = load_rows(keys, start, n, run[1], HEAD_DIM, BLOCK_D, MASKED)
        x = multiply(q, tl.trans(k), tl.zeros((q.shape[0], BLOCK_N), tl.float32), PRECISION)
        x, _ = cap_and_slope(x, inner, SOFTCAP)
        if MASKED:
            x = tl.where(seen(row, start + n, run), x * factor, NEVER)
            new_top = tl.maximum(top, tl.max(x, 1))
            base = tl.where(new_top == NEVER, 0.0, new_top)
            weight = tl.exp2(x - base[:, None])
        else:
            new_top = tl.maximum(top, tl.max(x, 1) * factor)
            base = new_top
            weight = tl.exp2(x * factor - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(weight, 1)
        if DROPOUT:
            weight = tl.where(survives(dropout, query_hash[:, None], (start + n)[None, :], num_keys), weight, 0.0)
        v = load_rows(values, start, n, run[1], VALUE_DIM, BLOCK_DV, MASKED)
        acc = multiply(weight.to(v.dtype), v, acc * shrink[:, None], PRECISION)
        top = new_top
    return acc, top, total


@triton.jit(do_not_specialize=["group", "num_queries", "num_keys", "batch_stride"])
def attention_forward_kernel(
    q, k, v, q_strides, k_strides, v_strides, out, lse, blocks, runs, batch_stride, group, num_queries, num_keys,
    scores, dropout,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MASKED_STEP: tl.constexpr, SOFTCAP: tl.constexpr,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out and lse of one block of queries of one head; programs (block, head, batch row)."""
    head, batch = tl.program_id(1), tl.program_id(2)
    block, whole, masked, end = load_block(blocks, batch_stride, batch)
    m = tl.arange(0, BLOCK_M)
    row = block * BLOCK_M + m
    queries = head_of(q, q_strides, batch, head)
    keys = head_of(k, k_strides, batch, head // group)
    values = head_of(v, v_strides, batch, head // group)
    q_block = load_rows(queries, block * BLOCK_M, m, num_queries, HEAD_DIM, BLOCK_D, True)
    query_hash = row
    if DROPOUT:
        query_hash = hash_queries(dropout, batch, head, row, num_queries)
    top = tl.full((BLOCK_M,), NEVER, tl.float32)
    state = (tl.zeros((BLOCK_M, BLOCK_DV), tl.float32), top, tl.zeros((BLOCK_M,), tl.float32))
    for number in range(whole, masked):
        state = forward_run(
            state, q_block, keys, values, row, load_run(runs, number), scores, dropout, query_hash, num_keys,
            HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, BLOCK_N, False, SOFTCAP, DROPOUT, PRECISION,
        )  # fmt: skip
    for number in range(masked, end):
        state = forward_run(
            state, q_block, keys, values, row, load_run(runs, number), scores, dropout, query_hash, num_keys,
            HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, MASKED_STEP, True, SOFTCAP, DROPOUT, PRECISION,
        )  # fmt: skip
    acc, top, total = state
    place = (batch * tl.num_programs(1) + head).to(tl.int64) * num_queries
    is_empty = (top == NEVER) & (total == 0.0)  # the top leaves out NaN: where all scores are, the total is as well
    total = tl.where(is_empty, 1.0, total)
    tl.store(lse + place + row, (top + tl.log2(total)) * LN2, mask=row < num_queries)
    share = 1.0 / total
    if DROPOUT:
        share *= dropout[6]
    store_rows(out + place * VALUE_DIM, acc * share[:, None], row, num_queries, VALUE_DIM, BLOCK_DV)


# ---- backward --------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["num_rows"])
def row_delta_kernel(
    dout, out, dlse, dout_strides, out_strides, dlse_strides, delta, num_rows, DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(dout * out) - dlse of BLOCK_M rows of one head; programs (rows, head, batch row).

    dout [[1, 2]], out [[3, 4]], dlse [5]: delta [6].
    """
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D).to(tl.int64)
    is_row = row < num_rows
    inside = is_row[:, None] & (d < DIM)[None, :]
    dout += batch * dout_strides[0] + head * dout_strides[1]
    out += batch * out_strides[0] + head * out_strides[1]
    grad = tl.load(dout + (row[:, None] * dout_strides[2] + d[None, :] * dout_strides[3]), mask=inside, other=0.0)
    value = tl.load(out + (row[:, None] * out_strides[2] + d[None, :] * out_strides[3]), mask=inside, other=0.0)
    total = tl.sum(grad.to(tl.float32) * value.to(tl.float32), 1)
    if dlse is not None:
        at = dlse + (batch * dlse_strides[0] + head * dlse_strides[1] + row * dlse_strides[2])
        total -= tl.load(at, mask=is_row, other=0.0).to(tl.float32)
    tl.store(delta + (batch * tl.num_programs(1) + head) * num_rows + row, total, mask=is_row)


@triton.jit
def score_grad(x, lse, dp, delta, visible, alive, scores, MASKED: tl.constexpr, SOFTCAP: tl.constexpr):
    """(P, dS) of the algebra in attention.py, of blocks either way round; lse and delta are broadcast.

    `alive` is 1 / (1 - p) times what survives, or None without dropout.
    """
    factor, inner = scores
    x, slope = cap_and_slope(x, inner, SOFTCAP)
    x = x * factor - lse
    if MASKED:
        x = tl.where(visible, x, NEVER)
    weight = tl.exp2(x)
    if alive is not None:
        dp = dp * alive
    grad = weight * (dp - delta)
    if SOFTCAP:
        grad *= slope
    if alive is not None:
        weight = weight * alive
    return weight, grad


@triton.jit
def dq_run(
    dq, q, dout, keys, values, lse, delta, row, run, scores, dropout, query_hash, num_keys,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr, MASKED: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dq / scale of the rows after the keys of one run."""
    n = tl.arange(0, BLOCK_N)
    zeros = tl.zeros((q.shape[0], BLOCK_N), tl.float32)
    for start in range(run[0], run[1], BLOCK_N):
        k = load_rows(keys, start, n, run[1], HEAD_DIM, BLOCK_D, MASKED)
        v = load_rows(values, start, n, run[1], VALUE_DIM, BLOCK_DV, MASKED)
        x = multiply(q, tl.trans(k), zeros, PRECISION)
        dp = multiply(dout, tl.trans(v), zeros, PRECISION)
        visible, alive = None, None
        if MASKED:
            visible = seen(row, start + n, run)
        if DROPOUT:
            alive = tl.where(survives(dropout, query_hash[:, None], (start + n)[None, :], num_keys), dropout[6], 0.0)
        _, grad = score_grad(x, lse[:, None], dp, delta[:, None], visible, alive, scores, MASKED, SOFTCAP)
        dq = multiply(grad.to(k.dtype), k, dq, PRECISION)
    return dq


@triton.jit(do_not_specialize=["group", "num_queries", "num_keys", "batch_stride"])
def attention_dq_kernel(
    dout, q, k, v, dout_strides, q_strides, k_strides, v_strides, lse, delta, dq, blocks, runs, batch_stride, group,
    num_queries, num_keys, scores, scale, dropout,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dq of one block of queries of one head; programs (block, head, batch row)."""
    head, batch = tl.program_id(1), tl.program_id(2)
    block, whole, masked, end = load_block(blocks, batch_stride, batch)
    m = tl.arange(0, BLOCK_M)
    row = block * BLOCK_M + m
    keys = head_of(k, k_strides, batch, head // group)
    values = head_of(v, v_strides, batch, head // group)
    queries, grads = head_of(q, q_strides, batch, head), head_of(dout, dout_strides, batch, head)
    q_block = load_rows(queries, block * BLOCK_M, m, num_queries, HEAD_DIM, BLOCK_D, True)
    dout_block = load_rows(grads, block * BLOCK_M, m, num_queries, VALUE_DIM, BLOCK_DV, True).to(q_block.dtype)
    query_hash = row
    if DROPOUT:
        query_hash = hash_queries(dropout, batch, head, row, num_queries)
    place = (batch * tl.num_programs(1) + head).to(tl.int64) * num_queries
    row_lse = load_lse(lse + place, row, num_queries)
    row_delta = tl.load(delta + place + row, mask=row < num_queries, other=0.0)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for number in range(whole, masked):
        acc = dq_run(
            acc, q_block, dout_block, keys, values, row_lse, row_delta, row, load_run(runs, number), scores, dropout,
            query_hash, num_keys, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, BLOCK_N, False, SOFTCAP, DROPOUT, PRECISION,
        )  # fmt: skip
    for number in range(masked, end):
        acc = dq_run(
            acc, q_block, dout_block, keys, values, row_lse, row_delta, row, load_run(runs, number), scores, dropout,
            query_hash, num_keys, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, BLOCK_N, True, SOFTCAP, DROPOUT, PRECISION,
        )  # fmt: skip
    store_grads(dq + place * HEAD_DIM, acc * scale, row, num_queries, HEAD_DIM, BLOCK_D)


@triton.jit
def dkv_run(
    state, k, v, queries, grads, lse, delta, column, run, scores, dropout, batch, head, num_queries, num_keys,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, MASKED: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """(dk / scale, dv) of the keys `column` after the queries of one run of one head. Blocks are [keys, queries]."""
    dk, dv = state
    m = tl.arange(0, BLOCK_M)
    zeros = tl.zeros((k.shape[0], BLOCK_M), tl.float32)
    for start in range(run[0], run[1], BLOCK_M):
        row = start + m
        q = load_rows(queries, start, m, run[1], HEAD_DIM, BLOCK_D, MASKED)
        dout = load_rows(grads, start, m, run[1], VALUE_DIM, BLOCK_DV, MASKED).to(q.dtype)
        row_lse = load_lse(lse, row, run[1])
        row_delta = tl.load(delta + row, mask=row < run[1], other=0.0)
        x = multiply(k, tl.trans(q), zeros, PRECISION)
        dp = multiply(v, tl.trans(dout), zeros, PRECISION)
        visible, alive = None, None
        if MASKED:
            visible = seen(column, row, run)
        if DROPOUT:
            query_hash = hash_queries(dropout, batch, head, row, num_queries)
            alive = tl.where(survives(dropout, query_hash[None, :], column[:, None], num_keys), dropout[6], 0.0)
        weight, grad = score_grad(x, row_lse[None, :], dp, row_delta[None, :], visible, alive, scores, MASKED, SOFTCAP)
        dv = multiply(weight.to(dout.dtype), dout, dv, PRECISION)
        dk = multiply(grad.to(q.dtype), q, dk, PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=["group", "num_queries", "num_keys", "batch_stride"])
def attention_dkv_kernel(
    dout, q, k, v, dout_strides, q_strides, k_strides, v_strides, lse, delta, dk, dv, blocks, runs, batch_stride,
    group, num_queries, num_keys, scores, scale, dropout,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of one block of keys of one key head, summed over its `group` of query heads; programs (block, key
    head, batch row)."""
    key_head, batch = tl.program_id(1), tl.program_id(2)
    block, whole, masked, end = load_block(blocks, batch_stride, batch)
    n = tl.arange(0, BLOCK_N)
    column = block * BLOCK_N + n
    keys, values = head_of(k, k_strides, batch, key_head), head_of(v, v_strides, batch, key_head)
    k_block = load_rows(keys, block * BLOCK_N, n, num_keys, HEAD_DIM, BLOCK_D, True)
    v_block = load_rows(values, block * BLOCK_N, n, num_keys, VALUE_DIM, BLOCK_DV, True)
    state = (tl.zeros((BLOCK_N, BLOCK_D), tl.float32), tl.zeros((BLOCK_N, BLOCK_DV), tl.float32))
    for member in range(0, group):
        head = key_head * group + member
        queries, grads = head_of(q, q_strides, batch, head), head_of(dout, dout_strides, batch, head)
        place = (batch * tl.num_programs(1) * group + head).to(tl.int64) * num_queries
        for number in range(whole, masked):
            state = dkv_run(
                state, k_block, v_block, queries, grads, lse + place, delta + place, column, load_run(runs, number),
                scores, dropout, batch, head, num_queries, num_keys,
                HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, BLOCK_M, False, SOFTCAP, DROPOUT, PRECISION,
            )  # fmt: skip
        for number in range(masked, end):
            state = dkv_run(
                state, k_block, v_block, queries, grads, lse + place, delta + place, column, load_run(runs, number),
                scores, dropout, batch, head, num_queries, num_keys,
                HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, BLOCK_M, True, SOFTCAP, DROPOUT, PRECISION,
            )  # fmt: skip
    dk_block, dv_block = state
    place = (batch * tl.num_programs(1) + key_head).to(tl.int64) * num_keys
    store_grads(dk + place * HEAD_DIM, dk_block * scale, column, num_keys, HEAD_DIM, BLOCK_D)
    store_grads(dv + place * VALUE_DIM, dv_block, column, num_keys, VALUE_DIM, BLOCK_DV)
