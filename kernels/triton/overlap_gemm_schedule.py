"""The tables that say which tile is computed when (`Note: schedules` of overlap_gemm_kernels.py).

All of it is integers on the host: the same arguments give the same table on every rank, and ranks must agree on which
slot of which owner is which tile.

Rank-rotated order: rank r of W gathers shards in the order r, r+1, ..., r-1, own rows first since they need no wait; it
scatters to owners in the order r+1, ..., r-1, r, own tiles last since their partials need no way. At any time, every
rank reads from, or writes to, another one.

Grouped order: within a shard the tiles go down GROUP_M row tiles, then to the next column tile, so that the tiles that
run at the same time share rows and columns in the L2 cache.
"""

from __future__ import annotations

from typing import NamedTuple

GROUP_M = 8


class Tile(NamedTuple):
    """`rows` rows from `row` on, the columns of column tile `col`."""

    row: int
    rows: int
    col: int
    tag: int


def num_blocks(total: int, block: int) -> int:
    """Blocks that cover `total`."""
    return -(-total // block)


def grouped(first_row: int, num_rows: int, num_cols: int, block_m: int) -> list[Tile]:
    """All tiles of `num_rows` rows from `first_row` on and `num_cols` column tiles, in grouped order; tags are 0.

    A worked example: 5 rows from 10 on in blocks of 2, two column tiles, GROUP_M = 8: rows 10 and 11 of column tile 0,
    12 and 13, 14; the same rows of column tile 1.
    """
    starts = range(0, num_rows, block_m)
    tiles = []
    for first in range(0, len(starts), GROUP_M):
        for col in range(num_cols):
            for start in starts[first : first + GROUP_M]:
                tiles.append(Tile(first_row + start, min(block_m, num_rows - start), col, 0))
    return tiles


def gather_tiles(
    sizes: list[int], rank: int, num_cols: int, block_m: int, chunk_rows: int, capacity: int
) -> list[Tile]:
    """What rank `rank` computes of a gathered matrix: shard s has sizes[s] rows, announced in chunks of `chunk_rows`.

    The tag is that of `gather_gemm_kernel`; `chunk_rows` is a multiple of `block_m`, so a tile has one flag.
    """
    size = len(sizes)
    tiles = []
    for step in range(size):
        owner = (rank + step) % size
        first = sum(sizes[:owner])
        for tile in grouped(first, sizes[owner], num_cols, block_m):
            chunk = (tile.row - first) // chunk_rows
            tiles.append(tile._replace(tag=-1 if owner == rank else owner * capacity + chunk))
    return tiles


def owners_by_rows(sizes: list[int], num_cols: int, block_m: int) -> list[list[Tile]]:
    """The tiles of every owner, in slot order, when owner o has sizes[o] rows: reduce-scatter."""
    return [grouped(sum(sizes[:o]), sizes[o], num_cols, block_m) for o in range(len(sizes))]


def owners_by_tiles(num_rows: int, num_cols: int, block_m: int, size: int) -> list[list[Tile]]:
    """The tiles of every owner when each has as many as the others, give or take one: all-reduce.

    Runs of the grouped order, so that an owner's tiles are neighbours; one row of tiles is shared by all owners.
    """
    tiles = grouped(0, num_rows, num_cols, block_m)
    ends = [len(tiles) * o // size for o in range(size + 1)]
    return [tiles[ends[o] : ends[o + 1]] for o in range(size)]


def scatter_tiles(owned: list[list[Tile]], rank: int, slices: int, capacity: int) -> list[Tile]:
    """All tiles of all owners, in the order in which rank `rank` computes them.

    Every owner's tiles are cut into `slices` parts. The first part of every owner comes first, owners rotated and this
    rank last; then the second parts. So an owner can sum its first tiles while the last ones are computed; with one
    slice its own partials, and all sums with them, would come in the last 1/W of the time.
    """
    size = len(owned)
    tiles = []
    for part in range(slices):
        for step in range(1, size + 1):
            owner = (rank + step) % size
            slots = range(len(owned[owner]) * part // slices, len(owned[owner]) * (part + 1) // slices)
            tiles += [owned[owner][slot]._replace(tag=owner * capacity + slot) for slot in slots]
    return tiles


def owner_tiles(owned: list[list[Tile]], rank: int, capacity: int) -> list[Tile]:
    """What rank `rank` sums: its own tiles in slot order, which is the order in which they come."""
    return [tile._replace(tag=rank * capacity + slot) for slot, tile in enumerate(owned[rank])]


def collected_tiles(owned: list[list[Tile]], rank: int, capacity: int) -> list[Tile]:
    """All tiles of all owners, tagged by owner and slot, the first ones of every owner first."""
    longest = max(map(len, owned), default=0)
    order = [(rank + step) % len(owned) for step in range(len(owned))]
    return [
        owned[owner][slot]._replace(tag=owner * capacity + slot)
        for slot in range(longest)
        for owner in order
        if slot < len(owned[owner])
    ]
