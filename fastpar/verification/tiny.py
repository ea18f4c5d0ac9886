"""Models of the installed transformers by name, at a size that a test can run: no weights, no network.

A name is a folder or a config.json, a class (Gemma2ForCausalLM), a model_type (gemma2), or a name on a hub whose last
part has a model_type in it (google/gemma-2-2b is gemma2). The configuration's defaults, or the file's numbers, are made
small with their ratios: fewer key/value heads than heads stay fewer, one stays one, a head size that is not hidden size
by heads stays so, every kind of layer is there once. The vocabulary is odd, so that its parts differ.
"""

from __future__ import annotations

import difflib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

_VOCAB, _HEADS, _HEAD_DIM, _POSITIONS = 131, 4, 8, 64
_LARGEST = 5_000_000  # parameters
_WIDTHS = re.compile(r"(size|dim|rank|width|inner|channels)$")


@dataclass(frozen=True)
class TinyModel:
    """A class of transformers with a small configuration.

    numbers       what the configuration is made of
    switched_off  its dropout probabilities that were not 0
    """

    model_class: str
    config_class: str
    numbers: dict[str, Any]
    switched_off: tuple[str, ...] = field(default=())

    def build(self, dtype: str = "float32") -> nn.Module:
        """The model with random weights. RuntimeError where the class does not take this configuration."""
        import transformers

        cls = getattr(transformers, self.model_class)
        try:
            config = getattr(transformers, self.config_class)(**self.numbers)
            config._experts_implementation = "eager"
            _check_size(cls, config)
            made: nn.Module = cls(config)
        except Exception as error:
            raise RuntimeError(
                f"{self.model_class} cannot be made with {self.numbers}: {type(error).__name__}: {error}. Pass the "
                "path of a config.json with small numbers"
            ) from error
        return made.to(getattr(torch, dtype))


def _check_size(cls: Any, config: Any) -> None:
    """ValueError for a model that is not tiny after all, before it takes memory."""
    try:
        with torch.device("meta"):
            elements = sum(p.numel() for p in cls(config).parameters())
    except Exception:
        return  # code that wants numbers; what is wrong with the configuration shows when it is made in earnest
    if elements > _LARGEST:
        raise ValueError(f"it has {elements:,} parameters and would not be tiny")


def tiny_model(name: str) -> TinyModel:
    """The model that a name stands for. ValueError names near misses."""
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if path.suffix == ".json" and path.is_file():
        return _of_file(path)
    model_type = _model_type(name)
    model_class, config_class = _classes(model_type)
    if name in (model_class, *_class_types().keys()):
        model_class = name
    import transformers

    return _shrunk(model_class, config_class, getattr(transformers, config_class)().to_dict(), {})


def _of_file(path: Path) -> TinyModel:
    given = json.loads(path.read_text())
    model_type = given.get("model_type")
    if model_type not in _config_names():
        raise ValueError(f"{path}: model_type is {model_type!r}; {_near(str(model_type), _config_names())}")
    model_class, config_class = _classes(model_type)
    architectures = given.get("architectures") or []
    model_class = architectures[0] if architectures and architectures[0] in _class_types() else model_class
    import transformers

    config = getattr(transformers, config_class)(**{k: v for k, v in given.items() if k != "architectures"})
    return _shrunk(model_class, config_class, config.to_dict(), given)


# ---- names


def _auto() -> Any:
    try:
        from transformers.models.auto import modeling_auto
    except ImportError as error:
        raise RuntimeError("fastpar verify --model needs transformers: pip install transformers") from error
    return modeling_auto


def _config_names() -> dict[str, str]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return dict(CONFIG_MAPPING_NAMES)


def _language_models() -> dict[str, str]:
    """model_type to the class that has a loss over tokens."""
    auto = _auto()
    found = dict(auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES) | dict(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    return {kind: cls for kind, cls in found.items() if isinstance(cls, str) and kind in _config_names()}


def _class_types() -> dict[str, str]:
    auto = _auto()
    types: dict[str, str] = {}
    for table in (auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES):
        for kind, cls in table.items():
            if isinstance(cls, str):
                types.setdefault(cls, kind)
    return types


def _classes(model_type: str) -> tuple[str, str]:
    """(model, configuration). What takes images as well is replaced by its part for text."""
    models, configs = _language_models(), _config_names()
    model_type = f"{model_type}_text" if f"{model_type}_text" in models else model_type
    cls = models.get(model_type)
    if cls is None:
        raise ValueError(
            f"{model_type!r} is no language model of the installed transformers; {_near(model_type, models)}"
        )
    return cls, configs[model_type]


def _model_type(name: str) -> str:
    """The model_type of a class name, a model_type, or the words of a hub's name; ValueError where it is none or
    several."""
    classes, models = _class_types(), _language_models()
    if name in classes:
        return classes[name]
    tail = name.rstrip("/").rpartition("/")[2].lower()
    for plain in (tail, tail.replace("-", "_")):
        if plain in models:
            return plain
    squeezed = {re.sub("[-_]", "", kind): kind for kind in models}
    words = [word for word in re.split(r"[-_.]", tail) if word]
    runs = ["".join(words[i:j]) for i in range(len(words)) for j in range(i + 1, len(words) + 1)]
    hits = {squeezed[run] for run in runs if run in squeezed}
    # "phi3" and not "phi" of phi-3; several of one length are a question back.
    longest = {kind for kind in hits if not any(kind != other and other.startswith(kind) for other in hits)}
    if len(longest) != 1:
        what = (
            f"may be {' or '.join(sorted(longest))}" if longest else "is no model that the installed transformers know"
        )
        raise ValueError(f"--model {name!r} {what}; {_near(tail, models)}")
    (kind,) = longest
    is_mixture = "moe" in words or re.search(r"(^|[-_.])a\d+(\.\d+)?b($|[-_.])", tail)
    mixture = next((other for other in (f"{kind}_moe", f"{kind}moe") if other in models), None)
    if is_mixture and "moe" not in kind and mixture:
        raise ValueError(
            f"--model {name!r} looks like a mixture of experts: say {mixture}, or {kind} for the dense model"
        )
    return kind


def _near(name: str, known: Any) -> str:
    near = difflib.get_close_matches(name, known, n=5, cutoff=0.4)
    return f"near misses: {', '.join(near) or 'none'}. Or pass a class (Gemma2ForCausalLM), a model_type, a config.json"


# ---- sizes


def _shrunk(model_class: str, config_class: str, numbers: dict[str, Any], given: dict[str, Any]) -> TinyModel:
    """Small numbers for the large ones of a configuration. Other values of `given` are kept."""
    import transformers

    cls = getattr(transformers, config_class)
    small, off = _small_numbers(cls, numbers, given)
    return TinyModel(model_class, config_class, small, tuple(off))


def _small_numbers(cls: Any, numbers: dict[str, Any], given: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Small numbers of a configuration class; and which dropout was switched off."""
    names = cls.attribute_map

    def number(name: str) -> int | None:
        found = numbers.get(name, numbers.get(names.get(name, "")))
        return found if isinstance(found, int) else None

    sizes = _Sizes.of(number("hidden_size"), number("num_attention_heads"), number("head_dim"))
    small: dict[str, Any] = {name: value for name, value in given.items() if name in numbers and name != "model_type"}
    off: list[str] = []
    for name, inner in (getattr(cls, "sub_configs", None) or {}).items():  # of text beside images, for instance
        if isinstance(numbers.get(name), dict) and hasattr(inner, "attribute_map"):
            small[name], found_off = _small_numbers(inner, numbers[name], given.get(name) or {})
            off += found_off
    depth = number("num_hidden_layers")
    lists = [v for v in numbers.values() if isinstance(v, list) and len(v) == depth]
    kinds = next((list(dict.fromkeys(v)) for v in lists if v and all(isinstance(x, str) for x in v)), [])
    layers = max(2, len(kinds))
    for name, value in numbers.items():
        if isinstance(value, bool) or name in ("id2label", "label2id"):
            continue
        if isinstance(value, float) and "drop" in name and value > 0:
            small[name] = 0.0
            off.append(name)
        elif isinstance(value, int):
            found = (
                layers if name in ("num_hidden_layers", names.get("num_hidden_layers")) else sizes.of_field(name, value)
            )
            if found != value:
                small[name] = found
        elif isinstance(value, list) and name.endswith("_token_id"):
            small[name] = [token % _VOCAB for token in value]
        elif isinstance(value, list) and len(value) == depth and depth:
            large = [v for v in value if type(v) is int and v >= depth]
            small[name] = _per_layer([sizes.of_field(name, v) if v in large else v for v in value], kinds, layers)
    return small, off


def _per_layer(values: list[Any], kinds: list[str], layers: int) -> list[Any]:
    if values and all(isinstance(value, str) for value in values):
        found = list(dict.fromkeys(values))
        return (found + [found[-1]] * layers)[:layers] if found != kinds or len(found) < layers else found
    if values == list(range(len(values))):  # the layers themselves
        return values[:layers]
    step = (len(values) - 1) / max(layers - 1, 1)
    return [values[round(i * step)] for i in range(layers)]


@dataclass(frozen=True)
class _Sizes:
    """The large sizes that ratios are taken of, and the small ones."""

    hidden: int
    heads: int
    head_dim: int
    small_hidden: int

    @staticmethod
    def of(hidden: int | None, heads: int | None, head_dim: int | None) -> _Sizes:
        hidden, heads = hidden or 64, heads or 8
        head_dim = head_dim or max(hidden // heads, 1)
        product = heads * head_dim
        small = _HEADS * _HEAD_DIM + (0 if hidden == product else _HEAD_DIM if hidden > product else -_HEAD_DIM)
        return _Sizes(hidden, heads, head_dim, small)

    def of_field(self, name: str, value: int) -> int:
        """A small number by what the words of a configuration's field say that it counts."""
        words = name.split("_")
        if name.endswith("_token_id") or name.endswith("_token_index"):
            return value % _VOCAB
        if "vocab" in words:
            return _VOCAB if value > _VOCAB else value
        if "position" in name or name in ("n_positions", "n_ctx", "seq_length"):
            return min(value, _POSITIONS)
        if "window" in words:
            return min(value, 4)
        if "chunk" in words:
            return min(value, 8)
        if {"tok", "token"} & set(words) or "topk" in name or words[-1] == "k":
            return min(value, 1 if "group" in words else 2)
        if "shared" in words and words[-1] == "experts":
            return min(value, 1)
        if words[-1] in ("experts", "expert"):
            return min(value, 4)
        if "group" in words or "groups" in words:
            return min(value, 2)
        if "heads" in words or name in ("n_head", "n_head_kv", "multi_query_group_num"):
            return self._heads(value)
        if "head" in words and "dim" in words:
            return max(4, round(_HEAD_DIM * value / self.head_dim / 4) * 4)
        if value in (self.hidden, self.head_dim) and value >= 32:
            return self.small_hidden if value == self.hidden else _HEAD_DIM
        if "dense" in words and "replace" in words:
            return min(value, 1)
        if value >= 32 and (_WIDTHS.search(name) or name in ("n_embd", "n_inner", "d_model", "d_ff")):
            return max(8, round(value / self.hidden * self.small_hidden / 2) * 2)
        return value

    def _heads(self, value: int) -> int:
        """Fewer than the queries' stay fewer, and one stays one."""
        if value <= 1 or value == self.heads:
            return _HEADS if value == self.heads else value
        found = round(_HEADS * value / self.heads)
        return max(found, 1) if value > self.heads else min(max(found, 2), _HEADS - 2)
