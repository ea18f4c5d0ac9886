"""Files of measurements, one for each kind of machine: what was measured once need not be measured again."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
from pathlib import Path
from typing import Any

import torch


def cache_folder() -> Path:
    """Where measurements are kept: `fastpar` in the user's cache folder (XDG base directory specification)."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "fastpar"


def machine_file(stem: str, schema: int, folder: str | Path | None = None) -> Path:
    """The file of machines like this one: what a home directory shares between machines must not mix."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no gpu"
    facts = [schema, platform.machine(), platform.processor(), os.cpu_count(), torch.__version__, gpu]
    name = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    return (cache_folder() if folder is None else Path(folder)) / f"{stem}-{name}.json"


def write_json(path: Path, data: Any) -> None:
    """Write a file in one step: a reader sees the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False) as file:
        json.dump(data, file, indent=1)
    Path(file.name).replace(path)


def size_bucket(size: int) -> int:
    """The power of two that is nearest by ratio, as tables have sizes: 1448 -> 1024, 1449 -> 2048."""
    if size <= 1:
        return 1
    below = 1 << (size.bit_length() - 1)
    return below if size * size <= 2 * below * below else 2 * below
