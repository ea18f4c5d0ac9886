"""The lowest rank of every host, joined over the network by a gloo backend that nobody else uses.

Note: bad news. gloo tells at once when the process of a peer has ended, and nothing else: not who is missing, and not
that a peer waits in vain for a rank of its own host. So a leader that has to wait for long says in the group's store
where it is, and a leader that gives up says why; the others read it there every few milliseconds while they wait. The
store may be slow or gone, so only a thread of its own talks to it. The first failure of the group stays.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllToAllOptions, BroadcastOptions

from fastpar.comm.errors import CommError, CommMismatchError, CommTimeoutError, PeerLostError
from fastpar.comm.shared_memory.library import LateWait, check_interrupt
from fastpar.comm.shared_memory.rendezvous import collect, read_all

_SLICE_S = 0.02  # between two looks at the bad news
_NEWS_S = 0.4  # for the others to say what they know, once gloo has failed
# What a leader waits beyond the deadline: hosts that give up at it say which of their ranks is missing.
GRACE_S = 0.1
_ERRORS: dict[str, type[CommError]] = {
    error.__name__: error for error in (CommError, CommMismatchError, CommTimeoutError, PeerLostError)
}
_CONNECT_S = 10.0
_FAILURE, _NONE = "failure", "none"


class _Board:
    """The notes that leaders leave each other in the store, see the module's Note."""

    def __init__(self, store: dist.Store, host: int, num_hosts: int) -> None:
        self._host = host
        self._store = store
        self._keys = [f"at{other}" for other in range(num_hosts)]
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []  # the one that looks at the store, or none
        self._stopped = threading.Event()
        self._finalizer = weakref.finalize(self, _stop, self._stopped, self._threads)
        self._until = 0.0  # the thread looks at the store up to then
        self._at = self._told_at = -1
        self._report: str | None = None
        self._reported = False
        self.arrived = [-1] * num_hosts  # the last call in which each leader had to wait for long, or failed
        self.failure: CommError | None = None
        if host == 0:
            store.set(_FAILURE, _NONE)
        store.set(self._keys[host], "-1")

    def attend(self, sequence: int) -> None:
        """Say that this leader is in call `sequence`, and keep `arrived` and `failure` up to date for a while."""
        self._ask(lambda: self._set_at(sequence))

    def report(self, error: BaseException) -> None:
        """Tell the others why this leader gives up; returns when that is written, or after a moment."""
        kind = type(error).__name__ if isinstance(error, CommError) else CommError.__name__
        text = str(error) if isinstance(error, CommError) else f"{type(error).__name__}: {error}"
        self._ask(lambda: self._set_report(json.dumps([kind, text])))
        with self._changed:
            self._changed.wait_for(lambda: self._reported, _NEWS_S)

    def wait_for_failure(self, sequence: int) -> CommError | None:
        """The failure that others report, if they do so soon; each has said where it is by then."""
        limit = time.monotonic() + _NEWS_S
        while self.failure is None and time.monotonic() < limit:
            self.attend(sequence)
            time.sleep(_SLICE_S)
        return self.failure

    def _set_at(self, sequence: int) -> None:
        self._at = sequence

    def _set_report(self, report: str) -> None:
        self._report = report

    def _ask(self, change: Any) -> None:
        with self._changed:
            change()
            self._until = time.monotonic() + 2 * _NEWS_S
            if not self._threads:
                arguments = weakref.ref(self), self._stopped
                thread = threading.Thread(target=_keep_looking, args=arguments, name="fastpar-board", daemon=True)
                self._threads.append(thread)
                thread.start()

    def look(self) -> bool:
        """Write what there is to write, read what there is to read; False: nobody has asked for a while."""
        with self._changed:
            if time.monotonic() > self._until:
                self._threads.clear()
                return False
            at, report = self._at, self._report
        with contextlib.suppress(RuntimeError):  # the store is gone: there is no news
            if at != self._told_at:
                self._store.set(self._keys[self._host], str(at))
                self._told_at = at
            if report is not None and not self._reported:
                self._store.compare_set(_FAILURE, _NONE, report)
                with self._changed:
                    self._reported = True
                    self._changed.notify_all()
            values = read_all(self._store, [*self._keys, _FAILURE])
            self.arrived = [int(value) for value in values[:-1]]
            if values[-1] != _NONE and self.failure is None:
                kind, text = json.loads(values[-1])
                self.failure = _ERRORS[kind](text)
        return True


def _keep_looking(reference: weakref.ref[_Board], stopped: threading.Event) -> None:
    while not stopped.is_set():
        board = reference()
        if board is None or not board.look():
            return
        del board
        stopped.wait(_SLICE_S)


def _stop(stopped: threading.Event, threads: list[threading.Thread]) -> None:
    """End the threads, at the end of the process too: one that is cut off inside of the store takes it with it."""
    stopped.set()
    for thread in list(threads):
        if thread is not threading.current_thread():
            thread.join(_NEWS_S)


@dataclass(frozen=True)
class LeaderExchange:
    """Under way: what is received, and what must live until then."""

    work: Any
    received: Tensor
    sent: Tensor


def join_leaders(store: dist.Store, rank: int, hosts: Sequence[Sequence[int]], deadline: float) -> Leaders | str | None:
    """Called by every rank of the group: the leaders, for those who are; or why they cannot be joined, the same answer
    on every rank."""
    firsts = [ranks[0] for ranks in hosts]
    timeout = max(deadline - time.monotonic(), 0.1)
    connect_timeout = min(timeout / 2, _CONNECT_S)  # the others must still hear that it was in vain
    leaders: Leaders | None = None
    if rank in firsts:
        problem = ""
        try:
            leaders = Leaders(store, firsts.index(rank), hosts, connect_timeout)
        except RuntimeError as error:
            problem = str(error)
        store.set(f"fastpar/leader{rank}", problem or "yes")
    answers = collect(store, [f"fastpar/leader{first}" for first in firsts], deadline, timeout)
    problems = [f"rank {first}: {answer}" for first, answer in zip(firsts, answers, strict=True) if answer != "yes"]
    return f"the hosts cannot reach each other ({'; '.join(problems)})" if problems else leaders


class Leaders:
    """This host's leader among those of all hosts. Made by all leaders at the same time; raises RuntimeError where gloo
    cannot connect them. One call at a time."""

    def __init__(self, store: dist.Store, host: int, hosts: Sequence[Sequence[int]], timeout: float) -> None:
        self.host, self.hosts, self.num_hosts = host, hosts, len(hosts)
        with contextlib.suppress(NotImplementedError, RuntimeError):
            store = store.clone()  # type: ignore[attr-defined]  # waits of other threads on the group's store are none of ours
        self._board = _Board(dist.PrefixStore("fastpar/board", store), host, len(hosts))
        self._backend: Any = dist.ProcessGroupGloo(
            dist.PrefixStore("fastpar/leaders", store), host, len(hosts), timedelta(seconds=timeout)
        )
        self._in_flight: list[LeaderExchange] = []
        self.sequence = 0  # of the call that is under way
        self.activity = ""  # what it is, for messages

    def start(
        self, x: Tensor, input_sizes: Sequence[int], output_sizes: Sequence[int], deadline: float
    ) -> LeaderExchange:
        """x (flat) is the concatenation of a part for every host; received is the concatenation of the parts for this
        one."""
        unit = x.itemsize
        options = AllToAllOptions()
        options.asyncOp = True
        options.timeout = _backstop(deadline)
        received = x.new_empty(sum(output_sizes))
        work = self._backend.alltoall_base(
            received.view(torch.uint8),
            x.view(torch.uint8),
            [unit * size for size in output_sizes],
            [unit * size for size in input_sizes],
            options,
        )
        return self._keep(LeaderExchange(work, received, x))

    def start_broadcast(self, x: Tensor, host: int, deadline: float) -> LeaderExchange:
        """x becomes that of `host`'s leader."""
        options = BroadcastOptions()
        options.asyncOp = True
        options.timeout = _backstop(deadline)
        options.rootRank = host
        work = self._backend.broadcast([x.view(torch.uint8)], options)
        return self._keep(LeaderExchange(work, x, x))

    def finish(self, exchange: LeaderExchange, deadline: float) -> Tensor:
        """The received tensor. Raises the failure of another host as soon as it is known, CommTimeoutError at the
        deadline."""
        wait = LateWait()
        while not self._is_done(exchange.work):
            check_interrupt()
            self._board.attend(self.sequence)
            if self._board.failure is not None:
                raise self._board.failure
            wait.look(
                lambda waited: (
                    f"{self.activity}, call #{self.sequence}: rank {self.hosts[self.host][0]} has waited "
                    f"{waited:.0f} s for rank(s) {self._absent_ranks()}"
                )
            )
            if time.monotonic() > deadline + GRACE_S:
                absent = self._absent_ranks()
                raise CommTimeoutError(f"rank {self.hosts[self.host][0]} waited to the deadline for rank(s) {absent}")
        self._in_flight.remove(exchange)
        return exchange.received

    def give_up(self, error: BaseException) -> None:
        """Tell the other hosts. What is still under way stays so: gloo cannot end it, and letting go of the backend
        would wait for it; so both are kept for good."""
        if self._board.failure is None:
            self._board.report(error)
        if self._in_flight:
            for kept in (self._backend, *self._in_flight):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
            self._in_flight = []

    def _keep(self, exchange: LeaderExchange) -> LeaderExchange:
        self._in_flight.append(exchange)
        return exchange

    def _is_done(self, work: Any) -> bool:
        slice_ = timedelta(seconds=_SLICE_S)
        try:
            work.wait(slice_)
            return True
        except RuntimeError:
            if not work.is_completed():
                return False
        try:
            work.wait(slice_)  # it may have succeeded just then
            return True
        except RuntimeError as error:
            failure = self._board.wait_for_failure(self.sequence)
            if failure is not None:
                raise failure from error
            lost = ", ".join(str(self.hosts[host][0]) for host in self._absent())
            raise PeerLostError(
                f"lost the connection to rank(s) {lost}: the process has ended, or has closed the group ({error})"
            ) from error

    def _absent_ranks(self) -> str:
        return ", ".join(str(rank) for host in self._absent() for rank in self.hosts[host])

    def _absent(self) -> list[int]:
        """The hosts that have not said that they are in this call; all others, where all have."""
        others = [host for host in range(self.num_hosts) if host != self.host]
        return [host for host in others if self._board.arrived[host] != self.sequence] or others


def _backstop(deadline: float) -> timedelta:
    """When gloo itself gives up: after we do."""
    return timedelta(seconds=max(deadline - time.monotonic(), 0.0) + 2 * GRACE_S)
