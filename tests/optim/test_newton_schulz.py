"""Newton-Schulz: against float64 and the singular values, whole and split, its collectives, errors and compilation.

Tolerances. Five steps multiply rounding of the input by at most a^5 = 485 for singular values near 0, and by about 1
for the others: 2e-5 absolute in float32 and 1e-12 in float64 hold for the shapes here. In bfloat16 every product is
rounded to 2^-9 relative; entries are at most 1.2, and 0.05 absolute is what five steps make of that. The first
polynomial of polar_express takes numbers of 23 from each other: 0.1.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fastpar import comm, ops, reference
from fastpar.comm import Communicator, shard_sizes
from fastpar.contracts.newton_schulz import COEFFICIENTS, polynomials
from tests.dist import run_ranks

newton_schulz = ops.newton_schulz
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 0.05}
SHAPES = [(1, 1), (1, 7), (9, 5), (37, 65), (64, 64), (130, 51)]


def random(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).to(dtype)


def exact(x: Tensor, **options: Any) -> Tensor:
    return reference.newton_schulz(x.double(), **{**options, "dtype": torch.float64})


# ---- one rank --------------------------------------------------------------------------------------------------------


def test_worked_example_of_the_docstring() -> None:
    found = newton_schulz(torch.diag(torch.tensor([3.0, 4.0])), steps=1, coefficients="cubic", dtype=torch.float32)
    torch.testing.assert_close(found, torch.diag(torch.tensor([0.792, 0.944])))


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("coefficients", ["quintic", "polar_express", (3.0, -3.2, 1.2)])
@pytest.mark.parametrize("shape", SHAPES)
def test_matches_the_polynomial_of_the_singular_values(
    shape: tuple[int, int], coefficients: Any, dtype: torch.dtype
) -> None:
    x = random(*shape)
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    s = s / s.norm()
    for a, b, c in polynomials(coefficients, 5):
        s = a * s + b * s**3 + c * s**5
    wanted = u @ torch.diag(s) @ v
    found = newton_schulz(x, coefficients=coefficients, dtype=dtype)
    assert (found.dtype, found.shape, found.is_contiguous()) == (dtype, x.shape, True)
    tolerance = TOLERANCE[dtype] * (2 if coefficients == "polar_express" else 1)
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=tolerance)
    torch.testing.assert_close(exact(x, coefficients=coefficients), wanted, rtol=0, atol=1e-12)


def test_bits_are_those_of_torch_muon() -> None:
    for shape in SHAPES:
        param = torch.nn.Parameter(torch.zeros(shape))
        param.grad = random(*shape, dtype=torch.float32)
        torch.optim.Muon([param], lr=1.0, weight_decay=0.0, momentum=0.0).step()
        ratio = max(1.0, shape[0] / shape[1]) ** 0.5
        expected = torch.zeros(shape).add_(newton_schulz(param.grad), alpha=-ratio)
        assert torch.equal(param.detach(), expected)


@pytest.mark.parametrize(
    ("name", "steps", "least", "low", "high"),
    [
        ("quintic", 5, 3e-3, 0.68, 1.21),
        ("polar_express", 5, 1e-3, 0.84, 1.13),
        ("polar_express", 8, 1e-3, 1 - 1e-6, 1 + 1e-6),
    ],
)
def test_named_coefficients_bring_singular_values_near_one(
    name: str, steps: int, least: float, low: float, high: float
) -> None:
    s = torch.logspace(torch.tensor(least).log10().item(), 0, 4001, dtype=torch.float64)
    for a, b, c in polynomials(name, steps):
        s = a * s + b * s**3 + c * s**5
    assert low < s.min() <= s.max() < high


def test_cubic_converges_to_the_polar_factor() -> None:
    x = random(20, 33)
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    torch.testing.assert_close(newton_schulz(x, steps=40, coefficients="cubic", dtype=torch.float64), u @ v)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_the_input_is_not_changed_and_not_shared(dtype: torch.dtype) -> None:
    for shape in ((5, 9), (9, 5), (0, 4)):
        x = random(*shape).to(dtype)
        before = x.clone()
        found = newton_schulz(x, dtype=dtype)
        found.fill_(7.0)
        assert torch.equal(x, before)


def test_a_stack_has_the_bits_of_its_matrices() -> None:
    x = random(2, 3, 33, 17, dtype=torch.float32)
    found = newton_schulz(x)
    assert found.shape == x.shape
    for i in range(2):
        for j in range(3):
            assert torch.equal(found[i, j], newton_schulz(x[i, j]))


def test_zeros_stay_zero_and_nan_spreads_over_its_own_matrix() -> None:
    x = random(3, 4, 6, dtype=torch.float32)
    x[0] = 0.0
    x[1, 2, 3] = torch.nan
    found = newton_schulz(x)
    assert torch.equal(found[0], torch.zeros_like(found[0]))
    assert found[1].isnan().all()
    assert found[2].isfinite().all()


def test_strided_inputs_give_the_contiguous_result() -> None:
    x = random(14, 22, dtype=torch.float32)
    assert torch.equal(newton_schulz(x.T.contiguous().T), newton_schulz(x))
    assert torch.equal(newton_schulz(x[::2, 1::3]), newton_schulz(x[::2, 1::3].contiguous()))


def test_compiles_without_a_graph_break() -> None:
    x = random(9, 17, dtype=torch.float32)
    compiled = torch.compile(lambda t: newton_schulz(t, steps=2), fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), newton_schulz(x, steps=2))


# ---- split over a group ----------------------------------------------------------------------------------------------


def mine(x: Tensor, group: Communicator, dim: int, sizes: list[int]) -> Tensor:
    return x.narrow(dim, sum(sizes[: group.rank]), sizes[group.rank])


def _check_shards(divided: bool) -> bool:
    import sys

    sys.modules["fastpar.ops.newton_schulz"]._DIVIDED_FROM["cpu"] = 1 if divided else 256  # type: ignore[attr-defined]
    group = Communicator(dist.group.WORLD)
    for shape in [(1, 7), (9, 5), (5, 9), (37, 65), (64, 64), (65, 37)]:
        x = random(*shape)
        for dim in (0, 1):
            uneven = [0] * (group.size - 1) + [shape[dim]]
            for sizes in (shard_sizes(shape[dim], group.size), uneven):
                part = mine(x, group, dim, sizes)
                wanted = mine(exact(x), group, dim, sizes)
                by_reference = reference.newton_schulz(part, group=group, dim=dim - 2, sizes=sizes, dtype=torch.float64)
                torch.testing.assert_close(by_reference, wanted, rtol=0, atol=1e-12)
                for dtype, tolerance in TOLERANCE.items():
                    found = newton_schulz(part, group=group, dim=dim, sizes=sizes, dtype=dtype)
                    assert (found.dtype, found.shape, found.is_contiguous()) == (dtype, part.shape, True)
                    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=tolerance)
    sys.modules["fastpar.ops.newton_schulz"]._DIVIDED_FROM["cpu"] = 256  # type: ignore[attr-defined]
    return True


@pytest.mark.parametrize("divided", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_uneven_and_empty_shards_match_the_whole_matrix(ranks: int, divided: bool) -> None:
    assert all(run_ranks(ranks, _check_shards, divided))


def _check_equal_parts_and_stack() -> bool:
    group = Communicator(dist.group.WORLD)
    x = random(3, 12, 20, dtype=torch.float32)
    part = x.chunk(group.size, dim=-1)[group.rank]
    found = newton_schulz(part, group=group, dtype=torch.float32)  # dim=-1, equal sizes
    assert found.shape == part.shape
    wanted = exact(x).chunk(group.size, dim=-1)[group.rank]
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=2e-5)
    zeros = newton_schulz(torch.zeros(4, 3), group=group)
    assert torch.equal(zeros, torch.zeros(4, 3, dtype=torch.bfloat16))
    return True


def test_stacks_and_zeros_split_over_a_group() -> None:
    assert all(run_ranks(2, _check_equal_parts_and_stack))


def _records(rows: int, columns: int, dim: int, dtype: torch.dtype) -> list[tuple[str, int, torch.dtype]]:
    group = Communicator(dist.group.WORLD)
    x = random(rows, columns, dtype=torch.float32)
    sizes = shard_sizes(x.shape[dim], group.size)
    part = mine(x, group, dim, sizes)
    with comm.record() as log:
        newton_schulz(part, group=group, dim=dim, sizes=sizes, steps=3, dtype=dtype)
    return [(entry.op, entry.numel, entry.dtype) for entry in log]


def test_a_split_long_side_sends_one_gram_matrix_a_step() -> None:
    for found in run_ranks(2, _records, 10, 24, 1, torch.bfloat16):
        assert found == [("all_reduce", 1, torch.float32)] + [("all_reduce", 100, torch.bfloat16)] * 3


def test_a_split_short_side_is_turned_once_each_way() -> None:
    for found in run_ranks(2, _records, 10, 24, 0, torch.float32):
        turn = ("all_to_all", 60, torch.float32)  # 10 * 24 / 2 numbers, of which this rank keeps half
        grams = [("all_reduce", 1, torch.float32)] + [("all_reduce", 100, torch.float32)] * 3
        assert found == [turn, *grams, turn]


def test_from_256_rows_on_the_square_of_the_gram_matrix_is_divided() -> None:
    for found in run_ranks(2, _records, 257, 300, 1, torch.float32):
        step = [("all_reduce", 257 * 257, torch.float32), ("all_gather", 257 * 257, torch.float32)]
        assert found == [("all_reduce", 1, torch.float32), *step * 3]


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [ops.newton_schulz, reference.newton_schulz])
@pytest.mark.parametrize(
    ("x", "options", "error", "message"),
    [
        (torch.zeros(3), {}, ValueError, r"shape \(3,\)"),
        (torch.zeros(3, 4, dtype=torch.int64), {}, TypeError, "got torch.int64"),
        (torch.zeros(3, 4), {"dtype": torch.float16}, TypeError, "got torch.float16"),
        (torch.zeros(2, 3, 4), {"dim": 0}, ValueError, "got 0 for 3 dims"),
        (torch.zeros(3, 4), {"sizes": [3]}, ValueError, r"sizes\[0\] is 3, but x has 4 along dim -1"),
        (torch.zeros(3, 4), {"sizes": [2, 2]}, ValueError, r"each of 1 ranks.*\[2, 2\]"),
        (torch.zeros(3, 4), {"steps": 0}, ValueError, "from 1 to 99, got 0"),
        (torch.zeros(3, 4), {"coefficients": "quartic"}, ValueError, "got 'quartic'"),
        (torch.zeros(3, 4), {"coefficients": (1.0, 2.0)}, ValueError, r"got \(1.0, 2.0\)"),
        (torch.zeros(3, 4), {"coefficients": []}, ValueError, r"got \[\]"),
        (torch.zeros(3, 4, requires_grad=True), {}, ValueError, "no backward"),
    ],
)
def test_bad_arguments_are_named(
    function: Any, x: Tensor, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        function(x, **options)


def test_last_triple_serves_all_further_steps() -> None:
    first, second = (3.0, -3.2, 1.2), (1.5, -0.5, 0.0)
    assert polynomials([first, second], 4) == [first, second, second, second]
    assert polynomials("quintic", 2) == [COEFFICIENTS["quintic"][0]] * 2


def test_a_tensor_that_requires_a_gradient_is_taken_without_recording() -> None:
    x = random(3, 4, dtype=torch.float32).requires_grad_()
    with torch.no_grad():
        assert not newton_schulz(x).requires_grad
