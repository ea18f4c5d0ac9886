"""Wire formats: how gradients travel when they are reduced over ranks.

    wire = CastWire(torch.bfloat16)
    shard = wire.reduce_scatter(comm, flat_gradient, sizes)        # float32
    pending = wire.reduce_scatter_async(comm, flat_gradient, sizes)

What a rank of N sends for n float32 elements, in bytes, where parts are equal:

                                reduce_scatter          all_reduce
    PlainWire                   4 n (N-1)/N             8 n (N-1)/N
    CastWire                    2 n (N-1)/N             6 n (N-1)/N      the result travels as float32

A format adds in the order of ranks and in float32, and gives the same bits on every rank, in every run, blocking or
not, however the elements are cut into parts; PlainWire as the communicator's transport does. Infinities and NaN of any
rank's gradient stay visible in the result.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fastpar.comm.communicator import Communicator
from fastpar.comm.pending import Pending
from fastpar.comm.shards import shard_sizes
from fastpar.comm.shared_memory import new_output

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
OPS = ("sum", "avg")


class Wire(Protocol):
    """A format, with the two reductions that gradients need.

    x       flat and contiguous, float32, bfloat16 or float16; not written to
    sizes   elements of each rank's part, any of them 0; by default `shard_sizes`
    op      "avg" or "sum"
    key     names what is reduced, the same in every step (a bucket's number): for formats that keep something from one
            step to the next. A key belongs to one communicator, and to one of the two reductions

    `_async` twins return at once. The result of an all_reduce may take a second collective, which is launched by
    `wait()`: ranks wait for such results in the same order, and that is their place among the launches.
    """

    def reduce_scatter(
        self,
        comm: Communicator,
        x: Tensor,
        sizes: Sequence[int] | None = None,
        op: str = "avg",
        *,
        key: Hashable | None = None,
    ) -> Tensor:
        """This rank's part of x reduced over the ranks: float32, or x's dtype where the format is x's own."""

    def reduce_scatter_async(
        self,
        comm: Communicator,
        x: Tensor,
        sizes: Sequence[int] | None = None,
        op: str = "avg",
        *,
        key: Hashable | None = None,
    ) -> Pending[Tensor]: ...

    def all_reduce(self, comm: Communicator, x: Tensor, op: str = "avg", *, key: Hashable | None = None) -> Tensor:
        """x reduced over the ranks, whole; dtypes as for `reduce_scatter`."""

    def all_reduce_async(
        self, comm: Communicator, x: Tensor, op: str = "avg", *, key: Hashable | None = None
    ) -> Pending[Tensor]: ...


@dataclass(frozen=True)
class PlainWire:
    """x travels as it is, and the result has its dtype: what `Communicator` does."""

    def reduce_scatter(
        self,
        comm: Communicator,
        x: Tensor,
        sizes: Sequence[int] | None = None,
        op: str = "avg",
        *,
        key: Hashable | None = None,
    ) -> Tensor:
        check_gradient(x, op)
        return comm.reduce_scatter(x, op, sizes=sizes)

    def reduce_scatter_async(
        self,
        comm: Communicator,
        x: Tensor,
        sizes: Sequence[int] | None = None,
        op: str = "avg",
        *,
        key: Hashable | None = None,
    ) -> Pending[Tensor]:
        check_gradient(x, op)
        return comm.reduce_scatter_async(x, op, sizes=sizes)

    def all_reduce(self, comm: Communicator, x: Tensor, op: str = "avg", *, key: Hashable | None = None) -> Tensor:
        check_gradient(x, op)
        return comm.all_reduce(x, op)

    def all_reduce_async(
        self, comm: Communicator, x: Tensor, op: str = "avg", *, key: Hashable | None = None
    ) -> Pending[Tensor]:
        check_gradient(x, op)
        return comm.all_reduce_async(x, op)


@dataclass(frozen=True)
class CastWire:
    """x is rounded to `dtype` (torch.bfloat16 or torch.float16) and travels so; the sum is float32 and not rounded.

    Every rank's values are rounded once, this rank's own too, so that a result does not depend on who computes it. With
    two ranks, bfloat16 and op "sum":

        x of rank 0     1 + 2^-9    rounded to 1
        x of rank 1     2^-8        is one
        result          1 + 2^-8    which bfloat16 does not have

    A value beyond float16's 65504 becomes infinite, as a loss scaler expects of an overflow.

    Between CPU ranks that share memory the wire is memory, and a cast is one pass more over it: there 16 bits pay where
    x has 16 bits already, and the result is wide for nothing.
    """

    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(f"dtype must be torch.bfloat16 or torch.float16, got {self.dtype}")

    def reduce_scatter(
        self,
        comm: Communicator,
        x: Tensor,
        sizes: Sequence[int] | None = None,
        op: str = "avg",
        *,
        key: Hashable | None = None,
    ) -> Tensor:
        check_gradient(x, op)
        return comm.reduce_scatter(self._cast(x), op, sizes=sizes, dtype=torch.float32)

    def reduce_scatter_async(
        self,
        comm: Communicator,
        x: Tensor,
        sizes: Sequence[int] | None = None,
        op: str = "avg",
        *,
        key: Hashable | None = None,
    ) -> Pending[Tensor]:
        check_gradient(x, op)
        return comm.reduce_scatter_async(self._cast(x), op, sizes=sizes, dtype=torch.float32)

    def all_reduce(self, comm: Communicator, x: Tensor, op: str = "avg", *, key: Hashable | None = None) -> Tensor:
        sizes = shard_sizes(x.numel(), comm.size)
        return comm.all_gather(self.reduce_scatter(comm, x, sizes, op), sizes=sizes)

    def all_reduce_async(
        self, comm: Communicator, x: Tensor, op: str = "avg", *, key: Hashable | None = None
    ) -> Pending[Tensor]:
        sizes = shard_sizes(x.numel(), comm.size)
        part = self.reduce_scatter_async(comm, x, sizes, op)
        return part.then(lambda reduced: comm.all_gather(reduced, sizes=sizes))

    def _cast(self, x: Tensor) -> Tensor:
        if x.dtype == self.dtype:
            return x
        return new_output(x, x.numel(), self.dtype).copy_(x) if x.is_cpu else x.to(self.dtype)


def check_gradient(x: Tensor, op: str) -> None:
    """Raise TypeError or ValueError for what no wire takes."""
    if not isinstance(x, Tensor) or x.dtype not in FLOATS:
        found = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"x must be a float32, bfloat16 or float16 tensor, got {found}")
    if x.ndim != 1 or not x.is_contiguous():
        raise ValueError(f"x must be flat and contiguous, got shape {tuple(x.shape)} with strides {x.stride()}")
    if op not in OPS:
        raise ValueError(f"op must be one of {', '.join(OPS)}, got {op!r}")
