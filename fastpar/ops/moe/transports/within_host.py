"""Within a host: rows of tokens that came over the network to one rank, for the experts of all ranks there.

`fastpar.ops.moe.transports.hierarchical` moves rows between hosts and says which rank they come in at, their gateway.
From there `SharedForwarder` shows them to the other ranks in memory that they share: CPU tensors. `AllToAllForwarder`
sends them once more, by an all-to-all of the whole group in which hosts send each other nothing: any device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from fastpar.comm.multi_host.host_ranks import HostRanks
from fastpar.comm.shared_memory.rendezvous import Hosts
from fastpar.ops._buffers import new_buffer
from fastpar.ops.moe.dispatcher import DispatchHandle, ExpertResults, Tables, take_values
from fastpar.ops.moe.packing import Field, PackedField, PackedSums, SentTokens, TokenDecoder
from fastpar.ops.moe.plan import RowPlacement, SortedPairs, spread
from fastpar.ops.moe.transports.all_to_all import AllToAllDispatcher
from fastpar.ops.moe.transports.shared_memory import DoubleBuffer, SharedTables

ForwardRoute = TypeVar("ForwardRoute")


@dataclass(frozen=True)
class Topology:
    """Who is where, seen by one rank.

    host, index  this rank's host, and its number among the ranks `here`
    widest       ranks of the largest host
    gateways     for every host, the rank there that this one's rows go to
    sources      for every rank here, the ranks whose rows come in there, in order
    places       for every rank: its number in `widest` for each host, where hosts stand in the order of the gateways:
                 that is the order in which an all-to-all takes rows
    """

    hosts: Hosts
    rank: int
    host: int
    index: int
    widest: int
    gateways: tuple[int, ...]
    sources: tuple[tuple[int, ...], ...]
    places: tuple[int, ...]

    @staticmethod
    @lru_cache(maxsize=256)
    def of(hosts: Hosts, rank: int) -> Topology:
        where = {other: (host, index) for host, ranks in enumerate(hosts) for index, other in enumerate(ranks)}
        host, index = where[rank]
        widest = max(map(len, hosts))

        def comes_to(other: int) -> int:
            """Where its rows come in here."""
            return where[other][1] % len(hosts[host])

        gateways = tuple(ranks[index % len(ranks)] for ranks in hosts)
        first = [sorted(gateways).index(gateway) * widest for gateway in gateways]
        return Topology(
            hosts=hosts,
            rank=rank,
            host=host,
            index=index,
            widest=widest,
            gateways=gateways,
            sources=tuple(
                tuple(other for other in sorted(where) if comes_to(other) == number)
                for number in range(len(hosts[host]))
            ),
            places=tuple(first[where[other][0]] + where[other][1] for other in sorted(where)),
        )

    @property
    def here(self) -> tuple[int, ...]:
        return self.hosts[self.host]

    @property
    def size(self) -> int:
        return len(self.places)

    def experts_by_place(self, indices: Tensor, per_rank: int) -> Tensor:
        """The same choices with experts numbered by the places of their ranks; -1: nowhere."""
        if self.places == tuple(range(len(self.hosts) * self.widest)):
            return indices
        ranks = indices.div(per_rank, rounding_mode="floor")
        goes = (indices >= 0) & (ranks < self.size)
        places = torch.tensor(self.places, device=indices.device)[torch.where(goes, ranks, 0)]
        return torch.where(goes, indices + (places - ranks) * per_rank, -1)

    def sizes_by_host(self, sizes: Tensor) -> Tensor:
        """From the order of gateways to that of hosts."""
        order = sorted(self.gateways)
        return sizes[torch.tensor([order.index(gateway) for gateway in self.gateways], device=sizes.device)]

    def saves(self, by_host: Tensor, by_rank: Tensor) -> bool:
        """Whether fewer rows leave hosts if they go to hosts [size, hosts] than if they go to ranks [size, size]."""
        host_of = torch.empty(self.size, dtype=torch.int64, device="cpu")
        for host, ranks in enumerate(self.hosts):
            host_of[list(ranks)] = host
        hosts = torch.arange(len(self.hosts), device="cpu")
        to_hosts, to_ranks = by_host[host_of[:, None] != hosts], by_rank[host_of[:, None] != host_of]
        return bool(to_hosts.sum() < to_ranks.sum())

    def by_gateway(self, sizes: Sequence[int]) -> list[int]:
        """What is sent to each rank, from what is sent to each host."""
        sent = dict(zip(self.gateways, sizes, strict=True))
        return [sent.get(rank, 0) for rank in range(self.size)]

    def rows_in(self, counts: Sequence[int]) -> list[int]:
        """What has come in at each rank here, from what has come of each rank of the group."""
        return [sum(counts[source] for source in sources) for sources in self.sources]

    def by_source(self, counts: Sequence[int]) -> Tensor:
        """Where rows lie, taken by the ranks that they come from, if they lie by the ranks here at which they came in
        and then by where they come from; int64, in host memory.
        """
        first, total = [0] * self.size, 0
        for source in (source for sources in self.sources for source in sources):
            first[source] = total
            total += counts[source]
        return spread(torch.tensor(first, device="cpu"), torch.tensor(counts, device="cpu"))


@dataclass(frozen=True)
class GatewayRows:
    """Rows that have come in at this rank, for whomever on its host, and what is known of all.

    experts, weights  [R, K]: numbers on this host, -1 elsewhere; of the rows by source
    by_host           rows that each rank of the group has sent to this host
    by_rank           [size, size]: tokens of each rank that go to each, where the forwarder asks for it
    """

    top: Topology
    per_rank: int
    experts: Tensor
    weights: Tensor
    by_host: list[int]
    by_rank: Tensor
    place: RowPlacement


class ForwardedRows(NamedTuple):
    """What this rank's experts have of the rows at all gateways of the host.

    tables    of every tensor that was sent
    experts   [n, K]: numbers on this rank, -1 elsewhere; of the rows `position`, which are by source
    weights   [n, K]
    """

    tables: list[Tables]
    experts: Tensor
    weights: Tensor
    position: Tensor


class HostForwarder(ABC, Generic[ForwardRoute]):
    """The step between a gateway and the ranks of its host. All methods are collective there.

    `decoder` makes tensors of columns as they travel.
    """

    needs_rank_sizes: bool

    @abstractmethod
    def dispatch(
        self, gateway: GatewayRows, columns: Sequence[Tensor], decoder: TokenDecoder
    ) -> tuple[ForwardedRows, ForwardRoute]:
        """The rows of a dispatch, and what the other methods take as its route."""

    def set_slots(self, route: ForwardRoute, forwarded: ForwardedRows, slots: Tensor) -> None:
        """The rows [n, K] of this rank's experts for those of `forwarded`: for forwarders that have to be told."""

    @abstractmethod
    def redispatch(self, route: ForwardRoute, columns: Sequence[Tensor], decoder: TokenDecoder) -> list[Tables]:
        """Other tensors over the same route."""

    @abstractmethod
    def combine_buffer(self, route: ForwardRoute, handle: DispatchHandle, width: int, dtype: torch.dtype) -> Tensor:
        """See `TokenDispatcher.combine_buffer`."""

    @abstractmethod
    def sums(self, route: ForwardRoute, results: ExpertResults) -> list[Field]:
        """What goes back of the rows that came in at this rank: sums over this host's ranks, and values of pairs."""


class SharedForwardRoute(NamedTuple):
    """Rows that came in at each rank here, and rows of the experts of each; where the pairs of what came in at this one
    have theirs, [R, K], among those of all ranks here, and their weights."""

    rows_in: list[int]
    expert_rows: list[int]
    slots: Tensor
    weights: Tensor


class SharedForwarder(HostForwarder[SharedForwardRoute]):
    """Forwards rows in memory that the ranks of the host share."""

    needs_rank_sizes = False

    def __init__(self, host: HostRanks, memory: DoubleBuffer) -> None:
        self._tables = SharedTables(host, memory) if host.size > 1 else None

    def dispatch(
        self, gateway: GatewayRows, columns: Sequence[Tensor], decoder: TokenDecoder
    ) -> tuple[ForwardedRows, SharedForwardRoute]:
        top, per_rank = gateway.top, gateway.per_rank
        rows_in = top.rows_in(gateway.by_host)
        *tables, experts, weights = self._share([*decoder(columns), gateway.experts, gateway.weights], rows_in)
        position = top.by_source(gateway.by_host)
        numbers = torch.cat(list(experts))[position].int() - top.index * per_rank
        numbers = torch.where((numbers >= 0) & (numbers < per_rank), numbers, -1)
        expert_rows = [gateway.place.rank_rows[rank] for rank in top.here]
        route = SharedForwardRoute(
            rows_in, expert_rows, self._slots(gateway, expert_rows), gateway.weights.contiguous()
        )
        return ForwardedRows(tables, numbers, torch.cat(list(weights))[position], position), route

    def _slots(self, gateway: GatewayRows, expert_rows: list[int]) -> Tensor:
        """Where pairs lie follows from the loads: the ranks that rows came in at need not be told."""
        top, per_rank = gateway.top, gateway.per_rank
        num_here = len(top.here) * per_rank
        sources = list(top.sources[top.index])
        begins = torch.tensor([0, *expert_rows[:-1]], device="cpu").cumsum(0).repeat_interleave(per_rank)
        first = gateway.place.first.view(top.size, top.size, per_rank)[sources][:, list(top.here)].flatten(1) + begins
        counts = torch.tensor([gateway.by_host[source] for source in sources], device="cpu")
        block = torch.arange(len(sources), device="cpu").repeat_interleave(counts)[:, None] * num_here
        experts = gateway.experts.long()
        experts = torch.where(experts < 0, -1, experts + block)
        return SortedPairs.of(experts, len(sources) * num_here).slots(first.flatten())

    def redispatch(self, route: SharedForwardRoute, columns: Sequence[Tensor], decoder: TokenDecoder) -> list[Tables]:
        return self._share(decoder(columns), route.rows_in)

    def combine_buffer(
        self, route: SharedForwardRoute, handle: DispatchHandle, width: int, dtype: torch.dtype
    ) -> Tensor:
        if self._tables is None:
            return new_buffer(handle.row_weights, (handle.num_rows, width), dtype)
        return self._tables.buffer(route.expert_rows, width, dtype)

    def sums(self, route: SharedForwardRoute, results: ExpertResults) -> list[Field]:
        tables = self._share(results.columns, route.expert_rows)
        weights = route.weights if results.weighted else None
        fields: list[Field] = [PackedSums(results.rows, tables[0], route.slots, weights)]
        return fields if len(tables) == 1 else [*fields, PackedField(take_values(tables[1], route.slots))]

    def _share(self, tensors: Sequence[Tensor], rows: Sequence[int]) -> list[Tables]:
        if self._tables is None:
            return [[x] for x in tensors]
        return self._tables.share(*((x, rows) for x in tensors))


@dataclass
class AllToAllForwardRoute:
    """What came in here and goes to the ranks here; rows to and from each; weights of the pairs of the rows that have
    come to this one, [n, K], and where they lie among its experts'."""

    sent: SentTokens
    to: list[int]
    back: list[int]
    weights: Tensor
    slots: Tensor | None = None


class AllToAllForwarder(HostForwarder[AllToAllForwardRoute]):
    """Forwards rows by an all-to-all within the host, each row once to each rank."""

    needs_rank_sizes = True

    def __init__(self, flat: AllToAllDispatcher) -> None:
        self._flat = flat

    def dispatch(
        self, gateway: GatewayRows, columns: Sequence[Tensor], decoder: TokenDecoder
    ) -> tuple[ForwardedRows, AllToAllForwardRoute]:
        top, by_rank = gateway.top, gateway.by_rank
        mine = by_rank[list(top.sources[top.index])].sum(0).tolist()
        to = [mine[rank] if rank in top.here else 0 for rank in range(top.size)]
        sent = SentTokens.of(gateway.experts.int(), top.widest, gateway.per_rank).going(sum(to))
        counts = by_rank[:, top.rank].tolist()
        back = [0] * top.size
        for rank, count in zip(top.here, top.rows_in(counts), strict=True):
            back[rank] = count
        numbers = PackedField(sent.experts.to(gateway.experts.dtype))
        fields = [*(PackedField(x, sent.tokens) for x in columns), numbers, PackedField(gateway.weights, sent.tokens)]
        *found, experts, weights = self._flat.swap(fields, to, back)()
        position = top.by_source(counts).to(experts.device)
        tables: list[Tables] = [[x] for x in decoder(found)]
        route = AllToAllForwardRoute(sent, to, back, weights.contiguous())
        return ForwardedRows(tables, experts[position].int(), weights[position], position), route

    def set_slots(self, route: AllToAllForwardRoute, forwarded: ForwardedRows, slots: Tensor) -> None:
        route.slots = torch.empty_like(slots)
        route.slots[forwarded.position] = slots

    def redispatch(self, route: AllToAllForwardRoute, columns: Sequence[Tensor], decoder: TokenDecoder) -> list[Tables]:
        found = self._flat.swap([PackedField(x, route.sent.tokens) for x in columns], route.to, route.back)()
        return [[x] for x in decoder(found)]

    def combine_buffer(
        self, route: AllToAllForwardRoute, handle: DispatchHandle, width: int, dtype: torch.dtype
    ) -> Tensor:
        return new_buffer(handle.row_weights, (handle.num_rows, width), dtype)

    def sums(self, route: AllToAllForwardRoute, results: ExpertResults) -> list[Field]:
        assert route.slots is not None
        rows, values = results.rows, results.values
        # Sums of a rank's own rows travel wide, and are rounded once, at the gateway.
        wide = rows.new_empty((0, rows.shape[1]), dtype=torch.promote_types(rows.dtype, torch.float32))
        fields: list[Field] = [PackedSums(wide, [rows], route.slots, route.weights if results.weighted else None)]
        fields += [] if values is None else [PackedField(take_values([values], route.slots))]
        sums, *found = self._flat.swap(fields, route.back, route.to)()
        summed = PackedSums(rows, [sums], route.sent.rows_of_token, None)
        return [summed, *(PackedField(take_values([x], route.sent.values_of_pair)) for x in found)]
