"""The kernel of the backward of log-probabilities and entropy of a split vocabulary, one program per row;
fastpar.kernels.vocab_softmax launches it.

How a row is walked and shapes arrive: vocab_softmax_kernels.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastpar.kernels.cross_entropy_kernels import row_offset, target_column
from fastpar.kernels.cross_entropy_row import LOG2E, SOFTCAP, base_logits, zero_row
from fastpar.kernels.vocab_softmax_kernels import base_reference, load_block, store_block
from fastpar.kernels.vocab_statistics_kernels import LOWEST


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
