"""Configurations of transformers as shapes of the planner: read by cause, or refused."""

import dataclasses
import json
from pathlib import Path

import pytest

from fastpar.layouts import ExpertShape
from fastpar.planner import find_model
from fastpar.planner.configurations import shape_of_config


def test_configurations_of_transformers_give_shapes(tmp_path: Path) -> None:
    import transformers

    llama = transformers.LlamaConfig(num_key_value_heads=8)
    assert find_model(llama) == shape_of_config(llama.to_dict())
    assert find_model(llama).gated
    gpt2 = find_model(transformers.GPT2Config())
    assert (gpt2.gated, gpt2.tied, gpt2.parameters) == (False, True, find_model("gpt2").parameters)
    mixtral = find_model(transformers.MixtralConfig())
    assert mixtral.experts == ExpertShape(8, 2, 14336)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(llama.to_dict()))
    assert dataclasses.replace(find_model(path), name="llama") == dataclasses.replace(find_model(llama), name="llama")
    assert find_model(str(tmp_path)) == find_model(path)
    with pytest.raises(ValueError, match="latent attention"):
        find_model(transformers.DeepseekV3Config())


def test_nested_configurations_give_the_decoder_and_say_what_was_left_out() -> None:
    import transformers

    dbrx = transformers.DbrxConfig(
        d_model=512, n_heads=8, n_layers=3, attn_config={"kv_n_heads": 2},
        ffn_config={"ffn_hidden_size": 768, "moe_num_experts": 4, "moe_top_k": 2},
    )  # fmt: skip
    shape = find_model(dbrx)
    assert (shape.heads, shape.ffn, shape.gated, shape.experts) == (8, 768, True, ExpertShape(4, 2, 768))
    text = transformers.LlamaConfig().to_dict()
    llava = {"model_type": "llava", "text_config": text, "vision_config": {"hidden_size": 8, "num_hidden_layers": 2}}
    assert find_model(llava).name == "llava (without vision_config)"
    assert find_model(llava).parameters == find_model(text).parameters
    deeper = {"thinker_config": {"text_config": text, "audio_config": {"d_model": 8, "num_layers": 2}}}
    assert find_model(deeper).parameters == find_model(text).parameters


LLAMA: dict = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 100}
LLAMA |= {"intermediate_size": 128, "rms_norm_eps": 1e-6}


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        ({"is_encoder_decoder": True}, "encoder beside"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"mamba_d_state": 16}, "mamba_d_state"),
        ({"kv_lora_rank": 8}, "latent"),
        ({"intermediate_size": [64, 128]}, "layers are taken as equal"),
        ({"expert_count": 8}, "seems to have experts"),
        ({"num_experts": 8}, "none of num_experts_per_tok"),
        ({"num_experts": 8, "num_experts_per_tok": 2, "decoder_sparse_step": 2}, "some layers only"),
        ({"num_experts": 8, "num_experts_per_tok": 2, "mlp_only_layers": [2]}, "at the front only"),
        ({"num_experts": 8, "num_experts_per_tok": 2, "mlp_layer_types": ["sparse", "dense"]}, "at the front only"),
        ({"num_experts": 8, "num_experts_per_tok": 2, "moe_layer_end_index": 2}, "last layers"),
        ({"hidden_size": None, "a": {**LLAMA}, "b": {**LLAMA}}, "several decoders"),
    ],
)
def test_configurations_that_are_not_understood_are_refused(more: dict, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        find_model({**LLAMA, **more})


def test_leading_dense_layers_and_activations_are_read() -> None:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    for more in ({"mlp_only_layers": [0, 1]}, {"moe_layer_start_index": 2}, {"mlp_layer_types": ["dense"] * 2 + ["x"]}):
        assert find_model({**LLAMA, **experts, **more}).experts == ExpertShape(8, 2, 32, dense_layers=2), more
    assert find_model({**LLAMA, **experts, "is_moe": False}).experts is None
    words = {"silu": True, "relu2": False, "gelu_pytorch_tanh": True}
    assert {word: find_model({**LLAMA, "hidden_act": word}).gated for word in words} == words


def test_a_module_that_is_larger_than_its_configuration_reads_is_refused() -> None:
    import torch
    import transformers

    with torch.device("meta"):
        llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
    assert find_model(llama) == find_model(llama.config)
    llama.extra = torch.nn.Linear(512, 512)
    with pytest.raises(ValueError, match="the module has"):
        find_model(llama)


@pytest.mark.slow
def test_causal_models_of_transformers_are_read_within_10_percent_or_refused() -> None:
    """Numbers of parameters, of default configurations on the meta device. What is off, has towers or stacks beside."""
    import torch
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    ratios = {}
    for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            config = transformers.CONFIG_MAPPING[name]()
            shape = find_model(config)
            with torch.device("meta"):
                model = transformers.AutoModelForCausalLM.from_config(config)
        except Exception:  # a default that transformers itself cannot build, or a refusal
            continue
        ratios[name] = shape.parameters / sum(each.numel() for each in model.parameters())
    off = {name for name, ratio in ratios.items() if abs(ratio - 1) > 0.1}
    assert len(ratios) >= 90
    assert len(off) <= 0.13 * len(ratios), off
