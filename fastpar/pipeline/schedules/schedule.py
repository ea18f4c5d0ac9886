"""A pipeline schedule as data: per rank, the list of actions it executes.

The model is cut into parts 0, 1, ..., n-1, and a *stage* is a part that lives on a rank. Microbatches pass the stages
of their *chain* in order. Almost every schedule has one chain, in which stage s is part s. In DualPipe microbatches
flow in both directions: there are two chains, and each part exists twice, as two stages on two ranks (*replicas*).

An action is written as torch.distributed.pipelining writes it, stage first, then what, then the microbatch:

    0F3             forward of microbatch 3 through stage 0
    0B3             its whole backward; or in two halves:
    0I3  0W3        gradient of the stage's input; gradients of its weights
    0SEND_F3        its activations go to the next stage           1RECV_F3   ... and arrive
    1SEND_B3        the gradient of stage 1's input goes back      0RECV_B3   ... and arrives
    0SEND_F3>2      over a skip connection, to stage 2             2RECV_F3>0
    0UNSHARD        gather the stage's sharded parameters          0RESHARD   free them again
    0REDUCE_GRAD    sum the stage's gradients over its replicas
    0STEP           update the stage's weights
    0STASH@2        keep a copy of the weights as version 2        0DROP@2    forget it
    0F3@2           forward with version 2 of the weights          0B3@2      backward with the same
    (0F3;1B1)OVERLAP_F_B   a forward and a backward at the same time
    4S3  4T3        a sharded head after stages 0 to 3: this rank's shard of it, forward and gradients of its weights

Actions of torch's files mean the same here; `>`, `@`, S and T are additions. Version v of a stage's weights is what
they are after v STEPs; an action without a version uses the current weights.

Sends are buffered: they wait for nobody. Everything else on a rank happens in the order of its list. Gradients
accumulate in that order too, so a schedule whose backwards ascend in the microbatches of each stage sums as a
sequential run does, bit for bit.
"""

from __future__ import annotations

import csv
import enum
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from fastpar.arguments import checked, checked_fields


class ScheduleError(ValueError):
    """A schedule that cannot be run, or text that is not one; the message says where and why."""


class ActionType(enum.Enum):
    """What an action does; the value is its word in text."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE_GRAD = "REDUCE_GRAD"
    STASH = "STASH"
    DROP = "DROP"
    STEP = "STEP"
    OVERLAP_F_B = "OVERLAP_F_B"
    HEAD_FORWARD = "S"
    HEAD_WEIGHT = "T"

    @property
    def is_compute(self) -> bool:
        """F, B, I or W: what a stage does."""
        return self in _COMPUTE

    @property
    def is_head(self) -> bool:
        """S or T: what every rank does with its shard of the head."""
        return self in _HEAD

    @property
    def is_transfer(self) -> bool:
        """Whether it sends or receives."""
        return self in _TRANSFER

    @property
    def has_microbatch(self) -> bool:
        """Whether it is of one microbatch, as forwards, backwards and transfers are."""
        return self in _COMPUTE or self in _TRANSFER or self in _HEAD


_COMPUTE = {ActionType.FORWARD, ActionType.BACKWARD, ActionType.BACKWARD_INPUT, ActionType.BACKWARD_WEIGHT}
_TRANSFER = {ActionType.SEND_F, ActionType.RECV_F, ActionType.SEND_B, ActionType.RECV_B}
_HEAD = {ActionType.HEAD_FORWARD, ActionType.HEAD_WEIGHT}
_VERSIONED = _COMPUTE | {ActionType.STASH, ActionType.DROP}

_WORDS = "|".join(sorted((t.value for t in ActionType if t is not ActionType.OVERLAP_F_B), key=len, reverse=True))
_ACTION = re.compile(rf"(?P<stage>\d+)(?P<type>{_WORDS})(?P<microbatch>\d*)(>(?P<peer>\d+))?(@(?P<version>\d+))?")
_OVERLAP = re.compile(r"\((?P<parts>[^()]*)\)OVERLAP_F_B")


@dataclass(frozen=True)
class Action:
    """One step of one rank.

    type        what is done
    stage       on which stage; the first part's for an OVERLAP_F_B; for S and T the number after the last stage's
    microbatch  for F, B, I, W, S, T, SEND_*, RECV_*; None for all others
    peer        SEND_* and RECV_*: the stage at the other end; None: the neighbour in the chain
    version     F, B, I, W: the version of the weights to use (None: the current one); STASH and DROP: the version kept
    parts       OVERLAP_F_B: the actions that run together
    """

    type: ActionType
    stage: int
    microbatch: int | None = None
    peer: int | None = None
    version: int | None = None
    parts: tuple[Action, ...] = ()

    def __post_init__(self) -> None:
        if type(self.type) is not ActionType:
            raise TypeError(f"type must be an ActionType, got {self.type!r:.60}")
        for name in ("stage", "microbatch", "peer", "version"):
            value = getattr(self, name)
            if type(value) is not int and (value is not None or name == "stage"):
                raise TypeError(f"{name} must be an int, got {value!r:.60}")
        if type(self.parts) is not tuple:
            raise TypeError(f"parts must be a tuple of Actions, got {self.parts!r:.60}")
        if (self.type is ActionType.OVERLAP_F_B) != bool(self.parts):
            raise ScheduleError(f"OVERLAP_F_B has parts and nothing else has, got {self.type.value} {self.parts}")
        if self.parts:
            if not all(part.type.is_compute for part in self.parts):
                raise ScheduleError(f"only F, B, I and W can overlap, got {self}")
            return
        if self.type.has_microbatch != (self.microbatch is not None):
            needs = "needs a" if self.type.has_microbatch else "has no"
            raise ScheduleError(f"{self.type.value} {needs} microbatch, got {self.microbatch}")
        if self.peer is not None and not self.type.is_transfer:
            raise ScheduleError(f"only SEND_* and RECV_* have a peer, got {self.type.value} and {self.peer}")
        if self.version is not None and self.type not in _VERSIONED:
            raise ScheduleError(f"{self.type.value} has no weight version, got {self.version}")
        if self.version is None and self.type in (ActionType.STASH, ActionType.DROP):
            raise ScheduleError(f"{self.type.value} needs a weight version")
        if min(self.stage, self.microbatch or 0, self.peer or 0, self.version or 0) < 0:
            raise ScheduleError(f"stage, microbatch, peer and version count from 0, got {self}")

    @staticmethod
    def overlap(*parts: Action) -> Action:
        """The actions `parts` at the same time."""
        if len(parts) < 2:
            raise ScheduleError(f"an overlap needs at least two actions, got {len(parts)}")
        return Action(ActionType.OVERLAP_F_B, parts[0].stage, parts=tuple(parts))

    @staticmethod
    @checked(computed=False)
    def parse(text: str) -> Action:
        """The inverse of `str`; blanks around it are ignored."""
        word = text.strip()
        if overlap := _OVERLAP.fullmatch(word):
            return Action.overlap(*(Action.parse(part) for part in overlap["parts"].split(";")))
        match = _ACTION.fullmatch(word)
        if match is None:
            raise ScheduleError(f"{word!r} is not an action: write stage, action, microbatch, such as 2F0 or 1SEND_B3")
        microbatch, peer, version = (int(match[n]) if match[n] else None for n in ("microbatch", "peer", "version"))
        try:
            return Action(ActionType(match["type"]), int(match["stage"]), microbatch, peer, version)
        except ScheduleError as error:
            raise ScheduleError(f"{word!r}: {error}") from None

    def __str__(self) -> str:
        if self.parts:
            return f"({';'.join(map(str, self.parts))}){self.type.value}"
        microbatch = "" if self.microbatch is None else self.microbatch
        peer = "" if self.peer is None else f">{self.peer}"
        version = "" if self.version is None else f"@{self.version}"
        return f"{self.stage}{self.type.value}{microbatch}{peer}{version}"

    def flat(self) -> tuple[Action, ...]:
        """The actions inside an overlap; else the action itself."""
        return self.parts or (self,)


MAX_MICROBATCHES = 1 << 28


@checked_fields
@dataclass(frozen=True)
class Chain:
    """These microbatches pass these stages, in this order."""

    stages: tuple[int, ...]
    microbatches: tuple[int, ...]


@checked_fields
@dataclass(frozen=True)
class Schedule:
    """What every rank executes.

    name         for tables and pictures
    stage_ranks  the rank on which stage s lives
    chains       which microbatches pass which stages; together they hold every stage and every microbatch once
    actions      per rank, in order
    sharded_head whether the model ends with a head that is no stage but has a shard on every rank, which S and T run

    Construction checks what the fields say about each other. Whether the actions can be executed, and add up to a
    training step, is for `fastpar.pipeline.schedules.validate`.
    """

    name: str
    stage_ranks: tuple[int, ...]
    chains: tuple[Chain, ...]
    actions: tuple[tuple[Action, ...], ...]
    sharded_head: bool = False

    def __post_init__(self) -> None:
        if not self.actions or not self.stage_ranks or not self.chains:
            raise ScheduleError("a schedule needs at least one rank, one stage and one chain")
        for stage, rank in enumerate(self.stage_ranks):
            if not 0 <= rank < self.num_ranks:
                raise ScheduleError(f"stage {stage} is on rank {rank}, but there are ranks 0 to {self.num_ranks - 1}")
        stages = sorted(stage for chain in self.chains for stage in chain.stages)
        if stages != list(range(self.num_stages)):
            raise ScheduleError(f"the chains must hold each of the {self.num_stages} stages once, got {stages}")
        if len({len(chain.stages) for chain in self.chains}) != 1:
            raise ScheduleError(f"all chains must be equally long, got {[len(c.stages) for c in self.chains]} stages")
        microbatches = sorted(index for chain in self.chains for index in chain.microbatches)
        if microbatches != list(range(len(microbatches))) or not microbatches:
            raise ScheduleError(f"the chains must hold each microbatch from 0 on once, got {microbatches}")
        if self.sharded_head and len(self.chains) > 1:
            raise ScheduleError(f"a sharded head needs a schedule with one chain, got {len(self.chains)}")

    @staticmethod
    @checked(computed=False)
    def of_one_chain(
        name: str, stage_ranks: Sequence[int], num_microbatches: int, actions: Iterable[Iterable[Action]]
    ) -> Schedule:
        """A schedule in which every microbatch passes the stages 0, 1, 2, ..."""
        if not 1 <= num_microbatches <= MAX_MICROBATCHES:
            raise ScheduleError(
                f"num_microbatches must be at least 1 and at most {MAX_MICROBATCHES}, got {num_microbatches}"
            )
        chain = Chain(tuple(range(len(stage_ranks))), tuple(range(num_microbatches)))
        return Schedule(name, tuple(stage_ranks), (chain,), tuple(tuple(own) for own in actions))

    @property
    def num_ranks(self) -> int:
        """Ranks of the pipeline."""
        return len(self.actions)

    @property
    def num_stages(self) -> int:
        """Stages of all ranks."""
        return len(self.stage_ranks)

    @property
    def num_parts(self) -> int:
        """Parts that the model is cut into: the length of a chain."""
        return len(self.chains[0].stages)

    @property
    def head(self) -> int | None:
        """The stage number of S and T, where the head is sharded."""
        return self.num_stages if self.sharded_head else None

    @property
    def last_stage(self) -> int:
        """The stage that a sharded head follows (of one chain: the last)."""
        return self.chains[0].stages[-1]

    @cached_property
    def num_microbatches(self) -> int:
        """Microbatches of all chains."""
        return sum(len(chain.microbatches) for chain in self.chains)

    @checked(computed=False)
    def part_of(self, stage: int) -> int:
        """Which part of the model a stage is: its position in its chain. A sharded head comes after all parts."""
        self._check_stage(stage)
        return self._places[stage][1]

    def _check_stage(self, stage: int) -> None:
        if stage not in self._places:
            raise IndexError(f"stage must be one of the {len(self._places)} stages of {self.name}, got {stage}")

    @checked(computed=False)
    def chain_of_stage(self, stage: int) -> Chain:
        """The chain that a stage is in."""
        self._check_stage(stage)
        return self.chains[self._places[stage][0]]

    @checked(computed=False)
    def chain_of(self, microbatch: int) -> Chain:
        """The chain that a microbatch passes."""
        return self.chains[self._chain_of_microbatch[microbatch]]

    @checked(computed=False)
    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that live on a rank."""
        return tuple(stage for stage, owner in enumerate(self.stage_ranks) if owner == rank)

    @checked(computed=False)
    def replicas_of(self, part: int) -> tuple[int, ...]:
        """The stages that hold one part of the model: one, or two in DualPipe."""
        return tuple(chain.stages[part] for chain in self.chains)

    def next_stage(self, stage: int) -> int | None:
        """The stage that the activations go to; None after the last."""
        chain, position = self._places[stage]
        stages = self.chains[chain].stages
        return stages[position + 1] if position + 1 < len(stages) else None

    def previous_stage(self, stage: int) -> int | None:
        """The stage that the activations come from; None before the first."""
        chain, position = self._places[stage]
        return self.chains[chain].stages[position - 1] if position else None

    def flat(self, rank: int) -> Iterator[Action]:
        """The actions of a rank, with overlaps taken apart."""
        for action in self.actions[rank]:
            yield from action.flat()

    def peer_of(self, action: Action) -> int:
        """The stage at the other end of a SEND_* or RECV_*."""
        if action.peer is not None:
            return action.peer
        downstream = action.type in (ActionType.SEND_F, ActionType.RECV_B)
        peer = self.next_stage(action.stage) if downstream else self.previous_stage(action.stage)
        if peer is None:
            raise ScheduleError(f"{action}: stage {action.stage} has no neighbour on that side")
        return peer

    @property
    def has_transfers(self) -> bool:
        """Whether SEND_* and RECV_* are in it (`fastpar.pipeline.add_communication`), or compute only."""
        return any(action.type.is_transfer for own in self.actions for action in own)

    # Text

    @checked(computed=False)
    def to_csv(self, path: str | Path | None = None) -> str:
        """One line per rank, actions separated by commas, as torch.distributed.pipelining reads it; also written to
        `path`. Name, ranks and chains are not in the file."""
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows([str(action) for action in own] for own in self.actions)
        if path is not None:
            Path(path).write_text(out.getvalue())
        return out.getvalue()

    @staticmethod
    @checked(computed=False)
    def from_csv(source: str | Path, *, name: str = "csv") -> Schedule:
        """Read what `to_csv` or torch wrote: a path, or the text itself (with at least one line break or comma).

        Empty cells are idle time and ignored. Stages live where their actions are; one chain over all of them is
        assumed. Raises ScheduleError, which names line and column.
        """
        is_text = isinstance(source, str) and ("\n" in source or "," in source)
        text = str(source) if is_text else Path(source).read_text()
        actions: list[list[Action]] = []
        for line, cells in enumerate(csv.reader(io.StringIO(text)), 1):
            own = []
            for column, cell in enumerate(cells, 1):
                try:
                    own += [Action.parse(cell)] if cell.strip() not in ("", "None") else []
                except ScheduleError as error:
                    raise ScheduleError(f"line {line}, column {column}: {error}") from None
            actions.append(own)
        return Schedule._of_actions(name, actions)

    def to_text(self) -> str:
        """One line per rank, for people."""
        return "\n".join(f"rank {rank}: {' '.join(map(str, own))}" for rank, own in enumerate(self.actions))

    @staticmethod
    def _of_actions(name: str, actions: list[list[Action]]) -> Schedule:
        stage_ranks: dict[int, int] = {}
        microbatches: set[int] = set()
        heads: set[int] = set()
        for rank, own in enumerate(actions):
            for action in (part for either in own for part in either.flat()):
                if action.type.is_head:
                    heads.add(action.stage)
                    continue
                other = stage_ranks.setdefault(action.stage, rank)
                if other != rank:
                    raise ScheduleError(f"{action}: stage {action.stage} has actions on ranks {other} and {rank}")
                if action.microbatch is not None:
                    microbatches.add(action.microbatch)
        missing = set(range(max(stage_ranks, default=-1) + 1)) - set(stage_ranks)
        if missing or not stage_ranks or not microbatches:
            raise ScheduleError(f"stages without actions: {sorted(missing)}" if missing else "there are no actions")
        ranks = [stage_ranks[stage] for stage in range(len(stage_ranks))]
        if heads - {len(ranks)}:
            raise ScheduleError(
                f"S and T have the stage number {len(ranks)}, after the last stage, got {sorted(heads)}"
            )
        made = Schedule.of_one_chain(name, ranks, max(microbatches) + 1, actions)
        return replace(made, sharded_head=bool(heads))

    # Places, computed once

    @cached_property
    def _places(self) -> dict[int, tuple[int, int]]:
        """Stage -> (index of its chain, position in it)."""
        places = {s: (c, at) for c, chain in enumerate(self.chains) for at, s in enumerate(chain.stages)}
        return places if self.head is None else {**places, self.head: (0, self.num_parts)}

    @cached_property
    def _chain_of_microbatch(self) -> dict[int, int]:
        return {index: c for c, chain in enumerate(self.chains) for index in chain.microbatches}
