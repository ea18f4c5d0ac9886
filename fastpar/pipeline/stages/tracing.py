"""The graph of the code between a model's modules, or an error that says what a graph would not keep.

torch.fx runs a forward once, with stand-ins for its inputs, and writes down what is done to them. All else that the
code does happens in that run, and never again: random numbers and the choices of a mode are constants from then on, a
change of an attribute is made once, `no_grad` and autocast are left out, and so are hooks. Each of these would be
another model without a word, so the run is watched, and repeated in the other of training and evaluation and without
the optional inputs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx, nn

from fastpar.contracts.containers import containers_in, items_of, put_back
from fastpar.contracts.rehearsal import own_attributes, same_generators

CONSTANT = "_tensor_constant"  # torch.fx's names for the tensors that traced code has made
_TORCH = str(Path(torch.__file__).parent)
_DEVICES = ("cpu", "cuda")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_ADVICE = "put that code into a module of its own, which is not traced unless it contains a split point"


class Traced(NamedTuple):
    """graph     the forward
    deciding  optional inputs without which the forward is another one: the graph is for calls that give them
    """

    graph: fx.Graph
    deciding: frozenset[str]


def trace(model: nn.Module, traced: Set[str]) -> Traced:
    """The forward with a look into the modules of these paths, the root's "" among them. ValueError, which says why,
    for code that a graph cannot stand for."""
    modules = [model.get_submodule(path) for path in sorted(traced)]
    for module in modules:
        if hooks := [hook for kind in _HOOKS for hook in getattr(module, kind).values()]:
            raise ValueError(
                f"{type(module).__name__} contains a split point, so its forward is traced, and its hook {hooks[0]} "
                "would not run: register it at a module within, or choose other split points"
            )
    with same_generators() as has_drawn, _attributes_of(modules) as changed:
        graph = _graph(model, traced)
        if has_drawn():
            raise ValueError(
                "it draws random numbers, which a trace would keep: draw them for a tensor (torch.rand_like), or "
                f"{_ADVICE}"
            )
        if names := changed():
            raise ValueError(
                f"it changes {', '.join(names)}, which a trace does once and no part ever: make it a buffer that is "
                f"written in place, or {_ADVICE}"
            )
        with _other_mode(model):
            if not _is_same(model, graph, _again(model, traced)):
                raise ValueError(
                    "it does something else in training than in evaluation (functional dropout, say), and a trace "
                    f"would keep one of them: {_ADVICE}"
                )
        optional = {str(node.target): node.args[0] for node in graph.nodes if node.op == "placeholder" and node.args}
        return Traced(graph, frozenset(_deciding(model, traced, graph, optional)))


def _deciding(model: nn.Module, traced: Set[str], graph: fx.Graph, optional: Mapping[str, Any]) -> list[str]:
    def is_same_without(names: Iterable[str]) -> bool:
        left_out = {name: optional[name] for name in names}
        return _is_same(model, graph, _again(model, traced, left_out), left_out)

    if not optional or is_same_without(optional):
        return []
    return [name for name in optional if not is_same_without([name])] or list(optional)


def _graph(model: nn.Module, traced: Set[str], left_out: Mapping[str, Any] | None = None) -> fx.Graph:
    tracer = _Tracer(traced, left_out)
    try:
        return tracer.trace(model)
    finally:
        tracer.is_running = False


class _Tracer(fx.Tracer):
    """Looks into the modules that contain a split point. `left_out`: inputs that have their defaults."""

    def __init__(self, traced: Set[str], left_out: Mapping[str, Any] | None = None):
        super().__init__()
        self._traced, self._left_out, self._modes = traced, left_out or {}, _modes()
        self.is_running = True

    def is_leaf_module(self, module: nn.Module, path: str) -> bool:
        return path not in self._traced

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *more: Any, **named: Any) -> Any:
        if kind == "placeholder" and target in self._left_out:
            return self._left_out[target]
        return super().create_proxy(kind, target, args, kwargs, *more, **named)

    def create_node(self, kind: str, target: Any, *more: Any, **named: Any) -> fx.Node:
        for mode, value in _modes().items():
            if value != self._modes[mode]:
                raise ValueError(f"it runs {target} with {mode} {value}, which a trace does not keep: {_ADVICE}")
        return super().create_node(kind, target, *more, **named)


def _modes() -> dict[str, Any]:
    """What a `with` around code may set for what runs in it."""
    found: dict[str, Any] = {
        "gradients enabled:": torch.is_grad_enabled(),
        "inference mode enabled:": torch.is_inference_mode_enabled(),
        "a number of modes of torch:": torch.overrides._len_torch_function_stack(),
    }
    for device in _DEVICES:
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        found[f"autocast of {device}:"] = dtype
    return found


class _Proxy(fx.Proxy):
    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """What isinstance() asks an object whose type is none of those it was given, and so do functions in C."""
        caller = sys._getframe(1).f_code
        is_running = cast(_Tracer, self.tracer).is_running
        if is_running and "isinstance" in caller.co_names and not caller.co_filename.startswith(_TORCH):
            raise ValueError(
                f"{caller.co_name} asks for the type of {self.node}, which is a stand-in while it is traced: {_ADVICE}"
            )
        return type(self)


@contextmanager
def _attributes_of(modules: Iterable[nn.Module]) -> Iterator[Callable[[], list[str]]]:
    """Leave what these modules hold beside tensors and modules as it is, but for a graph's constants; yields which
    attributes have been changed."""
    before = [(module, own_attributes(module)) for module in modules]
    contents = [(x, items_of(x)) for x in containers_in(v for _, own in before for v in own.values())]

    def changed() -> list[str]:
        touched = {id(container) for container, items in contents if not _holds(container, items)}
        found = []
        for module, own in before:
            now = _without_constants(own_attributes(module))
            names = [key for key in own.keys() | now.keys() if key not in now or own.get(key, changed) is not now[key]]
            names += [key for key in own if touched & {id(x) for x in containers_in([own[key]])}]
            found += [f"self.{key} of {type(module).__name__}" for key in sorted(set(names))]
        return found

    is_kept = False
    try:
        yield changed
        is_kept = True
    finally:
        for module, own in before:
            now = own_attributes(module)
            now = _without_constants(now) if is_kept else now
            for key in now.keys() - own.keys():
                del module.__dict__[key]
            module.__dict__.update(own)
        for container, items in contents:
            if not _holds(container, items):
                put_back(container, items)


def _without_constants(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if not name.startswith(CONSTANT)}


def _holds(container: Any, items: Any) -> bool:
    """Whether these very objects are in it: tensors and stand-ins do not compare."""
    if isinstance(container, dict):
        return container.keys() == items.keys() and all(container[key] is value for key, value in items.items())
    if isinstance(container, set):
        return bool(container == items)
    return len(container) == len(items) and all(a is b for a, b in zip(container, items, strict=True))


@contextmanager
def _other_mode(model: nn.Module) -> Iterator[None]:
    """Training in the place of evaluation for every module, and the reverse."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        for module, mode in modes:
            module.training = not mode
        yield
    finally:
        for module, mode in modes:
            module.training = mode


# ---- the same graph? -------------------------------------------------------------------------------------------------


class _Again(NamedTuple):
    """Another run's graph, and the tensors that its code has made."""

    graph: fx.Graph
    constants: dict[str, Tensor]


def _again(model: nn.Module, traced: Set[str], left_out: Mapping[str, Any] | None = None) -> _Again | None:
    """None: what the code does then fails, or cannot be traced."""
    modules = [model.get_submodule(path) for path in traced]
    before = set(vars(model))
    try:
        with same_generators(), _attributes_of(modules):
            graph = _graph(model, traced, left_out)
    except Exception:
        graph = None
    own = {name: vars(model).pop(name) for name in set(vars(model)) - before if name.startswith(CONSTANT)}
    return None if graph is None else _Again(graph, own)


def _is_same(model: nn.Module, graph: fx.Graph, again: _Again | None, given: Mapping[str, Any] | None = None) -> bool:
    """Whether a graph does what another does, where some of its inputs have these values."""
    if again is None:
        return False
    others = iter(again.graph.nodes)
    values: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if node.op == "placeholder" and given and node.target in given:
            values[node] = given[node.target]
            continue
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        if _is_known(node, args, kwargs):
            try:
                values[node] = _value(node, args, kwargs)
            except Exception:  # as the code itself would
                return False
            continue
        other = next(others, None)
        if other is None or node.op != other.op or not _is_equal((args, kwargs), (other.args, other.kwargs)):
            return False
        if node.target != other.target and not _is_same_constant(model, node, other, again):
            return False
        values[node] = other
    return next(others, None) is None


def _is_known(node: fx.Node, args: Any, kwargs: Any) -> bool:
    """Whether plain code would have had the value at once: a call with inputs, all of which are known."""
    if node.op not in ("call_function", "call_method") or not node.all_input_nodes:
        return False
    found: list[fx.Node] = []
    fx.node.map_arg((args, kwargs), found.append)
    return not found


def _value(node: fx.Node, args: Any, kwargs: Any) -> Any:
    if callable(node.target):
        return node.target(*args, **kwargs)
    return getattr(args[0], node.target)(*args[1:], **kwargs)


def _is_equal(one: Any, other: Any) -> bool:
    return bool(one == other) or repr(one) == repr(other)  # NaN


def _is_same_constant(model: nn.Module, node: fx.Node, other: fx.Node, again: _Again) -> bool:
    own, found = vars(model).get(str(node.target)), again.constants.get(str(other.target))
    return own is not None and found is not None and own.dtype == found.dtype and torch.equal(own, found)
