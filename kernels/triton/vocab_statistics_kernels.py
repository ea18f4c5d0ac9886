"""The kernels of the statistics behind softmax, log-probabilities and entropy of a split vocabulary: a shard's, one
program per row, and those of all ranks merged; fastpar.kernels.vocab_softmax launches them.

How rows are walked and shapes arrive: vocab_softmax_kernels.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastpar.kernels.cross_entropy_kernels import row_offset, target_column, write_header
from fastpar.kernels.cross_entropy_row import LOG2E, base_logits, join_lse, row_statistics, written_maximum
from fastpar.kernels.vocab_softmax_kernels import load_block

LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-1.0e4)  # in place of a logarithm of -inf: its exponential is 0 as well, and 0 times it is 0
SUMS = tl.constexpr(3)  # columns of the statistics before those of the ids


@triton.jit
def rescaled(s: tl.tensor, e: tl.tensor, shift: tl.tensor) -> tl.tensor:
    """(sum 2^t, sum 2^t t) after `shift` has been added to every t."""
    shift = tl.maximum(shift, LOWEST)
    scale = tl.exp2(shift)
    return s * scale, scale * (e + shift * s)


@triton.jit
def add_block(
    m: tl.tensor,
    s: tl.tensor,
    e: tl.tensor,
    row: tl.tensor,
    start: tl.tensor,
    vocab: tl.tensor,
    factor: tl.tensor,
    inner: tl.tensor,
    MASKED: tl.constexpr,
    TRANSFORM: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
) -> tl.tensor:
    """(m, s, e), each [WIDTH], with a block added: t = (b - m) factor, s = sum 2^t, e = sum 2^t t."""
    _, valid, x = load_block(row, start, vocab, MASKED, K, WIDTH, "")
    b, _ = base_logits(x, inner, TRANSFORM, m.dtype)
    if MASKED:
        b = tl.where(valid, b, float("-inf"))
    highest = tl.maximum(m, tl.max(b, axis=0))
    # As in cross_entropy_row.add_block: 0 where there is -inf only, and NaN arrives in the sums.
    reference = tl.where(highest == float("-inf"), 0.0, highest)
    s, e = rescaled(s, e, (m - reference) * factor)
    t = (b - reference[None, :]) * factor
    power = tl.exp2(t)
    return highest, s + tl.sum(power, axis=0), e + tl.sum(power * tl.maximum(t, LOWEST), axis=0)


@triton.jit
def row_entropy_statistics(
    row: tl.tensor,
    vocab: tl.tensor,
    inner: tl.tensor,
    outer: tl.tensor,
    TRANSFORM: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    COMPUTE: tl.constexpr,
) -> tl.tensor:
    """(m, s, e): the maximum of b, and in double sum exp(d) and sum exp(d) d, where d = outer (b - m)."""
    BLOCK: tl.constexpr = K * WIDTH
    factor = tl.full([], outer * LOG2E, COMPUTE)
    m = tl.full([WIDTH], float("-inf"), COMPUTE)
    s = tl.zeros([WIDTH], COMPUTE)
    e = tl.zeros([WIDTH], COMPUTE)
    whole = vocab // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        m, s, e = add_block(m, s, e, row, start, vocab, factor, inner, False, TRANSFORM, K, WIDTH)
    if whole < vocab:
        m, s, e = add_block(m, s, e, row, whole, vocab, factor, inner, True, TRANSFORM, K, WIDTH)
    top = tl.max(m, axis=0)
    reference = tl.where(top == float("-inf"), 0.0, top)
    s, e = rescaled(s, e, (m - reference) * factor)
    return top, tl.sum(s.to(tl.float64), axis=0), tl.sum(e.to(tl.float64), axis=0) * LN2


@triton.jit(do_not_specialize=["rows", "num_ids", "vocab_start", "vocab_total", "ignore_index"])
def softmax_stats_kernel(
    logits: tl.tensor,
    ids: tl.tensor,
    stats: tl.tensor,
    rows: tl.tensor,
    num_ids: tl.tensor,
    inner_rows: tl.tensor,
    outer_stride: tl.tensor,
    inner_stride: tl.tensor,
    vocab: tl.tensor,
    vocab_start: tl.tensor,
    vocab_total: tl.tensor,
    ignore_index: tl.tensor,
    inner: tl.float64,
    outer: tl.float64,
    ENTROPY: tl.constexpr,
    TRANSFORM: tl.constexpr,
    ALIGN: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    IDS: tl.constexpr,
) -> None:
    """Statistics [rows + 3, 3 + num_ids] of this shard. Grid: rows + 1.

    A row [0, log 3] with id 1 gives (log 3, 4/3, -log(3)/3, log 3).
    """
    COMPUTE: tl.constexpr = stats.dtype.element_ty
    n = tl.program_id(0)
    vocab = vocab * ALIGN
    columns = SUMS + num_ids
    base = stats + n.to(tl.int64) * columns
    if n == rows:
        SCALE: tl.constexpr = stats.dtype.element_ty.primitive_bitwidth // 32
        write_header(base, vocab, vocab_start, vocab_total, 3 * SUMS * SCALE)
        for first in range(3 * SUMS, 3 * columns, 32):
            position = first + tl.arange(0, 32)
            tl.store(base + position, tl.zeros([32], COMPUTE), mask=position < 3 * columns)
    else:
        row = logits + row_offset(n, inner_rows, outer_stride, inner_stride, ALIGN)
        if ENTROPY:
            m, s, e = row_entropy_statistics(row, vocab, inner, outer, TRANSFORM, K, WIDTH, COMPUTE)
        else:
            m, s, e = row_statistics(
                row, None, None, vocab, inner, outer, False, TRANSFORM, K, WIDTH, COMPUTE, ""
            )  # fmt: skip
        # Of the maximum's product with the scale, m keeps what fits a float; the sums are relative to that.
        high, low = written_maximum(m, outer, COMPUTE)
        gain = tl.exp2(low * LOG2E)
        tl.store(base, high)
        tl.store(base + 1, s.to(COMPUTE) * gain)
        if ENTROPY:
            tl.store(base + 2, (e + s * low.to(tl.float64)).to(COMPUTE) * gain)
        else:
            tl.store(base + 2, 0.0)
        if ids is not None:
            for first in range(0, num_ids, IDS):
                k = first + tl.arange(0, IDS)
                id = tl.load(ids + n.to(tl.int64) * num_ids + k, mask=k < num_ids, other=0).to(tl.int64)
                column, is_outside = target_column(id, vocab, vocab_start, vocab_total, ignore_index)
                x = tl.load(row + column, mask=column >= 0, other=0.0)
                z = (base_logits(x, inner, TRANSFORM, COMPUTE)[0].to(tl.float64) * outer).to(COMPUTE)
                z = tl.where(is_outside, float("nan"), tl.where(column >= 0, z, 0.0))
                tl.store(base + SUMS + k, z, mask=k < num_ids)


@triton.jit(do_not_specialize=["rows", "num_ids", "ranks", "ignore_index"])
def softmax_merge_kernel(
    gathered: tl.tensor,
    ids: tl.tensor,
    lse: tl.tensor,
    entropy: tl.tensor,
    log_prob: tl.tensor,
    rows: tl.tensor,
    num_ids: tl.tensor,
    ranks: tl.tensor,
    rank_stride: tl.tensor,
    ignore_index: tl.tensor,
    BLOCK: tl.constexpr,
    IDS: tl.constexpr,
) -> None:
    """(lse, entropy, log-probabilities) of BLOCK rows from the statistics of all ranks, in rank order and in double.

    Two ranks with (0, 1, 0, 0) and (log 3, 1, 0, log 3), the id being the second one's: lse = log 4, log-probability
    log(3/4), entropy log 4 - 3/4 log 3.
    """
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid = n < rows
    base = gathered + n * (SUMS + num_ids)
    stride = rank_stride + tl.zeros([1], tl.int64)
    maximum = tl.full([BLOCK], float("-inf"), tl.float64)
    for rank in range(0, ranks):
        maximum = tl.maximum(maximum, tl.load(base + rank * stride, mask=valid, other=0.0).to(tl.float64))
    reference = tl.where(maximum == float("-inf"), 0.0, maximum)
    total = tl.zeros([BLOCK], tl.float64)
    weighted = tl.zeros([BLOCK], tl.float64)
    for rank in range(0, ranks):
        part = base + rank * stride
        shift = tl.load(part, mask=valid, other=0.0).to(tl.float64) - reference
        s = tl.load(part + 1, mask=valid, other=1.0).to(tl.float64)
        e = tl.load(part + 2, mask=valid, other=0.0).to(tl.float64)
        scale = tl.exp(shift)
        total += scale * s
        weighted += scale * (e + tl.where(scale == 0.0, 0.0, shift * s))
    log_sum = tl.log(total)
    tl.store(lse + n, join_lse(reference, log_sum, gathered.dtype.element_ty), mask=valid)
    tl.store(entropy + n, log_sum - weighted / total, mask=valid)
    if ids is not None:
        for first in range(0, num_ids, IDS):
            k = first + tl.arange(0, IDS)[None, :]
            exists = valid[:, None] & (k < num_ids)
            picked = tl.zeros([BLOCK, IDS], tl.float64)
            for rank in range(0, ranks):
                z = tl.load((base + rank * stride)[:, None] + SUMS + k, mask=exists, other=0.0)
                picked += z.to(tl.float64)
            position = n[:, None] * num_ids + k
            id = tl.load(ids + position, mask=exists, other=0).to(tl.int64)
            value = (picked - reference[:, None]) - log_sum[:, None]
            value = tl.where(id == ignore_index, 0.0, value)
            tl.store(log_prob + position, value.to(log_prob.dtype.element_ty), mask=exists)
