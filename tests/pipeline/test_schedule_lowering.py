"""What follows from the compute actions: transfers, gathers, sums of gradients, whole and split backwards."""

import random
from collections import Counter

import pytest

from fastpar.pipeline import (
    Action,
    ActionType,
    Schedule,
    ScheduleError,
    add_communication,
    add_reduce_grad,
    add_unshard,
    dualpipe,
    dualpipev,
    gpipe,
    interleaved_1f1b,
    looped_bfs,
    make_schedule,
    merge_backward,
    naive,
    one_f_one_b,
    pipedream,
    simulate,
    split_backward,
    validate,
    zb_h1,
    zb_h2,
    zbv,
)


def of_text(*ranks: str, stage_ranks: list[int] | None = None, num_microbatches: int = 2) -> Schedule:
    actions = [[Action.parse(word) for word in own.split()] for own in ranks]
    return Schedule.of_one_chain("by hand", stage_ranks or range(len(ranks)), num_microbatches, actions)


def text(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, own)) for own in schedule.actions]


# ------------------------------------------------------------------------------------------- whole and split backwards


def test_merge_joins_only_an_i_and_its_own_w_side_by_side() -> None:
    schedule = of_text("0F0 0I0 0W0 0F1 0I1 0F2 0W1 0I2 0I3 0W2 0W3")
    assert text(merge_backward(schedule)) == ["0F0 0B0 0F1 0I1 0F2 0W1 0I2 0I3 0W2 0W3"]
    other_stage = of_text("0I0 1W0 1I0 0W0", stage_ranks=[0, 0])
    assert merge_backward(other_stage) == other_stage


def test_split_and_merge_are_inverse_and_keep_versions_and_overlaps() -> None:
    assert text(split_backward(of_text("0F0 0B0 0F1 0B1"))) == ["0F0 0I0 0W0 0F1 0I1 0W1"]
    asynchronous = pipedream(3, 5)
    assert merge_backward(split_backward(asynchronous)) == asynchronous
    assert "1I0@0 1W0@0" in text(split_backward(asynchronous))[1]
    paired = of_text("(0F1;0B0)OVERLAP_F_B 0B1")
    assert text(split_backward(paired)) == ["(0F1;0B0)OVERLAP_F_B 0I1 0W1"]


def test_a_split_1f1b_idles_less_and_a_merged_zb_h1_is_1f1b_again_on_rank_0() -> None:
    assert simulate(split_backward(one_f_one_b(4, 8))).makespan < simulate(one_f_one_b(4, 8)).makespan
    assert merge_backward(zb_h1(4, 8)).actions[0] == one_f_one_b(4, 8).actions[0]


# ----------------------------------------------------------------------------------------------------------- transfers


def test_transfers_stand_next_to_what_makes_and_needs_them() -> None:
    found = add_communication(of_text("0F0 0F1 0I0 0W0 0B1", "1F0 1I0 1F1 1B1 1W0"))
    assert text(found) == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0I0 0W0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1I0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1W0",
    ]


def test_neighbours_on_one_rank_exchange_nothing() -> None:
    found = add_communication(of_text("0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0", stage_ranks=[0, 1, 1, 0]))
    assert text(found) == [
        "0F0 0SEND_F0 3RECV_F0 3F0 3B0 3SEND_B0 0RECV_B0 0B0",
        "1RECV_F0 1F0 2F0 2SEND_F0 2RECV_B0 2B0 1B0 1SEND_B0",
    ]


def test_a_pair_receives_before_it_and_sends_after_it() -> None:
    found = add_communication(of_text("0F0 0F1 0B0 0B1", "1F0 (1F1;1B0)OVERLAP_F_B 1B1", "2F0 2B0 2F1 2B1"))
    assert text(found)[1] == (
        "1RECV_F0 1F0 1SEND_F0 1RECV_F1 1RECV_B0 (1F1;1B0)OVERLAP_F_B 1SEND_F1 1SEND_B0 1RECV_B1 1B1 1SEND_B1"
    )


def test_skip_connections_name_the_other_stage_and_carry_gradients_back() -> None:
    found = add_communication(naive(3, 1), [(0, 2)])
    assert text(found) == [
        "0F0 0SEND_F0 0SEND_F0>2 0RECV_B0 0RECV_B0>2 0B0",
        "1RECV_F0 1F0 1SEND_F0 1RECV_B0 1B0 1SEND_B0",
        "2RECV_F0 2RECV_F0>0 2F0 2B0 2SEND_B0 2SEND_B0>0",
    ]
    # Stages 0 and 3 of a V are on one rank; 1 and 3 are not.
    skipped = add_communication(zbv(2, 3), [(0, 3), (1, 3)])
    peers = {(action.stage, action.peer) for own in skipped.actions for action in own if action.peer is not None}
    assert peers == {(1, 3), (3, 1)}


@pytest.mark.parametrize("edge", [(0, 1), (2, 1), (1, 1), (0, 4), (-1, 2)])
def test_edges_that_skip_nothing_are_refused(edge: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="neighbours" if edge == (0, 1) else "to a later one of 0 to 3"):
        add_communication(gpipe(4, 2), [edge])


def test_each_stream_of_dualpipe_has_its_own_transfers() -> None:
    schedule = dualpipe(4, 8)
    lowered = add_communication(schedule, [(0, 2)])
    for own in lowered.actions:
        for action in own:
            if action.type.is_transfer:
                peer = lowered.peer_of(action)
                assert lowered.chain_of_stage(peer) == lowered.chain_of(action.microbatch)
                assert lowered.stage_ranks[peer] != lowered.stage_ranks[action.stage]
    assert ("4", "6") in {(str(a.stage), str(a.peer)) for own in lowered.actions for a in own}
    assert simulate(lowered).makespan == simulate(schedule).makespan


@pytest.mark.parametrize(
    "schedule",
    [gpipe(3, 4), zb_h2(4, 7), interleaved_1f1b(3, 7, stages_per_rank=3), zbv(3, 5), dualpipev(3, 6), pipedream(3, 4)],
    ids=lambda schedule: schedule.name,
)
@pytest.mark.parametrize("skips", [0, 3])
def test_every_send_has_one_receive_on_the_other_rank(schedule: Schedule, skips: int) -> None:
    draw = random.Random(3)
    pairs = [(i, j) for j in range(schedule.num_parts) for i in range(j - 1)]
    edges = draw.sample(pairs, min(skips, len(pairs)))
    lowered = add_communication(schedule, edges)
    sent: Counter = Counter()
    for rank, own in enumerate(lowered.actions):
        for action in own:
            if not action.type.is_transfer:
                continue
            assert lowered.stage_ranks[action.stage] == rank
            ends = (action.stage, lowered.peer_of(action))
            is_send = action.type in (ActionType.SEND_F, ActionType.SEND_B)
            down = action.type in (ActionType.SEND_F, ActionType.RECV_F)
            sent[(down, action.microbatch, *(ends if is_send else ends[::-1]))] += 1 if is_send else -1
    assert set(sent.values()) == {0}
    hops = [
        (i, j)
        for i, j in [*((i, i + 1) for i in range(schedule.num_parts - 1)), *edges]
        if schedule.stage_ranks[i] != schedule.stage_ranks[j]
    ]
    assert len(sent) == 2 * len(hops) * schedule.num_microbatches
    simulate(lowered)


# ------------------------------------------------------------------------------------------------- sharded parameters


def test_stages_are_gathered_one_ahead_and_freed_behind() -> None:
    schedule = of_text("0F0 0F1 1F0 1F1 2F0 2F1 2B0 2B1 1B0 1B1 0B0 0B1", stage_ranks=[0, 0, 0])
    assert text(add_unshard(schedule)) == [
        "0UNSHARD 1UNSHARD 0F0 0F1 0RESHARD 2UNSHARD 1F0 1F1 2F0 2F1 2B0 2B1 2RESHARD 0UNSHARD 1B0 1B1 1RESHARD "
        "0B0 0B1 0RESHARD"
    ]
    assert text(add_unshard(schedule, lookahead=0)) == [
        "0UNSHARD 0F0 0F1 0RESHARD 1UNSHARD 1F0 1F1 1RESHARD 2UNSHARD 2F0 2F1 2B0 2B1 2RESHARD 1UNSHARD 1B0 1B1 "
        "1RESHARD 0UNSHARD 0B0 0B1 0RESHARD"
    ]


def test_breadth_first_gathers_each_stage_at_most_twice_and_one_stage_per_rank_once() -> None:
    for lookahead in (0, 1):
        for own in add_unshard(looped_bfs(3, 6, stages_per_rank=4), lookahead=lookahead).actions:
            gathers = Counter(action.stage for action in own if action.type is ActionType.UNSHARD)
            # The last is used without a pause; so is, gathered ahead, the one before it.
            assert sorted(gathers.values()) == ([1, 2, 2, 2] if lookahead == 0 else [1, 1, 2, 2])
    for own in add_unshard(one_f_one_b(3, 6)).actions:
        assert (own[0].type, own[-1].type) == (ActionType.UNSHARD, ActionType.RESHARD)
        assert len([action for action in own if action.type is ActionType.UNSHARD]) == 1


@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_no_rank_computes_without_or_holds_more_parameters_than_asked(lookahead: int) -> None:
    for schedule in (interleaved_1f1b(2, 6, stages_per_rank=4), looped_bfs(2, 4, stages_per_rank=4), dualpipev(3, 7)):
        for own in add_unshard(schedule, lookahead=lookahead).actions:
            held: set[int] = set()
            for action in own:
                if action.type is ActionType.UNSHARD:
                    assert action.stage not in held
                    held.add(action.stage)
                elif action.type is ActionType.RESHARD:
                    held.remove(action.stage)
                else:
                    used = {part.stage for part in action.flat()}
                    assert used <= held
                    assert len(held) <= len(used) + lookahead
            assert not held


# --------------------------------------------------------------------------------------------------- sums of gradients


def test_data_parallel_gradients_are_summed_when_their_stage_is_done() -> None:
    schedule = of_text("0F0 1F0 1I0 0I0 1W0 0W0", stage_ranks=[0, 0], num_microbatches=1)
    assert text(add_reduce_grad(schedule, data_parallel=True)) == ["0F0 1F0 1I0 0I0 1W0 1REDUCE_GRAD 0W0 0REDUCE_GRAD"]
    assert add_reduce_grad(schedule) == schedule


def test_asynchronous_gradients_are_summed_before_each_step() -> None:
    found = text(add_reduce_grad(pipedream(2, 2), data_parallel=True))
    assert found[1] == "1F0@0 1B0@0 1REDUCE_GRAD 1STEP 1F1@1 1B1@1 1REDUCE_GRAD 1STEP"


@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("data_parallel", [False, True])
def test_replicas_are_summed_in_one_order_on_both_ranks(p: int, data_parallel: bool) -> None:
    """If each rank began with the stage that it finishes first, mirrored ranks would wait for each other."""
    schedule = add_reduce_grad(dualpipe(p, 2 * p), data_parallel=data_parallel)
    order = []
    for own in schedule.actions:
        assert [action.type for action in own[-2:]] == [ActionType.REDUCE_GRAD] * 2
        order.append([schedule.part_of(action.stage) for action in own[-2:]])
    for rank in range(p):
        assert order[rank] == order[p - 1 - rank] == sorted(order[rank])


# ------------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("lower", "says"),
    [
        (lambda s: add_communication(add_communication(s)), "add_communication: 0SEND_F0 is already there, on rank 0"),
        (lambda s: merge_backward(add_communication(s)), "merge_backward: 0SEND_F0"),
        (lambda s: split_backward(add_communication(s)), "split_backward: 0SEND_F0"),
        (lambda s: add_unshard(add_unshard(s)), "add_unshard: 0UNSHARD is already there, on rank 0 at position 0"),
        (lambda s: add_reduce_grad(add_reduce_grad(s, data_parallel=True)), "add_reduce_grad: 0REDUCE_GRAD"),
    ],
)
def test_passes_that_were_done_before_are_refused(lower, says: str) -> None:
    with pytest.raises(ScheduleError, match=says):
        lower(one_f_one_b(2, 2))


def test_a_negative_lookahead_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 0, got -1"):
        add_unshard(gpipe(2, 2), lookahead=-1)


def test_all_passes_together() -> None:
    schedule = add_communication(add_reduce_grad(add_unshard(merge_backward(zbv(2, 3))), data_parallel=True))
    assert simulate(schedule).makespan >= simulate(zbv(2, 3)).makespan
    assert Schedule.from_csv(schedule.to_csv(), name="zbv").actions == schedule.actions


@pytest.mark.parametrize("name", ["pipedream", "pipedream_2bw"])
def test_parameters_are_gathered_again_after_an_update(name: str) -> None:
    schedule = add_unshard(make_schedule(name, 3, 6))
    assert validate(schedule) == []
    for own in schedule.actions:
        for action in (a for a in own if a.type is ActionType.STEP):
            before = [a.type for a in own[: own.index(action)] if a.stage == action.stage]
            gathers = [t for t in before if t in (ActionType.UNSHARD, ActionType.RESHARD)]
            assert gathers[-1] is ActionType.RESHARD
