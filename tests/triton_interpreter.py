"""Runs tests of Triton kernels in Triton's interpreter, on CPU tensors.

TRITON_INTERPRET is read when a kernel is decorated, so these tests need a process of their own. They stand in
tests/interpreted/check_<stem>.py, a name that ordinary collection passes over, and one wrapper test per stem runs them;
another one, which is slow itself, those that are marked slow.

The processes are forks of one that has imported torch and Triton and done nothing else, which takes them seconds less.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO

import pytest

from tests.markers import needs

ROOT = Path(__file__).resolve().parents[1]


class _Forks:
    """The process that forks, begun by the first run; it ends with the pipe to it."""

    def __init__(self) -> None:
        self.commands: IO[str] | None = None
        self.replies: IO[str] | None = None
        self.owner = 0

    def run(self, arguments: list[str], output: str) -> int:
        if self.commands is None or self.owner != os.getpid():
            self.start()
        assert self.commands is not None
        assert self.replies is not None
        print(json.dumps([arguments, output]), file=self.commands, flush=True)
        status = self.replies.readline()
        if not status:
            self.commands = None
            raise RuntimeError("the process that runs Triton's interpreter has ended")
        return int(status)

    def start(self) -> None:
        code = "from tests.triton_interpreter import serve; serve()"
        environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(
            [sys.executable, "-c", code], cwd=ROOT, env=environment, text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )  # fmt: skip
        process.returncode = 0  # nobody waits for it, and Popen need not warn of that
        self.commands, self.replies, self.owner = process.stdin, process.stdout, os.getpid()


_FORKS = _Forks()


def serve() -> None:
    """For each line with arguments and a file: run pytest in a fork, its output in the file, and say how it ended."""
    import torch  # noqa: F401
    import triton  # noqa: F401

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


@needs("device")
def run_interpreted(*test_files: str, markers: str = "not slow") -> None:
    """Run the tests of files in tests/interpreted/ in the interpreter; shows their output if one fails or none ran.

    Skips where triton is not installed.
    """
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    paths = [str(ROOT / "tests" / "interpreted" / name) for name in test_files]
    with tempfile.NamedTemporaryFile("r", errors="replace") as output:
        status = _FORKS.run(["-q", "-p", "no:cacheprovider", "-m", markers, *paths], output.name)
        if status != 0:
            pytest.fail(f"{', '.join(test_files)} failed in the Triton interpreter:\n{output.read()}", pytrace=False)
