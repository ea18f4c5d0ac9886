"""The tool of `make breaks` plants, notices and takes out again; and its table is one of this tree."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from tests import programs

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return programs.load("tools/planted_breaks.py")


class TwoFiles:
    """A copy with one source and tests that need it to say `x = 1`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.source = folder, folder / "source.py"
        self.source.write_text("x = 1\ny = 2\n")
        self.runs = 0

    def find(self, text: str) -> list[Path]:
        return [self.source] * self.source.read_text().count(text)

    def test_files(self, name: str) -> list[str]:
        return [name] if name == "test_x.py" else []

    def pytest(self, arguments: list[str]) -> tuple[int, str]:
        self.runs += 1
        is_right = "x = 1" in self.source.read_text()
        shown = "FAILED tests/interpreted/check_x.py::test_inner - AssertionError\n"  # of a run within a test
        return (0, "1 passed") if is_right else (1, f"{shown}FAILED test_x.py::test_one[a b] - AssertionError")


@pytest.mark.parametrize(
    ("old", "new", "tests", "verdict", "by"),
    [
        ("x = 1", "x = 3", "test_x.py", "caught", "test_x.py::test_one[a b]"),
        ("y = 2", "y = 3", "test_x.py one", "missed", "test_x.py one"),
        ("z = 2", "z = 3", "test_x.py", "gone", "its text is there 0 times"),
        (" = ", " == ", "test_x.py", "gone", "its text is there 2 times"),
        ("x = 1", "x = 3", "test_z.py", "gone", "there is no test_z.py"),
    ],
)
def test_a_break_is_caught_missed_or_gone_and_taken_out(
    tool: ModuleType, tmp_path: Path, old: str, new: str, tests: str, verdict: str, by: str
) -> None:
    copy = TwoFiles(tmp_path)
    outcome = tool.try_break(copy, tool.Break("a break", "part", old, new, (tests,)))
    assert (outcome.verdict, outcome.by) == (verdict, by)
    assert copy.source.read_text() == "x = 1\ny = 2\n"


def test_a_test_that_fails_without_the_break_proves_nothing(tool: ModuleType, tmp_path: Path) -> None:
    copy = TwoFiles(tmp_path)
    copy.source.write_text("x = 2\ny = 2\n")
    assert tool.try_break(copy, tool.Break("a break", "part", "y = 2", "y = 3", ("test_x.py",))).verdict == "unsure"


def test_results_are_a_table_of_tests_and_of_what_was_missed(tool: ModuleType) -> None:
    planted = tool.Break("one is two", "comm", "1", "2", ("test_x.py",))
    caught = tool.Outcome(planted, "caught", "tests/test_x.py::test_one[a b]")
    missed = tool.Outcome(planted, "missed", "test_x.py")
    rows = tool.table([caught, missed]).splitlines()[2:]
    assert rows == ["| comm | one is two | `test_one` |", "| comm | one is two | **missed** (test_x.py) |"]


def test_a_page_keeps_the_rows_of_breaks_that_were_not_run(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    breaks = [tool.Break(name, "comm", "1", "2", ("test_x.py",)) for name in ("one", "two", "three")]
    old = tool.Break("gone since", "comm", "1", "2", ("test_x.py",))
    monkeypatch.setattr(tool, "BREAKS", breaks)
    first = tool.page([tool.Outcome(b, "missed", "test_x.py") for b in (breaks[2], breaks[0], old)])
    second = tool.page([tool.Outcome(b, "caught", "test_x.py::test_y") for b in breaks[:2]], first)
    rows = ["| comm | one | `test_y` |", "| comm | two | `test_y` |", "| comm | three | **missed** (test_x.py) |"]
    assert second.splitlines()[-4:] == ["|---|---|---|", *rows]
    assert second.startswith("# Planted breaks\n")


def test_the_breaks_of_the_table_are_those_of_this_tree(tool: ModuleType) -> None:
    files = [f for top, names in tool.SOURCES.items() for name in names for f in (ROOT / top).rglob(name)]
    text = "\n".join(file.read_text() for file in dict.fromkeys(file.resolve() for file in files))
    gone = [planted.name for planted in tool.BREAKS if text.count(planted.old) != 1]
    assert not gone, f"tools/breaks.py lags behind; not there once: {gone}"
    assert len(tool.BREAKS) >= 60
    assert len({planted.name for planted in tool.BREAKS}) == len(tool.BREAKS)
    names = {file.name for file in (ROOT / "tests").rglob("test_*.py")}
    wanted = {test.partition(" ")[0] for planted in tool.BREAKS for test in planted.tests}
    assert wanted <= names, f"no such test files: {sorted(wanted - names)}"
