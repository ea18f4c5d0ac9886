"""The end of a kept file: what lies where in it.

tensors     each at a multiple of 4096
index       JSON: {"block_bytes": ..., "tensors": {name: [dtype, shape, offset, checksums of its blocks or null]}}
trailer     32 bytes: "FASTPAR1", offset and bytes of the index (uint64 each, little-endian), the CRC of the index
            (uint32, as in csrc/runtime/checksum.h), 0
"""

from __future__ import annotations

import errno
import json
import os
import struct
from typing import Any

from fastpar.storage._library import library
from fastpar.storage.errors import ChecksumError, StorageError

_TRAILER = struct.Struct("<8sQQII")
_MAGIC = b"FASTPAR1"


def append_index(descriptor: int, offset: int, index: dict[str, Any]) -> None:
    """Write index and trailer at `offset`, and everything to the disk. `descriptor` must go through the page cache."""
    text = json.dumps(index).encode()
    trailer = _TRAILER.pack(_MAGIC, offset, len(text), library().checksum(text, len(text)), 0)
    os.ftruncate(descriptor, offset)
    with open(descriptor, "wb", buffering=0, closefd=False) as file:
        file.seek(offset)
        for part in (text, trailer):
            left = memoryview(part)
            while left:
                left = left[file.write(left) :]
    os.fsync(descriptor)


def read_index(descriptor: int, path: str) -> dict[str, Any]:
    """The index of the file. Raises StorageError if it has none, ChecksumError if it is damaged."""
    size = os.fstat(descriptor).st_size
    trailer = os.pread(descriptor, _TRAILER.size, max(0, size - _TRAILER.size))
    if len(trailer) < _TRAILER.size or not trailer.startswith(_MAGIC):
        raise StorageError(errno.EINVAL, path, "open", cause="it is not a file that TensorStore.keep() has left")
    _, offset, num_bytes, expected, _ = _TRAILER.unpack(trailer)
    text = os.pread(descriptor, num_bytes, offset)
    if len(text) != num_bytes or library().checksum(text, num_bytes) != expected:
        cause = "the index is not what was written"
        raise ChecksumError(errno.EBADMSG, path, "open", offset=offset, num_bytes=num_bytes, cause=cause)
    index: dict[str, Any] = json.loads(text)
    return index
