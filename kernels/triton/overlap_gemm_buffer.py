"""The memory under overlapped GEMMs: two channels in a symmetric buffer; `Note: protocol` of overlap_gemm.py."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fastpar.kernels import overlap_gemm_kernels as kernels
from fastpar.kernels.launch import launch_named as launch
from fastpar.kernels.overlap_gemm_schedule import Tile

CHANNELS = 2
ALIGN = 256  # bytes; of everything that begins in a buffer
FLAG_CAPACITY = 16384  # flags of a rank on another: tiles of an owner, or chunks of a shard
POLLS_PER_SECOND = 1_000_000  # a poll is a read of the L2 cache between two barriers of a program: not measured yet
POLLS_PER_SECOND_INTERPRETED = 3_000
WAITED_FOR = {
    kernels.EMPTY.value: "to finish the call before the last one",
    kernels.GATHERED.value: "to send rows (chunk {index} of its shard) for all_gather_gemm",
    kernels.PARTIAL.value: "to send its partial tile {index} for gemm_reduce_scatter or gemm_all_reduce",
    kernels.REDUCED.value: "to send its finished tile {index} for gemm_all_reduce",
    kernels.COUNTED.value: "to say how many rows it has for each expert",
    kernels.PUSHED.value: "to send its rows to the experts of this rank",
    kernels.SHOWN.value: "to show its experts' results",
}


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


class PeerTable(NamedTuple):
    """A schedule on the device."""

    tiles: Tensor  # int32 [num_tiles, 4]; one entry that nobody reads, if there are none
    num_tiles: int

    @staticmethod
    def of(tiles: list[Tile], device: torch.device) -> PeerTable:
        rows = torch.tensor(tiles or [Tile(0, 0, 0, 0)], dtype=torch.int32)
        return PeerTable(rows.to(device), len(tiles))


class Symmetric(Protocol):
    """What is used of a fastpar.comm.symmetric.buffer.SymmetricBuffer."""

    rank: int
    size: int
    nbytes: int
    device: torch.device
    pointers: Tensor  # int64 [size]: address of every rank's memory
    signals: Tensor  # int64 [size]: address of every rank's signals, 3 * size or more uint32 that were zero

    def tensor(
        self, shape: tuple[int, ...], dtype: torch.dtype, *, offset: int = 0, rank: int | None = None
    ) -> Tensor: ...


class Channel(NamedTuple):
    """One of the two halves of a buffer; offsets in bytes into the memory (`done`: the signals) of every rank."""

    state: Tensor  # int32 [1]: this rank's epoch
    done: int
    flags: int  # int32 [size, capacity], by sender
    result_flags: int  # int32 [size, capacity], by owner
    data: int


class OverlapBuffer:
    """Memory that the ranks of a group share, arranged for overlapped GEMMs: `Note: protocol`.

    Opening is collective and synchronises the device. While it is open nothing else may use the symmetric buffer or its
    signals. The ranks make the same calls in the same order, with equal shapes, dtypes and options where these say
    which tile or chunk is whose; that is not checked.

    flag_capacity  tiles that one rank may own, and chunks of a shard
    timeout        seconds that a wait lasts at least roughly; a wait counts polls, not time
    """

    def __init__(self, symmetric: Symmetric, *, flag_capacity: int = FLAG_CAPACITY, timeout: float = 30.0) -> None:
        self.symmetric, self.rank, self.size, self.device = symmetric, symmetric.rank, symmetric.size, symmetric.device
        self.flag_capacity, self.timeout = flag_capacity, timeout
        self.on_gpu = self.device.type == "cuda"
        rate = POLLS_PER_SECOND if self.on_gpu else POLLS_PER_SECOND_INTERPRETED
        self.max_polls = min(int(timeout * rate), 2**31 - 2)
        flags_bytes = aligned(4 * self.size * flag_capacity)
        self.channel_bytes = (symmetric.nbytes - CHANNELS * 2 * flags_bytes) // CHANNELS // ALIGN * ALIGN
        if self.channel_bytes <= 0:
            raise ValueError(
                f"the symmetric buffer has {symmetric.nbytes} bytes, but the flags of {self.size} ranks alone take "
                f"{CHANNELS * 2 * flags_bytes}; make it larger, or flag_capacity ({flag_capacity}) smaller"
            )
        symmetric.tensor((CHANNELS * 2 * flags_bytes // 4,), torch.int32).zero_()
        epochs = torch.ones(CHANNELS, 4, dtype=torch.int32, device=self.device)
        data = CHANNELS * 2 * flags_bytes
        self.channels = [
            Channel(
                epochs[c, :1],
                done=4 * c * self.size,
                flags=2 * c * flags_bytes,
                result_flags=(2 * c + 1) * flags_bytes,
                data=data + c * self.channel_bytes,
            )
            for c in range(CHANNELS)
        ]
        self.failed = 4 * CHANNELS * self.size
        self.record = torch.zeros(8, dtype=torch.int32, device=self.device)
        self._record_seen = torch.zeros(8, dtype=torch.int32, pin_memory=self.on_gpu)
        self._has_refused = False  # this rank, which need not wait for the device to know it
        self.stream = torch.cuda.Stream(self.device, priority=-1) if self.on_gpu else None  # before the GEMM
        self._calls = 0
        self._kept: dict[tuple[Any, ...], Any] = {}
        self._loaded: set[tuple[Any, ...]] = set()
        if self.on_gpu:
            torch.cuda.synchronize(self.device)
        for channel in self.channels:
            self.finish(channel)
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def next_channel(self) -> Channel:
        """The channel of the next call, on the host's count."""
        self._calls += 1
        return self.channels[self._calls % CHANNELS]

    def begin(self, channel: Channel) -> None:
        launch(kernels.begin_kernel, 1, self.device, {
            "state": channel.state, "signals": self.symmetric.signals, "done_offset": channel.done,
            "failed_offset": self.failed, "record": self.record, "rank": self.rank, "max_polls": self.max_polls,
            "W": self.size, "num_warps": 1,
        })  # fmt: skip

    def finish(self, channel: Channel) -> None:
        launch(kernels.finish_kernel, 1, self.device, {
            "state": channel.state, "signals": self.symmetric.signals, "done_offset": channel.done,
            "failed_offset": self.failed, "record": self.record, "rank": self.rank, "W": self.size, "num_warps": 1,
        })  # fmt: skip
        self.note_failures()

    def note_failures(self) -> None:
        """Let `check` know of what has failed in the launches up to here, once they have run."""
        self._record_seen.copy_(self.record, non_blocking=True)

    def note_refusal(self) -> None:
        """This rank has refused its arguments: `check` raises from now on, and so do launches that wait."""
        self._has_refused = True
        self.record[kernels.RECORD_PEER.value].fill_(self.rank)
        self.record[kernels.RECORD_WHAT.value].fill_(kernels.REFUSED.value)
        self.note_failures()

    def check(self) -> None:
        """Raise TimeoutError if a wait of this rank, or of a peer, has failed; the buffer is of no use after that.
        RuntimeError if rows did not fit, ValueError if a peer has refused its arguments (`moe_push.py`).

        Every call begins with it. On a GPU it knows of calls that have run to their end, and waits for none.
        """
        what, peer, index, wanted, found = self._record_seen[:5].tolist()
        if what == kernels.PEER_FAILED.value:
            raise TimeoutError(f"rank {self.rank}: a wait of rank {peer} has failed; its own error says for whom")
        if what == kernels.OVERFLOWED.value:
            raise RuntimeError(
                f"rank {peer} would have got {index} rows for its experts, but there is room for {wanted}; make the "
                "exchange with a larger capacity (moe_mlp: max_rows). The call's result is NaN"
            )
        if self._has_refused or what == kernels.REFUSED.value:
            peer = self.rank if self._has_refused else peer
            raise ValueError(f"rank {peer} has refused its arguments: see its error. The call's result is NaN")
        if what:
            raise TimeoutError(
                f"rank {self.rank} waited about {self.timeout} s for rank {peer} "
                f"{WAITED_FOR[what].format(index=index)}: epoch {wanted} did not come, the last one was {found}. Is "
                f"rank {peer} alive, and did it make the same calls? The call's result is NaN where data is missing"
            )

    def view(
        self, channel: Channel, shape: tuple[int, ...], dtype: torch.dtype, *, offset: int = 0, rank: int | None = None
    ) -> Tensor:
        """A tensor in the channel's data, `offset` bytes in, of this rank or of `rank`."""
        return self.symmetric.tensor(shape, dtype, offset=channel.data + offset, rank=rank)

    def flag_views(self, channel: Channel) -> tuple[Tensor, Tensor]:
        """This rank's flags and result flags."""
        shape = (self.size, self.flag_capacity)
        found = [self.symmetric.tensor(shape, torch.int32, offset=o) for o in (channel.flags, channel.result_flags)]
        return found[0], found[1]

    def require(self, nbytes: int, what: str) -> None:
        """Raise ValueError unless a channel holds `nbytes` of data."""
        if nbytes > self.channel_bytes:
            raise ValueError(
                f"{what} needs {nbytes} bytes in each of the {CHANNELS} channels, but the buffer has "
                f"{self.channel_bytes}; create the symmetric buffer with {CHANNELS * (nbytes - self.channel_bytes)} "
                "bytes more, or more"
            )

    def keep(self, make: Any, *arguments: Any) -> Any:
        """make(buffer, *arguments), made once: arguments are numbers and tuples of them."""
        key = (make, *arguments)
        if key not in self._kept:
            self._kept[key] = make(self, *arguments)
        return self._kept[key]

    def table(self, tiles: list[Tile]) -> PeerTable:
        return PeerTable.of(tiles, self.device)

    def load(self, kernel: Any, arguments: dict[str, Any]) -> None:
        """Load a kernel's code with a launch that has nothing to do, the first time that it is used like this.

        CUDA may wait for running kernels when it loads code, and these may spin until another kernel is launched.
        """
        if not self.on_gpu:
            return
        plain = {k: v for k, v in arguments.items() if not isinstance(v, Tensor)}
        kinds = tuple((k, v.dtype, v.data_ptr() % 16) for k, v in arguments.items() if isinstance(v, Tensor))
        key = (kernel, kinds, tuple(plain.items()))
        if key not in self._loaded:
            launch(kernel, 1, self.device, {**arguments, "num_tiles": 0})
            self._loaded.add(key)
