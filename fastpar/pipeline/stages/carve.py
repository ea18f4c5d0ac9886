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
_Change = tuple[dict[str, Any], str, Any]


def carve(
    model: nn.Module, owners: Mapping[str, int], absent: Mapping[str, MakeAbsent], parts: Sequence[int]
) -> dict[int, nn.Module]:
    """The model of each of `parts`; the first is the given model, changed in place.

    owners  unit path to the part that holds it
    absent  unit path to what makes its stand-in: (original, path, part that holds it) -> module
    """
    shares = Shares()
    carved: dict[int, nn.Module] = {}
    for number, part in enumerate(parts):
        carver = _Carver(owners, absent, shares.of_part(part), shares if number == 0 else None)
        carved[part] = carver.rebuild(model, "")
    shares.finish()
    return carved


def carve_around(model: nn.Module, owners: Mapping[str, int], absent: Mapping[str, MakeAbsent], part: int) -> nn.Module:
    """A part beside the model, which stays as it is: its units, and what parts share, are the model's own."""
    return _Carver(owners, absent, Shares().of_part(part), None).rebuild(model, "")


class Shares:
    """Which part has the original of each module and tensor, over all kept parts.

    Originals change only in `finish`: until then every part is built from the model as it was.
    """

    def __init__(self) -> None:
        self.taken: dict[int, tuple[int, Any]] = {}  # id of a module or tensor -> (part, the object, to keep the id)
        self.changes: list[_Change] = []

    def of_part(self, part: int) -> PartShare:
        return PartShare(self, part)

    def finish(self) -> None:
        for target, name, value in self.changes:
            target[name] = value


class PartShare:
    """The modules and tensors of one part: originals where it is the first to use them, else copies."""

    def __init__(self, shares: Shares, part: int):
        self.shares, self.part = shares, part
        self.mine: dict[int, Any] = {}  # id of an object of the model -> the object that this part has for it

    def module(self, module: nn.Module) -> nn.Module:
        """A module with all that is in it: the original, or a deep copy where another part has any module of it."""
        if id(module) in self.mine:
            return self.mine[id(module)]
        inside, taken = list(module.modules()), self.shares.taken
        if any(taken.get(id(m), (self.part,))[0] != self.part for m in inside):
            for tensor in (*module.parameters(), *module.buffers()):
                self.tensor(tensor)
            self.mine[id(module)] = copy.deepcopy(module, self.mine)
            return self.mine[id(module)]
        for m in inside:
            taken[id(m)] = (self.part, m)
            self.mine[id(m)] = m
            self.shares.changes += self.tensors_of(m, m)
        return module

    def tensors_of(self, source: nn.Module, target: nn.Module) -> list[_Change]:
        """The assignments that give `target` this part's parameters and buffers of `source`."""
        pairs = ((source._parameters, target._parameters), (source._buffers, target._buffers))
        return [(new, name, self.tensor(t)) for old, new in pairs for name, t in old.items() if t is not None]

    def tensor(self, tensor: Tensor) -> Any:
        if id(tensor) not in self.mine:
            owner, _ = self.shares.taken.setdefault(id(tensor), (self.part, tensor))
            self.mine[id(tensor)] = tensor if owner == self.part else copy.deepcopy(tensor)
        return self.mine[id(tensor)]


class _Carver:
    """Builds one part. `original`: the containers are the model's own, and change when all is built; None: copies."""

    def __init__(
        self,
        owners: Mapping[str, int],
        absent: Mapping[str, MakeAbsent],
        share: PartShare,
        original: Shares | None,
    ):
        self.owners, self.absent, self.share, self.original = owners, absent, share, original
        self.containers: dict[int, nn.Module] = {}

    def rebuild(self, module: nn.Module, path: str) -> nn.Module:
        owner = self.owners.get(path)
        if owner is not None and owner != self.share.part:
            return self.absent[path](module, path, owner)
        if owner is not None or not any(unit.startswith(path + "." if path else "") for unit in self.owners):
            return self.share.module(module)
        if id(module) not in self.containers:
            container = module if self.original is not None else shallow_copy(module)
            self.containers[id(module)] = container
            changes = self.share.tensors_of(module, container)
            for name, child in module._modules.items():
                if child is not None:
                    rebuilt = self.rebuild(child, f"{path}.{name}" if path else name)
                    changes.append((container._modules, name, rebuilt))
            if self.original is not None:
                self.original.changes += changes
            else:
                for target, name, value in changes:
                    target[name] = value
        return self.containers[id(module)]


def shallow_copy(module: nn.Module) -> nn.Module:
    """The same module with dictionaries of its own, so that children, tensors and hooks can differ."""
    if nn.utils.parametrize.is_parametrized(module):  # whose __getstate__ refuses copies
        twin = type(module).__new__(type(module))
        twin.__dict__.update(nn.Module.__getstate__(module))
    else:
        twin = copy.copy(module)
    for name, value in vars(twin).items():
        if type(value) in (dict, OrderedDict, set):
            twin.__dict__[name] = value.copy()
    return twin
