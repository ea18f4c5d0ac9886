"""`calibrate`: a `Machine` as its own ranks measure it, all of them at once. Needs torch, as the planner does not.

| field | measured |
|---|---|
| peak, gemm | products of 5 widths and 3 numbers of tokens, wide and square: their best rate, and shares of it |
| attention | causal attention of one length |
| hbm | the sum of two tensors, larger than caches, into a third |
| launch | forward and backward of a layer too small to take time, the mean of both |
| efficiency | what makes a predicted layer, forward and backward, the measured one: attention as long as above |
| optimizer | a step of torch's AdamW |
| nvlink, alpha_node | all-gathers and all-reduces of 4 KiB to 16 MiB (64 on CUDA) in a node, least relative squares |
| nic, alpha_net | the same between nodes |
| host_link | copies to the host; of CPU ranks, hbm |
| disk | a file of 64 MiB, written and synchronised |
| errors | of a layer with a quarter of the tokens, and of the collectives: root mean square |

Every time is the best of a few, and of all ranks the slowest counts: cores and links are shared.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastpar.arguments import checked
from fastpar.comm import Communicator
from fastpar.layouts import Layout, ModelShape
from fastpar.mesh import init_mesh
from fastpar.planner.layer_time import layer_time
from fastpar.planner.machine import CPU_POOLED_OUTPUTS, GemmTable, Machine
from fastpar.planner.table import LayoutTable
from fastpar.planner.workload import Workload

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Sizes:
    """What is measured: widths and tokens of products, (tokens, heads, head size) of attention, elements of a sum,
    (hidden, heads, tokens) of a layer, and the powers of two times 4 KiB up to which collectives go."""

    widths: tuple[int, ...]
    tokens: tuple[int, ...]
    attention: tuple[int, int, int]
    elements: int
    layer: tuple[int, int, int]
    largest: int


SIZES = {
    "cpu": Sizes((64, 128, 256, 512, 1024), (128, 512, 2048), (512, 8, 64), 16 << 20, (512, 8, 2048), 12),
    "cuda": Sizes((256, 512, 1024, 4096, 8192), (1024, 4096, 16384), (4096, 16, 128), 64 << 20, (4096, 32, 8192), 14),
}
_LEAST_ERROR = 0.05  # of a prediction: what a machine's own noise comes to


@checked(computed=False)
def calibrate(
    name: str = "here", *, device: str | None = None, precision: str | None = None, seconds: float = 120.0
) -> Machine:
    """Measure this machine. Called by every rank of a job, all of which get the same `Machine`.

        torchrun --nproc-per-node 2 -m fastpar calibrate --out machine.json
        fp.plan(model, "machine.json", batch=64, seq=1024, precision="fp32")

    name       what the machine is called
    device     "cpu" or "cuda"; by default "cuda" where there is one
    precision  that products are measured in: "fp32", "bf16" or "fp16"; None: bf16 on CUDA, fp32 on CPU
    seconds    about how long it may take; at least 1

    Bytes: up to 64 MiB a collective, and about 1 GiB of memory a rank. What was not measured is in `Machine.assumed`.
    Raises ValueError for arguments, and what `init_mesh` raises where the ranks do not meet.
    """
    if not 1 <= seconds < math.inf:
        raise ValueError(f"seconds must be at least 1 and finite, got {seconds}")
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    words = precision or ("bf16" if where == "cuda" else "fp32")
    if words not in _DTYPES:
        raise ValueError(f"precision must be one of {', '.join(_DTYPES)}, got {words!r}")
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else _launched("WORLD_SIZE")
    per_node = min(world, _launched("LOCAL_WORLD_SIZE") if _launched("LOCAL_WORLD_SIZE") > 1 else world)
    per_node = per_node if world % per_node == 0 else world
    mesh = init_mesh(dp_replicate=world // per_node, dp_shard=per_node, device=where)
    try:
        groups = {dim: Communicator.of(mesh.group(dim)) for dim in ("dp_replicate", "dp_shard")}
        return _Bench(where, words, seconds, groups, per_node).machine(name)
    finally:
        mesh.close()


def _launched(name: str) -> int:
    """What the launcher says of the job; 1 without one."""
    return int(os.environ.get(name, "1"))


@dataclass(frozen=True)
class _Bench:
    """The ranks of a calibration: `groups` by dim, the replicas being on different nodes."""

    device: str
    precision: str
    seconds: float
    groups: dict[str, Communicator]
    per_node: int

    def machine(self, name: str) -> Machine:
        rates = self._gemms()
        best = max(max(row) for row in rates.values())
        widths, tokens = self._sizes.widths, self._sizes.tokens
        table = GemmTable(tokens, widths, tuple(tuple(rate / best for rate in rates[count]) for count in tokens))
        is_cpu, world = self.device == "cpu", math.prod(group.size for group in self.groups.values())
        nodes = world // self.per_node
        hbm = self._memory_rate()
        inside, wrong = self._links(self.groups["dp_shard"])
        across, _ = self._links(self.groups["dp_replicate"]) if nodes > 1 else (inside, 0.0)
        assumed = (() if self.per_node > 1 else ("nvlink", "alpha_node")) + (() if nodes > 1 else ("nic", "alpha_net"))
        assumed += () if is_cpu else ("overlap",)
        total, reserve = self._room()
        made = Machine(
            name, world, self.per_node, {self.precision: best}, 1.0, 0.0, total, hbm, inside[1], across[1], inside[0],
            across[0], hbm if is_cpu else self._host_rate(), self._disk_rate(), reserve,
            overlap=0.0 if is_cpu else 0.7, pooled_outputs=CPU_POOLED_OUTPUTS if is_cpu else 0, gemm=table,
            source="calibrated", assumed=assumed,
        )  # fmt: skip
        made = replace(
            made, attention=min(1.0, self._attention_rate() / best), launch=self._floor(), optimizer=self._optimizer()
        )
        made, error = self._fitted(made)
        errors = {each: max(_LEAST_ERROR, math.hypot(error, wrong)) for each in ("base", "floor")}
        note = f"measured by {world} ranks on {self.device}, torch {torch.__version__}"
        return replace(made, errors=errors, note=note)

    # ---- one rank's time, of all the slowest -------------------------------------------------------------------------

    def _time(self, run: Callable[[], object], share: float) -> float:
        """Seconds of a call: the best of 3 to 30, as many as fit into a share of the time, on all ranks alike."""
        self._once(run)
        first = self._slowest(self._once(run))
        count = int(min(30.0, max(3.0, share * self.seconds / max(first, 1e-9))))
        return self._slowest(min(self._once(run) for _ in range(count)))

    def _once(self, run: Callable[[], object]) -> float:
        self._synchronize()
        before = time.perf_counter()
        run()
        self._synchronize()
        return time.perf_counter() - before

    def _slowest(self, value: float) -> float:
        found = torch.tensor([value], dtype=torch.float64, device=self.device)
        for group in self.groups.values():
            found = group.all_reduce(found, op="max")
        return float(found)

    def _synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=_DTYPES[self.precision], device=self.device)

    # ---- what a rank computes ----------------------------------------------------------------------------------------

    @property
    def _sizes(self) -> Sizes:
        return SIZES[self.device]

    def _gemms(self) -> dict[int, list[float]]:
        """tokens -> flop/s by width: half of the time of a square weight, half of one four times as wide."""
        widths, tokens = self._sizes.widths, self._sizes.tokens
        found: dict[int, list[float]] = {count: [] for count in tokens}
        for count in tokens:
            for width in widths:
                flops = spent = 0.0
                for other in (width, 4 * width):
                    x, weight = self._random(count, width), self._random(other, width)
                    spent += self._time(partial(F.linear, x, weight), 0.005)
                    flops += 2.0 * count * width * other
                found[count].append(flops / spent)
        return found

    def _attention_rate(self) -> float:
        seq, heads, size = self._sizes.attention
        q, k, v = (self._random(1, heads, seq, size) for _ in range(3))
        spent = self._time(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), 0.02)
        return 2.0 * seq * seq * heads * size / spent

    def _memory_rate(self) -> float:
        x = torch.ones(self._sizes.elements, device=self.device)
        total = torch.empty_like(x)  # written before: what first touches of new pages cost is no rate of memory
        return 12.0 * x.numel() / self._time(lambda: torch.add(x, x, out=total), 0.02)

    def _optimizer(self) -> float:
        """Seconds of AdamW for a float32 parameter, in weights of a layer's size."""
        hidden = self._sizes.layer[0]
        weights = [nn.Parameter(torch.ones(4 * hidden, hidden, device=self.device)) for _ in range(4)]
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        return self._time(torch.optim.AdamW(weights).step, 0.02) / sum(weight.numel() for weight in weights)

    def _layer(self, hidden: int, heads: int, tokens: int, share: float) -> tuple[float, float]:
        """Seconds of forward and of backward of a decoder layer."""
        layer = _Layer(hidden, heads).to(self.device, _DTYPES[self.precision])
        seq = min(tokens, self._sizes.attention[0])  # its rate depends on the length
        x = self._random(tokens // seq, seq, hidden).requires_grad_()
        forward = self._time(lambda: layer(x), share)
        both = self._time(lambda: layer(x).sum().backward(), share)
        return forward, max(both - forward, forward)

    def _floor(self) -> float:
        forward, backward = self._layer(32, 1, 8, 0.02)
        return (forward + backward) / 2.0

    def _fitted(self, machine: Machine) -> tuple[Machine, float]:
        """The machine that predicts the measured layer, and its relative error with a quarter of the tokens."""
        hidden, heads, tokens = self._sizes.layer
        shape = ModelShape("layer", 1, hidden, 4 * hidden, 128, heads, gated=True)

        def predicted(count: int, efficiency: float) -> float:
            seq = min(count, self._sizes.attention[0])
            work = Workload(shape, count // seq, seq, self.precision)
            tried = replace(machine, efficiency=efficiency)
            return float(layer_time(tried, work, LayoutTable.of([Layout()], work.batch)).total[0])

        goal = sum(self._layer(hidden, heads, tokens, 0.05))
        low, high = 0.02, 1.0
        for _ in range(30):
            middle = (low + high) / 2.0
            low, high = (middle, high) if predicted(tokens, middle) > goal else (low, middle)
        small = sum(self._layer(hidden, heads, tokens // 4, 0.05))
        return replace(machine, efficiency=high), predicted(tokens // 4, high) / small - 1.0

    # ---- between ranks -----------------------------------------------------------------------------------------------

    def _links(self, group: Communicator) -> tuple[tuple[float, float], float]:
        """(latency, bytes/s) of a group's collectives, and the root mean square of their relative errors."""
        if group.size == 1:
            return (0.0, 1e12), 0.0
        rows, times = [], []
        for power in range(0, self._sizes.largest + 1, 2):
            nbytes = 4096 << power
            part, whole = torch.ones(nbytes // 4 // group.size), torch.ones(nbytes // 4)
            part, whole = part.to(self.device), whole.to(self.device)
            # What `gather_seconds` and `all_reduce_seconds` count: alpha log2 n + bytes (n - 1) / n / bandwidth.
            terms = math.log2(group.size), nbytes * (group.size - 1) / group.size
            for count, run in ((1, partial(group.all_gather, part)), (2, partial(group.all_reduce, whole))):
                rows.append([count * term for term in terms])
                times.append(self._time(run, 0.01))
        weighted = np.array(rows) / np.array(times)[:, None]
        (alpha, slope), *_ = np.linalg.lstsq(weighted, np.ones(len(times)), rcond=None)
        alpha, slope = max(float(alpha), 0.0), max(float(slope), 1e-13)
        wrong = weighted @ np.array([alpha, slope]) - 1.0
        return (alpha, 1.0 / slope), float(np.sqrt(np.mean(wrong**2)))

    # ---- the host ----------------------------------------------------------------------------------------------------

    def _room(self) -> tuple[int, int]:
        """Bytes of a rank's memory, and those of them that no tensor can have."""
        if self.device == "cuda":
            free, total = torch.cuda.mem_get_info()
            return total, max(0, total - free - torch.cuda.memory_reserved())
        pages, page = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
        with open("/proc/self/statm") as file:
            resident = int(file.read().split()[1]) * page
        return pages * page // self.per_node, int(self._slowest(float(resident)))

    def _host_rate(self) -> float:
        x = torch.ones(64 << 20, dtype=torch.uint8, device=self.device)
        there = torch.ones(64 << 20, dtype=torch.uint8, pin_memory=True)
        return x.numel() / self._time(lambda: there.copy_(x), 0.02)

    def _disk_rate(self) -> float:
        data = os.urandom(1 << 20) * 64
        with tempfile.TemporaryFile() as file:

            def write() -> None:
                file.seek(0)
                file.write(data)
                file.flush()
                os.fsync(file.fileno())

            return len(data) / self._time(write, 0.02)


class _Layer(nn.Module):
    """Attention and a gated MLP, each behind an RMSNorm."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norms = heads, nn.ModuleList(nn.RMSNorm(hidden) for _ in range(2))
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.up, self.down = nn.Linear(hidden, 8 * hidden, bias=False), nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norms[0](x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        gate, up = self.up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)
