"""What a schedule would take: its makespan, idle time, messages and activations under given costs.

Every rank executes its list in order, and an action starts as soon as its rank is free and what it needs is there:

    F of a stage    F of the previous stage of the chain, same microbatch
    I or B          F of the same stage, and I or B of the next stage
    W               I of the same stage
    SEND, RECV      what is to be sent; the SEND
    S of a rank     F of the last stage; I or B of the last stage needs S of every rank; T needs both

What comes from another rank arrives `Costs.hop` later (and after its bytes, where a bandwidth is given); both ranks may
compute meanwhile. Without SEND and RECV in the schedule the messages leave as soon as they exist; with them, when the
rank gets to the SEND, which waits for nobody. What S and T exchange with the last stage leaves as soon as it exists in
either case (hidden states, results of their size, and normalisers, whose bytes are not counted). As every order is
fixed, links included, start times follow from one pass over the actions; nothing is sampled, and no queue of events is
needed.

Worked example: 1F1B of two ranks and two microbatches with F = 1, I + W = 2,

    rank 0: 0F0 0F1 0B0 0B1
    rank 1: 1F0 1B0 1F1 1B1

    rank 0  F0 F1 ····· B0━━━ ·· B1━━━
    rank 1  ·· F0 B0━━━ F1 B1━━━ ·····

ends after 9: 6 of work and (p - 1) * 3 idle on either rank. Rank 0 keeps the activations of two microbatches, rank 1 of
one.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Any, TypeVar

from fastpar.arguments import checked
from fastpar.pipeline.schedules.costs import FIELDS, Costs, Number, common_denominator, simplest
from fastpar.pipeline.schedules.schedule import Action, ActionType, Schedule, ScheduleError
from fastpar.pipeline.simulation.timeline import Event, Timeline

_F, _B, _I, _W = (
    ActionType.FORWARD,
    ActionType.BACKWARD,
    ActionType.BACKWARD_INPUT,
    ActionType.BACKWARD_WEIGHT,
)
# What a transfer carries: the output of F, or of I (the key of whole backwards too).
_S, _HEAD_WEIGHT = ActionType.HEAD_FORWARD, ActionType.HEAD_WEIGHT
_SENDS = {ActionType.SEND_F: _F, ActionType.SEND_B: _I}
_RECEIVES = {ActionType.RECV_F: _F, ActionType.RECV_B: _I}
_SEND_OF = {ActionType.RECV_F: ActionType.SEND_F, ActionType.RECV_B: ActionType.SEND_B}
_RECEIVE_OF = {send: receive for receive, send in _SEND_OF.items()}
_Link = tuple[int, int]
# (kind, stage, microbatch, peer or -1); of S, T, and what they send: the rank that they are on instead of a peer
_Key = tuple[ActionType, int, int, int]
_T = TypeVar("_T")


@dataclass(frozen=True)
class Simulation:
    """The outcome of `simulate`.

    timeline            when each action starts and ends; the first starts at 0
    peak_until_input    per rank, the most activations kept at once if I or B frees them (`Costs.activation` of each)
    peak_until_weight   ... if W or B frees them
    messages_per_link   (from rank, to rank) -> number of messages; stages of one rank exchange none
    bytes_per_link      (from rank, to rank) -> sum of their `Costs.message_bytes`
    """

    schedule: Schedule
    costs: Costs
    timeline: Timeline
    peak_until_input: tuple[Number, ...]
    peak_until_weight: tuple[Number, ...]
    messages_per_link: dict[_Link, int]
    bytes_per_link: dict[_Link, Number]

    @cached_property
    def makespan(self) -> Number:
        """Time from the first event's start to the last one's end."""
        return self.timeline.makespan

    @cached_property
    def busy(self) -> tuple[Number, ...]:
        """Time of its actions, per rank."""
        return tuple(self.timeline.busy(rank) for rank in range(self.schedule.num_ranks))

    @cached_property
    def idle(self) -> tuple[Number, ...]:
        """makespan - busy, per rank."""
        return tuple(self.makespan - busy for busy in self.busy)

    @cached_property
    def inner_idle(self) -> Number:
        """The most time that a rank is idle between its own first and last action: what "zero bubble" means."""
        return max(self.timeline.inner_idle(rank) for rank in range(self.schedule.num_ranks))

    @cached_property
    def bubble(self) -> Number:
        """Idle share of the time of all ranks."""
        return self.timeline.bubble

    @cached_property
    def num_messages(self) -> int:
        """Messages over all links."""
        return sum(self.messages_per_link.values())


@checked(computed=False)
def simulate(schedule: Schedule, costs: Costs | None = None) -> Simulation:
    """Execute a schedule on paper.

    costs  default: F = I = W = 1, no latency

    Exact for ints and Fractions. Raises ScheduleError for a deadlock, and shows the cycle; for an action that needs
    what nobody makes; and for one that is there twice. What else can be wrong with a schedule is for
    `fastpar.pipeline.schedules.validate`. A REDUCE_GRAD costs its rank time, but does not wait for the other replica.
    """
    costs = costs or Costs()
    costs.check(schedule)
    program = _Program(schedule, costs)
    starts, ends = program.run()
    events = []
    for rank in range(schedule.num_ranks):
        clock: Number = 0
        for index in program.orders[rank]:
            node = program.nodes[index]
            assert node.action is not None
            # A rank is done with a SEND at once, and waits in a RECV.
            start = clock if node.action.type in _RECEIVES else starts[index]
            end = program.arrival(index, ends) if node.action.type in _SENDS else ends[index]
            events.append(Event(rank, node.action, start, end))
            clock = ends[index]
    return Simulation(
        schedule,
        costs,
        Timeline(tuple(events), name=schedule.name),
        activation_peaks(schedule, costs, until="input"),
        activation_peaks(schedule, costs, until="weight"),
        program.messages_per_link,
        program.bytes_per_link,
    )


@checked(computed=False)
def measured_costs(schedule: Schedule, timeline: Timeline, **others: Any) -> Costs:
    """The costs that a recorded run shows: of every kind of action the median per part.

    timeline  what a run of `schedule` recorded; its unit of time becomes that of the costs
    others    fields of `Costs` that a timeline does not tell (hop, overlap, ...)

    Whole backwards count as I, with W = 0, unless the run has I and W as well. Overlapped actions cannot be told apart
    and are left out. Raises ValueError for a part of which nothing was recorded.
    """
    times: dict[tuple[ActionType, int], list[Any]] = {}
    for event in timeline.events:
        if event.occupies_rank and not event.action.parts:
            key = (event.action.type, schedule.part_of(event.action.stage))
            times.setdefault(key, []).append(event.duration)
    kinds = {kind for kind, _ in times}
    found: dict[str, Any] = {}
    for kind, name in FIELDS.items():
        if kind not in kinds and not (kind is _I and _B in kinds):
            found[name] = 0
            continue
        recorded = kind if kind in kinds else _B
        missing = [part for part in range(schedule.num_parts) if (recorded, part) not in times]
        if missing and not kind.is_head:
            raise ValueError(f"no {recorded.value} of part {missing[0]} was recorded")
        if kind.is_head:
            found[name] = statistics.median(times[kind, schedule.num_parts])
            continue
        found[name] = tuple(statistics.median(times[recorded, part]) for part in range(schedule.num_parts))
    return Costs(**{**found, **others})


@checked(computed=False)
def activation_peaks(schedule: Schedule, costs: Costs | None = None, *, until: str = "input") -> tuple[Number, ...]:
    """Per rank, the most activations kept at once: from F to I or B (until="input"), or to W or B (until="weight").

    They depend on the order of the actions alone. A sharded head keeps `Costs.head_activation` from S to T. The parts
    of an OVERLAP_F_B keep theirs until both are done.
    """
    if until not in ("input", "weight"):
        raise ValueError(f'until must be "input" or "weight", got {until!r}')
    costs = costs or Costs()
    sizes = [costs.activation_of(schedule.part_of(stage)) for stage in range(schedule.num_stages)]
    sizes.append(costs.head_activation)
    keeps = (_F, _S)
    frees = (_B, _I, _HEAD_WEIGHT) if until == "input" else (_B, _W, _HEAD_WEIGHT)
    peaks = []
    for own in schedule.actions:
        kept: Number = 0
        peak: Number = 0
        for action in own:
            parts = action.flat()
            kept += sum(sizes[part.stage] for part in parts if part.type in keeps)
            peak = max(peak, kept)
            kept -= sum(sizes[part.stage] for part in parts if part.type in frees)
        peaks.append(peak)
    return tuple(peaks)


@dataclass
class _Node:
    """An action, or (action None) a message that occupies a link."""

    action: Action | None
    resource: int
    duration: Number
    needs: list[tuple[int, Number]] = field(default_factory=list)  # (node, how long after its end)


class _Program:
    """The actions as nodes, each on a resource (the ranks, then the links), executed in the order of the resource.

    Two passes connect them: first every action puts down what it makes and where that arrives when (`_produce`), in the
    order of its rank, which is the order of the messages of a link; then every action looks for what it needs
    (`_consume`).
    """

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.schedule, self.costs = schedule, costs
        self.nodes: list[_Node] = []
        self.orders: list[list[int]] = [[] for _ in range(schedule.num_ranks)]
        self.messages_per_link: dict[_Link, int] = {}
        self.bytes_per_link: dict[_Link, Number] = {}
        self._explicit = schedule.has_transfers
        self._links: dict[_Link, int] = {}
        self._made: dict[_Key, int] = {}  # what an action makes -> its node
        self._arrives: dict[_Key, tuple[int, Number]] = {}  # for which action -> (node, how long after its end)
        self._received: dict[_Key, list[int]] = {}  # for which F or I -> its RECVs
        self._sent: dict[int, tuple[int, Number]] = {}  # SEND -> when its message is there

        durations: dict[tuple[tuple[ActionType, int], ...], Number] = {}
        for rank, own in enumerate(schedule.actions):
            for action in own:
                kinds = tuple((part.type, schedule.part_of(part.stage)) for part in action.flat())
                if kinds not in durations:
                    durations[kinds] = costs.of_action(action, schedule)
                index = self._add(_Node(action, rank, durations[kinds]))
                for part in action.flat():
                    if part.microbatch is not None:
                        self._produce(index, part, part.microbatch)
        for node in list(self.nodes):
            for part in node.action.flat() if node.action else ():
                if part.microbatch is not None:
                    node.needs += self._consume(node.resource, part, part.microbatch)

    def _add(self, node: _Node) -> int:
        self.nodes.append(node)
        self.orders[node.resource].append(len(self.nodes) - 1)
        return len(self.nodes) - 1

    def _produce(self, index: int, part: Action, microbatch: int) -> None:
        schedule, kind, stage = self.schedule, part.type, part.stage
        peer = schedule.peer_of(part) if kind.is_transfer else -1
        rank = self.nodes[index].resource
        if kind.is_head:
            peer = rank
        made = (_I if kind is _B else kind, stage, microbatch, peer)
        if made in self._made:
            raise ScheduleError(f"rank {rank}: {part} is there twice")
        self._made[made] = index
        if kind in _SENDS:
            arrival = self._message(index, stage, peer, _SENDS[kind] is _F)
            self._sent[index] = self._arrives[_RECEIVE_OF[kind], peer, microbatch, stage] = arrival
        elif kind in _RECEIVES:
            what = _RECEIVES[kind]
            self._received.setdefault((what, stage, microbatch, -1), []).append(index)
            if peer == self._source(stage, what is _F):
                self._arrives[what, stage, microbatch, -1] = (index, 0)
        elif kind is _S:
            last = schedule.last_stage
            link = rank, schedule.stage_ranks[last]
            self._arrives[_I, last, microbatch, rank] = self._travel(index, link, schedule.num_parts - 1)
        elif kind in (_F, _B, _I):
            if schedule.head is not None and stage == schedule.last_stage:
                self._to_shards(index, rank, made[0], microbatch)
            to = schedule.next_stage(stage) if kind is _F else schedule.previous_stage(stage)
            if to is not None and not self._is_received(stage, to):
                self._arrives[made[0], to, microbatch, -1] = self._message(index, stage, to, kind is _F)

    def _to_shards(self, index: int, rank: int, made: ActionType, microbatch: int) -> None:
        """F of the last stage sends the hidden states to every S; its I (or B) the normalisers to every T."""
        head = self.schedule.num_stages
        kind, part = (_S, self.schedule.num_parts - 1) if made is _F else (_HEAD_WEIGHT, None)
        for to in range(self.schedule.num_ranks):
            self._arrives[kind, head, microbatch, to] = self._travel(index, (rank, to), part)

    def _message(self, index: int, stage: int, to: int, is_forward: bool) -> tuple[int, Number]:
        """When what node `index` made on one stage is there on another: (node, how long after its end)."""
        link = (self.schedule.stage_ranks[stage], self.schedule.stage_ranks[to])
        return self._travel(index, link, self.schedule.part_of(stage if is_forward else to))

    def _travel(self, index: int, link: _Link, part: int | None) -> tuple[int, Number]:
        """The same between two ranks, of what is as large as the output of a part (None: of no size)."""
        if link[0] == link[1]:
            return index, 0
        size = 0 if part is None else self.costs.bytes_of(part)
        self.messages_per_link[link] = self.messages_per_link.get(link, 0) + 1
        self.bytes_per_link[link] = self.bytes_per_link.get(link, 0) + size
        time = 0 if part is None else self.costs.transfer_time(part)
        if not time or not self.costs.serial:
            return index, self.costs.hop + time
        if link not in self._links:
            self._links[link] = len(self.orders)
            self.orders.append([])
        return self._add(_Node(None, self._links[link], time, [(index, 0)])), self.costs.hop

    def _consume(self, rank: int, part: Action, microbatch: int) -> list[tuple[int, Number]]:
        kind, stage = part.type, part.stage
        needs: list[tuple[int, Number]]

        def find(table: dict[_Key, _T], key: _Key, missing: _Key) -> _T:
            if key in table:
                return table[key]
            name = Action(*missing[:3], peer=missing[3] if missing[0].is_transfer and missing[3] >= 0 else None)
            raise ScheduleError(f"rank {rank}: {part} needs {name}, which is in the list of no rank")

        def own(what: ActionType) -> tuple[int, Number]:
            key = (what, stage, microbatch, -1)
            return find(self._made, key, key), 0

        if kind in _RECEIVES:
            peer = self.schedule.peer_of(part)
            return [find(self._arrives, (kind, stage, microbatch, peer), (_SEND_OF[kind], peer, microbatch, stage))]
        if kind in _SENDS:
            return [own(_SENDS[kind])]
        if kind is _W:
            return [own(_I)]
        if kind.is_head:
            key, made = (kind, stage, microbatch, rank), _F if kind is _S else _I
            needs = [find(self._arrives, key, (made, self.schedule.last_stage, microbatch, -1))]
            if kind is _HEAD_WEIGHT:
                kept = (_S, stage, microbatch, rank)
                needs.append((find(self._made, kept, kept), 0))
            return needs
        what = _F if kind is _F else _I
        key = (what, stage, microbatch, -1)
        needs = [(index, 0) for index in self._received.get(key, ())]
        if kind is not _F:
            needs.append(own(_F))
            if self.schedule.head is not None and stage == self.schedule.last_stage:
                for r in range(self.schedule.num_ranks):
                    shard = (_S, self.schedule.head, microbatch, r)
                    needs.append(find(self._arrives, (_I, stage, microbatch, r), shard))
        source = self._source(stage, kind is _F)
        if source is not None:
            receive = ActionType.RECV_F if kind is _F else ActionType.RECV_B
            received = self._is_received(source, stage)
            missing = (receive, stage, microbatch, -1) if received else (what, source, microbatch, -1)
            needs.append(find(self._arrives, key, missing))
        return needs

    def _source(self, stage: int, is_forward: bool) -> int | None:
        """The stage that the input of F, or of I, comes from."""
        return self.schedule.previous_stage(stage) if is_forward else self.schedule.next_stage(stage)

    def _is_received(self, source: int, stage: int) -> bool:
        """Whether a RECV must bring what `stage` gets from `source`."""
        return self._explicit and self.schedule.stage_ranks[source] != self.schedule.stage_ranks[stage]

    def arrival(self, send: int, ends: Sequence[Number]) -> Number:
        """When the message of a SEND is there."""
        index, delay = self._sent[send]
        return ends[index] + delay

    def run(self) -> tuple[list[Number], list[Number]]:
        """Start and end of every node."""
        scale = self._make_whole()
        starts: list[Number] = [0] * len(self.nodes)
        ends: list[Number | None] = [None] * len(self.nodes)
        clocks: list[Number] = [0] * len(self.orders)
        positions = [0] * len(self.orders)
        waiting: dict[int, list[int]] = {}
        ready = list(range(len(self.orders)))
        while ready:
            resource = ready.pop()
            order = self.orders[resource]
            while positions[resource] < len(order):
                index = order[positions[resource]]
                node = self.nodes[index]
                start, missing = _start(clocks[resource], node, ends)
                if missing is not None:
                    waiting.setdefault(missing, []).append(resource)
                    break
                starts[index] = start
                ends[index] = clocks[resource] = start + node.duration
                positions[resource] += 1
                ready += waiting.pop(index, ())
        done = [end for end in ends if end is not None]
        if len(done) < len(ends):
            raise ScheduleError(self._deadlock(positions, ends))
        if scale == 1:
            return starts, done
        return [simplest(Fraction(t) / scale) for t in starts], [simplest(Fraction(t) / scale) for t in done]

    def _make_whole(self) -> int:
        """Turn times that are fractions into whole numbers of a smaller unit; return how many of it one unit has."""
        times = {node.duration for node in self.nodes} | {delay for node in self.nodes for _, delay in node.needs}
        scale = common_denominator(times) or 1
        if scale > 1:
            for node in self.nodes:
                node.duration = int(node.duration * scale)
                node.needs = [(needed, int(delay * scale)) for needed, delay in node.needs]
        return scale

    def _deadlock(self, positions: Sequence[int], ends: Sequence[Number | None]) -> str:
        """Whom each rank of the cycle waits for."""
        resource = next(r for r, order in enumerate(self.orders) if positions[r] < len(order))
        path: list[int] = []
        lines = []
        while resource not in path:
            path.append(resource)
            node = self.nodes[self.orders[resource][positions[resource]]]
            _, missing = _start(0, node, ends)
            assert missing is not None
            needed = self.nodes[missing]
            if node.action is not None:
                # Where the message of a link is missing, say who makes it.
                maker = needed if needed.action is not None else self.nodes[needed.needs[0][0]]
                later = ", which comes later in its own list" if maker.resource == resource else ""
                lines.append(
                    f"rank {resource} at {node.action} waits for {maker.action} of rank {maker.resource}{later}"
                )
            else:
                lines.append("")
            resource = needed.resource
        cycle = [line for line in lines[path.index(resource) :] if line]
        return f"{self.schedule.name} deadlocks:\n  " + "\n  ".join(cycle)


def _start(clock: Number, node: _Node, ends: Sequence[Number | None]) -> tuple[Number, int | None]:
    """When a node can start on a resource that is free from `clock` on; and a node that it needs and is not done."""
    start = clock
    for needed, delay in node.needs:
        end = ends[needed]
        if end is None:
            return start, needed
        start = max(start, end + delay)
    return start, None
