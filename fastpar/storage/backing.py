"""The file behind a store, and which parts of it are free.

It has no name unless it is kept, so that nothing stays behind however a process ends.

O_TMPFILE makes a file that never had a name. Where a file system has no such files, one is made and unlinked at once.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import tempfile
from bisect import bisect_left, insort
from collections.abc import Iterator

from fastpar.storage._library import library
from fastpar.storage.errors import StorageError
from fastpar.storage.index import ALIGNMENT, Index, append_index, read_index

# The kernel does not know O_TMPFILE (it then opens the folder itself), or the file system does not.
_NO_NAMELESS_FILES = (errno.EISDIR, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


class BackingFile:
    """An open file, and whether its `descriptor` passes the page cache by (`direct`).

    path  a folder: the file is a new one in it, without a name; a file: it is that one, for reading (`is_readonly`)
    """

    def __init__(self, path: str | os.PathLike[str], direct: bool | str) -> None:
        if direct not in (True, False, "auto"):
            raise ValueError(f'direct must be True, False or "auto", got {direct!r}')
        self.path = os.fspath(path)
        self.direct = False
        self.is_readonly = os.path.isfile(self.path)
        with self._errors("open"):
            if self.is_readonly:
                self.descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            else:
                self.descriptor = _open_nameless(self.path)
        if direct is not False:
            try:
                self._go_direct(is_required=direct is True)
            except BaseException:
                self.close()
                raise

    def _go_direct(self, is_required: bool) -> None:
        if not self.is_readonly:
            self.reserve(0, ALIGNMENT)
        opened = -1
        try:
            opened = self._reopen(os.O_DIRECT)
            _try_direct(opened, self.is_readonly)
        except OSError as error:
            if opened >= 0:
                os.close(opened)
            if is_required:
                cause = f"direct=True, but O_DIRECT is refused there: {error.strerror}"
                raise StorageError(error.errno or 0, self.path, "open", cause=cause) from error
            return
        os.close(self.descriptor)
        self.descriptor, self.direct = opened, True

    def _reopen(self, flags: int) -> int:
        access = os.O_RDONLY if self.is_readonly else os.O_RDWR
        return os.open(f"/proc/self/fd/{self.descriptor}", access | os.O_CLOEXEC | flags)

    def keep(self, path: str, end: int, index: Index) -> None:
        """Give the file a name, once all of it is on the disk. What has that name already is an error."""
        with self._errors("keep"):
            descriptor = self._reopen(0)
            try:
                append_index(descriptor, self.path, end, index)
                # Python follows the link in /proc only where it is told of a folder (which an absolute path ignores).
                os.link(f"/proc/self/fd/{descriptor}", path, src_dir_fd=descriptor)
                _flush_folder(os.path.dirname(path) or ".")
            finally:
                os.close(descriptor)

    def index(self) -> Index:
        """The index of a kept file."""
        descriptor = self._reopen(0)
        try:
            return read_index(descriptor, self.path)
        finally:
            os.close(descriptor)

    def reserve(self, offset: int, num_bytes: int) -> None:
        """Room on the disk, now, so that a full disk shows here and not in the middle of a write."""
        number = library().file_reserve(self.descriptor, offset, num_bytes)
        if number != 0:
            raise StorageError(number, self.path, "reserve", offset=offset, num_bytes=num_bytes)

    def close(self) -> None:
        """Gives the room on the disk back, unless the file has a name."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1

    @contextlib.contextmanager
    def _errors(self, operation: str) -> Iterator[None]:
        try:
            yield
        except StorageError:
            raise
        except OSError as error:
            raise StorageError(error.errno or 0, self.path, operation) from error


def _open_nameless(folder: str) -> int:
    flags = os.O_RDWR | os.O_CLOEXEC
    try:
        return os.open(folder, flags | os.O_TMPFILE, 0o600)
    except OSError as error:
        if error.errno not in _NO_NAMELESS_FILES or not os.path.isdir(folder):
            raise
    descriptor, name = tempfile.mkstemp(prefix=".fastpar-", dir=folder)
    os.unlink(name)
    return descriptor


def _flush_folder(path: str) -> None:
    """A name is on the disk when its folder is."""
    folder = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _try_direct(descriptor: int, is_readonly: bool) -> None:
    """One aligned block written and read: some file systems open a file with O_DIRECT and refuse its transfers."""
    with mmap.mmap(-1, ALIGNMENT) as page:
        if not is_readonly:
            os.pwritev(descriptor, [page], 0)
        os.preadv(descriptor, [page], 0)


class Extents:
    """The free ranges of a file: first fit over them; it grows when nothing fits. Sizes are the caller's, aligned.

    >>> extents = Extents(); a, b = extents.take(8192), extents.take(4096)
    >>> extents.give_back(a, 8192); extents.take(4096), extents.take(4096), extents.take(4096)
    (0, 4096, 12288)
    """

    def __init__(self) -> None:
        self.end = 0  # of the file
        self._free: list[tuple[int, int]] = []  # (offset, bytes), by offset; neighbours are one

    def take(self, num_bytes: int) -> int:
        """Offset of a range that is the caller's from now on."""
        for i, (offset, free) in enumerate(self._free):
            if free >= num_bytes:
                self._free[i : i + 1] = [(offset + num_bytes, free - num_bytes)] if free > num_bytes else []
                return offset
        offset = self.end
        self.end += num_bytes
        return offset

    def retract(self, num_bytes: int) -> None:
        """Undo the last `take`, which has let the file grow by that."""
        self.end -= num_bytes

    def give_back(self, offset: int, num_bytes: int) -> None:
        if num_bytes == 0:
            return
        insort(self._free, (offset, num_bytes))
        at = bisect_left(self._free, (offset, num_bytes))
        for i in (at, at - 1):  # join with the one after, then with the one before
            if 0 <= i < len(self._free) - 1 and sum(self._free[i]) == self._free[i + 1][0]:
                self._free[i : i + 2] = [(self._free[i][0], self._free[i][1] + self._free[i + 1][1])]
