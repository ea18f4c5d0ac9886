"""GEMMs of rows that lie by expert with the matrices of the experts, and the activation between two of them.

Matrices are [E, F, K] or, transposed, [E, K, F]. Rows come with `rows`, the slice of each expert's: what lies between
the slices is padding, which is neither read nor, unless it is said, written.

On CPU one GEMM an expert, written where it belongs. On CUDA one launch for all experts: `F.grouped_mm` for bfloat16
without bias or padding, `fastpar.kernels.grouped_gemm` for the rest (float32 without TF32); float64
has one GEMM an expert there, too.

The activation, on rows with weights, forward and backward into memory that is there:

    forward   out = w * f(hidden)
    backward  dhidden = w * f'(hidden) * dout      out = w * f(hidden) again      dw = <dout, f(hidden)>, by row

One C++ pass each for SwiGLU with gate and up apart, PyTorch for everything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fastpar import _ext
from fastpar.contracts.moe import ExpertRule, activate
from fastpar.ops._backends import has_kernels
from fastpar.ops._buffers import new_buffer

if TYPE_CHECKING:
    from fastpar.kernels.grouped_gemm import RowGroups

_ext.load()

_GROUPED_ALIGNMENT = 16  # bytes, of every row that grouped_mm reads or writes
_TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def matmul(a: Tensor, b: Tensor, out: Tensor, *, bias: Tensor | None = None, alpha: float = 1.0) -> Tensor:
    """out = alpha * a @ b (+ bias) for matrices. Unlike torch.mm(a, b), never touched by autocast."""
    if bias is not None:
        return torch.addmm(bias, a, b, alpha=alpha, out=out)
    if alpha != 1.0:
        return torch.addmm(out, a, b, beta=0, alpha=alpha, out=out)  # beta = 0: `out` is not read
    return torch.mm(a, b, out=out)


def forward(x: Tensor, weight: Tensor, rows: Sequence[slice], bias: Tensor | None, *, transposed: bool) -> Tensor:
    """out [N, F]: the rows of x through their expert's matrix; padding rows are zeros."""
    matrices = weight if transposed else weight.transpose(1, 2)  # [E, K, F]
    if bias is None and _takes_grouped(x, rows, *matrices.shape[1:]):
        return torch.nn.functional.grouped_mm(x, matrices, offs=_ends(rows, x.device))
    if _takes_triton(x):
        return _triton_forward(x, weight, rows, bias, transposed=transposed)
    out = new_buffer(x, (len(x), matrices.shape[2]))
    _zero_padding(out, rows)
    for expert, mine in enumerate(rows):
        if mine.start < mine.stop:
            matmul(x[mine], matrices[expert], out[mine], bias=None if bias is None else bias[expert])
    return out


def dgrad(dout: Tensor, weight: Tensor, rows: Sequence[slice], *, transposed: bool) -> Tensor:
    """dx [N, K] from dout [N, F]; padding rows are zeros."""
    return forward(dout, weight, rows, None, transposed=not transposed)


def wgrad(dout: Tensor, x: Tensor, like: Tensor, rows: Sequence[slice], *, transposed: bool) -> Tensor:
    """dweight in the shape of `like`, zeros for an expert without rows."""
    left, right = (x, dout) if transposed else (dout, x)
    if _takes_grouped(x, rows, *like.shape[1:]):
        out = torch.nn.functional.grouped_mm(left.t(), right, offs=_ends(rows, x.device))
    elif _takes_triton(x):
        from fastpar.kernels import grouped_gemm

        groups, index = _triton_rows(x, rows)
        # A row that one index leaves out is read of neither: what lies in padding may be NaN.
        return grouped_gemm.grouped_wgrad(left, right, groups, left_index=index)
    else:
        out = new_buffer(like, like.shape)
        for expert, mine in enumerate(rows):
            wgrad_of(left[mine], right[mine], out[expert])
    for expert, mine in enumerate(rows):
        if mine.start == mine.stop:
            out[expert].zero_()  # a GEMM of nothing need not write
    return out


def wgrad_of(left: Tensor, right: Tensor, out: Tensor, *, alpha: float = 1.0) -> None:
    """out = alpha * left.T @ right for one expert; without rows nothing is written."""
    if len(left):
        matmul(left.t(), right, out, alpha=alpha)


def bias_grad(dout: Tensor, like: Tensor, rows: Sequence[slice]) -> Tensor:
    """dbias [E, F], zeros for an expert without rows."""
    if _takes_triton(dout):
        from fastpar.kernels import grouped_gemm

        groups, index = _triton_rows(dout, rows)
        return grouped_gemm.grouped_bias_grad(dout, groups, index=index)
    out = new_buffer(like, like.shape)
    for expert, mine in enumerate(rows):
        torch.sum(dout[mine], 0, out=out[expert])
    return out


def _zero_padding(out: Tensor, rows: Sequence[slice]) -> None:
    starts = [mine.start for mine in rows[1:]] + [len(out)]
    for mine, following in zip(rows, starts, strict=True):
        if mine.stop < following:
            out[mine.stop : following].zero_()


def _takes_grouped(x: Tensor, rows: Sequence[slice], *sizes: int) -> bool:
    """Whether grouped_mm computes this: on CUDA, bfloat16, rows of 16 bytes, no padding between the experts."""
    if x.device.type != "cuda" or x.dtype != torch.bfloat16 or not hasattr(torch.nn.functional, "grouped_mm"):
        return False
    is_dense = len(x) > 0 and sum(mine.stop - mine.start for mine in rows) == len(x)
    is_aligned = all(size * x.element_size() % _GROUPED_ALIGNMENT == 0 for size in sizes)
    return is_dense and is_aligned and x.is_contiguous() and x.data_ptr() % _GROUPED_ALIGNMENT == 0


def _ends(rows: Sequence[slice], device: torch.device) -> Tensor:
    return torch.tensor([mine.stop for mine in rows], dtype=torch.int32, device=device)


def _takes_triton(x: Tensor) -> bool:
    return x.device.type == "cuda" and x.dtype in _TRITON_DTYPES and has_kernels(x)


def _triton_forward(
    x: Tensor, weight: Tensor, rows: Sequence[slice], bias: Tensor | None, *, transposed: bool
) -> Tensor:
    from fastpar.kernels import grouped_gemm

    groups, index = _triton_rows(x, rows)
    out = grouped_gemm.grouped_linear(x, weight, groups, bias, index=index, transposed=transposed)
    if bias is not None and index is not None:
        out.masked_fill_((index < 0)[:, None], 0.0)  # padding has the bias of its expert
    return out


def _triton_rows(x: Tensor, rows: Sequence[slice]) -> tuple[RowGroups, Tensor | None]:
    """The experts' rows with their padding, and which rows are read: int64 [N], -1 for padding; None: all of them."""
    from fastpar.kernels.grouped_gemm import RowGroups

    starts, stops = [mine.start for mine in rows], [mine.stop for mine in rows]
    numbers = torch.tensor([[*starts, len(x)], [*stops, 0]], device=x.device)
    groups = RowGroups(numbers[0], len(x), x.device)
    if stops == [*starts[1:], len(x)]:
        return groups, None
    row = torch.arange(len(x), device=x.device)
    # Of experts whose rows begin at one place the last is found, which is the one that has room.
    expert = torch.searchsorted(numbers[0, :-1].contiguous(), row, right=True) - 1
    return groups, torch.where(row < numbers[1][expert], row, -1)


# ---- activation ------------------------------------------------------------------------------------------------------


@torch.library.register_fake("fastpar::swiglu_weighted")
def _forward_fake(gate_up: Tensor, weights: Tensor | None, out: Tensor) -> None:
    return None


@torch.library.register_fake("fastpar::swiglu_weighted_backward")
def _backward_fake(
    grad_out: Tensor, gate_up: Tensor, weights: Tensor | None, out: Tensor, grad_gate_up: Tensor, dots: Tensor | None
) -> None:
    return None


def _has_kernel(hidden: Tensor, rule: ExpertRule) -> bool:
    is_plain = rule.activation == "swiglu" and not rule.interleaved
    return is_plain and hidden.device.type == "cpu" and hidden.dtype != torch.float64


def activate_rows(hidden: Tensor, rule: ExpertRule, weights: Tensor | None, out: Tensor) -> Tensor:
    """out = weights * f(hidden).

    hidden   [n, 2I] or [n, I]
    weights  [n]      float32, or None: 1
    out      [n, I]
    """
    if _has_kernel(hidden, rule):
        torch.ops.fastpar.swiglu_weighted(hidden, weights, out)
        return out
    found = activate(hidden, rule)
    return out.copy_(found if weights is None else _scaled(found, weights))


def activate_rows_backward(
    dout: Tensor, hidden: Tensor, rule: ExpertRule, weights: Tensor | None, out: Tensor, dhidden: Tensor,
    dots: Tensor | None,
) -> None:  # fmt: skip
    """Writes weights * f(hidden) to `out` [n, I], and the gradients of hidden and, unless None, of weights.

    dout     [n, I]   of weights * f(hidden)
    dhidden  [n, 2I] or [n, I]
    dots     [n]      float32: <dout, f(hidden)>
    """
    if _has_kernel(hidden, rule):
        torch.ops.fastpar.swiglu_weighted_backward(dout, hidden, weights, out, dhidden, dots)
        return
    with torch.enable_grad():
        given = hidden.detach().requires_grad_()
        found = activate(given, rule)
    by_hidden = torch.autograd.grad(found, given, dout if weights is None else _scaled(dout, weights))[0]
    dhidden.copy_(by_hidden)
    found = found.detach()
    if dots is not None:
        wide = torch.promote_types(found.dtype, torch.float32)
        dots.copy_((found.to(wide) * dout.to(wide)).sum(1))
    out.copy_(found if weights is None else _scaled(found, weights))


def _scaled(rows: Tensor, weights: Tensor) -> Tensor:
    wide = torch.promote_types(rows.dtype, torch.float32)
    return rows.to(wide) * weights.to(wide)[:, None]
