"""Dispatch and combine over several hosts, which are simulated as in test_hierarchical.py, against one rank; what
travels between hosts; and errors, which must reach the ranks of all hosts.

Sums are of sums by host, each rounded once: 1e-6 in float32 of values up to 50, two roundings to bfloat16 (2^-8 each).
"""

from __future__ import annotations

import pytest
import torch

from fastpar.ops import ExpertRule
from fastpar.ops.moe.permute import tokens_by_rank
from fastpar.ops.moe.transports.within_host import Topology
from tests.comm.test_hierarchical import ALONE_FIRST, ALONE_LAST, MIXED, PAIRS, THREE, run_on
from tests.dist import run_ranks
from tests.moe import moe_hierarchical_ranks as ranks
from tests.moe.moe_mlp_ranks import gradients, problem
from tests.moe.moe_ranks import through_experts, tokens_of
from tests.moe.test_moe_adversarial import DIFFERENT, WRONG_ON_ONE
from tests.moe.test_moe_dispatch import FP8
from tests.moe.test_moe_mlp import TOLERANCE, assert_close, moe_mlp

CROSSED = [[0, 3], [1, 2]]  # gateways of rank 3 in another order than hosts
SIZES = (9, 0, 13, 1)
OPTIONS = [
    (torch.float32, {}),
    (torch.bfloat16, {}),
    (torch.float32, {"exact": True}),
    (torch.bfloat16, {"payload": FP8}),
]


@pytest.mark.parametrize("over", ranks.OVER)
@pytest.mark.parametrize("layout", [PAIRS, CROSSED, ALONE_LAST, THREE], ids=str)
def test_ranks_on_several_hosts_match_one(layout, over):
    hidden = 130
    found = run_on(layout, ranks.every_option, over, SIZES, hidden, OPTIONS)
    for (dtype, options), *by_rank in zip(OPTIONS, *found, strict=True):
        parts = tokens_of(0, (sum(SIZES),), hidden, 3, 12, dtype)
        whole = through_experts(*parts, num_experts=12, **options)
        for got, want in zip(zip(*by_rank, strict=True), whole, strict=True):
            if options.get("exact"):
                assert torch.equal(torch.cat(got), want)
            else:
                rtol, atol = (0.02, 0.3) if dtype == torch.bfloat16 else (1e-6, 5e-5)
                torch.testing.assert_close(torch.cat(got), want, rtol=rtol, atol=atol)


@pytest.mark.parametrize("over", ranks.OVER)
@pytest.mark.parametrize("layout", [MIXED, ALONE_FIRST], ids=str)
def test_any_routing_over_hosts_gives_the_sum_over_choices(layout, over):
    assert set(run_on(layout, ranks.adversarial, over)) == {14}


@pytest.mark.parametrize("over", ranks.OVER)
def test_steps_over_hosts_that_have_nothing_in_common_all_end(over):
    assert run_on(PAIRS, ranks.random_steps, over, 20) == [20] * 4


@pytest.mark.slow
@pytest.mark.parametrize("over", ranks.OVER)
@pytest.mark.parametrize("layout", [MIXED, THREE, ALONE_LAST], ids=str)
def test_500_steps_over_hosts_that_have_nothing_in_common_all_end(layout, over):
    assert run_on(layout, ranks.random_steps, over, 500, timeout=300.0) == [500] * 4


@pytest.mark.parametrize("over", ranks.OVER)
def test_the_sum_of_a_host_is_rounded_once(over):
    """1 + a + a + a with a = 2^-9, a quarter of the last bit of 1 in bfloat16. Were each rank's sum rounded,
    1 + a would become 1, and 1 + 2 a as well: half a bit, which rounds to even."""
    assert run_on(PAIRS, ranks.rounded_once, over) == [[1 + 2**-7], [], [], []]


@pytest.mark.parametrize("over", ranks.OVER)
@pytest.mark.parametrize("weigh", ["after", "input"])
def test_experts_over_hosts_match_one_process_in_any_number_of_chunks(weigh, over):
    rule = ExpertRule(weigh=weigh)
    whole = gradients(moe_mlp, problem(torch.float64, rule), rule=rule)
    by_rank = run_on(MIXED, ranks.experts, over, SIZES, rule)  # of tokens or experts
    assert_close({n: torch.cat([found[n] for found in by_rank]) for n in whole}, whole, TOLERANCE[torch.float64])


@pytest.mark.parametrize("over", ranks.OVER)
def test_tokens_sent_again_over_hosts_arrive_as_they_did_before(over):
    assert run_on(ALONE_FIRST, ranks.sent_again, over) == [True] * 3


# ---- what is sent


@pytest.mark.parametrize("over", ranks.OVER)
@pytest.mark.parametrize("layout", [PAIRS, MIXED], ids=str)
def test_a_token_goes_once_to_each_host_and_one_row_comes_back(layout, over):
    found = run_on(layout, ranks.step_over_network, layout, over, {"transport": "hierarchical"})
    numbers = 4 * 2 + 4 * 4  # of 4 experts, and weights
    sent = [found[0]["to hosts"] * row_bytes for row_bytes in (512 + numbers, 512, 512, 512 + 4 * 4)]
    within = 2 if over == "all-to-all" else 1
    totals = [sum(calls) for calls in zip(*(step["bytes"] for step in found), strict=True)]
    assert [total for total in totals if total] == sent  # those within hosts send nothing over the network
    assert len(totals) == 4 * within
    plain = run_on(layout, ranks.step_over_network, layout, over, {"transport": "all_to_all"})
    claims = 4 * 2 * 32  # from each rank to those of the other host, before results
    sent_plain = sum(sum(step["bytes"]) for step in plain) - claims
    assert sent_plain * found[0]["to hosts"] == sum(sent) * found[0]["to ranks"]
    assert found[0]["to ranks"] > 1.4 * found[0]["to hosts"]


def test_a_step_over_hosts_is_a_header_a_claim_and_four_all_to_alls_with_a_barrier_each():
    there, back = [("all_to_all", 4), ("barrier", 2)], [("barrier", 2), ("all_to_all", 4)]
    for step in run_on(PAIRS, ranks.step_over_network, PAIRS, "shared memory", {"transport": "hierarchical"}):
        assert step["ops"] == [("all_gather", 4), *there, ("all_gather", 4), *back, *there, *back]


def test_worked_example_of_the_docstring():
    rows = run_on(PAIRS, ranks.worked_example)
    assert rows[1] == [[0, 0, 0, 1], [0, 0, 1, 1]]
    assert [rows[rank] for rank in (0, 2, 3)] == [[[0] * 4] * 2] * 3


def test_8_ranks_on_2_hosts_with_top_8_of_256_send_2_6_times_fewer_rows_between_hosts():
    """Virtual: what rank 0 of 8 would send of 4096 tokens to the other host."""
    indices = torch.rand(4096, 256, generator=torch.Generator().manual_seed(0)).argsort(1)[:, :8]
    to_ranks, to_hosts = (tokens_by_rank(indices, size, 256 // size)[2] for size in (8, 2))
    assert int(to_ranks[4:].sum()) / int(to_hosts[1]) == pytest.approx(2.66, abs=0.05)


@pytest.mark.parametrize("over", ranks.OVER)
def test_a_function_runs_while_rows_travel_between_hosts_and_changes_no_bit(over):
    launch, wait = "launch all_to_all", "wait all_to_all"
    for forward, backward in run_on(MIXED, ranks.beside, over):
        assert forward[-3:] == [launch, "forward", wait]
        assert backward[:3] == [launch, "backward", wait]


# ---- who is where


@pytest.mark.parametrize("layout", [PAIRS, CROSSED, ALONE_LAST, THREE, [[0, 4], [1, 2, 3]]], ids=str)
def test_every_ranks_rows_come_in_at_one_rank_of_each_host(layout):
    hosts = tuple(map(tuple, layout))
    size = sum(map(len, hosts))
    tops = [Topology.of(hosts, rank) for rank in range(size)]
    for top in tops:
        for host, gateway in enumerate(top.gateways):
            assert gateway in hosts[host]
            assert top.rank in tops[gateway].sources[tops[gateway].index]
        assert top.gateways[top.host] == top.rank  # its own rows come in at itself
        assert sorted(source for sources in top.sources for source in sources) == list(range(size))
        # Experts by place: a rank's stay together, and hosts stand in the order of their gateways.
        experts = torch.arange(3 * size)
        places = top.experts_by_place(torch.cat([experts, torch.tensor([-1, 3 * size])]), 3)
        assert len(set(places[:-2].tolist())) == 3 * size
        for expert, place in zip(experts.tolist(), places.tolist(), strict=False):
            host = next(h for h, members in enumerate(hosts) if expert // 3 in members)
            assert place // (3 * top.widest) == sorted(top.gateways).index(top.gateways[host])
            assert place % 3 == expert % 3
        assert all(not 0 <= place < 3 * top.widest * len(hosts) for place in places[-2:].tolist())


@pytest.mark.parametrize("layout", [MIXED, ALONE_FIRST], ids=str)
def test_the_ranks_of_a_host_take_turns_with_the_collectives_of_the_group(layout):
    for rank, (here, (index, size)) in enumerate(run_on(layout, ranks.take_turns)):
        assert list(here) in layout
        assert (here[index], len(here)) == (rank, size)


def test_hosts_decide_which_way_tokens_take():
    over_hosts = ["SharedForwarder", "SharedForwarder", "AllToAllDispatcher", "AllToAllForwarder", "AllToAllDispatcher"]
    assert run_on(ALONE_FIRST, ranks.chosen) == [over_hosts] * 3


@pytest.mark.parametrize("over", ranks.OVER)
def test_auto_goes_over_hosts_where_that_sends_fewer_rows(over):
    flat, over_hosts = "AllToAllDispatcher", "HierarchicalDispatcher"
    assert run_on(PAIRS, ranks.chosen_by_rows, over) == [[flat, flat, over_hosts, flat]] * 4


@pytest.mark.parametrize("over", ranks.OVER)
def test_a_dispatch_that_auto_does_not_send_over_hosts_takes_one_chunk(over):
    ops = ["all_gather", *["all_to_all"] * 4]
    assert run_on(PAIRS, ranks.chunks_of_one_expert, over) == [[ops, ops]] * 4


@pytest.mark.parametrize("layout", [[[0, 1]], [[0], [1]]], ids=["one host", "each on its own"])
def test_a_group_without_hosts_of_several_ranks_is_an_error(layout):
    for text in run_on(layout, ranks.refused):
        assert "must be on several hosts, with several on one of them" in text
    if len(layout) == 1:
        assert len(run_ranks(2, ranks.refused)) == 2


# ---- errors


@pytest.mark.parametrize("over", ranks.OVER)
def test_what_is_wrong_on_one_rank_is_an_error_on_all_hosts_and_the_group_goes_on(over):
    assert run_on(PAIRS, ranks.wrong_arguments, over) == [len(WRONG_ON_ONE) + len(DIFFERENT)] * 4


@pytest.mark.parametrize("over", ranks.OVER)
def test_results_that_are_wrong_on_one_rank_are_an_error_on_all_hosts_and_the_group_goes_on(over):
    assert run_on(MIXED, ranks.wrong_results, over) == [7] * 4


@pytest.mark.parametrize("over", ranks.OVER)
def test_a_rank_that_does_not_combine_is_an_error_on_all_hosts_at_the_deadline(over):
    for rank, (text, took) in enumerate(run_on(PAIRS, ranks.wait_for_nobody, over)):
        if rank != 1:
            assert 0.3 < took < 3.0, text
            if over == "shared memory" and rank == 0:
                assert "rank(s) 1" in text


@pytest.mark.parametrize("over", ranks.OVER)
def test_layers_over_hosts_may_be_between_each_other(over):
    assert run_on(MIXED, ranks.between_each_other, over) == [2] * 4


# ---- memory


def test_nothing_uninitialised_comes_out_over_hosts():
    assert run_on(ALONE_FIRST, ranks.poisoned, "shared memory") == [0, 4, 4]  # two halves, which grow for 2000 tokens
    assert run_on(PAIRS, ranks.poisoned, "all-to-all") == [0] * 4


def test_a_group_on_several_hosts_that_is_destroyed_leaves_no_memory():
    for first, last in run_on(PAIRS, ranks.leave_nothing):
        assert last == first
