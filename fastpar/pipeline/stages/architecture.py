"""Which modules of a model run before its layers, which are the layers, and which run after them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from fastpar.arguments import checked_fields
from fastpar.pipeline.stages.absent import Absent, AbsentAddend, AbsentEmbedding, AbsentLayer


class ModelUnit(NamedTuple):
    """A module that belongs to one part. kind "E", "t", "N" or "H" (see `Layout`), `number` counts the layers."""

    kind: str
    number: int
    path: str
    absent: type[Absent] = Absent


@checked_fields
@dataclass(frozen=True)
class Architecture:
    """Module paths of a layered model, in the order in which they run.

    embedding  called with the ids; later parts give it the hidden states instead (or pass them as `inputs_embeds`)
    added      its output is added to the embedding's (position embeddings): nothing on later parts
    before     runs on that sum (dropout, norm): passes it on, on later parts
    layers     an nn.ModuleList, nn.ModuleDict or nn.Sequential whose modules are called with the hidden states first.
               What they return is found by trying the model on made-up inputs; where that cannot be done, those whose
               forward is declared to return a tuple (`-> tuple[...]`) return the hidden states in it, the others alone
    norm       after the last layer; passes on, where absent
    after      further modules between the norm and the head, in running order; they go with the norm
    head       after the norm; passes on, where absent
    shared     used by several parts, each of which keeps a copy of its own, parameters included (their gradients are
               summed). So are parameters of the model itself, and modules without parameters that are named nowhere
               (rotary tables)

        Architecture(embedding="tok", added=("pos",), layers="blocks", norm="ln", head="out")
    """

    layers: str
    embedding: str | None = None
    added: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    norm: str | None = None
    head: str | None = None
    shared: tuple[str, ...] = ()
    after: tuple[str, ...] = ()

    def units(self, model: nn.Module) -> list[ModelUnit]:
        """Every module named here, in running order, with what stands for it on other parts."""
        layers = model.get_submodule(self.layers)._modules  # named_children would leave out a layer that is used twice
        units = [ModelUnit("E", 0, self.embedding, AbsentEmbedding)] if self.embedding is not None else []
        units += [ModelUnit("E", 0, path, AbsentAddend) for path in self.added]
        units += [ModelUnit("E", 0, path) for path in self.before]
        units += [ModelUnit("t", index, f"{self.layers}.{name}", AbsentLayer) for index, name in enumerate(layers)]
        units += [ModelUnit("N", 0, self.norm)] if self.norm is not None else []
        units += [ModelUnit("N", 0, path) for path in self.after]
        units += [ModelUnit("H", 0, self.head)] if self.head is not None else []
        return units

    def check(self, model: nn.Module) -> None:
        """ValueError for names that the model does not have, and for modules that nothing is said about."""
        paths = dict(model.named_modules(remove_duplicate=False))
        named = [self.layers, *self.added, *self.before, *self.shared, *self.after]
        named += [path for path in (self.embedding, self.norm, self.head) if path is not None]
        for path in named:
            if path not in paths:
                raise ValueError(f"the architecture names {path!r}, which {type(model).__name__} does not have")
        if not isinstance(paths[self.layers], CHAINS) or not len(paths[self.layers]):
            raise ValueError(
                f"layers={self.layers!r} must be an nn.ModuleList, nn.ModuleDict or nn.Sequential that is not empty, "
                f"got {type(paths[self.layers]).__name__}"
            )
        for path, module in paths.items():
            if any(path == name or path.startswith(name + ".") for name in named):
                continue
            if not path or any(other.startswith(path + ".") for other in named):
                continue  # its own forward runs on every part, and its own parameters are shared by all
            for name, _ in module.named_parameters(recurse=False):
                raise ValueError(
                    f"{path}.{name}: say in the architecture where {path!r} runs (added, before, ..., after, shared)"
                )


CHAINS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_KNOWN = (
    Architecture(embedding="embed_tokens", layers="layers", norm="norm", head="lm_head"),  # Llama, Qwen, Mistral, ...
    Architecture(embedding="wte", added=("wpe",), before=("drop",), layers="h", norm="ln_f", head="lm_head"),  # GPT-2
)


def find_architecture(model: nn.Module) -> Architecture | None:
    """The architecture of a model with the module names of Hugging Face's Llama or GPT-2, or with a plan; or None.

    Names are a short cut. They are believed where they account for every parameter, and the model is tried either way;
    for other models see `infer_architecture`.
    """
    paths = {path for path, _ in model.named_modules(remove_duplicate=False)}
    base = getattr(model, "base_model_prefix", "")
    prefix = f"{base}." if base and base in paths else ""

    def here(path: str | None) -> str | None:
        return prefix + path if path is not None and prefix + path in paths else None

    for known in (*_KNOWN, *_planned(model, prefix)):
        if here(known.layers) and here(known.embedding):
            found = Architecture(
                layers=prefix + known.layers,
                embedding=here(known.embedding),
                added=tuple(filter(None, map(here, known.added))),
                before=tuple(filter(None, map(here, known.before))),
                norm=here(known.norm),
                head=known.head if known.head in paths else None,
            )
            try:
                found.check(model)
            except ValueError:
                continue
            return found
    return None


def _planned(model: nn.Module, prefix: str) -> list[Architecture]:
    """The architecture in a Hugging Face model's own plan for pipelines, whose modules stand in running order."""
    plan: Any = getattr(getattr(model, "config", None), "base_model_pp_plan", None) or {}
    paths = dict(model.named_modules())
    names = [name for name in plan if prefix + name in paths]
    lists = [i for i, name in enumerate(names) if isinstance(paths[prefix + name], nn.ModuleList)]
    if len(lists) != 1 or lists[0] == 0 or len(names) > lists[0] + 2:
        return []
    head = next((name for name in getattr(type(model), "_pp_plan", None) or {} if name in paths), None)
    norm = names[-1] if len(names) == lists[0] + 2 else None
    return [Architecture(names[lists[0]], names[0], (), tuple(names[1 : lists[0]]), norm, head)]


def sequential_units(model: nn.Sequential, prefix: str = "") -> list[ModelUnit]:
    """The modules of an nn.Sequential in running order, those of nested ones included."""
    units: list[ModelUnit] = []
    for name, module in model._modules.items():
        if type(module) is nn.Sequential:
            units += sequential_units(module, f"{prefix}{name}.")
        else:
            units.append(ModelUnit("t", 0, f"{prefix}{name}"))
    return [unit._replace(number=number) for number, unit in enumerate(units)]
