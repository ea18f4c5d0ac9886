"""Operators whose results are kept when a layer is recomputed."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fastpar.comm.recompute_cache import kept, tensors_of, writes_to

# Matrix products, convolutions, attention, and collectives of torch's functional kind. Others run in microseconds.
_DEFAULT = (
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::baddbmm",
    "aten::_scaled_mm",
    "aten::_grouped_mm",
    "aten::convolution",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_fused_attention_overrideable",
    "_c10d_functional::all_reduce",
    "_c10d_functional::all_gather_into_tensor",
    "_c10d_functional::reduce_scatter_tensor",
    "_c10d_functional::all_to_all_single",
    "_c10d_functional::broadcast",
)


@functools.cache
def default_ops() -> frozenset[Any]:
    """The operators of the list above that this torch has."""
    found = set()
    for name in _DEFAULT:
        namespace, _, op = name.partition("::")
        packet = getattr(getattr(torch.ops, namespace), op, None)
        if packet is not None:
            found.add(packet.default)
    return frozenset(found)


def check_ops(ops: Iterable[Any]) -> frozenset[Any]:
    """The operators as a set. TypeError for what is no overload, ValueError for one that writes to or returns views of
    its arguments."""
    ops = tuple(ops)
    for op in ops:
        if not isinstance(op, torch._ops.OpOverload):
            raise TypeError(f"keep takes operator overloads such as torch.ops.aten.mm.default, got {op!r}")
        if any(argument.alias_info is not None for argument in (*op._schema.arguments, *op._schema.returns)):
            raise ValueError(f"{op} writes to or returns views of its arguments; only new tensors can be kept")
    return frozenset(ops)


@functools.cache
def _written(op: Any) -> tuple[tuple[int, str], ...]:
    """The place and the name of every argument that an operator writes to."""
    arguments = enumerate(op._schema.arguments)
    return tuple((i, each.name) for i, each in arguments if each.alias_info is not None and each.alias_info.is_write)


class KeepOps(TorchDispatchMode):
    """Runs the operators through `fastpar.comm.recompute_cache.kept`, in the order in which they come."""

    def __init__(self, ops: frozenset[Any]):
        super().__init__()
        self.ops = ops

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in self.ops:
            for number, name in _written(func):
                for x in tensors_of(args[number] if number < len(args) else kwargs.get(name)):
                    writes_to(x)
            return func(*args, **kwargs)
        return kept(lambda: func(*args, **kwargs))
