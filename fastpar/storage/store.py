"""TensorStore: tensors by name in a file, written and read while the caller computes."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import math
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from fastpar.arguments import check_counts, checked
from fastpar.storage.async_file import AsyncFile, Flight, Transfer, empty_aligned
from fastpar.storage.backing import Extents
from fastpar.storage.errors import StorageError
from fastpar.storage.index import ALIGNMENT, DTYPES, MAX_BLOCK_BYTES, Index, KeptTensor, is_block_size


@dataclass
class _StoreEntry:
    """Where a tensor lies, and the transfer of it that was launched last."""

    offset: int
    room: int  # bytes of the file that are its own
    dtype: torch.dtype
    shape: torch.Size
    checksums: Any  # ctypes array of one uint32 per block, or None
    last: Flight | None = None
    last_write: Flight | None = None


class TensorStore:
    """Tensors in a file on a local disk.

        store = fp.storage.TensorStore("/nvme/scratch")
        pending = store.write("exp_avg", exp_avg)        # returns at once
        ...                                              # compute; exp_avg may be read, not written
        pending.wait()
        store.read("exp_avg", out).wait()

    path         a folder on a local disk: where the file is made. It has no name, so several stores and processes may
                 use one folder, and nothing is left there when a process ends, killed ones included. Or a file that
                 `keep` has left, for reading; its `block_bytes` and checksums are what they were
    backend      "io_uring"; "threads" (a pool of `depth` threads with pread and pwrite); "auto": the first where the
                 kernel allows it. `repr(store)` says which, and why not the first
    direct       O_DIRECT, past the page cache: True; False: through it (memory is used twice until the kernel takes it
                 back); "auto": where the file system can. Tensors made by `empty` are then read and written in place,
                 others are copied through a buffer of a block
    checksums    of every block of `block_bytes`, kept in memory (4 bytes each), verified by every read
    depth        blocks in flight at once
    timeout      seconds that a `wait()` takes at most

    Transfers of one name run in the order in which they were launched; those of different names in any. Room on the
    disk is reserved when a name is first written: a full disk raises StorageError in `write`, before anything is
    overwritten. Methods may be called from any thread.

    A failed write makes its name unreadable until a later write of it succeeds: `read`, or the `wait()` of a read that
    was launched before the write had failed, raises the write's error. What other names hold is not affected.

    A process forked from this one has no store: every call there raises StorageError, but `close` and the end of that
    process, which leave this one's store alone. A kept file is not believed: whatever is wrong in it is a StorageError,
    by which no memory has been touched (docs/security.md).
    """

    @checked(computed=False, but=("depth", "block_bytes"))
    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        backend: str = "auto",
        direct: bool | str = "auto",
        checksums: bool = True,
        depth: int = 8,
        block_bytes: int = 1 << 20,
        timeout: float = 600.0,
    ) -> None:
        if not is_block_size(block_bytes):
            allowed = f"a multiple of {ALIGNMENT} from {ALIGNMENT} to {MAX_BLOCK_BYTES}"
            raise ValueError(f"block_bytes must be {allowed}, got {block_bytes!r}")
        if type(depth) is not int or not 1 <= depth <= 256:
            raise ValueError(f"depth must be between 1 and 256, got {depth!r}")
        self._file = AsyncFile(
            path, backend=backend, direct=direct, depth=depth, block_bytes=block_bytes, timeout=timeout
        )
        self._checksums = checksums
        self._lock = threading.RLock()
        self._extents = Extents()
        self._entries: dict[str, _StoreEntry] = {}
        self._leaving: list[_StoreEntry] = []  # deleted, with a transfer in flight
        self._in_flight: deque[Flight] = deque()
        self._discarded: deque[str] = deque()
        self._buffers: list[Tensor] = []
        self._take_over(self._file.tensors)
        # Without a close() the memory of what is in flight has to stay until the file's threads have ended.
        self._finalizer = weakref.finalize(self, _close, self._file, self._in_flight)

    # ---- transfers

    @checked(meta=True, computed=False)
    def write(self, name: str, tensor: Tensor) -> Transfer:
        """Write the tensor under `name`, which it may have already, with any dtype and shape.

        tensor  on the CPU. One that is not contiguous is copied first.

        Raises StorageError if there is no room on the disk.
        """
        source = _on_cpu(name, tensor).detach().contiguous()
        with self._locked("write"):
            entry = self._entry_for_write(name, source)
            entry.last_write = self._launch(name, entry, source, is_write=True)
            return Transfer(entry.last_write, tensor)

    @checked(meta=True, computed=False)
    def read(self, name: str, out: Tensor | None = None) -> Transfer:
        """Read the tensor of that name into `out`, or into a new one.

        out  on the CPU, contiguous, with the dtype and the shape that were written

        Raises KeyError if nothing was written under that name, StorageError if writing it failed.
        """
        with self._locked("read"):
            entry = self._entry(name)
            if out is None:
                out = self._room_for(name, entry)
            _check_out(name, entry, out)
            written = entry.last_write
            if written is not None and written.done() and written.error is not None:
                raise written.error
            return Transfer(self._launch(name, entry, out.detach(), is_write=False), out)

    def _launch(self, name: str, entry: _StoreEntry, memory: Tensor, *, is_write: bool) -> Flight:
        while self._in_flight and self._in_flight[0].done():
            self._in_flight.popleft()
        after = 0 if entry.last is None or entry.last.done() else entry.last.ticket
        entry.last = self._file.submit(
            is_write,
            entry.offset,
            memory,
            checksums=entry.checksums,
            after=after,
            subject=f"tensor {name!r}",
            # Not decided by whether that has failed by now: it may do so at any moment.
            written=None if is_write else entry.last_write,
        )
        self._in_flight.append(entry.last)
        return entry.last

    # ---- names

    @checked(computed=False)
    def delete(self, name: str) -> None:
        """Forget the name; its part of the file is used again. What is in flight ends undisturbed."""
        with self._locked("delete"):
            self._entry(name)
            self._check_writable()
            self._leaving.append(self._entries.pop(name))

    @checked(computed=False)
    def discard(self, name: str) -> None:
        """`delete` it at the store's next call, if it exists. For finalizers, which may run anywhere."""
        self._discarded.append(name)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def names(self) -> list[str]:
        """The names in the order in which they were first written."""
        return list(self._entries)

    @checked(computed=False)
    def spec(self, name: str) -> tuple[torch.dtype, torch.Size]:
        """(dtype, shape) of what `name` holds."""
        with self._locked("spec"):
            entry = self._entry(name)
            return entry.dtype, entry.shape

    def _entry(self, name: str) -> _StoreEntry:
        self._begin()
        if name not in self._entries:
            raise KeyError(f"{self._file.path}: nothing was written under {name!r}")
        return self._entries[name]

    def _entry_for_write(self, name: str, source: Tensor) -> _StoreEntry:
        self._begin()
        self._check_writable()
        room = -(-source.nbytes // ALIGNMENT) * ALIGNMENT
        entry = self._entries.get(name)
        if entry is not None and entry.room == room:
            entry.dtype, entry.shape = source.dtype, source.shape
            return entry
        made = _StoreEntry(self._reserve(room), room, source.dtype, source.shape, self._new_checksums(source.nbytes))
        if entry is not None:
            self._leaving.append(entry)
        self._entries[name] = made
        return made

    def _new_checksums(self, num_bytes: int) -> Any:
        return (ctypes.c_uint32 * self._file.num_blocks(num_bytes))() if self._checksums else None

    def _reserve(self, room: int) -> int:
        still_leaving = []
        for entry in self._leaving:
            if entry.last is not None and not entry.last.done():
                still_leaving.append(entry)
            else:
                self._extents.give_back(entry.offset, entry.room)
        self._leaving = still_leaving
        end = self._extents.end
        offset = self._extents.take(room)
        if self._extents.end > end:
            try:
                self._file.backing.reserve(offset, room)
            except BaseException:
                self._extents.retract(room)
                raise
        return offset

    # ---- memory

    def _room_for(self, name: str, entry: _StoreEntry) -> Tensor:
        try:
            return self.empty(entry.shape, entry.dtype)
        except (RuntimeError, MemoryError) as error:  # torch's allocator raises the former
            num_bytes = math.prod(entry.shape) * entry.dtype.itemsize
            place: dict[str, Any] = {"offset": entry.offset, "num_bytes": num_bytes, "subject": f"tensor {name!r}"}
            raise StorageError(errno.ENOMEM, self._file.path, "read", **place) from error

    @staticmethod
    @checked(computed=False)
    def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor that begins at a page, so that O_DIRECT needs no copy of it."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if min(shape, default=0) < 0 or num_bytes >= 1 << 62:
            raise ValueError(f"shape must not be negative, and of less than 2**62 bytes, got {tuple(shape)}")
        return empty_aligned(num_bytes).view(dtype).view(torch.Size(shape))

    @checked(computed=False)
    def buffers(self, count: int, num_bytes: int) -> list[Tensor]:
        """`count` aligned buffers of at least `num_bytes` each, the same ones at every call; freed by `close`."""
        with self._locked("buffers"):
            self._begin()
            check_counts(1 << 16, count=count)
            check_counts(least=0, num_bytes=num_bytes)
            if len(self._buffers) < count or any(buffer.nbytes < num_bytes for buffer in self._buffers):
                self._buffers = []  # the old ones go before there are new ones
                self._buffers = [empty_aligned(num_bytes) for _ in range(count)]
            return self._buffers[:count]

    # ---- the whole

    @property
    def file_bytes(self) -> int:
        """Bytes of the disk that are taken."""
        return self._extents.end

    def flush(self) -> None:
        """Wait for everything in flight. Raises the first error of a write that nothing has been written over."""
        with self._locked("flush"):
            while self._in_flight:
                self._in_flight[0].settle()
                self._in_flight.popleft()
            for entry in self._entries.values():
                if entry.last_write is not None and entry.last_write.error is not None:
                    raise entry.last_write.error

    @checked(computed=False)
    def keep(self, path: str | os.PathLike[str]) -> None:
        """Give the file that name, on its own disk, with all that was written, and close. TensorStore(path) reads it.

        Raises StorageError if a write has failed, if that name exists, or if it is on another file system; the store is
        as it was then. The name appears when everything is on the disk: there is never half a file under it.
        """
        with self._locked("keep"):
            self._begin()
            self._check_writable()
            self.flush()
            tensors = {
                name: KeptTensor(entry.dtype, entry.shape, entry.offset, entry.checksums)
                for name, entry in self._entries.items()
            }
            self._file.backing.keep(os.fspath(path), self._extents.end, Index(self._file.block_bytes, tensors))
            self.close()

    def _take_over(self, tensors: Mapping[str, KeptTensor]) -> None:
        """What the index of a kept file says."""
        for name, kept in tensors.items():
            sums = None if kept.checksums is None else (ctypes.c_uint32 * len(kept.checksums))(*kept.checksums)
            self._entries[name] = _StoreEntry(kept.offset, 0, kept.dtype, kept.shape, sums)
            self._extents.end = max(self._extents.end, kept.end)

    def _check_writable(self) -> None:
        if self._file.backing.is_readonly:
            raise ValueError(f"{self._file.path}: a kept file can only be read")

    def close(self) -> None:
        """Wait for what is in flight, and give the disk and the buffers back. May be called twice."""
        if not self._file.is_owner:
            self._finalizer()
            return
        with self._lock:
            self._buffers = []
            self._finalizer()

    @contextlib.contextmanager
    def _locked(self, operation: str) -> Iterator[None]:
        self._file.check_owner(operation)
        with self._lock:
            yield

    def _begin(self) -> None:
        """Begin a call that touches names, with the lock held."""
        if not self._finalizer.alive:
            raise ValueError(f"{self._file.path}: the store is closed")
        while self._discarded:
            entry = self._entries.pop(self._discarded.popleft(), None)
            if entry is not None:
                self._leaving.append(entry)

    def __enter__(self) -> TensorStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        file = self._file
        refusal = f" (io_uring is refused: {file.refusal})" if file.refusal else ""
        past = "O_DIRECT" if file.backing.direct else "page cache"
        held = f"{len(self._entries)} tensors, {self.file_bytes} bytes"
        return f"TensorStore({file.path!r}, {file.backend}{refusal}, {past}, {held})"


def _close(file: AsyncFile, in_flight: deque[Flight]) -> None:
    """Close a file; in a forked child, too, when it ends: nothing is in flight there."""
    while file.is_owner and in_flight:
        in_flight[0].settle()
        in_flight.popleft()
    file.close()


def _on_cpu(name: str, tensor: Tensor) -> Tensor:
    if tensor.layout != torch.strided or str(tensor.dtype).removeprefix("torch.") not in DTYPES:
        raise ValueError(
            f"{name!r} is {tensor.dtype}, {tensor.layout}: a store takes dense tensors of {', '.join(DTYPES)}"
        )
    if tensor.device.type != "cpu":
        raise ValueError(f"{name!r} is on {tensor.device}: a store takes CPU tensors; copy it (to pinned memory) first")
    return tensor


def _check_out(name: str, entry: _StoreEntry, out: Tensor) -> None:
    _on_cpu(name, out)
    if out.dtype != entry.dtype or out.shape != entry.shape:
        raise ValueError(
            f"{name!r} holds {entry.dtype} {list(entry.shape)}, and is read into {out.dtype} {list(out.shape)}"
        )
    if not out.is_contiguous():
        raise ValueError(f"{name!r} is read into a tensor that is not contiguous (strides {list(out.stride())})")
