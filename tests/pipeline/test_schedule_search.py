"""The search for schedules: against every order there is where they can be counted, and against the fixed schedules."""

import random
from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from itertools import product

import pytest

from fastpar.pipeline import (
    Action,
    ActionType,
    Costs,
    Evaluator,
    Schedule,
    activation_peaks,
    find_schedule,
    make_schedule,
    simulate,
    validate,
)
from fastpar.pipeline.search.exact import branch_and_bound
from fastpar.pipeline.search.find import fixed_schedules, placements
from fastpar.pipeline.search.model import Model, Priorities, fill, list_plan, plan_of, to_schedule

T = ActionType
COSTS = {
    "even": Costs(1, 1, 1),
    "measured": Costs(10, 20, 6),
    "heavy weights": Costs(10, 8, 12),
    "latency": Costs(2, 2, 2, hop=1),
    "uneven parts": Costs([3, 1, 2, 2], [4, 2, 3, 2], [1, 1, 2, 1], hop=Fraction(1, 2)),
}
PEAKS = {"weight": "peak_until_weight", "input": "peak_until_input"}


def costs_of(name: str, num_parts: int) -> Costs:
    costs = COSTS[name]
    if isinstance(costs.forward, tuple):
        cut = [values[:num_parts] for values in (costs.forward, costs.backward_input, costs.backward_weight)]
        return Costs(*cut, hop=costs.hop)
    return costs


def makespan(schedule: Schedule, costs: Costs) -> float:
    return simulate(schedule, costs).makespan


def model_of(num_ranks: int, num_microbatches: int, costs: Costs, limit: int | None, until: str = "weight") -> Model:
    limits = [limit] * num_ranks
    return Model.of(range(num_ranks), num_microbatches, costs, limits, until_weight=until == "weight", is_split=True)


@cache
def rank_orders(num_microbatches: int, rank: int) -> list[list[Action]]:
    """Every order of F, I and W of one stage in which microbatches ascend and each comes after what it needs."""
    orders: list[list[Action]] = []

    def extend(own: list[Action], counts: tuple[int, int, int]) -> None:
        if counts == (num_microbatches,) * 3:
            orders.append(own)
        for index, kind in enumerate((T.FORWARD, T.BACKWARD_INPUT, T.BACKWARD_WEIGHT)):
            if counts[index] < (num_microbatches if index == 0 else counts[index - 1]):
                after = tuple(count + (i == index) for i, count in enumerate(counts))
                extend([*own, Action(kind, rank, counts[index])], after)  # type: ignore[arg-type]

    extend([], (0, 0, 0))
    return orders


def all_schedules(num_ranks: int, num_microbatches: int) -> Iterator[Schedule]:
    for orders in product(*(rank_orders(num_microbatches, rank) for rank in range(num_ranks))):
        yield Schedule.of_one_chain("any", range(num_ranks), num_microbatches, orders)


@pytest.mark.parametrize("costs_name", COSTS)
@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(2, 2), (2, 3), (3, 2)])
def test_branch_and_bound_finds_the_shortest_of_all_orders(
    num_ranks: int, num_microbatches: int, costs_name: str
) -> None:
    costs = costs_of(costs_name, num_ranks)
    everything = []
    for schedule in all_schedules(num_ranks, num_microbatches):
        evaluator = Evaluator(schedule, costs)
        orders = evaluator.encode(schedule)
        length = evaluator.makespan(orders)
        if length is not None:  # else it deadlocks
            peaks = {"input": evaluator.peaks_until_input(orders), "weight": evaluator.peaks_until_weight(orders)}
            everything.append((length, {until: max(own) for until, own in peaks.items()}))
    for until, limit in product(PEAKS, (1, 2, num_microbatches)):
        model = model_of(num_ranks, num_microbatches, costs, limit, until)
        exact = branch_and_bound(model, 10_000, max_nodes=10_000)
        assert exact.orders is not None
        assert exact.is_final
        found = to_schedule(model, exact.orders, "exact")
        assert makespan(found, costs) == min(length for length, peak in everything if peak[until] <= limit)
        assert max(activation_peaks(found, until=until)) <= limit


@pytest.mark.parametrize("costs_name", COSTS)
@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(2, 3), (2, 4), (3, 3), (3, 4)])
def test_search_without_proof_reaches_the_exact_optimum(num_ranks: int, num_microbatches: int, costs_name: str) -> None:
    costs = costs_of(costs_name, num_ranks)
    for limit in (None, 2, num_ranks):
        found = find_schedule(num_ranks, num_microbatches, costs, max_activations=limit, exact=False, evaluations=1500)
        model = model_of(num_ranks, num_microbatches, costs, limit)
        exact = branch_and_bound(model, 10_000, max_nodes=20_000)
        assert exact.is_final
        assert exact.orders is not None
        best = makespan(to_schedule(model, exact.orders, "exact"), costs)
        assert makespan(found, costs) == best
        assert exact.makespan >= model.lower_bound()


def test_moves_of_weight_gradients_reach_the_optimum_that_priorities_miss() -> None:
    costs = Costs(10, 8, 12)
    found = find_schedule(3, 6, costs, max_activations=2, exact=False)
    assert makespan(found, costs) == branch_and_bound(model_of(3, 6, costs, 2), 1000, max_nodes=20_000).makespan == 236


SIZES = [(1, 3, 1), (2, 5, 1), (4, 8, 1), (4, 3, 1), (2, 4, 2), (4, 8, 2), (3, 6, 3)]


@pytest.mark.expensive
@pytest.mark.parametrize(
    "costs_name", ["measured", *(pytest.param(c, marks=pytest.mark.slow) for c in ("even", "latency"))]
)
@pytest.mark.parametrize(("num_ranks", "num_microbatches", "stages_per_rank"), SIZES)
def test_search_is_never_worse_than_a_fixed_schedule_within_the_limit(
    num_ranks: int, num_microbatches: int, stages_per_rank: int, costs_name: str
) -> None:
    costs = COSTS[costs_name]
    for until, limit in product(PEAKS, (None, stages_per_rank * num_ranks, stages_per_rank)):
        found = find_schedule(
            num_ranks, num_microbatches, costs, max_activations=limit, until=until, stages_per_rank=stages_per_rank,
            evaluations=20,
        )  # fmt: skip
        assert validate(found, max_activations=limit, until=until) == []
        for stage_ranks in placements(num_ranks, stages_per_rank).values():
            fixed = fixed_schedules(stage_ranks, num_microbatches, [limit] * num_ranks, costs, until)
            assert all(makespan(found, costs) <= makespan(schedule, costs) for schedule in fixed)


def test_fixed_schedules_are_those_with_the_placement_and_within_the_limit() -> None:
    def names(ranks: list[int], limit: int | None) -> set[str]:
        found = fixed_schedules(ranks, 8, [limit] * 4, Costs(), "weight")
        return {schedule.name.split("(")[0] for schedule in found}

    assert names([0, 1, 2, 3], None) >= {"naive", "gpipe", "1f1b", "eager_1f1b", "zb_h1", "zb_h2"}
    assert {"1f1b", "zb_h1"} <= names([0, 1, 2, 3], 4)
    assert not {"gpipe", "eager_1f1b"} & names([0, 1, 2, 3], 4)
    assert names([0, 1, 2, 3, 0, 1, 2, 3], None) >= {"interleaved_1f1b", "looped_bfs"}
    assert names([0, 1, 2, 3, 3, 2, 1, 0], None) >= {"zbv", "v_half", "v_min"}


# Wins at p = 8, m = 32 over the best fixed schedule of any placement; the whole table is in docs/pipeline_search.md

# F, I, W and hop; memory in microbatches, until when; best fixed; what the V-shaped search reaches, and how soon
WINS = [
    ((10, 20, 6, 0), 8, "weight", 1250, 1247, 30),
    pytest.param((10, 20, 6, 0), 8, "input", 1250, 1222, 600, marks=pytest.mark.slow),
    ((10, 10, 10, 5), 8, "weight", 1170, 1165, 30),
    ((10, 10, 10, 5), 8, "input", 1170, 1100, 600),
    pytest.param((10, 10, 10, 5), 16, "weight", 1065, 1035, 600, marks=pytest.mark.slow),
]


def costs_per_part(case: tuple[int, int, int, int], stages_per_rank: int) -> Costs:
    share = Fraction(1, stages_per_rank)
    return Costs(*(time * share for time in case[:3]), hop=case[3], activation=share)


@pytest.mark.expensive
@pytest.mark.parametrize(("case", "memory", "until", "best_fixed", "reached", "evaluations"), WINS)
def test_search_beats_the_fixed_schedules_at_equal_memory(
    case: tuple[int, int, int, int], memory: int, until: str, best_fixed: int, reached: int, evaluations: int
) -> None:
    fixed = []
    for stages_per_rank in (1, 2):
        costs = costs_per_part(case, stages_per_rank)
        for stage_ranks in placements(8, stages_per_rank).values():
            schedules = fixed_schedules(stage_ranks, 32, [memory] * 8, costs, until)
            fixed += [makespan(schedule, costs) for schedule in schedules]
    assert min(fixed) == best_fixed
    found = find_schedule(
        8, 32, costs, max_activations=memory, until=until, stages_per_rank=2, placement="v", evaluations=evaluations
    )
    assert makespan(found, costs) <= reached < best_fixed
    assert max(getattr(simulate(found, costs), PEAKS[until])) <= memory


# What the stages stand on


def test_the_worked_example() -> None:
    costs = Costs(10, 20, 6)
    found = find_schedule(2, 3, costs, max_activations=2, until="input")
    lengths = [makespan(s, costs) for s in (make_schedule("1f1b", 2, 3), make_schedule("zb_h1", 2, 3), found)]
    assert lengths == [144, 132, 128]
    assert found.to_text().splitlines() == [
        "rank 0: 0F0 0F1 0I0 0F2 0I1 0W0 0W1 0I2 0W2",
        "rank 1: 1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2",
    ]


@pytest.mark.parametrize("stages_per_rank", [1, 2])
def test_filled_plans_take_as_long_as_they_simulate(stages_per_rank: int) -> None:
    rng = random.Random(0)
    costs = Costs(3, 4, 2, hop=1)
    for name, stage_ranks in placements(4, stages_per_rank).items():
        reached = 0
        for limit in (None, 4 * stages_per_rank, 3 * stages_per_rank):
            for until in PEAKS:
                model = Model.of(stage_ranks, 6, costs, [limit] * 4, until_weight=until == "weight", is_split=True)
                caps = tuple(rng.choice((2, 3, 9)) for _ in stage_ranks)
                for backward_first, deep_first in product((True, False), repeat=2):
                    plan = list_plan(model, Priorities(caps, backward_first, deep_first, 0.5))
                    if plan is None:
                        continue
                    filled = fill(model, plan, [1] * 4)
                    schedule = to_schedule(model, filled.orders, name)
                    assert validate(schedule, max_activations=limit, until=until) == []
                    assert makespan(schedule, costs) == filled.makespan >= model.lower_bound()
                    assert plan_of(model, schedule) == plan
                    reached += 1
        assert reached >= 12


def test_a_plan_that_cannot_run_is_infeasible() -> None:
    model = model_of(2, 2, Costs(), 1)
    backward_first = [[2, 0, 0, 2], [1, 3, 1, 3]]
    circle = [[0, 2, 0, 2], [1, 1, 3, 3]]
    too_much = [[0, 0, 2, 2], [1, 3, 1, 3]]
    right = [[0, 2, 0, 2], [1, 3, 1, 3]]
    lengths = [fill(model, plan, [0, 0]).makespan for plan in (backward_first, circle, too_much, right)]
    assert lengths == [float("inf"), float("inf"), float("inf"), 10]


def test_whole_backwards_on_request() -> None:
    costs = Costs(2, 2, 2, hop=1)
    found = find_schedule(4, 8, costs, max_activations=5, split_backward=False, evaluations=300)
    assert {action.type for own in found.actions for action in own} == {T.FORWARD, T.BACKWARD}
    assert makespan(found, costs) < makespan(make_schedule("1f1b", 4, 8), costs)


def test_limits_and_activations_may_differ() -> None:
    costs = Costs(10, 20, 6, activation=[5, 3, 3, 1])
    limits = [12, 6, 6, 2]
    found = find_schedule(4, 6, costs, max_activations=limits, evaluations=300)
    peaks = simulate(found, costs).peak_until_weight
    assert all(peak <= limit for peak, limit in zip(peaks, limits, strict=True))


def test_the_same_seed_finds_the_same_schedule() -> None:
    def search(seed: int) -> str:
        costs = Costs(10, 20, 6, hop=3)
        return find_schedule(3, 6, costs, max_activations=4, exact=False, evaluations=300, seed=seed).to_text()

    assert search(1) == search(1)


def test_no_time_still_gives_a_schedule() -> None:
    found = find_schedule(4, 8, Costs(10, 20, 6), max_activations=1, time_limit=0)
    assert validate(found, max_activations=1) == []


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_activations": 0}, "one microbatch needs 1 on rank 0, but max_activations is 0"),
        ({"max_activations": 1, "stages_per_rank": 2}, "one microbatch needs 2 on rank 0"),
        ({"max_activations": [1, 2, 3]}, r"one per rank \(2\), got 3"),
        ({"until": "end"}, "got 'end'"),
        ({"placement": "v"}, "placement must be one of"),
        ({"stages_per_rank": 0}, "at least 1"),
        ({"costs": Costs([1, 2, 3])}, "forward has 3 numbers"),
    ],
)
def test_requests_that_cannot_be_met_are_refused(options: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        find_schedule(2, 2, **options)  # type: ignore[arg-type]
