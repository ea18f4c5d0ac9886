"""Shared memory, problems and exact answers for the tests of overlapped GEMMs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

SIGNAL_BYTES = 1024
# What memory holds before it is used: flags of 1061109567, far ahead of every epoch, and data of 0.747.
DIRT = b"\x3f"


class MappedBuffer:
    """A SymmetricBuffer over one file per rank that all ranks map; with all of them in one process, virtual ranks."""

    def __init__(self, paths: Sequence[Path], rank: int, nbytes: int) -> None:
        self.rank, self.size, self.nbytes, self.device = rank, len(paths), nbytes, torch.device("cpu")
        total = SIGNAL_BYTES + nbytes
        self.maps = [torch.from_file(str(path), shared=True, size=total, dtype=torch.uint8) for path in paths]
        self.signals = torch.tensor([m.data_ptr() for m in self.maps])
        self.pointers = self.signals + SIGNAL_BYTES

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype, *, offset: int = 0, rank: int | None = None) -> Tensor:
        memory = self.maps[self.rank if rank is None else rank][SIGNAL_BYTES + offset :]
        count = torch.Size(shape).numel()
        return memory[: count * dtype.itemsize].view(dtype).view(shape)


class DeviceBuffer:
    """A SymmetricBuffer of one of several virtual ranks on one device: every rank's memory is a tensor there."""

    def __init__(self, memories: Sequence[Tensor], rank: int) -> None:
        self.rank, self.size, self.device = rank, len(memories), memories[rank].device
        self.nbytes = memories[rank].numel() - SIGNAL_BYTES
        self.maps = memories
        self.signals = torch.tensor([m.data_ptr() for m in memories], device=self.device)
        self.pointers = self.signals + SIGNAL_BYTES

    tensor = MappedBuffer.tensor


def create_files(folder: Path, size: int, nbytes: int) -> list[Path]:
    """One file per rank: signals of zero, and memory that is not."""
    paths = []
    for rank in range(size):
        path = folder / f"rank{rank}"
        path.write_bytes(bytes(SIGNAL_BYTES) + DIRT * nbytes)
        paths.append(path)
    return paths


def device_memories(size: int, nbytes: int, device: str) -> list[Tensor]:
    """The same on a device."""
    memories = []
    for _ in range(size):
        memory = torch.full((SIGNAL_BYTES + nbytes,), DIRT[0], dtype=torch.uint8, device=device)
        memory[:SIGNAL_BYTES] = 0
        memories.append(memory)
    return memories


def integers(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """-1, 0 and 1: sums of a few hundred products are exact in every dtype, in every order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, 2, shape, generator=generator).to(dtype)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias, exact for `integers`; asserts that the dtype of x can hold it."""
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert exact.numel() == 0 or exact.abs().max() <= 256
    return exact.to(x.dtype)


def rounded_sum(parts: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    """In float32 and in rank order, then the bias, then one rounding, as the interpreter rounds (it cuts off)."""
    total = torch.zeros_like(parts[0], dtype=torch.float32)
    for part in parts:
        total += part.float()
    if bias is not None:
        total += bias.float()
    if parts[0].dtype == torch.bfloat16 and total.device.type == "cpu":
        return (total.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
    return total.to(parts[0].dtype)
