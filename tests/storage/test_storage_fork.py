"""A process forked from one with an open store ends as if there were none, and leaves its parent's alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.storage.test_storage import ring_refusal

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.expensive
@pytest.mark.parametrize("backend", ["threads", "io_uring"])
def test_a_forked_child_gets_errors_and_ends_and_its_parent_goes_on(backend: str, tmp_path: Path) -> None:
    if backend == "io_uring" and ring_refusal():
        pytest.skip(f"io_uring: {ring_refusal()}")
    command = [sys.executable, "-m", "tests.storage.storage_forks", str(tmp_path), backend]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=280)
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr[-3000:]}"
    assert dict(line.split("\t", 1) for line in done.stdout.splitlines()) == {
        "nothing": "no error",
        "sys.exit": "no error",
        "close": "no error",
        "dropped": "no error",
        "every call": "no error",
        "what has ended": "no error",
        "repr and names": "no error",
        "a store of its own": "no error",
        "os._exit": "no error",
        "lock held": "no error",
        "multiprocessing": "0",
        "loader": "[0, 1, 2, 3]",
        "loader that reads": "True",
        "parent": "True",
    }
    assert os.listdir(tmp_path) == []
