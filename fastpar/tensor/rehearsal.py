"""Running a module for trial, and leaving what it draws from and keeps as it was."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

_STATES = frozenset(vars(nn.Module()))  # of modules themselves, not of their code


@contextlib.contextmanager
def same_generators() -> Iterator[Callable[[], bool]]:
    """Leave the default generators of torch, Python and numpy as they are; yields whether they have been used."""
    numpy: Any = sys.modules.get("numpy")
    python, arrays = random.getstate(), None if numpy is None else numpy.random.get_state()
    with torch.random.fork_rng(devices=[]):
        before = torch.get_rng_state()

        def has_drawn() -> bool:
            same = torch.equal(before, torch.get_rng_state()) and random.getstate() == python
            return not (same and (numpy is None or _same_state(numpy.random.get_state(), arrays)))

        try:
            yield has_drawn
        finally:
            random.setstate(python)
            if numpy is not None:
                numpy.random.set_state(arrays)


def _same_state(state: Any, before: Any) -> bool:
    return bool(state[2] == before[2] and (state[1] == before[1]).all())


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """What a module's own code holds beside parameters, buffers and modules."""
    return {k: v for k, v in vars(module).items() if k not in _STATES and not k.startswith("_fastpar")}


@contextlib.contextmanager
def attributes_as_they_were(model: nn.Module) -> Iterator[None]:
    """Undo what code has done to tensors that modules hold, and to lists and dicts of them. Other attributes, such as
    a mark that hooks are installed, are left: what they say may have happened."""
    before = [(module, own_attributes(module)) for module in model.modules()]
    contents = {id(v): (v, v.copy()) for _, own in before for v in own.values() if isinstance(v, list | dict)}
    try:
        yield
    finally:
        for module, own in before:
            for key, value in own_attributes(module).items():
                if isinstance(value, Tensor) and own.get(key) is not value:
                    del module.__dict__[key]
                    if key in own:
                        module.__dict__[key] = own[key]
        for container, content in contents.values():
            if _has_tensors(container):
                container.clear()
                container.extend(content) if isinstance(container, list) else container.update(content)


def _has_tensors(container: Any) -> bool:
    values = container.values() if isinstance(container, dict) else container
    return any(isinstance(value, Tensor) for value in values)
