"""Linear layers of several experts against a loop over them in float64.

Tolerances: sums of at most 19 products in float32, 1e-6 of the largest; bfloat16 results are rounded once, 2^-8.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastpar.ops import WeightGradStore
from fastpar.ops.moe import gemms as products
from fastpar.ops.moe.grouped_linear import grouped_linear, grouped_linear_dgrad, grouped_linear_wgrad
from fastpar.reference.grouped_linear import grouped_linear as reference_grouped_linear

SPLITS = (0, 5, 5, 16, 19)  # the second expert has no rows
COUNTS = (3, 0, 11, 2)
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8, torch.float64: 1e-14}


def problem(dtype: torch.dtype, transposed: bool = False, features: tuple[int, int] = (7, 9)) -> tuple[Tensor, ...]:
    """x, weight, bias, dout."""
    generator = torch.Generator().manual_seed(3)
    inputs, outputs = features
    shape = (4, inputs, outputs) if transposed else (4, outputs, inputs)
    shapes = ((SPLITS[-1], inputs), shape, (4, outputs), (SPLITS[-1], outputs))
    return tuple(torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes)


def gradients(function, x, weight, bias, dout, **options) -> list[Tensor]:
    """out, dx, dweight, dbias."""
    leaves = [t.detach().clone().requires_grad_() for t in (x, weight, bias)]
    out = function(leaves[0], leaves[1], SPLITS, leaves[2], **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def loop(x, weight, bias, dout, *, transposed=False, counts=None) -> list[Tensor]:
    """The same in float64, expert by expert."""
    x, weight, bias, dout = (t.double() for t in (x, weight, bias, dout))
    out, dx, dweight, dbias = dout * 0, x * 0, weight * 0, bias * 0
    for expert, begin in enumerate(SPLITS[:-1]):
        rows = slice(begin, SPLITS[expert + 1] if counts is None else begin + counts[expert])
        matrix = weight[expert] if transposed else weight[expert].T
        out[rows] = x[rows] @ matrix + bias[expert]
        dx[rows] = dout[rows] @ matrix.T
        dweight[expert] = x[rows].T @ dout[rows] if transposed else dout[rows].T @ x[rows]
        dbias[expert] = dout[rows].sum(0)
    return [out, dx, dweight, dbias]


def assert_close(found: list[Tensor], wanted: list[Tensor], dtype: torch.dtype) -> None:
    for name, got, want in zip(("out", "dx", "dweight", "dbias"), found, wanted, strict=True):
        assert got.dtype == dtype
        limit = TOLERANCE[dtype] * max(float(want.abs().max()), 1.0)
        error = float((got.double() - want).abs().max())
        assert error <= limit, f"{name} is off by {error:.3g}, allowed {limit:.3g}"


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_output_and_all_gradients_match_a_float64_loop(dtype, transposed):
    given = problem(dtype, transposed)
    found = gradients(grouped_linear, *given, transposed=transposed)
    assert_close(found, loop(*given, transposed=transposed), dtype)


def test_the_reference_is_the_same_function():
    given = problem(torch.float64)
    found = gradients(reference_grouped_linear, *given, counts=COUNTS)
    assert_close(found, loop(*given, counts=COUNTS), torch.float64)


def test_worked_example_of_the_docstring():
    x, weight = (torch.tensor(v).requires_grad_() for v in ([[1.0], [2.0], [3.0]], [[[10.0]], [[20.0]]]))
    out = grouped_linear(x, weight, (0, 1, 3))
    dx, dweight = torch.autograd.grad(out.sum(), (x, weight))
    assert [t.flatten().tolist() for t in (out, dx, dweight)] == [[10, 40, 60], [10, 20, 20], [1, 5]]


@pytest.fixture
def poisoned_buffers(monkeypatch):
    """Memory that is not written shows as NaN."""
    monkeypatch.setattr(
        products, "new_buffer", lambda like, shape, dtype=None: torch.full(shape, torch.nan, dtype=dtype or like.dtype)
    )


@pytest.mark.parametrize("transposed", [False, True])
def test_padding_rows_are_not_read_and_come_out_as_zeros(poisoned_buffers, transposed):
    x, weight, bias, dout = problem(torch.float32, transposed)
    clean = loop(x, weight, bias, dout, transposed=transposed, counts=COUNTS)
    for begin, end, count in zip(SPLITS, SPLITS[1:], COUNTS, strict=False):
        x[begin + count : end] = torch.nan
        dout[begin + count : end] = torch.nan
    found = gradients(grouped_linear, x, weight, bias, dout, counts=torch.tensor(COUNTS), transposed=transposed)
    assert_close(found, clean, torch.float32)


def test_an_expert_without_rows_has_gradients_of_zeros(poisoned_buffers):
    _, _, dweight, dbias = gradients(grouped_linear, *problem(torch.float32))
    assert torch.equal(dweight[1], torch.zeros(9, 7))
    assert torch.equal(dbias[1], torch.zeros(9))


def test_no_rows_at_all_give_gradients_of_zeros(poisoned_buffers):
    x, weight = torch.empty(0, 7, requires_grad=True), torch.randn(2, 9, 7, requires_grad=True)
    out = grouped_linear(x, weight, (0, 0, 0))
    assert out.shape == (0, 9)
    out.sum().backward()
    assert torch.equal(weight.grad, torch.zeros(2, 9, 7))
    assert x.grad.shape == (0, 7)


@pytest.mark.parametrize("transposed", [False, True])
def test_dgrad_and_wgrad_apart_have_the_bits_of_autograd(transposed):
    x, weight, bias, dout = problem(torch.float32, transposed)
    _, dx, dweight, _ = gradients(grouped_linear, x, weight, bias, dout, counts=COUNTS, transposed=transposed)
    options = {"counts": COUNTS, "transposed": transposed}
    assert torch.equal(grouped_linear_dgrad(dout, weight, SPLITS, **options), dx)
    assert torch.equal(grouped_linear_wgrad(dout, x, weight, SPLITS, **options), dweight)


@pytest.mark.parametrize("explicit", [True, False])
def test_a_store_gets_the_weight_gradients_and_nothing_else(explicit):
    x, weight, bias, dout = problem(torch.float32)
    _, dx, dweight, dbias = gradients(grouped_linear, x, weight, bias, dout)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    store = WeightGradStore()
    if explicit:
        out = grouped_linear(x, weight, SPLITS, bias, wgrad_store=store)
    else:
        with store.deferring():
            out = grouped_linear(x, weight, SPLITS, bias)
    out.backward(dout)
    assert torch.equal(leaves[0].grad, dx)
    assert (weight.grad, bias.grad) == (None, None)
    assert store.run() == 1
    assert torch.equal(weight.grad, dweight)
    assert torch.equal(bias.grad, dbias)


@pytest.mark.parametrize("transposed", [False, True])
def test_one_launch_for_all_experts_computes_the_same(monkeypatch, transposed):
    """What runs on CUDA, here with torch's kernel for CPU."""
    x, weight, _, dout = problem(torch.bfloat16, transposed, (16, 24))
    bias = torch.zeros(4, 24, dtype=torch.bfloat16)
    wanted = loop(x, weight, bias, dout, transposed=transposed)
    calls = []
    original = torch.nn.functional.grouped_mm
    monkeypatch.setattr(products, "_takes_grouped", lambda *_: True)
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", lambda *a, **k: calls.append(1) or original(*a, **k))
    leaves = [t.requires_grad_() for t in (x, weight)]
    out = grouped_linear(*leaves, SPLITS, transposed=transposed)
    found = [out.detach(), *torch.autograd.grad(out, leaves, dout), wanted[3].bfloat16()]
    assert len(calls) == 3
    assert_close(found, wanted, torch.bfloat16)
    assert not found[2][1].any()


def test_frozen_operands_need_no_gradient():
    x, weight, bias, dout = problem(torch.float32)
    wanted = gradients(grouped_linear, x, weight, bias, dout)
    for index, tensor in enumerate((x, weight, bias)):
        tensor.requires_grad_()
        (found,) = torch.autograd.grad(grouped_linear(x, weight, SPLITS, bias), tensor, dout)
        tensor.requires_grad_(False)
        assert torch.equal(found, wanted[1 + index])
    assert grouped_linear(x, weight, SPLITS, bias).grad_fn is None


def test_autocast_computes_in_its_dtype():
    x, weight, bias, dout = problem(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
        out = grouped_linear(leaves[0], leaves[1], SPLITS, leaves[2])
    assert out.dtype == torch.bfloat16
    out.backward(dout.bfloat16())
    assert [t.grad.dtype for t in leaves] == [torch.float32] * 3
    assert torch.equal(out, grouped_linear(x.bfloat16(), weight.bfloat16(), SPLITS, bias.bfloat16()))


def test_a_compiled_call_computes_the_same():
    given = problem(torch.float32)
    compiled = torch.compile(grouped_linear, backend="aot_eager", fullgraph=True)
    assert_close(gradients(compiled, *given, counts=COUNTS), loop(*given, counts=COUNTS), torch.float32)


def test_a_second_derivative_is_refused_with_an_alternative():
    x, weight, _, dout = problem(torch.float32)
    x.requires_grad_()
    out = grouped_linear(x, weight.requires_grad_(), SPLITS)
    (dx,) = torch.autograd.grad(out, x, dout.requires_grad_(), create_graph=True)
    with pytest.raises(RuntimeError, match=r"grouped_linear has a first derivative only; fastpar.reference"):
        dx.sum().backward()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"splits": (0, 5, 19)}, "splits must be 5 numbers"),
        ({"splits": (0, 5, 4, 16, 19)}, "do not fall"),
        ({"splits": (0, 5, 5, 16, 18)}, "rows that splits end with, 18, got 19"),
        ({"counts": (6, 0, 0, 0)}, r"counts must be 4 numbers within the rows of the experts \[5, 0, 11, 3\]"),
        ({"weight": torch.zeros(4, 9, 8)}, r"must agree in K, got \(19, 7\) and \(4, 9, 8\)"),
        ({"bias": torch.zeros(4, 8)}, r"bias must be \[E, F\], \(4, 9\), got \(4, 8\)"),
        ({"weight": torch.zeros(4, 9, 7, dtype=torch.float64)}, "weight must have the dtype of x"),
    ],
)
def test_what_does_not_fit_together_is_named(change, message):
    x, weight, bias, _ = problem(torch.float32)
    given = {"x": x, "weight": weight, "splits": SPLITS, "bias": bias} | change
    with pytest.raises((ValueError, TypeError), match=message):
        grouped_linear(**given)
