"""Loads the compiled library, fastpar/_C.so, and answers questions about it.

The library is plain C++ against the LibTorch stable ABI: `load` hands it to torch.ops.load_library, and its ops appear
as torch.ops.fastpar.*. Nothing is loaded when this module is imported; the op modules call `load` when they are.

What can go wrong is checked before the dynamic loader sees the file, because afterwards it is a crash or a riddle: on
torch older than the build's target the loader reports an undefined symbol, and a second copy of the library in one
process ends in a segmentation fault inside the registration of its ops.

Note: FASTPAR_LIBRARY. Naming another binary there makes `load` take it instead. It is for running the tests against an
instrumented build (`python _build/native.py --sanitize=address,undefined --output=...`), not for ordinary use.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import cast

import torch

MIN_TORCH = (2, 11)  # TORCH_TARGET in _build/native.py
_REBUILD = "run `pip install -e .` (or `python setup.py build_ext --inplace`) in the fastpar repository"


@functools.cache
def load() -> Path:
    """Load the library if that has not been done yet, and return its path.

    Raises ImportError, saying what to do, if torch is too old, the binary is missing or does not load, or another copy
    of fastpar's library is already registered in this process.
    """
    _check_torch_version(torch.__version__)
    path = Path(os.environ.get("FASTPAR_LIBRARY") or Path(__file__).with_name("_C.so")).resolve()
    if not path.exists():
        raise ImportError(f"fastpar's compiled library is missing: no {path}. To build it, {_REBUILD}.")
    registered = _registered_library()
    if registered == str(path):
        return path
    if registered is not None:
        raise ImportError(
            f"another copy of fastpar's library is already loaded, {registered}; loading {path} as well would crash. "
            "Keep one of the two installations: `pip uninstall fastpar` removes the installed one."
        )
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        reason = error.__cause__ or error
        raise ImportError(
            f"fastpar's compiled library {path} does not load into torch {torch.__version__}: {reason}. "
            f"To rebuild it, {_REBUILD}."
        ) from error
    return path


def library_path() -> Path:
    """Path of the library that is in use."""
    return load()


def build_info() -> dict[str, str]:
    """How the library was built, and what it can run here.

    Keys: compiler, torch_target, cpu_capabilities (space-separated, best first), cuda_archs (comma-separated, empty for
    a CPU-only build), library.
    """
    load()
    return _parse(torch.ops.fastpar.build_info())


def cpu_capability() -> str:
    """The instruction set that CPU kernels use: "amx", "avx512bf16", "avx512", "avx2" or "portable"."""
    load()
    return cast(str, torch.ops.fastpar.cpu_capability())


def set_cpu_capability(name: str) -> None:
    """Make CPU kernels use `name`, one of build_info()["cpu_capabilities"]; for tests and benches.

    Raises ValueError if this machine cannot run it.
    """
    available = build_info()["cpu_capabilities"].split()
    if name not in available:
        raise ValueError(f"cpu capability {name!r} is not available; this machine can run {', '.join(available)}")
    torch.ops.fastpar.set_cpu_capability(name)


def _check_torch_version(version: str) -> None:
    found = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if found < MIN_TORCH:
        needed = ".".join(map(str, MIN_TORCH))
        raise ImportError(f"fastpar needs torch >= {needed}, found {version}: `pip install 'torch>={needed}'`.")


def _registered_library() -> str | None:
    """Path of the library whose ops are registered in this process, if there is one."""
    if not torch._C._jit_get_schemas_for_operator("fastpar::build_info"):
        return None
    return _parse(torch.ops.fastpar.build_info())["library"]


def _parse(info: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in info.splitlines())
