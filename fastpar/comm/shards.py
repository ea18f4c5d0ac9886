"""How a dimension is split over ranks: the rule of `torch.chunk` and DTensor's `Shard`."""

from __future__ import annotations

from fastpar.comm.layout import is_int

MAX_PARTS = 1 << 24  # more ranks than there are; a list of as many numbers still fits


def shard_sizes(total: int, parts: int) -> list[int]:
    """Rows of each of `parts` ranks out of `total`: ceil(total / parts) each until they are used up; the last ones
    get fewer, or none.

        shard_sizes(10, 4) == [3, 3, 3, 1]        shard_sizes(4, 3) == [2, 2, 0]

    Raises ValueError if `total` is negative or `parts` is not positive.
    """
    for name, value in (("total", total), ("parts", parts)):
        if not is_int(value):
            raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if total < 0:
        raise ValueError(f"total must not be negative, got {total}")
    if not 1 <= parts <= MAX_PARTS:
        raise ValueError(f"parts must be at least 1 and at most {MAX_PARTS}, got {parts}")
    each = -(-total // parts)
    return [max(0, min(each, total - each * part)) for part in range(parts)]


def shard_range(total: int, parts: int, rank: int) -> tuple[int, int]:
    """First row and one past the last row of `rank` under `shard_sizes`: shard_range(10, 4, 1) == (3, 6).

    Raises ValueError as `shard_sizes` does, and IndexError if `rank` is not in 0..parts-1.
    """
    sizes = shard_sizes(total, parts)
    if not is_int(rank):
        raise TypeError(f"rank must be an int, got {type(rank).__name__}")
    if not 0 <= rank < parts:
        raise IndexError(f"rank must be in 0..{parts - 1}, got {rank}")
    start = sum(sizes[:rank])
    return start, start + sizes[rank]
