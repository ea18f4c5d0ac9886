"""Moving rows of tokens to the ranks of their experts and back: what every transport does, and the one of one rank.

    plan, tables = exchange.dispatch(x, indices, weights, num_experts, terms)
    rows = gather_rows(tables, plan.source)                     # by expert
    ...                                                         # the experts' work
    finish = exchange.launch_back(plan, results, weighted=True)
    ...                                                         # what else there is to compute while rows travel
    out, _ = finish(None)                                       # [T, H]: a sum over each token's choices

`launch_send` is `send` in two steps, likewise.

The functions here know nothing of autograd. `fastpar.ops.moe` and `fastpar.ops.moe_mlp` differentiate them: the
backward of `launch_back` is `send` with the same plan, and that of `dispatch` is `launch_back`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from fastpar.comm import Communicator
from fastpar.ops._buffers import new_buffer
from fastpar.ops.moe.claim import Claim
from fastpar.ops.moe.fp8 import through
from fastpar.ops.moe.permute import gather_rows, row_sources, sum_rows
from fastpar.ops.moe.plan import DispatchPlan, Headers, Pairs, Placement, Terms, check_arguments

Tables = Sequence[Tensor]  # as if they lay one below the other
Finish = Callable[[Tensor | None], tuple[Tensor, Tensor | None]]  # see `Exchange.launch_back`


class Exchange(Protocol):
    """All are collective: every rank of the group calls the same, in the same order, also with no tokens.

    What `dispatch`, `send` and `empty_rows` give may lie in memory that others write: it is valid until the exchange
    is next called, but for `empty_rows`.

    travels  whether rows that were launched are on their way while their rank computes something else
    """

    comm: Communicator
    travels: bool

    def dispatch(
        self,
        x: Tensor,
        indices: Tensor,
        weights: Tensor | None,
        num_experts: int,
        terms: Terms,
    ) -> tuple[DispatchPlan, Tables]:
        """Send x [T, H] to the ranks of its experts. `gather_rows(tables, plan.source)` are the experts' rows.

        Raises ValueError on every rank for what is wrong on one.
        """
        ...

    def send(self, plan: DispatchPlan, *tensors: Tensor, again: Tensor | None = None) -> list[Tables]:
        """The same for other tensors [T, n] over the same tokens. `again`: the x of the dispatch, which travels as it
        did then (see `DispatchPlan.payload`), and is the first of the results.
        """
        ...

    def empty_rows(self, plan: DispatchPlan, width: int, dtype: torch.dtype) -> Tensor:
        """[num_rows, width] to write what is given back next, which then need not be copied. Uninitialised."""
        ...

    def launch_send(
        self, plan: DispatchPlan, *tensors: Tensor, again: Tensor | None = None
    ) -> Callable[[], list[Tables]]:
        """`send`, whose tables come when what this returns is called."""
        ...

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
        """Send rows [num_rows, n] back to their tokens. What this returns is called with `add` [T, n] or None for

            out     [T, n] = add + the sum over each token's choices of its rows, times the pair's weight if `weighted`
            values  of `values` float32 [num_rows] those of this rank's pairs, [T, K], 0 where a pair has no row

        claim   for rows that may be wrong on one rank alone: raises ValueError on every rank for what is
        beside  whether the caller computes something before it calls; else it calls at once
        """
        ...


class GroupBound:
    """An exchange is its group's: a copied module still runs on the same, and no file can hold it.

    What is launched here does everything when it is waited for.
    """

    travels = False

    def launch_send(
        self: Exchange, plan: DispatchPlan, *tensors: Tensor, again: Tensor | None = None
    ) -> Callable[[], list[Tables]]:
        return lambda: self.send(plan, *tensors, again=again)

    def __deepcopy__(self, memo: Any) -> GroupBound:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} cannot be pickled, nor can a DispatchPlan: it belongs to the process group that it "
            "moves rows in. Save indices and weights, and dispatch again"
        )


class LocalExchange(GroupBound):
    """One rank: nothing is sent and nothing is copied."""

    def __init__(self) -> None:
        self.comm = Communicator(None)

    def dispatch(
        self,
        x: Tensor,
        indices: Tensor,
        weights: Tensor | None,
        num_experts: int,
        terms: Terms,
    ) -> tuple[DispatchPlan, Tables]:
        problem = check_arguments(x, indices, weights, num_experts, terms, self.comm)
        if problem:
            raise ValueError(problem)
        pairs = Pairs.of(indices, num_experts)
        header = Headers(torch.tensor([len(x)], device="cpu"), pairs.counts[None].cpu(), terms)
        place = Placement.of(header.loads, terms.padding)
        slots = pairs.slots(place.first[0])
        rows = rows_of_pairs(pairs, place.first[0], weights, place.rank_rows[0])
        return make_plan(self, pairs, header, place, rows, weights, way=slots), [through(x, terms.payload)]

    def send(self, plan: DispatchPlan, *tensors: Tensor, again: Tensor | None = None) -> list[Tables]:
        first = [] if again is None else [through(again, plan.payload)]
        return [[x] for x in (*first, *tensors)]

    def empty_rows(self, plan: DispatchPlan, width: int, dtype: torch.dtype) -> Tensor:
        return new_buffer(plan.row_weights, (plan.num_rows, width), dtype)

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
        if claim is not None and claim.problem:
            raise ValueError(claim.problem)

        def finish(add: Tensor | None) -> tuple[Tensor, Tensor | None]:
            out = sum_rows([rows], plan.way, weights=plan.pair_weights if weighted else None, add=add)
            return out, None if values is None else take_values([values], plan.way)

        return finish


def rows_of_pairs(pairs: Pairs, first: Tensor, weights: Tensor | None, num_rows: int) -> tuple[Tensor, Tensor]:
    """Token and weight of every row of one rank, from its own pairs and where those of each expert begin."""
    counts = pairs.counts
    nothing = torch.zeros_like(counts)
    runs = torch.stack([nothing, counts.cumsum(0) - counts, counts, first.to(counts.device), nothing], 1)
    in_order = None if weights is None else [weights.detach().reshape(-1)[pairs.order].float()]
    return row_sources([pairs.order], in_order, runs, max(pairs.top_k, 1), num_rows)


def take_values(tables: Tables, index: Tensor) -> Tensor:
    """values[index] for every entry of index, 0 where it is -1."""
    return gather_rows([table.reshape(-1, 1) for table in tables], index.reshape(-1)).view(index.shape)


def make_plan(
    exchange: Exchange,
    pairs: Pairs,
    headers: Headers,
    place: Placement,
    rows: tuple[Tensor, Tensor],
    weights: Tensor | None,
    way: object,
) -> DispatchPlan:
    """`rows`: source and weight of each of this rank's rows."""
    comm, loads, indices = exchange.comm, headers.loads, pairs.indices
    per_rank = pairs.num_experts // comm.size
    experts = range(comm.rank * per_rank, (comm.rank + 1) * per_rank)
    return DispatchPlan(
        tokens=len(indices),
        top_k=pairs.top_k,
        num_experts=pairs.num_experts,
        experts=experts,
        counts=loads[:, experts.start : experts.stop].sum(0),
        splits=(*place.starts[experts.start : experts.stop].tolist(), place.rank_rows[comm.rank]),
        loads=loads,
        source=rows[0],
        row_weights=rows[1],
        pair_weights=float_weights(weights, indices),
        payload=headers.terms.payload,
        tokens_per_rank=tuple(headers.tokens.tolist()),
        way=way,
        exchange=exchange,
    )


def float_weights(weights: Tensor | None, indices: Tensor) -> Tensor:
    """[T, K] in float32, contiguous and the plan's own, whatever becomes of the caller's: 1 without weights."""
    if weights is None:
        return torch.ones(indices.shape, device=indices.device)
    return weights.detach().to(torch.float32, copy=True, memory_format=torch.contiguous_format)


__all__ = ["Claim", "DispatchPlan", "Exchange", "Finish", "LocalExchange", "Tables"]
