"""Vocab-parallel cross-entropy in one process: every instruction set, dtype, option and layout against float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fastpar import ops
from fastpar.ops.cross_entropy import implementation
from tests.ops.cross_entropy_cases import (
    DTYPES,
    OPTIONS,
    assert_grad_close,
    assert_loss_close,
    capability,
    example,
    expected,
    expected_with,
    upstream,
    with_weights,
)

__all__ = ["capability"]  # a fixture: used by name

SIZES = [1, 2, 257, 1023, 4099, 9001]
cross_entropy = ops.vocab_parallel_cross_entropy


# ---- one rank, against float64 ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", SIZES)
def test_loss_and_gradient_match_float64(capability: str, dtype: torch.dtype, vocab: int) -> None:
    logits, target = example(7, vocab, dtype)
    x = logits.clone().requires_grad_()
    loss, lse = cross_entropy(x, target, return_lse=True)
    loss.backward()
    wanted_loss, wanted_grad = expected(logits, target)
    assert_loss_close(loss, wanted_loss, scale=10.0)
    assert_loss_close(lse, logits.double().logsumexp(-1), scale=10.0)
    assert_grad_close(x.grad, wanted_grad, dtype)
    assert torch.equal(x.detach(), logits), "the logits were changed without inplace_backward"


def test_a_gradient_in_place_may_be_asked_for_with_a_graph() -> None:
    logits, target = torch.randn(4, 9, requires_grad=True), torch.tensor([0, 3, 8, 1])
    loss = ops.vocab_parallel_cross_entropy(logits * 1.0, target, inplace_backward=True)
    (found,) = torch.autograd.grad(loss, logits, create_graph=True)
    assert torch.equal(found, torch.autograd.grad(ops.vocab_parallel_cross_entropy(logits, target), logits)[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_inplace_and_fresh_gradients_have_the_same_bits(capability: str, dtype: torch.dtype) -> None:
    logits, target = example(33, 1023, dtype)
    fresh, inplace = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    cross_entropy(fresh, target).backward()
    cross_entropy(inplace, target, inplace_backward=True).backward()
    assert fresh.grad is not None
    assert inplace.grad is not None
    assert torch.equal(fresh.grad, inplace.grad)
    assert inplace.grad.data_ptr() == inplace.data_ptr(), "the gradient is not in the logits' memory"


@pytest.mark.slow  # test_cross_entropy_kernels.py has the kernels' large outputs
@pytest.mark.parametrize("dtype", DTYPES)
def test_streamed_gradient_of_a_large_unaligned_output_matches(capability: str, dtype: torch.dtype) -> None:
    # Above 8 MiB the gradient is stored past the caches, which needs aligned addresses: odd rows start misaligned.
    vocab = 40961 if dtype in (torch.float32, torch.float64) else 81921
    logits, target = example(71, vocab, dtype)
    assert logits.numel() * logits.element_size() > 8 << 20
    x = logits.clone().requires_grad_()
    cross_entropy(x, target, reduction="sum").backward()
    assert_grad_close(x.grad, expected(logits, target, "sum")[1], dtype)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_reductions_and_their_gradients_match(reduction: str) -> None:
    logits, target = example(14, 257)
    logits, target = logits.view(2, 7, 257), target.view(2, 7)
    x = logits.clone().requires_grad_()
    loss = cross_entropy(x, target, reduction=reduction)
    weights = torch.linspace(-1.0, 2.0, 14).view(2, 7) if reduction == "none" else None
    loss.backward(weights)
    wanted_loss, wanted_grad = expected(logits, target, reduction, weights)
    assert loss.shape == wanted_loss.shape
    assert_loss_close(loss, wanted_loss, scale=100.0 if reduction == "sum" else 10.0)
    assert_grad_close(x.grad, wanted_grad.view_as(x), torch.float32)


def test_ignored_rows_have_zero_loss_and_exactly_zero_gradient(capability: str) -> None:
    logits, target = example(10, 300)
    x = logits.clone().requires_grad_()
    loss = cross_entropy(x, target, reduction="none")
    loss.sum().backward()
    ignored = target == -100
    assert ignored.any()
    assert x.grad is not None
    assert torch.count_nonzero(loss[ignored]) == 0
    assert torch.count_nonzero(x.grad[ignored]) == 0
    assert x.grad[~ignored].abs().amax(dim=-1).min() > 0


def test_an_ignore_index_inside_the_vocabulary_is_ignored() -> None:
    logits = torch.randn(4, 9)
    target = torch.tensor([3, 0, 3, 8])
    wanted = F.cross_entropy(logits, target, ignore_index=3)
    assert_loss_close(cross_entropy(logits, target, ignore_index=3), wanted)


def test_mean_over_only_ignored_rows_is_zero_with_zero_gradient() -> None:
    x = torch.randn(3, 5, requires_grad=True)
    loss = cross_entropy(x, torch.full((3,), -100))
    loss.backward()
    assert loss.item() == 0.0
    assert x.grad is not None
    assert torch.count_nonzero(x.grad) == 0


def test_large_logits_keep_float32_accuracy(capability: str) -> None:
    # With lse in float32 the gradient would be off by 5e-4 here.
    logits, target = example(8, 513)
    logits = logits + 1e4
    x = logits.clone().requires_grad_()
    loss = cross_entropy(x, target)
    loss.backward()
    wanted_loss, wanted_grad = expected(logits, target)
    assert_loss_close(loss, wanted_loss, scale=10.0)
    assert_grad_close(x.grad, wanted_grad, torch.float32)


@pytest.mark.parametrize("probability", [0.9, 0.999, 1 - 1e-6])
def test_the_target_entry_keeps_its_digits_as_the_probability_nears_one(capability: str, probability: float) -> None:
    vocab = 100
    logits = torch.zeros(1, vocab)
    logits[0, 17] = math.log(probability / (1 - probability) * (vocab - 1))
    for dtype in (torch.float32, torch.bfloat16):
        x = logits.to(dtype, copy=True).requires_grad_()
        cross_entropy(x, torch.tensor([17])).backward()
        _, wanted = expected(x, torch.tensor([17]))
        assert x.grad is not None
        # p - 1 from p rounded to bfloat16 would be 0; the float32 sum of exponentials leaves 6e-8 / (1 - p).
        torch.testing.assert_close(x.grad[0, 17].double(), wanted[0, 17], rtol=0.1, atol=0.0)


def test_infinite_logits_and_nan_behave_as_in_torch(capability: str) -> None:
    logits = torch.randn(4, 70)
    logits[0, 5:] = -math.inf  # masked columns
    logits[1, 3] = math.nan
    logits[2, 69] = math.inf
    logits[3, 7] = -math.inf
    target = torch.tensor([2, 10, 4, 7])
    x, y = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    loss, wanted = cross_entropy(x, target, reduction="none"), F.cross_entropy(y, target, reduction="none")
    torch.testing.assert_close(loss, wanted, equal_nan=True)
    assert loss[3] == math.inf
    loss[[0, 3]].sum().backward()
    wanted[[0, 3]].sum().backward()
    assert x.grad is not None
    assert y.grad is not None
    torch.testing.assert_close(x.grad[0], y.grad[0])
    assert torch.count_nonzero(x.grad[0, 5:]) == 0


def test_a_nan_with_any_payload_reaches_the_loss(capability: str) -> None:
    logits = torch.zeros(1, 40)
    logits.view(torch.int32)[0, 11] = 0x7FFFFFFF  # what a GPU makes
    assert math.isnan(cross_entropy(logits, torch.tensor([0])).item())


# ---- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_matches_float64_with_different_upstream_gradients_per_token(
    capability: str, name: str, dtype: torch.dtype
) -> None:
    logits, target = example(11, 1031, dtype)
    options = with_weights(OPTIONS[name], 1031, dtype)
    grads = (upstream(11, dtype), upstream(11, dtype).flip(0) * 0.5)
    (wanted_loss, wanted_lse), wanted_grad = expected_with(
        logits, target, grads, reduction="none", return_lse=True, **options
    )
    x = logits.clone().requires_grad_()
    loss, lse = cross_entropy(x, target, reduction="none", return_lse=True, **options)
    torch.autograd.backward([loss, lse], list(grads))
    # z = softcap * tanh(...) carries tanh's rounding times softcap, and so does everything computed from it.
    coarser = 4.0 if "softcap" in options else 1.0
    assert_loss_close(loss, wanted_loss, scale=30.0 * coarser)
    assert_loss_close(lse, wanted_lse, scale=30.0 * coarser)
    assert_grad_close(x.grad, wanted_grad, dtype, roundings=1.05 * (coarser if dtype == torch.float32 else 1.0))


@pytest.mark.parametrize("name", ["smoothing", "weights", "smoothing and weights", "only smoothing"])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_smoothing_and_weights_follow_torch(name: str, reduction: str) -> None:
    logits, target = example(13, 300)
    options = with_weights(OPTIONS[name], 300)
    x, y = logits.clone().requires_grad_(), logits.double().requires_grad_()
    exact = {k: v.double() if isinstance(v, Tensor) else v for k, v in options.items()}
    loss, wanted = (
        cross_entropy(x, target, reduction=reduction, **options),
        F.cross_entropy(y, target, reduction=reduction, **exact),
    )
    loss.backward(torch.ones_like(loss))
    wanted.backward(torch.ones_like(wanted))
    assert y.grad is not None
    assert_loss_close(loss, wanted, scale=100.0)
    assert_grad_close(x.grad, y.grad, torch.float32)


def test_smoothing_survives_a_gap_of_1000_between_logits(capability: str) -> None:
    # log(softmax) underflows to -inf there: an infinite loss in implementations that take it.
    logits = torch.zeros(3, 200)
    logits[:, 7] = 1000.0
    target = torch.tensor([7, 8, 199])
    x = logits.clone().requires_grad_()
    loss = cross_entropy(x, target, label_smoothing=0.1, reduction="none")
    loss.sum().backward()
    (wanted,), wanted_grad = expected_with(logits, target, [torch.ones(3)], label_smoothing=0.1, reduction="none")
    assert_loss_close(loss, wanted, scale=1.0)
    assert_grad_close(x.grad, wanted_grad, torch.float32)


@pytest.mark.parametrize("weighted", [False, True])
def test_smoothing_of_large_logits_keeps_float32_accuracy(capability: str, weighted: bool) -> None:
    # Sums of logits as they are would lose 1e-3 here: they are taken around the maximum.
    logits, target = example(8, 5003)
    logits = logits + 1e4
    options = with_weights({"label_smoothing": 0.3, "weight": weighted or None}, 5003)
    grads = [torch.ones(8)]
    (wanted,), wanted_grad = expected_with(logits, target, grads, reduction="none", **options)
    x = logits.clone().requires_grad_()
    loss = cross_entropy(x, target, reduction="none", **options)
    loss.sum().backward()
    assert_loss_close(loss, wanted, scale=30.0)
    assert_grad_close(x.grad, wanted_grad, torch.float32)


@pytest.mark.parametrize("softcap", [None, 30.0])
def test_logits_between_minus_and_plus_1e4_are_exact(capability: str, softcap: float | None) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = (torch.rand(6, 777, generator=generator) - 0.5) * 2e4
    logits[0, 0], logits[1, 1] = 1e4, -1e4
    target = torch.tensor([0, 1, 2, 3, 4, 776])
    options = {"softcap": softcap, "z_loss": 1e-4, "label_smoothing": 0.1, "reduction": "none"}
    (wanted,), wanted_grad = expected_with(logits, target, [torch.ones(6)], **options)
    x = logits.clone().requires_grad_()
    loss = cross_entropy(x, target, **options)
    loss.sum().backward()
    assert_loss_close(loss, wanted, scale=30.0)
    # Where tanh saturates, its derivative is 1 minus something close to 1.
    assert_grad_close(x.grad, wanted_grad, torch.float32, roundings=2 if softcap is None else 8)


def test_masked_columns_get_no_gradient_under_softcap_and_smoothing_is_infinite(capability: str) -> None:
    logits, target = example(4, 70)
    target = target.clamp(min=0) % 50
    logits[:, 50:] = -math.inf
    x = logits.clone().requires_grad_()
    cross_entropy(x, target, softcap=10.0).backward()
    assert x.grad is not None
    assert torch.isfinite(x.grad).all()
    assert torch.count_nonzero(x.grad[:, 50:]) == 0  # tanh is flat at infinity
    smoothed = cross_entropy(logits, target, label_smoothing=0.1, reduction="none")
    assert torch.isposinf(smoothed).all()
    assert torch.isposinf(F.cross_entropy(logits, target, label_smoothing=0.1, reduction="none")).all()


def test_ignored_rows_of_garbage_leave_loss_and_gradient_zero_with_every_option(capability: str) -> None:
    logits, target = example(9, 333)
    logits[target == -100] = math.nan
    x = logits.clone().requires_grad_()
    loss = cross_entropy(x, target, **with_weights(OPTIONS["everything"], 333))
    loss.backward()
    assert x.grad is not None
    assert torch.isfinite(loss)
    assert torch.count_nonzero(x.grad[target == -100]) == 0
    assert torch.isfinite(x.grad).all()


def test_a_fully_ignored_batch_gives_zero_with_every_option() -> None:
    x = torch.randn(5, 40, requires_grad=True)
    loss = cross_entropy(x, torch.full((5,), -100), **with_weights(OPTIONS["everything"], 40))
    loss.backward()
    assert loss.item() == 0.0
    assert x.grad is not None
    assert torch.count_nonzero(x.grad) == 0


def test_weights_of_zero_give_a_mean_of_zero() -> None:
    logits, target = example(5, 20)
    assert cross_entropy(logits, target, weight=torch.zeros(20)).item() == 0.0


@pytest.mark.parametrize("denominator", [7.5, torch.tensor(7.5), torch.tensor([7.5], dtype=torch.float64)])
def test_a_given_denominator_replaces_the_count(denominator: float | Tensor) -> None:
    logits, target = example(14, 100)
    x = logits.clone().requires_grad_()
    loss = cross_entropy(x, target, denominator=denominator)
    loss.backward()
    wanted_loss, wanted_grad = expected(logits, target, "sum")
    assert_loss_close(loss, wanted_loss / 7.5, scale=10.0)
    assert_grad_close(x.grad, wanted_grad / 7.5, torch.float32, roundings=2)


@pytest.mark.parametrize("shift", [1, 2, 9])
def test_shift_scores_a_position_against_a_later_target_without_copying_logits(shift: int) -> None:
    logits, target = example(2 * 6, 50)
    logits, target = logits.view(2, 6, 50), target.view(2, 6)
    x = logits.clone().requires_grad_()
    loss = cross_entropy(x, target, shift=shift, reduction="none")
    wanted = torch.full((2, 6), -100)
    wanted[:, : max(6 - shift, 0)] = target[:, shift:]
    assert torch.equal(loss, cross_entropy(logits, wanted, reduction="none"))
    loss.sum().backward()
    assert x.grad is not None
    assert torch.count_nonzero(x.grad[:, max(6 - shift, 0) :]) == 0


def test_the_gradient_of_lse_alone_is_the_softmax() -> None:
    logits, target = example(6, 91)
    x = logits.clone().requires_grad_()
    _, lse = cross_entropy(x, target, return_lse=True)
    lse.sum().backward()
    assert_grad_close(x.grad, logits.double().softmax(-1), torch.float32)


def test_worked_example_of_the_docstring() -> None:
    first, second = torch.tensor([[0.0]]), torch.tensor([[math.log(3.0)]])
    target, K = torch.tensor([1]), implementation(first)
    gathered = torch.stack(
        [K.stats(x, target, None, s, 2, -100, False, 0.0, 1.0) for s, x in enumerate((first, second))]
    )
    torch.testing.assert_close(
        gathered[:, :1], torch.tensor([[[0.0, 1.0, 0.0]], [[math.log(3.0), 1.0, math.log(3.0)]]])
    )
    loss, lse = K.merge(gathered, target, None, None, 2, -100, 0.0, 0.0)
    torch.testing.assert_close(loss, torch.tensor([math.log(4 / 3)]))
    torch.testing.assert_close(lse, torch.tensor([math.log(4.0)], dtype=torch.float64))
    options: tuple[Any, ...] = (2, -100, 0.0, 0.0, 0.0, 1.0)
    grads = [
        K.backward(x, lse, target, None, None, torch.ones(1), None, s, *options) for s, x in enumerate((first, second))
    ]
    torch.testing.assert_close(torch.cat(grads), torch.tensor([[0.25], [-0.25]]))


# ---- layouts and sizes -----------------------------------------------------------------------------------------------


def layouts(logits: Tensor) -> dict[str, Tensor]:
    """The [4, 6, V] logits in other strides."""
    batch, sequence, vocab = logits.shape
    padded = torch.zeros(batch, sequence + 1, vocab + 3)
    padded[:, :-1, :-3] = logits
    return {
        "sliced rows and columns": padded[:, :-1, :-3],
        "transposed batch": logits.transpose(0, 1).contiguous().transpose(0, 1),
        "strided columns": logits.permute(2, 0, 1).contiguous().permute(1, 2, 0),
    }


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("layout", ["sliced rows and columns", "transposed batch", "strided columns"])
def test_any_strides_give_the_contiguous_result(capability: str, layout: str, inplace: bool) -> None:
    logits, target = example(24, 1023)
    logits, target = logits.view(4, 6, 1023), target.view(4, 6)
    x = layouts(logits)[layout].requires_grad_()
    assert not x.is_contiguous()
    loss = cross_entropy(x, target, inplace_backward=inplace)
    loss.backward()
    plain = logits.clone().requires_grad_()
    wanted = cross_entropy(plain, target)
    wanted.backward()
    assert torch.equal(loss, wanted)
    assert x.grad is not None
    assert plain.grad is not None
    assert torch.equal(x.grad, plain.grad)


def test_expanded_rows_are_rejected_by_the_inplace_op() -> None:
    x = torch.randn(1, 5).expand(3, 5)
    lse, target, grad = torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.int64), torch.ones(3)
    with pytest.raises(RuntimeError, match="rows do not share memory"):
        implementation(x).backward_(x, lse, target, None, None, grad, None, 0, 5, -100, 0.0, 0.0, 0.0, 1.0)


def test_an_empty_batch_has_an_empty_gradient_in_place_too() -> None:
    x = torch.empty(2, 0, 5, requires_grad=True)
    cross_entropy(x * 1, torch.empty(2, 0, dtype=torch.int64), reduction="sum", inplace_backward=True).backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape


@pytest.mark.slow  # 4.3 GB
def test_rows_beyond_2_to_the_31_elements_are_found() -> None:
    rows, vocab = 32770, 65537
    assert rows * vocab > 2**31
    logits = torch.zeros(rows, vocab, dtype=torch.bfloat16)
    logits[-1, 5] = 9.0
    target = torch.full((rows,), -100)
    target[-1] = 5
    x = logits.clone().requires_grad_()
    loss = cross_entropy(x, target, reduction="sum", inplace_backward=True)
    wanted_loss, wanted_grad = expected(logits[-1:], target[-1:], "sum")
    assert_loss_close(loss, wanted_loss, scale=10.0)
    loss.backward()
    grad = x.detach()  # in place
    assert_grad_close(grad[-1:], wanted_grad, torch.bfloat16)
    assert torch.count_nonzero(grad[:-1]) == 0


@pytest.mark.parametrize("shape", [(0, 5), (2, 0, 5), (0, 0)])
def test_no_tokens_give_an_empty_loss(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, requires_grad=True)
    target = torch.empty(shape[:-1], dtype=torch.int64)
    loss = cross_entropy(x, target, reduction="none")
    assert loss.shape == shape[:-1]
    cross_entropy(x, target).backward()
    assert x.grad is not None
    assert x.grad.shape == shape


def test_a_single_vector_of_logits_is_one_token() -> None:
    logits, target = torch.randn(11), torch.tensor(4)
    assert_loss_close(cross_entropy(logits, target), F.cross_entropy(logits, target))


def test_int32_targets_are_accepted() -> None:
    logits, target = example(5, 40)
    assert torch.equal(cross_entropy(logits, target.int()), cross_entropy(logits, target))


# ---- time of the host ------------------------------------------------------------------------------------------------


class OpNames(TorchDispatchMode):
    """The names of the ops that are called, without those that only look at a tensor another way."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (torch.ops.aten.detach.default, torch.ops.aten.ones_like.default):
            self.found.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_one_rank_calls_one_op_a_direction(reduction: str) -> None:
    x, target = torch.randn(4, 9).requires_grad_(), torch.tensor([1, -100, 8, 0])
    with OpNames() as forward:
        loss = cross_entropy(x, target, reduction=reduction)
    with OpNames() as backward:
        loss.backward()
    assert forward.found == ["fastpar::cross_entropy_forward"]
    assert backward.found == ["fastpar::cross_entropy_backward"]
