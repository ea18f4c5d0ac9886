"""Checks of an installation: versions, the compiled library, devices, what ranks of a host need.

Each check is a function that returns findings and never raises: what it cannot find out is a finding, too. Nothing here
needs the compiled extension to be there or to load. Every problem comes with a remedy.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from fastpar import _ext
from fastpar._version import __version__

BUILD_REMEDY = "build it: `pip install -e .` in the source checkout (or `make build`), or reinstall the package"


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    status  "ok", "info" (a fact, neither good nor bad), "warning" (works, but you may want to know), or "problem"
    remedy  what to do about it; every problem has one
    """

    topic: str
    status: str
    text: str
    remedy: str = ""

    def __post_init__(self) -> None:
        if self.status == "problem" and not self.remedy:
            raise ValueError(f"the problem {self.topic!r} needs a remedy")


def findings() -> list[Finding]:
    """The findings of all checks of this file, in the order in which they are printed."""
    binary = binary_path()
    return [
        *check_versions(),
        *check_binary(binary),
        *check_abi(binary),
        *check_extension(),
        *check_cpu(),
        *check_cuda(),
        *check_backends(),
        *check_shared_memory(),
    ]


def binary_path() -> Path:
    """Where `fastpar._ext.load` looks for the library, whether it is there or not."""
    return Path(os.environ.get("FASTPAR_LIBRARY") or Path(_ext.__file__).with_name("_C.so")).resolve()


# ------------------------------------------------------------------------------------------------ versions and binary


def check_versions() -> list[Finding]:
    """fastpar, Python, torch (new enough?) and triton (optional)."""
    found = [Finding("fastpar", "info", f"{__version__} at {Path(_ext.__file__).resolve().parent}")]
    found.append(Finding("python", "info", f"{platform.python_version()} at {sys.executable}"))
    release = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    if release >= _ext.MIN_TORCH:
        found.append(Finding("torch", "ok", torch.__version__))
    else:
        needed = ".".join(map(str, _ext.MIN_TORCH))
        remedy = f"install torch {needed} or newer: `pip install 'torch>={needed}'`"
        found.append(Finding("torch", "problem", f"{torch.__version__} is older than {needed}", remedy))
    found.append(Finding("triton", "info", _version("triton") or "not installed (optional; the GPU kernels need it)"))
    return found


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def check_binary(binary: Path) -> list[Finding]:
    """Is the shared library there?"""
    if not binary.is_file():
        return [Finding("binary", "problem", f"{binary} does not exist", BUILD_REMEDY)]
    return [Finding("binary", "ok", f"{binary} ({binary.stat().st_size / 1e6:.1f} MB)")]


def check_abi(binary: Path) -> list[Finding]:
    """Does the library use LibTorch's stable ABI only? By its symbol table."""
    if not binary.is_file():
        return [Finding("abi", "info", "not checked: there is no binary")]
    symbols = undefined_symbols(binary)
    if symbols is None:
        return [Finding("abi", "info", "not checked: the library cannot be read, or nm (binutils) is not there")]
    unstable = [name for name in symbols if is_unstable(name)]
    if unstable:
        text = f"{len(unstable)} symbols outside LibTorch's stable ABI, such as {unstable[0]}: it fits one torch only"
        return [Finding("abi", "problem", text, f"{BUILD_REMEDY}, from sources that use torch/csrc/stable only")]
    shims = sum(name.startswith(("aoti_torch_", "torch_")) for name in symbols)
    return [Finding("abi", "ok", f"LibTorch stable ABI ({shims} stable symbols, none unstable)")]


def undefined_symbols(binary: Path) -> list[str] | None:
    """Names that the library expects from others, without their versions; None where `nm` is missing or fails."""
    output = _output("nm", "-D", "--undefined-only", str(binary)) if shutil.which("nm") else None
    return None if output is None else [line.split()[-1].split("@")[0] for line in output.splitlines() if line.strip()]


def is_unstable(symbol: str) -> bool:
    """Whether a mangled name is a C++ symbol of torch or a symbol of CPython, both of which change between versions."""
    return bool(re.match(r"_ZN?[A-Z]*\d*(2at|3c10|5torch)", symbol)) or symbol.startswith(("Py", "_Py"))


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def check_extension() -> list[Finding]:
    """Does the library load, and how was it built?"""
    try:
        facts = _ext.build_info()
    except Exception as error:  # whatever goes wrong while loading is what is to be reported
        return [Finding("extension", "problem", f"does not load: {one_line(error)}", BUILD_REMEDY)]
    built = f"compiler {facts['compiler']}, CUDA {facts['cuda_archs'] or 'no'}"
    return [Finding("extension", "ok", f"loads ({built}); CPU kernels: {facts['cpu_capabilities']}")]


def one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


# ------------------------------------------------------------------------------------------------------------ devices


def check_cpu() -> list[Finding]:
    """Vector instructions, and the kernels that fastpar chose."""
    text = f"torch uses {torch.backends.cpu.get_cpu_capability().lower()} and {torch.get_num_threads()} threads"
    try:
        text += f", fastpar {_ext.cpu_capability()}"
    except ImportError:
        text += "; fastpar's kernels are not loaded"
    return [Finding("cpu", "info", text)]


def check_cuda() -> list[Finding]:
    """Devices and driver; a CUDA build of torch that sees no device on a machine that has one is a problem."""
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") or ""
    if torch.version.cuda is None:
        if driver:
            remedy = "install a CUDA build of torch: https://pytorch.org/get-started/locally"
            return [Finding("cuda", "warning", "this machine has a GPU, but torch is a CPU build", remedy)]
        return [Finding("cuda", "info", "torch is a CPU build; no NVIDIA driver found")]
    if not torch.cuda.is_available():
        if driver:
            remedy = f"torch is built for CUDA {torch.version.cuda}; install a driver that supports it"
            return [Finding("cuda", "problem", f"driver {driver.split()[0]} is there, but torch cannot use it", remedy)]
        return [Finding("cuda", "info", f"torch is built for CUDA {torch.version.cuda}; this machine has no GPU")]
    for index in range(torch.cuda.device_count()):
        try:
            problem = _use_device(torch.device("cuda", index))
        except Exception as error:  # whatever goes wrong on the device is what is to be reported
            problem = one_line(error)
        if problem:
            remedy = (
                "run nvidia-smi, and a small torch program on this device; with CUDA_LAUNCH_BLOCKING=1 errors name it"
            )
            return [Finding("cuda", "problem", f"cuda:{index} does not compute: {problem}", remedy)]
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    version = driver.split()[0] if driver else "unknown"
    return [Finding("cuda", "ok", f"{', '.join(names)}; driver {version}, torch built for CUDA {torch.version.cuda}")]


def _use_device(device: torch.device) -> str:
    """What is wrong with the results of torch and of a kernel of ours on a device; empty: nothing."""
    from fastpar.ops.rms_norm import rms_norm

    x = torch.arange(1.0, 65.0).view(4, 16)
    there = x.to(device)
    total = float(there.sum())
    if total != 2080.0:
        return f"the sum of 1 to 64 is {total:g} there"
    difference = float((rms_norm(there, None).cpu() - rms_norm(x, None)).abs().max())
    return "" if difference < 1e-5 else f"fastpar.ops.rms_norm is off by {difference:g} there"


def check_backends() -> list[Finding]:
    """torch.distributed and its transports."""
    if not torch.distributed.is_available():
        remedy = "install a torch build with USE_DISTRIBUTED (the official wheels have it)"
        return [Finding("distributed", "problem", "this torch was built without torch.distributed", remedy)]
    gloo, nccl = torch.distributed.is_gloo_available(), torch.distributed.is_nccl_available()
    text = f"gloo {'yes' if gloo else 'no'}, NCCL {'yes' if nccl else 'no'}"
    if not gloo and not nccl:
        remedy = "install an official torch wheel, which has gloo"
        return [Finding("distributed", "problem", text, remedy)]
    return [Finding("distributed", "ok", text)]


def check_shared_memory() -> list[Finding]:
    """What ranks on this host need to exchange CPU tensors through memory: see fastpar/comm/shared_memory/world.py."""
    try:
        descriptor = os.memfd_create("fastpar-doctor", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, 1)
            os.close(os.open(f"/proc/{os.getpid()}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC))
            os.close(os.pidfd_open(os.getpid()))
        finally:
            os.close(descriptor)
    except (AttributeError, OSError) as error:
        remedy = "allow memfd_create and pidfd_open in the container's seccomp profile, and mount /proc"
        return [Finding("shared memory", "warning", f"CPU collectives take gloo: {one_line(error)}", remedy)]
    return [Finding("shared memory", "ok", "CPU ranks of one host exchange through memory (memfd, pidfd)")]
