"""Feed-forward experts in plain PyTorch: each expert on the tokens that chose it, one expert after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

ACTIVATIONS = ("swiglu", "geglu", "clamped_swiglu", "gelu", "relu", "relu2", "silu")
_GATED = ("swiglu", "geglu", "clamped_swiglu")
WEIGH = ("after", "before", "input")


@dataclass(frozen=True)
class ExpertRule:
    """What an expert computes, and how its weights lie.

    activation    gated: "swiglu" silu(gate) * up, "geglu" gelu(gate) * up, "clamped_swiglu" as in gpt-oss: gate at most
                  `limit`, up within it, (up + 1) * gate * sigmoid(alpha * gate); else "gelu", "relu", "relu2", "silu"
    weigh         where a choice's weight comes in: "after" the last product, "before" it (on the activation),
                  "input": on the token
    transposed    weights are [E, in, out] and not [E, out, in]
    interleaved   gate and up alternate along the features; else first all of gate, then all of up
    limit, alpha  of clamped_swiglu
    """

    activation: str = "swiglu"
    weigh: str = "after"
    transposed: bool = False
    interleaved: bool = False
    limit: float = 7.0
    alpha: float = 1.702

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {self.activation!r}")
        if self.weigh not in WEIGH:
            raise ValueError(f"weigh must be one of {', '.join(WEIGH)}, got {self.weigh!r}")
        if self.interleaved and not self.is_gated:
            raise ValueError(f"interleaved is for gated activations, not {self.activation!r}")

    @property
    def is_gated(self) -> bool:
        """Whether the first product has twice the features of the second's input."""
        return self.activation in _GATED


def check_experts(
    x: Tensor,
    weights: Tensor,
    first: Tensor,
    second: Tensor,
    first_bias: Tensor | None,
    second_bias: Tensor | None,
    rule: ExpertRule,
) -> Exception | None:
    """What is wrong with the experts' parameters, if anything. Not raised here: other ranks may have to be told."""
    named = {"first": first, "second": second, "first_bias": first_bias, "second_bias": second_bias}
    for name, tensor in named.items():
        if tensor is None:
            continue
        if hasattr(tensor, "device_mesh"):
            return TypeError(f"{name} must be a plain tensor, got a DTensor: pass {name}.to_local()")
        if tensor.dtype != x.dtype:
            return TypeError(
                f"{name} must have the dtype of x ({x.dtype}; torch.autocast converts), got {tensor.dtype}"
            )
        if tensor.device != x.device:
            return ValueError(f"{name} must be on the device of x, {x.device}, got {tensor.device}")
    if not weights.is_floating_point():
        return TypeError(f"weights must have a floating dtype, got {weights.dtype}")
    if first.ndim != 3 or second.ndim != 3:
        return ValueError(f"first and second must be [E, .., ..], got {tuple(first.shape)} and {tuple(second.shape)}")
    num_experts, hidden = len(first), x.shape[-1] if x.ndim else 0
    inner = second.shape[1 if rule.transposed else 2]
    outer = 2 * inner if rule.is_gated else inner
    shapes = {
        "first": (num_experts, hidden, outer) if rule.transposed else (num_experts, outer, hidden),
        "second": (num_experts, inner, hidden) if rule.transposed else (num_experts, hidden, inner),
        "first_bias": (num_experts, outer),
        "second_bias": (num_experts, hidden),
    }
    for name, tensor in named.items():
        if tensor is not None and tensor.shape != shapes[name]:
            return ValueError(
                f"{name} must be {shapes[name]} for x {tuple(x.shape)}, second {tuple(second.shape)} and {rule}, "
                f"got {tuple(tensor.shape)}"
            )
    return None


def activate(hidden: Tensor, rule: ExpertRule) -> Tensor:
    """[.., 2 I] (gated) or [.., I] to [.., I]."""
    if not rule.is_gated:
        functions: dict[str, Callable[[Tensor], Tensor]] = {
            "gelu": functional.gelu,
            "relu": functional.relu,
            "relu2": lambda x: functional.relu(x).square(),
            "silu": functional.silu,
        }
        return functions[rule.activation](hidden)
    gate, up = (hidden[..., ::2], hidden[..., 1::2]) if rule.interleaved else hidden.chunk(2, -1)
    if rule.activation == "swiglu":
        return functional.silu(gate) * up
    if rule.activation == "geglu":
        return functional.gelu(gate) * up
    gate, up = gate.clamp(max=rule.limit), up.clamp(-rule.limit, rule.limit)
    return (up + 1) * gate * torch.sigmoid(rule.alpha * gate)


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
