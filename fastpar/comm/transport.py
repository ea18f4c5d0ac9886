"""The interface between a communicator and the transport that moves its bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor


class StillInFlightError(RuntimeError):
    """Raised by the work of a transport that is not done within the seconds it was given."""


class Work(Protocol):
    """An operation that a transport has in flight."""

    def wait(self, seconds: float) -> None:
        """Return when the operation is done (on CUDA: when the current stream is ordered after it); raise if it
        failed or is late."""

    def done(self) -> bool:
        """True when it is done, without waiting."""


@dataclass(frozen=True)
class InFlight:
    """A launched operation: wait for `work` (None: nothing to wait for), then `finish()` gives the result.

    `finish` may compute (an ordered sum) but must not communicate: ranks may finish in different orders.
    """

    work: Work | None
    finish: Callable[[], Any]


class Transport(Protocol):
    """Collectives over flat tensors. The communicator has checked the arguments and does everything about shapes.

    `x` is 1-D and contiguous, and is not written to. Sizes are in elements. No call is made for a group of one rank, or
    where the payload is empty on every rank. Every operation is given up `timeout` seconds after its launch. The
    results of reductions have the same bits on every rank that gets them.
    """

    def all_reduce(self, x: Tensor, op: str, out: Tensor | None) -> InFlight:
        """Gives the reduced tensor: `out` (flat, may be x itself) where given, else a new one."""

    def reduce_scatter(self, x: Tensor, sizes: Sequence[int], op: str) -> InFlight:
        """x is the concatenation of a part for every rank; gives this rank's part reduced over the ranks. `op` may be
        one of `reduction.WIDE_OPS` too."""

    def all_gather(self, x: Tensor, sizes: Sequence[int]) -> InFlight:
        """Gives the concatenation of the x of all ranks; sizes[r] is what rank r brings."""

    def all_to_all(self, x: Tensor, input_sizes: Sequence[int], output_sizes: Sequence[int]) -> InFlight:
        """x is the concatenation of a part for every rank; gives the concatenation of the parts for this one."""

    def broadcast(self, x: Tensor, src: int) -> InFlight:
        """Gives a new tensor with the x of rank src."""

    def reduce(self, x: Tensor, dst: int, op: str) -> InFlight:
        """Gives the reduced tensor on rank dst, None elsewhere."""

    def barrier(self) -> InFlight:
        """Gives None, when every rank has entered."""
