"""Plans of recomputation: their formulas, the optimum under a budget, and that runs do what a plan says."""

import gc
import itertools
import math
import random
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fastpar as fp
from fastpar.recompute import (
    Binomial,
    Budget,
    ConstantMemory,
    Drop,
    Full,
    Keep,
    LayerCost,
    NoRecompute,
    RecomputePlan,
    Segments,
    Selective,
    least_memory_plan,
    measure_layers,
    optimal_plan,
)
from fastpar.recompute.plan import Steps, clip

# ---- a chain whose memory and runs can be counted --------------------------------------------------------------------


class Ledger:
    """Counts the bytes that are alive of what `new` has made, whoever holds them, and the peak over the samples."""

    def __init__(self) -> None:
        self.live, self.peak, self.backwards = 0, 0, []
        self.runs: Counter[int] = Counter()  # of each layer

    def new(self, nbytes: int) -> Tensor:
        array = np.zeros(nbytes // 4, dtype=np.float32)
        self.live += nbytes
        weakref.finalize(array, self._freed, nbytes)
        return torch.from_numpy(array)  # whose storage keeps the array

    def _freed(self, nbytes: int) -> None:
        self.live -= nbytes

    def sample(self) -> None:
        self.peak = max(self.peak, self.live)


class Work(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: "Counted") -> Tensor:
        ctx.layer, ctx.shape = layer, x.shape
        ctx.save_for_backward(x, layer.ledger.new(layer.cost.saved))
        return layer.ledger.new(layer.cost.output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        _, activation = ctx.saved_tensors
        assert activation.nbytes == ctx.layer.cost.saved
        ctx.layer.ledger.sample()
        ctx.layer.ledger.backwards.append(ctx.layer.index)
        return torch.zeros(ctx.shape), None


class Counted(nn.Module):
    """A layer that holds `cost.saved` bytes for backward and returns `cost.output`, and counts its runs."""

    def __init__(self, ledger: Ledger, index: int, cost: LayerCost):
        super().__init__()
        self.ledger, self.index, self.cost = ledger, index, cost

    def forward(self, x: Tensor) -> Tensor:
        self.ledger.runs[self.index] += 1
        out = Work.apply(x, self)
        self.ledger.sample()
        return out


class GivenPlan:
    """A policy that is a plan."""

    def __init__(self, given: RecomputePlan):
        self.given = given

    def plan(self, num_layers: int) -> RecomputePlan:
        return self.given


def run_counted(costs: Sequence[LayerCost], policy: Any, *, early_stop: bool = False) -> tuple[list[int], Ledger]:
    """(runs per layer, ledger) of one forward and backward. Early stops would end a layer before its sample."""
    ledger = Ledger()
    layers = nn.Sequential(*(Counted(ledger, index, cost) for index, cost in enumerate(costs)))
    fp.apply_recompute(layers, policy, early_stop=early_stop)
    gc.disable()  # what only the collector frees would count as held
    try:
        layers(torch.zeros(4, requires_grad=True)).sum().backward()
    finally:
        gc.enable()
    assert ledger.backwards == list(range(len(costs)))[::-1]
    assert ledger.live == 0
    return [ledger.runs[index] for index in range(len(layers))], ledger


def equal_layers(count: int) -> list[LayerCost]:
    """One unit, 4000 bytes, of activations and nearly nothing else each."""
    return [LayerCost(1, 2, 4, 4000) for _ in range(count)]


def random_costs(rng: random.Random, count: int) -> list[LayerCost]:
    costs = [
        LayerCost(rng.randint(1, 9), rng.randint(1, 9), 4 * rng.randint(1, 6), 4 * rng.randint(0, 12))
        for _ in range(count)
    ]
    costs[-1] = LayerCost(costs[-1].forward, costs[-1].backward, 0, costs[-1].saved)  # the caller holds the output
    return costs


def all_steps(start: int, stop: int) -> Iterator[Steps]:
    """Every plan of layers start..stop-1: 1, 2, 6, 22, 90, ... of them."""
    if start == stop:
        yield ()
        return
    for rest in all_steps(start + 1, stop):
        yield (Keep(start), *rest)
    for middle in range(start + 1, stop):
        for inner, rest in itertools.product(all_steps(start, middle), all_steps(middle, stop)):
            yield (Drop(start, middle, inner), *rest)


# ---- formulas --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layers", "count"), [(1, 1), (8, 1), (8, 2), (9, 3), (16, 4), (12, 12), (10, 3)])
def test_segments_run_again_all_but_the_last_stretch(layers: int, count: int) -> None:
    plan = Segments(count).plan(layers)
    assert plan.num_recomputed == layers - layers // count
    assert max(plan.forwards()) <= 2


@pytest.mark.parametrize("layers", [1, 4, 9, 16, 25, 30])
def test_segments_are_sqrt_n_by_default_and_hold_the_least(layers: int) -> None:
    def held(plan: RecomputePlan) -> int:
        return sum(isinstance(step, Drop) for step in plan.steps) + -(-layers // round(math.sqrt(layers)))

    assert held(Segments().plan(layers)) <= 2 * math.sqrt(layers)


@pytest.mark.parametrize("layers", [1, 2, 3, 7, 40])
def test_constant_memory_runs_n_times_n_minus_1_halves_layers_again(layers: int) -> None:
    plan = ConstantMemory().plan(layers)
    assert plan.num_recomputed == layers * (layers - 1) // 2
    assert plan.peak_bytes([LayerCost(1, 2, 0, 1)] * layers) == 1  # one activation at a time, whatever n


@pytest.mark.parametrize("slots", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("repetitions", [1, 2, 3, 4])
def test_binomial_covers_c_of_s_plus_r_over_s_layers(slots: int, repetitions: int) -> None:
    most = math.comb(slots + repetitions, slots)
    assert max(Binomial(slots).plan(most).forwards()) - 1 == repetitions
    assert max(Binomial(slots).plan(most + 1).forwards()) - 1 == repetitions + 1


@pytest.mark.parametrize("slots", [1, 2, 3, 5])
def test_binomial_recomputes_least_for_its_slots(slots: int) -> None:
    """Against Griewank's formula, and against a search over all plans that keep one layer's activations."""
    least: dict[tuple[int, int], int] = {}
    for inputs in range(1, slots + 1):
        for count in range(1, 25):
            splits = range(1, count) if inputs > 1 else range(count - 1, count)
            least[count, inputs] = min(
                (j + least[count - j, max(inputs - 1, 1)] + least[j, inputs] for j in splits if j > 0), default=0
            )
    for count in range(1, 25):
        plan = Binomial(slots).plan(count)
        repetitions = next(r for r in itertools.count() if math.comb(slots + r, slots) >= count)
        assert plan.num_recomputed == least[count, slots]
        assert plan.num_recomputed == repetitions * count - math.comb(slots + repetitions, slots + 1)
        # slots - 1 inputs of one unit beside the chain's own, one activation of 100, and its layer's input and output
        assert plan.peak_bytes([LayerCost(1, 2, 1, 100)] * count) <= slots - 1 + 100 + 2


def test_a_named_policy_is_the_plan_that_its_table_says() -> None:
    assert NoRecompute().plan(3).num_recomputed == 0
    assert Full().plan(3).num_recomputed == Selective().plan(3).num_recomputed == 3
    assert Full().plan(2).steps == (Drop(0, 1, (Keep(0),)), Drop(1, 2, (Keep(1),)))


def test_the_worked_example_of_the_plan_module() -> None:
    plan = RecomputePlan(4, (Drop(0, 2, (Keep(0), Keep(1))), Keep(2), Keep(3)))
    assert plan == Segments(2).plan(4)
    assert plan.num_recomputed == 2
    assert plan.peak_bytes([LayerCost(1, 2, 0, 1)] * 4) == 2
    runs, ledger = run_counted(equal_layers(4), GivenPlan(plan))
    assert runs == [2, 2, 1, 1]
    assert ledger.peak // 4000 == 2


def test_clip_replaces_a_stretch_at_the_end_by_what_it_would_be_run_by() -> None:
    steps = Binomial(2).plan(6).steps
    clipped = clip(steps, 1, 4)
    assert isinstance(clipped[-1], Keep)
    assert (
        RecomputePlan(3, tuple(_shifted(step, 1) for step in clipped)).num_layers == 3
    )  # covers layers 1..3 without gaps


def _shifted(step: Keep | Drop, by: int) -> Keep | Drop:
    if isinstance(step, Keep):
        return Keep(step.start - by)
    return Drop(step.start - by, step.stop - by, tuple(_shifted(inner, by) for inner in step.inner))


@pytest.mark.parametrize(
    "steps", [(Keep(0),), (Keep(1), Keep(0)), (Drop(0, 2, (Keep(0),)),), (Keep(0), Drop(1, 1, ()), Keep(1))]
)
def test_a_plan_with_gaps_is_an_error(steps: Steps) -> None:
    with pytest.raises(ValueError, match="the steps"):
        RecomputePlan(2, steps)


def test_policies_name_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="has 1 to 3 segments, got 4"):
        Segments(4).plan(3)
    with pytest.raises(ValueError, match="slots must be at least 1"):
        Binomial(0).plan(3)
    with pytest.raises(ValueError, match="costs of 2 layers, but the chain has 3"):
        Budget(9000, tuple(equal_layers(2))).plan(3)
    with pytest.raises(ValueError, match="into 100 bytes; the least is 4008"):
        Budget(100, tuple(equal_layers(2)))
    with pytest.raises(ValueError, match="must not be negative"):
        LayerCost(1, -1, 0, 0)


# ---- the optimum -----------------------------------------------------------------------------------------------------


def simulated(steps: Steps, costs: Sequence[LayerCost]) -> tuple[float, int]:
    """(time, peak) of a plan by playing it event by event, apart from the recurrences of the package."""
    held: dict[tuple[str, int], int] = {}
    time, peak = 0.0, 0

    def note(**transient: int) -> None:
        nonlocal peak
        peak = max(peak, sum(held.values()) + sum(transient.values()))

    def play(steps: Steps) -> None:
        nonlocal time
        for step in steps:
            for layer in range(step.start, step.stop):
                time += costs[layer].forward
                if isinstance(step, Keep):
                    held["saved", layer] = costs[layer].saved
                    held["output", layer] = costs[layer].output
                    note()
                else:
                    before = costs[layer - 1].output if layer > step.start else 0
                    note(before=before, after=costs[layer].output)
            held["output", step.stop - 1] = costs[step.stop - 1].output
        for step in reversed(steps):
            held.pop(("output", step.stop - 1))
            if isinstance(step, Drop):
                play(step.inner)
            else:
                time += costs[step.start].backward
                held.pop(("saved", step.start))

    play(steps)
    assert not held
    return time, peak


@pytest.mark.parametrize("seed", range(12))
def test_optimal_plan_is_the_fastest_of_all_plans_that_fit(seed: int) -> None:
    rng = random.Random(seed)
    costs = random_costs(rng, 1 + seed % 5)
    points = [simulated(steps, costs) for steps in all_steps(0, len(costs))]
    least, most = min(peak for _, peak in points), max(peak for _, peak in points)
    assert least_memory_plan(costs).peak_bytes(costs) == least
    for budget in range(least, most + 8):
        plan = optimal_plan(costs, budget)
        time, peak = simulated(plan.steps, costs)
        assert (time, peak) == (plan.time(costs), plan.peak_bytes(costs))
        assert peak <= budget
        assert time == min(time for time, peak in points if peak <= budget)
    with pytest.raises(ValueError, match=f"the least is {least}"):
        optimal_plan(costs, least - 1)


def test_optimal_plan_with_rounded_sizes_fits_and_is_no_slower_than_that_of_a_smaller_budget() -> None:
    rng = random.Random(0)
    costs = [LayerCost(rng.random(), rng.random(), rng.randint(900, 1100), rng.randint(9000, 11000)) for _ in range(12)]
    for budget in (20_001, 40_003, 70_001):
        coarse = optimal_plan(costs, budget, resolution=200)
        smaller = optimal_plan(costs, budget - 12 * 2 * budget // 200, resolution=10**6)
        assert coarse.peak_bytes(costs) <= budget
        assert coarse.time(costs) <= smaller.time(costs)


def test_more_memory_is_never_slower() -> None:
    costs = random_costs(random.Random(5), 9)
    times = [optimal_plan(costs, budget).time(costs) for budget in range(100, 500, 20)]
    assert times == sorted(times, reverse=True)
    assert times[-1] == sum(cost.forward + cost.backward for cost in costs)
    assert times[0] > times[-1]


# ---- runs ------------------------------------------------------------------------------------------------------------

POLICIES = [NoRecompute(), Full(), Segments(), Segments(2), Binomial(1), Binomial(2), Binomial(3), ConstantMemory()]


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@pytest.mark.parametrize("layers", [2, 5, 12])
def test_layers_run_as_often_and_hold_as_much_as_the_plan_says(policy: Any, layers: int) -> None:
    costs = [*equal_layers(layers - 1), LayerCost(1, 2, 0, 4000)]
    plan = policy.plan(layers)
    runs, ledger = run_counted(costs, policy)
    assert runs == plan.forwards()
    assert ledger.peak == plan.peak_bytes(costs)
    runs, ledger = run_counted(costs, policy, early_stop=True)
    assert runs == plan.forwards()
    assert ledger.peak <= plan.peak_bytes(costs)


@pytest.mark.parametrize("seed", range(25))
def test_any_plan_of_unequal_layers_runs_and_holds_what_it_says(seed: int) -> None:
    rng = random.Random(seed)
    costs = random_costs(rng, 5)
    plan = RecomputePlan(5, rng.choice(list(all_steps(0, 5))))
    plan = RecomputePlan(5, clip(plan.steps, 0, 5))  # a stretch at the very end is run as its own plan says
    runs, ledger = run_counted(costs, GivenPlan(plan))
    assert runs == plan.forwards()
    assert ledger.peak == plan.peak_bytes(costs)


@pytest.mark.parametrize("budget", [5000, 9000, 14000, 30000])
def test_a_budget_is_kept(budget: int) -> None:
    costs = [*equal_layers(6), LayerCost(1, 2, 0, 4000)]
    runs, ledger = run_counted(costs, Budget(budget, tuple(costs)))
    assert ledger.peak <= budget
    assert sum(runs) == optimal_plan(costs, budget).num_recomputed + 7


def test_sixteen_layers_in_four_segments_hold_four_activations_and_three_inputs() -> None:
    costs = [*([LayerCost(1, 2, 40, 4000)] * 15), LayerCost(1, 2, 0, 4000)]
    runs, ledger = run_counted(costs, Segments())
    assert sum(runs) - 16 == 12
    assert ledger.peak == 4 * 4000 + 3 * 40 + 3 * 40  # inputs of the stretches, and within the last one


# ---- measured costs --------------------------------------------------------------------------------------------------


class Squares(nn.Module):
    """Saves x (its input), x * w and its exponential, which it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1000))

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return ((x * self.w) * (x * self.w)).mul(scale).exp()


def test_measured_bytes_leave_out_input_output_and_parameters() -> None:
    layers = nn.Sequential(Squares(), nn.ReLU(), nn.Linear(1000, 10))
    layers[0].w.grad = torch.full((1000,), 7.0)
    squares, relu, linear = measure_layers(layers, torch.zeros(3, 1000), repeats=1)
    assert (squares.saved, squares.output) == (2 * 3 * 1000 * 4, 3 * 1000 * 4)  # both products, not exp's output
    assert (relu.saved, relu.output) == (0, 3 * 1000 * 4)
    assert (linear.saved, linear.output) == (0, 3 * 10 * 4)
    assert min(cost.forward for cost in (squares, relu, linear)) > 0
    assert min(cost.backward for cost in (squares, relu, linear)) > 0
    assert torch.equal(layers[0].w.grad, torch.full((1000,), 7.0))
    with pytest.raises(ValueError, match="repeats"):
        measure_layers(layers, torch.zeros(3, 1000), repeats=0)


def test_measured_costs_make_a_budget_that_holds_in_a_run() -> None:
    layers = nn.Sequential(*(Squares() for _ in range(6)))
    costs = measure_layers(layers, torch.zeros(3, 1000), repeats=1)
    everything = RecomputePlan(6, tuple(Keep(i) for i in range(6))).peak_bytes(costs)
    policy = Budget(everything // 2, costs)
    x = torch.rand(3, 1000, requires_grad=True)
    layers(x * 0.1).sum().backward()
    plain = [p.grad.clone() for p in layers.parameters() if p.grad is not None]
    layers.zero_grad()
    fp.apply_recompute(layers, policy)
    layers(x * 0.1).sum().backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(layers.parameters(), plain, strict=True) if p.grad is not None)
    assert policy.plan(6).num_recomputed > 0
