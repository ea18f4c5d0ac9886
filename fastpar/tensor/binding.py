"""From what a caller passes as `group` to what a layer needs: a Communicator and a mesh for its DTensors."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from fastpar.arguments import checked
from fastpar.comm import Communicator
from fastpar.tensor.grid import Grid
from fastpar.tensor.own_forward import has_hooks, has_own_forward, keeping_forward, prove_own_forward

# What decides on the numbers of a parallel layer; the others say how it fits into a model.
_PROVEN_OPTIONS = ("rows", "sections", "gather_output", "input_is_parallel", "input_prepared")


class BoundGroup(NamedTuple):
    """A group as layers use it. Layers of one model share one, so that its collectives are numbered in one sequence."""

    comm: Communicator
    mesh: DeviceMesh | None  # of the same ranks, for DTensors; None for a lone rank without torch.distributed

    def __deepcopy__(self, memo: Any) -> BoundGroup:
        return self  # a copied model runs on the same group


GroupLike = ProcessGroup | DeviceMesh | Communicator | BoundGroup | None


def bind(group: GroupLike, device_type: str) -> BoundGroup:
    """The communicator of `group`, and a one-dimensional mesh over the same ranks; unchanged if it is bound already."""
    if isinstance(group, BoundGroup):
        return group
    comm = Communicator.of(group)
    if isinstance(group, DeviceMesh):
        return BoundGroup(comm, group)
    return BoundGroup(comm, None if comm.group is None else DeviceMesh.from_group(comm.group, device_type))


def blank(cls: type[Any]) -> Any:
    """An instance of a module class with `nn.Module`'s own state and nothing else, for `from_...` constructors."""
    layer = object.__new__(cls)
    nn.Module.__init__(layer)
    return layer


def class_like(original: type[Any], /, *before: type[Any], **namespace: Any) -> type[Any]:
    """A subclass with what stands before and in the namespace, for `Adoption`. It has the name of the original: others
    go by it, as transformers does to find out what a model can record, and users who sort parameters."""
    same = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(original.__name__, (*before, original), same | namespace)


class Adoption:
    """Turns an existing module into a parallel one in place, and back.

    The module object stays: its hooks, its place in the model and references to it survive. What changes is its class,
    its parameters and the attributes that the parallel layer sets; `undo` restores all three. Swapping the object
    instead would not do for `torch.distributed.tensor.parallel.parallelize_module`, which drops what a style returns.

    What is set after `settle` is the user's, or the module's own code's that counts its calls: `undo` leaves it.
    """

    def __init__(self, module: nn.Module, cls: type[nn.Module]):
        self.module = module
        self.original_class = module.__class__
        self.original_dict = dict(module.__dict__)
        self.original_parameters = dict(module._parameters)
        self.handles: list[Any] = []
        self._own: frozenset[str] | None = None  # attributes that the parallel layer has set; None: not known yet
        module.__class__ = cls

    def settle(self) -> None:
        """Say that the parallel module is complete."""
        before = self.original_dict
        self._own = frozenset(k for k, v in self.module.__dict__.items() if k not in before or v is not before[k])

    def undo(self) -> None:
        """Give the module its class, its attributes and its original parameter objects back."""
        module = self.module
        for handle in self.handles:
            handle.remove()
        training = module.training
        module.__class__ = self.original_class
        own = set(module.__dict__) | set(self.original_dict) if self._own is None else self._own
        for name in own:
            if name in self.original_dict:
                module.__dict__[name] = self.original_dict[name]
            else:
                module.__dict__.pop(name, None)
        module.training = training
        module._parameters.clear()
        module._parameters.update(self.original_parameters)


@checked(computed=False)
def adopt(
    module: nn.Module, cls: type[Any], group: GroupLike | Grid, *, is_proven: bool = False, **options: Any
) -> Adoption:
    """Turn `module` into the parallel layer `cls` in place; `options` are those of the layer's `from_...` constructor.

    A forward of its own is kept around the parallel layer's, after `prove_adoption` has shown that this is right (which
    `is_proven` says has been done). On an error the module is left as it was.
    """
    if not hasattr(cls, "_configure"):
        raise TypeError(f"cls must be a parallel layer of fastpar.tensor, got {cls.__name__}")
    if not module._parameters:
        raise TypeError(f"module must have parameters to split, got {type(module).__name__}")
    own = has_own_forward(module)
    if own and not is_proven:
        if isinstance(group, Grid):
            raise TypeError(f"module: a {type(module).__name__} with a forward of its own cannot be kept on a grid")
        prove_adoption(type(module).__name__, module, cls, group, options)
    source = copy.copy(module)
    source.__dict__["_parameters"] = dict(module._parameters)
    adoption = Adoption(module, keeping_forward(cls, type(module)) if own else cls)
    try:
        cast(Any, module)._configure(source, group, **options)
    except BaseException:
        adoption.undo()
        raise
    adoption.handles.extend(getattr(module, "_state_handles", []))
    return adoption


def prove_adoption(
    path: str, module: nn.Module, cls: type[Any], group: GroupLike, options: Mapping[str, Any] | None = None
) -> None:
    """TypeError on every rank unless `cls` around the module's own forward and hooks computes what the module does.
    Collective; nothing to do where neither is its own."""
    if not (has_own_forward(module) or has_hooks(module)):
        return
    device_type = next((p.device.type for p in module.parameters()), "cpu")
    bound = bind(group, device_type)
    kept = {name: value for name, value in (options or {}).items() if name in _PROVEN_OPTIONS}

    def split(twin: nn.Module) -> nn.Module:
        adopt(twin, cls, bound, is_proven=True, **kept)
        return twin

    prove_own_forward(path, module, bound.comm, split)
