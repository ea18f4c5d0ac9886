"""The markers that `tests/markers.py` finds are those of what a test reaches, and a test that has too few fails."""

from __future__ import annotations

import functools
import itertools
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import dist, markers
from tests.comm import fault_ranks
from tests.emulated import emulated
from tests.timing import assert_within
from tests.triton_interpreter import run_interpreted

ROOT = Path(__file__).resolve().parents[2]
DEADLINE = 2.0


def on_ranks() -> None:
    dist.run_ranks(2, dist.say_done)


def in_a_table() -> None:
    TABLE["ranks"]()


def imported_inside() -> None:
    from tests.triton_aot import compile_for

    compile_for(None, {}, {}, ("cuda", 90, 32))


def looks_at_the_clock() -> float:
    return (lambda: time.monotonic())()


def waits(timeout: float = DEADLINE) -> None:
    raise NotImplementedError


def waits_long() -> None:
    waits_at_most(timeout=60.0)


def waits_at_most(timeout: float) -> None:
    raise NotImplementedError


@functools.cache
def remembered() -> None:
    on_ranks()


@emulated
def on_the_emulated_device() -> None:
    raise NotImplementedError


class Machine:
    def run(self) -> None:
        run_interpreted("check_rms_norm.py")


TABLE: dict[str, Callable[[], None]] = {"ranks": remembered}
MACHINE = Machine()


@pytest.mark.parametrize(
    ("root", "wanted"),
    [
        (on_ranks, {"ranks"}),
        (in_a_table, {"ranks"}),
        (functools.partial(remembered), {"ranks"}),
        (imported_inside, {"device"}),
        (on_the_emulated_device, {"device"}),
        (lambda: MACHINE.run(), {"device"}),
        (looks_at_the_clock, {"clock"}),
        (lambda: assert_within(1.0, looks_at_the_clock), {"clock"}),
        (waits, {"clock"}),
        (waits_long, set()),
        (fault_ranks.FaultRanks, {"clock", "ranks"}),
        (markers.needs, set()),
    ],
)
def test_markers_are_those_of_everything_that_can_be_reached(root: object, wanted: set[str]) -> None:
    assert markers.reach(root) == wanted


HIDDEN = """
import os
import subprocess
import sys
import time

import pytest
import torch

from tests import dist

torch.cuda.device_count = lambda: 1  # or tests for a GPU are skipped
started = getattr(dist, "run_" + "ranks")
environment = {**os.environ, "TRITON_" + "INTERPRET": "1"}


@pytest.fixture
def device():
    subprocess.run([sys.executable, "-c", ""], env=environment)


def test_ranks():
    started(1, dist.say_done)


def test_device(device):
    pass


def test_clock():
    getattr(__import__("time"), "perf_" + "counter")()


@pytest.mark.ranks
@pytest.mark.device
@pytest.mark.clock
def test_all(device):
    test_ranks()
    test_clock()


@pytest.mark.gpu
def test_on_a_gpu(device):
    pass
"""


@pytest.mark.ranks
@pytest.mark.expensive
def test_a_test_that_does_what_its_markers_deny_fails(tmp_path: Path) -> None:
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "test_hidden.py").write_text(HIDDEN)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-p", "no:cacheprovider"]
    command += ["--import-mode=importlib", "--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml"), str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    for said in ("starts ranks", "looks at a clock", "runs the tools of device code"):
        assert done.stdout.count(f"\nit {said}, and has no marker") == 1, done.stdout
    assert "5 passed, 3 errors" in done.stdout


def test_a_test_that_is_not_expensive_may_not_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = iter([0.0, markers.CHEAP_S + 1])
    monkeypatch.setattr(markers, "_processor_time", lambda: next(taken))
    watch = markers.Watch(lambda: 0)
    watch.begin()
    watch.end()
    monkeypatch.setattr(markers, "_processor_time", lambda: markers.CHEAP_S + 1)
    assert [text for text in watch.denied({"timeout"}) if "expensive" in text]
    for enough in ("expensive", "ranks", "device", "clock", "slow"):
        assert watch.denied({enough}) == []


def test_a_sample_has_some_parameters_of_every_test_and_is_the_same_every_time() -> None:
    names = ["a.py::one", *(f"a.py::many[{x}-{y}]" for x in range(4) for y in "uv"), "a.py::few[0]", "b.py::few[0]"]
    kept = markers.sample(names, 3)
    assert kept >= {"a.py::one", "a.py::few[0]", "b.py::few[0]"}
    many = {name for name in kept if "many" in name}
    assert len(many) == 3
    assert {name[-2] for name in many} == {"u", "v"}, "not every value of each parameter"
    assert markers.sample(names[::-1], 3) == kept


@pytest.mark.parametrize("count", [1, 2, 3])
def test_shards_are_all_files_once(count: int) -> None:
    files = [Path(f"tests/test_{letter}.py") for letter in "abcdefg"]
    shards = [[file for file in files if markers.in_shard(file, files, f"{i + 1}/{count}")] for i in range(count)]
    assert sorted(itertools.chain(*shards)) == files
    assert max(map(len, shards)) - min(map(len, shards)) <= 1
