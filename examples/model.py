"""A small Llama-style decoder in plain PyTorch, with the module names of Hugging Face's Llama.

The model knows nothing about parallelism; `fastpar.parallelize` swaps its linear and embedding layers in place, and
spreads its experts where it has some (`num_experts`; Mixtral's routing, `fastpar.expert.Router`). Two
habits make that possible, and are all that a model of yours needs:

- attention reads its number of heads off the projections' output (`view(batch, seq, -1, head_dim)`), so a projection
  that holds half of the heads simply yields half of them;
- positions come from `position_ids` or `input_ids`, not from the hidden states: under sequence parallelism the hidden
  states between the blocks are this rank's part of the sequence, and whole again only inside `self_attn` and `mlp`.

Where sequences are split over ranks (cp), `PLAN` says which module sees other tokens; "auto" finds the rest of it.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastpar.expert import LossRule, Router, preset


@dataclass(frozen=True)
class LlamaConfig:
    """Shape of the decoder. Names as in Hugging Face's `LlamaConfig`; sizes must divide as the errors below say."""

    vocab_size: int = 256
    hidden_size: int = 256
    intermediate_size: int = 704
    num_hidden_layers: int = 4
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    dropout: float = 0.0
    tie_word_embeddings: bool = False
    num_experts: int = 0  # in every layer; 0: one dense MLP
    num_experts_per_tok: int = 2
    router_aux_loss_coef: float = 0.01

    def __post_init__(self) -> None:
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        sizes = (self.vocab_size, self.hidden_size, self.intermediate_size, self.num_hidden_layers, heads, kv_heads)
        if min(sizes) < 1:
            raise ValueError(f"every size of the model must be at least 1, got {self}")
        if self.hidden_size % heads or self.head_dim % 2:
            raise ValueError(
                f"hidden_size ({self.hidden_size}) must be num_attention_heads ({heads}) times an even number: "
                "rotary embedding turns the features of a head in pairs"
            )
        if self.num_experts and not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise ValueError(
                f"num_experts_per_tok ({self.num_experts_per_tok}) must be 1 to num_experts ({self.num_experts})"
            )
        if heads % kv_heads:
            raise ValueError(f"num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({kv_heads})")

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


def rotary_tables(positions: Tensor, head_dim: int, theta: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [batch, 1, seq, head_dim] of `position * theta ** (-2 i / head_dim)`, both halves alike.

    positions [batch, seq], or [1, seq] for all sequences alike.

    The angles are computed in at least fp32 whatever the model's dtype: bf16 cannot tell position 257 from 258.
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    exponent = torch.arange(0, head_dim, 2, device=like.device, dtype=dtype) / head_dim
    angles = (positions.to(dtype)[:, None, :, None] * theta**-exponent).repeat(1, 1, 1, 2)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn feature pairs (i, i + head_dim / 2) of x [batch, heads, seq, head_dim] by their position's angle."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class CoreAttention(nn.Module):
    """softmax(q k^T) v: the one place where tokens see each other."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


class Attention(nn.Module):
    """Causal self-attention with grouped-query heads: each key/value head serves heads / kv_heads query heads."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.core_attention = CoreAttention()

    def forward(self, hidden_states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """hidden_states [batch, seq, hidden] -> [batch, seq, hidden]."""
        batch, seq_len, _ = hidden_states.shape

        def split_heads(x: Tensor) -> Tensor:
            return x.view(batch, seq_len, -1, self.head_dim).transpose(1, 2)

        query = apply_rotary(split_heads(self.q_proj(hidden_states)), cos, sin)
        key = apply_rotary(split_heads(self.k_proj(hidden_states)), cos, sin)
        value = split_heads(self.v_proj(hidden_states))
        out = self.core_attention(query, key, value)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(hidden_states)) * self.up_proj(hidden_states))


class Experts(nn.Module):
    """Stacked SwiGLU experts, under Hugging Face's names: gate_up_proj [E, 2I, H], down_proj [E, H, I]."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        experts, hidden, inner = config.num_experts, config.hidden_size, config.intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, inner))
        self.act_fn = nn.SiLU()

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states [T, H], the experts of each token and their weights [T, K] -> [T, H]."""
        out = torch.zeros_like(hidden_states)
        for expert, (gate_up, down) in enumerate(zip(self.gate_up_proj, self.down_proj, strict=True)):
            tokens, choice = torch.where(top_k_index == expert)
            gate, up = F.linear(hidden_states[tokens], gate_up).chunk(2, -1)
            rows = F.linear(self.act_fn(gate) * up, down) * top_k_weights[tokens, choice, None].to(out.dtype)
            out = out.index_add(0, tokens, rows)
        return out


class MoE(nn.Module):
    """A router and the experts that it sends each token to."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        rule = preset("mixtral").routing(top_k=config.num_experts_per_tok).rule
        coeff = config.router_aux_loss_coef
        losses = LossRule("global_batch", coeff) if coeff else None
        self.gate = Router(config.hidden_size, config.num_experts, rule, losses=losses)
        self.experts = Experts(config)

    def forward(self, hidden_states: Tensor) -> Tensor:
        tokens = hidden_states.flatten(0, 1)
        routing = self.gate(tokens)
        return self.experts(tokens, routing.indices, routing.weights).view_as(hidden_states)


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = MoE(config) if config.num_experts else MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden_states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        attended = self.self_attn(self.input_layernorm(hidden_states), cos, sin)
        hidden_states = hidden_states + self.dropout(attended)
        return hidden_states + self.dropout(self.mlp(self.post_attention_layernorm(hidden_states)))


PLAN = {
    "embed_tokens": "vocab",
    "layers.*": "stream",
    "layers.*.self_attn": "block",
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.v_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.self_attn.core_attention": "attention",
    "layers.*.mlp": "block",
    "layers.*.mlp.gate_proj": "colwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
    "lm_head": "vocab",
}  # of a model without experts


class Llama(nn.Module):
    """Decoder-only language model: input_ids [batch, seq] int64 -> logits [batch, seq, vocab].

    position_ids [batch, seq] or [1, seq]; None: 0, 1, 2, ...
    After `fastpar.parallelize` the last dimension is this rank's shard of the vocabulary.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weights that keep every activation near unit size and let the first prediction be uniform.

        Linear weights come from N(0, 1 / fan_in), divided by sqrt(2 * layers) where they write to the residual stream,
        so that its variance does not grow with depth. Without tying, the head comes from N(0, 0.02^2) and the embedding
        from N(0, 1): at 0.02, a step of Adam at lr 3e-3 turns its rows so far that training is chaotic, and the losses
        of two runs that differ in rounding alone are 0.05 apart after 30 steps, instead of 5e-7.
        """
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue  # norms stay at one
            std = parameter.size(-1) ** -0.5
            if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
                std /= math.sqrt(2 * self.config.num_hidden_layers)
            elif not self.config.tie_word_embeddings:
                std = {"embed_tokens.weight": 1.0, "lm_head.weight": 0.02}.get(name, std)
            nn.init.normal_(parameter, std=std)

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        hidden_states = self.embed_tokens(input_ids)
        if position_ids is None:
            position_ids = torch.arange(input_ids.size(1), device=input_ids.device)[None]
        cos, sin = rotary_tables(position_ids, self.config.head_dim, self.config.rope_theta, like=hidden_states)
        for layer in self.layers:
            hidden_states = layer(hidden_states, cos, sin)
        return self.lm_head(self.norm(hidden_states))
