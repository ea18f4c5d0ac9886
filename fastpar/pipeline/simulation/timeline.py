"""What ran when: the outcome of a simulation, or the record of a run.

Both are a `Timeline`, so that a prediction and a measurement can be drawn one above the other, opened in the same trace
viewer, and compared rank by rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from fastpar.arguments import checked, checked_fields
from fastpar.pipeline.schedules.costs import Number, quotient
from fastpar.pipeline.schedules.schedule import Action, ActionType
from fastpar.pipeline.simulation import text, trace


@dataclass(frozen=True)
class Event:
    """One action as it happened.

    A SEND lasts until its message has arrived (as recorded by a runtime: until it is handed over), a RECV from when the
    rank asks until the message is there. Both are communication; everything else occupies the rank.
    """

    rank: int
    action: Action
    start: Number
    end: Number

    @property
    def duration(self) -> Number:
        """Time from start to end."""
        return self.end - self.start

    @property
    def occupies_rank(self) -> bool:
        """Whether its rank computes meanwhile; transfers run beside."""
        return not self.action.type.is_transfer


@checked_fields
@dataclass(frozen=True)
class Timeline:
    """The events of all ranks.

    events  in any order; of each rank in the order of its schedule
    unit    of time: "s" for what a runtime records, anything for simulations
    name    for titles

    "Busy" is the time of the actions that occupy a rank, "idle" the rest of the time from the first event of any rank
    to the last.
    """

    events: tuple[Event, ...]
    unit: str = "unit"
    name: str = ""

    @cached_property
    def num_ranks(self) -> int:
        """Ranks that have events."""
        return max((event.rank for event in self.events), default=-1) + 1

    @cached_property
    def by_rank(self) -> tuple[tuple[Event, ...], ...]:
        """The events of each rank."""
        ranks: list[list[Event]] = [[] for _ in range(self.num_ranks)]
        for event in self.events:
            ranks[event.rank].append(event)
        return tuple(map(tuple, ranks))

    @cached_property
    def start(self) -> Number:
        """Start of the first event."""
        return min((event.start for event in self.events), default=0)

    @cached_property
    def end(self) -> Number:
        """End of the last event."""
        return max((event.end for event in self.events), default=0)

    @property
    def makespan(self) -> Number:
        """Time from the first event's start to the last one's end."""
        return self.end - self.start

    @checked(computed=False)
    def busy(self, rank: int) -> Number:
        """Time that a rank computes."""
        if not 0 <= rank < len(self.by_rank):
            raise IndexError(f"rank must be in 0..{len(self.by_rank) - 1}, got {rank}")
        return sum(event.duration for event in self.by_rank[rank] if event.occupies_rank)

    @checked(computed=False)
    def idle(self, rank: int) -> Number:
        """Time of the makespan in which a rank does not compute."""
        return self.makespan - self.busy(rank)

    @checked(computed=False)
    def inner_idle(self, rank: int) -> Number:
        """Idle time between the rank's own first and last action."""
        own = [event for event in self.by_rank[rank] if event.occupies_rank]
        if not own:
            return 0
        return max(event.end for event in own) - min(event.start for event in own) - self.busy(rank)

    @property
    def bubble(self) -> Number:
        """Idle share of the time of all ranks."""
        if not self.makespan:
            return 0
        idle = sum(self.idle(rank) for rank in range(self.num_ranks))
        return quotient(idle, self.num_ranks * self.makespan)

    @checked(computed=False)
    def shares(self, rank: int) -> dict[ActionType, Number]:
        """What part of the makespan each kind of action took. Transfers are counted too, although the rank may compute
        meanwhile (SEND) or is idle (RECV)."""
        times: dict[ActionType, Number] = {}
        for event in self.by_rank[rank]:
            times[event.action.type] = times.get(event.action.type, 0) + event.duration
        return {kind: quotient(time, self.makespan) if self.makespan else 0 for kind, time in times.items()}

    @checked(computed=False)
    def shifted(self, offset: Number) -> Timeline:
        """The same events, `offset` later."""
        moved = (dataclasses.replace(e, start=e.start + offset, end=e.end + offset) for e in self.events)
        return dataclasses.replace(self, events=tuple(moved))

    def from_zero(self) -> Timeline:
        """The same events, the first of which starts at 0."""
        return self.shifted(-self.start)

    @staticmethod
    @checked(computed=False)
    def merge(timelines: Sequence[Timeline], offsets: Sequence[Number] | None = None) -> Timeline:
        """One timeline out of those that the ranks recorded.

        offsets  per timeline, what its clock is to be moved by: the clock of the merged timeline minus its own
        """
        if not timelines:
            raise ValueError("there are no timelines to merge")
        if offsets is not None and len(offsets) != len(timelines):
            raise ValueError(f"{len(timelines)} timelines need as many offsets, got {len(offsets)}")
        units = {timeline.unit for timeline in timelines}
        if len(units) != 1:
            raise ValueError(f"timelines to merge must have one unit, got {', '.join(sorted(units))}")
        moved = [t.shifted(o) for t, o in zip(timelines, offsets, strict=True)] if offsets is not None else timelines
        owners: dict[int, int] = {}
        for index, timeline in enumerate(moved):
            for rank in {event.rank for event in timeline.events}:
                if owners.setdefault(rank, index) != index:
                    raise ValueError(f"timelines {owners[rank]} and {index} both have events of rank {rank}")
        events = sorted((e for timeline in moved for e in timeline.events), key=lambda event: event.rank)
        return Timeline(tuple(events), timelines[0].unit, timelines[0].name)

    @checked(computed=False)
    def to_chrome_trace(self, path: str | Path | None = None) -> dict[str, Any]:
        """The timeline in the Trace Event Format, for ui.perfetto.dev; also written to `path`. `from_chrome_trace`
        reads it without loss."""
        return trace.write(self, path)

    @staticmethod
    @checked(computed=False)
    def from_chrome_trace(source: str | Path | Mapping[str, Any]) -> Timeline:
        """Read what `to_chrome_trace` returned or wrote. ValueError for traces of others."""
        events, unit, name = trace.read(source)
        return Timeline(tuple(Event(*event) for event in events), unit, name)

    @checked(computed=False)
    def to_text(self, width: int = 160) -> str:
        """A picture for terminals, at most `width` columns of time: see `fastpar.pipeline.simulation.text`."""
        if not 1 <= width <= 1 << 20:
            raise ValueError(f"width must be at least 1 and at most {1 << 20} columns, got {width}")
        return text.draw(self, width)

    @cached_property
    def flows(self) -> tuple[tuple[Event, Event], ...]:
        """(producer, consumer) of everything that goes from one rank to another.

        Where there are transfers, SEND and RECV; else a forward and the next forward of its microbatch, a backward and
        the next. Read from the order in time, since a microbatch is at one stage of its chain after another.
        """
        if any(event.action.type.is_transfer for event in self.events):
            return tuple(_pair_transfers(self.events))
        forward: dict[int, list[tuple[Number, int, Event]]] = {}
        backward: dict[int, list[tuple[Number, int, Event]]] = {}
        for event in self.events:
            for part in event.action.flat():
                if part.type is ActionType.FORWARD and part.microbatch is not None:
                    forward.setdefault(part.microbatch, []).append((event.start, part.stage, event))
                elif part.type in _GRADIENT and part.microbatch is not None:
                    backward.setdefault(part.microbatch, []).append((event.start, -part.stage, event))
        flows = []
        for passes in (*forward.values(), *backward.values()):
            passes.sort(key=lambda item: item[:2])
            flows += [(a[2], b[2]) for a, b in pairwise(passes) if a[2].rank != b[2].rank]
        return tuple(flows)


_GRADIENT = {ActionType.BACKWARD, ActionType.BACKWARD_INPUT}
_RECEIVES = {ActionType.SEND_F: ActionType.RECV_F, ActionType.SEND_B: ActionType.RECV_B}


def _pair_transfers(events: Iterable[Event]) -> list[tuple[Event, Event]]:
    """SENDs and their RECVs: by the stages where both name them, else the k-th of a microbatch with its k-th."""
    sends: dict[tuple[object, ...], list[Event]] = {}
    receives: dict[tuple[object, ...], list[Event]] = {}
    for event in events:
        kind, stage, peer = event.action.type, event.action.stage, event.action.peer
        if kind in _RECEIVES:
            ends = (stage, peer) if peer is not None else ()
            sends.setdefault((_RECEIVES[kind], event.action.microbatch, ends), []).append(event)
        elif kind.is_transfer:
            ends = (peer, stage) if peer is not None else ()
            receives.setdefault((kind, event.action.microbatch, ends), []).append(event)
    pairs = []
    for key, sent in sends.items():
        sent.sort(key=lambda event: event.start)
        received = sorted(receives.get(key, ()), key=lambda event: event.end)
        pairs += list(zip(sent, received, strict=False))
    return pairs


@dataclass(frozen=True)
class RankComparison:
    """(predicted, measured) of one rank: idle share of the makespan, and the share of each kind of action."""

    rank: int
    idle: tuple[Number, Number]
    shares: dict[ActionType, tuple[Number, Number]]


@dataclass(frozen=True)
class Comparison:
    """A prediction against a measurement; see `compare`."""

    makespan: tuple[Number, Number]
    units: tuple[str, str]
    ranks: tuple[RankComparison, ...]

    @property
    def error(self) -> float | None:
        """Predicted makespan relative to the measured one, minus 1; None where their units differ."""
        predicted, measured = self.makespan
        return float(predicted) / float(measured) - 1 if self.units[0] == self.units[1] and measured else None

    def to_text(self) -> str:
        """A table, in percent of the makespan: predicted / measured."""
        kinds = sorted({kind for rank in self.ranks for kind in rank.shares}, key=list(ActionType).index)
        rows = [["rank", "idle", *(kind.value for kind in kinds)]]
        for rank in self.ranks:
            rows.append([str(rank.rank), _percents(rank.idle), *(_percents(rank.shares[kind]) for kind in kinds)])
        predicted, measured = (f"{float(t):.6g} {u}" for t, u in zip(self.makespan, self.units, strict=True))
        error = "" if self.error is None else f" ({self.error:+.1%})"
        return f"makespan: {predicted} predicted{error}, {measured} measured\n" + table(rows)


@checked(computed=False)
def compare(predicted: Timeline, measured: Timeline) -> Comparison:
    """Makespan, and per rank the shares of it that were idle and that went into each kind of action.

    Shares can be compared whatever the units are; makespans where the prediction was made with measured costs
    (`Costs` in seconds).
    """
    if predicted.num_ranks != measured.num_ranks:
        raise ValueError(f"{predicted.num_ranks} ranks were predicted and {measured.num_ranks} measured")
    ranks = []
    shares = [[timeline.shares(rank) for timeline in (predicted, measured)] for rank in range(predicted.num_ranks)]
    kinds = sorted({kind for rank in shares for of in rank for kind in of}, key=list(ActionType).index)
    for rank, (expected, found) in enumerate(shares):
        idle = [quotient(t.idle(rank), t.makespan) if t.makespan else 0 for t in (predicted, measured)]
        both = {kind: (expected.get(kind, 0), found.get(kind, 0)) for kind in kinds}
        ranks.append(RankComparison(rank, (idle[0], idle[1]), both))
    return Comparison((predicted.makespan, measured.makespan), (predicted.unit, measured.unit), tuple(ranks))


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of equally many cells as aligned columns: the first to the left, all others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells]).rstrip())
    return "\n".join(lines)


def _percents(pair: tuple[Number, Number]) -> str:
    return " / ".join(f"{100 * float(share):.1f}" for share in pair)
