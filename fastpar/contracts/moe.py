"""Mixture of experts: what an expert computes and how experts are chosen, and the checks of both.

ExpertRule, activate, check_experts      of `moe_mlp`
RouteRule, Routing, check_routing        of `moe_route`
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

# ---- experts ---------------------------------------------------------------------------------------------------------

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


# ---- routing ---------------------------------------------------------------------------------------------------------

SCORES = ("softmax", "sigmoid", "sqrtsoftplus")
WHEN = ("before", "after")
GROUP_SCORES = ("top2", "top_k_over_groups", "max")
NOISE = ("none", "learned", "normal", "gumbel")
_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class RouteRule:
    """How experts are chosen and weighed.

    top_k        experts of a token
    score        "softmax", "sigmoid", "sqrtsoftplus"
    when         scores come "before" the choice, which is by score (softmax over all experts), or "after" it, which
                 then is by logit (softmax over the chosen ones)
    normalize    weights of a token sum to 1
    epsilon      added to their sum
    scale        of the weights
    num_groups   experts are in so many groups of neighbours, of which the best top_groups are chosen from
    group_score  "top2": the sum of a group's two best; "top_k_over_groups": of its best top_k / top_groups; "max"
    noise        for training: "learned", normal noise times a softplus of the token (Shazeer et al. 2017); "normal",
                 of deviation noise_scale; "gumbel", times noise_scale, in the choice only: with softmax and a scale
                 of 1, experts are drawn by their probabilities
    """

    top_k: int
    score: str = "softmax"
    when: str = "before"
    normalize: bool = False
    epsilon: float = 0.0
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_score: str = "top2"
    noise: str = "none"
    noise_scale: float = 1.0

    def __post_init__(self) -> None:
        for name, value, known in (
            ("score", self.score, SCORES),
            ("when", self.when, WHEN),
            ("group_score", self.group_score, GROUP_SCORES),
            ("noise", self.noise, NOISE),
        ):
            if value not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
        if self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {self.top_k}")
        if self.epsilon < 0:
            raise ValueError(f"epsilon must not be negative, got {self.epsilon}")
        if self.epsilon and not self.normalize:
            raise ValueError(f"epsilon ({self.epsilon}) is for normalize=True")
        if not 1 <= self.top_groups <= self.num_groups:
            raise ValueError(f"top_groups must be between 1 and num_groups ({self.num_groups}), got {self.top_groups}")

    def check_experts(self, num_experts: int) -> None:
        """Raises ValueError if the rule does not fit so many experts."""
        if self.top_k > num_experts:
            raise ValueError(
                f"top_k ({self.top_k}) must be at most the number of experts ({num_experts}), the columns of logits"
            )
        if num_experts % self.num_groups:
            raise ValueError(f"num_experts ({num_experts}) must be divisible by num_groups ({self.num_groups})")
        open_to = num_experts // self.num_groups * self.top_groups
        if self.top_k > open_to:
            raise ValueError(
                f"top_k ({self.top_k}) must be at most the experts of the top groups ({self.top_groups} groups of "
                f"{num_experts // self.num_groups}: {open_to})"
            )


@dataclass(frozen=True)
class Routing:
    """Where the tokens go.

    indices  int64 [T, K]      experts, best first; -1: nowhere
    weights  float32 [T, K]    (float64 for float64 logits); 0 where the index is -1
    counts   int64 [E]         tokens of each expert
    logits   float32 [T, E]    as they came, without noise; 0 where masked
    score    the rule's
    """

    indices: Tensor
    weights: Tensor
    counts: Tensor
    logits: Tensor
    score: str

    @property
    def scores(self) -> Tensor:
        """[T, E]: the scores over all experts, of sum 1, for balance losses. Computed whenever asked for."""
        return log_scores(self.logits, self.score).softmax(-1)


def log_scores(logits: Tensor, score: str) -> Tensor:
    """Logarithms of the scores, for softmax but for a summand per token. Finite, with gradients, for finite logits."""
    if score == "softmax":
        return logits
    if score == "sigmoid":
        return functional.logsigmoid(logits)
    # log(softplus(x)) is x - exp(x) / 2 + ..., so x to the last bit where softplus would lose or underflow
    small = logits < -20.0
    return 0.5 * torch.where(small, logits, functional.softplus(logits.masked_fill(small, 0.0)).log())


def check_routing(
    logits: Tensor, bias: Tensor | None, indices: Tensor | None, noise: Tensor | None, mask: Tensor | None
) -> None:
    """Raises TypeError or ValueError with the values if the tensors do not fit `moe_route`."""
    if logits.dtype not in _FLOATS:
        raise TypeError(f"logits must be one of {', '.join(map(str, _FLOATS))}, got {logits.dtype}")
    if logits.dim() != 2:
        raise ValueError(f"logits must be [tokens, experts], got shape {tuple(logits.shape)}")
    if bias is not None and bias.shape != logits.shape[1:]:
        raise ValueError(f"bias must have shape {tuple(logits.shape[1:])}, got {tuple(bias.shape)}")
    if noise is not None and noise.shape != logits.shape:
        raise ValueError(f"noise must have the shape of logits, {tuple(logits.shape)}, got {tuple(noise.shape)}")
    if mask is not None and (mask.dtype != torch.bool or mask.shape != logits.shape[:1]):
        raise ValueError(
            f"mask must be bool of shape {tuple(logits.shape[:1])}, got {mask.dtype} of {tuple(mask.shape)}"
        )
    if indices is None:
        return
    if indices.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"indices must be int64 or int32, got {indices.dtype}")
    if indices.dim() != 2 or len(indices) != len(logits):
        raise ValueError(f"indices must be [{len(logits)}, K], got shape {tuple(indices.shape)}")
