"""Tiny models with awkward sizes, for tests that compare a parallel model with the unsharded one.

Vocabulary 257 and feed-forward width 70 do not divide by 3 and 4 (257 not by 2 either); 12 query heads divide by all
sizes up to 4, while the key/value heads (4; 2 for Mistral) do not divide by 3 (and 4), so that ranks share them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

ARCHITECTURES = ("example", "llama", "qwen3", "mistral", "gpt2")
VOCAB = 257


def build_model(architecture: str, dtype: torch.dtype, seed: int = 0, **overrides: Any) -> nn.Module:
    """A random-weight model, the same on every rank; norms and biases are random too, so that errors show."""
    torch.manual_seed(seed)
    model = _example(**overrides) if architecture == "example" else _huggingface(architecture, **overrides)
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() == 1:
                param.add_(torch.randn_like(param) * 0.3)
    return model.to(dtype).train()


def _example(**overrides: Any) -> nn.Module:
    from examples.model import Llama, LlamaConfig

    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 70,
        "num_hidden_layers": 2,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
    }
    return Llama(LlamaConfig(**(sizes | overrides)))


def _huggingface(architecture: str, **overrides: Any) -> nn.Module:
    import transformers

    if architecture == "gpt2":
        sizes: dict[str, Any] = {"n_embd": 48, "n_head": 12, "n_layer": 2, "n_positions": 64, "vocab_size": VOCAB}
        sizes |= {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "n_inner": 70}
        sizes |= {"bos_token_id": 0, "eos_token_id": 0}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**(sizes | overrides)))
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 70,
        "num_hidden_layers": 2,
        "num_attention_heads": 12,
        "num_key_value_heads": 2 if architecture == "mistral" else 4,
        "head_dim": 4,
        "max_position_embeddings": 64,
        "attention_bias": architecture == "llama",
        "tie_word_embeddings": architecture == "qwen3",
    }
    if architecture == "mistral":
        del sizes["attention_bias"]
    names = {"llama": "Llama", "qwen3": "Qwen3", "mistral": "Mistral"}
    config = getattr(transformers, names[architecture] + "Config")(**(sizes | overrides))
    return getattr(transformers, names[architecture] + "ForCausalLM")(config)


def logits_of(model: nn.Module, ids: Tensor) -> Tensor:
    out = model(ids)
    return out if isinstance(out, Tensor) else out.logits


@contextlib.contextmanager
def norms_in_their_own_dtype(model: nn.Module) -> Iterator[None]:
    """Let Hugging Face's RMSNorm classes compute in the input's dtype.

    They cast to float32 inside, which turns differences of 1e-16 between layouts into 1e-8 and would hide anything
    smaller from a float64 comparison.
    """

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))

    classes = {type(m) for m in model.modules() if hasattr(m, "variance_epsilon")}
    with contextlib.ExitStack() as stack:
        for cls in classes:
            stack.enter_context(mock.patch.object(cls, "forward", forward))
        yield
