"""Wire formats: how gradients travel when they are reduced over ranks.

    wire = CastWire(torch.bfloat16)
    shard = wire.reduce_scatter(comm, flat_gradient, sizes)        # float32
    pending = wire.reduce_scatter_async(comm, flat_gradient, sizes)

What a rank of N sends for n float32 elements, in bytes, where parts are equal:

                                reduce_scatter          all_reduce
    PlainWire                   4 n (N-1)/N             8 n (N-1)/N
    CastWire                    2 n (N-1)/N             6 n (N-1)/N      the result travels as float32
    BlockWire, blocks of 256    1.016 n (N-1)/N         2.031 n (N-1)/N

A format adds in the order of ranks and in float32, and gives the same bits on every rank, in every run, blocking or
not, however the elements are cut into parts (BlockWire: at blocks); PlainWire as the communicator's transport does.
Infinities and NaN of any rank's gradient stay visible in the result.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fastpar import _ext
from fastpar.arguments import checked, checked_fields
from fastpar.comm.block_codes import BlockCodes, mixed
from fastpar.comm.communicator import Communicator
from fastpar.comm.pending import Pending
from fastpar.comm.shards import shard_sizes
from fastpar.comm.shared_memory.transport import new_output
from fastpar.comm.transport_selector import Mode

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
OPS = ("sum", "avg")
ROUNDINGS = ("nearest", "stochastic")


class Wire(ABC):
    """A format, with the two reductions that gradients need.

    x       flat and contiguous, float32, bfloat16 or float16; not written to
    sizes   elements of each rank's part, any of them 0; by default `shard_sizes`
    op      "avg" or "sum"
    key     names what is reduced, the same in every step (a bucket's number): for formats that keep something from one
            step to the next. A key belongs to one communicator, and to one of the two reductions

    `_async` twins return at once. The result of an all_reduce may take a second collective, which is launched by
    `wait()`: ranks wait for such results in the same order, and that is their place among the launches.

    A format defines `_reduce_scatter` and `_all_reduce`, whose x and op are checked. They launch by
    `comm.collectives(mode)`.
    """

    @checked(computed=False)
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
        check_gradient(x, op)
        return self._reduce_scatter(comm, "blocking", x, sizes, op, key).wait()

    @checked(computed=False)
    def reduce_scatter_async(
        self,
        comm: Communicator,
        x: Tensor,
        sizes: Sequence[int] | None = None,
        op: str = "avg",
        *,
        key: Hashable | None = None,
    ) -> Pending[Tensor]:
        """The twin of `reduce_scatter`."""
        check_gradient(x, op)
        return self._reduce_scatter(comm, "background", x, sizes, op, key)

    @checked(computed=False)
    def all_reduce(self, comm: Communicator, x: Tensor, op: str = "avg", *, key: Hashable | None = None) -> Tensor:
        """x reduced over the ranks, whole; dtypes as for `reduce_scatter`."""
        check_gradient(x, op)
        return self._all_reduce(comm, "blocking", x, op, key).wait()

    @checked(computed=False)
    def all_reduce_async(
        self, comm: Communicator, x: Tensor, op: str = "avg", *, key: Hashable | None = None
    ) -> Pending[Tensor]:
        """The twin of `all_reduce`."""
        check_gradient(x, op)
        return self._all_reduce(comm, "background", x, op, key)

    @abstractmethod
    def _reduce_scatter(
        self, comm: Communicator, mode: Mode, x: Tensor, sizes: Sequence[int] | None, op: str, key: Hashable | None
    ) -> Pending[Tensor]: ...

    @abstractmethod
    def _all_reduce(
        self, comm: Communicator, mode: Mode, x: Tensor, op: str, key: Hashable | None
    ) -> Pending[Tensor]: ...


@dataclass(frozen=True)
class PlainWire(Wire):
    """x travels as it is, and the result has its dtype: what `Communicator` does."""

    def _reduce_scatter(
        self, comm: Communicator, mode: Mode, x: Tensor, sizes: Sequence[int] | None, op: str, key: Hashable | None
    ) -> Pending[Tensor]:
        return comm.collectives(mode).reduce_scatter(x, op, sizes=sizes)

    def _all_reduce(self, comm: Communicator, mode: Mode, x: Tensor, op: str, key: Hashable | None) -> Pending[Tensor]:
        return comm.collectives(mode).all_reduce(x, op)


@checked_fields
@dataclass(frozen=True)
class CastWire(Wire):
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

    def _reduce_scatter(
        self, comm: Communicator, mode: Mode, x: Tensor, sizes: Sequence[int] | None, op: str, key: Hashable | None
    ) -> Pending[Tensor]:
        return comm.collectives(mode).reduce_scatter(self._cast(x), op, sizes=sizes, dtype=torch.float32)

    def _all_reduce(self, comm: Communicator, mode: Mode, x: Tensor, op: str, key: Hashable | None) -> Pending[Tensor]:
        sizes = shard_sizes(x.numel(), comm.size)
        part = self._reduce_scatter(comm, mode, x, sizes, op, key)
        return part.then(lambda reduced: comm.all_gather(reduced, sizes=sizes))

    def _cast(self, x: Tensor) -> Tensor:
        if x.dtype == self.dtype:
            return x
        if not x.is_cpu:
            return x.to(self.dtype)
        _ext.load()  # which has the pool of large outputs
        return new_output(x, x.numel(), self.dtype).copy_(x)


class BlockWire(Wire):
    """x travels as 8-bit codes, `block` of which share a float32 scale: about a quarter of float32's bytes.

    format           "int8", or "float8_e4m3fn", which is finer for small elements of a block and coarser for large
                     ones, or "float8_e5m2", which is more so
    block            elements that share a scale, a multiple of 64 up to 4096
    rounding         "nearest", or "stochastic": without bias, so that what is lost cancels over steps and ranks
    error_feedback   what a message loses is added to the next of the same `key` (Karimireddy et al. 2019,
                     arXiv:1901.09847): float32, as long as x; for an all_reduce that and a rank's part of it
    seed             of stochastic rounding: with it, a run repeats its bits. Ranks draw different numbers

    reduce_scatter   every part is quantised for its owner, who adds the ranks' values in rank order in float32
    all_reduce       the same with parts cut at blocks; the owner quantises its result, and all take the same codes, so
                     all have the same bits

    Blocks begin with each part, so results depend on where parts are cut, but for cuts at multiples of `block`. A block
    of which any element is NaN or infinite becomes NaN altogether, on every rank that gets it, and loses its error
    feedback: a step with such a gradient has to be skipped anyway. Rounding to nearest, int8 is off by at most 1/254 of
    the block's largest element; float8_e4m3fn by 1/16 of the element itself, or 2^-10 / 448 of the largest where that
    is more. Stochastic rounding may be off by twice that.

    Fewer bytes on the wire is all there is to gain: between CPU ranks that share memory, where a wire is as fast as
    memory, quantising takes longer than it saves.
    """

    @checked(computed=False)
    def __init__(
        self,
        format: str = "int8",
        block: int = 256,
        *,
        rounding: str = "nearest",
        error_feedback: bool = False,
        seed: int = 0,
    ) -> None:
        if rounding not in ROUNDINGS:
            raise ValueError(f"rounding must be one of {', '.join(ROUNDINGS)}, got {rounding!r}")
        if not 0 <= seed < 1 << 31:
            raise ValueError(f"seed must be in 0..2**31 - 1, got {seed}")
        self.codes = BlockCodes(format, block)
        self.rounding, self.error_feedback, self.seed = rounding, error_feedback, seed
        self._num_messages = 0
        self._residuals: dict[tuple[Hashable, str], Tensor] = {}

    def __repr__(self) -> str:
        return (
            f"BlockWire({self.codes.format!r}, block={self.codes.block}, rounding={self.rounding!r}, "
            f"error_feedback={self.error_feedback}, seed={self.seed})"
        )

    def _reduce_scatter(
        self, comm: Communicator, mode: Mode, x: Tensor, sizes: Sequence[int] | None, op: str, key: Hashable | None
    ) -> Pending[Tensor]:
        exchange = self._exchange(comm, x, sizes, op, key)
        pending = comm.collectives(mode).all_to_all(
            exchange.message, input_sizes=exchange.sent, output_sizes=exchange.received
        )
        return pending.then(exchange.finish)

    def _all_reduce(self, comm: Communicator, mode: Mode, x: Tensor, op: str, key: Hashable | None) -> Pending[Tensor]:
        sizes = self._aligned_sizes(x, comm.size)
        pending = self._reduce_scatter(comm, mode, x, sizes, op, key)
        return pending.then(lambda part: self._gather(comm, part, sizes, key))

    def _exchange(
        self, comm: Communicator, x: Tensor, sizes: Sequence[int] | None, op: str, key: Hashable | None
    ) -> _Exchange:
        parts = shard_sizes(x.numel(), comm.size) if sizes is None else list(sizes)
        if len(parts) != comm.size or min(parts) < 0 or sum(parts) != x.numel():
            raise ValueError(
                f"sizes must be {comm.size} numbers, one per rank, that add up to the {x.numel()} elements of x; got "
                f"{parts}"
            )
        message = self._quantize(comm, x, parts, (key, "sent"))
        mine = parts[comm.rank]
        return _Exchange(
            message,
            [self.codes.words(count) for count in parts],
            [self.codes.words(mine)] * comm.size,
            lambda received: self.codes.sum_parts(received, mine, comm.size, average=op == "avg"),
        )

    def _gather(self, comm: Communicator, part: Tensor, sizes: list[int], key: Hashable | None) -> Tensor:
        message = self._quantize(comm, part, [part.numel()], (key, "result"))
        gathered = comm.all_gather(message, sizes=[self.codes.words(count) for count in sizes])
        return self.codes.dequantize(gathered, sizes)

    def _aligned_sizes(self, x: Tensor, parts: int) -> list[int]:
        """`shard_sizes` in whole blocks."""
        block, left, sizes = self.codes.block, x.numel(), []
        for blocks in shard_sizes(-(-left // block), parts):
            sizes.append(min(left, blocks * block))
            left -= sizes[-1]
        return sizes

    def _quantize(self, comm: Communicator, x: Tensor, sizes: list[int], key: tuple[Hashable | None, str]) -> Tensor:
        residual = self._residual_of(x, key) if self.error_feedback else None
        seed = None
        if self.rounding == "stochastic":
            seed = mixed(mixed(self.seed, comm.rank), self._num_messages) >> 1
        self._num_messages += 1
        return self.codes.quantize(x, sizes, seed=seed, residual=residual)

    def _residual_of(self, x: Tensor, key: tuple[Hashable | None, str]) -> Tensor:
        if key[0] is None:
            raise ValueError("error feedback needs a key that names what is reduced, the same in every step")
        residual = self._residuals.get(key)
        if residual is None:
            residual = self._residuals[key] = torch.zeros(x.numel(), dtype=torch.float32, device=x.device)
        if residual.numel() != x.numel():
            raise ValueError(f"key {key[0]!r} was for {residual.numel()} elements before, got {x.numel()}")
        return residual


@dataclass(frozen=True)
class _Exchange:
    """A message, words for each rank and from each, and what makes a result of those."""

    message: Tensor
    sent: list[int]
    received: list[int]
    finish: Callable[[Tensor], Tensor]


def check_gradient(x: Tensor, op: str) -> None:
    """Raise TypeError or ValueError for what no wire takes."""
    if not isinstance(x, Tensor) or x.dtype not in FLOATS:
        found = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"x must be a float32, bfloat16 or float16 tensor, got {found}")
    if x.ndim != 1 or not x.is_contiguous():
        raise ValueError(f"x must be flat and contiguous, got shape {tuple(x.shape)} with strides {x.stride()}")
    if op not in OPS:
        raise ValueError(f"op must be one of {', '.join(OPS)}, got {op!r}")
