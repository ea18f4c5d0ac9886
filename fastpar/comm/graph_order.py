"""The order of collectives in graphs of torch.compile.

Where results do not depend on each other, Inductor orders operations by the memory that they take. Parts of ranks may
differ in size, and so would the order of their collectives: an all-reduce of one would be added to another of its peer.
Of torch's own collectives Inductor keeps the order that the graph has, which is the same on all ranks. What is here
makes it do so for ops that hold collectives, of whatever group, as a wait in one keeps a rank from the others.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

_ORDERED: dict[Any, bool] = {}  # ops, and whether Inductor knows
_WITH_GRAPHS: set[Any] = set()  # ops of torch that Inductor knows of


def in_order(op: torch._ops.OpOverload) -> None:
    """Let compiled graphs call this op, and all others that came here, in the order of the graph."""
    _ORDERED[op] = False


def keep_order() -> None:
    """To be called where such an op enters a graph. A constant of the graph, so that it runs when the graph is made."""
    inductor = sys.modules.get("torch._inductor.lowering")  # there once somebody compiles by it; takes seconds to load
    if inductor is None:
        return
    for op in [op for op in inductor.lowerings if isinstance(op, torch._ops.HigherOrderOperator)]:
        if op not in _WITH_GRAPHS:  # as `torch.cond`, which may have collectives in graphs of its own
            inductor.lowerings[op] = _in_order(inductor.lowerings[op])
            _WITH_GRAPHS.add(op)
    for op, is_known in _ORDERED.items():
        if not is_known:
            exact = inductor.tag_to_layout_constraint(torch.Tag.needs_exact_strides)  # as for any op of a library
            inductor.make_fallback(op, exact, warn=False)
            inductor.lowerings[op] = _in_order(inductor.lowerings[op])
            _ORDERED[op] = True


keep_order._dynamo_marked_constant = True  # type: ignore[attr-defined]  # see ops/_attention_torch.py


def _in_order(lower: Callable[..., Any]) -> Callable[..., Any]:
    """`lower`, with what it makes run after the op before it in the graph."""

    @functools.wraps(lower)
    def lowered(*args: Any, **kwargs: Any) -> Any:
        from torch._inductor.virtualized import V

        result, graph = lower(*args, **kwargs), V.graph
        kernels: list[Any] = [one for one in graph.operations if _holds_collectives(one)]
        if len(kernels) > 1:
            graph.additional_buffer_deps[kernels[-1].get_operation_name()].add(kernels[-2].get_name())
        return result

    return lowered


def _holds_collectives(operation: Any) -> bool:
    """An operation of Inductor's that is one of these ops, or has one in a graph of its own."""
    from torch._inductor.ir import Subgraph

    graphs = [one.graph for one in vars(operation).values() if isinstance(one, Subgraph) and one.graph is not None]
    return getattr(operation, "op_overload", None) in _ORDERED or any(
        _holds_collectives(one) for graph in graphs for one in graph.operations
    )
