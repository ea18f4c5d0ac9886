"""Copies of the host's tensors on a device, beside what the device computes. Not measured yet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class Upload:
    """Copies from pinned memory of the host to a CUDA device, on a stream of its own.

    with upload.stream():                      # also what is to follow the copy, such as a gather
        copy = upload.copy(x)
        event = upload.event()
    upload.arrived(event, copy)                # the current stream waits for it; the host does not
    upload.settle()                            # the host waits for all copies: x may be written to
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)  # copies, beside the kernels of the current stream

    @staticmethod
    def of(device: torch.device) -> Upload | None:
        """None where the device's memory is the host's."""
        return Upload(device) if device.type == "cuda" else None

    @contextmanager
    def stream(self) -> Iterator[None]:
        with torch.cuda.stream(self._stream):
            yield

    def copy(self, x: Tensor) -> Tensor:
        return x.to(self.device, non_blocking=True)

    def event(self) -> torch.cuda.Event:
        """Marks that what has been put on the stream so far is done."""
        return self._stream.record_event()

    def arrived(self, event: torch.cuda.Event, x: Tensor) -> None:
        """Let the current stream use x, which was allocated on the other one."""
        current = torch.cuda.current_stream(self.device)
        current.wait_event(event)
        x.record_stream(current)

    def settle(self) -> None:
        self._stream.synchronize()


def host_memory(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros in the host's memory, which the device copies from without a detour."""
    return torch.zeros(numel, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")
