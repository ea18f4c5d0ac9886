"""Compiles csrc/ into one plain shared library, fastpar/_C.so.

The library is built against the LibTorch stable ABI and holds no CPython symbol, so one file serves every Python and
every torch from TORCH_TARGET on. torch.utils.cpp_extension is of no use for that: it imports torch, and links against
the CUDA libraries of the torch it finds. The compilers are called directly instead.

Read from the environment, all at build time only:

    FASTPAR_CUDA         1: compile the CUDA sources, with the nvcc on PATH; 0: leave them out. Unset: an install compiles
                         them where there is an nvcc and torch is a CUDA build; a checkout, where there is an nvcc
    FASTPAR_CUDA_ARCHS   comma-separated architectures (default "90a")
    FASTPAR_MANYLINUX    2_28: link for systems of that age and tag the wheel so (portable.py); `make wheel` sets it
    FASTPAR_TORCH_DIR    the installed torch package, where it is not in this environment's site-packages
    CXX, MAX_JOBS        the C++ compiler (default g++) and the number of parallel compilations (default 2)

Run as a program (as `make` does: "a checkout" above) it builds into any place, for instance an instrumented library for
the tests:

    python _build/native.py --sanitize=address,undefined --output=build/sanitize/_C.so
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

sys.path.insert(0, str(Path(__file__).resolve().parent))  # this file is also loaded by its path
import portable  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
TORCH_TARGET = (
    "0x020B000000000000"  # 2.11: first with from_blob and a capturing deleter; fastpar/_ext.py checks the same
)
STABLE_HEADER = Path("include/torch/csrc/stable/library.h")

# A source named *_<isa>.cpp is compiled for that instruction set; all others for the baseline of the platform.
# gcc 12 warns about its own AVX-512 header, which leaves a register undefined on purpose (GCC bug 105593).
_AVX2 = ("-mavx2", "-mfma", "-mf16c", "-mbmi2")
_AVX512 = (
    *_AVX2,
    "-mavx512f",
    "-mavx512bw",
    "-mavx512vl",
    "-mavx512dq",
    "-Wno-uninitialized",
    "-Wno-maybe-uninitialized",
)
_PTXAS_INFO = re.compile(r"ptxas info +:| +\d+ bytes stack frame,")
_AVX512_BF16 = (*_AVX512, "-mavx512bf16")
ISA_FLAGS = {
    "avx2": _AVX2,
    "avx512": _AVX512,
    "avx512bf16": _AVX512_BF16,
    "amx": (*_AVX512_BF16, "-mamx-tile", "-mamx-bf16"),
}

# Checks that AddressSanitizer's signal and red zones make again, or that need virtual functions, are left out, and
# accesses are checked by a call instead of in place: that halves the time to compile. Without optimisation it takes
# less than half of that again, which is more than the tests take longer.
_SANITIZE_FLAGS = (
    "-fno-sanitize-recover=all",
    "-fno-sanitize=null,object-size,vptr",
    "--param",
    "asan-instrumentation-with-call-threshold=0",
    "-fno-omit-frame-pointer",
    "-g1",
    "-O0",
)


@dataclass(frozen=True)
class Options:
    """What to build: `sanitize` is a value of -fsanitize= or empty, `cuda_archs` is empty for a CPU-only build."""

    torch_dir: Path
    cxx: str
    cuda_archs: tuple[str, ...]
    sanitize: str = ""
    jobs: int = 2
    manylinux: str = ""  # a key of portable.POLICIES, or empty: for this system


def find_torch() -> Path | None:
    """The installed torch package with the stable headers, without importing it."""
    candidates = [
        os.environ.get("FASTPAR_TORCH_DIR"),
        Path(sysconfig.get_path("purelib")) / "torch",
        Path(sysconfig.get_path("platlib")) / "torch",
    ]
    spec = importlib.util.find_spec("torch")
    if spec is not None and spec.submodule_search_locations:
        candidates.append(spec.submodule_search_locations[0])
    return next((Path(c) for c in candidates if c and (Path(c) / STABLE_HEADER).exists()), None)


def options_from_environment(sanitize: str = "", *, is_checkout: bool = True) -> Options:
    """is_checkout  whether somebody works on the sources, who wants the CUDA ones checked whatever torch is here"""
    torch_dir = find_torch()
    if torch_dir is None:
        raise SystemExit(
            "fastpar: no torch >= 2.11 headers found. Install torch into this environment first (`pip install torch`), "
            "or set FASTPAR_TORCH_DIR to an installed torch package."
        )
    if not (torch_dir / "include/torch/csrc/stable/c/shim.h").exists():
        raise SystemExit(f"fastpar: the torch at {torch_dir} is older than 2.11, which the build needs.")
    archs: tuple[str, ...] = ()
    if not sanitize and _wants_cuda(torch_dir, is_checkout):
        archs = tuple(os.environ.get("FASTPAR_CUDA_ARCHS", "90a").split(","))
    jobs = int(os.environ.get("MAX_JOBS", "2"))
    return Options(torch_dir, os.environ.get("CXX", "g++"), archs, sanitize, jobs, "" if sanitize else manylinux())


def manylinux() -> str:
    """The policy that was asked for, or nothing."""
    wanted = os.environ.get("FASTPAR_MANYLINUX", "")
    if wanted not in ("", *portable.POLICIES):
        raise SystemExit(f"fastpar: FASTPAR_MANYLINUX must be one of {', '.join(portable.POLICIES)}, got {wanted!r}")
    return wanted


def _wants_cuda(torch_dir: Path, is_checkout: bool) -> bool:
    wanted, has_nvcc = os.environ.get("FASTPAR_CUDA", ""), shutil.which("nvcc") is not None
    if wanted not in ("", "0", "1"):
        raise SystemExit(f"fastpar: FASTPAR_CUDA must be 0, 1 or unset, got {wanted!r}")
    if wanted == "1" and not has_nvcc:
        raise SystemExit("fastpar: FASTPAR_CUDA=1, but there is no nvcc on PATH. Put the CUDA toolkit's bin on PATH.")
    if wanted:
        return wanted == "1"
    return has_nvcc and (is_checkout or is_cuda_torch(torch_dir))


def is_cuda_torch(torch_dir: Path) -> bool:
    """Whether that torch was built for CUDA, from the file in which it says so; torch is not imported."""
    version = torch_dir / "version.py"
    text = version.read_text() if version.exists() else ""
    found = re.search(r"^cuda\b[^=]*=\s*(.+?)\s*$", text, re.MULTILINE)
    return found is None or found[1] != "None"


def describe(options: Options) -> str:
    """The one line that a build prints when it has something to compile."""
    if options.cuda_archs:
        parts = "CPU + CUDA (" + ", ".join(f"sm_{arch}" for arch in options.cuda_archs) + ")"
    elif options.sanitize:
        parts = f"CPU only, instrumented with -fsanitize={options.sanitize}"
    else:
        parts = "CPU only (no nvcc on PATH, a CPU build of torch, or FASTPAR_CUDA=0)"
    return f"fastpar: building {parts}; torch headers from {options.torch_dir}"


def build(output: Path, options: Options, run: Callable[[Sequence[str]], str] | None = None) -> None:
    """Compiles what changed and links `output`. `run` runs a command and returns what it printed."""
    run = run or _run
    sources = sorted(p for p in (ROOT / "csrc").rglob("*.cpp") if "emulation" not in p.parts)
    if options.cuda_archs:
        sources += sorted(p for p in (ROOT / "csrc").rglob("*.cu") if "emulation" not in p.parts)
    objects, stale = [], []
    for source in sources:
        target = object_of(source, options)
        target.parent.mkdir(parents=True, exist_ok=True)
        command = _compile_command(source, target, options)
        objects.append(target)
        if not _is_fresh(target, command):
            stale.append((target, command))
    if stale:
        print(describe(options), flush=True)
    with Progress(len(stale)) as progress, ThreadPoolExecutor(max_workers=max(1, options.jobs)) as pool:
        for target, _ in stale:
            target.with_suffix(".cmd").unlink(missing_ok=True)
        for _ in pool.map(lambda item: progress.after(_compile, *item, run), stale):
            pass

    # Linked aside and renamed: a process that has the old library mapped keeps its file.
    partial = output.with_suffix(".so.partial")
    command = _link_command(objects, partial, options, run)
    record = object_of(ROOT / "csrc" / "link", options).with_name(f"link-{_digest(str(output))}.cmd")
    is_old = not output.exists() or any(o.stat().st_mtime > output.stat().st_mtime for o in objects)
    if stale or is_old or not record.exists() or record.read_text() != "\n".join(command):
        output.parent.mkdir(parents=True, exist_ok=True)
        run(command)
        partial.replace(output)
        record.write_text("\n".join(command))


class Progress:
    """One line that counts, where somebody can see it: on the terminal even under pip, which shows nothing of a build."""

    def __init__(self, total: int) -> None:
        self._total, self._done, self._started = total, 0, time.monotonic()
        self._lock = threading.Lock()
        self._terminal: TextIO | None = None

    def __enter__(self) -> Progress:
        if self._total > 1:
            with contextlib.suppress(OSError):  # none: a log, CI
                self._terminal = open("/dev/tty", "w")
        return self

    def __exit__(self, *_: object) -> None:
        if self._terminal is not None:
            with contextlib.suppress(OSError):
                self._terminal.write("\r\033[K")
                self._terminal.close()

    def after(self, work: Callable[..., None], *arguments: Any) -> None:
        """Do that work, and count it."""
        work(*arguments)
        with self._lock:
            self._done += 1
            text = f"fastpar: compiled {self._done} of {self._total} files, {time.monotonic() - self._started:.0f} s"
            if self._terminal is not None:
                with contextlib.suppress(OSError):
                    self._terminal.write(f"\r\033[K{text}")
                    self._terminal.flush()
            elif self._done % 10 == 0 or self._done == self._total > 1:
                print(text, flush=True)


def object_of(source: Path, options: Options) -> Path:
    key = json.dumps([str(ROOT), str(options.torch_dir), options.cxx, options.cuda_archs, options.sanitize])
    folder = ROOT / "build" / f"objects-{_digest(key)}"
    return folder / (str(source.relative_to(ROOT / "csrc")).replace(os.sep, "_") + ".o")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def compiler_report(source: Path, options: Options) -> str:
    """What the compiler said of a source; compiles it if it has changed since it was built."""
    target = object_of(source, options)
    command = _compile_command(source, target, options)
    if not _is_fresh(target, command):
        target.parent.mkdir(parents=True, exist_ok=True)
        _compile(target, command, _run)
    return target.with_suffix(".log").read_text()


def _compile(target: Path, command: Sequence[str], run: Callable[[Sequence[str]], str]) -> None:
    target.with_suffix(".log").write_text(run(command))
    target.with_suffix(".cmd").write_text("\n".join(command))


def _compile_command(source: Path, target: Path, options: Options) -> list[str]:
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    common = [
        "-std=c++17",
        f"-DTORCH_TARGET_VERSION={TORCH_TARGET}",
        "-DUSE_CUDA",  # torch 2.11 declares the CUDA part of its C interface only with it
        f'-DFASTPAR_CUDA_ARCHS="{",".join(options.cuda_archs)}"',
        f"-DFASTPAR_X86={int(is_x86)}",
        f"-I{ROOT / 'csrc'}",
        f"-I{options.torch_dir / 'include'}",
        "-MMD",
        "-MF",
        str(target.with_suffix(".d")),
    ]
    if source.suffix == ".cu":
        archs = [f for a in options.cuda_archs for f in ("-gencode", f"arch=compute_{a},code=sm_{a}")]
        host = ["-Xcompiler", "-fPIC,-fvisibility=hidden"]
        more = ["-Xptxas", "-v", "-cudart", "static"]  # how many registers a kernel takes, and what it spills
        return ["nvcc", "-O3", *common, *host, *archs, *more, "-c", str(source), "-o", str(target)]
    flags = ["-O3", "-fPIC", "-fvisibility=hidden", "-fvisibility-inlines-hidden", "-Wall", "-Wextra"]
    flags += ["-Wno-unused-parameter", "-isystem", str(options.torch_dir / "include")]
    if options.sanitize:
        flags += [f"-fsanitize={options.sanitize}", *_SANITIZE_FLAGS]
    if is_x86:
        isa: Sequence[str] = ISA_FLAGS.get(source.stem.rpartition("_")[2], ())
        # Kernels throw nothing, and the tables for unwinding would share a symbol with files for other processors.
        flags += [*isa, "-fno-exceptions"] if isa else []
    common.remove(f"-I{options.torch_dir / 'include'}")
    return [options.cxx, *flags, *common, "-c", str(source), "-o", str(target)]


def _link_command(
    objects: Sequence[Path], output: Path, options: Options, run: Callable[[Sequence[str]], str]
) -> list[str]:
    command = [options.cxx, "-shared", "-o", str(output), *map(str, objects), f"-L{options.torch_dir / 'lib'}"]
    # libtorch itself must stay in NEEDED: on CUDA builds of torch it pulls in libtorch_cuda, where the weak
    # aoti_torch_get_current_cuda_stream is found. No RPATH: torch is always imported first.
    command += [
        "-Wl,--no-as-needed",
        "-ltorch",
        "-ltorch_cpu",
        "-Wl,--as-needed",
        "-Wl,--exclude-libs,ALL",
        "-Wl,-z,now",
    ]
    if options.sanitize:
        command.append(f"-fsanitize={options.sanitize}")
    if options.cuda_archs:
        top = _cuda_toolkit()
        command += [f"-L{top / 'lib64'}", f"-L{top / 'lib'}", "-lcudart_static", "-lpthread", "-ldl", "-lrt"]
    if options.manylinux:
        folder = objects[0].parent / f"manylinux-{options.manylinux}"
        command += portable.link_flags(options.manylinux, options.cxx, folder, run)
    return command


def _cuda_toolkit() -> Path:
    """The toolkit's folder; asked of nvcc, because the one on PATH may be a wrapper script."""
    probe = subprocess.run(
        ["nvcc", "--dryrun", "-x", "cu", "-c", os.devnull], capture_output=True, text=True, check=True
    )
    top = next(line.split("=", 1)[1] for line in probe.stderr.splitlines() if line.startswith("#$ TOP="))
    return Path(top.strip()).resolve()


def _is_fresh(target: Path, command: Sequence[str]) -> bool:
    """True when the object was made by the same command from files that have not changed since."""
    record, depfile = target.with_suffix(".cmd"), target.with_suffix(".d")
    if not (target.exists() and record.exists() and depfile.exists() and record.read_text() == "\n".join(command)):
        return False
    prerequisites = depfile.read_text().replace("\\\n", " ").split(":", 1)[1].split()
    built = target.stat().st_mtime
    return all(Path(p).exists() and Path(p).stat().st_mtime <= built for p in prerequisites)


def _run(command: Sequence[str]) -> str:
    result = subprocess.run(command, capture_output=True, text=True)
    output = result.stdout + result.stderr
    if worth_reading := "".join(line for line in output.splitlines(True) if not _PTXAS_INFO.match(line)):
        print(worth_reading, flush=True)
    if result.returncode != 0:
        raise SystemExit(f"fastpar: this command failed with status {result.returncode}:\n{' '.join(command)}")
    return output


def main() -> None:
    parser = argparse.ArgumentParser(description="Build fastpar's compiled library.")
    parser.add_argument("--output", type=Path, default=ROOT / "fastpar" / "_C.so")
    parser.add_argument("--sanitize", default="", help="value for -fsanitize=, for instance address,undefined")
    arguments = parser.parse_args()
    build(arguments.output.resolve(), options_from_environment(arguments.sanitize))


if __name__ == "__main__":
    main()
