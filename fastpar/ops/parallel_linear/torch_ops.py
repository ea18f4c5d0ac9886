"""Forward and backward of the parallel linears as torch.library ops, for torch.compile: it cannot trace a transport.

Eager code calls the functions of autograd.py directly; the ops wrap the same ones. Gradients that are not asked for are
empty. Of fastpar::all_gather_linear the backward is fastpar::all_gather_linear_backward, and so on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from fastpar.comm import Communicator
from fastpar.comm.graph_order import in_order, keep_order
from fastpar.ops.parallel_linear.types import LinearCall, LinearSpec, RankRows

_CALL = (
    "str group, float timeout, str transport, int rank, int dim, SymInt[] sizes, int chunks, bool concurrent, "
    "int backward_chunks"
)


def register(spec: LinearSpec) -> None:
    """The two ops of one linear."""
    name, linear = f"fastpar::{spec.op}", spec.function
    torch.library.define(name, f"(Tensor x, Tensor[] weights, Tensor?[] biases, bool keep, {_CALL}) -> Tensor[]")
    torch.library.define(
        f"{name}_backward", f"(Tensor? x, Tensor[] weights, Tensor?[] grads, bool[] needs, {_CALL}) -> Tensor[]"
    )

    for each in (spec.op, f"{spec.op}_backward"):
        in_order(getattr(torch.ops.fastpar, each).default)

    @torch.library.impl(name, "CompositeExplicitAutograd")
    def forward(x: Tensor, weights: list[Tensor], biases: list[Tensor | None], keep: bool, *call: Any) -> list[Tensor]:
        outs, gathered = linear.compute(_unpack(spec, *call), x, weights, biases, keep)
        return outs if gathered is None else [*outs, gathered]

    @torch.library.impl(f"{name}_backward", "CompositeExplicitAutograd")
    def backward(
        x: Tensor | None, weights: list[Tensor], grads: list[Tensor | None], needs: list[bool], *call: Any
    ) -> list[Tensor]:
        found = linear.gradients(_unpack(spec, *call), x, weights, grads, needs)
        return [weights[0].new_empty(0) if grad is None else grad for grad in found]

    @torch.library.register_fake(name)
    def _(x: Tensor, weights: list[Tensor], biases: list[Tensor | None], keep: bool, *call: Any) -> list[Tensor]:
        whole = _with_rows(list(x.shape), spec.gathers_input, *call)
        outs = [x.new_empty((*whole[:-1], weight.shape[0])) for weight in weights]
        return [*outs, x.new_empty(whole)] if keep and spec.gathers_input else outs

    @torch.library.register_fake(f"{name}_backward")
    def _(
        x: Tensor | None, weights: list[Tensor], grads: list[Tensor | None], needs: list[bool], *call: Any
    ) -> list[Tensor]:
        given = next(grad for grad in grads if grad is not None)
        shape = _with_rows([*given.shape[:-1], weights[0].shape[1]], not spec.gathers_input, *call)
        count = len(weights)
        by_weights, by_biases = [], []
        for j, (weight, grad) in enumerate(zip(weights, grads, strict=True)):
            is_given = grad is not None
            by_weights.append(_dense_as(weight) if is_given and needs[1 + j] else given.new_empty(0))
            by_biases.append(given.new_empty(weight.shape[:1] if is_given and needs[1 + count + j] else 0))
        return [given.new_empty(shape if needs[0] else 0), *by_weights, *by_biases]


def _dense_as(weight: Tensor) -> Tensor:
    """Of its shape, columns first only where the weight is dense so (`_weight_grad` in autograd.py)."""
    if not weight.is_contiguous() and weight.t().is_contiguous():
        return weight.new_empty(weight.shape[::-1]).t()
    return weight.new_empty(weight.shape)


def _with_rows(
    shape: list[Any], gathered: bool, group: str, timeout: float, transport: str, rank: int, dim: int, *rest: Any
) -> list[Any]:
    """The shape with the rows of all ranks along dim, or with those of this one."""
    sizes = rest[0]
    if sizes:
        shape[dim] = sum(sizes) if gathered else sizes[rank]
    return shape


def _unpack(
    spec: LinearSpec,
    group: str,
    timeout: float,
    transport: str,
    rank: int,
    dim: int,
    sizes: list[int],
    *chunks: Any,
) -> LinearCall:
    from torch.distributed.distributed_c10d import _resolve_process_group

    forward_chunks, concurrent, backward_chunks = chunks
    comm = Communicator(_resolve_process_group(cast(Any, group)), timeout=timeout, transport=transport)
    rows = RankRows(dim, tuple(sizes), forward_chunks, concurrent)
    return LinearCall(spec, comm, rows, rows._replace(chunks=backward_chunks))


def _pack(call: LinearCall) -> tuple[Any, ...]:
    comm, rows = call.comm, call.rows
    assert comm.group is not None
    where = (comm.group.group_name, comm.timeout, comm.transport, comm.rank)
    return (*where, rows.dim, list(rows.sizes), rows.chunks, rows.concurrent, call.backward.chunks)


def run_forward(
    call: LinearCall, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], keep: bool
) -> tuple[list[Tensor], Tensor | None]:
    """The outputs by weight and, with `keep`, what was gathered."""
    keep_order()
    op = getattr(torch.ops.fastpar, call.spec.op)
    outs = op(x, list(weights), list(biases), keep, *_pack(call))
    count = len(weights)
    return list(outs[:count]), outs[count] if len(outs) > count else None


def run_backward(
    call: LinearCall, x: Tensor | None, weights: Sequence[Tensor], grads: Sequence[Tensor | None], needs: Sequence[bool]
) -> list[Tensor | None]:
    """The gradients of x, the weights and the biases; None: not asked for, or nothing came."""
    count = len(weights)
    is_given = [grad is not None for grad in grads]
    needs = [bool(need) for need in needs[: 1 + 2 * count]]
    keep_order()
    op = getattr(torch.ops.fastpar, f"{call.spec.op}_backward")
    found = op(x, list(weights), list(grads), needs, *_pack(call))
    wanted = [need and given for need, given in zip(needs, [True, *is_given, *is_given], strict=True)]
    return [grad if want else None for grad, want in zip(found, wanted, strict=True)]
