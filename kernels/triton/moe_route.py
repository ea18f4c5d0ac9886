"""Routing on GPUs in Triton: from float32 logits to indices, weights and counts in one launch, and back in another.

    forward          indices, weights [T, K], counts [E]      and one launch that zeroes the counts
    backward         the gradient of the logits [T, E] from that of the weights
    scores           [T, E], for losses, only if asked for; scores_backward

The algebra is that of fastpar.reference.moe_route. A program keeps the logits of a few tokens in registers, chooses one
expert after the other (two integer reductions each, within a warp up to 512 experts), and reads and writes nothing else
that is as wide as the experts. Backward reads the logits again: kept are they, which exist anyway, and the indices.

Counts are sums of integers by atomics, so the same in any order. Weights are within a few roundings of float32 of what
the CPU has, and so are the values that experts are compared by: a choice can differ only between experts whose values
are as close as that; where they are equal it is the lowest, here as there. A token with a NaN logit has valid indices,
NaN weights and a NaN gradient. Nothing synchronises with the host. Tested on an H200, not timed.

Bytes moved: forward reads 4 T E and writes 12 T K; backward reads 4 T E + 12 T K and writes 4 T E.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fastpar.kernels.cross_entropy import WARP_SIZE
from fastpar.kernels.launch import cdiv, launch, next_power_of_2
from fastpar.kernels.moe_route_kernels import route_backward_kernel, route_kernel, scores_kernel

MOST_EXPERTS = 2048
MOST_CHOICES = 32  # one after the other: a sort is faster at some number of them
COLUMNS_PER_THREAD = 8  # of a program with several tokens; those of many experts have twice as many


class RouterRule(Protocol):
    """What is used of a fastpar.reference.moe_route.RouteRule."""

    @property
    def top_k(self) -> int: ...
    @property
    def score(self) -> str: ...
    @property
    def when(self) -> str: ...
    @property
    def normalize(self) -> bool: ...
    @property
    def epsilon(self) -> float: ...
    @property
    def scale(self) -> float: ...
    @property
    def num_groups(self) -> int: ...
    @property
    def top_groups(self) -> int: ...
    @property
    def group_score(self) -> str: ...


class Routed(NamedTuple):
    """indices int64 [T, K], weights float32 [T, K], counts int64 [E]."""

    indices: Tensor
    weights: Tensor
    counts: Tensor


def takes(num_experts: int, top_k: int) -> bool:
    """Whether the kernels are made for so many."""
    return 1 <= num_experts <= MOST_EXPERTS and top_k <= MOST_CHOICES


def _options(padded: int, num_tokens: int) -> dict[str, Any]:
    """ROWS and warps of programs with so many columns of a token."""
    rows = min(max(COLUMNS_PER_THREAD * WARP_SIZE // padded, 1), next_power_of_2(num_tokens))
    return {"ROWS": rows, "num_warps": max(padded // (2 * COLUMNS_PER_THREAD * WARP_SIZE), 1)}


def _weighing(rule: RouterRule) -> dict[str, Any]:
    """SHARE: weights are a softmax over the chosen; NORMALIZE: they are divided by their sum and epsilon."""
    share = (rule.score == "softmax" and rule.when == "after") or (rule.normalize and rule.epsilon == 0.0)
    return {"SCORE": rule.score, "SHARE": share, "NORMALIZE": rule.normalize and rule.epsilon > 0.0}


def _grouping(rule: RouterRule, num_experts: int) -> dict[str, Any]:
    """One group if the choice is among all of them."""
    groups = rule.num_groups if rule.top_groups < rule.num_groups else 1
    width = num_experts // groups
    best = {"top2": 2, "top_k_over_groups": max(1, rule.top_k // rule.top_groups), "max": 1}[rule.group_score]
    return {
        "GROUPS": groups, "TOP_GROUPS": min(rule.top_groups, groups), "BEST": min(best, width), "WIDTH": width,
        "PADDED_GROUPS": next_power_of_2(groups), "PADDED_WIDTH": next_power_of_2(width),
    }  # fmt: skip


def forward(logits: Tensor, rule: RouterRule, bias: Tensor | None = None, mask: Tensor | None = None) -> Routed:
    """Route logits float32 [T, E]; bias [E] only selects, and mask bool [T] is False where a token goes nowhere."""
    num_tokens, num_experts = logits.shape
    indices = torch.empty((num_tokens, rule.top_k), dtype=torch.int64, device=logits.device)
    weights = torch.empty((num_tokens, rule.top_k), dtype=torch.float32, device=logits.device)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=logits.device)
    if num_tokens:
        grouping = _grouping(rule, num_experts)
        options = _options(grouping["PADDED_GROUPS"] * grouping["PADDED_WIDTH"], num_tokens)
        launch(
            route_kernel, cdiv(num_tokens, options["ROWS"]), logits.device,
            logits.contiguous(), None if bias is None else bias.contiguous(),
            None if mask is None else mask.contiguous().view(torch.uint8), indices, weights, counts,
            num_tokens, float(rule.epsilon), float(rule.scale), AFTER=rule.when == "after", TOP_K=rule.top_k,
            **_weighing(rule), **grouping, **options,
        )  # fmt: skip
    return Routed(indices, weights, counts)


def backward(grad_weights: Tensor, logits: Tensor, indices: Tensor, rule: RouterRule) -> Tensor:
    """The gradient of logits; indices as forward gave them."""
    num_tokens, num_experts = logits.shape
    grad = torch.empty((num_tokens, num_experts), dtype=torch.float32, device=logits.device)
    if num_tokens:
        padded = next_power_of_2(num_experts)
        options = _options(padded, num_tokens)
        launch(
            route_backward_kernel, cdiv(num_tokens, options["ROWS"]), logits.device,
            logits.contiguous(), indices, grad_weights.contiguous(), grad,
            num_tokens, float(rule.epsilon), float(rule.scale), TOP_K=rule.top_k, NUM_EXPERTS=num_experts,
            PADDED=padded, **_weighing(rule), **options,
        )  # fmt: skip
    return grad


def scores(logits: Tensor, score: str) -> Tensor:
    """float32 [T, E]: the scores of all experts, with a sum of 1."""
    return _scores(logits, None, score)


def scores_backward(grad_scores: Tensor, logits: Tensor, score: str) -> Tensor:
    """The gradient of logits."""
    return _scores(logits, grad_scores.contiguous(), score)


def _scores(logits: Tensor, grad_scores: Tensor | None, score: str) -> Tensor:
    num_tokens, num_experts = logits.shape
    out = torch.empty((num_tokens, num_experts), dtype=torch.float32, device=logits.device)
    if num_tokens:
        padded = next_power_of_2(num_experts)
        options = _options(padded, num_tokens)
        launch(
            scores_kernel, cdiv(num_tokens, options["ROWS"]), logits.device, logits.contiguous(), grad_scores,
            out, num_tokens, SCORE=score, NUM_EXPERTS=num_experts, PADDED=padded, **options,
        )  # fmt: skip
    return out
