"""Rendezvous of a group's ranks in its store: they learn who shares a host and where each one's memory is."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fastpar._version import __version__
from fastpar.comm.errors import CommError, CommTimeoutError
from fastpar.comm.shared_memory.library import int64_array, library

SEVERAL_HOSTS = "the ranks are on several hosts, or in several containers"
_GAVE_UP = "gave up:"

Hosts = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class _Place:
    """The place of a rank, which it tells the others first."""

    host: str  # equal where memory can be shared: machine, boot, process namespace, user
    version: str
    problem: str  # why this rank cannot share memory at all


@dataclass(frozen=True)
class HostMemory:
    """And then, knowing who shares its host, where its part of their memory is."""

    pid: int
    descriptor: int  # -1: there is none
    nonce: int
    problem: str

    @classmethod
    def none(cls, problem: str = "") -> HostMemory:
        return cls(os.getpid(), -1, 0, problem)


@dataclass(frozen=True)
class Share:
    """Steps by which a rank shares memory of some kind with those of its host.

    create    (ranks here) -> (a handle or 0, where it is)
    connect   (handle, memories of the ranks here) -> why that did not work, or nothing
    seal      (handle): nobody else can open it from here on
    destroy   (handle)
    """

    create: Callable[[Sequence[int]], tuple[int, HostMemory]]
    connect: Callable[[int, Sequence[HostMemory]], str]
    seal: Callable[[int], None]
    destroy: Callable[[int], None]


class Rendezvous:
    """One meeting of all ranks of a group in a store, under a name that no other meeting there has.

    They poll the store: a blocking wait would keep other users of the store waiting.
    """

    def __init__(self, store: dist.Store, name: str, rank: int, size: int, timeout: float) -> None:
        self.store, self.rank, self.size = store, rank, size
        self._name, self._timeout = name, timeout
        self._deadline = time.monotonic() + timeout

    def exchange(self, what: str, mine: str) -> list[str]:
        """The answers of all ranks. Raises CommTimeoutError naming the ranks that have not come by the deadline,
        CommError where another rank has given up."""
        self.store.set(self.key(what, self.rank), mine)
        keys = [self.key(what, other) for other in range(self.size)]
        answers = collect(self.store, keys, self._deadline, self._timeout)
        given_up = [f"rank {other} {text}" for other, text in enumerate(answers) if text.startswith(_GAVE_UP)]
        if given_up:
            raise CommError("; ".join(given_up))
        return answers

    def give_up(self, error: BaseException, *exchanges: str) -> None:
        """Say so wherever others may still expect this rank."""
        for what in exchanges:
            self.store.set(self.key(what, self.rank), f"{_GAVE_UP} {error}")

    def key(self, what: str, rank: int | None = None) -> str:
        """The key of something of this meeting in the store."""
        return f"{self._name}/{what}{'' if rank is None else rank}"


def find_hosts(meeting: Rendezvous) -> Hosts | str:
    """The ranks by host, in the order of each host's lowest rank; or why memory cannot be shared at all."""
    try:
        places = [_Place(**json.loads(text)) for text in meeting.exchange("place", json.dumps(asdict(_place())))]
    except BaseException as error:
        meeting.give_up(error, "memory", "connected")
        raise
    return _problem(places) or _by_host(places)


def share_memory(meeting: Rendezvous, here: Sequence[int], share: Share) -> int | str:
    """This rank's handle on the memory that the ranks `here` share; 0 where it is alone there. Or why there is none:
    the same answer on every rank of the group."""
    handle = 0
    try:
        handle, memory = share.create(here) if len(here) > 1 else (0, HostMemory.none())
        memories = [HostMemory(**json.loads(text)) for text in meeting.exchange("memory", json.dumps(asdict(memory)))]
        problem = memory.problem
        if handle and not any(memories[other].problem for other in here):
            # Only where every rank here has memory: else all of them give up alike.
            problem = share.connect(handle, [memories[other] for other in here])
        answers = meeting.exchange("connected", problem or "yes")
    except BaseException as error:
        meeting.give_up(error, "memory", "connected")
        if handle:
            share.destroy(handle)
        raise
    # All ranks read the same answers, so that all take the same transport.
    for other, answer in enumerate(answers):
        if answer != "yes":
            if handle:
                share.destroy(handle)
            return f"rank {other} has no shared memory: {answer}"
    if handle:
        share.seal(handle)
    return handle


def addresses_of(memories: Sequence[HostMemory]) -> tuple[Any, Any, Any]:
    """Process ids, descriptors and nonces, as the library takes them."""
    nonces = (ctypes.c_uint64 * len(memories))(*[memory.nonce for memory in memories])
    return int64_array([m.pid for m in memories]), int64_array([m.descriptor for m in memories]), nonces


def ranks_on_host() -> int:
    """Ranks that compete for this host's processors, as far as one can tell: they decide how long to spin."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or dist.get_world_size())


def collect(store: dist.Store, keys: list[str], deadline: float, timeout: float) -> list[str]:
    """The values of keys, each of which ends in the rank that sets it, when all are there."""
    pause = 0.0002
    while not store.check(keys):
        if time.monotonic() > deadline:
            missing = [key.rpartition("/")[2] for key in keys if not store.check([key])]
            ranks = ", ".join("".join(filter(str.isdigit, key)) for key in missing)
            raise CommTimeoutError(f"rank(s) {ranks} of the group did not come to share memory within {timeout:g} s")
        time.sleep(pause)
        # Polled: a blocking wait would hold the store's one connection of this process.
        pause = min(2 * pause, 0.005)
    return read_all(store, keys)


def read_all(store: dist.Store, keys: list[str]) -> list[str]:
    """The values of keys that are there."""
    with contextlib.suppress(NotImplementedError, RuntimeError):
        return [value.decode() for value in store.multi_get(keys)]
    return [store.get(key).decode() for key in keys]


def _host() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.getuid()}"


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


def _by_host(places: Sequence[_Place]) -> Hosts:
    ranks: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        ranks.setdefault(place.host, []).append(rank)
    return tuple(tuple(here) for here in ranks.values())
