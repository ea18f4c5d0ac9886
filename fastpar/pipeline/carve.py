"""Cut one model object into one per part, without copying what a single part holds.

Note: what is moved and what is copied
    A *unit* (the embedding, a layer, the head) belongs to one part and moves there as it is: the same module object
    with its hooks, the same parameters. On the other parts a stand-in takes its place. The modules around units (the
    model itself, containers) run on every part: the first kept part takes the original objects, further parts on the
    same rank get shallow copies of them. Everything else (rotary tables, modules declared as shared) is used by all
    parts; the first kept part takes the original, each further one a deep copy.

    The same rule holds for tensors by identity: a parameter that two parts use (tied embeddings) stays the original
    object in the first of them and is cloned once for each other part. Within a part, ties stay ties.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

MakeAbsent = Callable[[nn.Module, str, int], nn.Module]


def carve(
    model: nn.Module, owners: Mapping[str, int], absent: Mapping[str, MakeAbsent], parts: Sequence[int]
) -> dict[int, nn.Module]:
    """The model of each of `parts`; the first is the given model, changed in place.

    owners  unit path to the part that holds it
    absent  unit path to what makes its stand-in: (original, path, part that holds it) -> module
    """
    taken: dict[int, tuple[int, Any]] = {}  # id of a module or tensor -> (the part that has the original, the object)
    carved: dict[int, nn.Module] = {}
    pending: list[tuple[nn.Module, dict[str, nn.Module | None]]] = []
    for number, part in enumerate(parts):
        carver = _Part(part, owners, absent, taken, pending if number == 0 else None)
        carved[part] = carver.rebuild(model, "")
    for module, children in pending:
        module._modules.clear()
        module._modules.update(children)
    return carved


class _Part:
    """The objects of one part. `pending`: where children of original containers are noted (they are needed as they are
    until every part is built); None: containers are copied.
    """

    def __init__(
        self,
        part: int,
        owners: Mapping[str, int],
        absent: Mapping[str, MakeAbsent],
        taken: dict[int, tuple[int, Any]],
        pending: list[tuple[nn.Module, dict[str, nn.Module | None]]] | None,
    ):
        self.part, self.owners, self.absent, self.taken, self.pending = part, owners, absent, taken, pending
        self.mine: dict[int, Any] = {}  # id of an object of the model -> the object that this part has for it

    def rebuild(self, module: nn.Module, path: str) -> nn.Module:
        owner = self.owners.get(path)
        if owner is not None and owner != self.part:
            return self.absent[path](module, path, owner)
        if owner is not None or not any(unit.startswith(path + "." if path else "") for unit in self.owners):
            return self._whole(module)
        if id(module) not in self.mine:
            around = module if self.pending is not None else _shallow(module)
            self.mine[id(module)] = around
            self._take_tensors(module, around)
            children = {
                name: None if child is None else self.rebuild(child, f"{path}.{name}" if path else name)
                for name, child in module._modules.items()
            }
            if self.pending is not None:
                self.pending.append((module, children))
            else:
                around._modules.update(children)
        return self.mine[id(module)]

    def _whole(self, module: nn.Module) -> nn.Module:
        """A module with all that is in it: the original, or a deep copy where another part has any module of it."""
        if id(module) in self.mine:
            return self.mine[id(module)]
        inside = list(module.modules())
        if any(self.taken.get(id(m), (self.part,))[0] != self.part for m in inside):
            for tensor in (*module.parameters(), *module.buffers()):
                self._tensor(tensor)
            self.mine[id(module)] = copy.deepcopy(module, self.mine)
            return self.mine[id(module)]
        for m in inside:
            self.taken[id(m)] = (self.part, m)
            self.mine[id(m)] = m
            self._take_tensors(m, m)
        return module

    def _take_tensors(self, source: nn.Module, target: nn.Module) -> None:
        for tensors, new in ((source._parameters, target._parameters), (source._buffers, target._buffers)):
            for name, tensor in list(tensors.items()):
                new[name] = None if tensor is None else self._tensor(tensor)

    def _tensor(self, tensor: Tensor) -> Any:
        if id(tensor) not in self.mine:
            owner, _ = self.taken.setdefault(id(tensor), (self.part, tensor))
            self.mine[id(tensor)] = tensor if owner == self.part else copy.deepcopy(tensor)
        return self.mine[id(tensor)]


def _shallow(module: nn.Module) -> nn.Module:
    """The same module with dictionaries of its own, so that children, tensors and hooks can differ."""
    twin = copy.copy(module)
    for name, value in vars(twin).items():
        if type(value) in (dict, OrderedDict, set):
            twin.__dict__[name] = value.copy()
    return twin
