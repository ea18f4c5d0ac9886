"""Rows of tokens between ranks on several hosts: each token once to each host, and there to the ranks of its experts.

    source rank  --network-->  a rank of each host that has an expert of the token  --within the host-->  their ranks

A rank's rows come in at the rank of the other host with its own number there (modulo their number): its *gateway*. So
every rank of a host sends and receives a share. On the way back the gateway sums what the ranks of its host have for a
token, and one row travels over the network: the sum over the token's choices there, in float32 with one rounding, and
the source adds those of the hosts. `exact` sends every choice's row over the network on the way back, from rank to rank
as `AllToAllDispatcher` does, and has the bits of one rank; the way there is the same.

`fastpar.ops.moe.transports.within_host` has the way within a host: memory that its ranks share, or an all-to-all.

A dispatch is one all-gather (of loads) and one all-to-all, as without hosts, and a barrier or an all-to-all within
the host. The other ways are one all-to-all and that; `moe_combine`, whose rows may be wrong on one rank, has an
all-gather of 32 bytes a rank before. What is computed beside an all-to-all hides the step between hosts.

Bytes over the network, top-8 of 256 experts at random, 8 ranks on 2 hosts: a token goes to 2.65 ranks of the other host
(4 (1 - C(224, 8) / C(256, 8))), and to 0.997 other hosts (1 - C(128, 8) / C(256, 8)): 2.66 times fewer rows. Each has
48 bytes of experts' numbers and weights in both. With a single choice there is nothing to save, and "auto" leaves the
dispatch to `AllToAllDispatcher`: the loads tell.

Worked example: hosts {0, 1} and {2, 3}, an expert on each rank. Rank 1 has a token for experts 2 and 3. It sends one
row, to rank 3, its gateway, where ranks 2 and 3 read it, and gets one row back from there, the sum of what the two
have. By `AllToAllDispatcher` they are two rows each way.

Hosts may have any numbers of ranks, and any ranks.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fastpar.comm import Communicator
from fastpar.comm.shared_memory.rendezvous import Hosts
from fastpar.ops._buffers import new_buffer
from fastpar.ops.moe.dispatcher import (
    DispatchHandle,
    ExpertResults,
    FinishCombine,
    FinishRedispatch,
    Tables,
    TokenDispatcher,
    make_handle,
    rows_of_pairs,
    take_values,
    wide_weights,
)
from fastpar.ops.moe.packing import Field, PackedField, SentPairs, SentTokens, token_parts
from fastpar.ops.moe.permute import sum_rows
from fastpar.ops.moe.plan import DispatchSpec, RowPlacement, SortedPairs, gather_loads, problem_of
from fastpar.ops.moe.transports.all_to_all import INT16_MAX, AllToAllDispatcher
from fastpar.ops.moe.transports.within_host import GatewayRows, HostForwarder, Topology


@dataclass
class HierarchicalRoute:
    """How the rows of one dispatch travel.

    sent      the tokens that this rank sends to hosts
    to, back  rows to and from each rank over the network
    forward   the route within the host
    pairs     for sums with the bits of one rank, how pairs' rows go back
    coming    what has been launched and is not yet taken
    """

    sent: SentTokens
    to: list[int]
    back: list[int]
    forward: Any
    pairs: SentPairs | None = None
    coming: FinishRedispatch | None = None

    def take(self) -> list[Tables]:
        assert self.coming is not None
        coming, self.coming = self.coming, None
        return coming()


HierarchicalHandle = DispatchHandle[HierarchicalRoute]


class HierarchicalDispatcher(TokenDispatcher[HierarchicalRoute]):
    """See `TokenDispatcher`, and the module's docstring.

    if_fewer  give a dispatch that would not send fewer rows between hosts this way, as the loads tell, to
              `AllToAllDispatcher`, which spares them the step within the host
    """

    overlaps = True

    def __init__(
        self, comm: Communicator, hosts: Hosts, forwarder: HostForwarder, *, exact: bool = False, if_fewer: bool = False
    ) -> None:
        self.comm, self._forwarder, self._exact, self._if_fewer = comm, forwarder, exact, if_fewer
        self._top = Topology.of(hosts, comm.rank)
        self._flat = AllToAllDispatcher(comm, exact=exact, in_chunks=False)

    def dispatch(
        self, x: Tensor, indices: Tensor, weights: Tensor | None, spec: DispatchSpec
    ) -> tuple[DispatchHandle, Tables]:
        comm, top, forwarder = self.comm, self._top, self._forwarder
        spec = replace(spec, exact=self._exact)
        problem = problem_of(x, indices, weights, spec, comm)
        pairs = SortedPairs.nowhere(spec.num_experts) if problem else SortedPairs.of(indices, spec.num_experts)
        per_rank = max(spec.num_experts // comm.size, 1)
        num_here = top.widest * per_rank
        sent = SentTokens.of(top.experts_by_place(pairs.indices, per_rank), len(top.hosts), num_here)
        # Rows to each host, and where it decides something also rows to each rank, go into the one all-gather.
        sizes = [top.sizes_by_host(sent.sizes)]
        to_ranks = None
        if self._if_fewer or forwarder.needs_rank_sizes:
            to_ranks = SentTokens.of(pairs.indices, comm.size, per_rank)
            sizes.append(to_ranks.sizes)
        loads = gather_loads(comm, problem, x, pairs, spec, *sizes)
        by_host, by_rank = loads.extra.split([len(top.hosts), loads.extra.shape[1] - len(top.hosts)], 1)
        if self._if_fewer and to_ranks is not None and not top.saves(by_host, by_rank):
            return self._flat.send_tokens(x, weights, pairs, to_ranks, loads, by_rank)
        place = RowPlacement.of(loads.loads, spec.padding)
        mine = slice(comm.rank * per_rank, (comm.rank + 1) * per_rank)
        rows_here = by_host[:, top.host].tolist()
        to = top.by_gateway(by_host[comm.rank].tolist())
        back = [rows_here[rank] if rank in top.sources[top.index] else 0 for rank in range(comm.size)]
        pairs, sent = pairs.going(int(loads.loads[comm.rank].sum())), sent.going(sum(to))

        numbers = sent.experts.to(torch.int16 if num_here <= INT16_MAX else torch.int32)
        parts, decoder = token_parts([], x, spec.payload)
        tokens = [PackedField(part, sent.tokens) for part in parts]
        pair_weights = wide_weights(weights, x, pairs)
        fields = [*tokens, PackedField(numbers), PackedField(pair_weights, sent.tokens)]
        *columns, experts, received_weights = self._flat.swap(fields, to, back)()

        gateway = GatewayRows(top, per_rank, experts, received_weights, rows_here, by_rank, place)
        forwarded, forward = forwarder.dispatch(gateway, columns, decoder)
        received = SortedPairs.of(forwarded.experts, per_rank).going(int(loads.loads[:, mine].sum()))
        forwarder.set_slots(forward, forwarded, received.slots(place.starts[mine]))
        rows = rows_of_pairs(received, place.starts[mine], forwarded.weights, place.rank_rows[comm.rank])
        # Sorted by source for the order of rows; the tables have them by gateway.
        source = rows[0]
        if len(forwarded.position):
            source = torch.where(source < 0, source, forwarded.position[source])
        route = HierarchicalRoute(sent, to, back, forward)
        if self._exact:
            route.pairs = SentPairs.of(pairs, loads.loads, place.first[:, mine], comm.rank)
        (tables,) = forwarded.tables
        return make_handle(self, pairs, loads, place, (source, rows[1]), pair_weights, route), tables

    def redispatch(
        self, handle: HierarchicalHandle, *tensors: Tensor, x: Tensor | None = None, overlapped: bool = False
    ) -> FinishRedispatch:
        route = handle.route
        parts, decoder = token_parts(tensors, x, handle.payload)
        fields = [PackedField(part, route.sent.tokens) for part in parts]
        # Only the step between hosts goes beside what the caller does.
        coming = self._flat.swap(fields, route.to, route.back, overlapped)

        def wait() -> list[Tables]:
            return self._forwarder.redispatch(route.forward, coming(), decoder)

        if not overlapped:
            return wait
        # Cached, as `combine_buffer` may have to take it first.
        route.coming = functools.cache(wait)
        return route.take

    def combine_buffer(self, handle: HierarchicalHandle, width: int, dtype: torch.dtype) -> Tensor:
        route = handle.route
        if route.coming is not None:
            route.coming()  # its step within the host takes the memory that is next, before this
        if route.pairs is not None:
            return new_buffer(handle.row_weights, (handle.num_rows, width), dtype)
        return self._forwarder.combine_buffer(route.forward, handle, width, dtype)

    def combine(self, handle: HierarchicalHandle, results: ExpertResults) -> FinishCombine:
        if results.agreement is not None:
            results.agreement.gather(self.comm)  # before the rows, which meet within hosts before they travel
        route = handle.route
        if route.pairs is None:
            fields = self._forwarder.sums(route.forward, results)
            to, back, factors = route.back, route.to, None
            index, places = route.sent.rows_of_token, route.sent.values_of_pair
        else:
            pairs = route.pairs
            fields = list[Field](PackedField(part, pairs.rows) for part in results.columns)
            to, back, factors = pairs.to, pairs.back, handle.pair_weights if results.weighted else None
            index = places = pairs.slots
        coming = self._flat.swap(fields, to, back, results.overlapped)

        def finish(add: Tensor | None) -> tuple[Tensor, Tensor | None]:
            sums, *found = coming()
            return sum_rows([sums], index, weights=factors, add=add), take_values(found, places) if found else None

        return finish
