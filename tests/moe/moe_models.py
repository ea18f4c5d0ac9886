"""Tiny mixture-of-experts models of Hugging Face, and what ranks of the tests do with them."""

from __future__ import annotations

import importlib
import warnings
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from fastpar.integrations import huggingface, huggingface_moe
from fastpar.parallel.stacked_experts import is_stacked, run_experts
from fastpar.tensor import full_parameter

VOCAB = 67
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 28,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_WIDTH = {"moe_intermediate_size": 20, "num_experts": 4}
_DEEPSEEK = {"moe_intermediate_size": 20, "n_routed_experts": 8, "n_group": 2, "topk_group": 1}
_DEEPSEEK |= {"first_k_dense_replace": 1, "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 8}
_DEEPSEEK |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "qwen2_moe": ("Qwen2Moe", _WIDTH | {"shared_expert_intermediate_size": 26, "mlp_only_layers": [1]}),
    "qwen3_moe": ("Qwen3Moe", _WIDTH | {"norm_topk_prob": True}),
    "olmoe": ("Olmoe", {"num_experts": 4}),
    "deepseek_v3": ("DeepseekV3", _DEEPSEEK),
    "gpt_oss": ("GptOss", {"num_local_experts": 4, "sliding_window": 4}),
    "llama4": ("Llama4", {"num_local_experts": 4, "intermediate_size_mlp": 30, "interleave_moe_layer_step": 2}),
}


def build(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """A model with random weights, large enough that every part of it counts; the same on every rank."""
    import transformers

    family, sizes = MODELS[name]
    config = getattr(transformers, family + ("TextConfig" if name == "llama4" else "Config"))(**(_SIZES | sizes))
    torch.manual_seed(0)
    model = getattr(transformers, family + "ForCausalLM")._from_config(config, experts_implementation="eager")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for param in model.parameters():
            noise = torch.randn(param.shape, generator=generator) * 0.2
            param.copy_(1 + noise if param.dim() == 1 and bool((param == 1).all()) else noise)
    return model.to(dtype).train()


def batch(index: int = 0, rows: int = 2, length: int = 7) -> Tensor:
    """Token ids of the index-th batch."""
    return torch.randint(0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(100 + index))


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    """The mean of the next tokens' cross-entropy: of all positions alike, so that batches of one size average."""
    return nn.functional.cross_entropy(logits[:, :-1].reshape(-1, VOCAB).float(), ids[:, 1:].reshape(-1))


def step(model: nn.Module, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits and the gradients of all parameters, whole."""
    model.zero_grad(set_to_none=True)
    logits = model(ids).logits
    loss_of(logits, ids).backward()
    return logits.detach(), {name: _whole(param) for name, param in model.named_parameters()}


def _whole(param: nn.Parameter) -> Tensor:
    assert param.grad is not None
    if hasattr(param, "fastpar_layout"):
        return full_parameter(param, param.grad)
    return param.grad.full_tensor() if isinstance(param.grad, DTensor) else param.grad.clone()


def assert_equal_steps(found: tuple[Tensor, dict[str, Tensor]], wanted: tuple[Tensor, dict[str, Tensor]]) -> None:
    """Sums in another order, in float32, of numbers around 1."""
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-4, atol=2e-5)
    assert found[1].keys() == wanted[1].keys()
    for name, grad in wanted[1].items():
        scale = float(grad.abs().max())
        torch.testing.assert_close(found[1][name], grad, rtol=1e-4, atol=2e-5 * max(scale, 1e-2), msg=name)


def mean_step(name: str, batches: int) -> Any:
    """The step over several batches: logits of the first, mean gradients."""
    model = build(name)
    steps = [step(model, batch(index)) for index in range(batches)]
    grads = {key: torch.stack([s[1][key] for s in steps]).mean(0) for key in steps[0][1]}
    return [s[0] for s in steps], grads


_ALONE = {"hidden_size": 12, "intermediate_size": 10, "num_local_experts": 3, "hidden_act": "silu"}
_ALONE |= {"moe_hidden_size": 12, "moe_intermediate_size": 10, "num_experts": 3, "n_routed_experts": 3}
_ALONE |= {"moe_latent_size": None, "mlp_hidden_act": "relu2", "post_norm_eps": 1e-6}
_ALONE |= {"swiglu_alpha": 1.1, "swiglu_limit": 1.5}


def experts_of(path: str, config: dict[str, Any]) -> Any:
    """An experts module of transformers alone, of 3 experts and a hidden size of 12, with random weights."""
    folder, _, cls = path.partition(".")
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    config = _ALONE | config
    configuration = mock.Mock(spec_set=[*config, "_experts_implementation"], **config)
    configuration._experts_implementation = "eager"
    made = getattr(module, cls)(configuration)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for param in made.parameters():
            param.copy_(torch.randn(param.shape, generator=generator))
    return made


# ---- what ranks do


def transformers_steps(jobs: list[tuple[str, dict[str, Any], str]]) -> list[Any]:
    """Of every (folder, options of DistributedConfig, experts_implementation): the step of a model that transformers
    spreads, on a batch for each tp group. Whatever brings the tokens, fastpar runs each module of experts once.
    """
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    huggingface.register()
    found = []
    for folder, options, experts in jobs:
        model = AutoModelForCausalLM.from_pretrained(
            folder, distributed_config=DistributedConfig(**options), experts_implementation=experts
        ).train()
        with mock.patch.object(huggingface_moe, "run_experts", wraps=run_experts) as ran, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # transformers' tp in its fsdp, not ours
            found.append(step(model, batch(dist.get_rank() // options.get("tp_size", 1))))
        assert ran.call_count == sum(is_stacked(module) for module in model.modules()) > 0
        _clear_sharding_prop_cache()  # else DTensor takes a later mesh of this shape for this one
    return found
