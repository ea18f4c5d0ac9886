"""The Triton kernels of SwiGLU against torch in float64; run by tests/ops/test_swiglu.py in Triton's interpreter."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastpar.kernels import swiglu as kernels

# The interpreter cuts bfloat16 off, where devices round to nearest.
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-11, torch.float64: 1e-12}


def assert_close(found: Tensor, exact: Tensor) -> None:
    tolerance = ROUNDING[found.dtype]
    assert found.shape == exact.shape
    torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=1e-6 if tolerance > 1e-9 else 1e-12)


def expected(grad_out: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    gate, up = (t.detach().double().requires_grad_() for t in (gate, up))
    out = F.silu(gate) * up
    return out.detach(), *torch.autograd.grad(out, (gate, up), grad_out.double())


@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize("features", [1, 2051])
def test_packed_and_separate_tensors_match_float64(dtype: torch.dtype, features: int) -> None:
    packed = (2 * torch.randn(2, 3, 2 * features)).to(dtype)
    grad_out = torch.randn(2, 3, features).to(dtype)
    gate, up = packed.chunk(2, -1)
    out, grad_gate, grad_up = expected(grad_out, gate, up)
    assert_close(kernels.forward(packed, None), out)
    assert_close(kernels.forward(gate, up), out)
    grad_packed, empty = kernels.backward(grad_out, packed, None)
    assert_close(grad_packed, torch.cat([grad_gate, grad_up], -1))
    assert empty.numel() == 0
    found = kernels.backward(grad_out, gate.contiguous(), up)
    assert_close(found[0], grad_gate)
    assert_close(found[1], grad_up)


def test_strided_rows_and_empty_tensors() -> None:
    wide = torch.randn(3, 2, 40)
    packed = wide.transpose(0, 1)[:, :, 3:33]
    grad_out = torch.randn(1, 1, 15).expand(2, 3, 15)
    out, grad_gate, grad_up = expected(grad_out, *packed.chunk(2, -1))
    assert_close(kernels.forward(packed, None), out)
    assert_close(kernels.backward(grad_out, packed, None)[0], torch.cat([grad_gate, grad_up], -1))
    columns = torch.randn(10, 4).T
    assert_close(kernels.forward(columns, None), expected(torch.ones(4, 5), *columns.chunk(2, -1))[0])
    empty = torch.empty(0, 6)
    assert kernels.forward(empty, None).shape == (0, 3)
    assert kernels.backward(torch.empty(0, 3), empty, None)[0].shape == (0, 6)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of inf * 0
def test_infinities_and_nan_are_as_in_torch() -> None:
    gate = torch.tensor([math.inf, -math.inf, math.nan, 100.0, -100.0])
    up = torch.ones(5)
    torch.testing.assert_close(kernels.forward(gate, up), F.silu(gate), equal_nan=True)
    leaf = gate.clone().requires_grad_()
    (grad,) = torch.autograd.grad(F.silu(leaf).sum(), leaf)
    torch.testing.assert_close(kernels.backward(up, gate, up)[0], grad, equal_nan=True)
