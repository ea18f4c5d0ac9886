"""Makespan and peaks of very many orders of the same actions: what a search for schedules spends its time in.

`simulate` answers more questions, at some 10 us an action; this one takes 0.3 us. The two are tested
against each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate

from fastpar.arguments import checked
from fastpar.pipeline.schedules.costs import Costs, Number, common_denominator, simplest
from fastpar.pipeline.schedules.schedule import Action, ActionType, Schedule, ScheduleError

_KINDS = (ActionType.FORWARD, ActionType.BACKWARD_INPUT, ActionType.BACKWARD_WEIGHT, ActionType.BACKWARD)


class Evaluator:
    """Simulates orders of F, I, W and B on the stages and chains of one schedule, under one set of costs.

    An order is a list of codes per rank: (kind * num_stages + stage) * num_microbatches + microbatch, where kind is 0
    for F, 1 for I, 2 for W and 3 for B (`code`, `encode`, `decode`). Messages take `Costs.hop`, and their bytes /
    bandwidth where they need not queue for a link (`serial=False`).

    >>> two = Schedule.from_csv("0F0,0F1,0B0,0B1\\n1F0,1B0,1F1,1B1\\n")
    >>> evaluator = Evaluator(two, Costs(1, 1, 1))
    >>> orders = evaluator.encode(two)
    >>> orders[1]
    [2, 14, 3, 15]
    >>> evaluator.makespan(orders), evaluator.peaks_until_input(orders)
    (9, [2, 1])
    """

    @checked(computed=False)
    def __init__(self, schedule: Schedule, costs: Costs | None = None) -> None:
        costs = costs or Costs()
        costs.check(schedule)
        if costs.serial and any(costs.transfer_time(part) for part in range(schedule.num_parts)):
            raise ValueError("messages that queue for a link need `simulate`; or use Costs(serial=False)")
        self.schedule = schedule
        self.num_stages, self.num_microbatches = schedule.num_stages, schedule.num_microbatches
        # Ends of actions by the codes of F, I and W; a B ends where an I would; last, what is always there.
        self._ends: list[Number] = [*[-1] * (3 * self.num_stages * self.num_microbatches), 0]
        self._writes: list[int] = []
        self._duration: list[Number] = []
        self._own: list[int] = []  # what an action needs from its own rank,
        self._remote: list[int] = []  # what from another stage,
        self._delay: list[Number] = []  # and how long after its end that is there
        self._kept_until_input: list[Number] = []
        self._kept_until_weight: list[Number] = []
        for kind in _KINDS:
            for stage in range(self.num_stages):
                self._add_stage(kind, stage, costs)
        self._scale = common_denominator({*self._duration, *self._delay}) or 1
        if self._scale > 1:
            self._duration = [int(time * self._scale) for time in self._duration]
            self._delay = [int(time * self._scale) for time in self._delay]

    def _add_stage(self, kind: ActionType, stage: int, costs: Costs) -> None:
        schedule, always = self.schedule, len(self._ends) - 1
        part, ranks = schedule.part_of(stage), schedule.stage_ranks
        forward, backward = kind is ActionType.FORWARD, kind in (ActionType.BACKWARD, ActionType.BACKWARD_INPUT)
        source = schedule.previous_stage(stage) if forward else schedule.next_stage(stage) if backward else None
        delay: Number = 0
        if source is not None and ranks[source] != ranks[stage]:
            delay = costs.hop + costs.transfer_time(schedule.part_of(source) if forward else part)
        keeps = costs.activation_of(part)
        frees = {ActionType.BACKWARD: (1, 1), ActionType.BACKWARD_INPUT: (1, 0), ActionType.BACKWARD_WEIGHT: (0, 1)}
        until_input, until_weight = frees.get(kind, (-1, -1))
        own = ActionType.FORWARD if backward else ActionType.BACKWARD_INPUT
        carried = ActionType.FORWARD if forward else ActionType.BACKWARD_INPUT
        for microbatch in range(self.num_microbatches):
            ends_as = ActionType.BACKWARD_INPUT if backward else kind
            self._writes.append(self._code(ends_as, stage, microbatch))
            self._duration.append(costs.of(kind, part))
            self._own.append(always if forward else self._code(own, stage, microbatch))
            self._remote.append(always if source is None else self._code(carried, source, microbatch))
            self._delay.append(delay)
            self._kept_until_input.append(-until_input * keeps)
            self._kept_until_weight.append(-until_weight * keeps)

    def _code(self, kind: ActionType, stage: int, microbatch: int) -> int:
        return (_KINDS.index(kind) * self.num_stages + stage) * self.num_microbatches + microbatch

    def code(self, action: Action) -> int:
        """The code of an F, I, W or B."""
        if action.type not in _KINDS or action.microbatch is None:
            raise ScheduleError(f"only F, I, W and B have a code, got {action}; take SEND and RECV out, overlaps apart")
        return self._code(action.type, action.stage, action.microbatch)

    def action(self, code: int) -> Action:
        """The inverse of `code`."""
        rest, microbatch = divmod(code, self.num_microbatches)
        kind, stage = divmod(rest, self.num_stages)
        return Action(_KINDS[kind], stage, microbatch)

    @checked(computed=False)
    def encode(self, schedule: Schedule) -> list[list[int]]:
        """The orders of a schedule of the same stages and chains, compute only."""
        return [[self.code(action) for action in own] for own in schedule.actions]

    @checked(computed=False)
    def decode(self, orders: Sequence[Sequence[int]], name: str) -> Schedule:
        """The inverse of `encode`."""
        actions = tuple(tuple(map(self.action, own)) for own in orders)
        return Schedule(name, self.schedule.stage_ranks, self.schedule.chains, actions)

    def makespan(self, orders: Sequence[Sequence[int]]) -> Number | None:
        """When the last action ends; None if the orders deadlock or need what is in none of them."""
        ends = self.ends(orders)
        if ends is None:
            return None
        return max(ends) if self._scale == 1 else simplest(Fraction(int(max(ends)), self._scale))

    def ends(self, orders: Sequence[Sequence[int]]) -> list[Number] | None:
        """When every F, I and W ends, by code (a B as an I), in units of 1 / (common denominator of the costs); -1 for
        what is in no order. None if the orders deadlock."""
        ends = self._ends.copy()
        own, remote, delays, durations, writes = self._own, self._remote, self._delay, self._duration, self._writes
        clocks: list[Number] = [0] * len(orders)
        left = [iter(order) for order in orders]
        heads: list[int | None] = [next(order, None) for order in left]
        # Downstream for forwards, then upstream for backwards, so that few visits find nothing to do.
        ranks = [*range(len(orders)), *reversed(range(1, len(orders) - 1))] if len(orders) > 1 else [0]
        moved = True
        while moved:
            moved = False
            for rank in ranks:
                code = heads[rank]
                if code is None:
                    continue
                clock = clocks[rank]
                while code is not None:
                    ready = ends[remote[code]]
                    if ready < 0 or ends[own[code]] < 0:
                        break
                    ready += delays[code]
                    clock = (ready if ready > clock else clock) + durations[code]
                    ends[writes[code]] = clock
                    code = next(left[rank], None)
                    moved = True
                clocks[rank], heads[rank] = clock, code
        return ends if all(code is None for code in heads) else None

    def peaks_until_input(self, orders: Sequence[Sequence[int]]) -> list[Number]:
        """Per rank, the most activations kept at once if I or B frees them."""
        kept = self._kept_until_input.__getitem__
        return [max(accumulate(map(kept, own)), default=0) for own in orders]

    def peaks_until_weight(self, orders: Sequence[Sequence[int]]) -> list[Number]:
        """Per rank, the most activations kept at once if W or B frees them."""
        kept = self._kept_until_weight.__getitem__
        return [max(accumulate(map(kept, own)), default=0) for own in orders]
