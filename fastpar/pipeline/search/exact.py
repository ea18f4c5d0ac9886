"""The shortest schedule there is, for a few ranks and microbatches: branch and bound.

Giffler and Thompson's branching ("Algorithms for solving production-scheduling problems", 1960) carries over: of all
actions whose inputs are made, take the one that could end first. What its rank does next starts before that end, or the
action would fit in front of it for nothing. So only such actions of that rank are tried. A memory limit is one more
thing that a forward waits for: with one stage per rank, the freeing of the activation `limit` microbatches back.

Two branches that have done the same actions differ in times only: one that is nowhere earlier is cut. So is one that
cannot end before the best schedule known.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import le

from fastpar.pipeline.schedules.costs import Number
from fastpar.pipeline.search.model import Model, Plan

_F, _B, _W = 0, 1, 2


@dataclass
class _Rank:
    """What a rank has done: kinds of actions, when its forwards and input gradients ended, when it is free."""

    order: list[int] = field(default_factory=list)
    ends_f: list[Number] = field(default_factory=list)
    ends_b: list[Number] = field(default_factory=list)
    num_w: int = 0
    clock: Number = 0


@dataclass(frozen=True)
class _Choice:
    rank: int
    kind: int
    start: Number
    end: Number


class _BranchAndBound:
    def __init__(self, model: Model, upper: Number, max_nodes: int) -> None:
        self.model, self.nodes_left = model, max_nodes
        self.ranks = [_Rank() for _ in range(model.num_ranks)]
        self.durations = list(zip(model.forward, model.backward, model.weight, strict=True))
        self.best: Number = upper
        self.best_orders: Plan | None = None
        self.bound = model.lower_bound()
        self.seen: dict[tuple[int, ...], list[list[Number]]] = {}

    def choices(self) -> list[_Choice]:
        """Actions whose inputs are made, with the earliest times they can have."""
        model, m = self.model, self.model.num_microbatches
        found = []
        for rank, own in enumerate(self.ranks):
            num_f, num_b, num_w = len(own.ends_f), len(own.ends_b), own.num_w
            arrivals: list[tuple[int, Number]] = []
            freed = num_w if model.until_weight and model.is_split else num_b
            if num_f < m and (num_f - freed + 1) * model.sizes[rank] <= model.room(rank):
                before = self.ranks[rank - 1].ends_f if rank else []
                if not rank:
                    arrivals.append((_F, 0))
                elif len(before) > num_f:
                    arrivals.append((_F, before[num_f] + model.latency[rank - 1]))
            if num_b < num_f:
                after = self.ranks[rank + 1].ends_b if rank + 1 < model.num_ranks else []
                if rank + 1 == model.num_ranks:
                    arrivals.append((_B, 0))
                elif len(after) > num_b:
                    arrivals.append((_B, after[num_b] + model.latency[rank]))
            if model.is_split and num_w < num_b:
                arrivals.append((_W, 0))
            for kind, arrival in arrivals:
                start = max(own.clock, arrival)
                found.append(_Choice(rank, kind, start, start + self.durations[rank][kind]))
        return found

    def run(self) -> None:
        """Try everything that may lead to less than the best; stop where the lower bound is reached."""
        if self.nodes_left <= 0 or self.best <= self.bound:
            return
        self.nodes_left -= 1
        choices = self.choices()
        if not choices:
            self.best = max(own.clock for own in self.ranks)
            self.best_orders = [list(own.order) for own in self.ranks]
            return
        if self.is_hopeless() or self.is_dominated():
            return
        first = min(choices, key=lambda choice: (choice.end, choice.rank, choice.kind))
        rivals = [c for c in choices if c.rank == first.rank and (c.start < first.end or c is first)]
        own = self.ranks[first.rank]
        for choice in sorted(rivals, key=lambda c: (c.start, (_B, _F, _W).index(c.kind))):
            clock = own.clock
            self.do(own, choice)
            self.run()
            own.clock = clock
            own.order.pop()
            if choice.kind == _W:
                own.num_w -= 1
            else:
                (own.ends_f if choice.kind == _F else own.ends_b).pop()

    def do(self, own: _Rank, choice: _Choice) -> None:
        own.clock = choice.end
        own.order.append(choice.kind)
        if choice.kind == _W:
            own.num_w += 1
        else:
            (own.ends_f if choice.kind == _F else own.ends_b).append(choice.end)

    def is_hopeless(self) -> bool:
        """Whether what is left on some rank cannot end before the best."""
        m = self.model.num_microbatches
        arrival: Number = 0  # of the next gradient, from below
        for rank in reversed(range(len(self.ranks))):
            own = self.ranks[rank]
            forward, backward, weight = self.durations[rank]
            num_f, num_b = len(own.ends_f), len(own.ends_b)
            left_b, left_w = (m - num_b) * backward, (m - own.num_w) * weight * self.model.is_split
            if own.clock + (m - num_f) * forward + left_b + left_w >= self.best:
                return True
            if rank + 1 < len(self.ranks) and num_b < m:
                below = self.ranks[rank + 1]
                done = below.ends_b[m - 1] if len(below.ends_b) == m else arrival
                arrival = max(done + self.model.latency[rank] + backward, own.clock + left_b)
            elif num_b < m:
                arrival = own.clock + left_b
            if num_b < m and arrival + weight * self.model.is_split >= self.best:
                return True
        return False

    def is_dominated(self) -> bool:
        """Whether a branch with the same actions done was nowhere later; else remember this one."""
        key: list[int] = []
        times: list[Number] = []
        for rank, own in enumerate(self.ranks):
            num_f, num_b = len(own.ends_f), len(own.ends_b)
            key += (num_f, num_b, own.num_w)
            times.append(own.clock)
            if rank:
                clock, latency = self.ranks[rank - 1].clock, self.model.latency[rank - 1]
                times += [max(end + latency, clock) for end in own.ends_b[len(self.ranks[rank - 1].ends_b) :]]
            if rank + 1 < len(self.ranks):
                clock, latency = self.ranks[rank + 1].clock, self.model.latency[rank]
                times += [max(end + latency, clock) for end in own.ends_f[len(self.ranks[rank + 1].ends_f) :]]
        known = self.seen.setdefault(tuple(key), [])
        if any(all(map(le, other, times)) for other in known):
            return True
        known[:] = [other for other in known if not all(map(le, times, other))]
        known.append(times)
        return False


@dataclass(frozen=True)
class Exact:
    """What branch and bound found.

    orders    complete orders (codes of `Model`) that are shorter than what was known; None: there are none
    makespan  theirs, or of what was known
    is_final  nothing is shorter, of all schedules with microbatches in ascending order per stage; False: there were
              not enough nodes to say so
    """

    orders: Plan | None
    makespan: Number
    is_final: bool


def branch_and_bound(model: Model, known: Number, *, max_nodes: int) -> Exact:
    """Look for orders shorter than `known`, with one stage per rank. Recurses once per action."""
    if model.num_stages != model.num_ranks:
        raise ValueError(f"branch and bound takes one stage per rank, got {model.num_stages} on {model.num_ranks}")
    search = _BranchAndBound(model, known, max_nodes)
    search.run()
    orders = search.best_orders and [
        [kind * model.num_ranks + rank for kind in own] for rank, own in enumerate(search.best_orders)
    ]
    return Exact(orders, search.best, search.nodes_left > 0)
