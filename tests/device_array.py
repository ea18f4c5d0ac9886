"""Arrays in the emulated device memory, for the tests under `tests.emulated`.

Outputs hold poison (0xff bytes: NaN in every float type) until a kernel writes them. Memory ends where the array ends,
so that AddressSanitizer sees a step beyond; what lies between rows that are further apart than their length is poison
too, and `check_gaps` sees whether it still is.
"""

from __future__ import annotations

from typing import Any

import numpy as np

POISON = 0xFF


class DeviceArray:
    """A 2-D (or 1-D) array with `row_stride` elements from row to row, `offset` elements past an aligned address."""

    def __init__(self, shape: tuple[int, ...], dtype: Any, row_stride: int | None = None, offset: int = 0) -> None:
        import fastpar_emulation as emulation

        dtype = np.dtype(dtype)
        rows, columns = (1, shape[0]) if len(shape) == 1 else shape
        self.row_stride = columns if row_stride is None else row_stride
        extent = (rows - 1) * self.row_stride + columns if rows > 0 else 0
        self.buffer = emulation.Buffer(extent * dtype.itemsize, offset * dtype.itemsize)
        self._bytes = np.frombuffer(self.buffer, dtype=np.uint8)
        flat = self._bytes.view(dtype)
        strides = (self.row_stride * dtype.itemsize, dtype.itemsize)
        self.array = np.lib.stride_tricks.as_strided(flat, (rows, columns), strides) if extent > 0 else flat[:0]
        if len(shape) == 1 or extent == 0:
            self.array = self.array.reshape(shape)

    @classmethod
    def of(cls, values: np.ndarray, row_stride: int | None = None, offset: int = 0) -> DeviceArray:
        result = cls(values.shape, values.dtype, row_stride, offset)
        result.array[...] = values
        return result

    def check_gaps(self) -> None:
        rows, columns = self.array.shape
        itemsize = self.array.itemsize
        for row in range(rows - 1):
            gap = self._bytes[(row * self.row_stride + columns) * itemsize : (row + 1) * self.row_stride * itemsize]
            assert (gap == POISON).all(), f"bytes after row {row} were overwritten"


def float_to_bfloat16(x: np.ndarray) -> np.ndarray:
    """The bits of bfloat16, rounded to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), rounded)


def bfloat16_to_float(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)
