"""Ranks that may be killed: one process with torch loaded forks a set of them for every run.

    with FaultRanks() as ranks:
        outcomes = ranks.run(3, "all_reduce", kill=1, after=0.01)

A rank that starts from nothing costs seconds of a core; a fork of a process that has imported torch, and done nothing
with it, a few milliseconds. That process is a child of the test's own, so that what is forked has one thread.

A rank of a run joins a group, calls one collective again and again (with sizes around all thresholds, the same on all
ranks; or sends messages round a ring, or trains a pipeline), and reports the first error. `Outcome.seconds`: from the
moment of the fault to the error.
"""

from __future__ import annotations

import gc
import json
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.markers import needs

ROOT = Path(__file__).resolve().parents[2]
OPS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce", "barrier", "async", "region")
MESSAGES = ("messages over shared_memory", "messages over torch")
NUMELS = (1, 1000, 20_000, 300_000, 1_500_000)  # of float32: one-shot, two-shot, several chunks, beyond the buffers


@dataclass(frozen=True)
class Outcome:
    """How one rank of a run ended: the class of its error and the text, or how it was killed."""

    rank: int
    error: str
    text: str
    seconds: float


@needs("ranks", "clock")
class FaultRanks:
    """The process that forks ranks; a context manager."""

    def __enter__(self) -> FaultRanks:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.comm.fault_ranks"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert self._answer(60.0) == "ready"
        return self

    def __exit__(self, *_: object) -> None:
        with self._process:  # closes its pipes, at which it ends, and waits for that
            pass

    def run(self, size: int, op: str, *, fault: str, victim: int, after: float, timeout: float = 20.0) -> list[Outcome]:
        """`fault` is "kill" (SIGKILL), "stop" (SIGSTOP), "leave" (a clean exit) or "sleep" (it stops calling), and
        happens to rank `victim` so many seconds after all ranks have met. Raises if a rank says nothing for long."""
        task = {"size": size, "op": op, "fault": fault, "victim": victim, "after": after, "timeout": timeout}
        assert self._process.stdin is not None
        print(json.dumps(task), file=self._process.stdin, flush=True)
        return [Outcome(**outcome) for outcome in self._answer(timeout + 30.0)]

    def _answer(self, seconds: float) -> Any:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], seconds)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            self._process.kill()
            raise AssertionError(f"no answer within {seconds:g} s" if not ready else "the forking process died")
        return json.loads(line)


# ---- the forking process


def serve() -> None:
    """Answer one task a line until the end of the input."""
    import torch

    import fastpar.comm
    import fastpar.comm.shared_memory.region
    import fastpar.pipeline  # noqa: F401  (ranks find it loaded)

    torch.set_num_threads(1)
    gc.freeze()  # a collection in a rank would copy all of the pages that it has in common with this process
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(run_once(**json.loads(line))), file=answers, flush=True)


def run_once(size: int, op: str, fault: str, victim: int, after: float, timeout: float) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="fastpar_faults_") as folder:
        pids, pipes = [], []
        for rank in range(size):
            ours, theirs = os.pipe()
            pid = os.fork()
            if pid == 0:
                try:
                    rank_main(rank, size, op, folder, theirs, timeout, fault if rank == victim else "")
                finally:
                    os._exit(0)
            os.close(theirs)
            pids.append(pid)
            pipes.append(ours)
        try:
            return follow(pids, pipes, fault, victim, after, timeout)
        finally:
            for pid, pipe in zip(pids, pipes, strict=True):
                os.kill(pid, signal.SIGKILL)  # nobody has waited for it yet, so it is still ours
                os.waitpid(pid, 0)
                os.close(pipe)


def follow(
    pids: list[int], pipes: list[int], fault: str, victim: int, after: float, timeout: float
) -> list[dict[str, Any]]:
    for pipe in pipes:
        if read_line(pipe, 60.0) != {"state": "met"}:
            raise RuntimeError("the ranks did not meet")
    time.sleep(after)
    at = time.monotonic()
    if fault == "kill":
        os.kill(pids[victim], signal.SIGKILL)
    elif fault == "stop":
        os.kill(pids[victim], signal.SIGSTOP)
    else:
        os.kill(pids[victim], signal.SIGUSR2)
    outcomes = []
    for rank, pipe in enumerate(pipes):
        if rank == victim:
            continue
        said = read_line(pipe, timeout + 10.0)
        outcomes.append(
            {"rank": rank, "error": said["error"], "text": said["text"], "seconds": said["time"] - at}
            if said
            else {"rank": rank, "error": "HANG", "text": "", "seconds": time.monotonic() - at}
        )
    if fault == "stop":  # the late one goes on, and must find out
        os.kill(pids[victim], signal.SIGCONT)
        again = time.monotonic()
        said = read_line(pipes[victim], timeout + 10.0)
        error, text, moment = (said["error"], said["text"], said["time"]) if said else ("HANG", "", time.monotonic())
        outcomes.append({"rank": victim, "error": error, "text": text, "seconds": moment - again})
    return outcomes


def read_line(pipe: int, seconds: float) -> dict[str, Any]:
    """A message; empty after so many seconds, or when the rank is gone."""
    data, deadline = b"", time.monotonic() + seconds
    while not data.endswith(b"\n"):
        ready, _, _ = select.select([pipe], [], [], max(deadline - time.monotonic(), 0.0))
        piece = os.read(pipe, 1) if ready else b""
        if not piece:
            return {}
        data += piece
    message: dict[str, Any] = json.loads(data)
    return message


# ---- a rank


def rank_main(rank: int, size: int, op: str, folder: str, pipe: int, timeout: float, fault: str) -> None:
    import torch.distributed as dist

    from fastpar.comm import Communicator

    leaves = []
    signal.signal(signal.SIGUSR2, lambda *_: leaves.append(1))
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", size), rank=rank, world_size=size)
    Communicator(dist.group.WORLD).barrier()  # meets the others, however late they start
    comm = Communicator(dist.group.WORLD, timeout=timeout, transport="shared_memory")
    calls = Calls(comm, op)
    comm.barrier()
    say(pipe, state="met")
    try:
        while True:
            if leaves and fault == "leave":
                return
            if leaves and fault == "sleep":
                time.sleep(3600.0)
            calls.next()
    except Exception as error:
        say(pipe, error=type(error).__name__, text=str(error), time=time.monotonic())


def say(pipe: int, **message: Any) -> None:
    os.write(pipe, (json.dumps(message) + "\n").encode())


def build_pipeline(comm: Any) -> Any:
    """A small stage on every rank, under 1F1B with 8 microbatches."""
    import torch

    from fastpar.pipeline import Pipeline, make_schedule

    torch.manual_seed(0)
    stage = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    schedule = make_schedule("1f1b", comm.size, 8)
    return Pipeline([stage], schedule, comm.group, loss=torch.nn.functional.mse_loss, timeout=comm.timeout)


class Calls:
    """The same collective with one size after the other."""

    def __init__(self, comm: Any, op: str) -> None:
        import torch

        from fastpar.comm.point_to_point import PointToPoint
        from fastpar.comm.shared_memory.region import SharedRegion

        self.comm, self.op = comm, op
        self.random = random.Random(1)
        if op == "region":
            self.region = SharedRegion(comm, 4 * NUMELS[-1])
        if op in MESSAGES:
            self.messages = PointToPoint(comm.group, timeout=comm.timeout, transport=op.split()[-1])
        if op == "pipeline":
            self.pipe = build_pipeline(comm)
        self.inputs = {numel: torch.ones(numel * comm.size) for numel in NUMELS}

    def next(self) -> None:
        import torch

        numel = self.random.choice(NUMELS)
        x, comm = self.inputs[numel], self.comm
        if self.op == "barrier":
            comm.barrier()
        elif self.op == "async":
            pendings = [comm.all_reduce_async(x), comm.all_gather_async(x[:numel])]
            for pending in pendings[::-1]:
                pending.wait()
        elif self.op == "region":
            inside = self.region.tensor((numel,), torch.float32)
            comm.all_reduce(inside, out=inside)
        elif self.op == "pipeline":
            self.pipe.step(torch.ones(8, 64), target=torch.zeros(8, 64))
        elif self.op in MESSAGES:
            self.messages.send((comm.rank + 1) % comm.size, 0, [x])
            self.messages.recv((comm.rank - 1) % comm.size, 0)
        else:
            getattr(comm, self.op)(x)


if __name__ == "__main__":
    serve()
