"""Observers of collectives: `record` counts what is sent, `trace` measures how long anybody waited for it.

    with fp.comm.record() as log:
        loss.backward()
    sum(entry.nbytes for entry in log)

    with fp.comm.trace() as trace:
        with trace.phase("forward"):
            loss = model(x)
        with trace.phase("backward"):
            loss.backward()
    trace.to_chrome_trace("step.json")           # for ui.perfetto.dev
    trace.waited("backward")                     # seconds

Times are those of this process, in seconds from the beginning of the trace. What a rank computes is not seen, so what
lies between launch and wait counts as hidden, whoever did it.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fastpar.arguments import checked

# Note: process-wide lists instead of context variables. The backward pass of CUDA tensors runs on a thread of
# autograd's own, which inherits no context; a rank is a process, so process-wide is what "this rank sent" means.
# They are changed in place, so that whoever imports them may ask whether they are empty.
LOGS: list[list[CommRecord]] = []
TRACES: list[CommTrace] = []
_lock = threading.Lock()


@dataclass(frozen=True)
class CommRecord:
    """One collective of a group of `size` > 1 ranks, as launched by this rank.

    op      name of the Communicator method, without _async
    size    ranks of the group
    numel   elements of the whole payload: the reduced or gathered tensor, or all that this rank sends in an all-to-all
    dtype   of the caller's tensor
    nbytes  bytes that a rank sends under the bandwidth-optimal algorithm (`algorithmic_bytes`), whatever the transport
            really does
    """

    op: str
    size: int
    numel: int
    dtype: torch.dtype
    nbytes: int


def algorithmic_bytes(op: str, size: int, payload: int) -> int:
    """Bytes that one of `size` ranks sends for `payload` bytes (see `CommRecord.numel`), ring algorithms, averaged
    over the ranks.

    all_reduce                          2 (size - 1) / size * payload
    reduce_scatter, all_gather          (size - 1) / size * payload        so that their sum equals the all_reduce
    scatter, gather, broadcast, reduce  (size - 1) / size * payload
    all_to_all                          payload                            the caller leaves out what a rank keeps
    barrier                             0
    """
    if op == "barrier":
        return 0
    if op == "all_to_all":
        return payload
    return (2 if op == "all_reduce" else 1) * payload * (size - 1) // size


@contextmanager
def record() -> Iterator[list[CommRecord]]:
    """Collect a `CommRecord` of every collective that this process launches in the block, on any thread, backward
    passes included.

    A group of one rank launches none, and neither does an empty payload. Blocks nest; each log gets everything.
    """
    log: list[CommRecord] = []
    with _lock:
        LOGS.append(log)
    try:
        yield log
    finally:
        with _lock:
            LOGS[:] = [other for other in LOGS if other is not log]


def note(op: str, size: int, numel: int, dtype: torch.dtype) -> None:
    """Add to every open log (one truth test when there is none)."""
    if LOGS:
        entry = CommRecord(op, size, numel, dtype, algorithmic_bytes(op, size, numel * dtype.itemsize))
        with _lock:
            for log in LOGS:
                log.append(entry)


@dataclass
class CommSpan:
    """One collective of a group of `size` ranks.

    op, nbytes   as in `fastpar.comm.CommRecord`
    launched     when it was launched, and `returned` when the launch was over: a blocking one is done then
    waits        when somebody began to wait for it and had it
    """

    op: str
    size: int
    nbytes: int
    launched: float
    returned: float = 0.0
    waits: list[tuple[float, float]] = field(default_factory=list)

    @property
    def done(self) -> float:
        """When the result was there for who asked for it."""
        return max([self.returned, *(end for _, end in self.waits)])

    @property
    def blocked(self) -> float:
        """Seconds in which the caller could do nothing else."""
        return self.returned - self.launched + sum(end - begin for begin, end in self.waits)


class CommTrace:
    """The record of `trace()`: `spans` of collectives, and (name, begin, end) of `phases`."""

    def __init__(self) -> None:
        self._zero = time.perf_counter()
        self.spans: list[CommSpan] = []
        self.phases: list[tuple[str, float, float]] = []

    def now(self) -> float:
        """Seconds since the trace began."""
        return time.perf_counter() - self._zero

    @contextmanager
    @checked(computed=False)
    def phase(self, name: str) -> Iterator[None]:
        """Names what this process does meanwhile."""
        begin = self.now()
        try:
            yield
        finally:
            self.phases.append((name, begin, self.now()))

    @checked(computed=False)
    def waited(self, phase: str | None = None) -> float:
        """Seconds in which collectives kept their callers, in all phases of a name or (None) at all."""
        found = 0.0
        for span in self.spans:
            for begin, end in [(span.launched, span.returned), *span.waits]:
                if phase is None:
                    found += end - begin
                else:
                    meets = (min(end, last) - max(begin, first) for name, first, last in self.phases if name == phase)
                    found += sum(max(overlap, 0.0) for overlap in meets)
        return found

    @checked(computed=False)
    def to_chrome_trace(self, path: str | Path, *, rank: int = 0) -> None:
        """Write a file of the Trace Event Format: phases, what kept the caller, and what was in flight."""
        events: list[dict[str, Any]] = []

        def add(row: str, name: str, begin: float, end: float, **arguments: Any) -> None:
            times = {"ts": begin * 1e6, "dur": (end - begin) * 1e6}
            events.append({"ph": "X", "pid": rank, "tid": row, "name": name, **times, "args": arguments})

        for name, begin, end in self.phases:
            add("phases", name, begin, end)
        for span in self.spans:
            for begin, end in [(span.launched, span.returned), *span.waits]:
                add("waiting", span.op, begin, end, bytes=span.nbytes)
            add("in flight", span.op, span.launched, span.done, bytes=span.nbytes, ranks=span.size)
        Path(path).write_text(json.dumps({"traceEvents": events}))


@contextmanager
def trace() -> Iterator[CommTrace]:
    """Collect a `CommSpan` of every collective that this process launches in the block, on any thread.

    Blocks nest. Outside of them a collective pays one truth test.
    """
    made = CommTrace()
    with _lock:
        TRACES.append(made)
    try:
        yield made
    finally:
        with _lock:
            TRACES[:] = [other for other in TRACES if other is not made]


class OpenSpans:
    """The spans of one collective in the open traces."""

    def __init__(self, traces: list[CommTrace], launched: float) -> None:
        self._traces, self._launched = traces, launched
        self._spans: list[CommSpan] = []

    def launched(self, op: str, size: int, numel: int, dtype: torch.dtype) -> None:
        """The launch is over."""
        nbytes, now = algorithmic_bytes(op, size, numel * dtype.itemsize), time.perf_counter()
        for made in self._traces:
            span = CommSpan(op, size, nbytes, self._launched - made._zero, now - made._zero)
            self._spans.append(span)
            made.spans.append(span)

    def waited(self, began: float) -> None:
        now = time.perf_counter()
        for made, span in zip(self._traces, self._spans, strict=True):
            span.waits.append((began - made._zero, now - made._zero))


def open_spans() -> OpenSpans | None:
    """At the beginning of a launch: None where nobody looks."""
    # Of the traces that are open now: the span ends in the same ones.
    return OpenSpans(list(TRACES), time.perf_counter()) if TRACES else None
