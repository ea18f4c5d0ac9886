"""The ranks of a group that share a host, joined by shared memory. See csrc/comm/world.h for the protocol."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fastpar._version import __version__
from fastpar.comm._library import int64_array, library
from fastpar.comm.errors import CommError, CommTimeoutError

SLOT_BYTES = 1 << 20  # of each of the four exchange buffers of a rank
SEVERAL_HOSTS = "the ranks are on several hosts, or in several containers"
_GAVE_UP = "gave up:"
_WAIT_SLICE_S = 0.1  # between two looks at signals while a submitted call is awaited


@dataclass(frozen=True)
class _Place:
    """What a rank first tells the others of its group, through the group's store: where it is."""

    host: str  # equal where memory can be shared: machine, boot, process namespace, user
    version: str
    problem: str  # why this rank cannot share memory at all


@dataclass(frozen=True)
class _Memory:
    """And then, knowing who shares its host, where its part of their memory is."""

    pid: int
    descriptor: int  # -1: there is none
    nonce: int
    problem: str


def _host() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.getuid()}"


_WORLDS: weakref.WeakSet[LocalWorld] = weakref.WeakSet()


def _forbid_in_child() -> None:
    """A forked child has a rank's memory and none of its threads; a call of its would pass for one of its parent's."""
    for world in _WORLDS:
        world._run = world._submit = world._begin = _refuse


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
        self._handle = handle
        self._run: Callable[..., int] = self._library.comm_run
        self._submit: Callable[..., int] = self._library.comm_submit
        self._begin: Callable[..., int] = self._library.comm_begin
        self.ranks, self.rank, self.size = ranks, rank, len(ranks)
        self._kept: list[tuple[int, Any]] = []  # ticket, buffers
        self._finalizer = weakref.finalize(self, _destroy, handle, os.getpid())
        _WORLDS.add(self)

    # `call` is what csrc/comm/c_api.h takes: spec, element_bytes, source, target, count, sizes, output_sizes, timeout.

    def run(self, *call: Any) -> None:
        status = self._run(self._handle, *call)
        if status:
            self._library.check_status(status)

    def submit(self, *call: Any, keep: Any) -> int:
        return self._keep(self._submit(self._handle, *call), keep)

    def begin(self, *call: Any, keep: Any) -> int:
        ticket = self._begin(self._handle, *call)
        if not ticket:
            raise CommError(self._library.error_text())
        return self._keep(ticket, keep)

    def finish(self, ticket: int) -> None:
        self._library.check_status(self._library.comm_finish(self._handle, ticket))

    def _keep(self, ticket: int, buffers: Any) -> int:
        if self._kept and self.done(self._kept[0][0]):
            self._kept = [entry for entry in self._kept if not self.done(entry[0])]
        self._kept.append((ticket, buffers))
        return ticket

    def wait(self, ticket: int, seconds: float) -> bool:
        """Whether the ticket's call is done within so many seconds; raises its error."""
        deadline = time.monotonic() + seconds
        while True:
            left = deadline - time.monotonic()
            status = self._library.comm_wait(self._handle, ticket, min(max(left, 0.0), _WAIT_SLICE_S))
            if status >= 0:
                self._library.check_status(status)
                return True
            if left <= _WAIT_SLICE_S:
                return False

    def done(self, ticket: int) -> bool:
        return bool(self._library.comm_done(self._handle, ticket))

    @property
    def handle(self) -> int:
        return self._handle


def _destroy(handle: int, owner: int) -> None:
    if os.getpid() == owner:  # a forked child has the memory, but not the thread
        library().comm_destroy(handle)


@dataclass(frozen=True)
class Meeting:
    """What the ranks of a group found out about each other.

    hosts   ranks of the group by host, in the order of each host's lowest rank; each host's in ascending order
    world   the ranks of this host; None where this rank is alone on it, and then of several hosts
    """

    hosts: tuple[tuple[int, ...], ...]
    world: LocalWorld | None


def connect(store: dist.Store, rank: int, size: int, ranks_on_host: int, timeout: float) -> Meeting | str:
    """Join the ranks of each host; or say why nothing can be shared, the same answer on every rank.

    `ranks_on_host`: of the whole job, as far as one can tell; it decides how long to spin. The ranks meet in the store,
    which they poll: a blocking wait would keep other users of the store waiting. A store serves one meeting. Raises
    CommTimeoutError naming the ranks that have not come within `timeout` seconds, CommError where another rank has
    given up.
    """
    deadline = time.monotonic() + timeout
    handle = 0

    def exchange(what: str, mine: str) -> list[str]:
        store.set(f"fastpar/{what}{rank}", mine)
        answers = collect(store, [f"fastpar/{what}{other}" for other in range(size)], deadline, timeout)
        given_up = [f"rank {other} {text}" for other, text in enumerate(answers) if text.startswith(_GAVE_UP)]
        if given_up:
            raise CommError("; ".join(given_up))
        return answers

    try:
        places = [_Place(**json.loads(text)) for text in exchange("place", json.dumps(asdict(_place())))]
        problem = _problem(places)
        if problem:
            return problem
        hosts = _by_host(places)
        if len(hosts) == size:
            return f"{SEVERAL_HOSTS}, no two on the same"
        here = next(ranks for ranks in hosts if rank in ranks)
        handle, memory = _create(here, rank, max(ranks_on_host, len(here)))
        memories = [_Memory(**json.loads(text)) for text in exchange("memory", json.dumps(asdict(memory)))]
        problem = memory.problem
        if handle and not any(memories[other].problem for other in here):
            problem = _connect(handle, [memories[other] for other in here])
        answers = exchange("connected", problem or "yes")
    except BaseException as error:
        for what in ("memory", "connected"):
            store.set(f"fastpar/{what}{rank}", f"{_GAVE_UP} {error}")
        if handle:
            library().comm_destroy(handle)
        raise
    for other, answer in enumerate(answers):
        if answer != "yes":
            if handle:
                library().comm_destroy(handle)
            return f"rank {other} has no shared memory: {answer}"
    if not handle:
        return Meeting(hosts, None)
    library().comm_seal(handle)
    return Meeting(hosts, LocalWorld(handle, list(here), here.index(rank)))


def _place() -> _Place:
    try:
        host = _host()
        library()
    except (ImportError, OSError) as error:
        return _Place("", __version__, str(error) or type(error).__name__)
    return _Place(host, __version__, "")


def _problem(places: Sequence[_Place]) -> str:
    for rank, place in enumerate(places):
        if place.problem:
            return f"rank {rank} has no shared memory: {place.problem}"
    if len({place.version for place in places}) > 1:
        return f"the ranks run different versions of fastpar: {[place.version for place in places]}"
    return ""


def _by_host(places: Sequence[_Place]) -> tuple[tuple[int, ...], ...]:
    ranks: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        ranks.setdefault(place.host, []).append(rank)
    return tuple(tuple(here) for here in ranks.values())


def _create(here: Sequence[int], rank: int, ranks_on_host: int) -> tuple[int, _Memory]:
    """This rank's part of the memory of its host; none where it is alone."""
    if len(here) == 1:
        return 0, _Memory(os.getpid(), -1, 0, "")
    handle = library().comm_create(here.index(rank), len(here), ranks_on_host, SLOT_BYTES) or 0
    if not handle:
        return 0, _Memory(os.getpid(), -1, 0, library().error_text() or "unknown")
    library().comm_name_ranks(handle, int64_array(here))
    return handle, _Memory(os.getpid(), library().comm_descriptor(handle), library().comm_nonce(handle), "")


def _connect(handle: int, memories: Sequence[_Memory]) -> str:
    pids, descriptors = int64_array([m.pid for m in memories]), int64_array([m.descriptor for m in memories])
    nonces = (ctypes.c_uint64 * len(memories))(*[m.nonce for m in memories])
    try:
        library().check_status(library().comm_connect(handle, pids, descriptors, nonces))
    except CommError as error:
        return str(error)
    return ""


def collect(store: dist.Store, keys: list[str], deadline: float, timeout: float) -> list[str]:
    """The values of keys, each of which ends in the rank that sets it, when all are there."""
    pause = 0.0002
    while not store.check(keys):
        if time.monotonic() > deadline:
            missing = [key for key in keys if not store.check([key])]
            ranks = ", ".join("".join(filter(str.isdigit, key)) for key in missing)
            raise CommTimeoutError(f"rank(s) {ranks} of the group did not come to share memory within {timeout:g} s")
        time.sleep(pause)
        pause = min(2 * pause, 0.005)
    return read_all(store, keys)


def read_all(store: dist.Store, keys: list[str]) -> list[str]:
    """The values of keys that are there."""
    with contextlib.suppress(NotImplementedError, RuntimeError):
        return [value.decode() for value in store.multi_get(keys)]
    return [store.get(key).decode() for key in keys]
