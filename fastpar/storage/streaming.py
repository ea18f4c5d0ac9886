"""A pass over tensors in a store that are together larger than memory: read, work, write, all at once."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from fastpar.arguments import checked
from fastpar.storage.async_file import Transfer
from fastpar.storage.errors import StorageError
from fastpar.storage.index import ALIGNMENT
from fastpar.storage.store import TensorStore

Names = str | Sequence[str]
_BUFFERS = 3  # one is read into, one is worked on, one is written from


@checked(computed=False)
def stream(
    store: TensorStore,
    items: Sequence[Names],
    work: Callable[[int, Mapping[str, Tensor]], object],
    *,
    written: Callable[[str], bool] = lambda name: True,
) -> None:
    """Call `work(i, tensors)` for every item i in order: its tensors by name, which work changes in place.

    items    names that are needed at once: of one tensor, or of several; no name twice
    written  which names are written back; the others are only read

    While work(i) runs, item i+1 is read and item i-1 is written. Memory: 3 buffers of the largest item (its tensors
    rounded up to 4096 bytes each), which the store keeps for the next pass; nothing may keep the tensors of an item
    after its work has returned. Bytes: every name is read once, and written once unless `written` says no.

    If work raises, or the disk fails, what is in flight is waited for and the error raised: items before i are written,
    item i is as it was.
    """
    groups = [(item,) if isinstance(item, str) else tuple(item) for item in items]
    _check_distinct(groups)
    layouts = [_BufferLayout(store, names) for names in groups]
    if not groups:
        return
    buffers = store.buffers(_BUFFERS, max(layout.num_bytes for layout in layouts))
    tensors = [layout.tensors(buffers[i % _BUFFERS]) for i, layout in enumerate(layouts)]
    reading: dict[int, list[Transfer]] = {}
    writing: dict[int, list[Transfer]] = {}

    def read(i: int) -> None:
        _wait(writing.pop(i - _BUFFERS, []))  # its buffer
        reading[i] = [store.read(name, out) for name, out in tensors[i].items()]

    try:
        read(0)
        for i in range(len(groups)):
            _wait(reading.pop(i))
            if i + 1 < len(groups):
                read(i + 1)
            work(i, tensors[i])
            writing[i] = [store.write(name, tensor) for name, tensor in tensors[i].items() if written(name)]
    except BaseException:
        for transfer in itertools.chain(*reading.values(), *writing.values()):
            with contextlib.suppress(StorageError):
                transfer.wait()
        raise
    for transfers in writing.values():
        _wait(transfers)


class _BufferLayout:
    """Where the tensors of an item lie in a buffer."""

    def __init__(self, store: TensorStore, names: Sequence[str]) -> None:
        self._places: list[tuple[str, int, torch.dtype, torch.Size]] = []
        self.num_bytes = 0
        for name in names:
            dtype, shape = store.spec(name)
            self._places.append((name, self.num_bytes, dtype, shape))
            self.num_bytes += -(-shape.numel() * dtype.itemsize // ALIGNMENT) * ALIGNMENT

    def tensors(self, buffer: Tensor) -> dict[str, Tensor]:
        return {
            name: buffer[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)
            for name, start, dtype, shape in self._places
        }


def _wait(transfers: Iterable[Transfer]) -> None:
    for transfer in transfers:
        transfer.wait()


def _check_distinct(groups: Iterable[Sequence[str]]) -> None:
    counts = Counter(itertools.chain.from_iterable(groups))
    repeated = [name for name, count in counts.items() if count > 1]
    if repeated:
        # The next item is read before this one is written.
        raise ValueError(f"a name may be in one item only; {', '.join(map(repr, repeated[:3]))} is in several")
