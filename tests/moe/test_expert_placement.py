"""Copies of hot experts: the plan, what a placement changes (who computes) and what it does not (any result)."""

from __future__ import annotations

import random
import sys

import pytest
import torch

from fastpar import ops
from fastpar.comm import Communicator
from fastpar.expert import Placement, plan_placement
from fastpar.expert.layer import Experts
from fastpar.expert.replicas import ExpertReplicas, _runs
from fastpar.ops.moe.mlp import ExpertRule
from tests.dist import run_ranks
from tests.moe.expert_placement_ranks import (
    PLACEMENTS,
    compared,
    disagreements,
    rebalanced,
    rows_by_rank,
    sent,
    trained,
    trained_by_zero,
)
from tests.moe.moe_calls import moe_mlp
from tests.moe.moe_layer_ranks import train, zero_train
from tests.moe.moe_mlp_ranks import gradients, problem

# ---- the plan


def test_the_worked_examples_of_the_plan_hold():
    placement = plan_placement([50, 10, 10, 10], 2, 1)
    assert placement.copies == ((), (0,))
    assert placement.shares[0] == ((0, pytest.approx(0.6)), (1, pytest.approx(0.4)))
    assert placement.rank_loads([50, 10, 10, 10]).tolist() == pytest.approx([40, 40])

    placement = Placement(2, (((0, 0.75), (1, 0.25)), ((0, 1.0),), ((1, 1.0),), ((1, 1.0),)))
    assert placement.physical_to_logical == (0, 1, -1, 2, 3, 0)
    assert placement.rank_loads(torch.tensor([40, 10, 10, 20])).tolist() == [40, 40]


def test_shares_that_are_not_even_help_where_even_ones_would_harm():
    loads = [60.0, 40.0, 40.0, 40.0]
    assert Placement.even(4, [[], [0], [], []]).rank_loads(loads).max() == 70
    placement = plan_placement(loads, 4, 1)
    assert placement.rank_loads(loads).tolist() == pytest.approx([45] * 4, rel=0.01)


@pytest.mark.parametrize(("ep", "per_rank", "replicas"), [(2, 4, 1), (4, 2, 2), (8, 8, 2), (8, 16, 1)])
def test_a_plan_never_makes_the_busiest_rank_busier_and_obeys_its_limits(ep, per_rank, replicas):
    draw = random.Random(0)
    for exponent in (0.5, 1.0, 2.0):
        loads = [int(1000 / (1 + rank) ** exponent) for rank in range(ep * per_rank)]
        draw.shuffle(loads)
        placement = plan_placement(loads, ep, replicas)
        assert placement == plan_placement(torch.tensor(loads), ep, replicas)
        assert placement.slots <= replicas
        before = torch.tensor(loads).view(ep, per_rank).sum(1).max()
        after = placement.rank_loads(loads)
        assert after.sum() == pytest.approx(sum(loads))
        assert after.max() <= before
        for rank, copies in enumerate(placement.copies):
            assert len(set(copies)) == len(copies)
            assert all(placement.home(expert) != rank for expert in copies)


def test_with_slots_for_everything_all_ranks_get_the_mean():
    loads = [2.0**-e for e in range(16)]
    placement = plan_placement(loads, 8, 14, min_gain=1e-6)
    assert placement.rank_loads(loads).tolist() == pytest.approx([sum(loads) / 8] * 8, rel=1e-4)


def test_shares_are_the_best_that_the_copies_allow():
    """By the bound of every set of ranks: it has at least the loads of the experts that are nowhere else."""
    draw = random.Random(1)
    for _ in range(20):
        loads = [draw.random() ** 3 for _ in range(8)]
        placement = plan_placement(loads, 4, 1)
        ranks = [{rank for rank, _ in shares} for shares in placement.shares]
        best = 0.0
        for some in range(1, 16):
            chosen = {rank for rank in range(4) if some >> rank & 1}
            within = sum(load for load, on in zip(loads, ranks, strict=True) if on <= chosen)
            best = max(best, within / len(chosen))
        assert placement.rank_loads(loads).max() == pytest.approx(best, rel=1e-6)


def test_a_copy_that_gains_too_little_is_not_made():
    assert plan_placement([10, 10, 10, 10], 2, 2).slots == 0
    assert plan_placement([0, 0, 0, 0], 2, 2).slots == 0
    assert plan_placement([13, 10, 10, 10], 2, 1, min_gain=0.1).slots == 0
    assert plan_placement([13, 10, 10, 10], 2, 1, min_gain=0.01).copies == ((), (0,))
    assert plan_placement([5, 1], 1, 3).slots == 0


def test_wrong_plans_and_placements_are_refused():
    for call, message in [
        (lambda: plan_placement([1, 2, 3], 2, 1), "divisible by ep"),
        (lambda: plan_placement(torch.ones(2, 2), 2, 1), r"loads must be \[E\]"),
        (lambda: plan_placement([1, -1], 2, 1), "not negative"),
        (lambda: plan_placement([1, float("nan")], 2, 1), "finite"),
        (lambda: plan_placement([1, 1], 2, -1), "replicas must not be negative"),
        (lambda: plan_placement([1, 1], 2, 1, min_gain=0), "min_gain must be positive"),
        (lambda: Placement(2, (((0, 1.0),),)), "divisible by ep"),
        (lambda: Placement(2, (((1, 1.0),), ((1, 1.0),))), "must be on its home, rank 0"),
        (lambda: Placement(2, (((0, 0.5), (0, 0.5)), ((1, 1.0),))), "must ascend"),
        (lambda: Placement(2, (((0, 0.5), (1, 0.4)), ((1, 1.0),))), "add up to 1"),
        (lambda: Placement.even(2, [[1], [1]]), "must ascend"),
        (lambda: Placement.even(2, [[2], []]), "experts are 0..1"),
        (lambda: Placement.even(3, [[], []]), "divisible"),
        (lambda: PLACEMENTS[2].rank_loads([1, 2]), "4 experts, got 2"),
        (lambda: Experts(8, 8, 2, replicas=-1), "replicas must not be negative"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()


# ---- choices


def test_choices_stay_where_a_copy_is_as_long_as_its_share_allows():
    shares = ((0, 1 / 2), (1, 3 / 8), (2, 1 / 8))  # the worked example
    found = [dict(_runs(shares, rank, 4)) for rank in range(4)]
    assert found[0] == {0: 1.0}
    assert found[1] == {1: 1.0}
    assert found[2] == pytest.approx({2: 1 / 2, 0: 1 / 3, 1: 1 / 6})
    assert found[3] == pytest.approx({0: 2 / 3, 1: 1 / 3})


class _Rank(Communicator):
    """A rank of a group that nobody talks to."""

    def __init__(self, rank, size):
        super().__init__()
        self.rank, self.size = rank, size


@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_choices_go_to_copies_by_their_shares_and_to_no_other_expert(tokens):
    placement = plan_placement([70, 5, 9, 3, 40, 8, 2, 6], 4, 2)
    assert placement.slots == 2
    logical = torch.tensor(placement.physical_to_logical)
    indices = torch.tensor([[0, 4], [4, 8], [0, -1], [7, 0]]).repeat(tokens, 1)
    rows = torch.zeros(len(logical))
    for rank in range(4):
        physical = ExpertReplicas(placement, _Rank(rank, 4)).physical(indices.int() if rank == 1 else indices)
        goes = (indices >= 0) & (indices < 8)
        assert torch.equal(logical[physical[goes]], indices[goes])
        assert bool((physical[~goes] == -1).all())
        rows += torch.bincount(physical[goes], minlength=len(logical))
    stride = len(logical) // 4
    for expert, count in ((0, 12 * tokens), (4, 8 * tokens), (7, 4 * tokens)):
        for rank, share in placement.shares[expert]:
            mine = rows[rank * stride : (rank + 1) * stride]
            here = mine[logical[rank * stride : (rank + 1) * stride] == expert].sum()
            assert abs(here - share * count) <= 1.5  # of all ranks together: their roundings cancel


@pytest.mark.parametrize("choices", [1, 2, 3])
def test_roundings_of_few_choices_cancel_over_the_ranks(choices):
    placement = Placement.even(8, [[], [0], *[[]] * 6])
    stride = placement.experts_per_rank + placement.slots
    rows = torch.zeros(8)
    for rank in range(8):
        physical = ExpertReplicas(placement, _Rank(rank, 8)).physical(torch.zeros(choices, 1, dtype=torch.int64))
        rows += torch.bincount(physical.flatten() // stride, minlength=8)
    assert rows[:2].tolist() == pytest.approx([4 * choices] * 2, abs=1)  # 7 and 1 if all rounded alike


def test_what_is_wrong_with_indices_is_left_to_the_dispatch():
    replicas = ExpertReplicas(PLACEMENTS[2], _Rank(0, 2))
    assert replicas.num_physical == 8
    assert bool((replicas.physical(torch.tensor([[5, -2]])) == torch.tensor([[9, -2]])).all())
    for wrong in (torch.zeros(3, 2), torch.zeros(3, dtype=torch.int64)):
        assert replicas.physical(wrong) is wrong


# ---- results


RULES = [ExpertRule(), ExpertRule("gelu", weigh="before"), ExpertRule("clamped_swiglu", weigh="input")]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.activation}, {rule.weigh}")
@pytest.mark.parametrize("biased", [False, True], ids=["no biases", "biases"])
@pytest.mark.parametrize("fused", [False, True], ids=["composed", "fused"])
def test_experts_in_two_parts_have_the_bits_of_those_in_one(rule, biased, fused, monkeypatch):
    monkeypatch.setattr(sys.modules["fastpar.ops.moe.mlp"], "_is_fused", lambda _: fused)
    given = problem(torch.float32, rule, biased=biased)

    def in_parts(x, indices, weights, first, second, *, add, first_bias=None, second_bias=None):
        experts = [first, second, first_bias, second_bias]
        own, more = ([None if p is None else p[rows] for p in experts] for rows in (slice(0, 5), slice(5, 8)))
        biases = {"first_bias": own[2], "second_bias": own[3]}
        return moe_mlp(x, indices, weights, own[0], own[1], **biases, replicas=more, rule=rule, add=add)

    found = gradients(in_parts, given)
    for name, value in gradients(moe_mlp, given, rule=rule).items():
        assert torch.equal(found[name], value), name
    with torch.no_grad():
        out = in_parts(**{name: value for name, value in given.items() if name != "dout"})
    assert torch.equal(out, found["out"])


def test_wrong_replicas_are_refused():
    given = problem(torch.float32, ExpertRule())
    x, indices, weights = given["x"], given["indices"], given["weights"]
    first, second = given["first"], given["second"]
    for more, message in [
        ((first, second, given["first_bias"], None), "first_bias"),
        ((first[:, :2], second, None, None), "must be"),
        ((first, second.clone().requires_grad_(), None, None), "second, and its gradient"),
    ]:
        with pytest.raises(ValueError, match=message):
            moe_mlp(x, indices, weights, first, second, replicas=more)
    with pytest.raises(TypeError, match="replicas"):
        ops.moe_mlp(x, indices, weights, ops.ExpertWeights(first, second), replicas=(first, second))


@pytest.mark.parametrize("world", [2, 4])
def test_training_with_copies_equals_one_process_in_every_layout(world):
    rules = RULES if world == 2 else [RULES[0], RULES[2]]
    wanted = {rule: train(None, rule) for rule in rules}
    for found in run_ranks(world, trained, rules):
        for layout, values in found:
            want = wanted[layout["rule"]]
            assert values.keys() == want.keys()
            for name, value in values.items():
                torch.testing.assert_close(
                    value, want[name], rtol=1e-6, atol=1e-6, msg=lambda m, where=f"{layout}, {name}": f"{where}: {m}"
                )


@pytest.mark.parametrize("world", [2, 4])
def test_zero_stage_1_trains_experts_with_copies_as_one_process_does(world):
    want = zero_train(None, 0)
    for found in run_ranks(world, trained_by_zero):
        for name, value in found.items():
            torch.testing.assert_close(value, want[name], rtol=1e-5, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")


VARIANTS = [
    "plain",
    "chunks",
    "exact",
    "one matrix frozen",
    "experts frozen",
    "a rank without tokens",
    "no gradients",
    "torch's checkpoint",
    "recomputed",
    "recomputed selectively",
    "copied",
    "taken back",
    "autocast",
]


def test_results_and_gradients_with_copies_are_those_without_and_repeat_bit_for_bit():
    for found in run_ranks(4, compared, VARIANTS):
        assert len(found) == len(VARIANTS) + 1
        for variant, values, wanted in found:
            assert values.keys() == wanted.keys()
            for name, value in values.items():
                if value is None:
                    assert wanted[name] is None
                    assert "frozen" in variant
                    continue
                # Sums of up to 20 tokens' rows in another order; in bfloat16 each copy's sum is rounded, too.
                close = {"rtol": 1e-5, "atol": 1e-5} if variant != "autocast" else {"rtol": 0.05, "atol": 0.05}
                if variant in ("taken back", "plain, again"):
                    close = {"rtol": 0, "atol": 0}
                torch.testing.assert_close(
                    value, wanted[name], **close, msg=lambda m, where=f"{variant}, {name}": f"{where}: {m}"
                )


# ---- rows and bytes


def test_rows_of_the_busiest_rank_fall_to_what_the_plan_promises():
    tokens = 64
    before, after, promised = run_ranks(4, rows_by_rank, tokens, True)[0]
    assert max(before) > 4 * tokens  # of 8: half of all choices, and another expert's
    assert max(promised) < 0.3 * 8 * tokens
    for rows, wanted in zip(after, promised, strict=True):
        assert abs(rows - wanted) <= 2


def test_rows_of_batches_that_differ_are_close_to_what_the_plan_promises():
    before, after, promised = run_ranks(4, rows_by_rank, 512, False)[0]
    assert max(after) < 0.5 * max(before)
    for rows, wanted in zip(after, promised, strict=True):
        assert rows == pytest.approx(wanted, rel=0.05)


@pytest.mark.parametrize("kind", ["float32", "autocast", "a matrix frozen", "recomputed", "recomputed selectively"])
def test_a_copy_costs_its_weights_once_each_way(kind):
    itemsize = 2 if kind == "autocast" else 4
    copies = PLACEMENTS[4].copies
    for rank, (nbytes, sizes) in enumerate(run_ranks(4, sent, kind)):
        there = sum(experts.count(rank) for experts in copies) * sum(sizes) * itemsize
        trained = sizes[0] if kind == "a matrix frozen" else sum(sizes)
        back = len(copies[rank]) * trained * itemsize
        assert nbytes == ([there, there, back] if kind == "recomputed" else [there, back])


# ---- agreement, and a model


def test_a_placement_that_is_wrong_or_different_on_one_rank_is_refused_on_all():
    for raised in run_ranks(4, disagreements):
        different, by_etp, none, too_many, other_ep, good, bad_index = raised
        for message in (different, by_etp, none):
            assert "must be equal on all ranks" in message or "wrong arguments on rank" in message
        assert "replicas is 1" in too_many or "wrong arguments on rank" in too_many
        assert "not for 4 on 2" in other_ep
        assert good == ""
        assert "indices must be in" in bad_index or "wrong arguments on rank" in bad_index


def test_rebalance_places_by_the_loads_of_all_ranks():
    for found in run_ranks(2, rebalanced):
        assert found["placements"] == found["wanted"]
        assert all(placement.slots == 1 for placement in found["placements"].values())
        for name, one in zip("01", found["loads after"], strict=False):
            assert sum(one) == 0, name
        loads, placement = found["of the third"]
        assert found["loads after"][2] == loads
        assert placement is None
        with_copies, without = found["steps"]
        for value, want in zip(with_copies, without, strict=True):
            torch.testing.assert_close(value, want, rtol=1e-5, atol=1e-5)
        assert found["state"][0] == found["state"][1]
        assert "counts no loads" in found["error"]
