"""The Triton kernels of softmax, log-probabilities and entropy against float64; run by test_vocab_triton.py in
the interpreter.

Most tests shrink the blocks, so that a row of 150 columns is two whole blocks and a part of one.

Tolerances. A term of a float32 sum is good to 2e-6, relative, and the softcap's tanh to 1e-7 times the cap. The
interpreter cuts bfloat16 off where devices round to nearest: two roundings there.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fastpar import ops
from fastpar.contracts.vocab import num_rows
from fastpar.kernels import vocab_softmax as kernels
from fastpar.reference import vocab_softmax as reference
from tests.ops.vocab_cases import normal

# log(0) of a row without a finite logit, and inf - inf, are results here; numpy mentions them.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

VOCAB = 150
ROWS = 4
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
ROUNDING = {torch.float32: 3e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-11, torch.float64: 1e-12}
OPTIONS = {"plain": (0.0, 1.0), "scale": (0.0, -1.5), "softcap": (5.0, 0.7)}
SHARDS = [[0, VOCAB], [0, 45, VOCAB], [0, 0, 3, 3, 131, VOCAB]]
configuration = kernels.configuration


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton behind the public functions, and blocks of 2 * 32 columns."""
    monkeypatch.setattr("fastpar.ops.vocab_softmax.implementation", lambda x: kernels)
    monkeypatch.setattr("fastpar.ops.vocab_entropy.implementation", lambda x: kernels)
    monkeypatch.setattr(kernels, "configuration", lambda *args, **kwargs: type(configuration(64, 4, 4))(2, 32, 1))


def some_ids(num_ids: int, vocab: int = VOCAB, rows: int = ROWS) -> Tensor:
    """[rows, num_ids]; some are ignored, and where a row has several, some occur twice."""
    ids = torch.randint(0, vocab, (rows, num_ids), generator=torch.Generator().manual_seed(num_ids))
    ids[1, 0] = -100
    if num_ids > 2:
        ids[2, 2] = ids[2, 0]
        ids[3, 1] = ids[3, num_ids - 1] = vocab - 1
    return ids


def some_logits(dtype: torch.dtype = torch.float32, option: str = "plain") -> Tensor:
    """Row 0 has masked columns, all of [40, 80) among them."""
    logits = normal(ROWS, VOCAB, dtype=dtype)
    masked = math.copysign(math.inf, -OPTIONS[option][1])  # z is -inf, or with a softcap -softcap
    logits[0, 40:80] = masked
    logits[0, ::7] = masked
    return logits


def close(actual: Tensor, wanted: Tensor, scale: float = 1.0, dtype: torch.dtype | None = None) -> None:
    """To a rounding of the dtype, relative to each entry, and to float32 arithmetic, relative to `scale`."""
    dtype = dtype or actual.dtype
    floor = 1e-12 if dtype == torch.float64 else 3e-6
    atol = floor * scale + (2.0**-24 if dtype == torch.float16 else 0.0)
    torch.testing.assert_close(actual.double(), wanted.double(), rtol=1.01 * ROUNDING[dtype], atol=atol, equal_nan=True)


def merged(
    namespace: Any, logits: Tensor, ids: Tensor | None, bounds: list[int], options: tuple[float, float], entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(lse, entropy, log-probabilities) from the statistics of the shards [bounds[i], bounds[i + 1])."""
    parts = [
        namespace.stats(logits[..., start:end], ids, start, bounds[-1], -100, entropy, *options)
        for start, end in itertools.pairwise(bounds)
    ]
    lse, entropies, log_prob = namespace.merge(torch.stack(parts), ids, -100)
    return lse, entropies, log_prob


# ---- statistics ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("bounds", SHARDS, ids=str)
def test_lse_entropy_and_log_probabilities_match_float64_over_uneven_and_empty_shards(
    bounds: list[int], option: str
) -> None:
    logits, ids = some_logits(option=option), some_ids(5)
    found = merged(kernels, logits, ids, bounds, OPTIONS[option], True)
    wanted = merged(reference, logits.double(), ids, bounds, OPTIONS[option], True)
    for actual, exact in zip(found, wanted, strict=True):
        close(actual, exact, scale=4.0, dtype=torch.float32)
    assert torch.count_nonzero(found[2][ids == -100]) == 0
    assert (found[0].dtype, found[1].dtype, found[2].dtype) == (torch.float64, torch.float64, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_ids", [1, 40])
def test_every_dtype_and_many_ids_match_float64(dtype: torch.dtype, num_ids: int) -> None:
    logits, ids = some_logits(dtype), some_ids(num_ids)
    found = merged(kernels, logits, ids, [0, 60, VOCAB], OPTIONS["plain"], True)
    wanted = merged(reference, logits.double(), ids, [0, 60, VOCAB], OPTIONS["plain"], True)
    for actual, exact in zip(found, wanted, strict=True):
        close(actual, exact, scale=4.0, dtype=kernels.compute_dtype(logits))


def test_without_ids_and_entropy_the_statistics_are_those_of_the_reference() -> None:
    logits = some_logits()
    found = kernels.stats(logits, None, 0, VOCAB, -100, False, 0.0, 1.0)
    wanted = reference.stats(logits, None, 0, VOCAB, -100, False, 0.0, 1.0)
    assert found.shape == wanted.shape
    close(found[:-3], wanted[:-3])
    lse, _, log_prob = kernels.merge(found.unsqueeze(0), None, -100)
    close(lse, logits.double().logsumexp(-1), dtype=torch.float32)
    assert log_prob.shape == (ROWS, 0)


def test_entropy_of_large_logits_cancels_nothing() -> None:
    logits = normal(ROWS, VOCAB) + 1e6
    _, entropy, _ = merged(kernels, logits, None, [0, 70, VOCAB], OPTIONS["plain"], True)
    close(entropy, merged(reference, logits.double(), None, [0, VOCAB], OPTIONS["plain"], True)[1], dtype=torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_ids", [0, 1, 40])
@pytest.mark.parametrize("rows", [0, 2])
def test_the_header_has_the_words_of_the_reference(dtype: torch.dtype, num_ids: int, rows: int) -> None:
    logits = torch.zeros(rows, 3, dtype=dtype)
    ids = torch.full((rows, num_ids), 2**33 + 6) if num_ids else None
    arguments = (ids, 2**33 + 5, 2**40 + 1, -100, False, 0.0, 1.0)
    found, wanted = kernels.stats(logits, *arguments), reference.stats(logits, *arguments)
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    assert torch.equal(found[rows:].view(torch.int32), wanted[rows:].view(torch.int32))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_shard_of_nan_or_infinities_gives_what_the_reference_gives(value: float) -> None:
    logits, ids = normal(ROWS, VOCAB), some_ids(2) % 45
    ids[1, 0] = -100
    logits[:3, 45:90] = value
    logits[1] = value
    for actual, exact in zip(
        merged(kernels, logits, ids, [0, 45, 90, VOCAB], OPTIONS["plain"], True),
        merged(reference, logits.double(), ids, [0, 45, 90, VOCAB], OPTIONS["plain"], True),
        strict=True,
    ):
        close(actual, exact, scale=4.0, dtype=torch.float32)
        assert actual[3].isfinite().all()


@pytest.mark.parametrize("outside", [-1, VOCAB, 2**40])
def test_an_id_outside_the_vocabulary_has_log_probability_nan_and_no_other_has(outside: int) -> None:
    ids = some_ids(3)
    ids[2, 1] = outside
    _, _, log_prob = merged(kernels, normal(ROWS, VOCAB), ids, [0, 70, VOCAB], OPTIONS["plain"], False)
    assert log_prob.isnan().nonzero().tolist() == [[2, 1]]


# ---- softmax and log-softmax -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize(
    ("option", "dtype"), [("plain", d) for d in DTYPES] + [("scale", torch.float32), ("softcap", torch.float32)]
)
def test_softmax_and_its_gradient_match_float64(option: str, dtype: torch.dtype, log: bool) -> None:
    logits, options = some_logits(dtype, option), OPTIONS[option]
    exact = logits.double()
    lse = merged(reference, exact, None, [0, VOCAB], options, False)[0]
    found = kernels.normalize(logits, lse, log, False, *options)
    assert found.dtype == dtype
    close(found, reference.normalize(exact, lse, log, False, *options), scale=4.0 if log else 0.1)
    upstream = normal(ROWS, VOCAB, scale=1.0, seed=1, dtype=dtype)
    sums = kernels.dot(logits, lse, upstream, log, *options)
    assert sums.dtype == torch.float64
    compute = kernels.compute_dtype(logits)
    close(sums, reference.dot(exact, lse, upstream, log, *options), scale=5.0, dtype=compute)
    wanted = reference.backward(exact, lse, upstream, None, log, *options)
    given = kernels.backward(logits, lse, upstream, sums, log, *options)
    close(given, wanted, scale=3.0)
    assert torch.equal(kernels.backward(logits, lse, upstream, None, log, *options), given)


@pytest.mark.parametrize("log", [False, True])
def test_a_wider_result_is_computed_from_the_same_logits(log: bool) -> None:
    logits = some_logits(torch.bfloat16)
    lse = logits.double().logsumexp(-1)
    found = kernels.normalize(logits, lse, log, True, 0.0, 1.0)
    assert found.dtype == torch.float32
    close(found, reference.normalize(logits.double(), lse, log, True, 0.0, 1.0), scale=4.0 if log else 0.1)
    upstream = normal(ROWS, VOCAB, scale=1.0, seed=1)
    grad = kernels.backward(logits, lse, upstream, None, log, 0.0, 1.0)
    assert grad.dtype == torch.bfloat16
    close(grad, reference.backward(logits.double(), lse, upstream, None, log, 0.0, 1.0), scale=3.0)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_rows_with_nan_are_nan_and_others_are_not(value: float) -> None:
    logits = normal(ROWS, VOCAB)
    logits[1, 100] = value
    logits[2] = -math.inf
    for log in (False, True):
        x = logits.clone().requires_grad_()
        out = (ops.vocab_parallel_log_softmax if log else ops.vocab_parallel_softmax)(x)
        out.backward(torch.ones_like(out))
        assert x.grad is not None
        for result in (out, x.grad):
            assert result[1:3].isnan().all()
            assert result[::3].isfinite().all()


# ---- log-probabilities and entropy -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "dtype", "num_ids", "with_entropy"),
    [
        ("plain", torch.float32, 1, False),
        ("plain", torch.float32, 0, True),
        *[("plain", dtype, 40, True) for dtype in DTYPES],
        ("scale", torch.float32, 3, True),
        ("softcap", torch.float32, 3, True),
        ("softcap", torch.bfloat16, 1, False),
    ],
)
def test_gradient_of_log_probabilities_and_entropy_matches_float64(
    option: str, dtype: torch.dtype, num_ids: int, with_entropy: bool
) -> None:
    logits, options, start = some_logits(dtype, option), OPTIONS[option], 45
    exact, ids = logits.double(), some_ids(num_ids) if num_ids else None
    lse, entropy, _ = merged(reference, exact, ids, [0, VOCAB], options, True)
    compute = kernels.compute_dtype(logits)
    grad_log_prob = None if ids is None else normal(*ids.shape, scale=1.0, dtype=compute)
    upstream = (entropy, normal(ROWS, scale=1.0, dtype=compute)) if with_entropy else (None, None)
    for begin, end in ((0, start), (start, VOCAB)):
        arguments = (lse, ids, grad_log_prob, *upstream, begin, -100, *options)
        found = kernels.log_prob_backward(logits[:, begin:end], *arguments)
        assert found.dtype == dtype
        close(found, reference.log_prob_backward(exact[:, begin:end], *arguments), scale=6.0)


def test_the_gradient_of_a_likely_id_keeps_its_relative_accuracy() -> None:
    logits, ids = torch.tensor([[0.0, 20.0, -1.0]]), torch.tensor([[1]])
    lse = logits.double().logsumexp(-1)
    found = kernels.log_prob_backward(logits, lse, ids, torch.ones(1, 1), None, None, 0, -100, 0.0, 1.0)
    p = (logits.double() - lse).exp()
    torch.testing.assert_close(found[0, 1].double(), p[0, 0] + p[0, 2], rtol=3e-6, atol=0.0)


def test_rows_without_upstream_gradient_are_exact_zeros_even_where_the_logits_are_nan() -> None:
    logits, ids = normal(ROWS, VOCAB), some_ids(2)
    ids[2] = -100
    logits[1:3] = math.nan
    lse = logits.double().logsumexp(-1)
    grad_log_prob, grad_entropy = normal(ROWS, 2), normal(ROWS)
    grad_log_prob[1], grad_entropy[1:3] = 0.0, 0.0
    found = kernels.log_prob_backward(
        logits, lse, ids, grad_log_prob, torch.zeros_like(lse), grad_entropy, 0, -100, 0.0, 1.0
    )
    assert torch.count_nonzero(found[1:3]) == 0
    assert found.isfinite().all()
    assert found[::3].abs().min() > 0


# ---- rows and blocks -------------------------------------------------------------------------------------------------


def test_views_with_any_strides_give_the_same_bits() -> None:
    whole = normal(3, 2, 70)
    grads = normal(3, 2, 70, scale=1.0, seed=1)
    for view in (whole[::2, 1:], whole.transpose(0, 1), whole[..., ::3], whole[:1].expand(2, -1, -1), whole[0, 0]):
        # Laid out unlike the logits: a transposed copy, and one number for all.
        transposed = grads.flatten()[: view.numel()].view(view.shape[::-1]).permute(*range(view.dim())[::-1])
        for upstream in (transposed, torch.ones(()).expand(view.shape)):
            results = []
            for x, g in ((view, upstream), (view.contiguous(), upstream.contiguous())):
                lse = kernels.merge(kernels.stats(x, None, 0, x.shape[-1], -100, False, 0.0, 1.0)[None], None, -100)[0]
                results.append(
                    (lse, kernels.normalize(x, lse, False, False, 0.0, 1.0), kernels.dot(x, lse, g, False, 0.0, 1.0),
                     kernels.backward(x, lse, g, None, False, 0.0, 1.0))
                )  # fmt: skip
            for found, wanted in zip(*results, strict=True):
                assert torch.equal(found, wanted)
            assert results[0][1].is_contiguous()


def test_the_production_blocks_give_the_same_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "configuration", configuration)
    for vocab in (1, 1000, 17000):
        logits, ids = normal(2, vocab, dtype=torch.bfloat16), torch.tensor([[0], [vocab - 1]])
        exact = logits.double()
        lse, entropy, log_prob = merged(kernels, logits, ids, [0, vocab], OPTIONS["plain"], True)
        for actual, wanted in zip(
            (lse, entropy, log_prob), merged(reference, exact, ids, [0, vocab], OPTIONS["plain"], True), strict=True
        ):
            close(actual, wanted, scale=4.0, dtype=torch.float32)
        close(kernels.normalize(logits, lse, True, True, 0.0, 1.0), exact.log_softmax(-1), scale=4.0)
        arguments = (lse, ids, torch.ones(2, 1), entropy, torch.ones(2), 0, -100, 0.0, 1.0)
        close(kernels.log_prob_backward(logits, *arguments), reference.log_prob_backward(exact, *arguments), scale=6.0)
        upstream = normal(2, vocab, scale=1.0, seed=1, dtype=torch.bfloat16)
        wanted = reference.backward(exact, lse, upstream, None, False, 0.0, 1.0)
        close(kernels.backward(logits, lse, upstream, None, False, 0.0, 1.0), wanted)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (2, 0, 6), (0,)])
def test_empty_logits_have_empty_results(shape: tuple[int, ...]) -> None:
    logits = torch.empty(shape)
    rows = num_rows(logits)
    lse = torch.zeros(rows, dtype=torch.float64)
    found = kernels.stats(logits, None, 0, 8, -100, True, 0.0, 1.0)
    assert found.shape == (rows + 3, 3)
    assert torch.equal(found[:-3], torch.tensor([-math.inf, 0.0, 0.0]).expand(rows, 3))
    assert kernels.normalize(logits, lse, False, False, 0.0, 1.0).shape == shape
    assert kernels.backward(logits, lse, logits, None, False, 0.0, 1.0).shape == shape
    assert torch.equal(kernels.dot(logits, lse, logits, False, 0.0, 1.0), lse)
    assert kernels.log_prob_backward(logits, lse, None, None, lse, lse, 0, -100, 0.0, 1.0).shape == shape


def test_worked_examples_of_the_docstrings() -> None:
    log3, log4 = math.log(3.0), math.log(4.0)
    logits, ids, lse = torch.tensor([[0.0, log3]]), torch.tensor([[1]]), torch.tensor([log4], dtype=torch.float64)
    stats = kernels.stats(logits, ids, 0, 2, -100, True, 0.0, 1.0)
    torch.testing.assert_close(stats[0], torch.tensor([log3, 4 / 3, -log3 / 3, log3]))
    gathered = torch.zeros(2, 4, 4)
    gathered[:, 0] = torch.tensor([[0.0, 1.0, 0.0, 0.0], [log3, 1.0, 0.0, log3]])
    found = kernels.merge(gathered, ids, -100)
    for actual, wanted in zip(found, (log4, log4 - 0.75 * log3, math.log(0.75)), strict=True):
        torch.testing.assert_close(actual.double().flatten(), torch.tensor([wanted], dtype=torch.float64))
    dy = torch.tensor([[1.0, 0.0]])
    for log, results in (
        (False, ([[0.25, 0.75]], [0.25], [[0.1875, -0.1875]])),
        (True, ([[-log4, log3 - log4]], [1.0], [[0.75, -0.75]])),
    ):
        torch.testing.assert_close(kernels.normalize(logits, lse, log, False, 0.0, 1.0), torch.tensor(results[0]))
        torch.testing.assert_close(kernels.dot(logits, lse, dy, log, 0.0, 1.0).float(), torch.tensor(results[1]))
        torch.testing.assert_close(kernels.backward(logits, lse, dy, None, log, 0.0, 1.0), torch.tensor(results[2]))
    grad = kernels.log_prob_backward(logits, lse, ids, torch.ones(1, 1), None, None, 0, -100, 0.0, 1.0)
    torch.testing.assert_close(grad, torch.tensor([[-0.25, 0.25]]))


def test_the_public_functions_differentiate_through_the_kernels() -> None:
    logits, ids = normal(2, 3, VOCAB), some_ids(3, rows=6).view(2, 3, 3)
    x, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    log_prob, entropy = ops.vocab_parallel_log_prob_and_entropy(x, ids, softcap=5.0)
    out = ops.vocab_parallel_log_softmax(x, softcap=5.0)
    # A sum's upstream gradient is one number for all.
    (log_prob.sum() + entropy.sum() + out[..., ::2].sum()).backward()
    wanted = (5.0 * torch.tanh(exact / 5.0)).log_softmax(-1)
    picked = wanted.gather(-1, ids.clamp(min=0)).masked_fill(ids == -100, 0.0)
    (picked.sum() - (wanted.exp() * wanted).sum() + wanted[..., ::2].sum()).backward()
    close(log_prob, picked, scale=4.0)
    assert x.grad is not None
    assert exact.grad is not None
    close(x.grad, exact.grad, scale=10.0)
