"""A head that is sharded over all ranks, as a pass over schedules: `shard_head`.

The output layer of a language model costs as much as several of its layers, and its weights weigh as much, so the rank
that holds it is slower than the others, and all wait for it. Sharded by vocabulary over all p ranks it costs everybody
the same (vocabulary parallelism, arXiv 2411.05288, whose Algorithm 2 this is: one exchange between S and T):

    4F3             the last stage makes the hidden states, and sends them to all ranks
    5S3  on each    logits of the rank's shard, and what of loss and gradient follows from them alone; goes back
    4B3  (or 4I3)   combines the shards' results to the loss and its gradient, and sends the normalisers to all ranks
    5T3  on each    gradients of the shard's weights

S and T have the stage number after the last stage's. The messages belong to the actions: each has one use, right where
it arrives, and nothing could stand between.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from fastpar.arguments import checked
from fastpar.pipeline.schedules.costs import Costs, Number, common_denominator
from fastpar.pipeline.schedules.schedule import Action, ActionType, Schedule, ScheduleError
from fastpar.pipeline.simulation.simulate import activation_peaks, simulate

_F, _B, _I, _W = (
    ActionType.FORWARD,
    ActionType.BACKWARD,
    ActionType.BACKWARD_INPUT,
    ActionType.BACKWARD_WEIGHT,
)
_S, _T = ActionType.HEAD_FORWARD, ActionType.HEAD_WEIGHT
_REFUSED = (ActionType.STEP, ActionType.STASH, ActionType.DROP)

# What a rank does first where several things could start at the same time.
_PRIORITIES = ((_S, None, _T), (_S, _T, None), (None, _S, _T))  # None: the next action of the schedule


@checked(computed=False)
def shard_head(
    schedule: Schedule, costs: Costs | None = None, *, extra_forwards: int = 1, max_kept: int = 2
) -> Schedule:
    """The schedule with a head that has a shard on every rank: S and T of every microbatch on each of them.

    What is in the schedule stays in its order, but that each rank may run up to `extra_forwards` more forwards before
    its first backward: a backward of the last stage waits for S on all ranks, and 1F1B would stand still meanwhile.
    Of these, and of several rules for the places of S and T, those are taken with the shortest simulated time (then
    the least memory). S runs in the order of the last stage's forwards; T ascends, so that sums round as ever.

    costs           what is simulated; default: F, I and W take 1, and the whole head as much as a stage
    extra_forwards  each costs a rank the activations of one microbatch more
    max_kept        microbatches between their S and their T on a rank, which keeps logits and hidden states of each

    Of 1F1B on two ranks:

        rank 0: 0F0 0F1 0B0 0F2 0B1 0B2  ->  0F0 0F1 2S0 0F2 2S1 0B0 2T0 2S2 0B1 2T1 0B2 2T2
        rank 1: 1F0 1B0 1F1 1B1 1F2 1B2  ->  1F0 2S0 1F1 2S1 1B0 1F2 1B1 2T0 2S2 1B2 2T1 2T2

    Raises ScheduleError for a schedule that updates weights on its way, has two chains (DualPipe), a sharded head
    already, or transfers: `add_communication` comes after this.
    """
    _check(schedule)
    if not (0 <= extra_forwards <= 1 << 16 and 1 <= max_kept <= 1 << 16):
        raise ValueError(
            f"extra_forwards must be at least 0 and max_kept at least 1, got {extra_forwards} and {max_kept}"
        )
    share = Fraction(1, schedule.num_ranks)
    costs = costs or Costs(head_forward=2 * share, head_weight=share)
    costs.check(schedule)
    schedule = replace(schedule, name=f"{schedule.name}+sharded_head", sharded_head=True)
    best: tuple[tuple[Number, ...], Schedule] | None = None
    for extra in range(extra_forwards + 1):
        pulled = schedule if extra == 0 else _pull_forwards(schedule, extra)
        for kept, priority in itertools.product(range(1, max_kept + 1), _PRIORITIES):
            actions = None if pulled is None else _Insertion(pulled, costs, priority, kept).run()
            if actions is None:
                continue  # with forwards this early, or with as little kept, ranks would wait for each other
            found = replace(schedule, actions=actions)
            cost = (simulate(found, costs).makespan, max(activation_peaks(found, until="weight")), kept)
            if best is None or cost < best[0]:
                best = cost, found
    if best is None:
        raise ScheduleError(f"{schedule.name} cannot run: ranks wait for each other (see `validate`)")
    return best[1]


def _check(schedule: Schedule) -> None:
    if schedule.sharded_head:
        raise ScheduleError(f"{schedule.name} has a sharded head already")
    if len(schedule.chains) > 1:
        raise ScheduleError(f"a sharded head needs one chain, but {schedule.name} has {len(schedule.chains)}")
    for rank in range(schedule.num_ranks):
        for action in schedule.flat(rank):
            if action.type.is_transfer:
                raise ScheduleError(f"shard_head comes before add_communication, but {action} is there already")
            if action.type in _REFUSED:
                raise ScheduleError(
                    f"{schedule.name} updates weights on its way ({action} on rank {rank}); shards of the head have no "
                    "versions"
                )


def _pull_forwards(schedule: Schedule, extra: int) -> Schedule | None:
    """Each rank runs `extra` more forwards before its first backward; None where forwards overlap with backwards."""
    actions = []
    for own in schedule.actions:
        if any(action.parts for action in own):
            return None
        left = iter([action for action in own if action.type is _F])
        out: list[Action] = []
        started = False
        for action in own:
            if action.type is _F:
                out += itertools.islice(left, 1)
                continue
            if not started and action.type in (_B, _I):
                started = True
                out += itertools.islice(left, extra)
            out.append(action)
        actions.append(tuple(out))
    return replace(schedule, actions=tuple(actions))


# Who makes what: kind (a B counts as an I), stage, microbatch, rank.
_Key = tuple[ActionType, int, int, int]


class _Insertion:
    """One run on paper, in which a rank that is free decides between its next action, its next S and its next T."""

    def __init__(self, schedule: Schedule, costs: Costs, priority: Sequence[ActionType | None], max_kept: int) -> None:
        self.schedule, self.priority, self.max_kept = schedule, priority, max_kept
        ranks = range(schedule.num_ranks)
        last = schedule.last_stage
        forwards = [a.microbatch for a in schedule.flat(schedule.stage_ranks[last]) if a.type is _F and a.stage == last]
        order = [mb for mb in forwards if mb is not None]
        # The lists of each rank, the next action last.
        self.left: list[dict[ActionType | None, list[Action]]] = [
            {
                None: list(reversed(schedule.actions[rank])),
                _S: [Action(_S, schedule.num_stages, mb) for mb in reversed(order)],
                _T: [Action(_T, schedule.num_stages, mb) for mb in sorted(order, reverse=True)],
            }
            for rank in ranks
        ]
        self.out: list[list[Action]] = [[] for _ in ranks]
        self.clocks: list[Number] = [0 for _ in ranks]
        self.ends: dict[_Key, Number] = {}
        actions = {action for own in schedule.actions for action in own}
        actions |= {action for lists in self.left for kind in (_S, _T) for action in lists[kind][:1]}
        times = {(a.type, a.stage, a.parts): costs.of_action(a, schedule) for a in actions}
        scale = common_denominator([*times.values(), costs.hop]) or 1
        self.durations = {key: time * scale for key, time in times.items()} if scale > 1 else times
        self.hop = costs.hop * scale

    def run(self) -> tuple[tuple[Action, ...], ...] | None:
        """The actions of all ranks; None if they come to wait for each other."""
        everybody = range(len(self.left))
        starts = [self._next(rank) for rank in everybody]
        while any(start is not None for start in starts):
            time, _, rank, kind = min((start for start in starts if start is not None), key=lambda start: start[:3])
            action = self.left[rank][kind].pop()
            end = self.clocks[rank] = time + self.durations[action.type, action.stage, action.parts]
            self.out[rank].append(action)
            changed = {rank}
            for part in action.flat():
                if part.microbatch is not None:
                    made = _I if part.type is _B else part.type
                    self.ends[made, part.stage, part.microbatch, rank] = end
                    changed |= self._consumers(part)
            for rank in changed:
                starts[rank] = self._next(rank)
        done = not any(any(lists.values()) for lists in self.left)
        return tuple(map(tuple, self.out)) if done else None

    def _consumers(self, part: Action) -> set[int]:
        """The other ranks that may wait for an action."""
        schedule, last = self.schedule, self.schedule.last_stage
        if part.type is _S:
            return {schedule.stage_ranks[last]}
        if part.type not in (_F, _B, _I):
            return set()
        if part.stage == last:
            return set(range(schedule.num_ranks))
        to = schedule.next_stage(part.stage) if part.type is _F else schedule.previous_stage(part.stage)
        return set() if to is None else {schedule.stage_ranks[to]}

    def _next(self, rank: int) -> tuple[Number, int, int, ActionType | None] | None:
        """What the rank does next and when, as (time, urgency, rank, kind): the first thing that can start."""
        found = []
        for urgency, kind in enumerate(self.priority):
            own = self.left[rank][kind]
            if not own or (kind is _S and self._num_kept(rank) >= self.max_kept):
                continue
            ready = self._ready(own[-1], rank)
            if ready is not None:
                found.append((max(ready, self.clocks[rank]), urgency, rank, kind))
        return min(found, key=lambda start: start[:2], default=None)

    def _num_kept(self, rank: int) -> int:
        return len(self.left[rank][_T]) - len(self.left[rank][_S])

    def _ready(self, action: Action, rank: int) -> Number | None:
        """When what an action needs is there; None where some of it is not made yet."""
        latest: Number = 0
        for key in self._needs(action, rank):
            end = self.ends.get(key)
            if end is None:
                return None
            latest = max(latest, end + (self.hop if key[3] != rank else 0))
        return latest

    def _needs(self, action: Action, rank: int) -> list[_Key]:
        schedule, last, head = self.schedule, self.schedule.last_stage, self.schedule.num_stages
        needs: list[_Key] = []

        def add(kind: ActionType, stage: int | None, mb: int) -> None:
            if stage is not None:
                needs.append((kind, stage, mb, schedule.stage_ranks[stage]))

        for part in action.flat():
            kind, stage, mb = part.type, part.stage, part.microbatch
            if mb is None:
                continue
            if kind is _F:
                add(_F, schedule.previous_stage(stage), mb)
            elif kind in (_B, _I):
                add(_F, stage, mb)
                add(_I, schedule.next_stage(stage), mb)
                needs += [(_S, head, mb, r) for r in range(schedule.num_ranks) if stage == last]
            elif kind is _W:
                add(_I, stage, mb)
            else:
                add(*((_F, last, mb) if kind is _S else (_I, last, mb)))
                needs += [(_S, head, mb, rank)] if kind is _T else []
        return needs
