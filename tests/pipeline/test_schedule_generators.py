"""Schedules from their rules: published formulas, exactly, over p ranks, m microbatches and v stages per rank.

F, B, W are the times of forward, input gradient and weight gradient per rank and microbatch; a stage takes 1/v of them.
"""

import ast
import inspect
import random
import re
from collections.abc import Iterator
from fractions import Fraction
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from fastpar.pipeline import (
    Action,
    ActionType,
    Costs,
    Schedule,
    Simulation,
    activation_peaks,
    add_communication,
    dualpipe,
    dualpipev,
    eager_1f1b,
    gpipe,
    interleaved_1f1b,
    looped_bfs,
    make_schedule,
    naive,
    one_f_one_b,
    pipedream,
    pipedream_2bw,
    schedule_names,
    simulate,
    v_half,
    v_min,
    zb_h1,
    zb_h2,
    zbv,
)
from fastpar.pipeline.schedules import asynchronous, bidirectional, flush, v_shape, zero_bubble

# The largest in `make test-all` only: a formula that holds for 2, 3, 4 and 6 ranks does not fail for 8.
RANKS = (2, 3, 4, 6, pytest.param(8, marks=pytest.mark.slow))
EQUAL = (1, 1, 1)
COSTS = (EQUAL, (10, 14, 8), (10, 20, 6), (10, 8, 12), (Fraction(1, 3), Fraction(1, 2), 2))
SHORT_WEIGHTS = tuple((f, b, w) for f, b, w in COSTS if w <= min(f, b))
LOOPED = (interleaved_1f1b, looped_bfs)


def run(schedule: Schedule, costs: tuple = EQUAL, **others) -> Simulation:
    """Simulate with costs per rank and microbatch."""
    per_rank = len(schedule.stages_of(0)) // len(schedule.chains)
    return simulate(schedule, Costs(*(Fraction(cost) / per_rank for cost in costs), **others))


def microbatches(p: int) -> list[int]:
    return sorted({1, p - 1, p, p + 1, 2 * p - 1, 3 * p})


def from_p(p: int) -> list[int]:
    return [m for m in microbatches(p) if m >= p]


# ------------------------------------------------------------------------------------------------------- the idle time


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize("costs", COSTS)
def test_flush_schedules_idle_p_minus_1_passes(p: int, costs: tuple) -> None:
    """GPipe (1811.06965), 1F1B (2104.04473), and its eager variant, for any costs and any m; naive: for every one."""
    for m in microbatches(p):
        for make in (gpipe, one_f_one_b, eager_1f1b):
            assert run(make(p, m), costs).idle == ((p - 1) * sum(costs),) * p
        assert run(gpipe(p, m)).bubble == Fraction(p - 1, m + p - 1)
        assert run(naive(p, m), costs).idle == ((p - 1) * m * sum(costs),) * p


def test_gpipe_of_unequal_stages_waits_for_the_slowest_and_1f1b_takes_no_less_than_its_bound() -> None:
    draw = random.Random(0)
    for _ in range(200):
        p, m = draw.randint(1, 6), draw.randint(1, 9)
        forward, both = ([Fraction(draw.randint(1, 30)) for _ in range(p)] for _ in range(2))
        costs = Costs(forward, both, 0)
        want = sum(forward) + (m - 1) * max(forward) + sum(both) + (m - 1) * max(both)
        assert simulate(gpipe(p, m), costs).makespan == want
        stages = [f + b for f, b in zip(forward, both, strict=True)]
        bound = max(sum(stages[:rank]) + m * stages[rank] for rank in range(p))
        assert simulate(one_f_one_b(p, m), costs).makespan >= bound


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize("v", [2, 3, 4])
def test_looped_schedules_idle_v_times_less(p: int, v: int) -> None:
    """Interleaved 1F1B (2104.04473) and breadth-first (2211.05953), for any costs; the paper has multiples of p only.

    Fewer than p microbatches leave p-m ranks waiting each time that the model winds around: own derivation.
    """
    for m in microbatches(p):
        for make in LOOPED:
            for costs in COSTS[-2:]:
                want = Fraction(p - 1 + (v - 1) * max(0, p - m)) * sum(costs) / v
                assert run(make(p, m, stages_per_rank=v), costs).idle == (want,) * p


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize("v", [1, 2, 3])
def test_zb_h1_idles_f_plus_b_minus_w_per_rank_while_w_is_short(p: int, v: int) -> None:
    """2401.10241, W <= F and W <= B; v = 2 is torch's ZB1P."""
    for m in from_p(p):
        for f, b, w in SHORT_WEIGHTS:
            assert run(zb_h1(p, m, stages_per_rank=v), (f, b, w)).idle == (Fraction((p - 1) * (f + b - w)) / v,) * p
    assert run(zb_h1(p, p)).idle[0] * 3 == run(one_f_one_b(p, p)).idle[0]


@pytest.mark.parametrize("p", RANKS)
def test_zb_h1_of_fewer_than_p_microbatches_lacks_their_w(p: int) -> None:
    """The published formula supposes p microbatches: the last m-1 W's fill the drain, where p-1 would be needed."""
    for m in range(1, p):
        for f, b, w in SHORT_WEIGHTS:
            assert run(zb_h1(p, m), (f, b, w)).idle == ((p - 1) * (f + b) - (m - 1) * w,) * p


def test_zb_h1_formula_is_only_a_bound_where_w_is_long() -> None:
    draw = random.Random(1)
    for _ in range(100):
        p, m = draw.choice((2, 3, 4, 6, 8)), draw.randint(8, 20)
        f, b, w = (draw.randint(1, 30) for _ in range(3))
        assert max(run(zb_h1(p, m), (f, b, w)).idle) >= (p - 1) * (f + b - w)
    assert run(zb_h1(4, 8), (10, 8, 12)).idle == (30,) * 4  # the formula says 18
    assert run(zb_h1(4, 8, stages_per_rank=2), (10, 8, 12)).idle == (15,) * 4  # 9


@pytest.mark.parametrize("p", RANKS)
def test_zb_h2_has_no_inner_bubble(p: int) -> None:
    """2401.10241, from 2p-1 microbatches on and W <= F; inner 0 and (p-1)F in all at F = B = W."""
    for m in (2 * p - 1, 2 * p, 3 * p + 2):
        assert run(zb_h2(p, m)).inner_idle == 0
        assert run(zb_h2(p, m)).idle == (p - 1,) * p
        for f, b, w in SHORT_WEIGHTS:
            assert run(zb_h2(p, m), (f, b, w)).inner_idle == max(0, (p - 1) * (f + b - 2 * w))


def test_zb_h2_formula_is_only_a_bound_where_w_exceeds_f() -> None:
    """At 1 : 3/2 : 19 the formula says 0, but each of the first W's delays the forwards behind it."""
    assert run(zb_h2(3, 7), (1, Fraction(3, 2), 19)).inner_idle == 1


@pytest.mark.parametrize("p", RANKS)
def test_each_extra_microbatch_of_memory_takes_one_f_off_zb_h1(p: int) -> None:
    for extra in range(p):
        for m in (2, p + 1, 2 * p):
            schedule = zb_h2(p, m, extra=extra)
            used = min(extra, max(0, m - p))
            found = run(schedule)
            assert found.idle == run(zb_h1(p, m)).idle
            assert set(found.peak_until_weight) == {min(m, p + used)}
            if m >= p:
                assert found.inner_idle == p - 1 - used
    assert zb_h2(p, 2 * p, extra=0).actions == zb_h1(p, 2 * p).actions


@pytest.mark.parametrize("p", RANKS)
def test_zbv_has_no_inner_bubble(p: int) -> None:
    """2401.10241: inner 0 from 2p-1 microbatches on; in all (p-1)F/2, that from p on."""
    for m in from_p(p):
        assert run(zbv(p, m)).idle == (Fraction(p - 1, 2),) * p
    for m in (2 * p - 1, 2 * p, 3 * p + 2):
        assert run(zbv(p, m)).inner_idle == 0


def test_zbv_at_unequal_costs() -> None:
    """The fixed order is not the best one then: 39 can be had, and ZB1P with v = 2 has 36 (p = 4, m = 8)."""
    assert run(zbv(4, 8), (10, 20, 6)).idle == (42,) * 4
    assert run(zb_h1(4, 8, stages_per_rank=2), (10, 20, 6)).idle == (36,) * 4


@pytest.mark.parametrize("p", [*RANKS, 5, pytest.param(12, marks=pytest.mark.slow)])
def test_v_half_and_v_min_idle_within_half_and_two_thirds_of_1f1b(p: int) -> None:
    """2405.15362: B/2 and 2B/3 where 1F1B has B = 3(p-1)."""
    for m in (p, 2 * p + 1):
        half, least = run(v_half(p, m)).idle, run(v_min(p, m)).idle
        assert len(set(half)) == len(set(least)) == 1
        assert half[0] <= Fraction(3, 2) * (p - 1)
        if p % 2 and m > p:
            assert half[0] == Fraction(3, 2) * (p - 2)
        assert least[0] == 2 * (p - 1) - (Fraction(1, 2) if p % 3 else Fraction(3, 2))


def test_v_half_and_v_min_idle_as_little_as_their_authors_schedules() -> None:
    """Figures of the schedules that the authors' implementation finds."""
    assert run(v_half(4, 8)).idle[0] == Fraction(5, 2)
    assert run(v_half(8, 24)).idle[0] == Fraction(17, 2)
    assert run(v_min(4, 8)).idle[0] == Fraction(11, 2)
    assert run(v_min(8, 24)).idle[0] == Fraction(27, 2)


@pytest.mark.parametrize("p", RANKS)
def test_dualpipev_bubble(p: int) -> None:
    """DeepSeek's formula (p-1)(F&B + B - 3W), B whole and all times those of a stage, at F = B = W."""
    f = b = w = Fraction(1, 2)
    for m in (2 * p, 2 * p + 1, 3 * p + 2):
        in_sequence = run(dualpipev(p, m), overlap="sum")
        assert in_sequence.idle == ((p - 1) * ((f + b + w) + (b + w) - 3 * w),) * p
        overlapped = run(dualpipev(p, m), overlap="max")
        assert max(overlapped.idle) == (p - 1) * (max(f, b + w) + (b + w) - 3 * w)
        # A forward that is written before its backward hands its output on earlier.
        assert run(dualpipev(p, m, overlap=False)).idle == (Fraction(p - 1, 2),) * p


def test_dualpipev_formula_does_not_hold_at_unequal_costs() -> None:
    """p = 4, pairs in sequence: (cost, idle, formula), as another simulator found them."""
    for costs, idle, formula in (((10, 14, 8), 40, 45), ((10, 20, 6), 61, 66), ((10, 8, 12), 30, 21)):
        f, b, w = (Fraction(cost, 2) for cost in costs)
        assert 3 * ((f + b + w) + (b + w) - 3 * w) == formula
        assert run(dualpipev(4, 8), costs).idle == (idle,) * 4


@pytest.mark.parametrize("p", [2, 4, 6, 8])
def test_dualpipe_is_dualpipev_on_half_the_ranks(p: int) -> None:
    for m in (2 * p, 2 * p + 2, 4 * p):
        for overlap in ("sum", "max"):
            both, folded = (
                simulate(schedule, Costs(1, 1, 1, overlap=overlap))
                for schedule in (dualpipe(p, m), dualpipev(p // 2, m // 2))
            )
            assert both.idle == (*folded.idle, *reversed(folded.idle))
        assert set(simulate(dualpipe(p, m)).idle) == {(p // 2 - 1) * (3 + 2 - 3)}


# ---------------------------------------------------------------------------------------------------------- hop latency


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize("hop", [Fraction(1, 4), Fraction(1, 2), 1])
def test_hop_latency_is_hidden_by_gpipe_and_eager_1f1b_and_paid_by_1f1b(p: int, hop: Fraction) -> None:
    """2c(p-1), as long as 2c <= F+B+W for eager 1F1B; for 1F1B nearly 2c per microbatch, own derivation.

    "2c(m-1)" for 1F1B is only right where ceil((m-1)/p) = p-1, as it is at p = 4 and m = 12.
    """
    for m in microbatches(p):
        flat = 3 * (m + p - 1)
        for make in (gpipe, eager_1f1b):
            assert run(make(p, m), hop=hop).makespan == flat + 2 * hop * (p - 1)
        round_trips = p - 1 + (m - 1) - -(-(m - 1) // p)
        assert run(one_f_one_b(p, m), hop=hop).makespan == flat + 2 * hop * round_trips
    assert run(one_f_one_b(4, 12), hop=hop).makespan == 45 + 2 * hop * 11
    assert run(one_f_one_b(8, 32), hop=Fraction(1, 2)).makespan == 151
    assert run(eager_1f1b(8, 32), hop=Fraction(1, 2)).makespan == 124


# ----------------------------------------------------------------------------------------------- activations in flight


@pytest.mark.parametrize("p", RANKS)
def test_stage_inputs_in_flight_of_flush_schedules(p: int) -> None:
    for m in microbatches(p):
        ranks = range(p)
        assert peaks(naive(p, m)) == [1] * p
        assert peaks(gpipe(p, m)) == [m] * p
        assert peaks(one_f_one_b(p, m)) == [min(m, p - r) for r in ranks]
        assert peaks(eager_1f1b(p, m)) == [min(m, 2 * (p - 1 - r) + 1) for r in ranks]
        for v in (2, 3, 4):
            assert peaks(looped_bfs(p, m, stages_per_rank=v)) == [m * v] * p
            round_size = p if m % p == 0 else -(-m // max(1, m // p))
            want = [min(m * v, (v - 1) * round_size + 2 * (p - 1 - r) + 1) for r in ranks]
            assert peaks(interleaved_1f1b(p, m, stages_per_rank=v)) == want
    for v in (2, 3, 4):
        assert Fraction(peaks(interleaved_1f1b(p, 3 * p, stages_per_rank=v))[0], v * p) == 1 + Fraction(p - 1, p * v)


@pytest.mark.parametrize("p", RANKS)
def test_stage_inputs_in_flight_of_split_schedules(p: int) -> None:
    for m in microbatches(p):
        assert peaks(zb_h1(p, m)) == [min(m, p - r) for r in range(p)]
        assert peaks(zb_h1(p, m), until="weight") == [min(m, p)] * p
        if m >= 2 * p - 1:
            assert peaks(zb_h2(p, m)) == [2 * (p - r) - 1 for r in range(p)]
            assert peaks(zb_h2(p, m), until="weight") == [2 * p - 1] * p
            assert peaks(zbv(p, m)) == peaks(zbv(p, m), until="weight") == [2 * p] * p
        if m >= 2 * p:
            assert peaks(dualpipev(p, m)) == peaks(dualpipev(p, m), until="weight") == [2 * p + 1] * p
        if m >= 2 * p and m % 2 == p % 2 == 0:
            assert peaks(dualpipe(p, m)) == peaks(dualpipe(p, m), until="weight") == [p + 1] * p


@pytest.mark.parametrize("p", [1, *RANKS, 5, 7, 12])
def test_stage_inputs_in_flight_of_v_half_and_v_min(p: int) -> None:
    """Until W, at most p+2 = 2(p/2+1) and 2(ceil(p/3)+1): 6 and 4 at p = 4, 10 and 8 at p = 8."""
    for m in microbatches(p) if p > 1 else (1, 5):
        assert max(peaks(v_half(p, m), until="weight")) <= p + 2
        assert max(peaks(v_min(p, m), until="weight")) <= 2 * ((p + 1) // 3 + 1) <= 2 * (-(-p // 3) + 1)
    reached = {p: (6, 4), 8: (10, 8)}.get(p) if p in (4, 8) else None
    if reached:
        found = [max(peaks(make(p, 3 * p), until="weight")) for make in (v_half, v_min)]
        assert found == list(reached)


def peaks(schedule: Schedule, until: str = "input") -> list[int]:
    return list(activation_peaks(schedule, Costs(), until=until))


# -------------------------------------------------------------------------------------------------------- asynchronous


def versions_alive(schedule: Schedule, rank: int) -> tuple[dict[str, int], int]:
    """Interpret the list of a rank: the version of each F and B, and the most versions alive at once.

    Fails where a version is used that is neither current nor kept, or kept versions are left over.
    """
    current, most, kept, used = 0, 1, set(), {}
    for action in schedule.actions[rank]:
        if action.type is ActionType.STEP:
            current += 1
        elif action.type is ActionType.STASH:
            assert action.version == current
            kept.add(action.version)
        elif action.type is ActionType.DROP:
            kept.remove(action.version)
        else:
            assert action.version == current or action.version in kept
            used[f"{action.type.value}{action.microbatch}"] = action.version
        most = max(most, len(kept | {current}))
    assert not kept
    return used, most


@pytest.mark.parametrize("p", [1, *RANKS])
@pytest.mark.parametrize("vertical_sync", [False, True])
def test_pipedream_uses_the_weights_of_its_recurrence(p: int, vertical_sync: bool) -> None:
    """SOSP 2019: microbatch t sees version t-(p-1-k) at stage k, or t-(p-1) everywhere; n-k versions, or n."""
    for m in (1, 2, p, 2 * p, 3 * p + 1):
        schedule = pipedream(p, m, vertical_sync=vertical_sync)
        for stage in range(p):
            used, most = versions_alive(schedule, stage)
            delay = p - 1 if vertical_sync else p - 1 - stage
            want = {f"{word}{t}": max(0, t - delay) for t in range(m) for word in "FB"}
            assert used == want
            assert most <= delay + 1
            if m >= 2 * p:
                assert most == delay + 1
            steps = [action for action in schedule.actions[stage] if action.type is ActionType.STEP]
            assert len(steps) == m


@pytest.mark.parametrize("p", [1, *RANKS])
def test_2bw_keeps_two_versions_and_delays_by_one_update(p: int) -> None:
    """2006.09503: w(b+1) = w(b) - lr * gradient at w(b-1)."""
    for size in {max(1, p - 1), p, p + 2}:
        for batches in (1, 2, 5):
            schedule = pipedream_2bw(p, size * batches, microbatches_per_update=size)
            for stage in range(p):
                used, most = versions_alive(schedule, stage)
                want = {f"{word}{t}": max(0, t // size - 1) for t in range(size * batches) for word in "FB"}
                assert used == want
                assert most == min(2, batches)


def test_asynchronous_schedules_compute_in_the_order_of_1f1b() -> None:
    for schedule in (pipedream(4, 8), pipedream(4, 8, vertical_sync=True), pipedream_2bw(4, 8)):
        assert words(schedule, versions=False) == words(one_f_one_b(4, 8))
        assert run(schedule).idle == (9,) * 4


# --------------------------------------------------------------------------------------------------------------- torch


def words(schedule: Schedule, *, versions: bool = True) -> list[list[str]]:
    """The compute actions of each rank as text."""
    ranks = [[str(action) for action in own if action.parts or action.type.is_compute] for own in schedule.actions]
    return ranks if versions else [[word.split("@")[0] for word in own] for own in ranks]


def of_torch(kind: type, stage_ranks: list[int], m: int) -> list[list[str]]:
    """The compute actions that a schedule class of torch lists, without process groups."""
    stages = [
        SimpleNamespace(
            stage_index=stage,
            num_stages=len(stage_ranks),
            group_size=max(stage_ranks) + 1,
            group_rank=rank,
            is_first=stage == 0,
            is_last=stage == len(stage_ranks) - 1,
            has_backward=True,
            submod=None,
        )
        for stage, rank in enumerate(stage_ranks)
        if rank == 0
    ]
    if issubclass(kind, torch_schedules.PipelineScheduleMulti):
        order = kind(stages, m).pipeline_order
    else:
        order = kind(stages[0], m)._get_pipeline_order()
    ranks = [[str(action) for action in order[rank] if action is not None] for rank in sorted(order)]
    return [[word for word in own if "REDUCE" not in word] for own in ranks]


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_torch_lists_the_same_flush_schedules(p: int) -> None:
    for m in (p, p + 1, 2 * p, 3 * p + 1):
        line = list(range(p))
        assert of_torch(torch_schedules.ScheduleGPipe, line, m) == words(gpipe(p, m))
        # Torch's picture of 1F1B lacks F0 on the last rank and has a microbatch m there: the other ranks are right.
        assert of_torch(torch_schedules.Schedule1F1B, line, m)[:-1] == words(one_f_one_b(p, m))[:-1]
        assert of_torch(torch_schedules.Schedule1F1B, line, m)[-1][0] == f"{p - 1}F1"


@pytest.mark.parametrize("p", [2, 3, 4, 8])
@pytest.mark.parametrize("v", [2, 3])
def test_torch_lists_the_same_looped_schedules(p: int, v: int) -> None:
    loop = [stage % p for stage in range(p * v)]
    # Torch refuses what its rounds do not divide: p = 4 and m = 9, two rounds, for instance.
    for m in (m for m in (2, p, p + 1, 2 * p, 2 * p + 2, 3 * p) if m % max(1, m // p) == 0):
        ours = interleaved_1f1b(p, m, stages_per_rank=v)
        assert of_torch(torch_schedules.ScheduleInterleaved1F1B, loop, m) == words(ours)
    for m in (2, p, 2 * p + 1):
        # Torch runs the backwards of breadth-first in descending order; ours ascend, as gradients add up.
        ours = words(looped_bfs(p, m, stages_per_rank=v))
        descending = of_torch(torch_schedules.ScheduleLoopedBFS, loop, m)
        forwards = m * v
        assert [own[:forwards] for own in descending] == [own[:forwards] for own in ours]
        for own, theirs in zip(ours, descending, strict=True):
            turned = [theirs[at : at + m][::-1] for at in range(forwards, 2 * forwards, m)]
            assert own[forwards:] == [word for stage in turned for word in stage]


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_torch_lists_the_same_dualpipev(p: int) -> None:
    fold = [*range(p), *reversed(range(p))]
    for m in (2 * p, 2 * p + 1, 4 * p):
        assert of_torch(torch_schedules.ScheduleDualPipeV, fold, m) == words(dualpipev(p, m))


@pytest.mark.parametrize("p", [2, 4])
def test_torch_lists_no_better_zero_bubble_schedules(p: int) -> None:
    """Other places for W, the same idle time where W is not long."""
    m = 2 * p + 2 * (p % 2)
    for kind, ours in (
        (torch_schedules.ScheduleInterleavedZeroBubble, zb_h1(p, m, stages_per_rank=2)),
        (torch_schedules.ScheduleZBVZeroBubble, zbv(p, m)),
    ):
        actions = [[Action.parse(word) for word in own] for own in of_torch(kind, list(ours.stage_ranks), m)]
        theirs = Schedule.of_one_chain("torch", ours.stage_ranks, m, actions)
        for costs in SHORT_WEIGHTS:
            assert run(ours, costs).idle == run(theirs, costs).idle


# ----------------------------------------------------------------------------------------------------- every schedule


def every_schedule(p: int, m: int) -> Iterator[Schedule]:
    """All generators at one size, with their options; those that cannot have it are left out."""
    for name in schedule_names():
        variants: list[dict] = [{}]
        if name in ("interleaved_1f1b", "looped_bfs", "zb_h1"):
            variants = [{"stages_per_rank": v} for v in (1, 2, 3)]
        elif name == "pipedream":
            variants = [{}, {"vertical_sync": True}]
        elif name == "pipedream_2bw":
            sizes = [size for size in {max(1, p - 1), m} if m % size == 0 and size >= p - 1]
            variants = [{"microbatches_per_update": size} for size in sizes]
        elif name.startswith("dualpipe"):
            fits = m >= 2 * p and (name == "dualpipev" or m % 2 == p % 2 == 0)
            variants = [{}, {"overlap": False}] if fits else []
        for options in variants:
            yield make_schedule(name, p, m, **options)


@pytest.mark.expensive
@pytest.mark.parametrize("p", [1, 2, 3, 4, pytest.param(7, marks=pytest.mark.slow)])
def test_every_schedule_computes_everything_once_in_ascending_order_and_ends(p: int) -> None:
    for m in sorted({1, 2, p, 2 * p, 2 * p + 1}):
        for schedule in every_schedule(p, m):
            for rank in range(p):
                for stage in schedule.stages_of(rank):
                    check_stage(schedule, rank, stage)
            plain = simulate(schedule)
            assert simulate(add_communication(schedule)).makespan == plain.makespan
            assert sum(plain.busy) == 3 * schedule.num_parts * m


def check_stage(schedule: Schedule, rank: int, stage: int) -> None:
    """Each microbatch of the chain passes once: F, then B or I and W; all of a kind ascend."""
    microbatches = list(schedule.chain_of_stage(stage).microbatches)
    own = [action for action in schedule.flat(rank) if action.stage == stage]
    by_kind = {kind: [a.microbatch for a in own if a.type is kind] for kind in ActionType if kind.is_compute}
    whole, inputs, weights = (
        by_kind[kind] for kind in (ActionType.BACKWARD, ActionType.BACKWARD_INPUT, ActionType.BACKWARD_WEIGHT)
    )
    where = f"{schedule.name}, p = {schedule.num_ranks}, stage {stage}"
    assert by_kind[ActionType.FORWARD] == microbatches, where
    assert inputs == weights == sorted(inputs), where
    gradients = [a.microbatch for a in own if a.type in (ActionType.BACKWARD, ActionType.BACKWARD_WEIGHT)]
    assert gradients == microbatches == sorted(whole + inputs), where
    outputs = [a.microbatch for a in own if a.type in (ActionType.BACKWARD, ActionType.BACKWARD_INPUT)]
    assert outputs == microbatches, where


@pytest.mark.parametrize("module", [flush, zero_bubble, v_shape, bidirectional, asynchronous])
def test_worked_examples(module) -> None:
    """`name(arguments):` and the lists of all ranks, in every generator's docstring."""
    examples = 0
    for name, make in inspect.getmembers(module, inspect.isfunction):
        if make.__module__ != module.__name__ or name.startswith("_") or "Schedule" not in str(make.__annotations__):
            continue
        if make.__annotations__.get("return") != "Schedule":
            continue
        found = re.search(rf"^ +{name}(\(.*\)):\n((?: +rank \d+: .*\n)+)", make.__doc__, re.MULTILINE)
        assert found, f"{name} has no worked example"
        call = ast.parse(f"f{found[1]}", mode="eval").body
        arguments = [ast.literal_eval(argument) for argument in call.args]
        options = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
        assert inspect.cleandoc(found[2]).strip() == make(*arguments, **options).to_text(), name
        examples += 1
    assert examples >= 2


# --------------------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("1F1B", "1f1b"),
        ("Schedule1F1B", "1f1b"),
        ("PipeDream-Flush", "1f1b"),
        ("TrainSchedule", "1f1b"),
        ("forward_backward_pipelining_without_interleaving", "1f1b"),
        ("GPipe", "gpipe"),
        ("ScheduleGPipe", "gpipe"),
        ("eager-1f1b", "eager_1f1b"),
        ("Interleaved1F1B", "interleaved_1f1b(v=2)"),
        ("forward_backward_pipelining_with_interleaving", "interleaved_1f1b(v=2)"),
        ("ScheduleLoopedBFS", "looped_bfs(v=2)"),
        ("ZB-H1", "zb_h1"),
        ("zb1p", "zb_h1"),
        ("ScheduleInterleavedZeroBubble", "zb_h1(v=2)"),
        ("zb2p", "zb_h2"),
        ("ZBVZeroBubble", "zbv"),
        ("V-Half", "v_half"),
        ("vmin", "v_min"),
        ("DualPipe", "dualpipe"),
        ("ScheduleDualPipeV", "dualpipev"),
        ("PipeDream", "pipedream"),
        ("PipeDream-2BW", "pipedream_2bw"),
    ],
)
def test_make_schedule_knows_the_usual_spellings(spelling: str, name: str) -> None:
    assert make_schedule(spelling, 2, 8).name == name


def test_all_torch_schedules_have_a_name_here() -> None:
    names = [name for name in vars(torch_schedules) if name.startswith("Schedule")]
    assert len(names) >= 7
    for name in names:
        assert make_schedule(name, 2, 4).num_ranks == 2


def test_every_name_is_a_schedule() -> None:
    for name in schedule_names():
        assert make_schedule(name, 2, 4).name.startswith(name)


@pytest.mark.parametrize("name", ["interleaved_1f1b", "looped_bfs"])
def test_options_reach_the_generator(name: str) -> None:
    assert make_schedule(name, 2, 4, stages_per_rank=3).num_stages == 6


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: make_schedule("1fb1", 2, 4), ValueError, "did you mean 1f1b"),
        (lambda: make_schedule("zvb", 2, 4), ValueError, "zbv"),
        (lambda: make_schedule("qqqqqq", 2, 4), ValueError, "there are naive, gpipe, 1f1b"),
        (lambda: make_schedule("gpipe", 2, 4, stages_per_rank=2), TypeError, "gpipe has no option 'stages_per_rank'"),
        (lambda: make_schedule("looped_bfs", 2, 4, v=2), TypeError, "its options are stages_per_rank"),
        (lambda: gpipe(0, 4), ValueError, "num_ranks must be an integer of at least 1, got 0"),
        (lambda: zbv(2, 0), ValueError, "num_microbatches must be an integer of at least 1, got 0"),
        (lambda: looped_bfs(2, 2, stages_per_rank=0), ValueError, "stages_per_rank"),
        (lambda: one_f_one_b(2, 1.5), TypeError, r"num_microbatches .* got float 1\.5"),
        (lambda: zb_h2(4, 8, extra=4), ValueError, "extra must be from 0 to num_ranks - 1 = 3, got 4"),
        (lambda: dualpipev(4, 7), ValueError, "at least 2 microbatches per rank, 8 on 4 ranks, got 7"),
        (lambda: dualpipe(3, 8), ValueError, "even number of ranks, got 3"),
        (lambda: dualpipe(4, 9), ValueError, "even number of microbatches"),
        (lambda: dualpipe(4, 6), ValueError, r"8 on 4 ranks\), got 6"),
        (lambda: pipedream_2bw(4, 8, microbatches_per_update=2), ValueError, "at least num_ranks - 1 = 3, got 2"),
        (lambda: pipedream_2bw(4, 9), ValueError, r"multiple of 4 \(per update\), got 9"),
    ],
)
def test_what_cannot_be_had_is_refused_with_a_reason(call, error: type, says: str) -> None:
    with pytest.raises(error, match=says):
        call()
