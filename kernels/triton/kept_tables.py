"""Tables that the host makes and kernels read: uploaded from pinned memory once, and kept by what they hold.

Note: who may read a table. Its memory belongs to the stream that copied it. A call on another stream of the device
waits for the copy, on the device, and tells the allocator that it reads. Else the memory of a table that is dropped
would go to the next tensor of the first stream while the other one's kernel still reads it. A call on the stream that
copied needs neither. A table that is made in a capture is the graph's alone, since its copy runs when the graph is
replayed; one that was there before may be read by graphs too, and is held as long as they may be replayed. Backward
threads of several devices use one object: it has a lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastpar.kernels.launch import is_capturing

# By the index of a device: torch's own `current_stream` makes an object, which takes a microsecond.
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def _current(device: torch.device) -> int:
    if _raw_stream is None:
        return torch.cuda.current_stream(device).cuda_stream
    return int(_raw_stream(device.index))


class TableUpload(NamedTuple):
    there: Tensor
    staging: Tensor  # what lies there is a copy of it; a captured graph reads it again
    event: Any = None  # after the copy; None on the CPU, and in a capture
    stream: int = 0  # that copied


def upload(numbers: Tensor, device: torch.device) -> TableUpload:
    if device.type != "cuda":
        return TableUpload(numbers.to(device), numbers)
    with torch.cuda.device(device):
        in_capture = is_capturing(device)
        staging = numbers.pin_memory()
        if not in_capture:
            # A second block, which goes back to torch's pool at once: a capture that makes such a table later finds it
            # there, and need not allocate, which CUDA forbids it.
            numbers.pin_memory()
        there = staging.to(device, non_blocking=True)
        event = None if in_capture else torch.cuda.current_stream(device).record_event()
    return TableUpload(there, staging, event, _current(device))


def let_read(table: TableUpload) -> None:
    """Let the current stream of the table's device read it: `Note: who may read a table`."""
    device = table.there.device
    if table.event is None or table.stream == _current(device) or is_capturing(device):
        return  # a capture begins with a synchronisation, and holds what it reads
    # To ask the event whether it is done would save 1 us, and could break a capture that another thread has begun.
    table.event.wait(torch.cuda.current_stream(device))
    table.there.record_stream(torch.cuda.current_stream(device))


class KeptTables:
    """The tables of the last calls, `limit` of them, each with what shows it."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._kept: dict[Any, tuple[TableUpload, Any]] = {}  # the last used is the last
        self._captured: dict[int, tuple[TableUpload, Any]] = {}  # by id: read by graphs whenever those are replayed

    def __len__(self) -> int:
        return len(self._kept)

    def find(
        self, key: Any, device: torch.device, make: Callable[[], tuple[Tensor, Callable[[TableUpload], Any]]]
    ) -> Any:
        """What shows the table of `key` on the device. `make` gives a table on the host, and what shows it there."""
        in_capture = is_capturing(device)
        with self._lock:
            found = self._kept.pop((key, device), None)
            if found is None:
                numbers, show = make()
                table = upload(numbers, device)
                found = table, show(table)
            if in_capture:
                self._captured[id(found)] = found
            if not in_capture or found[0].event is not None:  # else its copy runs when the graph is replayed
                self._kept[key, device] = found
                if len(self._kept) > self._limit:
                    del self._kept[next(iter(self._kept))]
        let_read(found[0])
        return found[1]
