"""Collectives between CPU ranks on several hosts: shared memory within a host, gloo between hosts.

Reductions add within each host in rank order, and the hosts' sums in the order of their lowest ranks: for hosts [0, 2]
and [1, 3] the sum is (x0 + x2) + (x1 + x3). bfloat16 and float16 are added in float32 and rounded once, at the very
end. The bits are the same on every rank, from run to run, blocking or in the background, for every size; they are not
those of one host, nor of other hosts. NaN wins in max and min.

Only the lowest rank of a host, its leader, uses the network, so a host of L ranks sends what one rank would:
an all_reduce of n bytes moves 2 (H - 1) / H n bytes out of each of H hosts. What has nothing to gain from that goes
as if every rank were alone on its host ("flat"): all_to_all (with scatter and gather), and little data in small groups
(`_is_flat`), whose sums are in the order of ranks. Ranks of which some call what goes one way, and some the other, hear
of it at the deadline only.

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
from itertools import accumulate

import torch
from torch import Tensor

from fastpar.comm.errors import CommMismatchError
from fastpar.comm.multi_host.leaders import Leaders
from fastpar.comm.multi_host.protocol import INLINE_BYTES, Collective, Hierarchy, Local, header_of
from fastpar.comm.reduction import accumulator, reduce_in_order, widen
from fastpar.comm.shards import shard_sizes
from fastpar.comm.transport import InFlight, Transport

# Up to so many bytes, of all hosts together, leaders send each other their whole sums instead of a share and then the
# result: one message to each instead of two.
_WHOLE_BYTES = 1 << 18


# What goes the flat way: up to so many ranks, and bytes of the whole payload.
_FLAT_RANKS = 4
_FLAT_BYTES = 64 << 10


class _Layout:
    """Who is where. `order` is all ranks by host."""

    def __init__(self, hosts: Sequence[Sequence[int]]) -> None:
        self.hosts = hosts
        self.num_hosts = len(hosts)
        self.order = [rank for ranks in hosts for rank in ranks]
        self.size = len(self.order)
        self.host_of = {rank: host for host, ranks in enumerate(hosts) for rank in ranks}
        self.is_contiguous = self.order == sorted(self.order)

    def by_host(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """From parts in the order of ranks to the order of hosts."""
        if self.is_contiguous:
            return x
        parts = x.split(list(sizes))
        return torch.cat([parts[rank] for rank in self.order])

    def by_rank(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """The inverse."""
        if self.is_contiguous:
            return x
        starts = dict(zip(self.order, accumulate([0, *(sizes[rank] for rank in self.order)]), strict=False))
        return torch.cat([x.narrow(0, starts[rank], sizes[rank]) for rank in range(self.size)])

    def host_sizes(self, sizes: Sequence[int]) -> list[int]:
        return [sum(sizes[rank] for rank in ranks) for ranks in self.hosts]


class _Reduction(Collective):
    """all_reduce, reduce and reduce_scatter: `parts[h]` elements of the reduced tensor, in the order of hosts, go to
    host h; or all of it to every host, where `parts` is None."""

    x: Tensor

    def __init__(self, layout: _Layout, x: Tensor, op: str, parts: Sequence[int] | None) -> None:
        self.layout, self.x, self.op = layout, x, op
        self.parts = parts
        self.adds = op in ("sum", "avg")
        self.wide = accumulator(x.dtype) if self.adds else x.dtype
        self.is_little = x.numel() * self.wide.itemsize <= INLINE_BYTES

    def numel_of(self, rank: int) -> int:
        return self.x.numel()

    def value_of(self, host: int) -> tuple[int, torch.dtype]:
        return self.x.numel(), self.wide

    def result_of(self, host: int) -> tuple[int, torch.dtype]:
        return self.x.numel() if self.parts is None else self.parts[host], self.x.dtype

    def sort(self, value: Tensor) -> Tensor:
        """To the order of hosts."""
        return value

    def reduced(self, values: Sequence[Tensor]) -> Tensor:
        """Over hosts: the one place where values are rounded."""
        total = reduce_in_order(values, "sum" if self.adds else self.op)
        if self.op == "avg":
            total.div_(self.layout.size)
        return total.to(self.x.dtype)

    def combine_ranks(self, xs: list[Tensor]) -> Tensor:
        return reduce_in_order([x.to(self.wide) for x in xs], "sum" if self.adds else self.op)

    def combine_hosts(self, values: list[Tensor], host: int) -> Tensor:
        total = self.reduced(values)
        return total if self.parts is None else self.sort(total).split(list(self.parts))[host]

    def bring(self, local: Local) -> Tensor | None:
        return local.reduce(self.x.to(self.wide), "sum" if self.adds else self.op)

    def exchange(self, leaders: Leaders, value: Tensor, deadline: float) -> Tensor:
        num_hosts = self.layout.num_hosts
        if self.parts is not None:
            return self._reduce_parts(leaders, self.sort(value), self.parts, deadline)
        if value.nbytes * num_hosts <= _WHOLE_BYTES:
            sizes = [value.numel()] * num_hosts
            received = leaders.finish(leaders.start(value.repeat(num_hosts), sizes, sizes, deadline), deadline)
            return self.reduced(received.chunk(num_hosts))
        shares = shard_sizes(value.numel(), num_hosts)
        share = self._reduce_parts(leaders, value, shares, deadline)
        return _gather(leaders, share, shares, deadline)

    def _reduce_parts(self, leaders: Leaders, value: Tensor, parts: Sequence[int], deadline: float) -> Tensor:
        mine, num_hosts = parts[leaders.host], len(parts)
        received = leaders.finish(leaders.start(value, parts, [mine] * num_hosts, deadline), deadline)
        return self.reduced(received.view(num_hosts, mine).unbind())


class _AllReduce(_Reduction):
    def __init__(self, layout: _Layout, x: Tensor, op: str) -> None:
        super().__init__(layout, x, op, None)
        self.header = header_of("all_reduce", x, reduction=op, count=x.numel())

    def take(self, result: Tensor) -> Tensor:
        return result.clone()

    def hand_on(self, local: Local, result: Tensor | None) -> Tensor:
        return local.broadcast(torch.empty_like(self.x) if result is None else result, 0)


class _Reduce(_Reduction):
    def __init__(self, layout: _Layout, rank: int, x: Tensor, dst: int, op: str) -> None:
        self.is_dst, self.dst = rank == dst, dst
        self.is_dst_here = layout.host_of[rank] == layout.host_of[dst]
        parts = [x.numel() if dst in ranks else 0 for ranks in layout.hosts]
        super().__init__(layout, x, op, parts)
        self.header = header_of("reduce", x, reduction=op, root=dst, count=x.numel())

    def take(self, result: Tensor) -> Tensor | None:
        return result.clone() if self.is_dst else None

    def hand_on(self, local: Local, result: Tensor | None) -> Tensor | None:
        if not self.is_dst_here:
            return None
        ranks = self.layout.hosts[self.layout.host_of[self.dst]]
        part = local.scatter(
            self.x if result is None else result, [self.x.numel() if rank == self.dst else 0 for rank in ranks]
        )
        return part if self.is_dst else None


class _ReduceScatter(_Reduction):
    def __init__(self, layout: _Layout, rank: int, x: Tensor, sizes: Sequence[int], op: str) -> None:
        super().__init__(layout, x, op, layout.host_sizes(sizes))
        self.sizes = sizes
        ranks = layout.hosts[layout.host_of[rank]]
        self.index = ranks.index(rank)
        self.sizes_here = [sizes[other] for other in ranks]
        self.header = header_of("reduce_scatter", x, reduction=op, count=x.numel(), sizes=sizes)

    def sort(self, value: Tensor) -> Tensor:
        return self.layout.by_host(value, self.sizes)

    def take(self, result: Tensor) -> Tensor:
        return result.split(self.sizes_here)[self.index].clone()

    def hand_on(self, local: Local, result: Tensor | None) -> Tensor:
        return local.scatter(self.x if result is None else result, self.sizes_here)


class _AllGather(Collective):
    x: Tensor

    def __init__(self, layout: _Layout, rank: int, x: Tensor, sizes: Sequence[int]) -> None:
        self.layout, self.x, self.sizes = layout, x, sizes
        self.total = sum(sizes)
        self.host_sizes = layout.host_sizes(sizes)
        self.sizes_here = [sizes[other] for other in layout.hosts[layout.host_of[rank]]]
        self.is_little = self.total * x.itemsize <= INLINE_BYTES
        self.header = header_of("all_gather", x, count=self.total, sizes=sizes)

    def numel_of(self, rank: int) -> int:
        return self.sizes[rank]

    def value_of(self, host: int) -> tuple[int, torch.dtype]:
        return self.host_sizes[host], self.x.dtype

    def result_of(self, host: int) -> tuple[int, torch.dtype]:
        return self.total, self.x.dtype

    def combine_ranks(self, xs: list[Tensor]) -> Tensor:
        return torch.cat(xs)

    def combine_hosts(self, values: list[Tensor], host: int) -> Tensor:
        return torch.cat(values)

    def take(self, result: Tensor) -> Tensor:
        return result.clone() if self.layout.is_contiguous else self.layout.by_rank(result, self.sizes)

    def bring(self, local: Local) -> Tensor | None:
        return local.gather(self.x, self.sizes_here)

    def exchange(self, leaders: Leaders, value: Tensor, deadline: float) -> Tensor:
        return _gather(leaders, value, self.host_sizes, deadline)

    def hand_on(self, local: Local, result: Tensor | None) -> Tensor:
        gathered = local.broadcast(self.x.new_empty(self.total) if result is None else result, 0)
        return self.layout.by_rank(gathered, self.sizes)


class _Broadcast(Collective):
    """Ranks on the host of src have their result before the network is asked."""

    x: Tensor

    def __init__(self, layout: _Layout, rank: int, x: Tensor, src: int) -> None:
        self.x, self.src_host = x, layout.host_of[src]
        self.is_src_here = layout.host_of[rank] == self.src_host
        self.index = layout.hosts[self.src_host].index(src)
        self.is_little = x.nbytes <= INLINE_BYTES
        self.header = header_of("broadcast", x, root=src, count=x.numel())

    def numel_of(self, rank: int) -> int:
        return self.x.numel()

    def value_of(self, host: int) -> tuple[int, torch.dtype]:
        return self.x.numel() if host == self.src_host else 0, self.x.dtype

    def result_of(self, host: int) -> tuple[int, torch.dtype]:
        return self.x.numel(), self.x.dtype

    def combine_ranks(self, xs: list[Tensor]) -> Tensor:
        return xs[self.index] if self.is_src_here else self.x.new_empty(0)

    def combine_hosts(self, values: list[Tensor], host: int) -> Tensor:
        return values[self.src_host]

    def take(self, result: Tensor) -> Tensor:
        return result.clone()

    def bring(self, local: Local) -> Tensor | None:
        if self.is_src_here:
            self.result = local.broadcast(self.x, self.index) if local.size > 1 else self.x.clone()
            return self.result
        return torch.empty_like(self.x)

    def exchange(self, leaders: Leaders, value: Tensor, deadline: float) -> Tensor:
        return leaders.finish(leaders.start_broadcast(value, self.src_host, deadline), deadline)

    def hand_on(self, local: Local, result: Tensor | None) -> Tensor:
        if self.is_src_here:
            return self.result
        return local.broadcast(torch.empty_like(self.x) if result is None else result, 0)


class _Barrier(Collective):
    """Nothing, brought and handed on: the headers alone make ranks wait for each other."""

    x = None
    header = header_of("barrier", None)
    is_little = True

    def numel_of(self, rank: int) -> int:
        return 0

    def value_of(self, host: int) -> tuple[int, torch.dtype]:
        return 0, torch.uint8

    def result_of(self, host: int) -> tuple[int, torch.dtype]:
        return 0, torch.uint8

    def combine_ranks(self, xs: list[Tensor]) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def combine_hosts(self, values: list[Tensor], host: int) -> Tensor:
        return values[host]

    def take(self, result: Tensor) -> None:
        return None

    def bring(self, local: Local) -> None:
        return None

    def exchange(self, leaders: Leaders, value: Tensor, deadline: float) -> Tensor:
        return value

    def hand_on(self, local: Local, result: Tensor | None) -> None:
        return None


class AllToAll(Collective):
    """Of ranks that are all alone on their hosts. `moves` False: only compare what ranks say."""

    x: Tensor

    def __init__(
        self, rank: int, x: Tensor, inputs: Sequence[int], outputs: Sequence[int], *, moves: bool = True
    ) -> None:
        self.x, self.inputs, self.outputs, self.moves = x, list(inputs), list(outputs), moves
        self.size = len(self.inputs)
        self.is_little = False
        self.header = header_of("all_to_all", x)
        if 2 * self.size * 8 <= INLINE_BYTES:  # else ranks that disagree about sizes hear of it from gloo
            self.table = torch.tensor([*self.inputs, *self.outputs], device="cpu")

    def check_tables(self, tables: list[Tensor], sequence: int) -> None:
        sent = torch.stack([table[: self.size] for table in tables])
        expected = torch.stack([table[self.size :] for table in tables])
        if torch.equal(sent, expected.t()):
            return
        said = "; ".join(
            f"rank {rank} sends {' '.join(map(str, table[: self.size].tolist()))} and expects "
            f"{' '.join(map(str, table[self.size :].tolist()))}"
            for rank, table in enumerate(tables)
        )
        raise CommMismatchError(f"call #{sequence}: what ranks send is not what ranks expect in all_to_all; {said}")

    def numel_of(self, rank: int) -> int:
        return self.x.numel()

    def value_of(self, host: int) -> tuple[int, torch.dtype]:
        return self.inputs[host], self.x.dtype

    def result_of(self, host: int) -> tuple[int, torch.dtype]:
        return sum(self.outputs), self.x.dtype

    def combine_ranks(self, xs: list[Tensor]) -> Tensor:
        raise AssertionError("never little")

    def combine_hosts(self, values: list[Tensor], host: int) -> Tensor:
        raise AssertionError("never little")

    def take(self, result: Tensor) -> Tensor:
        raise AssertionError("never little")

    def bring(self, local: Local) -> Tensor | None:
        return self.x

    def exchange(self, leaders: Leaders, value: Tensor, deadline: float) -> Tensor:
        if not self.moves:
            return value
        return leaders.finish(leaders.start(value, self.inputs, self.outputs, deadline), deadline)

    def hand_on(self, local: Local, result: Tensor | None) -> Tensor | None:
        return result


class Comparison(_Barrier):
    """Only the headers."""

    def __init__(self, header: bytes) -> None:
        self.header = header


def _gather(leaders: Leaders, value: Tensor, sizes: Sequence[int], deadline: float) -> Tensor:
    """The values of all hosts, one after another."""
    exchange = leaders.start(value.repeat(len(sizes)), [value.numel()] * len(sizes), sizes, deadline)
    return leaders.finish(exchange, deadline)


class HierarchicalTransport:
    """See `fastpar.comm.transport.Transport` and the module docstring. `timeout` in seconds; `flat` takes the rest:
    None where every rank is alone on its host."""

    def __init__(
        self, hierarchy: Hierarchy, rank: int, flat: Transport | None, timeout: float, *, background: bool
    ) -> None:
        self._hierarchy, self._rank, self._flat = hierarchy, rank, flat
        self._layout = _Layout(hierarchy.hosts)
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
        call = _AllReduce(self._layout, x, op)
        return self._launch(call, (lambda result: result) if out is None else out.copy_)

    def reduce_scatter(self, x: Tensor, sizes: Sequence[int], op: str) -> InFlight:
        flat = self._flat_way(x.numel(), x.dtype)
        if flat is not None:
            return flat.reduce_scatter(x, sizes, op)
        x, op = widen(x, op)  # hosts send float32 sums in any case
        return self._launch(_ReduceScatter(self._layout, self._rank, x, sizes, op))

    def all_gather(self, x: Tensor, sizes: Sequence[int]) -> InFlight:
        flat = self._flat_way(sum(sizes), x.dtype)
        if flat is not None:
            return flat.all_gather(x, sizes)
        return self._launch(_AllGather(self._layout, self._rank, x, sizes))

    def all_to_all(self, x: Tensor, input_sizes: Sequence[int], output_sizes: Sequence[int]) -> InFlight:
        if self._flat is not None:
            return self._flat.all_to_all(x, input_sizes, output_sizes)
        return self._launch(AllToAll(self._rank, x, input_sizes, output_sizes))

    def broadcast(self, x: Tensor, src: int) -> InFlight:
        flat = self._flat_way(x.numel(), x.dtype)
        if flat is not None:
            return flat.broadcast(x, src)
        return self._launch(_Broadcast(self._layout, self._rank, x, src))

    def reduce(self, x: Tensor, dst: int, op: str) -> InFlight:
        flat = self._flat_way(x.numel(), x.dtype)
        if flat is not None:
            return flat.reduce(x, dst, op)
        return self._launch(_Reduce(self._layout, self._rank, x, dst, op))

    def barrier(self) -> InFlight:
        return self._launch(_Barrier())

    def _launch(self, call: Collective, write: Callable[[Tensor], Tensor] = lambda result: result) -> InFlight:
        hierarchy, deadline = self._hierarchy, time.monotonic() + self._timeout
        if self._background:
            work = hierarchy.sequencer.submit(lambda: hierarchy.run(call, deadline))
            return InFlight(work, lambda: write(work.result()))
        result = hierarchy.sequencer.run(lambda: hierarchy.run(call, deadline))
        return InFlight(None, lambda: write(result))
