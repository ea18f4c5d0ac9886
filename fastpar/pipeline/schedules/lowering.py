"""Passes over schedules: from what is computed to everything that a rank does.

Generators write compute actions only. These passes add what follows from them:

    merge_backward      I directly followed by its W becomes B: one backward instead of two halves
    split_backward      the opposite
    shard_head          a head with a shard on every rank instead of one on the last stage (`head_schedule`)
    add_unshard         gather sharded parameters before they are used, free them afterwards
    add_reduce_grad     sum gradients over replicas when a stage has its last one
    add_communication   send and receive between ranks

in this order, as far as they are wanted. Each takes a schedule and returns a new one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from fastpar.arguments import checked
from fastpar.pipeline.schedules.schedule import Action, ActionType, Schedule, ScheduleError

_BACKWARDS = (ActionType.BACKWARD, ActionType.BACKWARD_INPUT)
_WEIGHT_GRADS = (ActionType.BACKWARD, ActionType.BACKWARD_WEIGHT)


@checked(computed=False)
def merge_backward(schedule: Schedule) -> Schedule:
    """Replace each I that is directly followed by its W with B, which computes the same without keeping what W needs.

        0F0 0I0 0W0 0F1 0I1  ->  0F0 0B0 0F1 0I1

    Gradients of inputs leave later then, by the time of a W. Raises ScheduleError once transfers are in it: these
    stand between I and W.
    """
    _refuse_transfers("merge_backward", schedule)

    def merge(own: Sequence[Action]) -> list[Action]:
        out: list[Action] = []
        for action in own:
            if (
                action.type is ActionType.BACKWARD_WEIGHT
                and out
                and out[-1] == _typed(action, ActionType.BACKWARD_INPUT)
            ):
                out[-1] = _typed(action, ActionType.BACKWARD)
            else:
                out.append(action)
        return out

    return _map_ranks(schedule, merge)


@checked(computed=False)
def split_backward(schedule: Schedule) -> Schedule:
    """Replace each B with I and W, so that the gradient of the input leaves before the weight gradients are computed.

        0F0 0B0 0F1 0B1  ->  0F0 0I0 0W0 0F1 0I1 0W1

    A B inside an OVERLAP_F_B stays whole. Raises ScheduleError once transfers are in it.
    """
    _refuse_transfers("split_backward", schedule)

    def split(own: Sequence[Action]) -> list[Action]:
        out: list[Action] = []
        for action in own:
            halves = (ActionType.BACKWARD_INPUT, ActionType.BACKWARD_WEIGHT)
            out += [_typed(action, half) for half in halves] if action.type is ActionType.BACKWARD else [action]
        return out

    return _map_ranks(schedule, split)


@checked(computed=False)
def add_unshard(schedule: Schedule, *, lookahead: int = 1) -> Schedule:
    """Gather the parameters of a stage (UNSHARD) before they are used, and free them (RESHARD) afterwards.

    At each action a rank holds the stages that the action uses and the next `lookahead` other stages that it is going
    to use; a gather can so run beside the computation before it. A stage is freed as soon as it is not among these,
    and gathered again for its next use. With one or two stages per rank each stage is gathered once. In `looped_bfs`
    with more, each is gathered once for its forwards and once for its backwards. `lookahead` 0 gathers in the last
    moment. Raises ScheduleError where UNSHARD or RESHARD are already in it, ValueError for a negative lookahead.

        0F0 0F1 2F0 2F1 4F0  ->  0UNSHARD 2UNSHARD 0F0 0F1 0RESHARD 4UNSHARD 2F0 2F1 2RESHARD 4F0 4RESHARD
    """
    if lookahead < 0:
        raise ValueError(f"lookahead must be at least 0, got {lookahead}")
    _refuse("add_unshard", schedule, (ActionType.UNSHARD, ActionType.RESHARD))

    def gather(own: Sequence[Action]) -> list[Action]:
        out: list[Action] = []
        held: list[int] = []
        for action, ahead in zip(own, _stages_ahead(own, lookahead), strict=True):
            # What was gathered before an update is stale after it.
            wanted = [s for s in ahead if action.type is not ActionType.STEP or s != action.stage]
            out += [Action(ActionType.RESHARD, stage) for stage in held if stage not in wanted]
            out += [Action(ActionType.UNSHARD, stage) for stage in wanted if stage not in held]
            held = wanted
            out.append(action)
        return out + [Action(ActionType.RESHARD, stage) for stage in held]

    return _map_ranks(schedule, gather)


@checked(computed=False)
def add_reduce_grad(schedule: Schedule, *, data_parallel: bool = False) -> Schedule:
    """Sum gradients over the replicas of a stage (REDUCE_GRAD), when the stage has computed its last one.

    Stages that have replicas in the schedule itself (DualPipe) always get one; all stages do with `data_parallel`,
    where each rank stands for a data-parallel group. It follows the last weight gradient of the stage, so that it runs
    beside the rest of the schedule; before each STEP where there are several. Two ranks with two replicated stages
    each finish them in opposite orders, and would wait for each other: those are reduced after all weight gradients,
    in the order of the parts. Raises ScheduleError where REDUCE_GRAD is already in it.

        0F0 0B0 0F1 0B1  ->  0F0 0B0 0F1 0B1 0REDUCE_GRAD
    """
    _refuse("add_reduce_grad", schedule, (ActionType.REDUCE_GRAD,))
    replicated = len(schedule.chains) > 1
    if not replicated and not data_parallel:
        return schedule

    def reduce(own: Sequence[Action]) -> list[Action]:
        after: dict[int, list[int]] = {}  # position -> stages to reduce behind it
        last: dict[int, int] = {}  # stage -> position of its last weight gradient since its last STEP
        for position, action in enumerate(own):
            for part in action.flat():
                if part.type in _WEIGHT_GRADS:
                    last[part.stage] = position
                elif part.type is ActionType.STEP and part.stage in last:
                    after.setdefault(last.pop(part.stage), []).append(part.stage)
        for stage, position in last.items():
            after.setdefault(max(last.values()) if replicated else position, []).append(stage)
        out: list[Action] = []
        for position, action in enumerate(own):
            stages = sorted(after.get(position, ()), key=schedule.part_of)
            out += [action, *(Action(ActionType.REDUCE_GRAD, stage) for stage in stages)]
        return out

    return _map_ranks(schedule, reduce)


@checked(computed=False)
def add_communication(schedule: Schedule, edges: Iterable[tuple[int, int]] | None = None) -> Schedule:
    """Add SEND_F, RECV_F, SEND_B and RECV_B: what crosses from rank to rank.

    Activations go to the next stage of the chain and gradients of inputs to the previous one. A SEND directly follows
    the action that produces it (F; B or I), a RECV directly precedes the action that needs it: sends are buffered and
    wait for nobody, so a schedule that runs with its compute actions alone runs with its transfers. Neighbours on one
    rank (V-shaped placement) exchange nothing.

        edges   skip connections: pairs (i, j), i < j, of parts of the model (stages, where there is one chain): part j
                also takes activations of part i. Transfers over them name the other stage: 0SEND_F3>2. A pair of
                neighbours is a ValueError: what stage i gives to stage i+1 needs no skip.

    Of two ranks with one stage each and one microbatch:

        rank 0: 0F0 0B0  ->  0F0 0SEND_F0 0RECV_B0 0B0
        rank 1: 1F0 1B0  ->  1RECV_F0 1F0 1B0 1SEND_B0

    Raises ScheduleError where transfers are already in it.
    """
    _refuse_transfers("add_communication", schedule)
    outputs, inputs = _links(schedule, _checked_edges(schedule, edges))

    def transfers(kind: ActionType, links: dict[int, list[int]], action: Action) -> list[Action]:
        neighbours = (schedule.next_stage(action.stage), schedule.previous_stage(action.stage))
        return [
            Action(kind, action.stage, action.microbatch, peer=None if peer in neighbours else peer)
            for peer in links[action.stage]
            if schedule.stage_ranks[peer] != schedule.stage_ranks[action.stage]
        ]

    def connect(own: Sequence[Action]) -> list[Action]:
        out: list[Action] = []
        for action in own:
            before: list[Action] = []
            after: list[Action] = []
            for part in action.flat():
                if part.type is ActionType.FORWARD:
                    before += transfers(ActionType.RECV_F, inputs, part)
                    after += transfers(ActionType.SEND_F, outputs, part)
                elif part.type in _BACKWARDS:
                    before += transfers(ActionType.RECV_B, outputs, part)
                    after += transfers(ActionType.SEND_B, inputs, part)
            out += [*before, action, *after]
        return out

    return _map_ranks(schedule, connect)


def _links(schedule: Schedule, edges: Sequence[tuple[int, int]]) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Per stage, the stages that its activations go to, and the stages that they come from: the neighbour first."""
    outputs: dict[int, list[int]] = {stage: [] for stage in range(schedule.num_stages)}
    inputs: dict[int, list[int]] = {stage: [] for stage in range(schedule.num_stages)}
    for chain in schedule.chains:
        neighbours = [(part, part + 1) for part in range(schedule.num_parts - 1)]
        for source, destination in [*neighbours, *edges]:
            outputs[chain.stages[source]].append(chain.stages[destination])
            inputs[chain.stages[destination]].append(chain.stages[source])
    return outputs, inputs


def _checked_edges(schedule: Schedule, edges: Iterable[tuple[int, int]] | None) -> list[tuple[int, int]]:
    checked = sorted(set(edges or ()))
    for source, destination in checked:
        if not 0 <= source < destination < schedule.num_parts:
            raise ValueError(
                f"edges: a skip connection goes from a part to a later one of 0 to {schedule.num_parts - 1}, "
                f"got ({source}, {destination})"
            )
        if destination == source + 1:
            raise ValueError(f"edges: parts {source} and {destination} are neighbours: they need no skip connection")
    return checked


def _stages_ahead(own: Sequence[Action], lookahead: int) -> list[list[int]]:
    """Per action, the stages it uses and the next `lookahead` others in the order of their use."""
    wanted: list[list[int]] = []
    coming: list[int] = []  # stages in the order of their next use
    for action in reversed(own):
        if action.type.is_head:  # is no stage, and is never sharded in this sense
            wanted.append(wanted[-1] if wanted else [])
            continue
        now = list(dict.fromkeys(part.stage for part in action.flat()))
        coming = now + [stage for stage in coming if stage not in now]
        wanted.append(coming[: len(now) + lookahead])
    return wanted[::-1]


def _typed(action: Action, kind: ActionType) -> Action:
    return replace(action, type=kind)


def _map_ranks(schedule: Schedule, function: Callable[[Sequence[Action]], Sequence[Action]]) -> Schedule:
    return replace(schedule, actions=tuple(tuple(function(own)) for own in schedule.actions))


def _refuse_transfers(what: str, schedule: Schedule) -> None:
    kinds = (ActionType.SEND_F, ActionType.RECV_F, ActionType.SEND_B, ActionType.RECV_B)
    _refuse(what, schedule, kinds)


def _refuse(what: str, schedule: Schedule, kinds: Sequence[ActionType]) -> None:
    for rank, own in enumerate(schedule.actions):
        for position, action in enumerate(own):
            if action.type in kinds:
                raise ScheduleError(f"{what}: {action} is already there, on rank {rank} at position {position}")
