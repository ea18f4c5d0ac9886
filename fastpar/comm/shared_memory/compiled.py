"""Collectives over shared memory under torch.compile: one op in the graph, which runs the eager path.

The op is done when it returns, so that a graph never holds a collective that is under way.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from fastpar.comm.graph_order import in_order, keep_order
from fastpar.comm.reduction import widen
from fastpar.comm.transport import InFlight, Transport


class _Selector(Protocol):
    """The `TransportSelector` of a communicator."""

    timeout: float

    def launch(
        self, op: str, is_cpu: bool, dtype: torch.dtype, start: Callable[[Transport], InFlight], *, mode: Any
    ) -> InFlight: ...


# A graph holds numbers and tensors only: the number of a selector, for as long as it lives.
_SELECTORS: weakref.WeakValueDictionary[int, _Selector] = weakref.WeakValueDictionary()
_KEYS = itertools.count(1)


@torch.library.custom_op("fastpar::shared_collective", mutates_args=())
def _collective(
    x: Tensor, selector: int, name: str, op: str, root: int, sizes: list[int], output_sizes: list[int], numel: int
) -> Tensor:
    owner = _SELECTORS.get(selector)
    if owner is None:
        raise RuntimeError("the communicator that this graph was traced with is gone: keep it as long as the graph")

    def start(transport: Transport) -> InFlight:
        if name == "all_reduce":
            return transport.all_reduce(x, op, None)
        if name == "reduce_scatter":
            return transport.reduce_scatter(x, sizes, op)
        if name == "all_gather":
            return transport.all_gather(x, sizes)
        if name == "all_to_all":
            return transport.all_to_all(x, sizes, output_sizes)
        if name == "broadcast":
            return transport.broadcast(x, root)
        if name == "reduce":
            return transport.reduce(x, root, op)
        return transport.barrier()

    # Eager here: the graph is running, and the selector may still have to meet the ranks.
    flight = owner.launch(name, True, x.dtype, start, mode="blocking")
    if flight.work is not None:
        flight.work.wait(owner.timeout)
    result = flight.finish()
    return x.new_empty(numel) if result is None else result


@_collective.register_fake
def _(
    x: Tensor, selector: int, name: str, op: str, root: int, sizes: list[int], output_sizes: list[int], numel: int
) -> Tensor:
    return x.new_empty(numel)


# Ranks wait for each other in it, so it must run even where nobody uses its result.
torch.fx.node.has_side_effect(torch.ops.fastpar.shared_collective.default)
in_order(torch.ops.fastpar.shared_collective.default)


class CompiledTransport:
    """See `fastpar.comm.transport.Transport`; what it returns is done."""

    def __init__(self, selector: _Selector, rank: int) -> None:
        self._rank = rank
        self._key = next(_KEYS)
        _SELECTORS[self._key] = selector

    def all_reduce(self, x: Tensor, op: str, out: Tensor | None) -> InFlight:
        result = self._call(x, "all_reduce", x.numel(), op=op)
        return InFlight(None, lambda: result if out is None else out.copy_(result))

    def reduce_scatter(self, x: Tensor, sizes: Sequence[int], op: str) -> InFlight:
        x, op = widen(x, op)
        return self._done(self._call(x, "reduce_scatter", sizes[self._rank], op=op, sizes=sizes))

    def all_gather(self, x: Tensor, sizes: Sequence[int]) -> InFlight:
        return self._done(self._call(x, "all_gather", sum(sizes), sizes=sizes))

    def all_to_all(self, x: Tensor, input_sizes: Sequence[int], output_sizes: Sequence[int]) -> InFlight:
        return self._done(self._call(x, "all_to_all", sum(output_sizes), sizes=input_sizes, output_sizes=output_sizes))

    def broadcast(self, x: Tensor, src: int) -> InFlight:
        return self._done(self._call(x, "broadcast", x.numel(), root=src))

    def reduce(self, x: Tensor, dst: int, op: str) -> InFlight:
        is_dst = self._rank == dst
        result = self._call(x, "reduce", x.numel() if is_dst else 0, op=op, root=dst)
        return self._done(result if is_dst else None)

    def barrier(self) -> InFlight:
        self._call(torch.empty(0), "barrier", 0)
        return self._done(None)

    def _done(self, result: Tensor | None) -> InFlight:
        return InFlight(None, lambda: result)

    def _call(
        self,
        x: Tensor,
        name: str,
        numel: int,
        *,
        op: str = "",
        root: int = 0,
        sizes: Sequence[int] = (),
        output_sizes: Sequence[int] = (),
    ) -> Tensor:
        keep_order()
        return _collective(x, self._key, name, op, root, list(sizes), list(output_sizes), numel)
