"""The errors of files that tensors are kept in."""

from __future__ import annotations

import errno as codes
import os
from typing import Any

_ADVICE = {
    codes.ENOSPC: "Free some space there, or give the store a folder on a larger disk.",
    codes.EDQUOT: "The user's quota of that disk is used up.",
    codes.EIO: "The disk reports an error: see the kernel's log.",
    codes.EFBIG: "The file would grow beyond the limit of the process (`ulimit -f`) or of the file system.",
    codes.EACCES: "The folder must be writable for this user.",
    codes.EROFS: "That file system is mounted read-only.",
}


class StorageError(OSError):
    """A file could not be created, written or read. Nothing of the transfer that it belongs to may be used.

    errno, strerror and filename are as for any OSError; besides them
        operation    "open", "reserve", "write", "read" or "wait"
        offset       in the file, of the block that failed; None: of no block
        num_bytes    of that block, or that were asked for
    """

    def __init__(
        self,
        number: int,
        path: str,
        operation: str,
        *,
        offset: int | None = None,
        num_bytes: int | None = None,
        subject: str = "",
        cause: str = "",
    ) -> None:
        super().__init__(number, cause or os.strerror(number), path)
        self.operation, self.offset, self.num_bytes, self.subject = operation, offset, num_bytes, subject

    def __str__(self) -> str:
        what = f" {self.num_bytes} bytes" * (self.num_bytes is not None)
        where = f" at offset {self.offset}" * (self.offset is not None)
        whose = f" for {self.subject}" * bool(self.subject)
        code = codes.errorcode.get(self.errno or 0, self.errno)
        advice = f" {_ADVICE[self.errno]}" if self.errno in _ADVICE else ""
        return f"{self.filename}: {self.operation}{what}{where}{whose} failed: {self.strerror} ({code}).{advice}"

    def __reduce__(self) -> tuple[Any, ...]:  # the arguments are not those of the base
        return _rebuild, (type(self), self.errno, self.filename, self.operation, self.strerror, vars(self))


class ChecksumError(StorageError):
    """What was read is not what was written."""


def _rebuild(
    cls: type[StorageError], number: int, path: str, operation: str, cause: str, state: dict[str, Any]
) -> StorageError:
    error = cls(number, path, operation, cause=cause)
    vars(error).update(state)
    return error
