"""Where every action of a schedule stands, and what each of them needs: what the validator looks things up in.

Skip connections are edges between stages that are not neighbours. A compute-only schedule does not show them; of one
with SEND_* and RECV_* they are read off the transfers, unless they are given.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fastpar.pipeline.schedules.schedule import Action, ActionType, Schedule

_T = ActionType
_DOWNSTREAM = {_T.SEND_F, _T.RECV_B}
COUNTERPARTS = {_T.SEND_F: _T.RECV_F, _T.RECV_F: _T.SEND_F, _T.SEND_B: _T.RECV_B, _T.RECV_B: _T.SEND_B}
_FORWARD_ONLY = {_T.FORWARD, _T.SEND_F, _T.RECV_F, _T.UNSHARD, _T.RESHARD, _T.STASH, _T.DROP, _T.HEAD_FORWARD}


@dataclass(frozen=True)
class Problem:
    """What is wrong with a schedule, and where.

    kind      stage, rank, microbatch, transfer, duplicate, unexpected, missing, order, overlap, deadlock, memory,
              version, step, reduce, shard; accumulation, which is a warning: the sums are right but for rounding
    rank      where
    position  index in the rank's list; None for an action that is not there
    action    the action; for a missing one, what should be there
    """

    kind: str
    rank: int
    position: int | None
    action: Action | None
    message: str

    @property
    def is_warning(self) -> bool:
        """Whether the schedule can be run all the same."""
        return self.kind == "accumulation"

    def __str__(self) -> str:
        place = f"rank {self.rank}" if self.position is None else f"rank {self.rank}, position {self.position}"
        action = "" if self.action is None else f", {self.action}"
        return f"[{self.kind}] {place}{action}: {self.message}"


@dataclass(frozen=True)
class Placed:
    """An action, or a part of an overlap, and where it stands."""

    rank: int
    position: int
    action: Action

    def __str__(self) -> str:
        return f"{self.action} (rank {self.rank}, position {self.position})"

    def problem(self, kind: str, message: str) -> Problem:
        return Problem(kind, self.rank, self.position, self.action, message)


@dataclass(frozen=True)
class Need:
    """Something that must have happened before an action; `placed` is None where the schedule lacks it."""

    placed: Placed | None
    why: str


# type, stage, peer (of transfers; of S and T the rank that they are on), microbatch
Key = tuple[ActionType, int, int | None, int]


class Ledger:
    """The actions of a schedule that make sense where they stand, by what they are; the others become `problems`."""

    def __init__(self, schedule: Schedule, edges: Iterable[tuple[int, int]] | None, *, forward_only: bool) -> None:
        self.schedule = schedule
        self.forward_only = forward_only
        self.with_transfers = schedule.has_transfers
        self.problems: list[Problem] = []
        self.placed: list[Placed] = []
        self._by_key: dict[Key, Placed] = {}
        parts = self._edges_used() if edges is None else self._checked_edges(edges)
        self.skips = {(chain.stages[i], chain.stages[j]) for chain in schedule.chains for i, j in parts}
        self._sources: dict[int, list[int]] = {stage: [] for stage in range(schedule.num_stages)}
        self._destinations: dict[int, list[int]] = {stage: [] for stage in range(schedule.num_stages)}
        for source, destination in self.edges():
            self._sources[destination].append(source)
            self._destinations[source].append(destination)
        for rank, own in enumerate(schedule.actions):
            for position, action in enumerate(own):
                for part in action.flat():
                    self._enter(Placed(rank, position, part))

    # Looking up

    def find(self, kind: ActionType, stage: int, microbatch: int, peer: int | None = None) -> Placed | None:
        return self._by_key.get((kind, stage, peer, microbatch))

    def backward(self, stage: int, microbatch: int) -> Placed | None:
        """What makes the gradient of the stage's input: B or I."""
        return self.find(_T.BACKWARD, stage, microbatch) or self.find(_T.BACKWARD_INPUT, stage, microbatch)

    def in_head(self, kind: ActionType, rank: int, microbatch: int) -> Placed | None:
        """S or T of a rank."""
        return self.find(kind, self.schedule.num_stages, microbatch, rank)

    def edges(self) -> Iterator[tuple[int, int]]:
        """(source, destination) of all activations: neighbours, then skip connections."""
        for stage in range(self.schedule.num_stages):
            following = self.schedule.next_stage(stage)
            if following is not None:
                yield stage, following
        yield from sorted(self.skips)

    def crosses(self, stage: int, other: int) -> bool:
        """Whether activations between two stages travel by SEND and RECV: not within a rank."""
        ranks = self.schedule.stage_ranks
        return self.with_transfers and ranks[stage] != ranks[other]

    def needs(self, placed: Placed) -> Iterator[Need]:
        """What must have happened before a compute action, a transfer, S or T.

        What S and T exchange with the last stage they send and receive themselves: no SEND or RECV stands for it.
        """
        action, find = placed.action, self.find
        kind, stage, microbatch = action.type, action.stage, action.microbatch
        if microbatch is None:
            return
        if kind is _T.FORWARD:
            for source in self._sources[stage]:
                if self.crosses(source, stage):
                    yield Need(find(_T.RECV_F, stage, microbatch, source), f"the activations of stage {source}")
                else:
                    yield Need(find(_T.FORWARD, source, microbatch), f"the activations of stage {source}")
        elif kind in (_T.BACKWARD, _T.BACKWARD_INPUT):
            yield Need(find(_T.FORWARD, stage, microbatch), "the activations of its forward")
            for destination in self._destinations[stage]:
                if self.crosses(stage, destination):
                    arrival = find(_T.RECV_B, stage, microbatch, destination)
                    yield Need(arrival, f"the gradient from stage {destination}")
                else:
                    yield Need(self.backward(destination, microbatch), f"the gradient from stage {destination}")
            if self.schedule.sharded_head and stage == self.schedule.last_stage:
                for rank in range(self.schedule.num_ranks):
                    yield Need(self.in_head(_T.HEAD_FORWARD, rank, microbatch), f"the head's results of rank {rank}")
        elif kind is _T.HEAD_FORWARD:
            last = self.schedule.last_stage
            yield Need(find(_T.FORWARD, last, microbatch), f"the hidden states of stage {last}")
        elif kind is _T.HEAD_WEIGHT:
            last = self.schedule.last_stage
            yield Need(self.in_head(_T.HEAD_FORWARD, placed.rank, microbatch), "what its S keeps")
            yield Need(self.backward(last, microbatch), f"the normalisers, which the backward of stage {last} combines")
        elif kind is _T.BACKWARD_WEIGHT:
            yield Need(find(_T.BACKWARD_INPUT, stage, microbatch), "what the first half of the backward keeps")
        elif kind is _T.SEND_F:
            yield Need(find(_T.FORWARD, stage, microbatch), "the activations to send")
        elif kind is _T.SEND_B:
            yield Need(self.backward(stage, microbatch), "the gradient to send")
        else:
            peer = self.schedule.peer_of(action)
            yield Need(find(COUNTERPARTS[kind], peer, microbatch, stage), "the message")

    # Entering

    def _edges_used(self) -> set[tuple[int, int]]:
        """The skip connections, as parts of the model, over which anything is sent or received."""
        schedule = self.schedule
        edges = set()
        for rank in range(schedule.num_ranks):
            for action in schedule.flat(rank):
                if action.peer is not None and max(action.peer, action.stage) < schedule.num_stages:
                    edge = (action.stage, action.peer) if action.type in _DOWNSTREAM else (action.peer, action.stage)
                    if self._is_downstream(*edge) and schedule.next_stage(edge[0]) != edge[1]:
                        edges.add((schedule.part_of(edge[0]), schedule.part_of(edge[1])))
        return edges

    def _checked_edges(self, edges: Iterable[tuple[int, int]]) -> set[tuple[int, int]]:
        checked = set(edges)
        last = self.schedule.num_parts - 1
        for source, destination in checked:
            if not 0 <= source < destination - 1 < last:
                raise ValueError(
                    f"edges: a skip connection goes from a part to one behind the next, of 0 to {last}, "
                    f"got ({source}, {destination})"
                )
        return checked

    def _is_downstream(self, source: int, destination: int) -> bool:
        schedule = self.schedule
        same_chain = schedule.chain_of_stage(source) is schedule.chain_of_stage(destination)
        return same_chain and schedule.part_of(source) < schedule.part_of(destination)

    def _enter(self, placed: Placed) -> None:
        action = placed.action
        refusal = self._misplaced(placed) or self._bad_transfer(placed)
        if refusal is not None:
            self.problems.append(refusal)
            return
        if action.microbatch is not None:
            peer = self.schedule.peer_of(action) if action.type.is_transfer else None
            peer = placed.rank if action.type.is_head else peer
            key = (action.type, action.stage, peer, action.microbatch)
            first = self._by_key.get(key) or self._other_form(action)
            if first is not None:
                again = "" if first.action.type is action.type else f", and {first.action.type.value} is a form of it"
                self.problems.append(placed.problem("duplicate", f"already done by {first}{again}; remove one of them"))
                return
            self._by_key[key] = placed
        self.placed.append(placed)

    def _other_form(self, action: Action) -> Placed | None:
        """B is I and W in one."""
        assert action.microbatch is not None
        halves: tuple[ActionType, ...]
        if action.type is _T.BACKWARD:
            halves = (_T.BACKWARD_INPUT, _T.BACKWARD_WEIGHT)
        elif action.type in (_T.BACKWARD_INPUT, _T.BACKWARD_WEIGHT):
            halves = (_T.BACKWARD,)
        else:
            return None
        return next((p for half in halves if (p := self.find(half, action.stage, action.microbatch))), None)

    def _misplaced(self, placed: Placed) -> Problem | None:
        schedule, action = self.schedule, placed.action
        if action.type.is_head:
            if schedule.head is None:
                return placed.problem("stage", "the schedule has no sharded head; see shard_head")
            if action.stage != schedule.head:
                return placed.problem("stage", f"S and T have the stage number {schedule.head}")
        elif action.stage >= schedule.num_stages:
            return placed.problem("stage", f"there are stages 0 to {schedule.num_stages - 1}")
        elif (home := schedule.stage_ranks[action.stage]) != placed.rank:
            return placed.problem("rank", f"stage {action.stage} lives on rank {home}; move the action there")
        if self.forward_only and action.type not in _FORWARD_ONLY:
            return placed.problem("unexpected", f"{action.type.value} has no place in a forward-only schedule")
        if action.microbatch is None:
            return None
        if action.microbatch >= schedule.num_microbatches:
            return placed.problem("microbatch", f"there are microbatches 0 to {schedule.num_microbatches - 1}")
        chain = schedule.chain_of(action.microbatch)
        if not action.type.is_head and action.stage not in chain.stages:
            stages = ", ".join(map(str, chain.stages))
            return placed.problem("microbatch", f"microbatch {action.microbatch} passes stages {stages} only")
        return None

    def _bad_transfer(self, placed: Placed) -> Problem | None:
        schedule, action = self.schedule, placed.action
        if not action.type.is_transfer:
            return None
        stage, kind = action.stage, action.type.value
        downstream = action.type in _DOWNSTREAM
        near = schedule.next_stage(stage) if downstream else schedule.previous_stage(stage)
        peer = near if action.peer is None else action.peer
        if peer is None:
            end, gone = ("last", "follows") if downstream else ("first", "precedes")
            return placed.problem("transfer", f"stage {stage} is the {end} of its chain: nothing {gone} it; remove it")
        edge = (stage, peer) if downstream else (peer, stage)
        if peer >= schedule.num_stages or not self._is_downstream(*edge):
            side = "a later" if downstream else "an earlier"
            return placed.problem("transfer", f"the other end of {kind} is {side} stage of the chain, got {peer}")
        if near != peer and edge not in self.skips:
            return placed.problem("transfer", f"no skip connection leads from stage {edge[0]} to stage {edge[1]}")
        if schedule.stage_ranks[peer] == placed.rank:
            return placed.problem(
                "transfer", f"stages {stage} and {peer} both live on rank {placed.rank}, which hands over; remove it"
            )
        return None
