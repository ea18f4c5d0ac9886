"""Which blocks of queries and keys attention's Triton kernels multiply: a table of tiles, in compressed rows by block.

A tile (q0, q1, k0, k1, lo, hi) lets query q0 + i see key k0 + j iff lo <= j - i <= hi: `Note: band tiles` of
fastpar.contracts.attention. A program owns a block of one side, rows here, and walks over the other side, columns, in
steps of a fixed width. With the tiles turned over, (k0, k1, q0, q1, -hi, -lo), rows are keys.

Note: runs
    The columns of a tile that some row of the block sees are one range. Cut into steps from its begin, it is a run of
    steps of which every row sees every column, between two runs that have to be masked; any may be empty. `runs` has
    them by block, whole ones first:

        int32 (begin, end, low, high, first, last): columns [begin, end); in a masked run row r sees column c iff
        low <= c - r <= high and first <= r < last; a whole run's length is a multiple of the step

    `blocks` has int32 (block, whole, masked, end): runs [whole, masked) are whole ones, runs [masked, end) are masked.
    Blocks stand by falling work, so that none that is long begins last.

    Example: 4 queries see 4 keys causally, blocks of 2 rows, steps of 2 columns.
        blocks  (1, 1, 2, 3), (0, 0, 0, 1)      runs  (0, 2, -3, 0, 0, 4); (0, 2, -3, 0, 0, 4), (2, 4, -3, 0, 0, 4)

Tables are made on the host, once for the same tiles, and are uploaded from pinned memory without waiting:
`kept_tables.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, cast

import torch
from torch import Tensor

from fastpar.kernels.kept_tables import KeptTables, TableUpload

MAX_KEPT = 256  # tables: kinds of layers, times ranks, times two sides


class StepShape(NamedTuple):
    """Rows to own, rows of a block, columns of a step; `by_key`: rows are keys, and not queries."""

    rows: int
    block: int
    step: int
    by_key: bool = False


class AttentionSteps(NamedTuple):
    """`Note: runs` on a device: blocks int32 [1 or batch, num_blocks, 4], runs int32 [num_runs, 6]."""

    blocks: Tensor
    runs: Tensor

    @property
    def num_blocks(self) -> int:
        return self.blocks.shape[1]

    @property
    def batch_stride(self) -> int:
        """From one batch row's blocks to the next's; 0 where all rows have the same."""
        return self.blocks.stride(0) if len(self.blocks) > 1 else 0


def make_steps(tiles: Tensor, offsets: Tensor | None, shape: StepShape) -> tuple[Tensor, Tensor]:
    """(blocks, runs) on the host of tiles int32 [T, 6] and their offsets int64 [b + 1] by batch row, None: one row."""
    r0, r1, c0, c1, lo, hi = tiles.long().unbind(1)
    if shape.by_key:
        r0, r1, c0, c1, lo, hi = c0, c1, r0, r1, -hi, -lo
    rows, block, step, _ = shape
    first, last = r0 // block, (r1 - 1) // block
    tile = torch.arange(len(tiles)).repeat_interleave(last - first + 1)
    place = torch.arange(len(tile)) - ((last - first + 1).cumsum(0) - (last - first + 1))[tile]
    index = first[tile] + place
    begin, end = index * block, ((index + 1) * block).clamp(max=rows)  # rows of the block
    low, high = (lo + c0 - r0)[tile], (hi + c0 - r0)[tile]
    r0, r1, c0, c1 = r0[tile], r1[tile], c0[tile], c1[tile]
    top, bottom = torch.maximum(begin, r0), torch.minimum(end, r1)
    seen_begin, seen_end = torch.maximum(c0, top + low), torch.minimum(c1, bottom + high)  # by some row
    whole_begin, whole_end = torch.maximum(c0, bottom - 1 + low), torch.minimum(c1, top + high + 1)  # by all
    skipped = -((seen_begin - whole_begin) // step)  # steps up to the first whole one
    steps = (whole_end - seen_begin) // step - skipped
    # Rows of the block that are not the tile's have to be masked everywhere.
    steps = torch.where((r0 <= begin) & (r1 >= end), steps, 0).clamp(min=0)
    left = torch.where(steps > 0, seen_begin + skipped * step, seen_end)
    right = left + steps * step
    batch = torch.zeros_like(tile) if offsets is None else torch.searchsorted(offsets, tile, right=True) - 1
    count, num_batch = -(-rows // block), 1 if offsets is None else len(offsets) - 1
    owner = batch * count + index
    band = [low, high, r0, r1]
    runs = torch.cat([torch.stack([*ends, *band, owner, is_masked], 1) for *ends, is_masked in (
        (left, right, torch.zeros_like(tile)),
        (seen_begin, left, torch.ones_like(tile)),
        (torch.minimum(right, seen_end), seen_end, torch.ones_like(tile)),
    )])  # fmt: skip
    runs = runs[runs[:, 0] < runs[:, 1]]
    return _by_block(runs, count, num_batch, step)


def _by_block(runs: Tensor, count: int, num_batch: int, step: int) -> tuple[Tensor, Tensor]:
    """(blocks, runs) of runs with two more columns: the block over all batch rows, and whether it is masked."""
    for column in (0, 7, 6):  # by block, then whole before masked, then by the first column
        runs = runs[torch.argsort(runs[:, column], stable=True)]
    owner, is_masked = runs[:, 6], runs[:, 7]
    total = num_batch * count
    whole, both = (torch.bincount(x, minlength=total) for x in (owner[is_masked == 0], owner))
    start = both.cumsum(0) - both
    work = torch.zeros(total, dtype=torch.int64).index_add_(0, owner, -((runs[:, 0] - runs[:, 1]) // step))
    block = torch.arange(count).repeat(num_batch)
    blocks = torch.stack([block, start, start + whole, start + both], 1).view(num_batch, count, 4)
    order = torch.argsort(work.view(num_batch, count), dim=1, descending=True, stable=True)
    blocks = blocks.gather(1, order[..., None].expand(-1, -1, 4))
    return blocks.to(torch.int32), runs[:, :6].to(torch.int32)


class HostTables:
    """Device copies of what the last calls read, by what it holds: a table that was edited is another one."""

    def __init__(self) -> None:
        self._kept = KeptTables(MAX_KEPT)

    def steps(self, tiles: Tensor, offsets: Tensor | None, shape: StepShape, device: torch.device) -> AttentionSteps:
        """`make_steps` on a device."""

        def make() -> tuple[Tensor, Callable[[TableUpload], AttentionSteps]]:
            blocks, runs = make_steps(tiles, offsets, shape)
            size = blocks.numel()
            return torch.cat([blocks.flatten(), runs.flatten()]), lambda table: AttentionSteps(
                table.there[:size].view(blocks.shape), table.there[size:].view(-1, 6)
            )

        return cast(AttentionSteps, self._kept.find((_content(tiles), _content(offsets), shape), device, make))

    def on(self, device: torch.device, x: Tensor) -> Tensor:
        """x on a device, dense."""
        if x.device == device:
            return x.contiguous()
        key = _content(x), x.dtype, x.shape
        return cast(Tensor, self._kept.find(key, device, lambda: (x.contiguous(), lambda table: table.there)))


def _content(x: Tensor | None) -> bytes | None:
    return None if x is None else x.numpy().tobytes()
