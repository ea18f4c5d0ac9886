"""Symmetric memory: a buffer of the same size on every rank of a group, which all of them can read and write.

What overlapped GEMMs and the GPU collectives stand on. Each rank has `nbytes` of data and a pad of signals, words of 32
bits that begin at zero; kernels get tables of the addresses of both, by rank. Nothing here orders accesses: that is the
business of who uses the memory.

    one CUDA device a rank, one host or NVLink domain   torch's `_symmetric_memory` (CUDA's virtual memory management)
    CPU ranks of one host                               `fastpar.comm.SharedRegion`
    all ranks in one process (`virtual_ranks`)          one tensor: for tests and benches on one device
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastpar.arguments import checked
from fastpar.comm.communicator import Communicator, GroupLike
from fastpar.comm.shared_memory.region import SharedRegion

SIGNAL_WORDS = 16384  # 64 KiB
MAX_BYTES = 1 << 48  # what addresses have bits for
_ALIGNMENT = 256  # bytes; of the data


class SymmetricBuffer:
    """`nbytes` of data and a pad of `signal_words` signals on every rank of a group, mapped by all of them.

        buffer = SymmetricBuffer.create(comm, nbytes, device="cuda")     # collective: the same nbytes on every rank
        x = buffer.tensor((1024, 1024), torch.bfloat16)                   # here
        y = buffer.tensor((1024, 1024), torch.bfloat16, rank=1)           # what lies there on rank 1
        launch(buffer.pointers, buffer.signals, ...)                      # int64 addresses of all ranks, on the device

    rank, size      this rank, and how many there are
    nbytes          of data, of one rank; they begin at a multiple of 256 bytes (64 for virtual ranks on CPU)
    signal_words    32-bit words of one rank's pad
    device          where the memory is; of `pointers` and `signals` too
    pointers        int64 [size]: where the data of each rank begin in this process
    signals         int64 [size]: the same of the pads
    multicast       the address that stands for the data of all ranks (NVLink's switch adds and distributes there);
                    0 where the hardware or torch has none

    Data and signals are zero when `create` returns, on every rank.
    """

    def __init__(
        self,
        rank: int,
        memory: Sequence[Tensor],
        nbytes: int,
        signal_words: int,
        *,
        multicast: int = 0,
        close: Callable[[], None] | None = None,
    ) -> None:
        """From each rank's memory: uint8 tensors of `footprint(nbytes, signal_words)`, signals first."""
        self.rank, self.size = rank, len(memory)
        self.nbytes, self.signal_words = nbytes, signal_words
        self.device = memory[rank].device
        self._memory: list[Tensor] | None = list(memory)
        self._close = close
        self._handle: Any = None  # torch's, which keeps the peers' memory mapped
        data = _signal_bytes(signal_words)
        bases = [part.data_ptr() for part in memory]
        self.pointers = torch.tensor([base + data for base in bases], dtype=torch.int64, device=self.device)
        self.signals = torch.tensor(bases, dtype=torch.int64, device=self.device)
        self.multicast = multicast + data if multicast else 0

    @classmethod
    @checked(computed=False)
    def create(
        cls, comm: GroupLike, nbytes: int, device: str | torch.device = "cpu", *, signal_words: int = SIGNAL_WORDS
    ) -> SymmetricBuffer:
        """A buffer on every rank of `comm`: a collective call, with the same arguments on every rank.

        device  "cpu": ranks of one host. "cuda": the current device (or "cuda:2"); devices must reach each other, over
                NVLink or PCIe. Several ranks on one device only where TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 is in
                the environment: for tests.

        Raises ValueError for sizes that are not positive or not equal on all ranks, CommError where the ranks cannot
        share memory, RuntimeError where torch has no symmetric memory.
        """
        comm, device = Communicator.of(comm), torch.device(device)
        _check_sizes(nbytes, signal_words)
        sizes = comm.all_gather(torch.tensor([nbytes, signal_words], device="cpu")).view(-1, 2).tolist()
        if any(size != sizes[0] for size in sizes):
            raise ValueError(f"nbytes and signal_words must be equal on all ranks, got {sizes}")
        total = footprint(nbytes, signal_words)
        if comm.size == 1:
            return cls(0, [torch.zeros(total, dtype=torch.uint8, device=device)], nbytes, signal_words)
        if device.type == "cpu":
            region = SharedRegion(comm, total)
            memory = [region.tensor((total,), torch.uint8, rank=rank) for rank in range(comm.size)]
            return cls(comm.rank, memory, nbytes, signal_words, close=region.close)
        if device.type != "cuda":
            raise ValueError(f"device must be cpu or cuda, got {device}")
        return cls._create_cuda(comm, device, nbytes, signal_words)

    @classmethod
    def _create_cuda(cls, comm: Communicator, device: torch.device, nbytes: int, signal_words: int) -> SymmetricBuffer:
        torch_symmetric = _torch_symmetric_memory()
        device = torch.device("cuda", torch.cuda.current_device()) if device.index is None else device
        total = footprint(nbytes, signal_words)
        own = torch_symmetric.empty(total, dtype=torch.uint8, device=device)
        try:
            handle = torch_symmetric.rendezvous(own, comm.group)
        except RuntimeError as error:
            raise RuntimeError(
                f"torch could not share {total} bytes of {device} between the ranks: {error}. Where the binding to a "
                "multicast object fails (virtual machines without a fabric manager, several ranks on a device), start "
                "the ranks with TORCH_SYMM_MEM_DISABLE_MULTICAST=1 in the environment"
            ) from error
        memory = []
        for rank in range(comm.size):
            if rank == comm.rank:
                memory.append(own)
                continue
            part: Any = _peers_part(handle, own, rank)
            part._fastpar_mapping = (own, handle)  # a view of a peer's memory does not own it: its mapping lives longer
            memory.append(part)
        own.zero_()
        torch.cuda.synchronize(device)
        comm.barrier()
        # Not on `own` itself: a tensor that holds itself would keep the memory until the collector comes by.
        buffer = cls(comm.rank, memory, nbytes, signal_words, multicast=int(handle.multicast_ptr))
        buffer._handle = handle
        return buffer

    @checked(computed=False)
    def tensor(self, shape: Sequence[int], dtype: torch.dtype, *, offset: int = 0, rank: int | None = None) -> Tensor:
        """A contiguous tensor over the data of `rank` (None: this one), from byte `offset` on; it keeps them mapped."""
        count = math.prod(shape)
        if offset < 0 or offset % dtype.itemsize or offset + count * dtype.itemsize > self.nbytes:
            raise ValueError(
                f"{tuple(shape)} {dtype} at offset {offset} does not fit into {self.nbytes} bytes "
                f"(offset must be a multiple of {dtype.itemsize})"
            )
        first = _signal_bytes(self.signal_words) + offset
        return self._of(rank)[first : first + count * dtype.itemsize].view(dtype).view(tuple(shape))

    @checked(computed=False)
    def signal_pad(self, rank: int | None = None) -> Tensor:
        """int32 [signal_words]: the signals of `rank` (None: this one)."""
        return self._of(rank)[: 4 * self.signal_words].view(torch.int32)

    def close(self) -> None:
        """End its use: a collective call. Tensors over the memory stay valid; the buffer itself cannot be used."""
        self._memory = self._handle = None
        if self._close is not None:
            self._close()
            self._close = None

    def _of(self, rank: int | None) -> Tensor:
        if self._memory is None:
            raise RuntimeError("this SymmetricBuffer is closed")
        rank = self.rank if rank is None else rank
        if not 0 <= rank < self.size:
            raise ValueError(f"rank must be in 0..{self.size - 1}, got {rank}")
        return self._memory[rank]

    def __repr__(self) -> str:
        return f"SymmetricBuffer(rank={self.rank}, size={self.size}, nbytes={self.nbytes}, device={self.device})"


@checked(computed=False)
def virtual_ranks(
    size: int, nbytes: int, device: str | torch.device = "cpu", *, signal_words: int = SIGNAL_WORDS
) -> list[SymmetricBuffer]:
    """The buffers of `size` ranks that are all in this process, on one device: for tests and benches.

    To a kernel they look like those of real ranks: "peers" are other parts of the same memory.
    """
    if size < 1:
        raise ValueError(f"size must be at least 1, got {size}")
    _check_sizes(nbytes, signal_words)
    total = footprint(nbytes, signal_words)
    memory = torch.zeros((size, total), dtype=torch.uint8, device=device).unbind(0)
    return [SymmetricBuffer(rank, memory, nbytes, signal_words) for rank in range(size)]


def footprint(nbytes: int, signal_words: int = SIGNAL_WORDS) -> int:
    """Bytes that a buffer takes on each rank."""
    return _signal_bytes(signal_words) + -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _signal_bytes(signal_words: int) -> int:
    return -(-4 * signal_words // _ALIGNMENT) * _ALIGNMENT


def _check_sizes(nbytes: int, signal_words: int) -> None:
    if not (1 <= nbytes <= MAX_BYTES and 1 <= signal_words <= MAX_BYTES):
        raise ValueError(
            f"nbytes and signal_words must be at least 1 and at most {MAX_BYTES}, got {nbytes} and {signal_words}"
        )


def _peers_part(handle: Any, own: Tensor, rank: int) -> Any:
    """All of a peer's memory, as a tensor. It begins where `own` begins here, which need not be where the allocation
    does: get_buffer counts from there, get_remote_tensor from `own`."""
    if hasattr(handle, "get_remote_tensor"):
        return handle.get_remote_tensor(rank, own.shape, own.dtype)
    if own.data_ptr() != handle.buffer_ptrs[handle.rank]:
        raise RuntimeError(
            f"torch {torch.__version__} has put symmetric memory at an offset into its allocation, and has no "
            "get_remote_tensor that would know of it"
        )
    return handle.get_buffer(rank, own.shape, own.dtype)


def _torch_symmetric_memory() -> Any:
    """torch's module, an alpha API: what is used of it is looked for first."""
    try:
        import torch.distributed._symmetric_memory as module
    except ImportError as error:
        raise RuntimeError(f"torch {torch.__version__} has no torch.distributed._symmetric_memory: {error}") from error
    missing = [name for name in ("empty", "rendezvous") if not hasattr(module, name)]
    if missing:
        raise RuntimeError(
            f"torch.distributed._symmetric_memory of torch {torch.__version__} lacks {', '.join(missing)}; fastpar "
            "knows it as it is in torch 2.11 to 2.13"
        )
    return module
