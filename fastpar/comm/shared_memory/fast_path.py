"""The fast path of blocking collectives, for plain dense CPU tensors: over shared memory, and where there is one rank.

A small collective takes a microsecond or two; checking arguments, packing and unpacking in their full generality
(`fastpar.comm.launcher`) takes ten. The common case needs none of it: a contiguous CPU tensor, whole or in equal parts
along dim 0. A method takes what the launcher's takes, and gives the same result or None: take the launcher's.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad, profiler
from torch.autograd.graph import increment_version

from fastpar.comm.observers import LOGS, TRACES, note, open_spans
from fastpar.comm.pending import LaunchLog
from fastpar.comm.ranges import annotate
from fastpar.comm.shared_memory.library import size_array
from fastpar.comm.shared_memory.transport import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BARRIER,
    BROADCAST,
    LARGE_BYTES,
    REDUCE_SCATTER,
    REDUCTION_SPECS,
    dtype_code,
    new_output,
)
from fastpar.comm.shared_memory.world import LocalWorld

_NO_DATA = torch.empty(0, dtype=torch.uint8, device="cpu")  # of a barrier


class FastPath:
    """Ranks are those of `world`, which is the whole group of `log`."""

    def __init__(self, world: LocalWorld, log: LaunchLog, timeout: float) -> None:
        self._world, self._log, self._timeout = world, log, timeout
        self._size = world.size

    def all_reduce(self, x: Tensor, op: str = "sum", *, out: Tensor | None = None) -> Tensor | None:
        spec = REDUCTION_SPECS.get((op, x.dtype)) if _is_plain(x) and type(op) is str else None
        if spec is None or (out is not None and out is not x):
            return None
        target = _new_like(x) if out is None else x
        numel = x.numel()
        self._run("all_reduce", spec | ALL_REDUCE, x, target, numel, numel)
        if out is not None:
            # csrc/comm wrote to memory that autograd may have saved.
            increment_version(out)
        return target

    def reduce_scatter(
        self,
        x: Tensor,
        op: str = "sum",
        *,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor | None:
        if sizes is not None or dtype is not None or not _is_plain(x, dim) or type(op) is not str:
            return None
        spec = REDUCTION_SPECS.get((op, x.dtype))
        if spec is None or x.shape[0] % self._size:
            return None
        numel = x.numel()
        part = numel // self._size
        target = _new(x, part, (x.shape[0] // self._size, *x.shape[1:]))
        self._run("reduce_scatter", spec | REDUCE_SCATTER, x, target, numel, numel, _equal(part, self._size))
        return target

    def all_gather(self, x: Tensor, *, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor | None:
        if sizes is not None or not _is_plain(x, dim):
            return None
        numel = x.numel()
        total = numel * self._size
        target = _new(x, total, (x.shape[0] * self._size, *x.shape[1:]))
        self._run("all_gather", ALL_GATHER | dtype_code(x.dtype), x, target, total, total, _equal(numel, self._size))
        return target

    def all_to_all(
        self,
        x: Tensor,
        *,
        input_sizes: Sequence[int] | None = None,
        output_sizes: Sequence[int] | None = None,
        split_dim: int = 0,
        concat_dim: int | None = None,
    ) -> Tensor | None:
        if input_sizes is not None or output_sizes is not None or not _is_plain(x, split_dim):
            return None
        if (concat_dim is not None and (type(concat_dim) is not int or concat_dim)) or x.shape[0] % self._size:
            return None
        target, numel = _new_like(x), x.numel()
        part = numel // self._size
        sizes = _equal(part, self._size)
        self._run("all_to_all", ALL_TO_ALL | dtype_code(x.dtype), x, target, numel, numel - part, sizes, sizes)
        return target

    def broadcast(self, x: Tensor, src: int = 0) -> Tensor | None:
        if not _is_plain(x) or type(src) is not int or not 0 <= src < self._size:
            return None
        target, numel = _new_like(x), x.numel()
        self._run("broadcast", BROADCAST | dtype_code(x.dtype) | src << 32, x, target, numel, numel)
        return target

    def barrier(self) -> None:
        self._run("barrier", BARRIER, _NO_DATA, _NO_DATA, 0, 0)

    def _run(
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
        world, log = self._world, self._log
        sequence = log.launched
        # Also of a call that fails: ranks number what they launch, not what succeeds.
        log.launched = sequence + 1
        try:
            call = spec, x.itemsize, x.data_ptr(), target.data_ptr(), count, sizes, output_sizes, self._timeout
            # One test for all who may watch; what `world.run` does, without its frame.
            if LOGS or TRACES or profiler._is_profiler_enabled:
                self._run_observed(name, call, payload, x.dtype)
            elif status := world.comm_run(world.handle, *call):
                world.check_status(status)
        except RuntimeError as error:
            raise log.failure(error, name, sequence, None if x is _NO_DATA else x.shape, x.dtype) from error

    def _run_observed(self, name: str, call: tuple[Any, ...], payload: int, dtype: torch.dtype) -> None:
        spans = open_spans()
        with annotate(f"fastpar::comm::{name}"):
            self._world.run(*call)
        note(name, self._size, payload, dtype)
        if spans is not None:
            spans.launched(name, self._size, payload, dtype)


class OneRankFastPath:
    """A group of one rank: every result is a copy."""

    def all_reduce(self, x: Tensor, op: str = "sum", *, out: Tensor | None = None) -> Tensor | None:
        is_known = out is None and _is_plain(x) and type(op) is str and (op, x.dtype) in REDUCTION_SPECS
        return x.detach().clone() if is_known else None

    def reduce_scatter(self, x: Tensor, op: str = "sum", *, dim: int = 0, **others: Any) -> Tensor | None:
        is_known = not others and _is_plain(x, dim) and type(op) is str and (op, x.dtype) in REDUCTION_SPECS
        return x.detach().clone() if is_known else None

    def all_gather(self, x: Tensor, *, dim: int = 0, **others: Any) -> Tensor | None:
        return x.detach().clone() if not others and _is_plain(x, dim) else None

    def all_to_all(self, x: Tensor, **others: Any) -> Tensor | None:
        return x.detach().clone() if not others and _is_plain(x, 0) else None

    def broadcast(self, x: Tensor, src: int = 0) -> Tensor | None:
        return x.detach().clone() if _is_plain(x) and type(src) is int and src == 0 else None

    def barrier(self) -> None:
        """There is nobody to wait for."""


def _is_plain(x: Tensor, dim: int | None = None) -> bool:
    """Dense memory that can be taken as it is; `dim` is the first of its dims, where there is one."""
    return (
        type(x) is Tensor
        and x.is_cpu
        and x.is_contiguous()
        and x.numel() > 0
        and not x.is_conj()
        and not x.is_neg()
        and forward_ad._current_level < 0  # a tangent is refused where arguments are checked
        and (dim is None or (type(dim) is int and dim == 0 and x.ndim > 0))
    )


# A new tensor takes longer than the call that fills it: empty_like half as long as new_empty, and that is faster with
# numbers than with a tuple.


def _new_like(x: Tensor) -> Tensor:
    return torch.empty_like(x) if x.nbytes < LARGE_BYTES else new_output(x, x.numel()).view(x.shape)


def _new(x: Tensor, numel: int, shape: tuple[int, ...]) -> Tensor:
    return x.new_empty(*shape) if numel * x.itemsize < LARGE_BYTES else new_output(x, numel).view(shape)


@functools.lru_cache(maxsize=256)
def _equal(part: int, size: int) -> Any:
    return size_array((part,) * size)
