"""Which modules of a model compute the same on other numbers, so that a trial of one speaks for all.

Two modules are of one kind if their classes, hooks, and all that their code may read agree: sizes, options, functions
with what they close over; and if the model calls them alike. Only their index differs, `layer_idx` and the like. What
is done with it no attribute tells, so the first of a kind is run with the index of each of the others: those for which
its output differs are tried by themselves.
"""

from __future__ import annotations

import functools
import re
import types
import warnings
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from fastpar.contracts.rehearsal import own_attributes, same_generators
from fastpar.parallel.styles import Style
from fastpar.parallel.trial import RecordedCall
from fastpar.parallel.trial.copies import fresh_leaves, noisy_copy, sharing_copy

_INDEX = re.compile(r"(^|_)(id|index|idx)$")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_DEEP = 8  # objects within objects; what lies deeper is told by its class


def alike(modules: Mapping[str, nn.Module], paths: Iterable[str], styles: Mapping[str, Style]) -> list[list[str]]:
    """Modules that have the same classes, shapes, attributes, hooks and styles inside, by path; the first stands for
    the others."""
    keys, groups = _Keys(), dict[Hashable, list[str]]()
    for path in paths:
        inner = tuple((name[len(path) :], style) for name, style in styles.items() if name.startswith(f"{path}."))
        groups.setdefault((keys.of_tree(modules[path]), inner), []).append(path)
    return list(groups.values())


def called_alike(
    modules: Mapping[str, nn.Module], group: Sequence[str], calls: Mapping[str, RecordedCall]
) -> list[list[str]]:
    """A group of `alike` in the parts that are called alike, and compute the same with each other's index."""
    keys, parts = _Keys(), dict[Hashable, list[str]]()
    for path in group:
        parts.setdefault(keys.of_call(calls[path]) if path in calls else None, []).append(path)
    return [same for part in parts.values() for same in _with_each_index(modules, part, calls)]


def _with_each_index(
    modules: Mapping[str, nn.Module], group: list[str], calls: Mapping[str, RecordedCall]
) -> list[list[str]]:
    """A group in parts: those with whose index the first computes the same."""
    first = group[0]
    if len(group) == 1 or first not in calls:
        return [group]
    mine = _indices(modules[first], calls[first])
    others = {path: _indices(modules[path], calls[path]) for path in group[1:]}
    if all(index == mine for index in others.values()):
        return [group]
    source = noisy_copy(modules[first])
    try:
        wanted = _output_with_index(source, calls[first], mine)
    except Exception:  # of the module's own code: any; so does its trial
        return [group]
    parts: list[tuple[list[Tensor], list[str]]] = [(wanted, [first])]
    for path, index in others.items():
        try:
            found = wanted if index == mine else _output_with_index(source, calls[first], index)
        except Exception:  # of code to which this index means something else
            found = []
        for seen, part in parts:
            if len(seen) == len(found) > 0 and all(torch.equal(a, b) for a, b in zip(seen, found, strict=True)):
                part.append(path)
                break
        else:
            parts.append((found, [path]))
    return [part for _, part in parts]


def _indices(module: nn.Module, call: RecordedCall) -> dict[tuple[str, str], int]:
    """What only counts modules, by path of the module inside and name, or "call" and name."""
    found = {
        (name, k): v for name, child in module.named_modules() for k, v in vars(child).items() if _counts_modules(k, v)
    }
    return found | {("call", k): v for k, v in call.kwargs.items() if _counts_modules(k, v)}


def _counts_modules(name: str, value: Any) -> bool:
    return type(value) is int and _INDEX.search(name) is not None


@torch.no_grad()
def _output_with_index(source: nn.Module, call: RecordedCall, indices: Mapping[tuple[str, str], int]) -> list[Tensor]:
    twin = sharing_copy(source)
    (args, kwargs), _ = fresh_leaves((call.args, call.kwargs))
    for (path, name), value in indices.items():
        if path == "call":
            kwargs[name] = value
        else:
            vars(twin.get_submodule(path))[name] = value
    with same_generators(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        output = twin(*args, **kwargs)
    values = list(output.values()) if isinstance(output, Mapping) else output
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


class _Keys:
    """Keys of modules and values, equal where what code reads from them is: by value, not by identity, since layers
    hold copies. Keys are small numbers, so that what many modules share is compared once."""

    def __init__(self) -> None:
        self.numbers: dict[Hashable, int] = {}
        self.objects: dict[int, tuple[Any, int]] = {}  # by id, with the object, which must live as long
        self.inside: set[int] = set()

    def number(self, key: Hashable) -> int:
        return self.numbers.setdefault(key, len(self.numbers))

    def of_tree(self, module: nn.Module) -> int:
        """The key of a module with all modules inside."""
        return self.number(tuple((name, self.of_module(child)) for name, child in module.named_modules()))

    def of_call(self, call: RecordedCall) -> int:
        kwargs = {k: v for k, v in call.kwargs.items() if not _counts_modules(k, v)}
        plain = tree_map_only(Tensor, lambda t: ("tensor", tuple(t.shape), t.dtype), (call.args, kwargs))
        flat, spec = tree_flatten(plain)
        return self.number((str(spec), tuple(self.of(value) for value in flat)))

    def of_module(self, module: nn.Module, depth: int = 0) -> int:
        if id(module) not in self.objects:
            own = {k: v for k, v in own_attributes(module).items() if not _counts_modules(k, v)}
            hooks = [fn for name in _HOOKS for fn in vars(module)[name].values()]
            tensors = [*module._parameters.items(), *module._buffers.items()]
            shapes = tuple((k, tuple(t.shape)) for k, t in tensors if t is not None)
            said = tuple((k, self.of(v, depth + 1)) for k, v in sorted(own.items()))
            called = tuple(self.of(fn, depth + 1) for fn in hooks)
            self.objects[id(module)] = module, self.number((type(module), module.training, said, called, shapes))
        return self.objects[id(module)][1]

    def of(self, value: Any, depth: int = 0) -> int:
        """The key of any value."""
        if value is None or isinstance(value, bool | int | float | complex | str | bytes):
            return self.number((type(value), repr(value)))
        if isinstance(value, Tensor):
            return self.number((type(value), tuple(value.shape), value.dtype))
        if id(value) in self.objects:
            return self.objects[id(value)][1]
        if id(value) in self.inside or depth > _DEEP:
            return self.number((type(value),))
        self.inside.add(id(value))
        try:
            key = self._of_object(value, depth + 1)
        finally:
            self.inside.discard(id(value))
        self.objects[id(value)] = value, key
        return key

    def _of_object(self, value: Any, depth: int) -> int:
        def each(values: Iterable[Any]) -> tuple[int, ...]:
            return tuple(self.of(v, depth) for v in values)

        kind: Any = type(value)
        if isinstance(value, nn.Module):
            return self.of_module(value, depth)
        if isinstance(value, list | tuple):
            return self.number((kind, each(value)))
        if isinstance(value, Mapping):
            return self.number((kind, each(value), each(value.values())))
        if isinstance(value, set | frozenset):
            return self.number((kind, frozenset(each(value))))
        if isinstance(value, types.FunctionType):
            cells = each(cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType())
            defaults = each([*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()])
            return self.number((kind, value.__code__, cells, defaults))
        if isinstance(value, types.MethodType):
            return self.number((kind, each([value.__func__, value.__self__])))
        if isinstance(value, functools.partial):
            return self.number((kind, each([value.func, value.args, value.keywords])))
        if isinstance(value, type) or not hasattr(value, "__dict__"):
            return self.number((kind, value if isinstance(value, Hashable) else id(value)))
        return self.number((kind, tuple((k, self.of(v, depth)) for k, v in sorted(vars(value).items()))))
