"""The Triton kernels of RMSNorm against torch in float64; run by tests/ops/test_rms_norm.py in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fastpar.kernels import rms_norm as kernels
from fastpar.kernels.rows import as_rows

# The interpreter cuts bfloat16 off, where devices round to nearest.
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-11, torch.float64: 1e-12}
EPS = 2.0**-17  # a kernel's scalars are float32: this one is the same in float64


def assert_close(found: Tensor, exact: Tensor, terms: Tensor | None = None) -> None:
    """`terms` are what a difference is made of, where it may cancel: their rounding errors stay."""
    tolerance = ROUNDING[found.dtype]
    assert found.shape == exact.shape
    size = (exact if terms is None else terms).abs().max().item()
    atol = (1e-6 if tolerance > 1e-9 else 1e-12) * max(1.0, size)
    torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=atol)


def expected(
    grad_out: Tensor, grad_sum: Tensor | None, h: Tensor, weight: Tensor | None, offset: float
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(out, gradient of h, gradient of the weight)"""
    x = h.detach().double().requires_grad_()
    w = None if weight is None else weight.detach().double().requires_grad_()
    out = F.rms_norm(x, x.shape[-1:], None if w is None else w + offset, EPS)
    grads = torch.autograd.grad(out, [x] if w is None else [x, w], grad_out.double())
    grad_h = grads[0] if grad_sum is None else grads[0] + grad_sum.double()
    return out.detach(), grad_h, None if w is None else grads[1]


def check(x: Tensor, residual: Tensor | None, weight: Tensor | None, offset: float, num_programs: int) -> None:
    """Forward and backward of one call; the residual's gradient arrives where there is a residual."""
    grad_out = torch.randn(x.shape).to(x.dtype)
    grad_sum = None if residual is None else torch.randn(x.shape).to(x.dtype)
    out, summed, rstd = kernels.forward(x, residual, weight, EPS, offset)
    h = x if residual is None else summed
    if residual is not None:
        assert_close(summed, x.double() + residual.double())
    exact, grad_h, grad_w = expected(grad_out, grad_sum, h, weight, offset)
    assert_close(out, exact)
    assert_close(rstd, (h.double().square().mean(-1) + EPS).rsqrt().flatten())
    arguments = (grad_out, grad_sum, h, rstd, weight, offset)
    grad_x, grad_weight = kernels.backward(*arguments, True, weight is not None, num_programs)
    w = torch.ones(()) if weight is None else weight.double() + offset
    assert_close(grad_x, grad_h, grad_out.double() * w * rstd.double().view(*x.shape[:-1], 1))
    if grad_w is not None:
        assert_close(grad_weight, grad_w)
        assert torch.equal(kernels.backward(*arguments, False, True, num_programs)[1], grad_weight)
        assert torch.equal(kernels.backward(*arguments, True, False, num_programs)[0], grad_x)


@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize("hidden", [1, 1030])
def test_kernels_match_float64(dtype: torch.dtype, hidden: int) -> None:
    x, residual = (torch.randn(2, 3, hidden).to(dtype) for _ in range(2))
    weight = torch.randn(hidden).to(dtype)
    check(x, None, weight, 0.0, num_programs=2)
    check(x, residual, weight, 1.0, num_programs=5)


def test_rows_longer_than_a_block_match_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "MAX_BLOCK", 64)
    monkeypatch.setattr(kernels, "MAX_BLOCK_BACKWARD", 64)
    x, residual = torch.randn(2, 5, 200)
    weight = torch.randn(200)
    check(x, None, weight, 0.0, num_programs=2)
    check(x, residual, weight, 1.0, num_programs=2)
    check(x, residual, None, 0.0, num_programs=2)


def test_no_weight_a_weight_of_another_dtype_and_strided_rows() -> None:
    x = torch.randn(4, 2, 50).bfloat16().transpose(0, 1)[:, :, 3:43]
    check(x, None, None, 0.0, num_programs=3)
    check(x, x.contiguous(), torch.randn(40), 0.0, num_programs=3)
    check(torch.randn(40, 6).T, None, torch.randn(40), 0.0, num_programs=3)


class Allocations(TorchDispatchMode):
    """Counts torch's ops that make memory."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "new_" in str(func) or "empty" in str(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("hidden", [40, 20000])
def test_only_what_a_call_needs_is_allocated(hidden: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "launch", lambda *arguments, **options: None)
    x, weight = torch.ones(3, hidden), torch.ones(hidden)
    for residual, number in ((None, 2), (x, 3)):
        with Allocations() as forward:
            _, _, rstd = kernels.forward(x, residual, weight, EPS, 0.0)
        assert forward.count == number
    for needs, number in (((True, True), 3), ((True, False), 2), ((False, True), 3)):
        with Allocations() as backward:
            kernels.backward(x, None, x, rstd, weight, 0.0, *needs, 2)
        assert backward.count == number


def test_no_rows_leave_a_zero_weight_gradient() -> None:
    x, weight = torch.empty(0, 5), torch.ones(5)
    out, _, rstd = kernels.forward(x, None, weight, EPS, 0.0)
    assert out.shape == (0, 5)
    grad_x, grad_weight = kernels.backward(out, None, x, rstd, weight, 0.0, True, True, 2)
    assert grad_x.shape == (0, 5)
    assert torch.equal(grad_weight, torch.zeros(5))


def test_leading_dims_are_merged_where_every_tensor_allows_it() -> None:
    x = torch.randn(4, 3, 5, 8)
    assert as_rows(x)[0] == 60
    inner, ((same, outer, step), (_, other_outer, other_step)) = as_rows(
        x.flatten(1, 2).transpose(0, 1), x.view(15, 4, 8)
    )
    assert (inner, outer, step, other_outer, other_step) == (4, 8, 120, 32, 8)
    assert same.data_ptr() == x.data_ptr()
    inner, ((copied, outer, step),) = as_rows(x.permute(2, 1, 0, 3))
    assert (inner, outer, step) == (60, 0, 8)
    assert torch.equal(copied, x.permute(2, 1, 0, 3))
