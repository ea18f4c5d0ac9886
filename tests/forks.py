"""Runs pytest, or a program, in forks of a process that has imported what all of them need, and done nothing else: for
tests that need a process of their own, because of a variable that is read while something is imported, or of a limit.
Each import takes seconds.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

import pytest

ROOT = Path(__file__).resolve().parents[1]


class Forks:
    """The process that forks, begun by the first run; it ends with the pipe to it."""

    def __init__(self, modules: Sequence[str], environment: Callable[[], Mapping[str, str]]) -> None:
        """Of a process with these variables that imports these modules."""
        self.modules, self.environment = modules, environment
        self.commands: IO[str] | None = None
        self.replies: IO[str] | None = None
        self.owner = 0

    def run(self, arguments: Sequence[str], output: str) -> int:
        """Run pytest, its output in a file: its exit status."""
        if self.commands is None or self.owner != os.getpid():
            self.start()
        assert self.commands is not None
        assert self.replies is not None
        print(json.dumps([arguments, output]), file=self.commands, flush=True)
        status = self.replies.readline()
        if not status:
            self.commands = None
            raise RuntimeError(f"the process that has imported {', '.join(self.modules)} has ended")
        return int(status)

    def start(self) -> None:
        command = [sys.executable, "-c", "from tests.forks import serve; serve()", *self.modules]
        environment = {**self.environment(), "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        process.returncode = 0  # nobody waits for it, and Popen need not warn of that
        self.commands, self.replies, self.owner = process.stdin, process.stdout, os.getpid()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            atexit.register(pipe.close)


def _import(modules: Sequence[str]) -> None:
    """For forks, whose collections leave out what is here: they would go through all of it, and have copies."""
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()


def serve() -> None:
    """For each line with arguments and a file: run pytest in a fork, its output in the file, and say how it ended."""
    _import(sys.argv[1:])
    for line in sys.stdin:
        arguments, output = json.loads(line)
        child = os.fork()
        if child == 0:
            with open(output, "wb") as file, open(os.devnull) as nothing:
                os.dup2(nothing.fileno(), 0)
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            os._exit(int(pytest.main(arguments)))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def run_programs(
    program: str, cases: Sequence[Sequence[str]], modules: Sequence[str], timeout: float = 240.0
) -> list[subprocess.CompletedProcess[str]]:
    """Run a program once for each list of arguments, one after the other, where these modules are imported."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", "from tests.forks import serve_programs; serve_programs()"],
            input=json.dumps([program, cases, modules, folder]),
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=timeout,
        )
        return [
            subprocess.CompletedProcess(
                list(case), int(status), *(Path(folder, f"{n}.{name}").read_text() for name in ("out", "err"))
            )
            for n, (case, status) in enumerate(zip(cases, done.stdout.split(), strict=True))
        ]


def become_ranks(world_size: int, port: str) -> None:
    """In a program of `run_programs`: goes on in a fork for each rank, where `env://` finds the others by the store
    at this port, as under torchrun. The process itself waits, and ends with the number of ranks that failed.
    """
    at = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for rank in range(world_size):
        if os.fork() == 0:
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), **at)
            return
    sys.exit(sum(os.wait()[1] != 0 for _ in range(world_size)))


def serve_programs() -> None:
    """For each case: run the program in a fork, to the end of its interpreter, and say how it ended."""
    program, cases, modules, folder = json.load(sys.stdin)
    _import(modules)
    for n, case in enumerate(cases):
        child = os.fork()
        if child == 0:
            for name, descriptor in (("out", 1), ("err", 2)):
                with open(f"{folder}/{n}.{name}", "wb") as file:
                    os.dup2(file.fileno(), descriptor)
            sys.argv[1:] = case
            exec(program, {"__name__": "__main__"})
            return
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
