"""Files of csrc/runtime under ThreadSanitizer: see tests/tsan/files.cpp. Broken copies show what it finds."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.comm.test_transport_tsan import FLAGS, ROOT, compiler

CSRC = ROOT / "csrc"
SOURCES = ["runtime/async_file", "runtime/io_ring", "runtime/checksum", "runtime/checksum_portable"]
SOURCES += ["common/cpu_capability"]


def build(folder: Path, overlay: Path | None = None) -> Path:
    """The program, with the files in `overlay` instead of those of csrc with the same names."""
    program = folder / "files"
    copies = [overlay / f"{source}.cpp" if overlay else CSRC / f"{source}.cpp" for source in SOURCES]
    files = [copy if copy.exists() else CSRC / f"{source}.cpp" for copy, source in zip(copies, SOURCES, strict=True)]
    files.append(ROOT / "tests/tsan/files.cpp")
    subprocess.run([compiler(), *FLAGS, f"-I{CSRC}", *map(str, files), "-o", str(program)], check=True)
    return program


def run(program: Path, rounds: int, seed: int = 1) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(program), str(rounds), str(seed)], capture_output=True, text=True, timeout=240)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("files"))


def check_quiet(done: subprocess.CompletedProcess[str], rounds: int) -> None:
    assert done.returncode == 0, done.stderr[-6000:]
    assert done.stderr == ""
    threads, ring = done.stdout.splitlines()
    assert threads == f"threads: {rounds} rounds"
    assert ring == f"io_uring: {rounds} rounds" or ring.startswith("io_uring: refused")


def test_no_data_race_and_no_wrong_byte_in_random_transfers(program: Path) -> None:
    check_quiet(run(program, 100), 100)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 8))
def test_no_data_race_in_many_more(program: Path, seed: int) -> None:
    check_quiet(run(program, 500, seed), 500)


MUTATIONS = {
    "a block is finished without the lock": (
        "void AsyncFile::finish(const Block& block, int64_t code) {\n  const std::lock_guard<std::mutex> lock(mutex_);",
        "void AsyncFile::finish(const Block& block, int64_t code) {",
    ),
    "a transfer does not wait for the one that it comes after": (
        "if (predecessor != requests_.end() && !predecessor->second->is_done) {",
        "if (false) {",
    ),
    "a transfer is done when its last block has begun": (
        "if (++request.moved == request.blocks) complete(block.request);",
        "if (++request.moved == request.blocks - (request.blocks > 1)) complete(block.request);",
    ),
    "blocks lie one beside their place": (
        "block->offset = transfer.offset + start;",
        "block->offset = transfer.offset + start + (transfer.is_write ? kFileAlignment : 0);",
    ),
}


@pytest.mark.parametrize(
    "name", [name if "without the lock" in name else pytest.param(name, marks=pytest.mark.slow) for name in MUTATIONS]
)
def test_a_broken_file_is_found(name: str, tmp_path: Path) -> None:
    right, wrong = MUTATIONS[name]
    text = (CSRC / "runtime/async_file.cpp").read_text()
    assert text.count(right) == 1, f"async_file.cpp no longer says {right!r}"
    (tmp_path / "runtime").mkdir()
    (tmp_path / "runtime/async_file.cpp").write_text(text.replace(right, wrong))
    done = run(build(tmp_path, tmp_path), 50)
    assert done.returncode != 0, "not found"
    if "without the lock" in name:
        assert "data race" in done.stderr  # whatever then came of it: a lost count also keeps a transfer from ending
