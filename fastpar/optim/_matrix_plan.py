"""Which rank orthogonalizes which matrix, and which matrices all ranks orthogonalize together.

A model has many more matrices than a group has ranks. So the cheapest way is nearly always to give every matrix to one
rank: parts travel to the owner once and back once, nothing is computed twice, and the owner's products are those of a
single rank, bit for bit. What remains is balance. Matrices go to ranks by decreasing cost, each to the rank with least
to do (Graham 1969, "longest processing time first"). Where that leaves ranks idle, because there are few matrices or
one is large, the most expensive ones stay split, and Newton-Schulz runs on the parts.

`assign` compares these plans by a model of their time, a few rates per device type and dtype. It is a function of
shapes and of constants alone, so that all ranks come to the same plan without asking each other.

Sources for owners: Jordan et al. 2024 (round-robin over data-parallel ranks), and Megatron-LM's proposal of one home
for each weight over tensor and data parallelism, filled by cost (issue 6676).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fastpar.optim._matrix_layout import CUTS, MatrixSpec

MODES = ("auto", "owners", "shards")
_MOST_SPLIT_TRIED = 32


@dataclass(frozen=True)
class Rates:
    """Operations per second of a rank's products, bytes per second that it sends, seconds until a collective begins."""

    flops: float
    bytes: float
    latency: float


# CPU: one core with AVX-512 and shared memory, measured. CUDA: estimates for one H100 with NVLink.
_RATES = {
    ("cpu", torch.bfloat16): Rates(400e9, 5e9, 20e-6),
    ("cpu", torch.float32): Rates(95e9, 5e9, 20e-6),
    ("cpu", torch.float64): Rates(45e9, 5e9, 20e-6),
    ("cuda", torch.bfloat16): Rates(500e12, 200e9, 20e-6),
    ("cuda", torch.float32): Rates(50e12, 200e9, 20e-6),
    ("cuda", torch.float64): Rates(50e12, 200e9, 20e-6),
}


def rates_of(device_type: str, dtype: torch.dtype) -> Rates:
    return _RATES.get((device_type, dtype), _RATES["cuda", dtype])


@dataclass(frozen=True)
class Place:
    """Where a matrix is orthogonalized.

    owner  along each axis the coordinate of the rank that gets all parts, or None: every rank keeps what it has
    split  the axis along which it stays cut during Newton-Schulz
    """

    owner: tuple[int | None, ...]
    split: int | None = None


def flops(spec: MatrixSpec) -> int:
    """Operations of all Newton-Schulz steps of the stack."""
    short, long = sorted(spec.shape)
    return spec.count * spec.steps * (4 * short * short * long + 2 * short**3)


def assign(
    specs: Sequence[MatrixSpec], sizes: Sequence[int], rates: Rates, itemsize: int, mode: str = "auto"
) -> list[Place]:
    """A place for each matrix over axes of `sizes` ranks: the fastest plan by the model, or the one of `mode`."""
    costs = _Costs(sizes, rates, itemsize)
    splittable = [
        i for i, spec in enumerate(specs) if spec.rows and spec.columns and costs.split_axis(spec) is not None
    ]
    splittable.sort(key=lambda i: (-flops(specs[i]), i))
    if mode == "owners":
        counts = [0]
    elif mode == "shards":
        counts = [len(splittable)]
    else:
        counts = sorted({*range(min(len(splittable), _MOST_SPLIT_TRIED) + 1), len(splittable)})
    repeats = [False, True] if any("copy" in spec.kinds for spec in specs) else [False]
    plans = [_plan(specs, set(splittable[:count]), repeat, costs) for repeat in repeats for count in counts]
    return min(plans, key=lambda plan: plan[0])[1]  # the first of equals: fewest split


class _Costs:
    """Seconds that a rank is busy with a matrix."""

    def __init__(self, sizes: Sequence[int], rates: Rates, itemsize: int) -> None:
        self.sizes = tuple(sizes)
        self.rates = rates
        self._seconds_per_number = itemsize / rates.bytes

    def split_axis(self, spec: MatrixSpec) -> int | None:
        """The axis along which the matrix would stay cut: the one with most ranks."""
        axes = [axis for axis, kind in enumerate(spec.kinds) if kind in CUTS]
        return max(axes, key=lambda axis: self.sizes[axis], default=None)

    def whole(self, spec: MatrixSpec) -> float:
        """Seconds that the owner takes."""
        moves = any(kind in CUTS for kind in spec.kinds)
        numbers = 2 * spec.count * math.prod(spec.shape) if moves else 0
        return flops(spec) / self.rates.flops + numbers * self._seconds_per_number

    def split(self, spec: MatrixSpec, axis: int) -> float:
        """Seconds that each of the ranks along the axis takes."""
        ranks = self.sizes[axis]
        short, long = sorted(spec.shape)
        along = spec.shape[0 if spec.kinds[axis] == "rows" else 1]
        moves = sum(kind in CUTS for kind in spec.kinds) > 1
        turns = along < long
        gram = 3 * short * short * (ranks - 1) / ranks  # an all-reduce and an all-gather
        numbers = spec.count * (spec.steps * gram + 2 * (moves + turns) * short * long / ranks)
        waits = spec.count * (2 * spec.steps + 1 + 2 * turns) * self.rates.latency
        return flops(spec) / ranks / self.rates.flops + numbers * self._seconds_per_number + waits

    def copies(self, spec: MatrixSpec) -> float:
        """Seconds in which a rank gets the part of the result that another replica's owner computed."""
        parts = math.prod(size for size, kind in zip(self.sizes, spec.kinds, strict=True) if kind in CUTS)
        return spec.count * math.prod(spec.shape) / parts * self._seconds_per_number + self.rates.latency


def _plan(specs: Sequence[MatrixSpec], split: set[int], repeat: bool, costs: _Costs) -> tuple[float, list[Place]]:
    """(seconds, places) with the matrices in `split` split; `repeat`: replicas all do the same instead of sharing."""
    loads = dict.fromkeys(itertools.product(*map(range, costs.sizes)), 0.0)
    places = [Place((None,) * len(costs.sizes))] * len(specs)
    shared = 0.0
    work: list[tuple[float, int, int | None, list[int]]] = []
    for index, spec in enumerate(specs):
        axis = costs.split_axis(spec) if index in split else None
        kept = {"apart", "copy"} if repeat else {"apart"}
        free = [a for a, kind in enumerate(spec.kinds) if kind not in kept and a != axis]
        work.append((costs.whole(spec) if axis is None else costs.split(spec, axis), index, axis, free))
        if not repeat and "copy" in spec.kinds:
            shared += costs.copies(spec)
    for seconds, index, axis, free in sorted(work, key=lambda item: (-item[0], item[1])):
        busy: dict[tuple[int, ...], float] = {}  # by the owner's coordinates along the free axes
        for coordinates, load in loads.items():
            owner = tuple(coordinates[a] for a in free)
            busy[owner] = max(busy.get(owner, 0.0), load)
        chosen = min(busy, key=lambda owner: (busy[owner], owner))
        for coordinates in loads:
            if tuple(coordinates[a] for a in free) == chosen:
                loads[coordinates] += seconds
        full: list[int | None] = [None] * len(costs.sizes)
        for a, coordinate in zip(free, chosen, strict=True):
            full[a] = coordinate
        places[index] = Place(tuple(full), axis)
    return max(loads.values()) + shared, places
