"""Files in the safetensors format: written tensor by tensor, read by rows.

    8 bytes      length of the header, little-endian
    header       JSON: {name: {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}, "__metadata__": {...}}
    data         the tensors' bytes, in row-major order, without holes

The safetensors library writes a file from tensors that are all there, and it maps files, so that nobody can say what
was read. Here a tensor is written when it has been gathered, and the bytes that are read are those of the slice.

Source: the format's description in the README of huggingface/safetensors.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_MAX_HEADER = 100_000_000  # bytes: the library's own limit
_MAX_CALL = 1 << 30  # bytes of one read or write: the system takes less than 2^31

Range = tuple[int, int]


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor lies in a file: `start` counts from the beginning of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int = 0

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class TensorFileWriter:
    """A file whose tensors' names, dtypes and shapes are known, and whose values come in any order.

    It has the name `path` when it is closed after all tensors, and another one until then.
    """

    def __init__(self, path: Path, tensors: Mapping[str, TensorEntry], metadata: Mapping[str, str]):
        self.path, self._partial = path, path.with_name(path.name + ".partial")
        header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
        place = 0
        starts = {}
        # The widest first, so that each begins at a multiple of its size.
        for name, entry in sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])):
            if entry.dtype not in _NAMES:
                raise TypeError(f"{name} has dtype {entry.dtype}, which safetensors files cannot hold")
            starts[name] = place
            offsets = [place, place + entry.nbytes]
            header[name] = {"dtype": _NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": offsets}
            place += entry.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        base = 8 + len(text)
        self._left = {name: TensorEntry(e.dtype, e.shape, base + starts[name]) for name, e in tensors.items()}
        self._fd = os.open(self._partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        self._write(len(text).to_bytes(8, "little") + text, 0)
        os.ftruncate(self._fd, base + place)

    def write(self, name: str, value: Tensor) -> None:
        """Write one tensor, of the dtype and shape that were said."""
        entry = self._left.pop(name)
        if (value.dtype, tuple(value.shape)) != (entry.dtype, entry.shape):
            raise ValueError(
                f"{name} was to be {entry.dtype} of {list(entry.shape)}, got {value.dtype} of {list(value.shape)}"
            )
        self._write(_bytes_of(value.detach().cpu().contiguous()), entry.start)

    def _write(self, data: bytes | memoryview, place: int) -> None:
        done = 0
        while done < len(data):
            done += os.pwrite(self._fd, data[done : done + _MAX_CALL], place + done)

    def close(self) -> None:
        """Give the file its name."""
        if self._left:
            raise ValueError(f"{self.path.name} lacks {sorted(self._left)[:4]}")
        self._end()
        os.replace(self._partial, self.path)

    def abandon(self) -> None:
        """Remove what has been written."""
        self._end()
        self._partial.unlink(missing_ok=True)

    def _end(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


class TensorFile:
    """A file that is read by rows; `bytes_read` counts what has been, the header included.

    Raises ValueError, with the name of the file, for what is not in the format: lengths and offsets are checked against
    the size of the file before anything is allocated.
    """

    def __init__(self, path: Path):
        self.path, self.bytes_read = path, 0
        self._fd = os.open(path, os.O_RDONLY)
        try:
            self.entries = self._header()
        except BaseException:
            self.close()
            raise

    def _header(self) -> dict[str, TensorEntry]:
        size = os.fstat(self._fd).st_size
        if size < 8:
            raise ValueError(f"{self.path} is no safetensors file: it has {size} bytes")
        length = int.from_bytes(self._bytes(8, 0), "little")
        if not 2 <= length <= min(size - 8, _MAX_HEADER):
            raise ValueError(f"{self.path} is no safetensors file: a header of {length} bytes, a file of {size}")
        try:
            header = json.loads(self._bytes(length, 8))
            header.pop("__metadata__", None)
            return {str(name): _entry(said, 8 + length, size) for name, said in header.items()}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"{self.path} has a header that is not one of safetensors: {error}") from None

    def read(self, name: str, dim: int = 0, ranges: Sequence[Range] | None = None) -> Tensor:
        """A tensor in host memory, or of it the given ranges along `dim`, one after the other."""
        entry = self.entries[name]
        if ranges is None or not entry.shape:
            return self.read_box(name, {})
        if any(not 0 <= lo <= hi <= entry.shape[dim] for lo, hi in ranges):
            raise IndexError(f"ranges {list(ranges)} are not all in {name} of {list(entry.shape)} along dim {dim}")
        return self.read_box(name, {dim: ranges})

    def read_box(self, name: str, box: Mapping[int, Sequence[Range]]) -> Tensor:
        """The given ranges of a tensor along each of some dims; of the other dims all."""
        entry = self.entries[name]
        dims = [box.get(dim, [(0, size)]) for dim, size in enumerate(entry.shape)]
        last = max(box, default=0)  # the ranges of the last dim that is cut are runs in the file
        shape = [sum(hi - lo for lo, hi in ranges) for ranges in dims]
        found = torch.empty(shape, dtype=entry.dtype, device="cpu")
        into, done = _bytes_of(found), 0
        inner = math.prod(entry.shape[last + 1 :]) * entry.dtype.itemsize
        outer = [[i for lo, hi in ranges for i in range(lo, hi)] for ranges in dims[:last]]
        for place in itertools.product(*outer):
            row = 0
            for dim, i in enumerate(place):
                row = row * entry.shape[dim] + i
            for lo, hi in dims[last] if dims else [(0, 1)]:
                length = (hi - lo) * inner
                start = row * entry.shape[last] + lo if dims else 0
                self._read_into(into[done : done + length], entry.start + start * inner)
                done += length
        return found

    def _bytes(self, length: int, place: int) -> bytes:
        found = bytearray(length)
        self._read_into(memoryview(found), place)
        return bytes(found)

    def _read_into(self, into: memoryview, place: int) -> None:
        done = 0
        while done < len(into):
            count = os.preadv(self._fd, [into[done : done + _MAX_CALL]], place + done)
            if count == 0:
                raise ValueError(f"{self.path} has become shorter while it was read")
            done += count
        self.bytes_read += done

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _entry(said: Mapping[str, Any], base: int, size: int) -> TensorEntry:
    start, end = said["data_offsets"]
    shape, dtype = tuple(said["shape"]), _DTYPES.get(said["dtype"])
    if dtype is None:
        raise ValueError(f"dtype {said['dtype']!r:.40}")
    if not all(type(number) is int and number >= 0 for number in (*shape, start, end)):
        raise ValueError("sizes that are no counts")
    entry = TensorEntry(dtype, shape, base + start)
    if end - start != entry.nbytes or base + end > size:
        raise ValueError(f"a tensor of {list(shape)} in bytes {start} to {end} of {size - base}")
    return entry


def _bytes_of(value: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    if value.numel() == 0:
        return memoryview(b"")
    array: Any = value.view(-1).view(torch.uint8).numpy()
    return memoryview(array).cast("B")
