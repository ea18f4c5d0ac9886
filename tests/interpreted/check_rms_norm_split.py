"""The Triton kernels of RMSNorm over split rows against torch in float64; run by tests/ops/test_rms_norm_split.py in
Triton's interpreter. The row of a "rank" is a slice of the whole one here; sums over ranks are sums."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastpar.kernels import rms_norm_split as kernels

# The interpreter cuts bfloat16 off, where devices round to nearest.
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float64: 1e-12}
EPS = 2.0**-17


def assert_close(found: Tensor, exact: Tensor, terms: float = 1.0) -> None:
    tolerance = ROUNDING[found.dtype]
    atol = (2e-6 if tolerance > 1e-9 else 1e-12) * max(1.0, terms)
    torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=atol)


@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize("sizes", [(3, 0, 14), (4100, 1)])
@pytest.mark.parametrize("has_all", [True, False])
def test_parts_of_rows_give_the_norm_of_whole_rows(dtype: torch.dtype, sizes: tuple[int, ...], has_all: bool) -> None:
    hidden, offset = sum(sizes), 1.0 if has_all else 0.0
    x, residual, grad_out, grad_h = (torch.randn(2, 3, hidden).to(dtype) for _ in range(4))
    weight = torch.randn(hidden).to(dtype) if has_all else None
    w = torch.ones(hidden, dtype=torch.float64) if weight is None else weight.double() + offset
    parts = [t.split(sizes, -1) for t in (x, residual, grad_out, grad_h)]  # not contiguous
    weights = [None] * len(sizes) if weight is None else weight.split(sizes)

    found = [kernels.squares(a, r if has_all else None) for a, r in zip(parts[0], parts[1], strict=True)]
    rows = [s if has_all else a for (_, s), a in zip(found, parts[0], strict=True)]
    h = torch.cat(rows, -1)
    if has_all:
        assert_close(h, x.double() + residual.double(), 4.0)
    total = sum(s for s, _ in found)
    assert isinstance(total, Tensor)
    assert_close(total, h.double().square().sum(-1).flatten(), float(hidden))
    rstd = (total.double() / hidden + EPS).rsqrt().to(total.dtype)

    leaf = h.double().requires_grad_()
    exact = F.rms_norm(leaf, (hidden,), w, EPS)
    (grad,) = torch.autograd.grad(exact, leaf, grad_out.double())
    out = torch.cat([kernels.scale(a, rstd, b, offset) for a, b in zip(rows, weights, strict=True)], -1)
    assert_close(out, exact.detach())
    dots = [kernels.products(g, a, b, offset) for g, a, b in zip(parts[2], rows, weights, strict=True)]
    factor = (torch.stack(dots).sum(0).double() / hidden * rstd.double().square()).to(rstd.dtype)
    grads = [
        kernels.grad_x(g, s if has_all else None, a, rstd, factor, b, offset)
        for g, s, a, b in zip(parts[2], parts[3], rows, weights, strict=True)
    ]
    size = float((grad_out.double() * w * rstd.double().view(2, 3, 1)).abs().max())
    assert_close(torch.cat(grads, -1), grad + grad_h.double() if has_all else grad, size)


def test_empty_tensors() -> None:
    empty = torch.empty(0, 6)
    squares, summed = kernels.squares(empty, empty)
    assert (squares.shape, summed.shape) == ((0,), (0, 6))
    assert kernels.scale(empty, squares, None, 0.0).shape == (0, 6)
    assert kernels.products(empty, empty, None, 0.0).shape == (0,)
    assert kernels.grad_x(empty, None, empty, squares, squares, None, 0.0).shape == (0, 6)
