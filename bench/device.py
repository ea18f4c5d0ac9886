"""Where a provider runs: how its time and its peak memory are measured there, and what has to happen before a sample.

CPU: the host's clock, and the resident size of the process.

CUDA, and what is done about its traps:

* **Launches return before the work is done.** A sample is the time between two events on the stream that the provider
  launches on; the host waits for the second one, which makes any asynchronous error this provider's.
* **Host time between launches** is not bandwidth. The flush below keeps the device busy for about a third of a
  millisecond while the host runs ahead and queues the provider's kernels, as it does inside a training step. A provider
  that synchronises gives that lead away, and pays, as it would there. The setting `hot` has no flush: there, short
  calls show their host time.
* **A hot L2 cache** makes small tensors faster than the memory is. Before every sample the device reads `FLUSH_BYTES`,
  several times any L2; reads, because what a flush writes would be written back on the provider's time.
* **Warm-up.** `Worker.check` has run the provider at full size before it is timed, so compilers, module loading and the
  caching allocator's first requests are over; `Sampling.lead` more samples precede the timed ones.
* **Peak memory** is the caching allocator's own count, exact, in the same process. What a library takes from the driver
  past the allocator is not in it.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

FLUSH_BYTES = 1 << 30  # an H100 has 50 MB of L2, a B200 126 MB; reading this takes about 0.35 ms


class Device(Protocol):
    """The clock and the memory of the device that a rank's providers run on."""

    def settle(self) -> None:
        """Untimed, right before a sample, after `Provider.prepare`."""

    def start(self) -> Any:
        """Begin a sample; returns what `stop` needs."""

    def stop(self, mark: Any) -> float:
        """Seconds since `start`, when everything launched meanwhile has finished."""

    def track_memory(self) -> int:
        """Forget earlier peaks; returns the bytes in use now."""

    def peak_memory(self) -> int:
        """Most bytes in use since `track_memory`."""


class HostDevice:
    """CPU tensors."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock

    def settle(self) -> None:
        pass

    def start(self) -> float:
        return self._clock()

    def stop(self, mark: float) -> float:
        return self._clock() - mark

    def track_memory(self) -> int:
        gc.collect()
        reset_peak_memory()
        return resident_bytes("VmRSS")

    def peak_memory(self) -> int:
        return resident_bytes("VmHWM")


class CudaDevice:
    """CUDA tensors on the current device.

    flush  reads more than any cache holds; None: samples find whatever the one before left there
    cuda   torch.cuda, or in tests something that behaves like it
    """

    def __init__(self, flush: Callable[[], object] | None, cuda: Any = torch.cuda) -> None:
        self._flush, self._cuda = flush, cuda

    def settle(self) -> None:
        self._cuda.synchronize()  # the preparation, and whatever the sample before left behind
        if self._flush is not None:
            self._flush()

    def start(self) -> Any:
        event = self._cuda.Event(enable_timing=True)
        event.record()
        return event

    def stop(self, mark: Any) -> float:
        event = self._cuda.Event(enable_timing=True)
        event.record()
        event.synchronize()
        return float(mark.elapsed_time(event)) * 1e-3

    def track_memory(self) -> int:
        gc.collect()
        self._cuda.synchronize()
        self._cuda.reset_peak_memory_stats()
        return int(self._cuda.memory_allocated())

    def peak_memory(self) -> int:
        self._cuda.synchronize()
        return int(self._cuda.max_memory_allocated())


class Recorded:
    """A call as a CUDA graph: launched by the host once, replayed from then on, into the same results.

    updated  tensors that the call changes, which are set back after the launch: one call of this object is one call
    """

    def __init__(self, call: Callable[[], Any], updated: Sequence[torch.Tensor] = ()) -> None:
        self._call, self._updated = call, list(updated)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._found: Any = None

    def __call__(self) -> Any:
        if self._graph is None:
            before = [tensor.clone() for tensor in self._updated]
            self._call()  # compiles, and makes what a capture must not make
            for tensor, kept in zip(self._updated, before, strict=True):
                tensor.copy_(kept)
            torch.cuda.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._found = self._call()
        self._graph.replay()
        return self._found


def device_for(kind: str, flush: bool = True, clock: Callable[[], float] = time.perf_counter) -> Device:
    """The `Device` of a rank whose tensors live on `kind`, "cpu" or "cuda"; `flush` and `clock` are for one of them."""
    if kind == "cpu":
        return HostDevice(clock)
    if not flush:
        return CudaDevice(None)
    buffer = torch.zeros(FLUSH_BYTES // 4, device=kind)
    return CudaDevice(buffer.amax)


def resident_bytes(field_name: str) -> int:
    """VmRSS (now) or VmHWM (peak) of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field_name + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field_name}; peak memory needs Linux")


def reset_peak_memory() -> None:
    """Make VmHWM start again from the present resident size (see proc(5), clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5")


# ----------------------------------------------------------------------------------------------------------- the roofs


def copy_buffers(num_bytes: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Two float32 buffers of `num_bytes` each; on CUDA of at least `FLUSH_BYTES`, so that no cache holds a part."""
    least = 4 if device == "cpu" else FLUSH_BYTES
    source = torch.ones(max(num_bytes, least) // 4, device=device)
    return source, torch.ones_like(source)
