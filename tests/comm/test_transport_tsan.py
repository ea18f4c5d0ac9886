"""csrc/comm under ThreadSanitizer, with threads as ranks: see tests/tsan/transport.cpp and tests/tsan/messages.cpp.

The programs are built into build/tsan when a source is newer than them. Broken copies of the sources show that they
find what they are there to find.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.markers import needs

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
BUILD = ROOT / "build" / "tsan"
# The reduction is the portable one: what instruction set adds numbers makes no difference to who waits for whom.
SOURCES = {"transport": ("world", "collectives", "progress", "reduce_portable"), "messages": ("mailbox",)}
FLAGS = ["-std=c++17", "-O1", "-g1", "-fsanitize=thread", "-DFASTPAR_X86=0"]
REPORTED = 66  # ThreadSanitizer's exit status


@needs("device")
def compiler() -> str:
    cxx = os.environ.get("CXX", "g++")
    found = shutil.which(cxx) and subprocess.run(
        [cxx, "-print-file-name=libtsan.so"], capture_output=True, text=True, check=True
    ).stdout.startswith("/")
    if not found:
        pytest.skip(f"{cxx} has no libtsan.so")
    return cxx


def build(name: str, overlay: Path | None = None) -> Path:
    """A program; with `overlay`, a folder of changed copies of files in csrc, from those where there are some."""
    cxx, folder = compiler(), overlay or BUILD
    folder.mkdir(parents=True, exist_ok=True)
    folders = [CSRC / "comm", CSRC / "common", CSRC / "runtime", ROOT / "tests/tsan"]
    headers = max(path.stat().st_mtime for folder_ in folders for path in folder_.glob("*.h"))
    changed_headers = overlay is not None and any(overlay.rglob("*.h"))
    objects = []
    for source in [*(CSRC / f"comm/{stem}.cpp" for stem in SOURCES[name]), ROOT / f"tests/tsan/{name}.cpp"]:
        copy = overlay / source.relative_to(CSRC) if overlay and source.is_relative_to(CSRC) else source
        is_changed = overlay is not None and (changed_headers or (copy.exists() and copy != source))
        target = (folder if is_changed else BUILD) / f"{source.stem}.o"
        if not target.exists() or target.stat().st_mtime < max(headers, source.stat().st_mtime):
            includes = [f"-I{overlay}"] * bool(overlay) + [f"-I{CSRC}"]
            file = copy if copy.exists() else source
            subprocess.run([cxx, *FLAGS, *includes, "-c", str(file), "-o", str(target)], check=True)
        objects.append(str(target))
    program = folder / name
    subprocess.run([cxx, "-fsanitize=thread", *objects, "-o", str(program)], check=True)
    return program


def run(program: Path, rounds: int, seed: int = 1) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(program), str(rounds), str(seed)], capture_output=True, text=True, timeout=240)


@pytest.fixture(scope="module", params=list(SOURCES))
def program(request: pytest.FixtureRequest) -> Path:
    return build(request.param)


def check_quiet(done: subprocess.CompletedProcess[str], rounds: int) -> None:
    assert done.returncode == 0, done.stderr[-6000:]
    assert done.stderr == ""
    assert done.stdout.splitlines() == [f"{n} ranks: {rounds} rounds" for n in (2, 3, 4)]


def test_no_data_race_and_no_wrong_result_in_random_calls(program):
    check_quiet(run(program, 300), 300)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 12))
def test_no_data_race_in_many_more(program, seed):
    check_quiet(run(program, 2000, seed), 2000)


MUTATIONS = {
    "the phase is published without release order": (
        "comm/world.cpp",
        "own.phase.store(phase_, std::memory_order_seq_cst)",
        "own.phase.store(phase_, std::memory_order_relaxed)",
    ),
    "waits have no acquire order": (
        "comm/world.cpp",
        "if (theirs.load(std::memory_order_acquire) >= phase) return;",
        "if (theirs.load(std::memory_order_relaxed) >= phase) return;",
    ),
    "the last peer is not waited for": (
        "comm/world.cpp",
        "for (int step = 1; step < size(); ",
        "for (int step = 2; step < size(); ",
    ),
    "one exchange buffer instead of two": (
        "comm/world.h",
        "slots_offset_ + (phase & 1) * slot_stride_",
        "slots_offset_",
    ),
    "one header instead of two": ("comm/world.h", "control(rank).header[phase & 1]", "control(rank).header[0]"),
    "a letter is sent without release order": (
        "comm/mailbox.cpp",
        "out.sent.store(++outbox.sent, std::memory_order_seq_cst)",
        "out.sent.store(++outbox.sent, std::memory_order_relaxed)",
    ),
    "letters are taken without acquire order": (
        "comm/mailbox.cpp",
        "const uint64_t sent = in.sent.load(std::memory_order_acquire);",
        "const uint64_t sent = in.sent.load(std::memory_order_relaxed);",
    ),
    "blocks are given back without release order": (
        "comm/mailbox.cpp",
        "compare_exchange_weak(first, block, std::memory_order_release, ",
        "compare_exchange_weak(first, block, std::memory_order_relaxed, ",
    ),
    "blocks are taken back without acquire order": (
        "comm/mailbox.cpp",
        "returned.exchange(0, std::memory_order_acquire)",
        "returned.exchange(0, std::memory_order_relaxed)",
    ),
    "a block that another thread gives back meanwhile is lost": (
        "comm/mailbox.cpp",
        "while (!returned.compare_exchange_weak(first, block, std::memory_order_release, std::memory_order_relaxed));",
        "while (returned.store(block, std::memory_order_release), false);",
    ),
    "a letter goes back before the next one is there": (
        "comm/mailbox.cpp",
        "if (inbox.letter != 0) give_back(base(peer), inbox.letter);\n    inbox.letter = next;",
        "inbox.letter = next;\n    give_back(base(peer), inbox.letter);",
    ),
    "a tensor goes back when its message does": (
        "comm/mailbox.cpp",
        "mail.tensors.push_back(",
        "if (block != 0) give_back(base(peer), block);\n    mail.tensors.push_back(",
    ),
}
QUICK = ("the phase is published without release order", "blocks are given back without release order")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in MUTATIONS]
)
def test_a_broken_transport_is_found(name, tmp_path):
    file, right, wrong = MUTATIONS[name]
    text = (CSRC / file).read_text()
    assert text.count(right) == 1, f"{file} no longer says {right!r}"
    (tmp_path / file).parent.mkdir()
    (tmp_path / file).write_text(text.replace(right, wrong))
    done = run(build("messages" if "mailbox" in file else "transport", tmp_path), 100)
    assert done.returncode != 0, "not found"
    if "order" in name:  # x86 orders the accesses all the same: only the sanitizer sees it
        assert done.returncode == REPORTED
        assert "data race" in done.stderr
