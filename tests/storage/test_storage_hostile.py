"""A kept file is input that somebody else may have written: whatever it says, no signal, no hang, no wrong byte."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fastpar.storage import StorageError, TensorStore, index
from tests.storage.test_storage import ring_refusal, values

ROOT = Path(__file__).resolve().parents[2]


def outcomes(folder: Path, backend: str, seed: int, count: int) -> dict[str, str]:
    """Of tests/storage/hostile_files.py."""
    if backend == "io_uring" and ring_refusal():
        pytest.skip(f"io_uring: {ring_refusal()}")
    command = [sys.executable, "-m", "tests.storage.hostile_files", str(folder), backend, str(seed), str(count)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=280)
    lines = done.stdout.splitlines()
    last = lines[-1] if lines else "nothing"
    assert done.returncode == 0, f"exit status {done.returncode} in {last}\n{done.stderr[-2000:]}"
    return {json.loads(name): json.loads(said) for name, said in (line.split("\t") for line in lines)}


@pytest.mark.expensive
@pytest.mark.parametrize("backend", ["threads", "io_uring"])
def test_a_hostile_file_is_refused_or_read_as_it_is(backend: str, tmp_path: Path) -> None:
    found = outcomes(tmp_path, backend, seed=1, count=200)
    assert {name: said for name, said in found.items() if "WRONG" in said} == {}
    assert len(found) > 400
    assert found["valid"] == "read"
    # A few by what they say: what is wrong, its value, and what is allowed.
    assert "block_bytes is 0, where it has to be a multiple of 4096 up to 1073741824" in found["block_bytes 0"]
    assert "the dtype of tensor 'a' is 'load', where it has to be one of bool" in found["dtype of a: 'load'"]
    assert "the shape of tensor 'a' is [-3, -700]" in found["shape of a: [-3, -700]"]
    assert "the offset of tensor 'a' is 4095, where it has to be a multiple" in found["offset of a: 4095"]
    assert "within another one" in found["overlap"]
    assert "RecursionError" in found["deep lists"]
    assert "a name is there twice" in found["twice the same name"]
    assert found["shape of a: [700, 3]"] == "read"  # the same bytes


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["threads", "io_uring"])
@pytest.mark.parametrize("seed", range(2, 6))
def test_more_hostile_files_are_refused_or_read_as_they_are(backend: str, seed: int, tmp_path: Path) -> None:
    found = outcomes(tmp_path, backend, seed=seed, count=3000)
    assert {name: said for name, said in found.items() if "WRONG" in said} == {}


def test_an_index_that_would_not_be_read_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "MAX_INDEX_BYTES", 1000)
    with TensorStore(tmp_path, block_bytes=4096) as store:
        store.write("x", values(200 * 4096))
        with pytest.raises(StorageError, match=r"keep failed: the index of 1 tensors takes \d+ bytes, at most 1000"):
            store.keep(tmp_path / "kept")
        assert os.listdir(tmp_path) == []
        assert store.read("x").wait().equal(values(200 * 4096))


NO_THREADS = """
import resource, sys, torch
from fastpar.storage import StorageError, TensorStore
TensorStore(sys.argv[1], backend="threads").close()
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (100 << 20), resource.RLIM_INFINITY))
try:
    TensorStore(sys.argv[1], backend="threads", depth=256)
except StorageError as error:
    print(error)
"""


@pytest.mark.expensive
def test_a_system_without_threads_is_an_error_and_not_the_end(tmp_path: Path) -> None:
    command = [sys.executable, "-c", NO_THREADS, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert "open failed: no threads: " in done.stdout
