"""Tiny models of every family of Hugging Face's causal and masked language models, from their configuration classes.

Nothing is downloaded. A configuration gets small values for whatever sizes it has (`_SIZES`), one layer of each kind
that its default has, and noise on every parameter, so that biases and norms are not 0 and 1.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

# Awkward where a size need not be even: 61 ids, 50 features of an MLP; six heads and six experts, for two and three.
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size",), 61),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embedding_size", "lru_width", "word_embed_proj_dim"), 48),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads"), 6),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "v_head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank"), 16),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "mlp_hidden_size"), 50),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 12),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers"), 2),
    **dict.fromkeys(("n_routed_experts", "num_experts", "num_local_experts"), 6),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "top_k_experts"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "first_k_dense_replace", "n_group", "topk_group"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_sequence_length"), 64),
    **dict.fromkeys(("linear_num_key_heads",), 6),
    **dict.fromkeys(("linear_num_value_heads",), 6),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("sliding_window",), 4),
    **dict.fromkeys(("attention_dropout", "hidden_dropout", "resid_pdrop", "attn_pdrop", "embd_pdrop", "dropout"), 0.0),
    **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "activation_dropout", "layerdrop"), 0.0),
    **dict.fromkeys(("residual_dropout", "embedding_dropout", "classifier_dropout", "router_jitter_noise"), 0.0),
    **dict.fromkeys(("input_jitter_noise", "ffn_dropout", "attn_dropout"), 0.0),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "sep_token_id", "cls_token_id"), 0),
}

# What the sizes above cannot know of a family: how its layers alternate, and sizes with names of their own.
_VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
_AUDIO = {"hidden_size": 32, "intermediate_size": 32, "num_blocks": 1, "num_attention_heads": 2}
_MAMBA = {"mamba_n_heads": 6, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 4}
_MORE: dict[str, dict[str, Any]] = {
    "aria_text": {"intermediate_size": 12, "moe_num_experts": 6, "moe_num_shared_experts": 1},
    "bamba": {**_MAMBA, "layer_types": None, "attn_layer_indices": [1]},
    "codegen": {"num_attention_heads": 12, "n_head": 12, "hidden_size": 96, "n_embd": 96},
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e4},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }
    },
    "dots3_note_text": {
        "head_dim": 16, "swa_head_dim": 16, "shared_experts_intermediate_size": 12, "index_head_dim": 16,
    },
    "esmc": {"num_key_value_heads": 6},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 96, "layer_types": None},
    "gemma3n_text": {
        "num_kv_shared_layers": 0, "intermediate_size": 50, "vocab_size_per_layer_input": 61,
        "hidden_size_per_layer_input": 8, "laurel_rank": 4, "activation_sparsity_pattern": None,
    },
    "gemma4_text": {
        "vocab_size_per_layer_input": 61, "hidden_size_per_layer_input": 8,
        "global_head_dim": 16, "moe_intermediate_size": 12,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 4},
    "granitemoehybrid": {**_MAMBA, "shared_intermediate_size": 50},
    "inkling2_text": {"unpadded_vocab_size": 61, "swa_head_dim": 8, "intermediate_size": 12},
    "inkling2_loop_text": {"unpadded_vocab_size": 61, "swa_head_dim": 8, "intermediate_size": 12},
    "kimi_linear": {"linear_head_dim": 8, "linear_num_heads": 6},
    "lfm2": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3, "num_dense_layers": 1},
    "mimo_v2_flash": {"num_key_value_heads": 3},
    "longcat_flash": {"zero_expert_num": 2, "n_routed_experts": 6},
    "minimax_m3_vl_text": {"dense_intermediate_size": 50, "shared_intermediate_size": 12, "index_head_dim": 8},
    "nemotron_h": {
        "mamba_num_heads": 6, "mamba_head_dim": 16, "ssm_state_size": 8, "chunk_size": 4, "n_groups": 2,
        "moe_shared_expert_intermediate_size": 12, "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
    },
    "deepseek_v4": {"index_head_dim": 8, "intermediate_size": 12},
    "neomme": {"head_dim": 16, "rope_parameters": None},
    "phi4_multimodal": {"vision_config": _VISION, "audio_config": _AUDIO},
    "qwen4_exp_text": {
        "indexer_budget": 4, "indexer_compress_ratio": 2, "indexer_n_heads": 6, "indexer_kv_heads": 1,
        "indexer_head_dim": 8, "hc_lowrank": 8, "ple_embed_dim": 8,
        "ngram_vocab_size_base": 50, "make_ngram_vocab_size_divisible_by": 4, "split_ngram_parts": 1,
    },
    "recurrent_gemma": {"layer_types": None, "block_types": ["recurrent", "attention"], "num_hidden_layers": 3},
}  # fmt: skip


def families() -> list[tuple[str, str, str]]:
    """(model type, class name, "causal" or "masked") of every family with a tp_plan, and of some that have none."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto import modeling_auto

    found = []
    for kind in ("causal", "masked"):
        names = {"causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES"}[kind]
        for model_type, name in getattr(modeling_auto, names).items():
            config = CONFIG_MAPPING[model_type]
            if "text_config" in getattr(config, "sub_configs", {}):
                continue  # its text model is a family of its own
            if getattr(config, "base_model_tp_plan", None) or (kind == "causal" and model_type in _WITHOUT_PLAN):
                found.append((model_type, name if isinstance(name, str) else name[0], kind))
    return found


_WITHOUT_PLAN = (
    "bamba", "biogpt", "bitnet", "bloom", "codegen", "diffllama", "falcon", "falcon_h1", "falcon_mamba", "gpt2",
    "gpt_bigcode", "gpt_neo", "gpt_neox_japanese", "gpt_oss", "gptj", "hunyuan_v1_dense", "jetmoe", "lfm2", "mamba",
    "modernbert-decoder", "mpt", "opt", "persimmon", "recurrent_gemma", "stablelm", "xglm",
)  # fmt: skip


def tiny_config(model_type: str) -> Any:
    from transformers import CONFIG_MAPPING

    cls = CONFIG_MAPPING[model_type]
    default = cls()
    known = set(inspect.signature(cls.__init__).parameters) | set(getattr(cls, "__dataclass_fields__", {}))
    known |= set(default.to_dict()) | set(getattr(cls, "attribute_map", {}))
    options = {name: value for name, value in _SIZES.items() if name in known}
    if "kv_lora_rank" in known:  # every head has keys and values of its own, made from what all share
        options["num_key_value_heads"] = options["num_attention_heads"]
    if "moe_intermediate_size" not in known and options.get("num_experts_per_tok"):
        options |= dict.fromkeys(("intermediate_size", "ffn_hidden_size"), 12)  # strides that grouped products take
        options = {name: value for name, value in options.items() if name in known}
    kinds = getattr(default, "layer_types", None)
    if isinstance(kinds, list | tuple) and "layer_types" in known:
        options["layer_types"] = (list(dict.fromkeys(kinds)) * 2)[: max(2, len(set(kinds)))]
        options["num_hidden_layers"] = len(options["layer_types"])
    for name in ("mlp_layer_types",):
        if name in known:
            kinds = list(dict.fromkeys(getattr(default, name) or []))
            options[name] = (kinds * 8)[: options.get("num_hidden_layers", 2)] if kinds else None
    for name, value in default.to_dict().items():  # such as `swa_q_lora_rank`: another kind of layer's
        like = next((size for size in _SIZES if name.endswith("_" + size)), None)
        if like is not None and name not in options and type(value) is int and value > 4 and name != "qk_head_dim":
            options[name] = _SIZES[like]
    if "per_layer_config" in known:
        options["per_layer_config"] = {}
    options |= _MORE.get(model_type, {})
    options = {name: value for name, value in options.items() if value is not None}
    return cls(**options)


def tiny_model(model_type: str, class_name: str, *, seed: int = 0, **sizes: Any) -> nn.Module:
    """A model of the family in float32, on noisy parameters, in training mode without dropout.

    sizes   of its configuration, in the place of the tiny ones
    """
    import transformers

    torch.manual_seed(seed)
    config = tiny_config(model_type)
    config.use_cache = False
    for name, value in sizes.items():
        setattr(config, name, value)
    model = getattr(transformers, class_name)(config)
    with torch.no_grad():
        for param in dict.fromkeys(model.parameters()):
            param.add_(torch.randn_like(param) * 0.1)
    return model.train()


def batch(vocab: int = 61, *, seed: int = 1) -> torch.Tensor:
    """[2, 7]: a sequence that neither two nor three ranks share evenly."""
    return torch.randint(1, vocab, (2, 7), generator=torch.Generator().manual_seed(seed))
