"""The ranks of a group that share a host, joined by shared memory. See csrc/comm/world.h for the protocol."""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from fastpar.comm.errors import CommError
from fastpar.comm.shared_memory.library import int64_array, library
from fastpar.comm.shared_memory.rendezvous import (
    SEVERAL_HOSTS,
    HostMemory,
    Hosts,
    Rendezvous,
    Share,
    addresses_of,
    find_hosts,
    share_memory,
)

SLOT_BYTES = 1 << 20  # of each of the four exchange buffers of a rank
_WAIT_SLICE_S = 0.1  # between two looks at signals while a submitted call is awaited


_WORLDS: weakref.WeakSet[LocalWorld] = weakref.WeakSet()


def _forbid_in_child() -> None:
    """A forked child has a rank's memory and none of its threads; a call of its would pass for one of its parent's."""
    for world in _WORLDS:
        world.comm_run = world._submit = world._begin = _refuse


def _refuse(*_: Any) -> int:
    raise CommError("this process was forked from a rank: it cannot take part in the collectives of its group")


os.register_at_fork(after_in_child=_forbid_in_child)


class LocalWorld:
    """`ranks[i]` is the group's rank of the i-th rank here; `rank` and `size` count those.

    `run` blocks; `submit` gives a ticket for `wait` and `done`; `begin` does the first half of a call and gives a
    ticket for `finish`, which does the second. Buffers must live until a call is done: `submit` and `begin` keep what
    they are given until then.
    """

    def __init__(self, handle: int, ranks: list[int], rank: int) -> None:
        self._library = library()
        self.handle = handle
        self.comm_run: Callable[..., int] = self._library.comm_run  # gives a status for `check_status`
        self._submit: Callable[..., int] = self._library.comm_submit
        self._begin: Callable[..., int] = self._library.comm_begin
        self.ranks, self.rank, self.size = ranks, rank, len(ranks)
        self._kept: list[tuple[int, Any]] = []  # ticket, buffers
        self._finalizer = weakref.finalize(self, _destroy, handle, os.getpid())
        _WORLDS.add(self)

    # `call` is what csrc/comm/c_api.h takes: spec, element_bytes, source, target, count, sizes, output_sizes, timeout.

    def run(self, *call: Any) -> None:
        self.check_status(self.comm_run(self.handle, *call))

    def check_status(self, status: int) -> None:
        if status:
            self._library.check_status(status)

    def submit(self, *call: Any, keep: Any) -> int:
        return self._keep(self._submit(self.handle, *call), keep)

    def begin(self, *call: Any, keep: Any) -> int:
        ticket = self._begin(self.handle, *call)
        if not ticket:
            raise CommError(self._library.error_text())
        return self._keep(ticket, keep)

    def finish(self, ticket: int) -> None:
        status = self._library.comm_finish(self.handle, ticket)
        self._let_go(ticket)
        self._library.check_status(status)

    def _keep(self, ticket: int, buffers: Any) -> int:
        # Buffers of calls that are done go when the next one is launched: nobody looks in between.
        if self._kept and self.done(self._kept[0][0]):
            self._kept = [entry for entry in self._kept if not self.done(entry[0])]
        self._kept.append((ticket, buffers))
        return ticket

    def _let_go(self, ticket: int) -> None:
        self._kept = [entry for entry in self._kept if entry[0] != ticket]

    def wait(self, ticket: int, seconds: float) -> bool:
        """True when the ticket's call is done within so many seconds; raises its error."""
        deadline = time.monotonic() + seconds
        while True:
            # In slices, so that signal handlers get their turn.
            left = deadline - time.monotonic()
            status = self._library.comm_wait(self.handle, ticket, min(max(left, 0.0), _WAIT_SLICE_S))
            if status >= 0:
                self._let_go(ticket)
                self._library.check_status(status)
                return True
            if left <= _WAIT_SLICE_S:
                return False

    def done(self, ticket: int) -> bool:
        return bool(self._library.comm_done(self.handle, ticket))


def _destroy(handle: int, owner: int) -> None:
    if os.getpid() != owner:  # a forked child has the memory, but not the thread
        return
    if not threading.main_thread().is_alive():  # at the end of the process
        error = getattr(sys, "last_value", None)  # what Python has reported, and nobody has caught
        how = "normally" if error is None else f"with {type(error).__name__}: {error}"
        library().comm_note_exit(handle, how.encode()[:200])
    library().comm_destroy(handle)


@dataclass(frozen=True)
class HostMeeting:
    """The result of a rendezvous.

    hosts   ranks of the group by host, in the order of each host's lowest rank; each host's in ascending order
    world   the ranks of this host; None where this rank is alone on it, and then of several hosts
    """

    hosts: Hosts
    world: LocalWorld | None


def connect(store: dist.Store, rank: int, size: int, ranks_on_host: int, timeout: float) -> HostMeeting | str:
    """Join the ranks of each host; or say why nothing can be shared, the same answer on every rank.

    `ranks_on_host`: of the whole job, as far as one can tell; it decides how long to spin. A store serves one meeting.
    Raises CommTimeoutError naming the ranks that have not come within `timeout` seconds, CommError where another rank
    has given up.
    """
    meeting = Rendezvous(store, "fastpar", rank, size, timeout)
    hosts = find_hosts(meeting)
    if isinstance(hosts, str):
        return hosts
    if len(hosts) == size:
        return f"{SEVERAL_HOSTS}, no two on the same"
    here = next(ranks for ranks in hosts if rank in ranks)

    def create(here: Sequence[int]) -> tuple[int, HostMemory]:
        return _create(here, rank, max(ranks_on_host, len(here)))

    handle = share_memory(meeting, here, Share(create, _connect, library().comm_seal, library().comm_destroy))
    if isinstance(handle, str):
        return handle
    return HostMeeting(hosts, LocalWorld(handle, list(here), here.index(rank)) if handle else None)


def _create(here: Sequence[int], rank: int, ranks_on_host: int) -> tuple[int, HostMemory]:
    """This rank's part of the memory of its host."""
    handle = library().comm_create(here.index(rank), len(here), ranks_on_host, SLOT_BYTES) or 0
    if not handle:
        return 0, HostMemory.none(library().error_text() or "unknown")
    library().comm_name_ranks(handle, int64_array(here))
    return handle, HostMemory(os.getpid(), library().comm_descriptor(handle), library().comm_nonce(handle), "")


def _connect(handle: int, memories: Sequence[HostMemory]) -> str:
    try:
        library().check_status(library().comm_connect(handle, *addresses_of(memories)))
    except CommError as error:
        return str(error)
    return ""
