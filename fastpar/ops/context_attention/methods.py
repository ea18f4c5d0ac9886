"""How attention is spread over the ranks of a group: the options, and which heads each rank has.

Ranks are a grid of rings and heads: rank = ring * u + head rank. Ulysses over the u neighbours of a ring position gives
each of them all tokens of these neighbours and its share of the heads; the r = P / u positions of a ring then exchange
keys. "ulysses" is u = P and "ring" is u = 1.

Source: Jacobs et al. 2023 (arXiv:2309.14509); Fang and Zhao 2024 (arXiv:2405.07719).
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import NamedTuple

from fastpar.arguments import check_counts, checked_fields

MAX_RANKS = 1 << 20
Span = tuple[int, int]  # [start, stop)


@checked_fields
@dataclass(frozen=True)
class Usp:
    """Ulysses over neighbouring ranks, a ring over the rest: a `method` of `context_attention`.

    ulysses  ranks that divide the heads; a divisor of the group's size
    uneven   allow ranks to have different numbers of heads: those with more are waited for
    """

    ulysses: int
    uneven: bool = False

    def __post_init__(self) -> None:
        check_counts(MAX_RANKS, ulysses=self.ulysses)


@checked_fields
@dataclass(frozen=True)
class GatherKeys:
    """Keys and values gathered from all ranks: a `method` of `context_attention`.

    head_groups  gather so many groups of key/value heads one after the other, each during the attention of the one
                 before: all but the first are hidden, and no more than two are in memory
    """

    head_groups: int = 1

    def __post_init__(self) -> None:
        check_counts(MAX_RANKS, head_groups=self.head_groups)


Method = str | Usp | GatherKeys


class Spread(NamedTuple):
    """A method, resolved for a group.

    ulysses  ranks that divide the heads
    gather   groups of heads whose keys are gathered one after the other; 0: keys go round a ring
    uneven   whether the heads need not be spread evenly
    """

    ulysses: int = 1
    gather: int = 0
    uneven: bool = False


@dataclass(frozen=True)
class HeadSpread:
    """Which heads each of the head ranks has: query heads, and the key/value heads that those read.

    Example, 6 query heads and 3 key/value heads over 2 ranks: queries ((0, 3), (3, 6)), keys ((0, 2), (1, 3)).
    """

    queries: tuple[Span, ...]
    keys: tuple[Span, ...]
    group: int  # query heads that read one key/value head

    @property
    def is_shared(self) -> bool:
        """Whether several ranks read one key/value head: each has a part of its gradient."""
        return any(this[1] > following[0] for this, following in zip(self.keys, self.keys[1:], strict=False))

    def segments(self, rank: int) -> tuple[tuple[Span, Span], ...]:
        """(local query heads, local key/value heads) of a rank, in parts in which each of the latter serves equally
        many of the former: what grouped-query attention can compute in one call.
        """
        (first, last), (key, stop) = self.queries[rank], self.keys[rank]
        found: list[tuple[Span, Span]] = []
        for head in range(key, stop):
            begin, end = max(first, head * self.group) - first, min(last, (head + 1) * self.group) - first
            if found and end - begin == _serves(found[-1]):
                (begin, _), (local, _) = found.pop()
            else:
                local = head - key
            found.append(((begin, end), (local, head - key + 1)))
        return tuple(found)


def _serves(segment: tuple[Span, Span]) -> int:
    (q0, q1), (k0, k1) = segment
    return (q1 - q0) // (k1 - k0)


@functools.lru_cache(maxsize=256)
def spread_heads(num_heads: int, num_kv_heads: int, ranks: int, uneven: bool = False) -> HeadSpread:
    """Equally many query heads for each rank, in their order; with `uneven` cut between groups where there are as many
    key/value heads as ranks. A key/value head that several ranks read goes to each of them.

    Raises ValueError for heads that cannot be spread so.
    """
    group = num_heads // num_kv_heads
    if num_heads % ranks and not uneven:
        works = [n for n in range(1, num_heads + 1) if num_heads % n == 0]
        raise ValueError(
            f"{num_heads} query heads cannot be spread over ulysses={ranks} ranks evenly; {_listed(works)} can. "
            f"Uneven heads: Usp({ranks}, uneven=True)"
        )
    if num_heads < ranks:
        raise ValueError(f"{num_heads} query heads cannot be spread over ulysses={ranks} ranks: one of them had none")
    if num_heads % ranks and num_kv_heads >= ranks:
        queries = tuple((start * group, stop * group) for start, stop in _evenly(num_kv_heads, ranks))
    else:
        queries = _evenly(num_heads, ranks)
    keys = tuple((start // group, -(-stop // group)) for start, stop in queries)
    return HeadSpread(queries, keys, group)


def _listed(numbers: list[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"


def head_groups(num_heads: int, num_kv_heads: int, groups: int) -> tuple[tuple[Span, Span], ...]:
    """(query heads, key/value heads) of each of so many groups, as equal as they can be."""
    if groups > num_kv_heads:
        raise ValueError(f"head_groups must be at most the {num_kv_heads} key/value heads, got {groups}")
    group = num_heads // num_kv_heads
    return tuple(((start * group, stop * group), (start, stop)) for start, stop in _evenly(num_kv_heads, groups))


def _evenly(total: int, parts: int) -> tuple[Span, ...]:
    """`total` heads in so many spans, which differ by one head at most."""
    cuts = [total * part // parts for part in range(parts + 1)]
    return tuple(itertools.pairwise(cuts))
