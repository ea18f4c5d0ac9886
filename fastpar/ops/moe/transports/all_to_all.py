"""Rows of tokens by all-to-all, over any transport of a `Communicator`: each token once to each rank.

A dispatch is one all-gather of loads and one all-to-all of packed rows: the token, the local numbers of its experts on
that rank, and their weights. On the way back a rank sums each token's rows, in float32 with one rounding, and sends one
row a token; `exact` sends every pair's row instead, and the sum over a token's choices has the bits of one rank.
Results from outside (`moe_combine`) stand behind their rank's `Agreement` of 32 bytes, in the same all-to-all.

Bytes, top-8 of 256 experts on 8 ranks chosen at random: a token goes to 8 (1 - C(224, 8) / C(256, 8)) = 5.29 ranks and
not to 8. With H = 7168 in bfloat16 that is 1.51 times fewer than a row for each choice, with rows in 8 bits 2.91 times
(`fastpar.ops.moe.fp8`), the 48 bytes a token of numbers and weights included.

Across hosts rows go as the `Communicator` sends an all-to-all there: through torch.distributed (gloo, NCCL), from each
rank to each, also where several ranks of one host get the same token. `fastpar.ops.moe.transports.hierarchical` sends
it once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from fastpar.comm import Communicator, Pending
from fastpar.comm.agree import Agreement
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
from fastpar.ops.moe.packing import (
    Field,
    PackedField,
    PackedSums,
    SentPairs,
    SentTokens,
    columns,
    layout,
    pack,
    token_parts,
)
from fastpar.ops.moe.permute import sum_rows
from fastpar.ops.moe.plan import (
    DTYPES,
    DispatchSpec,
    GroupLoads,
    RowPlacement,
    SortedPairs,
    gather_loads,
    problem_of,
)

INT16_MAX = 32767


@dataclass
class AllToAllRoute:
    """How the rows of one dispatch travel.

    sent        the tokens that this rank sends
    to, back    rows to each rank and from each
    slots       [n, K]: where the pairs of the received tokens have their rows
    weights     [n, K] of those pairs
    width, dtype  of tokens
    pairs       where pairs' rows go back one by one
    """

    sent: SentTokens
    to: list[int]
    back: list[int]
    slots: Tensor
    weights: Tensor
    width: int
    dtype: torch.dtype
    pairs: SentPairs | None = None


AllToAllHandle = DispatchHandle[AllToAllRoute]


class AllToAllDispatcher(TokenDispatcher[AllToAllRoute]):
    """See `TokenDispatcher`.

    exact      send every pair's row back, and sum at the token: the bits of one rank
    in_chunks  whether `fastpar.ops.moe.chunks` may cut what is sent
    """

    overlaps = True

    def __init__(self, comm: Communicator, *, exact: bool = False, in_chunks: bool = True) -> None:
        self.comm, self.exact, self.in_chunks = comm, exact, in_chunks

    def dispatch(
        self, x: Tensor, indices: Tensor, weights: Tensor | None, spec: DispatchSpec
    ) -> tuple[AllToAllHandle, Tables]:
        comm, num_experts = self.comm, spec.num_experts
        spec = replace(spec, exact=self.exact)
        problem = problem_of(x, indices, weights, spec, comm)
        pairs = SortedPairs.nowhere(num_experts) if problem else SortedPairs.of(indices, num_experts)
        sent = SentTokens.of(pairs.indices, comm.size, max(num_experts // comm.size, 1))
        loads = gather_loads(comm, problem, x, pairs, spec, sent.sizes)
        return self.send_tokens(x, weights, pairs, sent, loads, loads.extra)

    def send_tokens(
        self, x: Tensor, weights: Tensor | None, pairs: SortedPairs, sent: SentTokens, loads: GroupLoads, sizes: Tensor
    ) -> tuple[AllToAllHandle, Tables]:
        """What `dispatch` does once loads are known; `sizes` [size, size]: rows from each rank to each."""
        comm, payload = self.comm, loads.spec.payload
        per_rank = pairs.num_experts // comm.size
        place = RowPlacement.of(loads.loads, loads.spec.padding)
        mine = slice(comm.rank * per_rank, (comm.rank + 1) * per_rank)
        to, back = sizes[comm.rank].tolist(), sizes[:, comm.rank].tolist()
        pairs, sent = pairs.going(int(loads.loads[comm.rank].sum())), sent.going(sum(to))

        # Experts are numbered on their rank, where two bytes nearly always do.
        numbers = sent.experts.to(torch.int16 if per_rank <= INT16_MAX else torch.int32)
        pair_weights = wide_weights(weights, x, pairs)
        parts, decoder = token_parts([], x, payload)
        tokens = [PackedField(part, sent.tokens) for part in parts]
        fields = [*tokens, PackedField(numbers), PackedField(pair_weights, sent.tokens)]
        # Rows arrive by source rank, then by token: the order of rows within an expert.
        *arrived, experts, received_weights = self.swap(fields, to, back)()
        received = SortedPairs.of(experts.int(), per_rank).going(int(loads.loads[:, mine].sum()))
        slots = received.slots(place.starts[mine])
        rows = rows_of_pairs(received, place.starts[mine], received_weights, place.rank_rows[comm.rank])
        route = AllToAllRoute(sent, to, back, slots, received_weights, x.shape[1], x.dtype)
        if self.exact:
            route.pairs = SentPairs.of(pairs, loads.loads, place.first[:, mine], comm.rank)
        return make_handle(self, pairs, loads, place, rows, pair_weights, route), decoder(arrived)

    def redispatch(
        self, handle: AllToAllHandle, *tensors: Tensor, x: Tensor | None = None, overlapped: bool = False
    ) -> FinishRedispatch:
        route = handle.route
        parts, decoder = token_parts(tensors, x, handle.payload)
        fields = [PackedField(part, route.sent.tokens) for part in parts]
        coming = self.swap(fields, route.to, route.back, overlapped)
        return lambda: [[table] for table in decoder(coming())]

    def combine_buffer(self, handle: AllToAllHandle, width: int, dtype: torch.dtype) -> Tensor:
        return new_buffer(handle.row_weights, (handle.num_rows, width), dtype)

    def combine(self, handle: AllToAllHandle, results: ExpertResults) -> FinishCombine:
        route = CombineRoute.of(handle, results.weighted)
        if results.agreement is not None:
            found = self._swap_agreed(results.agreement, route, handle, results.rows)
            return lambda add: route.sum([found], add)
        coming = self.swap(route.fields(results), route.to, route.back, results.overlapped)
        return lambda add: route.sum([[table] for table in coming()], add)

    def swap(
        self, fields: Sequence[Field], to: Sequence[int], back: Sequence[int], overlapped: bool = False
    ) -> Callable[[], list[Tensor]]:
        """What the ranks have sent, field by field: one all-to-all of packed rows.

        overlapped  the caller computes before it waits: then the group's thread carries them
        """
        packed = pack(fields, sum(to))
        ends, _ = layout(fields)
        likes = [field.x.new_empty((0, field.x.shape[1])) for field in fields]  # not the fields, which may be large
        if overlapped:
            pending = self.comm.all_to_all_async(packed, input_sizes=to, output_sizes=back)
        else:
            pending = Pending.ready(self.comm.all_to_all(packed, input_sizes=to, output_sizes=back))

        def wait() -> list[Tensor]:
            received = pending.wait()
            return [columns(received, like, end) for like, end in zip(likes, ends, strict=True)]

        return wait

    def _swap_agreed(self, agreement: Agreement, route: CombineRoute, handle: AllToAllHandle, rows: Tensor) -> Tables:
        """Rows on their way back, those for each rank behind this one's words; raises on every rank what is wrong on
        one.
        """
        if agreement.problem:
            rows = _stand_in(rows, handle)  # the others wait for rows, and would for this rank's
        (field,) = route.fields(ExpertResults(rows, False))
        (end,), width = layout([field])
        # In front of every rank's share, so that no message of its own is needed.
        words = torch.tensor(agreement.words, device="cpu").view(torch.uint8)
        head = len(words)
        to, back = ([head + width * count for count in counts] for counts in (route.to, route.back))
        packed = new_buffer(rows, (sum(to),), torch.uint8)
        pieces: Sequence[Field] = field.split(route.to)
        for part, count, piece in zip(packed.split(to), route.to, pieces, strict=True):
            part[:head] = words
            piece.write(columns(part[head:].view(count, width), rows, end))
        received = self.comm.all_to_all(packed, input_sizes=to, output_sizes=back).split(back)
        agreement.check([part[:head].view(torch.int64).tolist() for part in received])
        parts = zip(received, route.back, strict=True)
        return [columns(part[head:].view(count, width), rows, end) for part, count in parts]


def _stand_in(rows: object, handle: AllToAllHandle) -> Tensor:
    """Something to send in the place of wrong rows: as wide as those of other ranks will be."""
    width, dtype = handle.route.width, handle.route.dtype
    if isinstance(rows, Tensor) and rows.ndim == 2 and rows.dtype in DTYPES:
        width, dtype = rows.shape[1], rows.dtype
    return torch.zeros((handle.num_rows, width), dtype=dtype, device=handle.source.device)


class CombineRoute(NamedTuple):
    """How results go back: a sum for each token that has come (`slots`, `slot_weights`), or with `exact` single `rows`.

    to, back   rows to each rank and from each
    rows_of_token   [T, n]: which of the received rows a token's sum is of
    weights         what it multiplies them by; None: nothing
    values_of_pair  [T, K]: where a pair's value is, of `width` that a received row has
    """

    rows: Tensor | None
    slots: Tensor
    slot_weights: Tensor | None
    to: list[int]
    back: list[int]
    rows_of_token: Tensor
    weights: Tensor | None
    values_of_pair: Tensor
    width: int

    @classmethod
    def of(cls, handle: AllToAllHandle, weighted: bool) -> CombineRoute:
        route, pairs = handle.route, handle.route.pairs
        if pairs is None:
            return cls(
                None, route.slots, route.weights if weighted else None, route.back, route.to,
                route.sent.rows_of_token, None, route.sent.values_of_pair, route.slots.shape[1],
            )  # fmt: skip
        weights = handle.pair_weights if weighted else None
        return cls(pairs.rows, route.slots, None, pairs.to, pairs.back, pairs.slots, weights, pairs.slots, 1)

    def fields(self, results: ExpertResults, chosen: Tensor | None = None) -> list[Field]:
        """What is sent of all rows, or of those that are chosen."""

        def pick(x: Tensor) -> Tensor:
            return x if chosen is None else x[chosen]

        if self.rows is not None:
            return [PackedField(x, pick(self.rows)) for x in results.columns]
        rows, values, slots = results.rows, results.values, pick(self.slots)
        sums = PackedSums(rows, [rows], slots, None if self.slot_weights is None else pick(self.slot_weights))
        return [sums] if values is None else [sums, PackedField(take_values([values], slots))]

    def reordered(self, place: Tensor) -> CombineRoute:
        """The same for rows that arrive in another order: row i at place[i]."""
        rows, values, width = self.rows_of_token, self.values_of_pair, max(self.width, 1)
        if len(place):
            rows = torch.where(rows < 0, rows, place[rows])
            values = torch.where(values < 0, values, place[values // width] * width + values % width)
        return self._replace(rows_of_token=rows, values_of_pair=values)

    def sum(self, tables: Sequence[Tables], add: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The result of `TokenDispatcher.combine`, of what has arrived: rows, and values if there are any."""
        out = sum_rows(tables[0], self.rows_of_token, weights=self.weights, add=add)
        return out, take_values(tables[1], self.values_of_pair) if len(tables) > 1 else None
