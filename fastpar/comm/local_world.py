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
_GAVE_UP = "gave up:"
_WAIT_SLICE_S = 0.1  # between two looks at signals while a submitted call is awaited


@dataclass(frozen=True)
class _Announcement:
    """What a rank tells the others of its group, through the group's store, before they can share memory."""

    host: str  # equal where memory can be shared: machine, boot, process namespace, user
    version: str
    pid: int
    descriptor: int  # -1: this rank cannot, because of
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

    def run(
        self,
        spec: int,
        element_bytes: int,
        source: int,
        target: int,
        count: int,
        sizes: Any,
        output_sizes: Any,
        timeout: float,
    ) -> None:
        status = self._run(self._handle, spec, element_bytes, source, target, count, sizes, output_sizes, timeout)
        if status:
            self._library.check_status(status)

    def submit(
        self,
        spec: int,
        element_bytes: int,
        source: int,
        target: int,
        count: int,
        sizes: Any,
        output_sizes: Any,
        timeout: float,
        keep: Any,
    ) -> int:
        ticket = self._submit(self._handle, spec, element_bytes, source, target, count, sizes, output_sizes, timeout)
        return self._keep(ticket, keep)

    def begin(
        self,
        spec: int,
        element_bytes: int,
        source: int,
        target: int,
        count: int,
        sizes: Any,
        output_sizes: Any,
        timeout: float,
        keep: Any,
    ) -> int:
        ticket = self._begin(self._handle, spec, element_bytes, source, target, count, sizes, output_sizes, timeout)
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


def connect(store: dist.Store, rank: int, size: int, ranks_on_host: int, timeout: float) -> LocalWorld | str:
    """Join the ranks of a group; or say why their memory cannot be shared, the same answer on every rank.

    The ranks meet in the store, which they poll: a blocking wait would keep other users of the store waiting. A store
    serves one meeting. Raises CommTimeoutError naming the ranks that have not come within `timeout` seconds, CommError
    where another rank has given up.
    """
    deadline = time.monotonic() + timeout
    handle, mine = _announce(rank, size, ranks_on_host)
    try:
        store.set(f"fastpar/rank{rank}", json.dumps(asdict(mine)))
        texts = _collect(store, [f"fastpar/rank{other}" for other in range(size)], deadline, timeout)
        all_ranks = [_Announcement(**json.loads(text)) for text in texts]
        problem = _problem(all_ranks)
        if not problem and handle:
            problem = _connect(handle, all_ranks)
        store.set(f"fastpar/connected{rank}", problem or "yes")
        answers = _collect(store, [f"fastpar/connected{other}" for other in range(size)], deadline, timeout)
    except BaseException as error:
        store.set(f"fastpar/connected{rank}", f"{_GAVE_UP} {error}")
        if handle:
            library().comm_destroy(handle)
        raise
    if any(answer.startswith(_GAVE_UP) for answer in answers):
        library().comm_destroy(handle or None)
        raise CommError("; ".join(f"rank {other} {answer}" for other, answer in enumerate(answers) if answer != "yes"))
    problems = [f"rank {other}: {answer}" for other, answer in enumerate(answers) if answer != "yes"]
    if problems or not handle:
        if handle:
            library().comm_destroy(handle)
        return problems[0] if problems else "no shared memory"
    library().comm_seal(handle)
    return LocalWorld(handle, list(range(size)), rank)


def _announce(rank: int, size: int, ranks_on_host: int) -> tuple[int, _Announcement]:
    handle, host, problem = 0, "", ""
    try:
        host = _host()
        handle = library().comm_create(rank, size, ranks_on_host, SLOT_BYTES) or 0
        if not handle:
            problem = library().error_text()
    except (ImportError, OSError) as error:
        problem = str(error)
    if not handle:
        return 0, _Announcement(host, __version__, os.getpid(), -1, 0, problem or "unknown")
    nonce, descriptor = library().comm_nonce(handle), library().comm_descriptor(handle)
    return handle, _Announcement(host, __version__, os.getpid(), descriptor, nonce, "")


def _problem(ranks: Sequence[_Announcement]) -> str:
    for rank, announcement in enumerate(ranks):
        if announcement.problem:
            return f"rank {rank} has no shared memory: {announcement.problem}"
    if len({announcement.host for announcement in ranks}) > 1:
        return "the ranks are on several hosts, or in several containers"
    if len({announcement.version for announcement in ranks}) > 1:
        return f"the ranks run different versions of fastpar: {[a.version for a in ranks]}"
    return ""


def _connect(handle: int, ranks: Sequence[_Announcement]) -> str:
    pids, descriptors = int64_array([a.pid for a in ranks]), int64_array([a.descriptor for a in ranks])
    nonces = (ctypes.c_uint64 * len(ranks))(*[a.nonce for a in ranks])
    try:
        library().check_status(library().comm_connect(handle, pids, descriptors, nonces))
    except CommError as error:
        return str(error)
    return ""


def _collect(store: dist.Store, keys: list[str], deadline: float, timeout: float) -> list[str]:
    pause = 0.0002
    while not store.check(keys):
        if time.monotonic() > deadline:
            missing = [key for key in keys if not store.check([key])]
            ranks = ", ".join("".join(filter(str.isdigit, key)) for key in missing)
            raise CommTimeoutError(f"rank(s) {ranks} of the group did not come to share memory within {timeout:g} s")
        time.sleep(pause)
        pause = min(2 * pause, 0.005)
    with contextlib.suppress(NotImplementedError, RuntimeError):
        return [value.decode() for value in store.multi_get(keys)]
    return [store.get(key).decode() for key in keys]
