"""How many layers each pipeline rank gets, and what it recomputes: the least time of the slowest rank.

With equal layers a stage is told by their number: t_i(n) is the fastest of {none, selective, full} whose memory fits on
rank i with n layers. t_i grows with n, since more layers take longer and leave less room; so the least bound t with
sum of max{n: t_i(n) <= t} >= L is found by bisection among the values that t_i(n) has, and is the optimum that dynamic
programming over cuts would find.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StageChoice:
    """A rank's stage: seconds of a microbatch, and the word of its recomputation."""

    seconds: float
    recompute: str


@dataclass(frozen=True)
class Cut:
    """Layers and choices by rank, and the seconds of the slowest."""

    layers: tuple[int, ...]
    choices: tuple[StageChoice, ...]
    slowest: float


def best_cut(num_layers: int, num_ranks: int, stage: Callable[[int, int], StageChoice | None]) -> Cut | None:
    """The cut whose slowest rank is fastest; None if none fits.

    stage   (rank, number of layers) -> its fastest choice that fits, or None. The first and the last rank may have no
            layer, beside the embedding and the head; others have at least one

    Among equal cuts layers lie where they cost least, later ranks first.
    """
    least = [0 if rank in (0, num_ranks - 1) and num_ranks > 1 else 1 for rank in range(num_ranks)]
    table = [[stage(rank, count) for count in range(num_layers + 1)] for rank in range(num_ranks)]
    seconds = [[math.inf if choice is None else choice.seconds for choice in row] for row in table]
    for row in seconds:  # numerical noise must not break the order that bisection needs
        for count in range(1, len(row)):
            row[count] = max(row[count], row[count - 1])
    bounds = sorted({value for row in seconds for value in row if value < math.inf})

    def room(bound: float) -> list[int]:
        return [_most(row, bound) for row in seconds]

    low, high = 0, len(bounds)
    while low < high:
        middle = (low + high) // 2
        counts = room(bounds[middle])
        fits = sum(counts) >= num_layers and all(count >= few for count, few in zip(counts, least, strict=True))
        low, high = (low, middle) if fits else (middle + 1, high)
    if low == len(bounds):
        return None
    counts = room(bounds[low])
    while sum(counts) > num_layers:
        worst = max(
            (rank for rank in range(num_ranks) if counts[rank] > least[rank]),
            key=lambda rank: (seconds[rank][counts[rank]], -rank),
            default=None,
        )
        if worst is None:
            return None
        counts[worst] -= 1
    choices = [table[rank][count] for rank, count in enumerate(counts)]
    assert all(choice is not None for choice in choices)
    found = tuple(choice for choice in choices if choice is not None)
    return Cut(tuple(counts), found, max(choice.seconds for choice in found))


def _most(row: Sequence[float], bound: float) -> int:
    """The most layers within the bound; -1 for none, not even without layers."""
    return bisect_left(row, math.nextafter(bound, math.inf)) - 1


def even_parts(num_layers: int, ranks: Sequence[int], head: float) -> list[int]:
    """Layers of each part when the costliest rank costs least: each layer goes to the rank that has least so far.

    ranks   the rank of each part; the last part has the head, which costs as much as `head` layers

        even_parts(10, [0, 1, 2, 3], 2.0) == [3, 3, 3, 1]
        even_parts(8, [0, 1, 1, 0], 2.0) == [2, 3, 2, 1]
    """
    own: dict[int, list[int]] = {}
    for part, rank in enumerate(ranks):
        own.setdefault(rank, []).append(part)
    waiting = [(head if rank == ranks[-1] else 0.0, rank) for rank in own]
    heapq.heapify(waiting)
    counts = dict.fromkeys(own, 0)
    for _ in range(num_layers):
        load, rank = heapq.heappop(waiting)
        counts[rank] += 1
        heapq.heappush(waiting, (load + 1.0, rank))
    parts = [0] * len(ranks)
    for rank, mine in own.items():
        each, more = divmod(counts[rank], len(mine))
        for index, part in enumerate(mine):
            parts[part] = each + (index < more)
    return parts
