"""Plans: which module is split how, as a dict from wildcard pattern to style.

    {"layers.*.self_attn": "block", "layers.*.self_attn.q_proj": "colwise", "layers.*.self_attn.o_proj": "rowwise", ...}

A pattern is a module path in which `*` stands for one path component. Styles are the words that torch and Hugging Face
use, or an instance of `Style` for options that a word cannot say. Plans come from three places: a dict from the caller,
the model's own `tp_plan` (Hugging Face), or the table of known architectures here.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from fastpar.arguments import checked, checked_fields
from fastpar.pipeline.stages.absent import Absent


@checked_fields
@dataclass(frozen=True)
class Style:
    """How one module is parallelised.

    kind      one of `KINDS`
    sections  colwise only: number of equal parts of a fused weight (3 for packed QKV, 2 for packed gate/up), or their
              sizes in features; 1 = not fused
    unit      colwise and rowwise: features that must stay together on one rank, usually the head dim; None = take
              `head_dim` from the enclosing module if it has one, else 1
    local     block only: attributes of the module that count heads or features, to be divided by the group, beside
              those that are known by their names (`num_heads` and its like)
    note      said by `fastpar.explain`
    """

    kind: str
    sections: int | tuple[int, ...] = 1
    unit: int | None = None
    local: tuple[str, ...] = ()
    note: str = ""


KINDS: dict[str, str] = {
    "colwise": "linear split by output features; its output stays split",
    "colwise_gather_output": "linear split by output features; its output is gathered",
    "rowwise": "linear split by input features, which arrive split; outputs are summed",
    "rowwise_split_input": "linear split by input features of a full input; outputs are summed",
    "vocab": "embedding, or output head, split over the vocabulary; logits stay split",
    "replicate": "parameters whole on every rank, every rank computes the same gradient",
    "partial": "parameters whole on every rank, each computes part of the gradient; they are summed",
    "block": "module between two sums: its hidden input is gathered (sequence parallel) or copied, once for all inside",
    "heads": "a parameter with a row per attention head, split by head",
    "whole": "module left as it is; with sequence parallelism it works on this rank's tokens, each by itself",
    "gathered": "module left as it is, on all tokens: sequence parallelism gathers its input and cuts its output",
    "stream": "layers that pass the residual stream on; sequence parallelism splits it from the first to the last",
    "dropout": "dropout on the residual stream, or wherever its tensor is whole",
    "expert": "stacked experts, spread over the expert group; tokens are sent to those that they have chosen",
}

WORDS: dict[str, Style] = {
    **{kind: Style(kind) for kind in KINDS},
    "packed_colwise": Style("colwise", sections=2),
    "packed_qkv": Style("colwise", sections=3),
    "sequence": Style("replicate"),
    "sequence_parallel": Style("replicate"),
    "embedding_rowwise": Style("vocab"),
    "replicated_with_grad_allreduce": Style("partial"),
    "moe_tp_experts": Style("expert"),
    "ep_dispatch_experts": Style("expert"),
}


def _module_paths(model: nn.Module) -> list[str]:
    """Paths of all modules of the whole model, those on other parts of a pipeline included."""
    paths = []
    for path, module in model.named_modules(remove_duplicate=False):
        paths.append(path)
        if isinstance(module, Absent):
            paths += [f"{path}.{name}" for name in module.absent_modules]
    return paths


@checked(computed=False, but=("style",))
def parse_style(pattern: str, style: str | Style) -> Style:
    """A `Style` from a word or a Style; ValueError lists the words."""
    if isinstance(style, Style):
        if style.kind not in KINDS:
            raise ValueError(f"plan[{pattern!r}]: Style.kind {style.kind!r} is not one of {sorted(KINDS)}")
        return style
    if not isinstance(style, str):
        raise TypeError(f"plan[{pattern!r}] must be a str or fastpar.Style, got {type(style).__name__}")
    if style not in WORDS:
        near = difflib.get_close_matches(style, WORDS, n=3)
        hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise ValueError(f"plan[{pattern!r}] is {style!r}, not one of {sorted(WORDS)}{hint}")
    return WORDS[style]


@checked(computed=False)
def match_plan(model: nn.Module, plan: Mapping[str, str | Style]) -> dict[str, Style]:
    """Path to style, in the model's order; later patterns win. Paths are those of modules, and of single parameters.

    A pattern that matches nothing is an error that lists near misses, since a typing error would otherwise leave a
    layer silently unsplit. Modules that another part of a pipeline holds are matched as if they were here.
    """
    paths = [path for path in _module_paths(model) if path]
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    known = {*paths, *parameters}
    absent = tuple(f"{path}." for path, module in model.named_modules() if isinstance(module, Absent))
    parameters += [path for path in plan if path not in known and path.startswith(absent)]
    known.update(parameters)
    chosen: dict[str, Style] = {}
    for pattern, word in plan.items():
        style = parse_style(pattern, word)
        matched = [pattern] if pattern in known else _matching(pattern, paths) or _matching(pattern, parameters)
        if not matched:
            shown = sorted({re.sub(r"\.\d+(?=\.|$)", ".*", path) for path in paths})
            near = difflib.get_close_matches(pattern, shown, n=3, cutoff=0.5) or shown[:3]
            raise ValueError(f"plan pattern {pattern!r} matches no module; near misses: {near}")
        chosen.update(dict.fromkeys(matched, style))
    return {path: chosen[path] for path in dict.fromkeys([*paths, *parameters]) if path in chosen}


def _matching(pattern: str, paths: Iterable[str]) -> list[str]:
    regex = re.compile(r"\.".join("[^.]+" if part == "*" else re.escape(part) for part in pattern.split(".")))
    return [path for path in paths if regex.fullmatch(path)]


_LINEAR_WORDS = (
    *("colwise", "rowwise", "packed_colwise", "colwise_gather_output", "rowwise_split_input"),
    *("replicate", "replicated_with_grad_allreduce", "sequence_parallel"),
)

_LLAMA_LIKE: dict[str, str] = {
    "layers.*": "stream",
    "layers.*.self_attn": "block",
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.v_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.mlp": "block",
    "layers.*.mlp.gate_proj": "colwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
    "embed_tokens": "vocab",
}

_LLAMA_WITH_EXPERTS: dict[str, str] = {
    **{pattern: word for pattern, word in _LLAMA_LIKE.items() if ".mlp" not in pattern},
    "layers.*.mlp.experts": "expert",
}

_GPT2: dict[str, str] = {
    "wte": "vocab",
    "drop": "dropout",
    "h.*": "stream",
    "h.*.attn": "block",
    "h.*.attn.c_attn": "packed_qkv",
    "h.*.attn.c_proj": "rowwise",
    "h.*.attn.resid_dropout": "dropout",
    "h.*.mlp": "block",
    "h.*.mlp.c_fc": "colwise",
    "h.*.mlp.c_proj": "rowwise",
    "h.*.mlp.dropout": "dropout",
}


@checked(computed=False)
def auto_plan(model: nn.Module) -> dict[str, str | Style]:
    """The plan for a model that is known, or that brings its own; ValueError says how to write one otherwise.

    In order: Hugging Face's `base_model_tp_plan` of the configuration with what it leaves out (embedding, head, block
    boundaries), and of its `base_model_ep_plan` the experts; the architectures of the table here, recognised by their
    module names.
    """
    every = _module_paths(model)
    paths = {re.sub(r"\.\d+(?=\.|$)", ".*", path) for path in every}
    own = _own_plan(getattr(model, "config", None))
    base = getattr(model, "base_model_prefix", "")
    prefix = f"{base}." if base and base in paths else ""
    if own and not any(prefix + pattern in paths for pattern in own):  # one that the class inherits and does not use
        prefix = next((f"{name}." for name, _ in model.named_children() if f"{name}.{next(iter(own))}" in paths), "")
    own = own if any(prefix + pattern in paths for pattern in own) else {}
    known = next(
        (
            t
            for t in (_LLAMA_LIKE, _LLAMA_WITH_EXPERTS, _GPT2)
            if all(prefix + p in paths for p in t if "drop" not in p)
        ),
        None,
    )
    plan: dict[str, str | Style]
    if own:
        plan = dict(_with_boundaries({prefix + pattern: word for pattern, word in own.items()}, paths, every))
        if isinstance(_at(model, prefix + "embed_tokens"), nn.Embedding | Absent):
            plan[prefix + "embed_tokens"] = "vocab"
    elif known is not None:
        plan = {prefix + pattern: word for pattern, word in known.items() if prefix + pattern in paths}
        plan |= _head_norms(paths, prefix)
    else:
        raise UnknownModelError(
            f'plan="auto" does not know {type(model).__name__}: it has no tp_plan, and its modules are named like none '
            'of the known architectures. Pass a dict such as {"layers.*.mlp.up_proj": "colwise", '
            '"layers.*.mlp.down_proj": "rowwise"}'
        )
    if isinstance(_at(model, "lm_head"), nn.Linear | Absent):
        plan["lm_head"] = "vocab"
    return _with_tied(model, plan)


def _with_tied(model: nn.Module, plan: dict[str, str | Style]) -> dict[str, str | Style]:
    """Embeddings that share a head's weight are split as it is; a head that shares it with anything else is not."""
    holders: dict[int, list[str]] = {}
    modules = dict(model.named_modules(remove_duplicate=False))
    for path, module in modules.items():
        for param in module._parameters.values():
            if param is not None:
                holders.setdefault(id(param), []).append(path)
    for paths in holders.values():
        if not any(plan.get(path) == "vocab" for path in paths):
            continue
        same = all(isinstance(modules[path], nn.Embedding | nn.Linear) for path in paths)
        for path in paths:
            if same:
                plan[path] = "vocab"
            else:
                plan.pop(path, None)
    return plan


class UnknownModelError(ValueError):
    """A model that neither brings a plan nor is one of the known architectures."""


def _at(model: nn.Module, path: str) -> nn.Module | None:
    return dict(model.named_modules(remove_duplicate=False)).get(path)


def _own_plan(config: Any) -> dict[str, str]:
    """What a Hugging Face configuration says of its model: linears and experts, without the experts' parameters."""
    tensor: dict[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    expert: dict[str, str] = getattr(config, "base_model_ep_plan", None) or {}
    experts = {p: w for p, w in (tensor | expert).items() if w in ("moe_tp_experts", "ep_dispatch_experts")}
    # Other words say how transformers keeps its own code consistent (`mla_kv_a_proj`, `local_params`): which gradients
    # are parts, and which parameters go by head, is found by trying here (`fastpar.parallel.proving`).
    linears = {p: w for p, w in tensor.items() if p.rpartition(".")[0] not in experts and w in _LINEAR_WORDS}
    return linears | dict.fromkeys(experts, "expert")


def _with_boundaries(own: Mapping[str, str], wildcards: set[str], every: Iterable[str]) -> dict[str, str]:
    """Hugging Face's plan lists the linears; the modules they sit in are the blocks, and the layers the stream.

    Where dense and expert layers alternate, a block's pattern would take in the expert layers as well: those of the
    dense layers are named one by one. Patterns for layers that this model has not are left out.
    """
    plan: dict[str, str] = {}
    for pattern, word in own.items():
        if pattern not in wildcards:
            continue
        block = pattern.rpartition(".")[0]
        if ".*" in block:
            plan.setdefault(block.partition(".*")[0] + ".*", "stream")
        if word in ("colwise", "rowwise", "packed_colwise"):
            around = any(other.startswith(block + ".") for other, kind in own.items() if kind == "expert")
            names = [path.rpartition(".")[0] for path in _matching(pattern, every)] if around else [block]
            for name in names:
                plan.setdefault(name, "block")
        plan[pattern] = word
    return plan


def _head_norms(paths: set[str], prefix: str) -> dict[str, str]:
    """Norms on queries and keys see only this rank's heads."""
    names = ("layers.*.self_attn.q_norm", "layers.*.self_attn.k_norm")
    return {prefix + name: "partial" for name in names if prefix + name in paths}
