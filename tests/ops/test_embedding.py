"""Vocab-parallel embedding: lookups bit for bit, gradients against float64, on ranks as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastpar import ops, reference
from fastpar.reference import embedding as reference_module
from tests.counting import count_collectives
from tests.dist import run_ranks
from tests.ops.cross_entropy_cases import DTYPES, ROUNDING
from tests.ops.vocab_cases import WORLD_SIZES, normal, own_range, world

K = torch.ops.fastpar
embedding = ops.vocab_parallel_embedding


def some_ids(vocab: int, *shape: int) -> Tensor:
    """With the first and the last id, and id 1 often."""
    ids = torch.randint(0, vocab, shape, generator=torch.Generator().manual_seed(vocab))
    ids.view(-1)[::3] = min(1, vocab - 1)
    ids.view(-1)[0], ids.view(-1)[-1] = 0, vocab - 1
    return ids


def exact_gradient(ids: Tensor, upstream: Tensor, vocab: int, padding_idx: int | None = None) -> Tensor:
    weight = torch.zeros(vocab, upstream.shape[-1], dtype=torch.float64, requires_grad=True)
    F.embedding(ids, weight, padding_idx).backward(upstream.double())
    assert weight.grad is not None
    return weight.grad


def assert_gradient(actual: Tensor | None, wanted: Tensor, dtype: torch.dtype) -> None:
    """float32 sums of a few dozen rows, of magnitude 10; one rounding to the dtype."""
    assert actual is not None
    assert actual.dtype == dtype
    atol = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(actual.double(), wanted, rtol=max(ROUNDING[dtype], 1e-12), atol=atol)


# ---- one rank --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [1, 64, 300, 513])
def test_rows_and_gradient_match_torch(dtype: torch.dtype, hidden: int) -> None:
    weight, ids = normal(50, hidden, dtype=dtype).requires_grad_(), some_ids(50, 6, 11)
    for padding_idx in (None, 1, -1):
        out = embedding(ids, weight, padding_idx=padding_idx)
        assert torch.equal(out, F.embedding(ids, weight, padding_idx))
        upstream = normal(6, 11, hidden, scale=1.0, dtype=dtype)
        (grad,) = torch.autograd.grad(out, weight, upstream)
        assert_gradient(grad, exact_gradient(ids, upstream, 50, padding_idx), dtype)
        if padding_idx is not None:
            assert torch.count_nonzero(grad[padding_idx]) == 0


def test_equal_16_bit_rows_add_up_beyond_256() -> None:
    # Added in bfloat16, 1000 ones are 256.
    weight = torch.zeros(3, 8, dtype=torch.bfloat16, requires_grad=True)
    embedding(torch.ones(1000, dtype=torch.int64), weight).sum().backward()
    assert weight.grad is not None
    assert weight.grad[1].tolist() == [1000.0] * 8


def test_the_gradient_has_the_same_bits_for_any_number_of_threads() -> None:
    ids, upstream = some_ids(400, 5000), normal(5000, 300)
    threads, found = torch.get_num_threads(), []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        found.append(K.vocab_embedding_backward(ids, upstream, 400, 0, -1))
    torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_foreign_ids_have_rows_of_zeros_and_no_gradient() -> None:
    weight = normal(4, 5).requires_grad_()
    ids = torch.tensor([0, 3, 4, 7, 8, 99, -1])
    out = K.vocab_embedding(ids, weight.detach(), 4)
    assert torch.equal(out[2], weight[0])
    assert torch.equal(out[3], weight[3])
    assert torch.count_nonzero(out[[0, 1, 4, 5, 6]]) == 0
    grad = K.vocab_embedding_backward(ids, torch.ones(7, 5), 4, 4, 7)
    assert grad.tolist() == [[1.0] * 5] + [[0.0] * 5] * 3


def test_any_strides_integer_dtypes_and_empty_inputs_work() -> None:
    weight, ids = normal(20, 9), some_ids(20, 4, 6)
    assert torch.equal(embedding(ids.T, weight), F.embedding(ids.T, weight))
    assert torch.equal(embedding(ids.int(), weight), F.embedding(ids, weight))
    assert torch.equal(embedding(ids.to(torch.uint8), weight), F.embedding(ids, weight))
    table = weight.T.contiguous().T  # columns are contiguous
    assert torch.equal(embedding(ids, table), F.embedding(ids, weight))
    wide = normal(20, 30)[:, 3:12]
    assert torch.equal(embedding(ids, wide), F.embedding(ids, wide))
    empty = torch.zeros(0, 3, dtype=torch.int64)
    x = weight.clone().requires_grad_()
    embedding(empty, x).sum().backward()
    assert x.grad is not None
    assert torch.count_nonzero(x.grad) == 0
    assert embedding(empty, torch.zeros(0, 4)).shape == (0, 3, 4)
    assert embedding(torch.tensor(3), weight).shape == (9,)


def test_first_and_second_gradients_pass_gradcheck() -> None:
    weight, ids = normal(5, 3, dtype=torch.float64).requires_grad_(), torch.tensor([0, 4, 4, 2])
    assert torch.autograd.gradcheck(lambda w: embedding(ids, w), (weight,))
    # With a padding id as well: what it gets is no gradient, but a linear function of what it is given.
    assert torch.autograd.gradgradcheck(lambda w: embedding(ids, w, padding_idx=2), (weight,))


# ---- ranks -----------------------------------------------------------------------------------------------------------


def run_sharded(vocab: int, padding_idx: int | None) -> list[dict[str, Any]]:
    comm, results = world(), []
    where, ids = own_range(vocab, comm), some_ids(vocab, 7, 4)
    for module in (ops, reference):
        for reduce in ("all", "scatter"):
            weight = normal(vocab, 6)[where[0] : where[1]].clone().requires_grad_()
            upstream = normal(7, 4, 6, scale=1.0)
            with count_collectives() as forward:
                out = module.vocab_parallel_embedding(
                    ids, weight, group=comm, vocab_range=where, padding_idx=padding_idx, reduce=reduce
                )
            part = upstream if reduce == "all" else upstream.chunk(comm.size)[comm.rank]
            with count_collectives() as backward:
                out.backward(part)
            counts = (forward.total, backward.total)
            results.append({"reduce": reduce, "out": out.detach(), "grad": weight.grad, "collectives": counts})
    own = embedding(ids, normal(vocab, 6)[where[0] : where[1]], group=comm, vocab_range=where, reduce="none")
    results.append({"reduce": "none", "out": own})
    with pytest.raises(IndexError, match=r"ids\[1\] is 99, outside the vocabulary \[0, "):
        embedding(torch.tensor([0, 99]), weight, group=comm, vocab_range=where)
    return results


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_ranks_match_one_process_with_one_collective_and_equal_bits(world_size: int) -> None:
    vocab, padding_idx = 13, 1 if world_size % 2 else None
    ranks = run_ranks(world_size, run_sharded, vocab, padding_idx)
    ids, wanted = some_ids(vocab, 7, 4), F.embedding(some_ids(vocab, 7, 4), normal(vocab, 6))
    for parts in zip(*ranks, strict=True):
        reduce = parts[0]["reduce"]
        if reduce == "none":
            assert torch.equal(torch.stack([part["out"] for part in parts]).sum(dim=0), wanted)
            continue
        if reduce == "all":
            assert all(torch.equal(part["out"], wanted) for part in parts)
        else:
            assert torch.equal(torch.cat([part["out"] for part in parts]), wanted)
        one = int(world_size > 1)
        assert all(part["collectives"] == (one, one if reduce == "scatter" else 0) for part in parts)
        grad = torch.cat([part["grad"] for part in parts])
        exact = exact_gradient(ids, normal(7, 4, 6, scale=1.0), vocab, padding_idx)
        assert_gradient(grad, exact, torch.float32)


def test_worked_example() -> None:
    ids, weight = torch.tensor([1, 0, 1]), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert K.vocab_embedding(ids, weight[:1], 0).tolist() == [[0, 0], [1, 2], [0, 0]]
    assert K.vocab_embedding(ids, weight[1:], 1).tolist() == [[3, 4], [0, 0], [3, 4]]
    assert K.vocab_embedding_backward(ids, torch.ones(3, 2), 1, 0, -1).tolist() == [[1, 1]]
    assert K.vocab_embedding_backward(ids, torch.ones(3, 2), 1, 1, -1).tolist() == [[2, 2]]


# ---- what torch expects of an op -------------------------------------------------------------------------------------


def test_opcheck_passes_for_both_ops() -> None:
    ids = some_ids(9, 2, 3)
    torch.library.opcheck(K.vocab_embedding.default, (ids, normal(4, 5), 3))
    torch.library.opcheck(K.vocab_embedding_backward.default, (ids, normal(2, 3, 5), 4, 3, 1))


def test_compiled_fullgraph_equals_eager() -> None:
    weight, ids = normal(9, 5), some_ids(9, 2, 3)
    step = lambda w: embedding(ids, w * 2.0, padding_idx=1)  # noqa: E731
    x, y = weight.clone().requires_grad_(), weight.clone().requires_grad_()
    torch.compile(step, fullgraph=True, backend="aot_eager")(x).square().sum().backward()
    step(y).square().sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, y.grad)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_fallback_for_devices_without_kernels_is_the_same_function(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastpar.ops.embedding.implementation", lambda x: reference_module)
    weight, ids, upstream = normal(30, 7, dtype=dtype).requires_grad_(), some_ids(30, 40), normal(40, 7, dtype=dtype)
    out = embedding(ids, weight, padding_idx=1)
    out.backward(upstream)
    assert torch.equal(out, F.embedding(ids, weight))
    assert_gradient(weight.grad, exact_gradient(ids, upstream, 30, 1), dtype)
    assert torch.count_nonzero(reference_module.embedding(ids, weight.detach()[:0], 0)) == 0


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"ids": torch.zeros(3)}, TypeError, "ids must be integers"),
        ({"ids": torch.tensor([[0, 8]])}, IndexError, r"ids\[0, 1\] is 8, outside the vocabulary \[0, 8\)"),
        ({"weight": torch.zeros(8)}, ValueError, r"weight must be \[vocabulary, hidden\], got shape \(8,\)"),
        ({"weight": torch.zeros(8, 2).int()}, TypeError, "weight must be one of"),
        ({"reduce": "sum"}, ValueError, "reduce must be one of .* got 'sum'"),
        ({"padding_idx": 8}, ValueError, r"padding_idx must be inside the vocabulary \[0, 8\), got 8"),
        ({"vocab_range": (0, 9, 9)}, ValueError, "names 9 columns, but there are 8"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    call: dict[str, Any] = {"ids": torch.zeros(2, 3).long(), "weight": torch.zeros(8, 2), **arguments}
    for module in (ops, reference):
        with pytest.raises(error, match=message):
            module.vocab_parallel_embedding(**call)
