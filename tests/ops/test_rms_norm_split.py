"""RMSNorm with a group: rows whose elements are split over ranks, against whole rows in float64.

Tolerances are those of tests/ops/test_rms_norm.py: sums of squares in float32, one rounding of results.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fastpar import ops, reference
from fastpar.comm import Communicator, record
from tests import instruction_sets
from tests.dist import run_ranks
from tests.triton_aot import HOPPER, MI300, compile_for
from tests.triton_interpreter import run_interpreted
from tests.values import random

ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float64: 1e-13}
EPS = 1e-5
SIZES = {1: [257], 2: [200, 57], 3: [100, 0, 157]}
rms_norm = ops.rms_norm  # which registers the fakes
K = torch.ops.fastpar


def assert_close(found: Tensor, exact: Tensor, name: str, terms: float | None = None) -> None:
    """`terms`: the size of what a sum that may cancel is made of."""
    tolerance = ROUNDING[found.dtype]
    size = (float(exact.abs().max()) if exact.numel() else 0.0) if terms is None else terms
    torch.testing.assert_close(
        found.double(), exact, rtol=tolerance, atol=min(tolerance, 2e-6) * size, msg=lambda text: f"{name}: {text}"
    )


def compare(dtype: torch.dtype, weight_dtype: torch.dtype, has_residual: bool, offset: float) -> list[list[float]]:
    """Each pass of this rank's part against the unsharded norm. Returns what has to be equal on all ranks."""
    comm = Communicator(dist.group.WORLD)
    sizes = SIZES[comm.size]
    hidden, shape = sum(sizes), (3, 5, sum(sizes))
    x, residual, grad_out, grad_h = (random(*shape, dtype=dtype, seed=i) for i in range(4))
    weight = random(hidden, dtype=weight_dtype, seed=4)

    h = (x + residual if has_residual else x).double().requires_grad_()
    w = weight.double().requires_grad_()
    exact = F.rms_norm(h, (hidden,), w + offset, EPS)
    dh, dw = torch.autograd.grad(exact, (h, w), grad_out.double())
    dh = dh + grad_h.double() if has_residual else dh
    rstd = (h.detach().square().mean(-1, keepdim=True) + EPS).rsqrt()
    terms = float((grad_out.double() * (w.detach() + offset) * rstd).abs().max())
    share = float((grad_out.double() * h.detach() * rstd).abs().flatten(0, -2).sum(0).max())

    begin = sum(sizes[: comm.rank])
    mine = slice(begin, begin + sizes[comm.rank])
    # Autograd adds the reference's gradients in the dtype of x: a rounding more in 16 bits.
    for family in (ops, reference) if dtype.itemsize > 2 else (ops,):
        a, r, b = (t.detach().clone().requires_grad_() for t in (x[..., mine], residual[..., mine], weight[mine]))
        options: dict[str, Any] = {"eps": EPS, "weight_offset": offset, "group": comm}
        if has_residual:
            out, summed = family.add_rms_norm(a, r, b, **options)
            assert torch.equal(summed, h[..., mine].to(dtype)), "h is not the sum, rounded once"
            grads = torch.autograd.grad((out, summed), (a, r, b), (grad_out[..., mine], grad_h[..., mine]))
            assert torch.equal(grads[1], grads[0])
        else:
            out = family.rms_norm(a, b, **options)
            grads = torch.autograd.grad(out, (a, b), grad_out[..., mine])
        assert (out.dtype, grads[0].dtype, grads[-1].dtype) == (dtype, dtype, weight_dtype)
        assert out.shape == a.shape
        assert_close(out, exact[..., mine].detach(), f"{family.__name__} out")
        assert_close(grads[0], dh[..., mine], f"{family.__name__} dx", terms)
        assert_close(grads[-1], dw[mine], f"{family.__name__} dweight", share)
    return []


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_forward_dgrad_and_wgrad_are_those_of_the_unsharded_norm(world_size: int) -> None:
    for dtype, weight_dtype in ((torch.float32, torch.float32), (torch.bfloat16, torch.float32)):
        run_ranks(world_size, compare, dtype, weight_dtype, True, 1.0)
    for dtype in (torch.float64, torch.float16):
        run_ranks(world_size, compare, dtype, dtype, False, 0.0)


def same_rstd() -> list[float]:
    comm = Communicator(dist.group.WORLD)
    torch.manual_seed(comm.rank)
    x = torch.randn(7, 50 + comm.rank)
    x[:, 0] = 1.0
    return ops.rms_norm(x, None, group=comm)[:, 0].tolist()  # rstd itself


def test_every_rank_has_the_same_bits_of_rstd() -> None:
    first, second = run_ranks(2, same_rstd)
    assert first == second


def example() -> None:
    comm = Communicator(dist.group.WORLD)
    x, w = torch.tensor([3.0, 4.0])[comm.rank, None], torch.tensor([1.0, 2.0])[comm.rank, None]
    x.requires_grad_(), w.requires_grad_()
    out = ops.rms_norm(x, w, eps=0.0, group=comm)
    out.backward(torch.tensor([1.0, 0.0])[comm.rank, None])
    torch.testing.assert_close(out, torch.tensor([0.848528, 2.262742])[comm.rank, None])
    torch.testing.assert_close(x.grad, torch.tensor([0.181019, -0.135765])[comm.rank, None], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(w.grad, torch.tensor([0.848528, 0.0])[comm.rank, None])


def test_numbers_of_the_worked_example() -> None:
    run_ranks(2, example)


def collectives() -> list[tuple[list[tuple[str, int]], list[tuple[str, int]]]]:
    comm = Communicator(dist.group.WORLD)
    found = []
    for needs in ("x", "weight", "residual", "nothing"):
        x, weight, residual = torch.randn(6, 10), torch.randn(10), torch.randn(6, 10)
        leaves = {"x": x, "weight": weight, "residual": residual}
        if needs in leaves:
            leaves[needs].requires_grad_()
        with record() as forward:
            out, _ = ops.add_rms_norm(x, residual, weight, group=comm)
        with record() as backward:
            if needs in leaves:
                out.sum().backward()
        found.append(([(r.op, r.numel) for r in forward], [(r.op, r.numel) for r in backward]))
    return found


def test_one_number_a_row_travels_each_way_and_none_back_for_the_weight_alone() -> None:
    forward, backward = [("all_reduce", 6 + 3)], [("all_reduce", 6)]
    wanted = [(forward, backward), (forward, []), (forward, backward), (forward, [])]
    assert run_ranks(2, collectives) == [wanted, wanted]


def only_h_is_used_on_one_rank() -> None:
    comm = Communicator(dist.group.WORLD)
    x = torch.randn(4, 6).requires_grad_()
    out, h = ops.add_rms_norm(x, torch.ones(4, 6), None, group=comm)
    (h.sum() + (out.sum() if comm.rank == 0 else 0.0)).backward()
    assert x.grad is not None
    if comm.rank == 1:
        assert not torch.equal(x.grad, torch.ones(4, 6))  # rank 0's part of the row depends on it


def test_a_rank_that_does_not_use_its_part_still_takes_part_in_backward() -> None:
    run_ranks(2, only_h_is_used_on_one_rank)


def bad_calls() -> list[str]:
    comm = Communicator(dist.group.WORLD)
    messages = []

    def attempt(call: Any) -> None:
        with pytest.raises(ValueError, match=r"rms_norm|weight|eps") as raised:
            call()
        messages.append(str(raised.value))

    x, is_first = torch.randn(3, 4), comm.rank == 0
    attempt(lambda: ops.rms_norm(x, torch.ones(5 if is_first else 4), group=comm))
    attempt(lambda: ops.rms_norm(x, None, eps=-1.0 if is_first else 1e-6, group=comm))
    attempt(lambda: ops.rms_norm(x.clone().requires_grad_(is_first), None, group=comm))
    ops.rms_norm(x, None, group=comm)  # the group can be used further
    return messages


def test_what_is_wrong_on_one_rank_is_an_error_on_all() -> None:
    first, second = run_ranks(2, bad_calls)
    assert "weight must be [4]" in first[0]
    assert "eps must be finite" in first[1]
    assert "wrong arguments on another rank" in second[0]
    assert "wrong arguments on another rank" in second[1]
    assert "requires a gradient on 1 of 2 ranks" in first[2]
    assert first[2] == second[2]


def empty_rows() -> None:
    comm = Communicator(dist.group.WORLD)
    x, w = torch.empty(0, 4).requires_grad_(), torch.ones(4).requires_grad_()
    out = ops.rms_norm(x, w, group=comm)
    assert out.shape == (0, 4)
    out.sum().backward()
    assert w.grad is not None
    assert torch.equal(w.grad, torch.zeros(4))


def test_no_rows_have_an_empty_result() -> None:
    run_ranks(2, empty_rows)


def compiled_equals_eager() -> None:
    comm = Communicator(dist.group.WORLD)

    def step(x: Tensor, weight: Tensor) -> Tensor:
        out, h = ops.add_rms_norm(x * 2.0, x, weight, group=comm)
        return out + ops.rms_norm(h, weight, weight_offset=1.0, group=comm)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    a, b = ([random(5, 34 + comm.rank).requires_grad_(), random(34 + comm.rank).requires_grad_()] for _ in range(2))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*should not be instantiated", DeprecationWarning)  # Dynamo's own
        found, wanted = compiled(*a), step(*b)
    assert torch.equal(found, wanted)
    found.sum().backward()
    wanted.sum().backward()
    for one, two in zip(a, b, strict=True):
        assert one.grad is not None
        assert two.grad is not None
        torch.testing.assert_close(one.grad, two.grad)


def test_compiled_fullgraph_equals_eager() -> None:
    run_ranks(2, compiled_equals_eager)


def second_derivative() -> None:
    x = torch.randn(3, 8).requires_grad_()
    out = ops.rms_norm(x, None, group=dist.group.WORLD)
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"rms_norm has a first derivative only; fastpar\.reference\.rms_norm"):
        grad.square().sum().backward()


def test_gradients_of_the_gradient_are_refused() -> None:
    run_ranks(2, second_derivative)


# ---- the ops, on whole rows ------------------------------------------------------------------------------------------


capability = instruction_sets.each()


@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize("hidden", [0, 1, 67, 1023])
def test_the_ops_of_every_instruction_set_make_up_the_whole_norm(
    capability: str, dtype: torch.dtype, hidden: int
) -> None:
    x, residual, grad_out, grad_h = (random(4, 3, hidden, dtype=dtype, seed=i).transpose(0, 1) for i in range(4))
    weight = random(hidden, dtype=dtype)
    squares, h = K.rms_norm_squares(x, residual)
    assert torch.equal(h, x + residual)
    assert_close(squares, h.double().square().sum(-1).flatten(), "squares")
    out, wanted_h, rstd = K.add_rms_norm(x, residual, weight, EPS, 1.0)
    assert torch.equal(h, wanted_h)
    assert torch.equal(K.rms_norm_scale(h, rstd, weight, 1.0), out)
    grad_x, grad_weight = K.rms_norm_backward(grad_out, grad_h, h, rstd, weight, 1.0, True, True)
    products, found = K.rms_norm_products(grad_out, h, rstd, weight, 1.0, True)
    assert torch.equal(found, grad_weight)
    exact = grad_out.double() * (weight.double() + 1.0) * h.double()
    assert_close(products, exact.sum(-1).flatten(), "products", float(exact.abs().sum(-1).max()) if hidden else 0.0)
    factor = (products.double() / max(hidden, 1) * rstd.double().square()).to(rstd.dtype)
    mine = K.rms_norm_grad_x(grad_out, grad_h, h, rstd, factor, weight, 1.0)
    terms = float(exact.abs().max() + grad_h.double().abs().max()) if hidden else 0.0
    assert_close(mine, grad_x.double(), "grad_x", terms + 1.0)


def test_streamed_results_of_large_tensors_match(capability: str) -> None:
    """Above 8 MiB results are stored past the caches, which needs aligned addresses; odd rows begin misaligned."""
    x, rstd = random(60001).bfloat16().repeat(80, 1), random(80).abs()
    assert x.nbytes > 8 << 20
    out = K.rms_norm_scale(x, rstd, None, 0.0)
    for row in (0, 1, 79):
        assert torch.equal(out[row], K.rms_norm_scale(x[row], rstd[row : row + 1], None, 0.0))


def test_the_ops_check_what_they_are_given() -> None:
    x, rstd = torch.zeros(3, 4), torch.zeros(3)
    with pytest.raises(RuntimeError, match="residual must have the shape of x"):
        K.rms_norm_squares(x, torch.zeros(4, 3))
    with pytest.raises(RuntimeError, match=r"rstd must be \[3\]"):
        K.rms_norm_scale(x, rstd.double(), None, 0.0)
    with pytest.raises(RuntimeError, match=r"weight must be \[4\]"):
        K.rms_norm_scale(x, rstd, torch.zeros(3), 0.0)
    with pytest.raises(RuntimeError, match=r"factor must be \[3\]"):
        K.rms_norm_grad_x(x, None, x, rstd, torch.zeros(2), None, 0.0)
    with pytest.raises(RuntimeError, match="grad_out must have the dtype of x"):
        K.rms_norm_products(x.half(), x, rstd, None, 0.0, True)


def test_opcheck_passes_for_every_op() -> None:
    x, residual, weight, rstd = random(3, 2, 10), random(3, 2, 10, seed=1), random(10), random(6).abs()
    torch.library.opcheck(K.rms_norm_squares.default, (x, residual))
    torch.library.opcheck(K.rms_norm_squares.default, (x.double(), None))
    torch.library.opcheck(K.rms_norm_scale.default, (x, rstd, weight, 1.0))
    for needs in (True, False):
        torch.library.opcheck(K.rms_norm_products.default, (residual, x, rstd, weight, 1.0, needs))
    torch.library.opcheck(K.rms_norm_grad_x.default, (residual, x, x, rstd, rstd, None, 0.0))


def test_triton_kernels_match_float64_in_the_interpreter() -> None:
    run_interpreted("check_rms_norm_split.py")


@pytest.mark.parametrize("target", [HOPPER, MI300])
def test_triton_kernels_compile_without_spills(target: Any) -> None:
    tl = pytest.importorskip("triton.language")
    from fastpar.kernels import rms_norm_split as kernels

    given = {"COMPUTE": tl.float32, "BLOCK": 1024, "HAS_WEIGHT": True, "HAS_RESIDUAL": True, "HAS_GRAD_SUM": True}
    floats = {"rstd", "factor", "squares", "products"}
    for kernel in (kernels.squares_kernel, kernels.scale_kernel, kernels.products_kernel, kernels.grad_x_kernel):
        constants = {name: value for name, value in given.items() if name in kernel.arg_names}
        types = dict.fromkeys(
            ("x", "residual", "weight", "out", "summed", "grad_out", "grad_sum", "grad_x"), "*bf16:16"
        )
        types |= {**dict.fromkeys(floats, "*fp32:16"), "offset": "fp32"}
        signature = {name: types.get(name, "i32:16") for name in kernel.arg_names if name not in constants}
        assert compile_for(kernel, signature, constants, target, {"num_warps": 4})["spills"] == 0
