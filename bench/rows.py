"""Rows: what was measured, where, on what, and the JSON file that keeps them.

``bench/results/<machine>/<bench>.json``, and for CUDA ``bench/results/<gpu>/<bench>.json``, holds ``{"schema": 1,
"runs": {id: {...}}, "rows": [...]}``. A run is the machine, the versions, the commit, the date and the command; each
row names its run. Saving *replaces* rows that measured the same thing (`identity`: bench, case, provider, setting) and
keeps all others, so one provider or shape can be measured again by itself; runs that no row names any more are dropped.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as distribution_version
from pathlib import Path
from typing import Any

import torch

from bench.harness import QUIET_CORES, Measurement, summary
from bench.peers import PEER_DISTRIBUTIONS

SCHEMA = 1
ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
Row = dict[str, Any]


def machine() -> dict[str, Any]:
    """CPU model and core count, memory in GiB, and GPUs."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = [torch.cuda.get_device_name(i) for i in range(count)]
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "gpus": gpus,
    }


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.machine()
    fields = {name: _first_value(text, name) for name in ("model name", "cpu family", "model")}
    return f"{fields['model name'] or platform.machine()} (family {fields['cpu family']}, model {fields['model']})"


def _first_value(text: str, name: str) -> str:
    match = re.search(rf"^{name}\s*:\s*(.*)$", text, flags=re.MULTILINE)
    return match.group(1).strip() if match else "?"


def machine_name(facts: dict[str, Any]) -> str:
    """A folder name: ``amd-epyc-family-26-model-2-2c-23g`` and the GPU, if any."""
    text = f"{facts['cpu']} {facts['cores']}c {facts['memory_gib']}g {' '.join(sorted(set(facts['gpus'])))}"
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def gpu_name(facts: dict[str, Any]) -> str:
    """A folder name: ``nvidia-h100-80gb-hbm3``, for rows measured on CUDA, where the host matters little.

    Raises ValueError if the machine has no GPU.
    """
    if not facts["gpus"]:
        raise ValueError("rows of a CUDA device are filed under its name, but this machine has no GPU")
    return re.sub(r"[^a-z0-9]+", "-", " ".join(sorted(set(facts["gpus"]))).lower()).strip("-")


def versions() -> dict[str, str]:
    """Of fastpar, torch and what they run on, and of the peers that are installed."""
    from fastpar._version import __version__

    found = {
        "fastpar": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "blas": "mkl" if torch.backends.mkl.is_available() else "other",
        "kernel": platform.release(),
    }
    if torch.cuda.is_available():
        found["cuda"] = str(torch.version.cuda)
    for name in ("triton", *PEER_DISTRIBUTIONS):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = distribution_version(name)
    return found


def commit() -> str:
    """Short commit of the checkout, with ``-dirty`` when files that git tracks have changed; "unknown" without git."""

    def git(*args: str) -> str:
        done = subprocess.run(["git", "-C", str(ROOT), *args], capture_output=True, text=True, check=True, timeout=20)
        return done.stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("-dirty" if git("status", "--porcelain") else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def new_run(command: Sequence[str] | None = None) -> dict[str, Any]:
    """The facts that all rows of one invocation share."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(command or ["fastpar", *sys.argv[1:]]),
        "commit": commit(),
        "machine": machine(),
        "versions": versions(),
    }


# ------------------------------------------------------------------------------------------------ measurements to rows


def make_rows(bench: str, case: dict[str, Any], found: Sequence[Measurement], run: str) -> list[Row]:
    """Rows of one case, with rates, fractions of the best roof, and ratios to every torch peer under every setting.

    ``ratio[peer][setting]`` is the peer's median time divided by this row's: above 1, this provider is faster.
    ``above_bound`` is the part of the time that the setting's bound (the job without its communication) does not need.
    """
    found = [m for m in found if not m.provider.absent]
    times = {(m.provider.name, m.setting): summary(m.seconds) for m in found if m.seconds}
    bounds = {m.setting: times[_key(m)]["median"] for m in found if m.provider.kind == "bound" and m.seconds}
    peers = [m for m in found if m.provider.kind in ("torch", "bound") and m.seconds]
    roofs = [m for m in found if m.provider.kind == "roof" and m.seconds]
    roof_bytes = max((_rate(m.provider.num_bytes, times[_key(m)]) for m in roofs), default=0.0)
    rows = []
    for m in found:
        row: Row = {
            "bench": bench,
            "case": case,
            "provider": m.provider.name,
            "kind": m.provider.kind,
            "setting": m.setting,
            "run": run,
            "errors": {name: {"value": e.value, "tolerance": e.tolerance} for name, e in m.errors.items()},
            "problem": m.problem,
            "extra_bytes": m.extra_bytes,
            "memory_bound": m.provider.memory_bound,
            "result_bytes": m.provider.result_bytes,
        }
        if m.seconds:
            ms = times[_key(m)]
            # A GEMM's roof depends on the setting (matmul precision); the copy roof is the machine's.
            same = [r for r in roofs if r.setting == m.setting]
            roof_flops = max((_rate(r.provider.flops, times[_key(r)]) for r in same), default=0.0)
            gb_s, gflop_s = _rate(m.provider.num_bytes, ms), _rate(m.provider.flops, ms)
            row |= {
                "ms": ms,
                "num_bytes": m.provider.num_bytes,
                "flops": m.provider.flops,
                "gb_s": gb_s,
                "gflop_s": gflop_s,
                "roof": {"gb_s": roof_bytes, "gflop_s": roof_flops},
                "roof_fraction": gb_s / roof_bytes if gb_s and roof_bytes else _over(gflop_s, roof_flops),
                "ratio": {},
                "above_bound": 1 - bounds[m.setting] / ms["median"] if _above(m, bounds) else None,
                "other_cores": m.other_cores,
                "quiet": m.other_cores < QUIET_CORES,
            }
            for p in peers:
                row["ratio"].setdefault(p.provider.name, {})[p.setting] = times[_key(p)]["median"] / ms["median"]
        rows.append(row)
    return rows


def _above(m: Measurement, bounds: dict[str, float]) -> bool:
    return m.setting in bounds and m.provider.kind in ("fastpar", "torch")


def _key(m: Measurement) -> tuple[str, str]:
    return m.provider.name, m.setting


def _rate(amount: float, ms: dict[str, float]) -> float:
    """1e9 units per second at the median."""
    return amount / (ms["median"] * 1e-3) / 1e9


def _over(value: float, roof: float) -> float | None:
    return value / roof if value and roof else None


# ------------------------------------------------------------------------------------------------------------ the file


def identity(row: Row) -> str:
    """Equal for two rows that measured the same thing."""
    return json.dumps([row["bench"], row["case"], row["provider"], row["setting"]], sort_keys=True)


def load(path: Path) -> dict[str, Any]:
    """The content of a results file; an empty one when there is no such file."""
    if not path.exists():
        return {"schema": SCHEMA, "runs": {}, "rows": []}
    data: dict[str, Any] = json.loads(path.read_text())
    if data.get("schema") != SCHEMA:
        raise ValueError(f"{path} has schema {data.get('schema')}, this harness writes {SCHEMA}; move the file away")
    return data


def save(path: Path, run_id: str, run: dict[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    """Merge `rows` into the file (see the module docstring) and return its new content."""
    data = load(path)
    new = {identity(row) for row in rows}
    data["rows"] = [row for row in data["rows"] if identity(row) not in new] + list(rows)
    data["runs"][run_id] = run
    named = {row["run"] for row in data["rows"]}
    data["runs"] = {key: value for key, value in data["runs"].items() if key in named}
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(data, indent=1) + "\n")
    part.replace(path)  # a run that is interrupted here leaves the old file whole
    return data


def default_path(bench: str, facts: dict[str, Any], device: str = "cpu") -> Path:
    folder = machine_name(facts) if device == "cpu" else gpu_name(facts)
    return RESULTS / folder / f"{bench}.json"
