"""Ranks with emulated symmetric memory, for tests under `tests.emulated`: every rank a stream, or all in one grid.

float32, bfloat16 (as its bits) and float16 tensors, and what their sums are: in the order of ranks, in float32, rounded
once. All comparisons are of bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from tests.device_array import DeviceArray, bfloat16_to_float, float_to_bfloat16

STORED = {"float32": np.float32, "bfloat16": np.uint16, "float16": np.float16}


def widen(x: np.ndarray, dtype: str) -> np.ndarray:
    return bfloat16_to_float(x) if dtype == "bfloat16" else x.astype(np.float32)


def narrow(x: np.ndarray, dtype: str) -> np.ndarray:
    return float_to_bfloat16(x) if dtype == "bfloat16" else x.astype(STORED[dtype])


def random_tensors(ranks: int, count: int, dtype: str, seed: int) -> np.ndarray:
    """[ranks, count] of numbers of very different sizes, so that every order of adding them gives other bits."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((ranks, count)) * np.exp2(rng.integers(-6, 7, (ranks, count)))
    return narrow(values.astype(np.float32), dtype)


def sum_in_rank_order(x: np.ndarray, dtype: str, average: bool = False) -> np.ndarray:
    wide = widen(x, dtype)
    total = wide[0].copy()
    for part in wide[1:]:
        total += part
    return narrow(total / np.float32(len(wide)) if average else total, dtype)


def same_bits(actual: np.ndarray, wanted: np.ndarray) -> bool:
    unsigned = np.dtype(f"u{wanted.itemsize}")
    return bool((np.ascontiguousarray(actual).view(unsigned) == np.ascontiguousarray(wanted).view(unsigned)).all())


class Ranks:
    """A group, and tensors of its ranks.

    launch  "streams": each rank launches for itself; "one grid": one launch works for all of them
    """

    def __init__(self, size: int, launch: str = "streams", **options: Any) -> None:
        import fastpar_emulation as emulation

        self.emulation, self.size, self.is_one_grid = emulation, size, launch == "one grid"
        self.group = emulation.symmetric.Group(size, **options)
        self.streams = [emulation.Stream() for _ in range(1 if self.is_one_grid else size)]

    def tensors(self, shape: tuple[int, ...], dtype: Any, offset: int = 0) -> Tensors:
        return Tensors(self, shape, dtype, offset)

    def tensors_of(self, values: Sequence[np.ndarray], offset: int = 0) -> Tensors:
        made = self.tensors((max(len(v) for v in values),), values[0].dtype, offset)
        for array, value in zip(made.arrays, values, strict=True):
            array[: len(value)] = value
        return made

    def enqueue(self, kernel: Callable[..., None], arguments: Callable[[int], tuple[Any, ...]]) -> None:
        """kernel(group, rank, *arguments(rank), stream=...) on every stream; of one grid the rank is -1."""
        for index, stream in enumerate(self.streams):
            kernel(self.group, -1 if self.is_one_grid else index, *arguments(index), stream)

    def synchronize(self) -> None:
        self.emulation.synchronize(self.streams)


class Tensors:
    """One for each rank, as long as the longest; in one grid they are one piece of memory."""

    def __init__(self, ranks: Ranks, shape: tuple[int, ...], dtype: Any, offset: int) -> None:
        self.stride = int(np.prod(shape))
        if ranks.is_one_grid:
            whole = DeviceArray((ranks.size * self.stride,), dtype, offset=offset)
            self._memory = [whole]
            self.arrays = [a.reshape(shape) for a in np.split(whole.array, ranks.size)]
        else:
            self._memory = [DeviceArray((self.stride,), dtype, offset=offset) for _ in range(ranks.size)]
            self.arrays = [m.array.reshape(shape) for m in self._memory]

    def __getitem__(self, index: int) -> Any:
        return self._memory[index].buffer


def schedules(seeds: int) -> Iterator[str]:
    """Sets one schedule after the other, and gives its name."""
    import fastpar_emulation as emulation

    try:
        for name in ("ascending", "descending"):
            emulation.set_schedule(name)
            yield name
        for seed in range(seeds):
            emulation.set_schedule("random", seed)
            yield f"random {seed}"
    finally:
        emulation.set_schedule("ascending")
