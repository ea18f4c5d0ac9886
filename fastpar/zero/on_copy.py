"""Copies of a model in stage 3 (`copy.deepcopy`, torch's AveragedModel): shards as the model has, which a copy gathers
for each module that runs, and frees after it. For averages of weights and their evaluation: nothing of it is sharded by
an optimizer, overlapped or kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

_AT_REST = "_fastpar_copy_at_rest"


class OnCopy:
    """What a hook of stage 3 is on a copy: "_before" gathers a module's own parameters, "_after" puts the shards back;
    the others do nothing. Collective, as forward is."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, module: nn.Module, *_: Any) -> None:
        if self._name == "_before" and _AT_REST not in vars(module):
            held = {name: x for name, x in module._parameters.items() if isinstance(x, DTensor)}
            vars(module)[_AT_REST] = held
            for name, x in held.items():
                _register(module, name, _whole(name, x))
        elif self._name == "_after":
            for name, x in vars(module).pop(_AT_REST, {}).items():
                _register(module, name, x)


def nothing_on_copy(*_: Any) -> None:
    """`unshard` and `reshard` of a copy, which gathers by itself."""


def _whole(name: str, x: Any) -> nn.Parameter:
    if x.device_mesh.mesh_dim_names is not None and "tp" in x.device_mesh.mesh_dim_names:
        raise RuntimeError(
            f"{name} is split by tensor parallelism as well: a copy of the model can hold values, and cannot run. Load "
            "them into a model, with load_state_dict"
        )
    with torch.no_grad():
        return nn.Parameter(x.full_tensor(), requires_grad=False)


def _register(module: nn.Module, name: str, parameter: Any) -> None:
    if type(module).__setattr__ is nn.Module.__setattr__:
        module._parameters[name] = parameter
    else:  # torch's recurrent layers keep a list of their weights
        setattr(module, name, parameter)
