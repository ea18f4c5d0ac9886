"""Does a wheel keep what its tag promises? `tools/check_wheel.py manylinux_2_28 fastpar-*.whl`; exit status 0 or 1.

By auditwheel: the versions of symbols that the wheel expects of the system are no newer than the policy's, no file is
compiled for newer processors as a whole, and nothing is expected from outside but the system's libraries and torch's.
`auditwheel repair` would copy those of torch into the wheel, so its own verdict on the whole is of no use here.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

FROM_TORCH = {"libtorch.so", "libtorch_cpu.so"}  # which is imported first


def problems(policy: str, wheel: Path) -> list[str]:
    command = [sys.executable, "-m", "auditwheel", "show", "--json", str(wheel)]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    said = []
    if f"-{policy}_" not in wheel.name:
        said.append(f"it is not tagged {policy}")
    needed = found["sym_tag"]
    if not needed.startswith("manylinux_") or _version(needed) > _version(policy):
        said.append(f"its symbols need {needed}: {found['versioned_symbols']}")
    foreign = set(found["external_libs"]) - FROM_TORCH
    if foreign:
        said.append(f"it expects {', '.join(sorted(foreign))} from outside")
    said += [f"auditwheel says {name}" for name in ("pyfpe", "ucs2", "unsupported_isa") if found[name]]
    return said


def _version(tag: str) -> tuple[int, int]:
    _, major, minor = tag.split("_")[:3]
    return int(major), int(minor)


def main() -> int:
    policy, wheel = sys.argv[1], Path(sys.argv[2])
    said = problems(policy, wheel)
    for problem in said:
        print(f"{wheel.name}: {problem}", file=sys.stderr)
    if not said:
        print(f"{wheel.name} keeps {policy}")
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main())
