"""linear_cross_entropy's forward and backward as torch.library ops: for torch.compile, which would otherwise trace
the loop over chunks, keep many chunks' logits at once and refuse the collectives.

Eager code calls the passes directly; the ops wrap the same functions. Gradients that are not asked for are empty.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from fastpar.comm.graph_order import in_order, keep_order
from fastpar.contracts import compute_dtype
from fastpar.contracts.cross_entropy import LossOptions
from fastpar.contracts.vocab_shard import Shard
from fastpar.ops.cross_entropy import LossProblem
from fastpar.ops.linear_cross_entropy.passes import (
    LinearLossGrads,
    LinearLossInputs,
    LinearLossLayout,
    LinearLossWants,
    gradients,
    losses,
    losses_and_gradients,
)

_COMMON = (
    "Tensor? class_weight, Tensor? weight_sum, bool[] wants, SymInt vocab_start, SymInt vocab_total, int ignore_index, "
    "float label_smoothing, float z_loss, float softcap, float logit_scale, str? group, float timeout, "
    "int? sequence_dim, int? chunk_bytes, bool every_row"
)
torch.library.define(
    "fastpar::linear_cross_entropy_forward",
    f"(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor? grad_loss, {_COMMON}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
torch.library.define(
    "fastpar::linear_cross_entropy_backward",
    "(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor lse, Tensor grad_loss, Tensor? grad_lse, "
    f"{_COMMON}) -> (Tensor, Tensor, Tensor)",
)

for _op in (torch.ops.fastpar.linear_cross_entropy_forward, torch.ops.fastpar.linear_cross_entropy_backward):
    in_order(_op.default)


@torch.library.impl("fastpar::linear_cross_entropy_forward", "CompositeExplicitAutograd")
def _forward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, grad_loss: Tensor | None, *common: Any
) -> tuple[Tensor, ...]:
    inputs = LinearLossInputs(hidden, weight, bias, target)
    problem, layout, wants = _unpack(weight, *common)
    if grad_loss is None:
        loss, lse = losses(inputs, problem, layout)
        return loss, lse, *(hidden.new_empty(0) for _ in range(3))
    loss, lse, grads = losses_and_gradients(inputs, problem, layout, grad_loss, wants)
    return loss, lse, *_filled(hidden, grads)


@torch.library.impl("fastpar::linear_cross_entropy_backward", "CompositeExplicitAutograd")
def _backward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    lse: Tensor,
    grad_loss: Tensor,
    grad_lse: Tensor | None,
    *common: Any,
) -> tuple[Tensor, ...]:
    problem, layout, wants = _unpack(weight, *common)
    inputs = LinearLossInputs(hidden, weight, bias, target)
    return _filled(hidden, gradients(inputs, problem, layout, lse, grad_loss, grad_lse, wants))


@torch.library.register_fake("fastpar::linear_cross_entropy_forward")
def _(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    grad_loss: Tensor | None,
    class_weight: Tensor | None,
    weight_sum: Tensor | None,
    wants: list[bool],
    *rest: Any,
) -> tuple[Tensor, ...]:
    loss = hidden.new_empty((target.numel(),), dtype=compute_dtype(hidden.dtype))
    asked = [False] * 3 if grad_loss is None else wants
    return loss, torch.empty_like(loss, dtype=torch.float64), *_fake_grads(hidden, weight, asked)


@torch.library.register_fake("fastpar::linear_cross_entropy_backward")
def _(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    lse: Tensor,
    grad_loss: Tensor,
    grad_lse: Tensor | None,
    class_weight: Tensor | None,
    weight_sum: Tensor | None,
    wants: list[bool],
    *rest: Any,
) -> tuple[Tensor, ...]:
    return _fake_grads(hidden, weight, wants)


def _fake_grads(hidden: Tensor, weight: Tensor, wants: list[bool]) -> tuple[Tensor, ...]:
    shapes = (hidden.shape, weight.shape, weight.shape[:1])
    return tuple(hidden.new_empty(shape if wanted else (0,)) for shape, wanted in zip(shapes, wants, strict=True))


def _filled(hidden: Tensor, grads: LinearLossGrads) -> tuple[Tensor, ...]:
    return tuple(hidden.new_empty(0) if grad is None else grad for grad in grads)


def _unpack(weight: Tensor, *common: Any) -> tuple[LossProblem, LinearLossLayout, LinearLossWants]:
    """What `_pack` has made of them."""
    class_weight, weight_sum, wants, vocab_start, vocab_total, *rest = common
    options = LossOptions(*rest[: len(LossOptions._fields)])
    group, timeout, *layout = rest[len(options) :]
    comm = None
    if group is not None:
        from torch.distributed.distributed_c10d import _resolve_process_group

        from fastpar.comm import Communicator

        comm = Communicator(_resolve_process_group(cast(Any, group)), timeout=timeout)
    shard = Shard(vocab_start, weight.shape[0], vocab_total)
    problem = LossProblem(shard, comm, options, class_weight, weight_sum)
    return problem, LinearLossLayout(*layout), LinearLossWants(*wants)


def _pack(problem: LossProblem, layout: LinearLossLayout, wants: LinearLossWants) -> tuple[Any, ...]:
    """What the ops have in common, in the order of `_COMMON`."""
    comm = problem.comm
    group, timeout = (None, 0.0) if comm is None or comm.group is None else (comm.group.group_name, comm.timeout)
    where = (problem.shard.start, problem.shard.total)
    terms = (problem.weight, problem.weight_sum, list(wants), *where, *problem.options)
    return *terms, group, timeout, *layout


def compiled_forward(
    inputs: LinearLossInputs,
    problem: LossProblem,
    layout: LinearLossLayout,
    grad_loss: Tensor | None,
    wants: LinearLossWants,
) -> tuple[Tensor, Tensor, LinearLossGrads]:
    """`losses` (grad_loss None) or `losses_and_gradients` as one op."""
    keep_order()
    op = torch.ops.fastpar.linear_cross_entropy_forward
    loss, lse, *grads = op(*inputs, grad_loss, *_pack(problem, layout, wants))
    return loss, lse, _asked(grads, wants if grad_loss is not None else LinearLossWants(False, False, False))


def compiled_backward(
    inputs: LinearLossInputs,
    problem: LossProblem,
    layout: LinearLossLayout,
    lse: Tensor,
    grad_loss: Tensor,
    grad_lse: Tensor | None,
    wants: LinearLossWants,
) -> LinearLossGrads:
    """`gradients` as one op."""
    keep_order()
    op = torch.ops.fastpar.linear_cross_entropy_backward
    grads = op(*inputs, lse, grad_loss, grad_lse, *_pack(problem, layout, wants))
    return _asked(cast("tuple[Tensor, ...]", grads), wants)


def _asked(grads: Any, wants: LinearLossWants) -> LinearLossGrads:
    return LinearLossGrads(*(grad if wanted else None for grad, wanted in zip(grads, wants, strict=True)))
