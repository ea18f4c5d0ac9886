"""Plant one break after the other in a scratch copy, run the tests that should notice it, and say which were missed.

    make breaks                                          all of tools/breaks.py: up to some minutes for each
    make breaks ARGS="--part zero"                       those of one part
    make breaks ARGS="'an expert reads'"                 those with these words in their names
    make breaks ARGS="--table docs/planted_breaks.md"    write each result into the table, which keeps what is not run

A break is caught if a test fails that passes without it; `broken` says that the files could not be collected or built,
`gone` that its text, or its test, is not there once. The copy has what git knows of the working tree, and its library;
of csrc/ one file is compiled again. Tests run in forks of a process that has imported torch already.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.testing  # noqa: F401  (what takes long to import, once for all)

sys.path.insert(0, str(Path(__file__).resolve().parent))
from breaks import BREAKS, Break

ROOT = Path(__file__).resolve().parents[1]
SOURCES = {"fastpar": ("*.py",), "kernels": ("*.py",), "csrc": ("*.cpp",)}
_TITLE = """# Planted breaks

Small mistakes in all parts of the package, each planted alone into a copy of the tree, and a test that failed with it
and passed without it. `make breaks` plants them again; `tools/breaks.py` has their text. A row in bold is of one that
no test of those it names has noticed.
"""
LIMIT_S = 900  # of one test file: a break may hang ranks until their deadline


@dataclass(frozen=True)
class Outcome:
    """What became of a break (caught, missed, unsure, broken or gone), and by which test, or why."""

    planted: Break
    verdict: str
    by: str
    seconds: float = 0.0


class Copy:
    """A scratch copy of the working tree."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
        for path in [*(ROOT / name for name in listed if name), ROOT / "fastpar" / "_C.so"]:
            if path.is_file():
                target = folder / path.relative_to(ROOT)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, target)  # with its time, by which Python knows what is compiled
        kernels = folder / "fastpar" / "kernels"
        if not kernels.exists():  # an editable install maps the package to where the copy comes from
            kernels.symlink_to(folder / "kernels" / "triton")

    def find(self, text: str) -> list[Path]:
        """The files in which a text is, once for each time."""
        files = [f for top, names in SOURCES.items() for name in names for f in sorted((self.folder / top).rglob(name))]
        real = dict.fromkeys(file.resolve() for file in files)
        return [file for file in real for _ in range(file.read_text().count(text))]

    def test_files(self, name: str) -> list[str]:
        return [str(file.relative_to(self.folder)) for file in sorted((self.folder / "tests").rglob(name))]

    def build(self, source: Path) -> str:
        """Compile one file as the working tree's was compiled, and link it with the objects there: what went wrong."""
        native = _native()
        options = native.options_from_environment()
        original = ROOT / source.relative_to(self.folder)
        kinds = ("*.cpp", "*.cu") if options.cuda_archs else ("*.cpp",)
        sources = [path for kind in kinds for path in (ROOT / "csrc").rglob(kind) if "emulation" not in path.parts]
        objects = {path: native.object_of(path, options) for path in sources}
        changed = objects[original] = self.folder / "changed.o"
        compile_ = [
            argument.replace(str(ROOT / "csrc"), str(self.folder / "csrc"))
            for argument in native._compile_command(original, changed, options)
        ]
        library = self.folder / "fastpar" / "_C.so"
        for command in (compile_, native._link_command([*objects.values()], library, options, native._run)):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                return done.stderr[-300:]
        return ""

    def pytest(self, arguments: Sequence[str]) -> tuple[int, str]:
        """Exit status and output of the tests; 124 at the limit."""
        output = self.folder / "output"
        child = os.fork()
        if child == 0:
            os.setsid()
            os.chdir(self.folder)
            with output.open("wb") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            sys.path[:0] = [str(self.folder)]
            sys.dont_write_bytecode = True
            os.environ.update(PYTHONDONTWRITEBYTECODE="1", PYTHONPATH=str(self.folder))
            signal.alarm(LIMIT_S)
            os._exit(int(pytest.main(["-q", "-p", "no:cacheprovider", *arguments])))
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # what it has started and left behind
        return 124 if status == -signal.SIGALRM else status, output.read_text(errors="replace")


def _native() -> Any:
    """_build/native.py."""
    spec = importlib.util.spec_from_file_location("native", ROOT / "_build" / "native.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["native"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def try_break(copy: Copy, planted: Break) -> Outcome:
    """Plant a break, run its tests until one fails, and take it out again."""
    found = copy.find(planted.old)
    if len(found) != 1:
        return Outcome(planted, "gone", f"its text is there {len(found)} times")
    (file,) = found
    text, times, started = file.read_text(), file.stat(), time.monotonic()
    file.write_text(text.replace(planted.old, planted.new))
    try:
        is_native = file.suffix != ".py"
        if is_native and (failure := copy.build(file)):
            return Outcome(planted, "broken", failure)
        verdict, by = _run_tests(copy, planted.tests)
    finally:
        file.write_text(text)
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
        if is_native:
            shutil.copy2(ROOT / "fastpar" / "_C.so", copy.folder / "fastpar" / "_C.so")
    if verdict == "caught" and copy.pytest([by])[0] != 0:
        verdict, by = "unsure", f"{by} fails without it too"
    return Outcome(planted, verdict, by, time.monotonic() - started)


def _run_tests(copy: Copy, tests: Sequence[str]) -> tuple[str, str]:
    for test in tests:
        name, _, keyword = test.partition(" ")
        files = copy.test_files(name)
        if not files:
            return "gone", f"there is no {name}"
        selection = ["-x", "-m", "not slow and not gpu", *files, *(["-k", keyword] if keyword else [])]
        status, output = copy.pytest(selection)
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+::.+?)(?: - |$)", output, re.MULTILINE)
        # A failure of interpreted kernels shows the output of a run of its own before it.
        if ours := [node for node in failed if node.split("::")[0] in files]:
            return "caught", ours[0]
        if status == 5:
            return "gone", f"{name} has no tests with {keyword}"
        if status != 0:
            return "broken", output[-300:]
    return "missed", "; ".join(tests)


def table(outcomes: Sequence[Outcome]) -> str:
    """Markdown: a row for each break."""
    lines = ["| part | planted break | noticed by |", "|---|---|---|"]
    for outcome in outcomes:
        test = outcome.by.split("::")[-1].split("[")[0]
        by = f"`{test}`" if outcome.verdict == "caught" else f"**{outcome.verdict}** ({outcome.by})"
        lines.append(f"| {outcome.planted.part} | {outcome.planted.name} | {by} |")
    return "\n".join(lines) + "\n"


def page(outcomes: Sequence[Outcome], before: str = "") -> str:
    """The table below its title; breaks that were not run, but still are in tools/breaks.py, keep their rows."""
    lines = [*before.splitlines(), *table(outcomes).splitlines()]
    rows = {line.split(" | ")[1]: line for line in lines if " | " in line}
    known = [rows[b.name] for b in BREAKS if b.name in rows]
    return "\n".join([_TITLE, *table([]).splitlines(), *known]) + "\n"


def main() -> int:
    """0 if every break was caught."""
    parser = argparse.ArgumentParser(description="plant breaks, and see the tests notice them")
    parser.add_argument("words", nargs="*", help="breaks with these words in their names")
    parser.add_argument("--part", help="those of one part: " + ", ".join(dict.fromkeys(b.part for b in BREAKS)))
    parser.add_argument("--table", type=Path, metavar="FILE", help="write a Markdown table of the results")
    flags = parser.parse_args()
    wanted = [b for b in BREAKS if flags.part in (None, b.part) and all(word in b.name for word in flags.words)]
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="breaks-") as folder:
        copy = Copy(Path(folder))
        for planted in wanted:
            outcome = try_break(copy, planted)
            outcomes.append(outcome)
            print(
                f"{outcome.verdict:7} {outcome.seconds:4.0f} s  {planted.part}: {planted.name} ({outcome.by})",
                flush=True,
            )
            if flags.table:
                before = flags.table.read_text() if flags.table.exists() else ""
                flags.table.write_text(page(outcomes, before))
    caught = sum(outcome.verdict == "caught" for outcome in outcomes)
    print(f"{caught} of {len(outcomes)} caught")
    return 0 if caught == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
