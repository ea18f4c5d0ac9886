"""Links a library that an older Linux loads, on a newer one and with its compiler: what `make wheel` does.

A symbol of the C library is bound to the version that the linker finds, which is the newest that this system has
(pthread_create@GLIBC_2.34). The same system still exports the older ones (pthread_create@GLIBC_2.2.5). So the library is
linked against stand-ins: shared libraries of the same names with no code in them, that export of every symbol the newest
version that the target has, and nothing newer. What is missing then is an error of the linker, not of somebody's
cluster. It comes from two places:

    libstdc++.a    C++ symbols that are newer than the target's libstdc++ are linked in, and hidden; all others stay in
                   the shared one, which torch uses too. Red Hat's gcc-toolset, with which manylinux wheels are made, does
                   the same
    portable.c     three names that newer headers of the C library use

Compared with a container of that system, or with another compiler for it: the objects are the ones that are tested and
measured, and nothing is downloaded.
"""

from __future__ import annotations

import platform
import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

# The newest versions that a system of that policy has (PEP 600; auditwheel's manylinux-policy.json).
POLICIES: dict[str, dict[str, str]] = {
    "2_28": {"GLIBC": "2.28", "GLIBCXX": "3.4.24", "CXXABI": "1.3.11", "GCC": "7.0.0"},
}
_LOADERS = {"x86_64": "ld-linux-x86-64.so.2", "aarch64": "ld-linux-aarch64.so.1"}  # __tls_get_addr
_LIBRARIES = ("libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1", _LOADERS[platform.machine()])
# Where parts of the C library were before glibc 2.34: needed, so that they are there.
_EMPTY = ("libpthread.so.0", "libdl.so.2")

Run = Callable[[Sequence[str]], str]


def wheel_tag(policy: str) -> str:
    """Of the platform."""
    return f"manylinux_{policy}_{platform.machine()}"


def link_flags(policy: str, cxx: str, folder: Path, run: Run) -> list[str]:
    """What stands behind the objects: stand-ins made in `folder`, and what is linked in."""
    folder.mkdir(parents=True, exist_ok=True)
    limits = {family: _parsed(version) for family, version in POLICIES[policy].items()}
    compiled = folder / "portable.o"
    source = Path(__file__).with_name("portable.c")
    run([cxx, "-x", "c", "-O2", "-fPIC", "-fvisibility=hidden", "-c", str(source), "-o", str(compiled)])
    made = {name: _stand_in(name, exported(_path_of(name, cxx), limits), cxx, folder, run) for name in _LIBRARIES}
    empty = [str(_stand_in(name, {}, cxx, folder, run)) for name in _EMPTY]
    return [
        "-nodefaultlibs",
        str(compiled),
        "-Wl,--no-as-needed",
        *empty,
        "-Wl,--as-needed",
        str(made["libstdc++.so.6"]),  # before the archive: only what is missing here is taken from there
        "-l:libstdc++.a",
        str(made["libm.so.6"]),
        str(made["libgcc_s.so.1"]),
        "-lgcc",
        str(made["libc.so.6"]),
        str(made[_LIBRARIES[-1]]),
        "-l:libc_nonshared.a",  # pthread_atfork
        "-Wl,-z,defs",
    ]


def exported(library: Path, limits: dict[str, tuple[int, ...]]) -> dict[str, tuple[str, str]]:
    """symbol -> (version, type), for the newest version of each symbol that is within the limits."""
    command = ["readelf", "-W", "--dyn-syms", str(library)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found: dict[str, tuple[tuple[int, ...], str, str]] = {}
    line_of = re.compile(r"\s(FUNC|OBJECT|TLS|IFUNC)\s+(?:GLOBAL|WEAK|UNIQUE)\s+DEFAULT\s+\d+\s+(\S+?)@@?([A-Z]+)_(\S+)$")
    for line in output.splitlines():
        match = line_of.search(line)
        if match is None or match[3] not in limits or not re.fullmatch(r"[0-9.]+", match[4]):
            continue
        kind, name, family, version = match.groups()
        newest = found.get(name)
        if _parsed(version) <= limits[family] and (newest is None or newest[0] < _parsed(version)):
            found[name] = (_parsed(version), f"{family}_{version}", kind)
    return {name: (version, kind) for name, (_, version, kind) in found.items()}


def _stand_in(name: str, symbols: dict[str, tuple[str, str]], cxx: str, folder: Path, run: Run) -> Path:
    types = {"FUNC": "@function", "IFUNC": "@function", "OBJECT": "@object", "TLS": "@tls_object"}
    lines, nodes = [], []
    for number, (symbol, (version, kind)) in enumerate(sorted(symbols.items())):
        section = ".tbss,\"awT\",@nobits" if kind == "TLS" else ".data"
        lines += [f".section {section}", f".globl s{number}", f".type s{number}, {types[kind]}", f"s{number}: .skip 8"]
        lines += [f".size s{number}, 8", f".symver s{number}, {symbol}@@{version}, remove"]
    nodes = [f"{version} {{ }};" for version in sorted({version for version, _ in symbols.values()})]
    assembly, script, target = folder / f"{name}.s", folder / f"{name}.map", folder / name
    assembly.write_text("\n".join(lines) + "\n")
    script.write_text("\n".join(nodes) + "\n")
    versions = [f"-Wl,--version-script={script}"] if nodes else []
    run([cxx, "-shared", "-nostdlib", *versions, f"-Wl,-soname,{name}", "-o", str(target), str(assembly)])
    return target


def _path_of(name: str, cxx: str) -> Path:
    output = subprocess.run([cxx, f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout
    return Path(output.strip())


def _parsed(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))
