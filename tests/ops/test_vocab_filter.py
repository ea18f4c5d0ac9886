"""Sampling filters over a split vocabulary: the same tokens as Hugging Face's warpers, for every number of ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fastpar import ops, reference
from fastpar.contracts.vocab import mass_bits, ordered_keys, values_of
from fastpar.reference import vocab_filter as reference_module
from tests.counting import count_collectives
from tests.dist import run_ranks
from tests.ops.cross_entropy_cases import DTYPES
from tests.ops.vocab_cases import WORLD_SIZES, normal, own_part, own_range, results_of, world

K = torch.ops.fastpar
top_k_top_p = ops.vocab_parallel_top_k_top_p

FILTERS: dict[str, dict[str, Any]] = {
    "nothing": {"top_k": None, "top_p": 1.0, "min_p": 0.0},
    "temperature": {"temperature": 0.7},
    "top-1": {"top_k": 1},
    "top-k": {"top_k": 9},
    "top-k of all": {"top_k": 10**6},
    "top-p": {"top_p": 0.9},
    "top-p of almost all": {"top_p": 0.9999},
    "top-p 0": {"top_p": 0.0},
    "tiny top-p": {"top_p": 1e-12},
    "min-p": {"min_p": 0.02},
    "top-k and top-p": {"top_k": 12, "top_p": 0.8},
    "top-p and min-p": {"top_p": 0.95, "min_p": 0.1},
    "everything": {"top_k": 30, "top_p": 0.9, "min_p": 0.05, "temperature": 1.7, "filter_value": -1e4},
}


def with_ties(rows: int, vocab: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Logits of about 50 different values, masked columns in the last row."""
    logits = (normal(rows, vocab, scale=3.0) * 4).round() / 4
    logits[-1, ::3] = -math.inf
    return logits.to(dtype)


def sizes_kept(filtered: Tensor, filter_value: float = -math.inf) -> list[int]:
    return (filtered != filter_value).sum(dim=-1).tolist()


# ---- one rank --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FILTERS)
def test_what_stays_is_what_sorting_the_vocabulary_says(name: str, dtype: torch.dtype) -> None:
    for logits in (normal(4, 1031, dtype=dtype), with_ties(4, 300, dtype), normal(2, 1, dtype=dtype)):
        found = top_k_top_p(logits, **FILTERS[name])
        assert found.dtype == dtype
        assert torch.equal(found, reference.vocab_parallel_top_k_top_p(logits, **FILTERS[name]))
        assert min(sizes_kept(found, FILTERS[name].get("filter_value", -math.inf))) >= 1


@pytest.mark.parametrize("name", [n for n in FILTERS if n != "nothing"])
def test_what_stays_is_what_hugging_faces_warpers_say(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    options = dict(FILTERS[name])
    logits, value = (
        normal(5, 501),
        options.get("filter_value", -math.inf),
    )  # no ties, which its sort leaves in any order
    warpers = transformers.generation.logits_process
    chain = [warpers.TemperatureLogitsWarper(options.get("temperature", 1.0))]
    if "top_k" in options:
        chain.append(warpers.TopKLogitsWarper(options["top_k"], filter_value=value))
    if "top_p" in options:
        chain.append(warpers.TopPLogitsWarper(options["top_p"], filter_value=value))
    if "min_p" in options:
        chain.append(warpers.MinPLogitsWarper(options["min_p"], filter_value=value))
    wanted = logits
    for warper in chain:
        wanted = warper(None, wanted)
    assert torch.equal(top_k_top_p(logits, **options), wanted)


def test_ties_at_the_k_th_place_stay_and_those_at_the_end_of_the_nucleus_go_by_id() -> None:
    logits = torch.tensor([[1.0, 2.0, 1.0, 1.0, 0.0, 2.0]])
    assert sizes_kept(top_k_top_p(logits, top_k=3)) == [5]
    total = 2 * math.e**2 + 3 * math.e  # of those that stay
    for kept, mass in [(1, 0.5), (2, 1.5), (3, 2 + 0.5 / math.e), (4, 2 + 1.5 / math.e), (5, 2 + 2.5 / math.e)]:
        found = top_k_top_p(logits, top_k=3, top_p=mass * math.e**2 / total)
        assert (found[0] > -math.inf).nonzero().squeeze(1).tolist() == sorted([1, 5, 0, 2, 3][:kept])
    flat = torch.zeros(1, 10)
    assert (top_k_top_p(flat, top_p=0.35)[0] == 0.0).nonzero().squeeze(1).tolist() == [0, 1, 2, 3]
    zeros = torch.tensor([[0.0, -0.0, 0.0, -0.0]])  # equal values
    assert (top_k_top_p(zeros, top_p=0.6)[0] == 0.0).tolist() == [True, True, True, False]


def test_rows_without_probabilities_are_not_filtered() -> None:
    logits = normal(4, 40)
    logits[0, 3], logits[1, 5], logits[2] = math.nan, math.inf, -math.inf
    for options in ({"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}, {"top_k": 5, "top_p": 0.5}):
        found = top_k_top_p(logits, filter_value=-1.0, **options)
        assert torch.equal(found[:3].nan_to_num(), logits[:3].nan_to_num())
        assert (found[3] == -1.0).any()


def test_extreme_logits_are_filtered_by_the_same_rules() -> None:
    logits = torch.cat([normal(3, 300) + 1e4, normal(3, 300) * 1e4, normal(3, 300) * 1e-6])
    for options in ({"top_p": 0.7}, {"top_k": 20, "top_p": 0.7}, {"min_p": 0.3}):
        found = top_k_top_p(logits, **options)
        assert torch.equal(found, reference.vocab_parallel_top_k_top_p(logits, **options))


def test_the_gradient_of_what_stays_is_kept() -> None:
    logits, upstream = with_ties(4, 60), normal(4, 60, seed=1)
    for value in (-math.inf, 0.0):
        options: dict[str, Any] = {"top_k": 10, "top_p": 0.9, "temperature": 2.0, "filter_value": value}
        (found,), grad = results_of(top_k_top_p, logits, [upstream], **options)
        (wanted,), wanted_grad = results_of(reference.vocab_parallel_top_k_top_p, logits, [upstream], **options)
        assert torch.equal(found, wanted)
        assert torch.equal(grad, wanted_grad)
        assert 0 < torch.count_nonzero(grad) < 40


def test_any_strides_and_empty_batches_work() -> None:
    logits = normal(6, 80)
    for view in (logits[:, ::2], logits.T[:9], logits.view(2, 3, 80).transpose(0, 1)):
        for options in ({"top_p": 0.8}, {"top_k": 3}):
            assert torch.equal(top_k_top_p(view, **options), top_k_top_p(view.contiguous(), **options))
    assert top_k_top_p(torch.zeros(0, 3, 7), top_p=0.5).shape == (0, 3, 7)
    assert top_k_top_p(torch.zeros(2, 0), top_k=2).shape == (2, 0)


# ---- ranks -----------------------------------------------------------------------------------------------------------


def run_sharded(vocab: int) -> list[dict[str, Any]]:
    comm, results = world(), []
    where = own_range(vocab, comm)
    for dtype in (torch.float32, torch.bfloat16):
        for name, options in FILTERS.items():
            for make in (normal, with_ties):
                x = own_part(make(4, vocab, dtype=dtype), where).detach()
                with count_collectives() as counts:
                    found = top_k_top_p(x, group=comm, vocab_range=where, **options)
                results.append({"case": (dtype, name, make is normal), "out": found, "collectives": counts.total})
    x = own_part(with_ties(4, vocab), where).detach()
    options = {"top_k": 12, "top_p": 0.8, "group": comm, "vocab_range": where}
    results.append({"case": "reference", "out": reference.vocab_parallel_top_k_top_p(x, **options)})
    return results


def collectives_of(name: str, dtype: torch.dtype) -> int:
    """What the documentation promises."""
    if name in ("nothing", "temperature", "top-k of all"):
        return 0
    return 1 if "top_p" not in FILTERS[name] or "top_k" in FILTERS[name] else 1 + dtype.itemsize


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_ranks_keep_exactly_the_tokens_of_one_process(world_size: int) -> None:
    ranks = run_ranks(world_size, run_sharded, 61)
    for parts in zip(*ranks, strict=True):
        out = torch.cat([part["out"] for part in parts], dim=1)
        if parts[0]["case"] == "reference":
            assert torch.equal(out, top_k_top_p(with_ties(4, 61), top_k=12, top_p=0.8))
            continue
        dtype, name, plain = parts[0]["case"]
        logits = (normal if plain else with_ties)(4, 61, dtype=dtype)
        assert torch.equal(out, top_k_top_p(logits, **FILTERS[name])), parts[0]["case"]
        wanted = collectives_of(name, dtype) if world_size > 1 else 0
        assert {part["collectives"] for part in parts} == {wanted}, parts[0]["case"]


def run_errors() -> str:
    comm = world()
    with pytest.raises(ValueError, match="do not tile") as error:
        top_k_top_p(torch.zeros(2, 3 + comm.rank), top_p=0.5, group=comm)
    return str(error.value)


def test_shards_that_do_not_tile_are_an_error_on_every_rank() -> None:
    first, second = run_ranks(2, run_errors)
    assert first == second


def test_worked_example() -> None:
    logits = torch.tensor([[1.0, 4.0, 3.0, 2.0]]).log()
    found = top_k_top_p(logits, top_k=3, top_p=0.7)
    torch.testing.assert_close(found.exp(), torch.tensor([[0.0, 4.0, 3.0, 0.0]]))


# ---- keys ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_have_the_order_of_the_numbers_and_lead_back_to_them(dtype: torch.dtype) -> None:
    numbers = [-math.inf, -1e30, -1.0, -1e-5, 0.0, 1e-5, 1.0, 3.0, 1e30, math.inf]
    if dtype == torch.float16:
        numbers = [x for x in numbers if abs(x) != 1e30]
    x = torch.tensor(numbers, dtype=dtype)
    keys = ordered_keys(x)
    unsigned = [key % 2**64 for key in keys.tolist()]
    assert unsigned == sorted(set(unsigned))
    assert torch.equal(values_of(keys, dtype), x)
    zero = torch.zeros(1, dtype=dtype)
    assert torch.equal(ordered_keys(-zero), ordered_keys(zero))
    if dtype == torch.bfloat16:  # the example of csrc/vocab_filter/ordered_key.h
        assert ordered_keys(torch.tensor([-1.0, 0.0, 1.0]).bfloat16()).tolist() == [
            0x407F,
            0x8000,
            0xBF80,
        ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_histograms_of_the_kernel_and_of_the_reference_agree(dtype: torch.dtype) -> None:
    logits = with_ties(4, 200, dtype)
    maximum, prefix = logits.double().amax(dim=1), torch.zeros(4, dtype=torch.int64)
    maximum[2] = math.inf  # such a row is left out
    for digit in range(dtype.itemsize):
        arguments = (logits, maximum, prefix, digit, 30)
        found, wanted = K.vocab_filter_histogram(*arguments), reference_module.histogram(*arguments)
        assert torch.equal(found, wanted)
        assert torch.count_nonzero(found[2]) == 0
        assert found[[0, 1, 3]].sum(dim=(1, 2)).min() > 0
        prefix = (prefix << 8) | found[:, 0].argmax(dim=1)


def test_masses_of_any_vocabulary_fit_63_bits() -> None:
    for total in (1, 2**17, 256000, 2**31 - 1):
        assert total * 2 ** mass_bits(total) < 2**63


# ---- what torch expects of an op -------------------------------------------------------------------------------------


def test_opcheck_passes_for_every_op() -> None:
    logits, maximum = normal(2, 3, 9), torch.full((6,), 9.0, dtype=torch.float64)
    whole = torch.zeros(6, dtype=torch.int64)
    torch.library.opcheck(K.vocab_filter_histogram.default, (logits, maximum, whole, 1, 40))
    torch.library.opcheck(K.vocab_filter_apply.default, (logits, maximum * 0.0, whole + 1, -math.inf))


@pytest.mark.expensive
def test_compiled_fullgraph_equals_eager() -> None:
    logits = with_ties(4, 60)
    for options in ({"top_k": 10, "top_p": 0.8}, {"top_p": 0.8, "min_p": 0.01}):
        step = lambda x, o=options: top_k_top_p(x * 2.0, **o)  # noqa: E731
        assert torch.equal(torch.compile(step, fullgraph=True, backend="aot_eager")(logits), step(logits))


@pytest.mark.parametrize("name", FILTERS)
def test_the_fallback_for_devices_without_kernels_is_the_same_function(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = with_ties(4, 90)
    found = top_k_top_p(logits, **FILTERS[name])
    monkeypatch.setattr("fastpar.ops.vocab_filter.implementation", lambda x: reference_module)
    assert torch.equal(top_k_top_p(logits, **FILTERS[name]), found)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"top_k": 0}, ValueError, "top_k must be at least 1"),
        ({"top_k": 2.5}, TypeError, "top_k must be (None or an int|an int or None)"),
        ({"top_p": 1.5}, ValueError, "top_p must be between 0 and 1"),
        ({"min_p": -0.1}, ValueError, "min_p must be between 0 and 1"),
        ({"temperature": 0.0}, ValueError, "temperature must be a finite number > 0, got 0.0"),
        ({"filter_value": math.nan}, ValueError, "filter_value must not be NaN"),
        ({"vocab_range": (0, 7, 7)}, ValueError, "names 7 columns, but there are 8"),
    ],
)
def test_bad_arguments_are_named(options: dict[str, Any], error: type[Exception], message: str) -> None:
    for module in (ops, reference):
        with pytest.raises(error, match=message):
            module.vocab_parallel_top_k_top_p(torch.zeros(2, 8), **options)
