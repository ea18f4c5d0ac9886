"""Vocab-parallel cross-entropy on GPUs in Triton: the functions that fastpar.ops.cross_entropy dispatches to.

The algebra is in fastpar.ops.cross_entropy; signatures and results are those of fastpar.reference.cross_entropy, except
that targets are not looked at: one outside the vocabulary makes its row's loss NaN (and the gradient), and the header
names no row. Nothing here synchronises with the host. Tensors are CUDA (or HIP) tensors; in Triton's interpreter, CPU
tensors.

    stats              reads the logits once, 12 bytes a row out (20 with smoothing)
    merge              all ranks' statistics to loss and lse
    backward[_]        reads once, writes once
    stats_exp_         reads, then reads and writes; the second read hits the L2 cache if the rows in flight fit
    forward_backward[_]  likewise, for a vocabulary on one rank
    scale_unless_one_  x *= scalar for a scalar on the device, for free where it is 1

One program owns a row from its first load to its last store, and loads a block before it stores that block: in place is
safe, and there are no atomics; results are the same from run to run. In the two-pass kernels a barrier stands between
the passes.

Not measured yet. Compiled for sm_90, bfloat16 logits, 131072 columns; registers a thread without options and with all:

    stats               48     103     0 spills
    stats_exp_          63     124     0 spills
    backward            59     128     0 spills
    forward_backward    62     128     0 spills

Every thread loads and stores 16 bytes at a time, and no loop has a barrier (tests/ops/test_cross_entropy_triton.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastpar.kernels.cross_entropy_kernels import (
    backward_kernel,
    forward_backward_kernel,
    merge_kernel,
    scale_kernel,
    stats_kernel,
)
from fastpar.kernels.cross_entropy_row import IDENTITY, SCALED, SOFTCAP
from fastpar.kernels.launch import cdiv, launch, next_power_of_2

WARP_SIZE = 64 if torch.version.hip else 32
LOADS_PER_THREAD = 4  # of 16 bytes, of a block; what is carried from block to block has the size of one
MERGE_BLOCK = 128
REGISTERS = 65536  # of a multiprocessor
SCALE_BLOCK = 4096
SCALE_PROGRAMS = 2048  # several per multiprocessor of any GPU


# ---- shapes ----------------------------------------------------------------------------------------------------------


class LossRows(NamedTuple):
    """Row n of a tensor starts at (n // inner_rows) * outer_stride + (n % inner_rows) * inner_stride."""

    inner_rows: int
    outer_stride: int
    inner_stride: int


def rows_of(x: Tensor) -> LossRows | None:
    """The rows of x [..., V], last dim contiguous; None if leading dims need more than two strides."""
    levels: list[tuple[int, int]] = []
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        if size == 1:
            continue
        if levels and levels[-1][1] == size * stride:
            levels[-1] = (levels[-1][0] * size, stride)
        else:
            levels.append((size, stride))
    if len(levels) > 2:
        return None
    if len(levels) == 2:
        return LossRows(levels[1][0], levels[0][1], levels[1][1])
    return LossRows(max(levels[0][0], 1), 0, levels[0][1]) if levels else LossRows(1, 0, 0)


def alignment(vocab: int, rows: LossRows, itemsize: int) -> int:
    """The largest power of two up to 16 bytes, in elements, that divides the vocabulary and the strides."""
    align = 16 // itemsize
    while any(length % align for length in (vocab, rows.outer_stride, rows.inner_stride)):
        align //= 2
    return align


class LossConfiguration(NamedTuple):
    """A block is [k, width] columns: width is one 16-byte load of every thread, and every thread makes k of them."""

    k: int
    width: int
    num_warps: int
    max_registers: int | None = None  # of a thread; None: the compiler's choice

    def options(self) -> dict[str, int]:
        """The options of a launch."""
        found = {"K": self.k, "WIDTH": self.width, "num_warps": self.num_warps}
        return found if self.max_registers is None else {**found, "maxnreg": self.max_registers}


def loads_per_thread(itemsize: int, narrow: bool, *, two_passes: bool, costly: bool) -> int:
    """How many times 16 bytes a thread takes at once: what its registers hold without spilling."""
    if itemsize == 8:  # double arithmetic takes more registers
        return LOADS_PER_THREAD // 4 if costly and two_passes else LOADS_PER_THREAD // 2
    loads = LOADS_PER_THREAD
    if costly and WARP_SIZE == 64:
        # AMD keeps a comparison's result in a pair of a wave's hundred scalar registers: 16 elements at most.
        loads = min(loads, itemsize)
    return loads // 2 if narrow else loads


def configuration(
    vocab: int, itemsize: int, align: int, *, two_passes: bool = False, costly: bool = False
) -> LossConfiguration:
    """The configuration by the length of a row: one block if it is short, else 256 threads.

    align       that of `alignment`; below 16 bytes a load is several accesses, each with an address and a condition,
                which is costly as well
    two_passes  over a long row, are made by more threads, so that fewer rows are in flight at a time (1024 threads are
                one row per multiprocessor) and the second pass finds them in an L2 cache of 50 MB
    costly      softcap or smoothing: 512 threads at most, which have twice the registers and are as few rows
    """
    narrow = align * itemsize < 16
    costly = costly or narrow
    threads = 256
    if two_passes and vocab * itemsize > 64 << 10:
        threads = 512 if costly or vocab * itemsize <= 128 << 10 else 1024
    per_load = 16 // itemsize
    row = next_power_of_2(max(vocab, 1))
    loads = loads_per_thread(itemsize, narrow, two_passes=two_passes, costly=costly)
    threads = max(min(threads, row // (loads * per_load)), WARP_SIZE)
    width = threads * per_load
    k = max(min(loads, row // width), 1)
    # Left to itself, ptxas spills to make do with 64 registers, which are two such rows on a multiprocessor.
    max_registers = REGISTERS // 512 if costly and two_passes and WARP_SIZE == 32 else None
    return LossConfiguration(k, width, threads // WARP_SIZE, max_registers)


class Transform(NamedTuple):
    """`Note: base logits` of cross_entropy_row.py."""

    kind: int
    inner: float
    outer: float


def transform_of(softcap: float, logit_scale: float) -> Transform:
    # Triton takes the int 1 for a constant, and a 0 for an integer: each would be another kernel.
    softcap, logit_scale = float(softcap), float(logit_scale)
    if softcap != 0.0:
        return Transform(SOFTCAP.value, logit_scale / softcap, softcap)
    if logit_scale != 1.0:
        return Transform(SCALED.value, 1.0 if logit_scale > 0 else -1.0, abs(logit_scale))
    return Transform(IDENTITY.value, 1.0, 1.0)


def compute_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def readable_rows(logits: Tensor) -> tuple[Tensor, LossRows]:
    """The logits, copied if no kernel can walk them."""
    rows = rows_of(logits)
    if rows is None or (logits.shape[-1] > 1 and logits.stride(-1) != 1):
        logits = logits.contiguous()
        rows = rows_of(logits)
    assert rows is not None
    return logits, rows


def check_inplace(logits: Tensor, name: str) -> LossRows | None:
    """Rows of a tensor to be written over; None where the leading dims must be taken one by one."""
    if logits.shape[-1] > 1 and logits.stride(-1) != 1:
        raise ValueError(
            f"{name} writes over the logits, whose last dim must be contiguous: stride {logits.stride(-1)}"
        )
    return rows_of(logits)


def shape_options(
    logits: Tensor, rows: LossRows, two_passes: bool, costly: bool
) -> tuple[tuple[int, ...], dict[str, Any]]:
    """(rows and vocabulary in units of ALIGN, compile-time options) of a launch over the logits."""
    vocab, itemsize = logits.shape[-1], logits.element_size()
    align = alignment(vocab, rows, itemsize)
    options = configuration(vocab, itemsize, align, two_passes=two_passes, costly=costly).options()
    options["ALIGN"] = align
    return (rows.inner_rows, rows.outer_stride // align, rows.inner_stride // align, vocab // align), options


# ---- the ops ---------------------------------------------------------------------------------------------------------


def _stats(
    logits: Tensor,
    rows: LossRows,
    target: Tensor,
    weight: Tensor | None,
    vocab_start: int,
    vocab_total: int,
    ignore_index: int,
    smoothing: bool,
    softcap: float,
    logit_scale: float,
    *,
    write_exp: bool,
) -> Tensor:
    count, vocab = target.numel(), logits.shape[-1]
    out = torch.empty((count + 3, 5 if smoothing else 3), dtype=compute_dtype(logits), device=logits.device)
    shard_weight = shard_sum = None
    if smoothing and weight is not None:
        shard_weight = weight.narrow(0, vocab_start, vocab)
        shard_sum = shard_weight.sum(dtype=torch.float64)
    kind, inner, outer = transform_of(softcap, logit_scale)
    shape, options = shape_options(logits, rows, write_exp, smoothing or softcap != 0.0)
    launch(
        stats_kernel, count + 1, logits.device,
        logits, target.reshape(-1), shard_weight, shard_sum, out, count, *shape,
        vocab_start, vocab_total, ignore_index, inner, outer,
        SMOOTHING=smoothing, TRANSFORM=kind, WRITE_EXP=write_exp, **options,
    )  # fmt: skip
    return out


def stats(logits: Tensor, target: Tensor, *terms: Any) -> Tensor:
    """[N + 3, 3 or 5]: every row's statistics over this rank's columns, and the header. Terms: see _stats, from weight
    on, and the number of the call, which no header has on a device, as nobody looks at it there."""
    logits, rows = readable_rows(logits)
    return _stats(logits, rows, target, *terms[:7], write_exp=False)


def stats_exp_(logits: Tensor, target: Tensor, *terms: Any) -> Tensor:
    """`stats`, and exp(z - maximum) (times 1 - (z / softcap)^2) written over the logits; 0 at the target."""
    rows = check_inplace(logits, "stats_exp_")
    if rows is not None:
        return _stats(logits, rows, target, *terms[:7], write_exp=True)
    parts = [stats_exp_(part, ids, *terms) for part, ids in zip(logits, target.view(logits.shape[:-1]), strict=True)]
    return torch.cat([part[:-3] for part in parts] + [parts[-1][-3:]])


def merge(
    gathered: Tensor,
    target: Tensor,
    weight: Tensor | None,
    weight_sum: Tensor | None,
    vocab_total: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> tuple[Tensor, Tensor]:
    """(loss [N], lse [N] float64) from every rank's statistics [ranks, N + 3, C]."""
    count = target.numel()
    loss = torch.empty((count,), dtype=gathered.dtype, device=gathered.device)
    lse = torch.empty((count,), dtype=torch.float64, device=gathered.device)
    if count == 0:
        return loss, lse
    if not gathered[0].is_contiguous():
        gathered = gathered.contiguous()
    launch(
        merge_kernel, cdiv(count, MERGE_BLOCK), gathered.device,
        gathered, target.reshape(-1), weight, weight_sum, loss, lse, count, gathered.shape[0], gathered.stride(0),
        vocab_total, ignore_index, float(label_smoothing), label_smoothing / max(vocab_total, 1), float(z_loss),
        SMOOTHING=label_smoothing > 0.0, BLOCK=MERGE_BLOCK, num_warps=MERGE_BLOCK // WARP_SIZE,
    )  # fmt: skip
    return loss, lse


def _backward(
    logits: Tensor,
    rows: LossRows,
    grad: Tensor,
    lse: Tensor,
    target: Tensor,
    weight: Tensor | None,
    weight_sum: Tensor | None,
    grad_loss: Tensor,
    grad_lse: Tensor | None,
    vocab_start: int,
    vocab_total: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    logit_scale: float,
) -> None:
    if logits.numel() == 0:
        return
    kind, inner, outer = transform_of(softcap, logit_scale)
    shape, options = shape_options(logits, rows, False, label_smoothing > 0.0 or softcap != 0.0)
    shard_weight = None if weight is None else weight.narrow(0, vocab_start, logits.shape[-1])
    launch(
        backward_kernel, target.numel(), logits.device,
        logits, grad, lse, target.reshape(-1), weight, shard_weight, weight_sum, grad_loss, grad_loss.stride(0),
        grad_lse, 0 if grad_lse is None else grad_lse.stride(0), *shape, vocab_start, vocab_total, ignore_index,
        float(label_smoothing), label_smoothing / max(vocab_total, 1), float(z_loss), inner, outer, float(logit_scale),
        SMOOTHING=label_smoothing > 0.0, TRANSFORM=kind, INPLACE=grad is logits, **options,
    )  # fmt: skip


def backward(logits: Tensor, *arguments: Any) -> Tensor:
    """The gradient by this rank's logits, of their shape and dtype. Arguments: see _backward, from lse on."""
    logits, rows = readable_rows(logits)
    grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
    _backward(logits, rows, grad, *arguments)
    return grad


def backward_(logits: Tensor, lse: Tensor, target: Tensor, *arguments: Any) -> None:
    """`backward`, written over the logits."""
    rows = check_inplace(logits, "backward_")
    if rows is not None:
        _backward(logits, rows, logits, lse, target, *arguments)
        return
    weight, weight_sum, grad_loss, grad_lse, *terms = arguments
    target = target.view(logits.shape[:-1])
    size = target[0].numel()
    for i, part in enumerate(logits):
        take = slice(i * size, (i + 1) * size)
        part_lse = None if grad_lse is None else grad_lse[take]
        backward_(part, lse[take], target[i], weight, weight_sum, grad_loss[take], part_lse, *terms)


def _forward_backward(
    logits: Tensor,
    rows: LossRows,
    grad: Tensor,
    target: Tensor,
    weight: Tensor | None,
    weight_sum: Tensor | None,
    grad_loss: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    logit_scale: float,
) -> tuple[Tensor, Tensor]:
    count, vocab = target.numel(), logits.shape[-1]
    loss = torch.empty((count,), dtype=compute_dtype(logits), device=logits.device)
    lse = torch.empty((count,), dtype=torch.float64, device=logits.device)
    if count == 0:
        return loss, lse
    kind, inner, outer = transform_of(softcap, logit_scale)
    shape, options = shape_options(logits, rows, True, label_smoothing > 0.0 or softcap != 0.0)
    launch(
        forward_backward_kernel, count, logits.device,
        logits, grad, loss, lse, target.reshape(-1), weight, weight_sum, grad_loss, grad_loss.stride(0), *shape,
        ignore_index, float(label_smoothing), label_smoothing / max(vocab, 1), float(z_loss), inner, outer,
        float(logit_scale),
        SMOOTHING=label_smoothing > 0.0, TRANSFORM=kind, INPLACE=grad is logits, **options,
    )  # fmt: skip
    return loss, lse


def forward_backward(logits: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(loss [N], lse [N], gradient of sum_n grad_loss_n loss_n). Arguments: see _forward_backward, from target on."""
    logits, rows = readable_rows(logits)
    grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
    return *_forward_backward(logits, rows, grad, *arguments), grad


def forward_backward_(logits: Tensor, target: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """`forward_backward`, with the gradient written over the logits."""
    rows = check_inplace(logits, "forward_backward_")
    if rows is not None:
        return _forward_backward(logits, rows, logits, target, *arguments)
    weight, weight_sum, grad_loss, *terms = arguments
    target = target.view(logits.shape[:-1])
    size = target[0].numel()
    parts = [
        forward_backward_(part, target[i], weight, weight_sum, grad_loss[i * size : (i + 1) * size], *terms)
        for i, part in enumerate(logits)
    ]
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def scale_unless_one_(x: Tensor, scalar: Tensor) -> None:
    """x *= scalar, a tensor of one element on x's device; where it is 1, x is not touched. No synchronisation.

    x must fill its memory without gaps (any order of dims).
    """
    if not torch.ops.aten.is_non_overlapping_and_dense(x):
        raise ValueError(f"x must be dense, got shape {tuple(x.shape)} with strides {x.stride()}")
    if scalar.numel() != 1:
        raise ValueError(f"scalar must have one element, got shape {tuple(scalar.shape)}")
    size = x.numel()
    if size == 0:
        return
    programs = min(cdiv(size, SCALE_BLOCK), SCALE_PROGRAMS)
    launch(scale_kernel, programs, x.device, x, scalar, size, BLOCK=SCALE_BLOCK, num_warps=8)
