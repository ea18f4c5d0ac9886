"""Schedules with one thing changed, and the valid ones that they come from."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from fastpar.pipeline import Action, ActionType, Schedule, ScheduleError, make_schedule, schedule_names
from fastpar.pipeline.schedules.lowering import add_communication, add_reduce_grad, add_unshard

T = ActionType
OPTIONS: dict[str, list[dict[str, int | bool]]] = {
    "interleaved_1f1b": [{}, {"stages_per_rank": 3}],
    "looped_bfs": [{}, {"stages_per_rank": 3}],
    "zb_h1": [{}, {"stages_per_rank": 2}],
    "pipedream": [{}, {"vertical_sync": True}],
}
FORMS = {
    T.FORWARD: T.BACKWARD,
    T.BACKWARD: T.BACKWARD_INPUT,
    T.BACKWARD_INPUT: T.BACKWARD,
    T.BACKWARD_WEIGHT: T.FORWARD,
}
FORMS |= {T.SEND_F: T.SEND_B, T.SEND_B: T.SEND_F, T.RECV_F: T.RECV_B, T.RECV_B: T.RECV_F, T.STASH: T.DROP}
FORMS |= {T.DROP: T.STASH, T.STEP: T.REDUCE_GRAD, T.REDUCE_GRAD: T.STEP, T.UNSHARD: T.RESHARD, T.RESHARD: T.UNSHARD}


def generated(num_ranks: int, num_microbatches: int) -> Iterator[Schedule]:
    """Every fixed schedule that exists for these sizes, compute only."""
    for name in schedule_names():
        for options in OPTIONS.get(name, [{}]):
            try:
                schedule = make_schedule(name, num_ranks, num_microbatches, **options)
            except ValueError:
                continue  # the schedule does not exist at this size; tests of the generators pin which do
            tail = "".join(f" {key}={value}" for key, value in options.items())
            yield replace(schedule, name=f"{name} p={num_ranks} m={num_microbatches}{tail}")


def lowered(schedule: Schedule, *, edges: tuple[tuple[int, int], ...] = (), sharded: bool = False) -> Schedule:
    """The schedule as it is executed; what updates its weights on the way is never sharded."""
    if sharded and not has_steps(schedule):
        schedule = with_steps(add_reduce_grad(add_unshard(schedule), data_parallel=True))
    return add_communication(schedule, edges or None)


def has_steps(schedule: Schedule) -> bool:
    return any(action.type is T.STEP for own in schedule.actions for action in own)


def with_steps(schedule: Schedule) -> Schedule:
    """A STEP of every stage in the end, unless the schedule has its own."""
    if has_steps(schedule):
        return schedule
    steps = [[Action(T.STEP, stage) for stage in schedule.stages_of(rank)] for rank in range(schedule.num_ranks)]
    return replace(schedule, actions=tuple((*own, *more) for own, more in zip(schedule.actions, steps, strict=True)))


def with_rank(schedule: Schedule, rank: int, own: list[Action]) -> Schedule:
    actions = tuple(tuple(own) if r == rank else other for r, other in enumerate(schedule.actions))
    return replace(schedule, actions=actions)


def positions(schedule: Schedule) -> list[tuple[int, int]]:
    return [(rank, position) for rank, own in enumerate(schedule.actions) for position in range(len(own))]


def mutants_at(schedule: Schedule, rank: int, position: int, rng: random.Random) -> Iterator[tuple[str, Schedule]]:
    """What can go wrong with one action; a few of these are harmless."""
    own = list(schedule.actions[rank])
    action = own[position]
    rest = own[:position] + own[position + 1 :]
    yield "drop", with_rank(schedule, rank, rest)
    for where in {position + 1, rng.randint(0, len(own))}:
        yield "duplicate", with_rank(schedule, rank, [*own[:where], action, *own[where:]])
    for other in {position + 1, rng.randrange(len(own)), rng.randrange(len(own))}:
        if other < len(own) and other != position:
            swapped = list(own)
            swapped[position], swapped[other] = own[other], own[position]
            yield "swap", with_rank(schedule, rank, swapped)
    for where in {0, len(rest), rng.randint(0, len(rest))} - {position}:
        yield "move", with_rank(schedule, rank, [*rest[:where], action, *rest[where:]])
    elsewhere = rng.randrange(schedule.num_ranks)
    if elsewhere != rank:
        there = list(schedule.actions[elsewhere])
        where = rng.randint(0, len(there))
        moved = with_rank(schedule, rank, rest)
        yield "other rank", with_rank(moved, elsewhere, [*there[:where], action, *there[where:]])
    for changed in changes(schedule, action, rng):
        yield "change", with_rank(schedule, rank, [*own[:position], changed, *own[position + 1 :]])
    if action.parts:
        yield "take apart", with_rank(schedule, rank, [*own[:position], *action.parts, *own[position + 1 :]])
    elif action.type.is_compute and position + 1 < len(own) and own[position + 1].type.is_compute:
        together = Action.overlap(action, own[position + 1])
        yield "overlap", with_rank(schedule, rank, [*own[:position], together, *own[position + 2 :]])


def changes(schedule: Schedule, action: Action, rng: random.Random) -> Iterator[Action]:
    """The action with another microbatch, stage, version, peer or type."""
    if action.parts:
        index = rng.randrange(len(action.parts))
        for part in changes(schedule, action.parts[index], rng):
            yield Action.overlap(*action.parts[:index], part, *action.parts[index + 1 :])
        return
    fields: list[dict[str, object]] = [{"type": FORMS[action.type]}, {"stage": schedule.num_stages}]
    fields += [{"stage": rng.randrange(schedule.num_stages)}]
    if action.microbatch is not None:
        fields += [{"microbatch": rng.randrange(schedule.num_microbatches)}, {"microbatch": schedule.num_microbatches}]
    if action.type.is_transfer:
        fields += [{"peer": rng.randrange(schedule.num_stages)}, {"peer": schedule.num_stages}]
    if action.version is not None:
        fields += [{"version": action.version + 1}, {"version": max(0, action.version - 1)}, {"version": None}]
    elif action.type.is_compute:
        fields += [{"version": 0}, {"version": 1}]
    for change in fields:
        try:
            changed = replace(action, **change)
        except ScheduleError:
            continue  # the action itself refuses, such as STASH without a version
        if changed != action:
            yield changed


def mutants(schedule: Schedule, rng: random.Random, at_most: int | None = None) -> Iterator[tuple[str, Schedule]]:
    """Mutants at all positions, or at `at_most` of them; and as many with two changes."""
    places = positions(schedule)
    if at_most is not None and len(places) > at_most:
        places = rng.sample(places, at_most)
    for rank, position in places:
        once = list(mutants_at(schedule, rank, position, rng))
        yield from once
        _, first = rng.choice(once)
        rank, position = rng.choice(positions(first))
        yield "twice", rng.choice(list(mutants_at(first, rank, position, rng)))[1]
