"""Shapes from configurations of transformers: `shape_of_config`. What is not understood is refused, not passed over.

Note: what a configuration does not say. Whether MLPs are gated is code: where there is no "gated", those with SiLU
count as gated, those with ReLU and its like not, and of others those of models with RMSNorm. A module says more than
its configuration: `find_model` compares the numbers of parameters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from fastpar.layouts import ExpertShape, ModelShape

_KEYS = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "ffn": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "dff"),
    "vocab": ("vocab_size",),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "kv_heads": ("num_key_value_heads", "kv_n_heads", "num_kv_heads", "n_head_kv"),
    "head_dim": ("head_dim", "kv_channels"),
}
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts", "n_experts")
_TOP_K = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "experts_per_token",
    "moe_top_k",
    "moe_topk",
    "moe_k",
    "top_k",
)
_STEPS = (
    "decoder_sparse_step", "moe_layer_interval", "moe_layer_freq", "expert_layer_period", "interleave_moe_layer_step"
)  # fmt: skip
_SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
_ACTIVATION = ("hidden_act", "hidden_activation", "activation_function", "activation", "ffn_act_fn")
_ATTENTION = ("attention", "full_attention", "sliding_attention", "chunked_attention", "global", "local")
_OTHER_LAYERS = re.compile(r"mamba_|ssm_|linear_(num|attn|key|value)|lru_|attn_layer_period")


def shape_of_config(config: Mapping[str, Any], name: str = "") -> ModelShape:
    """The shape that a configuration of transformers describes.

    A decoder inside a configuration of several models is found (`text_config`, say), and the name says what was left
    out. Layers are taken as equal. ValueError: no decoder, or several; numbers that are missing, or that differ from
    layer to layer; an encoder beside the decoder; layers without attention, or with latent attention; experts in some
    layers only, but for the first; experts under names that are not known.
    """
    if config.get("is_encoder_decoder"):
        raise ValueError("model: an encoder beside the decoder (is_encoder_decoder) is not among what it knows")
    own, left_out = _decoder_of(config)
    _refuse_unknown_layers(own)
    found: dict[str, Any] = {field: _number(own, field, keys) for field, keys in _KEYS.items()}
    if own.get("multi_query") and not own.get("new_decoder_architecture"):
        found["kv_heads"] = 1
    if found["ffn"] is None and found["hidden"] is not None:
        found["ffn"] = 4 * found["hidden"]
    for field in ("layers", "hidden", "vocab", "heads"):
        if found[field] is None:
            raise ValueError(f"model: the configuration has none of {', '.join(_KEYS[field])}")
    experts = _experts_of(own, found["ffn"] or 0, found["layers"] or 0)
    made: dict[str, Any] = {field: value for field, value in found.items() if value is not None}
    called = name or str(config.get("model_type") or "model")
    return ModelShape(
        called + (f" (without {', '.join(left_out)})" if left_out else ""),
        **made,
        gated=_is_gated(own),
        tied=bool(own.get("tie_word_embeddings", "rms_norm_eps" not in own)),
        experts=experts,
    )


def _decoder_of(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The decoder's numbers, those of its parts (attn_config) included, and the names of other models beside it."""
    towers = dict(_towers(config))
    if _has(config, "layers") and _has(config, "hidden"):
        path, own = "", config
    else:
        decoders = {path: each for path, each in towers.items() if _has(each, "vocab")}
        texts = {path: each for path, each in decoders.items() if path.rpartition(".")[2] == "text_config"}
        chosen = texts if len(texts) == 1 else decoders
        if len(chosen) > 1:
            raise ValueError(f"model: the configuration has several decoders: give one of {', '.join(chosen)} alone")
        path, own = next(iter(chosen.items()), ("", config))
    if own.get("is_encoder_decoder"):
        raise ValueError(f"model: {path} has an encoder beside its decoder, which is not among what the planner knows")
    parts = [each for each in own.values() if isinstance(each, Mapping) and not _has(each, "layers")]
    merged = {key: value for part in parts for key, value in part.items() if isinstance(key, str)}
    return {**merged, **own}, [each for each in towers if each != path]


def _towers(config: Mapping[str, Any], where: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Nested configurations that are models of their own, by their paths."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            if _has(value, "layers") and _has(value, "hidden"):
                yield where + key, value
            yield from _towers(value, f"{where}{key}.")


def _has(config: Mapping[str, Any], field: str) -> bool:
    return any(config.get(key) is not None for key in _KEYS[field])


def _number(config: Mapping[str, Any], field: str, keys: tuple[str, ...]) -> int | None:
    key = next((key for key in keys if config.get(key) is not None), None)
    if key is None:
        return None
    values = config[key] if isinstance(config[key], (list, tuple)) else [config[key]]
    if len(set(values)) != 1 or not isinstance(values[0], int):
        raise ValueError(f"model: layers are taken as equal, but {key} ({field}) is {config[key]!r}")
    return int(values[0])


def _refuse_unknown_layers(config: Mapping[str, Any]) -> None:
    """Layers whose costs are not known."""
    if config.get("kv_lora_rank"):
        raise ValueError("model: latent attention (kv_lora_rank) is not among what the planner knows the costs of")
    if config.get("hidden_size_per_layer_input"):
        raise ValueError("model: embeddings of every layer (hidden_size_per_layer_input) are not among what it knows")
    for key in ("layer_types", "layers_block_type", "block_types"):
        others = [str(each) for each in dict.fromkeys(config.get(key) or ()) if each not in _ATTENTION]
        if others:
            raise ValueError(f"model: layers of {', '.join(others)} ({key}) are not among what the planner knows")
    others = [key for key, value in config.items() if _OTHER_LAYERS.match(key) and value]
    if others:
        raise ValueError(f"model: layers without attention ({', '.join(others[:3])}) are not among what it knows")


def _is_gated(config: Mapping[str, Any]) -> bool:
    if "gated" in config:
        return bool(config["gated"])
    word = next((config[key] for key in _ACTIVATION if config.get(key) is not None), "")
    word = str(word.get("name", "") if isinstance(word, Mapping) else word).lower()
    if "relu" in word or "xielu" in word:
        return False
    return "silu" in word or "swi" in word or "rms_norm_eps" in config


def _experts_of(config: Mapping[str, Any], dense_ffn: int, layers: int) -> ExpertShape | None:
    count = next((config[key] for key in _EXPERTS if config.get(key)), 0)
    if config.get("is_moe") is False or count <= 1:
        unknown = [
            key
            for key, value in config.items()
            if "expert" in key and isinstance(value, int) and value > 1 and key not in (*_EXPERTS, *_TOP_K, *_SHARED)
        ]
        if unknown and config.get("is_moe") is not False and count == 0:
            raise ValueError(f"model: it seems to have experts ({', '.join(unknown)}), but not how many of them")
        return None
    top_k = next((config[key] for key in _TOP_K if config.get(key)), 0)
    if not top_k:
        raise ValueError(f"model: it has {count} experts, but none of {', '.join(_TOP_K)}")
    ffn = config.get("moe_intermediate_size") or dense_ffn
    shared = config.get("shared_expert_intermediate_size") or config.get("shared_intermediate_size")
    if not shared:
        shared = ffn * next((config[key] for key in _SHARED if config.get(key)), 0)
    return ExpertShape(count, top_k, ffn, shared, _dense_layers(config, layers))


def _dense_layers(config: Mapping[str, Any], layers: int) -> int:
    """Layers at the front without experts; ValueError where others have none."""
    for key in _STEPS:
        step = config.get(key) or 1
        if isinstance(step, int) and step > 1:
            raise ValueError(f"model: experts in some layers only ({key} {step}) are not among what the planner knows")
    if config.get("moe_layer_end_index") not in (None, -1, layers - 1):
        raise ValueError(
            f"model: the last layers have no experts (moe_layer_end_index {config['moe_layer_end_index']})"
        )
    kinds = config.get("mlp_layer_types") or config.get("moe_layer_freq")
    dense = [index for index, kind in enumerate(kinds) if kind in ("dense", 0)] if isinstance(kinds, list) else []
    dense = dense or sorted(config.get("mlp_only_layers") or ())
    if dense != list(range(len(dense))):
        raise ValueError(f"model: layers {dense} have no experts: the planner knows such layers at the front only")
    return len(dense) or config.get("first_k_dense_replace") or config.get("moe_layer_start_index") or 0
