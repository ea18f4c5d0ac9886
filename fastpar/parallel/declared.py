"""The plans that models bring, or are known for: Hugging Face's `tp_plan`, two architectures, and the ends of others.

Nothing of it is believed: `fastpar.parallel.proving` tries it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from fastpar.arguments import checked
from fastpar.parallel.plan import match_plan, matching, module_paths
from fastpar.parallel.stacked_experts import is_stacked
from fastpar.parallel.styles import STYLES, ExpertStyle, Style, VocabStyle, WholeStyle
from fastpar.parallel.trial import holds_linears
from fastpar.pipeline.stages.absent import Absent
from fastpar.tensor.own_forward import check_parameters


class UnknownModelError(ValueError):
    """A model that neither brings a plan nor is one of the known architectures."""


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
    every = module_paths(model)
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


def _at(model: nn.Module, path: str) -> nn.Module | None:
    return dict(model.named_modules(remove_duplicate=False)).get(path)


def _own_plan(config: Any) -> dict[str, str]:
    """The plan of a Hugging Face configuration: linears and experts, without the experts' parameters."""
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
            names = [path.rpartition(".")[0] for path in matching(pattern, every)] if around else [block]
            for name in names:
                plan.setdefault(name, "block")
        plan[pattern] = word
    return plan


def _head_norms(paths: set[str], prefix: str) -> dict[str, str]:
    """Norms on queries and keys see only this rank's heads."""
    names = ("layers.*.self_attn.q_norm", "layers.*.self_attn.k_norm")
    return {prefix + name: "partial" for name in names if prefix + name in paths}


def first_plan(
    model: nn.Module, modules: Mapping[str, nn.Module], *, sequence_parallel: bool
) -> tuple[dict[str, Style], UnknownModelError | None]:
    """The plan that is declared or known; for other models the embedding, the head, layers and stacked experts, and the
    error that says so. No styles where not even layers are found."""
    try:
        styles = match_plan(model, auto_plan(model))
    except UnknownModelError as error:
        lists = _lists_of_layers(modules)
        if sequence_parallel and len(lists) > 1:
            several = UnknownModelError(
                f"{error}. Nor has it one stream that could be split: {lists} are several lists"
            )
            return {}, several
        layers = _layers_of(modules, lists)
        if not layers:
            return {}, error
        inner = tuple(f"{layer}." for layer in layers)
        experts = [path for path, module in modules.items() if path.startswith(inner) and is_stacked(module)]
        styles = _ends(model) | dict.fromkeys(layers, STYLES["stream"]) | dict.fromkeys(experts, STYLES["expert"])
        return styles | _unsplit_ends(modules, styles), error
    for path in [path for path, style in styles.items() if isinstance(style, ExpertStyle)]:
        if path in modules and not isinstance(modules[path], Absent) and not is_stacked(modules[path]):
            del styles[path]  # experts of another form, such as some that do nothing: left whole
    return styles | _unsplit_ends(modules, styles), None


def _unsplit_ends(modules: Mapping[str, nn.Module], styles: Mapping[str, Style]) -> dict[str, Style]:
    """Embeddings and heads that a declared plan splits and that cannot be split, with all that share their weights."""
    ends = [path for path, style in styles.items() if isinstance(style, VocabStyle) and path in modules]
    found: dict[str, Style] = {}
    for path in ends:
        if not isinstance(modules[path], nn.Embedding | nn.Linear):
            continue
        try:
            check_parameters(modules[path])
        except TypeError as error:
            weights = {id(param) for param in modules[path].parameters()}
            sharing = [end for end in ends if weights & {id(param) for param in modules[end].parameters()}]
            found |= dict.fromkeys(sharing, WholeStyle(note=f"left whole: {error}", is_fallback=True))
    return found


def _ends(model: nn.Module) -> dict[str, Style]:
    """Embedding and head of a model that says where they are, with all tables and heads that share their weights."""
    ends: list[Any] = []
    for getter in ("get_input_embeddings", "get_output_embeddings"):
        with contextlib.suppress(AttributeError, NotImplementedError, TypeError):
            ends.append(getattr(model, getter)())
    weights = {id(end._parameters.get("weight", end)) for end in ends if isinstance(end, nn.Embedding | nn.Linear)}
    return {
        path: STYLES["vocab"]
        for path, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.Linear) and id(module._parameters.get("weight", module)) in weights
    }


def _lists_of_layers(modules: Mapping[str, nn.Module]) -> list[str]:
    """The outermost lists of modules that hold linears: of an encoder's layers and a decoder's."""
    lists = [path for path, module in modules.items() if _is_list_of_layers(module)]
    return [p for p in lists if not any(p.startswith(f"{other}." if other else "") for other in lists if other != p)]


def _layers_of(modules: Mapping[str, nn.Module], lists: Iterable[str]) -> list[str]:
    """The modules in these lists that hold linears; of lists of lists, which nobody calls, what runs them."""
    found: dict[str, None] = {}
    for path in lists:
        # One that is there twice is two layers.
        held = modules[path]._modules
        inside = {name: child for name, child in held.items() if child is not None and holds_linears(child)}
        parent = path.rpartition(".")[0]
        if parent and any(isinstance(child, nn.ModuleList) for child in inside.values()):
            found[parent] = None
        else:
            found |= dict.fromkeys(f"{path}.{name}" if path else name for name in inside)
    return [path for path in found if not any(path.startswith(f"{other}.") for other in found)]


def _is_list_of_layers(module: nn.Module) -> bool:
    """Not a list of linears, nor a chain of them and of what is between; nor a dict that names other lists."""
    inside = [child for child in module.children() if holds_linears(child)]
    if isinstance(module, nn.ModuleDict):
        return bool(inside) and not any(isinstance(child, nn.ModuleList | nn.ModuleDict) for child in inside)
    return isinstance(module, nn.ModuleList | nn.Sequential) and bool(inside)
