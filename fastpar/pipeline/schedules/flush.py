"""Schedules with whole backwards and one flush per step: naive, GPipe, the 1F1B family, breadth-first.

On every rank they are an order of the forwards, an order of the backwards, and how many forwards run before the first
backward (`alternate`). In the formulas p is the number of ranks, m of microbatches, v of stages per rank, r a rank;
F, B, W are the times of forward, backward for the input and for the weights *per rank and microbatch*;
"idle" is the makespan less the time that a rank computes, with transfers that take no time; "in flight" is the largest
number of stage inputs that a rank holds for backwards still to come.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from fastpar.arguments import checked
from fastpar.pipeline.schedules.schedule import Action, ActionType, Schedule


@checked(computed=False)
def naive(num_ranks: int, num_microbatches: int) -> Schedule:
    """Model parallelism without a pipeline: one microbatch at a time passes all ranks, forth and back.

    All but one rank wait at any time. It is the baseline, and the cheapest in memory.

        idle        (p-1) m (F+B+W)
        in flight   1
        use it      to debug a partition, or where the batch cannot be split and only memory counts

    naive(2, 2):
        rank 0: 0F0 0B0 0F1 0B1
        rank 1: 1F0 1B0 1F1 1B1
    """
    check_sizes(num_ranks, num_microbatches)
    return _one_stage_per_rank("naive", num_ranks, num_microbatches, [0] * num_ranks)


@checked(computed=False)
def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards (GPipe, arXiv 1811.06965).

    The pipeline fills and drains once in each direction. Hop latency costs least of all schedules, memory most.

        idle        (p-1)(F+B+W), for any F, B, W
        makespan    sum F + (m-1) max F + sum(B+W) + (m-1) max(B+W) for unequal stages
        in flight   m
        hops        hop latency c adds 2c(p-1)
        use it      with few microbatches, with recomputed activations, or over slow links

    gpipe(2, 3):
        rank 0: 0F0 0F1 0F2 0B0 0B1 0B2
        rank 1: 1F0 1F1 1F2 1B0 1B1 1B2
    """
    check_sizes(num_ranks, num_microbatches)
    return _one_stage_per_rank("gpipe", num_ranks, num_microbatches, [num_microbatches] * num_ranks)


@checked(computed=False)
def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """One forward, one backward (PipeDream-Flush; arXiv 2104.04473): a backward runs as soon as it can.

    Rank r first runs the p-1-r forwards that lie between it and the last rank, then a forward and a backward in turn.
    GPipe's time with memory that does not grow with m.

        idle        (p-1)(F+B+W) for equal stages; >= for unequal ones
        in flight   min(m, p-r)
        hops        hop latency c adds 2c (p-1 + m-1 - ceil((m-1)/p)) for equal stages: nearly 2c per microbatch
        use it      as the default where links are fast

    one_f_one_b(2, 3):
        rank 0: 0F0 0F1 0B0 0F2 0B1 0B2
        rank 1: 1F0 1B0 1F1 1B1 1F2 1B2
    """
    check_sizes(num_ranks, num_microbatches)
    warmups = [num_ranks - 1 - rank for rank in range(num_ranks)]
    return _one_stage_per_rank("1f1b", num_ranks, num_microbatches, warmups)


@checked(computed=False)
def eager_1f1b(num_ranks: int, num_microbatches: int) -> Schedule:
    """1F1B with twice the warm-up, 2(p-1-r) forwards on rank r: transfers in both directions hide behind compute.

    A microbatch that waits at each rank absorbs the latency of the hops, which plain 1F1B pays for every microbatch.

        idle        (p-1)(F+B+W)
        hops        hop latency c adds only 2c(p-1), as long as 2c <= F+B+W
        in flight   min(m, 2(p-1-r)+1)
        use it      over slow links, when the memory is there

    The same order is `interleaved_1f1b` with one stage per rank (arXiv 2104.04473).

    eager_1f1b(2, 4):
        rank 0: 0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
        rank 1: 1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3
    """
    check_sizes(num_ranks, num_microbatches)
    warmups = [2 * (num_ranks - 1 - rank) for rank in range(num_ranks)]
    return _one_stage_per_rank("eager_1f1b", num_ranks, num_microbatches, warmups)


@checked(computed=False)
def interleaved_1f1b(num_ranks: int, num_microbatches: int, *, stages_per_rank: int = 2) -> Schedule:
    """1F1B over v stages per rank (arXiv 2104.04473): the model winds around the ranks v times.

    Stage s is on rank s mod p. Microbatches pass in rounds, each through all stages of a rank before the next round
    starts. Fill and drain last only as long as a stage, which is v times shorter; there are v times more transfers.

        idle        (p-1)(F+B+W)/v, for any F, B, W, from p microbatches on; (p-1 + (v-1)(p-m))(F+B+W)/v for fewer
        in flight   min(m v, (v-1) g + 2(p-1-r) + 1) stage inputs, with rounds of g microbatches
        use it      with few microbatches per rank, when links are fast

    The paper needs m to be a multiple of p and has rounds of p. Here m is cut into floor(m/p) rounds as equal as
    possible, larger ones first: a round shorter than p would leave ranks idle in each of its v passes. Fewer than p
    microbatches are one round.

    interleaved_1f1b(2, 2):
        rank 0: 0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
        rank 1: 1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1
    """
    check_sizes(num_ranks, num_microbatches, stages_per_rank)
    rounds = rounds_of(num_ranks, num_microbatches)
    actions = []
    for rank in range(num_ranks):
        forwards, backwards = interleaved_orders(rank, num_ranks, rounds, stages_per_rank, ActionType.BACKWARD)
        actions.append(alternate(forwards, backwards, interleaved_warmup(rank, num_ranks, rounds, stages_per_rank)))
    name = f"interleaved_1f1b(v={stages_per_rank})"
    return Schedule.of_one_chain(name, looped_ranks(num_ranks, stages_per_rank), num_microbatches, actions)


@checked(computed=False)
def looped_bfs(num_ranks: int, num_microbatches: int, *, stages_per_rank: int = 2) -> Schedule:
    """Breadth-first pipeline (arXiv 2211.05953): all microbatches pass a stage before the rank turns to its next stage.

    GPipe over a model that winds around the ranks v times. Each stage is used in one stretch per direction, so sharded
    parameters are gathered twice per step, however many microbatches there are.

        idle        (p-1)(F+B+W)/v from p microbatches on; (p-1 + (v-1)(p-m))(F+B+W)/v for fewer
        in flight   m v stage inputs
        use it      together with sharded parameters

    Backwards ascend in the microbatches, so that gradients add up in the sequential order.

    looped_bfs(2, 2):
        rank 0: 0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
        rank 1: 1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1
    """
    check_sizes(num_ranks, num_microbatches, stages_per_rank)
    one_round = [range(num_microbatches)]
    actions = []
    for rank in range(num_ranks):
        forwards, backwards = interleaved_orders(rank, num_ranks, one_round, stages_per_rank, ActionType.BACKWARD)
        actions.append(forwards + backwards)
    name = f"looped_bfs(v={stages_per_rank})"
    return Schedule.of_one_chain(name, looped_ranks(num_ranks, stages_per_rank), num_microbatches, actions)


# What the generators share


def alternate(forwards: Sequence[Action], backwards: Sequence[Action], warmup: int) -> list[Action]:
    """The first `warmup` forwards, then a forward and a backward in turn, then the backwards that remain."""
    warmup = min(warmup, len(forwards))
    actions = list(forwards[:warmup])
    steady = len(forwards) - warmup
    for forward, backward in zip(forwards[warmup:], backwards[:steady], strict=True):
        actions += [forward, backward]
    return actions + list(backwards[steady:])


def rounds_of(num_ranks: int, num_microbatches: int) -> list[range]:
    """The rounds of an interleaved schedule: as many as hold num_ranks microbatches, as equal as possible.

    rounds_of(4, 11) is [range(0, 6), range(6, 11)]. Sizes never grow: a backward finds its forward done then.
    """
    count = max(1, num_microbatches // num_ranks)
    size, larger = divmod(num_microbatches, count)
    ends = [0]
    for index in range(count):
        ends.append(ends[-1] + size + (index < larger))
    return [range(start, end) for start, end in itertools.pairwise(ends)]


def interleaved_orders(
    rank: int, num_ranks: int, rounds: Sequence[range], stages_per_rank: int, backward: ActionType
) -> tuple[list[Action], list[Action]]:
    """The forwards and the backwards of a rank that takes each round through its stages, stage by stage."""
    stages = [rank + loop * num_ranks for loop in range(stages_per_rank)]
    forwards = [Action(ActionType.FORWARD, stage, index) for own in rounds for stage in stages for index in own]
    backwards = [Action(backward, stage, index) for own in rounds for stage in reversed(stages) for index in own]
    return forwards, backwards


def interleaved_warmup(rank: int, num_ranks: int, rounds: Sequence[range], stages_per_rank: int) -> int:
    """Forwards before the first backward: until the last stage has its first microbatch, and the way to it and back."""
    return (stages_per_rank - 1) * len(rounds[0]) + 2 * (num_ranks - 1 - rank)


def looped_ranks(num_ranks: int, stages_per_rank: int) -> list[int]:
    """The ranks of stages that wind around them: 0, 1, ..., p-1, 0, 1, ..."""
    return [stage % num_ranks for stage in range(num_ranks * stages_per_rank)]


MAX_PASSES = 1 << 28


def check_sizes(num_ranks: int, num_microbatches: int, stages_per_rank: int = 1) -> None:
    """Raise ValueError unless there is at least one of each."""
    for what, value in (
        ("num_ranks", num_ranks), ("num_microbatches", num_microbatches), ("stages_per_rank", stages_per_rank)
    ):  # fmt: skip
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{what} must be an integer of at least 1, got {value!r}")
    if num_ranks * num_microbatches * stages_per_rank > MAX_PASSES:
        raise ValueError(
            f"num_ranks ({num_ranks}) times num_microbatches ({num_microbatches}) times stages_per_rank "
            f"({stages_per_rank}) must be at most {MAX_PASSES}: no list of actions is that long"
        )


def _one_stage_per_rank(name: str, num_ranks: int, num_microbatches: int, warmups: Sequence[int]) -> Schedule:
    rounds = [range(num_microbatches)]
    actions = []
    for rank, warmup in enumerate(warmups):
        forwards, backwards = interleaved_orders(rank, num_ranks, rounds, 1, ActionType.BACKWARD)
        actions.append(alternate(forwards, backwards, warmup))
    return Schedule.of_one_chain(name, range(num_ranks), num_microbatches, actions)
