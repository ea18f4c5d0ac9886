"""Whether a schedule can be executed, and adds up to a training step (or, forward only, to an evaluation).

    problems = validate(schedule, max_activations=4)      # [] if it is right
    check(schedule)                                       # or ScheduleError, with all of them

What is checked, by the `kind` of the Problem that it gives:

    stage, rank, microbatch     every action names a stage that lives on its rank, and a microbatch that passes it
    missing, duplicate          each stage does F and B (or I and W) of each of its microbatches once, and sends and
                                receives each activation and gradient that crosses ranks once; where the head is
                                sharded, each rank does S and T of each microbatch once
    order                       on a rank, everything stands behind what it needs (F before B, RECV_F before F, ...)
    overlap                     the parts of an OVERLAP_F_B do not need each other
    deadlock                    no ranks wait for each other in a circle; the message walks the circle. Sends are
                                buffered, receives wait; REDUCE_GRAD of a stage waits for that of its replicas
    transfer                    messages go between neighbours in the chain, or over skip connections, and across ranks
    memory                      at most `max_activations` on any rank at any time
    version                     an action that names a weight version finds it, current or kept; what is kept is kept
                                while it is current and dropped in the end; F and backward of a microbatch agree
    step                        every STEP finds gradients, every gradient finds its STEP, and all stages put the same
                                microbatches into the same STEP
    reduce                      if gradients are summed over replicas at all, then on every stage, once per STEP (or in
                                the end), behind all of its gradients
    shard                       parameters that are ever gathered are so when used, once at a time, not across a STEP
                                (they would be stale), and are freed in the end
    accumulation  (a warning)   gradients of a stage are added in ascending order of microbatches

Example: rank 0 does "0F0 0F1 0B0 0B1", rank 1 does "1F0 1B1 1F1 1B0". Rank 1 needs the activations of 1F1 for 1B1:

    [order] rank 1, position 1, 1B1: needs the activations of its forward, but 1F1 (rank 1, position 2) comes later; ...

All checks are linear in the number of actions. A finished list of problems is not a proof for a schedule with several
faults: actions in the wrong place are left out of the later checks, so that one fault does not hide behind its echoes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product

from fastpar.arguments import checked
from fastpar.pipeline.schedules.costs import Number
from fastpar.pipeline.schedules.ledger import COUNTERPARTS, Ledger, Placed, Problem
from fastpar.pipeline.schedules.schedule import Action, ActionType, Schedule, ScheduleError
from fastpar.pipeline.schedules.weight_rules import weight_problems

_T = ActionType
_BACKWARDS = (_T.BACKWARD, _T.BACKWARD_INPUT, _T.BACKWARD_WEIGHT)
_SHOWN = 20  # problems in an error message


def _missing(ledger: Ledger) -> list[Problem]:
    """Compute and transfers that every stage owes to every microbatch of its chain, and does not do."""
    backwards = any(placed.action.type in _BACKWARDS for placed in ledger.placed)
    problems = _missing_compute(ledger, backwards=backwards) + _missing_head(ledger, backwards=backwards)
    if not backwards and not ledger.forward_only:  # once, instead of for every stage and microbatch
        text = "no action is a backward; add them, or check it with forward_only=True"
        problems.append(Problem("missing", ledger.schedule.stage_ranks[0], None, Action(_T.BACKWARD, 0, 0), text))
    return problems + (_missing_transfers(ledger, backwards=backwards) if ledger.with_transfers else [])


def _missing_compute(ledger: Ledger, *, backwards: bool) -> list[Problem]:
    schedule, find = ledger.schedule, ledger.find
    problems = []
    for stage, rank in enumerate(schedule.stage_ranks):
        for microbatch in schedule.chain_of_stage(stage).microbatches:
            owed = [] if find(_T.FORWARD, stage, microbatch) else [_T.FORWARD]
            if backwards and not find(_T.BACKWARD, stage, microbatch):
                halves = [half for half in _BACKWARDS[1:] if find(half, stage, microbatch) is None]
                owed += [_T.BACKWARD] if len(halves) == 2 else halves
            for kind in owed:
                text = f"stage {stage} never does {kind.value} of microbatch {microbatch}; add it"
                problems.append(Problem("missing", rank, None, Action(kind, stage, microbatch), text))
    return problems


def _missing_head(ledger: Ledger, *, backwards: bool) -> list[Problem]:
    """S and T that a rank owes to a microbatch where the head is sharded."""
    schedule = ledger.schedule
    if schedule.head is None:
        return []
    kinds = (_T.HEAD_FORWARD, _T.HEAD_WEIGHT) if backwards else (_T.HEAD_FORWARD,)
    text = "rank {} never does {} of microbatch {}, and the head has a shard on every rank; add it"
    return [
        Problem("missing", rank, None, Action(kind, schedule.head, mb), text.format(rank, kind.value, mb))
        for rank, mb, kind in product(range(schedule.num_ranks), range(schedule.num_microbatches), kinds)
        if ledger.in_head(kind, rank, mb) is None
    ]


def _missing_transfers(ledger: Ledger, *, backwards: bool) -> list[Problem]:
    schedule, find = ledger.schedule, ledger.find
    problems = []
    kinds = [_T.SEND_F, _T.RECV_F, _T.SEND_B, _T.RECV_B] if backwards else [_T.SEND_F, _T.RECV_F]
    crossing = [edge for edge in ledger.edges() if ledger.crosses(*edge)]
    for kind, (source, destination) in product(kinds, crossing):
        stage, peer = (source, destination) if kind in (_T.SEND_F, _T.RECV_B) else (destination, source)
        named = None if schedule.next_stage(source) == destination else peer
        what = "activations" if kind in (_T.SEND_F, _T.RECV_F) else "gradient"
        for microbatch in schedule.chain_of_stage(stage).microbatches:
            if find(kind, stage, microbatch, peer) is None:
                other = find(COUNTERPARTS[kind], peer, microbatch, stage)
                partner = f"; its partner is {other}" if other else ""
                text = f"the {what} of microbatch {microbatch} must cross between stages {stage} and {peer}{partner}"
                action = Action(kind, stage, microbatch, named)
                problems.append(Problem("missing", schedule.stage_ranks[stage], None, action, text))
    return problems


def _order(ledger: Ledger) -> tuple[list[Problem], dict[tuple[int, int], list[tuple[int, int]]]]:
    """Needs that the rank's own list breaks; and, per (rank, position), how far other ranks must have come for it."""
    problems = []
    waits: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for placed in ledger.placed:
        for need in ledger.needs(placed):
            before = need.placed
            if before is None:
                continue  # reported as missing
            if before.rank != placed.rank:
                waits.setdefault((placed.rank, placed.position), []).append((before.rank, before.position + 1))
            elif before.position == placed.position:
                text = f"needs {need.why}, which {before.action} makes at the same time; do them one after the other"
                problems.append(placed.problem("overlap", text))
            elif before.position > placed.position:
                text = f"needs {need.why}, but {before} comes later; move it in front, or this action behind it"
                problems.append(placed.problem("order", text))
    for meeting in _meetings(ledger):
        for placed in meeting:
            others = [(other.rank, other.position) for other in meeting if other.rank != placed.rank]
            waits.setdefault((placed.rank, placed.position), []).extend(others)
    return problems, waits


def _meetings(ledger: Ledger) -> list[list[Placed]]:
    """The REDUCE_GRADs of replicas that meet: the first of each, the second of each, ..."""
    schedule = ledger.schedule
    if len(schedule.chains) == 1:
        return []
    reduces: dict[int, list[Placed]] = {stage: [] for stage in range(schedule.num_stages)}
    for placed in ledger.placed:
        if placed.action.type is _T.REDUCE_GRAD:
            reduces[placed.action.stage].append(placed)
    meetings = []
    for part in range(schedule.num_parts):
        meetings += [list(group) for group in zip(*(reduces[s] for s in schedule.replicas_of(part)), strict=False)]
    return meetings


def _deadlock(ledger: Ledger, waits: dict[tuple[int, int], list[tuple[int, int]]]) -> list[Problem]:
    """Let all ranks run as far as they can; if some are stuck, walk the shortest circle of waiting ranks."""
    actions = ledger.schedule.actions
    done = [0] * len(actions)
    moved = True
    while moved:
        moved = False
        for rank, own in enumerate(actions):
            start = done[rank]
            while done[rank] < len(own) and all(done[r] >= far for r, far in waits.get((rank, done[rank]), ())):
                done[rank] += 1
            moved = moved or done[rank] > start
    stuck = {
        rank: {r: far for r, far in reversed(waits[rank, done[rank]]) if done[r] < far}
        for rank, own in enumerate(actions)
        if done[rank] < len(own)
    }
    if not stuck:
        return []
    circle = min((found for rank in stuck if (found := _shortest_circle(stuck, rank))), key=len)
    lines = []
    for rank, awaited in zip(circle, circle[1:] + circle[:1], strict=True):
        far = stuck[rank][awaited]
        meets = actions[rank][done[rank]].type is _T.REDUCE_GRAD
        position = far if meets else far - 1
        lines.append(
            f"rank {rank} at position {done[rank]} ({actions[rank][done[rank]]}) waits for rank {awaited} to "
            f"{'reach' if meets else 'do'} position {position} ({actions[awaited][position]})"
        )
    rank = circle[0]
    cycle = ", ".join(lines)
    text = f"ranks wait for each other in a circle: {cycle}; on one of them, move what is awaited in front of the wait"
    return [Problem("deadlock", rank, done[rank], actions[rank][done[rank]], text)]


def _shortest_circle(stuck: dict[int, dict[int, int]], start: int) -> list[int] | None:
    """Breadth first from a rank along "waits for" back to it."""
    paths = [[start]]
    seen = {start}
    for path in paths:
        for awaited in stuck[path[-1]]:
            if awaited == start:
                return path
            if awaited not in seen:
                seen.add(awaited)
                paths.append([*path, awaited])
    return None


def _memory(ledger: Ledger, limits: Sequence[Number], until: str, sizes: Sequence[Number]) -> list[Problem]:
    """Peak of live activations per rank; forwards of an overlap start before its backwards end."""
    freeing = {_T.BACKWARD, _T.BACKWARD_WEIGHT if until == "weight" else _T.BACKWARD_INPUT}
    schedule = ledger.schedule
    held: list[Number] = [0] * schedule.num_ranks
    peaks: dict[int, tuple[Number, Placed]] = {}
    first: dict[int, Placed] = {}
    freed: list[tuple[int, int, Number]] = []
    for placed in ledger.placed:
        if freed and freed[-1][:2] != (placed.rank, placed.position):
            for rank, _, size in freed:
                held[rank] -= size
            freed = []
        if placed.action.type.is_head:
            continue
        size = sizes[schedule.part_of(placed.action.stage)]
        if placed.action.type is _T.FORWARD:
            held[placed.rank] += size
            if held[placed.rank] > limits[placed.rank]:
                first.setdefault(placed.rank, placed)
                if held[placed.rank] > peaks.get(placed.rank, (0, placed))[0]:
                    peaks[placed.rank] = (held[placed.rank], placed)
        elif placed.action.type in freeing:
            freed.append((placed.rank, placed.position, size))
    problems = []
    for rank, (peak, _) in sorted(peaks.items()):
        what = "W (or B)" if until == "weight" else "I (or B)"
        text = (
            f"the rank holds more than the limit of {limits[rank]} from here on, {peak} at its peak, "
            f"with activations kept until {what}; do a {what} before this forward"
        )
        problems.append(first[rank].problem("memory", text))
    return problems


def _accumulation(ledger: Ledger) -> list[Problem]:
    """Weight gradients of a stage out of the order of microbatches."""
    problems = []
    last: dict[tuple[int, int], Placed] = {}  # by rank and stage: of the head every rank has a shard
    for placed in ledger.placed:
        if placed.action.type in (_T.BACKWARD, _T.BACKWARD_WEIGHT, _T.HEAD_WEIGHT):
            where = placed.rank, placed.action.stage
            before = last.setdefault(where, placed)
            assert before.action.microbatch is not None
            assert placed.action.microbatch is not None
            if before.action.microbatch > placed.action.microbatch:
                text = f"adds its gradient after {before}: the sum rounds differently from a sequential run's"
                problems.append(placed.problem("accumulation", text))
            last[where] = placed
    return problems


def one_each(value: Number | Sequence[Number], count: int, name: str, unit: str) -> list[Number]:
    """`count` numbers out of one for all or one for each; ValueError for any other number of them."""
    values = list(value) if isinstance(value, Sequence) else [value] * count
    if len(values) != count:
        raise ValueError(f"{name} must be one number, or one per {unit} ({count}), got {len(values)}")
    return values


@checked(computed=False)
def validate(
    schedule: Schedule,
    *,
    max_activations: Number | Sequence[Number] | None = None,
    until: str = "weight",
    activation_size: Number | Sequence[Number] = 1,
    forward_only: bool = False,
    edges: Iterable[tuple[int, int]] | None = None,
    same_version: bool = True,
) -> list[Problem]:
    """Everything that is wrong with a schedule; an empty list if nothing is.

    max_activations  limit of what a rank holds at any time, one for all ranks or one each; None: no limit
    until            "weight": an activation is held from F until W (or B); "input": until I (or B)
    activation_size  what the activation of one microbatch counts: one number, or one per part of the model
    forward_only     there are no backwards
    edges            skip connections that must be served, as pairs of parts of the model (what `add_communication`
                     was given); default: those over which the schedule sends anything
    same_version     F and backward of a microbatch must use the same version of the weights
    """
    if until not in ("weight", "input"):
        raise ValueError(f'until must be "weight" or "input", got {until!r}')
    if forward_only and max_activations is not None:
        raise ValueError("max_activations does not apply to a forward-only schedule, which keeps no activations")
    sizes = one_each(activation_size, schedule.num_parts, "activation_size", "part")
    ledger = Ledger(schedule, edges, forward_only=forward_only)
    order, waits = _order(ledger)
    problems = [*ledger.problems, *_missing(ledger), *order, *_deadlock(ledger, waits)]
    if max_activations is not None:
        problems += _memory(
            ledger, one_each(max_activations, schedule.num_ranks, "max_activations", "rank"), until, sizes
        )
    return problems + weight_problems(ledger, same_version=same_version) + _accumulation(ledger)


@checked(computed=False)
def check(
    schedule: Schedule,
    *,
    max_activations: Number | Sequence[Number] | None = None,
    until: str = "weight",
    activation_size: Number | Sequence[Number] = 1,
    forward_only: bool = False,
    edges: Iterable[tuple[int, int]] | None = None,
    same_version: bool = True,
    strict: bool = False,
) -> None:
    """Raise ScheduleError with all problems that `validate` finds; warnings count only if `strict`."""
    found = validate(
        schedule,
        max_activations=max_activations,
        until=until,
        activation_size=activation_size,
        forward_only=forward_only,
        edges=edges,
        same_version=same_version,
    )
    problems = [problem for problem in found if strict or not problem.is_warning]
    if problems:
        lines = [f"  {problem}" for problem in problems[:_SHOWN]]
        rest = [f"  and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
        title = f"schedule {schedule.name!r} ({schedule.num_ranks} ranks, {schedule.num_microbatches} microbatches)"
        raise ScheduleError("\n".join([f"{title} has {len(problems)} problems:", *lines, *rest]))
