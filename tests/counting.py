"""Counts the collectives that torch.distributed and the shared-memory library are asked for, below and independent of
`fastpar.comm.record`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fastpar.comm.shared_memory.fast_path import FastPath
from fastpar.comm.shared_memory.world import LocalWorld

# Operator of the c10d or _c10d_functional namespace -> where its payload is among the arguments.
_PAYLOAD = {
    "allreduce_": 0,
    "allreduce_coalesced_": 0,
    "broadcast_": 0,
    "reduce_": 0,
    "allgather_": 1,
    "_allgather_base_": 1,
    "allgather_coalesced_": 1,
    "allgather_into_tensor_coalesced_": 1,
    "reduce_scatter_": 1,
    "_reduce_scatter_base_": 1,
    "reduce_scatter_tensor_coalesced_": 1,
    "alltoall_": 1,
    "alltoall_base_": 1,
    "gather_": 1,
    "scatter_": 1,
    "send": 0,
    "barrier": None,
    "all_reduce": 0,
    "all_gather_into_tensor": 0,
    "reduce_scatter_tensor": 0,
    "all_to_all_single": 0,
    "broadcast": 0,
}


# csrc/comm's operations, by the low byte of a call's first argument.
_SHARED = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce", "barrier")


@dataclass
class Counts:
    """What was launched: `ops` in order, `nbytes` of each one's input on this rank. Sends count, receives do not."""

    ops: list[str] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)

    @property
    def total(self) -> int:
        return len(self.ops)

    @property
    def by_op(self) -> Counter[str]:
        return Counter(self.ops)


class _Counter(TorchDispatchMode):
    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func.name().partition("::")
        name = name.partition(".")[0]
        if namespace in ("c10d", "_c10d_functional") and name in _PAYLOAD:
            where = _PAYLOAD[name]
            self.counts.ops.append(name)
            self.counts.nbytes.append(0 if where is None else _nbytes(args[where]))
        return func(*args, **(kwargs or {}))


def _nbytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    return sum(_nbytes(item) for item in value)


@contextmanager
def count_collectives() -> Iterator[Counts]:
    """Count every collective that this thread launches in the block, whoever asks for it, backward passes included."""
    counts, nested = Counts(), [False]

    def add(world: LocalWorld, spec: int, element_bytes: int, count: int, sizes: Any) -> None:
        name = _SHARED[spec & 0xFF]
        counts.ops.append(name)
        counts.nbytes.append((sizes[world.rank] if name == "all_gather" else count) * element_bytes)

    def counted(method: Any) -> Any:
        def call(world: LocalWorld, spec: int, element_bytes: int, *args: Any, **kwargs: Any) -> Any:
            if not nested[0]:
                add(world, spec, element_bytes, *args[2:4])
            return method(world, spec, element_bytes, *args, **kwargs)

        return call

    def counted_fast(path: Any, name: str, spec: int, x: Tensor, target: Tensor, count: int, *args: Any) -> None:
        # It calls the library itself, and `LocalWorld.run` only where somebody records or profiles.
        add(path._world, spec, x.itemsize, count, args[1] if len(args) > 1 else None)
        nested[0] = True
        try:
            run_fast(path, name, spec, x, target, count, *args)
        finally:
            nested[0] = False

    run_fast = FastPath._run
    with (
        mock.patch.object(FastPath, "_run", counted_fast),
        mock.patch.object(LocalWorld, "run", counted(LocalWorld.run)),
        mock.patch.object(LocalWorld, "submit", counted(LocalWorld.submit)),
        mock.patch.object(LocalWorld, "begin", counted(LocalWorld.begin)),
        torch.autograd.set_multithreading_enabled(False),
        _Counter(counts),
    ):
        yield counts
