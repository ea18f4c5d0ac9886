"""The simulator: published formulas, schedules counted by hand, exact arithmetic, and what cannot be executed."""

import doctest
import random
import re
import sys
import time
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import pytest

from fastpar import cli
from fastpar.pipeline import (
    Action,
    Chain,
    Costs,
    Evaluator,
    Event,
    Schedule,
    ScheduleError,
    Timeline,
    activation_peaks,
    add_communication,
    make_schedule,
    measured_costs,
    schedule_names,
    simulate,
)

HALF = Fraction(1, 2)


def of_text(*ranks: str, stage_ranks: Sequence[int] | None = None) -> Schedule:
    """One chain, one line of actions per rank; stage s on rank s unless told otherwise."""
    actions = [[Action.parse(word) for word in own.split()] for own in ranks]
    microbatches = {part.microbatch for own in actions for action in own for part in action.flat()} - {None}
    return Schedule.of_one_chain("by hand", stage_ranks or range(len(ranks)), len(microbatches), actions)


def spans(schedule: Schedule, costs: Costs) -> dict[str, tuple]:
    return {str(event.action): (event.start, event.end) for event in simulate(schedule, costs).timeline.events}


# ---------------------------------------------------------------------------------------------------- by hand, formulas


def test_the_worked_example_of_the_module() -> None:
    schedule = of_text("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")
    found = simulate(schedule)
    assert (found.makespan, found.idle, found.inner_idle, found.bubble) == (9, (3, 3), 3, Fraction(1, 3))
    assert found.peak_until_input == found.peak_until_weight == (2, 1)
    assert found.messages_per_link == {(0, 1): 2, (1, 0): 2}
    text = found.timeline.to_text()
    module = sys.modules["fastpar.pipeline.simulation.simulate"].__doc__ or ""
    assert all(line in module for line in text.splitlines()), text


@pytest.mark.parametrize("module", ["schedules.costs", "simulation.evaluate"])
def test_doctests(module: str) -> None:
    done = doctest.testmod(sys.modules[f"fastpar.pipeline.{module}"])
    assert done.attempted > 0
    assert done.failed == 0


@pytest.mark.parametrize("p", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("m", [1, 5, 8, 16])
@pytest.mark.parametrize("costs", [(1, 1, 1), (10, 14, 8), (10, 8, 12), (Fraction(1, 3), HALF, 2)])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_the_bubble_of_a_flush_schedule_is_p_minus_1_passes(p: int, m: int, costs: tuple, name: str) -> None:
    """arXiv:1811.06965 and 2104.04473."""
    found = simulate(make_schedule(name, p, m), Costs(*costs))
    assert found.idle == (((p - 1) * sum(costs)),) * p
    assert found.bubble == Fraction(p - 1, m + p - 1)


def test_uneven_gpipe_waits_for_its_slowest_stage_once_per_microbatch() -> None:
    """makespan = sum F + (m-1) max F + sum(I+W) + (m-1) max(I+W): own derivation, for any costs."""
    draw = random.Random(5)
    for _ in range(200):
        p, m = draw.randint(1, 6), draw.randint(1, 9)
        forward, i, w = ([Fraction(draw.randint(0, 30), draw.randint(1, 4)) for _ in range(p)] for _ in range(3))
        both = [a + b for a, b in zip(i, w, strict=True)]
        want = sum(forward) + (m - 1) * max(forward) + sum(both) + (m - 1) * max(both)
        assert simulate(make_schedule("gpipe", p, m), Costs(forward, i, w)).makespan == want


def test_latency_costs_1f1b_two_hops_a_microbatch_and_eager_1f1b_two_hops_a_rank() -> None:
    """Figures of an independent event simulator."""
    makespans = [simulate(make_schedule("1f1b", 4, 12), Costs(hop=c)).makespan for c in (0, Fraction(1, 4), HALF, 1)]
    assert makespans == [45, Fraction(101, 2), 56, 67]
    for name, want in (("1f1b", 151), ("eager_1f1b", 124), ("gpipe", 124)):
        assert simulate(make_schedule(name, 8, 32), Costs(hop=HALF)).makespan == want


def test_a_gradient_leaves_before_w_but_after_a_whole_backward() -> None:
    split = of_text("0F0 0I0 0W0", "1F0 1I0 1W0")
    whole = of_text("0F0 0B0", "1F0 1B0")
    costs = Costs(10, 20, 6)
    assert spans(split, costs)["0I0"] == (40, 60)
    assert spans(whole, costs)["0B0"] == (46, 72)
    assert simulate(split, costs).makespan == 66


def test_ranks_compute_while_a_message_travels() -> None:
    found = spans(of_text("0F0 0F1", "1F0 1F1"), Costs(2, hop=5))
    assert found == {"0F0": (0, 2), "0F1": (2, 4), "1F0": (7, 9), "1F1": (9, 11)}


def test_messages_of_a_link_queue_for_its_bandwidth_unless_told_otherwise() -> None:
    schedule = of_text("0F0 0F1 0F2", "1F0 1F1 1F2")
    size = {"message_bytes": 30, "bandwidth": 10}
    queued = spans(schedule, Costs(1, hop=HALF, **size))
    assert [queued[f"1F{i}"][0] for i in range(3)] == [1 + 3 + HALF, 1 + 6 + HALF, 1 + 9 + HALF]
    at_once = spans(schedule, Costs(1, hop=HALF, serial=False, **size))
    assert [at_once[f"1F{i}"][0] for i in range(3)] == [4 + HALF, 5 + HALF, 6 + HALF]


def test_both_directions_of_a_link_are_apart() -> None:
    """Rank 0's second message leaves while rank 1's gradient is on its way."""
    schedule = of_text("0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2")
    found = spans(schedule, Costs(1, 1, 0, message_bytes=2, bandwidth=1))
    assert found["1B0"] == (4, 5)
    assert found["0B0"][0] == 7
    assert (found["1F1"][0], found["1F2"][0]) == (5, 7)


def test_stages_of_one_rank_exchange_no_messages() -> None:
    schedule = of_text("0F0 1F0 1B0 0B0", stage_ranks=[0, 0])
    found = simulate(schedule, Costs(hop=100, message_bytes=7, bandwidth=1))
    assert found.makespan == 6
    assert (found.num_messages, found.bytes_per_link) == (0, {})


def test_bytes_are_those_of_the_producing_part_in_both_directions() -> None:
    found = simulate(make_schedule("1f1b", 3, 4), Costs(message_bytes=[10, 20, 99]))
    assert found.bytes_per_link == {(0, 1): 40, (1, 2): 80, (2, 1): 80, (1, 0): 40}
    assert found.messages_per_link == dict.fromkeys(found.bytes_per_link, 4)


@pytest.mark.parametrize(
    ("overlap", "end"), [("sum", 1 + 1 + 3 + 4), ("max", 1 + 1 + 3 + 3), (HALF, 1 + 1 + 3 + 2), (2, 1 + 1 + 3 + 8)]
)
def test_an_overlap_costs_what_it_is_told_to(overlap: object, end: int) -> None:
    schedule = of_text("0F0 0F1 0B0 0B1", "1F0 1I0 (1F1;1W0)OVERLAP_F_B 1B1")
    costs = Costs(1, 3, 3, overlap=overlap)  # type: ignore[arg-type]
    assert spans(schedule, costs)["(1F1;1W0)OVERLAP_F_B"][1] == end


def test_an_overlap_waits_for_all_its_parts_need_and_hands_on_all_they_make() -> None:
    """Two chains: microbatch 0 goes down from rank 0, microbatch 1 up from rank 1."""
    chains = (Chain((0, 1), (0,)), Chain((2, 3), (1,)))
    actions = ("0F0 (3F1;0B0)OVERLAP_F_B 3B1", "2F1 1F0 1B0 2B1")
    schedule = Schedule(
        "both ways", (0, 1, 1, 0), chains, tuple(tuple(Action.parse(w) for w in own.split()) for own in actions)
    )
    found = spans(schedule, Costs(2, 1, 1, hop=1))
    assert found["1F0"] == (3, 5)
    assert found["1B0"] == (5, 7)
    assert found["(3F1;0B0)OVERLAP_F_B"] == (8, 12)
    assert found["3B1"] == (12, 14)
    assert found["2B1"] == (15, 17)
    # stages 1 and 3 are the same part
    uneven = spans(schedule, Costs([2, 5], 1, [1, 3]))
    assert uneven["1F0"] == (2, 7)
    assert uneven["(3F1;0B0)OVERLAP_F_B"] == (11, 18)


# ---------------------------------------------------------------------------------------------------------- activations


def test_activations_are_counted_until_i_and_until_w() -> None:
    schedule = of_text("0F0 0F1 0I0 0F2 0I1 0W0 0W1 0I2 0W2")
    found = simulate(schedule)
    assert found.peak_until_input == (2,)
    assert found.peak_until_weight == (3,)


def test_activations_are_weighed_per_part() -> None:
    schedule = of_text("0F0 1F0 0F1 1F1 1B0 0B0 1B1 0B1", stage_ranks=[0, 0])
    assert activation_peaks(schedule, Costs(activation=[100, 7])) == (214,)
    assert activation_peaks(schedule, Costs(activation=[HALF, 7]), until="weight") == (15,)
    with pytest.raises(ValueError, match='"input" or "weight", got \'I\''):
        activation_peaks(schedule, until="I")


def test_both_parts_of_an_overlap_keep_their_activations() -> None:
    assert activation_peaks(of_text("0F0 (0F1;0B0)OVERLAP_F_B 0B1")) == (2,)


@pytest.mark.parametrize(("p", "m"), [(4, 8), (4, 2), (6, 16)])
def test_peaks_of_the_flush_schedules(p: int, m: int) -> None:
    ranks = range(p)
    wanted = {
        "gpipe": [m] * p,
        "1f1b": [min(m, p - r) for r in ranks],
        "eager_1f1b": [min(m, 2 * (p - 1 - r) + 1) for r in ranks],
    }
    for name, want in wanted.items():
        assert simulate(make_schedule(name, p, m)).peak_until_input == tuple(want), name


# ------------------------------------------------------------------------------------------------------------ transfers


@pytest.mark.parametrize("name", schedule_names())
@pytest.mark.parametrize("costs", [Costs(), Costs(10, 20, 6, hop=Fraction(7, 2)), Costs(3, 1, 2, hop=1, overlap="max")])
def test_explicit_transfers_change_nothing_while_they_cost_latency_alone(name: str, costs: Costs) -> None:
    schedule = make_schedule(name, 4, 8)
    bare, explicit = simulate(schedule, costs), simulate(add_communication(schedule), costs)
    assert explicit.makespan == bare.makespan
    assert explicit.idle == bare.idle
    assert explicit.messages_per_link == bare.messages_per_link
    compute = [event for event in explicit.timeline.events if event.occupies_rank]
    assert compute == list(bare.timeline.events)


def test_a_message_leaves_when_the_rank_gets_to_the_send_and_a_receive_blocks() -> None:
    schedule = of_text("0F0 0F1 0SEND_F0 0SEND_F1", "1RECV_F0 1RECV_F1 1F0 1F1")
    found = spans(schedule, Costs(2, hop=1))
    assert found["0SEND_F0"] == found["0SEND_F1"] == (4, 5)
    assert found["1RECV_F0"] == (0, 5)
    assert found["1RECV_F1"] == (5, 5)
    assert found["1F0"] == (5, 7)
    early = of_text("0F0 0SEND_F0 0F1 0SEND_F1", "1RECV_F0 1RECV_F1 1F0 1F1")
    assert spans(early, Costs(2, hop=1))["1F0"] == (5, 7)
    in_time = of_text("0F0 0SEND_F0 0F1 0SEND_F1", "1RECV_F0 1F0 1RECV_F1 1F1")
    assert spans(in_time, Costs(2, hop=1))["1F0"] == (3, 5)


def test_skip_connections_are_waited_for() -> None:
    schedule = of_text("0F0 0SEND_F0 0STEP 0SEND_F0>2", "1RECV_F0 1F0 1SEND_F0", "2RECV_F0 2RECV_F0>0 2F0")
    found = simulate(schedule, Costs(1, step=10, message_bytes=[5, 3, 1]))
    assert found.makespan == 12
    assert found.messages_per_link == {(0, 1): 1, (1, 2): 1, (0, 2): 1}
    assert found.bytes_per_link == {(0, 1): 5, (1, 2): 3, (0, 2): 5}


def test_a_receive_after_its_consumer_is_a_deadlock_over_skip_connections_too() -> None:
    sender = "0F0 0SEND_F0 0SEND_F0>2"
    for last in ("2RECV_F0 2F0 2RECV_F0>0", "2RECV_F0>0 2F0 2RECV_F0"):
        with pytest.raises(ScheduleError, match=r"rank 2 at 2F0 waits for 2RECV_F0(>0)? of rank 2, which comes later"):
            simulate(of_text(sender, "1RECV_F0 1F0 1SEND_F0", last))


def test_explicit_sends_queue_for_their_link() -> None:
    schedule = add_communication(of_text("0F0 0F1", "1F0 1F1"))
    found = spans(schedule, Costs(1, hop=1, message_bytes=4, bandwidth=2))
    assert found["0SEND_F0"] == (1, 4)
    assert found["0SEND_F1"] == (2, 6)
    assert found["1F1"] == (6, 7)


# --------------------------------------------------------------------------------------------------------- asynchronous


def test_asynchronous_schedules_run_and_their_updates_cost_time() -> None:
    """PipeDream on two ranks: stage 0 keeps a version for each microbatch in flight."""
    schedule = of_text(
        "0STASH@0 0F0@0 0F1@0 0B0@0 0STEP 0STASH@1 0F2@1 0B1@0 0STEP 0DROP@0 0B2@1 0STEP 0DROP@1",
        "1F0 1B0 1STEP 1F1 1B1 1STEP 1F2 1B2 1STEP",
    )
    free = simulate(schedule)
    assert free.makespan == 12
    assert free.peak_until_input == (2, 1)
    costly = spans(schedule, Costs(step=[0, 1], stash=Fraction(1, 4)))
    assert costly["0STASH@0"] == (0, Fraction(1, 4))
    assert costly["1F1"] == (Fraction(21, 4), Fraction(25, 4))


# ------------------------------------------------------------------------------------------------------------ exactness


@pytest.mark.parametrize("hop", [0, 2, Fraction(2, 7)])
def test_whole_numbers_and_fractions_stay_exact(hop: int | Fraction) -> None:
    costs = Costs(Fraction(1, 3), 2, Fraction(4, 2), hop=hop, message_bytes=1, bandwidth=3)
    found = simulate(add_communication(make_schedule("1f1b", 4, 6)), costs)
    numbers = [n for event in found.timeline.events for n in (event.start, event.end)]
    numbers += [found.makespan, found.bubble, found.inner_idle, *found.idle, *found.busy, *found.peak_until_weight]
    assert {type(number) for number in numbers} <= {int, Fraction}
    assert all(busy == 6 * (Fraction(1, 3) + 4) for busy in found.busy)


def test_measured_costs_are_floats_and_close_to_the_exact_result() -> None:
    schedule = make_schedule("1f1b", 4, 8)
    exact = simulate(schedule, Costs(Fraction(1, 10), Fraction(2, 10), Fraction(1, 100), hop=Fraction(3, 100)))
    found = simulate(schedule, Costs(0.1, 0.2, 0.01, hop=0.03))
    assert isinstance(found.makespan, float)
    # a few hundred additions of numbers below 10
    assert found.makespan == pytest.approx(float(exact.makespan), abs=1e-12)


# --------------------------------------------------------------------------------------------------- what cannot be run


def test_a_deadlock_shows_the_cycle() -> None:
    with pytest.raises(ScheduleError) as caught:
        simulate(of_text("0F0 0F1 0B0 0B1", "1F0 1F1 2F0 2B0 1B0 1B1 2F1 2B1", "", stage_ranks=[0, 1, 1]))
    assert str(caught.value) == (
        "by hand deadlocks:\n  rank 1 at 1B1 waits for 2B1 of rank 1, which comes later in its own list"
    )
    with pytest.raises(ScheduleError) as caught:
        simulate(of_text("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1", "2F0 2B0 2F1 2B1"))
    assert str(caught.value) == (
        "by hand deadlocks:\n  rank 0 at 0B0 waits for 1B0 of rank 1\n  rank 1 at 1F1 waits for 0F1 of rank 0"
    )


def test_a_deadlock_of_transfers_shows_the_cycle_whether_or_not_links_are_serial() -> None:
    schedule = of_text(
        "0F0 0SEND_F0 0RECV_B0 0B0 0F1 0SEND_F1 0RECV_B1 0B1", "1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1"
    )
    for costs in (Costs(), Costs(message_bytes=1, bandwidth=1)):
        with pytest.raises(ScheduleError) as caught:
            simulate(schedule, costs)
        assert str(caught.value) == (
            "by hand deadlocks:\n"
            "  rank 0 at 0RECV_B0 waits for 1SEND_B0 of rank 1\n"
            "  rank 1 at 1RECV_F1 waits for 0SEND_F1 of rank 0"
        )


@pytest.mark.parametrize(
    ("ranks", "says"),
    [
        (("0F0 0B0", "1F0"), "rank 0: 0B0 needs 1I0, which is in the list of no rank"),
        (("0F0 0W0",), "rank 0: 0W0 needs 0I0"),
        (("0B0",), "rank 0: 0B0 needs 0F0"),
        (("0F0 0SEND_F0", "1F0"), "rank 1: 1F0 needs 1RECV_F0"),
        (("0F0", "1RECV_F0 1F0"), "rank 1: 1RECV_F0 needs 0SEND_F0>1"),
        (("0SEND_F0", "1RECV_F0 1F0"), "rank 0: 0SEND_F0 needs 0F0"),
        (("0F0 0F0 0B0",), "rank 0: 0F0 is there twice"),
        (("0F0 0B0 0I0",), "rank 0: 0I0 is there twice"),
        (("0F0 0SEND_F0 0SEND_F0>1", "1RECV_F0 1F0"), "rank 0: 0SEND_F0>1 is there twice"),
    ],
)
def test_what_nobody_makes_or_two_make_is_named(ranks: tuple[str, ...], says: str) -> None:
    with pytest.raises(ScheduleError, match=says):
        simulate(of_text(*ranks))


@pytest.mark.parametrize(
    ("fields", "error", "says"),
    [
        ({"forward": -1}, ValueError, "forward must be finite and not negative, got -1"),
        ({"hop": float("nan")}, ValueError, "hop must be finite"),
        ({"backward_weight": [1, float("inf")]}, ValueError, "backward_weight must be finite"),
        ({"forward": "fast"}, ValueError, "forward must be a number, got 'fast'"),
        ({"overlap": "min"}, ValueError, 'overlap must be a number, "sum" or "max", got \'min\''),
        ({"hop": [1, 2]}, TypeError, "hop is one number"),
        ({"step": None}, TypeError, "step must be a number or one per part, got None"),
        ({"forward": True}, TypeError, "got True"),
        ({"bandwidth": 0}, ValueError, "bandwidth must be positive"),
    ],
)
def test_costs_that_are_none_are_refused(fields: dict, error: type, says: str) -> None:
    with pytest.raises(error, match=says):
        Costs(**fields)


def test_costs_per_part_must_fit_the_schedule() -> None:
    with pytest.raises(ValueError, match="backward_input has 3 numbers, but 1f1b cuts the model into 4 parts"):
        simulate(make_schedule("1f1b", 4, 4), Costs(backward_input=[1, 2, 3]))


# -------------------------------------------------------------------------------------------------------- the fast twin


def random_schedule(draw: random.Random) -> Schedule:
    """Any order of a random schedule's actions on random ranks; now and then one that deadlocks."""
    p, v, m = draw.randint(1, 4), draw.randint(1, 3), draw.randint(1, 5)
    stage_ranks = [draw.randrange(p) for _ in range(p * v)]
    left = [["F", "B"] if draw.random() < 0.5 else ["F", "I", "W"] for _ in range(m * p * v)]
    todo = [(index // m, index % m, kinds) for index, kinds in enumerate(left)]
    actions: list[list[Action]] = [[] for _ in range(p)]
    done: set[tuple[str, int, int]] = set()
    last = p * v - 1
    while todo:
        stage, microbatch, kinds = item = draw.choice(todo)
        kind = kinds[0]
        needs = {
            "F": [("F", stage - 1)] if stage else [],
            "B": [("G", stage + 1)] if stage < last else [],
            "I": [("G", stage + 1)] if stage < last else [],
            "W": [],
        }[kind]
        if all((what, at, microbatch) in done for what, at in needs):
            actions[stage_ranks[stage]].append(Action.parse(f"{stage}{kind}{microbatch}"))
            done.add(("F" if kind == "F" else "G" if kind in "BI" else "W", stage, microbatch))
            kinds.pop(0)
            if not kinds:
                todo.remove(item)
    if draw.random() < 0.2:
        draw.shuffle(draw.choice(actions))
    return Schedule.of_one_chain("random", stage_ranks, m, actions)


@pytest.mark.expensive
def test_the_evaluator_agrees_with_the_simulator_on_random_schedules() -> None:
    draw = random.Random(11)
    deadlocks = 0
    for _ in range(400):
        schedule = random_schedule(draw)
        n = schedule.num_parts
        numbers = [draw.choice([1, 2, Fraction(1, 3), Fraction(7, 4)]) for _ in range(5 * n)]
        costs = Costs(*(numbers[i * n : (i + 1) * n] for i in range(3)), hop=draw.choice([0, 1, HALF]), serial=False,
                      message_bytes=numbers[3 * n : 4 * n], bandwidth=5, activation=numbers[4 * n :])  # fmt: skip
        evaluator = Evaluator(schedule, costs)
        orders = evaluator.encode(schedule)
        assert evaluator.decode(orders, "random") == schedule
        assert evaluator.peaks_until_input(orders) == list(activation_peaks(schedule, costs))
        assert evaluator.peaks_until_weight(orders) == list(activation_peaks(schedule, costs, until="weight"))
        try:
            want = simulate(schedule, costs).makespan
        except ScheduleError:
            want = None
            deadlocks += 1
        assert evaluator.makespan(orders) == want
    assert 20 < deadlocks < 200


def test_the_evaluator_refuses_what_it_does_not_model() -> None:
    schedule = make_schedule("1f1b", 2, 2)
    with pytest.raises(ValueError, match="queue for a link"):
        Evaluator(schedule, Costs(message_bytes=1, bandwidth=1))
    with pytest.raises(ScheduleError, match="only F, I, W and B have a code, got 0SEND_F0"):
        Evaluator(schedule).encode(add_communication(schedule))


def test_the_evaluator_takes_milliseconds() -> None:
    """1 ms for 4096 actions on the development machine; the bound allows for a slow and busy one."""
    schedule = make_schedule("interleaved_1f1b", 8, 64, stages_per_rank=4)
    evaluator = Evaluator(schedule, Costs(10, 20, 6, hop=5))
    orders = evaluator.encode(schedule)
    times = []
    for _ in range(10):
        start = time.perf_counter()
        evaluator.makespan(orders)
        evaluator.peaks_until_weight(orders)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.02


# ------------------------------------------------------------------------------------------------------- measured costs


def test_costs_read_from_a_run_predict_it() -> None:
    schedule = make_schedule("zb_h1", 3, 6)
    costs = Costs([1.0, 2.0, 3.0], [2.0, 4.0, 6.0], [1.0, 1.0, 1.5], hop=0.25)
    run = simulate(schedule, costs)
    found = measured_costs(schedule, run.timeline, hop=0.25)
    # differences of sums below 100
    for name in ("forward", "backward_input", "backward_weight"):
        assert getattr(found, name) == pytest.approx(getattr(costs, name), abs=1e-12)
    assert simulate(schedule, found).makespan == pytest.approx(run.makespan, abs=1e-10)


def test_the_median_of_a_part_counts_and_a_part_without_record_is_named() -> None:
    schedule = of_text("0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2")
    times = {"0F0": 9, "0F1": 1, "0F2": 2, "0B0": 4, "0B1": 4, "0B2": 4, "1F0": 3, "1B0": 5}
    events = [Event(int(word[0]), Action.parse(word), 0, time) for word, time in times.items()]
    found = measured_costs(schedule, Timeline(tuple(events)), step=7)
    assert (found.forward, found.backward_input, found.backward_weight, found.step) == ((2, 3), (4, 5), 0, 7)
    with pytest.raises(ValueError, match="no F of part 1 was recorded"):
        measured_costs(schedule, Timeline(tuple(events[:6])))


# ------------------------------------------------------------------------------------------------------------- the docs


def test_the_examples_of_the_documentation_are_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__).parents[2] / "docs" / "pipeline.md"
    done = doctest.testfile(str(page), module_relative=False)
    assert done.attempted > 5
    assert done.failed == 0
    ((command, output),) = re.findall(r"```\n\$ fastpar (simulate .*)\n((?:.*\n)*?)```", page.read_text())
    assert cli.main(command.split()) == 0
    assert capsys.readouterr().out == output
