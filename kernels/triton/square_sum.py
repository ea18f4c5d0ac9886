"""The exact sum of squares for CUDA tensors in Triton, and its root. The numbers are explained in
fastpar.ops.square_sum, the way they are summed in fastpar.kernels.square_sum_kernels.

On an H200 256 MB in 64 tensors take 0.71 ms in float32 and 0.37 in bfloat16, host included, where torch's inexact norm
takes 0.43 and 0.14 (docs/benchmarks.md).

A call makes a fill (zeros), a copy (the table of tensors, from pinned memory), one launch for each dtype and alignment,
and one that carries; however many tensors there are. Nothing waits for the device. The last tables are kept, and where
tensors lie as they did then (torch's pool gives gradients the same memory step after step) the copy falls away.

Traffic, by formula: every element is read once, numel * itemsize bytes, and of every chunk of 16 tiles a few digits are
added to the sum. Compiled for sm_90a, the loop has 29 instructions an element of 16 bits and 40 of float32, mostly for
integers, of which a multiprocessor retires 64 to 128 a clock. So 1e9 elements take an estimated 1 to 2.5 ms on 132 of
them, where reading them alone takes 0.5 ms (bfloat16) or 0.9 (float32) at 4.3 TB/s. In float64 that would be less on
devices that have as many units for it, and ten times more on those that do not. Elements that are float64 are read four
times. An atomic for each digit and chunk, at a few addresses: 6e4 of each for 1e9 elements of float32, spread over the
whole time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
import triton.language as tl
from torch import Tensor

from fastpar.kernels import square_sum_kernels as kernels
from fastpar.kernels.kept_tables import KeptTables, TableUpload
from fastpar.kernels.launch import is_capturing, launch
from fastpar.kernels.square_sum_kernels import carry_kernel, norm_kernel, square_sum_kernel, write_row_kernel

LENGTH = kernels.NUM_COUNTS.value + kernels.NUM_DIGITS.value
WARP_SIZE = 64 if torch.version.hip else 32
THREADS = 256
ALIGNMENT = 16  # bytes, which a thread takes of a tile
FLOAT64_PARTS = 4
MAX_TABLES = 64


class SquareSumKind(NamedTuple):
    """How elements of a dtype are read: as which integers, and as which format."""

    element: Any
    format: int
    itemsize: int

    @property
    def tile(self) -> int:
        return THREADS * ALIGNMENT // self.itemsize

    @property
    def chunk(self) -> int:
        return self.tile * kernels.ITERATIONS.value


KINDS = {
    torch.float32: SquareSumKind(tl.int32, kernels.FLOAT32.value, 4),
    torch.bfloat16: SquareSumKind(tl.int16, kernels.BFLOAT16.value, 2),
    torch.float16: SquareSumKind(tl.int16, kernels.FLOAT16.value, 2),
    torch.float64: SquareSumKind(tl.int64, kernels.FLOAT64.value, 8),
}


def _fills_its_memory(x: Tensor) -> bool:
    """Whether the elements are all of the memory between the first and the last, in any order."""
    if x.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(x.stride(), x.shape, strict=True) if n > 1):
        if stride != expected:
            return False
        expected *= size
    return True


# ---- the table -------------------------------------------------------------------------------------------------------


class SquareSumGroup(NamedTuple):
    """Tensors of one launch: rows [begin, begin + num_tensors) of the table."""

    kind: SquareSumKind
    is_aligned: bool
    begin: int
    num_tensors: int
    num_chunks: int


def _written(rows: list[tuple[int, ...]], device: torch.device) -> Tensor:
    """The table [len(rows), FIELDS] on the device, in a capture: a graph has the addresses in the parameters of
    launches, one for a tensor. It would read pinned memory again whenever it is replayed, and that cannot be had in
    every capture."""
    table = torch.empty(len(rows), kernels.FIELDS.value, dtype=torch.int64, device=device)
    for number, (address, count, first_chunk, _) in enumerate(rows):
        launch(write_row_kernel, 1, device, table, number, address, count, first_chunk, num_warps=1)
    return table


_tables = KeptTables(MAX_TABLES)


def _table(tensors: list[Tensor]) -> tuple[Tensor, list[SquareSumGroup]]:
    """(rows [num_tensors, FIELDS] on the device, the launches) of dense tensors with elements."""
    device = tensors[0].device
    if is_capturing(device):
        rows, groups = _rows(tensors)
        return _written(rows, device), groups

    def make() -> tuple[Tensor, Callable[[TableUpload], tuple[Tensor, list[SquareSumGroup]]]]:
        rows, groups = _rows(tensors)
        return torch.tensor(rows, dtype=torch.int64), lambda table: (table.there, groups)

    key = tuple([tuple([of(x) for x in tensors]) for of in (Tensor.data_ptr, Tensor.numel, _dtype_of)])
    return cast(tuple[Tensor, list[SquareSumGroup]], _tables.find(key, device, make))


def _rows(tensors: list[Tensor]) -> tuple[list[tuple[int, ...]], list[SquareSumGroup]]:
    of_group: dict[tuple[SquareSumKind, bool], list[Tensor]] = {}
    for x in tensors:
        of_group.setdefault((KINDS[x.dtype], x.data_ptr() % ALIGNMENT == 0), []).append(x)
    rows: list[tuple[int, ...]] = []
    groups = []
    for (kind, is_aligned), members in of_group.items():
        begin, chunks = len(rows), 0
        for x in members:
            rows.append((x.data_ptr(), x.numel(), chunks, 0))
            chunks += -(-x.numel() // kind.chunk)
        groups.append(SquareSumGroup(kind, is_aligned, begin, len(members), chunks))
    return rows, groups


def _dtype_of(x: Tensor) -> torch.dtype:
    return x.dtype


# ---- the ops ---------------------------------------------------------------------------------------------------------


def exact_square_sum(tensors: list[Tensor]) -> Tensor:
    """The op fastpar::exact_square_sum."""
    sums = torch.zeros(LENGTH, dtype=torch.int64, device=tensors[0].device)
    dense = [x if _fills_its_memory(x) else x.contiguous() for x in tensors if x.numel() > 0]
    if not dense:
        return sums
    table, groups = _table(dense)
    for group in groups:
        kind = group.kind
        parts = FLOAT64_PARTS if kind.format == kernels.FLOAT64.value else 1
        options = {"ELEMENT": kind.element, "KIND": kind.format, "ALIGNED": group.is_aligned, "TILE": kind.tile}
        launch(
            square_sum_kernel,
            (group.num_chunks, parts),
            sums.device,
            table[group.begin :],
            group.num_tensors,
            sums,
            **options,
            num_warps=THREADS // WARP_SIZE,
        )
    launch(carry_kernel, 1, sums.device, sums, num_warps=1)
    return sums


def square_sum_norm(sums: Tensor, dtype: torch.dtype) -> Tensor:
    """The op fastpar::square_sum_norm."""
    is_float = dtype == torch.float32
    out = torch.empty((), dtype=dtype, device=sums.device)
    digits, lowest, infinity = (24, -149, 0x7F800000) if is_float else (53, -1074, 0x7FF0000000000000)
    bits = out.view(torch.int32 if is_float else torch.int64)
    options = {"DIGITS": digits, "LOWEST": lowest, "INFINITY": infinity, "num_warps": 1}
    launch(norm_kernel, 1, sums.device, sums.contiguous(), bits, **options)
    return out
