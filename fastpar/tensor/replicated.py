"""Modules that stay whole on every rank: norms, position embeddings, routers.

Their parameters become `Replicate()` DTensors, so that an optimizer sees one kind of parameter throughout the model,
and their code runs unchanged. Where a rank sees only part of the work (its part of the sequence, or its own heads, as
the query/key norms of Qwen3 do), its gradient is a partial sum and is all-reduced when it is computed.

Note: how the module's own forward gets plain tensors
    `replicate` gives the instance a generated subclass with one property per parameter. `self.weight` inside the
    module's forward then is the unwrapped local tensor, connected to the parameter by one autograd node. This is the
    mechanism of `torch.nn.utils.parametrize`; it works for any module without knowing its formula, so that numerics
    stay exactly those of the class that the user chose. Code that is no forward gets a `ValueOfParameter`.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fastpar.arguments import checked
from fastpar.tensor.binding import Adoption, GroupLike, bind, class_like
from fastpar.tensor.grid_layout import GridLayout
from fastpar.tensor.parameter import (
    MakeParameter,
    ParallelModule,
    ParameterLayout,
    RowMap,
    install_state_dict_hooks,
    is_sharded_further,
    local_tensor,
)


class ValueOfParameter(Tensor):
    """A parameter's local values, connected to it in autograd, for code outside of a forward: each reading is another
    tensor, so that what such code asks of a parameter is asked of the parameter: its gradient, flags and hooks."""

    _parameter: Any
    _as_dtensor: Callable[[Tensor], Tensor]
    _is_param = True  # what isinstance(x, nn.Parameter) asks, and with it an assignment to a module's attribute
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # results are plain

    @property
    def data(self) -> Tensor:
        return cast(Tensor, Tensor.data.__get__(self))  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: Tensor) -> None:
        self._parameter.data = value

    @property
    def grad(self) -> Tensor | None:
        return None if self._parameter.grad is None else local_tensor(self._parameter.grad)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None and not isinstance(value, DTensor):
            if value.shape != self.shape:  # of a DTensor torch sees the shape that it is said to have
                raise RuntimeError(
                    f"a gradient must be {tuple(self.shape)}, as its parameter, not {tuple(value.shape)}"
                )
            value = self._as_dtensor(value)
        self._parameter.grad = value

    @property
    def requires_grad(self) -> bool:
        return bool(self._parameter.requires_grad)

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self._parameter.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> Tensor:
        self._parameter.requires_grad_(requires_grad)
        return self

    def register_hook(self, hook: Any) -> Any:
        return self._parameter.register_hook(hook)

    def register_post_accumulate_grad_hook(self, hook: Any) -> Any:
        return self._parameter.register_post_accumulate_grad_hook(hook)

    def __deepcopy__(self, memo: Any) -> Tensor:
        return copy.deepcopy(self.as_subclass(Tensor), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)


def _unwrapping_property(name: str) -> property:
    def read(self: Any) -> Tensor | None:
        param = self._parameters[name]
        if param is not None and is_sharded_further(param):
            return cast(Tensor, param)  # not in a forward: fully_shard asks for its own parameters so
        local = cast("Tensor | None", self._local(name, sum_grad=name in self._sum_grad))
        if local is None or torch.compiler.is_compiling():
            return local
        if sys._getframe(1).f_code.co_name.endswith("forward") or self._layouts[name].picks_rows:  # the usual, as it is
            if local.grad_fn is not None:
                local.register_hook = param.register_hook  # type: ignore[method-assign]
            return local
        value: Any = local if local.grad_fn is not None else local.view_as(local)
        value.__class__ = ValueOfParameter
        value._parameter, value._as_dtensor = param, self._layouts[name].as_dtensor
        return cast(Tensor, value)

    return property(read)


def _register_parameter_of(original: type[nn.Module]) -> Callable[..., None]:
    def register_parameter(self: Any, name: str, param: Any) -> None:
        """`module.weight = module.weight` registers the parameter, of which that is a value to read."""
        original.register_parameter(self, name, param._parameter if isinstance(param, ValueOfParameter) else param)

    return register_parameter


def _alias_property(name: str) -> property:
    # The parameter as it is: code that computed with it would need this module's own layout, and torch refuses DTensors
    # among plain tensors.
    return property(lambda self: self._parameters[name])


@checked(computed=False)
def replicate(
    module: nn.Module,
    group: GroupLike = None,
    *,
    sum_grad: bool | Collection[str] = False,
    rows: Mapping[str, RowMap] | None = None,
    aliases: Mapping[str, ParameterLayout] | None = None,
    make: MakeParameter | None = None,
    layout: Callable[[str, torch.Size], Any] | None = None,
) -> Adoption:
    """Keep a module's own parameters whole on every rank of `group`; in place.

    forward   the module's own code on the whole parameter, or on this rank's rows of those in `rows`, by name
    wgrad     the local gradient; with `sum_grad` its all_reduce over the group (one per parameter and backward),
              for modules that see only this rank's part of the sequence or of the heads: of all parameters, or of
              those named
    layout    that of a parameter by its name and shape, where it is another than whole over the group
    aliases   parameters, by name, that this module only holds a second name for, with the layout of the module that
              computes with them

    Returns the `Adoption`, whose `undo` gives the module back. Parameters of child modules are left alone.
    """
    own = [name for name, param in module._parameters.items() if param is not None]
    if not own:
        raise ValueError(f"module: this {type(module).__name__} has no parameters of its own to replicate")
    device_type = next(p.device.type for p in module._parameters.values() if p is not None)
    comm, mesh = bind(group, device_type)
    original = type(module)
    aliases = aliases or {}
    namespace: dict[str, Any] = {
        name: _alias_property(name) if name in aliases else _unwrapping_property(name) for name in own
    }
    namespace["register_parameter"] = _register_parameter_of(original)
    adoption = Adoption(module, class_like(original, ParallelModule, **namespace))
    parallel: Any = module
    rows = rows or {}
    summed = (own if sum_grad else ()) if isinstance(sum_grad, bool) else sum_grad
    parallel._sum_grad = set(summed) - set(rows) - set(aliases)
    try:
        for name in own:
            full = adoption.original_parameters[name]
            assert full is not None
            made: Any = aliases.get(name)
            if made is None and layout is not None:
                try:
                    made = layout(name, full.shape)
                except TypeError as error:
                    raise TypeError(f"layout cannot be called with a name and a shape: {error}") from error
                if not isinstance(made, (ParameterLayout, GridLayout)):
                    raise TypeError(f"layout must return a ParameterLayout or a GridLayout, got {type(made).__name__}")
            if made is None:
                made = ParameterLayout(comm, mesh, full.shape, 0, rows.get(name))
            parallel._add_parameter(name, full, made, make)
    except BaseException:
        adoption.undo()
        raise
    adoption.handles.extend(install_state_dict_hooks(module))
    return adoption
