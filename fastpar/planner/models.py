"""Shapes of models by name, or from a configuration; no weights, no network, no torch."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastpar.layouts import ExpertShape, ModelShape
from fastpar.planner.configurations import shape_of_config


def _shape(name: str, layers: int, hidden: int, ffn: int, vocab: int, heads: int, **others: Any) -> ModelShape:
    return ModelShape(name, layers, hidden, ffn, vocab, heads, **{"gated": True, **others})


_TOLERANCE = 0.1  # of the number of parameters: biases, learned positions and small norms are not counted
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

    Raises ValueError for an unknown name (with near misses), for a configuration without the numbers that are needed or
    with layers whose costs are not known (`fastpar.planner.configurations`), and for a module that has 10 % more or
    fewer parameters than its configuration reads as.
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
    shape = shape_of_config(numbers)
    check_size(shape, model, "its configuration reads as")
    return shape


def check_size(shape: ModelShape, model: Any, what: str) -> None:
    """A module says how large it is: ValueError where the shape, which is `what` it says, is another model's."""
    if not callable(getattr(model, "parameters", None)):
        return
    count = sum(math.prod(each.shape) for each in model.parameters())
    if abs(shape.parameters / max(count, 1) - 1.0) > _TOLERANCE:
        raise ValueError(
            f"model: {what} {shape.parameters:,} parameters, but the module has {count:,}: plan for a ModelShape, this "
            f"one with what is wrong replaced: {shape}"
        )


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
