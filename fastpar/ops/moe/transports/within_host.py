"""Within a host: how its ranks get at rows of tokens that came over the network to any one of them.

`fastpar.ops.moe.transports.hierarchical` moves rows between hosts and says which rank they come in at. From there,
`SharedRows` shows them to the other ranks in memory that they share: CPU tensors. `SentRows` sends them once more, by
an all-to-all of the whole group in which hosts send each other nothing: any device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fastpar.comm.multi_host.host_ranks import HostRanks
from fastpar.comm.shared_memory.rendezvous import Hosts
from fastpar.ops._buffers import new_buffer
from fastpar.ops.moe.dispatcher import Tables, take_values
from fastpar.ops.moe.permute import sum_rows, tokens_by_rank
from fastpar.ops.moe.plan import DispatchPlan, Pairs, Placement, spread
from fastpar.ops.moe.transports.all_to_all import AllToAllExchange, _Field, _Sent
from fastpar.ops.moe.transports.shared_memory import SharedExchange, SharedHalves, _bytes

Decode = Callable[[Sequence[Tensor]], list[Tensor]]  # tensors from columns as they travel


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


class _Sums(NamedTuple):
    """`sum_rows` of tables as a part of what is sent, in the dtype and width of x."""

    x: Tensor
    tables: Tables
    slots: Tensor
    weights: Tensor | None = None

    def write(self, out: Tensor) -> None:
        sum_rows(self.tables, self.slots, weights=self.weights, out=out)


@dataclass(frozen=True)
class Arrived:
    """What has come in at this rank, for whomever on its host, and what the headers say.

    experts, weights  [R, K]: numbers on this host, -1 elsewhere; of the rows by source
    by_host           rows that each rank of the group has sent to this host
    by_rank           [size, size]: tokens of each rank that go to each, where the way within the host asks for it
    """

    top: Topology
    per_rank: int
    experts: Tensor
    weights: Tensor
    by_host: list[int]
    by_rank: Tensor
    place: Placement


class Opened(NamedTuple):
    """What this rank's experts have of it.

    tables    of every tensor that was sent
    experts   [n, K]: numbers on this rank, -1 elsewhere; of the rows `position`, which are by source
    weights   [n, K]
    """

    tables: list[Tables]
    experts: Tensor
    weights: Tensor
    position: Tensor


class WithinHost(Protocol):
    """How the ranks of a host get at rows that came in at any of them. All are collective there.

    `decode` makes tensors of columns as they travel.
    """

    needs_rank_sizes: bool

    def open(self, arrived: Arrived, columns: Sequence[Tensor], decode: Decode) -> tuple[Opened, Any]:
        """The rows of a dispatch, and what the others take for its way."""
        ...

    def remember(self, way: Any, opened: Opened, slots: Tensor) -> None:
        """The rows [n, K] of this rank's experts for those of `opened`."""
        ...

    def send(self, way: Any, columns: Sequence[Tensor], decode: Decode) -> list[Tables]: ...

    def empty_rows(self, way: Any, plan: DispatchPlan, width: int, dtype: torch.dtype) -> Tensor: ...

    def sums(self, way: Any, rows: Tensor, *, weighted: bool, values: Tensor | None) -> list[Any]:
        """What goes back of the rows that came in at this rank: sums over this host's ranks, and values of pairs."""
        ...


class _SharedWay(NamedTuple):
    """Rows that came in at each rank here, and rows of the experts of each; where the pairs of what came in at this one
    have theirs, [R, K], among those of all ranks here, and their weights."""

    rows_in: list[int]
    expert_rows: list[int]
    slots: Tensor
    weights: Tensor


class SharedRows:
    """In memory that the ranks of the host share."""

    needs_rank_sizes = False

    def __init__(self, host: HostRanks, halves: SharedHalves) -> None:
        self._memory = SharedExchange(host, halves) if host.size > 1 else None  # type: ignore[arg-type]

    def open(self, arrived: Arrived, columns: Sequence[Tensor], decode: Decode) -> tuple[Opened, _SharedWay]:
        top, per_rank = arrived.top, arrived.per_rank
        rows_in = top.rows_in(arrived.by_host)
        *tables, experts, weights = self._show([*decode(columns), arrived.experts, arrived.weights], rows_in)
        position = top.by_source(arrived.by_host)
        numbers = torch.cat(list(experts))[position].int() - top.index * per_rank
        numbers = torch.where((numbers >= 0) & (numbers < per_rank), numbers, -1)
        expert_rows = [arrived.place.rank_rows[rank] for rank in top.here]
        way = _SharedWay(rows_in, expert_rows, self._slots(arrived, expert_rows), arrived.weights.contiguous())
        return Opened(tables, numbers, torch.cat(list(weights))[position], position), way

    def remember(self, way: _SharedWay, opened: Opened, slots: Tensor) -> None:
        """Nothing: the ranks that rows came in at know from the headers where their pairs lie."""

    def _slots(self, arrived: Arrived, expert_rows: list[int]) -> Tensor:
        top, per_rank = arrived.top, arrived.per_rank
        num_here = len(top.here) * per_rank
        sources = list(top.sources[top.index])
        begins = torch.tensor([0, *expert_rows[:-1]], device="cpu").cumsum(0).repeat_interleave(per_rank)
        first = arrived.place.first.view(top.size, top.size, per_rank)[sources][:, list(top.here)].flatten(1) + begins
        counts = torch.tensor([arrived.by_host[source] for source in sources], device="cpu")
        block = torch.arange(len(sources), device="cpu").repeat_interleave(counts)[:, None] * num_here
        experts = arrived.experts.long()
        experts = torch.where(experts < 0, -1, experts + block)
        return Pairs.of(experts, len(sources) * num_here).slots(first.flatten())

    def send(self, way: _SharedWay, columns: Sequence[Tensor], decode: Decode) -> list[Tables]:
        return self._show(decode(columns), way.rows_in)

    def empty_rows(self, way: _SharedWay, plan: DispatchPlan, width: int, dtype: torch.dtype) -> Tensor:
        memory = self._memory
        if memory is None:
            return new_buffer(plan.row_weights, (plan.num_rows, width), dtype)
        memory._reserve(_bytes(max(way.expert_rows), width, dtype))
        return memory._part(memory.comm.rank, (plan.num_rows, width), dtype, 0)

    def sums(self, way: _SharedWay, rows: Tensor, *, weighted: bool, values: Tensor | None) -> list[Any]:
        shown = [rows] if values is None else [rows, values.view(-1, 1)]
        tables = self._show(shown, way.expert_rows)
        fields: list[Any] = [_Sums(rows, tables[0], way.slots, way.weights if weighted else None)]
        return fields if values is None else [*fields, _Field(take_values(tables[1], way.slots))]

    def _show(self, tensors: Sequence[Tensor], rows: Sequence[int]) -> list[Tables]:
        if self._memory is None:
            return [[x] for x in tensors]
        counts = torch.tensor(rows, device="cpu")
        return self._memory._show(*((x, counts) for x in tensors))


@dataclass
class _SentWay:
    """What came in here and goes to the ranks here; rows to and from each; weights of the pairs of the rows that have
    come to this one, [n, K], and where they lie among its experts'."""

    sent: _Sent
    to: list[int]
    back: list[int]
    weights: Tensor
    slots: Tensor | None = None


class SentRows:
    """By an all-to-all within the host, each row once to each rank."""

    needs_rank_sizes = True

    def __init__(self, flat: AllToAllExchange) -> None:
        self._flat = flat

    def open(self, arrived: Arrived, columns: Sequence[Tensor], decode: Decode) -> tuple[Opened, _SentWay]:
        top, by_rank = arrived.top, arrived.by_rank
        sent = _Sent(*tokens_by_rank(arrived.experts.int(), top.widest, arrived.per_rank))
        mine = by_rank[list(top.sources[top.index])].sum(0).tolist()
        to = [mine[rank] if rank in top.here else 0 for rank in range(top.size)]
        counts = by_rank[:, top.rank].tolist()
        back = [0] * top.size
        for rank, count in zip(top.here, top.rows_in(counts), strict=True):
            back[rank] = count
        numbers = _Field(sent.experts.to(arrived.experts.dtype))
        fields = [*(_Field(x, sent.tokens) for x in columns), numbers, _Field(arrived.weights, sent.tokens)]
        *found, experts, weights = self._flat._swap(fields, to, back)
        position = top.by_source(counts).to(experts.device)
        tables: list[Tables] = [[x] for x in decode(found)]
        way = _SentWay(sent, to, back, weights.contiguous())
        return Opened(tables, experts[position].int(), weights[position], position), way

    def remember(self, way: _SentWay, opened: Opened, slots: Tensor) -> None:
        way.slots = torch.empty_like(slots)
        way.slots[opened.position] = slots

    def send(self, way: _SentWay, columns: Sequence[Tensor], decode: Decode) -> list[Tables]:
        found = self._flat._swap([_Field(x, way.sent.tokens) for x in columns], way.to, way.back)
        return [[x] for x in decode(found)]

    def empty_rows(self, way: _SentWay, plan: DispatchPlan, width: int, dtype: torch.dtype) -> Tensor:
        return new_buffer(plan.row_weights, (plan.num_rows, width), dtype)

    def sums(self, way: _SentWay, rows: Tensor, *, weighted: bool, values: Tensor | None) -> list[Any]:
        assert way.slots is not None
        wide = rows.new_empty((0, rows.shape[1]), dtype=torch.promote_types(rows.dtype, torch.float32))
        fields: list[Any] = [_Sums(wide, [rows], way.slots, way.weights if weighted else None)]
        fields += [] if values is None else [_Field(take_values([values], way.slots))]
        sums, *found = self._flat._swap(fields, way.back, way.to)
        fields = [_Sums(rows, [sums], way.sent.rows_of_token)]
        return [*fields, *(_Field(take_values([x], way.sent.values_of_pair)) for x in found)]
