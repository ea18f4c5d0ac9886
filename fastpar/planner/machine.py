"""`Machine`: rates and sizes of the ranks that a plan is for, and what collectives over the links between them cost.

Note: the stride rule. Ranks of a dim of n members are σ apart, σ being the product of the dims within, and a node holds
R ranks. With n σ <= R all of them share a node. Else g = min(n, max(1, R / σ)) share one, and the rings of a node's
other ranks use its other cards, so that g cards carry what crosses: min(nvlink, nic g).
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fastpar.arguments import checked_fields
from fastpar.planner.table import Column

MEMORY_SHARE = 0.92  # of a rank's memory that plans may fill, its reserve included
CPU_POOLED_OUTPUTS = 8  # buffers that the pool of csrc/common/large_buffer.h caches
SOURCES = ("calibrated", "fitted", "data sheet")


@checked_fields
@dataclass(frozen=True)
class GemmTable:
    """Measured rates of products [tokens, inner] x [inner, outer] as shares of the peak.

    tokens, widths  ascending; a width is the smaller of inner and outer
    shares          by tokens and width; between them by the logarithms, beyond them as at the edge
    """

    tokens: tuple[int, ...]
    widths: tuple[int, ...]
    shares: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        for axis in (self.tokens, self.widths):
            if not axis or min(axis) < 1 or list(axis) != sorted(set(axis)):
                raise ValueError(f"tokens and widths must be positive and ascend, got {axis}")
        if len(self.shares) != len(self.tokens) or {len(row) for row in self.shares} != {len(self.widths)}:
            raise ValueError(f"shares must have {len(self.tokens)} rows of {len(self.widths)}, got {self.shares}")
        if min(map(min, self.shares)) <= 0:
            raise ValueError(f"shares must be positive, got {self.shares}")

    def share(self, tokens: Any, width: Any) -> Any:
        """Share of the peak, elementwise over numpy arrays."""
        table = np.array(self.shares)
        row, down = _between(self.tokens, tokens)
        column, right = _between(self.widths, width)
        below, after = np.minimum(row + 1, len(table) - 1), np.minimum(column + 1, table.shape[1] - 1)
        upper = table[row, column] * (1 - right) + table[row, after] * right
        lower = table[below, column] * (1 - right) + table[below, after] * right
        return upper * (1 - down) + lower * down


def _between(axis: tuple[int, ...], values: Any) -> tuple[Any, Any]:
    """The place of each value on the axis: the index below it, and how far it is to the next."""
    places = np.interp(np.log2(np.maximum(values, 1)), np.log2(axis), np.arange(len(axis)))
    index = places.astype(int)
    return index, places - index


@checked_fields
@dataclass(frozen=True)
class Machine:
    """Nodes of equal ranks.

    gpus, per_node        ranks in all, and in a node
    peak                  dtype ("bf16", "fp16", "fp8", "fp32") -> flop/s of one rank, as its maker says
    efficiency            share of the peak that large GEMMs reach within a training step, of this software stack
    launch                seconds that a layer's forward, or backward, takes at least
    hbm_bytes, hbm        memory of a rank, and bytes/s that element-wise kernels reach
    nvlink, nic           achieved bytes/s per rank and direction, inside a node and between nodes
    alpha_node, alpha_net seconds of latency of a collective per doubling of its ranks, inside a node and between nodes
    host_link, disk       bytes/s per rank to the host's memory and to disk
    reserve               bytes of a rank that are nobody's tensors: context, communication buffers, fragmentation
    gemm                  measured rates, in place of a formula of the shape; `efficiency` holds beside it
    attention             attention's share of the rate of large GEMMs
    wave                  elements of a product's result that all cores make at once; 0: no waves
    optimizer             seconds of AdamW's step for a parameter; 0: 20 bytes of it at the rate of `hbm`
    overlap               share of backward behind which gradients, and gathered parameters, can travel
    pooled_outputs        buffers of 8 MiB and more for outputs of collectives that a rank keeps between steps: those of
                          CPU ranks (csrc/common/large_buffer.h)
    source                "calibrated" (measured there), "fitted" (to published steps) or "data sheet"
    note                  where the numbers come from
    errors                feature -> relative error, as calibration found it; see `fastpar.planner.features`
    assumed               of a calibrated machine the fields that were not measured
    """

    name: str
    gpus: int
    per_node: int
    peak: Mapping[str, float]
    efficiency: float
    launch: float
    hbm_bytes: int
    hbm: float
    nvlink: float
    nic: float
    alpha_node: float
    alpha_net: float
    host_link: float
    disk: float
    reserve: int
    optimizer: float = 0.0
    overlap: float = 0.7
    gemm: GemmTable | None = None
    attention: float = 0.6
    wave: float = 0.0
    pooled_outputs: int = 0
    source: str = "data sheet"
    note: str = ""
    errors: Mapping[str, float] = field(default_factory=dict)
    assumed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in (
            "gpus",
            "per_node",
            "efficiency",
            "attention",
            "hbm_bytes",
            "hbm",
            "nvlink",
            "nic",
            "host_link",
            "disk",
        ):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("launch", "alpha_node", "alpha_net", "reserve", "wave", "optimizer"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if not 0 <= self.overlap <= 1 or self.efficiency > 1:
            raise ValueError(f"overlap and efficiency are shares of 1, got {self.overlap} and {self.efficiency}")
        if not self.peak or min(self.peak.values()) <= 0:
            raise ValueError(f"peak must have a positive flop/s for each dtype, got {dict(self.peak)}")
        if self.source not in SOURCES:
            raise ValueError(f"source must be one of {', '.join(SOURCES)}, got {self.source!r}")

    @property
    def limit(self) -> int:
        """Bytes that a plan may fill: 0.92 of the memory, without the reserve."""
        return int(MEMORY_SHARE * self.hbm_bytes) - self.reserve

    def flops(self, precision: str) -> float:
        """Peak flop/s in a precision; ValueError names those that there are."""
        if precision not in self.peak:
            raise ValueError(f"{self.name} has no peak for precision {precision!r}; it has {', '.join(self.peak)}")
        return self.peak[precision]

    def to_json(self) -> dict[str, Any]:
        """Plain data; `from_json` reads it."""
        return {**dataclasses.asdict(self), "peak": dict(self.peak), "errors": dict(self.errors)}

    def save(self, path: str | Path) -> None:
        """Write it as JSON, for `find_machine` and `fastpar plan --machine`."""
        Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n")

    def __str__(self) -> str:
        rates = ", ".join(f"{name} {rate * self.efficiency / 1e12:.2f}" for name, rate in self.peak.items())
        return (
            f"{self.name} ({self.source}): {self.gpus} ranks, {self.per_node} a node; Tflop/s {rates}; GB/s memory "
            f"{self.hbm / 1e9:.1f}, in a node {self.nvlink / 1e9:.2f}, between nodes {self.nic / 1e9:.2f}; a layer's "
            f"pass takes {1e6 * self.launch:.0f} us at least"
            + (f"; not measured: {', '.join(self.assumed)}" if self.assumed else "")
        )

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Machine:
        """The inverse of `to_json`. ValueError for a field that there is not, or that is missing."""
        known = {each.name: each for each in dataclasses.fields(Machine)}
        for name in data:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=3)
                hint = f"; did you mean {' or '.join(near)}" if near else ""
                raise ValueError(f"a machine has no {name!r}{hint}; it has {', '.join(known)}")
        missing = [
            name
            for name, each in known.items()
            if name not in data and each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING
        ]
        if missing:
            raise ValueError(f"the machine lacks {', '.join(missing)}")
        given = dict(data)
        if given.get("gemm") is not None:
            rows = given["gemm"]
            axes = {name: tuple(rows[name]) for name in ("tokens", "widths")}
            given["gemm"] = GemmTable(**axes, shares=tuple(map(tuple, rows["shares"])))
        return Machine(**given | {"assumed": tuple(given.get("assumed", ()))})


_TILE = 128 * 256  # of a result, which a core of such a GPU makes at once
_GB = 10**9
_GIB = 1 << 30


def _node(
    name: str, flops: float, cores: int, memory: int, hbm: float, links: tuple[float, float], **others: Any
) -> Machine:
    """Eight GPUs in a node: dense bf16 peak, cores, memory, its data-sheet rate, achieved rates of NVLink and NIC."""
    made: dict[str, Any] = {
        "gpus": 8,
        "per_node": 8,
        "peak": {"bf16": flops, "fp16": flops},
        "launch": 0.0,
        "hbm_bytes": memory,
        "hbm": 0.85 * hbm,
        "nvlink": links[0],
        "nic": links[1],
        "alpha_node": 8e-6,
        "alpha_net": 20e-6,
        "host_link": 24e9,
        "disk": 3e9,
        "reserve": 6 * _GB,
        "wave": float(_TILE * cores),
    }
    return Machine(name, **{**made, **others})


# Peaks, memory and link rates are those of the makers' data sheets; of links 80 % is taken as achieved. Efficiencies
# belong to a software stack: "fitted" ones were fitted to published steps (see tests/planner/test_planner_rows.py).
_A100 = {"efficiency": 0.83, "source": "fitted", "note": "efficiency fitted to published A100 steps of Megatron-LM"}
_H100 = {"efficiency": 0.52, "source": "fitted", "note": "efficiency fitted to published H100 steps of llm-foundry"}
MACHINES: dict[str, Machine] = {
    "a100": _node("a100", 312e12, 108, 80 * _GIB, 2.039e12, (240e9, 20e9), **_A100),
    "a100-40": _node("a100-40", 312e12, 108, 40 * _GIB, 1.555e12, (240e9, 20e9), **_A100),
    "h100": _node(
        "h100", 989e12, 132, 80 * _GIB, 3.35e12, (360e9, 40e9), **_H100,
        peak={"bf16": 989e12, "fp16": 989e12, "fp8": 1979e12}, host_link=50e9,
    ),
    "h200": _node(
        "h200", 989e12, 132, 141 * _GB, 4.8e12, (360e9, 40e9), efficiency=0.52,
        note="data sheet; efficiency of the H100",
        peak={"bf16": 989e12, "fp16": 989e12, "fp8": 1979e12}, host_link=50e9,
    ),
    "b200": _node(
        "b200", 2250e12, 148, 180 * _GB, 8e12, (720e9, 40e9), efficiency=0.45, note="data sheet; efficiency assumed",
        peak={"bf16": 2250e12, "fp16": 2250e12, "fp8": 4500e12}, host_link=50e9,
    ),
    "mi300x": _node(
        "mi300x", 1307e12, 304, 192 * _GB, 5.3e12, (300e9, 40e9), efficiency=0.40,
        note="data sheet; efficiency assumed",
        peak={"bf16": 1307e12, "fp16": 1307e12, "fp8": 2615e12}, host_link=50e9,
    ),
    "cpu": Machine(
        "cpu", 2, 2, {"fp32": 1e11, "bf16": 4e11}, 0.85, 2e-4, 12 * _GIB, 15e9, 6e9, 1e9, 2e-4, 1e-3, 15e9, 1e9,
        200_000_000, overlap=0.0, pooled_outputs=CPU_POOLED_OUTPUTS,
        note="one AVX-512 core a rank, memory shared; describe your own: Machine.to_json",
    ),
}  # fmt: skip


def find_machine(name: str | Machine | Path) -> Machine:
    """A machine by name and number of ranks ("h100x64"), or from a JSON file of `Machine.to_json`.

    "h100x64" is 64 GPUs, in 8 nodes; "h100x4" is half of a node; "h100" a whole one. A file may be followed by its
    number of ranks as well: "machine.json:16". ValueError names near misses.
    """
    if isinstance(name, Machine):
        return name
    text = str(name)
    path, _, count = text.rpartition(":") if re.search(r"\.json:\d+$", text) else (text, "", "")
    if path.endswith(".json"):
        try:
            machine = Machine.from_json(json.loads(Path(path).read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise ValueError(f"machine {path}: {error}") from error
        return _with_gpus(machine, int(count)) if count else machine
    found = re.fullmatch(r"(.+?)(?:x(\d+))?", text.lower())
    base = found[1] if found else text
    if found is None or base not in MACHINES:
        near = difflib.get_close_matches(base, MACHINES, n=3, cutoff=0.4)
        hint = f"; did you mean {' or '.join(near)}" if near else ""
        raise ValueError(
            f"there is no machine {text!r}{hint}; there are {', '.join(MACHINES)}, each with a number of ranks as in "
            "h100x64, and JSON files of Machine.to_json"
        )
    return _with_gpus(MACHINES[base], int(found[2])) if found[2] else MACHINES[base]


def _with_gpus(machine: Machine, gpus: int) -> Machine:
    if gpus < 1 or (gpus > machine.per_node and gpus % machine.per_node):
        raise ValueError(f"{machine.name}: {gpus} ranks must be a part of a node, or whole nodes of {machine.per_node}")
    return dataclasses.replace(machine, gpus=gpus, per_node=min(gpus, machine.per_node))


# ---- collectives over a dim of the mesh ------------------------------------------------------------------------------


def bandwidth(machine: Machine, size: Column, stride: Column) -> Column:
    """Bytes/s per rank and direction of a ring over a dim, from its size and stride."""
    shared = np.minimum(size, np.maximum(1, machine.per_node // np.maximum(stride, 1)))
    across = np.minimum(machine.nvlink, machine.nic * shared)
    return np.where(size * stride <= machine.per_node, machine.nvlink, across)


def latency(machine: Machine, size: Column, stride: Column) -> Column:
    """Seconds of a collective of no bytes."""
    alpha = np.where(size * stride <= machine.per_node, machine.alpha_node, machine.alpha_net)
    return alpha * np.log2(np.maximum(size, 1))


def gather_seconds(machine: Machine, nbytes: Column, size: Column, stride: Column) -> Column:
    """An all-gather or a reduce-scatter whose whole tensor has so many bytes; 0 for one rank."""
    share = (size - 1) / np.maximum(size, 1)
    return latency(machine, size, stride) + nbytes * share / bandwidth(machine, size, stride)


def all_reduce_seconds(machine: Machine, nbytes: Column, size: Column, stride: Column) -> Column:
    """A reduce-scatter and an all-gather."""
    return 2 * gather_seconds(machine, nbytes, size, stride)


def hop_seconds(machine: Machine, nbytes: Column, size: Column, stride: Column) -> Column:
    """A message to the next rank of a dim; each rank of a node has its own card."""
    inside = size * stride <= machine.per_node
    rate = np.where(inside, machine.nvlink, machine.nic)
    return np.where(size > 1, np.where(inside, machine.alpha_node, machine.alpha_net) + nbytes / rate, 0.0)
