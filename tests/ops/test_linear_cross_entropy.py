"""linear_cross_entropy on one rank: values and gradients against float64, chunks, what is left out, and its promises.

See tests.ops.linear_cross_entropy_cases for the tolerances.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from fastpar import ops, reference
from fastpar.ops._weight_grad import WeightGrad, sum_bytes, weighted_sum
from fastpar.ops.linear_cross_entropy import api, passes, row_chunks
from fastpar.ops.linear_cross_entropy.passes import LinearLossInputs, LinearLossLayout, LinearLossWants
from fastpar.ops.linear_cross_entropy.row_chunks import rows_per_chunk, split_rows, split_sequence
from tests.ops.linear_cross_entropy_cases import (
    DTYPES,
    OPTIONS,
    assert_close_to_exact,
    example,
    options_for,
    plain,
    run,
)

linear_cross_entropy = ops.linear_cross_entropy
REDUCTIONS = ["mean", "sum", "none"]


def upstream_for(reduction: str, target: Tensor) -> list[Tensor]:
    if reduction == "none":
        return [torch.linspace(-1.0, 2.0, target.numel()).view(target.shape)]
    return [torch.tensor(0.75)]


def chunk_bytes_for(chunks: int, tensors: tuple[Tensor, ...], rows: int) -> int:
    """A budget that cuts `rows` rows into that many chunks."""
    row_bytes = tensors[1].shape[0] * tensors[0].element_size()
    return -(-rows // chunks) * row_bytes + 8 * row_bytes


# ---- against float64 -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIONS)
def test_loss_and_gradients_match_float64_at_every_option(name: str, dtype: torch.dtype, reduction: str) -> None:
    *tensors, target = example((2, 200), 24, 131, dtype)
    options = {"reduction": reduction, **options_for(name, 131)}
    grads = upstream_for(reduction, target)
    found = run(linear_cross_entropy, tensors, target, grads, chunk_bytes=1, **options)
    exact = plain(tensors, target, torch.float64, grads, **options)
    rough = None if dtype in (torch.float32, torch.float64) else plain(tensors, target, dtype, grads, **options)
    assert [x.dtype for x in found] == [torch.float64 if dtype == torch.float64 else torch.float32, *[dtype] * 3]
    assert_close_to_exact(found, exact, dtype, rough)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_lse_is_returned_for_every_token_and_is_differentiable(dtype: torch.dtype, reduction: str) -> None:
    *tensors, target = example((300,), 24, 131, dtype)
    grads = [*upstream_for(reduction, target), torch.linspace(1.0, -2.0, 300)]
    options = {"reduction": reduction, "return_lse": True, "z_loss": 1e-3}
    found = run(linear_cross_entropy, tensors, target, grads, chunk_bytes=1, **options)
    exact = plain(tensors, target, torch.float64, grads, **options)
    rough = None if dtype in (torch.float32, torch.float64) else plain(tensors, target, dtype, grads, **options)
    assert found[1].shape == target.shape
    assert_close_to_exact(found, exact, dtype, rough)


@pytest.mark.parametrize("chunks", [1, 2, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_number_of_chunks_gives_the_same_result(dtype: torch.dtype, chunks: int) -> None:
    *tensors, target = example((1040,), 16, 67, dtype)
    target[target == -100] = 5  # all 1040 rows
    budget = chunk_bytes_for(chunks, tuple(tensors), 1040)
    layout = LinearLossLayout(None, budget, every_row=False)
    assert len(split_rows(target, None, 67 * dtype.itemsize, layout.chunk_bytes)) == chunks
    found = run(linear_cross_entropy, tensors, target, chunk_bytes=budget)
    exact = plain(tensors, target, torch.float64)
    rough = None if dtype == torch.float32 else plain(tensors, target, dtype)
    assert_close_to_exact(found, exact, dtype, rough)


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_torchs_checkpoint_hands_out_what_is_saved_once(reduction: str) -> None:
    hidden, weight = torch.randn(5, 4, requires_grad=True), torch.randn(7, 4, requires_grad=True)
    target = torch.tensor([0, 6, 3, 1, 2])

    def loss(hidden: Tensor) -> Tensor:
        return ops.linear_cross_entropy(hidden, weight, target, reduction=reduction).sum()

    expected = torch.autograd.grad(loss(hidden), (hidden, weight))
    recomputed = torch.utils.checkpoint.checkpoint(loss, hidden, use_reentrant=False)
    for found, wanted in zip(torch.autograd.grad(recomputed, (hidden, weight)), expected, strict=True):
        assert torch.equal(found, wanted)


def test_the_worked_example_has_its_numbers() -> None:
    hidden = torch.tensor([[1.0]], requires_grad=True)
    weight = torch.tensor([[0.0], [math.log(3.0)]], requires_grad=True)
    loss, lse = linear_cross_entropy(hidden, weight, torch.tensor([1]), return_lse=True)
    loss.backward()
    torch.testing.assert_close(loss.item(), math.log(4.0 / 3.0), rtol=1e-6, atol=0.0)
    torch.testing.assert_close(lse.item(), math.log(4.0), rtol=1e-6, atol=0.0)
    torch.testing.assert_close(hidden.grad, torch.tensor([[-0.25 * math.log(3.0)]]))
    torch.testing.assert_close(weight.grad, torch.tensor([[0.25], [-0.25]]))


def test_the_target_keeps_its_gradient_where_the_model_is_sure_of_it() -> None:
    # p_y = 1 - 1e-6 in bfloat16, where p_y - 1 from a rounded p_y would be 0.
    hidden = torch.ones(1, 1, dtype=torch.bfloat16)
    weight = torch.tensor([[0.0], [14.0]], dtype=torch.bfloat16, requires_grad=True)
    linear_cross_entropy(hidden, weight, torch.tensor([1])).backward()
    assert weight.grad is not None
    probability = math.exp(-14.0) / (1.0 + math.exp(-14.0))
    torch.testing.assert_close(weight.grad[1, 0].item(), -probability, rtol=2**-8, atol=0.0)


# ---- which rows count ------------------------------------------------------------------------------------------------


def test_ignored_tokens_never_reach_a_gemm_and_get_exact_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    *tensors, target = example((2, 300), 16, 40)
    tensors[0][target == -100] = math.nan  # would spread to dweight
    found = run(linear_cross_entropy, tensors, target)
    assert all(torch.isfinite(x).all() for x in found)
    assert torch.count_nonzero(found[1][target == -100]) == 0
    assert found[1][target != -100].abs().amax(-1).min() > 0


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_batch_of_only_ignored_tokens_has_loss_and_gradients_of_zero(reduction: str) -> None:
    *tensors, target = example((2, 70), 16, 40)
    target.fill_(-100)
    for result in run(linear_cross_entropy, tensors, target, reduction=reduction):
        assert torch.equal(result, torch.zeros_like(result))


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 4)])
def test_an_empty_batch_has_loss_and_gradients_of_zero(shape: tuple[int, ...]) -> None:
    *tensors, target = example(shape, 16, 40)
    loss, *grads = run(linear_cross_entropy, tensors, target)
    assert loss.item() == 0.0
    assert [g.shape for g in grads] == [(*shape, 16), (40, 16), (40,)]
    assert all(torch.count_nonzero(g) == 0 for g in grads)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_shift_scores_a_position_against_a_later_target(reduction: str) -> None:
    *tensors, target = example((3, 70), 16, 40)
    shifted = F.pad(target, (0, 2), value=-100)[:, 2:]
    found = run(linear_cross_entropy, tensors, target, shift=2, reduction=reduction)
    wanted = run(linear_cross_entropy, tensors, shifted, reduction=reduction)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert torch.count_nonzero(found[1][:, -2:]) == 0


@pytest.mark.parametrize("denominator", [8.0, torch.tensor(8.0), torch.tensor([8])])
def test_a_mean_divides_by_the_denominator_that_is_given(denominator: float | Tensor) -> None:
    *tensors, target = example((300,), 16, 40)
    found = run(linear_cross_entropy, tensors, target, denominator=denominator)
    wanted = run(linear_cross_entropy, tensors, target, reduction="sum")
    assert_close_to_exact(found, [w.double() / 8.0 for w in wanted], torch.float32)


def test_strided_arguments_are_read_as_they_are() -> None:
    hidden, weight, bias, target = example((4, 60), 16, 40)
    wanted = run(linear_cross_entropy, (hidden, weight, bias), target)
    strided = [hidden.transpose(0, 1).contiguous().transpose(0, 1), weight.t().contiguous().t()]
    assert not any(x.is_contiguous() for x in strided)
    a, b = (x.requires_grad_() for x in strided)
    loss = linear_cross_entropy(a, b, target.t().contiguous().t().int(), bias=bias)
    loss.backward()
    assert_close_to_exact([loss.detach(), a.grad, b.grad], [w.double() for w in wanted[:3]], torch.float32)


# ---- when gradients are computed -------------------------------------------------------------------------------------


class _Allocations(TorchDispatchMode):
    """Sizes in bytes of the tensors that ops return, and the matrix products that run."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.products: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._opname in ("mm", "addmm", "addmm_"):
            self.products.append(tuple(out.shape))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        return out


def watched(call: Callable[[], Any]) -> _Allocations:
    with torch.autograd.set_multithreading_enabled(False), _Allocations() as seen:
        call()
    return seen


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tensor_is_larger_than_a_chunk_of_logits(dtype: torch.dtype, reduction: str) -> None:
    *tensors, target = example((2048,), 8, 4099, dtype)
    target.clamp_(min=0)
    chunk = 256 * 4099 * dtype.itemsize
    seen = watched(lambda: run(linear_cross_entropy, tensors, target, reduction=reduction, chunk_bytes=chunk))
    assert seen.largest <= chunk
    assert 8 * seen.largest <= 2048 * 4099 * dtype.itemsize
    unfused = watched(lambda: plain(tensors, target, dtype, reduction=reduction))
    assert unfused.largest >= 2048 * 4099 * dtype.itemsize, "the measurement does not see the logits"


@pytest.mark.parametrize(
    ("needs", "in_forward"),
    [((True, True, True), 3), ((True, False, False), 2), ((False, True, False), 2), ((False, False, True), 1)],
)
def test_only_gradients_that_are_asked_for_cost_a_gemm(needs: tuple[bool, bool, bool], in_forward: int) -> None:
    *tensors, target = example((100,), 16, 1000)
    exact = plain(tensors, target, torch.float64)
    hidden, weight, bias = (x.requires_grad_(need) for x, need in zip(tensors, needs, strict=True))
    results: list[Tensor] = []
    forward = watched(lambda: results.append(linear_cross_entropy(hidden, weight, target, bias=bias)))
    backward = watched(lambda: results[0].backward())
    assert len(forward.products) == in_forward
    assert len(backward.products) == 0
    for tensor, wanted in zip((hidden, weight, bias), exact[1:], strict=True):
        assert (tensor.grad is not None) == tensor.requires_grad
        if tensor.grad is not None:
            assert_close_to_exact([tensor.grad], [wanted], torch.float32)
    with torch.no_grad():
        assert len(watched(lambda: linear_cross_entropy(hidden, weight, target)).products) == 1


@pytest.mark.parametrize("options", [{"reduction": "none"}, {"return_lse": True}])
def test_gradients_that_forward_cannot_know_are_computed_in_backward(options: dict[str, Any]) -> None:
    *tensors, target = example((100,), 16, 1000)
    hidden, weight, bias = (x.requires_grad_() for x in tensors)
    results: list[Any] = []
    forward = watched(lambda: results.append(linear_cross_entropy(hidden, weight, target, bias=bias, **options)))
    loss = results[0][0] if isinstance(results[0], tuple) else results[0]
    backward = watched(lambda: loss.sum().backward())
    assert (len(forward.products), len(backward.products)) == (1, 3)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_backward_can_run_again_with_another_upstream_gradient(dtype: torch.dtype, reduction: str) -> None:
    *tensors, target = example((300,), 16, 40, dtype)
    hidden, weight, bias = (x.clone().requires_grad_() for x in tensors)
    loss = linear_cross_entropy(hidden, weight, target, bias=bias, reduction=reduction, chunk_bytes=1)
    kept = []
    for factor in (1.0, 3.0, -0.5):
        upstream = [g * factor for g in upstream_for(reduction, target)]
        grads = torch.autograd.grad(loss, (hidden, weight, bias), upstream[0].to(loss.dtype), retain_graph=True)
        exact = plain(tensors, target, torch.float64, upstream, reduction=reduction)[1:]
        rough = None
        if dtype in (torch.bfloat16, torch.float16):
            rough = plain(tensors, target, dtype, upstream, reduction=reduction)[1:]
        assert_close_to_exact(grads, exact, dtype, rough)
        kept.append((grads, exact, rough))
    for grads, exact, rough in kept:  # none of the buffers was written again
        assert_close_to_exact(grads, exact, dtype, rough)


def test_gradients_accumulate_over_microbatches() -> None:
    *tensors, target = example((300,), 16, 40)
    hidden, weight, bias = (x.requires_grad_() for x in tensors)
    for part in (slice(0, 100), slice(100, 300)):
        linear_cross_entropy(hidden[part], weight, target[part], bias=bias, denominator=200).backward()
    exact = plain(tensors, target, torch.float64, denominator=200)[1:]
    assert_close_to_exact([hidden.grad, weight.grad, bias.grad], exact, torch.float32)  # type: ignore[list-item]


def test_gradients_of_the_gradient_are_refused() -> None:
    *tensors, target = example((30,), 16, 40, torch.float64)
    hidden, weight, _ = (x.requires_grad_() for x in tensors)
    for reduction in ("mean", "none"):
        loss = linear_cross_entropy(hidden, weight, target, reduction=reduction).sum()
        (grad,) = torch.autograd.grad(loss, hidden, create_graph=True)
        with pytest.raises(RuntimeError, match="linear_cross_entropy has a first derivative only"):
            grad.square().sum().backward()


def test_float16_gradients_are_rounded_after_the_loss_scale() -> None:
    # Gradients of about 1e-8, below the smallest float16; a loss scale of 2^16 makes them numbers.
    *tensors, target = example((300,), 16, 40, torch.float16)
    grads = [torch.tensor(65536.0)]
    found = run(linear_cross_entropy, tensors, target, grads, denominator=1e7)
    exact = plain(tensors, target, torch.float64, grads, denominator=1e7)
    assert torch.count_nonzero(run(linear_cross_entropy, tensors, target, denominator=1e9)[1]) == 0
    assert_close_to_exact(
        found[1:], exact[1:], torch.float16, plain(tensors, target, torch.float16, grads, denominator=1e7)[1:]
    )


# ---- gradients apart -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dgrad_and_wgrad_are_the_parts_of_backward(dtype: torch.dtype) -> None:
    hidden, weight, bias, target = example((2, 150), 16, 40, dtype)
    options: dict[str, Any] = {"bias": bias, "shift": 1, "softcap": 5.0}
    _, lse = linear_cross_entropy(hidden, weight, target, reduction="none", return_lse=True, **options)
    grads = [
        torch.linspace(-1.0, 2.0, 300, dtype=dtype).view(2, 150),
        torch.linspace(1.0, 0.0, 300, dtype=dtype).view(2, 150),
    ]
    exact = plain(
        (hidden, weight, bias), target, torch.float64, grads, reduction="none", return_lse=True, shift=1, softcap=5.0
    )
    arguments = (hidden, weight, target, lse, grads[0])
    dgrad = watched(lambda: ops.linear_cross_entropy_dgrad(*arguments, grad_lse=grads[1], **options))
    assert len(dgrad.products) == 2
    found = [ops.linear_cross_entropy_dgrad(*arguments, grad_lse=grads[1], **options)]
    by_weight, by_bias = ops.linear_cross_entropy_wgrad(*arguments, grad_lse=grads[1], **options)
    assert by_bias is not None
    assert_close_to_exact([*found, by_weight, by_bias], exact[2:], dtype)
    assert ops.linear_cross_entropy_wgrad(hidden, weight, target, lse, grads[0])[1] is None
    with pytest.raises(ValueError, match=r"grad_loss must have target's shape \(2, 150\), got \(300,\)"):
        ops.linear_cross_entropy_dgrad(hidden, weight, target, lse, grads[0].view(-1))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_store_runs_the_weight_gradient_later_and_once(reduction: str) -> None:
    *tensors, target = example((2, 150), 16, 1000)
    hidden, weight, bias = (x.requires_grad_() for x in tensors)
    grads = upstream_for(reduction, target)
    exact = plain(tensors, target, torch.float64, grads, reduction=reduction)
    store = ops.WeightGradStore()
    projected = weight * 1.0  # as a sharded parameter: not the leaf itself
    loss = linear_cross_entropy(hidden, projected, target, bias=bias, reduction=reduction, wgrad_store=store)
    assert len(store) == 0
    backward = watched(lambda: loss.backward(grads[0]))
    assert (1000, 16) not in backward.products
    assert weight.grad is None
    assert bias.grad is None
    assert len(store) == 1
    later = watched(lambda: store.run(1))
    assert later.products.count((1000, 16)) == 1
    assert len(later.products) == 2  # the logits again, and dweight
    assert store.run() == 0
    assert_close_to_exact([hidden.grad, weight.grad, bias.grad], exact[1:], torch.float32)  # type: ignore[list-item]


def test_a_store_works_with_frozen_hidden_states_and_keeps_the_order() -> None:
    *tensors, target = example((150,), 16, 40)
    hidden, weight, _ = tensors
    weight.requires_grad_()
    store = ops.WeightGradStore()
    for part in (slice(0, 50), slice(50, 150)):
        linear_cross_entropy(hidden[part], weight, target[part], reduction="sum", wgrad_store=store).backward()
    assert weight.grad is None
    assert store.run(1) == 1
    first = run(linear_cross_entropy, (hidden[:50], weight, torch.zeros(40)), target[:50], reduction="sum")[2]
    # Forward takes exponentials and scales them, the store computes them again: they differ by a rounding.
    torch.testing.assert_close(weight.grad, first, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="count must be None or >= 0, got -1"):
        store.run(-1)
    store.clear()
    assert len(store) == 0


# ---- dtypes and torch features ---------------------------------------------------------------------------------------


def test_autocast_computes_in_its_dtype_as_linear_does() -> None:
    *tensors, target = example((300,), 16, 40)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = run(linear_cross_entropy, tensors, target)
    wanted = run(linear_cross_entropy, [x.bfloat16() for x in tensors], target)
    assert all(x.dtype == torch.float32 for x in found)
    assert all(torch.equal(a, b.float()) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_around_backward_changes_nothing(dtype: torch.dtype) -> None:
    *tensors, target = example((300,), 16, 40, dtype)
    results = []
    for enabled in (False, True):
        hidden, weight, bias = (x.clone().requires_grad_() for x in tensors)
        loss = linear_cross_entropy(hidden, weight, target, bias=bias, reduction="none", chunk_bytes=1)
        with torch.autocast("cpu", dtype=torch.float16, enabled=enabled):
            results.append(torch.autograd.grad(loss.sum(), (hidden, weight, bias)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_dtensor_weight_is_unwrapped() -> None:
    from tests.dist import run_ranks

    assert run_ranks(1, _dtensor_gradient) == [True]


def _dtensor_gradient() -> bool:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    hidden, weight, _, target = example((30,), 16, 40)
    mesh = init_device_mesh("cpu", (1,))
    parameter = nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)]))
    linear_cross_entropy(hidden, parameter, target, group=mesh).backward()
    assert isinstance(parameter.grad, DTensor)
    weight.requires_grad_()
    linear_cross_entropy(hidden, weight, target).backward()
    with pytest.raises(ValueError, match="must be split over the vocabulary"):
        linear_cross_entropy(hidden, distribute_tensor(weight.detach(), mesh, [Replicate()]), target)
    return torch.equal(parameter.grad.to_local(), weight.grad)  # type: ignore[arg-type]


@pytest.mark.expensive
@pytest.mark.parametrize(
    "options", [{}, {"reduction": "none"}, {"shift": 1, "label_smoothing": 0.1}, {"return_lse": True}]
)
def test_compiled_in_one_graph_it_gives_the_eager_bits(options: dict[str, Any]) -> None:
    *tensors, target = example((3, 100), 16, 40)

    def function(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor) -> Any:
        return linear_cross_entropy(hidden * 2.0, weight, target, bias=bias, class_weight=class_weight, **options)

    class_weight = torch.linspace(0.5, 1.5, 40)
    eager = run(function, tensors, target)
    compiled = run(torch.compile(function, fullgraph=True, backend="aot_eager"), tensors, target)
    assert all(torch.equal(a, b) for a, b in zip(eager, compiled, strict=True))


def test_opcheck_passes_for_both_ops() -> None:
    from fastpar.ops.linear_cross_entropy.torch_ops import _pack

    hidden, weight, bias, target = example((40,), 16, 12)
    inputs, problem, layout = api._prepare(hidden, weight, target, every_row=False, bias=bias)
    assert isinstance(inputs, LinearLossInputs)
    grad_loss = torch.linspace(0.0, 1.0, 40)
    forward = torch.ops.fastpar.linear_cross_entropy_forward
    backward = torch.ops.fastpar.linear_cross_entropy_backward
    for wants in (LinearLossWants(True, True, True), LinearLossWants(False, True, False)):
        packed = _pack(problem, layout, wants)
        torch.library.opcheck(forward, (*inputs, grad_loss, *packed))
        _, lse, *_ = forward(*inputs, None, *packed)
        torch.library.opcheck(backward, (*inputs, lse, grad_loss, None, *packed))
    torch.library.opcheck(forward, (*inputs, None, *packed))


def test_the_reference_has_the_same_signature_but_for_what_concerns_memory() -> None:
    import inspect

    names = list(inspect.signature(reference.linear_cross_entropy).parameters)
    ours = list(inspect.signature(linear_cross_entropy).parameters)
    assert [name for name in ours if name not in ("chunk_bytes", "wgrad_store")] == names


# ---- parts -----------------------------------------------------------------------------------------------------------


def test_chunks_fit_the_budget_and_are_about_equal() -> None:
    assert rows_per_chunk(1000, 128 << 10, None, "cpu") == 504  # the docstring's numbers
    assert rows_per_chunk(8192, 2 * 131072, None, "cuda") == 2048
    assert rows_per_chunk(8192, 4 * 262144, None, "cuda") == 1024  # 512 would fit
    assert rows_per_chunk(5, 1, None, "cpu") == 5
    assert rows_per_chunk(0, 1, None, "cpu") == 0
    for rows in (1, 127, 128, 129, 1000, 5003):
        for budget in (1, 200 * 64, 777 * 64, 1 << 30):
            step = rows_per_chunk(rows, 64, budget, "cpu")
            assert step <= max(128, budget // 64)
            assert step <= rows
            chunks = -(-rows // step)
            assert rows - (chunks - 1) * step > 0
            assert step * chunks < rows + 8 * chunks


def test_one_chunk_is_taken_on_cuda_where_it_needs_no_more_memory_than_the_sum_of_several() -> None:
    with FakeTensorMode():
        weight = torch.empty(128256, 4096, dtype=torch.bfloat16, device="cuda")
        assert sum_bytes(weight) == 4 * weight.numel()
        assert sum_bytes(torch.empty(10, 10, device="cuda")) == 0  # float32 is summed in the result
    assert sum_bytes(torch.empty(10, 10, dtype=torch.bfloat16)) == 0  # and on CPU, chunks stay in the cache
    row, spared = 2 * 128256, 4 * 128256 * 4096
    assert rows_per_chunk(8192, row, None, "cuda", spared) == 8192
    assert rows_per_chunk(10284, row, None, "cuda", spared) == 10284
    assert rows_per_chunk(10285, row, None, "cuda", spared) < 2100
    assert rows_per_chunk(8192, row, 512 << 20, "cuda", spared) == 2048  # the user's budget is the limit
    assert rows_per_chunk(8192, row, None, "cuda") == 2048


def test_chunks_are_one_where_the_weights_gradient_is_wanted_and_no_other_rank_takes_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(passes, "sum_bytes", lambda weight: 1 << 30)
    monkeypatch.setitem(row_chunks.BUDGET_BYTES, "cpu", 1)
    sizes: list[list[int]] = []

    def noted(*arguments: Any) -> list[row_chunks.RowChunk]:
        chunks = split_rows(*arguments)
        sizes.append([chunk.size for chunk in chunks])
        return chunks

    monkeypatch.setattr(passes, "split_rows", noted)
    *tensors, target = example((900,), 8, 11)
    hidden, weight = tensors[0].detach().requires_grad_(), tensors[1].detach().requires_grad_()
    linear_cross_entropy(hidden, weight, target)
    linear_cross_entropy(hidden, weight.detach(), target)
    kept = int((target != -100).sum())
    assert sizes[0] == [kept]
    assert sum(sizes[1]) == kept
    assert len(sizes[1]) > 1


def test_sequence_chunks_take_a_share_of_every_rank() -> None:
    target = torch.arange(3 * 301).view(3, 301)
    keep = target % 5 != 0
    seen: list[Tensor] = []
    plans = [split_sequence(target, keep, 1, 1, dim=1, ranks=4, rank=r) for r in range(4)]
    for chunks in zip(*plans, strict=True):
        assert all(torch.equal(c.rows, chunks[0].rows) and c.parts == chunks[0].parts for c in chunks)
        start = 0
        for rank, (chunk, part) in enumerate(zip(chunks, target.split(76, dim=1), strict=True)):
            assert chunk.parts is not None
            end = start + chunk.parts[rank]
            assert torch.equal(part.reshape(-1)[chunk.local], target.view(-1)[chunk.rows[start:end]])
            start = end
        seen.append(chunks[0].rows)
    assert torch.equal(torch.cat(seen).sort().values, keep.view(-1).nonzero().squeeze(1))


def test_bfloat16_products_are_summed_in_float32() -> None:
    # 1 + 64 * 2^-9: a sum in bfloat16 would stay at 1.
    weight = torch.zeros(3, 2, dtype=torch.bfloat16)
    sums = WeightGrad(weight, 65, exact=False)
    for chunk in range(65):
        dz = torch.full((1, 3), 1.0 if chunk == 0 else 2.0**-9, dtype=torch.bfloat16)
        sums.add(dz, torch.ones(1, 2, dtype=torch.bfloat16))
    assert torch.equal(sums.result(), torch.full((3, 2), 1.125, dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_weighted_sum_of_rows_has_no_rounding_but_the_sums_own(dtype: torch.dtype) -> None:
    matrix, weights = torch.randn(70, 40000).to(dtype), torch.rand(70)
    exact = (matrix.double() * weights.double().unsqueeze(1)).sum(0)
    assert_close_to_exact([weighted_sum(matrix, weights)], [exact], torch.float32)
    assert_close_to_exact([weighted_sum(matrix, None)], [matrix.double().sum(0)], torch.float32)


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"hidden": torch.zeros(3, 8, dtype=torch.int64)}, TypeError, "hidden must be one of"),
        ({"weight": torch.zeros(5, 8, dtype=torch.bfloat16)}, TypeError, "weight must have the dtype of hidden"),
        ({"weight": torch.zeros(5, 7)}, ValueError, r"got \(3, 8\) and \(5, 7\)"),
        ({"bias": torch.zeros(4)}, ValueError, r"bias must have one entry per row of weight, \(5,\), got \(4,\)"),
        ({"bias": torch.zeros(5).double()}, TypeError, "bias must have the dtype of hidden"),
        ({"target": torch.zeros(3)}, TypeError, "class ids as int64"),
        (
            {"target": torch.zeros(4, dtype=torch.int64)},
            ValueError,
            r"hidden must be \(4, 8\) to go with target \(4,\)",
        ),
        ({"reduction": "average"}, ValueError, "got 'average'"),
        ({"reduction": "sum", "denominator": 3}, ValueError, "reduction is 'sum'"),
        ({"label_smoothing": 1.5}, ValueError, "got 1.5"),
        ({"shift": -1}, ValueError, "shift must be an int >= 0, got -1"),
        ({"chunk_bytes": 0}, ValueError, "chunk_bytes must be None or an int > 0, got 0"),
        ({"class_weight": torch.ones(4)}, ValueError, r"\(5,\), got \(4,\)"),
        ({"vocab_range": (0, 5, 10)}, ValueError, "needs a group of several ranks"),
        ({"sequence_parallel": True, "sequence_dim": 1}, ValueError, "sequence_dim must be a dim of hidden"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    call: dict[str, Any] = {"hidden": torch.randn(3, 8), "weight": torch.randn(5, 8)}
    call |= {"target": torch.zeros(3, dtype=torch.int64), **arguments}
    with pytest.raises(error, match=message):
        linear_cross_entropy(call.pop("hidden"), call.pop("weight"), call.pop("target"), **call)


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("value", [-1, 5])
def test_a_target_outside_the_vocabulary_is_an_index_error_with_its_position(value: int, needs_grad: bool) -> None:
    target = torch.zeros(2, 3, dtype=torch.int64)
    target[1, 2] = value
    hidden = torch.randn(2, 3, 8, requires_grad=needs_grad)
    with pytest.raises(IndexError, match=rf"target\[1, 2\] is {value}, outside the vocabulary \[0, 5\)"):
        linear_cross_entropy(hidden, torch.randn(5, 8), target)
