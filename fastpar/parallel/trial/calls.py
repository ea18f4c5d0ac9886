"""Calls of a model's modules: one run on a few random ids, with hooks."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from fastpar.contracts.rehearsal import (
    Example,
    MadeTensors,
    attributes_as_they_were,
    buffers_as_they_were,
    same_generators,
)
from fastpar.parallel.trial.copies import own_copy
from fastpar.tensor.sequence import map_hidden


@dataclass
class RecordedCall:
    """One call of a module: its arguments, and whether what it returns beside the hidden states is used."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    uses_others: bool = False  # the model's output depends on some of the tensors it returns beside the hidden states
    keeps_results: bool | None = None  # tensors that it computes outlive the call: `trial.keeps_results` finds out
    reads: list[str] = field(default_factory=list)  # linears inside that were called with the hidden states themselves
    order: list[str] = field(default_factory=list)  # linears inside in the order of their calls
    lists: list[Any] = field(default_factory=list)  # that the model's code has put tensors into, and what was in them

    def hidden(self) -> Tensor:
        found: list[Tensor] = []
        map_hidden(self.args, self.kwargs, found.append)
        return found[0]


class _Recorder:
    """Hooks that note how modules are called while a model runs."""

    def __init__(self, model: nn.Module, paths: Iterable[str]):
        self.calls: dict[str, RecordedCall] = {}
        self.marks: dict[str, list[Tensor]] = {}
        self.handles: list[Any] = []
        self._arguments: dict[str, list[Any]] = {}
        for path in paths:
            module = model.get_submodule(path)
            self.handles.append(module.register_forward_pre_hook(self._enter(path), with_kwargs=True))
            self.handles.append(module.register_forward_hook(self._leave(path), with_kwargs=True))
            for name, child in module.named_modules():
                if name and is_linear(child):
                    self.handles.append(child.register_forward_pre_hook(self._linear(path, name)))

    def _enter(self, path: str) -> Callable[..., None]:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if path not in self.calls:
                self.calls[path] = RecordedCall(*_copied((args, kwargs)))
                self._arguments[path] = tree_leaves((args, kwargs))  # as they are: compared by identity below

        return hook

    def _linear(self, path: str, name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, args: tuple[Any, ...]) -> None:
            call = self.calls.get(path)
            if call is None or path in self.marks or name in call.order or not args:
                return
            call.order.append(name)
            if any(args[0] is leaf for leaf in self._arguments[path]):
                call.reads.append(name)

        return hook

    def _leave(self, path: str) -> Callable[..., Any]:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            call = self.calls[path]
            if path not in self.marks:
                call.uses_others = self._left_something(path, args, kwargs)
            marks = self.marks.setdefault(path, [])
            if not isinstance(output, tuple):
                return None
            floats = [isinstance(value, Tensor) and value.is_floating_point() for value in output]
            if type(output) is not tuple:
                call.uses_others = call.uses_others or any(floats[1:])  # cannot be told
                return None
            rest = []
            for value, is_float in zip(output[1:], floats[1:], strict=True):
                if is_float:
                    marks.append(torch.zeros((), device=value.device, dtype=value.dtype, requires_grad=True))
                rest.append(value + marks[-1] if is_float else value)
            return (output[0], *rest)

        return hook

    def _left_something(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """True if the module has put tensors into the containers that it was called with."""
        before = {id(leaf) for leaf in self._arguments[path]}
        return any(isinstance(leaf, Tensor) and id(leaf) not in before for leaf in tree_leaves((args, kwargs)))

    def finish(self, output: Any) -> None:
        for handle in self.handles:
            handle.remove()
        self._arguments.clear()
        leaves = list(output.values()) if isinstance(output, Mapping) else [output]
        ends = [t for t in tree_leaves(leaves) if isinstance(t, Tensor) and t.requires_grad and t.is_floating_point()]
        marks = [(path, mark) for path, marks in self.marks.items() for mark in marks]
        if not ends or not marks:
            return
        grads = torch.autograd.grad([t.sum() for t in ends], [mark for _, mark in marks], allow_unused=True)
        for (path, _), grad in zip(marks, grads, strict=True):
            if grad is not None and path in self.calls:
                self.calls[path].uses_others = True


def record_calls(
    model: nn.Module, paths: Iterable[str], num_tokens: int, example: Example | None = None
) -> dict[str, RecordedCall]:
    """Run a model once: how the modules at `paths` were called, by path.

    example  what it is called with; None: two sequences of so many random ids

    Modules that were not called are left out. The model is in eval mode for the time of the run; its buffers, what
    modules keep as numbers, tensors and lists of them, and the generators of random numbers are as before afterwards;
    lists elsewhere have lost what the run has put into them.
    Raises whatever the model does.
    """
    modes = {module: module.training for module in model.modules()}
    args, kwargs = _random_ids(model, num_tokens) if example is None else example.copy()
    if "use_cache" in inspect.signature(model.forward).parameters:
        kwargs.setdefault("use_cache", False)
    made, output = MadeTensors(lists=True), None
    # Around the hooks, which are gone when it ends.
    with attributes_as_they_were(model), buffers_as_they_were(model), same_generators():
        recorder = _Recorder(model, paths)
        try:
            with warnings.catch_warnings(), torch.enable_grad(), made:
                warnings.simplefilter("ignore")
                model.eval()
                output = model(*args, **kwargs)
                recorder.finish(output)
        finally:
            for handle in recorder.handles:
                handle.remove()
            for module, training in modes.items():
                module.training = training
    del output
    lists = made.take_back()
    for call in recorder.calls.values():
        call.lists = lists
    return recorder.calls


def _random_ids(model: nn.Module, num_tokens: int) -> Example:
    vocab = next((m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)), 2)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    return Example((torch.randint(vocab, (2, num_tokens), generator=generator).to(device),), {})


def recorded(args: tuple[Any, ...], kwargs: dict[str, Any]) -> RecordedCall:
    """A call as it happens; what becomes of its results is not known."""
    return RecordedCall(*_copied((args, kwargs)))


def _copied(tree: Any) -> Any:
    """The same containers around copies of the tensors, which know whether they need a gradient, and of objects."""

    def plain(tensor: Tensor) -> Tensor:
        value = tensor.detach().cpu()
        return value.float().clone() if value.is_floating_point() else value.clone()

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return own_copy(leaf, plain)
        return plain(leaf).requires_grad_(leaf.requires_grad and leaf.is_floating_point())

    return tree_map(one, tree)


def is_linear(module: nn.Module) -> bool:
    """An `nn.Linear`, or GPT-2's Conv1D, whatever its forward."""
    return isinstance(module, nn.Linear) or (type(module).__name__ == "Conv1D" and hasattr(module, "nf"))


def holds_linears(module: nn.Module) -> bool:
    """Whether there are linears in a module that is none itself."""
    return not is_linear(module) and any(map(is_linear, module.modules()))
