"""What travels between stages: tensors inside tuples, lists and dicts, beside plain Python values.

A stage may return a tensor, or a tuple, list or dict of tensors, None and plain values (numbers, strings, dtypes; see
`fastpar.comm.plain_data`). `pack` takes the tensors out, and `unpack` puts others in their places. The structure
travels with every message as a few dozen bytes, so it may change from one microbatch to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastpar.comm import plain_data

_TENSOR, _VALUE, _TUPLE, _LIST, _DICT = "tensor", "value", "tuple", "list", "dict"
_ONE_TENSOR = (_TENSOR, True)

Structure = tuple[Any, ...]


def pack(value: Any) -> tuple[list[Tensor], Structure]:
    """(tensors, structure): the tensors of `value` in order, and what `unpack` needs to put them back."""
    if isinstance(value, Tensor):
        return [value], (_TENSOR, value.requires_grad)
    tensors: list[Tensor] = []
    return tensors, _pack(value, tensors)


def _pack(value: Any, tensors: list[Tensor]) -> Structure:
    kind = type(value)
    if isinstance(value, Tensor):
        tensors.append(value)
        return (_TENSOR, value.requires_grad)
    if kind is tuple or kind is list:
        return (_TUPLE if kind is tuple else _LIST, tuple(_pack(item, tensors) for item in value))
    if kind is dict:
        return (_DICT, tuple((key, _pack(item, tensors)) for key, item in value.items()))
    if _holds_tensors(value):
        raise TypeError(
            f"a stage returned a {kind.__name__} that holds tensors; return tensors, tuples, lists or dicts "
            "(for output objects: one of their fields)"
        )
    return (_VALUE, value)


def unpack(tensors: Sequence[Tensor], structure: Structure) -> Any:
    """The inverse of `pack`."""
    return _unpack(iter(tensors).__next__, structure)


def _unpack(take: Callable[[], Tensor], structure: Structure) -> Any:
    kind, content = structure
    if kind == _TENSOR:
        return take()
    if kind == _VALUE:
        return content
    if kind == _DICT:
        return {key: _unpack(take, item) for key, item in content}
    items = [_unpack(take, item) for item in content]
    return tuple(items) if kind == _TUPLE else items


def grad_flags(structure: Structure) -> list[bool]:
    """Whether each tensor required a gradient where it was packed."""
    kind, content = structure
    if kind == _TENSOR:
        return [content]
    if kind == _VALUE:
        return []
    items = [item for _, item in content] if kind == _DICT else content
    return [flag for item in items for flag in grad_flags(item)]


def encode(structure: Structure) -> bytes:
    """The structure as bytes; empty for a single tensor that requires a gradient, by far the most common."""
    if structure == _ONE_TENSOR:
        return b""
    try:
        return plain_data.encode(structure)
    except (TypeError, ValueError) as error:
        raise TypeError(f"what a stage returns must be tensors and plain values: {error}") from error


def decode(note: bytes) -> Structure:
    """The inverse of `encode`. Raises PlainDataError for what is not a structure."""
    if not note:
        return _ONE_TENSOR
    structure = plain_data.decode(note)
    _check(structure)
    return structure


def _check(structure: Any) -> None:
    """A message may be cut off or altered; what is unpacked must have the form that `pack` gives it."""
    if not (isinstance(structure, tuple) and len(structure) == 2):
        raise plain_data.PlainDataError("not the structure of what a stage returns")
    kind, content = structure
    if kind == _VALUE or (kind == _TENSOR and isinstance(content, bool)):
        return
    if kind not in (_TUPLE, _LIST, _DICT) or not isinstance(content, tuple):
        raise plain_data.PlainDataError("not the structure of what a stage returns")
    for item in content:
        if kind == _DICT and not (isinstance(item, tuple) and len(item) == 2):
            raise plain_data.PlainDataError("not the structure of what a stage returns")
        _check(item[1] if kind == _DICT else item)


def _holds_tensors(value: Any, depth: int = 3) -> bool:
    """Whether an object that is not understood has tensors in it, which would not travel: `depth` levels of it."""
    if isinstance(value, str | bytes | int | float | bool | None.__class__ | torch.dtype | torch.Size):
        return False
    items = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list | set) else ()
    fields = vars(value).values() if hasattr(value, "__dict__") and not isinstance(value, type) else ()
    inner = (*items, *fields)
    return any(isinstance(item, Tensor) for item in inner) or (
        depth > 1 and any(_holds_tensors(item, depth - 1) for item in inner)
    )
