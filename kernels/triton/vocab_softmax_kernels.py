"""The kernels of softmax and log-softmax over a split vocabulary and of their backward, one program per row;
fastpar.kernels.vocab_softmax launches them.

How a row is walked, `Note: base logits`, and how lse is split into two floats: cross_entropy_row.py. How shapes arrive:
cross_entropy_kernels.py. Vocabulary and strides of all tensors are in units of one ALIGN. What comes before them, a
shard's statistics and the ranks' merged: vocab_statistics_kernels.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastpar.kernels.cross_entropy_kernels import row_offset
from fastpar.kernels.cross_entropy_row import IDENTITY, LOG2E, SOFTCAP, base_logits, split_lse

# ---- device functions, for the statistics and log-probabilities too --------------------------------------------------


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


# ---- kernels ---------------------------------------------------------------------------------------------------------


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
