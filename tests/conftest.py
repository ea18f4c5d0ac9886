"""Session-wide set-up: the rank pool ends with the session, `gpu` tests skip without a GPU, and parts of the tests can
be run apart.

    --part device    device code without a device: compiled, emulated, interpreted; and programs under ThreadSanitizer
    --part alone     what reads the clock, or has a deadline of less than ten seconds: needs the machine for itself
    --part ranks     whatever else starts processes, which may share the machine: a slow one is a slow one
    --part plain     the others

Given twice, it runs both.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
import torch

from tests import dist

_DEVICE = re.compile(
    r"test_(gpu|build|emulation|overlap_gemm|protocol_gpu|rehearsal)|_(triton|cuda|cuda_build|tsan)\.py$"
)
_CLOCK = re.compile(
    r"fault_ranks|ProcessLane|monotonic|perf_counter|assert_within|(timeout(_s)?|seconds)(=|: )\d(\.\d+)?\b"
)
_RANKS = re.compile(r"run_ranks|RLIMIT|timeout=")


@functools.cache
def part_of(file: Path) -> str:
    """The part that a test file belongs to."""
    if _DEVICE.search(file.name):
        return "device"
    text = file.read_text()
    if _CLOCK.search(text):
        return "alone"
    return "ranks" if _RANKS.search(text) else "plain"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part", action="append", choices=["device", "alone", "ranks", "plain"], help="run only that part of the tests"
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    parts = config.getoption("part")
    is_test = parts and collection_path.match("test_*.py")
    return True if is_test and part_of(collection_path) not in parts else None


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(2)
    if config.option.markexpr == "gpu":
        # The GPU's machine has other versions of torch and Triton: what they deprecate must not hide what runs there.
        config.addinivalue_line("filterwarnings", "default")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if parts := config.getoption("part"):  # pytest ignores no file that is named on the command line
        others = [item for item in items if part_of(item.path) not in parts]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if part_of(item.path) in parts]
    devices = torch.cuda.device_count()
    for item in items:
        if item.get_closest_marker("gpu") and devices < 1:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        elif item.get_closest_marker("gpu2") and devices < 2:
            item.add_marker(pytest.mark.skip(reason="needs two CUDA devices"))


def pytest_sessionfinish() -> None:
    dist.shutdown()
