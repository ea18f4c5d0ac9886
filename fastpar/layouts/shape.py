"""`ModelShape`: the numbers of a decoder that layouts, costs and memory depend on. No weights, no torch."""

from __future__ import annotations

from dataclasses import dataclass

from fastpar.arguments import checked_fields


@checked_fields
@dataclass(frozen=True)
class ExpertShape:
    """The experts of a layer.

    experts       routed experts of a layer; `top_k` of them see a token
    ffn           inner size of each
    shared_ffn    inner size of what every token sees beside them; 0: nothing
    dense_layers  layers at the front that have a dense MLP of `ModelShape.ffn` instead
    """

    experts: int
    top_k: int
    ffn: int
    shared_ffn: int = 0
    dense_layers: int = 0

    def __post_init__(self) -> None:
        for name in ("experts", "top_k", "ffn"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if min(self.shared_ffn, self.dense_layers) < 0:
            raise ValueError(f"shared_ffn and dense_layers must not be negative, got {self}")
        if self.top_k > self.experts:
            raise ValueError(f"top_k ({self.top_k}) must be at most the number of experts ({self.experts})")


@checked_fields
@dataclass(frozen=True)
class ModelShape:
    """A stack of equal decoder layers between an embedding and a head.

    layers, hidden, ffn, vocab   as their names say; `gated`: the MLP has two projections inwards
    heads, kv_heads, head_dim    of attention; head_dim 0: hidden / heads
    tied                         the head's weight is the embedding's
    dropout                      residual and attention dropout are active in training
    experts                      None: a dense model

    >>> ModelShape("gpt-22B", layers=48, hidden=6144, ffn=24576, vocab=51200, heads=64, tied=True).parameters
    22058440704
    """

    name: str
    layers: int
    hidden: int
    ffn: int
    vocab: int
    heads: int
    kv_heads: int = 0
    head_dim: int = 0
    gated: bool = False
    tied: bool = False
    dropout: bool = False
    experts: ExpertShape | None = None

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "vocab", "heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.ffn < 1 and (self.experts is None or self.experts.dense_layers):
            raise ValueError(f"ffn must be at least 1, got {self.ffn}")
        if not self.head_dim and self.hidden % self.heads:
            raise ValueError(f"hidden ({self.hidden}) must be divisible by heads ({self.heads}), or give head_dim")
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        object.__setattr__(self, "head_dim", self.head_dim or self.hidden // self.heads)

    @property
    def num_experts(self) -> int:
        """Routed experts of a layer; 0 in a dense model."""
        return self.experts.experts if self.experts else 0

    @property
    def attention_parameters(self) -> int:
        """Matrices of attention in one layer: queries, keys, values, output."""
        return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    def mlp_parameters(self, ffn: int) -> int:
        """Matrices of an MLP with this inner size."""
        return (3 if self.gated else 2) * self.hidden * ffn

    @property
    def expert_parameters(self) -> int:
        """Matrices of all routed experts of one layer."""
        return self.experts.experts * self.mlp_parameters(self.experts.ffn) if self.experts else 0

    @property
    def dense_layer_parameters(self) -> int:
        """Matrices and norms of a layer, without routed experts, in the layers that have those."""
        small = 2 * self.hidden  # norms; biases are left out
        if self.experts is None:
            return self.attention_parameters + self.mlp_parameters(self.ffn) + small
        shared = self.mlp_parameters(self.experts.shared_ffn) + self.hidden * self.experts.experts
        return self.attention_parameters + shared + small

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embedding, and of a head of its own as much again."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """All of them; biases and learned positions left out."""
        dense = self.experts.dense_layers if self.experts else 0
        first = dense * (self.attention_parameters + self.mlp_parameters(self.ffn) + 2 * self.hidden)
        rest = (self.layers - dense) * (self.dense_layer_parameters + self.expert_parameters)
        return first + rest + self.embedding_parameters * (1 if self.tied else 2) + self.hidden
