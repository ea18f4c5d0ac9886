"""Session-wide set-up: what a test needs becomes its markers (`tests/markers.py`), `gpu` tests skip without a GPU, the
rank pool ends with the session, and parts of the tests can be run apart.

    --part device    device code without a device: compiled, emulated, interpreted; and programs under ThreadSanitizer
    --part clock     what looks at a clock, or has a deadline of less than ten seconds: needs the machine for itself
    --part ranks     whatever else starts ranks, which may share the machine: a slow one is a slow one
    --part plain     the others

Given twice, it runs both, `clock` last; with `--quiet-when FILE`, not before nobody else holds a lock on that file.
`--shard 1/2` runs one of two halves of the files; with `clock` and another part, all that looks at a clock.
`--at-most N` runs no more than N of a test's parameters, the same ones every time.
"""

from __future__ import annotations

import fcntl
import functools
import gc
from collections.abc import Generator
from pathlib import Path
from typing import TextIO

import pytest
import torch

from tests import dist, markers

PARTS = (markers.DEVICE, markers.RANKS, "plain", markers.CLOCK)
_WATCH = pytest.StashKey[markers.Watch]()
_QUIET = pytest.StashKey[TextIO]()


def part_of(item: pytest.Item) -> str:
    """The part that a test belongs to."""
    for marker in (markers.CLOCK, markers.DEVICE, markers.RANKS):
        if item.get_closest_marker(marker):
            return marker
    return "plain"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", action="append", choices=PARTS, help="run only that part of the tests")
    parser.addoption("--shard", metavar="I/N", help="of N parts of the files, run the I-th")
    parser.addoption("--at-most", metavar="N", type=int, help="of a test's parameters, run no more than N")
    parser.addoption("--quiet-when", metavar="FILE", help="tests that look at a clock wait for a lock on it")


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(2)
    config.stash[_WATCH] = markers.Watch(dist.runs_started)
    if config.option.markexpr == "gpu":
        # The GPU's machine has other versions of torch and Triton: what they deprecate must not hide what runs there.
        config.addinivalue_line("filterwarnings", "default")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if not collection_path.match("test_*.py") or _has_all_clocks(config):
        return None
    return None if _is_in_shard(collection_path, config) else True


def _has_all_clocks(config: pytest.Config) -> bool:
    """Whether a shard is of the other parts only: one lane of several has the clocks of all."""
    parts = config.getoption("part") or []
    return markers.CLOCK in parts and len(set(parts)) > 1


@functools.cache
def _is_in_shard(file: Path, config: pytest.Config) -> bool:
    shard = config.getoption("shard")
    return not shard or markers.in_shard(file, _files_by_size(), shard)


@functools.cache
def _files_by_size() -> list[Path]:
    return sorted(Path(__file__).parent.rglob("test_*.py"), key=lambda file: (file.stat().st_size, file.name))


def pytest_itemcollected(item: pytest.Item) -> None:
    if isinstance(item, pytest.Function):
        for marker in sorted(markers.markers_of(item)):
            item.add_marker(marker)
    if item.path.name.startswith("check_"):  # in a process that some test started: see tests/triton_interpreter.py
        item.add_marker(markers.DEVICE)


def pytest_collection() -> None:
    gc.disable()  # next to nothing of what is made is garbage


def pytest_collection_finish() -> None:
    gc.enable()
    gc.collect()
    gc.freeze()  # a collection in a test would go through all modules and tests, which takes half a second


# Last: what other plugins have deselected (-m, -k) is none of the parameters to choose among.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if parts := config.getoption("part"):
        clock = markers.CLOCK if _has_all_clocks(config) else None
        wanted = [item for item in items if part_of(item) in parts]
        wanted = [item for item in wanted if part_of(item) == clock or _is_in_shard(item.path, config)]
        kept = set(wanted)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = wanted
        if len(parts) > 1:
            items.sort(key=lambda item: part_of(item) == markers.CLOCK)
    if at_most := config.getoption("at_most"):
        names = markers.sample([item.nodeid for item in items], at_most)
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in names])
        items[:] = [item for item in items if item.nodeid in names]
    devices = torch.cuda.device_count()
    for item in items:
        if item.get_closest_marker("gpu") and devices < 1:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        elif item.get_closest_marker("gpu2") and devices < 2:
            item.add_marker(pytest.mark.skip(reason="needs two CUDA devices"))


@pytest.hookimpl(wrapper=True, tryfirst=True)  # outside the timer of pytest-timeout
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    if item.get_closest_marker(markers.CLOCK):
        _wait_for_quiet(item.config)
    watch = item.config.stash[_WATCH]
    watch.begin()
    try:
        return (yield)
    finally:
        watch.end()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    yield
    if denied := item.config.stash[_WATCH].denied({marker.name for marker in item.iter_markers()}):
        pytest.fail("; ".join(denied) + " (see tests/markers.py)", pytrace=False)


def _wait_for_quiet(config: pytest.Config) -> None:
    """Returns when nobody else holds the lock, which is then ours to the end of the session."""
    file = config.getoption("quiet_when")
    if file and _QUIET not in config.stash:
        config.stash[_QUIET] = open(file)  # noqa: SIM115  (closed, it would be nobody's lock)
        fcntl.flock(config.stash[_QUIET], fcntl.LOCK_EX)


def pytest_unconfigure(config: pytest.Config) -> None:
    if _QUIET in config.stash:
        config.stash[_QUIET].close()


def pytest_sessionfinish() -> None:
    dist.shutdown()
