"""The Triton kernels of the exact sum of squares, bit for bit against the C++ kernel of the CPU; run by
tests/ops/test_square_sum_triton.py in Triton's interpreter.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fastpar import ops
from fastpar.kernels import square_sum as kernels

FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
NORMS = [torch.float32, torch.float64]


def assert_same(*tensors: Tensor) -> Tensor:
    found = kernels.exact_square_sum(list(tensors))
    assert torch.equal(found, ops.exact_square_sum(tensors))
    return found


def spread_out(count: int, lowest: int, highest: int, dtype: torch.dtype) -> Tensor:
    exponents = torch.randint(lowest, highest, (count,)).double()
    return (torch.randn(count, dtype=torch.float64) * exponents.exp2()).to(dtype)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def test_three_and_four_give_twenty_five() -> None:
    sums = assert_same(torch.tensor([3.0, 4.0]))
    assert sums.tolist() == [0] * 11 + [25600] + [0] * 9
    assert kernels.square_sum_norm(sums, torch.float32).item() == 5.0


@pytest.mark.parametrize("count", [1, 1025, 40_000])
@pytest.mark.parametrize("dtype", FLOATS)
def test_normally_distributed_numbers_have_the_bits_of_the_cpu(dtype: torch.dtype, count: int) -> None:
    assert_same((1e-3 * torch.randn(count, dtype=torch.float64)).to(dtype))


@pytest.mark.parametrize(("lowest", "highest"), [(-150, 128), (-30, 3), (-140, -120), (100, 128)])
@pytest.mark.parametrize("dtype", FLOATS)
def test_numbers_of_any_magnitudes_have_the_bits_of_the_cpu(dtype: torch.dtype, lowest: int, highest: int) -> None:
    assert_same(spread_out(1100, lowest, highest, dtype))


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_largest_and_the_smallest_numbers_are_summed_exactly(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    smallest = info.smallest_normal * info.eps
    for value in (info.max, info.tiny, smallest):
        assert_same(torch.full((1100,), value, dtype=dtype))
        assert_same(torch.cat([torch.randn(1100).to(dtype), torch.full((40,), value, dtype=dtype)]))


def test_float64_is_cut_to_what_float32_reaches() -> None:
    assert_same(spread_out(500, -1074, 1024, torch.float64))
    assert_same(torch.tensor([2.0**128, 2.0**128 - 2.0**75, 2.0**-149, 2.0**-150, 5e-324], dtype=torch.float64))


@pytest.mark.parametrize("dtype", FLOATS)
def test_nan_and_infinities_are_counted_and_not_summed(dtype: torch.dtype) -> None:
    x = torch.randn(3000).to(dtype)
    x[::401], x[17], x[2999] = math.nan, math.inf, -math.inf
    found = assert_same(x)
    assert found[:2].tolist() == [8, 2]
    assert math.isnan(kernels.square_sum_norm(found, torch.float32).item())
    assert kernels.square_sum_norm(assert_same(x[[0, 17]].nan_to_num(1.0, math.inf)), torch.float64).item() == math.inf
    assert_same(torch.tensor([math.nan], dtype=dtype))
    assert_same(torch.tensor([-math.inf, 0], dtype=dtype))


def test_a_chunk_that_begins_with_zeros_is_summed() -> None:
    for value in (1e-30, 1.0, 1e30):
        x = torch.zeros(3000)
        x[2000:] = value
        assert_same(x)
    assert_same(torch.zeros(1500))


def test_many_tensors_of_all_dtypes_and_addresses_are_one_sum() -> None:
    tensors = [spread_out(count, -20, 5, dtype) for dtype in FLOATS for count in (0, 1, 4500)]
    tensors += [torch.randn(700).to(dtype)[1:] for dtype in FLOATS]
    tensors += [torch.randn(30, 40).T, torch.randn(60, 30)[:, ::2], torch.tensor(3.0), torch.randn(5, 1).expand(5, 7)]
    assert_same(*tensors)
    assert torch.equal(kernels.exact_square_sum([torch.empty(0)]), torch.zeros(21, dtype=torch.int64))


def test_a_sum_depends_on_no_order_and_no_cut() -> None:
    x = spread_out(20_000, -40, 10, torch.float32)
    whole = kernels.exact_square_sum([x])
    shuffled = x[torch.randperm(len(x))]
    assert torch.equal(kernels.exact_square_sum([shuffled]), whole)
    assert torch.equal(kernels.exact_square_sum(list(shuffled.split([1, 16_385, 3614]))), whole)


@pytest.mark.parametrize("dtype", NORMS)
def test_norms_are_rounded_once(dtype: torch.dtype) -> None:
    sums = torch.stack([ops.exact_square_sum([spread_out(50, -140, 120, torch.float32)]) for _ in range(3)])
    for each in [*sums, sums.sum(0), 1000 * sums[0], ops.exact_square_sum([torch.tensor([2.0**-149] * 3)])]:
        assert torch.equal(kernels.square_sum_norm(each, dtype), ops.square_sum_norm(each, dtype))
    digits = 24 if dtype == torch.float32 else 53
    for kept in (2 ** (digits - 1), 2**digits - 2, 2**digits - 1):  # halfway to the next, and a little more
        root = 2 * kept + 1
        for more in (0, 1):
            value = root * root * 2**40 + more
            each = torch.tensor([0, 0, *(value >> 32 * i & 0xFFFFFFFF for i in range(19))])
            assert torch.equal(kernels.square_sum_norm(each, dtype), ops.square_sum_norm(each, dtype))


def test_digits_that_have_not_been_carried_give_the_same_norm() -> None:
    sums = ops.exact_square_sum([spread_out(50, -10, 10, torch.float32)])
    many = sums * (2**30 + 12345)  # as many ranks
    moved = sums.clone()
    moved[12] -= 5
    moved[11] += 5 << 32
    for each in (many, moved):
        assert torch.equal(kernels.square_sum_norm(each, torch.float64), ops.square_sum_norm(each, torch.float64))


def test_a_row_of_the_table_written_in_a_capture_is_what_is_uploaded_otherwise() -> None:
    rows = [(2**40 + 16, 1, 0, 0), (16, 2**33, 7, 0), (32, 5, 2**20, 0)]
    found = kernels._written(rows, torch.device("cpu"))
    assert found[:, :3].tolist() == [list(row[:3]) for row in rows]


def test_a_table_is_made_once_for_tensors_that_lie_where_they_did(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    rows = kernels._rows
    monkeypatch.setattr(kernels, "_rows", lambda tensors: (made.append(len(tensors)), rows(tensors))[1])
    memory = torch.randn(64)
    halves = [memory[:40], memory[40:].view(torch.int32).view(torch.float32)]
    for number in (1, 1, 1):
        memory.mul_(2)  # other values at the same addresses
        assert_same(*halves)
        assert len(made) == number
    assert_same(memory[:40], memory[39:])  # another address,
    assert_same(memory[:40], memory[40:63])  # another size,
    assert_same(memory[:40], memory[40:].view(torch.bfloat16)[:24])  # another dtype
    assert made == [2, 2, 2, 2]
    for number in range(kernels.MAX_TABLES + 1):
        assert_same(torch.randn(number + 1))
    assert len(kernels._tables) == kernels.MAX_TABLES


class Counting(TorchDispatchMode):
    """What torch is called for, and how many bytes it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls.append(str(func))
        if isinstance(out, Tensor) and not func.is_view:
            self.bytes += out.numel() * out.element_size()
        return out


@pytest.mark.parametrize("num_tensors", [1, 100])
@pytest.mark.parametrize("count", [10, 1_000_000])
def test_a_sum_takes_a_launch_for_each_dtype_and_no_memory(
    monkeypatch: pytest.MonkeyPatch, num_tensors: int, count: int
) -> None:
    launches: list[Any] = []
    monkeypatch.setattr(kernels, "launch", lambda kernel, programs, *rest, **options: launches.append(programs))
    tensors = [torch.empty(count // num_tensors + 1, dtype=dtype) for dtype in FLOATS[:2] for _ in range(num_tensors)]
    with Counting() as counted:
        sums = kernels.exact_square_sum(tensors)
        assert len(launches) == 3  # two dtypes, and the carry
        kernels.square_sum_norm(sums, torch.float32)
        assert len(launches) == 4
    assert len(counted.calls) <= 10, counted.calls  # zeros, the table, its slices; the norm's scalar and its bits
    assert not any("local_scalar" in call for call in counted.calls)
    assert counted.bytes <= 1000 + 32 * len(tensors)  # where plain PyTorch takes about 150 bytes an element
