"""What optimizers are made of, checked with more to say than torch has."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor


def checked_params(params: Any) -> list[Any]:
    """Parameters, pairs of names and parameters, or groups (dicts with "params"), as torch.optim takes them, in a list.

    Raises TypeError for anything else, ValueError for none.
    """
    if isinstance(params, (Tensor, str, bytes, dict)) or not isinstance(params, Iterable):
        raise TypeError(f"params must be an iterable of parameters or of groups of them, got {type(params).__name__}")
    found = list(params)
    if not found:
        raise ValueError("params must have at least one parameter, got none")
    for index, each in enumerate(found):
        named = isinstance(each, tuple) and len(each) == 2 and isinstance(each[0], str)
        if isinstance(each, dict):
            check_group(each)
        elif not isinstance(each[1] if named else each, Tensor):
            raise TypeError(f"params must be parameters, got {type(each).__name__} at number {index}")
    return found


def check_group(group: Any, name: str = "params") -> None:
    """TypeError or ValueError unless it is a dict with parameters in it."""
    if not isinstance(group, dict):
        raise TypeError(f"{name} must be a dict with 'params', got {type(group).__name__}")
    if "params" not in group:
        raise ValueError(f"{name}: a group of parameters must have 'params', got {sorted(map(str, group))}")
