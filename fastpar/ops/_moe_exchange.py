"""Moving rows of tokens to the ranks of their experts and back: what every transport does, and the one of one rank.

    plan, tables = exchange.dispatch(x, indices, weights, num_experts, padding)
    rows = gather_rows(tables, plan.source)                     # by expert
    ...                                                         # the experts' work
    out, _ = exchange.give_back(plan, results, weighted=True)   # [T, H]: a sum over each token's choices

The functions here know nothing of autograd. `fastpar.ops.moe` and `fastpar.ops.moe_mlp` differentiate them: the
backward of `give_back` is `send` with the same plan, and that of `dispatch` is `give_back`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from fastpar.comm import Communicator
from fastpar.ops._buffers import new_buffer
from fastpar.ops._moe_plan import DispatchPlan, Padding, Pairs, Placement, check_arguments, exchange_headers, spread
from fastpar.ops.moe_rows import gather_rows, sum_rows

Tables = Sequence[Tensor]  # as if they lay one below the other


class Exchange(Protocol):
    """All are collective: every rank of the group calls the same, in the same order, also with no tokens.

    What `dispatch`, `send` and `empty_rows` give may lie in memory that others write: it is valid until the exchange
    is next called, but for `empty_rows`.
    """

    comm: Communicator

    def dispatch(
        self, x: Tensor, indices: Tensor, weights: Tensor | None, num_experts: int, padding: Padding
    ) -> tuple[DispatchPlan, Tables]:
        """Send x [T, H] to the ranks of its experts. `gather_rows(tables, plan.source)` are the experts' rows.

        Raises ValueError on every rank for what is wrong on one.
        """
        ...

    def send(self, plan: DispatchPlan, *tensors: Tensor) -> list[Tables]:
        """The same for other tensors [T, n] over the same tokens."""
        ...

    def empty_rows(self, plan: DispatchPlan, width: int, dtype: torch.dtype) -> Tensor:
        """[num_rows, width] to write what is given back next, which then need not be copied. Uninitialised."""
        ...

    def give_back(
        self,
        plan: DispatchPlan,
        rows: Tensor,
        *,
        weighted: bool,
        add: Tensor | None = None,
        values: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """out [T, n]: add + the sum over each token's choices of its rows, times the pair's weight if `weighted`; and
        of `values` float32 [num_rows] those of this rank's pairs, [T, K], 0 where a pair has no row.
        """
        ...


class LocalExchange:
    """One rank: nothing is sent and nothing is copied."""

    def __init__(self) -> None:
        self.comm = Communicator(None)

    def dispatch(
        self, x: Tensor, indices: Tensor, weights: Tensor | None, num_experts: int, padding: Padding
    ) -> tuple[DispatchPlan, Tables]:
        problem = check_arguments(x, indices, weights, num_experts, self.comm)
        if problem:
            raise ValueError(problem)
        pairs = Pairs.of(indices, num_experts)
        loads = pairs.counts[None]
        place = Placement.of(loads, padding)
        slots = pairs.slots(place.first[0])
        source, row_weights = rows_of_pairs(pairs, slots, weights, place.rank_rows[0])
        plan = make_plan(self, pairs, loads, place, source, row_weights, weights, way=slots)
        return plan, [x]

    def send(self, plan: DispatchPlan, *tensors: Tensor) -> list[Tables]:
        return [[x] for x in tensors]

    def empty_rows(self, plan: DispatchPlan, width: int, dtype: torch.dtype) -> Tensor:
        return new_buffer(plan.row_weights, (plan.num_rows, width), dtype)

    def give_back(
        self,
        plan: DispatchPlan,
        rows: Tensor,
        *,
        weighted: bool,
        add: Tensor | None = None,
        values: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        out = sum_rows([rows], plan.way, weights=plan.pair_weights if weighted else None, add=add)
        return out, None if values is None else take_values([values], plan.way)


def rows_of_pairs(pairs: Pairs, slots: Tensor, weights: Tensor | None, num_rows: int) -> tuple[Tensor, Tensor]:
    """Token and weight of every row of one rank, from its own pairs' rows."""
    source = torch.full((num_rows,), -1, dtype=torch.int64)
    row_weights = torch.zeros(num_rows)
    rows = slots.view(-1)[pairs.order]
    source[rows] = pairs.order // pairs.top_k
    row_weights[rows] = 1.0 if weights is None else weights.reshape(-1)[pairs.order].float()
    return source, row_weights


def take_values(tables: Tables, index: Tensor) -> Tensor:
    """values[index] for every entry of index, 0 where it is -1."""
    return gather_rows([table.reshape(-1, 1) for table in tables], index.reshape(-1)).view(index.shape)


def make_plan(
    exchange: Exchange,
    pairs: Pairs,
    loads: Tensor,
    place: Placement,
    source: Tensor,
    row_weights: Tensor,
    weights: Tensor | None,
    way: object,
) -> DispatchPlan:
    comm = exchange.comm
    per_rank = pairs.num_experts // comm.size
    experts = range(comm.rank * per_rank, (comm.rank + 1) * per_rank)
    return DispatchPlan(
        tokens=len(pairs.indices),
        top_k=pairs.top_k,
        num_experts=pairs.num_experts,
        experts=experts,
        counts=loads[:, experts.start : experts.stop].sum(0),
        splits=(*place.starts[experts.start : experts.stop].tolist(), place.rank_rows[comm.rank]),
        loads=loads,
        source=source,
        row_weights=row_weights,
        pair_weights=torch.ones(pairs.indices.shape) if weights is None else weights.detach().float(),
        way=way,
        exchange=exchange,
    )


__all__ = [
    "DispatchPlan",
    "Exchange",
    "LocalExchange",
    "Padding",
    "Tables",
    "exchange_headers",
    "spread",
]
