"""Measures where collectives of CUDA ranks are faster over symmetric memory, once for each kind of machine.

    tp = mesh.group("tp")
    fp.comm.calibrate(tp)          # at start, on every rank; seconds the first time, a broadcast afterwards

From then on every `Communicator` over the group, and with it column- and row-parallel layers, sequence parallelism and
`fastpar.ops.all_reduce_rms_norm`, takes `SymmetricCollectives` for the operations, dtypes and sizes that were faster.
Nothing is taken that was not measured: a group that nobody calibrates goes by torch.distributed (NCCL) as ever, and so
does `Communicator(group, transport="torch")`. Not measured yet on any machine.
"""

from __future__ import annotations

import json
import logging
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastpar.arguments import checked
from fastpar.comm.agree import Agreement
from fastpar.comm.communicator import Communicator, GroupLike
from fastpar.comm.groups import carrying_device
from fastpar.comm.machine_cache import machine_file, size_bucket, write_json
from fastpar.comm.multi_host.host_ranks import find_hosts_of
from fastpar.comm.symmetric.collectives import DTYPES, SymmetricCollectives
from fastpar.comm.symmetric.switch import MARGIN, OPS, Ratios, SymmetricSwitch, install, key_of

_log = logging.getLogger("fastpar.comm.calibrate")
SCHEMA = 1
SIZES = tuple(1 << power for power in range(12, 27, 2))  # 4 KiB to 64 MiB
_MANY_CALLS, _FEW_CALLS, _FEW_BYTES = 20, 4, 4 << 20


@dataclass(frozen=True)
class Calibration:
    """What `calibrate` has found: ratios[operation and dtype][bytes] is the time over symmetric memory divided by that
    of torch.distributed; below 0.98 the group takes symmetric memory. Empty: nothing to choose from."""

    ratios: Ratios

    def describe(self) -> str:
        """A line for each operation: the sizes that go over symmetric memory."""
        lines = []
        for name, by_size in sorted(self.ratios.items()):
            faster = [f"{size} B ({ratio:.2f})" for size, ratio in sorted(by_size.items()) if ratio < MARGIN]
            lines.append(f"{name}: {', '.join(faster) or 'none'}")
        return "\n".join(lines) or "nothing measured"


@checked()
def calibrate(
    group: GroupLike,
    *,
    device: str | torch.device = "cuda",
    sizes: Iterable[int] = SIZES,
    dtypes: Iterable[torch.dtype] = (torch.bfloat16,),
    samples: int = 7,
    folder: str | Path | None = None,
    save: bool = True,
) -> Calibration:
    """Time all_reduce, reduce_scatter and all_gather over symmetric memory and by torch.distributed, and let the group
    take what is faster.

    Collective; every rank passes the same arguments, at a time when nothing else of the group is in flight. A size is
    that of the whole in bytes, a power of two; calls go by the nearest one that was measured. The two take turns, a
    sample's time is the slowest rank's, and symmetric memory has to win by 2 % in the median. What rank 0 has in its
    file (`fastpar` in the user's cache folder, or `folder`) is not measured again; with `save` it writes what is new.

    Memory: that of `SymmetricCollectives.create`, kept as long as the group. A second call of the group replaces the
    first. Bits: sums over symmetric memory are in rank order and float32; NCCL's are not, so results of a calibrated
    group may differ from those before in the last bits, and are equal from run to run with an equal file.

    One rank, and ranks on several hosts: an empty calibration, and nothing changes.

    Raises on all ranks: ValueError for a device that is not CUDA's, sizes that are no powers of two, samples below 1,
    and where these differ between ranks; TypeError for dtypes other than float32, bfloat16 and float16; what
    `SymmetricCollectives.create` raises. A file that cannot be written is a warning of "fastpar.comm.calibrate".
    """
    comm, device = Communicator.of(group), torch.device(device)
    sizes, dtypes = sorted(set(sizes)), sorted(set(dtypes), key=str)
    problem = _problem(device, sizes, dtypes, samples)
    # Sizes are different powers of two, so that their sum says which they are.
    given = (0, 0, 0) if problem else (sum(sizes), sum(1 << DTYPES.index(dtype) for dtype in dtypes), samples)
    Agreement("calibrate", ("sum of sizes", "dtypes as bits", "samples"), given, problem).gather(comm)
    if comm.group is None or comm.size == 1 or len(find_hosts_of(comm.group, comm.timeout)) != 1:
        return Calibration({})
    path = machine_file("symmetric", SCHEMA, folder)
    # Rank 0's alone: decisions must be equal on all ranks, whose files may not be.
    known = _share(_read(path, comm.size) if comm.rank == 0 else {}, comm)
    measured = [(op, dtype) for op in OPS for dtype in (dtypes if op != "all_gather" else [torch.uint8])]
    wanted = [(op, dtype, size) for op, dtype in measured for size in sizes]
    missing = [(op, dtype, size) for op, dtype, size in wanted if size not in known.get(key_of(op, dtype), {})]
    ratios = {name: dict(by_size) for name, by_size in known.items()}
    before = install(comm.group, None)
    if before is not None:
        before.collectives.close()  # type: ignore[attr-defined]
    if not missing and not _any_faster(ratios):
        return Calibration(ratios)
    collectives = SymmetricCollectives.create(comm, device, timeout=comm.timeout)
    for op, dtype, size in missing:
        ratios.setdefault(key_of(op, dtype), {})[size] = _ratio(comm, collectives, op, dtype, size, samples)
    if missing and save and comm.rank == 0:
        _write(path, comm.size, ratios)
    if _any_faster(ratios):
        install(comm.group, SymmetricSwitch(collectives, ratios))
    else:
        collectives.close()
    return Calibration(ratios)


def _problem(device: torch.device, sizes: list[int], dtypes: list[torch.dtype], samples: int) -> Exception | None:
    if device.type != "cuda":
        return ValueError(f"device must be a CUDA device, got {device}: CPU ranks of a host share memory as they are")
    if any(not 0 < size < 1 << 62 or size_bucket(size) != size for size in sizes):
        return ValueError(f"sizes must be powers of two, in bytes, got {sizes}")
    if any(dtype not in DTYPES for dtype in dtypes):
        return TypeError(f"dtypes must be among {', '.join(map(str, DTYPES))}, got {dtypes}")
    if samples < 1:
        return ValueError(f"samples must be at least 1, got {samples}")
    return None


def _any_faster(ratios: Ratios) -> bool:
    return any(ratio < MARGIN for by_size in ratios.values() for ratio in by_size.values())


# ---- measuring -------------------------------------------------------------------------------------------------------


def _ratio(
    comm: Communicator, collectives: SymmetricCollectives, op: str, dtype: torch.dtype, nbytes: int, samples: int
) -> float:
    """Time over symmetric memory / time by torch.distributed, the same on every rank."""
    plain = Communicator(comm.group, timeout=comm.timeout, transport="torch")
    count = max(nbytes // dtype.itemsize // (comm.size if op == "all_gather" else 1), 1)
    x = torch.zeros(count, dtype=dtype, device=collectives.device)
    calls = [getattr(collectives, op), getattr(plain, op)]
    repeats = _MANY_CALLS if nbytes <= _FEW_BYTES else _FEW_CALLS
    rows = []
    for sample in range(-1, samples):  # the first round warms up
        taken = [_seconds(call, x, comm, repeats) for call in calls]
        if sample >= 0:
            rows.append(taken)
    times = torch.tensor(rows, dtype=torch.float64, device=carrying_device(comm.group))  # type: ignore[arg-type]
    slowest = plain.all_reduce(times, "max").tolist()
    ours, torchs = (statistics.median(column) for column in zip(*slowest, strict=True))
    return float(ours / max(torchs, 1e-12))


def _seconds(call: Callable[[Tensor], Any], x: Tensor, comm: Communicator, repeats: int) -> float:
    comm.barrier()
    torch.cuda.synchronize(x.device)
    began = time.perf_counter()
    for _ in range(repeats):
        call(x)
    torch.cuda.synchronize(x.device)
    return (time.perf_counter() - began) / repeats


# ---- the file --------------------------------------------------------------------------------------------------------


def _read(path: Path, size: int) -> Ratios:
    """What the file has of groups of so many ranks; nothing of one that is missing, damaged or of another schema."""
    try:
        data = json.loads(path.read_text())
        if data["schema"] != SCHEMA:
            return {}
        return _numbers(data["ranks"].get(str(size), {}))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _write(path: Path, size: int, ratios: Ratios) -> None:
    try:
        data = json.loads(path.read_text())
        by_ranks = dict(data["ranks"]) if data["schema"] == SCHEMA else {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        by_ranks = {}
    try:
        write_json(path, {"schema": SCHEMA, "ranks": {**by_ranks, str(size): ratios}})
    except OSError as error:  # the other ranks go on by what was measured, and so must this one
        _log.warning("measurements are not kept, as %s cannot be written: %s", path, error)


def _numbers(table: Mapping[str, Mapping[str, float]]) -> Ratios:
    return {str(name): {int(size): float(ratio) for size, ratio in row.items()} for name, row in table.items()}


def _share(ratios: Ratios, comm: Communicator) -> Ratios:
    """Rank 0's table: its length, then its bytes."""
    text = json.dumps(ratios).encode()
    length = int(comm.broadcast(torch.tensor([len(text)], device="cpu"), 0).item())
    data = torch.zeros(length, dtype=torch.uint8, device="cpu")
    if comm.rank == 0:
        data.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    return _numbers(json.loads(bytes(comm.broadcast(data, 0).tolist())))
