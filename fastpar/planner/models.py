"""Shapes of models by name, or from a configuration; no weights, no network, no torch."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastpar.layouts import ExpertShape, ModelShape


def _shape(name: str, layers: int, hidden: int, ffn: int, vocab: int, heads: int, **others: Any) -> ModelShape:
    return ModelShape(name, layers, hidden, ffn, vocab, heads, **{"gated": True, **others})


_GPT = {"gated": False, "tied": True}
# From the published configurations (config.json of each model; GPT-3: arXiv:2005.14165, table 2.1).
MODELS: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        _shape("gpt2", 12, 768, 3072, 50257, 12, **_GPT),
        _shape("gpt2-xl", 48, 1600, 6400, 50257, 25, **_GPT),
        _shape("gpt3-175b", 96, 12288, 49152, 50257, 96, **_GPT),
        _shape("llama-2-7b", 32, 4096, 11008, 32000, 32),
        _shape("llama-2-13b", 40, 5120, 13824, 32000, 40),
        _shape("llama-2-70b", 80, 8192, 28672, 32000, 64, kv_heads=8),
        _shape("llama-3-8b", 32, 4096, 14336, 128256, 32, kv_heads=8),
        _shape("llama-3-70b", 80, 8192, 28672, 128256, 64, kv_heads=8),
        _shape("llama-3.1-405b", 126, 16384, 53248, 128256, 128, kv_heads=8),
        _shape("mistral-7b", 32, 4096, 14336, 32000, 32, kv_heads=8),
        _shape("qwen2.5-7b", 28, 3584, 18944, 152064, 28, kv_heads=4),
        _shape("qwen2.5-72b", 80, 8192, 29568, 152064, 64, kv_heads=8),
        _shape("mixtral-8x7b", 32, 4096, 14336, 32000, 32, kv_heads=8, experts=ExpertShape(8, 2, 14336)),
        _shape("mixtral-8x22b", 56, 6144, 16384, 32768, 48, kv_heads=8, experts=ExpertShape(8, 2, 16384)),
        _shape("qwen3-30b-a3b", 48, 2048, 6144, 151936, 32, kv_heads=4, head_dim=128, experts=ExpertShape(128, 8, 768)),
        _shape(
            "qwen3-235b-a22b", 94, 4096, 12288, 151936, 64, kv_heads=4, head_dim=128, experts=ExpertShape(128, 8, 1536)
        ),
    )
}


def find_model(model: Any) -> ModelShape:
    """The shape of a model.

    model   a ModelShape; a name; the path of a config.json, or of the folder that has one; its numbers as a dict; a
            configuration of transformers; or a module that has one as `.config`

    Raises ValueError for an unknown name (with near misses), and for a configuration without the numbers that are
    needed, or with attention that costs are not known of.
    """
    if isinstance(model, ModelShape):
        return model
    if isinstance(model, (str, Path)):
        return _by_name(str(model))
    config = getattr(model, "config", model)
    to_dict = getattr(config, "to_dict", None)
    numbers = to_dict() if callable(to_dict) else config
    if not isinstance(numbers, Mapping):
        raise TypeError(
            f"model must be a name, a config.json, a configuration or a module with one, got {type(model).__name__}"
        )
    return shape_of_config(numbers)


def _by_name(text: str) -> ModelShape:
    path = Path(text)
    if path.suffix == ".json" or path.is_dir():
        path = path / "config.json" if path.is_dir() else path
        try:
            return shape_of_config(json.loads(path.read_text()), path.parent.name or path.stem)
        except (OSError, json.JSONDecodeError) as error:
            raise ValueError(f"model {text}: {error}") from error
    name = text.lower().rpartition("/")[2]
    name = name.removesuffix("-hf").removesuffix("-base").removeprefix("meta-")
    if name not in MODELS:
        near = difflib.get_close_matches(name, MODELS, n=3, cutoff=0.4)
        hint = f"; did you mean {' or '.join(near)}" if near else ""
        raise ValueError(
            f"there is no model {text!r}{hint}; there are {', '.join(MODELS)}, and any config.json of transformers"
        )
    return MODELS[name]


_KEYS = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "ffn": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "vocab": ("vocab_size",),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "head_dim": ("head_dim",),
}
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def shape_of_config(config: Mapping[str, Any], name: str = "") -> ModelShape:
    """The shape that a configuration of transformers describes.

    A configuration does not say whether MLPs are gated; where it has no "gated", models with RMSNorm count as gated and
    those with LayerNorm as not, which holds for nearly all. Layers are taken as equal.
    """
    text = config.get("text_config")
    if isinstance(text, Mapping) and "hidden_size" not in config:
        config = text
    if config.get("kv_lora_rank"):
        raise ValueError("model: latent attention (kv_lora_rank) is not among what the planner knows the costs of")
    found = {field: next((config[k] for k in keys if config.get(k) is not None), None) for field, keys in _KEYS.items()}
    if found["ffn"] is None and found["hidden"] is not None:
        found["ffn"] = 4 * found["hidden"]
    for field in ("layers", "hidden", "vocab", "heads"):
        if not isinstance(found[field], int):
            raise ValueError(f"model: the configuration has none of {', '.join(_KEYS[field])}")
    experts = _experts_of(config, found)
    made = {field: value for field, value in found.items() if value is not None}
    return ModelShape(
        name or str(config.get("model_type") or "model"),
        **made,
        gated=bool(config.get("gated", "rms_norm_eps" in config)),
        tied=bool(config.get("tie_word_embeddings", "rms_norm_eps" not in config)),
        experts=experts,
    )


def _experts_of(config: Mapping[str, Any], found: Mapping[str, Any]) -> ExpertShape | None:
    count = next((config[key] for key in _EXPERTS if config.get(key)), 0)
    if count <= 1:
        return None
    ffn = config.get("moe_intermediate_size") or found["ffn"]
    shared = config.get("shared_expert_intermediate_size") or ffn * (config.get("n_shared_experts") or 0)
    top_k = config.get("num_experts_per_tok") or config.get("top_k")
    if not top_k or (config.get("decoder_sparse_step") or 1) > 1 or config.get("mlp_only_layers"):
        raise ValueError(
            f"the planner knows experts in every layer but the first, with num_experts_per_tok: got {count} experts, "
            f"num_experts_per_tok {top_k}, decoder_sparse_step {config.get('decoder_sparse_step')}, mlp_only_layers "
            f"{config.get('mlp_only_layers')}"
        )
    return ExpertShape(count, top_k, ffn, shared, config.get("first_k_dense_replace") or 0)
