"""The exact sum of squares: every CPU instruction set against integers, and its root against what rounding means.

No tolerances: a sum is right or wrong. What is expected comes from Python's integers and fractions.
"""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from fastpar import ops, reference
from fastpar.contracts.gradients import COUNTS, DIGIT_BITS, LENGTH, LOWEST
from tests import instruction_sets

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
ULPS = {torch.float32: (24, -149), torch.float64: (53, -1074)}
exact_square_sum, square_sum_norm = ops.exact_square_sum, ops.square_sum_norm


capability = instruction_sets.each()


def value_of(sums: Tensor) -> int:
    """In units of 2^-298."""
    return sum(d << DIGIT_BITS * i for i, d in enumerate(sums.tolist()[COUNTS:]))


def square(x: float) -> int:
    """In units of 2^-298; exact for multiples of 2^-149."""
    return int(math.ldexp(x, 149)) ** 2


def expected(x: Tensor) -> int:
    return sum(square(v) for v in x.double().flatten().tolist() if math.isfinite(v))


def spread_out(count: int, binary_orders: float, dtype: torch.dtype) -> Tensor:
    """Normally distributed numbers whose magnitudes also vary by up to 2^binary_orders, around 1."""
    generator = torch.Generator().manual_seed(count)
    power = binary_orders * (torch.rand(count, generator=generator, dtype=torch.float64) - 0.5)
    return (torch.randn(count, generator=generator, dtype=torch.float64) * power.exp2()).to(dtype)


# ---- the sum ---------------------------------------------------------------------------------------------------------


def test_worked_example_of_the_docstring(capability: str) -> None:
    sums = exact_square_sum([torch.tensor([3.0, 4.0])])
    assert sums.dtype == torch.int64
    assert {i: v for i, v in enumerate(sums.tolist()) if v} == {2 + 9: 25600}
    assert square_sum_norm(sums).item() == 5.0


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("binary_orders", [0, 12, 40, 240])  # one, two, three accumulators; several windows
@pytest.mark.parametrize("count", [1, 67, 1023, 4097])
def test_sum_is_exact(capability: str, dtype: torch.dtype, binary_orders: int, count: int) -> None:
    x = spread_out(count, min(binary_orders, 30) if dtype == torch.float16 else binary_orders, dtype)
    x = x[x.isfinite()]
    sums = exact_square_sum([x])
    assert value_of(sums) == expected(x)
    assert sums[:COUNTS].tolist() == [0, 0]


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_magnitude_of_a_dtype_is_summed_exactly(capability: str, dtype: torch.dtype) -> None:
    # All patterns of 16 bits, subnormals, infinities and NaN included; of float32 every 65521st, shuffled.
    step = 65521 if dtype == torch.float32 else 1
    low, high = (-(2**31), 2**31) if dtype == torch.float32 else (-(2**15), 2**15)
    x = torch.arange(low, high, step, dtype=torch.int64).to(BITS[dtype]).view(dtype)
    x = x[torch.randperm(x.numel(), generator=torch.Generator().manual_seed(0))]
    sums = exact_square_sum([x])
    assert value_of(sums) == expected(x)
    assert sums[0] == x.isnan().sum()
    assert sums[1] == x.isinf().sum()
    assert torch.equal(sums, reference.exact_square_sum([x]))


def test_float64_is_cut_to_the_grid_of_float32(capability: str) -> None:
    x = torch.tensor([1.0 + 2.0**-52, 3e-45, 2.0**-150, 2.0**-149 * 1.75, -(2.0**127) * 1.99], dtype=torch.float64)
    kept = [x[0].item(), 2 * 2.0**-149, 0.0, 2.0**-149, x[4].item()]
    assert value_of(exact_square_sum([x])) == sum(square(v) for v in kept)
    counts = exact_square_sum([torch.tensor([2.0**128, math.inf, math.nan], dtype=torch.float64)])
    assert counts.tolist() == [1, 2] + [0] * (LENGTH - 2)


def test_float64_equals_the_reference(capability: str) -> None:
    x = spread_out(5000, 250, torch.float64)
    assert torch.equal(exact_square_sum([x]), reference.exact_square_sum([x]))


def test_sum_has_the_same_bits_however_the_elements_are_cut(capability: str) -> None:
    x = spread_out(30_011, 30, torch.float32)
    whole = exact_square_sum([x])
    shuffled = x[torch.randperm(x.numel(), generator=torch.Generator().manual_seed(1))]
    assert torch.equal(exact_square_sum([shuffled]), whole)
    assert torch.equal(exact_square_sum(shuffled.split([1, 0, 4097, 10_000, 15_913])), whole)
    assert torch.equal(exact_square_sum([shuffled[::2], shuffled[1::2]]), whole)
    parts = sum(exact_square_sum([part]) for part in shuffled.chunk(7))
    assert value_of(parts) == value_of(whole)
    assert torch.equal(square_sum_norm(parts), square_sum_norm(whole))


@pytest.mark.parametrize("threads", [1, 3])
def test_sum_does_not_depend_on_the_number_of_threads(threads: int) -> None:
    x = spread_out(200_000, 30, torch.float32)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    found = exact_square_sum([x[:50_000], x[50_000:]])
    torch.set_num_threads(before)
    assert torch.equal(found, reference.exact_square_sum([x]))


def test_largest_values_do_not_overflow_an_accumulator(capability: str) -> None:
    for count in (4095, 4096, 2048, 2047):
        x = torch.full((count,), torch.finfo(torch.float32).max)
        assert value_of(exact_square_sum([x])) == count * square(torch.finfo(torch.float32).max)
        x = torch.cat([torch.full((count - 1,), 1.0 - 2.0**-24), torch.tensor([2.0**-17])])
        assert value_of(exact_square_sum([x])) == expected(x)


def test_strides_shapes_and_dtypes_may_be_mixed(capability: str) -> None:
    x = spread_out(2 * 3 * 5 * 7, 4, torch.float32).view(2, 3, 5, 7)
    channels_last = x.contiguous(memory_format=torch.channels_last)
    whole = exact_square_sum([x])
    for same in (channels_last, x.permute(3, 1, 0, 2), x.flip(0), x.flatten()):
        assert torch.equal(exact_square_sum([same]), whole)
    gaps = x[:, :, ::2, 1:6]
    assert value_of(exact_square_sum([gaps])) == expected(gaps)
    repeated = torch.tensor([1.5]).expand(9)
    mixed = [torch.tensor(2.0), torch.empty(0, 4), repeated, torch.ones(3, dtype=torch.float64), x.half(), x.bfloat16()]
    assert value_of(exact_square_sum(mixed)) == sum(expected(t) for t in mixed)
    assert torch.equal(exact_square_sum([]), torch.zeros(LENGTH, dtype=torch.int64))
    assert torch.equal(exact_square_sum([torch.empty(0)]), torch.zeros(LENGTH, dtype=torch.int64))


def test_subnormal_numbers_count_also_where_a_thread_flushes_them(capability: str) -> None:
    x = torch.full((100,), 2.0**-149)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormal numbers")
    try:
        found = exact_square_sum([x])
        root = square_sum_norm(found)
    finally:
        torch.set_flush_denormal(False)
    assert value_of(found) == 100
    assert root.view(torch.int32).item() == 10


def test_what_is_not_finite_is_counted_and_the_rest_is_summed(capability: str) -> None:
    x = spread_out(9000, 60, torch.float32)
    rest = x.clone()
    for i, value in ((0, math.nan), (4095, math.inf), (4096, -math.inf), (8999, -math.nan)):
        x[i], rest[i] = value, 0.0
    found = exact_square_sum([x])
    assert found[:COUNTS].tolist() == [2, 2]
    assert torch.equal(found[COUNTS:], exact_square_sum([rest])[COUNTS:])


@pytest.mark.slow
def test_more_elements_than_an_int32_counts() -> None:
    x = torch.zeros(2**31 + 4097, dtype=torch.bfloat16)
    x[0], x[2**31], x[-1] = 1.0, 2.0, 4.0
    assert value_of(exact_square_sum([x])) == 21 * square(1.0)


# ---- the root --------------------------------------------------------------------------------------------------------


def is_rounded(root: Fraction, whole: Fraction, dtype: torch.dtype) -> bool:
    """Whether root is sqrt(whole), to nearest: no other number of the dtype is closer. (Ties are tested apart.)"""
    digits, lowest = ULPS[dtype]
    exponent = max(math.frexp(float(root))[1] - digits, lowest)
    half = Fraction(2) ** (exponent - 1)
    return (root - half) ** 2 <= whole <= (root + half) ** 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("binary_orders", [0, 20, 100])
def test_root_is_rounded_correctly(dtype: torch.dtype, binary_orders: int) -> None:
    for count in range(1, 40):
        sums = exact_square_sum([spread_out(count, binary_orders, torch.float32)])
        root = square_sum_norm(sums, dtype)
        assert root.dtype == dtype
        assert root.shape == ()
        assert is_rounded(Fraction(root.item()), value_of(sums) * Fraction(2) ** LOWEST, dtype)
        assert torch.equal(root, reference.square_sum_norm(sums, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_roots_of_the_smallest_sums_are_rounded_correctly(dtype: torch.dtype) -> None:
    for squares in (1, 2, 3, 5, 7, 1000, 2**31 + 1, 2**40 + 3, 2**90 + 1, 2**105 + 1):
        sums = torch.tensor([0, 0, *(squares >> DIGIT_BITS * i & 0xFFFFFFFF for i in range(LENGTH - COUNTS))])
        root = square_sum_norm(sums, dtype)
        assert is_rounded(Fraction(root.item()), squares * Fraction(2) ** LOWEST, dtype), squares
        assert torch.equal(root, reference.square_sum_norm(sums, dtype))


def test_a_root_between_two_floats_goes_to_the_even_one_and_the_least_bit_more_goes_up() -> None:
    for middle, even, above in ((2**24 + 1, 2**24, 2**24 + 2), (2**24 + 3, 2**24 + 4, 2**24 + 4)):
        sums = exact_square_sum([torch.tensor([middle], dtype=torch.float64)])
        assert square_sum_norm(sums).item() == even
        assert reference.square_sum_norm(sums).item() == even
        sums += exact_square_sum([torch.tensor([2.0**-149])])
        assert square_sum_norm(sums).item() == above
        assert reference.square_sum_norm(sums).item() == above


def test_root_of_digits_that_have_not_been_carried() -> None:
    sums = exact_square_sum([torch.tensor([3.0])])
    many = sums * 2**30  # as an all-reduce of 2^30 ranks would leave it
    assert square_sum_norm(many).item() == 3.0 * 2**15
    assert reference.square_sum_norm(many).item() == 3.0 * 2**15
    split, borrowed = torch.zeros_like(sums), torch.zeros_like(sums)  # 25600 at digit 9, which is 25
    split[2 + 9], split[2 + 8] = 1, 25599 << DIGIT_BITS
    borrowed[2 + 9], borrowed[2 + 8] = 25601, -(1 << DIGIT_BITS)
    for each in (split, borrowed):
        assert square_sum_norm(each, torch.float64).item() == 5.0
        assert reference.square_sum_norm(each, torch.float64).item() == 5.0


def test_extreme_roots() -> None:
    largest = exact_square_sum([torch.full((2,), torch.finfo(torch.float32).max)])
    assert square_sum_norm(largest).item() == math.inf
    assert square_sum_norm(largest, torch.float64).item() == pytest.approx(
        math.sqrt(2) * torch.finfo(torch.float32).max
    )
    assert square_sum_norm(exact_square_sum([])).item() == 0.0
    smallest = exact_square_sum([torch.tensor([2.0**-149])])
    assert square_sum_norm(smallest).item() == 2.0**-149
    assert square_sum_norm(exact_square_sum([torch.tensor([math.inf, 1.0])])).item() == math.inf
    assert math.isnan(square_sum_norm(exact_square_sum([torch.tensor([math.inf, math.nan])])).item())


# ---- as an op --------------------------------------------------------------------------------------------------------


def test_ops_pass_opcheck_and_compile_without_a_break() -> None:
    x, y = torch.randn(10, requires_grad=True), torch.randn(3, 4).bfloat16()
    torch.library.opcheck(torch.ops.fastpar.exact_square_sum, ([x.detach(), y],))
    torch.library.opcheck(torch.ops.fastpar.square_sum_norm, (exact_square_sum([x, y]), torch.float32))
    compiled = torch.compile(
        lambda a, b: square_sum_norm(exact_square_sum([a, b])), fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(compiled(x, y), square_sum_norm(exact_square_sum([x, y])))


def test_wrong_arguments_are_refused_with_what_is_allowed() -> None:
    with pytest.raises(TypeError, match=r"tensors must be a sequence, each a tensor, got a tensor of shape \(3,\)"):
        exact_square_sum(torch.ones(3))
    with pytest.raises(TypeError, match=r"tensors\[1\] must be float32.*int64"):
        exact_square_sum([torch.ones(3), torch.ones(3, dtype=torch.int64)])
    with pytest.raises(ValueError, match=r"exact_square_sum: tensors \[1\] is on the meta device"):
        exact_square_sum([torch.ones(3), torch.ones(3, device="meta")])
    with pytest.raises(ValueError, match=r"int64 of shape \(21,\)"):
        square_sum_norm(torch.zeros(21))
    with pytest.raises(ValueError, match=r"torch\.float32 or torch\.float64, got torch\.bfloat16"):
        square_sum_norm(exact_square_sum([]), torch.bfloat16)
