"""The C++ kernels of cross-entropy, called as ops: every instruction set, type and option against float64 written here
from the algebra, and the values at which such kernels go wrong.

Tolerances are those of tests/ops/cross_entropy_cases.py. bfloat16 gradients come from an exponential that is good to
7.5e-5, so they may be off by 0.52 units in the last place instead of 0.5; a unit is allowed.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from fastpar import _ext
from fastpar.contracts.vocab_shard import read_headers
from tests.ops.cross_entropy_cases import DTYPES, assert_grad_close, assert_loss_close, capability, example

__all__ = ["capability"]  # a fixture
_ext.load()
K = torch.ops.fastpar
IGNORED = -100


class Terms(NamedTuple):
    """The options of a row, with the ops' defaults."""

    smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float = 0.0
    scale: float = 1.0
    weighted: bool = False


TERMS = {
    "plain": Terms(),
    "smoothing": Terms(smoothing=0.1),
    "only smoothing": Terms(smoothing=1.0),
    "z-loss": Terms(z_loss=1e-2),
    "softcap": Terms(softcap=6.0),
    "scale": Terms(scale=0.3),
    "negative scale": Terms(scale=-1.5),
    "softcap and negative scale": Terms(softcap=5.0, scale=-0.5),
    "weights": Terms(weighted=True),
    "smoothing and weights": Terms(smoothing=0.2, weighted=True),
    "everything": Terms(smoothing=0.1, z_loss=1e-3, softcap=8.0, scale=1.3, weighted=True),
}


def class_weight(terms: Terms, vocab: int, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """(weight, weight_sum) as the ops take them."""
    if not terms.weighted:
        return None, None
    weight = torch.linspace(0.25, 2.0, vocab, dtype=torch.float64).to(wide(dtype))
    return weight, weight.double().sum() if terms.smoothing > 0 else None


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def expected(
    logits: Tensor, target: Tensor, terms: Terms, grad_loss: Tensor, grad_lse: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, lse, gradient) in float64 by autograd on the definition."""
    x = logits.double().requires_grad_()
    vocab = x.shape[-1]
    z = terms.scale * x
    if terms.softcap:
        z = terms.softcap * torch.tanh(z / terms.softcap)
    lse = z.logsumexp(-1)
    weight, _ = class_weight(terms, vocab, torch.float64)
    w = torch.ones(vocab, dtype=torch.float64) if weight is None else weight
    ids = target.clamp(min=0)
    loss = (1 - terms.smoothing) * w[ids] * (lse - z.gather(1, ids.unsqueeze(1)).squeeze(1))
    if terms.smoothing:
        loss = loss + terms.smoothing / vocab * (w * (lse.unsqueeze(1) - z)).sum(-1)
    loss = (loss + terms.z_loss * lse.square()).masked_fill(target == IGNORED, 0.0)
    total = (loss * grad_loss.double()).sum()
    if grad_lse is not None:
        total = total + (lse * grad_lse.double()).sum()
    (grad,) = torch.autograd.grad(total, x)
    return loss.detach(), lse.detach(), grad


def stats(
    x: Tensor, target: Tensor, terms: Terms, start: int = 0, total: int | None = None, inplace: bool = False
) -> Tensor:
    total = x.shape[-1] if total is None else total
    weight, _ = class_weight(terms, total, x.dtype)
    op = K.vocab_parallel_cross_entropy_stats_exp_ if inplace else K.vocab_parallel_cross_entropy_stats
    result: Tensor = op(x, target, weight, start, total, IGNORED, terms.smoothing > 0, terms.softcap, terms.scale)
    return result


def merge(gathered: Tensor, target: Tensor, terms: Terms, total: int) -> tuple[Tensor, Tensor]:
    weight, weight_sum = class_weight(terms, total, gathered.dtype)
    loss, lse = K.vocab_parallel_cross_entropy_merge(
        gathered, target, weight, weight_sum, total, IGNORED, terms.smoothing, terms.z_loss
    )
    return loss, lse


def backward(x: Tensor, lse: Tensor, target: Tensor, terms: Terms, grad_loss: Tensor, **where: Any) -> Tensor:
    """The gradient; where: grad_lse, start, total, inplace."""
    total = where.get("total", x.shape[-1])
    weight, weight_sum = class_weight(terms, total, x.dtype)
    out = x.clone() if where.get("inplace") else x
    name = "vocab_parallel_cross_entropy_backward" + ("_" if where.get("inplace") else "")
    op = getattr(K, name)
    gradients = (grad_loss, where.get("grad_lse"))
    grad = op(out, lse, target, weight, weight_sum, *gradients, where.get("start", 0), total, IGNORED, *terms[:4])
    return out if grad is None else grad


def fused(x: Tensor, target: Tensor, terms: Terms, grad_loss: Tensor, inplace: bool = False) -> tuple[Tensor, ...]:
    weight, weight_sum = class_weight(terms, x.shape[-1], x.dtype)
    rest = (target, weight, weight_sum, grad_loss, IGNORED, *terms[:4])
    if not inplace:
        return tuple(K.cross_entropy_forward_backward(x, *rest))
    out = x.clone()
    return (*K.cross_entropy_forward_backward_(out, *rest), out)


def upstream(rows: int, dtype: torch.dtype) -> Tensor:
    return torch.linspace(-1.0, 2.0, rows, dtype=wide(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("denominator", [None, 3.0])
@pytest.mark.parametrize("reduction", [1, 2], ids=["sum", "mean"])
def test_a_reduced_loss_with_its_gradient_is_forward_and_backward(
    dtype: torch.dtype, denominator: float | None, reduction: int
) -> None:
    x, target = torch.randn(5, 37).to(dtype), torch.tensor([3, IGNORED, 0, 36, 7])
    given = None if denominator is None else torch.tensor(denominator, dtype=wide(dtype))
    terms = (IGNORED, 0.1, 1e-3, 20.0, 0.5)
    out, lse, divisor, grad = K.cross_entropy_reduced_forward_backward(x, target, None, None, given, reduction, *terms)
    forward = K.cross_entropy_forward(x, target, None, None, given, reduction, *terms)
    assert all(map(torch.equal, (out, lse, divisor), forward))
    upstream = (torch.ones((), dtype=wide(dtype)), divisor, 0, 37)
    assert torch.equal(grad, K.cross_entropy_backward(x, lse, target, None, None, *upstream, *terms))
    assert float(divisor) == (1.0 if reduction == 1 else denominator or 4.0)


def test_a_loss_of_each_row_has_no_reduced_gradient() -> None:
    x, target = torch.randn(2, 5), torch.tensor([1, 2])
    with pytest.raises(RuntimeError, match=r"the reduction must be a sum \(1\) or a mean \(2\), not 0"):
        K.cross_entropy_reduced_forward_backward(x, target, None, None, None, 0, IGNORED, 0.0, 0.0, 0.0, 1.0)


# ---- one rank --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TERMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_call_has_the_bits_of_stats_merge_and_torchs_reduction(dtype: torch.dtype, name: str) -> None:
    terms, rows, vocab = TERMS[name], 37, 19
    x, target = example(rows, vocab, dtype=dtype)
    target[3] = IGNORED
    loss, lse = merge(stats(x, target, terms).unsqueeze(0), target, terms, vocab)
    counted = torch.tensor(rows - int((target == IGNORED).sum()), dtype=loss.dtype)
    given = torch.tensor(1.7, dtype=loss.dtype)
    one = torch.ones_like(given)
    expected = {
        (0, None): (loss, one),
        (1, None): (loss.sum(), one),
        (2, None): (loss.sum() / counted, counted),
        (2, given): (loss.sum() / given, given),
    }
    weight, weight_sum = class_weight(terms, vocab, dtype)
    for (reduction, denominator), wanted in expected.items():
        arguments = (weight, weight_sum, denominator, reduction, IGNORED, *terms[:4])
        out, found, divisor = K.cross_entropy_forward(x, target, *arguments)
        assert torch.equal(found, lse)
        assert torch.equal(out, wanted[0])
        assert torch.equal(divisor, wanted[1])
    upstream_of_all = torch.tensor(0.3, dtype=loss.dtype)
    options = (0, vocab, IGNORED, *terms[:4])
    grad = K.cross_entropy_backward(x, lse, target, weight, weight_sum, upstream_of_all, counted, *options)
    assert torch.equal(grad, backward(x, lse, target, terms, (upstream_of_all / counted).expand(rows)))


def test_a_mean_over_no_rows_divides_by_one() -> None:
    x, target = torch.randn(3, 5), torch.full((3,), IGNORED)
    out, _, divisor = K.cross_entropy_forward(x, target, None, None, None, 2, IGNORED, *Terms()[:4])
    assert (out.item(), divisor.item()) == (0.0, 1.0)


# ---- every instruction set, type and option --------------------------------------------------------------------------


@pytest.mark.parametrize("name", TERMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_two_shards_match_float64(capability: str, dtype: torch.dtype, name: str) -> None:
    terms, vocab, cut = TERMS[name], 2310, 1027
    x, target = example(9, vocab, dtype)
    g, h = upstream(9, dtype), upstream(9, dtype).flip(0)
    shards = [(0, x[:, :cut]), (cut, x[:, cut:])]
    gathered = torch.stack([stats(shard, target, terms, start, vocab) for start, shard in shards])
    loss, lse = merge(gathered, target, terms, vocab)
    grads = [backward(s, lse, target, terms, g, grad_lse=h, start=at, total=vocab) for at, s in shards]
    wanted_loss, wanted_lse, wanted_grad = expected(x, target, terms, g, h)
    assert_loss_close(loss, wanted_loss, scale=10.0)
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-6, atol=1e-6)
    # With softcap the float32 z itself has an error of an ulp.
    roundings = 3 if terms.softcap or terms.z_loss else 1
    assert_grad_close(torch.cat(grads, 1), wanted_grad, dtype, roundings)


@pytest.mark.parametrize("name", TERMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_both_passes_at_once_match_float64_and_in_place_has_the_same_bits(
    capability: str, dtype: torch.dtype, name: str
) -> None:
    terms = TERMS[name]
    x, target = example(7, 4203, dtype)
    g = upstream(7, dtype)
    loss, lse, grad = fused(x, target, terms, g)
    wanted_loss, wanted_lse, wanted_grad = expected(x, target, terms, g)
    assert_loss_close(loss, wanted_loss, scale=10.0)
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-6, atol=1e-6)
    assert_grad_close(grad, wanted_grad, dtype, 3 if terms.softcap or terms.z_loss else 1)
    for kept, overwritten in zip((loss, lse, grad), fused(x, target, terms, g, inplace=True), strict=True):
        assert torch.equal(kept, overwritten)
    assert torch.equal(backward(x, lse, target, terms, g), backward(x, lse, target, terms, g, inplace=True))


@pytest.mark.parametrize("name", ["plain", "scale", "softcap", "smoothing"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_stats_leave_the_exponentials_without_the_target_in_place(
    capability: str, dtype: torch.dtype, name: str
) -> None:
    terms = TERMS[name]
    x, target = example(8, 1030, dtype)
    before = x.double().clone()
    wanted_stats = stats(x, target, terms)
    assert torch.equal(stats(x, target, terms, inplace=True), wanted_stats)
    z = terms.scale * before
    factor = torch.ones_like(z)
    if terms.softcap:
        z = terms.softcap * torch.tanh(z / terms.softcap)
        factor = 1 - (z / terms.softcap).square()
    e = (z - z.amax(1, keepdim=True)).exp() * factor
    e[target == IGNORED] = 0
    counted = target != IGNORED
    e[counted, target[counted]] = 0
    assert_grad_close(x, e, dtype, 3 if terms.softcap else 1)
    assert torch.count_nonzero(x[~counted]) == 0
    assert torch.count_nonzero(x[counted, target[counted]]) == 0


def test_the_example_of_two_ranks_with_one_column_each(capability: str) -> None:
    shards, target = [torch.zeros(1, 1), torch.full((1, 1), math.log(3.0))], torch.tensor([1])
    local = [stats(x, target, Terms(), start, 2) for start, x in enumerate(shards)]
    torch.testing.assert_close(local[0][0], torch.tensor([0.0, 1.0, 0.0]))
    torch.testing.assert_close(local[1][0], torch.tensor([math.log(3.0), 1.0, math.log(3.0)]))
    loss, lse = merge(torch.stack(local), target, Terms(), 2)
    torch.testing.assert_close(lse.item(), math.log(4.0), rtol=1e-7, atol=0.0)
    torch.testing.assert_close(loss.item(), math.log(4.0 / 3.0), rtol=1e-6, atol=0.0)
    grads = [
        backward(x, lse, target, Terms(), torch.ones(1), start=start, total=2).item() for start, x in enumerate(shards)
    ]
    torch.testing.assert_close(grads, [0.25, -0.25], rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_last_rows_of_the_statistics_are_a_header(dtype: torch.dtype, smoothing: float) -> None:
    x, target = example(5, 33, dtype)
    terms, total = Terms(smoothing=smoothing), 2**33
    out = stats(x, target, terms, 2**32 + 1, total)
    assert out.shape == (8, 5 if smoothing else 3)
    size, start, of, bad_row, checksum = read_headers(out.unsqueeze(0))[0]
    assert (size, start, of) == (33, 2**32 + 1, total)
    assert (bad_row, checksum) == (0, 0)
    assert torch.equal(out, out), "a half of the header reads as NaN"
    target[3] = total
    target[4] = -5
    out = stats(x, target, terms, 2**32 + 1, total)
    assert read_headers(out.unsqueeze(0))[0][3] == 4  # 1 + row
    assert torch.isnan(out[3:5, 2]).all()
    assert torch.isfinite(out[:3]).all()
    loss, _ = merge(out.unsqueeze(0), target, terms, total)
    assert torch.isnan(loss[3:]).all()


# ---- values at which such kernels go wrong ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["plain", "smoothing"])
def test_shards_without_a_column_or_a_finite_logit_contribute_nothing(
    capability: str, name: str, dtype: torch.dtype
) -> None:
    terms = TERMS[name]
    x, target = torch.randn(3, 70).to(dtype), torch.tensor([0, 30, 69])
    masked = torch.full((3, 40), -math.inf, dtype=dtype)
    empty = x[:, :0]
    for out in (stats(masked, target + 110, Terms(), 70, 200), stats(empty, target, Terms(), 0, 200)):
        assert torch.equal(out[:3], torch.tensor([[-math.inf, 0.0, 0.0]] * 3))
    if terms.smoothing == 0:
        parts = [
            stats(x, target, terms, 0, 110),
            stats(masked, target, terms, 70, 110),
            stats(empty, target, terms, 110, 110),
        ]
        loss, lse = merge(torch.stack(parts), target, terms, 110)
        assert_loss_close(loss, expected(x, target, terms, torch.ones(3))[0])
        grad = backward(masked, lse, target, terms, torch.ones(3), start=70, total=110)
    else:
        parts = [stats(x, target, terms, 0, 70), stats(empty, target, terms, 70, 70)]
        loss, lse = merge(torch.stack(parts), target, terms, 70)
        assert_loss_close(loss, expected(x, target, terms, torch.ones(3))[0], scale=10.0)
        grad = backward(masked, lse, target, terms, torch.ones(3), start=70, total=110) + 0.1 / 110
        assert grad.abs().max() <= 0.1 / 110 * 2.0**-8, "a class without probability gets -beta and nothing else"
        grad = torch.zeros(1)
    assert torch.count_nonzero(grad) == 0
    assert backward(empty, lse, target, terms, torch.ones(3), start=110, total=110).shape == (3, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_infinite_logits_with_softcap_have_a_finite_loss_and_no_gradient(capability: str, dtype: torch.dtype) -> None:
    x, target = torch.randn(2, 50).to(dtype), torch.tensor([1, 7])
    x[0, 5], x[0, 7], x[1] = math.inf, -math.inf, -math.inf
    terms = Terms(softcap=3.0)
    loss, lse, grad = fused(x, target, terms, torch.ones(2, dtype=wide(dtype)))
    assert torch.isfinite(loss).all()
    torch.testing.assert_close(lse[1].item(), -3.0 + math.log(50.0))
    torch.testing.assert_close(lse[0], (3.0 * torch.tanh(x[0].double() / 3.0)).logsumexp(0), rtol=1e-6, atol=0.0)
    assert torch.equal(grad[0, [5, 7]], torch.zeros(2, dtype=dtype))
    assert torch.count_nonzero(grad[1]) == 0
    assert torch.isfinite(grad).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf])
def test_nan_and_inf_make_their_row_nan_and_no_other(capability: str, value: float, dtype: torch.dtype) -> None:
    x, target = example(6, 2100, dtype)
    target[:] = 5
    x[2, 1300] = value
    x[3] = -x[3].abs()
    x[3, 17] = value
    loss, lse, grad = fused(x, target, Terms(), torch.ones(6, dtype=wide(dtype)))
    bad = torch.tensor([False, False, True, True, False, False])
    assert torch.equal(torch.isnan(loss), bad)
    assert torch.equal(torch.isnan(lse), bad)
    assert torch.equal(torch.isnan(grad).all(1), bad)
    assert torch.equal(torch.isnan(grad).any(1), bad)


@pytest.mark.parametrize("dtype", DTYPES)
def test_ignored_rows_are_zero_unless_lse_has_a_gradient(capability: str, dtype: torch.dtype) -> None:
    x, target = example(4, 100, dtype)
    target[:] = torch.tensor([IGNORED, 3, IGNORED, 4])
    g, h = torch.ones(4, dtype=wide(dtype)), torch.tensor([0.5, 0.0, 0.0, 0.0], dtype=wide(dtype))
    _, lse = merge(stats(x, target, Terms())[None], target, Terms(), 100)
    grad = backward(x, lse, target, Terms(), g, grad_lse=h)
    assert_grad_close(grad[0], 0.5 * x[0].double().softmax(0), dtype)
    assert torch.count_nonzero(grad[2]) == 0
    x[2] = math.nan
    loss, _, grad = fused(x, target, TERMS["everything"], g)
    assert torch.count_nonzero(grad[[0, 2]]) == 0
    assert torch.count_nonzero(loss[[0, 2]]) == 0
    assert torch.count_nonzero(backward(x, lse, target, TERMS["everything"], g)[2]) == 0


@pytest.mark.parametrize("offset", [-1e4, 1e4])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_large_logits_keep_their_digits(capability: str, offset: float, smoothing: float) -> None:
    terms = Terms(smoothing=smoothing)
    x, target = example(6, 3000)
    x = x + offset
    g = upstream(6, torch.float32)
    wanted_loss, wanted_lse, wanted_grad = expected(x, target, terms, g)
    loss, lse = merge(stats(x, target, terms)[None], target, terms, 3000)
    assert_loss_close(loss, wanted_loss, scale=10.0)
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-9, atol=0.0)
    assert_grad_close(backward(x, lse, target, terms, g), wanted_grad, torch.float32, 2)
    fused_loss, _, fused_grad = fused(x, target, terms, g)
    assert_loss_close(fused_loss, wanted_loss, scale=10.0)
    assert_grad_close(fused_grad, wanted_grad, torch.float32, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_masked_with_the_smallest_number_is_uniform(capability: str, dtype: torch.dtype) -> None:
    x = torch.full((1, 500), torch.finfo(dtype).min, dtype=dtype)
    loss = merge(stats(x, torch.tensor([3]), Terms())[None], torch.tensor([3]), Terms(), 500)[0]
    torch.testing.assert_close(loss.item(), math.log(500.0))
    assert torch.isfinite(fused(x, torch.tensor([3]), Terms(), torch.ones(1))[2]).all()


@pytest.mark.parametrize("probability", [0.9, 0.999, 1 - 1e-6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_target_entry_is_never_one_minus_a_rounded_probability(
    capability: str, dtype: torch.dtype, probability: float
) -> None:
    vocab = 5000
    x = torch.randn(1, vocab, generator=torch.Generator().manual_seed(1))
    x[0, 1234] = -math.inf
    x[0, 1234] = x.logsumexp(1) + math.log(probability / (1 - probability))
    x, target, g = x.to(dtype), torch.tensor([1234]), torch.ones(1)
    _, _, wanted = expected(x, target, Terms(), g)
    # The float32 sum is good to two ulps of 1.2e-7, and 1 - p is what it exceeds 1 by.
    slack = 2.4e-7 / wanted.abs().max().item()
    tolerance = slack + (2.0**-8 if dtype == torch.bfloat16 else 1e-6)
    for grad in (
        fused(x, target, Terms(), g)[2],
        backward(x, merge(stats(x, target, Terms())[None], target, Terms(), vocab)[1], target, Terms(), g),
    ):
        torch.testing.assert_close(grad[0, 1234].double(), wanted[0, 1234], rtol=tolerance, atol=0.0)


def test_a_certain_prediction_has_a_loss_of_exactly_zero(capability: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(64, 300, generator=generator) * 300 - 400
    target = torch.arange(64)
    x[target, target] = torch.rand(64, generator=generator) * 200
    loss, _, _ = fused(x, target, Terms(), torch.ones(64))
    assert torch.count_nonzero(loss) == 0
    assert torch.count_nonzero(merge(stats(x, target, Terms())[None], target, Terms(), 300)[0]) == 0
    x = torch.randn(64, 300, generator=generator) * 20
    assert (fused(x, x.argmax(1), Terms(), torch.ones(64))[0] >= 0).all()


def test_a_loss_over_131072_classes_is_good_to_two_ulps(capability: str) -> None:
    x, target = example(4, 131072)
    target[:] = torch.tensor([0, 7, 131071, 9])
    wanted, _, _ = expected(x, target, Terms(), torch.ones(4))
    ulp = torch.nextafter(wanted.float(), torch.tensor(math.inf)).double() - wanted.float().double()
    loss = merge(stats(x, target, Terms())[None], target, Terms(), 131072)[0]
    assert ((loss.double() - wanted).abs() <= 2 * ulp).all()
    assert ((fused(x, target, Terms(), torch.ones(4))[0].double() - wanted).abs() <= 2 * ulp).all()


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_any_stride_are_taken_where_they_lie(capability: str, dtype: torch.dtype) -> None:
    storage = torch.randn(5, 3, 2, 1111).to(dtype)
    x = storage[:, 1:, 1, 7:1024].transpose(0, 1)
    target, g = torch.randint(0, 1017, (2, 5)), torch.ones(10, dtype=wide(dtype))
    kept = storage.clone()
    terms = TERMS["everything"]
    wanted = fused(x.contiguous(), target, terms, g)
    for strided, dense in zip(fused(x, target, terms, g), wanted, strict=True):
        assert torch.equal(strided, dense)
    weight, weight_sum = class_weight(terms, 1017, dtype)
    K.cross_entropy_forward_backward_(x, target, weight, weight_sum, g, IGNORED, *terms[:4])
    assert torch.equal(x, wanted[2])
    x.copy_(kept[:, 1:, 1, 7:1024].transpose(0, 1))
    assert torch.equal(storage, kept), "written outside the rows"


@pytest.mark.parametrize("name", ["plain", "smoothing and weights", "softcap"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_large_unaligned_outputs_are_streamed_with_the_same_bits(
    capability: str, dtype: torch.dtype, name: str
) -> None:
    # Above 8 MiB an output is stored past the caches; odd rows start misaligned.
    vocab = 100003 if dtype == torch.float32 else 200003
    terms = TERMS[name]
    x, target = example(23, vocab, dtype)
    g = upstream(23, dtype)
    assert x.numel() * x.element_size() > 8 << 20
    _, lse, grad = fused(x, target, terms, g)
    assert torch.equal(grad, fused(x, target, terms, g, inplace=True)[2])
    assert torch.equal(backward(x, lse, target, terms, g), backward(x, lse, target, terms, g, inplace=True))
    some = [0, 1, 22]
    assert_grad_close(grad[some], expected(x[some], target[some], terms, g[some])[2], dtype, 3 if terms.softcap else 1)


def test_a_row_of_more_blocks_than_are_kept_is_computed_twice(capability: str) -> None:
    x, target = example(2, 524288 + 5)
    x[0] = x[0].sort().values  # every block has another maximum
    g = torch.ones(2)
    loss, lse, grad = fused(x, target, Terms(), g, inplace=True)
    wanted_loss, _, wanted_grad = expected(x, target, Terms(), g)
    assert_loss_close(loss, wanted_loss)
    assert_grad_close(grad, wanted_grad, torch.float32)
    assert torch.equal(grad, backward(x, lse, target, Terms(), g))


def test_a_row_whose_every_block_has_another_maximum_is_right(capability: str) -> None:
    x, target = example(3, 20001)
    x = x.sort(dim=1).values
    g = torch.ones(3)
    loss, _, grad = fused(x, target, Terms(), g, inplace=True)
    wanted_loss, _, wanted_grad = expected(x, target, Terms(), g)
    assert_loss_close(loss, wanted_loss)
    assert_grad_close(grad, wanted_grad, torch.float32)


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    x, target = example(64, 3001, torch.bfloat16)
    g, threads, results = upstream(64, x.dtype), torch.get_num_threads(), []
    for count in (1, 2):
        torch.set_num_threads(count)
        loss, lse, grad = fused(x, target, TERMS["everything"], g)
        out = stats(x, target, TERMS["everything"])
        results.append((loss, lse, grad, out, backward(x, lse, target, TERMS["everything"], g)))
    torch.set_num_threads(threads)
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_a_target_out_of_range_is_refused_before_anything_is_written() -> None:
    x, target = example(4, 20)
    target[2] = 20
    before = x.clone()
    with pytest.raises(RuntimeError, match=r"target\[2\] is 20, outside the vocabulary \[0, 20\)"):
        K.cross_entropy_forward_backward_(x, target, None, None, torch.ones(4), IGNORED, 0.0, 0.0, 0.0, 1.0)
    assert torch.equal(x, before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.ones(19)}, r"weight must be contiguous \[20\]"),
        ({"weight": torch.ones(20, dtype=torch.float64)}, "float64 for float64 logits and float32 for others"),
        ({"weight": torch.ones(20), "smoothing": 0.1}, "needs weight_sum"),
        ({"grad_loss": torch.ones(4, dtype=torch.float64)}, r"grad_loss must be \[4\]"),
        ({"smoothing": 1.5}, r"label_smoothing must be in \[0, 1\], got 1.5"),
        ({"softcap": -1.0}, "softcap must be positive"),
        ({"start": 1}, r"columns \[1, 21\) are not within the vocabulary \[0, 20\)"),
    ],
)
def test_arguments_that_do_not_fit_are_named(change: dict[str, Any], message: str) -> None:
    x, target = example(4, 20)
    lse = torch.zeros(4, dtype=torch.float64)
    call = {"weight": None, "grad_loss": torch.ones(4), "start": 0, "smoothing": 0.0, "softcap": 0.0, **change}
    with pytest.raises(RuntimeError, match=message):
        K.vocab_parallel_cross_entropy_backward(
            x, lse, target, call["weight"], None, call["grad_loss"], None, call["start"], 20, IGNORED,
            call["smoothing"], 0.0, call["softcap"], 1.0,
        )  # fmt: skip


def test_no_rows_still_have_a_header() -> None:
    x, target = torch.zeros(0, 9), torch.zeros(0, dtype=torch.int64)
    out = stats(x, target, Terms())
    assert read_headers(out.unsqueeze(0))[0][:3] == [9, 0, 9]
    loss, lse = merge(out.unsqueeze(0), target, Terms(), 9)
    assert loss.shape == lse.shape == (0,)
    assert fused(x, target, Terms(), torch.zeros(0))[2].shape == (0, 9)
