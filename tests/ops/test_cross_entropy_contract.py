"""What vocab-parallel cross-entropy promises besides numbers: errors, and everything that torch expects of an op."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastpar import ops, reference
from fastpar.contracts.cross_entropy import LossOptions, check_options, check_weight
from fastpar.contracts.vocab_shard import check_shards
from fastpar.reference import cross_entropy as reference_module
from tests.ops.cross_entropy_cases import (
    DTYPES,
    OPTIONS,
    assert_grad_close,
    assert_loss_close,
    example,
    expected,
    with_weights,
)

K = torch.ops.fastpar
cross_entropy = ops.vocab_parallel_cross_entropy


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [-1, 8, 2**40])
def test_a_target_outside_the_vocabulary_is_an_index_error_with_its_position(value: int) -> None:
    target = torch.zeros(3, 4, dtype=torch.int64)
    target[1, 2] = value
    with pytest.raises(IndexError, match=rf"target\[1, 2\] is {value}, outside the vocabulary \[0, 8\)"):
        cross_entropy(torch.randn(3, 4, 8), target)
    with pytest.raises(IndexError, match=rf"target\[1, 2\] is {value}"):
        reference.vocab_parallel_cross_entropy(torch.randn(3, 4, 8), target)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"logits": torch.zeros(3, 8, dtype=torch.int64)}, TypeError, "logits must be one of"),
        ({"target": torch.zeros(3)}, TypeError, "class ids as int64"),
        ({"target": torch.zeros(4, dtype=torch.int64)}, ValueError, r"logits is \(3, 8\), target is \(4,\)"),
        ({"reduction": "average"}, ValueError, "got 'average'"),
        ({"ignore_index": 1.5}, TypeError, "ignore_index must be an int"),
        ({"label_smoothing": 1.5}, ValueError, "label_smoothing must be between 0 and 1, got 1.5"),
        ({"z_loss": -1e-4}, ValueError, "z_loss must be a finite number >= 0, got -0.0001"),
        ({"softcap": 0.0}, ValueError, "softcap must be None or a finite number > 0, got 0.0"),
        ({"logit_scale": 0.0}, ValueError, "logit_scale must be finite and not 0"),
        ({"logit_scale": float("inf")}, ValueError, "logit_scale must be finite"),
        ({"weight": torch.ones(7)}, ValueError, r"one entry per id of the whole vocabulary, \(8,\), got \(7,\)"),
        ({"weight": torch.ones(8, dtype=torch.int64)}, TypeError, "weight must be floating point"),
        ({"weight": torch.ones(8, requires_grad=True)}, ValueError, "class weights have none here"),
        ({"shift": -1}, ValueError, "shift must be an int >= 0, got -1"),
        ({"shift": 1, "logits": torch.zeros(8), "target": torch.tensor(0)}, ValueError, "needs a target with a seq"),
        ({"denominator": 0}, ValueError, "denominator must be > 0, got 0"),
        ({"denominator": 2.0, "reduction": "sum"}, ValueError, "what a mean divides by; reduction is 'sum'"),
        ({"denominator": torch.ones(2)}, ValueError, r"a tensor of one, got shape \(2,\)"),
        ({"vocab_range": (0, 9, 9)}, ValueError, "names 9 columns, but there are 8"),
        ({"vocab_range": (4, 2, 9)}, ValueError, "0 <= start <= end <= total"),
        ({"vocab_range": (0, 8, 16)}, ValueError, "needs a group of several ranks"),
        ({"logits": torch.tensor(1.0), "target": torch.tensor(0)}, ValueError, "shape of logits without its last dim"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    call: dict[str, Any] = {"logits": torch.randn(3, 8), "target": torch.zeros(3, dtype=torch.int64), **arguments}
    with pytest.raises(error, match=message):
        cross_entropy(call.pop("logits"), call.pop("target"), **call)


def test_options_of_one_call_are_not_those_of_the_next() -> None:
    logits, target = torch.randn(3, 8), torch.tensor([1, 2, 7])
    calls: list[dict[str, Any]] = [{}, {"reduction": "sum"}, {"ignore_index": 2}, {"label_smoothing": 0.1}]
    calls += [{"z_loss": 0.1}, {"softcap": 1.0}, {"logit_scale": 0.5}, {"return_lse": True}]
    for options in [*calls, *calls]:  # what is checked once for all calls alike is kept
        found, wanted = (
            call(logits, target, **options) for call in (cross_entropy, reference.vocab_parallel_cross_entropy)
        )
        torch.testing.assert_close(found, wanted)
    for _ in range(2):
        with pytest.raises(ValueError, match="z_loss must be a finite number"):
            cross_entropy(logits, target, z_loss=-1.0)
    assert cross_entropy(logits[:, :7], target.clamp(max=6)) != cross_entropy(logits, target)


def test_shards_that_do_not_tile_the_vocabulary_are_an_error() -> None:
    check_shards([[3, 0, 7], [0, 3, 7], [4, 3, 7]])
    with pytest.raises(ValueError, match="rank 1 holds 4 columns from 4 of 8, expected to start at 3 of 6"):
        check_shards([[3, 0, 6], [4, 4, 8]])
    with pytest.raises(ValueError, match="end at 6, but the vocabulary has 7"):
        check_shards([[3, 0, 7], [3, 3, 7]])


def test_a_second_backward_after_an_inplace_one_is_an_error() -> None:
    x = torch.randn(4, 9).requires_grad_()
    loss = cross_entropy(x * 1.0, torch.zeros(4, dtype=torch.int64), inplace_backward=True)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"inplace_backward=True.*cannot run a second time"):
        loss.backward()


def test_another_use_of_overwritten_logits_in_backward_is_an_error() -> None:
    x = torch.randn(4, 9).requires_grad_()
    logits = x * 1.0
    loss = cross_entropy(logits, torch.zeros(4, dtype=torch.int64), inplace_backward=True)
    square = (logits * logits).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.backward()


def test_backward_can_run_twice_without_inplace() -> None:
    logits, target = example(5, 33)
    x = logits.clone().requires_grad_()
    loss = cross_entropy(x, target, reduction="none")
    first, second = torch.linspace(0, 1, 5), torch.linspace(3, -2, 5)
    for weights in (first, second):
        (grad,) = torch.autograd.grad(loss, x, weights, retain_graph=True)
        assert_grad_close(grad, expected(logits, target, "none", weights)[1], torch.float32)


# ---- what torch expects of an op -------------------------------------------------------------------------------------


@pytest.mark.expensive
@pytest.mark.parametrize("name", ["plain", "everything"])
def test_opcheck_passes_for_every_op(name: str) -> None:
    logits, target = example(6, 37)
    options = with_weights(OPTIONS[name], 37)
    checked = reference_options(options)
    weight, weight_sum = check_weight(options.get("weight"), 37, logits, checked)
    view = (target, weight, 0, 37, -100, checked.smoothing, checked.softcap, checked.logit_scale)
    stats = K.vocab_parallel_cross_entropy_stats(logits, *view)
    merge = (stats.unsqueeze(0), target, weight, weight_sum, 37, *checked[:3])
    loss, lse = K.vocab_parallel_cross_entropy_merge(*merge)
    backward = (lse, target, weight, weight_sum, torch.ones_like(loss), torch.ones_like(loss), 0, 37, *checked)
    fused = (target, weight, weight_sum, torch.ones_like(loss), *checked)
    two = (torch.tensor(0.5), torch.tensor(3.0))
    calls = {
        K.vocab_parallel_cross_entropy_stats: (logits, *view),
        K.vocab_parallel_cross_entropy_stats_exp_: (logits.clone(), *view),
        K.vocab_parallel_cross_entropy_merge: merge,
        K.vocab_parallel_cross_entropy_backward: (logits, *backward),
        K.vocab_parallel_cross_entropy_backward_: (logits.clone(), *backward),
        K.cross_entropy_forward: (logits, target, weight, weight_sum, None, 2, *checked),
        K.cross_entropy_backward: (logits, lse, target, weight, weight_sum, *two, 0, 37, *checked),
        K.cross_entropy_forward_backward: (logits, *fused),
        K.cross_entropy_forward_backward_: (logits.clone(), *fused),
        K.cross_entropy_reduced_forward_backward: (logits, target, weight, weight_sum, None, 2, *checked),
    }
    for op, arguments in calls.items():
        torch.library.opcheck(op.default, arguments)


def reference_options(options: dict[str, Any]) -> LossOptions:
    """The options as the ops take them."""
    defaults: dict[str, Any] = {
        "ignore_index": -100,
        "label_smoothing": 0.0,
        "z_loss": 0.0,
        "softcap": None,
        "logit_scale": 1.0,
    }
    return check_options(**{name: options.get(name, default) for name, default in defaults.items()})


@pytest.mark.expensive
@pytest.mark.parametrize("name", ["plain", "everything"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_fullgraph_equals_eager(dynamic: bool, name: str) -> None:
    options = with_weights(OPTIONS[name], 129)

    def step(x: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(x * 2.0, target, inplace_backward=True, **options)

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for rows in (5, 8):
        logits, target = example(rows, 129)
        x, y = logits.clone().requires_grad_(), logits.clone().requires_grad_()
        compiled(x, target).backward()
        step(y, target).backward()
        assert x.grad is not None
        assert y.grad is not None
        assert torch.equal(x.grad, y.grad)


def test_autocast_leaves_the_loss_in_float32() -> None:
    weight, hidden = torch.randn(50, 16, requires_grad=True), torch.randn(6, 16)
    target = torch.arange(6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = hidden @ weight.T
        loss = cross_entropy(logits, target)
    assert logits.dtype == torch.bfloat16
    assert loss.dtype == torch.float32
    loss.backward()
    assert_loss_close(loss, F.cross_entropy(logits.double(), target), scale=10.0)
    assert weight.grad is not None


def test_nothing_but_the_logits_and_bytes_per_token_is_saved() -> None:
    rows, vocab = 128, 4096
    logits, target = example(rows, vocab, torch.bfloat16)
    x = logits.requires_grad_() * 1.0
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        loss = cross_entropy(x, target)
    assert any(t.data_ptr() == x.data_ptr() for t in saved)
    others = sum(t.numel() * t.element_size() for t in saved if t.data_ptr() != x.data_ptr())
    assert others <= 32 * rows
    loss.backward()


def test_no_graph_is_made_when_no_gradient_is_needed() -> None:
    logits, target = example(3, 20)
    assert cross_entropy(logits, target).grad_fn is None
    with torch.no_grad():
        assert cross_entropy(logits.requires_grad_(), target).grad_fn is None


def test_gradients_of_the_gradient_are_refused() -> None:
    x = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    loss = cross_entropy(x, torch.zeros(3, dtype=torch.int64))
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="first derivative only"):
        grad.square().sum().backward()


@pytest.mark.parametrize("dtype", DTYPES)
def test_reference_agrees_with_the_kernels(dtype: torch.dtype) -> None:
    logits, target = example(12, 600, dtype)
    logits, target = logits.view(3, 4, 600), target.view(3, 4)
    x, y = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    loss, lse = cross_entropy(x, target, return_lse=True)
    wanted, wanted_lse = reference.vocab_parallel_cross_entropy(y, target, return_lse=True)
    loss.backward()
    wanted.backward()
    assert_loss_close(loss, wanted, scale=10.0)
    assert_loss_close(lse, wanted_lse, scale=10.0)
    assert wanted.dtype == loss.dtype
    assert y.grad is not None
    assert_grad_close(x.grad, y.grad, dtype, roundings=2)  # both sides round


@pytest.mark.parametrize("name", OPTIONS)
def test_the_fallback_for_devices_without_kernels_is_the_same_function(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, target = example(12, 90)
    options = with_weights(OPTIONS[name], 90)
    results = []
    for _ in range(2):
        x = logits.clone().requires_grad_()
        loss, lse = cross_entropy(x, target, return_lse=True, **options)
        (loss + lse.sum()).backward()
        results.append((loss.detach(), lse.detach(), x.grad))
        monkeypatch.setattr("fastpar.ops.cross_entropy.implementation", lambda x: reference_module)
    torch.testing.assert_close(results[0], results[1], rtol=2e-5, atol=2e-5)


def test_a_freed_large_gradient_is_handed_out_again() -> None:
    K.large_buffer_release()
    logits, target = example(300, 8001)
    assert logits.numel() * 4 > 8 << 20
    mapped_before = K.large_buffer_stats()[3]
    for _ in range(3):
        x = logits.clone().requires_grad_()
        cross_entropy(x, target).backward()
        assert K.large_buffer_stats()[0] >= logits.numel() * 4
        del x
    assert K.large_buffer_stats()[3] == mapped_before + 1
    assert K.large_buffer_stats()[1] >= logits.numel() * 4
    K.large_buffer_release()
    assert K.large_buffer_stats()[1] == 0


def test_equal_inputs_give_equal_bits_in_every_position_and_thread_count() -> None:
    logits, target = example(1, 5003)
    many = logits.expand(64, -1)
    threads = torch.get_num_threads()
    losses = []
    for count in (1, 2):
        torch.set_num_threads(count)
        losses.append(cross_entropy(many, target.expand(64), reduction="none"))
    torch.set_num_threads(threads)
    assert torch.unique(torch.cat(losses)).numel() == 1
