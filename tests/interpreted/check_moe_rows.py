"""The Triton kernels that place and move rows of tokens against the reference; run by test_moe_triton.py in the
interpreter, which cuts bfloat16 off where devices round to nearest: two roundings there.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastpar.kernels import moe_rows as kernels
from fastpar.kernels import moe_sort
from fastpar.reference import moe_rows as reference

ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float64: 1e-14}
DTYPES = list(ROUNDING)


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def close(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    """Sums of a few terms of size 1 to 10."""
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    torch.testing.assert_close(
        found.double(), wanted.double(), rtol=ROUNDING[dtype], atol=20 * min(ROUNDING[dtype], 1e-6)
    )


def tables_of(kind: str, width: int, dtype: torch.dtype) -> list[Tensor]:
    """11 rows in all, of which 4 lie in a table of wider rows; NaN lies beside them."""
    wide = torch.full((4, width + 3), float("nan"), dtype=dtype)
    wide[:, 1 : width + 1] = normal(4, width, seed=2, dtype=dtype)
    several = [
        normal(3, width, seed=1, dtype=dtype),
        wide[:0, :width],
        wide[:, 1 : width + 1],
        normal(4, width, seed=3, dtype=dtype),
    ]
    return [torch.cat(several)] if kind == "one table" else several


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kind", "width"), [("one table", 64), ("several tables", 37), ("several tables", 1)])
def test_rows_match_the_reference(kind: str, width: int, dtype: torch.dtype) -> None:
    tables = tables_of(kind, width, dtype)
    index = torch.tensor([10, 0, -1, 3, 6, 7, -1, 2, 2])
    scale, rows = normal(9, seed=4).abs(), normal(9, width, seed=5, dtype=dtype)
    assert torch.equal(kernels.gather_rows(tables, index), reference.gather_rows(tables, index))
    close(kernels.gather_rows(tables, index, scale=scale), reference.gather_rows(tables, index, scale=scale), dtype)
    dots = reference.dot_rows(rows, tables, index)
    found = kernels.dot_rows(rows, tables, index)
    assert found.dtype == dots.dtype
    torch.testing.assert_close(found, dots, rtol=1e-5, atol=1e-5)
    pairs = torch.tensor([[1, 10, -1], [-1, -1, -1], [5, 5, 0], [9, -1, 3]])
    weights, add = normal(4, 3, seed=6), normal(4, width, seed=7)
    close(kernels.sum_rows(tables, pairs), reference.sum_rows(tables, pairs), dtype)
    wanted = reference.sum_rows(tables, pairs, weights=weights, add=add)
    close(kernels.sum_rows(tables, pairs, weights=weights, add=add), wanted, dtype)


def test_outputs_may_be_columns_of_packed_rows_and_of_another_dtype() -> None:
    table, index = normal(5, 20, seed=0, dtype=torch.bfloat16), torch.tensor([4, -1, 1])
    packed = torch.full((3, 31), 7.0)
    columns = packed[:, 5:25]
    assert kernels.gather_rows([table], index, out=columns).data_ptr() == columns.data_ptr()
    assert torch.equal(columns, reference.gather_rows([table], index).float())
    kernels.sum_rows([table], index[:, None], add=table[:3], out=columns)
    torch.testing.assert_close(columns, reference.sum_rows([table.float()], index[:, None], add=table[:3]))
    packed[:, 5:25] = 7.0
    assert (packed == 7.0).all()


def test_columns_apart_and_8_bit_rows_are_gathered_too() -> None:
    table, index = normal(5, 12, seed=0), torch.tensor([4, -1, 1])
    out = torch.empty(12, 3).T
    assert kernels.gather_rows([table], index, out=out) is out
    assert torch.equal(out, reference.gather_rows([table], index))
    kernels.sum_rows([table], index[:, None], out=out)
    assert torch.equal(out, reference.sum_rows([table], index[:, None]))
    codes = table.to(torch.float8_e4m3fn)
    found = kernels.gather_rows([codes], index)
    assert found.dtype == codes.dtype
    assert torch.equal(found.float(), reference.gather_rows([codes.float()], index))
    assert kernels.gather_rows([table.bfloat16()], index, dtype=torch.float32).dtype == torch.float32


def test_nan_beside_and_behind_padding_is_not_read() -> None:
    table = torch.full((2, 8), float("nan"))
    table[1] = 1.0
    nowhere, scale = torch.tensor([-1, 1]), torch.tensor([float("nan"), 2.0])
    assert kernels.gather_rows([table], nowhere, scale=scale).tolist() == [[0.0] * 8, [2.0] * 8]
    assert kernels.sum_rows([table], nowhere[:, None], weights=scale[:, None]).tolist() == [[0.0] * 8, [2.0] * 8]
    assert kernels.dot_rows(table, [table], nowhere).tolist() == [0.0, 8.0]


def test_the_worked_examples() -> None:
    table = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    found = kernels.gather_rows([table], torch.tensor([1, -1]), scale=torch.tensor([10.0, 10.0]))
    assert found.tolist() == [[30, 40], [0, 0]]
    table, index = torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([[2, 0], [1, -1]])
    weights, add = torch.tensor([[1.0, 3.0], [5.0, 9.0]]), torch.tensor([[10.0], [20.0]])
    assert kernels.sum_rows([table], index, weights=weights, add=add).tolist() == [[17], [30]]
    rows = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert kernels.dot_rows(rows, [torch.tensor([[10.0, 1.0]])], torch.tensor([0, -1])).tolist() == [12, 0]
    placed = moe_sort.place_pairs(torch.tensor([[1, 0], [1, -1]]), 2, align=2)
    assert placed.splits.tolist() == [0, 2, 4]
    assert placed.slots.tolist() == [[2, 0], [3, -1]]
    assert placed.source.tolist() == [0, -1, 0, 1, -1, -1]


def test_empty_tensors() -> None:
    table, index = torch.ones(3, 4), torch.empty(0, dtype=torch.int64)
    assert kernels.gather_rows([table], index).shape == (0, 4)
    assert kernels.sum_rows([table], index.view(0, 2)).shape == (0, 4)
    assert kernels.dot_rows(table[:0], [table], index).shape == (0,)
    assert kernels.gather_rows([table[:0], table[:0]], torch.tensor([-1])).tolist() == [[0.0] * 4]
    placed = moe_sort.place_pairs(index.view(0, 2), 5)
    assert placed.splits.tolist() == [0] * 6
    assert placed.slots.shape == (0, 2)


# ---- places ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "top_k", "num_experts"), [(7, 1, 1), (37, 3, 5), (150, 2, 33)])
def test_pairs_are_placed_as_a_stable_sort_would(
    monkeypatch: pytest.MonkeyPatch, tokens: int, top_k: int, num_experts: int
) -> None:
    """Over several blocks, and several blocks of blocks."""
    monkeypatch.setattr(moe_sort, "BLOCK", 16)
    monkeypatch.setattr(moe_sort, "SCAN_BLOCKS", 8)
    generator = torch.Generator().manual_seed(tokens)
    indices = torch.randint(-1, num_experts + 1, (tokens, top_k), generator=generator)
    found, wanted = (m.order_pairs(indices.int(), num_experts) for m in (moe_sort, reference))
    assert all(map(torch.equal, found, wanted))
    order, counts = reference.sort_pairs(indices, num_experts)
    weights = torch.rand(tokens, top_k, generator=generator)
    for align in (1, 8):
        placed = moe_sort.place_pairs(indices, num_experts, weights, align=align)
        room = (counts + align - 1) // align * align
        assert torch.equal(placed.counts.long(), counts)
        assert torch.equal(placed.splits.long(), torch.cat([torch.zeros(1, dtype=torch.int64), room.cumsum(0)]))
        row_of = placed.slots.view(-1)[order]
        assert torch.equal(
            row_of - placed.splits.long()[indices.view(-1)[order]],
            torch.cat([torch.arange(n) for n in counts.tolist()]),
        )
        assert (placed.slots.view(-1) >= 0).sum() == len(order)
        source, row_weights = torch.full_like(placed.source, -1), torch.zeros_like(placed.row_weights)
        source[row_of], row_weights[row_of] = order // top_k, weights.view(-1)[order]
        assert torch.equal(placed.source, source)
        assert torch.equal(placed.row_weights, row_weights)
