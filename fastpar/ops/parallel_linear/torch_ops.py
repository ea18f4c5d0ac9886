"""Forward and backward of the parallel linears as torch.library ops, for torch.compile: it cannot trace a transport.

Eager code calls the passes directly; the ops wrap the same functions. Gradients that are not asked for are empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from fastpar.comm import Communicator
from fastpar.ops.parallel_linear.autograd import ALL_GATHER, REDUCE_SCATTER, Call, Grads, Wants, backward, forward
from fastpar.ops.parallel_linear.gemms import Rows

_CALL = (
    "str kind, str group, float timeout, str transport, int rank, int dim, SymInt[] sizes, int chunks, "
    "bool concurrent, int backward_chunks"
)
torch.library.define(
    "fastpar::parallel_linear_forward",
    f"(Tensor x, Tensor[] weights, Tensor?[] biases, bool keep, {_CALL}) -> Tensor[]",
)
torch.library.define(
    "fastpar::parallel_linear_backward",
    "(Tensor? x, Tensor[] weights, Tensor?[] grads, bool wants_x, bool[] wants_weights, bool[] wants_biases, "
    f"{_CALL}) -> Tensor[]",
)


@torch.library.impl("fastpar::parallel_linear_forward", "CompositeExplicitAutograd")
def _forward(x: Tensor, weights: list[Tensor], biases: list[Tensor | None], keep: bool, *call: Any) -> list[Tensor]:
    outs, gathered = forward(_unpack(*call), x, weights, biases, keep=keep)
    return outs if gathered is None else [*outs, gathered]


@torch.library.impl("fastpar::parallel_linear_backward", "CompositeExplicitAutograd")
def _backward(
    x: Tensor | None,
    weights: list[Tensor],
    grads: list[Tensor | None],
    wants_x: bool,
    wants_weights: list[bool],
    wants_biases: list[bool],
    *call: Any,
) -> list[Tensor]:
    wants = Wants(wants_x, tuple(wants_weights), tuple(wants_biases))
    found = backward(_unpack(*call), x, weights, grads, wants)
    empty = weights[0].new_empty
    return [empty(0) if grad is None else grad for grad in (found.x, *found.weights, *found.biases)]


@torch.library.register_fake("fastpar::parallel_linear_forward")
def _(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor | None],
    keep: bool,
    kind: str,
    group: str,
    timeout: float,
    transport: str,
    rank: int,
    dim: int,
    sizes: list[int],
    *rest: Any,
) -> list[Tensor]:
    gathered = list(x.shape)
    if kind == ALL_GATHER:
        gathered[dim] = sum(sizes)
    elif kind == REDUCE_SCATTER:
        gathered[dim] = sizes[rank]
    outs = [x.new_empty((*gathered[:-1], weight.shape[0])) for weight in weights]
    return [*outs, x.new_empty(gathered)] if keep else outs


@torch.library.register_fake("fastpar::parallel_linear_backward")
def _(
    x: Tensor | None,
    weights: list[Tensor],
    grads: list[Tensor | None],
    wants_x: bool,
    wants_weights: list[bool],
    wants_biases: list[bool],
    kind: str,
    group: str,
    timeout: float,
    transport: str,
    rank: int,
    dim: int,
    sizes: list[int],
    *rest: Any,
) -> list[Tensor]:
    given = next(grad for grad in grads if grad is not None)
    shape = [*given.shape[:-1], weights[0].shape[1]]
    if kind == ALL_GATHER:
        shape[dim] = sizes[rank]
    elif kind == REDUCE_SCATTER:
        shape[dim] = sum(sizes)
    by_x = given.new_empty(shape if wants_x else 0)
    by_weights = [
        torch.empty_like(weight) if wanted and grad is not None else given.new_empty(0)
        for weight, grad, wanted in zip(weights, grads, wants_weights, strict=True)
    ]
    by_biases = [
        given.new_empty(weight.shape[:1] if wanted and grad is not None else 0)
        for weight, grad, wanted in zip(weights, grads, wants_biases, strict=True)
    ]
    return [by_x, *by_weights, *by_biases]


def _unpack(
    kind: str,
    group: str,
    timeout: float,
    transport: str,
    rank: int,
    dim: int,
    sizes: list[int],
    chunks: int,
    concurrent: bool,
    backward_chunks: int,
) -> Call:
    from torch.distributed.distributed_c10d import _resolve_process_group

    comm = Communicator(_resolve_process_group(cast(Any, group)), timeout=timeout, transport=transport)
    return Call(kind, comm, Rows(dim, tuple(sizes), chunks, concurrent), backward_chunks)


def _pack(call: Call) -> tuple[Any, ...]:
    comm, rows = call.comm, call.rows
    assert comm.group is not None
    where = (comm.group.group_name, comm.timeout, comm.transport, comm.rank)
    return (call.kind, *where, rows.dim, list(rows.sizes), rows.chunks, rows.concurrent, call.backward_chunks)


def compiled_forward(
    call: Call, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], *, keep: bool
) -> tuple[list[Tensor], Tensor | None]:
    """`forward` as one op."""
    outs = torch.ops.fastpar.parallel_linear_forward(x, list(weights), list(biases), keep, *_pack(call))
    return list(outs[: len(weights)]), outs[-1] if keep else None


def compiled_backward(
    call: Call, x: Tensor | None, weights: Sequence[Tensor], grads: Sequence[Tensor | None], wants: Wants
) -> Grads:
    """`backward` as one op."""
    asked = (wants.x, list(wants.weights), list(wants.biases))
    op = torch.ops.fastpar.parallel_linear_backward
    by_x, *rest = op(x, list(weights), list(grads), *asked, *_pack(call))
    count = len(weights)
    is_given = [grad is not None for grad in grads]

    def asked_for(found: Sequence[Tensor], wanted: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
        return tuple(g if w and i else None for g, w, i in zip(found, wanted, is_given, strict=True))

    return Grads(
        by_x if wants.x else None, asked_for(rest[:count], wants.weights), asked_for(rest[count:], wants.biases)
    )
