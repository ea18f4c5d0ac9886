"""Collectives between hosts, each as one rank's part of it, in the terms of `fastpar.comm.multi_host.protocol`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from fastpar.comm.errors import CommMismatchError
from fastpar.comm.multi_host.leaders import Leaders
from fastpar.comm.multi_host.protocol import INLINE_BYTES, Collective, HostLocal, header_of
from fastpar.comm.reduction import accumulator, reduce_in_order
from fastpar.comm.shards import shard_sizes

# Up to so many bytes, of all hosts together, leaders send each other their whole sums instead of a share and then the
# result: one message to each instead of two.
_WHOLE_BYTES = 1 << 18


class HostLayout:
    """The placement of ranks. `order` is all ranks by host."""

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


class HostReduction(Collective):
    """all_reduce, reduce and reduce_scatter: `parts[h]` elements of the reduced tensor, in the order of hosts, go to
    host h; or all of it to every host, where `parts` is None."""

    x: Tensor

    def __init__(self, layout: HostLayout, x: Tensor, op: str, parts: Sequence[int] | None) -> None:
        self.layout, self.x, self.op = layout, x, op
        self.parts = parts
        # Sums stay in the wide dtype between hosts, so that they are rounded once.
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
        """The value in the order of hosts."""
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

    def bring(self, local: HostLocal) -> Tensor | None:
        return local.reduce(self.x.to(self.wide), "sum" if self.adds else self.op)

    def exchange(self, leaders: Leaders, value: Tensor, deadline: float) -> Tensor:
        num_hosts = self.layout.num_hosts
        if self.parts is not None:
            return self._reduce_parts(leaders, self.sort(value), self.parts, deadline)
        # One message to each leader instead of two: latency is what counts.
        if value.nbytes * num_hosts <= _WHOLE_BYTES:
            sizes = [value.numel()] * num_hosts
            received = leaders.finish(leaders.start(value.repeat(num_hosts), sizes, sizes, deadline), deadline)
            return self.reduced(received.chunk(num_hosts))
        # A reduce-scatter and an all-gather among leaders: the fewest bytes.
        shares = shard_sizes(value.numel(), num_hosts)
        share = self._reduce_parts(leaders, value, shares, deadline)
        return _gather(leaders, share, shares, deadline)

    def _reduce_parts(self, leaders: Leaders, value: Tensor, parts: Sequence[int], deadline: float) -> Tensor:
        mine, num_hosts = parts[leaders.host], len(parts)
        received = leaders.finish(leaders.start(value, parts, [mine] * num_hosts, deadline), deadline)
        return self.reduced(received.view(num_hosts, mine).unbind())


class HostAllReduce(HostReduction):
    def __init__(self, layout: HostLayout, x: Tensor, op: str) -> None:
        super().__init__(layout, x, op, None)
        self.header = header_of("all_reduce", x, reduction=op, count=x.numel())

    def take(self, result: Tensor) -> Tensor:
        return result.clone()

    def hand_on(self, local: HostLocal, result: Tensor | None) -> Tensor:
        return local.broadcast(torch.empty_like(self.x) if result is None else result, 0)


class HostReduce(HostReduction):
    def __init__(self, layout: HostLayout, rank: int, x: Tensor, dst: int, op: str) -> None:
        self.is_dst, self.dst = rank == dst, dst
        self.is_dst_here = layout.host_of[rank] == layout.host_of[dst]
        parts = [x.numel() if dst in ranks else 0 for ranks in layout.hosts]
        super().__init__(layout, x, op, parts)
        self.header = header_of("reduce", x, reduction=op, root=dst, count=x.numel())

    def take(self, result: Tensor) -> Tensor | None:
        return result.clone() if self.is_dst else None

    def hand_on(self, local: HostLocal, result: Tensor | None) -> Tensor | None:
        if not self.is_dst_here:
            return None
        ranks = self.layout.hosts[self.layout.host_of[self.dst]]
        part = local.scatter(
            self.x if result is None else result, [self.x.numel() if rank == self.dst else 0 for rank in ranks]
        )
        return part if self.is_dst else None


class HostReduceScatter(HostReduction):
    def __init__(self, layout: HostLayout, rank: int, x: Tensor, sizes: Sequence[int], op: str) -> None:
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

    def hand_on(self, local: HostLocal, result: Tensor | None) -> Tensor:
        return local.scatter(self.x if result is None else result, self.sizes_here)


class HostAllGather(Collective):
    x: Tensor

    def __init__(self, layout: HostLayout, rank: int, x: Tensor, sizes: Sequence[int]) -> None:
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

    def bring(self, local: HostLocal) -> Tensor | None:
        return local.gather(self.x, self.sizes_here)

    def exchange(self, leaders: Leaders, value: Tensor, deadline: float) -> Tensor:
        return _gather(leaders, value, self.host_sizes, deadline)

    def hand_on(self, local: HostLocal, result: Tensor | None) -> Tensor:
        gathered = local.broadcast(self.x.new_empty(self.total) if result is None else result, 0)
        return self.layout.by_rank(gathered, self.sizes)


class HostBroadcast(Collective):
    """Ranks on the host of src have their result before the network is asked."""

    x: Tensor

    def __init__(self, layout: HostLayout, rank: int, x: Tensor, src: int) -> None:
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

    def bring(self, local: HostLocal) -> Tensor | None:
        if self.is_src_here:
            # Ranks on src's host have it without the network.
            self.result = local.broadcast(self.x, self.index) if local.size > 1 else self.x.clone()
            return self.result
        return torch.empty_like(self.x)

    def exchange(self, leaders: Leaders, value: Tensor, deadline: float) -> Tensor:
        return leaders.finish(leaders.start_broadcast(value, self.src_host, deadline), deadline)

    def hand_on(self, local: HostLocal, result: Tensor | None) -> Tensor:
        if self.is_src_here:
            return self.result
        return local.broadcast(torch.empty_like(self.x) if result is None else result, 0)


class HostBarrier(Collective):
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

    def bring(self, local: HostLocal) -> None:
        return None

    def exchange(self, leaders: Leaders, value: Tensor, deadline: float) -> Tensor:
        return value

    def hand_on(self, local: HostLocal, result: Tensor | None) -> None:
        return None


class HostAllToAll(Collective):
    """The all_to_all of ranks that are all alone on their hosts. `moves` False: only compare what ranks say."""

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

    def bring(self, local: HostLocal) -> Tensor | None:
        return self.x

    def exchange(self, leaders: Leaders, value: Tensor, deadline: float) -> Tensor:
        if not self.moves:
            return value
        return leaders.finish(leaders.start(value, self.inputs, self.outputs, deadline), deadline)

    def hand_on(self, local: HostLocal, result: Tensor | None) -> Tensor | None:
        return result


class HeaderComparison(HostBarrier):
    """Only the headers."""

    def __init__(self, header: bytes) -> None:
        self.header = header


def _gather(leaders: Leaders, value: Tensor, sizes: Sequence[int], deadline: float) -> Tensor:
    """The values of all hosts, one after another."""
    exchange = leaders.start(value.repeat(len(sizes)), [value.numel()] * len(sizes), sizes, deadline)
    return leaders.finish(exchange, deadline)
