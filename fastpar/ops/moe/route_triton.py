"""Where routing runs in Triton: on CUDA tensors, in one kernel each way; `fastpar.kernels.moe_route` has them.

float64 logits, noise, choices that are given, rules with more choices or experts than the kernels take, and what
torch.compile traces go the way of plain PyTorch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastpar.contracts.moe import RouteRule, Routing, check_routing
from fastpar.ops._autograd import first_derivative_only
from fastpar.ops._backends import has_kernels
from fastpar.reference.moe_route import widen

_REFERENCE = "fastpar.reference.moe_route"


def applies(logits: Tensor, rule: RouteRule) -> bool:
    """Whether `moe_route` of these logits, by their own choice and without noise, is that of this file."""
    if logits.device.type != "cuda" or logits.dim() != 2 or logits.dtype == torch.float64 or not has_kernels(logits):
        return False
    from fastpar.kernels import moe_route as kernels

    return kernels.takes(logits.shape[1], rule.top_k) and not torch.compiler.is_compiling()


class TritonRoute(torch.autograd.Function):
    """Saved: logits and indices."""

    @staticmethod
    def forward(
        ctx: Any, rule: RouteRule, logits: Tensor, bias: Tensor | None, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        from fastpar.kernels import moe_route as kernels

        indices, weights, counts = kernels.forward(logits, rule, bias, mask)
        ctx.rule = rule
        ctx.save_for_backward(logits, indices)
        ctx.mark_non_differentiable(indices, counts)
        ctx.set_materialize_grads(False)
        return weights, indices, counts

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, Tensor | None, None, None]:
        from fastpar.kernels import moe_route as kernels

        logits, indices = ctx.saved_tensors
        if grads[0] is None:
            return None, None, None, None
        grad = kernels.backward(grads[0].detach(), logits.detach(), indices, ctx.rule)
        return None, first_derivative_only(grad, "moe_route", _REFERENCE, logits, grads[0]), None, None


class TritonScores(torch.autograd.Function):
    """Saved: logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, score: str) -> Tensor:
        from fastpar.kernels import moe_route as kernels

        ctx.score = score
        ctx.save_for_backward(logits)
        return kernels.scores(logits, score)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        from fastpar.kernels import moe_route as kernels

        (logits,) = ctx.saved_tensors
        grad = kernels.scores_backward(grads[0].detach(), logits.detach(), ctx.score)
        return first_derivative_only(grad, "Routing.scores", _REFERENCE, logits, grads[0]), None


class TritonRouting(Routing):
    """`Routing` whose scores come from one kernel, too."""

    @property
    def scores(self) -> Tensor:
        found: Tensor = super().scores if torch.compiler.is_compiling() else TritonScores.apply(self.logits, self.score)
        return found


def moe_route(logits: Tensor, rule: RouteRule, bias: Tensor | None, mask: Tensor | None) -> Routing:
    """`fastpar.ops.moe_route`."""
    check_routing(logits, bias, None, None, mask)
    rule.check_experts(logits.shape[1])
    logits = widen(logits, mask)
    weights, indices, counts = TritonRoute.apply(rule, logits, bias, mask)
    return TritonRouting(indices, weights, counts, logits, rule.score)
