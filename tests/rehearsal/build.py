"""Builds tests/rehearsal/device.cpp, and says how a process gets the device that it makes."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Path(__file__).with_name("device.cpp")
BUILD = ROOT / "build" / "rehearsal"
CXX = os.environ.get("CXX", "g++")


def environment() -> dict[str, str]:
    """What a process has to be started with.

    The library registers hooks that torch asks for while it is imported, so it is loaded before. Triton's kernels run
    in its interpreter. Skips without a compiler, and where torch has CUDA itself.
    """
    library = _build()
    torch = _torch_folder() / "lib" / "libtorch_cpu.so"
    return {**os.environ, "LD_PRELOAD": f"{torch}:{library}", "TRITON_INTERPRET": "1", "FASTPAR_REHEARSAL": "1"}


def _torch_folder() -> Path:
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent


def _build() -> Path:
    import torch

    if torch.backends.cuda.is_built():
        pytest.skip("this torch has CUDA itself, so there is no room for a device in its place")
    if shutil.which(CXX) is None:
        pytest.skip(f"no C++ compiler: {CXX} not found")
    folder = _torch_folder()
    flags = ["-std=c++20", "-fPIC", "-shared", "-w", f"-I{folder}/include"]
    libraries = [f"-L{folder}/lib", "-ltorch_cpu", "-lc10"]
    stamp = hashlib.sha256(SOURCE.read_bytes() + f"{CXX} {flags} {torch.__version__}".encode()).hexdigest()[:16]
    library = BUILD / f"device-{stamp}.so"
    BUILD.mkdir(parents=True, exist_ok=True)
    with open(BUILD / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two runs of pytest at the same time build once
        if not library.exists():
            unfinished = library.with_suffix(".part")
            command = [CXX, *flags, str(SOURCE), "-o", str(unfinished), *libraries]
            result = subprocess.run(command, capture_output=True, text=True)
            if result.returncode != 0:
                pytest.fail(f"the rehearsal's device does not build:\n{result.stderr[-4000:]}", pytrace=False)
            unfinished.rename(library)
    return library
