"""The MoE ops with their options as keywords, as tests vary them: `Dispatch` and `ExpertWeights` are made here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastpar import ops, reference
from fastpar.ops import Dispatch, DispatchHandle, ExpertWeights
from fastpar.ops.moe.dispatcher import TokenDispatcher
from fastpar.ops.moe.transports import select


def dispatch_of(**options: Any) -> Dispatch | None:
    """Of the options that are not None; None without any."""
    given = {name: value for name, value in options.items() if value is not None}
    return Dispatch(**given) if given else None


def moe_dispatch(
    x: Any, indices: Any, weights: Any = None, *, num_experts: int, group: Any = None, **options: Any
) -> tuple[Tensor, Tensor, DispatchHandle]:
    return ops.moe_dispatch(x, indices, weights, num_experts=num_experts, group=group, dispatch=dispatch_of(**options))


def moe_plan(
    indices: Any, weights: Any = None, *, num_experts: int, group: Any = None, **options: Any
) -> DispatchHandle:
    return ops.moe_plan(indices, weights, num_experts=num_experts, group=group, dispatch=dispatch_of(**options))


def moe_mlp(
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    first: Tensor,
    second: Tensor,
    *,
    first_bias: Tensor | None = None,
    second_bias: Tensor | None = None,
    replicas: Sequence[Tensor | None] | None = None,
    rule: Any = None,
    add: Tensor | Callable[[], Tensor | None] | None = None,
    group: Any = None,
    grad_scale: float = 1.0,
    **options: Any,
) -> Tensor:
    return ops.moe_mlp(
        x, indices, weights, ExpertWeights(first, second, first_bias, second_bias),
        replicas=None if replicas is None else ExpertWeights(*replicas), rule=rule, add=add, group=group,
        dispatch=dispatch_of(**options), grad_scale=grad_scale,
    )  # fmt: skip


def reference_mlp(
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    first: Tensor,
    second: Tensor,
    *,
    first_bias: Tensor | None = None,
    second_bias: Tensor | None = None,
    **options: Any,
) -> Tensor:
    experts = ExpertWeights(first, second, first_bias, second_bias)
    return reference.moe_mlp(x, indices, weights, experts, **options)


def find_dispatcher(group: Any, *, device: torch.device | None = None, **options: Any) -> TokenDispatcher:
    return select.find_dispatcher(group, dispatch_of(**options) or Dispatch(), device)
