"""Collectives between CPU ranks on several hosts: shared memory within a host, gloo between hosts.

Reductions add within each host in rank order, and the hosts' sums in the order of their lowest ranks: for hosts [0, 2]
and [1, 3] the sum is (x0 + x2) + (x1 + x3). bfloat16 and float16 are added in float32 and rounded once, at the very
end. The bits are the same on every rank, from run to run, blocking or in the background, for every size; they are not
those of one host, nor of other hosts. NaN wins in max and min.

Only the lowest rank of a host, its leader, uses the network, so a host of L ranks sends what one rank would:
an all_reduce of n bytes moves 2 (H - 1) / H n bytes out of each of H hosts. What has nothing to gain from that goes
as if every rank were alone on its host ("flat"): all_to_all (with scatter and gather), and little data in small groups
(`_flat_way`), whose sums are in the order of ranks. Ranks of which some call what goes one way, and some the other,
hear of it at the deadline only.

The same transport, with every rank alone on its host, serves CPU ranks that cannot share memory at all, and those who
ask for transport="torch". It uses a gloo backend of its own, not the group's: what users launch on that themselves is
in no order with this. Little data travels with the headers that ranks compare, in one message, so that the comparison
costs nothing there; much data costs one exchange of 8 KB more.

Blocking calls run on the caller's thread, others in order on a thread of the group.

Note: measured, with the group's own gloo as the flat way, ms, hierarchical | flat, float32, two simulated hosts on one
machine of two cores that did other work too, minima of turns. There the network costs nothing: what counts is the
number of messages and steps.

                          2 + 2 ranks     3 + 3 ranks     4 + 4 ranks
    all_reduce  64 B      1.1 | 0.7       1.9 | 1.5       2.6 | 2.1
                8 KB      1.0 | 0.7       1.7 | 1.6       2.3 | 2.6
                64 KB     1.8 | 1.0       2.4 | 1.7       2.9 | 3.0
                1 MB      7.0 | 4.5       7.3 | 7.9       11 | 17
                16 MB     52 | 50
    all_gather  64 B      1.2 | 0.6       1.4 | 1.0       2.5 | 2.4
                1 MB      5.5 | 3.4       23 | 13         26 | 34
                16 MB     189 | 393

Over a network, flat sends L times as much out of a host of L ranks (all_reduce of more than 128 KB: gloo's ring, about
as much), so that is where the choice for large data and large groups comes from.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fastpar.comm.multi_host.collectives import (
    HostAllGather,
    HostAllReduce,
    HostAllToAll,
    HostBarrier,
    HostBroadcast,
    HostLayout,
    HostReduce,
    HostReduceScatter,
)
from fastpar.comm.multi_host.protocol import Collective, Hierarchy
from fastpar.comm.reduction import widen
from fastpar.comm.transport import InFlight, Transport

# What goes the flat way: up to so many ranks, and bytes of the whole payload.
_FLAT_RANKS = 4
_FLAT_BYTES = 64 << 10


class HierarchicalTransport:
    """See `fastpar.comm.transport.Transport` and the module docstring. `timeout` in seconds; `flat` takes the rest:
    None where every rank is alone on its host."""

    def __init__(
        self, hierarchy: Hierarchy, rank: int, flat: Transport | None, timeout: float, *, background: bool
    ) -> None:
        self._hierarchy, self._rank, self._flat = hierarchy, rank, flat
        self._layout = HostLayout(hierarchy.hosts)
        self._timeout = timeout
        self._background = background

    def _flat_way(self, numel: int, dtype: torch.dtype) -> Transport | None:
        """A function of what is equal on all ranks only."""
        is_flat = self._layout.size <= _FLAT_RANKS and numel * dtype.itemsize <= _FLAT_BYTES
        return self._flat if is_flat else None

    def all_reduce(self, x: Tensor, op: str, out: Tensor | None) -> InFlight:
        flat = self._flat_way(x.numel(), x.dtype)
        if flat is not None:
            return flat.all_reduce(x, op, out)
        call = HostAllReduce(self._layout, x, op)
        return self._launch(call, (lambda result: result) if out is None else out.copy_)

    def reduce_scatter(self, x: Tensor, sizes: Sequence[int], op: str) -> InFlight:
        flat = self._flat_way(x.numel(), x.dtype)
        if flat is not None:
            return flat.reduce_scatter(x, sizes, op)
        x, op = widen(x, op)  # hosts send float32 sums in any case
        return self._launch(HostReduceScatter(self._layout, self._rank, x, sizes, op))

    def all_gather(self, x: Tensor, sizes: Sequence[int]) -> InFlight:
        flat = self._flat_way(sum(sizes), x.dtype)
        if flat is not None:
            return flat.all_gather(x, sizes)
        return self._launch(HostAllGather(self._layout, self._rank, x, sizes))

    def all_to_all(self, x: Tensor, input_sizes: Sequence[int], output_sizes: Sequence[int]) -> InFlight:
        if self._flat is not None:
            return self._flat.all_to_all(x, input_sizes, output_sizes)
        return self._launch(HostAllToAll(self._rank, x, input_sizes, output_sizes))

    def broadcast(self, x: Tensor, src: int) -> InFlight:
        flat = self._flat_way(x.numel(), x.dtype)
        if flat is not None:
            return flat.broadcast(x, src)
        return self._launch(HostBroadcast(self._layout, self._rank, x, src))

    def reduce(self, x: Tensor, dst: int, op: str) -> InFlight:
        flat = self._flat_way(x.numel(), x.dtype)
        if flat is not None:
            return flat.reduce(x, dst, op)
        return self._launch(HostReduce(self._layout, self._rank, x, dst, op))

    def barrier(self) -> InFlight:
        return self._launch(HostBarrier())

    def _launch(self, call: Collective, write: Callable[[Tensor], Tensor] = lambda result: result) -> InFlight:
        hierarchy, deadline = self._hierarchy, time.monotonic() + self._timeout
        if self._background:
            work = hierarchy.sequencer.submit(lambda: hierarchy.run(call, deadline))
            return InFlight(work, lambda: write(work.result()))
        result = hierarchy.sequencer.run(lambda: hierarchy.run(call, deadline))
        return InFlight(None, lambda: write(result))
