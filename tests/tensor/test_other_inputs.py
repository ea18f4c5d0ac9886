"""plan="auto" on models of transformers that take pictures, sound or two sequences, found out by `example_inputs`: the
loss and all gradients of one process, in float64.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fastpar as fp
from fastpar.tensor import full_parameter
from tests.dist import run_ranks

transformers = pytest.importorskip("transformers")

_TEXT = {"vocab_size": 61, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "intermediate_size": 50}
_IMAGE = {**{k: v for k, v in _TEXT.items() if k != "vocab_size"}, "image_size": 32, "patch_size": 8}
_TWO = {
    "dropout": 0.0,
    "pad_token_id": 0,
    "vocab_size": 61,
    "d_model": 48,
    **{f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in
       (("layers", 2), ("attention_heads", 6), ("ffn_dim", 50))},
}  # fmt: skip
_SWIN = {"embed_dim": 24, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4, "image_size": 32, "patch_size": 4}
_T5 = {"vocab_size": 61, "d_model": 48, "d_kv": 8, "d_ff": 50, "num_layers": 2, "num_heads": 6, "dropout_rate": 0.0}
# Model type, sizes, names of inputs, and how many linears are split at least.
CASES: dict[str, tuple[dict[str, Any], tuple[str, ...], int]] = {
    "vit": (_IMAGE, ("pixel_values",), 12),
    "clip": ({"text_config": _TEXT, "vision_config": _IMAGE}, ("input_ids", "pixel_values"), 24),
    "bert": (_TEXT, ("input_ids",), 12),
    "bart": (_TWO, ("input_ids", "decoder_input_ids"), 32),
    "whisper": (_TWO | {"num_mel_bins": 16, "max_source_positions": 8}, ("input_features", "decoder_input_ids"), 32),
    "t5": (_T5, ("input_ids", "decoder_input_ids"), 8),
    "swin": (_SWIN, ("pixel_values",), 4),
}


def _inputs(names: tuple[str, ...]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    made = {
        "input_ids": torch.randint(1, 60, (2, 7), generator=generator),
        "decoder_input_ids": torch.randint(1, 60, (2, 5), generator=generator),
        "pixel_values": torch.randn(2, 3, 32, 32, generator=generator, dtype=torch.float64),
        "input_features": torch.randn(2, 16, 16, generator=generator, dtype=torch.float64),
    }
    return {name: made[name] for name in names}


def _loss(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    outputs = [x for x in model(**inputs).values() if isinstance(x, Tensor) and x.is_floating_point()]
    return torch.stack([x.square().mean() + x.flatten()[::3].sum() for x in outputs]).sum()


def _walk(model_type: str) -> int:
    sizes, names, _ = CASES[model_type]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **sizes)
    model = transformers.AutoModel.from_config(config).double().train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    for param in model.parameters():
        param.data += 0.1 * torch.randn_like(param)
    model.config.use_cache = False
    parallel: Any = copy.deepcopy(model)
    given = _inputs(names)
    fp.parallelize(parallel, dist.group.WORLD, example_inputs=given)
    wanted, found = _loss(model, given), _loss(parallel, given)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    wanted.backward()
    found.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    largest = max(float(grad.abs().max()) for grad in grads.values() if grad is not None)
    for name, param in parallel.named_parameters():
        if param.grad is None:
            assert grads[name] is None, name
            continue
        grad = full_parameter(param, param.grad)
        torch.testing.assert_close(grad, grads[name], rtol=1e-6, atol=1e-9 * largest, msg=name)
    return sum(row["style"] in ("colwise", "rowwise") for row in fp.explain(parallel).rows)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", CASES)
def test_models_of_pictures_sound_and_two_sequences_are_split_by_an_example(model_type: str) -> None:
    assert min(run_ranks(2, _walk, model_type)) >= CASES[model_type][2]
