"""When collectives were launched, and how long somebody waited for them: what was hidden behind what.

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
from fastpar.comm.recording import algorithmic_bytes


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
    """What `trace()` collects: `spans` of collectives, and (name, begin, end) of `phases`."""

    def __init__(self) -> None:
        self._zero = time.perf_counter()
        self.spans: list[CommSpan] = []
        self.phases: list[tuple[str, float, float]] = []

    def now(self) -> float:
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


_traces: list[CommTrace] = []
_lock = threading.Lock()


@contextmanager
def trace() -> Iterator[CommTrace]:
    """Collect a `CommSpan` of every collective that this process launches in the block, on any thread.

    Blocks nest. Outside of them a collective pays one truth test.
    """
    made = CommTrace()
    with _lock:
        _traces.append(made)
    try:
        yield made
    finally:
        with _lock:
            _traces[:] = [other for other in _traces if other is not made]


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
    return OpenSpans(list(_traces), time.perf_counter()) if _traces else None
