"""The memory that CUDA ranks share, with torch's symmetric memory in mocks: addresses, lifetime, messages."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastpar.comm.symmetric import buffer as symmetric
from fastpar.comm.symmetric.buffer import SymmetricBuffer
from tests.rehearsal import device  # noqa: F401  puts it in place


class Handle:
    """Of two ranks: memory of the peer, and where it begins in its allocation."""

    rank, multicast_ptr = 0, 0

    def __init__(self, own: torch.Tensor, offset: int = 0) -> None:
        self.allocation = torch.zeros(own.numel() + offset, dtype=torch.uint8, device="cuda")
        self.offset = offset
        self.buffer_ptrs = [own.data_ptr() - offset, self.allocation.data_ptr()]

    def get_buffer(self, rank: int, sizes: Any, dtype: torch.dtype) -> torch.Tensor:
        return self.allocation[: sizes[0]]


class NewHandle(Handle):
    def get_remote_tensor(self, rank: int, sizes: Any, dtype: torch.dtype) -> torch.Tensor:
        return self.allocation[self.offset : self.offset + sizes[0]]


def create(monkeypatch: pytest.MonkeyPatch, make: Any) -> SymmetricBuffer:
    made: list[Any] = []
    module = SimpleNamespace(empty=torch.empty, rendezvous=lambda own, group: made.append(make(own)) or made[-1])
    monkeypatch.setattr(symmetric, "_torch_symmetric_memory", lambda: module)
    comm: Any = SimpleNamespace(rank=0, size=2, group=None, barrier=lambda: None)
    buffer = SymmetricBuffer._create_cuda(comm, torch.device("cuda", 0), 256, 64)
    buffer.made = made[-1]  # type: ignore[attr-defined]
    return buffer


def test_a_peers_memory_begins_where_ours_does_in_its_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer: Any = create(monkeypatch, lambda own: NewHandle(own, offset=512))
    assert buffer.signals[1] == buffer.made.allocation.data_ptr() + 512


def test_an_offset_that_torch_does_not_know_of_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert create(monkeypatch, Handle).size == 2
    with pytest.raises(RuntimeError, match="at an offset into its allocation"):
        create(monkeypatch, lambda own: Handle(own, offset=512))


def test_memory_goes_with_the_buffer_and_not_when_the_collector_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = create(monkeypatch, NewHandle)
    own = weakref.ref(buffer._of(0))
    gc.disable()
    try:
        del buffer
        assert own() is None
    finally:
        gc.enable()


def test_a_failed_rendezvous_says_how_to_go_without_multicast(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(own: torch.Tensor) -> Any:
        raise RuntimeError("CUDA driver error: invalid argument")

    with pytest.raises(RuntimeError, match="TORCH_SYMM_MEM_DISABLE_MULTICAST=1"):
        create(monkeypatch, fail)
