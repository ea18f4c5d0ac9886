"""Lanes of real processes: one per rank, started under a setting, driven over pipes, never left behind.

Processes are spawned, not forked (a forked OpenMP pool hangs). Their output goes to a file and is shown only when one
of them fails. Every command has a deadline; a rank that dies, hangs or raises where the others do not ends the whole
lane with the text of what happened. A rank whose parent is killed is killed with it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from bench.harness import Case, Error, ProviderError, ProviderInfo, Rank, Setting, Worker, slowest


class LaneError(RuntimeError):
    """A rank died, hung, or failed alone; the lane is closed."""


class ProcessLane:
    """`world_size` processes with `threads` threads each, under `setting`. Use as a context manager.

    With `device` "cuda" rank r has CUDA device r to itself, and collectives are NCCL's.
    """

    def __init__(
        self, setting: Setting, world_size: int = 1, threads: int = 1, *, device: str = "cpu", timeout: float = 300.0
    ) -> None:
        self.setting, self.world_size, self.threads, self.timeout = setting, world_size, threads, timeout
        self._folder = tempfile.TemporaryDirectory(prefix="fastpar_bench_")
        context = multiprocessing.get_context("spawn")
        self._processes = []
        self._pipes: list[Connection] = []
        # Compiler worker processes would outlive a rank, and compete with the ranks for the cores.
        with _environment({**setting.environment, "TORCHINDUCTOR_COMPILE_THREADS": "1"}):
            for index in range(world_size):
                ours, theirs = context.Pipe()
                rank = Rank(index, world_size, threads, setting, device)
                process = context.Process(
                    target=_serve, args=(theirs, rank, self._folder.name, timeout, os.getpid()), daemon=True
                )
                process.start()
                theirs.close()
                self._processes.append(process)
                self._pipes.append(ours)

    def build(self, case: Case) -> list[ProviderInfo]:
        infos: list[ProviderInfo] = self._all("build", case)[0]
        return infos

    def check(self, name: str) -> dict[str, Error]:
        """The largest error over the ranks, per quantity."""
        answers: list[dict[str, Error]] = self._all("check", name)
        return {key: max((a[key] for a in answers), key=_badness) for key in answers[0]}

    def sample(self, name: str, iters: int, lead: int = 0) -> tuple[list[float], float]:
        """Seconds per call of the slowest rank, per sample; CPU seconds of all ranks together."""
        answers = self._all("sample", name, iters, lead)
        return slowest([times for times, _ in answers]), sum(cpu for _, cpu in answers)

    def memory(self, name: str) -> int:
        """Peak extra bytes of the rank that needs most."""
        return max(self._all("memory", name))

    def _all(self, command: str, *args: Any) -> list[Any]:
        for pipe in self._pipes:
            try:
                pipe.send((command, args))
            except OSError as error:
                raise self._broken(f"a rank was gone before {command!r}") from error
        answers: dict[int, tuple[str, Any]] = {}
        deadline = time.monotonic() + self.timeout
        while len(answers) < self.world_size:
            missing = [r for r in range(self.world_size) if r not in answers]
            ready = wait([self._pipes[r] for r in missing], timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise self._broken(f"ranks {missing} did not answer {command!r} within {self.timeout:.0f} s", answers)
            for index in (r for r in missing if self._pipes[r] in ready):
                try:
                    answers[index] = self._pipes[index].recv()
                except (EOFError, OSError) as error:
                    raise self._broken(f"rank {index} died during {command!r}", answers) from error
        failed = sorted(r for r, (state, _) in answers.items() if state != "ok")
        if len(failed) == self.world_size:
            raise ProviderError(answers[failed[0]][1].strip().splitlines()[-1])
        if failed:
            raise self._broken(f"ranks {failed} failed in {command!r}, the others did not", answers)
        return [answers[r][1] for r in range(self.world_size)]

    def _broken(self, what: str, answers: dict[int, tuple[str, Any]] | None = None) -> LaneError:
        texts = [f"rank {r}:\n{text}" for r, (state, text) in (answers or {}).items() if state != "ok"]
        for file in sorted(Path(self._folder.name).glob("rank*.txt")):
            tail = file.read_text(errors="replace").strip()[-2000:]
            if tail:
                texts.append(f"output of {file.stem}:\n{tail}")
        self.close()
        return LaneError("\n".join([f"{what} (setting {self.setting.name!r})", *texts]))

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()  # a rank that waits for a command sees the end of the pipe and leaves
        for process in self._processes:
            process.join(timeout=5.0)
            if process.is_alive():
                process.kill()
                process.join()
        self._processes, self._pipes = [], []
        self._folder.cleanup()

    def __enter__(self) -> ProcessLane:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _badness(error: Error) -> float:
    ratio = error.value / error.tolerance if error.tolerance else error.value
    return float("inf") if ratio != ratio else ratio


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Set variables for the children started inside the block; ours are as before afterwards."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _serve(pipe: Connection, rank: Rank, folder: str, timeout: float, parent: int) -> None:
    """Main function of a rank process."""
    _die_with(parent)
    output = os.open(f"{folder}/rank{rank.rank}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    torch.set_num_threads(rank.threads)
    torch.set_float32_matmul_precision(rank.setting.matmul_precision)
    if rank.device == "cuda":
        torch.cuda.set_device(rank.rank)
    if rank.world_size > 1:
        dist.init_process_group(
            "gloo" if rank.device == "cpu" else "nccl",
            init_method=f"file://{folder}/store",
            rank=rank.rank,
            world_size=rank.world_size,
            timeout=timedelta(seconds=timeout),
        )
    worker: Worker | None = None
    while True:
        try:
            command, args = pipe.recv()
        except (EOFError, OSError):
            break
        try:
            if command == "build":
                worker = None  # lets go of the previous case's tensors before the next are made
                if rank.device == "cuda":
                    torch.cuda.empty_cache()  # blocks of the previous case's sizes
                worker = Worker(args[0], rank)
                answer: Any = worker.infos()
            else:
                answer = getattr(worker, command)(*args)
            pipe.send(("ok", answer))
        except Exception:
            pipe.send(("error", traceback.format_exc()))
    # Nothing else is cleaned up: destroy_process_group waits for the peers, one of which may be the reason why we
    # leave, and unloading torch takes a second.
    atexit._run_exitfuncs()
    os._exit(0)


def _die_with(parent: int) -> None:
    """Ask the kernel for SIGKILL when the parent ends (Linux), whatever we are doing then."""
    with contextlib.suppress(OSError, AttributeError):
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
