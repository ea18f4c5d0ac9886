"""Feed-forward experts in plain PyTorch: each expert on the tokens that chose it, one expert after the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from fastpar.contracts.moe import ExpertRule, activate


def expert_mlp(
    x: Tensor,
    first: Tensor,
    second: Tensor,
    first_bias: Tensor | None,
    second_bias: Tensor | None,
    row_weights: Tensor,
    rule: ExpertRule,
) -> Tensor:
    """One expert on rows x [n, H]; first [2I or I, H], second [H, I], unless transposed. Not yet weighed "after"."""
    scale = row_weights[:, None].to(x.dtype)
    if rule.transposed:
        first, second = first.T, second.T
    hidden = functional.linear(x * scale if rule.weigh == "input" else x, first, first_bias)
    activation = activate(hidden, rule)
    return functional.linear(activation * scale if rule.weigh == "before" else activation, second, second_bias)


def moe_mlp(
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    experts: Sequence[Tensor | None],
    *,
    rule: ExpertRule | None = None,
    add: Tensor | None = None,
) -> Tensor:
    """The experts of one process, token by token's choice, in the dtype of x. See `fastpar.ops.moe_mlp`."""
    rule = rule or ExpertRule()
    first, second, first_bias, second_bias = experts
    assert first is not None
    assert second is not None
    out = torch.zeros_like(x) if add is None else add
    for k in range(indices.shape[1]):
        for expert in range(len(first)):
            tokens = (indices[:, k] == expert).nonzero().flatten()
            first_b, second_b = (None if b is None else b[expert] for b in (first_bias, second_bias))
            chosen = weights[tokens, k]
            rows = expert_mlp(x[tokens], first[expert], second[expert], first_b, second_b, chosen, rule)
            if rule.weigh == "after":
                rows = rows * chosen[:, None].to(x.dtype)
            out = out.index_add(0, tokens, rows)
    return out
