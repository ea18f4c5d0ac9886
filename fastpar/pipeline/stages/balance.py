"""Cut a chain of units (embedding, layers, head) into consecutive parts of equal cost.

The cost that counts is a rank's: the parts of one rank add up. Costs are compared exactly (as integers of a common
scale), so that the same costs give the same cut on every machine. Every part gets at least one unit.

Three cases:

* One part per rank: dynamic programming over (parts, units), the optimum.
* Two parts per rank, in V order (part r with part 2p-1-r) or looped (r with p+r): dynamic programming rank by rank over
  the two ends that the ranks so far have reached, the optimum. Looped, the unit where the second round begins is tried
  in turn.
* Any other placement: from the optimum of the parts alone, boundaries are moved, one or a run of neighbours at a time,
  as long as that improves. That may miss the optimum (by one small unit in 10 of 600 random chains of up to 12 units).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import accumulate

Number = int | float | Fraction
_Score = tuple[int, int, int]  # largest rank, sum of squares over ranks, sum of squares over parts


def balance(costs: Sequence[Number], num_parts: int, stage_ranks: Sequence[int] | None = None) -> list[int]:
    """Boundaries [0, b1, ..., n] of `num_parts` consecutive parts of n units; part k holds units b[k] to b[k+1]-1.

    costs        one per unit, not negative
    stage_ranks  the rank of each part; None: a rank each

    The largest cost of a rank is minimised. Among the cuts that reach it, the most even one is taken (smallest sum of
    squares over ranks, then over parts), and among those the one with more units in front.

        balance([1] * 10, 4) == [0, 3, 6, 8, 10]
        balance([5, 1, 1, 1, 1, 1], 2) == [0, 1, 6]
        balance([1] * 7 + [3], 4, [0, 1, 1, 0]) == [0, 2, 5, 7, 8]     # V: the ranks hold 2 + 3 and 3 + 2

    Raises ValueError for fewer units than parts, and for costs that are negative or not finite.
    """
    scaled = _integers(costs)
    if num_parts < 1:
        raise ValueError(f"num_parts must be at least 1, got {num_parts}")
    if num_parts > len(scaled):
        raise ValueError(
            f"{len(scaled)} units cannot fill {num_parts} parts; use at most {len(scaled)} parts of the model"
        )
    ranks = list(range(num_parts)) if stage_ranks is None else list(stage_ranks)
    if len(ranks) != num_parts:
        raise ValueError(f"stage_ranks has {len(ranks)} entries for {num_parts} parts")
    cut = _BalanceCut(scaled, ranks)
    chain = _chain(cut)
    if len(set(ranks)) == num_parts:
        return chain
    best = _descend(cut, chain)
    half = num_parts // 2
    if num_parts % 2 == 0 and len(set(ranks[:half])) == half:
        if ranks[half:] == ranks[half - 1 :: -1]:
            best = _paired(cut, best, backwards=True)
        elif ranks[half:] == ranks[:half]:
            best = _paired(cut, best, backwards=False)
    return best


def _integers(costs: Sequence[Number]) -> list[int]:
    """The costs times their common denominator; floats are fractions exactly."""
    for cost in costs:
        if not math.isfinite(cost) or cost < 0:
            raise ValueError(f"costs must be finite and not negative, got {cost} among {list(costs)}")
    fractions = [Fraction(cost) for cost in costs]
    scale = math.lcm(*(f.denominator for f in fractions)) if fractions else 1
    return [int(f * scale) for f in fractions]


class _BalanceCut:
    """Costs of runs of units, and how good a list of boundaries is."""

    def __init__(self, costs: Sequence[int], ranks: Sequence[int]):
        self.num_units, self.num_parts = len(costs), len(ranks)
        self.prefix = [0, *accumulate(costs)]
        self.total = self.prefix[-1]
        order = list(dict.fromkeys(ranks))
        self.ranks = [order.index(rank) for rank in ranks]
        self.num_ranks = len(order)

    def cost(self, start: int, stop: int) -> int:
        return self.prefix[stop] - self.prefix[start]

    def score(self, bounds: Sequence[int]) -> _Score:
        loads, parts = [0] * self.num_ranks, 0
        for part, rank in enumerate(self.ranks):
            cost = self.cost(bounds[part], bounds[part + 1])
            loads[rank] += cost
            parts += cost * cost
        return max(loads), sum(load * load for load in loads), parts


def _chain(cut: _BalanceCut) -> list[int]:
    """The best cut where every part counts for itself: first the smallest maximum, then the smallest squares."""
    limit = _chain_table(cut, None)[0][0]
    table = _chain_table(cut, limit)[1]
    bounds = [0]
    for choices in table:
        bounds.append(choices[bounds[-1]])
    return bounds


def _chain_table(cut: _BalanceCut, limit: int | None) -> tuple[list[int], list[list[int]]]:
    """(value by first unit, per part the end of that part by its first unit) of units i to n in the parts that remain.

    The value is the largest cost of a part, or with `limit` the sum of squares where no part costs more. Of equal
    values the one with the longer first part is kept: ties go to the front.
    """
    n, parts = cut.num_units, cut.num_parts
    worst = cut.total**2 * parts + 1
    values = [worst] * n + [0]
    ends: list[list[int]] = []
    for left in range(1, parts + 1):  # parts still to fill, from the last one on
        new, chosen = [worst] * (n + 1), [n] * (n + 1)
        for start in range(n - left, -1, -1):
            for end in range(start + 1, n - left + 2):
                cost = cut.cost(start, end)
                if limit is not None and cost > limit:
                    break
                value = max(values[end], cost) if limit is None else values[end] + cost * cost
                if value <= new[start]:
                    new[start], chosen[start] = value, end
        values = new
        ends.insert(0, chosen)
    return values, ends


def _descend(cut: _BalanceCut, bounds: list[int]) -> list[int]:
    """Move boundaries while that improves the score."""
    score = cut.score(bounds)
    while True:
        better = min(((cut.score(b), [-x for x in b]) for b in _neighbours(bounds)), default=(score, []))
        if better[0] >= score:
            return bounds
        score, bounds = better[0], [-x for x in better[1]]


def _neighbours(bounds: list[int]) -> Iterator[list[int]]:
    """Cuts in which a run of neighbouring boundaries is shifted by one: one part gains a unit and another loses one."""
    for first in range(1, len(bounds) - 1):
        for last in range(first, len(bounds) - 1):
            for step in (1, -1):
                moved = [b + step if first <= i <= last else b for i, b in enumerate(bounds)]
                if moved[first - 1] < moved[first] and moved[last] < moved[last + 1]:
                    yield moved


def _paired(cut: _BalanceCut, known: list[int], *, backwards: bool) -> list[int]:
    """The optimum for two parts per rank; `known` is some cut, which bounds the search.

    Backwards (V), the ranks consume the chain from both ends towards the middle; else the second round of parts begins
    at a unit that is tried in turn.
    """
    n, p = cut.num_units, cut.num_parts // 2
    middles = [n] if backwards else range(n - p, p - 1, -1)
    limit = cut.score(known)[0]
    for middle in middles:
        found = _rank_by_rank(cut, middle, limit, backwards, even=False)
        limit = limit if found is None else min(limit, cut.score(found)[0])
    best = known
    for middle in middles:
        bounds = _rank_by_rank(cut, middle, limit, backwards, even=True)
        if bounds is not None and cut.score(bounds) < cut.score(best):
            best = bounds
    return best


def _rank_by_rank(cut: _BalanceCut, middle: int, limit: int, backwards: bool, *, even: bool) -> list[int] | None:
    """The cut with the smallest largest rank, or with `even` the smallest squares; None if a rank must exceed `limit`.

    State after r ranks: (i, j), how far the first and the second parts of ranks 0 to r-1 reach; value: what is
    minimised, and the states on the way.
    """
    states: dict[tuple[int, int], tuple[tuple[int, int], list[tuple[int, int]]]] = {(0, middle): ((0, 0), [])}
    for left in range(cut.num_parts // 2 - 1, -1, -1):  # ranks still to come
        following: dict[tuple[int, int], tuple[tuple[int, int], list[tuple[int, int]]]] = {}
        for (i, j), (value, path) in states.items():
            for i2, j2 in _steps(cut, i, j, left, middle, limit, backwards):
                first, second = cut.cost(i, i2), cut.cost(min(j, j2), max(j, j2))
                load = first + second
                new = (value[0] + load**2, value[1] + first**2 + second**2) if even else (max(value[0], load), 0)
                if (i2, j2) not in following or new < following[i2, j2][0]:
                    following[i2, j2] = (new, [*path, (i2, j2)])
        states = following
    if not states:
        return None
    path = min(states.values(), key=lambda state: (state[0], [-i for i, _ in state[1]]))[1]
    seconds = [j for _, j in path]
    seconds = [*reversed(seconds[:-1]), cut.num_units] if backwards else seconds
    return [0, *(i for i, _ in path), *seconds]


def _steps(
    cut: _BalanceCut, i: int, j: int, left: int, middle: int, limit: int, backwards: bool
) -> Iterator[tuple[int, int]]:
    """Where the next rank's two parts may end: within `limit`, and with a rest that `left` ranks can hold."""
    consumed = cut.cost(0, i) + (cut.cost(j, middle) if backwards else cut.cost(middle, j))
    for i2 in range(i + 1, (j - 2 * left if backwards else middle - left + 1)):
        first = cut.cost(i, i2)
        if first > limit:
            return
        if backwards:
            ends = range(j - 1, i2 + 2 * left - 1, -1) if left else [i2]
        elif left == 0 and i2 != middle:
            continue
        else:
            ends = range(j + 1, cut.num_units - left + 1) if left else [cut.num_units]
        for j2 in ends:
            load = first + cut.cost(min(j, j2), max(j, j2))
            if load > limit:
                break
            if j2 != j and cut.total - consumed - load <= left * limit:
                yield i2, j2
