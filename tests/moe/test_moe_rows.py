"""Rows of tokens sorted, gathered, summed and multiplied: every CPU instruction set against plain PyTorch, bit for bit.

Tolerances: only dot products are not the reference's bits, since torch adds in another order. Their error is relative
to the sum of the products' magnitudes: 16 roundings of 64 partial sums of at most 16 products each are under 1e-5.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fastpar.ops.moe import permute as ops
from fastpar.reference import moe_rows as reference
from tests import instruction_sets

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
WIDTHS = [1, 89, 300]  # blocks of four registers, whole registers and a part of one, in every instruction set
K = torch.ops.fastpar


capability = instruction_sets.each("avx512", "avx2", "portable")


def on_every_instruction_set(function: Any) -> list[Any]:
    """What the function gives under each of those that this machine has."""
    found = []
    for name in instruction_sets.available():
        with instruction_sets.using(name):
            found.append(function())
    return found


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def some_index(*shape: int, rows: int) -> Tensor:
    """Rows in any order, with repetitions, some -1, the first and the last."""
    index = torch.randint(-1, rows, shape, generator=torch.Generator().manual_seed(rows))
    index.view(-1)[0], index.view(-1)[-1] = 0, rows - 1
    return index


def some_tables(width: int, dtype: torch.dtype) -> list[Tensor]:
    """21 rows of three tables and one without rows: contiguous, one with gaps, and a field of packed rows."""
    packed = torch.zeros(4, 8 * width + 24, dtype=torch.uint8)
    field = packed[:, 8 : 8 + width * dtype.itemsize].view(dtype)
    field.copy_(random(4, width, dtype=dtype))
    return [
        random(10, width, dtype=dtype),
        random(7, width + 3, dtype=dtype)[:, 2:-1],
        random(0, width, dtype=dtype),
        field,
    ]


# ---- worked examples -------------------------------------------------------------------------------------------------

TABLES = [torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]])]


@pytest.mark.parametrize("module", [ops, reference], ids=["ops", "reference"])
def test_worked_examples_of_the_docstrings(capability: str, module: Any) -> None:
    order, counts = module.sort_pairs(torch.tensor([[1, 0], [0, -1]]), 2)
    assert (order.tolist(), counts.tolist()) == ([1, 2, 0], [2, 1])
    assert [t.tolist() for t in reference.order_pairs(torch.tensor([[1, 0], [0, -1]]), 2)] == [[1, 2, 0, 3], [2, 1]]
    positions, counts = ops.pair_positions(torch.tensor([[1, 0], [0, -1]]), 2)
    assert (positions.tolist(), counts.tolist()) == ([[0, 0], [1, -1]], [2, 1])
    slots = module.pair_slots(order, counts, torch.tensor([4, 8]), (2, 2))
    assert slots.tolist() == [[8, 4], [5, -1]]
    runs = torch.tensor([[0, 0, 2, 1, 10], [0, 2, 1, 3, 10]])
    source, row_weights = module.row_sources([order], [torch.tensor([5.0, 6.0, 7.0])], runs, 2, 5)
    assert (source.tolist(), row_weights.tolist()) == ([-1, 10, 11, 10, -1], [0, 5, 6, 7, 0])
    sent = module.tokens_by_rank(torch.tensor([[3, 0], [0, 1]]), 2, 2)
    assert [t.tolist() for t in sent] == [
        [0, 1, 0],
        [[-1, 0], [0, 1], [1, -1]],
        [2, 1],
        [[0, 2], [1, -1]],
        [[4, 1], [2, 3]],
    ]
    rows = module.gather_rows(TABLES, torch.tensor([1, -1, 0]), scale=torch.tensor([2.0, 7.0, 1.0]))
    assert rows.tolist() == [[6, 8], [0, 0], [1, 2]]
    index, weights = torch.tensor([[1, 0], [0, -1]]), torch.tensor([[0.5, 2.0], [1.0, 7.0]])
    assert module.sum_rows(TABLES, index, weights=weights).tolist() == [[3.5, 6], [1, 2]]
    dots = module.dot_rows(torch.tensor([[1.0, 1.0], [1.0, 2.0]]), TABLES, torch.tensor([1, -1]))
    assert dots.tolist() == [7, 0]


# ---- rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_gathered_rows_are_those_of_the_reference(capability: str, width: int, dtype: torch.dtype) -> None:
    tables, index = some_tables(width, dtype), some_index(30, rows=21)
    scale = random(30)
    for options in ({}, {"scale": scale}, {"dtype": torch.float32}, {"scale": scale, "dtype": torch.bfloat16}):
        found = ops.gather_rows(tables, index, **options)
        wanted = reference.gather_rows(tables, index, **options)
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted)
    wide = torch.full((30, width + 7), 3.0, dtype=dtype)
    assert ops.gather_rows(tables, index, out=wide[:, 5:-2]).data_ptr() == wide[:, 5:].data_ptr()
    assert torch.equal(wide[:, 5:-2], reference.gather_rows(tables, index))
    assert (wide[:, :5] == 3).all()
    assert (wide[:, -2:] == 3).all()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool], ids=str)
def test_rows_of_any_dtype_are_copied(capability: str, dtype: torch.dtype) -> None:
    for width in (1, 5, 200):
        tables = [torch.arange(n * width).view(n, width).to(dtype) for n in (6, 3)]
        index = some_index(20, rows=9)
        assert torch.equal(ops.gather_rows(tables, index), reference.gather_rows(tables, index))


def test_copies_keep_every_bit_of_nan_and_subnormal_numbers(capability: str) -> None:
    table = torch.arange(0x7F70, 0x8090, dtype=torch.int32).to(torch.int16).view(1, -1).view(torch.bfloat16)
    found = ops.gather_rows([table], torch.tensor([0]))
    assert torch.equal(found.view(torch.int16), table.view(torch.int16))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_summed_rows_have_the_bits_of_the_reference(capability: str, width: int, dtype: torch.dtype) -> None:
    tables = some_tables(width, dtype)
    for choices in (0, 1, 2, 9):
        index, weights = some_index(12, choices or 1, rows=21)[:, :choices], random(12, choices)
        for add in (None, random(12, width, dtype=dtype), random(12, 2 * width)[:, :width], random(12, width).half()):
            for used in (None, weights):
                found = ops.sum_rows(tables, index, weights=used, add=add)
                assert found.dtype == dtype
                assert torch.equal(found, reference.sum_rows(tables, index, weights=used, add=add))
    wide = torch.full((12, width + 7), 3.0)
    ops.sum_rows(tables, index, weights=weights, out=wide[:, 5:-2])
    assert torch.equal(wide[:, 5:-2], reference.sum_rows(tables, index, weights=weights, out=torch.empty(12, width)))
    assert (wide[:, :5] == 3).all()
    assert (wide[:, -2:] == 3).all()


def test_products_are_rounded_before_they_are_added(capability: str) -> None:
    # (1 + 2^-12)^2 = 1 + 2^-11 + 2^-24: the last term is lost where the product is rounded, and kept by an FMA.
    x = torch.full((1, 40), 1 + 2.0**-12)
    found = ops.sum_rows([x], torch.tensor([[0]]), weights=x[:, :1], add=torch.full((1, 40), -1 - 2.0**-11))
    assert torch.count_nonzero(found) == 0


def test_a_choice_that_goes_nowhere_contributes_nothing(capability: str) -> None:
    table = torch.full((2, 70), torch.nan)
    add = random(2, 70)
    add[0, ::3] = -0.0
    weights = torch.full((2, 2), torch.nan)
    found = ops.sum_rows([table], torch.full((2, 2), -1), weights=weights, add=add)
    assert torch.equal(found.view(torch.int32), add.view(torch.int32))
    assert torch.count_nonzero(ops.gather_rows([table], torch.tensor([-1, -1]), scale=weights[0])) == 0
    assert torch.count_nonzero(ops.dot_rows(table, [table], torch.tensor([-1, -1]))) == 0


def test_subnormal_bfloat16_results_are_not_flushed(capability: str) -> None:
    tiny = torch.full((1, 40), 2.0**-130, dtype=torch.bfloat16)
    assert torch.equal(ops.sum_rows([tiny], torch.tensor([[0]])), tiny)
    assert torch.equal(ops.gather_rows([tiny], torch.tensor([0]), scale=torch.tensor([2.0])), 2 * tiny)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_dot_products_match_float64(capability: str, width: int, dtype: torch.dtype) -> None:
    tables, index = some_tables(width, dtype), some_index(30, rows=21)
    for rows in (random(30, width, dtype=dtype), random(30, width + 4)[:, 1:-3]):
        found = ops.dot_rows(rows, tables, index)
        products = rows.double() * reference.gather_rows(tables, index).double()
        assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert bool(((found - products.sum(1)).abs() <= 1e-6 * products.abs().sum(1)).all())


@pytest.mark.parametrize("width", WIDTHS)
def test_dot_products_have_the_same_bits_on_every_instruction_set(width: int) -> None:
    rows, tables, index = random(30, width), some_tables(width, torch.bfloat16), some_index(30, rows=21)
    found = on_every_instruction_set(lambda: ops.dot_rows(rows, tables, index))
    assert all(torch.equal(other, found[0]) for other in found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("odd", [0, 3])
def test_large_results_stored_past_the_caches_match(capability: str, dtype: torch.dtype, odd: int) -> None:
    # Above 8 MiB. Rows of an odd width begin at any address, which stores past the caches do not take.
    width = 4096 + odd
    rows = (8 << 20) // (width * dtype.itemsize) + 3
    tables = [random(5, width, dtype=dtype), random(6, width, dtype=dtype)]
    index, weights = some_index(rows, 2, rows=11), random(rows, 2)
    column, scale = index[:, 0].contiguous(), weights[:, 0].contiguous()
    assert torch.equal(ops.gather_rows(tables, column), reference.gather_rows(tables, column))
    found, wanted = (f(tables, column, scale=scale) for f in (ops.gather_rows, reference.gather_rows))
    assert torch.equal(found, wanted)
    assert torch.equal(ops.sum_rows(tables, index, weights=weights), reference.sum_rows(tables, index, weights=weights))


def test_results_have_the_same_bits_for_any_number_of_threads() -> None:
    tables, index, weights = [random(500, 300)], some_index(400, 3, rows=500), random(400, 3)
    threads, found = torch.get_num_threads(), []
    experts = some_index(40000, 2, rows=60)
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        summed = ops.sum_rows(tables, index, weights=weights)
        found.append((summed, ops.dot_rows(summed, tables, index[:, 0]), *ops.sort_pairs(experts, 50)))
    torch.set_num_threads(threads)
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], others, strict=True))


@pytest.mark.parametrize("rows", [0, 4])
def test_tables_without_rows_or_columns_and_empty_indices_work(rows: int) -> None:
    for width in (0, 5):
        empty, nowhere = [torch.zeros(0, width)] * 2, torch.full((rows, 3), -1)
        assert torch.equal(ops.gather_rows(empty, nowhere[:, 0]), torch.zeros(rows, width))
        add = random(rows, width)
        assert torch.equal(ops.sum_rows(empty, nowhere, add=add), add)
        assert torch.equal(ops.dot_rows(add, empty, nowhere[:, 0]), torch.zeros(rows))


# ---- pairs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize(
    ("tokens", "top_k", "num_experts"), [(0, 2, 4), (1, 1, 1), (100, 3, 7), (50, 8, 3000), (30000, 2, 64), (9000, 4, 1)]
)
def test_pairs_are_sorted_and_placed_as_by_the_reference(
    tokens: int, top_k: int, num_experts: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(tokens)
    indices = torch.randint(-1, num_experts + 1, (tokens, top_k), generator=generator).to(dtype)
    order, counts = ops.sort_pairs(indices, num_experts)
    wanted = reference.sort_pairs(indices, num_experts)
    assert torch.equal(order, wanted[0])
    assert torch.equal(counts, wanted[1])
    first = (counts + 3).cumsum(0) - counts  # three more rows before each expert's
    slots = ops.pair_slots(order, counts, first, indices.shape)
    assert torch.equal(slots, reference.pair_slots(order, counts, first, indices.shape))
    begins = counts.cumsum(0) - counts
    zeros = torch.zeros_like(counts)
    runs = torch.stack([zeros, begins, counts, first, zeros + 5], 1)
    num_rows = len(order) + 3 * num_experts + 2
    for weights in (None, [random(len(order))], [random(len(order)).double() / 3]):
        found = ops.row_sources([order.to(dtype)], weights, runs, top_k, num_rows)
        wanted = reference.row_sources([order], weights, runs, top_k, num_rows)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize(
    ("tokens", "top_k", "size", "per_rank"), [(0, 2, 4, 1), (90, 1, 3, 2), (90, 5, 3, 4), (50, 3, 8, 1)]
)
def test_tokens_for_each_rank_are_those_of_the_reference(
    tokens: int, top_k: int, size: int, per_rank: int, dtype: torch.dtype
) -> None:
    # With the same expert twice, and tokens that go nowhere.
    indices = some_index(tokens + 1, top_k, rows=size * per_rank + 1)[1:].to(dtype)
    indices[::7] = -1
    found, wanted = (m.tokens_by_rank(indices, size, per_rank) for m in (ops, reference))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    padded = reference.padded_tokens_by_rank(indices, size, per_rank)
    assert padded[0].shape == (tokens * min(top_k, size),)
    assert not padded[0][len(found[0]) :].any()
    assert bool((padded[1][len(found[0]) :] == -1).all())


def test_strided_indices_are_sorted_as_they_are() -> None:
    indices = some_index(3, 50, rows=9).T[::2]
    assert all(map(torch.equal, ops.sort_pairs(indices, 8), reference.sort_pairs(indices, 8)))


def test_runs_of_several_tables_interleave() -> None:
    orders = [torch.tensor([[4], [1], [2]], dtype=torch.int32), torch.tensor([[0], [3]], dtype=torch.int32)]
    weights = [torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[4.0], [5.0]])]
    runs = torch.tensor([[0, 0, 1, 0, 0], [1, 0, 2, 1, 100], [0, 1, 2, 4, 0]])
    for module in (ops, reference):
        source, row_weights = module.row_sources(orders, weights, runs, 2, 6)
        assert source.tolist() == [2, 100, 101, -1, 0, 1]
        assert row_weights.tolist() == [1, 4, 5, 0, 2, 3]


# ---- contract --------------------------------------------------------------------------------------------------------


def test_an_index_beyond_the_tables_is_an_error() -> None:
    tables = [random(2, 40), random(3, 40)]
    for index in (torch.tensor([0, 5]), torch.tensor([1 << 40, 0])):
        with pytest.raises(RuntimeError, match=rf"index has {int(index.max())}, but the tables have 5 rows"):
            ops.gather_rows(tables, index)
        with pytest.raises(RuntimeError, match="the tables have 5 rows"):
            ops.sum_rows(tables, index[None])
        with pytest.raises(RuntimeError, match="the tables have 5 rows"):
            ops.dot_rows(random(2, 40), tables, index)


def test_mistakes_are_named() -> None:
    table, index = random(3, 4), torch.tensor([0, 1])
    for wrong, message in (
        (lambda: ops.gather_rows([table, random(3, 5)], index), "rows of one width, got 4 and 5"),
        (lambda: ops.gather_rows([table, table.double()], index), "one dtype"),
        (lambda: ops.gather_rows([table], index.int()), "index must be int64"),
        (lambda: ops.gather_rows([table], index, out=random(4, 2).T), "rows of out must be contiguous"),
        (lambda: ops.gather_rows([table], index, out=random(3, 4)), r"out must be \[2, 4\]"),
        (lambda: ops.gather_rows([table], index, scale=random(3)), "scale must have the shape of index"),
        (lambda: ops.sum_rows([table], index[None], weights=random(2, 1)), "weights must have the shape of index"),
        (lambda: ops.sum_rows([table], index[None], add=random(2, 4)), "add must have the shape of out"),
        (lambda: ops.dot_rows(random(3, 4), [table], index), r"rows must be \[2, 4\]"),
        (lambda: ops.sort_pairs(table, 2), "indices must be int64 or int32"),
        (lambda: ops.row_sources([index], None, torch.tensor([[0, 1, 2, 0, 0]]), 1, 9), "a run is out of bounds"),
        (lambda: ops.pair_slots(index, torch.tensor([3]), torch.tensor([0]), (2, 1)), "counts must add up"),
    ):
        with pytest.raises(RuntimeError, match=message):
            wrong()


def test_opcheck_passes_for_every_op() -> None:
    tables, index = [random(3, 5), random(2, 5)], torch.tensor([4, -1, 0])
    torch.library.opcheck(K.moe_gather_rows.default, (tables, index, random(3), torch.empty(3, 5)))
    pairs = index[:, None].repeat(1, 2)
    torch.library.opcheck(K.moe_sum_rows.default, (tables, pairs, random(3, 2), random(3, 5), torch.empty(3, 5)))
    torch.library.opcheck(K.moe_dot_rows.default, (random(3, 5), tables, index))
    torch.library.opcheck(K.moe_sort_pairs.default, (pairs, 5))
    torch.library.opcheck(K.moe_tokens_by_rank.default, (pairs, 3, 2))
    order, counts = ops.sort_pairs(pairs, 5)
    torch.library.opcheck(K.moe_pair_slots.default, (order, counts, counts.cumsum(0) - counts, 6))
    runs = torch.tensor([[0, 0, 2, 1, 0]])
    torch.library.opcheck(K.moe_row_sources.default, ([order], [random(len(order))], runs, 2, 4))
