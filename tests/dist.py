"""A warm pool of ranks for tests: `run_ranks(world_size, fn, *args)` runs `fn` on every rank and returns the results
by rank.

Importing torch, transformers and so on costs a process 2 to 5 seconds of a core, so one process does it
(`tests/dist_imports.py`) and ranks are forks of it. They are started once (lazily, as many as the largest world size
asked for so far), and every run gives ranks 0..world_size-1 a fresh default process group. What a run can rely on:

- the default process group (gloo) is initialised; RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR,
  MASTER_PORT are set;
- one intra-op thread, seeds of torch, numpy and random reset to 0, default dtype float32, gradients on, warnings are
  errors;
- results travel by value (pickle; a tensor carries its bytes), never as shared file descriptors;
- every process group is destroyed afterwards.

How it fails: `RankError`, within seconds, naming the rank.

- A rank that raises: its traceback. The others get `_GRACE_S` to finish; then their Python stacks are part of the
  message.
- A rank that dies (signal, `os._exit`): its exit status and the tail of its output, and the stacks of the others.
- A rank that is not done at the deadline: the Python stacks of all its threads (faulthandler), and the state of every
  other rank.

After a failure that leaves a rank busy, the pool is killed and the next run starts a new one. Workers read their
commands from a pipe and end at its end-of-file; on Linux they also get SIGKILL when the process that they are forks of
ends, as it does with the test process, so that a worker blocked inside a collective goes too.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from tests.dist_worker import STACK_SIGNAL, serve
from tests.markers import needs

_ROOT = Path(__file__).resolve().parent.parent
_GRACE_S = 3.0  # for the other ranks, once one has failed
_START_S = 240.0  # for a worker to import torch on a machine that is busy with something else
_CLEANUP_S = 60.0  # for a rank to destroy its process groups after a run that went well
_CONTEXT = multiprocessing.get_context("forkserver")


class RankError(AssertionError):
    """A rank raised, died or missed the deadline; `rank` is the first one that did."""

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


# ---- the side of the test process


class _Worker:
    """One process of the pool, its command pipe and the two files it writes: its output, and its stacks when asked."""

    def __init__(self, rank: int, folder: Path, port: int) -> None:
        self.rank = rank
        self.output = folder / f"rank{rank}.out"
        self.stacks = folder / f"rank{rank}.stacks"
        self.stacks.touch()
        self.output.touch()
        (commands, self.commands), (self.replies, replies) = _CONTEXT.Pipe(duplex=False), _CONTEXT.Pipe(duplex=False)
        arguments = commands, replies, rank, _ROOT, dict(os.environ), self.output, self.stacks, port
        self.process = _CONTEXT.Process(target=serve, args=arguments, name=f"rank {rank}")
        self.process.start()
        commands.close()
        replies.close()
        self.mark = 0  # where the output of the current run begins

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def start(self, task: bytes) -> None:
        self.mark = self.output.stat().st_size
        self.send(task)

    def send(self, command: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # a dead worker shows as end-of-file on its replies
            self.commands.send_bytes(command)

    def output_tail(self, limit: int = 4000) -> str:
        with self.output.open("rb") as file:
            file.seek(self.mark)
            return file.read()[-limit:].decode(errors="replace").strip()

    def dump_stacks(self) -> str:
        """The Python stacks of every thread of a worker that is alive, written by faulthandler in the worker."""
        before = self.stacks.stat().st_size
        if self.process.exitcode is not None:
            return ""
        os.kill(self.pid, STACK_SIGNAL)
        text, deadline = "", time.monotonic() + 1.0
        while time.monotonic() < deadline:
            time.sleep(0.05)
            with self.stacks.open() as file:
                file.seek(before)
                now = file.read()
            if now and now == text:
                break
            text = now
        return text.strip()

    def exit_status(self) -> str:
        """How a process that closed its pipe ended, in words."""
        self.process.join(timeout=2.0)
        code = self.process.exitcode
        if code is None:
            return "closed its pipe but still runs"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.process.close()
        self.commands.close()
        self.replies.close()


class _Pool:
    """The workers of this test session and the store through which they find each other."""

    def __init__(self) -> None:
        self.workers: list[_Worker] = []
        self.store: Any = None
        self.folder: Path | None = None
        self.runs = 0
        self.owner = os.getpid()

    def grow(self, world_size: int) -> None:
        import torch
        from torch.distributed import TCPStore

        if self.folder is None:
            self.folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        if self.store is None:
            # Port 0: the kernel picks a free one, so no two test runs can clash. It lives here, so that it outlives
            # every rank.
            self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        # What has looked for a device cannot use it in its forks, unless it is one of host memory.
        has_device = torch.cuda.device_count() > 0 and "FASTPAR_REHEARSAL" not in os.environ
        _CONTEXT.set_forkserver_preload([] if has_device else ["tests.dist_imports"])
        fresh = [_Worker(rank, self.folder, self.store.port) for rank in range(len(self.workers), world_size)]
        self.workers += fresh
        for worker in fresh:
            if not worker.replies.poll(_START_S) or not _is_ready(worker):
                tail, rank = worker.output_tail(), worker.rank
                self.close()
                raise RankError(f"rank {rank} of the test pool did not start:\n{tail}", rank)

    def close(self) -> None:
        """Kill every worker. The next run starts new ones."""
        if os.getpid() != self.owner:  # a forked child of the test process owns nothing here
            return
        for worker in self.workers:
            worker.kill()
        self.workers.clear()
        self.store = None
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder = None


def _is_ready(worker: _Worker) -> bool:
    try:
        return bool(worker.replies.recv_bytes() == b"ready")
    except EOFError:
        return False


_POOL = _Pool()
atexit.register(_POOL.close)


def shutdown() -> None:
    """End every worker of the pool (the next run starts new ones)."""
    _POOL.close()


def worker_pids() -> list[int]:
    """Process ids of the pool, by rank: for the tests of the pool itself."""
    return [worker.pid for worker in _POOL.workers]


def runs_started() -> int:
    """How many runs there have been, which tells whether a test started one."""
    return _POOL.runs


@needs("ranks")
def run_ranks(
    world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 240.0, backend: str = "gloo"
) -> list[Any]:
    """Run `fn(*args)` on `world_size` ranks and return what it returned, by rank.

    `fn` is a top-level function of an importable module (the test module); `args` and the results must pickle.
    `timeout` (seconds) covers the run, without the start of the pool. It ends hangs: a run that takes a second alone
    may take a hundred beside other load.

    Raises `RankError` as the module docstring says.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    if fn.__module__ == "__main__" or "<locals>" in fn.__qualname__ or "<lambda>" in fn.__qualname__:
        raise ValueError(
            f"fn must be a top-level function of an importable module, got {fn.__module__}.{fn.__qualname__}"
        )
    _POOL.grow(world_size)
    _POOL.runs += 1
    task = (
        _POOL.runs,
        world_size,
        backend,
        timeout,
        fn.__module__,
        fn.__qualname__,
        pickle.dumps(args),
    )
    run = _Run(_POOL.workers[:world_size], f"{fn.__module__}.{fn.__qualname__}", timeout)
    try:
        return run.collect(pickle.dumps(task))
    finally:
        if not run.all_idle():  # whatever went wrong, KeyboardInterrupt included, somebody may still be busy with it
            _POOL.close()


class _Run:
    """Follows one run. A rank goes running -> returned or raised -> (released) -> idle (its process groups destroyed),
    or it dies on the way."""

    def __init__(self, workers: list[_Worker], name: str, timeout: float) -> None:
        self.workers = workers
        self.name = name
        self.timeout = timeout
        self.returned: dict[int, Any] = {}
        self.raised: dict[int, str] = {}
        self.died: dict[int, str] = {}
        self.idle: set[int] = set()
        self.culprit: int | None = None  # the first rank that raised or died

    def collect(self, task: bytes) -> list[Any]:
        for worker in self.workers:
            worker.start(task)
        self.receive_until(time.monotonic() + self.timeout, self.running)
        if self.culprit is not None or not self.running():
            for worker in self.workers:  # a rank that has raised leaves at once: peers that wait for it may notice
                worker.send(b"release")
        if self.culprit is not None:
            self.receive_until(time.monotonic() + _GRACE_S, self.running)
            # What others raise because a rank has died can be here before its end-of-file.
            lost = [rank for rank in self.died if rank not in self.returned and rank not in self.raised]
            if lost and self.culprit in self.raised:
                self.culprit = lost[0]
            raise RankError(
                self.report(f"rank {self.culprit} {'raised' if self.culprit in self.raised else 'died'}"), self.culprit
            )
        if late := self.running():
            who = f"rank {late[0]} was" if len(late) == 1 else f"ranks {', '.join(map(str, late))} were"
            raise RankError(self.report(f"{who} not done within {self.timeout:g} s"), late[0])
        self.receive_until(
            time.monotonic() + _CLEANUP_S, lambda: [w.rank for w in self.workers if w.rank not in self.idle]
        )
        return [self.returned[worker.rank] for worker in self.workers]

    def running(self) -> list[int]:
        over = {*self.returned, *self.raised, *self.died}
        return [worker.rank for worker in self.workers if worker.rank not in over]

    def all_idle(self) -> bool:
        return len(self.idle) == len(self.workers)

    def receive_until(self, deadline: float, pending: Callable[[], list[int]]) -> None:
        """Take in replies until nobody is `pending`, the deadline, or the first failure."""
        known_culprit = self.culprit
        while pending() and self.culprit == known_culprit:
            left = deadline - time.monotonic()
            open_pipes = {w.replies: w for w in self.workers if w.rank not in self.died and w.rank not in self.idle}
            ready = wait(list(open_pipes), timeout=max(left, 0.0))
            if not ready:
                return
            for connection in ready:
                self.receive(open_pipes[connection])  # type: ignore[index]

    def receive(self, worker: _Worker) -> None:
        rank = worker.rank
        try:
            kind, payload = pickle.loads(worker.replies.recv_bytes())
        except EOFError:
            if rank not in self.returned and rank not in self.raised and self.culprit is None:
                self.culprit = rank
            self.died[rank] = worker.exit_status()
            return
        if kind == "idle":
            self.idle.add(rank)
        elif kind == "returned":
            self.returned[rank] = pickle.loads(payload)
        else:
            self.raised[rank] = payload
            if self.culprit is None:
                self.culprit = rank

    def report(self, headline: str) -> str:
        """What happened, the culprit first: tracebacks, exit statuses, stacks of the ranks that still run, and what
        they printed.
        """
        parts = [f"{self.name} on {len(self.workers)} ranks: {headline}"]
        for worker in sorted(self.workers, key=lambda w: (w.rank != self.culprit, w.rank)):
            rank = worker.rank
            if rank in self.died:
                parts.append(f"--- rank {rank} died: {self.died[rank]}")
            elif rank in self.raised:
                parts.append(f"--- rank {rank} raised\n{self.raised[rank].rstrip()}")
            elif rank in self.returned:
                parts.append(f"--- rank {rank} returned")
            else:
                parts.append(f"--- rank {rank} still running; its stacks:\n{worker.dump_stacks()}")
            if output := worker.output_tail():
                parts.append(f"--- rank {rank} printed\n{output}")
        return "\n".join(parts)


# ---- the side of a rank


def say_done() -> None:
    """To ranks that stay away."""
    import torch.distributed as dist

    _default_store().set(f"done {dist.get_rank()}", "")


def stay_away_until_done(ranks: Sequence[int]) -> None:
    """Take part in nothing until these ranks are done: no longer than they need, and no less."""
    _default_store().wait([f"done {rank}" for rank in ranks])


def _default_store() -> Any:
    import torch.distributed as dist

    return dist.distributed_c10d._get_default_store()
