"""The description of a message's tensors, dtypes and shapes, as bytes."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from fastpar.comm.errors import CommError

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
_MAX_DIMS, _MAX_NUMEL = 64, 1 << 48
_DTYPES = {number: dtype for dtype, number in DTYPE_NUMBERS.items()}

Spec = tuple[torch.dtype, tuple[int, ...]]


def describe(tensors: Sequence[Tensor], note: bytes = b"") -> bytes:
    """Words of 8 bytes: the number of tensors, and for each its dtype, dims and shape. Then the note."""
    words = [len(tensors)]
    for x in tensors:
        words += (DTYPE_NUMBERS[x.dtype], x.ndim, *x.shape)
    return struct.pack(f"<{len(words)}q", *words) + note


def parse(description: bytes) -> tuple[list[Spec], bytes]:
    """Dtypes and shapes, and the note. Raises CommError for what `describe` does not write: it comes from a peer."""
    words, at, specs = len(description) // 8, 1, []
    numbers = struct.unpack_from(f"<{words}q", description)
    if words < 1 or not 0 <= numbers[0] <= words // 2:
        raise _damaged("the number of its tensors")
    for _ in range(numbers[0]):
        if words - at < 2:
            raise _damaged("a tensor")
        number, dims = numbers[at : at + 2]
        shape = numbers[at + 2 : at + 2 + dims] if 0 <= dims <= _MAX_DIMS else ()
        if number not in _DTYPES or len(shape) != dims:
            raise _damaged("the dtype or the dims of a tensor")
        if any(size < 0 for size in shape) or math.prod(shape) > _MAX_NUMEL:
            raise _damaged(f"a tensor of shape {shape}")
        specs.append((_DTYPES[number], shape))
        at += 2 + dims
    return specs, description[8 * at :]


def _damaged(what: str) -> CommError:
    return CommError(f"what a peer says of its message is not what a rank writes ({what})")


def flat_bytes(x: Tensor) -> Tensor:
    """A contiguous tensor as what every backend can move."""
    return x.view(-1).view(torch.uint8)
