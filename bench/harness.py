"""Timing that survives a shared machine: providers, blocks, checks, roofs, memory.

A *provider* is one way to do a job (fastpar's, torch's eager one, torch's compiled one, ...). A *case* builds the
providers of one problem (a dtype and a shape) on one rank. A *lane* (`bench.ranks`) is a set of rank processes started
under one *setting*. `measure` checks every provider of every lane, then times them in interleaved blocks.

Measurement traps, and what is done about each:

* **Drift.** Bandwidth of a virtual machine moves by half over minutes. Providers take turns in short blocks, over all
  lanes (every lane is alive for the whole measurement, only one works at a time), and the order rotates from block to
  block, so that no provider always follows the same one. Compare ratios of one run, never figures of two runs.
* **Page faults and huge pages.** Fresh memory costs 0.4 s per GB with 4 KB pages, which is more than most kernels that
  fill it, and torch's CPU allocator returns every large block to the system. A tuned user sets
  ``THP_MEM_ALLOC_ENABLE=1``. It is read when the process starts, so the two settings are two lanes, and rows say which.
* **Memory that the hypervisor takes back.** A virtual machine may hand free huge pages back to its host within half a
  second (free page reporting); the next one to touch them waits for the host, which made a call with huge pages 12
  times slower here when others had run in between. A training step does not pause like that, so every turn begins with
  `Sampling.lead` untimed calls of the same provider, and the timed ones follow at once.
* **GEMM kernels.** The fp32 matmul precision can change the GEMM kernel (a factor of two on some CPUs). It belongs to
  the setting, so both sides of every ratio use the same one.
* **Adaptive iteration counts.** Ranks that decide for themselves how often to repeat stop matching each other's
  collectives. Counts are fixed, the same on every rank, and decided before the first call.
* **Ranks.** A collective is as slow as its slowest rank: a sample is the maximum over the ranks, and ranks leave a
  barrier together before each. Barriers are not timed.
* **Threads.** Every rank sets its thread count; fastpar and torch get the same. More ranks than cores is a row of its
  own, never an average with the others.
* **Inputs that do not survive.** `Provider.prepare` restores them before every sample, untimed.
* **Warm caches.** On CPU calls follow each other, so inputs that fit a cache are found there, by every provider alike.
* **Results kept or dropped.** The result of a call is released after the clock has stopped, for every provider;
  temporaries that a provider frees by itself are on its own time.
* **Garbage collection** is off inside a block.
* **Wrong results are fast.** A provider is checked against a float64 reference first, at full size; one that misses its
  tolerance is never timed, and the run fails.
* **Other people's load.** Rows carry how many cores *others* used while they were measured (`LoadMeter`).
* **Allocator state hides memory.** Peak memory is measured in fresh processes, one per provider, after a small call has
  loaded code and started threads (`Worker.memory`).
* **Peers that are not there.** A provider whose package is missing or does not import is left out, named in the output
  with the reason (`absent`), and is no failure.

Clocks, caches and memory of CPU and CUDA are in `bench.device`, with the traps that are CUDA's own.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from bench.device import Device, copy_buffers, device_for

QUIET_CORES = 0.15  # others used less than this while a quiet row was measured
SLOW_CHECK_S = 5.0  # a check that takes longer is named


@dataclass(frozen=True)
class Setting:
    """How a process is started: its environment, torch's fp32 matmul precision, and whether samples on CUDA find a cold
    L2 cache.
    """

    name: str
    environment: dict[str, str] = field(default_factory=dict)
    matmul_precision: str = "highest"
    note: str = ""
    flush: bool = True


SETTINGS = {
    "default": Setting("default", {"THP_MEM_ALLOC_ENABLE": "0"}, "highest", "torch as it comes"),
    "tuned": Setting(
        "tuned",
        {"THP_MEM_ALLOC_ENABLE": "1"},
        "medium",
        "THP_MEM_ALLOC_ENABLE=1 (huge pages) and fp32 matmul precision 'medium'",
    ),
}
CUDA_SETTINGS = {
    "cold": Setting("cold", note="CUDA: the L2 cache is flushed before every sample"),
    "hot": Setting("hot", note="CUDA: samples find what the one before left in the L2 cache", flush=False),
}


@dataclass(frozen=True)
class Rank:
    """What a case needs to know about the process it is built in."""

    rank: int = 0
    world_size: int = 1
    threads: int = 1
    setting: Setting = SETTINGS["default"]
    device: str = "cpu"  # "cuda": the rank's current CUDA device, which is that of its number

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The default process group, or None in a single process."""
        return dist.group.WORLD if self.world_size > 1 else None

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier()


@dataclass(frozen=True)
class Error:
    """One deviation from the reference, and how large it may be."""

    value: float
    tolerance: float

    @property
    def ok(self) -> bool:
        return self.value <= self.tolerance  # False for NaN


@dataclass(frozen=True)
class Provider:
    """One way to do the job of a case, on one rank.

    name        as it appears in rows
    kind        "fastpar", "torch" (a peer), "bound" (less work than the job, e.g. no communication) or "roof"
    call        the timed region
    check       runs `call` and returns its errors against the reference; empty for roofs
    prepare     untimed, before every sample
    warm        a small call that loads the same code, for `Worker.memory`; None: `call` itself
    num_bytes   bytes read + written that the job needs at least, over all ranks (0: not a memory-bound job)
    flops       floating-point operations of the job, over all ranks (0: not a GEMM job)
    memory_bound  bytes per rank that it claims to need at most besides its inputs; None: claims nothing
    result_bytes  bytes of results per rank that every provider of the job has to return; not counted as its memory
    absent      why it cannot run here (see `absent`), or empty
    """

    name: str
    kind: str
    call: Callable[[], object]
    check: Callable[[], dict[str, Error]] = dict
    prepare: Callable[[], None] | None = None
    warm: Callable[[], object] | None = None
    num_bytes: float = 0.0
    flops: float = 0.0
    memory_bound: int | None = None
    result_bytes: int = 0
    absent: str = ""

    def info(self) -> ProviderInfo:
        return ProviderInfo(
            self.name, self.kind, self.num_bytes, self.flops, self.memory_bound, self.result_bytes, self.absent
        )


def absent(name: str, reason: str) -> Provider:
    """A peer that is not installed, or does not import: named in the output and not run."""
    return Provider(name, "torch", call=lambda: None, absent=reason)


@dataclass(frozen=True)
class ProviderInfo:
    """The part of a provider that can be sent to another process."""

    name: str
    kind: str
    num_bytes: float = 0.0
    flops: float = 0.0
    memory_bound: int | None = None
    result_bytes: int = 0
    absent: str = ""


class Case(Protocol):
    """One problem. Instances are pickled and sent to every rank."""

    @property
    def calls(self) -> int:
        """Calls per sample: more than one where a call is so short that the barrier's own skew would show."""

    def describe(self) -> dict[str, Any]:
        """What identifies the problem in a row (dtype, shape)."""

    def build(self, rank: Rank) -> list[Provider]:
        """Allocate the inputs and return the providers. The same list, in the same order, on every rank."""


# ---------------------------------------------------------------------------------------------------------- one rank


class Worker:
    """Runs the commands of `measure` on one rank."""

    def __init__(
        self, case: Case, rank: Rank, clock: Callable[[], float] = time.perf_counter, device: Device | None = None
    ) -> None:
        self.case, self.rank = case, rank
        self.device = device or device_for(rank.device, rank.setting.flush, clock)
        self.providers = {p.name: p for p in case.build(rank)}

    def infos(self) -> list[ProviderInfo]:
        return [p.info() for p in self.providers.values()]

    def check(self, name: str) -> dict[str, Error]:
        provider = self.providers[name]
        if provider.prepare:
            provider.prepare()
        return provider.check()

    def sample(self, name: str, iters: int, lead: int = 0) -> tuple[list[float], float]:
        """`iters` samples in seconds per call, and the CPU seconds this process used meanwhile.

        `lead` more come first and are not in the answer.
        """
        provider = self.providers[name]
        calls = 1 if provider.kind == "roof" else self.case.calls
        cpu = time.process_time()
        times = []
        gc.disable()
        try:
            for _ in range(lead + iters):
                if provider.prepare:
                    provider.prepare()
                self.device.settle()
                self.rank.barrier()
                start = self.device.start()
                for _ in range(calls):
                    result = provider.call()
                times.append(self.device.stop(start) / calls)
                del result  # not timed: see the module docstring
        finally:
            gc.enable()
        return times[lead:], time.process_time() - cpu

    def memory(self, name: str) -> int:
        """Peak bytes of two calls above what was in use before them, without the results that every provider returns.
        On CPU resident bytes, and meant for a fresh process.

        The base is taken before the *first* full-size call, so a workspace that a provider keeps counts as extra
        memory even though the second call finds it there (on CUDA, where the process is not fresh, it does not).
        Resolution on CPU: about 0.3 MB, since the kernel keeps the resident size in per-thread counters.
        """
        provider = self.providers[name]
        (provider.warm or provider.call)()
        if provider.prepare:
            provider.prepare()
        base = self.device.track_memory()
        for _ in range(2):
            result = provider.call()
            del result
            if provider.prepare:
                provider.prepare()
        return max(0, self.device.peak_memory() - base - provider.result_bytes)


def local_tensor(x: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; any other tensor as it is."""
    from torch.distributed.tensor import DTensor

    local: torch.Tensor = x.to_local() if isinstance(x, DTensor) else x
    return local


def copy_roofs(num_bytes: int, world_size: int, device: str = "cpu") -> list[Provider]:
    """Copy bandwidth in place and between two reused buffers of `num_bytes` per rank; bytes read + written count."""
    source, target = copy_buffers(num_bytes, device)
    traffic = 2.0 * source.numel() * 4 * world_size
    return [
        Provider("roof: scale in place", "roof", lambda: source.mul_(1.0), num_bytes=traffic),
        Provider("roof: copy, reused buffers", "roof", lambda: target.copy_(source), num_bytes=traffic),
    ]


def gemm_roof(dtype: torch.dtype, world_size: int, size: int = 0, device: str = "cpu") -> Provider:
    """Rate of `F.linear` on square matrices in `dtype`, at the setting's matmul precision.

    size  0: 2048 on CPU, 8192 on CUDA, where smaller ones do not fill the device
    """
    size = size or (2048 if device == "cpu" else 8192)
    x, w = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    flops = 2.0 * size**3 * world_size
    return Provider(f"roof: GEMM {size}^3", "roof", lambda: torch.nn.functional.linear(x, w), flops=flops)


# ------------------------------------------------------------------------------------------------------- all the ranks


class Lane(Protocol):
    """Rank processes under one setting; every method acts on all ranks and returns rank 0's or the worst answer."""

    setting: Setting
    world_size: int
    threads: int

    def build(self, case: Case) -> list[ProviderInfo]: ...

    def check(self, name: str) -> dict[str, Error]: ...

    def sample(self, name: str, iters: int, lead: int = 0) -> tuple[list[float], float]: ...


class LoadMeter:
    """Cores that other processes kept busy, from /proc/stat. Zero where there is no /proc/stat."""

    def __init__(self, read: Callable[[], float] | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self._read, self._clock = read or _busy_seconds, clock
        self.others = self.wall = 0.0

    def start(self) -> None:
        self._busy_at, self._wall_at = self._read(), self._clock()

    def stop(self, own_cpu: float) -> None:
        self.others += max(0.0, self._read() - self._busy_at - own_cpu)
        self.wall += self._clock() - self._wall_at

    @property
    def other_cores(self) -> float:
        return self.others / self.wall if self.wall else 0.0


def _busy_seconds() -> float:
    """Seconds all cores together were not idle since boot (user, nice, system, irq, softirq, steal)."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return 0.0
    ticks = [int(f) for f in fields]
    return (sum(ticks[0:3]) + sum(ticks[5:8])) / 100.0


@dataclass
class Measurement:
    """What `measure` learned about one provider of one lane. `problem` is empty, or why there are no times.

    Nothing was tried with a provider that is `provider.absent`.
    """

    provider: ProviderInfo
    setting: str
    errors: dict[str, Error] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    other_cores: float = 0.0
    problem: str = ""
    extra_bytes: int | None = None


@dataclass(frozen=True)
class Sampling:
    """How often to measure: `blocks` rounds over all providers, in each `lead` untimed and `iters` timed samples."""

    blocks: int = 5
    iters: int = 2
    lead: int = 1

    def __post_init__(self) -> None:
        if self.blocks < 1 or self.iters < 1 or self.lead < 0:
            raise ValueError(f"blocks ({self.blocks}) and iters ({self.iters}) must be >= 1, lead ({self.lead}) >= 0")


def measure(case: Case, lanes: Sequence[Lane], plan: Sampling, only: Iterable[str] = ()) -> list[Measurement]:
    """Check every provider of `case` in every lane, then time those that are right, in interleaved blocks.

    only: words for `picks`; with any, providers that none of them picks are left out (roofs stay).
    """
    wanted = tuple(only)
    entries: list[tuple[Lane, Measurement, LoadMeter]] = []
    for lane in lanes:
        for info in lane.build(case):
            if not wanted or info.kind == "roof" or any(picks(w, info.name) for w in wanted):
                entries.append((lane, Measurement(info, lane.setting.name), LoadMeter()))
    present = [entry for entry in entries if not entry[1].provider.absent]
    for lane, found, _ in present:
        _check(lane, found)
    timed = [entry for entry in present if not entry[1].problem]
    for block in range(plan.blocks):
        shift = block % len(timed) if timed else 0
        for lane, found, meter in timed[shift:] + timed[:shift]:
            meter.start()
            seconds, cpu = lane.sample(found.provider.name, plan.iters, plan.lead)
            meter.stop(cpu)
            found.seconds += seconds
    wall = sum(meter.wall for _, _, meter in timed)
    average = sum(meter.others for _, _, meter in timed) / wall if wall else 0.0
    for _, found, meter in timed:
        # /proc/stat counts in 10 ms steps: a provider that ran for less than this is given the average of the case.
        found.other_cores = meter.other_cores if meter.wall >= 0.5 else average
    return [found for _, found, _ in entries]


def picks(word: str, name: str) -> bool:
    """Whether a word of --only picks a provider: "torch" also picks "torch.compile", "=torch" does not."""
    return word[1:] == name if word.startswith("=") else word in name


def _check(lane: Lane, found: Measurement) -> None:
    began = time.perf_counter()
    try:
        found.errors = lane.check(found.provider.name)
    except ProviderError as error:
        found.problem = f"failed: {error}"
        return
    finally:  # a run that is stopped says what it was waiting for
        if (seconds := time.perf_counter() - began) > SLOW_CHECK_S:
            what = f"{found.provider.name} ({found.setting})"
            print(f"checking {what} took {seconds:.0f} s", file=sys.stderr, flush=True)
    wrong = {name: e for name, e in found.errors.items() if not e.ok}
    if wrong:
        text = ", ".join(f"{name} error {e.value:.3g} (allowed {e.tolerance:.3g})" for name, e in wrong.items())
        found.problem = f"wrong result, not timed: {text}"


class ProviderError(RuntimeError):
    """A provider raised the same way on every rank; the lane is still usable."""


# --------------------------------------------------------------------------------------------------------- statistics


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear interpolation between the closest ranks; `percent` in [0, 100]."""
    if not values:
        raise ValueError("values must not be empty")
    if not 0 <= percent <= 100:
        raise ValueError(f"percent ({percent}) must be in [0, 100]")
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def summary(seconds: Sequence[float]) -> dict[str, float]:
    """median, min, p10 and p90 in milliseconds, and the number of samples."""
    return {
        "median": statistics.median(seconds) * 1e3,
        "min": min(seconds) * 1e3,
        "p10": percentile(seconds, 10) * 1e3,
        "p90": percentile(seconds, 90) * 1e3,
        "samples": len(seconds),
    }


def slowest(per_rank: Sequence[Sequence[float]]) -> list[float]:
    """Sample by sample, the time of the slowest rank."""
    if len({len(times) for times in per_rank}) != 1:
        raise ValueError(f"ranks returned different numbers of samples: {[len(t) for t in per_rank]}")
    return [max(times) for times in zip(*per_rank, strict=True)]
