"""The search's view of a pipeline: numbers per stage, and two ways to build a schedule out of a few decisions.

A *plan* is, per rank, the order of its forwards and input gradients: stage s stands for the next forward of stage s,
num_stages + s for its next input gradient. Microbatches ascend per stage, so that these codes suffice. Weight
gradients have no place in a plan: `fill` puts them where the rank would wait or must make room.

    `list_plan`   decides by priorities, in the order of time
    `fill`        turns a plan into complete orders and their makespan
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from fastpar.pipeline.schedules.costs import Costs, Number, common_denominator
from fastpar.pipeline.schedules.schedule import Action, ActionType, Chain, Schedule

Plan = list[list[int]]
_T = ActionType


@dataclass(frozen=True)
class Model:
    """Stages on ranks, and what they cost; whole numbers if the costs are exact.

    latency[s]  from stage s to stage s + 1 and back, 0 within a rank
    limits      per rank, of the sum of `sizes` of what it holds; None: no limit
    is_split    whether B is done in two halves; if not, `weight` is 0 and `backward` all of it
    """

    num_ranks: int
    num_microbatches: int
    stage_ranks: tuple[int, ...]
    forward: list[Number]
    backward: list[Number]
    weight: list[Number]
    latency: list[Number]
    sizes: list[Number]
    limits: list[Number | None]
    until_weight: bool
    is_split: bool

    @staticmethod
    def of(
        stage_ranks: Sequence[int],
        num_microbatches: int,
        costs: Costs,
        limits: Sequence[Number | None],
        *,
        until_weight: bool,
        is_split: bool,
    ) -> Model:
        """One chain: stage s is part s. Costs of all but F, I, W and messages are left out."""
        stages = range(len(stage_ranks))
        forward = [costs.of(_T.FORWARD, s) for s in stages]
        backward = [costs.of(_T.BACKWARD_INPUT if is_split else _T.BACKWARD, s) for s in stages]
        weight = [costs.of(_T.BACKWARD_WEIGHT, s) if is_split else 0 for s in stages]
        latency: list[Number] = []
        for stage in stages[:-1]:
            crosses = stage_ranks[stage] != stage_ranks[stage + 1]
            latency.append(costs.hop + costs.transfer_time(stage) if crosses else 0)
        times = [*forward, *backward, *weight, *latency]
        scale = common_denominator(times) or 1
        forward, backward, weight, latency = (
            [int(time * scale) if scale > 1 else time for time in own] for own in (forward, backward, weight, latency)
        )
        sizes = [costs.activation_of(stage) for stage in stages]
        return Model(
            max(stage_ranks) + 1, num_microbatches, tuple(stage_ranks), forward, backward, weight, latency, sizes,
            list(limits), until_weight, is_split,
        )  # fmt: skip

    @property
    def num_stages(self) -> int:
        return len(self.stage_ranks)

    def stages_of(self, rank: int) -> list[int]:
        return [stage for stage, owner in enumerate(self.stage_ranks) if owner == rank]

    def room(self, rank: int) -> float:
        limit = self.limits[rank]
        return float("inf") if limit is None else float(limit)

    def lower_bound(self) -> Number:
        """No schedule within the limits is shorter.

        A rank cannot start before the first microbatch has come down to it. Before the first gradient has come back to
        it, it can only do forwards, as many as it may hold. Everything else of its work comes after that.
        """
        bounds: list[Number] = []
        for rank in range(self.num_ranks):
            stages = self.stages_of(rank)
            first, last = stages[0], stages[-1]
            busy = self.num_microbatches * sum(self.forward[s] + self.backward[s] + self.weight[s] for s in stages)
            head = sum(self.forward[:first]) + sum(self.latency[:first])
            down = sum(self.forward) + sum(self.latency)
            back = down + sum(self.backward[last + 1 :]) + sum(self.latency[last:])
            before = back - head
            if self.limits[rank] is not None:
                densest = max(self.forward[s] / max(self.sizes[s], 1e-12) for s in stages)
                held = self.room(rank) * densest
                before = min(before, int(held) if held == int(held) else held)
            bounds.append(back + busy - min(before, self.num_microbatches * sum(self.forward[s] for s in stages)))
        return max(bounds)


@dataclass
class Filled:
    """A plan with its weight gradients.

    orders    per rank, codes as in a plan, and 2 * num_stages + s for the weight gradient of stage s
    makespan  infinite if the plan deadlocks or breaks a memory limit
    """

    makespan: Number
    orders: Plan


INFEASIBLE = Filled(float("inf"), [])


def fill(model: Model, plan: Plan, slack: Sequence[Number]) -> Filled:
    """Run a plan. A rank that would wait does the oldest weight gradient, if that delays what comes next by at most
    `slack[rank]`; a rank that lacks memory does as many as it takes; what is left is done in the end.

    Complete orders are plans too. With a slack of -infinity their weight gradients stay where they are.
    """
    n = model.num_stages
    forward, backward, weight, latency, sizes = (
        model.forward, model.backward, model.weight, model.latency, model.sizes,
    )  # fmt: skip
    ends_f: list[list[Number]] = [[] for _ in range(n)]
    ends_b: list[list[Number]] = [[] for _ in range(n)]
    clocks: list[Number] = [0] * model.num_ranks
    held: list[Number] = [0] * model.num_ranks
    pending: list[deque[int]] = [deque() for _ in plan]
    at = [0] * model.num_ranks
    out: Plan = [[] for _ in plan]
    rooms = [model.room(rank) for rank in range(model.num_ranks)]
    free_early, is_split = not model.until_weight, model.is_split
    moved = True
    while moved:
        moved = False
        for rank, own in enumerate(plan):
            i, clock, waiting, written, room = at[rank], clocks[rank], pending[rank], out[rank], rooms[rank]
            patience = slack[rank]
            while i < len(own):
                code = own[i]
                if code >= 2 * n:
                    stage = code - 2 * n
                    if stage not in waiting:
                        return INFEASIBLE
                    waiting.remove(stage)
                    clock += weight[stage]
                    if not free_early:
                        held[rank] -= sizes[stage]
                    written.append(code)
                    i += 1
                    continue
                if code < n:
                    done = ends_f[code]
                    arrival: Number = 0
                    if code:
                        source = ends_f[code - 1]
                        if len(source) <= len(done):
                            break
                        arrival = source[len(done)] + latency[code - 1]
                    while held[rank] + sizes[code] > room:
                        if free_early or not waiting:
                            return INFEASIBLE
                        stage = waiting.popleft()
                        clock += weight[stage]
                        held[rank] -= sizes[stage]
                        written.append(2 * n + stage)
                    duration = forward[code]
                else:
                    stage = code - n
                    done = ends_b[stage]
                    if len(ends_f[stage]) <= len(done):
                        return INFEASIBLE
                    arrival = 0
                    if stage + 1 < n:
                        source = ends_b[stage + 1]
                        if len(source) <= len(done):
                            break
                        arrival = source[len(done)] + latency[stage]
                    duration = backward[stage]
                while waiting and clock < arrival and clock + weight[waiting[0]] <= arrival + patience:
                    stage = waiting.popleft()
                    clock += weight[stage]
                    if not free_early:
                        held[rank] -= sizes[stage]
                    written.append(2 * n + stage)
                clock = (clock if clock > arrival else arrival) + duration
                done.append(clock)
                written.append(code)
                if code < n:
                    held[rank] += sizes[code]
                elif is_split:
                    waiting.append(code - n)
                    if free_early:
                        held[rank] -= sizes[code - n]
                else:
                    held[rank] -= sizes[code - n]
                i += 1
                moved = True
            at[rank], clocks[rank] = i, clock
    if any(i < len(own) for i, own in zip(at, plan, strict=True)):
        return INFEASIBLE
    for rank, waiting in enumerate(pending):
        clocks[rank] += sum(weight[stage] for stage in waiting)
        out[rank] += [2 * n + stage for stage in waiting]
    return Filled(max(clocks), out)


def critical_positions(model: Model, orders: Plan) -> list[tuple[int, int]]:
    """(rank, position) of the actions that decide the makespan of complete orders.

    Backwards from what ends last: what starts as its rank becomes free was decided by the action before it, everything
    else by the message that it waited for.
    """
    n, m = model.num_stages, model.num_microbatches
    durations = [*model.forward, *model.backward, *model.weight]
    counts = [0] * (3 * n)
    places: dict[int, tuple[int, int]] = {}  # code * m + microbatch -> where
    names: list[list[int]] = [[] for _ in orders]
    for rank, own in enumerate(orders):
        for position, code in enumerate(own):
            names[rank].append(code * m + counts[code])
            places[names[rank][-1]] = (rank, position)
            counts[code] += 1
    ends: dict[int, Number] = {}
    by_message: set[int] = set()
    at, clocks = [0] * len(orders), [cast(Number, 0)] * len(orders)
    while any(i < len(own) for i, own in zip(at, names, strict=True)):
        for rank, own in enumerate(names):
            while at[rank] < len(own):
                name = own[at[rank]]
                source = _source(model, name)
                if source is not None:
                    if source[0] not in ends:
                        break
                    arrival = ends[source[0]] + source[1]
                    if arrival > clocks[rank]:
                        clocks[rank] = arrival
                        by_message.add(name)
                clocks[rank] += durations[name // m]
                ends[name] = clocks[rank]
                at[rank] += 1
    critical = []
    rank = max(range(len(orders)), key=clocks.__getitem__)
    position = len(orders[rank]) - 1
    while position >= 0:
        name = names[rank][position]
        critical.append((rank, position))
        source = _source(model, name)
        if name in by_message and source is not None:
            rank, position = places[source[0]]
        else:
            position -= 1
    return critical


def _source(model: Model, name: int) -> tuple[int, Number] | None:
    """What sends the input of an action, and how long that is on its way; None for W and at the ends of the chain."""
    n, m = model.num_stages, model.num_microbatches
    code = name // m
    if 0 < code < n:
        return name - m, model.latency[code - 1]
    if n <= code < 2 * n - 1:
        return name + m, model.latency[code - n]
    return None


@dataclass(frozen=True)
class Priorities:
    """How `list_plan` decides.

    caps            per stage, how many microbatches may be between F and I
    backward_first  of what is ready, an input gradient goes before a forward
    deep_first      of forwards that are ready, the later stage goes first
    patience        how long a weight gradient may delay what arrives meanwhile, as a share of its time
    """

    caps: tuple[float, ...]
    backward_first: bool
    deep_first: bool
    patience: float


def list_plan(model: Model, priorities: Priorities) -> Plan | None:
    """A plan, decided rank by rank in the order of time; None if it runs into a dead end of memory.

    Whatever is ready goes by priority. A rank that has nothing ready does a weight gradient if that is over (nearly)
    before the next thing arrives. A forward leaves room for those of the rank's later stages: else early stages fill
    the memory that the microbatches need to get to the end.
    """
    n, m = model.num_stages, model.num_microbatches
    ends_f: list[list[Number]] = [[] for _ in range(n)]
    ends_b: list[list[Number]] = [[] for _ in range(n)]
    held: list[Number] = [0] * model.num_ranks
    pending: list[deque[int]] = [deque() for _ in range(model.num_ranks)]
    plan: Plan = [[] for _ in range(model.num_ranks)]
    own_stages = [model.stages_of(rank) for rank in range(model.num_ranks)]
    reserve = [sum(model.sizes[t] for t in own_stages[model.stage_ranks[s]] if t > s) for s in range(n)]
    events: list[tuple[Number, int]] = [(0, rank) for rank in range(model.num_ranks)]
    asleep = [False] * model.num_ranks
    left = 2 * n * m
    while left:
        if not events:
            return None
        clock, rank = heapq.heappop(events)
        waiting = pending[rank]
        coming: list[tuple[Number, tuple[int, int], int]] = []  # arrival, rank of priority, code
        short = False
        for stage in own_stages[rank]:
            count_f, count_b = len(ends_f[stage]), len(ends_b[stage])
            if count_f < m and count_f - count_b < priorities.caps[stage]:
                if held[rank] + model.sizes[stage] + reserve[stage] > model.room(rank):
                    short = True
                elif not stage:
                    coming.append((0, (priorities.backward_first, -stage * priorities.deep_first), stage))
                elif len(ends_f[stage - 1]) > count_f:
                    arrival = ends_f[stage - 1][count_f] + model.latency[stage - 1]
                    order = (int(priorities.backward_first), -stage if priorities.deep_first else stage)
                    coming.append((arrival, order, stage))
            if count_b < count_f and (stage == n - 1 or len(ends_b[stage + 1]) > count_b):
                arrival = ends_b[stage + 1][count_b] + model.latency[stage] if stage + 1 < n else 0
                coming.append((arrival, (int(not priorities.backward_first), -stage), n + stage))
        ready = [each for each in coming if each[0] <= clock]
        if ready:
            code = min(ready, key=lambda each: each[1])[2]
            stage = code % n
            clock += model.forward[stage] if code < n else model.backward[stage]
            (ends_f if code < n else ends_b)[stage].append(clock)
            plan[rank].append(code)
            left -= 1
            if code < n:
                held[rank] += model.sizes[stage]
            else:
                if model.is_split:
                    waiting.append(stage)
                if not (model.is_split and model.until_weight):
                    held[rank] -= model.sizes[stage]
            heapq.heappush(events, (clock, rank))
            target = stage + 1 if code < n else stage - 1
            if 0 <= target < n and asleep[model.stage_ranks[target]]:
                woken = model.stage_ranks[target]
                asleep[woken] = False
                heapq.heappush(events, (clock, woken))
            continue
        following = min((each[0] for each in coming), default=None)
        stage = waiting[0] if waiting else 0
        worth = following is None or clock + model.weight[stage] * (1 - priorities.patience) <= following
        if waiting and (worth or (short and model.until_weight)):
            waiting.popleft()
            if model.until_weight:
                held[rank] -= model.sizes[stage]
            heapq.heappush(events, (clock + model.weight[stage], rank))
        elif following is not None:
            heapq.heappush(events, (following, rank))
        else:
            asleep[rank] = True
    return plan


def plan_of(model: Model, schedule: Schedule) -> Plan:
    """The plan that a schedule of the same stages follows: whole backwards count as input gradients."""
    n = model.num_stages
    kinds = {_T.FORWARD: 0, _T.BACKWARD: n, _T.BACKWARD_INPUT: n}
    return [
        [kinds[action.type] + action.stage for action in schedule.flat(rank) if action.type in kinds]
        for rank in range(schedule.num_ranks)
    ]


def to_schedule(model: Model, orders: Plan, name: str) -> Schedule:
    """Complete orders as actions."""
    n = model.num_stages
    kinds = (_T.FORWARD, _T.BACKWARD_INPUT if model.is_split else _T.BACKWARD, _T.BACKWARD_WEIGHT)
    actions = []
    for own in orders:
        counts = [0] * (3 * n)
        listed = []
        for code in own:
            listed.append(Action(kinds[code // n], code % n, counts[code]))
            counts[code] += 1
        actions.append(tuple(listed))
    chain = Chain(tuple(range(n)), tuple(range(model.num_microbatches)))
    return Schedule(name, model.stage_ranks, (chain,), tuple(actions))
