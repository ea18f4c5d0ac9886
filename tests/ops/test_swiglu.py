"""SwiGLU: every CPU instruction set against float64, layouts, and what torch expects of an op.

Tolerances. The result is a product of three factors, computed in float32 from a sigmoid that is good to 2 ulp: 2e-6,
relative. Gradients are sums of two terms that may cancel, so their error is relative to the largest term. bfloat16 and
float16 add one rounding (2^-8 and 2^-11) and use an exponential that is good to 3e-6. float64 uses the C library's exp.
"""

from __future__ import annotations

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

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float64: 1e-13}
swiglu = ops.swiglu
K = torch.ops.fastpar


capability = instruction_sets.each()


def random(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).to(dtype)


def expected(grad_out: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(out, gradient of gate, gradient of up) by torch in float64."""
    gate, up = (t.detach().to(torch.float64, copy=True).requires_grad_() for t in (gate, up))
    out = F.silu(gate) * up
    return out.detach(), *torch.autograd.grad(out, (gate, up), grad_out.double())


def assert_close(found: Tensor | None, exact: Tensor, dtype: torch.dtype) -> None:
    assert found is not None
    assert (found.dtype, found.shape) == (dtype, exact.shape)
    peak = exact.abs().max().item() if exact.numel() else 0.0
    # float16 values below 2^-14 are subnormal and round to a multiple of 2^-24.
    atol = min(ROUNDING[dtype], 2e-6) * peak + (2.0**-25 if dtype == torch.float16 else 0.0)
    torch.testing.assert_close(found.double(), exact, rtol=1.01 * ROUNDING[dtype], atol=atol)


# ---- against float64 -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("features", [1, 67, 1023])
def test_packed_and_separate_tensors_match_float64(capability: str, dtype: torch.dtype, features: int) -> None:
    packed = random(3, 5, 2 * features, dtype=dtype, scale=4.0)
    grad_out = random(3, 5, features, dtype=dtype)
    gate, up = packed.chunk(2, dim=-1)
    out, grad_gate, grad_up = expected(grad_out, gate, up)

    x = packed.clone().requires_grad_()
    found = swiglu(x)
    found.backward(grad_out)
    assert found.is_contiguous()
    assert_close(found, out, dtype)
    assert_close(x.grad, torch.cat([grad_gate, grad_up], dim=-1), dtype)

    g, u = gate.clone().requires_grad_(), up.detach().requires_grad_()  # one contiguous, one with wide rows
    found_apart = swiglu(g, u)
    found_apart.backward(grad_out)
    assert torch.equal(found_apart, found)
    assert_close(g.grad, grad_gate, dtype)
    assert_close(u.grad, grad_up, dtype)


def test_worked_example_of_the_docstring(capability: str) -> None:
    x = torch.tensor([0.0, 1.0, 2.0, 3.0], requires_grad=True)
    out = swiglu(x)
    out.backward(torch.ones(2))
    torch.testing.assert_close(out, torch.tensor([0.0, 2.19318]), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x.grad, torch.tensor([1.0, 2.78301, 0.0, 0.73106]), rtol=1e-5, atol=1e-5)


def test_large_gates_keep_their_relative_accuracy_in_float32(capability: str) -> None:
    gate = torch.linspace(-80.0, 80.0, 4001)
    exact = F.silu(gate.double())
    # The portable version has no fused multiply-add, so half an ulp of 80 * log2(e) stays in the exponent.
    tolerance = 5e-6 if capability == "portable" else 5e-7
    torch.testing.assert_close(swiglu(gate, torch.ones(4001)).double(), exact, rtol=tolerance, atol=1e-36)


@pytest.mark.parametrize("dtype", DTYPES)
def test_infinities_and_nan_are_as_in_torch(capability: str, dtype: torch.dtype) -> None:
    gate = torch.tensor([math.inf, -math.inf, math.nan, 1e4, -1e4, 0.0, -0.0, 2.0], dtype=dtype).repeat(5)[:37]
    up = torch.ones(37, dtype=dtype)
    up[-1] = math.nan
    x, y = gate.clone().requires_grad_(), gate.clone().requires_grad_()
    found, wanted = swiglu(x, up), F.silu(y) * up
    torch.testing.assert_close(found, wanted, equal_nan=True)
    found.sum().backward()
    wanted.sum().backward()
    torch.testing.assert_close(x.grad, y.grad, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_streamed_results_of_large_tensors_match(capability: str, dtype: torch.dtype) -> None:
    # Above 8 MiB results are stored past the caches, which needs aligned addresses; of rows of odd length some begin
    # misaligned.
    features = 70001
    packed = random(2 * features).to(dtype).repeat(64, 1)
    packed[::3] *= 2
    grad_out = packed[:, 5 : features + 5]
    assert grad_out.numel() * dtype.itemsize > 8 << 20
    out = K.swiglu(packed, None)
    grad, _ = K.swiglu_backward(grad_out, packed, None)
    for row in (0, 1, 2, 63):  # a row alone is not streamed
        assert torch.equal(out[row], K.swiglu(packed[row], None))
        assert torch.equal(grad[row], K.swiglu_backward(grad_out[row], packed[row], None)[0])


# ---- layouts and sizes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["sliced", "transposed rows", "strided features", "expanded"])
def test_any_strides_give_the_contiguous_result(capability: str, layout: str) -> None:
    base = random(4, 6, 86)
    x = {
        "sliced": torch.nn.functional.pad(base, (3, 2, 1, 0))[:, 1:, 3:-2],
        "transposed rows": base.transpose(0, 1),
        "strided features": base.permute(2, 1, 0).contiguous().permute(2, 1, 0),
        "expanded": base[:1].expand(4, 6, 86),
    }[layout]
    grad_out = random(x.shape[1], x.shape[0], 43).transpose(0, 1)
    a, b = x.detach().requires_grad_(), x.contiguous().requires_grad_()
    assert not a.is_contiguous()
    out, wanted = swiglu(a), swiglu(b)
    assert torch.equal(out, wanted)
    found = torch.autograd.grad(out, a, grad_out)[0]
    assert torch.equal(found, torch.autograd.grad(wanted, b, grad_out.contiguous())[0])


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (2, 0, 6), (0,)])
def test_empty_tensors_have_empty_results_and_gradients(shape: tuple[int, ...]) -> None:
    x = torch.empty(shape, requires_grad=True)
    out = swiglu(x)
    assert out.shape == (*shape[:-1], shape[-1] // 2)
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == shape


def test_more_leading_dims_than_the_kernel_takes_are_copied() -> None:
    x = random(*[2] * 12, 4).permute(*range(11, -1, -1), 12)
    assert torch.equal(swiglu(x), swiglu(x.contiguous()))


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    x, grad_out = random(64, 2 * 1501), random(64, 1501)
    threads = torch.get_num_threads()
    results = []
    for count in (1, 2):
        torch.set_num_threads(count)
        results.append((K.swiglu(x, None), K.swiglu_backward(grad_out, x, None)[0]))
    torch.set_num_threads(threads)
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [ops.swiglu, reference.swiglu])
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((torch.zeros(3, 5),), ValueError, r"must be even.*\(3, 5\)"),
        ((torch.tensor(1.0),), ValueError, "at least one dim"),
        ((torch.zeros(3, 4, dtype=torch.int32),), TypeError, "got torch.int32"),
        ((torch.zeros(3, 4), torch.zeros(3, 5)), ValueError, r"got \(3, 4\) and \(3, 5\)"),
        ((torch.zeros(3), torch.zeros(3).half()), TypeError, "got torch.float32 and torch.float16"),
        ((torch.zeros(3), torch.zeros(3, device="meta")), ValueError, "got cpu and meta"),
    ],
)
def test_bad_arguments_are_named(function: Any, arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        function(*arguments)


def test_the_ops_check_what_they_are_given() -> None:
    with pytest.raises(RuntimeError, match="even last dim, got 3"):
        K.swiglu(torch.zeros(3), None)
    with pytest.raises(RuntimeError, match="grad_out must have the shape of the output"):
        K.swiglu_backward(torch.zeros(4), torch.zeros(4), None)
    with pytest.raises(RuntimeError, match="up must have the dtype of gate"):
        K.swiglu(torch.zeros(4), torch.zeros(4).half())


# ---- what torch expects of an op -------------------------------------------------------------------------------------


def test_opcheck_passes_for_every_op() -> None:
    packed, gate = random(3, 2, 10), random(3, 2, 5)
    for arguments in ((packed, None), (packed[..., :5], gate)):
        torch.library.opcheck(K.swiglu.default, arguments)
        torch.library.opcheck(K.swiglu_backward.default, (gate, *arguments))


@pytest.mark.expensive
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_fullgraph_equals_eager(dynamic: bool) -> None:
    def step(x: Tensor) -> Tensor:
        return swiglu(x * 2.0) + swiglu(x[..., ::2], x[..., 1::2])

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for rows in (5, 8):
        x, y = random(rows, 34).requires_grad_(), random(rows, 34).requires_grad_()
        found, wanted = compiled(x), step(y)
        assert torch.equal(found, wanted)
        found.sum().backward()
        wanted.sum().backward()
        assert x.grad is not None
        assert y.grad is not None
        assert torch.equal(x.grad, y.grad)


def test_nothing_but_the_inputs_is_saved() -> None:
    x = random(16, 64).requires_grad_()
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = swiglu(x)
    assert [t.data_ptr() for t in saved] == [x.data_ptr()]
    first = torch.autograd.grad(out.sum(), x, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], first)


def test_no_graph_is_made_when_no_gradient_is_needed() -> None:
    x = random(3, 20)
    assert swiglu(x).grad_fn is None
    with torch.no_grad():
        assert swiglu(x.requires_grad_()).grad_fn is None


def test_gradients_of_the_gradient_are_refused() -> None:
    x = random(3, 8, dtype=torch.float64).requires_grad_()
    (grad,) = torch.autograd.grad(swiglu(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="swiglu has a first derivative only; silu"):
        grad.square().sum().backward()


@pytest.mark.parametrize("dtype", DTYPES)
def test_reference_agrees_with_the_kernels(dtype: torch.dtype) -> None:
    x, grad_out = random(4, 46, dtype=dtype, scale=3.0), random(4, 23, dtype=dtype)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    out, wanted = swiglu(a), reference.swiglu(b)
    assert_close(out, wanted.detach().double(), dtype)
    (grad,), (wanted_grad,) = torch.autograd.grad(out, a, grad_out), torch.autograd.grad(wanted, b, grad_out)
    assert_close(grad, wanted_grad.double(), dtype)
    assert swiglu(x.to("meta")).shape == out.shape  # a device without kernels


# ---- Triton ----------------------------------------------------------------------------------------------------------


def test_triton_kernels_match_float64_in_the_interpreter() -> None:
    run_interpreted("check_swiglu.py")


@pytest.mark.parametrize("target", [HOPPER, MI300])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_triton_kernels_compile_without_spills_and_with_wide_accesses(target: Any, dtype: str) -> None:
    tl = pytest.importorskip("triton.language")
    from fastpar.kernels import swiglu as kernels

    for kernel, tensors in ((kernels.swiglu_kernel, 3), (kernels.swiglu_backward_kernel, 5)):
        names = [name for name in kernel.arg_names if name not in ("COMPUTE", "BLOCK")]
        pointers = {"gate", "up", "out", "grad_out", "grad_gate", "grad_up"}
        signature = {name: f"*{dtype}:16" if name in pointers else "i32:16" for name in names}
        constants = {"COMPUTE": tl.float32, "BLOCK": kernels.BLOCK}
        found = compile_for(kernel, signature, constants, target, {"num_warps": kernels.NUM_WARPS})
        assert found["spills"] == 0
        assert found["shared"] <= (SHARED_LIMIT if target == HOPPER else LDS_LIMIT)
        assert found["wide_loads"] + found["wide_stores"] >= tensors
