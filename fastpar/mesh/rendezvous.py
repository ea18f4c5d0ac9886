"""Rendezvous of the ranks of a job in `init_mesh`: by a deadline, and of the same job only.

Note: sessions. Rank 0 writes under a fixed name which session it opens: a random token and what the job is. Every other
rank compares that with its own job and signs in under the token, once: the store's compare-and-set sees to it that a
place is taken by one process. When all have signed in, rank 0 says that the session is complete, and everything that
follows (torch's own rendezvous, gloo's addresses) has the token in its names. So what an earlier attempt or mesh has
left in the store is not mistaken for anything of this one, and a rank that comes too late, or to the wrong job, joins
nothing. Rank 0 opens a new session each time; the others pass by those that they have been in.

    jobs differ in       the launcher's run (TORCHELASTIC_RUN_ID, or SLURM's job and step), the number of ranks, the
                         version of fastpar; a rank of another job is refused before it signs in
    attempts differ in   TORCHELASTIC_RESTART_COUNT
    ranks of one job     that call init_mesh with different arguments hear of it, all of them

Note: two jobs at one port. A process of another job that says the same of all that, which is so where two jobs are
started by hand with the same MASTER_ADDR, MASTER_PORT and sizes, cannot be told from one of this job. It can take the
place of a rank that has not come yet. It cannot join beside it: one of the two gets the place and the other an error
that names the process which has it. The store has no password either; it listens on all interfaces (torch's
TCPStore), so the network has to be one where nobody else sends to that port.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from fastpar._version import __version__

_CONNECT_SLICE_S = 3.0  # of one attempt to reach the store: signals are handled in between
_MAX_PAUSE_S = 0.05
_GRACE_S = 2.0  # beyond the deadline: rank 0 says who is missing, and the others hear it


class RendezvousError(RuntimeError):
    """The ranks did not become a job: they differ in what they want to be, or a place was taken."""


class RendezvousTimeoutError(RendezvousError, TimeoutError):
    """Ranks did not come by the deadline; the message names them."""


class Clock:
    """A deadline, and what waits for something poll with."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return self._end - time.monotonic()

    def wait_until(self, is_so: Callable[[], bool], grace: float = 0.0) -> bool:
        """True when it became so before the deadline. Signals get their turn."""
        pause = 0.0005
        while not is_so():
            if self.left + grace < 0:
                return False
            time.sleep(pause)
            pause = min(2 * pause, _MAX_PAUSE_S)
        return True


def launched_world() -> tuple[int, int] | None:
    """Rank and number of ranks that a launcher has given this process."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return None


def open_store(rank: int, clock: Clock) -> dist.Store:
    """The launcher's store. Raises RendezvousTimeoutError where it cannot be reached by the deadline."""
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise RendezvousError(f"{' and '.join(missing)} must be set beside RANK and WORLD_SIZE: torchrun sets them")
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    while True:
        try:
            return dist.TCPStore(
                host,
                port,
                is_master=serves,
                timeout=timedelta(seconds=max(min(clock.left, _CONNECT_SLICE_S), 0.1)),
                wait_for_workers=False,
                multi_tenant=True,
            )
        except RuntimeError as error:
            if serves:
                raise RendezvousError(
                    f"rank 0 cannot listen at {host}:{port}; does another job? Give each its own MASTER_PORT. "
                    f"Cause: {error}"
                ) from error
            if clock.left < 0:
                raise RendezvousTimeoutError(
                    f"rank {rank} cannot reach the store of rank 0 at {host}:{port} within {clock.seconds:g} s: has "
                    f"rank 0 been started, and is this its address? Cause: {error}"
                ) from error


class Session:
    """One meeting of all ranks in a store. After `meet`, `store` is for this session alone, and `known` is what every
    rank has said there, by rank."""

    def __init__(self, store: dist.Store, rank: int, size: int, clock: Clock) -> None:
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._root = dist.PrefixStore(f"fastpar/attempt{attempt}", store)
        self._rank, self._size, self._clock = rank, size, clock
        self._me = f"{socket.gethostname()} pid {os.getpid()} {_started()}"
        self.store: dist.Store = self._root
        self.known: list[dict[str, Any]] = []

    def meet(self, wanted: dict[str, Any], said: dict[str, Any]) -> None:
        """Return when all ranks are here.

        wanted   what must be equal on all ranks
        said     what this rank tells the others
        """
        mine = {"who": self._me, "job": {**_job(), "ranks": self._size}, "wanted": wanted, "said": said}
        try:
            if self._rank == 0:
                self._open(mine)
            else:
                self._join(mine)
        except RuntimeError as error:
            if isinstance(error, RendezvousError):
                raise
            raise RendezvousError(f"rank {self._rank} lost the store: has rank 0 ended? Cause: {error}") from error

    def confirm(self, problem: str, what: str = "done") -> None:
        """Agree that what followed has worked on every rank; `problem`: why not here. Raises RendezvousError on all.

        what    a name for each time that a session is asked
        """
        self.store.set(f"{what}{self._rank}", problem or "yes")
        self._wait_for_all(what, "did not get through the connections between ranks")
        answers = self._values(what)
        wrong = [f"rank {rank}: {answer}" for rank, answer in enumerate(answers) if answer != "yes"]
        if wrong:
            raise RendezvousError(f"the ranks could not be connected; {'; '.join(wrong)}")

    # ---- rank 0

    def _open(self, mine: dict[str, Any]) -> None:
        token = secrets.token_hex(8)
        self.store = dist.PrefixStore(token, self._root)
        self.store.set("in0", json.dumps(mine))
        self._root.set("session", token)
        try:
            self._wait_for_all("in", "did not come")
            entries = [json.loads(text) for text in self._values("in")]
            problem = _difference([entry["wanted"] for entry in entries])
            if problem:
                raise RendezvousError(problem)
        except BaseException as error:  # interrupted, too: the others need not wait
            text = str(error) if isinstance(error, RendezvousError) else f"rank 0 gave up: {error!r}"
            with contextlib.suppress(RuntimeError):
                self.store.set("outcome", json.dumps({"error": text, "late": _is_late(error)}))
            raise
        self.known = [entry["said"] for entry in entries]
        self.store.set("outcome", json.dumps({"known": self.known}))

    # ---- the others

    def _join(self, said: dict[str, Any]) -> None:
        """Into the newest session that this process was not in yet, as rank 0 may open another while we wait."""
        mine = json.dumps(said)
        token, problem = "", f"rank 0 did not come within {self._clock.seconds:g} s"

        def has_outcome() -> bool:
            nonlocal token, problem
            newest = self._root.get("session").decode() if self._root.check(["session"]) else ""
            # Asked after the newest: rank 0 may have ended this one just now, and opened its next, which is not ours.
            if token and not problem and self.store.check(["outcome"]):
                return True
            if newest and newest != token:
                token = newest
                self.store = dist.PrefixStore(token, self._root)
                _check_job(said["job"], json.loads(self.store.get("in0")))
                is_over = self.store.check(["outcome"])  # asked before signing in, which may be what completes it
                found = self.store.compare_set(f"in{self._rank}", "", mine).decode()
                if found != mine or is_over:
                    problem = self._taken(found)
                    return False
                problem = ""
            return False

        if not self._clock.wait_until(has_outcome, _GRACE_S):
            raise RendezvousTimeoutError(problem or self._missing("in", "did not come"))
        outcome = json.loads(self.store.get("outcome"))
        if "error" in outcome:
            raise (RendezvousTimeoutError if outcome["late"] else RendezvousError)(outcome["error"])
        self.known = outcome["known"]

    def _taken(self, entry: str) -> str:
        """Why this process cannot be in a session. An earlier one of its own is passed by: rank 0 opens another; so is
        that of a process which has ended. A process of this host that lives is an intruder, or this one is."""
        who = json.loads(entry)["who"]
        if who != self._me and _lives(who):
            raise RendezvousError(
                f"rank {self._rank} of this job is another process already ({who}), and not this one ({self._me}): do "
                "two jobs use the same MASTER_ADDR and MASTER_PORT?"
            )
        return (
            f"rank 0 opened no new session within {self._clock.seconds:g} s, and the place of rank {self._rank} in the "
            f"last one was taken by {'this process' if who == self._me else who}"
        )

    # ---- waiting

    def _wait_for_all(self, key: str, what: str) -> None:
        keys = [f"{key}{rank}" for rank in range(self._size)]
        if not self._clock.wait_until(lambda: self.store.check(keys), _GRACE_S if self._rank else 0.0):
            raise RendezvousTimeoutError(self._missing(key, what))

    def _values(self, key: str) -> list[str]:
        return [self.store.get(f"{key}{rank}").decode() for rank in range(self._size)]

    def _missing(self, key: str, what: str) -> str:
        absent = [rank for rank in range(self._size) if not self.store.check([f"{key}{rank}"])]
        named = ", ".join(map(str, absent[:16])) + (f" and {len(absent) - 16} more" if len(absent) > 16 else "")
        return f"rank(s) {named} of {self._size} {what} within {self._clock.seconds:g} s"


def _is_late(error: BaseException) -> bool:
    return isinstance(error, RendezvousTimeoutError)


def _job() -> dict[str, Any]:
    """The marks of this job, as far as its processes know."""
    slurm = [os.environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")]
    run = os.environ.get("TORCHELASTIC_RUN_ID") or ".".join(filter(None, slurm))
    return {"run": run, "fastpar": __version__}


def _check_job(own: dict[str, Any], first: dict[str, Any]) -> None:
    """Before this rank signs in, so that it does not disturb a job that is not its own."""
    for key, value in own.items():
        if first["job"].get(key) != value:
            raise RendezvousError(
                f"at MASTER_ADDR and MASTER_PORT another job is waiting for its ranks ({first['who']}): its {key} is "
                f"{first['job'].get(key)!r}, and this one's {value!r}. Give each job a MASTER_PORT of its own"
            )


def _difference(wanted: list[dict[str, Any]]) -> str:
    for rank, other in enumerate(wanted):
        if other != wanted[0]:
            return (
                f"ranks called init_mesh with different arguments: rank 0 with {_words(wanted[0])}; rank {rank} with "
                f"{_words(other)}"
            )
    return ""


def _words(wanted: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in wanted.items())


def _started(pid: int | str = "self") -> str:
    """When a process of this host was started, by its kernel's clock; with the pid its name."""
    with contextlib.suppress(OSError, IndexError), open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[19]
    return ""


def _lives(who: str) -> bool:
    """True for a process of this host that still runs."""
    host, _, rest = who.partition(" pid ")
    pid, _, started = rest.partition(" ")
    return host == socket.gethostname() and started != "" and _started(pid) == started
