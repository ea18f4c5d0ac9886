"""Moving rows of tokens to the ranks of their experts and back: what every transport does, and the one of one rank.

    handle, tables = dispatcher.dispatch(x, indices, weights, spec)
    rows = gather_rows(tables, handle.source)                   # by expert
    ...                                                         # the experts' work
    finish = dispatcher.combine(handle, ExpertResults(results, weighted=True))
    ...                                                         # what else there is to compute while rows travel
    out, _ = finish(None)                                       # [T, H]: a sum over each token's choices

The functions here know nothing of autograd. `fastpar.ops.moe_dispatch`, `moe_combine` and `moe_mlp` differentiate them:
the backward of `combine` is `redispatch` with the same handle, and that of `dispatch` is `combine`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor

from fastpar.comm import Communicator
from fastpar.comm.agree import Agreement
from fastpar.ops._buffers import new_buffer
from fastpar.ops.moe.fp8 import quantize_dequantize
from fastpar.ops.moe.permute import gather_rows, row_sources, sum_rows
from fastpar.ops.moe.plan import (
    DispatchSpec,
    GroupLoads,
    RowPlacement,
    SortedPairs,
    index_problem,
    problem_of,
    tokens_or_wrong,
)

Route = TypeVar("Route")
Tables = Sequence[Tensor]  # as if they lay one below the other
FinishRedispatch = Callable[[], list[Tables]]
FinishCombine = Callable[[Tensor | None], tuple[Tensor, Tensor | None]]  # see `TokenDispatcher.combine`


@dataclass(frozen=True, eq=False)
class DispatchHandle(Generic[Route]):
    """What a dispatch returns for its `moe_combine` and for both backwards: where rows lie, and how they travel.

    tokens, top_k   of this rank's indices
    num_experts     of the group; this rank has those of `experts`
    counts          int64 [len(experts)]: rows of each of this rank's experts
    splits          where the rows of each expert begin, and where the last end: len(experts) + 1 numbers. More room
                    than `counts` says where rows are padded
    loads           int64 [size, num_experts]: pairs of each rank for each expert
    source          int64 [num_rows]: which of the sent tokens each row is, in the tables of `dispatch`; -1: padding
    row_weights     float32, or float64 as x: [num_rows], what the pair's weight is; 0: padding
    pair_weights    the same dtype: [T, K]
    payload         what x travelled as; None: as it is
    tokens_per_rank tokens that each rank has brought
    route           how rows travel: the transport's own
    dispatcher      the transport, with the group

    `counts` and `loads` are in host memory, where every rank has them anyway, so that to look at loads waits for no
    device; the others are where x is.
    """

    tokens: int
    top_k: int
    num_experts: int
    experts: range
    counts: Tensor
    splits: tuple[int, ...]
    loads: Tensor
    source: Tensor
    row_weights: Tensor
    pair_weights: Tensor
    payload: str | None
    tokens_per_rank: tuple[int, ...]
    route: Route
    dispatcher: TokenDispatcher[Route]

    @property
    def num_rows(self) -> int:
        """Rows of this rank's experts, padding included."""
        return self.splits[-1]

    @property
    def rows_per_expert(self) -> Tensor:
        """int64 [num_experts]: rows of every expert of the group, without padding."""
        return self.loads.sum(0)

    @property
    def rows_per_rank(self) -> Tensor:
        """int64 [size]: rows of the experts of every rank, without padding."""
        return self.loads.view(len(self.loads), len(self.loads), -1).sum((0, 2))

    @property
    def dropped(self) -> int:
        """Choices of this rank's tokens that go nowhere: masked ones, and those that `moe_capacity` took away."""
        return self.dropped_per_rank[self.dispatcher.comm.rank]

    @property
    def dropped_per_rank(self) -> tuple[int, ...]:
        """The same of every rank's tokens."""
        return tuple(
            tokens * self.top_k - pairs
            for tokens, pairs in zip(self.tokens_per_rank, self.loads.sum(1).tolist(), strict=True)
        )


class ExpertResults(NamedTuple):
    """What `TokenDispatcher.combine` sends back to the tokens.

    rows        [num_rows, n]
    weighted    multiply each row by its pair's weight
    values      float32, or float64 as rows: [num_rows], numbers that go back to their pairs as well
    agreement   for rows that may be wrong on one rank alone
    overlapped  the caller computes something before it asks for the result
    """

    rows: Tensor
    weighted: bool
    values: Tensor | None = None
    agreement: Agreement | None = None
    overlapped: bool = False

    @property
    def columns(self) -> list[Tensor]:
        """Rows, and values [num_rows, 1] if there are any."""
        return [self.rows] if self.values is None else [self.rows, self.values.view(-1, 1)]


class TokenDispatcher(ABC, Generic[Route]):
    """A transport over a group. All methods are collective: every rank calls the same, in the same order, also with no
    tokens.

    What `dispatch`, `redispatch` and `combine_buffer` return may lie in memory that others write: it is valid until the
    dispatcher is next called, but for `combine_buffer`.

    overlaps  whether rows travel while their rank computes something else
    """

    comm: Communicator
    overlaps = False

    @abstractmethod
    def dispatch(
        self, x: Tensor, indices: Tensor, weights: Tensor | None, spec: DispatchSpec
    ) -> tuple[DispatchHandle[Route], Tables]:
        """Send x [T, H] to the ranks of its experts. `gather_rows(tables, handle.source)` are the experts' rows.

        Raises on every rank what is wrong on one: the problem itself there, ValueError on the others.
        """

    @abstractmethod
    def redispatch(
        self, handle: DispatchHandle[Route], *tensors: Tensor, x: Tensor | None = None, overlapped: bool = False
    ) -> FinishRedispatch:
        """Send other tensors [T, n] of the same tokens; what this returns waits for them.

        x           that of the dispatch, which travels as it did then (`handle.payload`) and is the first result
        overlapped  the caller computes something before it waits
        """

    @abstractmethod
    def combine_buffer(self, handle: DispatchHandle[Route], width: int, dtype: torch.dtype) -> Tensor:
        """[num_rows, width] for the rows that are combined next, which need no copy then. Uninitialised."""

    @abstractmethod
    def combine(self, handle: DispatchHandle[Route], results: ExpertResults) -> FinishCombine:
        """Send rows back to their tokens. What this returns is called with `add` [T, n] or None, for

            out     [T, n] = add + the sum over each token's choices of its rows, times the pair's weight if weighted
            values  of `results.values` those of this rank's pairs, [T, K], 0 where a pair has no row

        With an agreement: raises on every rank what is wrong on one.
        """

    def __deepcopy__(self, memo: Any) -> TokenDispatcher[Route]:
        """Itself: a copied module runs over the same group."""
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} cannot be pickled, nor can a DispatchHandle: it belongs to the process group that "
            "it moves rows in. Save indices and weights, and dispatch again"
        )


class LocalDispatcher(TokenDispatcher[Tensor]):
    """One rank: nothing is sent and nothing is copied. Its route is where the row of each pair lies."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm

    def dispatch(
        self, x: Tensor, indices: Tensor, weights: Tensor | None, spec: DispatchSpec
    ) -> tuple[DispatchHandle[Tensor], Tables]:
        if problem := problem_of(x, indices, weights, spec, self.comm):
            raise problem if isinstance(problem, Exception) else ValueError(problem)
        pairs = SortedPairs.of(indices, spec.num_experts)
        numbers = torch.cat([tokens_or_wrong(pairs), pairs.counts])[None].cpu()  # all that the host waits for
        tokens, counts = numbers[:, 0], numbers[:, 1:]
        if int(tokens) < 0:
            raise ValueError(index_problem(pairs.indices, spec.num_experts))
        loads = GroupLoads(tokens, counts, counts[:, :0], spec)
        pairs = pairs.going(int(counts.sum()))
        place = RowPlacement.of(loads.loads, spec.padding)
        pair_weights = wide_weights(weights, x, pairs)
        rows = rows_of_pairs(pairs, place.first[0], pair_weights, place.rank_rows[0])
        handle = make_handle(self, pairs, loads, place, rows, pair_weights, pairs.slots(place.first[0]))
        return handle, [quantize_dequantize(x, spec.payload)]

    def redispatch(
        self, handle: DispatchHandle[Tensor], *tensors: Tensor, x: Tensor | None = None, overlapped: bool = False
    ) -> FinishRedispatch:
        first = [] if x is None else [quantize_dequantize(x, handle.payload)]
        return lambda: [[tensor] for tensor in (*first, *tensors)]

    def combine_buffer(self, handle: DispatchHandle[Tensor], width: int, dtype: torch.dtype) -> Tensor:
        return new_buffer(handle.row_weights, (handle.num_rows, width), dtype)

    def combine(self, handle: DispatchHandle[Tensor], results: ExpertResults) -> FinishCombine:
        if results.agreement is not None and results.agreement.problem:
            results.agreement.check([])
        rows, values, slots = results.rows, results.values, handle.route

        def finish(add: Tensor | None) -> tuple[Tensor, Tensor | None]:
            out = sum_rows([rows], slots, weights=handle.pair_weights if results.weighted else None, add=add)
            return out, None if values is None else take_values([values], slots)

        return finish


# ---- what transports share -------------------------------------------------------------------------------------------


def rows_of_pairs(pairs: SortedPairs, first: Tensor, weights: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Token and weight of every row of one rank, from its own pairs and where those of each expert begin."""
    counts = pairs.counts
    nothing = torch.zeros_like(counts)
    runs = torch.stack([nothing, counts.cumsum(0) - counts, counts, first.to(counts.device), nothing], 1)
    return row_sources([pairs.order], [weights.reshape(-1)[pairs.order]], runs, max(pairs.top_k, 1), num_rows)


def take_values(tables: Tables, index: Tensor) -> Tensor:
    """values[index] for every entry of index, 0 where it is -1."""
    return gather_rows([table.reshape(-1, 1) for table in tables], index.reshape(-1)).view(index.shape)


def make_handle(
    dispatcher: TokenDispatcher[Route],
    pairs: SortedPairs,
    loads: GroupLoads,
    place: RowPlacement,
    rows: tuple[Tensor, Tensor],
    pair_weights: Tensor,
    route: Route,
) -> DispatchHandle[Route]:
    """`rows`: source and weight of each of this rank's rows."""
    comm = dispatcher.comm
    per_rank = pairs.num_experts // comm.size
    experts = range(comm.rank * per_rank, (comm.rank + 1) * per_rank)
    return DispatchHandle(
        tokens=len(pairs.indices),
        top_k=pairs.top_k,
        num_experts=pairs.num_experts,
        experts=experts,
        counts=loads.loads[:, experts.start : experts.stop].sum(0),
        splits=(*place.starts[experts.start : experts.stop].tolist(), place.rank_rows[comm.rank]),
        loads=loads.loads,
        source=rows[0],
        row_weights=rows[1],
        pair_weights=pair_weights,
        payload=loads.spec.payload,
        tokens_per_rank=tuple(loads.tokens.tolist()),
        route=route,
        dispatcher=dispatcher,
    )


def wide_weights(weights: Tensor | None, x: Tensor, pairs: SortedPairs) -> Tensor:
    """[T, K] in float32, of float64 tokens in float64, contiguous and the handle's own, whatever becomes of the
    caller's: 1 without weights. By x, whose dtype is the same on all ranks, and not by what each rank's router gives.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    if weights is None:
        return torch.ones(pairs.indices.shape, dtype=dtype, device=pairs.indices.device)
    # A copy: the caller may change its tensor before backward.
    return weights.detach().to(dtype, copy=True, memory_format=torch.contiguous_format)
