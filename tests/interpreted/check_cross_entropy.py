"""The Triton kernels of cross-entropy against float64; run by test_cross_entropy_triton.py in the interpreter.

Most tests shrink the blocks, so that a row of 300 columns is two whole blocks and a part of one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from fastpar import ops
from fastpar.contracts.cross_entropy import LossOptions, check_options, check_weight
from fastpar.kernels import cross_entropy as kernels
from fastpar.kernels.cross_entropy_kernels import row_offset
from fastpar.kernels.cross_entropy_row import expm1, tanh_and_slope
from fastpar.reference import cross_entropy as reference
from tests.ops.cross_entropy_cases import (
    DTYPES,
    OPTIONS,
    assert_grad_close,
    assert_loss_close,
    example,
    expected,
    expected_with,
    sharded,
    upstream,
    with_weights,
)

# log(0) of a row without a finite logit, and inf - inf, are results here; numpy mentions them.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

VOCAB = 300
cross_entropy = ops.vocab_parallel_cross_entropy
configuration = kernels.configuration


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton behind the public function, and blocks of 2 * 64 columns."""
    monkeypatch.setattr("fastpar.ops.cross_entropy.implementation", lambda x: kernels)
    monkeypatch.setattr("tests.ops.cross_entropy_cases.implementation", lambda x: kernels)
    monkeypatch.setattr(kernels, "configuration", lambda *args, **kwargs: kernels.LossConfiguration(2, 64, 1))


def cases() -> list[Any]:
    few = ("plain", "negative scale", "everything")
    return [
        pytest.param(name, dtype, id=f"{name}-{str(dtype).removeprefix('torch.')}")
        for name in OPTIONS
        for dtype in DTYPES
        if dtype == torch.float32 or name in few
    ]


def roundings(name: str, dtype: torch.dtype) -> float:
    """How many roundings to allow: the interpreter cuts bfloat16 off where devices round to nearest."""
    if dtype == torch.bfloat16:
        return 2.0
    # z = softcap * tanh(...) carries tanh's rounding times softcap.
    return 4.0 if "softcap" in OPTIONS[name] and dtype == torch.float32 else 1.5


def terms_of(
    name: str, vocab: int, dtype: torch.dtype = torch.float32
) -> tuple[LossOptions, Tensor | None, Tensor | None]:
    """(options, weight, weight_sum) as the ops take them."""
    options = with_weights(OPTIONS[name], vocab, dtype)
    defaults = {"ignore_index": -100, "label_smoothing": 0.0, "z_loss": 0.0, "softcap": None, "logit_scale": 1.0}
    checked = check_options(**{k: options.get(k, v) for k, v in defaults.items()})
    return checked, *check_weight(options.get("weight"), vocab, torch.empty((), dtype=dtype), checked)


def doubled(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.double()


# ---- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "dtype"), cases())
def test_every_option_matches_float64_with_different_upstream_gradients_per_token(
    name: str, dtype: torch.dtype
) -> None:
    logits, target = example(5, VOCAB, dtype)
    options = with_weights(OPTIONS[name], VOCAB, dtype)
    grads = (upstream(5, dtype), upstream(5, dtype).flip(0) * 0.5)
    (wanted_loss, wanted_lse), wanted_grad = expected_with(
        logits, target, grads, reduction="none", return_lse=True, **options
    )
    x = logits.clone().requires_grad_()
    loss, lse = cross_entropy(x, target, reduction="none", return_lse=True, **options)
    torch.autograd.backward([loss, lse], list(grads))
    coarser = 4.0 if "softcap" in options else 1.0
    assert_loss_close(loss, wanted_loss, scale=30.0 * coarser)
    assert_loss_close(lse, wanted_lse, scale=30.0 * coarser)
    assert_grad_close(x.grad, wanted_grad, dtype, roundings(name, dtype))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("plain", torch.bfloat16),
        ("only smoothing", torch.float32),
        ("negative scale", torch.float32),
        ("smoothing and weights", torch.float16),
        ("everything", torch.float32),
        ("everything", torch.float64),
    ],
)
def test_forward_backward_matches_float64_and_in_place_has_the_same_bits(name: str, dtype: torch.dtype) -> None:
    logits, target = example(5, VOCAB, dtype)
    options, weight, weight_sum = terms_of(name, VOCAB, dtype)
    arguments = (target, weight, weight_sum, upstream(5, dtype), *options)
    loss, lse, grad = kernels.forward_backward(logits, *arguments)
    exact = (target, doubled(weight), weight_sum, upstream(5, dtype).double(), *options)
    wanted_loss, wanted_lse, wanted_grad = reference.forward_backward(logits.double(), *exact)
    coarser = 4.0 if options.softcap else 1.0
    assert_loss_close(loss, wanted_loss, scale=30.0 * coarser)
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-6 if dtype != torch.float64 else 1e-12, atol=1e-6)
    assert_grad_close(grad, wanted_grad, dtype, roundings(name, dtype))
    same_loss, same_lse = kernels.forward_backward_(logits, *arguments)
    assert torch.equal(logits, grad)
    assert torch.equal(same_loss, loss)
    assert torch.equal(same_lse, lse)


@pytest.mark.parametrize(("name", "dtype"), [("plain", torch.bfloat16), ("everything", torch.float32)])
def test_inplace_and_fresh_gradients_have_the_same_bits(name: str, dtype: torch.dtype) -> None:
    logits, target = example(5, VOCAB, dtype)
    options, weight, weight_sum = terms_of(name, VOCAB)
    lse = logits.double().logsumexp(-1)
    arguments = (lse, target, weight, weight_sum, upstream(5), None, 0, VOCAB, *options)
    fresh = kernels.backward(logits, *arguments)
    kernels.backward_(logits, *arguments)
    assert torch.equal(logits, fresh)


@pytest.mark.parametrize(
    ("name", "dtype"), [("plain", torch.bfloat16), ("scale", torch.float32), ("everything", torch.float32)]
)
def test_exponentials_over_the_logits_are_relative_to_the_maximum_in_the_statistics(
    name: str, dtype: torch.dtype
) -> None:
    logits, target = example(5, VOCAB, dtype)
    logits[3] = -math.inf
    options, weight, _ = terms_of(name, VOCAB)
    start, total = 7, VOCAB + 20
    weight = None if weight is None else torch.cat([torch.ones(7), weight, torch.ones(13)])
    target = torch.where(target == -100, -100, target + start)
    arguments = (start, total, -100, options.smoothing, options.softcap, options.logit_scale)
    wanted_stats = kernels.stats(logits, target, weight, *arguments)
    exact = logits.double()
    found = kernels.stats_exp_(logits, target, weight, *arguments)
    assert torch.equal(found.view(torch.int32), wanted_stats.view(torch.int32))
    wanted = reference.transform(exact, 5, options.softcap, options.logit_scale)
    slope = 1.0 - (wanted / options.softcap).square() if options.softcap else 1.0
    wanted = (wanted - found[:5, :1].double()).exp() * slope
    wanted[torch.arange(5), (target - start).clamp(min=0)] = 0.0
    wanted[(target == -100) | (found[:5, 0] == -math.inf)] = 0.0
    assert torch.count_nonzero(logits[target == -100]) == 0
    assert_grad_close(logits, wanted, dtype, roundings(name, dtype))


def test_the_production_blocks_give_the_same_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "configuration", configuration)
    for vocab in (1, 1000, 17000):
        logits, target = example(2, vocab, torch.bfloat16)
        options = with_weights(OPTIONS["smoothing and weights"], vocab)
        (wanted,), wanted_grad = expected_with(logits, target, [upstream(2)], reduction="none", **options)
        x = logits.clone().requires_grad_()
        loss = cross_entropy(x, target, reduction="none", **options)
        loss.backward(upstream(2))
        assert_loss_close(loss, wanted, scale=30.0)
        assert_grad_close(x.grad, wanted_grad, torch.bfloat16, 2.0)


def test_worked_example() -> None:
    logits, target = torch.tensor([[0.0, math.log(3.0)]]), torch.tensor([1])
    stats = kernels.stats(logits, target, None, 0, 2, -100, False, 0.0, 1.0)
    torch.testing.assert_close(stats[0], torch.tensor([math.log(3.0), 4 / 3, math.log(3.0)]))
    loss, lse, grad = kernels.forward_backward(logits, target, None, None, torch.ones(1), -100, 0.0, 0.0, 0.0, 1.0)
    torch.testing.assert_close(loss, torch.tensor([math.log(4 / 3)]))
    torch.testing.assert_close(lse, torch.tensor([math.log(4.0)], dtype=torch.float64))
    torch.testing.assert_close(grad, torch.tensor([[0.25, -0.25]]))
    kernels.stats_exp_(logits, target, None, 0, 2, -100, False, 0.0, 1.0)
    torch.testing.assert_close(logits, torch.tensor([[1 / 3, 0.0]]))
    gathered = torch.tensor([[[0.0, 1.0, 0.0]], [[math.log(3.0), 1.0, math.log(3.0)]]])
    loss, lse = kernels.merge(gathered, target, None, None, 2, -100, 0.0, 0.0)
    torch.testing.assert_close(loss, torch.tensor([math.log(4 / 3)]))


# ---- shards ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain", "smoothing and weights", "everything"])
@pytest.mark.parametrize("bounds", [[0, 150, VOCAB], [0, 0, 3, 3, 131, VOCAB]])
def test_every_option_is_exact_over_uneven_and_empty_shards(name: str, bounds: list[int]) -> None:
    logits, target = example(4, VOCAB)
    options = with_weights(OPTIONS[name], VOCAB)
    loss, grad = sharded(logits, target, bounds, upstream(4), **options)
    (wanted,), wanted_grad = expected_with(logits, target, [upstream(4)], reduction="none", **options)
    assert_loss_close(loss, wanted, scale=120.0 if "softcap" in options else 30.0)
    assert_grad_close(grad, wanted_grad, torch.float32, roundings(name, torch.float32))


def test_a_shard_of_only_minus_infinity_contributes_nothing() -> None:
    logits, target = example(3, 200)
    target = target % 100
    logits[:, 100:] = -math.inf
    loss, grad = sharded(logits, target, [0, 100, 200], torch.ones(3))
    assert_loss_close(loss, F.cross_entropy(logits.double(), target, reduction="none"), scale=10.0)
    assert torch.isfinite(grad).all()
    assert torch.count_nonzero(grad[:, 100:]) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("smoothing", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 2])
def test_the_header_has_the_words_of_the_reference(dtype: torch.dtype, smoothing: bool, rows: int) -> None:
    logits, target = torch.zeros(rows, 3, dtype=dtype), torch.full((rows,), 2**33 + 6)
    arguments = (target, None, 2**33 + 5, 2**40 + 1, -100, smoothing, 0.0, 1.0)
    found, wanted = kernels.stats(logits, *arguments), reference.stats(logits, *arguments)
    assert found.shape == wanted.shape
    assert found.dtype == wanted.dtype
    assert torch.equal(found[rows:].view(torch.int32), wanted[rows:].view(torch.int32))


# ---- rows ------------------------------------------------------------------------------------------------------------


def test_ignored_rows_are_exact_zeros_even_where_the_logits_are_nan() -> None:
    logits, target = example(5, VOCAB)
    ignored = target == -100
    logits[ignored] = math.nan
    options, weight, weight_sum = terms_of("everything", VOCAB)
    loss, _, grad = kernels.forward_backward(logits, target, weight, weight_sum, torch.ones(5), *options)
    lse = torch.where(ignored, math.nan, 1.0).double()
    arguments = (lse, target, weight, weight_sum, torch.ones(5), None, 0, VOCAB, *options)
    other = kernels.backward(logits, *arguments)
    for found in (loss, grad, other):
        assert torch.count_nonzero(found[ignored]) == 0
        assert torch.isfinite(found).all()
        assert found[~ignored].abs().min() > 0


@pytest.mark.parametrize("name", ["plain", "everything"])
@pytest.mark.parametrize("outside", [-1, VOCAB, 2**40])
def test_a_target_outside_the_vocabulary_makes_its_row_nan_and_no_other(name: str, outside: int) -> None:
    logits, target = example(5, VOCAB)
    target[2] = outside
    options, weight, weight_sum = terms_of(name, VOCAB)
    loss, _, grad = kernels.forward_backward(logits, target, weight, weight_sum, torch.ones(5), *options)
    view = (options.smoothing, options.softcap, options.logit_scale)
    stats = kernels.stats(logits, target, weight, 0, VOCAB, -100, *view)
    same, _ = kernels.merge(stats[None], target, weight, weight_sum, VOCAB, *options[:3])
    for found in (loss, same, grad):
        assert found[2].isnan().all()
        assert found[[0, 1, 3, 4]].isfinite().all()


def test_infinite_logits_and_nan_behave_as_in_torch() -> None:
    logits = torch.randn(4, 150)
    logits[0, 5:] = -math.inf  # masked columns
    logits[1, 3] = math.nan
    logits[2, 149] = math.inf
    target = torch.tensor([2, 0, 1, 149])
    wanted = F.cross_entropy(logits, target, reduction="none")
    loss, _, grad = kernels.forward_backward(logits, target, None, None, torch.ones(4), -100, 0.0, 0.0, 0.0, 1.0)
    torch.testing.assert_close(loss, wanted, equal_nan=True, rtol=1e-5, atol=1e-5)
    assert torch.count_nonzero(grad[0, 5:]) == 0
    assert grad[0].isfinite().all()
    # Soft-capped, an infinite logit is a finite one whose gradient is zero.
    loss, _, grad = kernels.forward_backward(logits, target, None, None, torch.ones(4), -100, 0.0, 0.0, 30.0, 1.0)
    assert loss[[0, 2, 3]].isfinite().all()
    assert grad[2, 149] == 0
    assert torch.count_nonzero(grad[0, 5:]) == 0
    assert grad[[0, 2, 3]].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("probability", [0.9, 0.999, 1 - 1e-6, 1 - 1e-7])
def test_the_target_entry_keeps_its_digits_as_the_probability_nears_one(probability: float, dtype: torch.dtype) -> None:
    logits = torch.zeros(1, 100)
    logits[0, 17] = math.log(probability / (1 - probability) * 99)
    logits, target = logits.to(dtype), torch.tensor([17])
    _, wanted = expected(logits, target)
    grad = kernels.forward_backward(logits, target, None, None, torch.ones(1), -100, 0.0, 0.0, 0.0, 1.0)[2]
    # p - 1 from p in float32 is off by up to 6e-8 / (1 - p). Here a column's own float32 sum loses what falls on the
    # target's column, 1 of 99 other terms. Statistics in float32 lose the 6e-8 again, but no more than that.
    torch.testing.assert_close(grad[0, 17].double(), wanted[0, 17], rtol=0.02, atol=0.0)
    exact = logits.double().logsumexp(-1)
    arguments = (exact, target, None, None, torch.ones(1), None, 0, 100, -100, 0.0, 0.0, 0.0, 1.0)
    torch.testing.assert_close(kernels.backward(logits, *arguments)[0, 17].double(), wanted[0, 17], rtol=0.01, atol=0.0)


@pytest.mark.parametrize("name", ["plain", "smoothing and weights", "negative scale"])
@pytest.mark.parametrize("level", [1e4, -1e4])
def test_large_logits_keep_float32_accuracy(name: str, level: float) -> None:
    logits, target = example(4, VOCAB)
    logits = logits + level
    options = with_weights(OPTIONS[name], VOCAB)
    (wanted,), wanted_grad = expected_with(logits, target, [upstream(4)], reduction="none", **options)
    loss, grad = sharded(logits, target, [0, 170, VOCAB], upstream(4), **options)
    # A scaled logit is rounded where the statistics keep it: 1e-3 at 1e4.
    assert_loss_close(loss, wanted, scale=1000.0 if "logit_scale" in options else 30.0)
    assert_grad_close(grad, wanted_grad, torch.float32, roundings=2.0)


# ---- memory ----------------------------------------------------------------------------------------------------------


def columns_first(x: Tensor) -> Tensor:
    """The same values with a last dim that is not contiguous."""
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


STRIDED: dict[str, Callable[[Tensor], Tensor]] = {
    "a slice of the sequence": lambda base: base[0, :, :2, :60],
    "transposed": lambda base: base[0].transpose(0, 1)[..., 8:68],
    "three strides": lambda base: base[:, :2, :2, :60],
}


@pytest.mark.parametrize("name", STRIDED)
def test_strided_rows_are_read_and_written_where_they_are(name: str) -> None:
    options, weight, weight_sum = terms_of("smoothing and weights", 60)
    base = torch.randn(2, 3, 3, 80)
    x = STRIDED[name](base)
    count = x[..., 0].numel()
    target = torch.arange(count).view(x.shape[:-1])
    view = (target, weight, 0, 60, -100, True, 0.0, 1.0)
    fused = (target, weight, weight_sum, upstream(count), *options)

    contiguous = x.contiguous()
    stats = kernels.stats(contiguous, *view)
    loss, lse, grad = kernels.forward_backward(contiguous, *fused)
    backward = (lse, target, weight, weight_sum, upstream(count), upstream(count), 0, 60, *options)
    wanted_grad = kernels.backward(contiguous, *backward)

    assert torch.equal(kernels.stats(x, *view).view(torch.int32), stats.view(torch.int32))
    assert torch.equal(kernels.backward(x, *backward), wanted_grad)
    assert torch.equal(kernels.forward_backward(columns_first(x), *fused)[2], grad)
    for inplace, wanted in (("forward_backward_", grad), ("backward_", wanted_grad), ("stats_exp_", None)):
        held = base.clone()
        rows = STRIDED[name](held)
        if inplace == "forward_backward_":
            assert all(map(torch.equal, kernels.forward_backward_(rows, *fused), (loss, lse)))
        elif inplace == "backward_":
            kernels.backward_(rows, *backward)
        else:
            kernels.stats_exp_(contiguous, *view)
            assert torch.equal(kernels.stats_exp_(rows, *view).view(torch.int32), stats.view(torch.int32))
        assert torch.equal(rows, contiguous if wanted is None else wanted), inplace
        rows.copy_(x)
        assert torch.equal(held, base), f"{inplace} wrote outside the rows"


def test_in_place_needs_a_contiguous_vocabulary() -> None:
    x, target = columns_first(torch.randn(6, 9)), torch.zeros(6, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"forward_backward_ writes over the logits, .* contiguous: stride 6"):
        kernels.forward_backward_(x, target, None, None, torch.ones(6), -100, 0.0, 0.0, 0.0, 1.0)
    with pytest.raises(ValueError, match="stats_exp_ writes over the logits"):
        kernels.stats_exp_(x, target, None, 0, 9, -100, False, 0.0, 1.0)
    with pytest.raises(ValueError, match="backward_ writes over the logits"):
        kernels.backward_(x, *plain_backward(6))


def test_no_rows_and_no_columns_work() -> None:
    none = torch.empty(0, dtype=torch.int64)
    terms = (-100, 0.1, 1e-3, 0.0, 1.0)
    assert kernels.stats(torch.empty(0, 7), none, None, 0, 7, -100, True, 0.0, 1.0).shape == (3, 5)
    assert kernels.forward_backward(torch.empty(0, 7), none, None, None, torch.empty(0), *terms)[2].shape == (0, 7)
    assert kernels.backward(torch.empty(3, 0), *plain_backward(3)).shape == (3, 0)
    assert kernels.merge(torch.empty(2, 3, 3), none, None, None, 7, -100, 0.0, 0.0)[0].shape == (0,)
    stats = kernels.stats(torch.empty(2, 0), torch.tensor([1, 9]), None, 4, 7, -100, True, 0.0, 1.0)
    torch.testing.assert_close(
        stats[:2], torch.tensor([[-math.inf, 0, 0, 0, 0], [-math.inf, 0, math.nan, 0, 0]]), equal_nan=True
    )


def plain_backward(rows: int) -> tuple[Any, ...]:
    lse, target = torch.zeros(rows, dtype=torch.float64), torch.zeros(rows, dtype=torch.int64)
    return (lse, target, None, None, torch.ones(rows), None, 0, 7, -100, 0.0, 0.0, 0.0, 1.0)


def test_expanded_upstream_gradients_are_read_with_their_stride() -> None:
    logits, target = example(4, 70)
    arguments = (logits.double().logsumexp(-1), target, None, None)
    one = torch.tensor(0.5)
    terms = (0, 70, -100, 0.0, 0.0, 0.0, 1.0)
    wanted = kernels.backward(logits, *arguments, torch.full((4,), 0.5), torch.full((4,), 0.5), *terms)
    assert torch.equal(kernels.backward(logits, *arguments, one.expand(4), one.expand(4), *terms), wanted)
    every_other = torch.full((8,), 0.5)[::2]
    assert torch.equal(kernels.backward(logits, *arguments, every_other, every_other, *terms), wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scaling_by_a_scalar_on_the_device(dtype: torch.dtype) -> None:
    x = torch.randn(3, 5001).to(dtype)
    before = x.clone()
    kernels.scale_unless_one_(x, torch.ones(()))
    assert torch.equal(x, before)
    columns = x.T
    kernels.scale_unless_one_(columns, torch.tensor([0.5]))
    assert torch.equal(x, before * 0.5)
    kernels.scale_unless_one_(x, torch.tensor(math.nan))
    assert x.isnan().all()
    with pytest.raises(ValueError, match="x must be dense"):
        kernels.scale_unless_one_(x[:, 1:], torch.ones(()))
    with pytest.raises(ValueError, match=r"one element, got shape \(2,\)"):
        kernels.scale_unless_one_(x, torch.ones(2))


# ---- device functions ------------------------------------------------------------------------------------------------


@triton.jit
def offset_kernel(out, row, inner_rows, outer_stride, inner_stride):
    tl.store(out, row_offset(tl.program_id(0) + row, inner_rows, outer_stride, inner_stride, 8))


def test_row_offsets_pass_2_31() -> None:
    out = torch.zeros(1, dtype=torch.int64)
    offset_kernel[(1,)](out, 70001, 1000, 2**28 + 3, 50_000)
    assert out.item() == 8 * (70 * (2**28 + 3) + 50_000)


@triton.jit
def functions_kernel(x, t, slope, e, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    u = tl.load(x + i)
    tanh, derivative = tanh_and_slope(u)
    tl.store(t + i, tanh)
    tl.store(slope + i, derivative)
    tl.store(e + i, expm1(-tl.abs(u)))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 4e-7), (torch.float64, 1e-12)])
def test_tanh_its_slope_and_expm1_have_no_cancellation(dtype: torch.dtype, tolerance: float) -> None:
    size = torch.logspace(-7, 1.5, 512, dtype=dtype)
    x = torch.cat([size, -size])
    t, slope, e = (torch.empty_like(x) for _ in range(3))
    functions_kernel[(1,)](x, t, slope, e, BLOCK=1024)
    exact = x.double()
    torch.testing.assert_close(slope.double(), exact.cosh().pow(-2), rtol=tolerance * 30, atol=1e-30)
    torch.testing.assert_close(e.double(), (-exact.abs()).expm1(), rtol=tolerance, atol=0.0)
    # In float64 tanh is 1 - 2 E r near 0 too.
    torch.testing.assert_close(t.double(), exact.tanh(), rtol=tolerance, atol=1e-15 if dtype == torch.float64 else 0.0)
