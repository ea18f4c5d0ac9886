"""Which choices an expert's capacity leaves, and what becomes of the others."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from fastpar.ops import Padding, expert_capacity, moe_capacity, moe_combine
from tests.dist import run_ranks
from tests.moe.moe_calls import moe_dispatch
from tests.moe.moe_ranks import expected, through_experts

INDICES = torch.tensor([[0], [0], [1], [0]])
WEIGHTS = torch.tensor([[0.5], [0.9], [0.8], [0.7]])


def some(tokens: int = 50, num_experts: int = 4, top_k: int = 3):
    generator = torch.Generator().manual_seed(3)
    indices = torch.randint(-1, num_experts + 1, (tokens, top_k), generator=generator)
    weights = torch.rand(tokens, top_k, generator=generator)
    return indices, (weights * 8).round() / 8  # many are equal


def by_hand(indices, weights, capacity, num_experts, order_of):
    """Expert by expert: sort its pairs, cut, mark."""
    out, flat = indices.clone(), indices.reshape(-1).tolist()
    for expert in range(num_experts):
        pairs = sorted((p for p, e in enumerate(flat) if e == expert), key=order_of)
        for pair in pairs[capacity:]:
            out.view(-1)[pair] = -1
    return out


def test_worked_example():
    assert moe_capacity(INDICES, WEIGHTS, num_experts=2, tokens=2).tolist() == [[-1], [0], [1], [0]]
    assert moe_capacity(INDICES, num_experts=2, tokens=2, policy="position").tolist() == [[0], [0], [1], [-1]]


@pytest.mark.parametrize(
    ("tokens", "top_k", "num_experts", "factor", "minimum", "wanted"),
    [
        (100, 2, 8, 1.25, 0, 32),  # 31.25
        (10, 1, 1, 1.1, 0, 11),  # 11.000000000000002 in binary
        (4, 1, 2, 1.0, 0, 2),
        (4, 1, 64, 1.0, 0, 1),
        (4, 1, 64, 1.0, 4, 4),
        (0, 2, 8, 1.0, 0, 0),
    ],
)
def test_capacity_is_rounded_up(tokens, top_k, num_experts, factor, minimum, wanted):
    assert expert_capacity(tokens, top_k, num_experts, factor=factor, minimum=minimum) == wanted
    indices = torch.zeros(tokens, top_k, dtype=torch.int64)
    left = moe_capacity(indices, num_experts=num_experts, factor=factor, minimum=minimum, policy="position")
    assert int((left == 0).sum()) == min(wanted, tokens * top_k)


@pytest.mark.parametrize("tokens", [0, 1, 7, 1000])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_the_largest_weights_stay_and_of_equal_ones_the_first(dtype, tokens):
    indices, weights = some()
    found = moe_capacity(indices.to(dtype), weights, num_experts=4, tokens=tokens)
    flat = weights.view(-1).tolist()
    assert torch.equal(found, by_hand(indices, weights, tokens, 4, lambda p: (-flat[p], p)).to(dtype))
    assert found.dtype == dtype


def test_the_first_tokens_stay_by_position():
    indices, weights = some()
    found = moe_capacity(indices, num_experts=4, tokens=7, policy="position")
    assert torch.equal(found, by_hand(indices, weights, 7, 4, lambda p: p))


def test_any_choices_stay_at_random_and_the_generator_alone_says_which():
    indices, _ = some()
    found = [
        moe_capacity(indices, num_experts=4, tokens=7, policy="random", generator=torch.Generator().manual_seed(seed))
        for seed in (1, 1, 2)
    ]
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    for left in found:
        assert ((left == indices) | (left == -1)).all()
        assert torch.bincount(left[(left >= 0) & (left < 4)], minlength=4).tolist() == [7] * 4


def test_every_choice_has_the_same_chance_at_random():
    generator = torch.Generator().manual_seed(0)
    indices = torch.zeros(20, 1, dtype=torch.int64)
    kept = sum(
        (moe_capacity(indices, num_experts=1, tokens=5, policy="random", generator=generator) == 0).float()
        for _ in range(2000)
    )
    # 500 of 2000 expected; the standard deviation is 19.
    assert float((kept - 500).abs().max()) < 100


def test_nan_weights_go_first():
    weights = torch.tensor([[0.5], [torch.nan], [0.1], [-torch.inf]])
    indices = torch.zeros(4, 1, dtype=torch.int64)
    assert moe_capacity(indices, weights, num_experts=1, tokens=2).tolist() == [[0], [-1], [0], [-1]]


def test_no_tokens_and_no_choices():
    for shape in ((0, 2), (3, 0)):
        indices = torch.empty(shape, dtype=torch.int64)
        assert moe_capacity(indices, torch.empty(shape), num_experts=2, factor=1.0).shape == shape


def test_wrong_arguments_say_what_is_allowed():
    with pytest.raises(ValueError, match="either factor or tokens, got factor=None and tokens=None"):
        moe_capacity(INDICES, WEIGHTS, num_experts=2)
    with pytest.raises(ValueError, match=r"either factor or tokens, got factor=1.0 and tokens=2"):
        moe_capacity(INDICES, WEIGHTS, num_experts=2, factor=1.0, tokens=2)
    for factor in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="factor must be positive"):
            moe_capacity(INDICES, WEIGHTS, num_experts=2, factor=factor)
    with pytest.raises(ValueError, match="tokens must not be negative, got -1"):
        moe_capacity(INDICES, WEIGHTS, num_experts=2, tokens=-1)
    with pytest.raises(ValueError, match="policy must be one of probability, position, random, got 'best'"):
        moe_capacity(INDICES, WEIGHTS, num_experts=2, tokens=1, policy="best")
    with pytest.raises(ValueError, match=r"needs weights of the shape of indices, \(4, 1\), got None"):
        moe_capacity(INDICES, num_experts=2, tokens=1)
    with pytest.raises(ValueError, match=r"\[T, K\] of int64 or int32, got \(4, 1\) torch.float32"):
        moe_capacity(WEIGHTS, WEIGHTS, num_experts=2, tokens=1)
    with pytest.raises(ValueError, match="num_experts must be between 1 and"):
        moe_capacity(INDICES, WEIGHTS, num_experts=0, tokens=1)
    with pytest.raises(ValueError, match="align must be at least 1, got 0"):
        Padding(align=0)
    with pytest.raises(ValueError, match="capacity must not be negative, got -1"):
        Padding(capacity=-1)


# ---- on their way


def test_dropped_choices_have_no_weight_and_no_gradient_and_are_counted():
    indices, weights = some()
    left = moe_capacity(indices, weights, num_experts=4, tokens=7)
    x, dout = torch.randn(50, 5), torch.randn(50, 5)
    found = through_experts(x, left, weights, dout, num_experts=4)
    for got, want in zip(found, expected(x, left, weights, dout, 4), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    assert not found[2][left == -1].any()
    _, _, plan = moe_dispatch(x, left, weights, num_experts=4)
    assert plan.dropped == 150 - 28
    assert plan.dropped_per_rank == (122,)
    assert plan.rows_per_expert.tolist() == [7] * 4


def on_ranks() -> list[int]:
    """Rank r of 2 has 6 + r tokens, all for expert 1; each rank keeps 4."""
    rank, size = dist.get_rank(), dist.get_world_size()
    indices = torch.ones(6 + rank, 1, dtype=torch.int64)
    left = moe_capacity(indices, num_experts=size, tokens=4, policy="position")
    options = {"num_experts": size, "group": dist.group.WORLD}
    x = torch.ones(6 + rank, 3)
    _, _, plan = moe_dispatch(x, left, padding=Padding(capacity=4 * size), **options)
    assert plan.splits == (0, 4 * size)
    assert plan.num_rows == 4 * size
    assert plan.dropped == 2 + rank
    assert plan.dropped_per_rank == tuple(2 + r for r in range(size))
    assert plan.tokens_per_rank == tuple(6 + r for r in range(size))
    assert plan.rows_per_rank.tolist() == plan.rows_per_expert.tolist() == [0, 4 * size]
    with pytest.raises(ValueError, match=f"capacity is {4 * size - 1} rows for each expert, but one gets {4 * size}"):
        moe_dispatch(x, left, padding=Padding(capacity=4 * size - 1), **options)
    return plan.counts.tolist()


def test_each_rank_drops_its_own_and_room_that_is_too_small_is_an_error_on_all():
    assert run_ranks(2, on_ranks) == [[0], [8]]


@pytest.mark.parametrize(
    ("padding", "room"),
    [(Padding(), [3, 0, 2]), (Padding(align=4), [4, 0, 4]), (Padding(capacity=3), [3, 3, 3]),
     (Padding(align=4, capacity=3), [4, 4, 4])],
    ids=["none", "align", "capacity", "both"],
)  # fmt: skip
def test_padding_makes_room_of_zeros_that_comes_into_nothing(padding, room):
    indices = torch.tensor([[0, 2], [0, -1], [2, 0]])
    weights = torch.rand(3, 2, requires_grad=True)
    x = torch.randn(3, 5, requires_grad=True)
    rows, row_weights, plan = moe_dispatch(x, indices, weights, num_experts=3, padding=padding)
    assert [b - a for a, b in zip(plan.splits[:-1], plan.splits[1:], strict=True)] == room
    assert plan.counts.tolist() == [3, 0, 2]
    is_padding = torch.ones(plan.num_rows, dtype=torch.bool)
    for begin, count in zip(plan.splits[:-1], plan.counts.tolist(), strict=True):
        is_padding[begin : begin + count] = False
    assert not rows[is_padding].any()
    assert not row_weights[is_padding].any()
    assert (plan.source[is_padding] == -1).all()
    results = torch.where(is_padding[:, None], torch.nan, rows * 2.0)  # whatever experts make of zeros
    out = moe_combine(results, plan, row_weights)
    out.sum().backward()
    scale = 2.0 * torch.where(indices >= 0, weights.detach(), 0.0)
    torch.testing.assert_close(out.detach(), scale.sum(1, keepdim=True) * x.detach())
    torch.testing.assert_close(x.grad, scale.sum(1, keepdim=True).expand(-1, 5))
    torch.testing.assert_close(weights.grad, torch.where(indices >= 0, 2.0 * x.detach().sum(1, keepdim=True), 0.0))
