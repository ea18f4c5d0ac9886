"""Rows of tokens between ranks on several hosts: each token once to each host, and there to the ranks of its experts.

    source rank  --network-->  a rank of each host that has an expert of the token  --within the host-->  their ranks

A rank's rows come in at the rank of the other host with its own number there (modulo their number): its *gateway*. So
every rank of a host sends and receives a share. On the way back the gateway sums what the ranks of its host have for a
token, and one row travels over the network: the sum over the token's choices there, in float32 with one rounding, and
the source adds those of the hosts. `exact` sends every choice's row over the network on the way back, from rank to rank
as `AllToAllExchange` does, and has the bits of one rank; the way there is the same.

`fastpar.ops.moe.transports.within_host` has the way within a host: memory that its ranks share, or an all-to-all.

A dispatch is one all-gather (of headers) and one all-to-all, as without hosts, and a barrier or an all-to-all within
the host. The other ways are one all-to-all and that; `moe_combine`, whose rows may be wrong on one rank, has an
all-gather of 32 bytes a rank before. What is computed beside an exchange hides the step between hosts.

Bytes over the network, top-8 of 256 experts at random, 8 ranks on 2 hosts: a token goes to 2.65 ranks of the other host
(4 (1 - C(224, 8) / C(256, 8))), and to 0.997 other hosts (1 - C(128, 8) / C(256, 8)): 2.66 times fewer rows. Each has
48 bytes of experts' numbers and weights in both. With a single choice there is nothing to save, and "auto" leaves the
dispatch to `AllToAllExchange`: the headers tell.

Worked example: hosts {0, 1} and {2, 3}, an expert on each rank. Rank 1 has a token for experts 2 and 3. It sends one
row, to rank 3, its gateway, where ranks 2 and 3 read it, and gets one row back from there, the sum of what the two
have. By `AllToAllExchange` they are two rows each way.

Hosts may have any numbers of ranks, and any ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fastpar.comm import Communicator
from fastpar.comm.shared_memory.rendezvous import Hosts
from fastpar.ops.moe.claim import Claim
from fastpar.ops.moe.dispatcher import (
    Finish,
    GroupBound,
    Tables,
    float_weights,
    make_plan,
    rows_of_pairs,
    take_values,
)
from fastpar.ops.moe.permute import sum_rows, tokens_by_rank
from fastpar.ops.moe.plan import (
    DispatchPlan,
    Pairs,
    Placement,
    Terms,
    check_arguments,
    exchange_headers,
)
from fastpar.ops.moe.transports.all_to_all import (
    _INT16_MAX,
    AllToAllExchange,
    _Field,
    _PairRows,
    _received,
    _Sent,
    _tokens,
)
from fastpar.ops.moe.transports.within_host import Arrived, Decode, Topology, WithinHost


class HierarchicalExchange(GroupBound):
    """See `fastpar.ops.moe.dispatcher.Exchange`, and the module's docstring.

    if_fewer  give a dispatch that would not send fewer rows between hosts this way, as the headers tell, to
              `AllToAllExchange`, which spares them the step within the host
    """

    travels = True

    def __init__(
        self, comm: Communicator, hosts: Hosts, within: WithinHost, *, exact: bool = False, if_fewer: bool = False
    ) -> None:
        self.comm, self._within, self._exact, self._if_fewer = comm, within, exact, if_fewer
        self._top = Topology.of(hosts, comm.rank)
        self._flat = AllToAllExchange(comm, exact=exact, in_chunks=False)

    def dispatch(
        self,
        x: Tensor,
        indices: Tensor,
        weights: Tensor | None,
        num_experts: int,
        terms: Terms,
    ) -> tuple[DispatchPlan, Tables]:
        comm, top = self.comm, self._top
        terms = replace(terms, exact=self._exact)
        problem = check_arguments(x, indices, weights, num_experts, terms, comm)
        pairs = Pairs.nowhere(num_experts) if problem else Pairs.of(indices, num_experts)
        per_rank = max(num_experts // comm.size, 1)
        num_here = top.widest * per_rank
        sent = _Sent(*tokens_by_rank(top.experts_by_place(pairs.indices, per_rank), len(top.hosts), num_here))
        sizes = [top.sizes_by_host(sent.sizes)]
        directly = _Sent.of(pairs, comm.size, per_rank) if self._if_fewer or self._within.needs_rank_sizes else None
        if directly is not None:
            sizes.append(directly.sizes)
        headers = exchange_headers(comm, problem, x, pairs, terms, torch.cat(sizes))
        assert headers.extra is not None
        by_host, by_rank = headers.extra.split([len(top.hosts), headers.extra.shape[1] - len(top.hosts)], 1)
        if self._if_fewer and directly is not None and not top.saves(by_host, by_rank):
            return self._flat.deliver(x, weights, pairs, directly, headers, by_rank)
        place = Placement.of(headers.loads, terms.padding)

        numbers = sent.experts.to(torch.int16 if num_here <= _INT16_MAX else torch.int32)
        tokens = _tokens(x, sent, terms.payload)
        fields = [*tokens, _Field(numbers), _Field(float_weights(weights, indices), sent.tokens)]
        rows_here = by_host[:, top.host].tolist()
        to = top.by_gateway(by_host[comm.rank].tolist())
        back = [rows_here[rank] if rank in top.sources[top.index] else 0 for rank in range(comm.size)]
        *columns, experts, pair_weights = self._flat._swap(fields, to, back)

        arrived = Arrived(top, per_rank, experts, pair_weights, rows_here, by_rank, place)
        opened, inner = self._within.open(arrived, columns, _decoder(len(tokens), x.dtype, terms.payload))
        received = Pairs.of(opened.experts, per_rank)
        mine = slice(comm.rank * per_rank, (comm.rank + 1) * per_rank)
        self._within.remember(inner, opened, received.slots(place.starts[mine]))
        source, row_weights = rows_of_pairs(received, place.starts[mine], opened.weights, place.rank_rows[comm.rank])
        if len(opened.position):
            source = torch.where(source < 0, source, opened.position[source])
        way = _Way(sent, to, back, inner)
        if self._exact:
            way.pairs = _PairRows.of(pairs, headers.loads, place.first[:, mine], comm.rank)
        (tables,) = opened.tables
        return make_plan(self, pairs, headers, place, (source, row_weights), weights, way), tables

    def send(self, plan: DispatchPlan, *tensors: Tensor, again: Tensor | None = None) -> list[Tables]:
        return self._send(plan, tensors, again, beside=False)()

    def launch_send(
        self, plan: DispatchPlan, *tensors: Tensor, again: Tensor | None = None
    ) -> Callable[[], list[Tables]]:
        way: _Way = plan.way
        way.coming = functools.cache(self._send(plan, tensors, again, beside=True))
        return way.take

    def _send(
        self, plan: DispatchPlan, tensors: Sequence[Tensor], again: Tensor | None, *, beside: bool
    ) -> Callable[[], list[Tables]]:
        """Only the way between hosts goes beside what the caller does."""
        way: _Way = plan.way
        first = [] if again is None else _tokens(again, way.sent, plan.payload)
        fields = [*first, *(_Field(x, way.sent.tokens) for x in tensors)]
        coming = self._flat.launch_swap(fields, way.to, way.back, beside=beside)
        decode = _decoder(len(first), torch.float32 if again is None else again.dtype, plan.payload)
        return lambda: self._within.send(way.inner, coming(), decode)

    def empty_rows(self, plan: DispatchPlan, width: int, dtype: torch.dtype) -> Tensor:
        if plan.way.coming is not None:
            plan.way.coming()  # its step within the host takes the memory that is next, before this
        if plan.way.pairs is not None:
            return self._flat.empty_rows(plan, width, dtype)
        return self._within.empty_rows(plan.way.inner, plan, width, dtype)

    def launch_back(
        self,
        plan: DispatchPlan,
        rows: Tensor,
        *,
        weighted: bool,
        values: Tensor | None = None,
        claim: Claim | None = None,
        beside: bool = False,
    ) -> Finish:
        """Claims go before rows, in an all-gather: rows meet within hosts before they travel."""
        if claim is not None:
            claim.check(self.comm.all_gather(torch.tensor([claim.words(rows)], device="cpu")).tolist())
        way: _Way = plan.way
        if way.pairs is None:
            fields = self._within.sums(way.inner, rows, weighted=weighted, values=values)
            to, back, factors = way.back, way.to, None
            index, places = way.sent.rows_of_token, way.sent.values_of_pair
        else:
            pairs = way.pairs
            fields = [_Field(x, pairs.rows) for x in ([rows] if values is None else [rows, values.view(-1, 1)])]
            to, back, factors = pairs.to, pairs.back, plan.pair_weights if weighted else None
            index = places = pairs.slots
        coming = self._flat.launch_swap(fields, to, back, beside=beside)

        def finish(add: Tensor | None) -> tuple[Tensor, Tensor | None]:
            sums, *found = coming()
            return sum_rows([sums], index, weights=factors, add=add), take_values(found, places) if found else None

        return finish


@dataclass
class _Way:
    """What this rank sends to hosts; rows to and from each rank over the network; what the way within the host keeps;
    for sums with the bits of one rank, how pairs' rows go back; and what has been launched and is not yet taken."""

    sent: _Sent
    to: list[int]
    back: list[int]
    inner: Any
    pairs: _PairRows | None = None
    coming: Callable[[], list[Tables]] | None = None

    def take(self) -> list[Tables]:
        assert self.coming is not None
        coming, self.coming = self.coming, None
        return coming()


def _decoder(num_columns: int, dtype: torch.dtype, payload: str | None) -> Decode:
    """From columns as they travel to tensors: so many of the first are tokens, if any are."""

    def decode(columns: Sequence[Tensor]) -> list[Tensor]:
        first = [_received(columns[:num_columns], dtype, payload)] if num_columns else []
        return [*first, *columns[num_columns:]]

    return decode
