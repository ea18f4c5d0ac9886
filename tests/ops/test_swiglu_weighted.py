"""SwiGLU with a weight for each row, every CPU instruction set against float64.

Tolerances as in test_swiglu.py: products of factors that are good to 2 ulp in float32, and one rounding in the 16-bit
types. A sum over a row has an error relative to the sum of its terms' sizes.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastpar import _ext
from tests import instruction_sets
from tests.ops.test_swiglu import assert_close, random

_ext.load()
K = torch.ops.fastpar


capability = instruction_sets.each()


def exact(grad_out: Tensor, gate_up: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
    """weights * f, the gradient of gate_up, that of the weights, in float64."""
    gate_up, weights = (t.double().requires_grad_() for t in (gate_up, weights))
    gate, up = gate_up.chunk(2, 1)
    out = F.silu(gate) * up * weights[:, None]
    return out.detach(), *torch.autograd.grad(out, (gate_up, weights), grad_out.double())


@pytest.mark.parametrize("features", [1, 67, 1024])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_with_weights_match_float64(capability: str, dtype: torch.dtype, features: int) -> None:
    wide = random(9, 2 * features + 5, dtype=dtype, scale=3.0)
    gate_up = wide[:, 2 : 2 * features + 2]  # rows that are further apart than they are long
    grad_out, weights = random(9, features, dtype=dtype), random(9).abs()
    wanted, by_gate_up, by_weights = exact(grad_out, gate_up, weights)

    out = torch.full((9, features), torch.nan, dtype=dtype)
    K.swiglu_weighted(gate_up, weights, out)
    assert_close(out, wanted, dtype)

    again, grad, dots = (
        torch.full_like(out, torch.nan),
        torch.full((9, 2 * features), torch.nan).to(dtype),
        out.new_empty(9, dtype=torch.float32),
    )
    K.swiglu_weighted_backward(grad_out, gate_up, weights, again, grad, dots)
    assert torch.equal(again, out)
    assert_close(grad, by_gate_up, dtype)
    sizes = exact(grad_out.abs(), gate_up.abs(), weights)[2]  # of the terms
    assert float(((dots - by_weights).abs() / sizes).max()) < 3e-6


def test_without_weights_the_bits_are_those_of_swiglu(capability: str) -> None:
    gate_up, grad_out = random(5, 86), random(5, 43)
    out, again, grad = torch.empty(5, 43), torch.empty(5, 43), torch.empty(5, 86)
    K.swiglu_weighted(gate_up, None, out)
    K.swiglu_weighted_backward(grad_out, gate_up, None, again, grad, None)
    wanted = K.swiglu(gate_up, None), K.swiglu_backward(grad_out, gate_up, None)[0]
    assert all(torch.equal(found, want) for found, want in zip((out, grad), wanted, strict=True))
    assert torch.equal(again, out)


def test_worked_example_of_the_kernel(capability: str) -> None:
    gate_up, weights = torch.tensor([[0.0, 1.0, 2.0, 3.0]]), torch.tensor([2.0])
    out, grad, dots = torch.empty(1, 2), torch.empty(1, 4), torch.empty(1)
    K.swiglu_weighted_backward(torch.ones(1, 2), gate_up, weights, out, grad, dots)
    for found, wanted in ((out, [[0, 4.38635]]), (grad, [[2, 5.56602, 0, 1.46212]]), (dots, [2.19318])):
        torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float32), rtol=1e-5, atol=1e-5)


def test_what_does_not_fit_is_named() -> None:
    gate_up, out = torch.zeros(3, 8), torch.zeros(3, 4)
    for arguments, message in (
        ((torch.zeros(3, 7), None, out), "even last dim"),
        ((gate_up, torch.zeros(2), out), r"weights must be \[3\]"),
        ((gate_up, torch.zeros(3).double(), out), "weights must be float32"),
        ((gate_up, None, torch.zeros(3, 5)), r"out must be a matrix \[3, 4\]"),
        ((gate_up, None, torch.zeros(4, 3).t()), "out must have dense rows"),
        ((gate_up.double(), None, out.double()), "must not be float64"),
    ):
        with pytest.raises(RuntimeError, match=message):
            K.swiglu_weighted(*arguments)
