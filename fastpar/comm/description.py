"""What a message says about its tensors: dtypes and shapes, as bytes."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
from torch import Tensor

# torch's ScalarType; what that is in DLPack is in csrc/comm/dlpack.h. Others cannot be sent.
DTYPE_NUMBERS = {
    torch.uint8: 0,
    torch.int8: 1,
    torch.int16: 2,
    torch.int32: 3,
    torch.int64: 4,
    torch.float16: 5,
    torch.float32: 6,
    torch.float64: 7,
    torch.complex64: 9,
    torch.complex128: 10,
    torch.bool: 11,
    torch.bfloat16: 15,
    torch.float8_e5m2: 23,
    torch.float8_e4m3fn: 24,
    torch.float8_e5m2fnuz: 25,
    torch.float8_e4m3fnuz: 26,
    torch.uint16: 27,
    torch.uint32: 28,
    torch.uint64: 29,
}
_DTYPES = {number: dtype for dtype, number in DTYPE_NUMBERS.items()}

Spec = tuple[torch.dtype, tuple[int, ...]]


def describe(tensors: Sequence[Tensor], note: bytes = b"") -> bytes:
    """Words of 8 bytes: the number of tensors, and for each its dtype, dims and shape. Then the note."""
    words = [len(tensors)]
    for x in tensors:
        words += (DTYPE_NUMBERS[x.dtype], x.ndim, *x.shape)
    return struct.pack(f"<{len(words)}q", *words) + note


def parse(description: bytes) -> tuple[list[Spec], bytes]:
    """Dtypes and shapes, and the note."""
    (num_tensors,) = struct.unpack_from("<q", description)
    at, specs = 8, []
    for _ in range(num_tensors):
        number, dims = struct.unpack_from("<qq", description, at)
        specs.append((_DTYPES[number], struct.unpack_from(f"<{dims}q", description, at + 16)))
        at += 16 + 8 * dims
    return specs, description[at:]


def flat_bytes(x: Tensor) -> Tensor:
    """A contiguous tensor as what every backend can move."""
    return x.view(-1).view(torch.uint8)
