"""The kernels behind softmax, log-probabilities and entropy of a split vocabulary, one program per row;
fastpar.kernels.vocab_softmax launches them.

How a row is walked, `Note: base logits`, and how lse is split into two floats: cross_entropy_row.py. How shapes arrive:
cross_entropy_kernels.py. Vocabulary and strides of all tensors are in units of one ALIGN.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastpar.kernels.cross_entropy_kernels import row_offset, target_column, write_header
from fastpar.kernels.cross_entropy_row import (
    IDENTITY,
    LOG2E,
    SOFTCAP,
    base_logits,
    join_lse,
    row_statistics,
    split_lse,
    written_maximum,
    zero_row,
)

LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-1.0e4)  # in place of a logarithm of -inf: its exponential is 0 as well, and 0 times it is 0
SUMS = tl.constexpr(3)  # columns of the statistics before those of the ids


# ---- device functions ------------------------------------------------------------------------------------------------


@triton.jit
def load_block(
    row: tl.tensor,
    start: tl.tensor,
    vocab: tl.tensor,
    MASKED: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    EVICT: tl.constexpr,
) -> tl.tensor:
    """(columns, which of them exist, values) of the block [start, start + K * WIDTH); 0 for those that do not."""
    cols = start + tl.arange(0, K)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    valid = cols < vocab
    if MASKED:
        x = tl.load(row + cols, mask=valid, other=0.0, eviction_policy=EVICT)
    else:
        x = tl.load(row + cols, eviction_policy=EVICT)
    return cols, valid, x


@triton.jit
def store_block(out: tl.tensor, cols: tl.tensor, valid: tl.tensor, value: tl.tensor, MASKED: tl.constexpr) -> None:
    value = value.to(out.dtype.element_ty)
    if MASKED:
        tl.store(out + cols, value, mask=valid, eviction_policy="evict_first")
    else:
        tl.store(out + cols, value, eviction_policy="evict_first")


@triton.jit
def base_reference(
    lse: tl.tensor,
    row: tl.tensor,
    vocab: tl.tensor,
    inner: tl.tensor,
    outer: tl.tensor,
    factor: tl.tensor,
    TRANSFORM: tl.constexpr,
    WIDTH: tl.constexpr,
    COMPUTE: tl.constexpr,
) -> tl.tensor:
    """(high, low, gain) so that lse = outer (high + low), and p = exp2((b - high) factor) gain."""
    high, low = split_lse(lse, row, vocab, inner, outer, TRANSFORM, WIDTH, COMPUTE)
    return high, low, tl.exp2(-low * factor)


@triton.jit
def rescaled(s: tl.tensor, e: tl.tensor, shift: tl.tensor) -> tl.tensor:
    """(sum 2^t, sum 2^t t) after `shift` has been added to every t."""
    shift = tl.maximum(shift, LOWEST)
    scale = tl.exp2(shift)
    return s * scale, scale * (e + shift * s)


# ---- statistics ------------------------------------------------------------------------------------------------------


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


# ---- softmax and log-softmax -----------------------------------------------------------------------------------------


@triton.jit
def normalize_block(
    row: tl.tensor,
    out: tl.tensor,
    start: tl.tensor,
    vocab: tl.tensor,
    high: tl.tensor,
    scale: tl.tensor,
    rest: tl.tensor,
    inner: tl.tensor,
    MASKED: tl.constexpr,
    LOG: tl.constexpr,
    TRANSFORM: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    cols, valid, x = load_block(row, start, vocab, MASKED, K, WIDTH, "evict_first")
    b, _ = base_logits(x, inner, TRANSFORM, high.dtype)
    value = (b - high) * scale
    value = value - rest if LOG else tl.exp2(value) * rest
    store_block(out, cols, valid, value, MASKED)


@triton.jit
def normalize_kernel(
    logits: tl.tensor,
    lse: tl.tensor,
    out: tl.tensor,
    inner_rows: tl.tensor,
    outer_stride: tl.tensor,
    inner_stride: tl.tensor,
    vocab: tl.tensor,
    inner: tl.float64,
    outer: tl.float64,
    LOG: tl.constexpr,
    TRANSFORM: tl.constexpr,
    COMPUTE: tl.constexpr,
    ALIGN: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """exp(z - lse), or z - lse with LOG, of one row; out is dense. A row [0, log 3] gives [1/4, 3/4]."""
    BLOCK: tl.constexpr = K * WIDTH
    n = tl.program_id(0)
    vocab = vocab * ALIGN
    row = logits + row_offset(n, inner_rows, outer_stride, inner_stride, ALIGN)
    out += n.to(tl.int64) * vocab
    scale = tl.full([], outer if LOG else outer * LOG2E, COMPUTE)
    high, low, gain = base_reference(
        tl.load(lse + n), row, vocab, inner, outer, scale, TRANSFORM, WIDTH, COMPUTE
    )  # fmt: skip
    rest = low * scale if LOG else gain
    whole = vocab // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        normalize_block(row, out, start, vocab, high, scale, rest, inner, False, LOG, TRANSFORM, K, WIDTH)
    if whole < vocab:
        normalize_block(row, out, whole, vocab, high, scale, rest, inner, True, LOG, TRANSFORM, K, WIDTH)


@triton.jit
def dot_block(
    total: tl.tensor,
    row: tl.tensor,
    grad: tl.tensor,
    start: tl.tensor,
    vocab: tl.tensor,
    high: tl.tensor,
    factor: tl.tensor,
    inner: tl.tensor,
    MASKED: tl.constexpr,
    LOG: tl.constexpr,
    TRANSFORM: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
) -> tl.tensor:
    _, valid, value = load_block(grad, start, vocab, MASKED, K, WIDTH, "")
    value = value.to(total.dtype)
    if not LOG:
        _, _, x = load_block(row, start, vocab, MASKED, K, WIDTH, "")
        b, _ = base_logits(x, inner, TRANSFORM, total.dtype)
        value *= tl.exp2((b - high) * factor)
        if MASKED:
            value = tl.where(valid, value, 0.0)
    return total + tl.sum(value, axis=0)


@triton.jit
def row_dot(
    row: tl.tensor,
    grad: tl.tensor,
    vocab: tl.tensor,
    high: tl.tensor,
    gain: tl.tensor,
    factor: tl.tensor,
    inner: tl.tensor,
    LOG: tl.constexpr,
    TRANSFORM: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
) -> tl.tensor:
    """sum p dy, or sum dy with LOG, of one row, in double. LOG does not read the logits."""
    BLOCK: tl.constexpr = K * WIDTH
    total = tl.zeros([WIDTH], high.dtype)
    whole = vocab // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        total = dot_block(total, row, grad, start, vocab, high, factor, inner, False, LOG, TRANSFORM, K, WIDTH)
    if whole < vocab:
        total = dot_block(total, row, grad, whole, vocab, high, factor, inner, True, LOG, TRANSFORM, K, WIDTH)
    value = tl.sum(total.to(tl.float64), axis=0)
    return value if LOG else value * gain.to(tl.float64)


@triton.jit
def dot_kernel(
    logits: tl.tensor,
    lse: tl.tensor,
    grad_out: tl.tensor,
    dot: tl.tensor,
    inner_rows: tl.tensor,
    outer_stride: tl.tensor,
    inner_stride: tl.tensor,
    grad_outer_stride: tl.tensor,
    grad_inner_stride: tl.tensor,
    vocab: tl.tensor,
    inner: tl.float64,
    outer: tl.float64,
    LOG: tl.constexpr,
    TRANSFORM: tl.constexpr,
    COMPUTE: tl.constexpr,
    ALIGN: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """sum p dy of one row, or sum dy with LOG. A row [0, log 3] with dy [1, 0] gives 1/4, or 1."""
    n = tl.program_id(0)
    row = logits + row_offset(n, inner_rows, outer_stride, inner_stride, ALIGN)
    grad = grad_out + row_offset(n, inner_rows, grad_outer_stride, grad_inner_stride, ALIGN)
    factor = tl.full([], outer * LOG2E, COMPUTE)
    vocab = vocab * ALIGN
    high, _, gain = base_reference(
        tl.load(lse + n), row, vocab, inner, outer, factor, TRANSFORM, WIDTH, COMPUTE
    )  # fmt: skip
    tl.store(dot + n, row_dot(row, grad, vocab, high, gain, factor, inner, LOG, TRANSFORM, K, WIDTH))


@triton.jit
def softmax_backward_block(
    row: tl.tensor,
    grad: tl.tensor,
    out: tl.tensor,
    start: tl.tensor,
    vocab: tl.tensor,
    high: tl.tensor,
    gain: tl.tensor,
    factor: tl.tensor,
    total: tl.tensor,
    scale: tl.tensor,
    inner: tl.tensor,
    MASKED: tl.constexpr,
    LOG: tl.constexpr,
    TRANSFORM: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    cols, valid, x = load_block(row, start, vocab, MASKED, K, WIDTH, "evict_first")
    _, _, dy = load_block(grad, start, vocab, MASKED, K, WIDTH, "evict_first")
    b, slope = base_logits(x, inner, TRANSFORM, high.dtype)
    p = tl.exp2((b - high) * factor) * gain
    dy = dy.to(high.dtype)
    dz = dy - p * total if LOG else p * (dy - total)
    if TRANSFORM != IDENTITY:
        dz *= scale
    if TRANSFORM == SOFTCAP:
        dz *= slope
    store_block(out, cols, valid, dz, MASKED)


@triton.jit
def softmax_backward_kernel(
    logits: tl.tensor,
    lse: tl.tensor,
    grad_out: tl.tensor,
    dot: tl.tensor,
    out: tl.tensor,
    inner_rows: tl.tensor,
    outer_stride: tl.tensor,
    inner_stride: tl.tensor,
    grad_outer_stride: tl.tensor,
    grad_inner_stride: tl.tensor,
    vocab: tl.tensor,
    inner: tl.float64,
    outer: tl.float64,
    logit_scale: tl.float64,
    LOG: tl.constexpr,
    TRANSFORM: tl.constexpr,
    COMPUTE: tl.constexpr,
    ALIGN: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """The gradient of one row; out is dense. dot is the sum over all ranks, or None for a row that is whole here: the
    row is then read twice, the second time from the L2 cache.

    A row [0, log 3] with dy [1, 0] gives [3/16, -3/16], or [3/4, -3/4] with LOG.
    """
    BLOCK: tl.constexpr = K * WIDTH
    n = tl.program_id(0)
    vocab = vocab * ALIGN
    row = logits + row_offset(n, inner_rows, outer_stride, inner_stride, ALIGN)
    grad = grad_out + row_offset(n, inner_rows, grad_outer_stride, grad_inner_stride, ALIGN)
    out += n.to(tl.int64) * vocab
    factor = tl.full([], outer * LOG2E, COMPUTE)
    high, _, gain = base_reference(
        tl.load(lse + n), row, vocab, inner, outer, factor, TRANSFORM, WIDTH, COMPUTE
    )  # fmt: skip
    if dot is None:
        total = row_dot(row, grad, vocab, high, gain, factor, inner, LOG, TRANSFORM, K, WIDTH).to(COMPUTE)
    else:
        total = tl.load(dot + n).to(COMPUTE)
    scale = tl.full([], logit_scale, COMPUTE)
    whole = vocab // BLOCK
    # From the end, which was read last.
    if whole * BLOCK < vocab:
        softmax_backward_block(
            row, grad, out, whole * BLOCK, vocab, high, gain, factor, total, scale, inner,
            True, LOG, TRANSFORM, K, WIDTH,
        )  # fmt: skip
    for done in range(0, whole):
        softmax_backward_block(
            row, grad, out, (whole - 1 - done) * BLOCK, vocab, high, gain, factor, total, scale, inner,
            False, LOG, TRANSFORM, K, WIDTH,
        )  # fmt: skip


# ---- log-probabilities and entropy -----------------------------------------------------------------------------------


@triton.jit
def load_ids(
    ids: tl.tensor,
    grad: tl.tensor,
    n: tl.tensor,
    first: tl.tensor,
    num_ids: tl.tensor,
    row_stride: tl.tensor,
    id_stride: tl.tensor,
    ignore_index: tl.tensor,
    IDS: tl.constexpr,
) -> tl.tensor:
    """(ids, upstream gradients in double) of up to IDS ids of row n; an ignored id and one past the end have 0."""
    k = first + tl.arange(0, IDS)
    n = n.to(tl.int64)
    # tl.where, since `other` would have to be of the pointer's dtype.
    id = tl.load(ids + n * num_ids + k, mask=k < num_ids, other=0).to(tl.int64)
    id = tl.where(k < num_ids, id, ignore_index)
    g = tl.load(grad + n * row_stride + k.to(tl.int64) * id_stride, mask=k < num_ids, other=0.0).to(tl.float64)
    return id, tl.where(id == ignore_index, 0.0, g)


@triton.jit
def log_prob_backward_block(
    row: tl.tensor,
    out: tl.tensor,
    start: tl.tensor,
    vocab: tl.tensor,
    high: tl.tensor,
    factor: tl.tensor,
    scale: tl.tensor,
    slant: tl.tensor,
    level: tl.tensor,
    inner: tl.tensor,
    MASKED: tl.constexpr,
    ENTROPY: tl.constexpr,
    TRANSFORM: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """dx = p (slant log p + level), times the soft cap's slope."""
    cols, valid, x = load_block(row, start, vocab, MASKED, K, WIDTH, "evict_first")
    b, slope = base_logits(x, inner, TRANSFORM, high.dtype)
    below = b - high
    dz = tl.exp2(below * factor)
    if ENTROPY:
        dz *= slant * tl.maximum(below * scale, LOWEST) + level
    else:
        dz *= level
    if TRANSFORM == SOFTCAP:
        dz *= slope
    store_block(out, cols, valid, dz, MASKED)


@triton.jit
def write_ids(
    row: tl.tensor,
    out: tl.tensor,
    ids: tl.tensor,
    grad: tl.tensor,
    n: tl.tensor,
    num_ids: tl.tensor,
    row_stride: tl.tensor,
    id_stride: tl.tensor,
    vocab: tl.tensor,
    vocab_start: tl.tensor,
    ignore_index: tl.tensor,
    high: tl.tensor,
    low: tl.tensor,
    slant: tl.tensor,
    level: tl.tensor,
    inner: tl.tensor,
    outer: tl.tensor,
    logit_scale: tl.tensor,
    TRANSFORM: tl.constexpr,
    COMPUTE: tl.constexpr,
    IDS: tl.constexpr,
) -> None:
    """The entries of the ids, in double: g - p sum g would cancel as p nears 1.

    An id that occurs twice gets the sum of its gradients, stored twice with the same bits.
    """
    for first in range(0, num_ids, IDS):
        id, _ = load_ids(ids, grad, n, first, num_ids, row_stride, id_stride, ignore_index, IDS)
        own = tl.zeros([IDS], tl.float64)
        for other in range(0, num_ids, IDS):
            id2, g2 = load_ids(ids, grad, n, other, num_ids, row_stride, id_stride, ignore_index, IDS)
            own += tl.sum(tl.where(id[:, None] == id2[None, :], g2[None, :], 0.0), axis=1)
        column, _ = target_column(id, vocab, vocab_start, vocab_start + vocab, ignore_index)
        x = tl.load(row + column, mask=column >= 0, other=0.0)
        b, slope = base_logits(x, inner, TRANSFORM, COMPUTE)
        log_p = ((b.to(tl.float64) - high.to(tl.float64)) - low.to(tl.float64)) * outer
        dz = own + tl.exp(log_p) * (slant * tl.maximum(log_p, LOWEST) + level)
        dz *= logit_scale
        if TRANSFORM == SOFTCAP:
            dz *= slope.to(tl.float64)
        # Not from double to 16 bits at once, which Triton's interpreter cannot.
        tl.store(out + column, dz.to(COMPUTE).to(out.dtype.element_ty), mask=column >= 0)


@triton.jit(do_not_specialize=["num_ids", "vocab_start", "ignore_index"])
def log_prob_backward_kernel(
    logits: tl.tensor,
    lse: tl.tensor,
    ids: tl.tensor,
    grad_log_prob: tl.tensor,
    entropy: tl.tensor,
    grad_entropy: tl.tensor,
    out: tl.tensor,
    num_ids: tl.tensor,
    grad_row_stride: tl.tensor,
    grad_id_stride: tl.tensor,
    grad_entropy_stride: tl.tensor,
    inner_rows: tl.tensor,
    outer_stride: tl.tensor,
    inner_stride: tl.tensor,
    vocab: tl.tensor,
    vocab_start: tl.tensor,
    ignore_index: tl.tensor,
    inner: tl.float64,
    outer: tl.float64,
    logit_scale: tl.float64,
    TRANSFORM: tl.constexpr,
    COMPUTE: tl.constexpr,
    ALIGN: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    IDS: tl.constexpr,
) -> None:
    """The gradient of one row, read once and written once; out is dense. Zeros, and nothing is read, where all upstream
    gradients are 0.

    A row [0, log 3] with id 1 and dlog_prob 1 gives [-1/4, 1/4].
    """
    BLOCK: tl.constexpr = K * WIDTH
    n = tl.program_id(0)
    vocab = vocab * ALIGN
    row = logits + row_offset(n, inner_rows, outer_stride, inner_stride, ALIGN)
    out += n.to(tl.int64) * vocab
    slant = tl.full([], 0.0, tl.float64)  # dz = p (slant log p + level), and what the ids add
    level = tl.full([], 0.0, tl.float64)
    used = tl.full([], 0, tl.int32)
    if grad_entropy is not None:
        slant -= tl.load(grad_entropy + n.to(tl.int64) * grad_entropy_stride).to(tl.float64)
        level += slant * tl.load(entropy + n)
        used = (slant != 0.0).to(tl.int32)
    if grad_log_prob is not None:
        for first in range(0, num_ids, IDS):
            _, g = load_ids(
                ids, grad_log_prob, n, first, num_ids, grad_row_stride, grad_id_stride, ignore_index, IDS
            )  # fmt: skip
            level -= tl.sum(g, axis=0)
            used = tl.maximum(used, tl.max((g != 0.0).to(tl.int32), axis=0))
    if used == 0:
        zero_row(out, vocab, K, WIDTH)
    else:
        row_lse = tl.load(lse + n)
        factor = tl.full([], outer * LOG2E, COMPUTE)
        high, low, gain = base_reference(
            row_lse, row, vocab, inner, outer, factor, TRANSFORM, WIDTH, COMPUTE
        )  # fmt: skip
        scale = tl.full([], outer, COMPUTE)
        common = gain.to(tl.float64) * logit_scale
        block_slant = (slant * common).to(COMPUTE)
        block_level = ((level - slant * low.to(tl.float64) * outer) * common).to(COMPUTE)
        ENTROPY: tl.constexpr = grad_entropy is not None
        whole = vocab // BLOCK * BLOCK
        for start in range(0, whole, BLOCK):
            log_prob_backward_block(
                row, out, start, vocab, high, factor, scale, block_slant, block_level, inner,
                False, ENTROPY, TRANSFORM, K, WIDTH,
            )  # fmt: skip
        if whole < vocab:
            log_prob_backward_block(
                row, out, whole, vocab, high, factor, scale, block_slant, block_level, inner,
                True, ENTROPY, TRANSFORM, K, WIDTH,
            )  # fmt: skip
        if grad_log_prob is not None:
            tl.debug_barrier()  # the whole row has been written
            write_ids(
                row, out, ids, grad_log_prob, n, num_ids, grad_row_stride, grad_id_stride, vocab, vocab_start,
                ignore_index, high, low, slant, level, inner, outer, logit_scale, TRANSFORM, COMPUTE, IDS,
            )  # fmt: skip
