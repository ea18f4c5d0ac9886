"""Timelines as files of the Trace Event Format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

A rank is a process; its computations are one thread, its transfers another (more than one where messages are on their
way at once, since slices of a thread must not overlap in part). Arrows go from what is produced to who needs it.

The viewers read `ts` and `dur`, in microseconds. What `read` reads is in `args`: the action in words, and start and end
as they were, a Fraction as "3/2", so that nothing is lost.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastpar.pipeline.schedules.costs import Number
from fastpar.pipeline.schedules.schedule import Action

if TYPE_CHECKING:  # timelines write and read themselves with this module
    from fastpar.pipeline.simulation.timeline import Event, Timeline

# Microseconds in a unit of time; those of unknown units are drawn as milliseconds.
_MICROSECONDS = {"s": 1e6, "ms": 1e3, "us": 1.0, "ns": 1e-3}
_COMPUTE_THREAD = 0


def write(timeline: Timeline, path: str | Path | None = None) -> dict[str, Any]:
    """The trace of a timeline; also written to `path` as JSON."""
    factor = _MICROSECONDS.get(timeline.unit, 1e3)
    trace = {
        "traceEvents": list(_trace_events(timeline, factor)),
        "displayTimeUnit": "ms",
        "otherData": {"tool": "fastpar", "name": timeline.name, "unit": timeline.unit},
    }
    if path is not None:
        Path(path).write_text(json.dumps(trace, indent=None, separators=(",", ":"), allow_nan=False))
    return trace


def read(source: str | Path | Mapping[str, Any]) -> tuple[list[tuple[int, Action, Number, Number]], str, str]:
    """Events, unit and name of the timeline that `write` wrote: from a file, or from the trace itself. Other events in
    it are skipped, such as those that were merged in from a profiler."""
    trace = source if isinstance(source, Mapping) else json.loads(Path(source).read_text())
    origin = trace.get("otherData", {}) if isinstance(trace, Mapping) else {}
    if origin.get("tool") != "fastpar":
        raise ValueError(f"{'the trace' if isinstance(source, Mapping) else source} was not written by fastpar")
    events = []
    for event in trace["traceEvents"]:
        args = event.get("args", {})
        if event.get("ph") == "X" and "action" in args:
            action = Action.parse(args["action"])
            events.append((event["pid"], action, _from_json(args["start"]), _from_json(args["end"])))
    return events, origin["unit"], origin["name"]


def _trace_events(timeline: Timeline, factor: float) -> Iterator[dict[str, Any]]:
    threads = _threads(timeline)
    for rank in range(timeline.num_ranks):
        yield {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}}
        yield {"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}}
        for thread in sorted({_COMPUTE_THREAD, *(threads[id(event)] for event in timeline.by_rank[rank])}):
            name = "compute" if thread == _COMPUTE_THREAD else f"communication {thread}"
            yield {"ph": "M", "pid": rank, "tid": thread, "name": "thread_name", "args": {"name": name}}
    for event in timeline.events:
        yield {
            "ph": "X",
            "pid": event.rank,
            "tid": threads[id(event)],
            "name": str(event.action),
            "cat": event.action.type.value,
            "ts": float(event.start) * factor,
            "dur": float(event.duration) * factor,
            "args": {"action": str(event.action), "start": _to_json(event.start), "end": _to_json(event.end)},
        }
    for number, (producer, consumer) in enumerate(timeline.flows):
        # An arrow belongs to the slice that is open at its time.
        leaves = _late(producer) if producer.occupies_rank else float(producer.start)
        arrives = float(consumer.start) if consumer.occupies_rank else _late(consumer)
        ends = {"s": (producer, leaves), "f": (consumer, arrives)}
        for phase, (event, time) in ends.items():
            place = {"pid": event.rank, "tid": threads[id(event)], "ts": time * factor}
            yield {"ph": phase, "bp": "e", "cat": "flow", "name": "message", "id": number, **place}


def _late(event: Event) -> float:
    """A time just before the end of an event."""
    return float(event.end) - 0.01 * float(event.duration)


def _threads(timeline: Timeline) -> dict[int, int]:
    """Thread of each event, by its id(): a transfer goes to the first communication thread that is free."""
    threads = {}
    for own in timeline.by_rank:
        busy_until: list[Number] = []
        for event in sorted(own, key=lambda event: event.start):
            thread = _COMPUTE_THREAD
            if not event.occupies_rank:
                free = (i for i, end in enumerate(busy_until) if end <= event.start)
                lane = next(free, len(busy_until))
                busy_until[lane : lane + 1] = [event.end]
                thread = lane + 1
            threads[id(event)] = thread
    return threads


def _to_json(time: Number) -> int | float | str:
    return f"{time.numerator}/{time.denominator}" if isinstance(time, Fraction) else time


def _from_json(time: int | float | str) -> Number:
    return Fraction(time) if isinstance(time, str) else time
