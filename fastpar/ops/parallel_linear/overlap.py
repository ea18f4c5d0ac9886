"""The number of chunks in which a linear layer and its collective alternate: a rule, and a table of measurements.

The rule for what was never measured is one chunk: the plain product and the plain collective, which nothing here makes
slower. What costs no extra kernel is always done: in backward, collectives travel during the products that do not wait
for them. More chunks hide the collectives of forward as well, but cost smaller products; whether that pays is a matter
of the machine, so it is done only where `measure_overlap` found it faster.

Note: agreement. Ranks that cut differently launch different collectives. A decision is therefore a function of a table
that is equal on all ranks and of sizes that are: `Overlap.load` hands out rank 0's table, `measure_overlap` decides
from the slowest rank's times, and neither looks at a file later. Ranks whose caches differ, or who have none, do not
matter.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastpar.arguments import checked
from fastpar.comm import Communicator, GroupLike, shard_sizes
from fastpar.comm.groups import carrying_device
from fastpar.comm.machine_cache import machine_file, size_bucket, write_json
from fastpar.ops.parallel_linear.gemms import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
from fastpar.ops.parallel_linear.types import RankRows

SCHEMA = 1
PRODUCTS = ("all_gather_linear", "linear_reduce_scatter", "linear_all_reduce")
CANDIDATES = (1, 2, 4, 8)
# Cutting has to win by this much before it is preferred: a decision should not hang on the noise of one measurement.
_MARGIN = 0.98


class OverlapShape(NamedTuple):
    """A product to measure; every number is the whole layer's, the same on all ranks.

    product   one of `PRODUCTS`
    rows      tokens
    width     features that are communicated: the input's of all_gather_linear, the output's of the others
    features  the other features, which are split over the ranks
    """

    product: str
    rows: int
    width: int
    features: int
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Overlap:
    """How the linears of `fastpar.ops` overlap their collectives; pass it as their `overlap`, or True for `Overlap()`.

    enabled  False: every collective is waited for where it is launched. The products are the same, and so are the bits.
    table    chunks by key, as `Overlap.load` and `measure_overlap` make it; must be equal on all ranks
    """

    enabled: bool = True
    table: Mapping[str, int] = field(default_factory=dict)

    @staticmethod
    def of(overlap: bool | Overlap) -> Overlap:
        """An Overlap for what a caller passes as `overlap`."""
        if not isinstance(overlap, bool | Overlap):
            raise TypeError(f"overlap must be a bool or an Overlap, got {type(overlap).__name__}")
        return overlap if isinstance(overlap, Overlap) else Overlap(overlap)

    @staticmethod
    def load(group: GroupLike = None, *, folder: str | Path | None = None) -> Overlap:
        """What rank 0 has measured on machines like its own (`measure_overlap`), on every rank of the group.

        Collective: one broadcast or two. Without measurements, and for a group of one rank, an empty table: the rule.
        `folder` is `cache_folder()` by default; a file that cannot be read counts as none.
        """
        comm = Communicator.of(group)
        if comm.size == 1:
            return Overlap()
        return Overlap(table=_broadcast(_read(_path(folder)) if comm.rank == 0 else {}, comm))

    def disabled(self) -> Overlap:
        """The same products with no collective in flight during any."""
        return replace(self, enabled=False)

    def chunks(self, product: str, comm: Communicator, x: Tensor, rows: int, width: int, features: int | None) -> int:
        """Chunks of one product; sizes as in `OverlapShape`, `features` None where ranks may not agree on it."""
        if not self.table or features is None:
            return 1
        return self.table.get(key(product, comm, x.device.type, x.dtype, rows, width, features), 1)


def key(product: str, comm: Communicator, device: str, dtype: torch.dtype, rows: int, width: int, features: int) -> str:
    """The table's key: sizes to the nearest power of two, everything else exactly."""
    sizes = "x".join(str(size_bucket(size)) for size in (rows, width, features))
    transport = _transport(comm, device)
    return f"{product} {device} {str(dtype).removeprefix('torch.')} ranks={comm.size} {transport} {sizes}"


def _transport(comm: Communicator, device: str) -> str:
    return "shared_memory" if device == "cpu" and comm.local_world() is not None else "torch"


# ---- measuring -------------------------------------------------------------------------------------------------------


@checked()
def measure_overlap(
    group: GroupLike,
    shapes: Iterable[OverlapShape],
    *,
    device: str | torch.device = "cpu",
    candidates: Iterable[int] = CANDIDATES,
    samples: int = 7,
    folder: str | Path | None = None,
    save: bool = True,
) -> Overlap:
    """Time each product in every number of chunks, on all ranks together, and keep the fastest.

    Collective; every rank passes the same arguments. The candidates take turns, a sample's time is the slowest rank's,
    a candidate's is the median of its samples, and one chunk is kept unless another beats it by 2 %. The result holds
    rank 0's earlier measurements as well. With `save`, rank 0 writes them to `cache_folder()` (or `folder`), in one
    step, so that a reader sees the old file or the new one.

    Raises ValueError for a product that is not one of `PRODUCTS` and candidates without 1. With one rank there is
    nothing to measure: an empty table.
    """
    comm, counts = Communicator.of(group), list(candidates)
    shapes = list(shapes)
    for shape in shapes:
        if shape.product not in PRODUCTS:
            raise ValueError(f"product must be one of {PRODUCTS}, got {shape.product!r}")
    if 1 not in counts or min(counts) < 1 or samples < 1:
        raise ValueError(f"candidates must be >= 1 and include 1, samples >= 1, got {counts} and {samples}")
    if comm.size == 1:
        return Overlap()
    table = dict(Overlap.load(comm, folder=folder).table)
    device = torch.device(device)
    for shape in shapes:
        times = _times(comm, shape, device, counts, samples)
        best = min(counts, key=lambda count: times[count])
        chosen = best if times[best] < _MARGIN * times[1] else 1
        table[key(shape.product, comm, device.type, shape.dtype, *shape[1:4])] = chosen
    if save and comm.rank == 0:
        _write(_path(folder), table)
    return Overlap(table=table)


def _times(
    comm: Communicator, shape: OverlapShape, device: torch.device, counts: list[int], samples: int
) -> dict[int, float]:
    """Seconds by number of chunks, the same on every rank."""
    calls = {count: _call(comm, shape, device, count) for count in counts}
    rows: list[list[float]] = []
    for sample in range(-1, samples):  # the first round warms up
        taken = []
        for call in calls.values():
            comm.barrier()
            _synchronise(device)
            begin = time.perf_counter()
            call()
            _synchronise(device)
            taken.append(time.perf_counter() - begin)
        if sample >= 0:
            rows.append(taken)
    slowest = comm.all_reduce(torch.tensor(rows, dtype=torch.float64, device=device), "max").tolist()
    medians = [statistics.median(column) for column in zip(*slowest, strict=True)]
    return dict(zip(counts, medians, strict=True))


@torch.no_grad()
def _call(comm: Communicator, shape: OverlapShape, device: torch.device, chunks: int) -> Callable[[], Any]:
    sizes = tuple(shard_sizes(shape.rows, comm.size))
    share = shard_sizes(shape.features, comm.size)[comm.rank]
    rows = RankRows(0, sizes, chunks, True)
    if shape.product == "all_gather_linear":
        x = torch.randn(sizes[comm.rank], shape.width, device=device).to(shape.dtype)
        weight = torch.randn(share, shape.width, device=device).to(shape.dtype)
        return lambda: all_gather_matmul(x, [weight], [None], comm, rows, keep=False)
    x = torch.randn(shape.rows, share, device=device).to(shape.dtype)
    matrix = torch.randn(shape.width, share, device=device).to(shape.dtype).t()
    launch = matmul_reduce_scatter if shape.product == "linear_reduce_scatter" else matmul_all_reduce
    return lambda: launch([x], [matrix], comm, rows, busy=False)()


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ---- the cache -------------------------------------------------------------------------------------------------------


def _path(folder: str | Path | None) -> Path:
    return machine_file("overlap", SCHEMA, folder)


def _read(path: Path) -> dict[str, int]:
    """The table in a file; empty for one that is missing, unreadable, of another schema or damaged."""
    try:
        data = json.loads(path.read_text())
        if data["schema"] != SCHEMA:
            return {}
        return {str(name): max(1, int(chunks)) for name, chunks in data["chunks"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _write(path: Path, table: Mapping[str, int]) -> None:
    write_json(path, {"schema": SCHEMA, "chunks": dict(sorted(table.items()))})


def default_device(comm: Communicator) -> torch.device:
    """Where a tensor must be that any backend of the group can send."""
    assert comm.group is not None
    return carrying_device(comm.group)


def _broadcast(table: Mapping[str, int], comm: Communicator) -> dict[str, int]:
    """Rank 0's table: its length, then its bytes."""
    device = default_device(comm)
    text = json.dumps(table).encode()
    length = int(comm.broadcast(torch.tensor([len(text)], device=device)).item())
    data = torch.zeros(length, dtype=torch.uint8, device=device)
    if comm.rank == 0:
        data.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    found: dict[str, int] = json.loads(bytes(comm.broadcast(data).tolist()))
    return found
