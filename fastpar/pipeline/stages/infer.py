"""The architecture of a model that nobody has described: found by running it once and watching the order of its calls.

The layers are the list of modules with the most parameters whose modules are called once each, in their order. Of the
modules beside them, those called before the first layer are the embedding, what is added to it and what runs on the
sum, by what they take and return; those called after the last layer are the norm, the head and what lies between; the
others (rotary tables, relative positions) are shared by all parts. Whatever is wrong with that shows when a part is
tried (`probe.try_part`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fastpar.contracts.rehearsal import Example
from fastpar.pipeline.stages.architecture import CHAINS, Architecture, ModelUnit
from fastpar.pipeline.stages.calling import Convention
from fastpar.pipeline.stages.probe import hollow_copy, inputs_for, quiet_trial

_CANDIDATES = 4


@dataclass
class _ModuleCall:
    """A module's only or first call: what it took first, and what it returned."""

    path: str
    takes: Tensor | None
    returns: Tensor | None
    count: int = 1
    sides: tuple[Tensor, ...] = ()


def infer_architecture(model: nn.Module, example: Example | None = None) -> Architecture:
    """By a run on an example, or on made-up ids. ValueError that says why not, and how to describe the model."""
    name, reasons = type(model).__name__, []
    candidates = sorted(_lists(model), key=lambda path: -_weight(model.get_submodule(path)))
    for path in candidates[:_CANDIDATES]:
        found = _try(model, path, example)
        if isinstance(found, Architecture):
            return found
        reasons.append(f"{path!r}: {found}")
    why = "; ".join(reasons) or "it has no list of modules"
    longest = candidates[0] if candidates else "blocks"
    raise ValueError(
        f"{name} has module names of no known architecture, and its layers cannot be found by running it ({why}). "
        "Describe it: architecture=fastpar.pipeline.Architecture(embedding=..., "
        f"layers={longest!r}, norm=..., head=...) for parallelize_pipeline and partition; have them cut it at any "
        "modules: split_points=[...]; or list its parts as modules: Partition.of_modules([...])"
    )


def _lists(model: nn.Module) -> Iterator[str]:
    """Outermost lists of modules, and those in a dict of modules, which may be no more than names for them."""
    outer: list[str] = []
    for path, module in model.named_modules():
        if path and isinstance(module, CHAINS) and len(module) and not any(path.startswith(f"{p}.") for p in outer):
            if not isinstance(module, nn.ModuleDict):
                outer.append(path)
            yield path


def _weight(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _try(model: nn.Module, layers: str, example: Example | None) -> Architecture | str:
    """The architecture with these layers, or what speaks against it."""
    children = [f"{layers}.{name}" for name in model.get_submodule(layers)._modules]
    beside = [path for path in _beside(model, layers) if _weight(model.get_submodule(path))]
    embeddings = [path for path in beside if _looks_up(model.get_submodule(path))] or beside
    if not embeddings:
        return "no module beside them has parameters"
    convention = Convention(model)
    last: str = ""
    for embedding in embeddings:  # the first that runs on ids
        given = inputs_for(model, [ModelUnit("E", 0, embedding)], convention, example)
        if isinstance(given, str):
            return given
        inputs, keywords = given
        copy = hollow_copy(model, model)
        calls: dict[str, _ModuleCall] = {}
        for path in [*beside, *children]:
            copy.get_submodule(path).register_forward_hook(_note(path, calls), with_kwargs=True)
        try:
            with quiet_trial(inputs):
                copy(inputs, **keywords)
        except Exception as error:
            on = "made-up ids" if example is None else "example_inputs"
            last = f"{type(model).__name__} cannot run on {on}: {type(error).__name__}: {error}"
            continue
        return _read(model, layers, children, calls, beside, inputs)
    return last


def _beside(model: nn.Module, layers: str) -> list[str]:
    """Modules that are called by those that contain the layers."""
    found: list[str] = []

    def descend(module: nn.Module, path: str) -> None:
        for name, child in module._modules.items():
            full = f"{path}.{name}" if path else name
            if child is None or full == layers:
                continue
            if layers.startswith(f"{full}.") or isinstance(child, nn.ModuleList | nn.ModuleDict):
                descend(child, full)
            else:
                found.append(full)

    descend(model, "")
    return found


def _looks_up(module: nn.Module) -> bool:
    return any(isinstance(m, nn.Embedding) for m in module.modules())


def _note(path: str, calls: dict[str, _ModuleCall]) -> Callable[..., None]:
    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if path in calls:
            calls[path].count += 1
            return
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        given = tensors[0] if tensors else None
        first = output[0] if isinstance(output, tuple | list) and output else output
        calls[path] = _ModuleCall(path, given, first if isinstance(first, Tensor) else None, sides=tuple(tensors[1:]))

    return after


def _read(
    model: nn.Module,
    layers: str,
    children: list[str],
    calls: dict[str, _ModuleCall],
    beside: list[str],
    inputs: Tensor,
) -> Architecture | str:
    order = list(calls)
    for path in children:
        if path not in calls:
            return f"{path} is not called"
        if calls[path].count > 1:
            return f"{path} is called {calls[path].count} times in a forward"
    places = [order.index(path) for path in children]
    if places != sorted(places):
        return "they are not called in their order"
    hidden = calls[children[0]].takes
    if hidden is None or not hidden.is_floating_point():
        return f"{children[0]} is not called with hidden states"
    sides = [side for path in children for side in calls[path].sides]
    embedding, added, before = "", [], []
    for path in order[: places[0]]:
        call = calls[path]
        if call.returns is None or call.count > 1 or not call.returns.is_floating_point():
            continue
        if any(side is call.returns for side in sides):
            continue  # for the layers themselves
        takes = call.takes
        is_lookup = takes is None or not takes.is_floating_point() or takes.dim() < hidden.dim()
        is_lookup |= takes is not None and takes.shape == inputs.shape != hidden.shape  # pictures, or sound
        if is_lookup and not embedding and _has_tokens_of(call.returns, hidden):
            embedding = path
        elif call.returns.shape[-1:] == hidden.shape[-1:] and is_lookup:
            added.append(path)
        elif call.returns.shape == hidden.shape and embedding:
            before.append(path)
    if not embedding:
        return "no module beside them is called with the model's input before"
    after = [path for path in order[places[-1] + 1 :] if path in beside and calls[path].count == 1]
    head = None
    if after:
        call = calls[after[-1]]
        is_hidden = call.returns is not None and call.returns.shape == hidden.shape
        if not is_hidden or after[-1] in _output_modules(model):
            head = after.pop()
    placed = {embedding, *added, *before, *after, head}
    return Architecture(
        layers=layers,
        embedding=embedding,
        added=tuple(added),
        before=tuple(before),
        norm=after[0] if after else None,
        head=head,
        shared=tuple(path for path in beside if path not in placed),
        after=tuple(after[1:]),
    )


def _has_tokens_of(embedded: Tensor, hidden: Tensor) -> bool:
    """Whether hidden states may be made from it: one vector a token, or several (hyper-connections) of its size."""
    if embedded.dim() < hidden.dim():
        return embedded.shape[:2] == hidden.shape[:2] and embedded.shape[-1:] == hidden.shape[-1:]
    return embedded.shape[:-1] == hidden.shape[:-1]


def _output_modules(model: nn.Module) -> set[str]:
    """Paths of the output layer, and of what contains it."""
    get = getattr(model, "get_output_embeddings", None)
    output = get() if callable(get) else None
    path = next((p for p, m in model.named_modules() if m is output), "") if output is not None else ""
    return {path, *(path.rsplit(".", depth)[0] for depth in range(1, path.count(".") + 1))} - {""}
