"""Tests of CUDA kernels that run on the CPU, through csrc/emulation.

    @emulated
    def test_something(...):
        import fastpar_emulation as emulation      # inside: the module can be loaded in the instrumented process only
        ...

The kernels are compiled by g++ with AddressSanitizer and UndefinedBehaviorSanitizer, whose runtime has to be in a
process before Python itself. So the tests of a file run together in one process of their own, which imports numpy but
neither torch nor fastpar, and every test here reports what became of its twin there. To see that process itself:

    python -m tests.emulated tests/gpu/test_emulation.py [pytest arguments]
"""

from __future__ import annotations

import fcntl
import functools
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.markers import needs

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "emulation"
IS_INSIDE = os.environ.get("FASTPAR_EMULATED_TESTS") == "1"
CXX = os.environ.get("CXX", "g++")
# The sanitizers' checks are calls, and fewer, as in _build/native.py: in place they take a third longer to compile.
# With -O0 the tests take longer by what compiling takes less.
FLAGS = (
    "-std=c++17 -O1 -g1 -fPIC -fvisibility=hidden -fno-omit-frame-pointer -Wall -Wextra -Wno-unused-parameter "
    "-fsanitize=address,undefined -fno-sanitize-recover=all -fno-sanitize=null,object-size,vptr "
    "--param asan-instrumentation-with-call-threshold=0"
)


def runtime_library(name: str) -> str:
    """A library of the compiler's: its path, or the bare name where it has none."""
    return subprocess.run([CXX, f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()


@functools.cache
def reason_to_skip() -> str | None:
    if sys.platform != "linux":
        return f"the emulation's build knows Linux only, not {sys.platform}"
    for package in ("pybind11", "ninja"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed (pip install 'fastpar[test]')"
    if shutil.which(CXX) is None:
        return f"no C++ compiler: {CXX} not found"
    if not runtime_library("libasan.so").startswith("/"):
        return f"{CXX} has no libasan.so"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return "Python.h is not installed"
    return None


def build() -> None:
    """Compiles what changed into build/emulation/fastpar_emulation.so."""
    import ninja
    import pybind11

    csrc = ROOT / "csrc"
    sources = sorted((csrc / "emulation").glob("*.cpp"))
    includes = f"-I{csrc} -include {csrc}/emulation/cuda.h"  # before every file, as nvcc includes its own
    for folder in (sysconfig.get_path("include"), pybind11.get_include()):
        includes += f" -isystem {folder}"
    lines = [
        f"cxx = {CXX}",
        f"flags = {FLAGS} {includes}",
        "rule compile",
        "  command = $cxx -MMD -MF $out.d $flags -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "rule link",
        "  command = $cxx -shared -fsanitize=address,undefined -o $out $in",
        *(f"build {source.stem}.o: compile {source}" for source in sources),
        "build fastpar_emulation.so: link " + " ".join(f"{source.stem}.o" for source in sources),
        "",
    ]
    BUILD.mkdir(parents=True, exist_ok=True)
    with open(BUILD / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two runs of pytest at the same time build once
        (BUILD / "build.ninja").write_text("\n".join(lines))
        command = [str(Path(ninja.BIN_DIR) / "ninja"), "-C", str(BUILD), "-j2"]
        result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        pytest.fail(f"the emulation does not build:\n{result.stdout}{result.stderr}", pytrace=False)


def environment() -> dict[str, str]:
    """What a process needs to load the module."""
    preload = [runtime_library(name) for name in ("libasan.so", "libubsan.so", "libstdc++.so.6")]
    return {
        **os.environ,
        "FASTPAR_EMULATED_TESTS": "1",
        "LD_PRELOAD": " ".join(preload),
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONPATH": f"{BUILD}{os.pathsep}{ROOT}",
    }


def pytest_command(path: Path, *arguments: str) -> list[str]:
    # without conftest.py, which imports torch; what a sanitizer writes before it ends the process is not captured
    options = ["--noconftest", "-p", "no:cacheprovider", "--capture=sys", "-v"]
    return [sys.executable, "-m", "pytest", *options, str(path), *arguments]


@needs("device")
@functools.cache
def outcomes(path: Path, markers: str) -> dict[str, tuple[str, str]]:
    """Name -> (passed | failed | skipped, text) of the tests in `path` with these markers, run in one process."""
    build()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = pytest_command(path, f"--junitxml={report}", "--tb=short", "-m", markers)
        result = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
        if not report.exists():  # the process died: a sanitizer ended it
            text = "\n".join((result.stdout + result.stderr).splitlines()[-120:])
            return {"": ("failed", f"the process of the emulated tests died with status {result.returncode}:\n{text}")}
        cases = ElementTree.parse(report).getroot().iter("testcase")
        return {case.get("name", ""): _outcome(case) for case in cases}


def _outcome(case: ElementTree.Element) -> tuple[str, str]:
    for tag, verdict in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
        element = case.find(tag)
        if element is not None:
            return verdict, f"{element.get('message', '')}\n{element.text or ''}"
    return "passed", ""


def emulated(test: Callable[..., None]) -> Callable[..., None]:
    """Runs a test in the process of the emulation."""
    if IS_INSIDE:
        return test
    path = Path(sys.modules[test.__module__].__file__ or "")

    @functools.wraps(test)
    def report(*args: Any, **kwargs: Any) -> None:
        reason = reason_to_skip()
        if reason is not None:
            pytest.skip(reason)
        found = outcomes(path, "not slow")
        name = os.environ["PYTEST_CURRENT_TEST"].split("::")[-1].rpartition(" (")[0]
        if name not in found and "" not in found:
            found = outcomes(path, "slow")
        verdict, text = found.get(name) or found.get("") or ("failed", f"no test {name} in the emulated process")
        if verdict == "skipped":
            pytest.skip(text)
        if verdict == "failed":
            pytest.fail(text, pytrace=False)

    # the first of a file waits for the build and for all the others
    return pytest.mark.timeout(1800)(report)


if __name__ == "__main__":
    build()
    sys.exit(subprocess.run(pytest_command(Path(sys.argv[1]), *sys.argv[2:]), cwd=ROOT, env=environment()).returncode)
