#!/usr/bin/env python3
"""What only a GPU can tell: `make gpu`. One machine with one GPU, torch with CUDA and pytest; no network.

    python3 tools/run_gpu.py [--plan PLAN] [--only tests,cross_entropy] [--out FOLDER] [--dry-run] ...

A plan is a list of stages that fits into ten minutes; the first three of them are all there is to know:

    check     does it build, run and give the right results; then cross-entropy, its linear form and AdamW, in short
    bench     every bench that has a target, each beside its peers
    profile   what failed in `check` again, counters of the main kernels (ncu), memory and race checks
    changed-1, changed-2   what no device has seen since kernels changed, in 14 minutes of two calls: all tests, rows of
              these kernels, and in the second call the smaller rows, memory and race checks. For a library built
              elsewhere: there is no time to build one

Stages run one after the other whatever the ones before said, each under a limit of its own and all under --budget
seconds. A stage at its limit gets an interrupt first, after which pytest still says what failed. Every test file is a
process of its own: one import error, or one illegal access that ends the CUDA context, costs that file alone. Files
that leave the device to others run several at a time; those with the marker `gpu_alone`, after them, do not.

What comes out: rows in bench/results/<gpu>/, and in FOLDER (the variable OUT, else build/gpu/out) `log.txt`,
`summary.txt` and `results.tgz` with rows, junit files and each stage's log, after every stage, so that a run that is
killed leaves what it had. The
screen's last lines are the summary and one line for each test that failed.

A fastpar/_C.so that was built elsewhere is tried first (a second); only one that does not load, or has no kernels for
this GPU, is built again. Triton keeps its kernels in build/triton, for the next call. --peers holds wheels of libraries
to bench against; they are unpacked under build/, without what they depend on.

Exit status: 0 all fine; 1 a stage failed; 2 no Python with torch, or no GPU: nothing was run.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
KERNELS = ROOT / "fastpar" / "kernels"
BUDGET_S = 560
PLANS = ("check", "bench", "profile", "changed-1", "changed-2")
_GRACE_S = 15.0  # between the interrupt and the kill: pytest prints its failures
_LANES = 12  # test files at a time; they share the device well, and wait for Triton's compiler most of the time
# Kernels by the dozen to compile: a minute and a half each (H200), and no lane should begin with them at the end.
_LONGEST = tuple(f"tests/gpu/test_gpu_{name}.py" for name in ("attention", "attention_torch", "moe", "router"))
_FAILURES_SHOWN = 80
_PROBE = """
import sys, torch
if not torch.cuda.is_available():
    sys.exit(f"gpu: torch {torch.__version__} of {sys.executable} sees no CUDA device; these stages need one")
p = torch.cuda.get_device_properties(0)
print(f"gpu: {p.name}, {p.multi_processor_count} multiprocessors, torch {torch.__version__}, {sys.executable}")
"""
# The two roofs that every row is read against, as this card gives them today.
_ROOFS = """
import torch, triton
from triton.testing import do_bench
x = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").random_()
y = torch.empty_like(x)
a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
copy, gemm = (do_bench(f, warmup=50, rep=300, return_mode="median") for f in (lambda: y.copy_(x), lambda: a @ b))
rate, speed = 2 * x.numel() / copy / 1e9, 2 * 8192**3 / gemm / 1e9
print(f"triton {triton.__version__}; copy {rate:.2f} TB/s, bf16 GEMM {speed:.0f} TFLOP/s")
"""
_IS_BUILT = """
import torch
from fastpar import _ext
archs = _ext.build_info()["cuda_archs"].split(",")
major, minor = torch.cuda.get_device_capability()
assert any(arch.rstrip("af") == f"{major}{minor}" for arch in archs), f"built for {archs}, not sm_{major}{minor}"
print("gpu:", _ext.library_path(), "loads; its CUDA kernels are for", ",".join(archs))
"""


@dataclass(frozen=True)
class Stage:
    """One line of a plan.

    name      what --only picks it by, and what its log is called
    limit     seconds
    command   what runs; empty for `files`
    files     test files, each a process of its own, `lanes` at a time, all under `limit`
    """

    name: str
    limit: int
    command: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    lanes: int = 1
    options: tuple[str, ...] = ()  # of pytest, for `files`
    before: tuple[str, ...] = ()  # what pytest runs under
    left_out: str = ""  # why it is


@dataclass
class Done:
    """How a stage went."""

    stage: Stage
    verdict: str
    seconds: float = 0.0


@dataclass(frozen=True)
class Paths:
    """Where results go (`out`), and what the next call finds again (`work`)."""

    out: Path
    work: Path

    @property
    def logs(self) -> Path:
        return self.work / "logs"

    @property
    def junit(self) -> Path:
        return self.work / "junit"


# ---- the plans


def plans(python: str, peers: str, paths: Paths) -> dict[str, list[Stage]]:
    tests = gpu_tests()
    shared, alone = [f for f in tests if not is_alone(f)], [f for f in tests if is_alone(f)]

    def missing(program: str) -> str:
        return "" if shutil.which(program) else f"{program} is not on PATH"

    on_gpu = (python, "-m", "fastpar.cli", "bench")

    def bench(name: str, limit: int, *flags: str, what: str = "") -> Stage:
        command = (*on_gpu, name, "--device", "cuda", "--ranks", "1", "--blocks", "5", "--iters", "4", *flags)
        return Stage(f"{name}:{what}" if what else name, limit, command)

    def check(tool: str, limit: int, *flags: str) -> Stage:
        # Without torch's caching allocator every tensor is an allocation of its own, and a step past its end is seen.
        under = ("env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1", "compute-sanitizer", "--tool", tool, *flags)
        return Stage(
            tool,
            limit,
            files=tuple(f for f in tests if has_small_tests(f)),
            lanes=_LANES // 2,
            options=("-k", "small"),
            before=(*under, "--error-exitcode", "9", "--print-limit", "20"),
            left_out=missing("compute-sanitizer"),
        )

    def profile(name: str, *flags: str) -> Stage:
        under = ("ncu", "--set", "basic", "--target-processes", "all", "--launch-count", "40")
        once = ("--device", "cuda", "--ranks", "1", "--blocks", "1", "--iters", "1", "--no-memory", "--only", "fastpar")
        command = (*under, *on_gpu, name, *once, *flags)
        return Stage(f"ncu:{name}", 40, command, left_out=missing("ncu"))

    bf16 = ("--dtype", "bf16")
    experts = ("--tokens", "32768", "--hidden", "2048", "--ffn", "768", "--experts", "128", "--top-k", "8")
    entropy, linear = ("--tokens", "8192"), ("--tokens", "8192", "--hidden", "4096", "--vocab", "128256")
    quick = "fastpar,GEMM,linear,Liger"  # the others compile and tune for longer than all else takes
    # pip of no network and no dependencies: what a wheel needs is there, or the bench says which provider is missing.
    pip = (python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-input", "--no-index", "--no-deps")
    wheels = tuple(sorted(str(p) for p in Path(peers).glob("*.whl"))) if peers else ()
    target = ("--no-compile", "--upgrade", "--target", str(paths.work / "peers"))
    begin = [Stage("roofs", 12, (python, "-c", _ROOFS)), Stage("build", 170, (python, "_build/native.py"))]
    if peers:
        begin.append(Stage("peers", 10, (*pip, *target, *wheels), left_out="" if wheels else f"no wheel in {peers}"))

    every_test = [
        Stage("smoke", 36, files=tuple(f for f in shared if "smoke" in f)),
        Stage("tests", 130, files=tuple(f for f in shared if "smoke" not in f), lanes=_LANES),
        Stage("tests-alone", 105, files=tuple(alone)),
    ]
    found = {
        "check": [
            *begin,
            *every_test,
            bench("cross_entropy", 40, *bf16, *entropy, "--vocab", "128256", "--no-memory", what="short"),
            bench("linear_cross_entropy", 35, *bf16, *linear, "--no-memory", "--only", quick, what="short"),
            bench("optimizer", 30, "--job", "update", "--elements", "200000000", what="short"),
        ],
        "bench": [
            replace(begin[0], limit=10),
            replace(begin[1], limit=30),
            *begin[2:],
            bench("cross_entropy", 50, *bf16, *entropy, "--vocab", "32000,128256,262144"),
            bench("linear_cross_entropy", 50, *bf16, *linear),
            bench("optimizer", 30, "--job", "update,wide,step", "--elements", "200000000"),
            bench("moe", 40, *bf16, *experts, "--passes", "forward,both", "--only", "fastpar,torch,GEMMs"),
            bench("permute", 20, *bf16, "--tokens", "4096", "--hidden", "7168", "--top-k", "8", "--experts", "256"),
            bench("overlap_gpu", 35, *bf16, "--shapes", "8192x2048x8192", "--no-memory"),
            bench("symmetric", 35, *bf16, "--virtual-ranks", "2,4,8", "--kib", "1,64,1024,16384", "--settings", "hot"),
            bench(
                "symmetric",
                20,
                *bf16,
                "--norm",
                "--virtual-ranks",
                "8",
                "--kib",
                "64,1024",
                "--settings",
                "hot",
                what="norm",
            ),
            bench(
                "moe_push", 25, *bf16, "--virtual-ranks", "8", "--tokens", "4096", "--hidden", "7168", "--top-k", "8"
            ),
            bench(
                "moe_route",
                20,
                "--dtype",
                "fp32",
                "--presets",
                "deepseek_v3",
                "--tokens",
                "4096",
                "--experts",
                "256",
                "--only",
                "fastpar,=torch",
            ),
            bench("rms_norm", 20, *bf16, "--tokens", "4096", "--hidden", "4096", "--only", "fastpar,torch F."),
            bench("rotary_embedding", 20, *bf16, "--only", "fastpar,torch as"),
            bench("quantize", 20, *bf16, "--only", "fastpar,=torch"),
            bench("attention", 30, *bf16, "--tokens", "4096", "--dims", "64,128", "--heads", "16", "--key-heads", "4"),
            bench("swiglu", 20, *bf16, "--tokens", "8192", "--features", "16384", "--only", "fastpar,torch silu"),
            bench("clip", 18),
            bench(
                "cross_entropy", 35, *bf16, *entropy, "--vocab", "131072", "--virtual-ranks", "2", what="a rank of two"
            ),
            bench("moe", 30, *bf16, *experts, "--passes", "forward,both", "--only", "fastpar,Liger", what="Liger"),
        ],
        "profile": [
            replace(begin[1], limit=30),
            Stage("failed", 150, files=failed_before(paths.junit), lanes=_LANES, options=("--lf",)),
            profile("cross_entropy", *bf16, *entropy, "--vocab", "128256"),
            profile("optimizer", "--job", "update"),
            profile("moe", *bf16, *experts, "--passes", "forward"),
            profile("overlap_gpu", *bf16, "--shapes", "8192x2048x8192"),
            check("memcheck", 130),
            # Hazards in shared memory; only the compiled kernels, whose mangled names hold their namespace.
            check("racecheck", 80, "--kernel-name", "kns=fastpar"),
        ],
    }
    known = {stage.name: stage for plan in found.values() for stage in plan}
    heads = ("--dims", "64,128", "--heads", "16", "--key-heads", "4")
    return found | {
        "changed-1": [
            *found["bench"][: len(begin)],
            *every_test,
            known["cross_entropy"],
            known["linear_cross_entropy"],
            bench("attention", 60, *bf16, "--tokens", "1024,4096,16384", *heads, what="by length"),
            known["moe"],
        ],
        "changed-2": [
            *found["bench"][: len(begin)],
            known["clip"],
            known["moe_route"],
            known["moe_push"],
            replace(known["memcheck"], limit=110),
            replace(known["racecheck"], limit=60),
        ],
    }


def gpu_tests() -> list[str]:
    """Files with tests that need a device, those that take longest first."""
    found = [p for p in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in p.read_text()]
    return sorted((str(p.relative_to(ROOT)) for p in found), key=lambda file: (file not in _LONGEST, file))


def is_alone(file: str) -> bool:
    """Whether a file's kernels wait for one another: beside other processes each would wait for its turn, too."""
    return "mark.gpu_alone" in (ROOT / file).read_text()


def has_small_tests(file: str) -> bool:
    """Whether a file has tests for the tools that look at every access; a process without one is an error of theirs."""
    return re.search(r"def test_\w*small", (ROOT / file).read_text()) is not None


def failed_before(junit: Path) -> tuple[str, ...]:
    """Test files that failed, or did not end, when they last ran here."""
    return tuple(f for f in gpu_tests() if (p := junit / f"{Path(f).stem}.xml").exists() and failures_of(p))


# ---- running them


class Runner:
    """Runs stages, keeps what they print, and says at the end how it went, however it ends."""

    def __init__(self, python: str, budget: float, paths: Paths) -> None:
        self.python, self.paths = python, paths
        self.deadline = time.monotonic() + budget
        self.started = time.monotonic()
        self.done: list[Done] = []
        self.reports: list[Path] = []  # junit files of this call
        for folder in (paths.out, paths.logs, paths.junit):
            folder.mkdir(parents=True, exist_ok=True)
        self.log = (paths.out / "log.txt").open("w")

    def say(self, text: str) -> None:
        print(text, flush=True)
        self.log.write(text + "\n")
        self.log.flush()

    def run(self, stage: Stage) -> None:
        if stage.left_out or not (stage.command or stage.files):
            self.done.append(Done(stage, f"left out: {stage.left_out or 'no such tests'}"))
            return
        left = self.deadline - time.monotonic()
        if left < 5:
            self.done.append(Done(stage, "NOT RUN: out of time"))
            return
        limit = min(float(stage.limit), left)
        self.say(f"\n--- {stage.name} (at most {limit:.0f} s)")
        began = time.monotonic()
        record = Done(stage, "INTERRUPTED")
        self.done.append(record)
        try:
            record.verdict = self._tests(stage, limit) if stage.files else self._command(stage, limit)
        finally:
            record.seconds = time.monotonic() - began
            self.pack()

    def _command(self, stage: Stage, limit: float) -> str:
        if stage.name == "build" and self._is_built():
            return "ok: the library that is there loads"
        log = self.paths.logs / f"{stage.name.replace(':', '-').replace(' ', '-')}.txt"
        verdict = verdict_of(*run_until(stage.command, log, limit))
        self.say(tail(log, 30 if verdict == "ok" else 60))
        return verdict

    def _is_built(self) -> bool:
        found = subprocess.run([self.python, "-c", _IS_BUILT], cwd=ROOT, capture_output=True, text=True)
        self.say((found.stdout or found.stderr).strip().rpartition("\n")[2])
        return found.returncode == 0

    def _tests(self, stage: Stage, limit: float) -> str:
        end = time.monotonic() + limit
        waiting, running = list(stage.files), dict[subprocess.Popen[bytes], str]()
        verdicts: dict[str, str] = {}
        try:
            while waiting or running:
                while waiting and len(running) < stage.lanes and time.monotonic() < end:
                    file = waiting.pop(0)
                    running[self._start(stage, file)] = file
                for process, file in list(running.items()):
                    if process.poll() is not None:
                        del running[process]
                        verdicts[file] = verdict_of(process.returncode, False)
                        self._say_file(stage, file, verdicts[file])
                if time.monotonic() >= end:
                    for process, file in running.items():
                        interrupt(process)
                        verdicts[file] = "STOPPED after its time"
                        self._say_file(stage, file, verdicts[file])
                    verdicts |= dict.fromkeys(waiting, "NOT RUN: out of time")
                    waiting, running = [], {}
                time.sleep(0.05)
        finally:
            for process in running:
                interrupt(process)
        bad = [file for file, verdict in verdicts.items() if verdict != "ok"]
        return f"FAILED: {len(bad)} of {len(stage.files)} files" if bad else "ok"

    def _start(self, stage: Stage, file: str) -> subprocess.Popen[bytes]:
        stem = Path(file).stem
        name = stem if not stage.before else f"{stem}-{stage.name}"
        junit = self.paths.junit / f"{name}.xml"
        junit.write_text("")  # what a process that does not come to its end leaves
        self.reports.append(junit)
        # Warnings of another torch or Triton are no failures here. The cache tells --lf what failed in this file.
        cache = ("-o", f"cache_dir={self.paths.work / 'cache' / name}")
        command = [*stage.before, self.python, "-m", "pytest", "-m", "gpu", "-W", "default", "-q", "-rfE", "--tb=short"]
        command += [
            "-p",
            "tests.gpu.lost_context",
            *cache,
            "--durations=5",
            f"--junitxml={junit}",
            *stage.options,
            file,
        ]
        with (self.paths.logs / f"{name}.txt").open("wb") as log:
            return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)

    def _say_file(self, stage: Stage, file: str, verdict: str) -> None:
        name = Path(file).stem if not stage.before else f"{Path(file).stem}-{stage.name}"
        last = tail(self.paths.logs / f"{name}.txt", 1)
        self.say(f"{verdict:24} {file:44} {last.strip('= ')}")

    def pack(self) -> None:
        """The summary so far, and everything in one file, which replaces that of the stage before when it is whole."""
        (self.paths.out / "summary.txt").write_text("\n".join(self._summary()) + "\n")
        whole, part = self.paths.out / "results.tgz", self.paths.work / "results.part"
        with tarfile.open(part, "w:gz", compresslevel=1) as archive:
            for folder in (ROOT / "bench" / "results", self.paths.junit, self.paths.logs):
                if folder.exists():
                    archive.add(folder, arcname=folder.name)
        shutil.move(part, whole)

    def _summary(self) -> list[str]:
        lines = [f"--- summary ({time.monotonic() - self.started:.0f} s)"]
        lines += [f"{d.seconds:5.0f} s  {d.stage.name:34} {d.verdict}" for d in self.done]
        failed = [line for junit in sorted(set(self.reports)) for line in failures_of(junit)]
        if failed:
            lines += ["", f"--- {len(failed)} tests failed", *failed[:_FAILURES_SHOWN]]
        if len(failed) > _FAILURES_SHOWN:
            lines.append(f"... and {len(failed) - _FAILURES_SHOWN} more, in results.tgz")
        return lines

    def finish(self) -> int:
        """Shows the summary, and packs everything; the exit status."""
        self.say("\n" + "\n".join(self._summary()))
        self.log.close()
        self.pack()
        return int(any(not d.verdict.startswith(("ok", "left out")) for d in self.done))


def run_until(command: Sequence[str], log: Path, limit: float) -> tuple[int, bool]:
    """The exit status, and whether it was ended at its limit."""
    with log.open("wb") as file:
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        return process.wait(limit), False
    except subprocess.TimeoutExpired:
        return interrupt(process), True
    finally:
        interrupt(process)


def interrupt(process: subprocess.Popen[bytes]) -> int:
    """End a process and what it started: it is asked first, so that it can say how far it came."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def verdict_of(code: int, is_stopped: bool) -> str:
    if is_stopped:
        return "STOPPED after its time"
    # 5: pytest found none of the tests that were asked for
    return "ok" if code in (0, 5) else f"FAILED, exit status {code}"


def tail(log: Path, lines: int) -> str:
    return "\n".join(log.read_text(errors="replace").rstrip().splitlines()[-lines:])


def failures_of(junit: Path) -> list[str]:
    """One line for each test that failed: its file, name, and the first line of what it said."""
    try:
        cases = list(ElementTree.parse(junit).iter("testcase"))
    except ElementTree.ParseError:
        return [f"{junit.stem}: ended before it could say what failed; see its log"]
    lines = []
    for case in cases:
        for kind in ("failure", "error"):
            if (found := case.find(kind)) is not None:
                reason = re.sub(r"\s+", " ", (found.get("message") or "").strip())[:160]
                lines.append(f"{junit.stem}::{case.get('name')}: {reason}")
    return lines


# ---- the command


def has_torch(python: str) -> bool:
    code = 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)'
    is_there = shutil.which(python) is not None  # tools/find_python.sh names .venv whether or not it exists
    return is_there and subprocess.run([python, "-c", code], capture_output=True).returncode == 0


def find_python() -> str | None:
    """An interpreter that has torch already: the one of every other make target, else the system's."""
    ours = subprocess.run([ROOT / "tools" / "find_python.sh"], capture_output=True, text=True).stdout.strip()
    candidates = [ours, shutil.which("python3") or ""]
    return next((python for python in candidates if python and has_torch(python)), None)


def prepare_environment(peers: Path | None) -> None:
    """For every stage: fastpar from this folder, nvcc where it usually is, caches that the next call finds."""
    paths = [str(ROOT), *([str(peers)] if peers else []), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    os.environ["PATH"] = os.pathsep.join(["/usr/local/cuda/bin", os.environ.get("PATH", "")])
    os.environ.setdefault("MAX_JOBS", str(os.cpu_count() or 2))
    os.environ.setdefault("FASTPAR_CUDA", "1")  # without an nvcc the build fails, where it would leave the kernels out
    os.environ |= {
        "TRITON_CACHE_DIR": str(ROOT / "build" / "triton"),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "CUDA_MODULE_LOADING": "LAZY",
    }


def link_kernels(python: str) -> bool:
    """What an install maps fastpar.kernels to, where none did; kernels/ itself must not be a package (see setup.py)."""
    code = 'import importlib.util, sys; sys.exit(importlib.util.find_spec("fastpar.kernels") is None)'
    is_missing = subprocess.run([python, "-c", code], cwd=ROOT, capture_output=True).returncode == 1
    if is_missing and not KERNELS.is_symlink():
        KERNELS.symlink_to("../kernels/triton")
    return is_missing


def show(stages: Sequence[Stage], budget: float) -> None:
    for stage in stages:
        what = shlex.join(stage.command) or f"pytest {' '.join(stage.options)} {' '.join(stage.files)}"
        what = "copy and GEMM" if stage.name == "roofs" else what
        print(f"{stage.name:34} {stage.limit:4d} s  {f'left out: {stage.left_out}' if stage.left_out else what}")
    print(f"{sum(s.limit for s in stages)} s at most, all of them within {budget:.0f} s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", choices=PLANS, default="check")
    parser.add_argument(
        "--only", default="", help="stages by name, or by the part before the colon, with commas between"
    )
    out = os.environ.get("OUT")
    parser.add_argument("--out", type=Path, default=Path(out) if out else None, help="results (default: OUT, WORK/out)")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "gpu", help="what the next call finds again")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help=f"seconds for everything (default {BUDGET_S})")
    parser.add_argument("--peers", default="", help="folder of wheels to bench against")
    parser.add_argument("--dry-run", action="store_true", help="list the stages")
    arguments = parser.parse_args()

    python = os.environ.get("PYTHON") or find_python()
    if python is None:
        print("gpu: no Python with torch found; name one: make gpu PYTHON=/path/to/python3", file=sys.stderr)
        return 2
    paths = Paths(arguments.out or arguments.work / "out", arguments.work)
    prepare_environment(paths.work / "peers" if arguments.peers else None)
    stages = plans(python, arguments.peers, paths)[arguments.plan]
    if wanted := [name for name in arguments.only.split(",") if name]:
        known = sorted({part for stage in stages for part in (stage.name, stage.name.partition(":")[0])})
        if unknown := sorted(set(wanted) - set(known)):
            parser.error(f"--only {','.join(unknown)}: plan {arguments.plan} has {', '.join(known)}")
        stages = [s for s in stages if s.name in wanted or s.name.partition(":")[0] in wanted]
    if arguments.dry_run:
        show(stages, arguments.budget)
        return 0
    if subprocess.run([python, "-c", _PROBE], cwd=ROOT).returncode:
        return 2
    has_linked = link_kernels(python)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that results are packed then, too
    # What a script starts in the background ignores SIGINT, and so would every stage, which is asked to end with it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    runner, status = Runner(python, arguments.budget, paths), 1
    try:
        for stage in stages:
            runner.run(stage)
    finally:
        status = runner.finish()
        if has_linked:
            KERNELS.unlink(missing_ok=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
