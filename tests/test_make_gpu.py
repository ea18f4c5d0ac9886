"""`make gpu`: its stages, what it says without a GPU, and that it goes on after a stage that fails."""

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "tools" / "run_gpu.sh"

# Stands in for Python on a machine with a GPU: the build fails, the tests never end, everything else is fine.
FAKE_PYTHON = """#!/bin/sh
case "$*" in
  *native.py*) exit 3 ;;
  *pytest*) exec sleep 60 ;;
  *) echo "ran: $*" ;;
esac
"""


def run(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "PYTHON": sys.executable, **environment},
    )


def test_dry_run_lists_every_stage_and_runs_none() -> None:
    done = run("--dry-run", PEERS="/some/wheels")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for words in (
        "_build/native.py",
        "--no-index --no-deps",
        "fastpar.cli doctor",
        "pytest -q -p no:cacheprovider -m gpu tests/test_gpu.py",
        "compute-sanitizer --error-exitcode 9 --print-limit 20 --tool memcheck",
        "--tool racecheck --kernel-name kns=fastpar",
        "bench cross_entropy --device cuda --dtype bf16 --ranks 1",
        "--tokens 8192 --vocab 32000,128256,262144",
        "--vocab 32768,131072,262144 --virtual-ranks 2",
        "bench linear_cross_entropy --device cuda",
        "bench symmetric --device cuda --dtype bf16 --ranks 1 --blocks 5 --iters 4 --virtual-ranks 2,4,8",
        "bench overlap_gpu --device cuda",
        "--op gather --link pcie",
        "bench moe --device cuda",
        "--experts 128 --top-k 8 --passes forward,both",
        "bench permute --device cuda",
        "bench moe_route --device cuda --dtype bf16 --ranks 1 --blocks 5 --iters 4 --dtype fp32",
        "bench moe_push --device cuda",
        "bench rms_norm",
        "bench swiglu",
        "all of them within 480 s",
    ):
        assert any(words in line for line in lines), words
    assert "saved" not in done.stdout


def test_make_target_passes_its_variables_on() -> None:
    done = subprocess.run(
        ["make", "-s", "-C", str(ROOT), "gpu", "DRY_RUN=1", f"PYTHON={sys.executable}", "BUDGET=100"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "all of them within 100 s"


def test_without_a_gpu_it_says_so_and_runs_nothing() -> None:
    started = time.monotonic()
    done = run(CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert "sees no CUDA device" in done.stderr
    assert "---" not in done.stdout
    assert time.monotonic() - started < 60


def test_a_stage_that_fails_or_hangs_is_reported_and_the_next_ones_run(tmp_path: Path) -> None:
    fake = tmp_path / "python"
    fake.write_text(FAKE_PYTHON)
    fake.chmod(0o755)
    done = run(PYTHON=str(fake), BUDGET="6", PATH=f"{tmp_path}:/usr/bin:/bin")
    assert done.returncode == 1
    assert "ran: -m fastpar.cli doctor" in done.stdout
    summary = done.stdout.split("--- summary")[1]
    verdicts = {line[8:46].strip(): line[46:].strip() for line in summary.splitlines()[1:]}
    assert verdicts["build"] == "FAILED, exit status 3"
    assert verdicts["doctor"] == "ok"
    assert verdicts["tests"] == "STOPPED after its time"
    assert verdicts["bench cross_entropy: one rank"] == "not run: out of time"
