"""`make gpu`: its plans, what it says without a GPU, and that whatever fails, hangs or crashes costs nothing else."""

import importlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from bench.bench_linear_cross_entropy import LinearCrossEntropyCase
from bench.harness import Rank

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tools" / "run_gpu.py"
PLANS = ("check", "bench", "profile", "changed-1", "changed-2")

# Stands in for Python on a machine with a GPU: no library loads, the build fails, and the tests of one file fail, of
# one hang, of one crash; one bench fails. Everything else is fine.
FAKE_PYTHON = r"""#!/bin/bash
junit=$(grep -o -- '--junitxml=[^ ]*' <<<"$*" | cut -d= -f2)
report() { echo "<testsuites><testsuite>$1</testsuite></testsuites>" >"$junit"; }
case "$*" in
  *cuda_archs*) echo "no library"; exit 1 ;;
  *native.py*) echo "no compiler"; exit 3 ;;
  *test_gpu_moe.py)
    report '<testcase name="test_a"><failure message="wrong sum: 3 &lt; 4">long</failure></testcase>'
    echo "1 failed, 1 passed"; exit 1 ;;
  *test_gpu_symmetric.py)
    stop() { report '<testcase name="test_wait"><error message="KeyboardInterrupt"/></testcase>'; exit 2; }
    trap stop INT
    echo $$ >"$(dirname "$0")/pid"; touch "$(dirname "$0")/hangs"; echo waiting; sleep 60 & wait ;;
  *test_gpu_router.py) kill -SEGV $$ ;;
  *pytest*) report '<testcase name="test_fine"/>'; echo "1 passed" ;;
  *"bench linear_cross_entropy"*) echo "wrong result"; exit 1 ;;
  *) echo "ran: $*" ;;
esac
"""

# The script under a clock that stands still until the tests above hang, and is then past every limit: what ends them
# is that they hang, however long a busy machine took to come to them. (subprocess has the real clock: it is imported.)
FAKE_CLOCK = """
import os, runpy, subprocess, sys, time
hangs, sys.argv = sys.argv[1], sys.argv[2:]
time.monotonic = lambda: 1e3 if os.path.exists(hangs) else 0.0
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(*arguments: str, before: "tuple[str, ...]" = (), **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *before, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "PYTHON": sys.executable, **environment},
    )


def arguments_of(tmp_path: Path) -> list[str]:
    return ["--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]


def fake(tmp_path: Path) -> str:
    path = tmp_path / "python"
    path.write_text(FAKE_PYTHON)
    path.chmod(0o755)
    return str(path)


def stages(plan: str) -> list[list[str]]:
    """Name, limit and command of every stage of a plan."""
    done = run("--plan", plan, "--dry-run")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()[:-1]
    return [[line[:34].strip(), *shlex.split(line[34:].replace(" s  ", " ", 1))] for line in lines]


@pytest.mark.parametrize("plan", PLANS)
def test_the_limits_of_a_plan_leave_time_to_report(plan: str) -> None:
    listed = stages(plan)
    assert sum(int(limit) for _, limit, *_ in listed) < 560
    assert len({name for name, *_ in listed}) == len(listed), "--only could not tell them apart"


def test_both_calls_after_a_change_fit_the_time_of_a_device() -> None:
    assert sum(int(limit) for plan in PLANS[3:] for _, limit, *_ in stages(plan)) < 14 * 60


@pytest.mark.parametrize("plan", ["check", "changed-1"])
def test_every_gpu_test_runs_once(plan: str) -> None:
    listed = [word for name, _, *words in stages(plan) if name in ("smoke", "tests", "tests-alone") for word in words]
    files = sorted(word for word in listed if word.startswith("tests/"))
    assert files == sorted(
        str(p.relative_to(ROOT)) for p in ROOT.glob("tests/**/test_*.py") if "mark.gpu" in p.read_text()
    )
    assert "tests/gpu/test_gpu_symmetric.py" in files


@pytest.mark.parametrize(("plan", "stage"), [("check", "tests"), ("profile", "memcheck")])
def test_the_files_that_take_longest_start_first(plan: str, stage: str, tmp_path: Path) -> None:
    (tmp_path / "compute-sanitizer").symlink_to("/bin/true")
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = run("--plan", plan, "--only", stage, "--dry-run", PATH=path)
    files = [word for word in done.stdout.splitlines()[0].split() if word.startswith("tests/")]
    assert files[:4] == [f"tests/gpu/test_gpu_{name}.py" for name in ("attention", "attention_torch", "moe", "router")]
    assert files[4:] == sorted(files[4:])


def test_the_short_linear_cross_entropy_leaves_out_what_compiles_and_tunes_for_long() -> None:
    (words,) = [words for name, _, *words in stages("check") if name == "linear_cross_entropy:short"]
    only = words[words.index("--only") + 1].split(",")
    providers = LinearCrossEntropyCase("fp32", 8, 8, 16).build(Rank())
    names = [p.name for p in providers if p.kind != "roof"] + ["Liger", "cut-cross-entropy"]  # these of a GPU alone
    assert all(any(part in name for name in names) for part in only), "names what is not there"
    left_out = [name for name in names if not any(part in name for part in only)]
    assert left_out == ["torch.compile of it", "cut-cross-entropy"]


@pytest.mark.parametrize("plan", PLANS)
def test_benches_are_called_as_they_can_be(plan: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Flags that a bench does not know, or a device that it does not run on, would show on the machine with the GPU."""
    commands = [words[words.index("bench") + 1 :] for _, _, *words in stages(plan) if "fastpar.cli" in words]
    assert commands or plan == "profile"
    for name, *flags in commands:
        assert importlib.import_module(f"bench.bench_{name}").main(flags) == 2, name
        assert "torch sees no CUDA device here" in capsys.readouterr().err, name


def test_a_machine_without_our_environment_takes_the_python_on_its_path(tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    for name in ("run_gpu.py", "find_python.sh"):
        shutil.copy(ROOT / "tools" / name, tmp_path / "tools" / name)
    (tmp_path / "tests").mkdir()
    (tmp_path / "bin").mkdir()
    (python := tmp_path / "bin" / "python3").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    outside = {
        name: value for name, value in os.environ.items() if name not in ("PYTHON", "VIRTUAL_ENV", "CONDA_PREFIX")
    }
    path = os.pathsep.join([str(python.parent), os.environ["PATH"]])
    command = [sys.executable, str(tmp_path / "tools" / "run_gpu.py"), "--dry-run", "--only", "build"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**outside, "PATH": path})
    assert done.returncode == 0, done.stderr
    assert f"{python} _build/native.py" in done.stdout


def test_stages_can_be_picked_by_name_and_family() -> None:
    done = run("--plan", "bench", "--only", "symmetric,permute", "--dry-run")
    assert [line.split(" ")[0] for line in done.stdout.splitlines()[:-1]] == ["permute", "symmetric", "symmetric:norm"]
    done = run("--only", "symetric", "--dry-run")
    assert done.returncode == 2
    assert "--only symetric: plan check has build, cross_entropy" in done.stderr


def test_make_target_passes_its_variables_on() -> None:
    done = subprocess.run(
        [
            "make",
            "-s",
            "-C",
            str(ROOT),
            "gpu",
            "DRY_RUN=1",
            f"PYTHON={sys.executable}",
            "BUDGET=100",
            "ONLY=build,tests",
        ],
        capture_output=True,
        text=True,
        timeout=60,
        env={name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "ARGS")},
    )
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()[:-1]] == ["build", "tests"]
    assert done.stdout.splitlines()[-1].endswith("all of them within 100 s")


def test_without_a_gpu_it_says_so_and_runs_nothing(tmp_path: Path) -> None:
    started = time.monotonic()
    done = run("--out", str(tmp_path), CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert "sees no CUDA device" in done.stderr
    assert "---" not in done.stdout
    assert not list(tmp_path.iterdir())
    assert time.monotonic() - started < 60


@pytest.mark.expensive
def test_what_fails_hangs_or_crashes_is_reported_last_and_costs_nothing_else(tmp_path: Path) -> None:
    out = tmp_path / "out"
    clock = ("-c", FAKE_CLOCK, str(tmp_path / "hangs"))
    path = f"{tmp_path}:/usr/bin:/bin"
    done = run(*arguments_of(tmp_path), before=clock, PYTHON=fake(tmp_path), PATH=path)
    assert done.returncode == 1, done.stdout
    summary = (out / "summary.txt").read_text()
    assert done.stdout.endswith(summary)
    verdicts = {line[9:43].strip(): line[44:].strip() for line in summary.splitlines() if line[:5].strip().isdigit()}
    assert verdicts["roofs"] == "ok"
    assert verdicts["build"] == "FAILED, exit status 3"
    assert verdicts["tests"].startswith("FAILED: 2 of ")
    assert verdicts["tests-alone"].startswith("FAILED: 2 of ")  # one hangs, and the next has no time left
    assert verdicts["cross_entropy:short"] == "NOT RUN: out of time"  # the file that hangs took the rest
    last = summary.splitlines()[-3:]
    assert last[0] == "test_gpu_moe::test_a: wrong sum: 3 < 4"
    assert last[1] == "test_gpu_router: ended before it could say what failed; see its log"
    assert last[2] == "test_gpu_symmetric::test_wait: KeyboardInterrupt"  # it was asked to end, and said where it was
    with tarfile.open(out / "results.tgz") as archive:
        names = archive.getnames()
    assert {"junit/test_gpu_moe.xml", "logs/test_gpu_moe.txt", "logs/build.txt"} <= set(names)
    assert any(name.startswith("results/") for name in names)
    assert "no compiler" in (out / "log.txt").read_text()


def test_a_bench_that_fails_does_not_keep_the_next_from_running(tmp_path: Path) -> None:
    out = tmp_path / "out"
    work = ("--work", str(tmp_path / "work"))
    done = run("--only", "linear_cross_entropy,optimizer", *work, PYTHON=fake(tmp_path), OUT=str(out))
    assert done.returncode == 1
    assert "wrong result" in done.stdout
    assert "ran: -m fastpar.cli bench optimizer --device cuda" in done.stdout
    assert (out / "results.tgz").exists()  # the variable OUT names the folder


@pytest.mark.parametrize("sigint", [signal.SIG_DFL, signal.SIG_IGN], ids=["", "started in the background"])
def test_a_run_that_is_ended_packs_what_it_has(tmp_path: Path, sigint: signal.Handlers) -> None:
    command = [sys.executable, str(SCRIPT), "--only", "roofs,tests-alone", *arguments_of(tmp_path)]
    log = tmp_path / "work" / "logs" / "test_gpu_symmetric.txt"
    environment = {**os.environ, "PYTHON": fake(tmp_path)}
    before = signal.signal(signal.SIGINT, sigint)  # which a process inherits where it is ignored
    try:
        started = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal.SIGINT, before)
    with started as script:
        while not (log.exists() and "waiting" in log.read_text()):
            assert script.poll() is None
            time.sleep(0.02)
        script.send_signal(signal.SIGTERM)
        assert script.stdout is not None
        shown = script.stdout.read()
    assert "INTERRUPTED" in shown
    assert "test_gpu_symmetric::test_wait: KeyboardInterrupt" in shown  # the test file was asked to end, too
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"log.txt", "summary.txt", "results.tgz"}


def test_a_run_that_is_killed_has_packed_the_stages_before(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--only", "roofs,optimizer,tests-alone", *arguments_of(tmp_path)]
    log = tmp_path / "work" / "logs" / "test_gpu_symmetric.txt"
    environment = {**os.environ, "PYTHON": fake(tmp_path)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as script:
        while not (log.exists() and "waiting" in log.read_text()):
            assert script.poll() is None
            time.sleep(0.02)
        script.kill()
    os.killpg(int((tmp_path / "pid").read_text()), signal.SIGKILL)  # what a container's end would end
    assert "roofs" in (tmp_path / "out" / "summary.txt").read_text()
    with tarfile.open(tmp_path / "out" / "results.tgz") as archive:
        assert "logs/roofs.txt" in archive.getnames()


@pytest.mark.expensive
def test_a_lost_cuda_context_ends_its_file(tmp_path: Path) -> None:
    file = tmp_path / "test_context.py"
    file.write_text(
        "def test_first(): pass\n"
        "def test_illegal(): raise RuntimeError('CUDA error: an illegal memory access was encountered')\n"
        "def test_later(): pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "tests.gpu.lost_context", "-p", "no:cacheprovider", str(file)]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert "the tests after test_illegal were not run" in done.stdout
    assert "1 failed, 1 passed" in done.stdout
