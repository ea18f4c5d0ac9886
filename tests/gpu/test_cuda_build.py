"""Every .cu file compiles for sm_90a; none of its kernels spills registers to memory, or takes more registers or static
shared memory than tests/gpu/ptxas_budget.json says, on which what comments say of occupancy rests.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests import programs
from tests.markers import needs

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "csrc").rglob("*.cu"))
# Kernel -> the threads of its largest block, registers of a thread and static shared memory at most, and how many such
# blocks a multiprocessor has room for by these alone.
BUDGET = json.loads((Path(__file__).with_name("ptxas_budget.json")).read_text())
BUDGET_OF = "13.0"
MAX_STATIC_BYTES = 6 << 10  # kMaxStaticBytes of csrc/common/device.cuh


@needs("device")
def ptxas_report(source: Path) -> str:
    """Of the build that the other tests use, where that is for sm_90a: such a file takes half a minute."""
    build = programs.load("_build/native.py")
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
    assert {name: k for name, k in kernels.items() if k["spilled"] > 0} == {}


def name_of(mangled: str) -> str:
    """backward_kernel of _ZN7fastpar6device15backward_kernelIfLb1EEEv..., with <double> where that is its type."""
    at, name = len("_ZN"), ""
    while found := re.match(r"\d+", mangled[at:]):
        begin = at + found.end()
        at = begin + int(found[0])
        name = mangled[begin:at]
    return name + ("<double>" if mangled.startswith("Id", at) else "")


def resident_blocks(threads: int, registers: int, shared: int) -> int:
    """Of a multiprocessor with 65536 registers, 2048 threads, 32 blocks and 228 KiB, of which a block takes 1 KiB more
    than it asks for; a thread's registers come in eights.
    """
    return min(65536 // (threads * -(-registers // 8) * 8), 2048 // threads, 32, (228 << 10) // (shared + 1024))


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH")
def test_every_kernel_keeps_to_its_budget() -> None:
    version = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    if f"release {BUDGET_OF}," not in version:
        pytest.skip(f"the budget is what nvcc {BUDGET_OF} makes of the kernels")
    found: dict[str, dict[str, int]] = {}
    for source in SOURCES:
        for mangled, kernel in kernels_of(ptxas_report(source)).items():
            most = found.setdefault(name_of(mangled), {"registers": 0, "shared": 0})
            most.update({what: max(most[what], kernel[what]) for what in most})
    assert found.keys() == BUDGET.keys()
    beyond = {
        name: kernel for name, kernel in found.items() if any(kernel[what] > BUDGET[name][what] for what in kernel)
    }
    assert beyond == {}


def test_a_budget_leaves_room_for_as_many_blocks_as_it_says() -> None:
    for name, budget in BUDGET.items():
        assert resident_blocks(budget["threads"], budget["registers"], budget["shared"]) == budget["blocks"], name
        assert budget["shared"] <= MAX_STATIC_BYTES, f"{name}: launch() expects less static shared memory"
    assert (
        f"kMaxStaticBytes = size_t{{{MAX_STATIC_BYTES >> 10}}} << 10"
        in (ROOT / "csrc" / "common" / "device.cuh").read_text()
    )


def test_a_spill_in_the_compilers_report_is_seen() -> None:
    report = """ptxas info    : Compiling entry function '_Z1fv' for 'sm_90a'
ptxas info    : Function properties for _Z1fv
    16 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 64 registers, used 1 barriers, 16 bytes cumulative stack size, 768 bytes smem
"""
    assert kernels_of(report) == {"_Z1fv": {"registers": 64, "spilled": 20, "shared": 768}}


def test_kernels_are_named_by_their_last_name() -> None:
    assert name_of("_ZN7fastpar6device15backward_kernelIfLb1EEEvNS_17BackwardArgumentsE") == "backward_kernel"
    assert name_of("_ZN7fastpar6device12stats_kernelIdLb0EEEvNS_14StatsArgumentsE") == "stats_kernel<double>"
