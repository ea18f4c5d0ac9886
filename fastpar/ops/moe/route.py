"""From tokens to experts: router logits in float32, the choice of experts and its weights.

On CUDA tensors all of it is one Triton kernel each way, `route_triton.py`. On CPU the choice is made by the C++
kernel of `vocab_parallel_topk`, elsewhere by a stable sort, and all else is PyTorch. Each gives ties to the lowest
expert. No tensor here but logits and scores is as wide as the experts, and those are read by the products before and
after.

Decided: no C++ kernel for the whole. At 4096 tokens and 256 experts routing is a hundredth of the experts' work; on
CUDA a dozen launches would take longer than what they do.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fastpar import _ext
from fastpar.arguments import checked
from fastpar.contracts.moe import RouteRule, Routing
from fastpar.ops._autograd import first_derivative_only
from fastpar.ops.moe import route_triton
from fastpar.reference.moe_route import balanced_indices, hash_table, route, route_by_experts, stable_top

_ext.load()

__all__ = [
    "RouteRule",
    "Routing",
    "balanced_indices",
    "expert_choice_route",
    "hash_table",
    "moe_route",
    "router_logits",
    "top_experts",
]

_CHUNK_ROWS = 256  # tokens that are widened at once, into memory that stays in cache


def top_experts(values: Tensor, k: int) -> Tensor:
    """int64 [.., k]: where the k largest are, largest first, the lowest of equal ones; NaN counts as the smallest."""
    if values.device.type != "cpu" or torch.compiler.is_compiling():
        return stable_top(values, k)
    ordered = values.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
    ids: Tensor = torch.ops.fastpar.vocab_topk(ordered, k, 0)[1]
    return ids


# ---- logits ----------------------------------------------------------------------------------------------------------


class RouterLogits(torch.autograd.Function):
    """x @ weight.T in float32 of 16-bit operands, whose products float32 holds exactly.

    The operands are widened chunk by chunk. CPU GEMMs of bfloat16 round their result to it, and a widened x would be
    written to memory and read again at twice its size. Saved: x and weight as they are.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, wide: torch.dtype) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.wide = wide
        if x.is_cuda and x.dtype == weight.dtype:
            return torch.mm(x, weight.T, out_dtype=wide)
        logits = x.new_empty((len(x), len(weight)), dtype=wide)
        columns = weight.to(wide).T
        for rows, out in zip(x.split(_CHUNK_ROWS), logits.split(_CHUNK_ROWS), strict=True):
            torch.mm(rows.to(wide), columns, out=out)
        return logits

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (x, weight), wide = ctx.saved_tensors, ctx.wide
        grad = first_derivative_only(grads[0], "router_logits of 16-bit tensors", "float32 tensors", x, weight)
        dx = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        dweight = weight.new_zeros(weight.shape, dtype=wide) if ctx.needs_input_grad[1] else None
        rows_of = weight.to(wide)
        for start in range(0, len(x), _CHUNK_ROWS):
            chunk = slice(start, start + _CHUNK_ROWS)
            if dx is not None:
                dx[chunk] = grad[chunk] @ rows_of
            if dweight is not None:
                dweight.addmm_(grad[chunk].T, x[chunk].to(wide))
        return dx, None if dweight is None else dweight.to(weight.dtype), None


@checked()
def router_logits(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """What a router thinks of each expert for each token, in float32.

        x       [T, H]   any floating dtype
        weight  [E, H]   any floating dtype
        bias    [E]      likewise
        logits  [T, E]   float32 (float64 if one of them is)

        forward  logits = x @ weight.T + bias            summed and kept in float32, also under autocast
        dgrad    dx = dlogits @ weight                   in the dtype of x, rounded once
        wgrad    dweight = dlogits.T @ x, dbias          in the dtypes of weight and bias, rounded once

    Logits of 16 bits would tie: bfloat16 has 8 bits, so that near 8 two experts closer than 1/32 are one.

    Raises ValueError for shapes, TypeError for dtypes.
    """
    for name, tensor in (("x", x), ("weight", weight), ("bias", bias)):
        if tensor is not None and not tensor.is_floating_point():
            raise TypeError(f"{name} must be floating point, got {tensor.dtype}")
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"x must be [T, H] and weight [E, H], got {tuple(x.shape)} and {tuple(weight.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must have shape {tuple(weight.shape[:1])}, got {tuple(bias.shape)}")
    wide = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)
    with torch.autocast(x.device.type, enabled=False):
        if x.dtype == weight.dtype == wide:
            return functional.linear(x, weight, None if bias is None else bias.to(wide))
        logits: Tensor = RouterLogits.apply(x, weight, wide)
        return logits if bias is None else logits + bias.to(wide)


# ---- routing ---------------------------------------------------------------------------------------------------------


@checked()
def moe_route(
    logits: Tensor,
    rule: RouteRule,
    *,
    bias: Tensor | None = None,
    indices: Tensor | None = None,
    noise: Tensor | None = None,
    mask: Tensor | None = None,
) -> Routing:
    """Choose the experts of every token by `rule`, and weigh them.

        logits   [T, E]   float32; float64 for float64, 16 bits are widened
        bias     [E]      added in the choice and nowhere else; no gradient
        indices  [T, K]   choices that are given and only weighed (hash, replay); -1 or E: nowhere
        noise    [T, E]   added to the logits; see `RouteRule.noise`
        mask     [T]      bool; False: padding, which goes nowhere
        Routing           indices int64 [T, K], weights float32 [T, K], counts int64 [E], scores float32 [T, E]

        forward   indices = top_k of scores + bias; weights = scores[indices], normalised and scaled by the rule
        backward  dlogits from dweights and dscores; none through the choice

    No collective and no synchronisation with the device. Ties go to the lowest expert, on every device. A token with a
    NaN logit has valid indices, in which NaN is last, and NaN weights.

    Worked example, softmax and two of three experts, normalised: logits [[0, ln 3, 0]] has scores [[0.2, 0.6, 0.2]],
    indices [[1, 0]], weights [[0.75, 0.25]] and counts [1, 1, 0].

    Raises ValueError: shapes, top_k larger than E, groups that do not divide E. TypeError: dtypes.
    """
    if indices is None and noise is None and route_triton.applies(logits, rule):
        return route_triton.moe_route(logits, rule, bias, mask)
    return route(logits, rule, bias=bias, indices=indices, noise=noise, mask=mask, top=top_experts)


@checked()
def expert_choice_route(
    logits: Tensor, capacity: int, *, score: str = "softmax", mask: Tensor | None = None, width: int | None = None
) -> Routing:
    """Every expert takes the `capacity` tokens with the best scores for it (Zhou et al. 2022).

        logits    [T, E]
        mask      [T]      bool; False: padding, which nobody takes
        indices   [T, K]   the experts that took a token, in ascending order, then -1; K is the most that took one,
                           which costs a synchronisation on CUDA, or `width`, which must be as large
        weights   [T, K]   their scores

    Balanced by construction: counts are `capacity`, or the number of tokens if that is less. Ties go to the earliest
    token. What a token gets depends on the others, later ones included, so not for autoregressive generation.
    """
    return route_by_experts(logits, capacity, score=score, mask=mask, width=width, top=top_experts)
