"""The activation of experts on rows with weights, forward and backward into memory that is there.

    forward   out = w * f(hidden)
    backward  dhidden = w * f'(hidden) * dout      out = w * f(hidden) again      dw = <dout, f(hidden)>, by row

One C++ pass each for SwiGLU with gate and up apart, PyTorch for everything else.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastpar import _ext
from fastpar.reference.moe_mlp import ExpertRule, activate

_ext.load()


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
