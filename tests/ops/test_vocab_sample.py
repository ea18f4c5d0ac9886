"""Sampling from a split vocabulary: the distribution, and the same tokens for every number of ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fastpar import ops, reference
from fastpar.reference import vocab_sample as reference_module
from tests.counting import count_collectives
from tests.dist import run_ranks
from tests.ops.cross_entropy_cases import DTYPES
from tests.ops.vocab_cases import WORLD_SIZES, normal, own_part, own_range, world

K = torch.ops.fastpar
sample = ops.vocab_parallel_sample


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_come_as_often_as_the_softmax_says(temperature: float) -> None:
    logits = torch.tensor([0.3, 2.0, -1.0, 1.0, -math.inf, 0.0])
    rows = 20000
    found = sample(logits.expand(rows, -1), seed=7, temperature=temperature).bincount(minlength=6) / rows
    wanted = (logits / temperature).softmax(-1)
    # The standard deviation of a frequency is below 0.5 / sqrt(20000) = 0.0036.
    torch.testing.assert_close(found, wanted, rtol=0.0, atol=0.016)
    assert found[4] == 0.0


def test_seeds_and_rows_are_independent_and_calls_repeatable() -> None:
    logits = torch.zeros(2, 2000, 64)  # rows
    first, second = sample(logits, seed=1), sample(logits, seed=2)
    assert first.shape == (2, 2000)
    assert torch.equal(first, sample(logits, seed=1))
    # Equal by chance: once in 64. The standard deviation over 4000 rows is 0.002.
    for a, b in [(first, second), (first[0], first[1]), (first[0, 1:], first[0, :-1])]:
        assert abs((a == b).float().mean().item() - 1 / 64) < 0.012


def test_a_part_of_a_batch_gets_the_tokens_of_the_whole() -> None:
    logits = normal(10, 50)
    assert torch.equal(sample(logits[4:], seed=5, first_row=4), sample(logits, seed=5)[4:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_chooses_what_the_reference_does(dtype: torch.dtype) -> None:
    # The kernel leaves out noise that cannot win: it must never leave out the winner.
    for scale in (0.0, 0.1, 4.0):
        logits = normal(200, 700, scale=scale, dtype=dtype)
        assert torch.equal(sample(logits, seed=-3), reference.vocab_parallel_sample(logits, seed=-3))
    score, ids = K.vocab_gumbel_argmax(logits, 3, 1000, 2, 0.7)
    wanted, wanted_ids = reference_module.gumbel_argmax(logits, 3, 1000, 2, 0.7)
    assert torch.equal(ids, wanted_ids)
    torch.testing.assert_close(score, wanted, rtol=1e-12, atol=1e-12)


def test_rows_without_a_token_to_draw_give_minus_one() -> None:
    logits = torch.zeros(4, 30)
    logits[0], logits[1, 3], logits[2, 7:9] = -math.inf, math.nan, math.inf
    found = sample(logits, seed=0)
    assert found[:3].tolist() == [-1, -1, 7]
    assert torch.equal(found[:3], reference.vocab_parallel_sample(logits, seed=0)[:3])
    assert sample(torch.zeros(2, 0), seed=0).tolist() == [-1, -1]
    assert sample(torch.zeros(0, 5), seed=0).shape == (0,)


def test_filtered_tokens_are_never_drawn() -> None:
    logits = normal(1, 100).expand(500, -1)
    allowed = logits[0].topk(5).indices
    found = sample(ops.vocab_parallel_top_k_top_p(logits, top_k=5), seed=11)
    assert torch.isin(found, allowed).all()
    assert found.unique().numel() > 1


def run_sharded(vocab: int) -> tuple[list[Tensor], list[int]]:
    comm, found, counts = world(), [], []
    where = own_range(vocab, comm)
    for dtype in (torch.float32, torch.bfloat16):
        logits = normal(40, vocab, scale=1.0, dtype=dtype)
        logits[0], logits[1, 3], logits[2, 5:] = -math.inf, math.nan, -math.inf
        with count_collectives() as collectives:
            found.append(sample(own_part(logits, where), seed=9, temperature=0.8, group=comm, vocab_range=where))
        counts.append(collectives.total)
        found.append(
            reference.vocab_parallel_sample(
                own_part(logits, where), seed=9, temperature=0.8, group=comm, vocab_range=where
            )
        )
    with pytest.raises(ValueError, match="do not tile"):
        sample(torch.zeros(2, 3), seed=0, group=comm, vocab_range=(0, 3, 99 + comm.rank))
    return found, counts


@pytest.mark.parametrize("world_size", WORLD_SIZES[1:])
def test_ranks_draw_the_tokens_of_one_process_with_one_collective(world_size: int) -> None:
    for found, counts in run_ranks(world_size, run_sharded, 61):
        assert counts == [1, 1]
        for dtype, tokens, by_reference in zip([torch.float32, torch.bfloat16], found[::2], found[1::2], strict=True):
            logits = normal(40, 61, scale=1.0, dtype=dtype)
            logits[0], logits[1, 3], logits[2, 5:] = -math.inf, math.nan, -math.inf
            wanted = sample(logits, seed=9, temperature=0.8)
            assert wanted[:2].tolist() == [-1, -1]
            assert torch.equal(tokens, wanted)
            assert torch.equal(by_reference, wanted)


def test_opcheck_passes_and_compiled_fullgraph_equals_eager() -> None:
    logits = normal(2, 3, 9)
    torch.library.opcheck(K.vocab_gumbel_argmax.default, (logits, 1, 4, 0, 0.5))
    step = lambda x: sample(x, seed=3)  # noqa: E731
    assert torch.equal(torch.compile(step, fullgraph=True, backend="aot_eager")(logits), step(logits))


def test_the_fallback_for_devices_without_kernels_is_the_same_function(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = normal(9, 70)
    found = sample(logits[:, ::2], seed=4)
    monkeypatch.setattr("fastpar.ops.vocab_sample.implementation", lambda x: reference_module)
    assert torch.equal(sample(logits[:, ::2], seed=4), found)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"seed": 1.5}, TypeError, "seed must be an int"),
        ({"seed": 2**63}, ValueError, "seed must fit 64 bits"),
        ({"temperature": 0.0}, ValueError, r"greedy: vocab_parallel_argmax"),
        ({"first_row": -1}, ValueError, "first_row must not be negative"),
    ],
)
def test_bad_arguments_are_named(options: dict[str, Any], error: type[Exception], message: str) -> None:
    for module in (ops, reference):
        with pytest.raises(error, match=message):
            module.vocab_parallel_sample(torch.zeros(2, 8), **{"seed": 0, **options})
