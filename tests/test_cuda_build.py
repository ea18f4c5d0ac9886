"""Every .cu file compiles for sm_90a, and none of its kernels spills registers to memory."""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted((ROOT / "csrc").rglob("*.cu"))
MAX_SHARED_BYTES = 48 << 10  # static; more has to be dynamic, and is asked for at launch


def native() -> ModuleType:
    """_build/native.py."""
    spec = importlib.util.spec_from_file_location("native", ROOT / "_build" / "native.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["native"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def ptxas_report(source: Path) -> str:
    """Of the build that the other tests use, where that is for sm_90a: such a file takes half a minute."""
    build = native()
    report: str = build.compiler_report(source, build.Options(build.find_torch(), "g++", ("90a",)))
    return report


def kernels_of(report: str) -> dict[str, dict[str, int]]:
    """Of ptxas -v: kernel -> its registers, bytes spilled, static shared memory."""
    pattern = re.compile(
        r"Compiling entry function '(?P<name>\S+)'.*?"
        r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
        r"Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
        re.DOTALL,
    )
    found = {}
    for match in pattern.finditer(report):
        shared = re.search(r"(\d+) bytes smem", match["rest"])
        found[match["name"]] = {
            "registers": int(match["registers"]),
            "spilled": int(match["stores"]) + int(match["loads"]),
            "shared": int(shared[1]) if shared else 0,
        }
    return found


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH")
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_no_kernel_spills(source: Path) -> None:
    report = ptxas_report(source)
    kernels = kernels_of(report)
    assert len(kernels) == report.count("Compiling entry function") > 0
    assert {name: k for name, k in kernels.items() if k["spilled"] > 0 or k["shared"] > MAX_SHARED_BYTES} == {}


def test_a_spill_in_the_compilers_report_is_seen() -> None:
    report = """ptxas info    : Compiling entry function '_Z1fv' for 'sm_90a'
ptxas info    : Function properties for _Z1fv
    16 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 64 registers, used 1 barriers, 16 bytes cumulative stack size, 768 bytes smem
"""
    assert kernels_of(report) == {"_Z1fv": {"registers": 64, "spilled": 20, "shared": 768}}
