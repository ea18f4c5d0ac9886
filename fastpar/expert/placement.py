"""Where copies of hot experts go: a plan from measured loads.

Every expert has a home, the rank that has its parameters. Other ranks may have copies of it, in spare slots, and take
part of its tokens: `fastpar.expert.replicas` does that. Here it is planned, from loads alone.

Note: shares. DeepSeek's EPLB (https://github.com/deepseek-ai/EPLB) moves all experts about and splits the tokens of one
evenly over its copies. Here homes stay, for the parameters do, and even shares would often make it worse: with loads 60
and three times 40 on four ranks, one copy of the 60 on another rank gives 30 + 40 there. So every copy has a share of
its own, the one that makes the ranks as even as the copies allow. A further copy then never hurts, and copies can be
added one by one, to the busiest rank's largest expert, as long as that helps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fastpar.arguments import check_counts, checked, checked_fields

_SWEEPS = 50
_CLOSE = 1e-9  # of the mean load: a sweep that moves less is the last
_SUM_ERROR = 1e-6

_Parts = list[dict[int, float]]  # by expert: the load of each rank that has it


@checked_fields
@dataclass(frozen=True)
class Placement:
    """Which ranks have which experts, and what share of an expert's tokens each of them takes.

    ep      ranks of the expert group; rank r is the home of the experts from r E / ep on
    shares  by expert: (rank, share) of its home and of every copy, by rank; the shares of an expert add up to 1

    Worked example: expert 0 of four on two ranks, three quarters of its tokens at home, the rest on rank 1:

        Placement(2, (((0, 0.75), (1, 0.25)), ((0, 1.0),), ((1, 1.0),), ((1, 1.0),)))

    has `physical_to_logical` (0, 1, -1, 2, 3, 0), and for the loads [40, 10, 10, 20] `rank_loads` [40, 40].
    """

    ep: int
    shares: tuple[tuple[tuple[int, float], ...], ...]

    def __post_init__(self) -> None:
        if self.ep < 1 or not self.shares or len(self.shares) % self.ep:
            raise ValueError(f"the number of experts ({len(self.shares)}) must be divisible by ep ({self.ep})")
        for expert, shares in enumerate(self.shares):
            ranks = [rank for rank, _ in shares]
            if ranks != sorted(set(ranks)) or not all(0 <= rank < self.ep for rank in ranks):
                raise ValueError(
                    f"shares: ranks of copies of expert {expert} must ascend within 0..{self.ep - 1}, got {ranks}"
                )
            if self.home(expert) not in ranks:
                raise ValueError(f"expert {expert} must be on its home, rank {self.home(expert)}, got ranks {ranks}")
            parts = [share for _, share in shares]
            if not all(share >= 0 for share in parts) or abs(sum(parts) - 1) > _SUM_ERROR:
                raise ValueError(f"the shares of expert {expert} must be at least 0 and add up to 1, got {parts}")

    @classmethod
    @checked(computed=False)
    def even(cls, num_experts: int, copies: Sequence[Sequence[int]]) -> Placement:
        """From the experts that each rank has copies of; an expert's tokens are split evenly."""
        ep = len(copies)
        check_counts(1 << 20, num_experts=num_experts)
        if ep < 1 or num_experts < 1 or num_experts % ep:
            raise ValueError(f"num_experts ({num_experts}) must be divisible by the ranks in copies ({ep})")
        ranks = [[expert // (num_experts // ep)] for expert in range(num_experts)]
        for rank, experts in enumerate(copies):
            for expert in experts:
                if not 0 <= expert < num_experts:
                    raise ValueError(f"experts are 0..{num_experts - 1}, got a copy of {expert} on rank {rank}")
                ranks[expert].append(rank)
        return cls(ep, tuple(tuple((rank, 1 / len(mine)) for rank in sorted(mine)) for mine in ranks))

    @property
    def num_experts(self) -> int:
        """Experts, copies not counted."""
        return len(self.shares)

    @property
    def experts_per_rank(self) -> int:
        """Experts that are at home on a rank."""
        return len(self.shares) // self.ep

    @property
    def copies(self) -> tuple[tuple[int, ...], ...]:
        """The experts that each rank has copies of, ascending."""
        found: list[list[int]] = [[] for _ in range(self.ep)]
        for expert, shares in enumerate(self.shares):
            for rank, _ in shares:
                if rank != self.home(expert):
                    found[rank].append(expert)
        return tuple(tuple(mine) for mine in found)

    @property
    def slots(self) -> int:
        """Copies on the rank that has most."""
        return max(len(mine) for mine in self.copies)

    @property
    def physical_to_logical(self) -> tuple[int, ...]:
        """Each rank's own experts, then its copies in `slots` slots, -1 for one that is not used."""
        per_rank, slots = self.experts_per_rank, self.slots
        found: list[int] = []
        for rank, mine in enumerate(self.copies):
            found += [*range(rank * per_rank, (rank + 1) * per_rank), *mine, *[-1] * (slots - len(mine))]
        return tuple(found)

    @checked(computed=False)
    def home(self, expert: int) -> int:
        """The rank that has the expert's parameters."""
        return expert // self.experts_per_rank

    @checked(computed=False)
    def rank_loads(self, loads: Tensor | Sequence[float]) -> Tensor:
        """float64 [ep]: what each rank has to do if the experts' loads are `loads` [E]."""
        values = _values(loads)
        if len(values) != self.num_experts:
            raise ValueError(f"loads must be those of {self.num_experts} experts, got {len(values)}")
        found = [0.0] * self.ep
        for load, shares in zip(values, self.shares, strict=True):
            for rank, share in shares:
                found[rank] += load * share
        return torch.tensor(found, dtype=torch.float64)


@checked()
def plan_placement(loads: Tensor | Sequence[float], ep: int, replicas: int, *, min_gain: float = 0.01) -> Placement:
    """Copies that make the busiest rank's load as small as at most `replicas` of them on each rank can.

        loads     [E]   tokens of each expert, of all ranks together
        ep        ranks of the expert group, which divides E
        min_gain  a copy has to lower the busiest rank's load by this part of the mean to be worth its weights

    Greedy: of the busiest rank the largest expert whose copy on the least busy rank with a free slot gains enough, then
    again. After every copy the shares are those of the smallest loads that these copies allow, the largest first. The
    same numbers give the same plan on every rank: it is computed in float64, one addition after the other.

    Worked example: loads [50, 10, 10, 10], 2 ranks, 1 slot: rank 0 has 60 of 80. A copy of expert 0 on rank 1 takes 20
    of its 50: both have 40.
    """
    values = _values(loads)
    if ep < 1 or not values or len(values) % ep:
        raise ValueError(f"loads must be [E] with E ({len(values)}) divisible by ep ({ep})")
    if replicas < 0:
        raise ValueError(f"replicas must not be negative, got {replicas}")
    if min_gain <= 0:
        raise ValueError(f"min_gain must be positive, got {min_gain}")
    if not all(0 <= value < float("inf") for value in values):
        raise ValueError("loads must be finite and not negative")
    per_rank = len(values) // ep
    parts: _Parts = [{expert // per_rank: load} for expert, load in enumerate(values)]
    free = [replicas] * ep
    mean = sum(values) / ep
    while mean > 0:
        found = _with_another_copy(parts, free, min_gain * mean, _CLOSE * mean)
        if found is None:
            break
        parts, target = found
        free[target] -= 1
    return Placement(ep, tuple(_shares(mine, expert // per_rank) for expert, mine in enumerate(parts)))


def _values(loads: Tensor | Sequence[float]) -> list[float]:
    found = loads.tolist() if isinstance(loads, Tensor) else list(loads)
    if isinstance(loads, Tensor) and loads.dim() != 1:
        raise ValueError(f"loads must be [E], got {tuple(loads.shape)}")
    return [float(value) for value in found]


def _rank_loads(parts: _Parts, ep: int) -> list[float]:
    found = [0.0] * ep
    for mine in parts:
        for rank, load in mine.items():
            found[rank] += load
    return found


def _with_another_copy(parts: _Parts, free: list[int], gain: float, close: float) -> tuple[_Parts, int] | None:
    """The parts with one more copy, and the rank that has it; None where none gains so much."""
    loads = _rank_loads(parts, len(free))
    busiest = max(range(len(free)), key=lambda rank: (loads[rank], -rank))
    on_busiest = [expert for expert, mine in enumerate(parts) if mine.get(busiest, 0.0) > 0]
    for expert in sorted(on_busiest, key=lambda expert: (-parts[expert][busiest], expert)):
        if parts[expert][busiest] < gain:
            return None  # nor would a smaller one gain so much
        targets = [rank for rank, slots in enumerate(free) if slots and rank not in parts[expert]]
        if not targets:
            continue
        target = min(targets, key=lambda rank: (loads[rank], rank))
        tried = list(parts)
        tried[expert] = {**parts[expert], target: 0.0}
        tried = _levelled(tried, len(free), close)
        if loads[busiest] - _rank_loads(tried, len(free))[busiest] >= gain:
            return tried, target
    return None


def _levelled(parts: _Parts, ep: int, close: float) -> _Parts:
    """The parts of experts with copies chosen anew, for the smallest loads, the largest first.

    One expert after the other is split so that its ranks are level, in turns: this lowers the sum of squares, which is
    convex and has its minimum where no load can be made smaller but at the cost of a smaller one.
    """
    parts, loads = list(parts), _rank_loads(parts, ep)
    split = [expert for expert, mine in enumerate(parts) if len(mine) > 1]
    for _ in range(_SWEEPS if len(split) > 1 else 1):
        moved = 0.0
        for expert in split:
            mine = parts[expert]
            others = {rank: loads[rank] - load for rank, load in mine.items()}
            parts[expert] = _filled(sum(mine.values()), others)
            for rank, load in parts[expert].items():
                moved = max(moved, abs(load - mine[rank]))
                loads[rank] = others[rank] + load
        if moved <= close:
            break
    return parts


def _filled(load: float, others: dict[int, float]) -> dict[int, float]:
    """The load poured over ranks that have others: as water, up to one level."""
    heights = sorted((height, rank) for rank, height in others.items())
    below = level = 0.0
    for count, (height, _) in enumerate(heights, start=1):
        if count > 1 and level <= height:
            break
        below += height
        level = (load + below) / count
    return {rank: max(level - height, 0.0) for rank, height in others.items()}


def _shares(parts: dict[int, float], home: int) -> tuple[tuple[int, float], ...]:
    """Copies that have got nothing in the end are none."""
    total = sum(parts.values())
    if total == 0:
        return ((home, 1.0),)
    return tuple((rank, load / total) for rank, load in sorted(parts.items()) if load > 0 or rank == home)
