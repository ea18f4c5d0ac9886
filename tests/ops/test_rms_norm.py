"""RMSNorm: every CPU instruction set against float64, layouts, determinism, and what torch expects of an op.

Tolerances. Sums of squares and products are float32 in at least 8 lanes, so their relative error stays below 1e-6 here;
results have a few roundings more: 2e-6. A gradient is a difference, so its error is relative to the largest term, and
with hidden size 1 it is nothing but that error. The weight's gradient is a float32 sum over the rows, compared relative
to the sum of magnitudes. bfloat16 and float16 add one rounding (2^-8 and 2^-11).
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastpar import ops, reference
from tests import instruction_sets
from tests.triton_aot import HOPPER, LDS_LIMIT, MI300, SHARED_LIMIT, compile_for
from tests.triton_interpreter import run_interpreted
from tests.values import random

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float64: 1e-13}
EPS = 1e-5
rms_norm, add_rms_norm = ops.rms_norm, ops.add_rms_norm
K = torch.ops.fastpar


capability = instruction_sets.each()


def assert_close(found: Tensor | None, exact: Tensor, dtype: torch.dtype, terms: Tensor | None = None) -> None:
    """`terms` are what a sum that may cancel is made of; the default is the result itself."""
    assert found is not None
    assert (found.dtype, found.shape) == (dtype, exact.shape)
    size = exact if terms is None else terms
    peak = size.abs().max().item() if size.numel() else 0.0
    # float16 values below 2^-14 are subnormal and round to a multiple of 2^-24.
    atol = min(ROUNDING[dtype], 2e-6) * peak + (2.0**-25 if dtype == torch.float16 else 0.0)
    torch.testing.assert_close(found.double(), exact, rtol=ROUNDING[dtype], atol=atol)


def check(
    x: Tensor, weight: Tensor | None, *, residual: Tensor | None = None, offset: float = 0.0
) -> tuple[Tensor | None, ...]:
    """Forward and backward of one call against float64, with a gradient arriving at h where there is a residual.

    Returns the gradients of x, residual and weight.
    """
    dtype, grad_out, grad_h = x.dtype, random(*x.shape, dtype=x.dtype, seed=1), random(*x.shape, dtype=x.dtype, seed=2)
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in (x, residual, weight)]
    a, r, w = leaves
    assert a is not None
    if r is None:
        out = rms_norm(a, w, eps=EPS, weight_offset=offset)
        out.backward(grad_out)
        h = x
    else:
        out, h = add_rms_norm(a, r, w, eps=EPS, weight_offset=offset)
        assert residual is not None
        assert torch.equal(h, x + residual), "h is not the sum, rounded once"
        torch.autograd.backward((out, h), (grad_out, grad_h))

    exact_h = h.detach().to(torch.float64, copy=True).requires_grad_()
    exact_w = torch.ones(x.shape[-1]) if weight is None else weight.detach()
    exact_w = exact_w.to(torch.float64, copy=True).requires_grad_()
    exact = F.rms_norm(exact_h, x.shape[-1:], exact_w + offset, EPS)
    grad_x, grad_w = torch.autograd.grad(exact, (exact_h, exact_w), grad_out.double())
    rstd = (exact_h.detach().square().mean(-1, keepdim=True) + EPS).rsqrt()
    terms = grad_out.double() * (exact_w.detach() + offset) * rstd
    assert_close(out, exact.detach(), dtype)
    assert_close(a.grad, grad_x if r is None else grad_x + grad_h.double(), dtype, terms)
    if r is not None:
        assert r.grad is not None
        assert a.grad is not None
        assert torch.equal(r.grad, a.grad)
    if w is not None:
        share = (grad_out.double() * exact_h.detach() * rstd).abs().flatten(0, -2).sum(0)
        assert w.grad is not None
        assert w.grad.dtype == w.dtype
        in_float32 = w.dtype == torch.float64 != dtype  # a wider weight gets what was summed in float32
        assert_close(w.grad.float() if in_float32 else w.grad, grad_w, torch.float32 if in_float32 else w.dtype, share)
    return tuple(None if t is None else t.grad for t in leaves)


# ---- against float64 -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [1, 67, 1023])
def test_forward_and_gradients_match_float64(capability: str, dtype: torch.dtype, hidden: int) -> None:
    x, residual = random(3, 7, hidden, dtype=dtype), random(3, 7, hidden, dtype=dtype, seed=3)
    weight = random(hidden, dtype=dtype)
    check(x, weight)
    check(x, weight, residual=residual, offset=1.0)
    check(x, None, residual=residual)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", DTYPES)
def test_a_weight_may_have_any_dtype(dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    check(random(5, 100, dtype=dtype), random(100, dtype=weight_dtype), offset=1.0)


def test_worked_example_of_the_docstring(capability: str) -> None:
    x, weight = torch.tensor([3.0, 4.0], requires_grad=True), torch.tensor([1.0, 2.0], requires_grad=True)
    out = rms_norm(x, weight, eps=0.0)
    out.backward(torch.tensor([1.0, 0.0]))
    torch.testing.assert_close(out, torch.tensor([0.848528, 2.262742]))
    torch.testing.assert_close(x.grad, torch.tensor([0.181019, -0.135765]), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(weight.grad, torch.tensor([0.848528, 0.0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_is_that_of_the_rounded_sum(capability: str, dtype: torch.dtype) -> None:
    x, residual, weight = random(9, 300, dtype=dtype), 100 * random(9, 300, dtype=dtype, seed=1), torch.ones(300)
    out, h = add_rms_norm(x, residual, weight)
    assert torch.equal(out, rms_norm(h, weight))


@pytest.mark.parametrize("dtype", DTYPES)
def test_infinities_and_nan_are_as_in_torch(capability: str, dtype: torch.dtype) -> None:
    x = random(6, 37, dtype=dtype)
    x[0, 3], x[1, 5], x[2, 36] = math.inf, -math.inf, math.nan
    x[3] = 0.0
    torch.testing.assert_close(rms_norm(x, None, eps=0.0), F.rms_norm(x, (37,), eps=0.0), equal_nan=True)
    torch.testing.assert_close(rms_norm(x, None), F.rms_norm(x, (37,), eps=1e-6), equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("odd", [0, 1])
def test_streamed_results_of_large_tensors_match(capability: str, dtype: torch.dtype, odd: int) -> None:
    # Above 8 MiB results are stored past the caches, which needs aligned addresses; odd rows begin misaligned.
    x = random(60000 + odd).to(dtype).repeat(72, 1)
    x[::3] *= 2
    assert x.numel() * dtype.itemsize > 8 << 20
    weight = random(60000 + odd)
    residual, grad_out, grad_h = x.roll(1), x.roll(2, 0), x.roll(3, 0)
    out, h, rstd = K.add_rms_norm(x, residual, weight, EPS, 1.0)
    grad, _ = K.rms_norm_backward(grad_out, grad_h, h, rstd, weight, 1.0, True, False)
    for row in (0, 1, 2, 71):  # a row alone is not streamed
        one, one_h, one_rstd = K.add_rms_norm(x[row], residual[row], weight, EPS, 1.0)
        assert torch.equal(out[row], one)
        assert torch.equal(h[row], one_h)
        found = K.rms_norm_backward(grad_out[row], grad_h[row], one_h, one_rstd, weight, 1.0, True, False)[0]
        assert torch.equal(grad[row], found)
    assert torch.equal(K.rms_norm(x, weight, EPS, 1.0)[0][5], K.rms_norm(x[5], weight, EPS, 1.0)[0])


# ---- the weight's gradient -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("rows", [1, 9, 129, 8101])
def test_the_gradient_of_the_weight_matches_over_any_number_of_rows(
    capability: str, dtype: torch.dtype, rows: int
) -> None:
    check(random(rows, 33, dtype=dtype), random(33))


def test_no_result_depends_on_the_number_of_threads() -> None:
    x, grad_out, weight = random(3001, 65), random(3001, 65, seed=1), random(65)
    threads = torch.get_num_threads()
    results = []
    for count in (1, 2):
        torch.set_num_threads(count)
        out, h, rstd = K.add_rms_norm(x, grad_out, weight, EPS, 0.0)
        results.append((out, h, rstd, *K.rms_norm_backward(grad_out, x, h, rstd, weight, 0.0, True, True)))
    torch.set_num_threads(threads)
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)


def test_gradients_can_be_computed_apart() -> None:
    x, grad_out, weight = random(50, 65), random(50, 65, seed=1), random(65)
    _, rstd = K.rms_norm(x, weight, EPS, 0.0)
    both = K.rms_norm_backward(grad_out, None, x, rstd, weight, 0.0, True, True)
    dgrad = K.rms_norm_backward(grad_out, None, x, rstd, weight, 0.0, True, False)
    wgrad = K.rms_norm_backward(grad_out, None, x, rstd, weight, 0.0, False, True)
    assert torch.equal(dgrad[0], both[0])
    assert torch.equal(wgrad[1], both[1])
    assert dgrad[1].numel() == wgrad[0].numel() == 0


def test_only_the_gradients_that_are_needed_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastpar.ops.rms_norm import _backward

    asked: list[Any] = []
    monkeypatch.setitem(
        inspect.unwrap(rms_norm).__globals__,
        "_backward",
        lambda *arguments, **options: asked.append(arguments[-2:]) or _backward(*arguments, **options),
    )
    for leaves in ([0], [1], [2], [0, 2]):
        x, residual, weight = tensors = [random(4, 9), random(4, 9), random(9)]
        for index in leaves:
            tensors[index].requires_grad_()
        out, h = add_rms_norm(x, residual, weight)
        (out.sum() + h.sum()).backward()
        assert [t.grad is not None for t in tensors] == [i in leaves for i in range(3)]
    assert asked == [(True, False), (True, False), (False, True), (True, True)]


# ---- which outputs are used ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("used", ["out", "h", "both"])
def test_gradients_are_right_whichever_output_is_used(used: str) -> None:
    def loss(function: Any, x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        out, h = function(x, residual, weight)
        return (out.square().sum() if used != "h" else 0.0) + (h.cos().sum() if used != "out" else 0.0)

    tensors = [random(4, 10), random(4, 10, seed=1), random(10)]
    a, b = ([t.clone().requires_grad_() for t in tensors] for _ in range(2))
    loss(add_rms_norm, *a).backward()
    loss(reference.add_rms_norm, *b).backward()
    for found, wanted in zip(a, b, strict=True):
        if wanted.grad is None or used == "h":
            assert found.grad is None or torch.equal(found.grad, wanted.grad)
        else:
            torch.testing.assert_close(found.grad, wanted.grad)


def test_a_chain_of_blocks_over_one_residual_stream_matches_the_reference() -> None:
    def stack(function: Any, x: Tensor, weights: list[Tensor]) -> Tensor:
        stream = x
        for weight in weights:
            out, stream = function(stream.tanh(), stream, weight)
            stream = stream + out
        return stream.square().sum()

    inputs = [random(3, 24), *(random(24, seed=i) for i in range(4))]
    a, b = ([t.clone().requires_grad_() for t in inputs] for _ in range(2))
    stack(add_rms_norm, a[0], a[1:]).backward()
    stack(reference.add_rms_norm, b[0], b[1:]).backward()
    for found, wanted in zip(a, b, strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-5, atol=1e-4)


# ---- layouts and sizes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["sliced", "transposed rows", "strided hidden", "expanded"])
def test_any_strides_give_the_contiguous_result(capability: str, layout: str) -> None:
    base, weight = random(4, 6, 85), random(170)[::2]
    x = {
        "sliced": torch.nn.functional.pad(base, (3, 2, 1, 0))[:, 1:, 3:-2],
        "transposed rows": base.transpose(0, 1),
        "strided hidden": base.permute(2, 1, 0).contiguous().permute(2, 1, 0),
        "expanded": base[:1].expand(4, 6, 85),
    }[layout]
    residual = random(x.shape[1], x.shape[0], 85).transpose(0, 1)
    grads = [random(*x.shape, seed=1)[:, ::2].repeat_interleave(2, 1), residual.sin()]
    results = []
    for a, r in ((x, residual), (x.contiguous(), residual.contiguous())):
        a, r = a.detach().requires_grad_(), r.detach().requires_grad_()
        outputs = add_rms_norm(a, r, weight)
        results.append(
            (*outputs, *torch.autograd.grad(outputs, (a, r), [g if a is x else g.contiguous() for g in grads]))
        )
    assert not x.is_contiguous()
    for found, wanted in zip(*results, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (2, 0, 6), (0,)])
def test_empty_tensors_have_empty_results_and_a_zero_weight_gradient(shape: tuple[int, ...]) -> None:
    x, weight = torch.empty(shape, requires_grad=True), torch.ones(shape[-1], requires_grad=True)
    out, h = add_rms_norm(x, x.detach(), weight)
    assert out.shape == h.shape == shape
    (out.sum() + h.sum()).backward()
    assert x.grad is not None
    assert x.grad.shape == shape
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.zeros(shape[-1]))


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [ops, reference])
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"x": torch.zeros(3, 8, dtype=torch.int64)}, TypeError, "got torch.int64"),
        ({"x": torch.tensor(1.0)}, ValueError, "got a scalar"),
        ({"weight": torch.zeros(7)}, ValueError, r"weight must be \[8\].*got \(7,\)"),
        ({"weight": torch.zeros(8, dtype=torch.int8)}, TypeError, "got torch.int8"),
        ({"weight": torch.zeros(8, device="meta")}, ValueError, "got cpu and meta"),
        ({"residual": torch.zeros(3, 9)}, ValueError, r"got \(3, 8\) and \(3, 9\)"),
        ({"residual": torch.zeros(3, 8).half()}, TypeError, "got torch.float32 and torch.float16"),
        ({"eps": -1e-6}, ValueError, "got -1e-06"),
        ({"eps": math.nan}, ValueError, "got nan"),
        ({"weight_offset": math.inf}, ValueError, "got inf"),
        ({"weight": None, "weight_offset": 1.0}, ValueError, r"weight_offset \(1.0\).*weight is None"),
    ],
)
def test_bad_arguments_are_named(family: Any, arguments: Any, error: type[Exception], message: str) -> None:
    call = {"x": torch.zeros(3, 8), "weight": torch.ones(8), **arguments}
    with pytest.raises(error, match=message):
        (family.add_rms_norm if "residual" in call else family.rms_norm)(**call)


def test_the_ops_check_what_they_are_given() -> None:
    x, rstd = torch.zeros(3, 4), torch.zeros(3)
    with pytest.raises(RuntimeError, match=r"weight must be \[4\]"):
        K.rms_norm(x, torch.zeros(3), EPS, 0.0)
    with pytest.raises(RuntimeError, match="residual must have the shape of x"):
        K.add_rms_norm(x, torch.zeros(4, 3), None, EPS, 0.0)
    with pytest.raises(RuntimeError, match=r"rstd must be \[3\]"):
        K.rms_norm_backward(x, None, x, rstd.double(), None, 0.0, True, True)
    with pytest.raises(RuntimeError, match="grad_out must have the dtype of x"):
        K.rms_norm_backward(x.half(), None, x, rstd, None, 0.0, True, True)


# ---- what torch expects of an op -------------------------------------------------------------------------------------


def test_opcheck_passes_for_every_op() -> None:
    x, residual, weight = random(3, 2, 10), random(3, 2, 10, seed=1), random(10)
    _, rstd = K.rms_norm(x, weight, EPS, 0.0)
    torch.library.opcheck(K.rms_norm.default, (x, None, EPS, 0.0))
    torch.library.opcheck(K.add_rms_norm.default, (x, residual, weight.bfloat16(), EPS, 0.0))
    for needs in ((True, True), (False, True)):
        torch.library.opcheck(K.rms_norm_backward.default, (residual, None, x, rstd, weight, 1.0, *needs))
    torch.library.opcheck(K.rms_norm_backward.default, (residual, x, x, rstd, None, 0.0, True, False))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_fullgraph_equals_eager(dynamic: bool) -> None:
    def step(x: Tensor, weight: Tensor) -> Tensor:
        out, h = add_rms_norm(x * 2.0, x, weight)
        return out + rms_norm(h, weight, weight_offset=1.0)

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for rows in (5, 8):
        a, b = ([random(rows, 34).requires_grad_(), random(34).requires_grad_()] for _ in range(2))
        found, wanted = compiled(*a), step(*b)
        assert torch.equal(found, wanted)
        found.sum().backward()
        wanted.sum().backward()
        for one, two in zip(a, b, strict=True):
            assert one.grad is not None
            assert two.grad is not None
            torch.testing.assert_close(one.grad, two.grad)  # sums of gradients may be taken in another order


def test_saved_for_backward_are_the_input_the_weight_and_four_bytes_a_row() -> None:
    x, weight = random(128, 64).bfloat16().requires_grad_(), random(64).requires_grad_()
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = rms_norm(x, weight)
    assert {t.data_ptr() for t in saved} >= {x.data_ptr(), weight.data_ptr()}
    assert sum(t.nbytes for t in saved) == x.nbytes + weight.nbytes + 4 * 128
    first = torch.autograd.grad(out.sum(), x, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], first)


def test_no_graph_is_made_when_no_gradient_is_needed() -> None:
    x, weight = random(3, 20), random(20)
    assert rms_norm(x, weight).grad_fn is None
    with torch.no_grad():
        assert add_rms_norm(x.requires_grad_(), x, weight)[1].grad_fn is None


@pytest.mark.parametrize("by", ["x", "weight"])
def test_gradients_of_the_gradient_are_refused(by: str) -> None:
    tensors = {"x": random(3, 8).requires_grad_(), "weight": random(8).requires_grad_()}
    out = rms_norm(tensors["x"], tensors["weight"])
    (grad,) = torch.autograd.grad(out.sum(), tensors[by], create_graph=True)
    with pytest.raises(RuntimeError, match=r"rms_norm has a first derivative only; torch\.nn\.functional\.rms_norm"):
        grad.square().sum().backward()


@pytest.mark.parametrize("dtype", DTYPES)
def test_reference_agrees_with_the_kernels(dtype: torch.dtype) -> None:
    x, residual, weight = random(5, 40, dtype=dtype), random(5, 40, dtype=dtype, seed=1), random(40, dtype=dtype)
    out, h = add_rms_norm(x, residual, weight, weight_offset=1.0)
    wanted, wanted_h = reference.add_rms_norm(x, residual, weight, weight_offset=1.0)
    assert torch.equal(h, wanted_h)
    assert_close(out, wanted.double(), dtype)
    on_meta = add_rms_norm(x.to("meta"), residual.to("meta"), weight.to("meta"))  # a device without kernels
    assert [t.shape for t in on_meta] == [out.shape, h.shape]


# ---- Triton ----------------------------------------------------------------------------------------------------------


def test_triton_kernels_match_float64_in_the_interpreter() -> None:
    run_interpreted("check_rms_norm.py")


@pytest.mark.parametrize("target", [HOPPER, MI300])
@pytest.mark.parametrize("hidden", [128, 8192, 16384])
def test_triton_kernels_compile_without_spills_and_with_wide_accesses(target: Any, hidden: int) -> None:
    tl = pytest.importorskip("triton.language")
    from fastpar.kernels import rms_norm as kernels

    rows, block, num_warps = kernels.tile_of(hidden, kernels.MAX_BLOCK)
    back_rows, back_block, back_warps = kernels.tile_of(hidden, kernels.MAX_BLOCK_BACKWARD)
    constants = {"COMPUTE": tl.float32, "HAS_WEIGHT": True}
    forward = {**constants, "HAS_RESIDUAL": True, "ROWS": rows, "BLOCK": block, "WHOLE": hidden <= block}
    backward = {**constants, "HAS_GRAD_SUM": True, "NEEDS_X": True, "NEEDS_WEIGHT": True, "BLOCK": back_block}
    is_long = hidden > back_block
    cases = [
        (kernels.rms_norm_kernel, forward, num_warps, 2 + 2),
        (kernels.rms_norm_backward_long_kernel, backward, back_warps, 5 + 1)
        if is_long
        else (kernels.rms_norm_backward_kernel, {**backward, "ROWS": back_rows}, back_warps, 3 + 1),
    ]
    floats, scalars = {"rstd", "rstd_out", "shares"}, {"eps": "fp32", "offset": "fp32"}
    pointers = {"x", "residual", "weight", "out", "summed", "grad_out", "grad_sum", "grad_x"}
    for kernel, constexprs, warps, tensors in cases:
        names = [name for name in kernel.arg_names if name not in constexprs]
        signature = {name: "*bf16:16" if name in pointers else scalars.get(name, "i32:16") for name in names}
        signature |= dict.fromkeys(floats & set(names), "*fp32:16")
        found = compile_for(kernel, signature, constexprs, target, {"num_warps": warps})
        assert found["spills"] == 0
        assert found["shared"] <= (SHARED_LIMIT if target == HOPPER else LDS_LIMIT)
        assert found["wide_loads"] + found["wide_stores"] >= tensors
