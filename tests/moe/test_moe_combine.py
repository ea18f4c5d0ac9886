"""The way back: what is wrong with results on one rank, results in chunks, and what is computed meanwhile."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fastpar.ops.moe import chunks as _moe_chunks
from fastpar.ops.moe.dispatch_combine import agree_on_rows
from tests.dist import run_ranks
from tests.moe.moe_combine_ranks import (
    beside_and_before,
    chunk_events,
    combine_different,
    combine_wider,
    combine_wrong,
    layer_steps,
    nested,
    only_add,
    order_of_events,
    others_go_on,
    partial_gradients,
    second_derivative,
)
from tests.moe.moe_ranks import TRANSPORTS

WAYS = {**TRANSPORTS, "in chunks": {"transport": "all_to_all", "chunks": 2}}

# ---- what is wrong on one rank ---------------------------------------------------------------------------------------


def test_results_that_are_wrong_on_one_rank_are_an_error_on_all_and_the_group_goes_on():
    assert run_ranks(2, combine_wrong, "auto") == [3 * 7] * 2


def test_results_that_are_wrong_on_one_rank_are_an_error_on_all_over_torch_distributed():
    assert run_ranks(2, combine_wrong, "torch") == [7] * 2


def test_results_that_differ_between_ranks_are_an_error_on_all():
    run_ranks(2, combine_different)


def test_results_that_need_more_memory_are_checked_before_anybody_makes_it():
    for took in run_ranks(2, combine_wider):
        assert max(took) < 3.0  # no deadline of 60 seconds


def test_a_gradient_of_what_is_added_to_a_combine_alone_exchanges_nothing():
    assert run_ranks(2, only_add) == [[], []]


def test_worked_example_of_agreements_on_rows():
    rows = torch.zeros(3, 5, dtype=torch.bfloat16)
    agreements = [
        agree_on_rows("moe_combine", rows, problem, is_differentiable=not problem)
        for problem in ("", "rows are upside down")
    ]
    words = [agreement.words for agreement in agreements]
    assert words == [[0, 5, 1, 1], [1, 0, 0, 0]]
    agreements[0].check([words[0]] * 2)
    for agreement, text in zip(agreements, ("wrong arguments on rank 1", "rows are upside down"), strict=True):
        with pytest.raises(ValueError, match=text):
            agreement.check(words)
    other = agree_on_rows("moe_combine", rows.float(), "", is_differentiable=True)
    with pytest.raises(ValueError, match=r"the dtype of rows .*got \['torch.bfloat16', 'torch.float32'\]"):
        agreements[0].check([words[0], other.words])


# ---- chunks of results -----------------------------------------------------------------------------------------------


def test_worked_example_of_chunks_that_go_back():
    sent = SimpleNamespace(experts=torch.tensor([[-1, 2], [0, 3], [1, -1]]))
    plan = SimpleNamespace(route=SimpleNamespace(sent=sent, back=[3], pairs=None))
    plan.splits, plan.source = (0, 1, 2, 3, 4), torch.tensor([1, 2, 0, 1])
    group_of = torch.tensor([0, 0, 1, 1])
    assert _moe_chunks._last_received(plan, group_of).tolist() == [1, 1, 0]
    assert _moe_chunks._last_back(plan, group_of).tolist() == [1, 1, 0]
    plan.route.pairs = SimpleNamespace(rows=torch.tensor([2, 0, 1, 3]))
    plan.loads, plan.dispatcher = torch.tensor([[2, 0, 1, 1]]), SimpleNamespace(comm=SimpleNamespace(rank=0, size=1))
    assert _moe_chunks._last_back(plan, group_of).tolist() == [1, 0, 0, 1]
    assert _moe_chunks._last_received(plan, group_of).tolist() == [0, 0, 1, 1]
    assert _moe_chunks._places(torch.tensor([1, 0, 1, 0])).tolist() == [2, 0, 3, 1]


def test_the_first_results_leave_before_the_last_experts_compute():
    for whole, chunked in run_ranks(2, chunk_events, (1, 2)):
        # A forward, a backward: headers' all-to-all, tokens, results; tokens and gradients, gradients.
        assert whole.count("all_to_all") == 4
        assert chunked.count("all_to_all") == 1 + 2 + 2 + 2 + 2
        assert whole.count("matmul") == chunked.count("matmul")
        launches = [i for i, event in enumerate(chunked) if event == "all_to_all"]
        products = [i for i, event in enumerate(chunked) if event == "matmul"]
        forward, backward = launches[:5], launches[5:]
        assert max(i for i in products if i < forward[4]) > forward[3] > min(products)
        assert max(products) > backward[2] > min(i for i in products if i > forward[4])


# ---- beside ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_a_function_beside_the_combine_gives_the_bits_of_its_result_before_it(way, dtype):
    assert run_ranks(2, beside_and_before, WAYS[way], dtype) == [True, True]


@pytest.mark.parametrize("way", ["all-to-all", "all-to-all, exact", "in chunks"])
def test_the_function_and_its_backward_run_while_rows_travel(way):
    chunks = 2 if way == "in chunks" else 1
    for forward, backward in run_ranks(2, order_of_events, WAYS[way]):
        launches, waits = ["launch all_to_all"] * chunks, ["wait all_to_all"] * chunks
        assert forward[-2 - chunks :] == [launches[0], "forward", *waits]
        assert backward[: 2 + chunks] == [*launches, "backward", waits[0]]


def test_the_function_runs_first_where_nothing_travels():
    for forward, backward in run_ranks(2, order_of_events, WAYS["shared memory"]):
        assert forward == ["forward", "launch all_gather", "launch barrier", "launch barrier"]
        assert backward == ["launch barrier", "launch barrier", "backward"]


@pytest.mark.parametrize("way", ["all-to-all", "in chunks"])
def test_a_function_may_exchange_itself(way):
    assert run_ranks(2, nested, WAYS[way]) == [True, True]


def test_only_what_is_asked_for_is_exchanged_and_a_graph_can_be_used_again():
    for logs in run_ranks(2, partial_gradients, WAYS["all-to-all"]):
        nothing, both = [], ["all_to_all", "all_to_all"]
        assert logs == [nothing, both, both, both, nothing, both]


def test_errors_beside_are_told():
    run_ranks(2, second_derivative)


def test_collectives_of_other_groups_may_run_beside():
    assert run_ranks(4, others_go_on, WAYS["all-to-all"]) == [[True] * 4] * 4


SENT = {"transport": "all_to_all"}
LAYOUTS = [
    ({"dp_shard": 2, "ep": 2}, {}),
    ({"dp_shard": 2, "ep": 2}, {**SENT, "chunks": 2}),
    ({"tp": 2, "ep": 2}, SENT),
    ({"dp_shard": 2, "etp": 2}, {}),
    ({"dp_shard": 4, "ep": 2, "etp": 2}, SENT),
    ({"dp_shard": 2}, {}),
]


@pytest.mark.parametrize(("sizes", "options"), LAYOUTS, ids=str)
def test_a_shared_expert_beside_the_combine_changes_no_bit_and_adds_no_exchange(sizes, options):
    world = sizes.get("dp_shard", 1) * sizes.get("tp", 1)
    for (plain, before, full, selective), (beside, at_first) in run_ranks(world, layer_steps, sizes, options):
        assert beside > at_first or (not options and "etp" not in sizes)
        assert sorted(plain) == sorted(before)
        if "etp" not in sizes:  # what it gathers besides tokens is gathered again
            assert sorted(plain) == sorted(selective)
        assert len(full) > len(plain) or sizes == {"dp_shard": 2}
