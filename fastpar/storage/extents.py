"""Which parts of a file are free."""

from __future__ import annotations

from bisect import bisect_left, insort


class Extents:
    """First fit over the free ranges of a file that grows when nothing fits. Sizes are the caller's, aligned.

    >>> extents = Extents(); a, b = extents.take(8192), extents.take(4096)
    >>> extents.give_back(a, 8192); extents.take(4096), extents.take(4096), extents.take(4096)
    (0, 4096, 12288)
    """

    def __init__(self) -> None:
        self.end = 0  # of the file
        self._free: list[tuple[int, int]] = []  # (offset, bytes), by offset; neighbours are one

    def take(self, num_bytes: int) -> int:
        """Offset of a range that is the caller's from now on."""
        for i, (offset, free) in enumerate(self._free):
            if free >= num_bytes:
                self._free[i : i + 1] = [(offset + num_bytes, free - num_bytes)] if free > num_bytes else []
                return offset
        offset = self.end
        self.end += num_bytes
        return offset

    def retract(self, num_bytes: int) -> None:
        """Undo the last `take`, which has let the file grow by that."""
        self.end -= num_bytes

    def give_back(self, offset: int, num_bytes: int) -> None:
        if num_bytes == 0:
            return
        insort(self._free, (offset, num_bytes))
        at = bisect_left(self._free, (offset, num_bytes))
        for i in (at, at - 1):  # join with the one after, then with the one before
            if 0 <= i < len(self._free) - 1 and sum(self._free[i]) == self._free[i + 1][0]:
                self._free[i : i + 2] = [(self._free[i][0], self._free[i][1] + self._free[i + 1][1])]

    @property
    def free_bytes(self) -> int:
        return sum(num_bytes for _, num_bytes in self._free)
