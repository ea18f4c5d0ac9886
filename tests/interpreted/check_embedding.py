"""The Triton kernels of the embedding against torch; run by tests/ops/test_vocab_triton.py in the interpreter.

A gradient is a float32 sum of up to a few dozen rows, rounded once; the interpreter cuts bfloat16 off where devices
round to nearest: two roundings there.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastpar import ops
from fastpar.kernels import embedding as kernels
from fastpar.reference import embedding as reference
from tests.ops.vocab_cases import normal

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-11, torch.float64: 1e-13}
VOCAB = 20


def some_ids(*shape: int) -> Tensor:
    """With the first and the last id, and id 7 often: more than UNROLL times."""
    ids = torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(len(shape)))
    ids.view(-1)[::3] = 7
    ids.view(-1)[0], ids.view(-1)[-1] = 0, VOCAB - 1
    assert (ids == 7).sum() > kernels.UNROLL
    return ids


def close(actual: Tensor, wanted: Tensor) -> None:
    rounding = ROUNDING[actual.dtype]
    # Terms are up to 4 in size; float16 numbers below 2^-14 are multiples of 2^-24.
    atol = 4 * min(rounding, 1e-6) + (2.0**-24 if actual.dtype == torch.float16 else 0.0)
    torch.testing.assert_close(actual.double(), wanted.double(), rtol=1.01 * rounding, atol=atol)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [1, 64, 300])
def test_lookup_and_gradient_of_every_shard_match_the_reference(dtype: torch.dtype, hidden: int) -> None:
    table, ids = normal(VOCAB, hidden, dtype=dtype), some_ids(3, 7)
    upstream = normal(3, 7, hidden, scale=1.0, seed=1, dtype=dtype)
    for start, end in ((0, VOCAB), (0, 6), (6, 6), (6, VOCAB)):
        found = kernels.embedding(ids, table[start:end], start)
        assert torch.equal(found, reference.embedding(ids, table[start:end], start))
        for padding_idx in (-1, 7):
            grad = kernels.embedding_backward(ids, upstream, end - start, start, padding_idx)
            assert (grad.dtype, grad.shape) == (dtype, (end - start, hidden))
            wanted = reference.embedding_backward(ids, upstream.double(), end - start, start, padding_idx)
            close(grad, wanted)
            assert torch.equal(grad.count_nonzero(dim=1) > 0, wanted.count_nonzero(dim=1) > 0)


def test_a_hidden_dim_of_several_blocks_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "THREADS", 32)
    for hidden in (1000, 1003):  # 128 columns a block; the second one misaligned
        table, ids = normal(VOCAB, hidden), some_ids(20)
        upstream = normal(20, hidden, scale=1.0)
        assert torch.equal(kernels.embedding(ids, table, 0), table[ids])
        close(
            kernels.embedding_backward(ids, upstream, VOCAB, 0, -1),
            reference.embedding_backward(ids, upstream.double(), VOCAB, 0, -1),
        )


@pytest.mark.parametrize("length", [1, kernels.UNROLL - 1, kernels.UNROLL, kernels.UNROLL + 1, 3 * kernels.UNROLL])
def test_a_run_of_any_length_is_added_whole_and_no_more(length: int) -> None:
    ids = torch.tensor([4] * length + [2, 5])
    grad = kernels.embedding_backward(ids, torch.ones(length + 2, 8), 6, 0, -1)
    assert grad[:, 0].tolist() == [0.0, 0.0, 1.0, 0.0, float(length), 1.0]


def test_rows_are_added_in_the_order_of_their_positions_in_float32() -> None:
    # 2^24 + 3 rounds to 2^24 + 4, and from the other end, where nothing rounds, the sum would be 3.
    terms = torch.tensor([1.0, 1.0, 2.0**24, 1.0, -(2.0**24)])
    others = torch.full((5,), 9.0)
    ids = torch.tensor([3, 1] * 5)
    grad = kernels.embedding_backward(ids, torch.stack([terms, others], dim=1).reshape(10, 1), 4, 0, -1)
    assert grad.flatten().tolist() == [0.0, 45.0, 0.0, 4.0]
    # Summed in bfloat16 it would stop at 256.
    many = torch.ones(600, 1, dtype=torch.bfloat16)
    assert kernels.embedding_backward(torch.zeros(600, dtype=torch.int64), many, 1, 0, -1).item() == 600.0


def test_strided_tables_ids_and_gradients_give_the_same_bits() -> None:
    base, ids = normal(2 * VOCAB, 33), some_ids(4, 6)
    for table in (base[::2], base[:VOCAB, 1:], normal(33, VOCAB).t()):
        assert torch.equal(kernels.embedding(ids, table, 0), table[ids])
        assert torch.equal(kernels.embedding(ids.t(), table, 0), table[ids.t()])
    wide = normal(6, 4, 40, scale=1.0)
    for grad in (wide.transpose(0, 1), wide.transpose(0, 1)[..., 3:36], wide.permute(1, 0, 2)[..., ::2]):
        assert torch.equal(
            kernels.embedding_backward(ids, grad, VOCAB, 0, -1),
            kernels.embedding_backward(ids, grad.contiguous(), VOCAB, 0, -1),
        )
    one = torch.ones(()).expand(4, 6, 16)
    assert kernels.embedding_backward(ids, one, VOCAB, 0, -1)[7, 0] == (ids == 7).sum()


@pytest.mark.parametrize(("ids", "vocab", "hidden"), [((0,), 5, 8), ((3,), 0, 8), ((3,), 5, 0), ((), 5, 8)])
def test_empty_tensors_and_a_single_id_give_what_the_reference_gives(ids: Any, vocab: int, hidden: int) -> None:
    index, table = torch.zeros(ids, dtype=torch.int64), normal(vocab, hidden) if vocab * hidden else torch.empty(0, 8)
    table = table.reshape(vocab, hidden)
    upstream = torch.ones(*ids, hidden)
    assert torch.equal(kernels.embedding(index, table, 0), reference.embedding(index, table, 0))
    wanted = reference.embedding_backward(index, upstream, vocab, 0, -1)
    assert torch.equal(kernels.embedding_backward(index, upstream, vocab, 0, -1), wanted)


def test_worked_examples_of_the_docstrings() -> None:
    weight = torch.tensor([[1.0, 2.0]])
    assert kernels.embedding(torch.tensor([1, 0]), weight, 0).tolist() == [[0.0, 0.0], [1.0, 2.0]]
    grad = kernels.embedding_backward(torch.tensor([2, 0, 2]), torch.tensor([[1.0], [2.0], [4.0]]), 3, 0, -1)
    assert grad.tolist() == [[2.0], [0.0], [5.0]]


def test_the_public_function_differentiates_through_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastpar.ops.embedding.implementation", lambda x: kernels)
    weight, ids = normal(VOCAB, 24, dtype=torch.float64).requires_grad_(), some_ids(2, 8)
    upstream = normal(2, 8, 24, dtype=torch.float64)
    out = ops.vocab_parallel_embedding(ids, weight, padding_idx=7)
    wanted = F.embedding(ids, weight, 7)
    assert torch.equal(out, wanted)
    (found,) = torch.autograd.grad(out, weight, upstream)
    close(found, torch.autograd.grad(wanted, weight, upstream)[0])
