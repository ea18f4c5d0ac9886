"""The cross-entropy kernels, one program per row; fastpar.kernels.cross_entropy launches them.

Vocabulary and strides arrive in units of ALIGN elements, the largest power of two up to 16 bytes that divides them all:
Triton sees that multiples of ALIGN are aligned, and takes 16 bytes a load where it would only believe multiples of 16.
Row offsets are int64. Options that change what is done per element are compile-time (SMOOTHING, TRANSFORM, a tensor
that is None); their values are doubles at run time, so that a schedule of z_loss or logit_scale compiles nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastpar.kernels.cross_entropy_row import (
    IDENTITY,
    LOG2E,
    SUM_UNIT,
    base_logits,
    join_lse,
    row_statistics,
    split_lse,
    target_gradient,
    two_floats,
    write_row,
    written_maximum,
    zero_row,
)

# ---- device functions ------------------------------------------------------------------------------------------------


@triton.jit
def row_offset(
    row: tl.tensor, inner_rows: tl.tensor, outer_stride: tl.tensor, inner_stride: tl.tensor, ALIGN: tl.constexpr
) -> tl.tensor:
    outer = row // inner_rows
    inner = row - outer * inner_rows
    return (outer.to(tl.int64) * outer_stride + inner.to(tl.int64) * inner_stride) * ALIGN


@triton.jit
def target_column(
    id: tl.tensor, vocab: tl.tensor, vocab_start: tl.tensor, vocab_total: tl.tensor, ignore_index: tl.tensor
) -> tl.tensor:
    """(this shard's column of the target, or -1; whether the id is neither in the vocabulary nor ignored)."""
    counted = id != ignore_index
    column = id - vocab_start
    is_owned = (column >= 0) & (column < vocab) & counted
    return tl.where(is_owned, column, -1).to(tl.int32), ((id < 0) | (id >= vocab_total)) & counted


@triton.jit
def target_weight(weight: tl.tensor, id: tl.tensor, vocab_total: tl.tensor) -> tl.tensor:
    """weight[id] in double; NaN outside the vocabulary."""
    inside = (id >= 0) & (id < vocab_total)
    return tl.load(weight + id, mask=inside, other=float("nan")).to(tl.float64)


@triton.jit
def row_loss(
    maximum: tl.tensor,
    log_sum: tl.tensor,
    nll: tl.tensor,
    weighted_sum: tl.tensor,
    id: tl.tensor,
    weight: tl.tensor,
    weight_sum: tl.tensor,
    vocab_total: tl.tensor,
    ignore_index: tl.tensor,
    label_smoothing: tl.tensor,
    share: tl.tensor,
    z_loss: tl.tensor,
    SMOOTHING: tl.constexpr,
) -> tl.tensor:
    """The loss in double, lse in two parts. nll is lse - z_y, weighted_sum the sum of w z, share is
    label_smoothing / vocab_total. Around the maximum the smoothing's difference is exact for equal logits.
    """
    loss = nll * 0.0
    if label_smoothing < 1.0:
        loss = nll * (1.0 - label_smoothing)
        if weight is not None:
            loss *= target_weight(weight, id, vocab_total)
    if SMOOTHING:
        total = (vocab_total if weight is None else tl.load(weight_sum)) + log_sum * 0.0
        loss += share * ((total * maximum - weighted_sum) + total * log_sum)
    if z_loss > 0.0:
        lse = maximum + log_sum
        loss += z_loss * lse * lse
    return tl.where(id == ignore_index, 0.0, loss)


@triton.jit
def coefficients(
    grad_loss: tl.tensor,
    lse: tl.tensor,
    id: tl.tensor,
    is_outside: tl.tensor,
    weight: tl.tensor,
    weight_sum: tl.tensor,
    vocab_total: tl.tensor,
    ignore_index: tl.tensor,
    label_smoothing: tl.tensor,
    share: tl.tensor,
    z_loss: tl.tensor,
    SMOOTHING: tl.constexpr,
) -> tl.tensor:
    """(gamma, delta, beta) in double, for dz = (gamma + delta) p - beta w, and gamma expm1(log p) at the target.

    gamma is NaN for a target outside the vocabulary.
    """
    is_ignored = id == ignore_index
    g = tl.where(is_ignored, 0.0, grad_loss.to(tl.float64))
    gamma = g * (1.0 - label_smoothing)
    if weight is not None:
        gamma *= tl.where(is_ignored, 0.0, target_weight(weight, id, vocab_total))
    gamma = tl.where(is_outside, float("nan"), gamma)
    beta = g * share
    delta = g * 0.0
    if SMOOTHING:
        delta = beta * (vocab_total if weight is None else tl.load(weight_sum))
    if z_loss > 0.0:
        delta += g * lse * (2.0 * z_loss)
    return gamma, delta, beta


@triton.jit
def write_gradient(
    row: tl.tensor,
    out: tl.tensor,
    weight: tl.tensor,
    vocab: tl.tensor,
    column: tl.tensor,
    b_y: tl.tensor,
    high: tl.tensor,
    low: tl.tensor,
    gamma: tl.tensor,
    delta: tl.tensor,
    beta: tl.tensor,
    inner: tl.tensor,
    outer: tl.tensor,
    logit_scale: tl.tensor,
    SMOOTHING: tl.constexpr,
    TRANSFORM: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    COMPUTE: tl.constexpr,
) -> None:
    """dx of one row, lse = outer (high + low); weight is this shard's part, or None."""
    if TRANSFORM != IDENTITY:
        gamma, delta, beta = gamma * logit_scale, delta * logit_scale, beta * logit_scale
    gamma, delta, beta = gamma.to(COMPUTE), delta.to(COMPUTE), beta.to(COMPUTE)
    beta_w = beta
    if SMOOTHING and weight is not None:
        beta_w *= tl.load(weight + column, mask=column >= 0, other=0.0)
    value = target_gradient(b_y, high, low, gamma, delta, beta_w, outer, COMPUTE)
    write_row(
        row, out, weight, vocab, column, value, high, low, gamma + delta, beta, inner, outer,
        SMOOTHING, TRANSFORM, K, WIDTH, COMPUTE,
    )  # fmt: skip


# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def write_header(
    stats: tl.tensor, vocab: tl.tensor, vocab_start: tl.tensor, vocab_total: tl.tensor, WORDS: tl.constexpr
) -> None:
    """The last three rows of the statistics: (vocab, start, total, 0 for no bad row) as int64, then zeros."""
    word = tl.arange(0, 32)
    start, total = vocab_start + tl.zeros([32], tl.int64), vocab_total + tl.zeros([32], tl.int64)
    value = tl.where(word < 2, vocab.to(tl.int64), tl.where(word < 4, start, tl.where(word < 6, total, 0)))
    value = tl.where(word % 2 == 0, value & 0xFFFFFFFF, value >> 32)
    tl.store(stats.to(tl.pointer_type(tl.int32)) + word, value.to(tl.int32), mask=word < WORDS)


@triton.jit(do_not_specialize=["rows", "vocab_start", "vocab_total", "ignore_index"])
def stats_kernel(
    logits: tl.tensor,
    target: tl.tensor,
    weight: tl.tensor,
    weight_sum: tl.tensor,
    stats: tl.tensor,
    rows: tl.tensor,
    inner_rows: tl.tensor,
    outer_stride: tl.tensor,
    inner_stride: tl.tensor,
    vocab: tl.tensor,
    vocab_start: tl.tensor,
    vocab_total: tl.tensor,
    ignore_index: tl.tensor,
    inner: tl.float64,
    outer: tl.float64,
    SMOOTHING: tl.constexpr,
    TRANSFORM: tl.constexpr,
    WRITE_EXP: tl.constexpr,
    ALIGN: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Statistics [rows + 3, C] of this shard, and with WRITE_EXP exp(z - m) over the logits. Grid: rows + 1.

    weight is this shard's part, weight_sum its sum. A row [0, log 3] with target 1 gives (log 3, 4/3, log 3), and over
    the logits [1/3, 0].
    """
    COLUMNS: tl.constexpr = 5 if SMOOTHING else 3
    COMPUTE: tl.constexpr = stats.dtype.element_ty
    n = tl.program_id(0)
    vocab = vocab * ALIGN
    base = stats + n.to(tl.int64) * COLUMNS
    if n == rows:
        write_header(
            base, vocab, vocab_start, vocab_total, 3 * COLUMNS * (stats.dtype.element_ty.primitive_bitwidth // 32)
        )
    else:
        row = logits + row_offset(n, inner_rows, outer_stride, inner_stride, ALIGN)
        id = tl.load(target + n).to(tl.int64)
        column, is_outside = target_column(id, vocab, vocab_start, vocab_total, ignore_index)
        x_y = tl.load(row + column, mask=column >= 0, other=0.0)
        m, s, weighted = row_statistics(
            row, weight, weight_sum, vocab, inner, outer, SMOOTHING, TRANSFORM, K, WIDTH, COMPUTE, ""
        )
        # Of the maximum's product with the scale, m keeps what fits a float; s is relative to that.
        high, low = written_maximum(m, outer, COMPUTE)
        tl.store(base, high)
        tl.store(base + 1, s.to(COMPUTE) * tl.exp2(low * LOG2E))
        z_y = (base_logits(x_y, inner, TRANSFORM, COMPUTE)[0].to(tl.float64) * outer).to(COMPUTE)
        z_y = tl.where(is_outside, float("nan"), tl.where(column >= 0, z_y, 0.0))
        tl.store(base + 2, z_y)
        if SMOOTHING:
            sum_high, sum_low = two_floats(weighted * outer * SUM_UNIT, COMPUTE)
            tl.store(base + 3, sum_high)
            tl.store(base + 4, sum_low)
        if WRITE_EXP:
            tl.debug_barrier()  # the whole row has been read
            if (id == ignore_index) | (high == float("-inf")):
                zero_row(row, vocab, K, WIDTH)
            else:
                zero = tl.full([], 0.0, COMPUTE)
                write_row(
                    row, row, None, vocab, column, zero, m, zero, tl.exp2(low * LOG2E), zero, inner, outer,
                    False, TRANSFORM, K, WIDTH, COMPUTE,
                )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "ranks", "vocab_total", "ignore_index"])
def merge_kernel(
    gathered: tl.tensor,
    target: tl.tensor,
    weight: tl.tensor,
    weight_sum: tl.tensor,
    loss: tl.tensor,
    lse: tl.tensor,
    rows: tl.tensor,
    ranks: tl.tensor,
    rank_stride: tl.tensor,
    vocab_total: tl.tensor,
    ignore_index: tl.tensor,
    label_smoothing: tl.float64,
    share: tl.float64,
    z_loss: tl.float64,
    SMOOTHING: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """(loss, lse) of BLOCK rows from the statistics of all ranks, combined in rank order in double.

    Two ranks with (0, 1, 0) and (log 3, 1, log 3): lse = log 4, loss = log(4 / 3).
    """
    COLUMNS: tl.constexpr = 5 if SMOOTHING else 3
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid = n < rows
    base = gathered + n * COLUMNS
    stride = rank_stride + tl.zeros([1], tl.int64)
    maximum = tl.full([BLOCK], float("-inf"), tl.float64)
    for rank in range(0, ranks):
        m = tl.load(base + rank * stride, mask=valid, other=0.0).to(tl.float64)
        maximum = tl.maximum(maximum, m)
    reference = tl.where(maximum == float("-inf"), 0.0, maximum)
    total = tl.zeros([BLOCK], tl.float64)
    picked = tl.zeros([BLOCK], tl.float64)
    weighted = tl.zeros([BLOCK], tl.float64)
    for rank in range(0, ranks):
        part = base + rank * stride
        m = tl.load(part, mask=valid, other=0.0).to(tl.float64)
        total += tl.load(part + 1, mask=valid, other=1.0).to(tl.float64) * tl.exp(m - reference)
        picked += tl.load(part + 2, mask=valid, other=0.0).to(tl.float64)
        if SMOOTHING:
            weighted += tl.load(part + 3, mask=valid, other=0.0).to(tl.float64)
            weighted += tl.load(part + 4, mask=valid, other=0.0).to(tl.float64)
    log_sum = tl.log(total)
    id = tl.load(target + n, mask=valid, other=0).to(tl.int64)
    value = row_loss(
        reference, log_sum, (reference - picked) + log_sum, weighted / SUM_UNIT, id, weight, weight_sum, vocab_total,
        ignore_index, label_smoothing, share, z_loss, SMOOTHING,
    )  # fmt: skip
    tl.store(loss + n, value.to(loss.dtype.element_ty), mask=valid)
    tl.store(lse + n, join_lse(reference, log_sum, gathered.dtype.element_ty), mask=valid)


@triton.jit(do_not_specialize=["vocab_start", "vocab_total", "ignore_index"])
def backward_kernel(
    logits: tl.tensor,
    grad: tl.tensor,
    lse: tl.tensor,
    target: tl.tensor,
    weight: tl.tensor,
    shard_weight: tl.tensor,
    weight_sum: tl.tensor,
    grad_loss: tl.tensor,
    grad_loss_stride: tl.tensor,
    grad_lse: tl.tensor,
    grad_lse_stride: tl.tensor,
    inner_rows: tl.tensor,
    outer_stride: tl.tensor,
    inner_stride: tl.tensor,
    vocab: tl.tensor,
    vocab_start: tl.tensor,
    vocab_total: tl.tensor,
    ignore_index: tl.tensor,
    label_smoothing: tl.float64,
    share: tl.float64,
    z_loss: tl.float64,
    inner: tl.float64,
    outer: tl.float64,
    logit_scale: tl.float64,
    SMOOTHING: tl.constexpr,
    TRANSFORM: tl.constexpr,
    INPLACE: tl.constexpr,
    ALIGN: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """The gradient of one row: read once, written once. weight is the whole vocabulary's, shard_weight this shard's.

    A row [0, log 3] with target 1 and grad_loss 1: lse = log 4, gradient [1/4, -1/4].
    """
    COMPUTE: tl.constexpr = grad_loss.dtype.element_ty
    n = tl.program_id(0)
    vocab = vocab * ALIGN
    offset = row_offset(n, inner_rows, outer_stride, inner_stride, ALIGN)
    row = logits + offset
    out = grad + (offset if INPLACE else n.to(tl.int64) * vocab)
    id = tl.load(target + n).to(tl.int64)
    is_zero = (id == ignore_index) if grad_lse is None else False
    if is_zero:
        zero_row(out, vocab, K, WIDTH)
    else:
        column, is_outside = target_column(id, vocab, vocab_start, vocab_total, ignore_index)
        b_y = base_logits(tl.load(row + column, mask=column >= 0, other=0.0), inner, TRANSFORM, COMPUTE)[0]
        if INPLACE:
            tl.debug_barrier()  # every thread has read the target's logit
        row_lse = tl.load(lse + n)
        g = tl.load(grad_loss + n.to(tl.int64) * grad_loss_stride)
        gamma, delta, beta = coefficients(
            g, row_lse, id, is_outside, weight, weight_sum, vocab_total, ignore_index, label_smoothing, share, z_loss,
            SMOOTHING,
        )  # fmt: skip
        if grad_lse is not None:
            delta += tl.load(grad_lse + n.to(tl.int64) * grad_lse_stride).to(tl.float64)
        high, low = split_lse(row_lse, row, vocab, inner, outer, TRANSFORM, WIDTH, COMPUTE)
        write_gradient(
            row, out, shard_weight, vocab, column, b_y, high, low, gamma, delta, beta, inner, outer, logit_scale,
            SMOOTHING, TRANSFORM, K, WIDTH, COMPUTE,
        )  # fmt: skip


@triton.jit(do_not_specialize=["ignore_index"])
def forward_backward_kernel(
    logits: tl.tensor,
    grad: tl.tensor,
    loss: tl.tensor,
    lse: tl.tensor,
    target: tl.tensor,
    weight: tl.tensor,
    weight_sum: tl.tensor,
    grad_loss: tl.tensor,
    grad_loss_stride: tl.tensor,
    inner_rows: tl.tensor,
    outer_stride: tl.tensor,
    inner_stride: tl.tensor,
    vocab: tl.tensor,
    ignore_index: tl.tensor,
    label_smoothing: tl.float64,
    share: tl.float64,
    z_loss: tl.float64,
    inner: tl.float64,
    outer: tl.float64,
    logit_scale: tl.float64,
    SMOOTHING: tl.constexpr,
    TRANSFORM: tl.constexpr,
    INPLACE: tl.constexpr,
    ALIGN: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Loss, lse and gradient of one row of the whole vocabulary; the second read finds the row in the L2 cache.

    A row [0, log 3] with target 1 and grad_loss 1: loss log(4 / 3), lse log 4, gradient [1/4, -1/4].
    """
    COMPUTE: tl.constexpr = grad_loss.dtype.element_ty
    n = tl.program_id(0)
    vocab = vocab * ALIGN
    offset = row_offset(n, inner_rows, outer_stride, inner_stride, ALIGN)
    row = logits + offset
    out = grad + (offset if INPLACE else n.to(tl.int64) * vocab)
    id = tl.load(target + n).to(tl.int64)
    column, is_outside = target_column(id, vocab, 0, vocab, ignore_index)
    b_y = base_logits(tl.load(row + column, mask=column >= 0, other=0.0), inner, TRANSFORM, COMPUTE)[0]
    g = tl.load(grad_loss + n.to(tl.int64) * grad_loss_stride)
    m, s, weighted = row_statistics(
        row, weight, weight_sum, vocab, inner, outer, SMOOTHING, TRANSFORM, K, WIDTH, COMPUTE, "evict_last"
    )
    log_sum = tl.log(s)
    top = tl.where(m == float("-inf"), 0.0, m.to(tl.float64))
    row_lse = join_lse(top * outer, log_sum, COMPUTE)
    nll = (top - tl.where(is_outside, float("nan"), b_y.to(tl.float64))) * outer + log_sum
    value = row_loss(
        top * outer, log_sum, nll, weighted * outer, id, weight, weight_sum, vocab, ignore_index, label_smoothing,
        share, z_loss, SMOOTHING,
    )  # fmt: skip
    tl.store(loss + n, value.to(COMPUTE))
    tl.store(lse + n, row_lse)
    if INPLACE:
        tl.debug_barrier()  # the whole row has been read
    if id == ignore_index:
        zero_row(out, vocab, K, WIDTH)
    else:
        gamma, delta, beta = coefficients(
            g, row_lse, id, is_outside, weight, weight_sum, vocab, ignore_index, label_smoothing, share, z_loss,
            SMOOTHING,
        )  # fmt: skip
        write_gradient(
            row, out, weight, vocab, column, b_y, m, (log_sum / outer).to(COMPUTE), gamma, delta, beta, inner, outer,
            logit_scale, SMOOTHING, TRANSFORM, K, WIDTH, COMPUTE,
        )  # fmt: skip


@triton.jit
def scale_kernel(x: tl.tensor, scalar: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr) -> None:
    """x[:size] *= scalar, without touching x if it is 1. Blocks in turn: an early exit costs one small grid."""
    COMPUTE: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    factor = tl.load(scalar).to(COMPUTE)
    if factor != 1.0:
        blocks = tl.cdiv(size, BLOCK)
        for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
            position = tl.full([], BLOCK, tl.int64) * block + tl.arange(0, BLOCK)
            value = tl.load(x + position, mask=position < size).to(COMPUTE) * factor
            tl.store(x + position, value.to(x.dtype.element_ty), mask=position < size)
