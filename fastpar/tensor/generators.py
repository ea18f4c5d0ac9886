"""The default generators of random numbers, while a module is run for trial."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch


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
