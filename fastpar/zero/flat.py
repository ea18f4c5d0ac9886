"""Tensors split by rows over ranks: where the rows lie, the memory that they lie in, and how they come together.

    layout = FlatLayout([(5, 3), (2,)], size=2)
    layout.counts                  # (10, 7): elements of each rank: rows 0-2 and 0, rows 3-4 and 1
    shards = FlatShards(comm, tensors)
    shards.shards                  # this rank's rows of every tensor, views of one buffer
    shards.gather(outs)            # all rows of all ranks, into whole tensors

Rows (dim 0) go to ranks by `fastpar.comm.shard_sizes`, the rule of `torch.chunk` and of DTensor's Shard(0): trailing
ranks may have none. A tensor without dimensions belongs to rank 0.

Note: shared memory. Where the ranks share memory, a shard lies where the others can read it, and gathering is a copy
out of their memory: one pass, no staging buffer, and no waiting. The price is two rules, which `published` and
`released` make visible: between a write to shards and a gather, and between a gather and the next write, all ranks
must have passed one of them. Otherwise shards travel by `Communicator.all_gather`, which needs neither.

Note: memory that is kept (`MemoryPool`). On CPU fresh memory costs five to ten times as much to fill as memory that
has been touched (page faults: 1.7 against 12 GB/s for units of 7 MB, measured), and torch's allocator returns every
large block to the system. On other devices torch keeps freed memory itself. A storage's memory is exchanged in place
(`UntypedStorage._swap_data_ptr_`), so that all tensors on that storage see it; where torch has no such method, memory
comes from the allocator and goes back there.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from fastpar.comm import Communicator, shard_range
from fastpar.comm.errors import CommError
from fastpar.comm.observers import note
from fastpar.comm.pending import Pending
from fastpar.comm.shared_memory.region import SharedRegion


class FlatLayout:
    """The places of the rows of tensors of these shapes, sorted by the rank that owns them.

    `counts` are the elements of every rank. A rank's part holds its rows of the first tensor, then those of the
    second, and so on, without gaps.
    """

    def __init__(self, shapes: Sequence[Sequence[int]], size: int) -> None:
        self.size = size
        self.shapes = [tuple(shape) for shape in shapes]
        self._rows = [
            [shard_range(shape[0] if shape else 1, size, rank) for shape in self.shapes] for rank in range(size)
        ]
        numels = [
            [(hi - lo) * math.prod(shape[1:]) for (lo, hi), shape in zip(rows, self.shapes, strict=True)]
            for rows in self._rows
        ]
        self.numels = list(itertools.chain.from_iterable(numels))  # of all tensors, rank by rank
        self.counts = tuple(map(sum, numels))
        self.total = sum(self.counts)

    def rows(self, index: int, rank: int) -> tuple[int, int]:
        """First row and one past the last row that `rank` has of a tensor."""
        return self._rows[rank][index]

    def numels_of(self, index: int) -> list[int]:
        """Elements of a tensor that each rank has; they lie in the tensor in this order."""
        return self.numels[index :: len(self.shapes)]

    def rows_of(self, x: Tensor, index: int, rank: int) -> Tensor:
        """The rows that `rank` has of x, which has the shape of tensor `index`."""
        lo, hi = self._rows[rank][index]
        return (x if x.ndim else x.view(1)).narrow(0, lo, hi - lo)

    def views(self, part: Tensor, rank: int) -> list[Tensor]:
        """A rank's rows of every tensor, out of its flat part."""
        count = len(self.shapes)
        rows = part.split_with_sizes(self.numels[rank * count : (rank + 1) * count])
        return [
            x if len(shape) < 2 else x.view(hi - lo, *shape[1:])
            for x, shape, (lo, hi) in zip(rows, self.shapes, self._rows[rank], strict=True)
        ]

    def parts(self, flat: Tensor) -> list[Tensor]:
        """The parts of all ranks, out of a flat tensor that holds them in the order of ranks."""
        return list(flat.split(self.counts))

    def put_rows(self, flat: Tensor, rows: Sequence[list[Tensor]]) -> None:
        """Copy the parts of all ranks to the rows of each in whole tensors (`FlatShards.rows_in`)."""
        for rank, part in enumerate(self.parts(flat)):
            copy_rows(rows[rank], filled(self.views(part, rank)))

    def sources(self, memory: PeerMemory, mine: int) -> list[list[Tensor]]:
        """The rows of each rank where they lie, in memory that all of them see."""
        flats = [memory.mine if rank == mine else memory.of(rank) for rank in range(self.size)]
        return [filled(self.views(flat[: self.counts[rank]], rank)) for rank, flat in enumerate(flats)]


class PeerMemory:
    """A flat tensor on every rank (`mine`), of `counts[rank]` elements; `of(rank)` is another rank's, where the ranks
    share memory: `is_shared`. `at_host`: in the host's memory, whatever the device is."""

    def __init__(
        self,
        comm: Communicator,
        counts: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        *,
        at_host: bool = False,
    ) -> None:
        self._region: SharedRegion | None = None
        most = max(counts) * dtype.itemsize
        if comm.size > 1 and device.type == "cpu" and most > 0 and comm.local_world() is not None:
            try:
                self._region = SharedRegion(comm, most)
            except CommError:  # on all ranks or none
                self._region = None
        count = counts[comm.rank]
        if self._region is None and at_host:
            self.mine = host_memory(count, dtype, device)
        elif self._region is None:
            self.mine = torch.zeros(count, dtype=dtype, device=device)
        else:
            self.mine = self._region.tensor((count,), dtype)
        self._counts, self._dtype = counts, dtype

    @property
    def is_shared(self) -> bool:
        return self._region is not None

    def of(self, rank: int) -> Tensor:
        assert self._region is not None
        return self._region.tensor((self._counts[rank],), self._dtype, rank=rank)


class FlatShards:
    """The rows of `tensors` (of one dtype and device, the same shapes on all ranks) that belong to each rank.

    Collective: all ranks of `comm` make one, with tensors of the same shapes. Memory: this rank's rows. The tensors
    may be freed afterwards; `shards` start with their rows.

    upload   the shards are in the host's memory, and a gather copies them to this one's device first
    """

    def __init__(self, comm: Communicator, tensors: Sequence[Tensor], *, upload: Upload | None = None) -> None:
        if not tensors:
            raise ValueError("there must be at least one tensor")
        self.comm = comm
        self.layout = FlatLayout([x.shape for x in tensors], comm.size)
        self.dtype = tensors[0].dtype
        self._upload = upload
        self._memory: PeerMemory | None = None
        if upload is None:
            self._memory = PeerMemory(comm, self.layout.counts, self.dtype, tensors[0].device)
            self.flat = self._memory.mine
        else:
            self.flat = host_memory(self.layout.counts[comm.rank], self.dtype, upload.device)
        self.shards = self.layout.views(self.flat, comm.rank)
        for index, (shard, x) in enumerate(zip(self.shards, tensors, strict=True)):
            shard.copy_(self.layout.rows_of(x.detach(), index, comm.rank))
        self._sources: list[list[Tensor]] | None = None
        if self._memory is not None and self._memory.is_shared:
            self._sources = self.layout.sources(self._memory, comm.rank)

    @property
    def is_shared(self) -> bool:
        """Whether the ranks read each other's shards: see `published`."""
        return self._sources is not None

    def published(self) -> None:
        """After a write to shards, before the next gather: returns when all ranks have written. Collective."""
        if self.is_shared:
            self.comm.barrier()

    released = published  # the other way round: after a gather, before the next write

    def gather(self, outs: Sequence[Tensor]) -> None:
        """Write the rows of all ranks to `outs`: whole tensors of any floating dtype, which is rounded to."""
        self.gather_async(outs).wait()

    def abandon(self, pending: Pending[None]) -> None:
        """End a gather that has been begun, and whose result nobody wants."""
        pending.wait()  # it writes to memory that is about to go

    def gather_async(self, outs: Sequence[Tensor]) -> Pending[None]:
        """`gather` in two steps. Over shared memory the copying is done at once, as it waits for nobody."""
        return self.gather_rows_async(self.rows_in(outs))

    def rows_in(self, outs: Sequence[Tensor]) -> list[list[Tensor]]:
        """The rows of each rank in whole tensors, without those that are empty: where `gather_rows_async` writes to."""
        everyone = range(self.comm.size)
        return [filled(self.layout.rows_of(x.detach(), i, rank) for i, x in enumerate(outs)) for rank in everyone]

    def gather_rows_async(self, rows: Sequence[list[Tensor]]) -> Pending[None]:
        """`gather_async` into rows, which one may have kept: to cut tensors takes longer than to copy small ones."""
        if self._sources is not None:
            note("all_gather", self.comm.size, self.layout.total, self.dtype)
            for targets, sources in zip(rows, self._sources, strict=True):
                copy_rows(targets, sources)
            return Pending.ready(None)
        upload = self._upload
        if upload is None:
            pending = self.comm.all_gather_async(self.flat, sizes=self.layout.counts)
        else:
            with upload.stream():
                pending = self.comm.all_gather_async(upload.copy(self.flat), sizes=self.layout.counts)
                begun = upload.event()

        def finish() -> None:
            gathered = pending.wait()
            if upload is not None:
                upload.arrived(begun, gathered)
            self.layout.put_rows(gathered, rows)

        return Pending(None, finish, describe=lambda: "gathering shards", timeout=self.comm.timeout)


def filled(rows: Iterable[Tensor]) -> list[Tensor]:
    return [x for x in rows if x.numel() > 0]


def copy_rows(targets: list[Tensor], sources: list[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources)


class WholeParameters:
    """Tensors of one dtype and device, replicated over `comm`, of which this rank changes its rows (`rows`) only.

    Where the ranks share memory, the tensors are moved to where the others can read them (`values`), and `gather`
    copies changed rows from there: one pass, between two barriers. Else rows are packed, gathered and unpacked.
    (Tried for 4 tensors of 4096 elements that are shared, too, to wait once instead of twice: more host time.)
    """

    def __init__(self, comm: Communicator, tensors: Sequence[Tensor]) -> None:
        self.comm, self.dtype = comm, tensors[0].dtype
        self.layout = FlatLayout([x.shape for x in tensors], comm.size)
        numels = [x.numel() for x in tensors]
        self.values = list(tensors)
        self._mirrored: list[Tensor] = []  # rows of other ranks, here,
        self._peers: list[Tensor] = []  # and where those ranks write them
        self.is_shared = False
        if comm.size > 1:
            memory = PeerMemory(comm, [sum(numels)] * comm.size, self.dtype, tensors[0].device)
            if memory.is_shared:
                self.values = self._cut(memory.mine, numels)
                for value, x in zip(self.values, tensors, strict=True):
                    value.copy_(x)
                self.is_shared = True
                for rank in range(comm.size):
                    if rank != comm.rank:
                        self._mirrored += self._rows(self.values, rank)
                        self._peers += self._rows(self._cut(memory.of(rank), numels), rank)
        self.rows = [self.layout.rows_of(value, index, comm.rank) for index, value in enumerate(self.values)]

    def gather(self) -> None:
        """Bring the other ranks' rows in. Collective: when it returns, no rank reads this one's rows any more, which
        users may write to (averages of weights, load_state_dict)."""
        if self.comm.size == 1:
            return
        if not self.is_shared:
            mine = torch.cat([rows.reshape(-1) for rows in self.rows])
            flat = self.comm.all_gather(mine, sizes=self.layout.counts)
            for rank, part in enumerate(self.layout.parts(flat)):
                if rank != self.comm.rank:
                    sources = filled(self.layout.views(part, rank))
                    copy_rows(self._rows(self.values, rank), sources)
            return
        note("all_gather", self.comm.size, self.layout.total, self.dtype)
        self.comm.barrier()
        copy_rows(self._mirrored, self._peers)
        self.comm.barrier()

    def _cut(self, flat: Tensor, numels: Sequence[int]) -> list[Tensor]:
        ends = list(itertools.accumulate(numels))
        return [
            flat[end - numel : end].view(shape)
            for end, numel, shape in zip(ends, numels, self.layout.shapes, strict=True)
        ]

    def _rows(self, values: Sequence[Tensor], rank: int) -> list[Tensor]:
        """The rows of a rank, of those tensors of which it has some."""
        rows = [self.layout.rows_of(value, index, rank) for index, value in enumerate(values)]
        return filled(rows)


_CAN_SWAP = hasattr(torch.UntypedStorage, "_swap_data_ptr_")


class MemoryPool:
    """Lends memory to storages that have none.

    limit     bytes that lent and kept memory have together, as long as no more is asked for at a time
    nbytes    lent and kept; `peak` is the most so far
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.nbytes = self.peak = 0
        self._kept: list[torch.UntypedStorage] = []  # the oldest first

    def lend(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Give a storage without memory `nbytes` of it."""
        for kept in self._kept:
            if kept.nbytes() == nbytes:
                self._kept.remove(kept)
                storage._swap_data_ptr_(kept)  # type: ignore[attr-defined]
                return
        while self._kept and self.nbytes + nbytes > self.limit:
            self.nbytes -= self._kept.pop(0).nbytes()
        storage.resize_(nbytes)
        self.nbytes += nbytes
        self.peak = max(self.peak, self.nbytes)

    def take_back(self, storage: torch.UntypedStorage) -> None:
        """Leave a storage without memory."""
        nbytes = storage.nbytes()
        if not _CAN_SWAP or storage.device.type != "cpu" or self.nbytes > self.limit:
            storage.resize_(0)
            self.nbytes -= nbytes
            return
        kept = torch.UntypedStorage(0)
        kept._swap_data_ptr_(storage)  # type: ignore[attr-defined]
        self._kept.append(kept)

    def release(self) -> None:
        """Return what is not lent to the system."""
        self.nbytes -= sum(kept.nbytes() for kept in self._kept)
        self._kept.clear()


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
