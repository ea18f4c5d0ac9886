"""From what a caller passes as `group` to what a layer needs: a Communicator and a mesh for its DTensors."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple, cast

from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from fastpar.comm import Communicator


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


class Adoption:
    """Turns an existing module into a parallel one in place, and back.

    The module object stays: its hooks, its place in the model and references to it survive. What changes is its class,
    its parameters and the attributes that the parallel layer sets; `undo` restores all three. Swapping the object
    instead would not do for `torch.distributed.tensor.parallel.parallelize_module`, which drops what a style returns.
    """

    def __init__(self, module: nn.Module, cls: type[nn.Module]):
        self.module = module
        self.original_class = module.__class__
        self.original_dict = dict(module.__dict__)
        self.original_parameters = dict(module._parameters)
        self.handles: list[Any] = []
        module.__class__ = cls

    def undo(self) -> None:
        """Give the module its class, its attributes and its original parameter objects back."""
        module = self.module
        for handle in self.handles:
            handle.remove()
        training = module.training
        module.__class__ = self.original_class
        for name in set(module.__dict__) - set(self.original_dict):
            del module.__dict__[name]
        module.__dict__.update(self.original_dict)
        module.training = training
        module._parameters.clear()
        module._parameters.update(self.original_parameters)


def adopt(module: nn.Module, cls: type[Any], group: GroupLike, **options: Any) -> Adoption:
    """Turn `module` into the parallel layer `cls` in place; `options` are those of the layer's `from_...` constructor.

    On an error the module is left as it was.
    """
    source = copy.copy(module)
    source.__dict__["_parameters"] = dict(module._parameters)
    adoption = Adoption(module, cls)
    try:
        cast(Any, module)._configure(source, group, **options)
    except BaseException:
        adoption.undo()
        raise
    adoption.handles.extend(getattr(module, "_state_handles", []))
    return adoption
