"""A limit to the rows of an expert: what is over it goes nowhere.

    capacity = expert_capacity(tokens, top_k, num_experts, factor=1.25)
    indices = moe_capacity(indices, weights, num_experts=num_experts, tokens=capacity)
    rows, row_weights, plan = moe_dispatch(x, indices, weights, num_experts=num_experts, group=ep)
    plan.dropped                                    # choices that go nowhere: never in silence

Every rank limits its own tokens, without communication, as Megatron-LM and GShard do; an expert then gets its capacity
from each rank of the group at most. A dropped choice has weight 0 and gradient 0, and the weights of a token's other
choices stay as they are: they are not normalised again.
"""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor

from fastpar.arguments import checked
from fastpar.ops.moe.permute import pair_positions

MAX_EXPERTS = 2**24  # tables of so many numbers are made without asking
POLICIES = ("probability", "position", "random")


@checked()
def expert_capacity(tokens: int, top_k: int, num_experts: int, *, factor: float, minimum: int = 0) -> int:
    """ceil(tokens * top_k / num_experts * factor), at least `minimum`: what an expert may get of so many tokens.

    The factor counts as the decimal number that it was written as: 10 tokens times 1.1 are 11 and not 12.
    """
    if not (factor > 0 and math.isfinite(factor)):
        raise ValueError(f"factor must be positive, got {factor}")
    if not 1 <= num_experts <= MAX_EXPERTS:
        raise ValueError(f"num_experts must be between 1 and {MAX_EXPERTS}, got {num_experts}")
    for name, value in (("tokens", tokens), ("top_k", top_k), ("minimum", minimum)):
        if value < 0:
            raise ValueError(f"{name} must not be negative, got {value}")
    return max(math.ceil(Fraction(tokens * top_k, num_experts) * Fraction(str(factor))), minimum)


@checked()
def moe_capacity(
    indices: Tensor,
    weights: Tensor | None = None,
    *,
    num_experts: int,
    factor: float | None = None,
    tokens: int | None = None,
    policy: str = "probability",
    minimum: int = 0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Indices with -1 for the choices that are over their expert's capacity.

        indices  [T, K]   int64 or int32; what is outside 0..num_experts - 1 stays as it is
        weights  [T, K]   for policy "probability"; not differentiated
        out      [T, K]   in the dtype of indices

    Args:
        factor: the capacity is that of `expert_capacity`, of this rank's tokens.
        tokens: or so many.
        policy: which choices of an expert stay: "probability" those with the largest weights (of equal ones the first,
            NaN last), "position" the first tokens, "random" any.
        minimum: of the capacity, whatever the factor says.
        generator: for "random"; it decides alone, so the same state gives the same choices.

    Worked example: indices [[0], [0], [1], [0]], weights [[.5], [.9], [.8], [.7]], tokens=2: by probability
    [[-1], [0], [1], [0]], by position [[0], [0], [1], [-1]].
    """
    capacity = _capacity(indices, num_experts, factor, tokens, minimum)
    if policy not in POLICIES:
        raise ValueError(f"policy must be one of {', '.join(POLICIES)}, got {policy!r}")
    pairs = indices.reshape(-1)
    best_first = None
    if policy == "probability":
        if weights is None or weights.shape != indices.shape:
            raise ValueError(
                f"policy='probability' needs weights of the shape of indices, {tuple(indices.shape)}, "
                f"got {None if weights is None else tuple(weights.shape)}"
            )
        flat = weights.detach().reshape(-1)
        best_first = torch.argsort(torch.where(flat.isnan(), -torch.inf, flat), descending=True, stable=True)
    elif policy == "random":
        device = indices.device if generator is None else generator.device
        best_first = torch.randperm(len(pairs), generator=generator, device=device).to(indices.device)
    ranked = pairs if best_first is None else pairs[best_first]
    positions, _ = pair_positions(ranked[:, None], num_experts)
    kept = torch.where(positions.view(-1) >= capacity, -1, ranked)
    if best_first is None:
        return kept.view(indices.shape)
    out = torch.empty_like(pairs)
    out[best_first] = kept
    return out.view(indices.shape)


def _capacity(indices: Tensor, num_experts: int, factor: float | None, tokens: int | None, minimum: int) -> int:
    if indices.ndim != 2 or indices.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"indices must be [T, K] of int64 or int32, got {tuple(indices.shape)} {indices.dtype}")
    if not 1 <= num_experts <= MAX_EXPERTS:
        raise ValueError(f"num_experts must be between 1 and {MAX_EXPERTS}, got {num_experts}")
    if (factor is None) == (tokens is None):
        raise ValueError(f"give either factor or tokens, got factor={factor} and tokens={tokens}")
    if tokens is not None:
        if tokens < 0:
            raise ValueError(f"tokens must not be negative, got {tokens}")
        return max(tokens, minimum)
    assert factor is not None
    num_tokens, top_k = indices.shape
    # More than all choices is no limit, and need not fit a tensor's numbers.
    wanted = expert_capacity(num_tokens, top_k, num_experts, factor=factor, minimum=minimum)
    return min(wanted, num_tokens * top_k)
