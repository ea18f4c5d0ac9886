"""The end of a kept file: what lies where in it.

tensors     each at a multiple of 4096, none over another
index       JSON: {"block_bytes": ..., "tensors": {name: [dtype, shape, offset, checksums of its blocks or null]}}
trailer     32 bytes: "FASTPAR1", offset and bytes of the index (uint64 each, little-endian), the CRC of the index
            (uint32, as in csrc/runtime/checksum.h), 0

A checksum finds damage, not malice: whoever writes a file can write its checksum. So nothing in it is believed. Every
number is held against the file's size and the other numbers before anything is allocated or read by it, dtypes are
those of a fixed list, and whatever else the file says is a StorageError (docs/security.md).
"""

from __future__ import annotations

import errno
import json
import math
import os
import reprlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from fastpar.storage._library import library
from fastpar.storage.errors import ChecksumError, StorageError

ALIGNMENT = 4096  # kFileAlignment in csrc/runtime/async_file.h
MAX_BLOCK_BYTES = 1 << 30  # kMaxBlockBytes there
MAX_INDEX_BYTES = 256 << 20  # read in one piece, and ten times that as Python objects
MAX_DIMS = 64  # of a tensor: what torch's iterators take
_MAX_ELEMENTS = 1 << 58  # whose bytes and strides fit into 64 bits for every dtype
_MAX_CHECKSUM = (1 << 32) - 1

_TRAILER = struct.Struct("<8sQQII")
_MAGIC = b"FASTPAR1"
_DTYPE_NAMES = ["bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "bfloat16"]
_DTYPE_NAMES += ["float32", "float64", "complex32", "complex64", "complex128", "float8_e4m3fn", "float8_e4m3fnuz"]
_DTYPE_NAMES += ["float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"]
DTYPES: Mapping[str, torch.dtype] = {name: getattr(torch, name) for name in _DTYPE_NAMES if hasattr(torch, name)}


@dataclass(frozen=True)
class KeptTensor:
    """One line of an index: `checksums` are those of its blocks, or None."""

    dtype: torch.dtype
    shape: torch.Size
    offset: int
    checksums: Sequence[int] | None

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def end(self) -> int:
        """Where the next tensor may begin."""
        return self.offset + -(-self.num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Index:
    """What a kept file holds, by name in the order in which it was written."""

    block_bytes: int
    tensors: Mapping[str, KeptTensor]


def append_index(descriptor: int, path: str, offset: int, index: Index) -> None:
    """Write index and trailer at `offset`, and everything to the disk. `descriptor` must go through the page cache.

    Raises StorageError where the index would be larger than any that is read.
    """
    tensors = {
        name: [
            str(kept.dtype).removeprefix("torch."),
            list(kept.shape),
            kept.offset,
            None if kept.checksums is None else list(kept.checksums),
        ]
        for name, kept in index.tensors.items()
    }
    text = json.dumps({"block_bytes": index.block_bytes, "tensors": tensors}).encode()
    if len(text) > MAX_INDEX_BYTES:
        cause = (
            f"the index of {len(tensors)} tensors takes {len(text)} bytes, at most {MAX_INDEX_BYTES} are read back. "
            f"Larger blocks than {index.block_bytes} bytes have fewer checksums (block_bytes=)"
        )
        raise StorageError(errno.EFBIG, path, "keep", cause=cause)
    trailer = _TRAILER.pack(_MAGIC, offset, len(text), library().checksum(text, len(text)), 0)
    os.ftruncate(descriptor, offset)
    with open(descriptor, "wb", buffering=0, closefd=False) as file:
        file.seek(offset)
        for part in (text, trailer):
            left = memoryview(part)
            while left:
                left = left[file.write(left) :]
    os.fsync(descriptor)


def read_index(descriptor: int, path: str) -> Index:
    """The index of the file.

    Raises StorageError if it has none, or one that no store writes; ChecksumError if it is damaged.
    """
    size = os.fstat(descriptor).st_size
    trailer = os.pread(descriptor, _TRAILER.size, max(0, size - _TRAILER.size))
    if len(trailer) < _TRAILER.size or not trailer.startswith(_MAGIC):
        raise StorageError(errno.EINVAL, path, "open", cause="it is not a file that TensorStore.keep() has left")
    _, offset, num_bytes, expected, rest = _TRAILER.unpack(trailer)
    if offset + num_bytes + _TRAILER.size != size or offset % ALIGNMENT or rest:
        _refuse(path, f"the trailer says {num_bytes} bytes at {offset} of a file of {size}")
    if num_bytes > MAX_INDEX_BYTES:
        _refuse(path, f"the trailer says {num_bytes} bytes, more than the {MAX_INDEX_BYTES} of the largest index")
    text = os.pread(descriptor, num_bytes, offset)
    if len(text) != num_bytes or library().checksum(text, num_bytes) != expected:
        cause = "the index is not what was written"
        raise ChecksumError(errno.EBADMSG, path, "open", offset=offset, num_bytes=num_bytes, cause=cause)
    try:
        raw = json.loads(text, object_pairs_hook=_distinct, parse_constant=_no_number)
    except (ValueError, RecursionError, MemoryError) as error:
        _refuse(path, f"it is not JSON that can be read ({type(error).__name__}: {str(error)[:200]})")
    return _Checked(path, offset).index(raw)


def _refuse(path: str, cause: str) -> NoReturn:
    raise StorageError(errno.EINVAL, path, "open", cause=f"no store writes such an index: {cause}")


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a name is there twice")
    return made


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON")


class _Checked:
    """Turns plain JSON into an Index of a file whose tensors end before `end`."""

    def __init__(self, path: str, end: int) -> None:
        self._path, self._end = path, end

    def index(self, raw: Any) -> Index:
        if type(raw) is not dict or set(raw) != {"block_bytes", "tensors"}:
            _refuse(self._path, "it has to be an object with block_bytes and tensors")
        block_bytes, entries = raw["block_bytes"], raw["tensors"]
        if not is_block_size(block_bytes):
            self._say("block_bytes", block_bytes, f"a multiple of {ALIGNMENT} up to {MAX_BLOCK_BYTES}")
        if type(entries) is not dict:
            self._say("tensors", entries, "an object")
        tensors = {name: self._tensor(f"tensor {name!r}", entry, block_bytes) for name, entry in entries.items()}
        self._check_apart(tensors)
        return Index(block_bytes, tensors)

    def _tensor(self, whose: str, entry: Any, block_bytes: int) -> KeptTensor:
        if type(entry) is not list or len(entry) != 4:
            self._say(whose, entry, "[dtype, shape, offset, checksums]")
        dtype, shape, offset, checksums = entry
        if type(dtype) is not str or dtype not in DTYPES:
            self._say(f"the dtype of {whose}", dtype, f"one of {', '.join(DTYPES)}")
        if (
            type(shape) is not list
            or len(shape) > MAX_DIMS
            or not all(_is_count(size, _MAX_ELEMENTS) for size in shape)
        ):
            self._say(f"the shape of {whose}", shape, f"at most {MAX_DIMS} sizes")
        # Zeros aside: the strides of an empty tensor are products of its other sizes.
        if math.prod(max(size, 1) for size in shape) > _MAX_ELEMENTS:
            self._say(f"the shape of {whose}", shape, "a tensor that an address can be had for")
        if not _is_count(offset, self._end) or offset % ALIGNMENT:
            self._say(f"the offset of {whose}", offset, f"a multiple of {ALIGNMENT} up to {self._end}")
        kept = KeptTensor(DTYPES[dtype], torch.Size(shape), offset, checksums)
        if kept.end > self._end:
            cause = f"{whose} has {kept.num_bytes} bytes at {offset}, and the index begins at {self._end}"
            _refuse(self._path, cause)
        blocks = -(-kept.num_bytes // block_bytes)
        if checksums is not None and not (_are_counts(checksums, _MAX_CHECKSUM) and len(checksums) == blocks):
            self._say(f"the checksums of {whose}", checksums, f"null, or {blocks} numbers of 32 bits")
        return kept

    def _check_apart(self, tensors: Mapping[str, KeptTensor]) -> None:
        end = 0
        # An empty tensor may have a place that was given to others later.
        held = [(kept.offset, kept.end, name) for name, kept in tensors.items() if kept.num_bytes > 0]
        for offset, stop, name in sorted(held):
            if offset < end:
                _refuse(self._path, f"tensor {name!r} begins at {offset}, within another one")
            end = stop

    def _say(self, what: str, found: Any, allowed: str) -> NoReturn:
        _refuse(self._path, f"{what} is {reprlib.repr(found)}, where it has to be {allowed}")


def is_block_size(value: Any) -> bool:
    """Whether a file may be cut into blocks of that many bytes."""
    return type(value) is int and 0 < value <= MAX_BLOCK_BYTES and value % ALIGNMENT == 0


def _is_count(value: Any, largest: int) -> bool:
    """A whole number from 0; a bool is none."""
    return type(value) is int and 0 <= value <= largest


def _are_counts(value: Any, largest: int) -> bool:
    return type(value) is list and all(_is_count(one, largest) for one in value)
