"""Find a schedule for measured costs and a memory limit.

    schedule = find_schedule(8, 32, Costs(10, 20, 6, hop=5), max_activations=8)

The fixed schedules assume that F, I and W take equally long and that messages take no time. Where they do not, other
orders are shorter, and how much memory may be used decides which. The search goes through four stages, each starting
from the best so far, and stops early where a lower bound proves that nothing is shorter:

    fixed     every fixed schedule with this placement that is within the limit: the result is never worse
    list      list scheduling by priorities: how many microbatches each stage may have under way, what goes first, how
              long a weight gradient may delay what arrives meanwhile; over a grid, then at random, then around the best
    moves     local search: an F or I somewhere else in a rank's order, with weight gradients filled in anew, or a
              weight gradient somewhere else; mostly of what is on the critical path. What is a little worse may be
              kept for a while (simulated annealing)
    exact     branch and bound, for one stage per rank and few enough actions

Microbatches ascend on every stage, so that gradients are sums in the order of a sequential run.

Worked example: two ranks, three microbatches, F:I:W = 10:20:6, at most two activations until I: 1F1B takes 144, ZB-H1
132, the search 128, which is the lower bound:

    rank 0: 0F0 0F1 0I0 0F2 0I1 0W0 0W1 0I2 0W2
    rank 1: 1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, product

from fastpar.arguments import checked
from fastpar.pipeline.schedules.costs import Costs, Number
from fastpar.pipeline.schedules.generators import make_schedule, schedule_names
from fastpar.pipeline.schedules.schedule import ActionType, Schedule
from fastpar.pipeline.schedules.validate import check, one_each
from fastpar.pipeline.search.exact import branch_and_bound
from fastpar.pipeline.search.model import (
    Filled,
    Model,
    Plan,
    Priorities,
    critical_positions,
    fill,
    list_plan,
    plan_of,
    to_schedule,
)
from fastpar.pipeline.simulation.simulate import activation_peaks, simulate

_T = ActionType
_EXACT_ACTIONS = 200  # branch and bound recurses once per action, and cannot end with more of them anyway
_EXACT_NODES = 20_000
_SHARES = (0, 0.25, 0.5, 0.75, 1)
_ROUNDS = 4  # of annealing


def placements(num_ranks: int, stages_per_rank: int) -> dict[str, list[int]]:
    """Rank of each stage, by name: straight for one stage per rank, else looped and V (to and fro)."""
    there = list(range(num_ranks))
    if stages_per_rank == 1 or num_ranks == 1:
        return {"straight": there * stages_per_rank}
    zigzag = [there if lap % 2 == 0 else there[::-1] for lap in range(stages_per_rank)]
    return {"looped": there * stages_per_rank, "v": [rank for lap in zigzag for rank in lap]}


def fixed_schedules(
    stage_ranks: Sequence[int], num_microbatches: int, limits: Sequence[Number | None], costs: Costs, until: str
) -> Iterator[Schedule]:
    """The fixed schedules with these stages that update once, in the end, and are within the limits."""
    num_ranks = max(stage_ranks) + 1
    stages_per_rank = len(stage_ranks) // num_ranks
    extras = [{"extra": extra} for extra in range(num_ranks)]  # ZB-H2 in between 1F1B's memory and its own
    options_of_all: list[dict[str, int]] = [{}, {"stages_per_rank": stages_per_rank}, *extras]
    yielded = set()
    for name, options in product(schedule_names(), options_of_all):
        try:
            schedule = make_schedule(name, num_ranks, num_microbatches, **options)
        except (ValueError, TypeError):
            continue  # does not exist at this size, or has no such option
        if schedule.stage_ranks != tuple(stage_ranks) or len(schedule.chains) > 1 or schedule.actions in yielded:
            continue
        if any(not action.type.is_compute for rank in range(num_ranks) for action in schedule.flat(rank)):
            continue  # asynchronous: it steps on the way
        peaks = activation_peaks(schedule, costs, until=until)
        if all(limit is None or peak <= limit for peak, limit in zip(peaks, limits, strict=True)):
            yielded.add(schedule.actions)
            yield schedule


@dataclass
class _ScheduleSearch:
    """The best so far, and the stages that improve it."""

    model: Model
    rng: random.Random
    deadline: float
    evaluations: int
    best: Number = math.inf
    orders: Plan = field(default_factory=list)
    plan: Plan = field(default_factory=list)
    slack: list[Number] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.bound = self.model.lower_bound()  # or what branch and bound proves

    @property
    def is_over(self) -> bool:
        return self.best <= self.bound or self.evaluations <= 0 or time.monotonic() > self.deadline

    def evaluate(self, plan: Plan, slack: list[Number]) -> Filled:
        self.evaluations -= 1
        filled = fill(self.model, plan, slack)
        if filled.makespan < self.best:
            self.best, self.orders, self.plan, self.slack = filled.makespan, filled.orders, plan, slack
        return filled

    def shares(self, share: float) -> list[Number]:
        """Slack as a share of the rank's longest weight gradient."""
        model = self.model
        return [share * max(model.weight[s] for s in model.stages_of(rank)) for rank in range(model.num_ranks)]

    # Starts

    def start(self, schedules: Sequence[Schedule]) -> None:
        one_by_one = [self._one_by_one(rank) for rank in range(self.model.num_ranks)]
        for plan in [one_by_one, *(plan_of(self.model, schedule) for schedule in schedules)]:
            for share in (0, 0.5, 1):
                self.evaluate(plan, self.shares(share))

    def _one_by_one(self, rank: int) -> list[int]:
        """Each microbatch to its end before the next: fits wherever anything does."""
        stages = self.model.stages_of(rank)
        once = [*stages, *(self.model.num_stages + stage for stage in reversed(stages))]
        return once * self.model.num_microbatches

    # List scheduling

    def list_schedules(self) -> None:
        tried: list[tuple[Number, int, Priorities]] = []
        evaluations = self.evaluations
        for priorities in self._candidates():
            if self.is_over or self.evaluations < evaluations * 2 // 3:
                break
            tried.append((self._try(priorities), len(tried), priorities))
        for makespan, _, priorities in sorted(tried, key=lambda each: each[:2])[:3]:
            self._climb(priorities, makespan, evaluations // 18)

    def _try(self, priorities: Priorities) -> Number:
        plan = list_plan(self.model, priorities)
        if plan is None:
            self.evaluations -= 1
            return math.inf
        return min(self.evaluate(plan, self.shares(share)).makespan for share in (0, 1))

    def _candidates(self) -> Iterator[Priorities]:
        """First the same rule for all laps of stages over the ranks, then one for each at random.

        Stage s may have a + b * (stages behind it) microbatches under way.
        """
        model, rng = self.model, self.rng
        n, laps = model.num_stages, model.num_stages // model.num_ranks
        slopes = (0.25, 0.5, 0.75, 1, 1.25, 1.5, 2, 2.5)
        for a, b, backward_first, deep_first, patience in product(
            (1, 2, 3), slopes, (True, False), (True, False)[:laps], (0.0, 1.0)
        ):
            caps = tuple(a + b * (n - 1 - stage) for stage in range(n))
            yield Priorities(caps, backward_first, deep_first, patience)
        while True:
            rules = [(rng.choice((1, 2, 3, 4)), rng.choice(slopes)) for _ in range(laps)]
            caps = tuple(
                rules[s // model.num_ranks][0] + rules[s // model.num_ranks][1] * (n - 1 - s) for s in range(n)
            )
            yield Priorities(caps, rng.random() < 0.5, rng.random() < 0.5, rng.choice(_SHARES))

    def _climb(self, priorities: Priorities, makespan: Number, evaluations: int) -> None:
        """Change a few caps at a time; keep what is not worse."""
        until = self.evaluations - evaluations
        rng = self.rng
        while not self.is_over and self.evaluations > until:
            caps = list(priorities.caps)
            for _ in range(rng.choice((1, 1, 2, 3))):
                stage = rng.randrange(len(caps))
                caps[stage] = max(1, caps[stage] + rng.choice((-2, -1, 1, 2)))
            changed = replace(priorities, caps=tuple(caps))
            if rng.random() < 0.2:
                changed = replace(changed, patience=rng.random(), backward_first=rng.random() < 0.5)
            reached = self._try(changed)
            if reached <= makespan:
                priorities, makespan = changed, reached

    # Moves

    def move(self) -> None:
        """Simulated annealing: over plans, then with weight gradients moved as everything else, and again."""
        model = self.model
        for left in range(2 * _ROUNDS, 0, -1):
            if self.is_over:
                return
            plan = self.orders
            slack: list[Number] = [-math.inf] * model.num_ranks
            if left % 2 == 0:
                plan = [[code for code in own if code < 2 * model.num_stages] for own in plan]
                slack = self.slack if min(self.slack) >= 0 else self.shares(0)
            self._anneal(plan, slack, math.ceil(self.evaluations / left))

    def _anneal(self, plan: Plan, slack: list[Number], evaluations: int) -> None:
        """From a plan; mostly at what is critical."""
        model, rng = self.model, self.rng
        filled = self.evaluate(plan, slack)
        if not filled.orders:
            return  # weight gradients as late as this do not fit into the memory
        makespan, critical = filled.makespan, self._critical(filled.orders, plan)
        warmth = 0.5 * float(max(*model.weight, min(model.forward), 1e-12))
        end = self.evaluations - evaluations
        while not self.is_over and self.evaluations > end:
            temperature = warmth * (self.evaluations - end) / evaluations
            changed, changed_slack = list(plan), list(slack)
            for _ in range(rng.choice((1, 1, 1, 2, 3))):
                rank, position = rng.choice(critical)
                if rng.random() < 0.3:
                    rank = rng.randrange(model.num_ranks)
                    position = rng.randrange(len(changed[rank]))
                if rng.random() < 0.1 and slack[rank] >= 0:
                    changed_slack[rank] = rng.choice(_SHARES) * max(model.weight[s] for s in model.stages_of(rank))
                else:
                    changed[rank] = self._moved(changed[rank], position)
            if changed == plan and changed_slack == slack:
                self.evaluations -= 1
                continue
            filled = self.evaluate(changed, changed_slack)
            worse = float(filled.makespan - makespan)
            if worse <= 0 or (temperature > 0 and rng.random() < math.exp(-worse / temperature)):
                plan, slack, makespan = changed, changed_slack, filled.makespan
                critical = self._critical(filled.orders, plan)

    def _critical(self, orders: Plan, plan: Plan) -> list[tuple[int, int]]:
        """Places in a plan of what is critical in its complete orders."""
        critical = critical_positions(self.model, orders)
        if len(plan[0]) == len(orders[0]):
            return critical
        counts = [[0, *accumulate(code < 2 * self.model.num_stages for code in own)] for own in orders]
        return [(rank, min(counts[rank][position], len(plan[rank]) - 1)) for rank, position in critical]

    def _moved(self, own: list[int], position: int) -> list[int]:
        """One F or I somewhere else, mostly near."""
        distance = self.rng.choice((1, 1, 2, 2, 3, 4, 6, 10, 20)) * self.rng.choice((-1, 1))
        rest = own[:position] + own[position + 1 :]
        target = min(max(0, position + distance), len(rest))
        return [*rest[:target], own[position], *rest[target:]]

    # Exact

    def prove(self) -> None:
        """Branch and bound, if there are few enough actions: a shorter schedule, or that there is none."""
        model = self.model
        num_actions = (2 + model.is_split) * model.num_stages * model.num_microbatches
        if self.best <= self.bound or model.num_stages > model.num_ranks or num_actions > _EXACT_ACTIONS:
            return
        exact = branch_and_bound(model, self.best, max_nodes=_EXACT_NODES)
        if exact.orders is not None:
            self.best, self.orders = exact.makespan, exact.orders
            self.plan = [[code for code in own if code < 2 * model.num_stages] for own in exact.orders]
        if exact.is_final:
            self.bound = self.best


MAX_SEARCHED = 1 << 20


@checked(computed=False)
def find_schedule(
    num_ranks: int,
    num_microbatches: int,
    costs: Costs | None = None,
    *,
    max_activations: Number | Sequence[Number] | None = None,
    until: str = "weight",
    stages_per_rank: int = 1,
    placement: str | None = None,
    split_backward: bool = True,
    exact: bool = True,
    seed: int = 0,
    evaluations: int = 4000,
    time_limit: float = 60.0,
    name: str = "searched",
) -> Schedule:
    """The shortest schedule that the search finds, compute only; never longer than a fixed one within the limits.

    costs            of F, I and W of each part, and of messages; default: all equal, no latency
    max_activations  what a rank may hold at any time, in units of `costs.activation`: one limit for all or one per rank
    until            "weight": an activation is held from F until W (or B); "input": until I (or B)
    stages_per_rank  parts of the model per rank
    placement        "straight" (one stage per rank), "looped" or "v"; default: all that there are
    split_backward   F, I and W; False: F and B
    exact            try branch and bound where it is feasible
    seed             of the random choices; the same seed gives the same schedule, unless time runs out
    evaluations      how many schedules to look at, per placement
    time_limit       seconds, in all

    Schedules with two chains (DualPipe) are not looked at: they hold every parameter twice. Nor are asynchronous ones.

    Raises ValueError for limits that no schedule can keep, and for sizes and options that do not exist.
    """
    costs = costs or Costs()
    if min(num_ranks, num_microbatches, stages_per_rank) < 1:
        raise ValueError(
            "num_ranks, num_microbatches and stages_per_rank must be at least 1, "
            f"got {num_ranks}, {num_microbatches}, {stages_per_rank}"
        )
    if num_ranks * stages_per_rank * num_microbatches > MAX_SEARCHED:
        raise ValueError(
            f"num_ranks * stages_per_rank * num_microbatches must be at most {MAX_SEARCHED} to search in, got "
            f"{num_ranks} * {stages_per_rank} * {num_microbatches}"
        )
    if until not in ("weight", "input"):
        raise ValueError(f'until must be "weight" or "input", got {until!r}')
    known = placements(num_ranks, stages_per_rank)
    if placement is not None and placement not in known:
        raise ValueError(f"placement must be one of {sorted(known)} with {stages_per_rank} per rank, got {placement!r}")
    chosen = known if placement is None else {placement: known[placement]}
    limits: list[Number | None] = [None] * num_ranks
    if max_activations is not None:
        limits = list(one_each(max_activations, num_ranks, "max_activations", "rank"))
        if not all(limit is None or limit < math.inf for limit in limits):
            raise ValueError(f"max_activations must be finite, or None for no limit, got {max_activations}")
    start = time.monotonic()
    found: list[Schedule] = []
    for number, stage_ranks in enumerate(chosen.values(), 1):
        model = _checked_model(stage_ranks, num_microbatches, costs, limits, until, split_backward=split_backward)
        search = _ScheduleSearch(model, random.Random(seed), start + time_limit * number / len(chosen), evaluations)
        fixed = list(fixed_schedules(stage_ranks, num_microbatches, limits, costs, until))
        fixed = [schedule for schedule in fixed if split_backward or not _is_split(schedule)]
        search.start(fixed)
        search.list_schedules()
        if exact:
            search.prove()
        search.move()
        found += [*fixed, to_schedule(model, search.orders, name)]
    best = min(found, key=lambda schedule: simulate(schedule, costs).makespan)
    sizes = [costs.activation_of(part) for part in range(best.num_parts)]
    check(best, max_activations=max_activations, until=until, activation_size=sizes)
    return best


def _checked_model(
    stage_ranks: Sequence[int],
    num_microbatches: int,
    costs: Costs,
    limits: Sequence[Number | None],
    until: str,
    *,
    split_backward: bool,
) -> Model:
    costs.check(Schedule.of_one_chain("costs", stage_ranks, num_microbatches, [()] * len(limits)))
    model = Model.of(
        stage_ranks, num_microbatches, costs, limits, until_weight=until == "weight", is_split=split_backward
    )
    for rank, limit in enumerate(limits):
        one = sum(model.sizes[stage] for stage in model.stages_of(rank))
        if limit is not None and limit < one:
            raise ValueError(f"one microbatch needs {one} on rank {rank}, but max_activations is {limit} there")
    return model


def _is_split(schedule: Schedule) -> bool:
    return any(a.type is _T.BACKWARD_INPUT for rank in range(schedule.num_ranks) for a in schedule.flat(rank))
