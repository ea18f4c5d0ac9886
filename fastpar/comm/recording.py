"""A record of the collectives that communicators launch: what was sent, for users who tune a layout and for tests
that count."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


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


# Note: a process-wide list instead of a context variable. The backward pass of CUDA tensors runs on a thread of
# autograd's own, which inherits no context; a rank is a process, so process-wide is what "this rank sent" means.
_logs: list[list[CommRecord]] = []
_lock = threading.Lock()


@contextmanager
def record() -> Iterator[list[CommRecord]]:
    """Collect a `CommRecord` of every collective that this process launches in the block, on any thread, backward
    passes included.

    A group of one rank launches none, and neither does an empty payload. Blocks nest; each log gets everything.
    """
    log: list[CommRecord] = []
    with _lock:
        _logs.append(log)
    try:
        yield log
    finally:
        with _lock:
            _logs[:] = [other for other in _logs if other is not log]


def note(op: str, size: int, numel: int, dtype: torch.dtype) -> None:
    """Add to every open log (one truth test when there is none)."""
    if _logs:
        entry = CommRecord(op, size, numel, dtype, algorithmic_bytes(op, size, numel * dtype.itemsize))
        with _lock:
            for log in _logs:
                log.append(entry)
