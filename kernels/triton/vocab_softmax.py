"""Softmax, log-probabilities and entropy of a split vocabulary on GPUs in Triton: the functions that
fastpar.ops.vocab_softmax and fastpar.ops.vocab_entropy dispatch to.

The algebra is in those modules; signatures and results are those of fastpar.reference.vocab_softmax, except that ids
are not looked at: one outside the vocabulary has log-probability NaN, and the header names no row. Nothing here
synchronises with the host. Tensors are CUDA (or HIP) tensors; in Triton's interpreter, CPU tensors.

    stats               reads the logits once, (12 + 4 K) bytes a row out for K ids
    merge               all ranks' statistics to lse, entropy and log-probabilities
    normalize           reads once, writes once
    dot                 reads the logits and the upstream gradient once; of a log-softmax, the upstream gradient only
    backward            reads both, writes once; with one rank it reads them twice, the second time from the L2 cache if
                        the rows in flight fit
    log_prob_backward   reads once, writes once; rows whose upstream gradients are all 0 are not read

One program owns a row, there are no atomics, and sums go through double where threads meet: results are the same from
run to run. Any strides of up to two leading dims are walked in place, of the upstream gradient too.

Tested on an H200, not timed. Compiled for sm_90 and gfx942 (bfloat16, 131072 columns) nothing spills, but
log_prob_backward with an entropy gradient and a softcap: 16 bytes a thread on sm_90. A widened result of `normalize`
changes its layout in shared memory before it is stored.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from fastpar.kernels.cross_entropy import LossRows, alignment, compute_dtype, configuration, transform_of
from fastpar.kernels.launch import cdiv, launch, next_power_of_2
from fastpar.kernels.rows import as_rows
from fastpar.kernels.vocab_log_prob_kernels import log_prob_backward_kernel
from fastpar.kernels.vocab_softmax_kernels import dot_kernel, normalize_kernel, softmax_backward_kernel
from fastpar.kernels.vocab_statistics_kernels import SUMS, softmax_merge_kernel, softmax_stats_kernel

MAX_IDS = 32  # of a row, taken at a time
MERGE_BLOCK = 128  # log-probabilities of a program of `merge`
TRITON_DTYPES = {torch.float32: triton.language.float32, torch.float64: triton.language.float64}


# ---- shapes ----------------------------------------------------------------------------------------------------------


def walk(
    *tensors: Tensor, softcap: float = 0.0, two_passes: bool = False
) -> tuple[list[Tensor], tuple[int, ...], dict[str, Any]]:
    """(tensors, shape, compile-time options) of a launch over tensors of one shape, the logits first.

    shape is (inner_rows, the two strides of every tensor, vocabulary), lengths in units of ALIGN. Tensors that no
    kernel can walk are copied.
    """
    inner, rows = as_rows(*tensors)
    vocab, itemsize = tensors[0].shape[-1], tensors[0].element_size()
    smallest = min(t.element_size() for t in tensors)
    align = min(alignment(vocab, LossRows(inner, outer, step), smallest) for _, outer, step in rows)
    costly = softcap != 0.0 or len(tensors) > 1
    options = configuration(vocab, itemsize, align, two_passes=two_passes, costly=costly).options()
    options["ALIGN"] = align
    strides = [length // align for _, outer, step in rows for length in (outer, step)]
    return [t for t, _, _ in rows], (inner, *strides, vocab // align), options


def _compute(logits: Tensor) -> Any:
    return TRITON_DTYPES[compute_dtype(logits)]


def _ids_block(ids: Tensor | None) -> int:
    return 1 if ids is None else min(next_power_of_2(max(ids.shape[1], 1)), MAX_IDS)


def _dense(ids: Tensor | None) -> Tensor | None:
    return None if ids is None else ids.contiguous()


# ---- the ops ---------------------------------------------------------------------------------------------------------


def stats(
    logits: Tensor,
    ids: Tensor | None,
    vocab_start: int,
    vocab_total: int,
    ignore_index: int,
    entropy: bool,
    softcap: float,
    logit_scale: float,
    call: int = 0,
) -> Tensor:
    """[N + 3, 3 + K]: every row's maximum, sums and the z of its ids [N, K], and the header."""
    rows, num_ids = logits.shape[:-1].numel(), 0 if ids is None else ids.shape[1]
    out = torch.empty((rows + 3, SUMS.value + num_ids), dtype=compute_dtype(logits), device=logits.device)
    kind, inner, outer = transform_of(softcap, logit_scale)
    (logits,), shape, options = walk(logits, softcap=softcap)
    launch(
        softmax_stats_kernel, rows + 1, logits.device,
        logits, _dense(ids), out, rows, num_ids, *shape, vocab_start, vocab_total, ignore_index, inner, outer,
        ENTROPY=entropy, TRANSFORM=kind, IDS=_ids_block(ids), **options,
    )  # fmt: skip
    return out


def merge(gathered: Tensor, ids: Tensor | None, ignore_index: int) -> tuple[Tensor, Tensor, Tensor]:
    """(lse [N] float64, entropy [N] float64, log-probability [N, K]) from every rank's statistics."""
    rows, num_ids = gathered.shape[1] - 3, 0 if ids is None else ids.shape[1]
    lse = torch.empty((rows,), dtype=torch.float64, device=gathered.device)
    entropy = torch.empty_like(lse)
    log_prob = torch.empty((rows, num_ids), dtype=gathered.dtype, device=gathered.device)
    if rows == 0:
        return lse, entropy, log_prob
    if not gathered[0].is_contiguous():
        gathered = gathered.contiguous()
    per_row = _ids_block(ids)
    block = MERGE_BLOCK // per_row
    launch(
        softmax_merge_kernel, cdiv(rows, block), gathered.device,
        gathered, _dense(ids), lse, entropy, log_prob, rows, num_ids, gathered.shape[0], gathered.stride(0),
        ignore_index, BLOCK=block, IDS=per_row, num_warps=4,
    )  # fmt: skip
    return lse, entropy, log_prob


def normalize(logits: Tensor, lse: Tensor, log: bool, widen: bool, softcap: float, logit_scale: float) -> Tensor:
    """exp(z - lse), or z - lse with `log`; in the logits' dtype, or with `widen` in the compute dtype."""
    dtype = compute_dtype(logits) if widen else logits.dtype
    out = torch.empty(logits.shape, dtype=dtype, device=logits.device)
    if out.numel() == 0:
        return out
    kind, inner, outer = transform_of(softcap, logit_scale)
    (logits,), shape, options = walk(logits, softcap=softcap)
    launch(
        normalize_kernel, lse.numel(), logits.device,
        logits, lse, out, *shape, inner, outer,
        LOG=log, TRANSFORM=kind, COMPUTE=_compute(logits), **options,
    )  # fmt: skip
    return out


def dot(logits: Tensor, lse: Tensor, grad_out: Tensor, log: bool, softcap: float, logit_scale: float) -> Tensor:
    """sum_v p_v dy_v, or sum_v dy_v with `log`, of every row: [N] float64."""
    out = torch.empty_like(lse)
    if out.numel() == 0:
        return out
    kind, inner, outer = transform_of(softcap, logit_scale)
    (logits, grad_out), shape, options = walk(logits, grad_out, softcap=softcap)
    launch(
        dot_kernel, lse.numel(), logits.device,
        logits, lse, grad_out, out, *shape, inner, outer,
        LOG=log, TRANSFORM=kind, COMPUTE=_compute(logits), **options,
    )  # fmt: skip
    return out


def backward(
    logits: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    dot_: Tensor | None,
    log: bool,
    softcap: float,
    logit_scale: float,
) -> Tensor:
    """Gradient by this rank's logits; `dot_` is `dot` summed over the ranks, None where there is one rank."""
    out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    if out.numel() == 0:
        return out
    kind, inner, outer = transform_of(softcap, logit_scale)
    (logits, grad_out), shape, options = walk(logits, grad_out, softcap=softcap, two_passes=dot_ is None)
    launch(
        softmax_backward_kernel, lse.numel(), logits.device,
        logits, lse, grad_out, dot_, out, *shape, inner, outer, logit_scale,
        LOG=log, TRANSFORM=kind, COMPUTE=_compute(logits), **options,
    )  # fmt: skip
    return out


def log_prob_backward(
    logits: Tensor,
    lse: Tensor,
    ids: Tensor | None,
    grad_log_prob: Tensor | None,
    entropy: Tensor | None,
    grad_entropy: Tensor | None,
    vocab_start: int,
    ignore_index: int,
    softcap: float,
    logit_scale: float,
) -> Tensor:
    """Gradient by this rank's logits of sum grad_log_prob log_prob + sum grad_entropy entropy."""
    out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    if out.numel() == 0:
        return out
    if ids is None or grad_log_prob is None:
        ids = grad_log_prob = None
    else:
        grad_log_prob = grad_log_prob.reshape(ids.shape)
    if entropy is None or grad_entropy is None:
        entropy = grad_entropy = None
    else:
        grad_entropy = grad_entropy.reshape(-1)
    kind, inner, outer = transform_of(softcap, logit_scale)
    (logits,), shape, options = walk(logits, softcap=softcap)
    launch(
        log_prob_backward_kernel, lse.numel(), logits.device,
        logits, lse, _dense(ids), grad_log_prob, entropy, grad_entropy, out, 0 if ids is None else ids.shape[1],
        *((0, 0) if grad_log_prob is None else grad_log_prob.stride()),
        0 if grad_entropy is None else grad_entropy.stride(0), *shape, vocab_start, ignore_index, inner, outer,
        logit_scale, TRANSFORM=kind, COMPUTE=_compute(logits), IDS=_ids_block(ids), **options,
    )  # fmt: skip
    return out
