"""Embedding in a table whose rows are split across ranks, on GPUs in Triton: what fastpar.ops.embedding dispatches to.

The algebra is in fastpar.ops.embedding; signatures and results are those of fastpar.reference.embedding.

    embedding           reads each id and, where this rank holds it, its row; writes each row of the output once
    embedding_backward  sorts the ids on the device, then the program that stands at the first of a run of equal ids
                        adds up the run's rows of dout and writes one row of the gradient, which was filled with zeros

The gradient has no atomics: rows of an id are added in the order of their positions, in float32 (float64 for float64),
rounded once, and are the same bits from run to run. Nothing synchronises with the host. What is kept is 12 bytes a
token, where sorting needs a few times as much. A run is the work of one program per block of the hidden dim, however
long it is: one id that fills the whole batch is the slowest case.

Every access to the table and to dout has 16 bytes a thread where the hidden size is a multiple of that. Not measured
yet.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastpar.kernels.cross_entropy import WARP_SIZE, LossRows, alignment
from fastpar.kernels.launch import cdiv, launch, next_power_of_2

THREADS = 128
LOADS_PER_THREAD = 4  # of 16 bytes, by a program of the lookup
UNROLL = 4  # rows of a run whose loads are under way together


# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["num_ids", "vocab", "vocab_start"])
def embedding_kernel(
    ids: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    num_ids: tl.tensor,
    vocab: tl.tensor,
    vocab_start: tl.tensor,
    row_stride: tl.tensor,
    hidden: tl.tensor,
    ALIGN: tl.constexpr,
    TOKENS: tl.constexpr,
    HIDDEN: tl.constexpr,
) -> None:
    """out[n] = weight[ids[n] - vocab_start], or 0 if that is not in [0, vocab). Grid: token blocks * hidden blocks.

    weight [[1, 2]], vocab_start 0, ids [1, 0]: out [[0, 0], [1, 2]].
    """
    hidden = hidden * ALIGN
    blocks = tl.cdiv(hidden, HIDDEN)
    program = tl.program_id(0)
    n = (program // blocks).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    cols = program % blocks * HIDDEN + tl.arange(0, HIDDEN)[None, :]
    row = tl.load(ids + n, mask=n < num_ids, other=-1) - vocab_start
    is_owned = (row >= 0) & (row < vocab) & (n < num_ids)
    offset = row * row_stride * ALIGN
    value = tl.load(weight + offset[:, None] + cols, mask=is_owned[:, None] & (cols < hidden), other=0.0)
    tl.store(out + n[:, None] * hidden + cols, value, mask=(n < num_ids)[:, None] & (cols < hidden))


@triton.jit(do_not_specialize=["num_ids", "num_rows"])
def embedding_backward_kernel(
    rows: tl.tensor,
    positions: tl.tensor,
    grad_out: tl.tensor,
    grad: tl.tensor,
    num_ids: tl.tensor,
    num_rows: tl.tensor,
    row_stride: tl.tensor,
    hidden: tl.tensor,
    ALIGN: tl.constexpr,
    HIDDEN: tl.constexpr,
    UNROLL: tl.constexpr,
) -> None:
    """grad[rows[i]] = sum of grad_out[positions[j]] over the run j of rows[j] = rows[i]. Grid: num_ids * hidden blocks.

    rows are sorted, equal ones by position; num_rows marks what has no gradient. All but the first of a run return.

    rows [0, 2, 2], positions [1, 0, 2], grad_out [[1], [2], [4]]: grad [[2], [0], [5]].
    """
    COMPUTE: tl.constexpr = tl.float64 if grad.dtype.element_ty == tl.float64 else tl.float32
    hidden = hidden * ALIGN
    blocks = tl.cdiv(hidden, HIDDEN)
    program = tl.program_id(0)
    first = (program // blocks).to(tl.int64)
    row = tl.load(rows + first)
    before = tl.load(rows + first - 1, mask=first > 0, other=-1)
    if (row != before) & (row < num_rows):
        cols = program % blocks * HIDDEN + tl.arange(0, HIDDEN)
        total = tl.zeros([HIDDEN], COMPUTE)
        j = first
        belongs = row == row
        while belongs:
            for _ in tl.static_range(UNROLL):
                belongs = belongs & (tl.load(rows + j, mask=j < num_ids, other=-1) == row)
                position = tl.load(positions + j, mask=belongs, other=0)
                source = grad_out + position * row_stride * ALIGN
                total += tl.load(source + cols, mask=belongs & (cols < hidden), other=0.0).to(COMPUTE)
                j += 1
        out = grad + row.to(tl.int64) * hidden
        tl.store(out + cols, total.to(grad.dtype.element_ty), mask=cols < hidden)


# ---- the ops ---------------------------------------------------------------------------------------------------------


def _dense_rows(x: Tensor) -> Tensor:
    """x [N, H], copied if its last dim is not contiguous."""
    return x if x.shape[1] <= 1 or x.stride(1) == 1 else x.contiguous()


def _shape(x: Tensor) -> tuple[int, tuple[int, int], dict[str, Any]]:
    """(hidden blocks, (row stride and hidden in units of ALIGN), compile-time options) of x [N, H]."""
    hidden, itemsize = x.shape[1], x.element_size()
    align = alignment(hidden, LossRows(1, 0, x.stride(0)), itemsize)
    block = min(next_power_of_2(hidden), THREADS * 16 // itemsize)
    options = {"ALIGN": align, "HIDDEN": block, "num_warps": max(THREADS // WARP_SIZE, 1)}
    return cdiv(hidden, block), (x.stride(0) // align, hidden // align), options


def embedding(ids: Tensor, weight: Tensor, vocab_start: int) -> Tensor:
    """LossRows of the ids in [vocab_start, vocab_start + V_local), zeros for all others: [...] -> [..., H]."""
    out = torch.empty((*ids.shape, weight.shape[1]), dtype=weight.dtype, device=weight.device)
    if out.numel() == 0:
        return out
    flat, weight = ids.reshape(-1).contiguous(), _dense_rows(weight)
    blocks, shape, options = _shape(weight)
    tokens = THREADS * LOADS_PER_THREAD * 16 // weight.element_size() // options["HIDDEN"]
    tokens = min(tokens, next_power_of_2(flat.numel()))
    launch(
        embedding_kernel, cdiv(flat.numel(), tokens) * blocks, weight.device,
        flat, weight, out, flat.numel(), weight.shape[0], vocab_start, *shape, TOKENS=tokens, **options,
    )  # fmt: skip
    return out


def embedding_backward(ids: Tensor, grad_out: Tensor, num_rows: int, vocab_start: int, padding_idx: int) -> Tensor:
    """Gradient of the table [num_rows, H]: row t gets the sum of grad_out where the id is vocab_start + t."""
    hidden = grad_out.shape[-1]
    grad = torch.zeros((num_rows, hidden), dtype=grad_out.dtype, device=grad_out.device)
    if grad.numel() == 0 or ids.numel() == 0:
        return grad
    flat = ids.reshape(-1)
    local = flat - vocab_start
    unused = (local < 0) | (local >= num_rows) | (flat == padding_idx)
    # 32 bits: half the passes of a radix sort. What has no gradient goes to the end.
    rows, positions = local.masked_fill(unused, num_rows).to(torch.int32).sort(stable=True)
    source = _dense_rows(grad_out.reshape(-1, hidden))
    blocks, shape, options = _shape(source)
    launch(
        embedding_backward_kernel, flat.numel() * blocks, grad.device,
        rows, positions, source, grad, flat.numel(), num_rows, *shape, UNROLL=UNROLL, **options,
    )  # fmt: skip
    return grad
