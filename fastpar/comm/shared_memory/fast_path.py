"""The short way of blocking collectives over shared memory, for plain dense tensors.

A small collective takes a microsecond or two; checking arguments, packing and unpacking in their full generality
(`fastpar.comm.launcher`) takes ten. The common case needs none of it: a contiguous CPU tensor, whole or in equal parts
along dim 0. Every method gives what the long way gives, or None: take the long way.
"""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from fastpar.comm.observers import note, open_spans
from fastpar.comm.ranges import annotate, is_profiling
from fastpar.comm.shared_memory.library import size_array
from fastpar.comm.shared_memory.transport import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BARRIER,
    BROADCAST,
    LARGE_BYTES,
    REDUCE_SCATTER,
    dtype_code,
    new_output,
    reduction_spec,
)
from fastpar.comm.shared_memory.world import LocalWorld

if TYPE_CHECKING:
    from fastpar.comm.transport_selector import Route


class Express:
    """Ranks are those of `world`, which is the whole group of `route`."""

    def __init__(self, world: LocalWorld, route: Route) -> None:
        self._world = world
        self.rank, self.size = world.rank, world.size
        self._route: Route = weakref.proxy(route)  # which owns this: no cycle, so that a group goes at once
        self._timeout = route.timeout

    def all_reduce(self, x: Tensor, op: str, out: Tensor | None) -> Tensor | None:
        spec = reduction_spec(ALL_REDUCE, op, x.dtype) if _is_plain(x) else None
        if spec is None or (out is not None and out is not x):
            return None
        target = _new_like(x) if out is None else x
        self._call("all_reduce", spec, x, target, x.numel(), x.numel())
        if out is not None:
            increment_version(out)
        return target

    def reduce_scatter(self, x: Tensor, op: str) -> Tensor | None:
        spec = reduction_spec(REDUCE_SCATTER, op, x.dtype) if _is_plain(x) else None
        if spec is None or x.ndim == 0 or x.shape[0] % self.size:
            return None
        numel = x.numel()
        target = _new(x, numel // self.size, (x.shape[0] // self.size, *x.shape[1:]))
        self._call("reduce_scatter", spec, x, target, numel, numel, _equal(numel // self.size, self.size))
        return target

    def all_gather(self, x: Tensor) -> Tensor | None:
        if not _is_plain(x) or x.ndim == 0:
            return None
        numel = x.numel()
        total, spec = numel * self.size, ALL_GATHER | dtype_code(x.dtype)
        target = _new(x, total, (x.shape[0] * self.size, *x.shape[1:]))
        self._call("all_gather", spec, x, target, total, total, _equal(numel, self.size))
        return target

    def all_to_all(self, x: Tensor) -> Tensor | None:
        if not _is_plain(x) or x.ndim == 0 or x.shape[0] % self.size:
            return None
        target = _new_like(x)
        numel = x.numel()
        part = numel // self.size
        sizes, spec = _equal(part, self.size), ALL_TO_ALL | dtype_code(x.dtype)
        self._call("all_to_all", spec, x, target, numel, numel - part, sizes, sizes)
        return target

    def broadcast(self, x: Tensor, src: int) -> Tensor | None:
        if not _is_plain(x) or type(src) is not int or not 0 <= src < self.size:
            return None
        target = _new_like(x)
        self._call("broadcast", BROADCAST | dtype_code(x.dtype) | src << 32, x, target, x.numel(), x.numel())
        return target

    def barrier(self) -> bool:
        if torch.compiler.is_compiling():
            return False
        self._run("barrier", (BARRIER, 1, 0, 0, 0, None, None, self._timeout), None, 0, torch.uint8)
        return True

    def _call(
        self,
        name: str,
        spec: int,
        x: Tensor,
        target: Tensor,
        count: int,
        payload: int,
        sizes: Any = None,
        output_sizes: Any = None,
    ) -> None:
        call = spec, x.itemsize, x.data_ptr(), target.data_ptr(), count, sizes, output_sizes, self._timeout
        self._run(name, call, x.shape, payload, x.dtype)

    def _run(
        self, name: str, call: tuple[Any, ...], shape: torch.Size | None, payload: int, dtype: torch.dtype
    ) -> None:
        sequence, spans = self._route.count(), open_spans()
        try:
            if is_profiling():
                with annotate(f"fastpar::comm::{name}"):
                    self._world.run(*call)
            else:
                self._world.run(*call)
        except RuntimeError as error:
            raise self._route.failure(error, name, sequence, shape, dtype) from error
        note(name, self.size, payload, dtype)
        if spans is not None:
            spans.launched(name, self.size, payload, dtype)


def _is_plain(x: Tensor) -> bool:
    return (
        not torch.compiler.is_compiling()  # first: dynamo breaks the graph at is_conj
        and type(x) is Tensor
        and x.is_cpu
        and x.is_contiguous()
        and x.numel() > 0
        and not x.is_conj()
        and not x.is_neg()
    )


# A new tensor takes longer than the call that fills it: empty_like half as long as new_empty, and that is faster with
# numbers than with a tuple.


def _new_like(x: Tensor) -> Tensor:
    return new_output(x, x.numel()).view(x.shape) if x.nbytes >= LARGE_BYTES else torch.empty_like(x)


def _new(x: Tensor, numel: int, shape: tuple[int, ...]) -> Tensor:
    return new_output(x, numel).view(shape) if numel * x.itemsize >= LARGE_BYTES else x.new_empty(*shape)


@functools.lru_cache(maxsize=256)
def _equal(part: int, size: int) -> Any:
    return size_array((part,) * size)
