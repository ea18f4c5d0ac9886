"""Transfers between tensors and a file that run while the caller computes (csrc/runtime/async_file.h)."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fastpar.arguments import check_seconds
from fastpar.storage._library import library
from fastpar.storage.backing import BackingFile
from fastpar.storage.errors import ChecksumError, StorageError
from fastpar.storage.index import KeptTensor

_ENDED, _CORRUPT = -1, -2  # FileCode in csrc/runtime/async_file.h
_SLICE = 0.1  # seconds within C at most, so that Ctrl-C is heard
BACKENDS = ("auto", "io_uring", "threads")


class Flight:
    """A transfer as its file knows it. Holds the memory until it has ended, and no longer.

    written  of a read: the write that it comes after. Where that has failed, its error is the read's, whatever the read
             itself has found: the bytes in the file are neither the new ones nor the old.
    """

    def __init__(self, file: AsyncFile, ticket: int, memory: Any, subject: str, written: Flight | None = None) -> None:
        self.ticket = ticket
        self.error: StorageError | None = None  # why it failed; known once `done()` is true
        self._file, self._memory, self._subject, self._written = file, memory, subject, written
        self._lock = threading.Lock()
        self._is_done = False

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        if self._is_done:
            return True
        self._file.check_owner("wait")
        if not self._lock.acquire(blocking=False):
            return False  # somebody waits for it
        try:
            return self._poll(0.0)
        finally:
            self._lock.release()

    def settle(self, timeout: float | None = None) -> None:
        """Wait until it has ended, well or not. Raises TimeoutError."""
        if self._is_done:
            return
        self._file.check_owner("wait")
        seconds = self._file.timeout if timeout is None else timeout
        deadline = time.monotonic() + seconds
        with self._lock:
            while not self._poll(max(0.0, min(_SLICE, deadline - time.monotonic()))):
                if time.monotonic() >= deadline:
                    raise TimeoutError(
                        f"{self._file.path}: {self._subject} has not ended within {seconds:g} s. The disk is slower "
                        "than that, or hangs (see the kernel's log)."
                    )

    def _poll(self, seconds: float) -> bool:
        if not self._is_done:
            ended, error = self._file._wait(self.ticket, seconds, self._subject)
            if ended:
                if self._written is not None:  # has ended before this began; another thread may be taking note of it
                    self._written.settle()
                    error = self._written.error or error
                self.error = error
                self._memory = self._written = None
                self._is_done = True
        return self._is_done


class Transfer:
    """A write or a read that has been launched. `wait()` returns its tensor.

    Until it has returned do not write to a tensor that is being written to the file, and do not touch one that is being
    read into. The tensor's memory is kept until then, whether or not anybody waits.
    """

    def __init__(self, flight: Flight, tensor: Tensor) -> None:
        self._flight, self._tensor = flight, tensor

    def done(self) -> bool:
        """Whether it has ended, well or not: `wait()` would return, or raise, at once."""
        return self._flight.done()

    def wait(self, timeout: float | None = None) -> Tensor:
        """The tensor, once it is written or read.

        timeout  seconds; None: the store's

        Raises StorageError (the same at every call) if it failed, ChecksumError if what was read is not what was
        written, and TimeoutError when time is up: it is still in flight then, and may be waited for again. A read
        behind a write that has failed raises the write's error, whenever either was launched.
        """
        if timeout is not None and not (isinstance(timeout, (int, float)) and timeout == 0):
            timeout = check_seconds(timeout)
        self._flight.settle(timeout)
        if self._flight.error is not None:
            raise self._flight.error
        return self._tensor


class AsyncFile:
    """A file (see `BackingFile`) with transfers at offsets that are multiples of 4096."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        backend: str,
        direct: bool | str,
        depth: int,
        block_bytes: int,
        timeout: float,
    ) -> None:
        if backend not in BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
        self._owner = os.getpid()
        self.backing = BackingFile(path, direct)
        self.path, self.timeout, self.block_bytes = self.backing.path, timeout, block_bytes
        self.refusal = ""  # why io_uring is not used, where it was wanted
        self.tensors: Mapping[str, KeptTensor] = {}  # of a kept file
        try:
            if self.backing.is_readonly:
                index = self.backing.index()
                self.block_bytes, self.tensors = index.block_bytes, index.tensors
            self.backend, self._handle = self._create(backend, depth)
        except BaseException:
            self.backing.close()
            raise

    def _create(self, backend: str, depth: int) -> tuple[str, int]:
        number = ctypes.c_int64()
        for is_ring in {"auto": (1, 0), "io_uring": (1,), "threads": (0,)}[backend]:
            handle = library().file_create(
                self.backing.descriptor, self.backing.direct, is_ring, depth, self.block_bytes, number
            )
            if handle:
                return ("threads", "io_uring")[is_ring], handle
            self.refusal = os.strerror(number.value)
        cause = f"no {backend}: {self.refusal}"
        raise StorageError(number.value, self.path, "open", cause=cause)

    def num_blocks(self, num_bytes: int) -> int:
        return -(-num_bytes // self.block_bytes)

    def submit(
        self,
        is_write: bool,
        offset: int,
        tensor: Tensor,
        *,
        checksums: Any,
        after: int,
        subject: str,
        written: Flight | None = None,
    ) -> Flight:
        """tensor is contiguous; `checksums` a ctypes array of num_blocks() uint32, or None; `after` a ticket or 0."""
        count = 0 if checksums is None else len(checksums)
        ticket = library().file_submit(
            self._handle, is_write, offset, tensor.data_ptr(), tensor.nbytes, checksums, count, after
        )
        if ticket == 0:
            raise MemoryError(f"no memory for another transfer of {self.path}")
        return Flight(self, ticket, (tensor, checksums), subject, written)

    def _wait(self, ticket: int, seconds: float, subject: str) -> tuple[bool, StorageError | None]:
        failure = (ctypes.c_int64 * 4)()
        status = library().file_wait(self._handle, ticket, seconds, failure)
        if status <= 0:
            return status == 0, None
        code, offset, num_bytes, is_write = failure
        place: dict[str, Any] = {"offset": offset, "num_bytes": num_bytes, "subject": subject}
        operation = "write" if is_write else "read"
        if code == _CORRUPT:
            cause = "the checksum is not that of what was written"
            return True, ChecksumError(errno.EBADMSG, self.path, operation, cause=cause, **place)
        if code == _ENDED:
            return True, StorageError(errno.ENODATA, self.path, operation, cause="the file has become shorter", **place)
        return True, StorageError(code, self.path, operation, **place)

    @property
    def is_owner(self) -> bool:
        """Whether this process has the file's threads: those of a forked child stayed with its parent."""
        return os.getpid() == self._owner

    def check_owner(self, operation: str) -> None:
        """Raises StorageError in a forked child. Before any lock is taken: a thread of the parent may have held it."""
        if not self.is_owner:
            cause = (
                f"this process ({os.getpid()}) was forked from the one that opened the store ({self._owner}), and has "
                "none of its threads; open another store here"
            )
            raise StorageError(errno.EPERM, self.path, operation, cause=cause)

    def close(self) -> None:
        """Waits for what is in flight, and ends the threads. In a forked child it gives the descriptor back alone."""
        if self._handle:
            if self.is_owner:
                library().file_destroy(self._handle)
            self.backing.close()
        self._handle = 0


def empty_aligned(num_bytes: int) -> Tensor:
    """Uninitialised bytes at a page of their own, which O_DIRECT can read and write without a copy."""
    page = 4096
    memory = torch.empty(num_bytes + page, dtype=torch.uint8)
    start = -memory.data_ptr() % page
    return memory[start : start + num_bytes]
