"""The first meeting of a group's ranks, when a collective on CPU tensors asks for it, behind its back.

Joining needs all ranks, and a rank that launches a collective must not wait for the others. So a thread meets them in
the group's store, where nothing depends on the order of other collectives, and what is launched in the meantime waits
in a queue. From then on, collectives go straight to the transport that was found.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from fastpar.comm.errors import NEW_GROUP, CommError
from fastpar.comm.groups import ranks_of, store_of
from fastpar.comm.multi_host.leaders import join_leaders
from fastpar.comm.multi_host.protocol import Hierarchy
from fastpar.comm.shared_memory.rendezvous import SEVERAL_HOSTS, ranks_on_host
from fastpar.comm.shared_memory.world import HostMeeting, LocalWorld, connect
from fastpar.comm.torch.transport import let_gloo_finish_at_exit
from fastpar.comm.transport import InFlight, StillInFlightError, Work


class _Queued:
    """A collective that was launched before the ranks had met: the work of what it becomes."""

    def __init__(self, start: Callable[[], InFlight]) -> None:
        self._start = start
        self._started = threading.Event()
        self._flight: InFlight | None = None
        self._error: CommError | None = None

    def start(self, error: CommError | None) -> None:
        """On the thread of the connection."""
        try:
            if error is not None:
                raise error
            self._flight = self._start()
        except CommError as failure:
            self._error = failure
        except Exception as failure:  # whatever it is, the caller must hear of it, and not wait for ever
            self._error = CommError(f"could not be launched: {failure}")
        self._started.set()

    def wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        if not self._started.wait(seconds):
            raise StillInFlightError
        if self._error is not None:
            raise self._error
        work = self._inner()
        if work is not None:
            work.wait(max(deadline - time.monotonic(), 0.0))

    def done(self) -> bool:
        if not self._started.is_set():
            return False
        work = self._inner()
        return self._error is not None or work is None or work.done()

    def finish(self) -> Any:
        assert self._flight is not None
        return self._flight.finish()

    def _inner(self) -> Work | None:
        return None if self._flight is None else self._flight.work


class GroupConnection:
    """The shared state of one process group's ranks, once they have met: `world` where all are on one host, `hierarchy`
    where some are, and `apart` wherever there is no world: every rank as if it were alone on its host, joined with the
    others by gloo. `problem` says why there is no `world`, or why gloo cannot join them either.

    is_apart  do not look for shared memory
    """

    def __init__(self, group: ProcessGroup, *, is_apart: bool) -> None:
        # Weak: the table of connections would keep every group alive.
        self._group = weakref.ref(group)
        self._is_apart = is_apart
        self._rank, self._size, self._ranks = group.rank(), group.size(), ranks_of(group)
        self._lock = threading.Lock()
        self._queue: list[_Queued] | None = None  # None: not asked for yet
        self.is_settled = False
        self.error: CommError | None = None  # the ranks did not meet: for good
        self.world: LocalWorld | None = None
        self.hierarchy: Hierarchy | None = None
        self.apart: Hierarchy | None = None
        self.problem = ""

    @staticmethod
    def of(group: ProcessGroup, *, is_apart: bool = False) -> GroupConnection:
        """The connection of a group, which all its communicators share."""
        with _LOCK:
            of_group = _CONNECTIONS.setdefault(group, {})
            if is_apart not in of_group:
                of_group[is_apart] = GroupConnection(group, is_apart=is_apart)
            return of_group[is_apart]

    def settle(self, timeout: float) -> None:
        """Return when the ranks have met. Raises CommError where they have not."""
        if not self.is_settled:
            flight = self.defer(lambda: InFlight(None, lambda: None), timeout)
            if flight.work is not None:
                flight.work.wait(timeout)
        if self.error is not None:
            raise CommError(f"an earlier collective of this group failed ({self.error}): {NEW_GROUP}")

    def defer(self, start: Callable[[], InFlight], timeout: float) -> InFlight:
        """Launch `start` when the ranks have met; at once where they have."""
        queued = _Queued(start)
        with self._lock:
            if not self.is_settled:
                if self._queue is None:
                    # The first launch starts the thread, whose rendezvous no other collective can delay.
                    self._queue = []
                    group = self._group()
                    assert group is not None
                    store = store_of(group)
                    threading.Thread(
                        target=self._connect, args=(store, timeout), name="fastpar-connect", daemon=True
                    ).start()
                self._queue.append(queued)
                return InFlight(queued, queued.finish)
        if self.error is not None:
            raise CommError(f"an earlier collective of this group failed ({self.error}): {NEW_GROUP}")
        return start()

    def _connect(self, store: dist.Store | None, timeout: float) -> None:
        try:
            self._meet(store, timeout)
        except CommError as failure:
            self.error = failure
        except NotImplementedError as failure:  # a store of another kind, which is so on every rank
            self.problem = f"the group's store cannot do what is needed: {failure}"
        except Exception as failure:  # maybe on this rank alone, so there is no falling back
            self.error = CommError(f"the ranks could not meet: {type(failure).__name__}: {failure}")
        # Before queued launches run, so that the line stands above what they may raise.
        if self._rank == 0 and self.error is None:
            self._log_transport()
        with self._lock:
            assert self._queue is not None
            for queued in self._queue:
                queued.start(self.error)
            self._queue = None
            self.is_settled = True

    def _log_transport(self) -> None:
        """A line for operators, once for the group and by its rank 0; a fallback is a warning."""
        level, through = logging.INFO, "shared memory"
        if self.hierarchy is not None:
            through = f"shared memory within {len(self.hierarchy.hosts)} hosts, and gloo between them"
        elif self.world is None:
            through = "gloo" if self.apart is not None else "the group's own gloo, and calls are not compared"
            is_expected = self.apart is not None and (self._is_apart or self.problem.startswith(SEVERAL_HOSTS))
            level = logging.INFO if is_expected else logging.WARNING
        why = f": {self.problem}" if self.problem and self.hierarchy is None else ""
        _LOGGER.log(level, "CPU tensors of ranks %s go through %s%s", self._ranks, through, why)

    def _meet(self, store: dist.Store | None, timeout: float) -> None:
        if store is None:
            self.problem = "this version of torch does not give out the group's store"
            return
        deadline = time.monotonic() + timeout
        if self._is_apart:
            self._join_apart(store, deadline)
            return
        found = connect(store, self._rank, self._size, ranks_on_host(), timeout)
        if isinstance(found, str):
            self.problem = found
            self._join_apart(store, deadline)
        elif len(found.hosts) == 1:
            self.world = found.world
        else:
            self._join_hosts(store, found, deadline)

    def _join_hosts(self, store: dist.Store, meeting: HostMeeting, deadline: float) -> None:
        leaders = join_leaders(store, self._rank, meeting.hosts, deadline)
        self.problem = leaders if isinstance(leaders, str) else SEVERAL_HOSTS
        if not isinstance(leaders, str):
            # Leaders carry reductions between hosts, and the flat hierarchy all_to_all and little data.
            self.hierarchy = Hierarchy(self._rank, meeting.hosts, meeting.world, leaders)
            self._join_apart(store, deadline)

    def _join_apart(self, store: dist.Store, deadline: float) -> None:
        let_gloo_finish_at_exit()
        hosts = [(rank,) for rank in range(self._size)]
        leaders = join_leaders(dist.PrefixStore("apart", store), self._rank, hosts, deadline)
        if isinstance(leaders, str):
            self.problem = f"{self.problem}; {leaders}"
        elif leaders is not None:
            self.apart = Hierarchy(self._rank, hosts, None, leaders)


_LOGGER = logging.getLogger("fastpar.comm")
_CONNECTIONS: weakref.WeakKeyDictionary[ProcessGroup, dict[bool, GroupConnection]] = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()
