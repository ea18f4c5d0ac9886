"""Which experts a token goes to and with what weight. Plain PyTorch, differentiable in the logits.

    scores   softmax(logits) over all experts, or sigmoid(logits), or sqrt(softplus(logits))
    choice   the top_k experts by score + bias (rule.when "after": by logit + bias), within the best groups of experts
    weights  the scores of the chosen experts, without the bias; normalised over them, scaled

Ties go to the lowest expert, whatever the device. `fastpar.expert.presets` has the rules of known models.

Note: sums of scores are taken in logarithms where epsilon is 0. s_i / sum(s) of sigmoids whose logits are all below -90
is 0 / 0 in float32; the softmax of the logarithms of the same scores is right for any logits, and it is the same number
elsewhere. An epsilon, as other libraries add to the sum, is kept where a rule names one: at logits of -60 an epsilon of
1e-20 makes weights that sum to 1e-6.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from fastpar.contracts.moe import SCORES, RouteRule, Routing, check_routing, log_scores

_TABLE_ROWS = 4096  # of a hash table that are drawn at once

Top = Callable[[Tensor, int], Tensor]


def score_of(logits: Tensor, score: str) -> Tensor:
    """[.., E]: what experts are chosen by."""
    if score == "softmax":
        return logits.softmax(-1)
    return torch.sigmoid(logits) if score == "sigmoid" else log_scores(logits, score).exp()


def stable_top(values: Tensor, k: int) -> Tensor:
    """int64 [.., k]: where the largest values are, largest first, the first of equal ones; NaN is the smallest."""
    ordered = values.masked_fill(values.isnan(), -math.inf)
    return torch.sort(ordered, dim=-1, descending=True, stable=True).indices[..., :k]


def limit_to_groups(values: Tensor, rule: RouteRule, top: Top) -> Tensor:
    """values [T, E], -inf outside the best groups."""
    if rule.top_groups == rule.num_groups:
        return values
    grouped = values.masked_fill(values.isnan(), -math.inf).unflatten(-1, (rule.num_groups, -1))
    best = {"top2": 2, "top_k_over_groups": max(1, rule.top_k // rule.top_groups), "max": 1}[rule.group_score]
    group_scores = grouped.topk(min(best, grouped.shape[-1]), dim=-1).values.sum(-1)
    closed = torch.ones_like(group_scores, dtype=torch.bool).scatter_(-1, top(group_scores, rule.top_groups), False)
    return grouped.masked_fill(closed[..., None], -math.inf).flatten(-2)


def choose(logits: Tensor, rule: RouteRule, bias: Tensor | None, top: Top, scores: Tensor | None = None) -> Tensor:
    """int64 [T, K]: the experts of each token. `scores`: `score_of` the logits, where it is known."""
    with torch.no_grad():
        values = logits if rule.when == "after" else score_of(logits, rule.score) if scores is None else scores.detach()
        if bias is not None:
            values = values + bias.to(values.dtype)
        return top(limit_to_groups(values, rule, top), rule.top_k)


def needs_shares(rule: RouteRule) -> bool:
    """Whether weights are shares of all experts' softmax, not of the chosen ones'."""
    return rule.score == "softmax" and rule.when != "after" and not (rule.normalize and rule.epsilon == 0.0)


def weigh(logits: Tensor, indices: Tensor, rule: RouteRule, scores: Tensor | None = None) -> Tensor:
    """[T, K]: the weights of choices; 0 of those that go nowhere, NaN of the others of a token with a NaN logit.
    `scores`: the softmax of the logits, where it is known.
    """
    nowhere = (indices < 0) | (indices >= logits.shape[-1])
    index = indices.masked_fill(nowhere, 0)
    is_share = rule.score == "softmax" and rule.when == "after"
    if is_share or (rule.normalize and rule.epsilon == 0.0):
        chosen = log_scores(logits.gather(-1, index), rule.score)
        weights = chosen.masked_fill(nowhere, -math.inf).softmax(-1)
    elif rule.score == "softmax":
        weights = (logits.softmax(-1) if scores is None else scores).gather(-1, index)
    else:
        weights = score_of(logits.gather(-1, index), rule.score)
    weights = weights.masked_fill(nowhere, 0.0)
    if rule.normalize and rule.epsilon:
        weights = weights / (weights.sum(-1, keepdim=True) + rule.epsilon)
    if logits.shape[-1] == 0:
        return weights
    bad = logits.amax(-1, keepdim=True).isnan() & ~nowhere  # the largest of a row with NaN is NaN
    return (weights * rule.scale).masked_fill(bad, math.nan)


def count(indices: Tensor, num_experts: int) -> Tensor:
    """int64 [E]: how often each expert stands in indices."""
    flat = indices.reshape(-1).long()
    if flat.device.type == "cpu" and flat.numel() and not torch.compiler.is_compiling():
        low, high = torch.aminmax(flat)
        if low >= 0 and high < num_experts:
            return torch.bincount(flat, minlength=num_experts)
    flat = torch.where((flat < 0) | (flat >= num_experts), num_experts, flat)
    counts = flat.new_zeros(num_experts + 1)
    return counts.scatter_add_(0, flat, torch.ones_like(flat))[:num_experts]


def widen(logits: Tensor, mask: Tensor | None) -> Tensor:
    """Logits in float32 at least; zeros for padding, whose NaN would be 0 * NaN in the gradient of a softmax."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits if mask is None else logits.masked_fill(~mask[:, None], 0.0)


def route(
    logits: Tensor,
    rule: RouteRule,
    *,
    bias: Tensor | None = None,
    indices: Tensor | None = None,
    noise: Tensor | None = None,
    mask: Tensor | None = None,
    top: Top = stable_top,
) -> Routing:
    """`moe_route` with a given way to find the largest."""
    check_routing(logits, bias, indices, noise, mask)
    num_experts = logits.shape[1]
    logits = widen(logits, mask)
    noisy = logits if noise is None else logits + noise
    weighed = logits if rule.noise == "gumbel" else noisy
    scores = None
    if indices is None:
        rule.check_experts(num_experts)
        if needs_shares(rule) and weighed is noisy:
            scores = noisy.softmax(-1)  # once, for the choice and for the weights
        indices = choose(noisy, rule, bias, top, scores)
    else:
        indices = indices.long()
        indices = indices.masked_fill((indices < 0) | (indices >= num_experts), -1)
    if mask is not None:
        indices = indices.masked_fill(~mask[:, None], -1)
    weights = weigh(weighed, indices, rule, scores)
    return Routing(indices, weights, count(indices, num_experts), logits, rule.score)


def moe_route(
    logits: Tensor,
    rule: RouteRule,
    *,
    bias: Tensor | None = None,
    indices: Tensor | None = None,
    noise: Tensor | None = None,
    mask: Tensor | None = None,
) -> Routing:
    """See `fastpar.ops.moe_route`."""
    return route(logits, rule, bias=bias, indices=indices, noise=noise, mask=mask)


def route_by_experts(
    logits: Tensor,
    capacity: int,
    *,
    score: str = "softmax",
    mask: Tensor | None = None,
    width: int | None = None,
    top: Top = stable_top,
) -> Routing:
    """`expert_choice_route` with a given way to find the largest."""
    check_routing(logits, None, None, None, mask)
    if score not in SCORES:
        raise ValueError(f"score must be one of {', '.join(SCORES)}, got {score!r}")
    if capacity < 0:
        raise ValueError(f"capacity must not be negative, got {capacity}")
    num_tokens, num_experts = logits.shape
    logits = widen(logits, mask)
    scores = score_of(logits, score)
    chosen = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
    if capacity and num_tokens:
        ranked = scores.detach() if mask is None else scores.detach().masked_fill(~mask[:, None], -math.inf)
        tokens = top(ranked.T.contiguous(), min(capacity, num_tokens))
        chosen.scatter_(0, tokens.T.contiguous(), True)
    if mask is not None:
        chosen &= mask[:, None]
    most = int(chosen.sum(-1).max()) if num_tokens else 0
    if width is not None and width < most:
        raise ValueError(f"width ({width}) must be at least the most experts of a token ({most})")
    experts = torch.sort(chosen, dim=-1, descending=True, stable=True).indices[:, : most if width is None else width]
    indices = experts.masked_fill(~chosen.gather(-1, experts), -1)
    weights = scores.gather(-1, experts).masked_fill(indices < 0, 0.0)
    bad = logits.isnan().any(-1, keepdim=True) & (indices >= 0)
    return Routing(indices, weights.masked_fill(bad, math.nan), count(indices, num_experts), logits, score)


def expert_choice_route(
    logits: Tensor, capacity: int, *, score: str = "softmax", mask: Tensor | None = None, width: int | None = None
) -> Routing:
    """See `fastpar.ops.expert_choice_route`."""
    return route_by_experts(logits, capacity, score=score, mask=mask, width=width)


def hash_table(vocab_size: int, num_experts: int, top_k: int = 1, *, seed: int = 0) -> Tensor:
    """int64 [vocab_size, top_k]: different experts for every token id, drawn by the seed alone.

    Routing by hash (Roller et al. 2021) is `moe_route(logits, rule, indices=table[ids])`.
    """
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k must be between 1 and num_experts ({num_experts}), got {top_k}")
    generator = torch.Generator().manual_seed(seed)
    table = torch.empty((vocab_size, top_k), dtype=torch.int64)
    for rows in table.split(_TABLE_ROWS):
        rows.copy_(torch.rand(len(rows), num_experts, generator=generator).argsort(dim=-1, stable=True)[:, :top_k])
    return table


def balanced_indices(
    num_tokens: int, num_experts: int, top_k: int, *, start: int = 0, device: torch.device | str = "cpu"
) -> Tensor:
    """int64 [num_tokens, top_k]: all experts in turn from `start` on, so that none has one pair more than another.

    Give every rank another start: if all began at one expert, they would all send to its rank first.
    """
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k must be between 1 and num_experts ({num_experts}), got {top_k}")
    pairs = torch.arange(start, start + num_tokens * top_k, device=device)
    return (pairs % num_experts).view(num_tokens, top_k)
